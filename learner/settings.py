"""The learner's sections of a config file: what a step is made of, how stale it may be, and what becomes of it.

Guarantees: every value here is checked at load; a combination that cannot be trained on is named by `check_sampling`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout.config import SamplingConfig


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class BatchSettings(_Section):
    groups_per_step: int = Field(default=16, ge=1)
    group_size: int = Field(default=8, ge=1)
    """Episodes of one task, compared with each other."""
    min_members: int = Field(default=2, ge=1)
    """Members that must not have failed, else the whole group is dropped and another takes its place."""
    advantage: Literal["group_mean"] = "group_mean"
    no_signal: Literal["drop", "keep", "resample"] = "drop"
    """What becomes of a group whose advantages are all zero: `drop` leaves its place in the step empty, `keep` trains on it
    (it counts in the loss's denominator), `resample` puts another group in its place."""
    micro_batch_tokens: int = Field(default=8192, ge=16)
    """Tokens run at once, prompts included. A longer sequence cannot be trained on, and its episode is dropped."""


class AsyncSettings(_Section):
    max_staleness: int = Field(default=2, ge=0)
    """Steps' worth of groups that may be under way or waiting beyond the one being trained; 0 is synchronous."""
    window: int | None = Field(default=None, ge=1)
    """Groups past the oldest unfinished one that may be trained before it; None: as many as a step has."""
    head_timeout_s: float | None = Field(default=120.0, gt=0)
    """How long an unfinished group may hold the window back before it is passed over; None: for ever."""
    max_token_lag: int = Field(default=8, ge=0)
    """A group is dropped when its oldest token is more versions old than this."""


class ObjectiveSettings(_Section):
    name: Literal["dis", "cispo"] = "dis"
    eps_low: float | None = Field(default=None, gt=0)
    """Lower edge of the importance ratio is 1 - eps_low; None: the objective's own default."""
    eps_high: float | None = Field(default=None, gt=0)
    """Upper edge of the importance ratio is 1 + eps_high; None: the objective's own default."""


class OptimizerSettings(_Section):
    """AdamW with master weights in float32."""

    learning_rate: float = Field(default=1e-5, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises to its value, where it stays."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the trainer; None: torch's choice."""
    max_bad_steps: int = Field(default=3, ge=1)
    """Steps in a row with a loss or gradient that is not finite before the run stops. Each is skipped, its batch saved."""


class CheckpointSettings(_Section):
    every: int = Field(default=10, ge=1)
    """Steps between checkpoints; one more is written at the end."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept, the newest ones."""
    allow_previous: bool = False
    """On resume, go to the checkpoint before a damaged one instead of stopping."""


class PublishSettings(_Section):
    folder: str | None = None
    """Where weights are written for the policy servers, which must see the same path. None: shared memory if there is any,
    else the run's folder."""
    keep: int = Field(default=1, ge=1)
    """Versions kept on disk, the newest ones."""
    clear_cache: bool = True
    """Recompute cached keys and values under the new weights. Without it old ones stay in use until their requests end."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of every call to a policy server during a push."""
    verify: bool = True
    """Compare the servers' log-probs of a probe with the trainer's after every push."""
    tolerance: float | None = Field(default=None, gt=0)
    """Largest mean absolute difference of a probe's log-probs, nats a token; None: 0.002 in float32, 0.1 in bfloat16."""
    probe_tokens: int = Field(default=64, ge=2)


def check_sampling(sampling: SamplingConfig) -> list[tuple[str, str, str]]:
    """(key, found, allowed) for each way in which `sampling` cannot be trained on.

    Behaviour log-probs are those of the distribution sampled from. With top-p or top-k that is a truncated one, which
    differs from the trainer's at every token by a mass that nobody records, and at temperature 0 it is a point.
    """
    why = "the trainer's log-probs are of the full distribution at the sampling temperature"
    mistakes = []
    if sampling.temperature <= 0:
        mistakes.append(("sampling.temperature", str(sampling.temperature), f"above 0 in training: {why}"))
    if sampling.top_p < 1:
        mistakes.append(("sampling.top_p", str(sampling.top_p), f"1 in training: {why}"))
    if sampling.top_k > 0:
        mistakes.append(("sampling.top_k", str(sampling.top_k), f"0 in training: {why}"))
    return mistakes
