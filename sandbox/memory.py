"""The in-memory twin: a sandbox whose files are a dict and whose commands are a function. For tests and benchmarks.

It isolates nothing and runs no program. `MemoryBackend(handler)` calls `handler(sandbox, command, stdin)` for each command;
without one every command succeeds silently. It passes the file and life-cycle parts of the conformance suite.
"""

from __future__ import annotations

import asyncio
import posixpath
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sandbox.base import FileInfo, OnOutput, RunResult, SandboxDied, SandboxFileError, SandboxInfo, SandboxSpec, StreamName
from sandbox.output import Capture

Handler = Callable[["MemorySandbox", str | Sequence[str], bytes | None], RunResult | Awaitable[RunResult]]
"""What a command does. A coroutine may wait; the call's timeout ends it."""

NAME_MAX = 255


@dataclass(slots=True)
class _Node:
    data: bytes | None
    """None for a folder."""
    mode: int
    modified: float = field(default_factory=time.time)


class MemorySandbox:
    """See `sandbox.base.Sandbox`."""

    def __init__(self, info: SandboxInfo, spec: SandboxSpec, handler: Handler | None) -> None:
        self._info = info
        self._spec = spec
        self._handler = handler
        self._dead = False
        self._nodes: dict[str, _Node] = {"/": _Node(None, 0o755)}
        self._make_parents(f"{spec.workdir}/x")

    @property
    def id(self) -> str:
        return self._info.id

    @property
    def alive(self) -> bool:
        return not self._dead and time.time() < self._info.expires_at

    def _check(self) -> None:
        if not self.alive:
            raise SandboxDied(f"sandbox {self.id} is gone")

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
        self._check()
        begun = time.monotonic()
        if self._handler is None:
            return RunResult(0)
        answer = self._handler(self, command, stdin)
        if not isinstance(answer, RunResult):
            try:
                async with asyncio.timeout(timeout):
                    answer = await answer
            except TimeoutError:
                return RunResult(124, timed_out=True, seconds=time.monotonic() - begun)
            self._check()
        captures = (Capture(max_output), Capture(max_output))
        streams: tuple[tuple[StreamName, bytes], ...] = (("stdout", answer.stdout), ("stderr", answer.stderr))
        for capture, (name, data) in zip(captures, streams, strict=True):
            if on_output is not None and data:
                on_output(name, data)
            capture.feed(data)
        return replace(
            answer,
            stdout=captures[0].value(),
            stderr=captures[1].value(),
            truncated=answer.truncated or any(capture.truncated for capture in captures),
            seconds=time.monotonic() - begun,
        )

    async def kill_processes(self) -> None:
        self._check()

    def _path(self, path: str) -> str:
        self._check()
        if "\0" in path:
            raise SandboxFileError("EINVAL", path)
        full = posixpath.normpath(posixpath.join(self._spec.workdir, path))
        if any(len(part.encode(errors="surrogateescape")) > NAME_MAX for part in full.split("/")):
            raise SandboxFileError("ENAMETOOLONG", path)
        return full

    def _node(self, full: str, path: str) -> _Node:
        node = self._nodes.get(full)
        if node is None:
            parent = self._nodes.get(posixpath.dirname(full))
            raise SandboxFileError("ENOTDIR" if parent is not None and parent.data is not None else "ENOENT", path)
        return node

    def _make_parents(self, full: str) -> None:
        parent = posixpath.dirname(full)
        known = self._nodes.get(parent)
        if known is None:
            self._make_parents(parent)
            self._nodes[parent] = _Node(None, 0o755)
        elif known.data is not None:
            raise SandboxFileError("ENOTDIR", full)

    def _children(self, full: str) -> list[str]:
        prefix = full.rstrip("/") + "/"
        return [name for name in self._nodes if name.startswith(prefix) and name != "/"]

    async def read(self, path: str, *, max_bytes: int = 64 * 1024 * 1024) -> bytes:
        data = self._node(self._path(path), path).data
        if data is None:
            raise SandboxFileError("EISDIR", path)
        if len(data) > max_bytes:
            raise SandboxFileError("EFBIG", path)
        return data

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        full = self._path(path)
        if full in self._nodes and self._nodes[full].data is None:
            raise SandboxFileError("EISDIR", path)
        held = sum(len(node.data) for name, node in self._nodes.items() if node.data and name != full)
        if held + len(data) > self._spec.disk_mb << 20:
            raise SandboxFileError("ENOSPC", path)
        self._make_parents(full)
        self._nodes[full] = _Node(bytes(data), mode)

    async def list_dir(self, path: str) -> list[FileInfo]:
        full = self._path(path)
        if self._node(full, path).data is not None:
            raise SandboxFileError("ENOTDIR", path)
        return [self._describe(name) for name in sorted(self._children(full)) if posixpath.dirname(name) == full]

    async def stat(self, path: str) -> FileInfo:
        full = self._path(path)
        self._node(full, path)
        return self._describe(full)

    def _describe(self, full: str) -> FileInfo:
        node = self._nodes[full]
        return FileInfo(
            name=posixpath.basename(full),
            path=full,
            type="dir" if node.data is None else "file",
            size=len(node.data or b""),
            mode=node.mode,
            modified=node.modified,
        )

    async def remove(self, path: str) -> None:
        full = self._path(path)
        self._node(full, path)
        for name in (*self._children(full), full):
            del self._nodes[name]

    async def rename(self, old: str, new: str) -> None:
        source, target = self._path(old), self._path(new)
        moved = self._node(source, old)
        if f"{target}/".startswith(f"{source}/") and source != target:
            raise SandboxFileError("EINVAL", old)
        if posixpath.dirname(target) not in self._nodes:
            raise SandboxFileError("ENOENT", old)
        held = self._nodes.get(target)
        if held is not None and (held.data is None) != (moved.data is None):
            raise SandboxFileError("EEXIST", old)
        for name in (*self._children(source), source):
            self._nodes[target + name[len(source) :]] = self._nodes.pop(name)

    async def make_dir(self, path: str) -> None:
        full = self._path(path)
        if full in self._nodes and self._nodes[full].data is not None:
            raise SandboxFileError("EEXIST", path)
        self._make_parents(f"{full}/x")

    async def set_ttl(self, seconds: float) -> None:
        if seconds <= 0:
            raise ValueError(f"ttl must be positive, got {seconds}; use kill() to remove a sandbox now")
        self._check()
        self._info = replace(self._info, expires_at=time.time() + seconds)

    async def info(self) -> SandboxInfo:
        self._check()
        return self._info

    async def kill(self) -> None:
        self._dead = True

    def describe(self) -> SandboxInfo:
        """Also of a dead one."""
        return self._info


class MemoryBackend:
    """See `sandbox.base.SandboxBackend`. Its sandboxes are found again by this object only."""

    kind = "memory"

    def __init__(self, handler: Handler | None = None) -> None:
        self._handler = handler
        self._sandboxes: dict[str, MemorySandbox] = {}

    async def create(self, spec: SandboxSpec, *, labels: Mapping[str, str] | None = None) -> MemorySandbox:
        now = time.time()
        info = SandboxInfo(
            secrets.token_hex(8), self.kind, now, now + spec.ttl_s, dict(labels or {}), {"isolation": "none (in memory)"}
        )
        sandbox = MemorySandbox(info, spec, self._handler)
        self._sandboxes[sandbox.id] = sandbox
        return sandbox

    async def attach(self, sandbox_id: str) -> MemorySandbox:
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None or not sandbox.alive:
            raise SandboxDied(f"there is no live in-memory sandbox {sandbox_id!r} in this process")
        return sandbox

    async def sandboxes(self) -> list[SandboxInfo]:
        return [sandbox.describe() for sandbox in self._sandboxes.values() if sandbox.alive]

    async def reap(self, keep: Callable[[SandboxInfo], Awaitable[bool]] | None = None) -> list[str]:
        removed = []
        for sandbox_id, sandbox in list(self._sandboxes.items()):
            if not sandbox.alive or (keep is not None and not await keep(sandbox.describe())):
                await sandbox.kill()
                del self._sandboxes[sandbox_id]
                removed.append(sandbox_id)
        return removed

    async def close(self) -> None:
        return None
