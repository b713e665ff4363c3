"""From groups to messages: writes the orders of episodes, sends their ids, and sends again what got lost.

Guarantees:

* An order is in the store before its message is sent; `submit` and `janitor` may be repeated at any time without harm, because
  the lease decides who drives.
* An episode whose worker died, whose message was lost, or which was given back, is offered again by `janitor`.
* A broker that is away is tried again within `reconnect_s`; then `StoreUnavailable` names it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from celery import Celery
from kombu.exceptions import OperationalError

from rollout.celery import make_app
from rollout.queues import queue_of
from rollout.store import EpisodeStore, StoreUnavailable
from rollout.trajectory import Episode
from rollout.urls import masked

Send = Callable[[Sequence[Episode]], None]


class CelerySender:
    """Blocking: one message for each episode, on the queue of its sandbox kind."""

    def __init__(self, url: str, *, reconnect_s: float = 60.0) -> None:
        self._url = url
        self._app: Celery = make_app(url)
        self._reconnect_s = reconnect_s

    def __call__(self, episodes: Sequence[Episode]) -> None:
        deadline = time.monotonic() + self._reconnect_s
        left = list(episodes)
        while left:
            try:
                with self._app.producer_pool.acquire(block=True, timeout=self._reconnect_s) as producer:
                    while left:
                        self._send(left[-1], producer)
                        left.pop()
            except (OperationalError, OSError) as error:
                if time.monotonic() >= deadline:
                    raise StoreUnavailable(
                        f"the broker {masked(self._url)} did not take a message within {self._reconnect_s:g} s: {error}; "
                        "see broker.url"
                    ) from error
                time.sleep(0.2)

    def _send(self, episode: Episode, producer: object) -> None:
        self._app.send_task(
            "rollout.episode",
            kwargs={"run": episode.run, "episode_id": episode.id},
            queue=queue_of(episode.sandbox_kind),
            producer=producer,
            ignore_result=True,
            retry=False,
        )

    def close(self) -> None:
        self._app.close()


class Dispatcher:
    def __init__(self, store: EpisodeStore, send: Send) -> None:
        self._store = store
        self._send = send

    async def submit(self, episodes: Sequence[Episode]) -> None:
        """Write the orders and send the messages."""
        await self._store.submit(episodes)
        await asyncio.to_thread(self._send, episodes)

    async def janitor(self, run: str) -> int:
        """Offer again what nobody drives. Returns how many."""
        lost = await self._store.sweep(run)
        if lost:
            await asyncio.to_thread(self._send, lost)
        return len(lost)
