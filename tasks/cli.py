"""`farmhand tasks`: which task sets there are, and what is in one. `validate` is in `envs/cli.py`: it needs environments."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click
from rich.console import Console
from rich.table import Table

from tasks.base import Split, Task, TaskSet
from tasks.registry import TaskSetError, known_task_sets, load_task_set

F = TypeVar("F", bound=Callable[..., Any])

SPLITS: tuple[Split, ...] = get_args(Split)

SAMPLE = 500
"""Tasks of a split that are looked at to tell its families."""


def load_or_explain(name: str) -> TaskSet:
    try:
        return load_task_set(name)
    except TaskSetError as error:
        raise click.ClickException(str(error)) from error


def split_option(default: Split) -> Callable[[F], F]:
    return click.option("--split", type=click.Choice(SPLITS), default=default, show_default=True)


@click.group(name="tasks")
def cli() -> None:
    """List, show and validate tasks."""


@cli.command(name="list")
@click.argument("name", metavar="SET", required=False)
def list_sets(name: str | None) -> None:
    """List the installed task sets, or the sizes and families of SET."""
    console = Console()
    if name is None:
        table = Table("set", *SPLITS)
        for known in known_task_sets():
            task_set = load_or_explain(known)
            table.add_row(known, *(f"{task_set.size(split):,}" for split in SPLITS))
        console.print(table)
        return
    task_set = load_or_explain(name)
    counts = {split: _families(task_set, split) for split in SPLITS}
    table = Table("family", *(f"{split}: share of {task_set.size(split):,}" for split in SPLITS))
    for family in dict.fromkeys(key for split in SPLITS for key in counts[split]):
        shares = (counts[split][family] / max(1, counts[split].total()) for split in SPLITS)
        table.add_row(family or "(none)", *(f"{share:.1%}" for share in shares))
    console.print(table)
    if any(task_set.size(split) > SAMPLE for split in SPLITS):
        console.print(f"Shares are those of the first {SAMPLE} tasks of a split.")


def _families(task_set: TaskSet, split: Split) -> Counter[str]:
    size = min(SAMPLE, task_set.size(split))
    return Counter(task_set.task(split, index).family for index in range(size))


@cli.command()
@click.argument("name", metavar="SET")
@split_option("train")
@click.option("--index", type=click.IntRange(0), default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The whole task as one JSON object.")
def show(name: str, split: Split, index: int, as_json: bool) -> None:
    """Show one task of SET: what the agent is told, and how it is set up, judged and solved."""
    task_set = load_or_explain(name)
    try:
        task = task_set.task(split, index)
    except IndexError as error:
        raise click.ClickException(str(error)) from error
    click.echo(task.model_dump_json(indent=2) if as_json else _readable(task))


def _readable(task: Task) -> str:
    limits = ", ".join(f"{key}={value:g}" for key, value in task.limits.model_dump().items())
    parts = [
        f"id           {task.id}",
        f"family       {task.family or '-'}",
        f"environment  {task.env}",
        f"limits       {limits}",
        f"instruction  {task.instruction}",
    ]
    for key, value in task.params.items():
        text = "\n".join(json.dumps(item) for item in value) if isinstance(value, list) else str(value)
        parts.append(f"\n{key}:\n" + "\n".join(f"    {line}" for line in text.splitlines()))
    return "\n".join(parts)
