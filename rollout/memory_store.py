"""The store and the stream in this process's memory: the twin of `rollout/valkey_store.py`, for tests.

It keeps the same promises by the same rules, with the clock it is given, and keeps records as bytes, so that what does not
survive encoding does not survive here either. Nothing outlives the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.leasing import OFFER_S, check_record, doomed_end, lease_lost, refusal
from rollout.store import Delivery, Lease, LeaseLost, Resume
from rollout.stream import Quarantined
from rollout.trajectory import Episode, EpisodeEnd, MalformedRecord, Segment, decode, encode


@dataclass(slots=True)
class _Held:
    """One unended episode."""

    order: Episode
    due: float
    """When `sweep` looks at it: the lease's end, 0 once released, or when its last offer has gone unheard."""
    attempt: int = 0
    deaths: int = 0
    worker: str | None = None
    segments: list[bytes] = field(default_factory=list)
    base: int = 0
    """Number of segments when it was claimed."""
    point: str = "{}"


@dataclass(slots=True)
class _Run:
    config: str | None = None
    episodes: dict[str, _Held] = field(default_factory=dict)
    ended: dict[str, int | None] = field(default_factory=dict)
    """Attempt that finished it; None when the store ended it."""
    entries: dict[str, bytes] = field(default_factory=dict)
    """Unacknowledged records by entry id, oldest first."""
    written: int = 0
    quarantine: list[Quarantined] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def write(self, data: bytes) -> None:
        self.written += 1
        self.entries[f"{self.written}-0"] = data
        self.news.set()


class MemoryStore:
    """An `EpisodeStore`. `clock` gives Unix seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.time, offer_s: float = OFFER_S) -> None:
        self._clock = clock
        self._offer_s = offer_s
        self._runs: dict[str, _Run] = {}

    async def put_run(self, run: str, config: Mapping[str, Any]) -> None:
        self.run(run).config = json.dumps(config)

    async def get_run(self, run: str) -> Mapping[str, Any]:
        """Raises `LookupError` when the run was never published here."""
        text = self.run(run).config
        if text is None:
            raise LookupError(f"the store in memory knows no run {run!r}")
        config: dict[str, Any] = json.loads(text)
        return config

    async def submit(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            run = self.run(episode.run)
            if episode.id not in run.episodes and episode.id not in run.ended:
                run.episodes[episode.id] = _Held(episode, self._clock() + self._offer_s)

    async def claim(self, run: str, episode_id: str, worker: str, ttl_s: float) -> tuple[Lease, Resume] | None:
        held = self.run(run).episodes.get(episode_id)
        if held is None or (held.worker is not None and held.due > self._clock()):
            return None
        if held.worker is not None:
            self._bury(run, held)
            if episode_id not in self.run(run).episodes:
                return None
        held.attempt += 1
        held.worker = worker
        held.base = len(held.segments)
        held.due = self._clock() + ttl_s
        segments = tuple(record for record in map(decode, held.segments) if isinstance(record, Segment))
        return Lease(held.order, held.attempt, worker, ttl_s), Resume(segments, json.loads(held.point))

    async def checkpoint(self, lease: Lease, point: Mapping[str, Any]) -> None:
        text = json.dumps(point)
        held = self._held(lease)
        held.point = text
        held.due = self._clock() + lease.ttl_s

    async def restart(self, lease: Lease) -> None:
        """Raises `ValueError` once this attempt has appended: its indices are taken."""
        held = self._held(lease)
        if len(held.segments) != held.base:
            raise refusal(lease, 0, "late")
        held.segments.clear()
        held.base, held.point = 0, "{}"
        held.due = self._clock() + lease.ttl_s

    async def append(self, lease: Lease, segment: Segment, point: Mapping[str, Any]) -> None:
        check_record(lease, segment)
        data, text = encode(segment), json.dumps(point)
        held = self._held(lease)
        n = len(held.segments)
        again = segment.index == n - 1 and held.segments[-1] == data
        if not again:
            self._check_index(lease, held, segment.index)
            self.run(segment.run).write(data)
            held.segments.append(data)
        held.point = text
        held.due = self._clock() + lease.ttl_s

    async def finish(self, lease: Lease, end: EpisodeEnd) -> None:
        check_record(lease, end)
        run = self.run(end.run)
        if run.ended.get(end.episode_id) == lease.attempt:
            return
        held = self._held(lease)
        self._check_index(lease, held, end.index)
        self._end(end, lease.attempt)

    async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        lost: list[Lease] = []
        for lease in leases:
            try:
                self._held(lease).due = self._clock() + lease.ttl_s
            except LeaseLost:
                lost.append(lease)
        return lost

    async def release(self, lease: Lease) -> None:
        held = self.run(lease.episode.run).episodes.get(lease.episode.id)
        if held is None or held.attempt != lease.attempt:
            raise lease_lost(lease)
        if held.worker is not None:
            held.worker, held.due = None, 0.0

    async def cancel(self, run: str, episode_ids: Sequence[str], reason: str) -> None:
        for episode_id in episode_ids:
            held = self.run(run).episodes.get(episode_id)
            if held is not None:
                self._doom(run, held, f"cancelled:{reason}")

    async def sweep(self, run: str) -> list[Episode]:
        now = self._clock()
        offers: list[Episode] = []
        due = [held for held in self.run(run).episodes.values() if held.due <= now]
        for held in sorted(due, key=lambda held: (held.due, held.order.id)):
            if held.worker is not None:
                self._bury(run, held)
            if held.order.id in self.run(run).episodes:
                held.due = now + self._offer_s
                offers.append(held.order)
        return offers

    async def open_episodes(self, run: str) -> list[str]:
        """In order of submission."""
        return list(self.run(run).episodes)

    async def close(self) -> None:
        """Nothing to let go: the store lives as long as this object."""

    def run(self, run: str) -> _Run:
        """What `MemoryStream` reads."""
        return self._runs.setdefault(run, _Run())

    def _held(self, lease: Lease) -> _Held:
        held = self.run(lease.episode.run).episodes.get(lease.episode.id)
        if held is None or held.attempt != lease.attempt or held.worker is None:
            raise lease_lost(lease)
        return held

    def _check_index(self, lease: Lease, held: _Held, index: int) -> None:
        n = len(held.segments)
        if index > n:
            held.due = 0.0
            raise refusal(lease, index, f"gap{n}")
        if index < n:
            raise refusal(lease, index, f"again{n}")

    def _bury(self, run: str, held: _Held) -> None:
        """The holder of this lease has died."""
        worker, held.worker = held.worker, None
        held.deaths += 1
        if held.deaths >= held.order.max_attempts:
            self._doom(run, held, f"lost:{worker} ")

    def _doom(self, run: str, held: _Held, doom: str) -> None:
        self._end(doomed_end(run, held.order.id, held.attempt, len(held.segments), doom), None)

    def _end(self, end: EpisodeEnd, attempt: int | None) -> None:
        run = self.run(end.run)
        run.write(encode(end))
        del run.episodes[end.episode_id]
        run.ended[end.episode_id] = attempt


class MemoryStream:
    """A `RecordStream` on a `MemoryStore`. A new one on the same run is a learner that has started again."""

    def __init__(self, store: MemoryStore, run: str, consumer: str = "learner") -> None:
        self.consumer = consumer
        self._run = store.run(run)
        self._cursor = 0
        self.refused = 0
        """Records that this object has put into quarantine."""

    async def read(self, *, max_records: int, wait_s: float) -> list[Delivery]:
        deadline = time.monotonic() + wait_s
        while True:
            self._run.news.clear()
            deliveries: list[Delivery] = []
            while self._cursor < self._run.written and len(deliveries) < max_records:
                self._cursor += 1
                deliveries += self._delivery(f"{self._cursor}-0")
            left = deadline - time.monotonic()
            if deliveries or left <= 0:
                return deliveries
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._run.news.wait(), left)

    async def ack(self, entry_ids: Sequence[str]) -> None:
        for entry_id in entry_ids:
            self._run.entries.pop(entry_id, None)

    async def depth(self) -> int:
        """Of a new reader: all that is unacknowledged."""
        return sum(int(entry_id.partition("-")[0]) > self._cursor for entry_id in self._run.entries)

    async def quarantined(self) -> list[Quarantined]:
        """The records set aside in this run, oldest first."""
        return list(self._run.quarantine)

    async def close(self) -> None:
        """Nothing to let go."""

    def _delivery(self, entry_id: str) -> list[Delivery]:
        data = self._run.entries.get(entry_id)
        if data is None:
            return []
        try:
            return [Delivery(entry_id, decode(data))]
        except MalformedRecord as error:
            self.refused += 1
            self._run.quarantine.append(Quarantined(entry_id, data, str(error)))
            del self._run.entries[entry_id]
            return []
