"""What a policy server is to its callers: tokens in, tokens with log-probs and weight versions out.

Guarantees that every implementation gives, and that `tests/rollout/policy/contract.py` holds it to:

* `Completion` has one behaviour log-prob and one weight version for each sampled token; log-probs are those of the
  distribution sampled from, after temperature, top-k and top-p.
* A weight update between `pause("keep")` and `resume()` leaves requests in flight: they go on from the token they had
  reached, and their `versions` say where.
* `generate` ends: with a completion, or with `PolicyUnavailable` once its retry budget is spent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from rollout.trajectory import Versions

PauseMode = Literal["keep", "abort"]


class SamplingParams(BaseModel):
    """How to sample. The names are vLLM's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: int = Field(default=512, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 means all."""
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """`finish_reason`: "stop" (a stop token, which is the last of `token_ids`), "length", or "abort"."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: Versions
    finish_reason: str
    timing: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Counters since the server started, and its queue now. A counter that went back belongs to a server that restarted."""

    prompt_tokens: int
    """Prompt tokens that came in."""
    generated_tokens: int
    running: int
    waiting: int
    busy_s: float | None = None
    """Seconds in which the model ran. None: the server does not count them, as vLLM does not."""


class PolicyError(Exception):
    """A policy server answered, and refused: the message names the server, the status and its reason."""


class PolicyUnavailable(PolicyError):
    """No answer within the retry budget; the message names the server and the settings `policy.url`, `policy.retry_s`."""


class Policy(Protocol):
    """The hands' side. Safe for many concurrent calls from one event loop."""

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str, priority: int = 0
    ) -> Completion:
        """Continue `token_ids`. Cancelling the call aborts the request on the server. `request_id` is unique per call."""
        ...

    async def close(self) -> None: ...


class PolicyAdmin(Protocol):
    """The head's side: weights, pauses and the probe."""

    async def health(self) -> bool: ...

    async def version(self) -> int:
        """Weight version served now; 0 before the first push."""
        ...

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = True) -> None: ...

    async def resume(self) -> None: ...

    async def update_weights(self, update_info: Mapping[str, Any], version: int) -> None:
        """Start, update, finish with `version`. The server must be paused. Raises `PolicyError` if the server refuses."""
        ...

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-prob of `token_ids[i]` given what precedes it, for i >= 1, at temperature 1: `len(token_ids) - 1` values."""
        ...

    async def load(self) -> ServerLoad:
        """Counters for displays."""
        ...

    async def close(self) -> None: ...
