"""The store and the stream on a Redis-protocol server: see `rollout/store.py` for what they guarantee.

* Every step is one Lua script and one round trip; the scripts and the keys are in `rollout/valkey_scripts.py`.
* The turns that many episodes end in the same moment travel together (group commit): while one batch is on its way, the next
  one gathers. Each caller still gets its own answer.
* A step that is repeated because its connection broke changes nothing the second time.
* Leases go by the server's clock; those of other machines need not agree with it.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgpack
from redis.exceptions import ResponseError

from rollout.leasing import OFFER_S, check_record, doomed_end, lease_lost, refusal
from rollout.store import Delivery, Lease, Resume
from rollout.stream import Quarantined
from rollout.trajectory import Episode, EpisodeEnd, MalformedRecord, Segment, decode, encode
from rollout.valkey_client import ValkeyClient
from rollout.valkey_scripts import (
    CLAIM,
    COMMIT,
    DOOM,
    END_DOOMED,
    QUARANTINE,
    RELEASE,
    RENEW,
    SUBMIT,
    SWEEP,
)

_T = TypeVar("_T")

RECONNECT_S = 60.0
BATCH = 200
"""Steps in one script, and ids in any other: the server serves nobody else meanwhile, so this stays near a millisecond."""
BATCH_BYTES = 4 << 20
GROUP = "learner"
BLOCK_S = 5.0
"""Longest single wait at the server; a longer `wait_s` is made of several."""


class ValkeyStore:
    """An `EpisodeStore`. It belongs to one event loop; `close` it there.

    Raises `StoreUnavailable` from every method, and `LeaseLost` where the protocol says so.
    """

    def __init__(self, url: str, *, reconnect_s: float = RECONNECT_S, offer_s: float = OFFER_S) -> None:
        self._client = ValkeyClient(url, reconnect_s=reconnect_s)
        self._offer_ms = _ms(offer_s)
        self._steps: deque[tuple[tuple[bytes, ...], asyncio.Future[bytes]]] = deque()
        self._committer: asyncio.Task[None] | None = None

    async def put_run(self, run: str, config: Mapping[str, Any]) -> None:
        await self._client.call("SET", _key(run) + b"config", json.dumps(config).encode())

    async def get_run(self, run: str) -> Mapping[str, Any]:
        """Raises `LookupError` when the run was never published here."""
        data = await self._client.call("GET", _key(run) + b"config")
        if data is None:
            raise LookupError(
                f"{self._client.url} knows no run {run!r}: check `broker.url`, and that its trainer has started"
            )
        config: dict[str, Any] = json.loads(data)
        return config

    async def submit(self, episodes: Sequence[Episode]) -> None:
        by_run: dict[str, list[Episode]] = {}
        for episode in episodes:
            by_run.setdefault(episode.run, []).append(episode)
        for run, members in by_run.items():
            for part in _parts(members):
                args = [_key(run), self._offer_ms]
                for episode in part:
                    args += episode.id.encode(), b"%d" % episode.max_attempts, encode(episode)
                await self._client.run(SUBMIT, args)

    async def claim(self, run: str, episode_id: str, worker: str, ttl_s: float) -> tuple[Lease, Resume] | None:
        # The nonce lets a repeated call know its own lease from another's.
        token = f"{worker} {uuid.uuid4().hex}"
        answer = await self._client.run(CLAIM, [_key(run), episode_id.encode(), token.encode(), _ms(ttl_s)])
        if answer is None:
            return None
        order, attempt, point, segments = answer
        episode = decode(order)
        assert isinstance(episode, Episode)
        kept = tuple(record for record in map(decode, segments) if isinstance(record, Segment))
        return Lease(episode, int(attempt), worker, ttl_s), Resume(kept, json.loads(point) if point else {})

    async def checkpoint(self, lease: Lease, point: Mapping[str, Any]) -> None:
        await self._commit(lease, b"point", 0, json.dumps(point).encode(), b"")

    async def restart(self, lease: Lease) -> None:
        """Raises `ValueError` once this attempt has appended: its indices are taken."""
        await self._commit(lease, b"restart", 0, b"", b"")

    async def append(self, lease: Lease, segment: Segment, point: Mapping[str, Any]) -> None:
        check_record(lease, segment)
        await self._commit(lease, b"segment", segment.index, json.dumps(point).encode(), encode(segment))

    async def finish(self, lease: Lease, end: EpisodeEnd) -> None:
        check_record(lease, end)
        await self._commit(lease, b"end", end.index, b"", encode(end))

    async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        by_run: dict[str, list[Lease]] = {}
        for lease in leases:
            by_run.setdefault(lease.episode.run, []).append(lease)
        lost: list[Lease] = []
        for run, members in by_run.items():
            for part in _parts(members):
                args = [_key(run)]
                for lease in part:
                    args += lease.episode.id.encode(), b"%d" % lease.attempt, _ms(lease.ttl_s)
                held = await self._client.run(RENEW, args)
                lost += [lease for lease, yes in zip(part, held, strict=True) if not yes]
        return lost

    async def release(self, lease: Lease) -> None:
        args = [_key(lease.episode.run), lease.episode.id.encode(), b"%d" % lease.attempt]
        if not await self._client.run(RELEASE, args):
            raise lease_lost(lease)

    async def cancel(self, run: str, episode_ids: Sequence[str], reason: str) -> None:
        for part in _parts(episode_ids):
            doom = f"cancelled:{reason}".encode()
            await self._end_doomed(run, await self._client.run(DOOM, [_key(run), doom, *(i.encode() for i in part)]))

    async def sweep(self, run: str) -> list[Episode]:
        offers: list[Episode] = []
        while True:
            orders, doomed, found = await self._client.run(SWEEP, [_key(run), self._offer_ms, b"%d" % BATCH])
            offers += [record for record in map(decode, orders) if isinstance(record, Episode)]
            await self._end_doomed(run, doomed)
            if found < BATCH:
                return offers

    async def open_episodes(self, run: str) -> list[str]:
        """In order of submission."""
        return [member.decode() for member in await self._client.call("ZRANGE", _key(run) + b"open", 0, -1)]

    async def close(self) -> None:
        """Steps already begun are written first, as long as the server answers."""
        if self._committer is not None:
            await asyncio.wait([self._committer])
        await self._client.close()

    async def _end_doomed(self, run: str, doomed: Sequence[tuple[bytes, bytes, bytes, bytes]]) -> None:
        if not doomed:
            return
        args = [_key(run)]
        for episode_id, attempt, index, doom in doomed:
            end = doomed_end(run, episode_id.decode(), int(attempt), int(index), doom.decode())
            args += episode_id, encode(end)
        await self._client.run(END_DOOMED, args)

    # Group commit

    async def _commit(self, lease: Lease, step: bytes, index: int, point: bytes, data: bytes) -> None:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        episode = lease.episode
        args = (
            step,
            _key(episode.run),
            episode.id.encode(),
            b"%d" % lease.attempt,
            b"%d" % index,
            _ms(lease.ttl_s),
            point,
            data,
        )
        self._steps.append((args, future))
        if self._committer is None:
            self._committer = asyncio.create_task(self._commit_all(), name="valkey group commit")
        answer = await future
        if answer != b"ok":
            raise refusal(lease, index, answer.decode())

    async def _commit_all(self) -> None:
        try:
            while self._steps:
                batch = self._next_batch()
                futures = [future for _, future in batch]
                try:
                    answers = await self._client.run(COMMIT, [arg for args, _ in batch for arg in args])
                except Exception as error:
                    for future in futures:
                        if not future.done():
                            # One exception raised in many tasks would gather all their tracebacks.
                            future.set_exception(copy.copy(error))
                except BaseException:
                    for future in futures:
                        future.cancel()
                    raise
                else:
                    for future, answer in zip(futures, answers, strict=True):
                        if not future.done():
                            future.set_result(answer)
        finally:
            self._committer = None
            while self._steps:
                self._steps.popleft()[1].cancel()

    def _next_batch(self) -> list[tuple[tuple[bytes, ...], asyncio.Future[bytes]]]:
        batch = [self._steps.popleft()]
        size = len(batch[0][0][-1])
        while self._steps and len(batch) < BATCH and size < BATCH_BYTES:
            batch.append(self._steps.popleft())
            size += len(batch[-1][0][-1])
        return batch


class ValkeyStream:
    """A `RecordStream`: the consumer group "learner" of one run, with one reader at a time.

    Entries stay in the group's pending list until they are acknowledged. A new reader takes over what any earlier one left
    there, and so does this one after each broken connection, since the answer that was lost may have carried entries.
    """

    def __init__(self, url: str, run: str, consumer: str = "learner", *, reconnect_s: float = RECONNECT_S) -> None:
        self._client = ValkeyClient(url, reconnect_s=reconnect_s, connections=2, name=f"farmhand:{run}:{consumer}")
        self._prefix = _key(run)
        self._stream = self._prefix + b"stream"
        self._consumer = consumer
        self._scan: str | None = None
        """Pending entries after this one may not have been handed out; None: all have, and new ones are read."""
        self._delivered: set[str] = set()
        """Entries handed out and not acknowledged."""
        self._connects = 0
        self._lock = asyncio.Lock()
        self.refused = 0
        """Records that this object has put into quarantine."""

    async def read(self, *, max_records: int, wait_s: float) -> list[Delivery]:
        deadline = time.monotonic() + wait_s
        async with self._lock:
            while True:
                left = deadline - time.monotonic()
                entries = await self._entries(max_records, min(BLOCK_S, max(0.0, left)))
                deliveries = [delivery for entry in entries if (delivery := await self._delivery(*entry)) is not None]
                self._delivered.update(delivery.entry_id for delivery in deliveries)
                if deliveries or (not entries and left <= 0):
                    return deliveries

    async def ack(self, entry_ids: Sequence[str]) -> None:
        for part in _parts(entry_ids):
            # In this order: whoever dies in between leaves a pending entry that is known to be gone, not one that stays for ever.
            await self._client.call("XDEL", self._stream, *part)
            await self._client.call("XACK", self._stream, GROUP, *part)
            self._delivered.difference_update(part)

    async def depth(self) -> int:
        """Of a new reader: all that is unacknowledged."""
        length: int = await self._client.call("XLEN", self._stream)
        return max(0, length - len(self._delivered))

    async def quarantined(self) -> list[Quarantined]:
        """The records set aside in this run, oldest first; the server keeps the last thousand."""
        rows = await self._client.call("LRANGE", self._prefix + b"quarantine", 0, -1)
        return [Quarantined(*msgpack.unpackb(row)) for row in rows]

    async def close(self) -> None:
        await self._client.close()

    async def _entries(self, count: int, wait_s: float) -> list[tuple[str, bytes]]:
        """The next entries that have not been handed out, as (id, record's bytes): pending ones first."""
        while True:
            block = ("BLOCK", max(1, int(wait_s * 1000))) if wait_s > 0 and self._scan is None else ()
            start = ">" if self._scan is None else self._scan
            command = ("XREADGROUP", "GROUP", GROUP, self._consumer, "COUNT", count, *block, "STREAMS", self._stream, start)
            try:
                answer = await self._client.call(*command, wait_s=wait_s)
            except ResponseError as error:
                if not str(error).startswith("NOGROUP"):
                    raise
                await self._make_group()
                continue
            if self._client.connects != self._connects:
                self._connects = self._client.connects
                await self._take_over()
                self._scan, wait_s = "0-0", 0.0
                continue
            rows = answer[0][1] if answer else []
            if self._scan is None:
                return [(entry_id.decode(), fields[1]) for entry_id, fields in rows]
            self._scan = rows[-1][0].decode() if rows else None
            await self._forget_gone([entry_id for entry_id, fields in rows if not fields])
            found = [(entry_id.decode(), fields[1]) for entry_id, fields in rows if fields]
            if fresh := [entry for entry in found if entry[0] not in self._delivered]:
                return fresh

    async def _make_group(self) -> None:
        try:
            await self._client.call("XGROUP", "CREATE", self._stream, GROUP, "0", "MKSTREAM")
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def _take_over(self) -> None:
        """Make everything pending this reader's own."""
        cursor = b"0-0"
        while True:
            command = ("XAUTOCLAIM", self._stream, GROUP, self._consumer, 0, cursor, "COUNT", BATCH, "JUSTID")
            cursor = (await self._client.call(*command))[0]
            if cursor == b"0-0":
                return

    async def _forget_gone(self, entry_ids: Sequence[bytes]) -> None:
        """Acknowledge pending entries that were deleted already."""
        if entry_ids:
            await self._client.call("XACK", self._stream, GROUP, *entry_ids)

    async def _delivery(self, entry_id: str, data: bytes) -> Delivery | None:
        try:
            return Delivery(entry_id, decode(data))
        except MalformedRecord as error:
            row = msgpack.packb([entry_id, data, str(error)])
            await self._client.run(QUARANTINE, [self._prefix, entry_id.encode(), row])
            self.refused += 1
            return None


def _key(run: str) -> bytes:
    return b"farmhand:%b:" % run.encode()


def _ms(seconds: float) -> bytes:
    return b"%d" % (seconds * 1000)


def _parts(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]
