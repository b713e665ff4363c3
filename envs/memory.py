"""The no-op environment, for benchmarks and tests of whatever drives environments: a fixed number of turns, no sandbox.

`Task.params`: `turns` (default 1), `observation` (default "ok"), `reward` (default 1.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envs.base import Action, EnvError, Reset, Score, Step
from sandbox.base import Sandbox
from tasks.base import Task


class NoopParams(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    turns: int = Field(default=1, ge=1)
    observation: str = "ok"
    reward: float = Field(default=1.0, allow_inf_nan=False)


class NoopEnv:
    """See `envs.base.Environment`."""

    def __init__(self, task: Task, sandbox: Sandbox | None = None) -> None:
        try:
            self._params = NoopParams.model_validate(dict(task.params))
        except ValidationError as error:
            raise EnvError(f"task {task.id}: params do not fit the environment 'noop': {error}") from error
        self._instruction = task.instruction
        self._taken = 0

    async def reset(self) -> Reset:
        return Reset([{"role": "user", "content": self._instruction}])

    async def step(self, action: Action) -> Step:
        self._taken += 1
        if self._taken >= self._params.turns:
            return Step((), done=True)
        return Step([{"role": "user", "content": self._params.observation}])

    async def interrupted(self, action: Action) -> Step:
        return await self.step(action)

    async def score(self) -> Score:
        return Score(self._params.reward)

    def state(self) -> dict[str, Any]:
        return {"taken": self._taken}

    async def restore(self, state: Mapping[str, Any]) -> Reset:
        self._taken = int(state["taken"])
        return await self.reset()

    async def close(self) -> None:
        return None
