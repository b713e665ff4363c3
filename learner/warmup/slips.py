"""Slips: an oracle that gives up early, so that a policy which imitates it has something left to learn.

Guarantees: generic over oracles, for nothing but the calls' order is looked at; the last call, which ends the episode, stays; at
least one call before it is missing, unless there is none; the same generator state gives the same slip.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envs.base import ToolCall


def slip(calls: Sequence[ToolCall], rng: np.random.Generator) -> list[ToolCall]:
    """The first calls, fewer than all, and then the last one."""
    *work, last = calls
    return [*work[: rng.integers(len(work))], last] if work else [last]
