"""The in-memory twin of a policy server: `Policy` and `PolicyAdmin` in one object, deterministic, no model.

It holds to the contract: pauses keep or abort calls in flight, calls while paused wait, versions say which token came under
which, seeds repeat. Its distribution is uniform over the vocabulary, so every log-prob is `-log(vocab_size)`.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout.policy.base import Completion, PauseMode, PolicyError, SamplingParams, ServerLoad
from rollout.policy.client import join_versions
from rollout.trajectory import Versions

Script = Callable[[Sequence[int], SamplingParams], Sequence[int]]


class MemoryPolicy:
    """`script(prompt, sampling)` gives the tokens of a call; without it they are drawn from the seed.

    `tokens_per_tick` tokens are made per turn of the event loop, so that pauses find calls in flight; 0 makes all at once.
    `updates` records what `update_weights` was given.
    """

    def __init__(self, *, script: Script | None = None, vocab_size: int = 256, tokens_per_tick: int = 0) -> None:
        self.vocab_size = vocab_size
        self.updates: list[tuple[Mapping[str, Any], int]] = []
        self.in_flight = 0
        self._script = script
        self._tick = tokens_per_tick
        self._version = 0
        self._open = asyncio.Event()
        self._open.set()
        self._prompt_tokens = self._generated_tokens = 0
        self._unseeded = random.Random(0)  # noqa: S311 (a test's tokens, no secret)

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str, priority: int = 0
    ) -> Completion:
        if not len(token_ids):
            raise PolicyError("token_ids: empty")
        if (worst := max(token_ids)) >= self.vocab_size or min(token_ids) < 0:
            raise PolicyError(f"token_ids: {worst} is out of the vocabulary, which has {self.vocab_size} tokens")
        self.in_flight += 1
        self._prompt_tokens += len(token_ids)
        try:
            return await self._generate(token_ids, sampling)
        finally:
            self.in_flight -= 1

    async def _generate(self, prompt: Sequence[int], sampling: SamplingParams) -> Completion:
        tokens: list[int] = []
        versions: Versions = ()
        reason = "length"
        for token in self._plan(prompt, sampling):
            if self._tick and len(tokens) % self._tick == 0:
                await asyncio.sleep(0)
            # Kept and aborted calls look alike from here: a client goes on from the tokens it has once it may.
            if not self._open.is_set():
                await self._open.wait()
            tokens.append(token)
            self._generated_tokens += 1
            versions = join_versions(versions, ((self._version, 1),))
            if token in sampling.stop_token_ids:
                reason = "stop"
                break
        return Completion(tuple(tokens), (-math.log(self.vocab_size),) * len(tokens), versions, reason)

    def _plan(self, prompt: Sequence[int], sampling: SamplingParams) -> Sequence[int]:
        if self._script is not None:
            return self._script(prompt, sampling)[: sampling.max_tokens]
        seed = self._unseeded.getrandbits(32) if sampling.seed is None else sampling.seed
        draw = random.Random(f"{seed}:{len(prompt)}")  # noqa: S311 (a test's tokens, no secret)
        return [draw.randrange(self.vocab_size) for _ in range(sampling.max_tokens)]

    async def health(self) -> bool:
        return True

    async def version(self) -> int:
        return self._version

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = True) -> None:
        self._open.clear()

    async def resume(self) -> None:
        self._open.set()

    async def update_weights(self, update_info: Mapping[str, Any], version: int) -> None:
        if self._open.is_set():
            raise PolicyError("weights change only while paused; pause first")
        self.updates.append((update_info, version))
        self._version = version

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return [-math.log(self.vocab_size)] * (len(token_ids) - 1)

    async def load(self) -> ServerLoad:
        """It is never busy: it computes nothing."""
        return ServerLoad(self._prompt_tokens, self._generated_tokens, running=self.in_flight, waiting=0, busy_s=0.0)

    async def close(self) -> None:
        """Nothing to close."""
