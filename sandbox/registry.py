"""The backends by name: the built-in ones, and those of the entry-point group `farmhand.sandboxes`."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from sandbox.base import SandboxBackend, SandboxUnavailable

GROUP = "farmhand.sandboxes"

BUILT_IN = {"local": "sandbox.local.backend:LocalBackend", "memory": "sandbox.memory:MemoryBackend"}
"""Name: `module:callable` that takes no arguments."""


class UnknownSandbox(SandboxUnavailable):
    """No backend has that name; the message lists the known ones."""


def known_kinds() -> list[str]:
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def get_backend(kind: str) -> SandboxBackend:
    """A new backend of that kind; the caller closes it. Raises `UnknownSandbox` naming the known kinds."""
    if target := BUILT_IN.get(kind):
        module, _, name = target.partition(":")
        factory = getattr(importlib.import_module(module), name)
    else:
        found = [entry for entry in entry_points(group=GROUP) if entry.name == kind]
        if not found:
            raise UnknownSandbox(
                f"unknown sandbox kind {kind!r}; known: {', '.join(known_kinds())}. "
                f"A package adds one by an entry point in the group {GROUP!r}"
            )
        factory = found[0].load()
    backend: SandboxBackend = factory()
    return backend
