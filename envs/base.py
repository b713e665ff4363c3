"""The environment protocol: the rules of a kind of task.

Guarantees:

* An environment owns no token and no policy: messages and tool calls go in and out, the driver does the rest.
* A mistake of the agent (unknown tool, bad arguments, failing command) comes back as an observation; an exception means
  infrastructure or a defect of the task, fails the episode and is never a reward.
* `state()` and `restore()` carry an environment over to another worker, beside the sandbox it lives in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict

Role = Literal["system", "user", "assistant", "tool"]


class Message(TypedDict):
    role: Role
    content: str


class ToolSchema(TypedDict):
    """OpenAI's shape: {"type": "function", "function": {"name", "description", "parameters"}}."""

    type: Literal["function"]
    function: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Action:
    """One assistant turn, parsed. `errors` says what was malformed; such a turn may still hold good calls before it."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reset:
    """The opening messages (system and user) and the tools on offer."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What the environment answers. `messages` is empty only when `done`."""

    messages: Sequence[Message]
    reward: float = 0.0
    done: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """`reward` is finite; `parts` are what it is made of, for the report."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


class EnvError(Exception):
    """A task or its verifier is broken. The episode fails with kind "task"."""


class Environment(Protocol):
    async def reset(self) -> Reset:
        """Set the task up in its sandbox. Called once in an episode's life, not again when it is resumed."""
        ...

    async def step(self, action: Action) -> Step: ...

    async def interrupted(self, action: Action) -> Step:
        """The answer to an action that was under way when its worker was lost: it may have happened in part or in full.

        It is not run again; the observation says so truthfully.
        """
        ...

    async def score(self) -> Score:
        """Judge the outcome, after every process of the agent has been ended."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON that `restore` understands."""
        ...

    async def restore(self, state: Mapping[str, Any]) -> Reset:
        """Go on in the same sandbox where `state` was taken. Returns what `reset` had returned."""
        ...

    async def close(self) -> None: ...
