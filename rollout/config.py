"""What a worker must know of a run: everything that shapes an episode, and nothing of learning.

It is published as JSON in the store by the trainer and read there by workers, so a farm needs no shared files. Secrets are
not part of it: a policy's API key is read from the environment variable named by `policy.api_key_env`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PolicyConfig(_Section):
    model: str = "quickstart"
    """A folder with a transformers model and tokenizer, or a name that `rollout.models` knows."""
    url: str | None = Field(default=None, pattern=r"^https?://.")
    """An OpenAI/vLLM-style server's base URL. None: the trainer starts the reference engine itself."""
    api_key_env: str | None = None
    tool_format: Literal["hermes", "qwen3"] = "hermes"
    retry_s: float = Field(default=120.0, ge=0)
    """How long `generate` keeps trying an unreachable server before the episode fails."""
    request_timeout_s: float = Field(default=300.0, gt=0)


class SamplingConfig(_Section):
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)


class TasksConfig(_Section):
    set: str = "shell"
    """An entry point of `farmhand.tasks`, or `package.module:name`."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the task set's loader."""


class LimitsConfig(_Section):
    """Overrides of every task's own limits; None leaves the task's."""

    max_turns: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    turn_tokens: int | None = Field(default=None, ge=1)
    command_timeout_s: float | None = Field(default=None, gt=0)
    episode_timeout_s: float | None = Field(default=None, gt=0)


class LeaseConfig(_Section):
    ttl_s: float = Field(default=30.0, gt=0)
    """A worker that has not renewed for this long is taken for dead."""
    renew_s: float = Field(default=10.0, gt=0)
    max_attempts: int = Field(default=3, ge=1)


class RolloutConfig(_Section):
    policy: PolicyConfig = PolicyConfig()
    sampling: SamplingConfig = SamplingConfig()
    tasks: TasksConfig = TasksConfig()
    limits: LimitsConfig = LimitsConfig()
    lease: LeaseConfig = LeaseConfig()
    sandbox: Mapping[str, Any] = Field(default_factory=dict)
    """Fields of `sandbox.base.SandboxSpec`; a task's own override them."""
