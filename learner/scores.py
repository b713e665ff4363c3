"""From the ends of episodes to a score: pure arithmetic.

Guarantees: an episode that failed has no reward and enters no mean; it is counted beside. To pass is to get full marks (1).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout.trajectory import EpisodeEnd

Z_95 = 1.959964


def wilson(passed: int, total: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval of a share (E. B. Wilson, 1927): bounds in [0, 1]; (0, 1) without observations."""
    if total == 0:
        return 0.0, 1.0
    share = passed / total
    scale = 1 + z * z / total
    centre = (share + z * z / (2 * total)) / scale
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True, slots=True)
class Tally:
    """Episodes with a reward, and how many of them had full marks."""

    scored: int = 0
    passed: int = 0
    reward_sum: float = 0.0

    def plus(self, reward: float) -> Tally:
        return Tally(self.scored + 1, self.passed + (reward >= 1), self.reward_sum + reward)

    @property
    def mean(self) -> float | None:
        return self.reward_sum / self.scored if self.scored else None

    @property
    def pass_rate(self) -> float | None:
        return self.passed / self.scored if self.scored else None


@dataclass(slots=True)
class Evaluation:
    """One pass over fixed tasks. `families` maps each episode id to its task's family."""

    families: Mapping[str, str]
    ends: dict[str, EpisodeEnd] = field(default_factory=dict)

    def add(self, end: EpisodeEnd) -> bool:
        """Take note of an end; False if the episode is none of this evaluation's."""
        if end.episode_id not in self.families:
            return False
        self.ends.setdefault(end.episode_id, end)
        return True

    @property
    def missing(self) -> set[str]:
        return set(self.families) - set(self.ends)

    @property
    def complete(self) -> bool:
        return len(self.ends) == len(self.families)

    def tally(self) -> Tally:
        total = Tally()
        for end in self.ends.values():
            if end.reward is not None:
                total = total.plus(end.reward)
        return total

    def by_family(self) -> dict[str, Tally]:
        tallies: dict[str, Tally] = defaultdict(Tally)
        for episode_id, end in self.ends.items():
            if end.reward is not None:
                tallies[self.families[episode_id]] = tallies[self.families[episode_id]].plus(end.reward)
        return dict(sorted(tallies.items()))

    def failures(self) -> Counter[str]:
        return Counter(end.failure.kind for end in self.ends.values() if end.failure is not None)

    def row(self) -> dict[str, float | int | None]:
        """For `metrics.jsonl`: the mean reward is the score, the interval is that of the pass rate."""
        tally = self.tally()
        low, high = wilson(tally.passed, tally.scored)
        return {
            "score": tally.mean,
            "pass_rate": tally.pass_rate,
            "low": low,
            "high": high,
            "scored": tally.scored,
            "failed": sum(self.failures().values()),
        }
