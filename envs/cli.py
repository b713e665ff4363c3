"""`farmhand tasks validate`: in real sandboxes, a task's own solution must score 1 and doing nothing must score 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import click
from rich.console import Console
from rich.table import Table

from envs.base import EnvError
from envs.oracle import play_nothing, play_oracle
from envs.registry import make_environment
from sandbox.base import Sandbox, SandboxBackend, SandboxSpec, SandboxUnavailable
from sandbox.registry import get_backend
from tasks.base import Split, Task, TaskSet
from tasks.cli import load_or_explain, split_option

SHOWN = 10
"""Findings that are printed in full."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`oracle` and `nothing` are rewards; `problem` is why there is none, or what is wrong with them."""

    task: str
    family: str
    oracle: float | None
    nothing: float | None
    problem: str = ""

    @property
    def good(self) -> bool:
        return not self.problem and self.oracle == 1 and self.nothing == 0


@click.command()
@click.argument("name", metavar="SET")
@split_option("test")
@click.option("--count", type=click.IntRange(1), default=100, show_default=True, help="Tasks from the split's beginning.")
@click.option("--jobs", type=click.IntRange(1), default=4, show_default=True, help="Tasks at once.")
@click.option("--sandbox", "kind", default="local", show_default=True, help="Sandbox kind.")
@click.option("--unsafe", is_flag=True, help="Local sandbox only: where the host cannot isolate, run without.")
def validate(*, name: str, split: Split, count: int, jobs: int, kind: str, unsafe: bool) -> None:
    """Play each task's oracle, and play nothing: the first must score 1, the second 0."""
    task_set = load_or_explain(name)
    size = _size(task_set, split)
    count = min(count, size)
    spec = SandboxSpec(kind=kind, unsafe=unsafe)
    verdicts = asyncio.run(judge(task_set, split, range(count), spec=spec, jobs=jobs))
    console = Console()
    console.print(_table(verdicts))
    bad = [verdict for verdict in verdicts if not verdict.good]
    for verdict in bad[:SHOWN]:
        reason = verdict.problem or f"oracle scored {verdict.oracle:g}, doing nothing {verdict.nothing:g}"
        click.echo(f"{verdict.task} ({verdict.family or 'no family'}): {reason}", err=True)
    if bad:
        raise click.ClickException(f"{len(bad)} of {count} tasks are not valid (expected: oracle 1, doing nothing 0)")
    click.echo(f"{count} tasks of {name}/{split} are valid: the oracle scores 1, doing nothing 0")


def _size(task_set: TaskSet, split: Split) -> int:
    """At least 1, or a `ClickException`: a set of nothing is not valid."""
    try:
        size = task_set.size(split)
    except Exception as error:
        raise click.ClickException(f"size({split!r}) of the set raised {type(error).__name__}: {error}") from error
    if not isinstance(size, int) or size < 1:
        raise click.ClickException(f"size({split!r}) of the set is {size!r}, expected a whole number of at least 1")
    return size


async def judge(task_set: TaskSet, split: Split, indices: Iterable[int], *, spec: SandboxSpec, jobs: int) -> list[Verdict]:
    """A verdict for each index, in order. Raises a group of `SandboxUnavailable` where there is no sandbox to be had."""
    backend = get_backend(spec.kind)
    gate = asyncio.Semaphore(jobs)

    async def one(index: int) -> Verdict:
        try:
            task = Task.model_validate(task_set.task(split, index))
        except Exception as error:
            return Verdict(f"{split}/{index}", "", None, None, f"it cannot be made: {type(error).__name__}: {error}")
        async with gate:
            return await _judge_one(backend, spec, task)

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(index)) for index in indices]
        return [task.result() for task in running]
    finally:
        await backend.close()


async def _judge_one(backend: SandboxBackend, spec: SandboxSpec, task: Task) -> Verdict:
    wanted = SandboxSpec.model_validate({**spec.model_dump(), **task.sandbox})
    oracle = nothing = None
    try:
        async with _sandbox(backend, wanted) as sandbox, asyncio.timeout(task.limits.episode_timeout_s):
            oracle = (await play_oracle(task, make_environment(task, sandbox))).score.reward
        async with _sandbox(backend, wanted) as sandbox, asyncio.timeout(task.limits.episode_timeout_s):
            nothing = (await play_nothing(task, make_environment(task, sandbox))).reward
    except SandboxUnavailable:
        raise
    except TimeoutError:
        limit = task.limits.episode_timeout_s
        return Verdict(task.id, task.family, oracle, nothing, f"not done within its episode_timeout_s of {limit:g}")
    except Exception as error:
        # Task sets and environments are plugins: whatever one raises is a finding about it.
        kind = "" if isinstance(error, EnvError) else f"{type(error).__name__}: "
        return Verdict(task.id, task.family, oracle, nothing, f"{kind}{error}")
    return Verdict(task.id, task.family, oracle, nothing)


@asynccontextmanager
async def _sandbox(backend: SandboxBackend, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    sandbox = await backend.create(spec, labels={"made-by": "farmhand tasks validate"})
    try:
        yield sandbox
    finally:
        await asyncio.shield(sandbox.kill())


def _table(verdicts: Iterable[Verdict]) -> Table:
    table = Table("family", "tasks", "oracle = 1", "nothing = 0", "broken")
    families: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        families.setdefault(verdict.family, []).append(verdict)
    for family, members in families.items():
        table.add_row(
            family or "(none)",
            str(len(members)),
            str(sum(verdict.oracle == 1 for verdict in members)),
            str(sum(verdict.nothing == 0 for verdict in members)),
            str(sum(bool(verdict.problem) for verdict in members)),
        )
    return table
