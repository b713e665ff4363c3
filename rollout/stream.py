"""Exactly once at the learner: what `Dedup` accepts, and records set aside because they do not decode.

`Dedup` is pure. It sees the records of a run in the order they were written, some of them again after a restart. Guarantees:

* Each (episode, attempt, index) is accepted once.
* Nothing of an attempt older than the newest seen of its episode is accepted; what was accepted before a later attempt's
  resume point stays accepted.
* The first `EpisodeEnd` of the newest attempt closes the episode: nothing after it is accepted.
* Memory is a few numbers per episode until `forget`, and then its id, for the last `REMEMBERED` episodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.trajectory import Episode, EpisodeEnd, Record

REMEMBERED = 16384
"""Forgotten ids that are still refused: a learner that dies between its checkpoint and its acknowledgement reads the records
of settled episodes again, and must not take them for new ones. Far more than it can have left unacknowledged."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A stream entry that is not a record. `reason` is the decoder's message."""

    entry_id: str
    data: bytes
    reason: str


@dataclass(slots=True)
class _Seen:
    attempt: int
    following: int
    """The lowest index still to come from this attempt."""
    closed: bool = False


class Dedup:
    def __init__(self, *, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._episodes: dict[str, _Seen] = {}
        self._settled: dict[str, None] = {}

    def __len__(self) -> int:
        """Episodes not yet forgotten."""
        return len(self._episodes)

    def accept(self, record: Record) -> bool:
        """Whether this record is new and valid; orders always are, for nothing follows from them."""
        if isinstance(record, Episode):
            return True
        if record.episode_id in self._settled:
            return False
        seen = self._episodes.get(record.episode_id)
        if seen is None:
            seen = self._episodes[record.episode_id] = _Seen(record.attempt, record.index)
        if seen.closed or record.attempt < seen.attempt:
            return False
        if record.attempt > seen.attempt:
            seen.attempt, seen.following = record.attempt, record.index
        if record.index < seen.following:
            return False
        seen.following = record.index + 1
        seen.closed = isinstance(record, EpisodeEnd)
        return True

    def forget(self, episode_ids: Iterable[str]) -> None:
        """These episodes are settled: drop their state, and refuse what still comes of them."""
        for episode_id in episode_ids:
            self._episodes.pop(episode_id, None)
            self._settled.pop(episode_id, None)
            self._settled[episode_id] = None
        for episode_id in list(self._settled)[: max(0, len(self._settled) - self._remembered)]:
            del self._settled[episode_id]

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint."""
        return {
            "episodes": {key: [seen.attempt, seen.following, seen.closed] for key, seen in self._episodes.items()},
            "settled": list(self._settled),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._episodes = {
            key: _Seen(int(attempt), int(following), bool(closed))
            for key, (attempt, following, closed) in state["episodes"].items()
        }
        self._settled = dict.fromkeys(state["settled"])
