"""The trajectory buffer: records in, whole groups out, every episode accounted for.

Pure: no I/O. Records must have passed `rollout.stream.Dedup`; records of eval episodes belong elsewhere.

Guarantees:

* A group ends once all its members have ended, and then admission hears of it: as usable, or as failed when fewer than
  `min_members` of them are valid. Failed members have no part in the mean, the loss or the rewards.
* A segment of a later attempt replaces what an earlier one wrote from its index on.
* Records that arrive before their episode was dispatched (after a resume) are kept until it is.
* Nothing is cut: an episode with a sequence of more than `max_tokens` tokens is dropped as "too_long"; its reward still
  counts in the mean of its group.
* A group can be given up at any moment of its life with `drop`; what its episodes still send is then ignored.
* The ledger changes with the buffer, so that its counts hold at every moment; `settle` says what became of a step.
* `load_state(state())` goes on as if nothing had happened, unfinished episodes included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from learner.advantages import ADVANTAGES
from learner.batch import Batch, TokenSequence
from learner.ledger import Ledger
from learner.sequences import linearise
from learner.settings import BatchSettings
from rollout.admission import Admission
from rollout.trajectory import Episode, EpisodeEnd, Record, Segment, decode, encode


class BufferError(Exception):
    """A record that cannot be right, by its key: a gap in an episode, or records after its end."""


@dataclass(slots=True)
class _Progress:
    order: Episode
    segments: list[Segment] = field(default_factory=list)
    end: EpisodeEnd | None = None


class TrajectoryBuffer:
    """Joins records into groups and releases them to the trainer as `admission` allows.

    The life of a group: `admission.admit()`, `dispatch(episodes)`, `add(record)` for each record, `take()`, `settle(batch)`.
    """

    def __init__(self, settings: BatchSettings, admission: Admission, ledger: Ledger, *, max_tokens: int) -> None:
        self.admission = admission
        self.ledger = ledger
        self._settings = settings
        self._advantage = ADVANTAGES[settings.advantage]
        self._max_tokens = max_tokens
        self._episodes: dict[str, _Progress] = {}
        self._groups: dict[int, list[str]] = {}
        self._early: dict[str, list[Segment | EpisodeEnd]] = {}
        self._given_up: set[str] = set()
        """Episodes of dropped groups that have not ended."""
        self._taken: Batch | None = None

    # In

    def dispatch(self, episodes: Sequence[Episode]) -> None:
        """The members of one group that was admitted, all of them at once."""
        group = {episode.group for episode in episodes}
        if len(group) != 1:
            raise BufferError(f"episodes of groups {sorted(group)} dispatched as one")
        self.ledger.dispatch(episode.id for episode in episodes)
        self._groups[group.pop()] = [episode.id for episode in sorted(episodes, key=lambda episode: episode.member)]
        for episode in episodes:
            self._episodes[episode.id] = _Progress(episode)
        for episode in episodes:
            for record in self._early.pop(episode.id, ()):
                self.add(record)

    def add(self, record: Record) -> None:
        """One record. Raises `BufferError` if it contradicts what came before it."""
        if isinstance(record, Episode):
            return
        progress = self._episodes.get(record.episode_id)
        if record.episode_id in self._given_up:
            if isinstance(record, EpisodeEnd):
                self._given_up.remove(record.episode_id)
        elif progress is None:
            self._early.setdefault(record.episode_id, []).append(record)
        elif progress.end is not None:
            raise BufferError(f"episode {record.episode_id}: a record with index {record.index} came after its end")
        elif record.index > len(progress.segments):
            raise BufferError(
                f"episode {record.episode_id}, attempt {record.attempt}: index {record.index} came where"
                f" {len(progress.segments)} was expected: records in between are missing"
            )
        else:
            del progress.segments[record.index :]
            if isinstance(record, Segment):
                progress.segments.append(record)
            else:
                self._end(progress, record)

    def _end(self, progress: _Progress, end: EpisodeEnd) -> None:
        progress.end = end
        if end.failure is not None:
            self.ledger.fail(end.episode_id, end.failure.kind)
            progress.segments.clear()
        elif self._longest(progress.segments) > self._max_tokens:
            self.ledger.drop(end.episode_id, "too_long")
        group = progress.order.group
        members = [self._episodes[episode_id] for episode_id in self._groups[group]]
        if all(member.end is not None for member in members):
            self._close(group, members)

    def _longest(self, segments: Sequence[Segment]) -> int:
        depth: list[int] = []
        for segment in segments:
            before = 0 if segment.parent is None else depth[segment.parent]
            depth.append(before + len(segment.env_tokens) + len(segment.sampled_tokens))
        return max(depth, default=0)

    def _close(self, group: int, members: Sequence[_Progress]) -> None:
        """All members have ended: tell admission whether the group can be trained on."""
        rewards = self._rewards(members)
        if np.isfinite(rewards).sum() < self._settings.min_members:
            self.admission.fail(group)
            self._forget(group, "group_too_small")
        elif self._settings.no_signal == "resample" and not self._advantage(rewards).any():
            self.admission.drop(group, "no_signal")
            self._forget(group, "no_signal")
        else:
            versions = [
                version
                for member in members
                if self.ledger.is_open(member.order.id)
                for segment in member.segments
                for version, _ in segment.versions
            ]
            self.admission.finish(group, min(versions, default=self.admission.version))

    def _rewards(self, members: Sequence[_Progress]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return of each member [members]: the episode's reward and those of its turns; NaN where it failed."""
        return np.array(
            [
                np.nan
                if member.end is None or member.end.reward is None
                else member.end.reward + sum(segment.reward for segment in member.segments)
                for member in members
            ]
        )

    def drop(self, group: int, reason: str) -> None:
        """Give up a group that no step has taken: those of its episodes that have not ended another way are dropped."""
        if group not in self._groups:
            raise BufferError(f"group {group} is not held: it was never dispatched, or has ended")
        self.admission.drop(group, reason)
        self._forget(group, reason)

    def _forget(self, group: int, reason: str) -> None:
        """Drop what is left of a group."""
        for episode_id in self._groups.pop(group):
            progress = self._episodes.pop(episode_id)
            if progress.end is None:
                self._given_up.add(episode_id)
            if self.ledger.is_open(episode_id):
                self.ledger.drop(episode_id, reason)

    # Out

    def take(self) -> Batch | None:
        """The next step's groups, or None while there are not enough. `settle` must be called before the next `take`."""
        if self._taken is not None:
            raise BufferError("the batch taken last has not been settled")
        selection = self.admission.take()
        for group in selection.stale:
            self._forget(group, "stale")
        if not selection.groups:
            return None
        sequences: list[TokenSequence] = []
        trained: list[str] = []
        rewards: list[float] = []
        dropped: Counter[str] = Counter()
        for group in selection.groups:
            members = [self._episodes.pop(episode_id) for episode_id in self._groups.pop(group)]
            returns = self._rewards(members)
            advantages = self._advantage(returns)
            rewards += [float(value) for value in returns if np.isfinite(value)]
            left_out = self._settings.no_signal == "drop" and not advantages.any()
            for member, advantage in zip(members, advantages, strict=True):
                if not self.ledger.is_open(member.order.id):
                    continue
                parts = [] if left_out else linearise(member.order.id, member.segments, float(advantage))
                if parts:
                    sequences += parts
                    trained.append(member.order.id)
                else:
                    reason = "no_signal" if left_out else "no_tokens"
                    self.ledger.drop(member.order.id, reason)
                    dropped[reason] += 1
        self._taken = Batch(
            groups=selection.groups,
            sequences=tuple(sequences),
            trained=tuple(trained),
            rewards=tuple(rewards),
            dropped=dict(dropped),
        )
        return self._taken

    def settle(self, batch: Batch, *, version: int, skipped: bool = False) -> None:
        """The step on `batch` is done, from weights `version`; or it was skipped, and its episodes are dropped."""
        if batch is not self._taken:
            raise BufferError("this is not the batch taken last")
        self._taken = None
        for episode_id in batch.trained:
            if skipped:
                self.ledger.drop(episode_id, "bad_step")
            else:
                self.ledger.train(episode_id)
        if not skipped:
            self.ledger.lag.add(batch.lag(version))

    # State

    @property
    def open_groups(self) -> tuple[int, ...]:
        return tuple(self._groups)

    def open_episodes(self) -> Iterable[Episode]:
        """Orders of episodes that have not ended, for a dispatcher that resumes."""
        return (progress.order for progress in self._episodes.values() if progress.end is None)

    @property
    def held_tokens(self) -> int:
        """Tokens of all segments held."""
        return sum(
            len(segment.env_tokens) + len(segment.sampled_tokens)
            for progress in self._episodes.values()
            for segment in progress.segments
        )

    def state(self) -> dict[str, Any]:
        """Plain data for msgpack; admission and ledger have their own. A batch that was taken must be settled first."""
        if self._taken is not None:
            raise BufferError("the batch taken last has not been settled")
        return {
            "episodes": [
                [encode(p.order), [encode(segment) for segment in p.segments], None if p.end is None else encode(p.end)]
                for p in self._episodes.values()
            ],
            "groups": [[group, ids] for group, ids in self._groups.items()],
            "early": [[encode(record) for record in records] for records in self._early.values()],
            "given_up": sorted(self._given_up),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._episodes = {}
        for order, segments, end in state["episodes"]:
            episode, last = decode(order), None if end is None else decode(end)
            assert isinstance(episode, Episode)
            assert last is None or isinstance(last, EpisodeEnd)
            progress = _Progress(episode, [], last)
            progress.segments = [segment for data in segments if isinstance(segment := decode(data), Segment)]
            self._episodes[episode.id] = progress
        self._groups = {int(group): list(ids) for group, ids in state["groups"]}
        self._early = {}
        for records in state["early"]:
            for record in map(decode, records):
                assert not isinstance(record, Episode)
                self._early.setdefault(record.episode_id, []).append(record)
        self._given_up = set(state["given_up"])
        self._taken = None
