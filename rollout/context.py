"""What a worker needs to drive the episodes of one run: tasks, limits, renderer and policy, made from the published config.

Guarantees: made once for a run and shared by its episodes; a run whose config was published anew (the trainer resumed, and its
policy server listens elsewhere) gets a new context within `REFRESH_S`, while episodes under way keep theirs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from pydantic import ValidationError

from envs.base import EnvError
from rollout.chat import ChatRenderer
from rollout.config import RolloutConfig
from rollout.policy.base import Policy, PolicyError, SamplingParams
from rollout.policy.client import VllmPolicy
from rollout.store import EpisodeStore
from sandbox.base import SandboxSpec
from tasks.base import Limits, Split, Task, TaskSet
from tasks.registry import TaskSetError, load_task_set

REFRESH_S = 5.0


@dataclass(frozen=True, slots=True)
class RunContext:
    config: RolloutConfig
    tasks: TaskSet
    renderer: ChatRenderer
    policy: Policy
    sampling: SamplingParams

    def task(self, split: str, index: int) -> Task:
        """Raises `EnvError` where the set cannot make the task."""
        try:
            return self.tasks.task("test" if split == "test" else "train", index)
        except Exception as error:
            raise EnvError(f"task set {self.config.tasks.set!r} has no task {split}/{index}: {error}") from error

    def limits(self, task: Task) -> Limits:
        given = {name: value for name, value in self.config.limits.model_dump().items() if value is not None}
        return task.limits.model_copy(update=given)

    def sandbox_spec(self, task: Task) -> SandboxSpec:
        return sandbox_spec(self.config, task)


def sandbox_spec(config: RolloutConfig, task: Task) -> SandboxSpec:
    """The run's sandbox with the task's own fields over it. Raises `EnvError` if they do not fit."""
    try:
        return SandboxSpec.model_validate({**config.sandbox, **task.sandbox})
    except ValidationError as error:
        raise EnvError(f"task {task.id}: its sandbox does not fit the run's `sandbox` section: {error}") from error


def sandbox_kind(config: RolloutConfig, tasks: TaskSet, split: Split, index: int) -> str:
    """Which kind of sandbox an episode needs, for its queue."""
    return sandbox_spec(config, tasks.task(split, index)).kind


def make_context(config: RolloutConfig) -> RunContext:
    """Blocking: reads the tokenizer. Raises `TaskSetError`, `PolicyError`, `ModelNotFound`, `UnsupportedTemplate`."""
    if config.policy.url is None:
        raise PolicyError("the published config names no policy server: policy.url is empty")
    renderer = make_renderer(config.policy.model, config.policy.tool_format)
    key_name = config.policy.api_key_env
    policy = VllmPolicy(
        config.policy.url,
        model=config.policy.model,
        api_key=os.environ.get(key_name) if key_name else None,
        retry_s=config.policy.retry_s,
        request_timeout_s=config.policy.request_timeout_s,
    )
    sampling = SamplingParams(**config.sampling.model_dump(), stop_token_ids=renderer.stop_token_ids)
    return RunContext(config, load_task_set(config.tasks.set, **config.tasks.options), renderer, policy, sampling)


@lru_cache(maxsize=4)
def make_renderer(model: str, tool_format: str) -> ChatRenderer:
    from rollout.models import load_tokenizer, resolve_model

    return ChatRenderer(load_tokenizer(resolve_model(model)), tool_format)


class Contexts:
    """The contexts of a worker process, by run."""

    def __init__(self, store: EpisodeStore, make: Callable[[RolloutConfig], RunContext] | None = None) -> None:
        self._store = store
        self._make = make or make_context
        self._configs: dict[str, tuple[float, RolloutConfig]] = {}
        self._made: dict[str, RunContext] = {}
        self._retired: list[RunContext] = []
        self._lock = asyncio.Lock()

    async def config(self, run: str) -> RolloutConfig:
        """The run's config as published, at most `REFRESH_S` old."""
        known = self._configs.get(run)
        if known is not None and time.monotonic() - known[0] < REFRESH_S:
            return known[1]
        config = RolloutConfig.model_validate(await self._store.get_run(run))
        self._configs[run] = (time.monotonic(), config)
        return config

    async def get(self, run: str) -> RunContext:
        """Raises as `make_context` does."""
        config = await self.config(run)
        async with self._lock:
            known = self._made.get(run)
            if known is not None and known.config == config:
                return known
            made = await asyncio.to_thread(self._make, config)
            if known is not None:
                # Episodes under way still use its connections.
                self._retired.append(known)
            self._made[run] = made
            return made

    async def close(self) -> None:
        for context in (*self._retired, *self._made.values()):
            await context.policy.close()


__all__ = ["Contexts", "RunContext", "TaskSetError", "make_context", "make_renderer", "sandbox_kind", "sandbox_spec"]
