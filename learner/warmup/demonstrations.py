"""Demonstrations: oracle solutions played in real sandboxes, as messages and then as tokens.

Guarantees:

* A clean solution is one that the task's own verifier gave full marks; a task whose oracle fails stops the warm-up with
  its id, since such a task would also mislead training. A demonstration with a slip (`haste`) is kept whatever it scores.
* Every call was carried out in a sandbox, the slips too: what the environment answers is true.
* The tokens are laid out by `rollout.chat.ChatRenderer`, exactly as the driver lays out an episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from envs.base import Reset, Step
from envs.oracle import oracle_calls, play_oracle
from envs.registry import make_environment
from learner.warmup.slips import slip
from rollout.chat import ChatRenderer
from rollout.trajectory import Tokens
from sandbox.base import SandboxSpec
from sandbox.registry import get_backend
from tasks.base import Split, TaskSet


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One played task: what the environment opened with, and each assistant turn with the answer to it."""

    task_id: str
    slipped: bool
    reward: float
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
    task_set: TaskSet,
    split: Split,
    indices: Sequence[int],
    *,
    tool_format: str,
    spec: SandboxSpec,
    concurrency: int,
    haste: float = 0.0,
    seed: int = 0,
) -> list[Demonstration]:
    """Play the oracle of each task, a share `haste` of them with a slip; the result is in the order of `indices`."""
    backend = get_backend(spec.kind)
    gate = asyncio.Semaphore(concurrency)

    async def one(index: int) -> Demonstration:
        task = task_set.task(split, index)
        rng = np.random.default_rng((seed, index))
        slipped = bool(rng.random() < haste)
        calls = slip(oracle_calls(task), rng) if slipped else None
        async with gate:
            sandbox = await backend.create(spec.model_copy(update=dict(task.sandbox)), labels={"run": "warmup"})
            try:
                played = await play_oracle(task, make_environment(task, sandbox), tool_format, calls=calls)
            finally:
                await asyncio.shield(sandbox.kill())
        if not slipped and played.score.reward < 1:
            raise OracleFailed(
                f"task {task.id}: its oracle scored {played.score.reward:g}, expected 1; see `farmhand tasks validate`"
            )
        return Demonstration(task.id, slipped, played.score.reward, played.reset, tuple(played.turns))

    try:
        async with asyncio.TaskGroup() as group:
            jobs = [group.create_task(one(index)) for index in indices]
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
