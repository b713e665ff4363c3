"""Which episodes a group is made of: pure, and the same for every process that asks.

Guarantees: group n of a run is always the same task with the same seeds and episode ids, so that a trainer which resumes writes
the very orders that it had written before. Every task of the split is drawn once before any is drawn again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from rollout.config import RolloutConfig
from rollout.context import sandbox_kind
from rollout.trajectory import Episode, Purpose
from tasks.base import Split, TaskSet


@dataclass(slots=True)
class GroupPlan:
    """The train groups of a run."""

    run: str
    config: RolloutConfig
    tasks: TaskSet
    group_size: int
    seed: int
    _epoch: int = -1
    _order: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None

    def task_index(self, group: int) -> int:
        size = self.tasks.size("train")
        epoch, place = divmod(group, size)
        if self._order is None or epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(size)
            self._epoch = epoch
        return int(self._order[place])

    def episodes(self, group: int, version: int) -> list[Episode]:
        index = self.task_index(group)
        return make_group(
            self.run,
            self.config,
            self.tasks,
            "train",
            index,
            group=group,
            size=self.group_size,
            seed=self.seed,
            version=version,
        )


def make_group(
    run: str,
    config: RolloutConfig,
    tasks: TaskSet,
    split: Split,
    index: int,
    *,
    group: int,
    size: int,
    seed: int,
    version: int,
    purpose: Purpose = "train",
) -> list[Episode]:
    """`size` episodes of one task."""
    try:
        kind = sandbox_kind(config, tasks, split, index)
    except Exception:
        # A task that cannot be made fails with its traceback where it is driven, as any other fault of it does.
        kind = str(config.sandbox.get("kind", "local"))
    return [
        Episode(
            run=run,
            id=f"{run}-{group}-{member}",
            task_set=tasks.name,
            split=split,
            task_index=index,
            group=group,
            member=member,
            seed=_seed(seed, purpose, group, member),
            sandbox_kind=kind,
            purpose=purpose,
            max_attempts=config.lease.max_attempts,
            version=version,
            submitted_at=time.time(),
        )
        for member in range(size)
    ]


def _seed(seed: int, purpose: Purpose, group: int, member: int) -> int:
    digest = blake2b(f"{seed}/{purpose}/{group}/{member}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
