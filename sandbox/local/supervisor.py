"""The supervisor: a shell on the host that owns one sandbox, so that the sandbox needs no worker to live, nor to end.

It runs as the sandbox's own unprivileged user, with no_new_privs, in its own session, current folder `io`. It starts
bubblewrap, whose processes die with it, and reads lines from the pipe `ctl`:

* `start`: start the sandbox (sent once the supervisor is in its control groups and its record is written);
* `run TOKEN INIT MODE`: enter the sandbox of host pid INIT and run what `TOKEN.cmd` sets as arguments, with `TOKEN.out`,
  `TOKEN.err` and, if MODE is `pipe`, `TOKEN.in`; the exit code goes to `TOKEN.rc`;
* `ttl SECONDS`: move the deadline;
* `end`: the sandbox's init was killed; wait for every process outside, so that none is left to the host's init, and end.

The only lasting writer of `ctl` is a `sleep` until the deadline. When it ends, the supervisor reads end-of-file, kills
bubblewrap, and the kernel kills the sandbox with it: the deadline needs no worker, no timer and no trust in what runs inside.

Nothing of this can be reached from inside: the pipes are outside the sandbox's mounts, the processes outside its pid
namespace, and init keeps one capability, so that a command may not trace it although it has the same user.
"""

from __future__ import annotations

import functools
import os
import shlex
from pathlib import Path

from sandbox.base import SandboxSpec
from sandbox.local.tools import Tools

INSIDE_UID = 1000
HOME = "/home/agent"

BASE_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": HOME,
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": "/bin/sh",
    "TERM": "dumb",
}
"""The environment of the supervisor, and with `LATE_ENV` the whole of a command's, but for what spec and call add."""

LATE_ENV = {"LANG": "C.UTF-8"}
"""Set only once inside: a tenth of a command's CPU cost is programs on the way in loading a locale that they do not need."""

OOM_SUPERVISOR, OOM_COMMAND = 300, 600
"""Adjustments of the kernel's choice of a victim (-1000 to 1000): where memory ends, a command dies before what keeps the
sandbox, and that before the worker or anything else of the host."""

READY = b"farmhand-ready\n"

_SCRIPT = """
cd "$1" || exit
unset PWD OLDPWD
ulimit -c 0
exec 4<>ctl 3<ctl
@sleep@ "$2" >&4 4>&- 3<&- 2>/dev/null &
lease=$!
exec 4>&-
shift 2
while read -r verb token init mode <&3; do
  case $verb in
  start)
    "$@" 5>boot >&5 2>&5 3<&- &
    place=$!
    ;;
  run)
    {
      [ -p "$token.rc" ] || exit
      exec 3<&- 8>"$token.rc"
      if [ "$mode" = pipe ]; then exec <"$token.in"; echo open >&8; else exec </dev/null; fi
      (
        echo @adjust@ >/proc/self/oom_score_adj
        . "./$token.cmd"
        @limits@
        export FARMHAND_RUN="$token"
        exec 8>&- @enter@ "$@"
      ) >"$token.out" 2>"$token.err"
      echo "$?" >&8
    } &
    ;;
  ttl)
    exec 4>ctl
    @sleep@ "$token" >&4 4>&- 3<&- 2>/dev/null &
    exec 4>&-
    kill "$lease"
    lease=$!
    ;;
  end)
    kill "$lease"
    wait
    exit
    ;;
  esac
done
kill -9 "$place"
wait
"""

_INIT = """
echo 0 2>/dev/null >/proc/sys/user/max_user_namespaces
printf 'farmhand-ready\\n'
exec @env@ --ignore-signal=CHLD @sleep@ 2147483647 </dev/null >/dev/null 2>&1
"""
_UNSAFE_INIT = """
printf '{"child-pid": %d}\\nfarmhand-ready\\n' "$$"
exec @sleep@ 2147483647 </dev/null >/dev/null 2>&1
"""
# With SIGCHLD ignored, the kernel itself collects the orphans that init inherits (`trap '' CHLD` does not do: dash installs
# its own handler all the same). No user namespace can be made inside:
# that keeps most of the kernel's attack surface away from the agent's code.


def _fill(script: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        script = script.replace(f"@{name}@", value)
    return script


def limits(spec: SandboxSpec, *, memory: bool) -> str:
    """Shell lines that lower the limits of what is then executed. `memory`: bound address space, where no group does."""
    # dash and busybox name the number of processes -p, bash and ksh -u.
    lines = [f"ulimit -p {spec.pids} 2>/dev/null || ulimit -u {spec.pids}", "ulimit -n 4096 2>/dev/null"]
    if memory:
        lines.append(f"ulimit -v {spec.memory_mb * 1024}")
    return "\n        ".join(lines)


def arguments(tools: Tools, spec: SandboxSpec, *, uid: int, etc: Path, io: Path, isolated: bool, memory: bool) -> list[str]:
    """The command line of a supervisor whose pipes are in `io`."""
    if isolated:
        spaces = "-U -m -p -i -u -C" + (" -n" if spec.network == "none" else "")
        enter = f'{shlex.quote(tools.nsenter)} --preserve-credentials -t "$init" {spaces} -- {shlex.quote(tools.setsid)}'
        place = _bwrap(tools, spec, etc)
    else:
        enter = shlex.quote(tools.setsid)
        place = [tools.setpriv, "--pdeathsig", "KILL", "/bin/sh", "-c", _fill(_UNSAFE_INIT, {"sleep": tools.sleep})]
    values = {"sleep": shlex.quote(tools.sleep), "enter": enter, "limits": limits(spec, memory=memory)}
    script = _fill(_SCRIPT, values | {"adjust": str(OOM_COMMAND)})
    drop = [tools.setpriv, "--no-new-privs"]
    if os.geteuid() == 0:
        drop += ["--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--inh-caps=-all"]
    return [*drop, "/bin/sh", "-c", script, "farmhand-sandbox", str(io), f"{spec.ttl_s:.3f}", *place]


@functools.lru_cache
def _system_folders() -> list[tuple[str, str]]:
    """Name inside, and where that is on the host."""
    names = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
    return [(name, os.path.realpath(name)) for name in names if os.path.isdir(name)]


def _bwrap(tools: Tools, spec: SandboxSpec, etc: Path) -> list[str]:
    """One tmpfs is the root, so one size bounds all that can be written; every part of the system is a mount of its own on
    it, read-only, and a mount point can be neither removed nor renamed."""
    line = [tools.bwrap, "--die-with-parent", "--as-pid-1", "--unshare-all", "--new-session"]
    if spec.network == "open":
        line.append("--share-net")
    line += ["--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID), "--hostname", "sandbox", "--clearenv"]
    line += ["--cap-add", "CAP_SYS_RESOURCE", "--info-fd", "5"]
    line += ["--size", str(spec.disk_mb << 20), "--perms", "0755", "--tmpfs", "/"]
    for name, source in _system_folders():
        line += ["--ro-bind", source, name]
    line += ["--ro-bind", str(etc), "/etc", "--proc", "/proc"]
    line += ["--size", "65536", "--perms", "0755", "--tmpfs", "/dev"]
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        line += ["--dev-bind-try", f"/dev/{name}", f"/dev/{name}"]
    links = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "shm": "/run/shm"}
    for name, target in links.items():
        line += ["--symlink", target, f"/dev/{name}"]
    line += ["--remount-ro", "/dev"]
    for name in ("/tmp", "/run/shm", "/var/tmp"):  # noqa: S108 - of the sandbox
        line += ["--perms", "1777", "--dir", name]
    line += ["--dir", HOME, "--dir", spec.workdir]
    return [*line, "--", "/bin/sh", "-c", _fill(_INIT, {"sleep": tools.sleep, "env": tools.env})]
