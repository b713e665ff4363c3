"""The inside of a worker process: drives the episodes it is handed, keeps their leases alive, and reaps sandboxes.

Guarantees:

* An episode id may be handed over any number of times, by any number of workers: the lease decides, the others step back.
* The leases of all running episodes are renewed together every `lease.renew_s`; an episode whose lease is lost is stopped.
* Sandboxes on this host that carry the label of a run seen here, and whose episode has ended, are removed.
* Leaving the worker stops every episode and gives it back, sandbox alive, for another worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from rollout.config import RolloutConfig
from rollout.context import Contexts, RunContext
from rollout.driver import drive, failure_of
from rollout.store import EpisodeStore, Lease, LeaseLost, Resume, StoreUnavailable
from rollout.trajectory import EpisodeEnd, Failure
from sandbox.base import SandboxBackend, SandboxError, SandboxInfo
from sandbox.registry import get_backend

log = logging.getLogger(__name__)

REAP_EVERY_S = 30.0
STOP_TIMEOUT_S = 20.0


@dataclass(eq=False, slots=True)
class _Held:
    """An episode under way here."""

    lease: Lease
    task: asyncio.Task[object]
    lost: bool = False


def unable(lease: Lease, index: int, error: Exception) -> EpisodeEnd:
    """The end of an episode that this worker cannot even begin."""
    told = failure_of(error)
    message = f"this worker cannot drive episodes of run {lease.episode.run}: {told.message}"
    return EpisodeEnd(
        run=lease.episode.run,
        episode_id=lease.episode.id,
        attempt=lease.attempt,
        index=index,
        status="failed",
        reward=None,
        failure=Failure(kind="worker", message=message, traceback=told.traceback),
    )


class EpisodeWorker:
    """`async with EpisodeWorker(store) as worker: await worker.episode(run, id)`, any number at once.

    Raises `StoreUnavailable` from `episode`, or out of the `async with` when the renewal of leases meets it.
    """

    def __init__(
        self,
        store: EpisodeStore,
        *,
        name: str | None = None,
        backend: Callable[[str], SandboxBackend] = get_backend,
        make_context: Callable[[RolloutConfig], RunContext] | None = None,
        reap_every_s: float = REAP_EVERY_S,
    ) -> None:
        self.name = name or f"{socket.gethostname()}/{os.getpid()}"
        self._store = store
        self._contexts = Contexts(store, make_context)
        self._new_backend = backend
        self._backends: dict[str, SandboxBackend] = {}
        self._reap_every_s = reap_every_s
        self._running: set[_Held] = set()
        self._runs: set[str] = set()
        self._group = asyncio.TaskGroup()
        self._loops: list[asyncio.Task[None]] = []

    @property
    def running(self) -> int:
        return len(self._running)

    async def __aenter__(self) -> EpisodeWorker:
        await self._group.__aenter__()
        self._loops = [self._group.create_task(self._renew_loop()), self._group.create_task(self._reap_loop())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for loop in self._loops:
            loop.cancel()
        try:
            await self._stop_episodes()
            await self._group.__aexit__(kind, error, trace)
        finally:
            await self._contexts.close()
            for backend in self._backends.values():
                await backend.close()

    async def _stop_episodes(self) -> None:
        tasks = [held.task for held in self._running]
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
            if late:
                log.warning("%d episodes did not stop within %g s; their leases will run out", len(late), STOP_TIMEOUT_S)

    async def episode(self, run: str, episode_id: str) -> bool:
        """Drive one episode to its end. False if another worker has it, or it has ended."""
        config = await self._contexts.config(run)
        self._runs.add(run)
        claimed = await self._store.claim(run, episode_id, self.name, config.lease.ttl_s)
        if claimed is None:
            return False
        await self._hold(*claimed)
        return True

    async def _hold(self, lease: Lease, resume: Resume) -> None:
        """Drive under a lease that is renewed meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        held = _Held(lease, task)
        self._running.add(held)
        try:
            await self._drive(lease, resume)
        except LeaseLost:
            log.info("episode %s: attempt %d was overtaken", lease.episode.id, lease.attempt)
        except asyncio.CancelledError:
            if not held.lost:
                raise
            task.uncancel()
            log.info("episode %s: attempt %d was overtaken or cancelled", lease.episode.id, lease.attempt)
        finally:
            self._running.discard(held)

    async def _drive(self, lease: Lease, resume: Resume) -> None:
        try:
            context = await self._contexts.get(lease.episode.run)
        except StoreUnavailable:
            raise
        except Exception as error:
            # This worker lacks the model or the task set. Another might have them, but none may retry for ever.
            await self._store.finish(lease, unable(lease, len(resume.segments), error))
            return
        await drive(lease, resume, store=self._store, context=context, backend_for=self._backend)

    def _backend(self, kind: str) -> SandboxBackend:
        if kind not in self._backends:
            self._backends[kind] = self._new_backend(kind)
        return self._backends[kind]

    async def _renew_loop(self) -> None:
        while True:
            # Only runs with an episode here: one that has been deleted meanwhile has none.
            runs = {held.lease.episode.run for held in self._running}
            configs = [await self._contexts.config(run) for run in runs]
            await asyncio.sleep(min((config.lease.renew_s for config in configs), default=1.0))
            lost = await self._store.renew([held.lease for held in self._running]) if self._running else []
            for held in [held for held in self._running if held.lease in lost]:
                held.lost = True
                held.task.cancel()

    async def _reap_loop(self) -> None:
        while True:
            await asyncio.sleep(self._reap_every_s)
            await self.reap()

    async def reap(self) -> list[str]:
        """Remove sandboxes without a living episode; returns their ids."""
        living = {run: set(await self._store.open_episodes(run)) for run in tuple(self._runs)}

        async def keep(info: SandboxInfo) -> bool:
            run = info.labels.get("run")
            return run not in living or info.labels.get("episode") in living[run]

        removed: list[str] = []
        for backend in list(self._backends.values()):
            try:
                removed += await backend.reap(keep)
            except SandboxError as error:
                log.warning("reaping %s sandboxes: %s", backend.kind, error)
        return removed
