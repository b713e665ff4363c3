"""Demonstrations: oracle solutions played in real sandboxes, as messages and then as tokens.

Guarantees:

* Only solutions that the task's own verifier gave full marks are kept; a task whose oracle fails stops the warm-up with
  its id, since such a task would also mislead training.
* The tokens are laid out by `rollout.chat.ChatRenderer`, exactly as the driver lays out an episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from envs.base import Reset, Step
from envs.oracle import play_oracle
from envs.registry import make_environment
from rollout.chat import ChatRenderer
from rollout.trajectory import Tokens
from sandbox.base import SandboxSpec
from sandbox.registry import get_backend
from tasks.base import Split, Task, TaskSet


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One solved task: what the environment opened with, and each assistant turn with the answer to it."""

    task_id: str
    reset: Reset
    turns: tuple[tuple[str, Step], ...]

    def texts(self) -> list[str]:
        """Every message's text, for training a tokenizer."""
        out = [message["content"] for message in self.reset.messages]
        for text, step in self.turns:
            out.append(text)
            out.extend(message["content"] for message in step.messages)
        return out


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """`tokens` int32 [n]; `mask` bool [n] is true where the assistant speaks, its end-of-turn token included."""

    tokens: Tokens
    mask: NDArray[np.bool_]


class OracleFailed(Exception):
    """A task's own solution did not earn full marks."""


async def record(
    task_set: TaskSet, split: Split, indices: Sequence[int], *, tool_format: str, spec: SandboxSpec, concurrency: int
) -> list[Demonstration]:
    """Play the oracle of each task; the result is in the order of `indices`."""
    backend = get_backend(spec.kind)
    gate = asyncio.Semaphore(concurrency)

    async def one(task: Task) -> Demonstration:
        async with gate:
            sandbox = await backend.create(spec.model_copy(update=dict(task.sandbox)), labels={"run": "warmup"})
            try:
                played = await play_oracle(task, make_environment(task, sandbox), tool_format)
            finally:
                await asyncio.shield(sandbox.kill())
        if played.score.reward < 1:
            raise OracleFailed(
                f"task {task.id}: its oracle scored {played.score.reward:g}, expected 1; see `farmhand tasks validate`"
            )
        return Demonstration(task.id, played.reset, tuple(played.turns))

    try:
        async with asyncio.TaskGroup() as group:
            jobs = [group.create_task(one(task_set.task(split, index))) for index in indices]
    finally:
        await backend.close()
    return [job.result() for job in jobs]


def tokenise(demonstration: Demonstration, renderer: ChatRenderer) -> TokenSequence:
    """Lay a demonstration out as the driver would have recorded it."""
    tokens = list(renderer.open(demonstration.reset))
    mask = [False] * len(tokens)
    for text, step in demonstration.turns:
        sampled = renderer.encode_assistant(text)
        tokens += sampled
        mask += [True] * len(sampled)
        if not step.done:
            observation = renderer.bridge(sampled, "stop", step.messages)
            tokens += observation
            mask += [False] * len(observation)
    return TokenSequence(np.asarray(tokens, dtype=np.int32), np.asarray(mask))
