"""The buffer: records to batches by the rules, and no episode lost under any interleaving."""

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from learner.batch import Batch
from learner.buffer import BufferError, TrajectoryBuffer
from learner.ledger import Ledger
from learner.settings import BatchSettings
from rollout.admission import Admission
from rollout.trajectory import Episode, EpisodeEnd, Failure, Segment


def order(group: int, member: int) -> Episode:
    return Episode(
        run="r",
        id=f"{group}.{member}",
        task_set="t",
        split="train",
        task_index=group,
        group=group,
        member=member,
        seed=0,
    )


def segment(
    episode: str,
    index: int,
    *,
    attempt: int = 1,
    tokens: int = 2,
    reward: float = 0.0,
    version: int = 0,
    parent: int | None = None,
    first: int = 10,
) -> Segment:
    return Segment(
        run="r",
        episode_id=episode,
        attempt=attempt,
        index=index,
        parent=(index - 1 if index else None) if parent is None else parent,
        branch=0,
        env_tokens=np.array([1]),
        sampled_tokens=np.arange(first, first + tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5),
        versions=((version, tokens),) if tokens else (),
        finish_reason="stop",
        reward=reward,
    )


def end(episode: str, index: int, reward: float | None, *, attempt: int = 1, kind: str = "sandbox") -> EpisodeEnd:
    failed = reward is None
    return EpisodeEnd(
        run="r",
        episode_id=episode,
        attempt=attempt,
        index=index,
        status="failed" if failed else "completed",
        reward=reward,
        failure=Failure(kind=kind, message="m") if failed else None,
    )


class House:
    """A buffer with its admission and ledger."""

    def __init__(self, *, max_tokens: int = 100, admission: dict[str, Any] | None = None, **settings: Any) -> None:
        self.options = {"batch": 1, "max_staleness": 1, **(admission or {})}
        self.settings = BatchSettings.model_validate({"group_size": 2, **settings})
        self.max_tokens = max_tokens
        self.make()

    def make(self) -> None:
        self.admission = Admission(**self.options)
        self.ledger = Ledger()
        self.buffer = TrajectoryBuffer(self.settings, self.admission, self.ledger, max_tokens=self.max_tokens)

    def start(self) -> int:
        group = self.admission.admit()
        self.buffer.dispatch([order(group, member) for member in range(self.settings.group_size)])
        return group

    def play(self, episode: str, reward: float | None, *, turns: int = 1, **options: Any) -> None:
        for index in range(turns):
            self.buffer.add(segment(episode, index, **options))
        self.buffer.add(end(episode, turns, reward))

    def take(self) -> Batch:
        batch = self.buffer.take()
        assert batch is not None
        return batch

    def reload(self) -> None:
        parts = (self.admission.state(), self.ledger.state(), self.buffer.state())
        states = msgpack.unpackb(msgpack.packb(parts))
        self.make()
        self.admission.load_state(states[0])
        self.ledger.load_state(states[1])
        self.buffer.load_state(states[2])
        assert msgpack.packb((self.admission.state(), self.ledger.state(), self.buffer.state())) == msgpack.packb(parts)


def test_a_whole_group_becomes_a_batch_with_its_advantages() -> None:
    house = House()
    house.start()
    house.play("0.0", 1.0, turns=2)
    assert house.buffer.take() is None
    house.play("0.1", 0.0)
    batch = house.take()
    assert (batch.groups, batch.trained, batch.rewards) == ((0,), ("0.0", "0.1"), (1.0, 0.0))
    assert [sequence.advantages.max() or sequence.advantages.min() for sequence in batch.sequences] == [0.5, -0.5]
    assert batch.sampled_tokens == 6
    house.buffer.settle(batch, version=2)
    assert house.ledger.counts() == {"dispatched": 2, "trained": 2, "failed": 0, "dropped": 0, "unfinished": 0}
    assert house.ledger.lag.counts == {2: 6}


def test_a_failed_member_has_no_part_in_anything() -> None:
    house = House(group_size=3)
    house.start()
    house.play("0.0", 1.0)
    house.play("0.1", None)
    house.play("0.2", 0.0)
    batch = house.take()
    assert batch.rewards == (1.0, 0.0)
    assert batch.trained == ("0.0", "0.2")
    assert {sequence.key.split()[1] for sequence in batch.sequences} == {"0.0", "0.2"}
    assert house.ledger.failed == {"sandbox": 1}


def test_a_group_with_too_few_valid_members_fails_and_another_may_start() -> None:
    house = House(admission={"max_staleness": 0})
    house.start()
    house.play("0.0", 1.0)
    house.play("0.1", None)
    assert house.buffer.take() is None
    assert house.admission.failed == 1
    assert house.admission.capacity() == 1
    assert house.ledger.counts() == {"dispatched": 2, "trained": 0, "failed": 1, "dropped": 1, "unfinished": 0}
    assert house.ledger.dropped == {"group_too_small": 1}
    assert house.buffer.held_tokens == 0


@pytest.mark.parametrize(("no_signal", "trained", "groups"), [("drop", 0, 1), ("keep", 2, 1), ("resample", 0, 0)])
def test_a_group_without_signal(no_signal: str, trained: int, groups: int) -> None:
    house = House(no_signal=no_signal)
    house.start()
    house.play("0.0", 1.0)
    house.play("0.1", 1.0)
    batch = house.buffer.take()
    assert (0 if batch is None else len(batch.groups)) == groups
    assert (0 if batch is None else len(batch.trained)) == trained
    if batch is not None:
        assert batch.rewards == (1.0, 1.0)
    assert house.ledger.dropped.total() == 2 - trained


def test_a_longer_sequence_than_can_be_run_is_dropped_whole_but_its_reward_counts() -> None:
    house = House(max_tokens=5)
    house.start()
    for index in range(2):
        house.buffer.add(segment("0.0", index, reward=0.5))
    house.buffer.add(end("0.0", 2, 0.0))
    house.play("0.1", 0.0)
    batch = house.take()
    assert batch.trained == ("0.1",)
    # 1.0 from the turns of the one that was too long, 0.0 from the other.
    assert batch.rewards == (1.0, 0.0)
    assert batch.sequences[0].advantages.min() == -0.5
    assert house.ledger.dropped == {"too_long": 1}


def test_a_sequence_of_exactly_that_length_is_trained_on() -> None:
    house = House(max_tokens=6)
    house.start()
    house.play("0.0", 1.0, turns=2)
    house.play("0.1", 0.0)
    assert house.take().trained == ("0.0", "0.1")


def test_tokens_that_are_left_out_do_not_make_a_group_stale() -> None:
    house = House(max_tokens=5, admission={"max_token_lag": 1})
    house.start()
    house.play("0.0", 0.0, turns=2, version=0)
    house.play("0.1", 1.0, version=2)
    house.admission.publish(3)
    assert house.take().trained == ("0.1",)


def test_a_later_attempt_replaces_what_the_earlier_one_wrote_from_there_on() -> None:
    house = House()
    house.start()
    for index in range(3):
        house.buffer.add(segment("0.0", index, reward=1.0))
    house.buffer.add(segment("0.0", 1, attempt=2, first=50))
    house.buffer.add(end("0.0", 2, 0.0, attempt=2))
    house.play("0.1", 0.0)
    batch = house.take()
    assert batch.rewards == (1.0, 0.0)
    assert batch.sequences[0].tokens.tolist() == [1, 10, 11, 1, 50, 51]


def test_an_end_cuts_off_what_an_earlier_attempt_wrote_past_it() -> None:
    house = House()
    house.start()
    for index in range(3):
        house.buffer.add(segment("0.0", index))
    house.buffer.add(end("0.0", 1, 1.0, attempt=2))
    house.play("0.1", 0.0)
    assert house.take().sequences[0].tokens.tolist() == [1, 10, 11]


def test_records_that_come_before_their_dispatch_are_kept() -> None:
    house = House()
    house.play("0.0", 1.0)
    house.reload()
    house.start()
    house.play("0.1", 0.0)
    assert house.take().trained == ("0.0", "0.1")


def test_an_episode_that_sampled_nothing_is_dropped() -> None:
    house = House()
    house.start()
    house.play("0.0", 1.0, turns=0)
    house.play("0.1", 0.0)
    batch = house.take()
    assert batch.trained == ("0.1",)
    assert batch.dropped == {"no_tokens": 1}


def test_a_stale_group_is_dropped_by_the_bound() -> None:
    house = House(admission={"max_token_lag": 1})
    house.start()
    house.play("0.0", 1.0, version=0)
    house.play("0.1", 0.0, version=5)
    house.admission.publish(5)
    assert house.buffer.take() is None
    assert house.ledger.dropped == {"stale": 2}
    assert house.buffer.open_groups == ()


def test_a_group_given_up_midway_is_accounted_for_and_its_late_records_go_nowhere() -> None:
    house = House(group_size=3)
    group = house.start()
    house.play("0.0", 1.0)
    house.play("0.1", None)
    house.buffer.add(segment("0.2", 0))
    house.buffer.drop(group, "given_up")
    assert house.ledger.counts() == {"dispatched": 3, "trained": 0, "failed": 1, "dropped": 2, "unfinished": 0}
    house.reload()
    house.buffer.add(segment("0.2", 1))
    house.buffer.add(end("0.2", 2, 1.0))
    assert house.buffer.take() is None
    state = house.buffer.state()
    assert not any(state.values()), state
    with pytest.raises(BufferError, match="group 0 is not held"):
        house.buffer.drop(group, "given_up")


def test_a_skipped_step_drops_its_episodes() -> None:
    house = House()
    house.start()
    house.play("0.0", 1.0)
    house.play("0.1", 0.0)
    house.buffer.settle(house.take(), version=0, skipped=True)
    assert house.ledger.dropped == {"bad_step": 2}
    assert house.ledger.lag.total == 0


def test_a_batch_must_be_settled_before_anything_else_is_taken_or_saved() -> None:
    house = House()
    house.start()
    house.play("0.0", 1.0)
    house.play("0.1", 0.0)
    batch = house.take()
    with pytest.raises(BufferError, match="not been settled"):
        house.buffer.take()
    with pytest.raises(BufferError, match="not been settled"):
        house.buffer.state()
    with pytest.raises(BufferError, match="not the batch taken last"):
        house.buffer.settle(Batch(groups=(), sequences=()), version=0)
    house.buffer.settle(batch, version=0)


def test_records_that_cannot_be_right_are_refused_by_key() -> None:
    house = House()
    house.start()
    with pytest.raises(BufferError, match=r"episode 0\.0, attempt 1: index 1 came where 0"):
        house.buffer.add(segment("0.0", 1))
    house.play("0.0", 1.0)
    with pytest.raises(BufferError, match=r"episode 0\.0: a record with index 1 came after its end"):
        house.buffer.add(segment("0.0", 1))
    with pytest.raises(BufferError, match="dispatched as one"):
        house.buffer.dispatch([order(3, 0), order(4, 0)])


class Interleavings(RuleBasedStateMachine):
    """Anything that can happen, in any order; an account of every episode is kept beside the ledger."""

    @initialize(
        size=st.integers(1, 3),
        least=st.integers(1, 2),
        no_signal=st.sampled_from(["drop", "keep", "resample"]),
        batch=st.integers(1, 2),
        staleness=st.integers(0, 2),
        lag=st.none() | st.integers(0, 2),
    )
    def begin(self, size: int, least: int, no_signal: str, batch: int, staleness: int, lag: int | None) -> None:
        self.house = House(
            group_size=size,
            min_members=least,
            no_signal=no_signal,
            max_tokens=12,
            admission={"batch": batch, "max_staleness": staleness, "max_token_lag": lag},
        )
        self.playing: dict[str, tuple[int, int]] = {}
        """(attempt, segments) of what still plays."""
        self.dispatched = 0
        self.trained: list[str] = []
        self.skipped: list[str] = []
        self.given_up: set[str] = set()

    def _pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.playing)))

    @precondition(lambda self: self.house.admission.capacity() > 0)
    @rule()
    def dispatch(self) -> None:
        group = self.house.start()
        for member in range(self.house.settings.group_size):
            self.playing[f"{group}.{member}"] = (1, 0)
            self.dispatched += 1

    @precondition(lambda self: self.playing)
    @rule(data=st.data(), tokens=st.integers(0, 5))
    def turn(self, data: st.DataObject, tokens: int) -> None:
        episode = self._pick(data)
        attempt, segments = self.playing[episode]
        version = data.draw(st.integers(0, self.house.admission.version))
        self.house.buffer.add(segment(episode, segments, attempt=attempt, tokens=tokens, version=version))
        self.playing[episode] = (attempt, segments + 1)

    @precondition(lambda self: self.playing)
    @rule(data=st.data())
    def new_attempt(self, data: st.DataObject) -> None:
        episode = self._pick(data)
        attempt, segments = self.playing[episode]
        self.playing[episode] = (attempt + 1, data.draw(st.integers(0, segments)))

    @precondition(lambda self: self.playing)
    @rule(data=st.data(), reward=st.sampled_from([None, 0.0, 0.0, 1.0, 1.0]))
    def finish(self, data: st.DataObject, reward: float | None) -> None:
        episode = self._pick(data)
        attempt, segments = self.playing.pop(episode)
        self.house.buffer.add(end(episode, segments, reward, attempt=attempt))
        self.given_up.discard(episode)

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        groups: Sequence[int] = self.house.buffer.open_groups
        if groups:
            group = data.draw(st.sampled_from(groups))
            self.house.buffer.drop(group, "given_up")
            self.given_up |= {episode for episode in self.playing if episode.startswith(f"{group}.")}

    @rule(skipped=st.booleans())
    def step(self, skipped: bool) -> None:
        batch = self.house.buffer.take()
        if batch is None:
            return
        assert len(batch.groups) == self.house.admission.batch
        assert {sequence.key.split()[1] for sequence in batch.sequences} == set(batch.trained)
        assert not set(batch.trained) & set(self.playing)
        (self.skipped if skipped else self.trained).extend(batch.trained)
        self.house.buffer.settle(batch, version=self.house.admission.version, skipped=skipped)
        if not skipped:
            self.house.admission.publish(self.house.admission.version + 1)

    @rule()
    def save_and_load(self) -> None:
        self.house.reload()

    @invariant()
    def every_episode_is_accounted_for(self) -> None:
        ledger, buffer = self.house.ledger, self.house.buffer
        counts = ledger.counts()
        assert counts["dispatched"] == self.dispatched
        assert counts["trained"] == len(self.trained) == len(set(self.trained))
        assert ledger.dropped["bad_step"] == len(self.skipped)
        # Whoever plays and was not given up is unfinished; what is unfinished is held by the buffer.
        assert set(self.playing) - self.given_up <= set(ledger.unfinished)
        assert {episode.id for episode in buffer.open_episodes()} == set(self.playing) - self.given_up
        assert {episode.split(".")[0] for episode in ledger.unfinished} <= {str(group) for group in buffer.open_groups}
        assert len(buffer.open_groups) == self.house.admission.running + self.house.admission.ready


TestInterleavings = Interleavings.TestCase
