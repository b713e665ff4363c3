"""What every store and stream does: one suite, run against Valkey and against the twin in memory.

A module runs it by subclassing `StoreContract` and giving a fixture `world`, a fresh `World` for every test. Time is moved
by hand, so nothing waits for a lease to run out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from rollout.store import EpisodeStore, Lease, LeaseLost, RecordStream
from rollout.stream import Dedup, Quarantined
from rollout.trajectory import Episode, EpisodeEnd, Record, Segment, encode

RUN = "run/1 ü"
TTL_S = 30.0
OFFER_S = 300.0


class Stream(RecordStream):
    """What both streams offer beyond the protocol."""

    refused: int

    async def quarantined(self) -> list[Quarantined]:
        raise NotImplementedError


@dataclass(kw_only=True)
class World:
    store: EpisodeStore
    other: EpisodeStore
    """The same store as another process has it."""
    stream: Callable[[], Stream]
    """A new reader of `RUN`, as after a restart of the learner."""
    advance: Callable[[float], Awaitable[None]]
    """Let so many seconds of the store's clock go by."""
    inject: Callable[[bytes], Awaitable[None]]
    """Write bytes to the stream of `RUN`."""
    run: str = RUN


def order(episode_id: str = "e0", *, max_attempts: int = 3, run: str = RUN) -> Episode:
    return Episode(
        run=run,
        id=episode_id,
        task_set="s",
        split="train",
        task_index=0,
        group=0,
        member=0,
        seed=1,
        max_attempts=max_attempts,
    )


def segment(lease: Lease, index: int, *, tokens: int = 3) -> Segment:
    ids = np.arange(tokens, dtype=np.int32) + 1000 * index
    return Segment(
        run=lease.episode.run,
        episode_id=lease.episode.id,
        attempt=lease.attempt,
        index=index,
        parent=index - 1 if index else None,
        branch=0,
        env_tokens=ids,
        sampled_tokens=ids + 7,
        logprobs=np.full(tokens, -0.5, np.float32),
        versions=((1, tokens),),
        finish_reason="stop",
        timing={"policy": 0.25, "env": 0.5, "started_at": 1.0},
    )


def end(lease: Lease, index: int) -> EpisodeEnd:
    return EpisodeEnd(
        run=lease.episode.run,
        episode_id=lease.episode.id,
        attempt=lease.attempt,
        index=index,
        status="completed",
        reward=1.0,
    )


def keys(records: Sequence[Record]) -> list[tuple[str, str, int, int]]:
    """(kind, episode, attempt, index) of each."""
    return [
        (type(record).__name__, record.episode_id, record.attempt, record.index)
        for record in records
        if isinstance(record, Segment | EpisodeEnd)
    ]


async def drain(stream: RecordStream, *, ack: bool = True) -> list[Record]:
    records: list[Record] = []
    while deliveries := await stream.read(max_records=100, wait_s=0):
        records += [delivery.record for delivery in deliveries]
        if ack:
            await stream.ack([delivery.entry_id for delivery in deliveries])
    return records


async def claimed(store: EpisodeStore, episode_id: str = "e0", worker: str = "w1", *, run: str = RUN) -> Lease:
    taken = await store.claim(run, episode_id, worker, TTL_S)
    assert taken is not None
    return taken[0]


class StoreContract:
    """Subclasses give the fixture `world`."""

    async def test_a_run_is_published_and_an_unknown_one_is_named(self, world: World) -> None:
        await world.store.put_run(RUN, {"policy": {"url": "http://ü"}})
        assert await world.other.get_run(RUN) == {"policy": {"url": "http://ü"}}
        with pytest.raises(LookupError, match="nowhere"):
            await world.store.get_run("nowhere")

    async def test_an_episode_from_order_to_end(self, world: World) -> None:
        stream = world.stream()
        await world.store.submit([order("e0"), order("e1")])
        assert await world.store.open_episodes(RUN) == ["e0", "e1"]
        taken = await world.store.claim(RUN, "e0", "w1", TTL_S)
        assert taken is not None
        lease, resume = taken
        assert (lease.episode, lease.attempt, lease.worker) == (order("e0"), 1, "w1")
        assert (resume.segments, dict(resume.point)) == ((), {})
        await world.store.checkpoint(lease, {"sandbox": "s1"})
        written: list[Record] = [segment(lease, 0), segment(lease, 1), end(lease, 2)]
        for record in written[:2]:
            assert isinstance(record, Segment)
            await world.store.append(lease, record, {"sandbox": "s1", "env": [1]})
        assert isinstance(written[2], EpisodeEnd)
        await world.store.finish(lease, written[2])
        assert await world.store.open_episodes(RUN) == ["e1"]
        assert await stream.depth() == 3
        assert [encode(record) for record in await drain(stream)] == [encode(record) for record in written]
        assert await stream.depth() == 0

    async def test_submit_is_idempotent_even_after_the_end(self, world: World) -> None:
        await world.store.submit([order()])
        lease = await claimed(world.store)
        await world.store.append(lease, segment(lease, 0), {})
        await world.store.submit([order()])
        await world.store.append(lease, segment(lease, 1), {})
        await world.store.finish(lease, end(lease, 2))
        await world.store.submit([order()])
        assert await world.store.open_episodes(RUN) == []
        assert await world.store.claim(RUN, "e0", "w2", TTL_S) is None

    async def test_two_claimants_race_and_one_wins(self, world: World) -> None:
        await world.store.submit([order()])
        claims = [store.claim(RUN, "e0", f"w{i}", TTL_S) for i in range(8) for store in (world.store, world.other)]
        assert sum(taken is not None for taken in await asyncio.gather(*claims)) == 1

    async def test_nobody_can_claim_what_does_not_exist(self, world: World) -> None:
        assert await world.store.claim(RUN, "e0", "w1", TTL_S) is None
        assert await world.store.claim("other", "e0", "w1", TTL_S) is None

    async def test_resume_gives_segments_and_point_of_the_last_attempt(self, world: World) -> None:
        await world.store.submit([order()])
        first = await claimed(world.store)
        await world.store.append(first, segment(first, 0), {"n": 0})
        await world.store.append(first, segment(first, 1), {"n": 1, "blob": "\x00ü"})
        await world.advance(TTL_S + 1)
        taken = await world.other.claim(RUN, "e0", "w2", TTL_S)
        assert taken is not None
        lease, resume = taken
        assert lease.attempt == 2
        assert [encode(s) for s in resume.segments] == [encode(segment(first, 0)), encode(segment(first, 1))]
        assert dict(resume.point) == {"n": 1, "blob": "\x00ü"}
        await world.other.append(lease, segment(lease, 2), {})
        await world.other.finish(lease, end(lease, 3))
        expected = [("Segment", "e0", 1, 0), ("Segment", "e0", 1, 1), ("Segment", "e0", 2, 2), ("EpisodeEnd", "e0", 2, 3)]
        assert keys(await drain(world.stream())) == expected

    async def test_a_restart_begins_anew_under_the_same_lease(self, world: World) -> None:
        await world.store.submit([order()])
        first = await claimed(world.store)
        await world.store.append(first, segment(first, 0), {"sandbox": "gone"})
        with pytest.raises(ValueError, match="it has appended already"):
            await world.store.restart(first)
        await world.store.release(first)
        second = await claimed(world.store, worker="w2")
        for _ in range(2):
            await world.store.restart(second)
        with pytest.raises(LeaseLost):
            await world.store.restart(first)
        await world.store.append(second, segment(second, 0), {})
        await world.store.release(second)
        taken = await world.store.claim(RUN, "e0", "w3", TTL_S)
        assert taken is not None
        assert [encode(s) for s in taken[1].segments] == [encode(segment(second, 0))]
        records = await drain(world.stream())
        assert keys(records) == [("Segment", "e0", 1, 0), ("Segment", "e0", 2, 0)]
        assert list(filter(Dedup().accept, records)) == records

    async def test_an_older_attempt_writes_nothing(self, world: World) -> None:
        await world.store.submit([order()])
        old = await claimed(world.store)
        await world.advance(TTL_S + 1)
        new = await claimed(world.other, worker="w2")
        for step in (
            world.store.append(old, segment(old, 0), {"bad": 1}),
            world.store.checkpoint(old, {"bad": 1}),
            world.store.finish(old, end(old, 0)),
            world.store.release(old),
        ):
            with pytest.raises(LeaseLost):
                await step
        assert await world.store.renew([old, new]) == [old]
        await world.other.append(new, segment(new, 0), {})
        assert keys(await drain(world.stream())) == [("Segment", "e0", 2, 0)]

    async def test_a_turn_renews_its_lease(self, world: World) -> None:
        await world.store.submit([order()])
        lease = await claimed(world.store)
        steps: list[Callable[[], Awaitable[object]]] = [
            lambda: world.store.append(lease, segment(lease, 0), {}),
            lambda: world.store.checkpoint(lease, {}),
            lambda: world.store.renew([lease]),
        ]
        for step in steps:
            await world.advance(TTL_S - 5)
            await step()
            await world.advance(TTL_S - 5)
            assert await world.store.sweep(RUN) == []
            await world.store.renew([lease])
        assert await world.other.claim(RUN, "e0", "w2", TTL_S) is None
        await world.store.finish(lease, end(lease, 1))

    async def test_a_step_repeated_is_one_step(self, world: World) -> None:
        await world.store.submit([order()])
        lease = await claimed(world.store)
        for _ in range(2):
            await world.store.append(lease, segment(lease, 0), {})
        with pytest.raises(ValueError, match="index 0 a second time and differently; expected index 1"):
            await world.store.append(lease, segment(lease, 0, tokens=4), {})
        for _ in range(2):
            await world.store.finish(lease, end(lease, 1))
        with pytest.raises(LeaseLost):
            await world.store.append(lease, segment(lease, 1), {})
        assert keys(await drain(world.stream())) == [("Segment", "e0", 1, 0), ("EpisodeEnd", "e0", 1, 1)]

    async def test_a_gap_is_refused_and_the_next_attempt_goes_on_from_what_is_there(self, world: World) -> None:
        await world.store.submit([order()])
        lease = await claimed(world.store)
        await world.store.append(lease, segment(lease, 0), {})
        with pytest.raises(LeaseLost, match="only the first 1 segments"):
            await world.store.append(lease, segment(lease, 2), {})
        assert await world.store.sweep(RUN) == [order()]
        taken = await world.store.claim(RUN, "e0", "w2", TTL_S)
        assert taken is not None
        assert len(taken[1].segments) == 1

    async def test_a_record_of_another_episode_is_refused(self, world: World) -> None:
        await world.store.submit([order("e0"), order("e1")])
        mine, yours = await claimed(world.store, "e0"), await claimed(world.store, "e1")
        with pytest.raises(ValueError, match="under the lease of"):
            await world.store.append(mine, segment(yours, 0), {})
        with pytest.raises(ValueError, match="under the lease of"):
            await world.store.finish(mine, end(yours, 0))

    async def test_an_expired_lease_is_offered_once_and_again_until_lost(self, world: World) -> None:
        await world.store.submit([order(max_attempts=2)])
        first = await claimed(world.store, worker="w1")
        await world.store.append(first, segment(first, 0), {})
        assert await world.store.sweep(RUN) == []
        await world.advance(TTL_S + 1)
        assert await world.store.sweep(RUN) == [order(max_attempts=2)]
        assert await world.store.sweep(RUN) == []
        with pytest.raises(LeaseLost):
            await world.store.append(first, segment(first, 1), {})
        await claimed(world.store, worker="host-7 pid 12")
        await world.advance(TTL_S + 1)
        swept = await asyncio.gather(*(store.sweep(RUN) for store in (world.store, world.other, world.store)))
        assert swept == [[], [], []]
        records = await drain(world.stream())
        assert keys(records) == [("Segment", "e0", 1, 0), ("EpisodeEnd", "e0", 2, 1)]
        last = records[-1]
        assert isinstance(last, EpisodeEnd)
        assert last.failure is not None
        assert (last.status, last.failure.kind) == ("failed", "lost")
        assert last.failure.message == "attempt 2, the last one allowed, died with worker host-7 pid 12"
        assert await world.store.open_episodes(RUN) == []

    async def test_an_expired_lease_found_by_a_claimant_counts_as_a_death_too(self, world: World) -> None:
        await world.store.submit([order(max_attempts=2)])
        for worker in ("w1", "w2"):
            await claimed(world.store, worker=worker)
            await world.advance(TTL_S + 1)
        assert await world.store.claim(RUN, "e0", "w3", TTL_S) is None
        assert await world.store.sweep(RUN) == []
        assert keys(await drain(world.stream())) == [("EpisodeEnd", "e0", 2, 0)]

    async def test_a_release_is_no_death(self, world: World) -> None:
        await world.store.submit([order(max_attempts=1)])
        for attempt in range(1, 6):
            lease = await claimed(world.store)
            assert lease.attempt == attempt
            await world.store.append(lease, segment(lease, attempt - 1), {"at": attempt})
            await world.store.release(lease)
            assert await world.store.open_episodes(RUN) == ["e0"]
            with pytest.raises(LeaseLost):
                await world.store.append(lease, segment(lease, attempt), {})
            assert await world.store.sweep(RUN) == [order(max_attempts=1)]
            assert await world.store.sweep(RUN) == []
        assert len(keys(await drain(world.stream()))) == 5

    async def test_an_offer_that_nobody_hears_is_made_again(self, world: World) -> None:
        await world.store.submit([order(max_attempts=1)])
        for _ in range(3):
            assert await world.store.sweep(RUN) == []
            await world.advance(OFFER_S + 1)
            assert await world.store.sweep(RUN) == [order(max_attempts=1)]

    async def test_cancel_ends_what_is_open_and_fences_its_worker(self, world: World) -> None:
        await world.store.submit([order("e0"), order("e1"), order("e2")])
        lease, done = await claimed(world.store, "e0"), await claimed(world.store, "e2")
        await world.store.append(lease, segment(lease, 0), {})
        await world.store.finish(done, end(done, 0))
        for _ in range(2):
            await world.other.cancel(RUN, ["e0", "e1", "e2", "e9"], "group dropped: stale")
        for step in (world.store.append(lease, segment(lease, 1), {}), world.store.finish(lease, end(lease, 1))):
            with pytest.raises(LeaseLost):
                await step
        assert await world.store.renew([lease]) == [lease]
        assert await world.store.claim(RUN, "e1", "w2", TTL_S) is None
        assert await world.store.open_episodes(RUN) == []
        records = await drain(world.stream())
        assert keys(records)[2:] == [("EpisodeEnd", "e0", 1, 1), ("EpisodeEnd", "e1", 0, 0)]
        for record in records[2:]:
            assert isinstance(record, EpisodeEnd)
            assert record.failure is not None
            assert (record.failure.kind, record.failure.message) == ("cancelled", "group dropped: stale")

    async def test_many_episodes_append_at_once_and_each_hears_its_own_answer(self, world: World) -> None:
        ids = [f"e{i}" for i in range(450)]
        await world.store.submit([order(i) for i in ids])
        leases = [await claimed(world.store, i) for i in ids]
        await world.store.cancel(RUN, ids[::10], "enough")
        answers = await asyncio.gather(
            *(world.store.append(lease, segment(lease, 0), {}) for lease in leases), return_exceptions=True
        )
        assert [i for i, answer in enumerate(answers) if isinstance(answer, LeaseLost)] == list(range(0, 450, 10))
        assert sum(answer is None for answer in answers) == 405
        assert await world.store.renew(leases) == leases[::10]
        segments = [record for record in await drain(world.stream()) if isinstance(record, Segment)]
        assert sorted(s.episode_id for s in segments) == sorted(set(ids) - set(ids[::10]))

    async def test_unacknowledged_records_come_first_after_a_restart(self, world: World) -> None:
        await world.store.submit([order()])
        lease = await claimed(world.store)
        for index in range(6):
            await world.store.append(lease, segment(lease, index), {})
        before = world.stream()
        first = await before.read(max_records=2, wait_s=0)
        await before.ack([delivery.entry_id for delivery in first])
        second = await before.read(max_records=2, wait_s=0)
        assert [keys([d.record])[0][3] for d in (*first, *second)] == [0, 1, 2, 3]
        assert await before.read(max_records=1, wait_s=0) != []
        after = world.stream()
        assert await after.depth() == 4
        again = [await after.read(max_records=2, wait_s=0) for _ in range(3)]
        assert [[keys([d.record])[0][3] for d in part] for part in again] == [[2, 3], [4, 5], []]
        assert again[0][0].entry_id == second[0].entry_id
        await after.ack([delivery.entry_id for part in again for delivery in part])
        assert await drain(world.stream()) == []

    async def test_a_reader_that_waits_is_woken(self, world: World) -> None:
        stream = world.stream()
        assert await stream.read(max_records=1, wait_s=0.01) == []
        await world.store.submit([order()])
        lease = await claimed(world.store)
        reading = asyncio.create_task(stream.read(max_records=10, wait_s=30))
        await asyncio.sleep(0)
        await world.store.append(lease, segment(lease, 0), {})
        assert len(await asyncio.wait_for(reading, 10)) == 1

    async def test_a_cancelled_wait_loses_nothing(self, world: World) -> None:
        stream = world.stream()
        await world.store.submit([order()])
        lease = await claimed(world.store)
        for index in range(20):
            reading = asyncio.create_task(stream.read(max_records=1, wait_s=30))
            for _ in range(index % 7):
                await asyncio.sleep(0)
            writing = asyncio.create_task(world.store.append(lease, segment(lease, index), {}))
            for _ in range(index % 5):
                await asyncio.sleep(0)
            reading.cancel()
            (answer,) = await asyncio.gather(reading, return_exceptions=True)
            await writing
            got = answer if isinstance(answer, list) else await stream.read(max_records=1, wait_s=30)
            assert [keys([delivery.record])[0][3] for delivery in got] == [index]

    async def test_what_does_not_decode_is_set_aside(self, world: World) -> None:
        await world.store.submit([order()])
        lease = await claimed(world.store)
        await world.inject(b"\x09no record")
        await world.store.append(lease, segment(lease, 0), {})
        await world.inject(b"")
        stream = world.stream()
        assert keys(await drain(stream)) == [("Segment", "e0", 1, 0)]
        aside = await stream.quarantined()
        assert stream.refused == 2
        assert [item.data for item in aside] == [b"\x09no record", b""]
        assert "unknown record format 09" in aside[0].reason
        again = world.stream()
        assert await drain(again) == []
        assert [item.entry_id for item in await again.quarantined()] == [item.entry_id for item in aside]
