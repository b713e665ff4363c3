"""Child processes of a run: started, watched, restarted within a budget, and ended with their owner.

Guarantees:

* Every child leads its own session, writes to `LOGS/NAME.log`, and is killed by the kernel when its owner
  dies, however that happens (`setpriv --pdeathsig`).
* A child that ends unasked is started again after a back-off; more than `restarts` ends within `window_s` are a
  `ChildFailed` that names it, with the tail of its log. So is a child that does not get ready in time.
* Leaving the supervisor ends all children, the last started first: SIGTERM to the group, SIGKILL after `grace_s`. No member
  of a group is left, also when the stop itself is cancelled.
* `children.json` in the folder of the logs holds the process ids of the living children.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil

TAIL_LINES = 20

# The check closes the gap between the fork and the call that asks for the signal: an owner that died in it sends none.
_ONLY_UNDER_OWNER = '[ "$PPID" = "$0" ] && exec "$@"'


class ChildFailed(Exception):
    """A child process ended more often than its budget allows, or did not get ready."""

    def __init__(self, name: str, what: str, log: Path) -> None:
        super().__init__(f"{name} {what}. The end of its log ({log}):\n{tail(log)}")
        self.name = name
        self.what = what


async def _nothing() -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """What to start. `ready` is polled until it is True; `on_restart` runs after each start but the first, once ready."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    ready: Callable[[], Awaitable[bool]] | None = None
    ready_timeout_s: float = 120.0
    restarts: int = 3
    window_s: float = 600.0
    on_restart: Callable[[], Awaitable[None]] = _nothing
    grace_s: float = 10.0


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, indented; says so when there are none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 32 * 1024))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        text = ""
    kept = text.splitlines()[-lines:]
    return "\n".join(f"    {line}" for line in kept) or "    (nothing was written)"


def backoff(deaths: int) -> float:
    """Seconds to wait before the start that follows the n-th death in the window."""
    return float(min(10.0, 0.2 * 2 ** (deaths - 1)))


class Child:
    """One child across its restarts."""

    def __init__(self, spec: ChildSpec, logs: Path) -> None:
        self.spec = spec
        self.log = logs / f"{spec.name}.log"
        self.starts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._deaths: deque[float] = deque()

    @property
    def pid(self) -> int | None:
        """Process id of the living child, else None."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> None:
        """Start and wait until ready. Raises `ChildFailed` if it ends or stays silent instead."""
        spec = self.spec
        leash = ("setpriv", "--pdeathsig", "KILL", "sh", "-c", _ONLY_UNDER_OWNER, str(os.getpid()))
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *leash,
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **spec.env},
                start_new_session=True,
            )
        self.starts += 1
        if spec.ready is not None:
            await self._wait_ready(self._process, spec.ready)

    async def _wait_ready(self, process: asyncio.subprocess.Process, ready: Callable[[], Awaitable[bool]]) -> None:
        try:
            async with asyncio.timeout(self.spec.ready_timeout_s):
                while not await ready():
                    if process.returncode is not None:
                        raise ChildFailed(self.spec.name, f"ended at its start with {_ending(process.returncode)}", self.log)
                    await asyncio.sleep(0.05)
        except TimeoutError:
            await self.stop()
            raise ChildFailed(self.spec.name, f"was not ready within {self.spec.ready_timeout_s:g} s", self.log) from None

    async def watch(self, changed: Callable[[], None]) -> None:
        """Keep the child alive. Returns never; raises `ChildFailed` when the budget is spent."""
        while self._process is not None:
            code = await self._process.wait()
            changed()
            # What the child had started must not go on beside its successor.
            await self.stop()
            await self._start_again(ChildFailed(self.spec.name, f"ended with {_ending(code)}", self.log))
            changed()
            await self.spec.on_restart()

    async def _start_again(self, failure: ChildFailed) -> None:
        while True:
            now = time.monotonic()
            self._deaths.append(now)
            while self._deaths[0] < now - self.spec.window_s:
                self._deaths.popleft()
            if len(self._deaths) > self.spec.restarts:
                often = f"ended {len(self._deaths)} times within {self.spec.window_s:g} s; the last time it {failure.what}"
                raise ChildFailed(self.spec.name, often, self.log) if self.spec.restarts else failure
            await asyncio.sleep(backoff(len(self._deaths)))
            try:
                return await self.start()
            except ChildFailed as again:
                failure = again

    async def stop(self) -> None:
        """End the child and its group. Idempotent."""
        process = self._process
        if process is None:
            return
        try:
            await end_group(process.pid, self.spec.grace_s)
        except asyncio.CancelledError:
            signal_group(process.pid, signal.SIGKILL)
            raise
        await process.wait()
        self._process = None


class Supervisor:
    """Owns children: `async with Supervisor(logs) as family: await family.start(spec)`.

    A child that fails for good cancels the body of the `async with` and raises `ChildFailed` in an exception group.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []
        self._group = asyncio.TaskGroup()
        self._watchers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Supervisor:
        self._logs.mkdir(parents=True, exist_ok=True)
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # First nobody may restart what is being stopped.
        for watcher in self._watchers:
            watcher.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        finally:
            await self.stop()

    async def start(self, spec: ChildSpec) -> Child:
        """Start a child, wait until it is ready, and watch it from then on."""
        child = Child(spec, self._logs)
        self._children.append(child)
        try:
            await child.start()
        finally:
            self._write_pids()
        self._watchers.append(self._group.create_task(child.watch(self._write_pids), name=f"watch {spec.name}"))
        return child

    async def stop(self) -> None:
        """End all children, the last started first; a cancellation on the way kills what is left at once."""
        try:
            while self._children:
                await self._children[-1].stop()
                self._children.pop()
        finally:
            for child in self._children:
                if child.pid is not None:
                    signal_group(child.pid, signal.SIGKILL)
            (self._logs / "children.json").unlink(missing_ok=True)

    def pids(self) -> dict[str, int]:
        return {child.spec.name: child.pid for child in self._children if child.pid is not None}

    def _write_pids(self) -> None:
        path = self._logs / "children.json"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(self.pids()) + "\n")
        fresh.replace(path)


def signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def group_alive(leader: int) -> bool:
    """Whether the group still has a member that runs; a zombie does not."""
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                return True
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return False


async def end_group(leader: int, grace_s: float) -> None:
    """SIGTERM to the group, SIGKILL to what is left after the grace; returns when none is left."""
    signal_group(leader, signal.SIGTERM if grace_s > 0 else signal.SIGKILL)
    deadline = time.monotonic() + grace_s
    while group_alive(leader):
        if time.monotonic() >= deadline:
            signal_group(leader, signal.SIGKILL)
        await asyncio.sleep(0.02)


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
