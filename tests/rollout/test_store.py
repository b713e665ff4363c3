"""Both stores against one contract and against each other; then what only a server can do: die, fill up, refuse."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from rollout.memory_store import MemoryStore, MemoryStream
from rollout.store import EpisodeStore, Lease, LeaseLost, StoreUnavailable
from rollout.stream import Dedup
from rollout.trajectory import EpisodeEnd, Record, Segment, encode
from rollout.urls import redis_url, socket_url
from rollout.valkey_server import EmbeddedServer, embedded_command, embedded_server, wait_ready
from rollout.valkey_store import ValkeyStore, ValkeyStream
from tests.rollout.store_contract import (
    OFFER_S,
    RUN,
    TTL_S,
    StoreContract,
    Stream,
    World,
    claimed,
    drain,
    end,
    keys,
    order,
    segment,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command, url = embedded_command(tmp_path_factory.mktemp("valkey"))
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        asyncio.run(wait_ready(url))
        yield url
        process.terminate()


class TestMemory(StoreContract):
    @pytest.fixture
    def world(self) -> World:
        clock = Clock()
        store = MemoryStore(clock=clock, offer_s=OFFER_S)

        async def advance(seconds: float) -> None:
            clock.now += seconds

        async def inject(data: bytes) -> None:
            store.run(RUN).write(data)

        return World(
            store=store, other=store, stream=lambda: _stream(MemoryStream(store, RUN)), advance=advance, inject=inject
        )


class TestValkey(StoreContract):
    @pytest.fixture
    async def world(self, server_url: str) -> AsyncIterator[World]:
        with redis.from_url(redis_url(server_url)) as plain:
            plain.flushall()
            store, other = (ValkeyStore(server_url, reconnect_s=5, offer_s=OFFER_S) for _ in range(2))
            streams: list[ValkeyStream] = []

            def stream() -> Stream:
                streams.append(ValkeyStream(server_url, RUN, f"learner-{len(streams)}", reconnect_s=5))
                return _stream(streams[-1])

            async def advance(seconds: float) -> None:
                shift_due(plain, RUN, seconds)

            async def inject(data: bytes) -> None:
                plain.xadd(f"farmhand:{RUN}:stream", {"r": data})

            yield World(store=store, other=other, stream=stream, advance=advance, inject=inject)
            for reader in streams:
                await reader.close()
            await store.close()
            await other.close()

    async def test_ended_episodes_and_acknowledged_records_leave_only_a_mark(self, world: World, server_url: str) -> None:
        await world.store.submit([order(f"e{i}") for i in range(5)])
        for i in range(5):
            lease = await claimed(world.store, f"e{i}")
            await world.store.append(lease, segment(lease, 0, tokens=1000), {"sandbox": "x"})
            if i < 4:
                await world.store.finish(lease, end(lease, 1))
        await world.store.cancel(RUN, ["e4"], "")
        assert len(await drain(world.stream())) == 10
        with redis.from_url(redis_url(server_url)) as plain:
            left = {key.decode().removeprefix(f"farmhand:{RUN}:") for key in plain.keys("*")}
            assert left == {"stream", "seq", *(f"ended:e{i}" for i in range(5))}
            assert plain.xlen(f"farmhand:{RUN}:stream") == 0
            assert all(plain.ttl(f"farmhand:{RUN}:ended:e{i}") > 3600 for i in range(5))

    async def test_a_crash_between_doom_and_end_is_completed_by_the_next_sweep(self, world: World, server_url: str) -> None:
        await world.store.submit([order()])
        lease = await claimed(world.store)
        with redis.from_url(redis_url(server_url)) as plain:
            plain.hset(f"farmhand:{RUN}:episode:e0", mapping={"doom": "cancelled:why", "worker": ""})
        with pytest.raises(LeaseLost):
            await world.store.append(lease, segment(lease, 0), {})
        await world.advance(TTL_S + 1)
        assert await world.store.sweep(RUN) == []
        (record,) = await drain(world.stream())
        assert isinstance(record, EpisodeEnd)
        assert record.failure is not None
        assert (record.failure.kind, record.failure.message) == ("cancelled", "why")


def _stream(stream: Any) -> Stream:
    checked: Stream = stream
    return checked


def shift_due(plain: Any, run: str, seconds: float) -> None:
    """Let the server's clock run ahead for one run: everything it waits for comes so much nearer."""
    for member, at in plain.zrange(f"farmhand:{run}:due", 0, -1, withscores=True):
        if at:
            plain.zadd(f"farmhand:{run}:due", {member: at - seconds * 1000})


class Twins(RuleBasedStateMachine):
    """The same calls to both stores give the same answers and the same streams."""

    url = ""
    ids = st.sampled_from(["e0", "e1", "e2"])
    workers = st.sampled_from(["w1", "w2"])

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.run_name = uuid.uuid4().hex
        self.clock = Clock()
        self.memory = MemoryStore(clock=self.clock, offer_s=OFFER_S)
        self.plain = redis.from_url(redis_url(self.url))
        self.leases: list[Lease] = []
        self.counts: dict[str, int] = {}

    @initialize()
    def begin(self) -> None:
        async def begin() -> None:
            self.valkey = ValkeyStore(self.url, reconnect_s=5, offer_s=OFFER_S)
            self.start_readers()

        self.runner.run(begin())

    def start_readers(self) -> None:
        self.readers = (ValkeyStream(self.url, self.run_name, "l", reconnect_s=5), MemoryStream(self.memory, self.run_name))

    def both(self, method: str, *args: object) -> Any:
        async def one(store: EpisodeStore) -> object:
            try:
                return await getattr(store, method)(*args)
            except (LeaseLost, ValueError) as error:
                return type(error), str(error)

        async def two() -> tuple[object, object]:
            return await one(self.valkey), await one(self.memory)

        a, b = self.runner.run(two())
        if method == "claim" and isinstance(a, tuple) and isinstance(b, tuple):
            assert a[0] == b[0]
            assert [encode(s) for s in a[1].segments] == [encode(s) for s in b[1].segments]
            assert a[1].point == b[1].point
        elif method == "sweep":
            assert sorted(e.id for e in a) == sorted(e.id for e in b)  # type: ignore[attr-defined]
        else:
            assert a == b
        return a

    @rule(episode_id=ids, tries=st.integers(1, 3))
    def submit(self, episode_id: str, tries: int) -> None:
        self.both("submit", [order(episode_id, max_attempts=tries, run=self.run_name)])

    @rule(episode_id=ids, worker=workers)
    def claim(self, episode_id: str, worker: str) -> None:
        taken = self.both("claim", self.run_name, episode_id, worker, TTL_S)
        if taken is not None:
            self.leases.append(taken[0])
            self.counts[episode_id] = len(taken[1].segments)

    def lease(self, pick: int) -> Lease | None:
        return self.leases[-1 - pick % len(self.leases)] if self.leases else None

    @rule(pick=st.sampled_from([0, 0, 0, 1, 2, 3]), slip=st.sampled_from([0, 0, 0, 0, -1, 1]))
    def append(self, pick: int, slip: int) -> None:
        lease = self.lease(pick)
        if lease is not None:
            index = max(0, self.counts[lease.episode.id] + slip)
            if self.both("append", lease, segment(lease, index), {"i": index, "w": lease.worker}) is None and slip == 0:
                self.counts[lease.episode.id] += 1

    @rule(pick=st.integers(0, 3), what=st.sampled_from(["checkpoint", "restart", "finish", "release", "renew", "renew"]))
    def step(self, pick: int, what: str) -> None:
        lease = self.lease(pick)
        if lease is not None:
            arguments: dict[str, tuple[object, ...]] = {
                "checkpoint": (lease, {"c": pick}),
                "restart": (lease,),
                "finish": (lease, end(lease, self.counts[lease.episode.id])),
                "release": (lease,),
                "renew": (self.leases[-4:],),
            }
            if self.both(what, *arguments[what]) is None and what == "restart":
                self.counts[lease.episode.id] = 0

    @rule(episode_id=ids)
    def cancel(self, episode_id: str) -> None:
        self.both("cancel", self.run_name, [episode_id], "why")

    @rule(seconds=st.sampled_from([20.0, 40.0, 350.0]))
    def advance(self, seconds: float) -> None:
        self.clock.now += seconds
        shift_due(self.plain, self.run_name, seconds)

    @rule()
    def sweep(self) -> None:
        self.both("sweep", self.run_name)

    @rule(ack=st.booleans())
    def read(self, ack: bool) -> None:
        async def read() -> list[list[bytes]]:
            # Two episodes that one sweep ends may end in either order.
            return [sorted(encode(record) for record in await drain(reader, ack=ack)) for reader in self.readers]

        valkey, memory = self.runner.run(read())
        assert valkey == memory

    @rule()
    def restart_the_learner(self) -> None:
        async def restart() -> None:
            await self.readers[0].close()
            self.start_readers()

        self.runner.run(restart())

    @invariant()
    def the_same_is_open_and_unread(self) -> None:
        async def depths() -> list[int]:
            return [await reader.depth() for reader in self.readers]

        self.both("open_episodes", self.run_name)
        assert len(set(self.runner.run(depths()))) == 1

    def teardown(self) -> None:
        async def close() -> None:
            await self.readers[0].close()
            await self.valkey.close()

        self.runner.run(close())
        self.runner.close()
        self.plain.close()


def test_the_twins_agree(server_url: str) -> None:
    class Machine(Twins):
        url = server_url

    run_state_machine_as_test(Machine, settings=settings(max_examples=30, stateful_step_count=40))


class Farm:
    """Drivers of `episodes` times `turns`, and a learner, over a server that may die at any time."""

    def __init__(self, url: str, *, episodes: int, turns: int) -> None:
        self.url = url
        self.ids = [f"e{i}" for i in range(episodes)]
        self.turns = turns
        self.store = ValkeyStore(url, reconnect_s=30)
        self.written = 0
        self.lost = 0
        self.progress = asyncio.Condition()
        self.records: list[Record] = []

    async def drive(self, episode_id: str) -> None:
        while True:
            taken = await self.store.claim(RUN, episode_id, "w", 60)
            if taken is None:
                if episode_id not in await self.store.open_episodes(RUN):
                    return
                await self.store.sweep(RUN)
                continue
            lease, resume = taken
            try:
                for index in range(len(resume.segments), self.turns):
                    await self.store.append(lease, segment(lease, index), {"i": index})
                    async with self.progress:
                        self.written += 1
                        self.progress.notify_all()
                await self.store.finish(lease, end(lease, self.turns))
            except LeaseLost:
                self.lost += 1
            else:
                return

    async def learn(self) -> None:
        stream = ValkeyStream(self.url, RUN, reconnect_s=30)
        ended: set[str] = set()
        while len(ended) < len(self.ids):
            deliveries = await stream.read(max_records=17, wait_s=1)
            self.records += [delivery.record for delivery in deliveries]
            ended |= {d.record.episode_id for d in deliveries if isinstance(d.record, EpisodeEnd)}
            await stream.ack([delivery.entry_id for delivery in deliveries])
        await stream.close()

    async def assassinate(self, server: EmbeddedServer, times: int) -> None:
        for n in range(1, times + 1):
            enough = n * len(self.ids) * self.turns // (times + 1)
            async with self.progress:
                while self.written < enough:
                    await self.progress.wait()
            await server.kill()
            await server.start()

    async def run(self, server: EmbeddedServer, times: int) -> None:
        await self.store.submit([order(i, max_attempts=1000) for i in self.ids])
        async with asyncio.timeout(90), asyncio.TaskGroup() as group:
            for episode_id in self.ids:
                group.create_task(self.drive(episode_id))
            group.create_task(self.learn())
            group.create_task(self.assassinate(server, times))
        await self.store.close()


async def test_kill_9_with_every_write_synced_loses_and_doubles_nothing_on_the_wire(tmp_path: Path) -> None:
    async with embedded_server(tmp_path, appendfsync="always") as server:
        farm = Farm(server.url, episodes=20, turns=20)
        await farm.run(server, times=3)
    assert farm.lost == 0
    wanted = {("Segment", i, 1, turn) for i in farm.ids for turn in range(20)} | {("EpisodeEnd", i, 1, 20) for i in farm.ids}
    assert sorted(keys(farm.records)) == sorted(wanted)


async def test_kill_9_loses_and_doubles_nothing_at_the_learner(tmp_path: Path) -> None:
    async with embedded_server(tmp_path) as server:
        farm = Farm(server.url, episodes=20, turns=20)
        await farm.run(server, times=3)
    dedup = Dedup()
    episodes: dict[str, list[Segment | EpisodeEnd]] = {i: [] for i in farm.ids}
    for record in filter(dedup.accept, farm.records):
        assert isinstance(record, Segment | EpisodeEnd)
        del episodes[record.episode_id][record.index :]
        episodes[record.episode_id].append(record)
    for records in episodes.values():
        assert [index for _, _, _, index in keys(records)] == list(range(21))
        assert isinstance(records[-1], EpisodeEnd)


async def test_a_server_away_for_longer_than_the_budget_is_named(tmp_path: Path) -> None:
    async with embedded_server(tmp_path) as server:
        store, stream = ValkeyStore(server.url, reconnect_s=0.2), ValkeyStream(server.url, RUN, reconnect_s=0.2)
        await store.submit([order("e0"), order("e1")])
        leases = [await claimed(store, "e0"), await claimed(store, "e1")]
        await stream.depth()
        await server.kill()
        steps: list[Awaitable[object]] = [store.append(a, segment(a, 0), {}) for a in leases]
        steps += [store.sweep(RUN), stream.read(max_records=1, wait_s=9)]
        answers = await asyncio.gather(*steps, return_exceptions=True)
        for answer in answers:
            assert isinstance(answer, StoreUnavailable)
            assert server.url in str(answer)
            assert "broker.url" in str(answer)
        await server.start()
        for lease in leases:
            await store.append(lease, segment(lease, 0), {})
        assert len(await drain(stream)) == 2
        await stream.close()
        await store.close()


async def test_a_full_server_refuses_turns_but_lets_the_learner_make_room(tmp_path: Path) -> None:
    async with embedded_server(tmp_path) as server:
        with redis.from_url(redis_url(server.url)) as plain:
            store, stream = ValkeyStore(server.url), ValkeyStream(server.url, RUN)
            await store.submit([order()])
            lease = await claimed(store)
            await store.append(lease, segment(lease, 0), {})
            (delivery,) = await stream.read(max_records=1, wait_s=0)
            plain.config_set("maxmemory", 1)
            with pytest.raises(StoreUnavailable, match=r"no memory left.*`maxmemory`.*`broker\.url`"):
                await store.append(lease, segment(lease, 1), {})
            await stream.ack([delivery.entry_id])
            assert plain.xlen(f"farmhand:{RUN}:stream") == 0
            plain.config_set("maxmemory", 0)
            await store.append(lease, segment(lease, 1), {})
            await stream.close()
            await store.close()


async def test_a_server_whose_disk_fails_is_named(tmp_path: Path) -> None:
    async with embedded_server(tmp_path) as server:
        with redis.from_url(redis_url(server.url)) as plain:
            (tmp_path / "dump.rdb" / "in the way").mkdir(parents=True)
            plain.config_set("save", "3600 1")
            plain.execute_command("BGSAVE")
            async with asyncio.timeout(20):
                while plain.info("persistence")["rdb_last_bgsave_status"] != "err":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            store = ValkeyStore(server.url)
            with pytest.raises(StoreUnavailable, match=r"refuses to write: MISCONF.*`broker\.url`"):
                await store.submit([order()])
            await store.close()
            plain.config_set("save", "")


async def test_a_wrong_password_is_refused_at_once_and_not_shown(tmp_path: Path) -> None:
    async with embedded_server(tmp_path) as server:
        with redis.from_url(redis_url(server.url)) as plain:
            plain.config_set("requirepass", "right")
            for url in (server.url, server.url.replace("unix://", "unix://:wr0ng@")):
                store = ValkeyStore(url)
                with pytest.raises(StoreUnavailable, match=r"broker\.url") as caught:
                    await store.open_episodes(RUN)
                assert "wr0ng" not in str(caught.value)
                await store.close()
            plain.config_set("requirepass", "")


async def test_entries_numbered_below_the_cursor_after_a_crash_are_read(tmp_path: Path) -> None:
    async with embedded_server(tmp_path) as server:
        store, stream = ValkeyStore(server.url, reconnect_s=5), ValkeyStream(server.url, RUN, reconnect_s=5)
        await store.submit([order()])
        lease = await claimed(store)
        await store.append(lease, segment(lease, 0), {})
        with redis.from_url(redis_url(server.url)) as plain:
            (delivered,) = await stream.read(max_records=9, wait_s=0)
            # What a server that lost its last second looks like: the entry that was read is gone, the next one has a lower id.
            plain.delete(f"farmhand:{RUN}:stream")
            await server.kill()
            await server.start()
            assert await stream.depth() == 0
            plain.xadd(f"farmhand:{RUN}:stream", {"r": encode(segment(lease, 0, tokens=5))}, id="1-1")
        (again,) = await stream.read(max_records=9, wait_s=0)
        assert again.entry_id < delivered.entry_id
        await stream.close()
        await store.close()


async def test_a_server_that_stalls_takes_a_repeated_turn_once(tmp_path: Path) -> None:
    async with embedded_server(tmp_path) as server:
        store, stream = ValkeyStore(server.url, reconnect_s=0.5), ValkeyStream(server.url, RUN)
        await store.submit([order()])
        lease = await claimed(store)
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(StoreUnavailable, match=r"broker\.url"):
            await store.append(lease, segment(lease, 0), {})
        os.kill(server.pid, signal.SIGCONT)
        await store.append(lease, segment(lease, 0), {})
        await store.finish(lease, end(lease, 1))
        assert keys(await drain(stream)) == [("Segment", "e0", 1, 0), ("EpisodeEnd", "e0", 1, 1)]
        await stream.close()
        await store.close()


class CuttingProxy:
    """A socket before the server's that can swallow an answer and break the connection, the deed being done."""

    def __init__(self, path: Path, target: str) -> None:
        self.url = socket_url(str(path))
        self._path = path
        self._target = target
        self._tasks: set[asyncio.Task[None]] = set()
        self.cut_in: int | None = None
        """Answers still to pass before one is swallowed."""

    async def __aenter__(self) -> CuttingProxy:
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(self._target)
        for task in (
            asyncio.create_task(self._pump(reader, back, answers=False)),
            asyncio.create_task(self._pump(there, writer, answers=True)),
        ):
            self._tasks.add(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool) -> None:
        try:
            while data := await source.read(1 << 20):
                if answers and self.cut_in is not None:
                    self.cut_in = self.cut_in - 1 if self.cut_in else None
                    if self.cut_in is None:
                        break
                sink.write(data)
        finally:
            sink.close()


@pytest.mark.parametrize("nth", [0, 1])
async def test_a_step_whose_answer_is_lost_is_done_once(tmp_path: Path, server_url: str, nth: int) -> None:
    run = uuid.uuid4().hex
    async with CuttingProxy(tmp_path / "proxy.sock", redis_url(server_url).removeprefix("unix://")) as proxy:
        store, stream = ValkeyStore(proxy.url, reconnect_s=5), ValkeyStream(server_url, run)

        async def cut(step: Awaitable[Any]) -> Any:
            proxy.cut_in = nth
            answer = await step
            proxy.cut_in = None
            return answer

        await store.open_episodes(run)
        ids = ["a", "b", "c"]
        await cut(store.submit([order(i, run=run, max_attempts=1) for i in ids]))
        assert await store.open_episodes(run) == ids
        taken = await cut(store.claim(run, "a", "w1", TTL_S))
        assert taken is not None
        lease = taken[0]
        await cut(store.checkpoint(lease, {"sandbox": 1}))
        await cut(store.append(lease, segment(lease, 0), {"sandbox": 1}))
        assert await cut(store.renew([lease])) == []
        await cut(store.release(lease))
        lease = await claimed(store, "a", run=run)
        assert lease.attempt == 2
        await cut(store.finish(lease, end(lease, 1)))
        await cut(store.cancel(run, ["a", "b"], "why"))
        await claimed(store, "c", run=run)
        with redis.from_url(redis_url(server_url)) as plain:
            shift_due(plain, run, TTL_S + 1)
        await cut(store.sweep(run))
        await store.sweep(run)
        wanted = [("Segment", "a", 1, 0), ("EpisodeEnd", "a", 2, 1), ("EpisodeEnd", "b", 0, 0), ("EpisodeEnd", "c", 1, 0)]
        assert keys(await drain(stream)) == wanted
        assert await store.open_episodes(run) == []
        await stream.close()
        await store.close()
