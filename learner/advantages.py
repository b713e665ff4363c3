"""Rewards of a group to advantages of its members: pure, float64.

Guarantees: a member without a reward (NaN: it failed by infrastructure) has no part in any statistic and advantage 0; a
group with fewer than two valid members has advantage 0 throughout, never NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
Advantage = Callable[[Rewards], Rewards]


def group_mean(rewards: Rewards) -> Rewards:
    """A_i = R_i - mean(R) over the valid members, [members] -> [members]: GRPO without the division by the deviation."""
    valid = ~np.isnan(rewards)
    advantages = np.zeros_like(rewards)
    if valid.sum() >= 2:
        advantages[valid] = rewards[valid] - rewards[valid].mean()
        # The mean of equal rewards is not always that reward in floating point.
        if np.ptp(rewards[valid]) == 0:
            advantages[:] = 0.0
    return advantages


ADVANTAGES: Mapping[str, Advantage] = {"group_mean": group_mean}
