"""A whole training run: checks, farm, evaluations at both ends, the loop between them, and what is left on disk.

Guarantees:

* Nothing is started before every check has passed.
* Ctrl-C (or SIGTERM) ends the step under way, writes a checkpoint and leaves in order; a second one leaves at once, and the
  children are ended by the kernel. Both leave a run that `farmhand train --resume` goes on with.
* However the run ends, `summary.json` and `ledger.json` say how.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from learner.checkpoint import Checkpoint, load_checkpoint
from learner.config import TrainConfig
from learner.console import Display, Status
from learner.errors import leaves
from learner.evaluation import run_evaluation
from learner.farm import Farm, open_farm
from learner.loop import TrainingLoop
from learner.metrics import MetricsLog, read_rows
from learner.plots import draw
from learner.preflight import check
from learner.publish import Publisher
from learner.report import render_ledger
from learner.run import RunFolder, replace_json
from learner.summary import IdleShares, LagFigures, LedgerCounts, Summary
from learner.trainer import Trainer
from rollout.models import resolve_model
from rollout.valkey_store import ValkeyStream
from tasks.base import TaskSet

HARD_EXIT = 130


@dataclass(frozen=True, slots=True)
class Outcome:
    finished: bool
    folder: RunFolder


async def train(config: TrainConfig, folder: RunFolder | None, *, source: str, resume: bool) -> Outcome:
    """Run to the end, or until told to stop. Raises the errors that `learner.errors` explains."""
    tasks = await check(config, source)
    if folder is None:
        folder = RunFolder.create(config, Path(source))
    with folder.lock():
        run = _Run(config, folder, tasks, resume)
        with run.signals():
            return await run.go()


class _Run:
    def __init__(self, config: TrainConfig, folder: RunFolder, tasks: TaskSet, resume: bool) -> None:
        self._config = config
        self._folder = folder
        self._tasks = tasks
        self._resume = resume
        self._stop = asyncio.Event()
        self._started = False
        """There is something to save, so that a stop must wait for it."""
        self._loop: TrainingLoop | None = None
        status = Status(run=folder.name, steps=config.run.steps, time_limit_s=config.run.time_limit_s)
        self._display = Display(status)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM stop the run; the second one does not wait."""
        loop = asyncio.get_running_loop()

        task = asyncio.current_task()
        assert task is not None

        def heed() -> None:
            if self._stop.is_set():
                self._display.hide()
                os._exit(HARD_EXIT)
            self._stop.set()
            if self._started:
                self._display.say("stopping after this step; once more to leave at once")
            else:
                self._display.say("stopping; once more to leave at once")
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, heed)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def go(self) -> Outcome:
        checkpoint = load_checkpoint(self._folder.checkpoints, self._config.checkpoint.allow_previous)
        if checkpoint is not None and json.loads(checkpoint.parts["progress"])["finished"]:
            self._display.say(f"run {self._folder.path} has finished already; see farmhand report {self._folder.path}")
            return Outcome(True, self._folder)
        self._display.say(f"run {self._folder.path}" + (f", going on at step {checkpoint.step}" if checkpoint else ""))
        outcome = "failed"
        try:
            async with AsyncExitStack() as stack:
                await self._run(stack, checkpoint)
            assert self._loop is not None
            outcome = "finished" if self._loop.progress.finished else "interrupted"
        except asyncio.CancelledError:
            outcome = "interrupted"
            if not self._stop.is_set():
                raise
        except BaseException as error:
            outcome = f"failed: {', '.join(sorted({type(leaf).__name__ for leaf in leaves(error)}))}"
            raise
        finally:
            summary = self._conclude(outcome)
            if outcome != "finished":
                self._display.say(f"go on with: farmhand train --resume {self._folder.path}")
        if summary is not None:
            self._tell(summary)
        return Outcome(outcome == "finished", self._folder)

    async def _run(self, stack: AsyncExitStack, checkpoint: Checkpoint | None) -> None:
        config, folder = self._config, self._folder
        executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="trainer"))
        stack.enter_context(self._display.shown())
        # The model is read while the farm starts.
        made = asyncio.get_running_loop().run_in_executor(executor, self._make_trainer, checkpoint)
        farm = await stack.enter_async_context(open_farm(config, folder, fresh=not self._resume))
        trainer = await made
        publisher = Publisher(config.publish, folder.path, [farm.admin], dtype=config.engine.dtype)
        stack.callback(publisher.close)
        stream = ValkeyStream(farm.broker_url, folder.key, "learner")
        stack.push_async_callback(stream.close)
        resumed = (0 if checkpoint is None else checkpoint.step) if self._resume else None
        log = MetricsLog(folder.metrics, folder.tensorboard, resume_step=resumed)
        stack.callback(log.close)
        self._loop = TrainingLoop(
            config=config,
            folder=folder,
            farm=farm,
            tasks=self._tasks,
            trainer=trainer,
            publisher=publisher,
            stream=stream,
            display=self._display,
            log=log,
            executor=executor,
            stop=self._stop,
        )
        if checkpoint is not None:
            self._loop.load(checkpoint)
        await self._phases(farm, self._loop, trainer, publisher, log)

    def _make_trainer(self, checkpoint: Checkpoint | None) -> Trainer:
        trainer = Trainer(
            resolve_model(self._config.policy.model),
            optimizer=self._config.optimizer,
            objective=self._config.objective,
            micro_batch_tokens=self._config.batch.micro_batch_tokens,
            temperature=self._config.sampling.temperature,
            seed=self._config.run.seed,
        )
        if checkpoint is not None:
            trainer.load(checkpoint.trainer_folder)
        return trainer

    async def _phases(self, farm: Farm, loop: TrainingLoop, trainer: Trainer, publisher: Publisher, log: MetricsLog) -> None:
        progress, settings = loop.progress, self._config.eval
        # In this order: no episode begins under a policy that it should not have.
        await farm.publish(self._folder.key, farm.published)
        await publisher.catch_up(trainer, progress.step)
        await farm.open_policy()

        async def catch_up() -> None:
            await publisher.catch_up(trainer, progress.step)

        farm.on_policy_restart = catch_up
        await farm.start_workers()
        self._started = True

        async def evaluate(label: str) -> float | None:
            return await self._evaluate(farm, log, label, progress.step)

        if settings.size and settings.at_start and progress.step == 0 and progress.score_start is None:
            progress.score_start = await evaluate("start")
            if not self._stop.is_set():
                await loop.save()
        await loop.run(evaluate)
        if loop.reached_end and not progress.finished and not self._stop.is_set():
            # What is still under way has no step to go into: it stays in the ledger as unfinished.
            await farm.store.cancel(self._folder.key, loop.ledger.unfinished, "the run has ended")
            if settings.size and settings.at_end:
                # What is scored must be what a resumed run would score.
                await loop.save()
                progress.score_end = await evaluate("end")
            progress.finished = not self._stop.is_set()
            if progress.finished:
                await asyncio.get_running_loop().run_in_executor(None, trainer.export, self._folder.path / "model")
        self._display.status.phase = "saving"
        await loop.save(final=progress.finished)

    async def _evaluate(self, farm: Farm, log: MetricsLog, label: str, step: int) -> float | None:
        """The mean reward on the test split; None if it was interrupted or nothing could be scored."""
        status = self._display.status
        status.phase, before = f"evaluation ({label})", status.phase
        self._display.say(f"evaluating on {self._config.eval.size} test tasks ({label})")
        seed = self._config.run.seed
        work = asyncio.create_task(
            run_evaluation(farm, self._tasks, self._config.eval, label=label, split="test", seed=seed, version=step)
        )
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return None
            evaluation = work.result()
        finally:
            for task in (work, stopped):
                task.cancel()
            await asyncio.wait({work, stopped})
            status.phase = before
        row = evaluation.row()
        log.write("eval", step, {"label": label, **row})
        status.reward_test = evaluation.tally().mean
        self._display.say(
            f"score on test: {row['score'] if row['score'] is None else round(row['score'], 3)}"
            f" ({row['scored']} scored, {row['failed']} failed)"
        )
        return status.reward_test

    def _conclude(self, outcome: str) -> Summary | None:
        """Write what came of the run, as far as the loop got; None if it never began."""
        loop = self._loop
        if loop is None:
            return None
        progress = loop.progress
        lag = loop.ledger.lag.summary()
        summary = Summary(
            run=self._folder.name,
            outcome=outcome,
            score_start=progress.score_start,
            score_end=progress.score_end,
            train_seconds=round(progress.seconds, 3),
            steps=progress.step,
            weight_pushes=progress.pushes,
            token_lag=LagFigures(mean=lag["mean"], p95=int(lag["p95"]), max=int(lag["max"])),
            idle=IdleShares(learner=loop.learner_idle, policy=loop.policy_idle),
            ledger=LedgerCounts(**loop.ledger.counts()),
        )
        summary.write(self._folder.summary)
        replace_json(self._folder.ledger, loop.ledger.state())
        return summary

    def _tell(self, summary: Summary) -> None:
        """After everything has ended: the table, the ledger, and where the rest lies."""
        loop = self._loop
        assert loop is not None
        show = self._display.console.print
        show(summary.table())
        show(render_ledger(loop.ledger.state()))
        pictures = draw(read_rows(self._folder.metrics), self._folder.path)
        if pictures:
            show(f"pictures: {', '.join(str(path) for path in pictures)}")
        if loop.progress.finished:
            show(f"the trained model is in {self._folder.path / 'model'}; score it with farmhand eval --model")
