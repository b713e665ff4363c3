"""Sandboxes on this host by bubblewrap: own namespaces, no network, read-only system, bounded cpu, memory, pids and disk.

How the parts fit: `backend` creates, finds and reaps; `sandbox` is the handle that runs commands; `supervisor` is the shell
script that owns a sandbox on the host; `exchange` carries one command's bytes; `processes` kills exact trees; `cgroup`
bounds resources; `state` is the folder by which any process of the host finds a sandbox again; `tools` finds the programs.
"""
