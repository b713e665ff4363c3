"""The learner's commands: `train`, `eval` and `report`. They read the options; the work is in the modules they call."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

STOPPED = 130
"""Exit code of what a signal has ended before its time."""
FOLDER = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("config", type=FILE, required=False)
@click.option("--resume", type=FOLDER, metavar="RUN", help="Go on with the run in this folder.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key, e.g. --set run.steps=5.")
@click.pass_context
def train(ctx: click.Context, config: Path | None, resume: Path | None, overrides: tuple[str, ...]) -> None:
    """Train a policy as the file CONFIG says, or go on with a run.

    Ctrl-C ends the run cleanly with a checkpoint; a second one ends it at once. Either can be resumed.
    """
    from learner.config import load_config
    from learner.run import RunFolder
    from learner.train import train as run_training

    if (config is None) == (resume is None):
        raise click.UsageError("name either a config file or --resume RUN")
    if resume is not None:
        if overrides:
            raise click.UsageError("a run goes on as it was configured: --set cannot be used with --resume")
        folder, settings = RunFolder.open(resume)
        outcome = asyncio.run(run_training(settings, folder, source=str(folder.config), resume=True))
    else:
        assert config is not None
        settings = load_config(config, overrides)
        outcome = asyncio.run(run_training(settings, None, source=str(config), resume=False))
    ctx.exit(0 if outcome.finished else STOPPED)


@click.command("eval")
@click.option(
    "--model", default="quickstart", show_default=True, help="Model folder or name; served here unless --policy-url."
)
@click.option("--policy-url", default=None, help="A running policy server to ask instead.")
@click.option("--tasks", "task_set", default="shell", show_default=True, help="Task set, or package.module:name.")
@click.option("--split", type=click.Choice(["train", "test"]), default="test", show_default=True)
@click.option("--count", default=200, show_default=True, type=click.IntRange(min=1), help="Tasks, the first of the split.")
@click.option("--temperature", default=1.0, show_default=True, type=click.FloatRange(min=0))
@click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(min=0, max=1, min_open=True))
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0))
@click.option("--concurrency", default=64, show_default=True, type=click.IntRange(min=1), help="Episodes at once.")
@click.option("--tool-format", type=click.Choice(["hermes", "qwen3"]), default="hermes", show_default=True)
@click.option(
    "--out", type=FOLDER, default=None, help="Folder for the result and the trajectories (default: runs/eval-TIME)."
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a config key, e.g. --set limits.max_turns=4."
)
def evaluate(**options: object) -> None:
    """Score a policy on a set of tasks, without training."""
    from learner.evaluate import EvalOptions
    from learner.evaluate import evaluate as run_evaluation

    try:
        evaluation = asyncio.run(run_evaluation(EvalOptions.model_validate(options)))
    except (asyncio.CancelledError, KeyboardInterrupt):
        click.echo("farmhand: the evaluation was stopped before its end, and has no result", err=True)
        sys.exit(STOPPED)
    if not evaluation.tally().scored:
        raise click.ClickException("no episode could be scored; the table above says why, the trajectories say more")


@click.command()
@click.argument("run", type=FOLDER)
def report(run: Path) -> None:
    """Print a run's ledger, with reasons, and the histogram of token lag. Works during a run and after it."""
    from rich.console import Console

    from learner.report import render
    from learner.run import RunFolder

    folder, _ = RunFolder.open(run)
    Console(soft_wrap=True).print(render(folder))
