"""`farmhand eval`: a task set against any policy, without training.

Guarantees: the same farm, driver and scoring as in training; failures are counted beside the score and never in it; the folder
gets `eval.json` and every trajectory as Parquet.
"""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table

from learner.config import TrainConfig, apply_overrides, check_form
from learner.evaluation import run_evaluation
from learner.farm import open_farm
from learner.preflight import check_rollout
from learner.run import RunError, RunFolder, replace_json
from learner.scores import Evaluation, wilson


class EvalOptions(BaseModel):
    """The command's options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    policy_url: str | None
    task_set: str
    split: Literal["train", "test"]
    count: int
    temperature: float
    top_p: float
    seed: int
    concurrency: int
    tool_format: str
    out: Path | None
    overrides: tuple[str, ...]


def config_of(options: EvalOptions) -> TrainConfig:
    """A configuration with a farm and no training."""
    data: dict[str, Any] = {
        "run": {"steps": 1, "seed": options.seed},
        "policy": {"model": options.model, "tool_format": options.tool_format},
        "tasks": {"set": options.task_set},
        "sampling": {"temperature": options.temperature, "top_p": options.top_p},
        "eval": {"size": options.count},
        "farm": {"concurrency": options.concurrency},
    }
    if options.policy_url is not None:
        data["policy"]["url"] = options.policy_url
    apply_overrides(data, options.overrides)
    return check_form(data, "farmhand eval")


async def evaluate(options: EvalOptions) -> Evaluation:
    """Play the tasks, print and save the result."""
    config = config_of(options)
    tasks = await check_rollout(config, "farmhand eval", splits={options.split: config.eval.size})
    path = (options.out or Path("runs") / f"eval-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    folder = RunFolder(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder {path}: {error.strerror}; see --out") from error
    if folder.summary.exists() or (path / "eval.json").exists():
        raise RunError(f"{path} holds a result already; name another folder with --out")
    console = Console(highlight=False, soft_wrap=True)
    # As Ctrl-C does: everything that was started here is ended.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with AsyncExitStack() as stack:
        stack.enter_context(folder.lock())
        farm = await stack.enter_async_context(open_farm(config, folder, fresh=True))
        await farm.open_policy()
        console.print(f"playing {config.eval.size} tasks of {config.tasks.set}/{options.split}")
        evaluation = await run_evaluation(
            farm, tasks, config.eval, label=options.split, split=options.split, seed=options.seed, version=0
        )
    replace_json(path / "eval.json", result(evaluation, options))
    console.print(table(evaluation))
    console.print(f"trajectories and figures: {path}")
    return evaluation


def result(evaluation: Evaluation, options: EvalOptions) -> dict[str, Any]:
    families = {
        family: {"scored": tally.scored, "passed": tally.passed, "score": tally.mean}
        for family, tally in evaluation.by_family().items()
    }
    return {
        **evaluation.row(),
        "failures": dict(evaluation.failures()),
        "families": families,
        "options": options.model_dump(mode="json"),
    }


def table(evaluation: Evaluation) -> Table:
    """Pass rate with its 95 % interval, by family and in all."""
    shown = Table("family", "tasks", "passed", "pass rate", "95 % interval", "mean reward")
    rows = [*evaluation.by_family().items(), ("all", evaluation.tally())]
    for number, (family, tally) in enumerate(rows):
        last = number == len(rows) - 1
        low, high = wilson(tally.passed, tally.scored)
        rate = "-" if tally.pass_rate is None else f"{100 * tally.pass_rate:.1f} %"
        mean = "-" if tally.mean is None else f"{tally.mean:.3f}"
        interval = f"{100 * low:.1f} to {100 * high:.1f} %"
        shown.add_row(
            family or "-", f"{tally.scored}", f"{tally.passed}", rate, interval, mean, style="bold" if last else None
        )
    for kind, count in sorted(evaluation.failures().items()):
        shown.add_row(f"failed: {kind}", f"{count}", style="red")
    return shown
