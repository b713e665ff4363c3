"""A Celery pool that is one asyncio loop: `--concurrency` counts episodes, and thousands fit into a process.

Guarantees:

* A message is acknowledged as soon as it is taken over; from then on the episode lives by its lease in the store, and a message
  that is lost between the two is sent again by the run's janitor.
* No more than `--concurrency` episodes run at once; Celery fetches no more messages than there are free places.
* A stop (SIGTERM, Ctrl-C) gives all episodes back before the process ends. A store that stays away ends the process.

Celery runs in the main thread, the loop in a thread of its own. They share nothing but the calls below.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import uvloop
from billiard.einfo import ExceptionInfo
from celery.concurrency.base import BasePool
from celery.worker import state
from kombu.serialization import loads

from rollout.store import StoreUnavailable
from rollout.urls import masked
from rollout.valkey_store import ValkeyStore
from rollout.worker import STOP_TIMEOUT_S, EpisodeWorker

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
JSON = frozenset({"json", "application/json"})

Callback = Callable[..., Any]


class _Loop:
    """The thread with the loop, and the episodes in it."""

    def __init__(self, url: str, limit: int, on_free: Callable[[], None]) -> None:
        self._url = url
        self._limit = limit
        self._on_free = on_free
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="episodes", daemon=True)
        self._waiting: deque[tuple[str, str, Callback]] = deque()
        self._running: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S):
            raise RuntimeError(f"the episode loop did not start within {START_TIMEOUT_S:g} s")

    def submit(self, run: str, episode_id: str, callback: Callback) -> None:
        """From Celery's thread."""
        self._loop.call_soon_threadsafe(self._enqueue, run, episode_id, callback)

    def stop(self) -> None:
        """From Celery's thread: give every episode back, then end."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(STOP_TIMEOUT_S + 10)
            if self._thread.is_alive():
                log.warning("the episode loop did not end in time; its leases will run out")

    def _main(self) -> None:
        try:
            uvloop.run(self._serve())
        except BaseException as error:
            log.critical("the episode loop ended, and with it this worker: %s", _told(error), exc_info=error)
            # The process ends through Celery's own shutdown, with an exit code that says it failed.
            state.should_stop = os.EX_UNAVAILABLE

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        store = ValkeyStore(self._url)
        try:
            async with EpisodeWorker(store) as worker:
                self._worker = worker
                self._ready.set()
                await self._stop.wait()
        finally:
            await store.close()

    def _enqueue(self, run: str, episode_id: str, callback: Callback) -> None:
        self._waiting.append((run, episode_id, callback))
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._limit and not self._stop.is_set():
            task = self._loop.create_task(self._episode(*self._waiting.popleft()))
            self._running.add(task)
            task.add_done_callback(self._freed)

    def _freed(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._fill()
        self._on_free()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("an episode could not be driven: %s", error)
            state.should_stop = os.EX_UNAVAILABLE

    async def _episode(self, run: str, episode_id: str, callback: Callback) -> None:
        started = time.monotonic()
        try:
            await self._worker.episode(run, episode_id)
        except (StoreUnavailable, asyncio.CancelledError):
            raise
        except Exception:
            # The lease runs out, and the episode is tried again or ended as lost.
            log.exception("episode %s of run %s could not be driven here", episode_id, run)
            callback((1, ExceptionInfo(), time.monotonic() - started))
        else:
            callback((0, None, time.monotonic() - started))


def _loads(body: Any, content_type: str, encoding: str) -> Any:
    return loads(body, content_type, encoding, accept=JSON)  # type: ignore[no-untyped-call]


def _told(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_told(inner) for inner in error.exceptions)
    return str(error) or type(error).__name__


class EpisodePool(BasePool):  # type: ignore[misc]
    """See the module. Takes the messages of the task `rollout.episode`, and no others."""

    signal_safe = False
    _hub: Any = None

    def on_start(self) -> None:
        # Celery's loop sleeps in a poll: a byte in this pipe tells it that a place is free.
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        url = self.app.conf.farmhand_store
        log.info("episodes: up to %d at once, store %s", self.limit, masked(url))
        self._episodes = _Loop(url, self.limit, self._wake)
        self._episodes.start()

    def register_with_event_loop(self, loop: Any) -> None:
        self._hub = loop
        loop.add_reader(self._wake_in, self._awake)

    def _awake(self) -> None:
        try:
            os.read(self._wake_in, 4096)
        except BlockingIOError:
            return

    def _wake(self) -> None:
        try:
            os.write(self._wake_out, b".")
        except BlockingIOError:
            # Full: it is being woken already.
            return

    def on_apply(
        self,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
        callback: Callback | None = None,
        accept_callback: Callback | None = None,
        **_: Any,
    ) -> None:
        name, _task_id, _request, body, content_type, encoding = args
        assert callback is not None
        if accept_callback is not None:
            accept_callback(os.getpid(), time.monotonic())
        try:
            positional, named, _embed = body if content_type is None else _loads(body, content_type, encoding)
            if name != "rollout.episode" or positional:
                raise ValueError(f"a message for {name!r} with {positional!r}; expected rollout.episode(run=, episode_id=)")
            run, episode_id = str(named["run"]), str(named["episode_id"])
        except Exception:
            log.exception("a message was refused")
            callback((1, ExceptionInfo(), 0.0))
        else:
            self._episodes.submit(run, episode_id, callback)

    def on_stop(self) -> None:
        self._episodes.stop()

    def on_terminate(self) -> None:
        self._episodes.stop()

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        raise NotImplementedError("episodes are cancelled in the store, not by revoking their message")
