"""Play a task's own solution through its environment, as a policy would have: one turn a tool call.

Used to validate tasks and to record demonstrations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from envs.base import EnvError, Environment, Reset, Score, Step, ToolCall
from envs.toolcalls import parse, render
from tasks.base import Task


class _Call(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: dict[str, object] = {}


_CALLS = TypeAdapter(list[_Call])


@dataclass(frozen=True, slots=True)
class Played:
    """`turns`: the assistant's text, and the environment's answer to it."""

    reset: Reset
    turns: Sequence[tuple[str, Step]]
    score: Score


def oracle_calls(task: Task) -> list[ToolCall]:
    """The calls under `Task.params["oracle"]`. Raises `EnvError` where there are none or they are malformed."""
    try:
        calls = _CALLS.validate_python(task.params.get("oracle", []))
    except ValidationError as error:
        raise EnvError(f"task {task.id}: its oracle is not a list of tool calls: {error}") from error
    if not calls:
        raise EnvError(f"task {task.id} has no oracle: params lack the list of tool calls that solves it")
    return [ToolCall(call.name, call.arguments) for call in calls]


async def play_oracle(
    task: Task, environment: Environment, tool_format: str = "hermes", *, calls: Sequence[ToolCall] | None = None
) -> Played:
    """Reset, make each call in a turn of its own until the episode is done, score, close.

    `calls` are played in place of the oracle's own where they are given.
    """
    calls = oracle_calls(task) if calls is None else calls
    try:
        reset = await environment.reset()
        turns: list[tuple[str, Step]] = []
        for call in calls:
            text = render([call], tool_format)
            step = await environment.step(parse(text, tool_format, schemas=reset.tools))
            turns.append((text, step))
            if step.done:
                break
        return Played(reset, turns, await environment.score())
    finally:
        await environment.close()


async def play_nothing(task: Task, environment: Environment) -> Score:
    """Reset and score at once."""
    try:
        await environment.reset()
        return await environment.score()
    finally:
        await environment.close()
