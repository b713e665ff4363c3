"""The driver: turns a second of one worker process without policy and environment, and turns a CPU-second over HTTP.

Everything else is real: the worker, the lease and its renewal, the embedded Valkey, one segment a turn on the stream. CPU time
is that of the driver's process alone.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import uvloop

from benchmarks.noop_tasks import NoopTasks
from benchmarks.results import Row, write_results
from rollout.config import RolloutConfig
from rollout.context import RunContext, make_context, make_renderer
from rollout.policy.base import Completion, Policy, SamplingParams
from rollout.trajectory import Episode
from rollout.valkey_server import embedded_server
from rollout.valkey_store import ValkeyStore
from rollout.worker import EpisodeWorker

TURNS = 10
TOKENS = 32
VERIFIERS = {200: 141.0, 1000: 102.0}
"""Turns a CPU-second of verifiers 0.4 and 0.1.14 on plain chat, the better of the two, as the issue gives them."""


class NoopPolicy:
    """Answers within the call."""

    completion = Completion(tuple(range(100, 100 + TOKENS)), (-0.75,) * TOKENS, ((1, TOKENS),), "length")

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str, priority: int = 0
    ) -> Completion:
        return self.completion

    async def close(self) -> None:
        return None


def noop_context(config: RolloutConfig) -> RunContext:
    renderer = make_renderer(config.policy.model, config.policy.tool_format)
    policy: Policy = NoopPolicy()
    return RunContext(config, NoopTasks(TURNS), renderer, policy, SamplingParams())


async def _run(
    url: str, run: str, config: RolloutConfig, make: Callable[[RolloutConfig], RunContext], *, episodes: int, at_once: int
) -> tuple[float, float, float]:
    """Turns a second, turns a CPU-second, and the process's memory in MiB at the end."""
    store = ValkeyStore(url)
    try:
        await store.put_run(run, config.model_dump(mode="json"))
        orders = [
            Episode(run=run, id=f"{run}-{i}", task_set="noop", split="train", task_index=i, group=i, member=0, seed=i)
            for i in range(episodes)
        ]
        await store.submit(orders)
        async with EpisodeWorker(store, make_context=make) as worker:
            await worker.episode(run, orders[0].id)
            gate = asyncio.Semaphore(at_once)

            async def one(order: Episode) -> None:
                async with gate:
                    await worker.episode(run, order.id)

            wall, cpu = time.perf_counter(), time.process_time()
            async with asyncio.TaskGroup() as group:
                for order in orders[1:]:
                    group.create_task(one(order))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    finally:
        await store.close()
    turns = (episodes - 1) * TURNS
    return turns / wall, turns / cpu, psutil.Process().memory_info().rss / 2**20


async def _bench(folder: Path) -> list[Row]:
    rows: list[Row] = []
    config = RolloutConfig.model_validate({"tasks": {"set": "benchmarks.noop_tasks:load", "options": {"turns": TURNS}}})
    async with embedded_server(folder) as server:
        url = server.url
        before = psutil.Process().memory_info().rss / 2**20
        rate, _, memory = await _run(url, "noop", config, noop_context, episodes=4001, at_once=2000)
        what = "driver: turns a second of one process, no-op policy and environment, 2000 episodes at once"
        rows.append(Row(name=what, value=rate, unit="turns/s", target="at least 1,500"))
        what = "driver: memory with 2000 episodes at once"
        rows.append(Row(name=what, value=memory, unit="MiB", target="at most 1,024", baseline=before, against="before them"))
        stub = subprocess.Popen(  # noqa: ASYNC220 (before anything runs)
            [sys.executable, "-m", "benchmarks.policy_stub"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert stub.stdout is not None
            policy = config.policy.model_copy(update={"url": stub.stdout.readline().strip()})
            served = config.model_copy(update={"policy": policy})
            for at_once in (200, 1000):
                _, per_cpu, _ = await _run(
                    url, f"http-{at_once}", served, make_context, episodes=2 * at_once + 1, at_once=at_once
                )
                rows.append(
                    Row(
                        name=f"driver: turns a CPU-second over HTTP, {at_once} episodes at once",
                        value=per_cpu,
                        unit="turns/CPU-s",
                        target="at least 800",
                        baseline=VERIFIERS[at_once],
                        against="verifiers, as published",
                    )
                )
        finally:
            stub.communicate(timeout=10)
    return rows


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_results("driver", uvloop.run(_bench(Path(folder))))


if __name__ == "__main__":
    main()
