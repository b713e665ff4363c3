"""One pass over fixed tasks of a split: dispatched like training, scored apart from it.

Guarantees: an evaluation is a run of its own in the store, `RUN.eval.LABEL`, so that its records never meet the learner's; its
tasks, seeds and ids depend on nothing but its arguments; what has not ended by its deadline is cancelled and counted as failed.
"""

from __future__ import annotations

import asyncio

from learner.archive import EpisodeArchive
from learner.config import EvalSection
from learner.farm import Farm
from learner.groups import make_group
from learner.scores import Evaluation
from rollout.store import RecordStream
from rollout.stream import Dedup
from rollout.trajectory import EpisodeEnd
from rollout.valkey_store import ValkeyStream
from tasks.base import Split, TaskSet

JANITOR_S = 2.0
CANCEL_WAIT_S = 30.0


async def run_evaluation(
    farm: Farm, tasks: TaskSet, settings: EvalSection, *, label: str, split: Split, seed: int, version: int
) -> Evaluation:
    """Play `settings.size` tasks once each; trajectories go to `episodes/eval-LABEL-000000.parquet` in the run's folder."""
    run = f"{farm.folder.key}.eval.{label}"
    config = farm.published
    if settings.temperature is not None:
        sampling = config.sampling.model_copy(update={"temperature": settings.temperature})
        config = config.model_copy(update={"sampling": sampling})
    episodes = [
        make_group(run, config, tasks, split, i, group=i, size=1, seed=seed, version=version, purpose="eval")[0]
        for i in range(settings.size)
    ]
    families = {episode.id: _family(tasks, split, episode.task_index) for episode in episodes}
    evaluation = Evaluation(families)
    archive = EpisodeArchive(farm.folder.episodes, f"eval-{label}", farm.config.policy.model)
    await farm.publish(run, config)
    await farm.dispatcher.submit(episodes)
    archive.dispatch(episodes)
    stream = ValkeyStream(farm.broker_url, run, "learner")
    try:
        await _collect(farm, run, stream, evaluation, archive, timeout_s=settings.timeout_s)
    finally:
        await stream.close()
    await asyncio.to_thread(archive.flush)
    return evaluation


def _family(tasks: TaskSet, split: Split, index: int) -> str:
    """Empty for a task that cannot be made, which its worker will say."""
    try:
        return tasks.task(split, index).family
    except Exception:
        return ""


async def _collect(
    farm: Farm, run: str, stream: RecordStream, evaluation: Evaluation, archive: EpisodeArchive, *, timeout_s: float
) -> None:
    dedup = Dedup()
    janitor = asyncio.create_task(_janitor(farm, run))
    try:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        cancelled = False
        while not evaluation.complete:
            if janitor.done():
                janitor.result()
            if loop.time() > deadline:
                if cancelled:
                    break
                cancelled = True
                deadline = loop.time() + CANCEL_WAIT_S
                await farm.store.cancel(run, sorted(evaluation.missing), "the evaluation's time (eval.timeout_s) was over")
            for delivery in await stream.read(max_records=1000, wait_s=0.5):
                if dedup.accept(delivery.record):
                    archive.add(delivery.record)
                    if isinstance(delivery.record, EpisodeEnd):
                        evaluation.add(delivery.record)
    finally:
        janitor.cancel()
        await asyncio.wait([janitor])


async def _janitor(farm: Farm, run: str) -> None:
    while True:
        await asyncio.sleep(JANITOR_S)
        await farm.dispatcher.janitor(run)
