"""What a token costs on its way from the driver to the learner, in processor time of this process and the server together.

Every way carries the same turns from `EPISODES` episodes that append at the same time, one turn each at a time, and reads
them back: ours (encode, leased append, read, decode, acknowledge); plain redis-py XADD and XREADGROUP of the encoded bytes,
which neither encodes nor decodes, leases, or keeps anything for resumption; and plain redis-py with JSON lists. Rates are
per second of processor time, so that what else runs on the machine matters little; each is the best of `ROUNDS`.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import redis.asyncio as redis

from benchmarks.results import Row, write_results
from rollout.store import Lease
from rollout.trajectory import Episode, Segment, encode
from rollout.urls import redis_url
from rollout.valkey_server import EmbeddedServer, embedded_server
from rollout.valkey_store import ValkeyStore, ValkeyStream

EPISODES = 64
ROUNDS = 3
LARGE = (450, 300)
"""Tokens of the environment and of the policy in a turn of a coding episode."""
SMALL = (8, 7)
LARGE_TURNS = 80
SMALL_TURNS = 80
READ = 256
Append = Callable[[Segment], Awaitable[Any]]


@dataclass
class Cost:
    """Seconds of processor time; `wall` in seconds of the clock."""

    append: float
    read: float
    server: float
    wall: float

    @property
    def total(self) -> float:
        return self.append + self.read + self.server


def turns(leases: Sequence[Lease], count: int, size: tuple[int, int]) -> list[list[Segment]]:
    """[episode][turn]"""
    rng = np.random.default_rng(0)
    m, n = size
    return [
        [
            Segment(
                run=lease.episode.run,
                episode_id=lease.episode.id,
                attempt=lease.attempt,
                index=index,
                parent=index - 1 if index else None,
                branch=0,
                env_tokens=rng.integers(0, 150_000, m, dtype=np.int32),
                sampled_tokens=rng.integers(0, 150_000, n, dtype=np.int32),
                logprobs=-rng.random(n, dtype=np.float32),
                versions=((3, n),),
                finish_reason="tool_calls",
                timing={"policy": 0.8, "env": 0.1, "started_at": 1.7e9},
            )
            for index in range(count)
        ]
        for lease in leases
    ]


async def measure(
    server: EmbeddedServer, segments: Sequence[Sequence[Segment]], append: Append, read_all: Callable[[int], Awaitable[None]]
) -> Cost:
    async def drive(mine: Sequence[Segment]) -> None:
        for segment in mine:
            await append(segment)

    process = psutil.Process(server.pid)
    times = process.cpu_times()
    wall, start = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(drive, segments))
    middle = time.process_time()
    await read_all(sum(map(len, segments)))
    stop, now = time.process_time(), process.cpu_times()
    served = now.user + now.system - times.user - times.system
    return Cost(middle - start, stop - middle, served, time.perf_counter() - wall)


async def ours(server: EmbeddedServer, run: str, count: int, size: tuple[int, int], episodes: int = EPISODES) -> Cost:
    store, stream = ValkeyStore(server.url), ValkeyStream(server.url, run)
    orders = [
        Episode(run=run, id=f"episode-{i:06d}", task_set="b", split="train", task_index=i, group=i, member=0, seed=i)
        for i in range(episodes)
    ]
    await store.submit(orders)
    leases: dict[str, Lease] = {}
    for order in orders:
        taken = await store.claim(run, order.id, "bench", 60)
        assert taken is not None
        leases[order.id] = taken[0]
    point = {"sandbox": "local-0123456789abcdef", "env": {"cwd": "/work", "turn": 12}}

    async def append(segment: Segment) -> None:
        await store.append(leases[segment.episode_id], segment, point)

    async def read_all(expected: int) -> None:
        while expected:
            deliveries = await stream.read(max_records=READ, wait_s=5)
            await stream.ack([delivery.entry_id for delivery in deliveries])
            expected -= len(deliveries)

    cost = await measure(server, turns(list(leases.values()), count, size), append, read_all)
    await store.cancel(run, list(leases), "bench")
    await stream.close()
    await store.close()
    return cost


async def plain(server: EmbeddedServer, run: str, count: int, size: tuple[int, int], *, as_json: bool) -> Cost:
    client: Any = redis.from_url(redis_url(server.url), max_connections=EPISODES)
    leases = [
        Lease(
            Episode(run=run, id=f"episode-{i:06d}", task_set="b", split="train", task_index=i, group=i, member=0, seed=i),
            1,
            "bench",
            60,
        )
        for i in range(EPISODES)
    ]
    segments = turns(leases, count, size)
    encoded = {segment.key: encode(segment) for mine in segments for segment in mine}
    await client.xgroup_create(run, "g", "0", mkstream=True)

    async def append(segment: Segment) -> None:
        await client.xadd(run, {"r": _json(segment) if as_json else encoded[segment.key]})

    async def read_all(expected: int) -> None:
        while expected:
            ((_, entries),) = await client.xreadgroup("g", "c", {run: ">"}, count=READ)
            for _, fields in entries:
                if as_json:
                    json.loads(fields[b"r"])
            await client.xack(run, "g", *(entry_id for entry_id, _ in entries))
            expected -= len(entries)

    cost = await measure(server, segments, append, read_all)
    await client.delete(run)
    await client.aclose()
    return cost


def _json(segment: Segment) -> str:
    fields = {name: getattr(segment, name) for name in Segment.__slots__}
    return json.dumps({k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in fields.items()})


async def best(way: Callable[[str], Awaitable[Cost]], name: str) -> Cost:
    return min([await way(f"{name}-{i}") for i in range(ROUNDS)], key=lambda cost: cost.total)


async def bench() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="farmhand-bench-") as folder:
        async with embedded_server(Path(folder)) as server:
            large = await best(lambda run: ours(server, run, LARGE_TURNS, LARGE), "large")
            large_xadd = await best(lambda run: plain(server, run, LARGE_TURNS, LARGE, as_json=False), "large-xadd")
            large_json = await best(lambda run: plain(server, run, LARGE_TURNS, LARGE, as_json=True), "large-json")
            small = await best(lambda run: ours(server, run, SMALL_TURNS, SMALL), "small")
            small_xadd = await best(lambda run: plain(server, run, SMALL_TURNS, SMALL, as_json=False), "small-xadd")
            many = await best(lambda run: ours(server, run, 10, SMALL, episodes=2000), "many")
            lone = await best(lambda run: ours(server, run, 1000, SMALL, episodes=1), "lone")
    tokens = EPISODES * LARGE_TURNS * sum(LARGE)
    count = EPISODES * SMALL_TURNS
    micro = 1e6 / count
    whole = f"stream, turns of {sum(LARGE)} tokens, client + server"
    return [
        Row(
            name=whole,
            value=tokens / large.total,
            unit="tokens/s per core",
            baseline=tokens / large_xadd.total,
            against="plain redis-py XADD + XREADGROUP of the same bytes, undecoded",
            target=">= 1,000,000",
        ),
        Row(
            name=f"{whole} (against JSON)",
            value=tokens / large.total,
            unit="tokens/s per core",
            baseline=tokens / large_json.total,
            against="plain redis-py with JSON lists",
        ),
        Row(name="stream, same: server's part", value=large.server / large.total, unit="of the processor time"),
        Row(
            name=f"append of a {sum(SMALL)}-token turn, {EPISODES} at once, client",
            value=small.append * micro,
            unit="us of processor time",
            baseline=small_xadd.append * micro,
            against="plain redis-py XADD of the same bytes",
            target="< 150",
        ),
        Row(
            name="append of the same, server",
            value=small.server * micro,
            unit="us of processor time, reading included",
            baseline=small_xadd.server * micro,
            against="plain redis-py XADD + XREADGROUP",
        ),
        Row(
            name="read and acknowledgement of the same, client",
            value=small.read * micro,
            unit="us of processor time",
            baseline=small_xadd.read * micro,
            against="plain redis-py XREADGROUP + XACK, undecoded",
        ),
        Row(name="append of the same, 2,000 at once, client", value=many.append * 1e6 / 20_000, unit="us of processor time"),
        Row(name="append of the same, one at a time, client", value=lone.append * 1e3, unit="us of processor time"),
    ]


def main() -> None:
    write_results("stream", asyncio.run(bench()))


if __name__ == "__main__":
    main()
