"""The processes around a trainer: broker, policy server and workers, started where the config does not name others.

Guarantees:

* Everything that is started here is watched, restarted within a budget, and ends with the block, however that is left.
* The policy server keeps its port across its restarts, and is brought back to the newest weights before it counts as restarted.
* After the block no sandbox of the run is left on this host.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from learner.config import TrainConfig
from learner.run import RunFolder
from learner.supervise import ChildSpec, Supervisor
from rollout.cli import worker_command
from rollout.config import RolloutConfig
from rollout.dispatch import CelerySender, Dispatcher
from rollout.policy.base import PolicyUnavailable
from rollout.policy.client import VllmAdmin
from rollout.store import EpisodeStore
from rollout.valkey_server import embedded_command, ready
from rollout.valkey_store import ValkeyStore
from sandbox.base import SandboxInfo
from sandbox.registry import get_backend

POLICY_READY_S = 180.0
POLICY_ANSWER_S = 15.0
REAP_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Farm:
    config: TrainConfig
    folder: RunFolder
    broker_url: str
    policy_url: str
    store: EpisodeStore
    admin: VllmAdmin
    dispatcher: Dispatcher
    supervisor: Supervisor
    on_policy_restart: Callable[[], Awaitable[None]] | None = None
    """Set by whoever can bring a restarted policy server to the newest weights."""
    on_worker_restart: Callable[[], Awaitable[None]] | None = None
    """Set by whoever knows which episodes a worker may have taken along."""
    workers_started: bool = False
    published: RolloutConfig = field(init=False)

    def __post_init__(self) -> None:
        rollout = self.config.rollout()
        policy = rollout.policy.model_copy(update={"url": self.policy_url})
        self.published = rollout.model_copy(update={"policy": policy})

    async def open_policy(self) -> None:
        """Let the policy server, which starts paused, serve: it has the weights that it is to have.

        Raises `PolicyUnavailable` if one that was started elsewhere does not answer.
        """
        if self.config.policy.url is None:
            await self.admin.resume()
            return
        wait = min(POLICY_ANSWER_S, self.config.policy.retry_s)
        try:
            async with asyncio.timeout(wait):
                while not await self.admin.health():  # noqa: ASYNC110 (another process)
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise PolicyUnavailable(
                f"no policy server answered at {self.policy_url} within {wait:g} s: check that it runs and that policy.url is right"
            ) from None

    async def start_workers(self) -> None:
        """Does nothing if they run already.

        On resume, not before the run is published: what is left in the queue of an earlier start begins at once.
        """
        if self.workers_started:
            return
        self.workers_started = True
        async with asyncio.TaskGroup() as starts:
            for number in range(1, self.config.farm.workers + 1):
                starts.create_task(self.supervisor.start(_worker(self, number)))

    async def publish(self, run: str, config: RolloutConfig) -> None:
        """Let workers know how the episodes of `run` are to be driven."""
        await self.store.put_run(run, config.model_dump(mode="json"))


@asynccontextmanager
async def open_farm(config: TrainConfig, folder: RunFolder, *, fresh: bool) -> AsyncIterator[Farm]:
    """Broker and policy server are ready when the block begins, which starts the workers; those of a `fresh` run, whose
    queue is empty, start beside them.

    Raises `ChildFailed` (in a group) for a child that does not get there.
    """
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_remove_sandboxes, folder.key)
        supervisor = await stack.enter_async_context(Supervisor(folder.logs))
        broker_url = config.broker.url or await _start_broker(supervisor, folder)
        policy_url = config.policy.url or f"http://127.0.0.1:{_port(folder)}"
        key_name = config.policy.api_key_env
        admin = VllmAdmin(
            policy_url,
            model=config.policy.model,
            api_key=os.environ.get(key_name) if key_name else None,
            retry_s=config.policy.retry_s,
            timeout_s=config.publish.timeout_s,
        )
        stack.push_async_callback(admin.close)
        store = ValkeyStore(broker_url)
        stack.push_async_callback(store.close)
        sender = CelerySender(broker_url)
        stack.callback(sender.close)
        farm = Farm(config, folder, broker_url, policy_url, store, admin, Dispatcher(store, sender), supervisor)
        if fresh:
            await farm.start_workers()
        if config.policy.url is None:
            await supervisor.start(_policy(farm))
        yield farm


async def _start_broker(supervisor: Supervisor, folder: RunFolder) -> str:
    folder.broker.mkdir(parents=True, exist_ok=True)
    command, url = embedded_command(folder.broker)

    async def is_ready() -> bool:
        return await ready(url)

    await supervisor.start(ChildSpec(name="broker", command=command, ready=is_ready, grace_s=20.0))
    return url


def _policy(farm: Farm) -> ChildSpec:
    engine, limits = farm.config.engine, farm.config.limits
    command = [
        *(sys.executable, "-m", "learner", "policy", "serve", farm.config.policy.model),
        *("--port", farm.policy_url.rpartition(":")[2], "--paused"),
        *("--max-num-seqs", str(engine.max_num_seqs), "--dtype", engine.dtype, "--threads", str(engine.threads)),
    ]
    longest = engine.max_model_len or limits.max_tokens
    if longest is not None:
        command += ["--max-model-len", str(longest)]

    async def restarted() -> None:
        if farm.on_policy_restart is not None:
            await farm.on_policy_restart()
        await farm.open_policy()

    return ChildSpec(
        name="policy", command=command, ready=farm.admin.health, ready_timeout_s=POLICY_READY_S, on_restart=restarted
    )


def _worker(farm: Farm, number: int) -> ChildSpec:
    command = worker_command(
        concurrency=farm.config.farm.concurrency, kinds=(_kind(farm.config),), name=f"{farm.folder.name}-{number}"
    )
    # Torch and its kin would otherwise each start threads for every core in every worker.
    env = {"FARMHAND_BROKER": farm.broker_url, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

    async def restarted() -> None:
        if farm.on_worker_restart is not None:
            await farm.on_worker_restart()

    name = f"worker-{number}"
    return ChildSpec(name=name, command=command, env=env, restarts=20, grace_s=30.0, on_restart=restarted)


def _kind(config: TrainConfig) -> str:
    return str(config.sandbox.get("kind", "local"))


def _port(folder: RunFolder) -> int:
    """The policy server's port: that of the run's earlier start if it is free, for workers may still be told of it."""
    note = folder.path / ".policy-port"
    wanted = int(note.read_text()) if note.exists() else 0
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    note.write_text(f"{port}\n")
    return port


async def _remove_sandboxes(run: str) -> None:
    """Those of the run and of its evaluations, on this host."""
    backend = get_backend("local")

    async def keep(info: SandboxInfo) -> bool:
        label = info.labels.get("run", "")
        return label != run and not label.startswith(f"{run}.eval")

    try:
        async with asyncio.timeout(REAP_TIMEOUT_S):
            await backend.reap(keep)
    finally:
        await backend.close()
