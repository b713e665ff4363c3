"""What became of every train episode: pure bookkeeping.

Guarantees: dispatched = trained + failed + dropped + unfinished at all times, because an episode is in exactly one of these
states and ends once; ending one that is not open raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from learner.metrics import TokenLag


class LedgerError(Exception):
    """An episode was dispatched or ended twice: a defect of the caller."""


class Ledger:
    def __init__(self) -> None:
        self.trained = 0
        self.failed: Counter[str] = Counter()
        """By the kind of the failure."""
        self.dropped: Counter[str] = Counter()
        """By reason."""
        self.lag = TokenLag()
        """Of every trained token: the version trained from minus the token's, at least 0."""
        self._open: dict[str, None] = {}

    def dispatch(self, episode_ids: Iterable[str]) -> None:
        fresh = list(episode_ids)
        for episode_id, times in Counter(fresh).items():
            if times > 1 or self.is_open(episode_id):
                raise LedgerError(f"episode {episode_id} is dispatched already")
        self._open.update(dict.fromkeys(fresh))

    def train(self, episode_id: str) -> None:
        self._end(episode_id)
        self.trained += 1

    def fail(self, episode_id: str, kind: str) -> None:
        self._end(episode_id)
        self.failed[kind] += 1

    def drop(self, episode_id: str, reason: str) -> None:
        self._end(episode_id)
        self.dropped[reason] += 1

    def _end(self, episode_id: str) -> None:
        if episode_id not in self._open:
            raise LedgerError(f"episode {episode_id} is not open: it was never dispatched, or has ended")
        del self._open[episode_id]

    def is_open(self, episode_id: str) -> bool:
        return episode_id in self._open

    @property
    def unfinished(self) -> tuple[str, ...]:
        return tuple(self._open)

    def counts(self) -> dict[str, int]:
        """`dispatched` and its four parts."""
        parts = {
            "trained": self.trained,
            "failed": self.failed.total(),
            "dropped": self.dropped.total(),
            "unfinished": len(self._open),
        }
        return {"dispatched": sum(parts.values()), **parts}

    def state(self) -> dict[str, Any]:
        """Plain JSON, also what a run's `ledger.json` is made of."""
        return {
            "counts": self.counts(),
            "failed": dict(self.failed),
            "dropped": dict(self.dropped),
            "lag": {str(lag): count for lag, count in sorted(self.lag.counts.items())},
            "open": list(self._open),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.trained = int(state["counts"]["trained"])
        self.failed = Counter(state["failed"])
        self.dropped = Counter(state["dropped"])
        self.lag = TokenLag({int(lag): int(count) for lag, count in state["lag"].items()})
        self._open = dict.fromkeys(state["open"])
