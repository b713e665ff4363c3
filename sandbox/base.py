"""The sandbox protocol: a place where an agent's commands run, and the errors it may end with.

Guarantees that every backend gives, and that `tests/sandbox/` holds it to:

* `run` always returns or raises within `timeout` plus a small grace; on a timeout the whole process tree of the command
  is dead and the partial output is returned with `timed_out` set.
* Output is bytes, bounded, and flagged `truncated` when more was produced than kept. What is kept is the head and the tail.
* A sandbox outlives the worker that made it, never its deadline: `attach` finds it again from any process of the host.
* Nothing of the host's environment variables is visible inside.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

StreamName = Literal["stdout", "stderr"]
OnOutput = Callable[[StreamName, bytes], None]


class SandboxSpec(BaseModel):
    """What to create. `kind` chooses the backend; a backend refuses a field that it cannot honour, it never ignores one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = "local"
    image: str | None = None
    cpus: float = Field(default=1.0, gt=0)
    memory_mb: int = Field(default=512, ge=16)
    disk_mb: int = Field(default=256, ge=1)
    """Bound on everything that can be written inside."""
    pids: int = Field(default=128, ge=4)
    network: Literal["none", "open"] = "none"
    env: Mapping[str, str] = Field(default_factory=dict)
    workdir: str = "/workspace"
    ttl_s: float = Field(default=3600.0, gt=0)
    """The sandbox is removed this long after its creation, whoever still wants it; `set_ttl` moves the deadline."""
    unsafe: bool = False
    """Local backend only: run without isolation where bubblewrap cannot be had."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The outcome of one command. `exit_code` is 128 + signal for a death by signal and 124 after a timeout."""

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    truncated: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class FileInfo:
    name: str
    path: str
    type: Literal["file", "dir", "symlink", "other"]
    size: int
    mode: int
    """Permission bits only."""
    modified: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    id: str
    kind: str
    created_at: float
    expires_at: float
    """Unix seconds."""
    labels: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    """How each limit is enforced, e.g. {"memory": "cgroup"}."""


class SandboxError(Exception):
    """An infrastructure fault: it fails the episode, and the agent never sees it."""


class SandboxUnavailable(SandboxError):
    """The backend cannot work on this host; the message says what is missing and which setting or package cures it."""


class SandboxDied(SandboxError):
    """The sandbox is gone (killed, expired, out of memory as a whole)."""


class SandboxFileError(SandboxError):
    """A file operation failed for a reason that the caller can correct. `reason` is the errno name, e.g. "ENOENT"."""

    def __init__(self, reason: str, path: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason
        self.path = path


class Sandbox(Protocol):
    """One live sandbox. All paths are absolute or relative to the spec's `workdir`."""

    @property
    def id(self) -> str: ...

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float = 30.0,
        max_output: int = 64 * 1024,
        on_output: OnOutput | None = None,
    ) -> RunResult:
        """Run a command to its end; a `str` goes through `/bin/sh -c`. `max_output` bounds each stream in bytes.

        Raises `SandboxDied` if the sandbox is or goes away.
        """
        ...

    async def kill_processes(self) -> None:
        """End every process that commands have left running. The files stay."""
        ...

    async def read(self, path: str, *, max_bytes: int = 64 * 1024 * 1024) -> bytes: ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a whole file, with the parents it needs."""
        ...

    async def list_dir(self, path: str) -> list[FileInfo]: ...

    async def stat(self, path: str) -> FileInfo: ...

    async def remove(self, path: str) -> None: ...

    async def rename(self, old: str, new: str) -> None: ...

    async def make_dir(self, path: str) -> None: ...

    async def set_ttl(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now."""
        ...

    async def info(self) -> SandboxInfo: ...

    async def kill(self) -> None:
        """Remove the sandbox and everything in it. Idempotent."""
        ...


class SandboxBackend(Protocol):
    """Makes and finds sandboxes of one kind. Entry-point group `farmhand.sandboxes`; see `sandbox.registry`."""

    kind: str

    async def create(self, spec: SandboxSpec, *, labels: Mapping[str, str] | None = None) -> Sandbox:
        """Raises `SandboxUnavailable` where it cannot isolate."""
        ...

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Find a live sandbox from any process of the host. Raises `SandboxDied` if there is none."""
        ...

    async def sandboxes(self) -> list[SandboxInfo]: ...

    async def reap(self, keep: Callable[[SandboxInfo], Awaitable[bool]] | None = None) -> list[str]:
        """Remove every sandbox of ours that has expired, is damaged, or that `keep` says false of. Returns their ids."""
        ...

    async def close(self) -> None:
        """Release what this object holds. Living sandboxes stay."""
        ...
