"""The farm for real: Celery's own worker with the embedded Valkey, in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollout.celery import make_app
from rollout.cli import worker_command
from rollout.config import RolloutConfig
from rollout.dispatch import CelerySender, Dispatcher
from rollout.queues import queue_of
from rollout.trajectory import Episode, EpisodeEnd, Record, Segment
from rollout.valkey_server import EmbeddedServer, embedded_server
from rollout.valkey_store import ValkeyStore, ValkeyStream

ROOT = Path(__file__).parents[2]
RUN = "r"


class SlowPolicy(ThreadingHTTPServer):
    """Answers `/inference/v1/generate` with three tokens as long as `gate` is open; counts who waits."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = 0
        self.most = 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SlowPolicy

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        server = self.server
        with server.lock:
            server.waiting += 1
            server.most = max(server.most, server.waiting)
        server.gate.wait(60)
        with server.lock:
            server.waiting -= 1
        tokens = [100, 101, 102]
        choice = {
            "index": 0,
            "finish_reason": "length",
            "token_ids": tokens,
            "weight_versions": [{"version": "2", "start": 0, "end": 3}],
            "logprobs": {"content": [{"token_id": token, "logprob": -0.5} for token in tokens]},
        }
        body = json.dumps({"request_id": "x", "choices": [choice]}).encode()
        with contextlib.suppress(ConnectionError):
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def policy() -> Iterator[SlowPolicy]:
    server = SlowPolicy()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.gate.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


class Farm:
    def __init__(self, server: EmbeddedServer, policy: SlowPolicy, folder: Path) -> None:
        self.url = server.url
        self.policy = policy
        self.log = folder / "worker.log"
        self.store = ValkeyStore(self.url)
        self.stream = ValkeyStream(self.url, RUN)
        self.sender = CelerySender(self.url)
        self.dispatcher = Dispatcher(self.store, self.sender)
        self.workers: list[subprocess.Popen[bytes]] = []

    async def publish(self, *, ttl_s: float = 1.0, turns: int = 2) -> None:
        config = RolloutConfig.model_validate(
            {
                "policy": {"model": "quickstart", "url": self.policy.url},
                "tasks": {"set": "benchmarks.noop_tasks:load", "options": {"turns": turns}},
                "lease": {"ttl_s": ttl_s, "renew_s": ttl_s / 4},
            }
        )
        await self.store.put_run(RUN, config.model_dump(mode="json"))

    def work(self, concurrency: int = 8, command: list[str] | None = None) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command or worker_command(concurrency=concurrency, kinds=("local",), name=f"w{len(self.workers)}"),
                env={**os.environ, "FARMHAND_BROKER": self.url},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.workers.append(process)
        return process

    async def submit(self, count: int, first: int = 0) -> None:
        await self.dispatcher.submit([order(n) for n in range(first, first + count)])

    async def records(self, ends: int) -> list[Record]:
        """Everything up to that many ends."""
        found: list[Record] = []
        async with asyncio.timeout(60):
            while sum(isinstance(record, EpisodeEnd) for record in found) < ends:
                found += [delivery.record for delivery in await self.stream.read(max_records=1000, wait_s=1.0)]
        return found

    async def until_waiting(self, count: int) -> None:
        async with asyncio.timeout(60):
            while self.policy.waiting < count:  # noqa: ASYNC110 (counted in other threads)
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait(10)
        await self.stream.close()
        await self.store.close()
        self.sender.close()


def order(n: int) -> Episode:
    return Episode(run=RUN, id=f"e{n}", task_set="noop", split="train", task_index=n, group=n, member=0, seed=n)


@pytest.fixture
async def farm(tmp_path: Path, policy: SlowPolicy) -> AsyncIterator[Farm]:
    async with embedded_server(tmp_path / "broker") as server:
        made = Farm(server, policy, tmp_path)
        try:
            yield made
        finally:
            await made.close()


def ends(records: list[Record]) -> dict[str, EpisodeEnd]:
    return {record.episode_id: record for record in records if isinstance(record, EpisodeEnd)}


async def test_the_documented_celery_command_drives_episodes(farm: Farm) -> None:
    await farm.publish()
    await farm.submit(20)
    farm.work(command=[sys.executable, "-m", "celery", "-A", "rollout", "worker", "-Q", "episodes", "--concurrency", "8"])
    records = await farm.records(20)
    assert {end.status for end in ends(records).values()} == {"completed"}
    assert sum(isinstance(record, Segment) for record in records) == 40
    assert await farm.store.open_episodes(RUN) == []


async def test_concurrency_counts_episodes_of_one_process(farm: Farm) -> None:
    await farm.publish(ttl_s=20)
    farm.policy.gate.clear()
    farm.work(concurrency=12)
    await farm.submit(40)
    await farm.until_waiting(12)
    # A thirteenth would have been started by now: those that wait were all fetched from the same queue.
    assert farm.policy.waiting == 12
    farm.policy.gate.set()
    await farm.records(40)
    assert farm.policy.most == 12


async def test_a_stopped_worker_gives_its_episodes_back_at_once(farm: Farm) -> None:
    await farm.publish(ttl_s=1000)
    farm.policy.gate.clear()
    worker = farm.work()
    await farm.submit(8)
    await farm.until_waiting(8)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(30) == 0
    farm.policy.gate.set()
    farm.work()
    # No lease has to run out: a thousand seconds would be longer than this test.
    assert await farm.dispatcher.janitor(RUN) == 8
    found = ends(await farm.records(8))
    assert {end.attempt for end in found.values()} == {2}
    assert {end.status for end in found.values()} == {"completed"}


async def test_episodes_of_a_killed_worker_go_on_elsewhere(farm: Farm) -> None:
    await farm.publish(ttl_s=1)
    farm.policy.gate.clear()
    worker = farm.work()
    await farm.submit(8)
    await farm.until_waiting(8)
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait(10)
    farm.policy.gate.set()
    farm.work()
    offered = 0
    async with asyncio.timeout(30):
        while offered < 8:
            offered += await farm.dispatcher.janitor(RUN)
            await asyncio.sleep(0.05)
    found = ends(await farm.records(8))
    assert {(end.status, end.attempt) for end in found.values()} == {("completed", 2)}


async def test_a_cancelled_episode_frees_its_place(farm: Farm) -> None:
    await farm.publish(ttl_s=1)
    farm.policy.gate.clear()
    farm.work(concurrency=4)
    await farm.submit(4)
    await farm.until_waiting(4)
    await farm.store.cancel(RUN, [f"e{n}" for n in range(4)], "enough")
    found = ends(await farm.records(4))
    assert {end.failure.kind for end in found.values() if end.failure} == {"cancelled"}
    farm.policy.gate.set()
    await farm.submit(4, first=4)
    assert {end.status for end in ends(await farm.records(4)).values()} == {"completed"}


async def test_a_message_that_is_not_ours_is_logged_and_harms_nobody(farm: Farm) -> None:
    await farm.publish()
    app = make_app(farm.url)
    try:
        app.send_task("rollout.episode", args=["positional"], queue=queue_of("local"))
        app.send_task("rollout.episode", kwargs={"run": RUN}, queue=queue_of("local"))
        app.send_task("rollout.episode", kwargs={"run": "unknown", "episode_id": "x"}, queue=queue_of("local"))
        app.send_task("rollout.episode", kwargs={"run": RUN, "episode_id": "unknown"}, queue=queue_of("local"))
    finally:
        app.close()
    farm.work()
    await farm.submit(4)
    assert {end.status for end in ends(await farm.records(4)).values()} == {"completed"}
    assert "knows no run 'unknown'" in farm.log.read_text()


async def test_a_worker_without_the_task_set_fails_the_episode_and_says_why(farm: Farm) -> None:
    config = {"policy": {"url": farm.policy.url}, "tasks": {"set": "nowhere"}}
    await farm.store.put_run(RUN, RolloutConfig.model_validate(config).model_dump(mode="json"))
    farm.work()
    await farm.submit(1)
    (end,) = ends(await farm.records(1)).values()
    assert end.failure is not None
    assert end.failure.kind == "worker"
    assert "unknown task set 'nowhere'" in end.failure.message


def test_a_broker_that_never_answers_ends_the_worker_with_its_name(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "learner", "worker", "--broker", "nonsense://x"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode != 0
    assert "broker.url" in result.stderr
