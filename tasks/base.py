"""What a task is, and what a set of tasks promises.

Guarantees:

* A `Task` is plain data. It crosses processes as JSON and holds no code, so a worker can rebuild it from
  `(task set, split, index)` alone: the broker carries these three, never the task.
* `TaskSet.task(split, index)` is a pure function of its arguments: every process sees the same task.
* The splits of a task set are disjoint in content, not only in index.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

Split = Literal["train", "test"]


class Limits(BaseModel):
    """What one episode of a task may use. Reaching a limit ends the episode as `truncated`; it is scored all the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_turns: int = Field(default=8, ge=1)
    """Policy calls."""
    max_tokens: int = Field(default=4096, ge=1)
    """Length of the longest branch in tokens, prompt included."""
    turn_tokens: int = Field(default=512, ge=1)
    """Sampled tokens of one policy call."""
    command_timeout_s: float = Field(default=30.0, gt=0)
    """Wall clock of one tool call."""
    episode_timeout_s: float = Field(default=600.0, gt=0)
    """Wall clock of one attempt, from the claim to the score."""


class Task(BaseModel):
    """One thing to do.

    `env` names the environment that knows the rules ("coding"); `sandbox` overrides fields of the run's sandbox spec;
    `params` is what that environment needs to set up, score and demonstrate the task.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(min_length=1)
    env: str
    instruction: str
    family: str = ""
    """Groups tasks of one kind in reports."""
    sandbox: Mapping[str, Any] = Field(default_factory=dict)
    limits: Limits = Limits()
    params: Mapping[str, Any] = Field(default_factory=dict)


@runtime_checkable
class TaskSet(Protocol):
    """A named, seeded collection of tasks. `farmhand.tasks` entry points are callables that return one."""

    name: str

    def size(self, split: Split) -> int:
        """Number of distinct tasks in a split. Indices at and past it raise `IndexError`."""
        ...

    def task(self, split: Split, index: int) -> Task: ...
