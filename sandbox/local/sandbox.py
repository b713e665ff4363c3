"""The handle of one local sandbox: runs commands in it, knows at once when it is gone, and removes it.

A handle belongs to the event loop on which it was made. Any number of handles, in any processes, may share a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence

from sandbox.base import OnOutput, RunResult, SandboxDied, SandboxInfo
from sandbox.local import lifecycle
from sandbox.local.exchange import Exchange, script
from sandbox.local.processes import ticks_now
from sandbox.local.state import Boxes, Record
from sandbox.local.supervisor import LATE_ENV
from sandbox.shellfiles import ShellFiles

DRAIN_GRACE_S = 0.1
"""How long output is awaited after a command's end, when a process that it left behind holds its stdout."""

KILL_PATIENCE_S = 10.0


class LocalSandbox(ShellFiles):
    """See `sandbox.base.Sandbox`."""

    def __init__(self, boxes: Boxes, record: Record, watch: int, on_close: Callable[[LocalSandbox], None]) -> None:
        """`watch` is a pidfd of the sandbox's init; the handle closes it."""
        assert record.init is not None
        self._boxes = boxes
        self._record = record
        self._init = record.init
        self._io = str(boxes.path(record.id) / "io")
        self._owner = record.uid if os.geteuid() == 0 else None
        self._loop = asyncio.get_running_loop()
        self._gone = False
        self._running: set[asyncio.Future[int | None]] = set()
        """The codes that commands of this handle wait for."""
        self._watch: int | None = watch
        self._on_close = on_close
        self._root = "" if record.isolated else str(boxes.path(record.id) / "root")
        self._loop.add_reader(watch, self._ended)

    @property
    def id(self) -> str:
        return self._record.id

    @property
    def workdir(self) -> str:
        return self._record.spec.workdir

    def _mark_gone(self) -> None:
        self._gone = True
        for code in self._running:
            if not code.done():
                code.set_result(None)

    def _ended(self) -> None:
        self._mark_gone()
        self.detach()
        lifecycle.collect_children()

    def detach(self) -> None:
        """Stop watching. The sandbox lives on."""
        if self._watch is not None:
            self._loop.remove_reader(self._watch)
            os.close(self._watch)
            self._watch = None
            self._on_close(self)

    def _died(self, why: str = "") -> SandboxDied:
        expired = time.time() >= self._record.expires_at
        reason = why or ("its deadline passed" if expired else "it was killed, or all of it ran out of memory")
        return SandboxDied(f"sandbox {self.id} is gone: {reason}")

    def resolve(self, path: str) -> str:
        absolute = posixpath.join(self.workdir, path) if path else self.workdir
        if self._root and (absolute == self.workdir or absolute.startswith(f"{self.workdir}/")):
            return self._root + absolute
        return absolute

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
        if self._gone or self._watch is None:
            raise self._died("" if self._gone else "this handle is closed")
        variables = {**LATE_ENV, **self._record.spec.env, **(env or {})}
        text = script(command, cwd=self.resolve(cwd or ""), env=variables, marked=not self._record.isolated)
        exchange = Exchange(self._io, owner=self._owner, max_output=max_output, stdin=stdin, on_output=on_output)
        begun, ticks = time.monotonic(), ticks_now()
        try:
            try:
                exchange.open(text, self._init.pid)
            except OSError as error:
                raise self._died(f"its supervisor does not answer ({error.strerror})") from error
            timed_out = False
            try:
                code = await self._wait(exchange, timeout)
            except TimeoutError:
                timed_out = True
                code = None
            if code is None:
                # Timed out, or the process that was to report was itself killed, or `on_output` raised.
                await self._kill_command(exchange, ticks)
            if not exchange.drained.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DRAIN_GRACE_S):
                        await exchange.drained.wait()
            if exchange.fault is not None:
                raise exchange.fault
        except asyncio.CancelledError:
            await _finish_despite_cancel(self._kill_command(exchange, ticks))
            raise
        finally:
            exchange.close()
        if timed_out:
            code = 124
        elif code is None:
            code = 137
        return RunResult(
            exit_code=code,
            stdout=exchange.captures[0].value(),
            stderr=exchange.captures[1].value(),
            timed_out=timed_out,
            truncated=any(capture.truncated for capture in exchange.captures),
            seconds=time.monotonic() - begun,
        )

    async def _wait(self, exchange: Exchange, timeout: float) -> int | None:
        self._running.add(exchange.code)
        try:
            await asyncio.wait((exchange.code,), timeout=timeout)
        finally:
            self._running.discard(exchange.code)
        if self._gone:
            raise self._died()
        if not exchange.code.done():
            raise TimeoutError
        code = exchange.code.result()
        # The kernel kills what is inside before init is seen to have ended.
        if code in (None, 137) and not self._init.alive():
            raise self._died()
        return code

    async def _kill_command(self, exchange: Exchange, ticks: int) -> None:
        """Returns once the whole tree of the command is dead."""
        exchange.forget_request()
        population = lifecycle.population(self._record)
        deadline = time.monotonic() + KILL_PATIENCE_S
        while not self._gone:
            await asyncio.to_thread(population.kill_command, exchange.token, ticks)
            if exchange.code.done() or time.monotonic() > deadline:
                return
            # The request may still be on its way into the sandbox, where there is nothing to kill yet.
            await asyncio.wait((exchange.code,), timeout=0.02)

    async def kill_processes(self) -> None:
        if self._gone:
            raise self._died()
        await asyncio.to_thread(lifecycle.population(self._record).kill_all)

    async def set_ttl(self, seconds: float) -> None:
        if seconds <= 0:
            raise ValueError(f"ttl must be positive, got {seconds}; use kill() to remove a sandbox now")
        record = self._boxes.load(self.id)
        if record is None or self._gone:
            raise self._died()
        try:
            lifecycle.tell(self._io, f"ttl {seconds:.3f}")
            self._record = record.model_copy(update={"expires_at": time.time() + seconds})
            self._boxes.write(self._record)
        except OSError as error:
            raise self._died(f"its supervisor does not answer ({error.strerror})") from error

    async def info(self) -> SandboxInfo:
        record = self._boxes.load(self.id)
        if record is None or self._gone:
            raise self._died()
        return record.info()

    async def kill(self) -> None:
        self.detach()
        self._mark_gone()
        await _finish_despite_cancel(
            asyncio.to_thread(lifecycle.destroy, self._boxes, self._boxes.path(self.id), self._record)
        )


async def _finish_despite_cancel(work: Coroutine[object, object, None]) -> None:
    """Await to the end; a cancellation that arrives meanwhile is raised afterwards."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.done():
                break
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
