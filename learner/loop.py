"""The training loop: dispatches groups, follows the stream, takes steps, pushes weights, and writes it all down.

Guarantees:

* Dispatching, reading and stepping go on at the same time; they meet in the buffer, which is pure, and in two events.
* The records of a step are acknowledged only once a checkpoint holds them. Whatever dies in between, a resumed run reads them
  again, and writes again the orders that it had not yet saved.
* Every push is verified before the next group is dispatched under its version.
* With `async.max_staleness = 0` the rewards depend on the seed alone.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import msgpack

from learner.archive import EpisodeArchive
from learner.batch import Batch, save_batch
from learner.buffer import TrajectoryBuffer
from learner.checkpoint import Checkpoint, save_checkpoint
from learner.config import TrainConfig
from learner.console import Display
from learner.failures import FailureBudget
from learner.farm import Farm
from learner.groups import GroupPlan
from learner.ledger import Ledger
from learner.metrics import BusyShare, MetricsLog, Rate, Stopwatch
from learner.publish import Publisher, PushReport
from learner.run import RunError, RunFolder, replace_json
from learner.trainer import StepResult, Trainer
from rollout.admission import Admission
from rollout.policy.base import PolicyError
from rollout.store import RecordStream
from rollout.stream import Dedup
from rollout.trajectory import EpisodeEnd
from tasks.base import TaskSet

T = TypeVar("T")
Evaluate = Callable[[str], Awaitable[object]]

JANITOR_S = 2.0
MONITOR_S = 0.5
READ_WAIT_S = 1.0
READ_RECORDS = 2000
ARCHIVE_ROWS = 500
"""Ended episodes of one file of the archive, at least."""


@dataclass(slots=True)
class Progress:
    """What a resumed run must know beside its parts."""

    step: int = 0
    pushes: int = 0
    seconds: float = 0.0
    learner_busy_s: float = 0.0
    policy_busy_s: float = 0.0
    policy_seconds: float = 0.0
    bad_steps: int = 0
    """In a row."""
    finished: bool = False
    score_start: float | None = None
    score_end: float | None = None
    failures: dict[str, int] = field(default_factory=dict)
    """By kind."""
    ended: list[str] = field(default_factory=list)


class TrainingLoop:
    """`await run()` until the steps or the time are over, or `stop` is set. `evaluate` is called every `eval.every` steps."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        folder: RunFolder,
        farm: Farm,
        tasks: TaskSet,
        trainer: Trainer,
        publisher: Publisher,
        stream: RecordStream,
        display: Display,
        log: MetricsLog,
        executor: ThreadPoolExecutor,
        stop: asyncio.Event,
    ) -> None:
        self._config = config
        self._folder = folder
        self._farm = farm
        self._trainer = trainer
        self._publisher = publisher
        self._stream = stream
        self._display = display
        self._log = log
        self._executor = executor
        self._stop = stop
        self.progress = Progress()
        self.ledger = Ledger()
        self._admission = Admission(
            batch=config.batch.groups_per_step,
            max_staleness=config.async_.max_staleness,
            window=config.async_.window,
            head_timeout_s=config.async_.head_timeout_s,
            max_token_lag=config.async_.max_token_lag,
            steps=config.run.steps,
        )
        self._buffer = TrajectoryBuffer(
            config.batch, self._admission, self.ledger, max_tokens=min(config.batch.micro_batch_tokens, trainer.positions)
        )
        self._plan = GroupPlan(folder.key, config.rollout(), tasks, config.batch.group_size, config.run.seed)
        self._dedup = Dedup()
        self._archive = EpisodeArchive(folder.episodes, "train", config.policy.model)
        self._began = time.time()
        """Failures from before it have stopped a run once already."""
        self._budget = FailureBudget(config.run.max_failed_share, config.run.failure_window)
        self._unacked: list[str] = []
        self._ended: set[str] = set()
        """Episodes that have ended, as long as `Dedup` keeps something of them."""
        self._room = asyncio.Event()
        """Admission may have capacity."""
        self._news = asyncio.Event()
        """The buffer may have a batch."""
        self._watch = Stopwatch()
        self._policy = BusyShare()
        self._tokens_in, self._tokens_out = Rate(), Rate()

    # Checkpoints

    def load(self, checkpoint: Checkpoint) -> None:
        """Take up where a checkpoint was written. Before `run`."""
        parts = checkpoint.parts
        self.progress = Progress(**json.loads(parts["progress"]))
        self._admission.load_state(json.loads(parts["admission"]))
        self.ledger.load_state(json.loads(parts["ledger"]))
        self._buffer.load_state(msgpack.unpackb(parts["buffer"]))
        self._dedup.load_state(msgpack.unpackb(parts["dedup"]))
        self._archive.load_state(msgpack.unpackb(parts["archive"]))
        self._archive.discard_later()
        self._budget.kinds.update(self.progress.failures)
        self._ended = set(self.progress.ended)
        self._policy.busy, self._policy.elapsed = self.progress.policy_busy_s, self.progress.policy_seconds

    async def save(self, *, final: bool = False) -> None:
        """Write a checkpoint, then acknowledge what it holds. `final`: no more episodes are expected."""
        await asyncio.to_thread(self._archive.flush, at_least=1 if final else ARCHIVE_ROWS)
        self.progress.failures = dict(self._budget.kinds)
        self.progress.ended = sorted(self._ended)
        acked, self._unacked = self._unacked, []
        parts = {
            "progress": json.dumps(asdict(self.progress)).encode(),
            "admission": json.dumps(self._admission.state()).encode(),
            "ledger": json.dumps(self.ledger.state()).encode(),
            "buffer": msgpack.packb(self._buffer.state()),
            "dedup": msgpack.packb(self._dedup.state()),
            "archive": msgpack.packb(self._archive.state()),
        }
        keep = self._config.checkpoint.keep
        await self._in_thread(
            lambda: save_checkpoint(self._folder.checkpoints, self.progress.step, parts, self._trainer.save, keep)
        )
        await self._stream.ack(acked)

    def _clock_in(self) -> None:
        self.progress.seconds = self._watch.elapsed
        self.progress.learner_busy_s = self._watch.spent
        self.progress.policy_busy_s, self.progress.policy_seconds = self._policy.busy, self._policy.elapsed

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """In the trainer's own thread: torch keeps its settings by thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    # The run

    async def run(self, evaluate: Evaluate) -> None:
        self._watch = Stopwatch(elapsed=self.progress.seconds, spent=self.progress.learner_busy_s)
        status = self._display.status
        status.phase = "training"
        # Orders that a checkpoint holds may never have reached the store.
        await self._offer_again()
        self._farm.on_worker_restart = self._offer_again
        async with asyncio.TaskGroup() as group:
            helpers = [
                group.create_task(work)
                for work in (self._dispatch(), self._read(), self._sweep(), self._monitor(), self._heed_stop())
            ]
            while self._goes_on():
                await self._next(evaluate)
            for helper in helpers:
                helper.cancel()
        self._clock_in()

    async def _offer_again(self) -> None:
        """Send every open episode's message once more: a worker that died has taken some along."""
        if open_episodes := list(self._buffer.open_episodes()):
            await self._farm.dispatcher.submit(open_episodes)

    def _goes_on(self) -> bool:
        run = self._config.run
        if self._stop.is_set() or (run.steps is not None and self.progress.step >= run.steps):
            return False
        return run.time_limit_s is None or self._watch.elapsed < run.time_limit_s

    @property
    def reached_end(self) -> bool:
        """The steps or the time are over, so that the run has not only been stopped."""
        run = self._config.run
        if run.steps is not None and self.progress.step >= run.steps:
            return True
        return run.time_limit_s is not None and self._watch.elapsed >= run.time_limit_s

    async def _next(self, evaluate: Evaluate) -> None:
        """One step, or a wait for what may allow one."""
        self._news.clear()
        batch = self._buffer.take()
        # A batch that was dropped as stale has made room, whether or not there is one to train on.
        self._room.set()
        if batch is None:
            await self._wait_for_news()
            return
        with self._watch.running():
            await self._step(batch)
        every = self._config.eval.every
        if every and self.progress.step % every == 0 and self._goes_on():
            # What is scored under this label must be what a resumed run would score.
            await self.save()
            await evaluate(f"step-{self.progress.step}")

    async def _wait_for_news(self) -> None:
        wait = READ_WAIT_S
        if self._config.run.time_limit_s is not None:
            wait = min(wait, max(0.01, self._config.run.time_limit_s - self._watch.elapsed))
        # A head that is passed over sends no record: the deadline is looked at once a second.
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self._news.wait()

    async def _step(self, batch: Batch) -> None:
        progress = self.progress
        version = self._admission.version
        result = await self._in_thread(lambda: self._trainer.step(batch))
        await self._judge(batch, result)
        lag = batch.lag(version)
        self._buffer.settle(batch, version=version, skipped=result.skipped)
        push = await self._publisher.publish(self._trainer, version + 1)
        progress.step += 1
        progress.pushes += 1
        self._admission.publish(version + 1)
        settled = self._ended.difference(self.ledger.unfinished)
        self._dedup.forget(sorted(settled))
        self._ended -= settled
        self._room.set()
        self._clock_in()
        # A row whose step no checkpoint holds is cut off again when the run is resumed.
        self._write_down(batch, result, push, lag)
        if progress.step % self._config.checkpoint.every == 0:
            await self.save()

    async def _judge(self, batch: Batch, result: StepResult) -> None:
        """Keep a batch that could not be trained on; stop after too many in a row."""
        if not result.skipped:
            self.progress.bad_steps = 0
            return
        self.progress.bad_steps += 1
        path = self._folder.path / "bad-batches" / f"step-{self.progress.step}.safetensors"
        await asyncio.to_thread(save_batch, batch, path)
        limit = self._config.optimizer.max_bad_steps
        if self.progress.bad_steps >= limit:
            raise RunError(
                f"{self.progress.bad_steps} steps in a row had a loss or gradient that is not finite"
                f" (optimizer.max_bad_steps = {limit}); the last batch is in {path}."
                " A smaller optimizer.learning_rate may help"
            )
        self._display.say(f"step {self.progress.step}: loss or gradient not finite, the step was skipped; batch in {path}")

    def _write_down(self, batch: Batch, result: StepResult, push: PushReport, lag: dict[int, int]) -> None:
        status = self._display.status
        total = sum(lag.values())
        reward = sum(batch.rewards) / len(batch.rewards) if batch.rewards else None
        status.step = self.progress.step
        if reward is not None:
            status.reward_train = reward
        status.lag_mean = sum(versions * n for versions, n in lag.items()) / total if total else 0.0
        status.lag_max = max(lag, default=0)
        self._refresh_status()
        row: dict[str, Any] = {
            "seconds": round(self._watch.elapsed, 3),
            "reward": reward,
            "episodes": len(batch.rewards),
            "trained": len(batch.trained),
            "dropped": batch.dropped,
            "lag_mean": status.lag_mean,
            "lag_max": status.lag_max,
            "lag_counts": {str(versions): n for versions, n in sorted(lag.items())},
            "trainer": result.metrics,
            "skipped": int(result.skipped),
            "push": {"seconds": push.seconds, "pause_seconds": push.pause_seconds, "difference": push.difference},
            "tokens_in_s": status.tokens_in_s,
            "tokens_out_s": status.tokens_out_s,
            "queue_depth": status.queue_depth,
            "idle": {"learner": status.idle_learner, "policy": status.idle_policy},
            "failures": dict(self._budget.kinds),
            "ledger": self.ledger.counts(),
            "admission": self._admission.metrics(),
        }
        self._log.write("step", self.progress.step, row)
        replace_json(self._folder.ledger, self.ledger.state())
        self._display.stepped()

    # What goes on beside the steps

    async def _dispatch(self) -> None:
        while True:
            self._room.clear()
            episodes = []
            while self._admission.capacity():
                # A task set is somebody's code: it may take its time, and must not hold up the rest.
                number = self._admission.submitted
                group = await asyncio.to_thread(self._plan.episodes, number, self._admission.version)
                # Nobody else admits; and without a wait in between, a checkpoint finds the group in both places or in none.
                self._admission.admit()
                self._buffer.dispatch(group)
                self._archive.dispatch(group)
                episodes += group
            if episodes:
                await self._farm.dispatcher.submit(episodes)
            await self._room.wait()

    async def _read(self) -> None:
        while True:
            deliveries = await self._stream.read(max_records=READ_RECORDS, wait_s=READ_WAIT_S)
            for delivery in deliveries:
                self._unacked.append(delivery.entry_id)
                if not self._dedup.accept(delivery.record):
                    continue
                self._archive.add(delivery.record)
                self._buffer.add(delivery.record)
                if isinstance(delivery.record, EpisodeEnd):
                    self._ended.add(delivery.record.episode_id)
                    if _ended_at(delivery.record) >= self._began:
                        self._budget.add(delivery.record)
            if deliveries:
                self._news.set()
                self._room.set()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(JANITOR_S)
            await self._farm.dispatcher.janitor(self._folder.key)

    async def _heed_stop(self) -> None:
        await self._stop.wait()
        self._display.status.phase = "stopping"
        self._news.set()

    async def _monitor(self) -> None:
        """Keep the display's figures of the farm fresh; a server that does not answer leaves them as they are."""
        last = (0, 0)
        while True:
            with suppress(PolicyError, TimeoutError):
                async with asyncio.timeout(5.0):
                    load = await self._farm.admin.load()
                counts = (load.prompt_tokens, load.generated_tokens)
                for rate, before, now in zip((self._tokens_in, self._tokens_out), last, counts, strict=True):
                    rate.add(now - before if now >= before else now)
                last = counts
                if load.busy_s is not None:
                    self._policy.read(load.busy_s)
            self._display.status.queue_depth = await self._stream.depth()
            self._refresh_status()
            await asyncio.sleep(MONITOR_S)

    def _refresh_status(self) -> None:
        status = self._display.status
        status.seconds = self._watch.elapsed
        status.tokens_in_s = self._tokens_in.per_second
        status.tokens_out_s = self._tokens_out.per_second
        status.open_episodes = len(self.ledger.unfinished)
        status.idle_learner = 1 - self._watch.share
        status.idle_policy = self.policy_idle
        status.failures = self._budget.kinds

    @property
    def learner_idle(self) -> float:
        seconds = self.progress.seconds
        return max(0.0, 1 - self.progress.learner_busy_s / seconds) if seconds else 0.0

    @property
    def policy_idle(self) -> float:
        return self._policy.idle


def _ended_at(end: EpisodeEnd) -> float:
    """Unix seconds by its worker's clock; now, if the store has ended it."""
    started = end.timing.get("started_at")
    return time.time() if started is None else started + end.timing.get("seconds", 0.0)
