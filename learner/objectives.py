"""The objectives: pure functions of tokens in torch, blind to models, groups and batches.

Guarantees:

* The loss is a sum over the tokens in the mask; the trainer divides it by the number of sampled tokens of the whole batch,
  those that an objective leaves out included, so that leaving tokens out does not make the rest count for more.
* Importance weights are detached: all gradient flows through the log-probs, as in a score function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Sums = dict[str, Tensor]


class LossFunction(Protocol):
    def __call__(
        self, logp: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, *, eps_low: float, eps_high: float
    ) -> tuple[Tensor, Sums]:
        """All tensors are [tokens], `behaviour` are log-probs. Returns the sum of their losses, and sums of metrics."""
        ...


_LARGEST_LOG_RATIO = 20.0
"""Beyond it a ratio is a defect; the figure that shows it should stay finite."""


@dataclass(frozen=True, slots=True)
class Objective:
    """`function` with its own edges of the ratio, for where the settings name none."""

    function: LossFunction
    eps_low: float
    eps_high: float

    def __call__(
        self,
        logp: Tensor,
        behaviour: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        eps_low: float | None = None,
        eps_high: float | None = None,
    ) -> tuple[Tensor, Sums]:
        """Loss sum (a scalar with gradient) and metric sums: `mismatch_kl`, `clipped` and `ratio`."""
        low = self.eps_low if eps_low is None else eps_low
        high = self.eps_high if eps_high is None else eps_high
        return self.function(logp, behaviour, advantages, mask, eps_low=low, eps_high=high)


def double_sided(
    logp: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Sums]:
    """Double-sided importance sampling: -f(w) A log pi, f(w) = w strictly between 1 - eps_low and 1 + eps_high, else 0.

    A token outside the band has no part in the gradient, whatever the sign of its advantage.
    """
    ratio, metrics = _ratio(logp, behaviour, mask)
    inside = (ratio > 1 - eps_low) & (ratio < 1 + eps_high)
    weight = torch.where(inside & mask, ratio, 0.0)
    metrics["clipped"] = (~inside & mask).sum()
    return -(weight * advantages * logp).sum(), metrics


def cispo(
    logp: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Sums]:
    """CISPO: -clip(w, 1 - eps_low, 1 + eps_high) A log pi. Every token keeps its gradient; only its weight is bounded."""
    ratio, metrics = _ratio(logp, behaviour, mask)
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    metrics["clipped"] = ((clipped != ratio) & mask).sum()
    return -(torch.where(mask, clipped, 0.0) * advantages * logp).sum(), metrics


def _ratio(logp: Tensor, behaviour: Tensor, mask: Tensor) -> tuple[Tensor, Sums]:
    """Current over behaviour probability [n], detached, and the metrics that follow from it alone.

    `mismatch_kl` is the estimator k3 of KL(behaviour || current): w - 1 - log w, which is never negative.
    """
    log_ratio = (logp.detach() - behaviour).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    ratio = log_ratio.exp()
    k3 = torch.where(mask, ratio - 1 - log_ratio, 0.0)
    return ratio, {"mismatch_kl": k3.sum(), "ratio": torch.where(mask, ratio, 0.0).sum()}


OBJECTIVES: Mapping[str, Objective] = {
    # A factor of two either way: outside of it a token says more about how old it is than about how good it was.
    "dis": Objective(double_sided, eps_low=0.5, eps_high=1.0),
    # No lower edge: a small weight does no harm.
    "cispo": Objective(cispo, eps_low=1.0, eps_high=4.0),
}
