"""When to stop a run because its episodes fail: pure.

Guarantees: failures that the run asked for (kind "cancelled") do not count. The budget judges the last `window` episodes, and
a shorter past only once it could not be saved by what is still to come.
"""

from __future__ import annotations

from collections import Counter, deque

from learner.run import RunError
from rollout.trajectory import EpisodeEnd, Failure


class TooManyFailures(RunError):
    """The share of failed episodes is over the budget. The message has the kinds and one failure in full."""


class FailureBudget:
    def __init__(self, max_share: float, window: int) -> None:
        self.kinds: Counter[str] = Counter()
        """All failures so far by kind."""
        self._max_share = max_share
        self._window = window
        self._recent: deque[Failure | None] = deque(maxlen=window)

    def add(self, end: EpisodeEnd) -> None:
        """Raises `TooManyFailures` if this one is over the budget."""
        failure = end.failure
        if failure is not None and failure.kind == "cancelled":
            return
        self._recent.append(failure)
        if failure is None:
            return
        self.kinds[failure.kind] += 1
        failed = [item for item in self._recent if item is not None]
        if len(failed) > self._max_share * self._window:
            counts = ", ".join(f"{kind} {n}" for kind, n in Counter(item.kind for item in failed).most_common())
            raise TooManyFailures(
                f"{len(failed)} of the last {len(self._recent)} episodes failed ({counts}), more than `run.max_failed_share`"
                f" = {self._max_share:g} of `run.failure_window` = {self._window}. The last one, episode {end.episode_id}:\n"
                f"{failure.kind}: {failure.message}\n{failure.traceback}".rstrip()
            )
