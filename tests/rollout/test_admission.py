"""Admission, window and bound: the rules one by one, then all of them under random interleavings."""

import itertools

import msgpack
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout.admission import Admission, AdmissionError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def admit_all(admission: Admission) -> list[int]:
    return [admission.admit() for _ in range(admission.capacity())]


def test_capacity_is_a_batch_for_each_version_ahead() -> None:
    admission = Admission(batch=4, max_staleness=2)
    assert admit_all(admission) == list(range(12))
    with pytest.raises(AdmissionError, match="capacity"):
        admission.admit()
    for group in range(4):
        admission.finish(group, 0)
    assert admission.take().groups == (0, 1, 2, 3)
    assert admission.capacity() == 0
    admission.publish(1)
    assert admission.capacity() == 4


def test_no_more_groups_start_than_the_remaining_steps_need() -> None:
    admission = Admission(batch=4, max_staleness=5, steps=2)
    assert admission.capacity() == 8


def test_a_group_that_ends_without_being_trained_on_frees_its_place() -> None:
    admission = Admission(batch=2, max_staleness=0)
    first, second = admit_all(admission)
    admission.fail(first)
    admission.finish(second, 0)
    admission.drop(second, "no_signal")
    assert admission.capacity() == 2
    assert admission.failed == 1
    assert admission.dropped == {"no_signal": 1}


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_synchronous_steps_are_in_submission_order_whatever_finishes_first(order: tuple[int, ...]) -> None:
    admission = Admission(batch=4, max_staleness=0)
    admit_all(admission)
    for i, group in enumerate(order):
        assert admission.take().groups == (), f"after {i} groups"
        admission.finish(group, 0)
    assert admission.take().groups == (0, 1, 2, 3)


def test_the_window_holds_back_what_is_too_far_past_the_oldest_running_group() -> None:
    admission = Admission(batch=2, max_staleness=3, window=4)
    admit_all(admission)
    for group in (4, 5, 6, 7):
        admission.finish(group, 0)
    assert admission.take().groups == ()
    admission.finish(3, 0)
    # Group 0 runs: 1, 2 and 3 may go before it, 4 and later may not.
    assert admission.take().groups == ()
    assert admission.metrics()["held_back"] == 4
    admission.finish(0, 0)
    # Now group 1 is the oldest that runs.
    assert admission.take().groups == (0, 3)
    assert admission.take().groups == ()
    admission.finish(1, 0)
    assert admission.take().groups == (1, 4)


def test_a_head_that_takes_too_long_is_passed_over_and_may_still_be_trained_on() -> None:
    clock = Clock()
    admission = Admission(batch=2, max_staleness=3, window=2, head_timeout_s=10, clock=clock)
    admit_all(admission)
    clock.now = 5.0
    admission.finish(4, 0)
    admission.finish(5, 0)
    assert admission.deadline() == 10.0
    assert admission.take().groups == ()
    clock.now = 10.0
    # The next one has its own ten seconds from now on: passing over 0 does not let 4 and 5 in yet.
    assert admission.take().groups == ()
    assert admission.deadline() == 20.0
    for now in (20.0, 30.0):
        clock.now = now
        groups = admission.take().groups
    # Group 3 is the head, so that the window reaches to 4: one short of a batch.
    assert groups == ()
    admission.finish(0, 0)
    assert admission.take().groups == (0, 4)
    assert admission.passed_over == 3


def test_the_bound_drops_what_is_too_old_to_train_on() -> None:
    admission = Admission(batch=2, max_staleness=1, max_token_lag=1)
    admit_all(admission)
    for group, version in enumerate((0, 1, 1, 0)):
        admission.finish(group, version)
    admission.publish(2)
    selection = admission.take()
    assert selection.stale == (0, 3)
    assert selection.groups == (1, 2)
    assert admission.dropped == {"stale": 2}


def test_calls_that_the_groups_state_does_not_allow() -> None:
    admission = Admission(batch=1, max_staleness=1)
    admit_all(admission)
    admission.finish(0, 0)
    with pytest.raises(AdmissionError, match="group 0 is not running"):
        admission.finish(0, 0)
    with pytest.raises(AdmissionError, match="group 0 is not running"):
        admission.fail(0)
    with pytest.raises(AdmissionError, match="group 9 is not open"):
        admission.drop(9, "x")
    admission.publish(3)
    with pytest.raises(AdmissionError, match="version 2 after version 3"):
        admission.publish(2)


class Interleavings(RuleBasedStateMachine):
    """Any order of calls, with saves and loads in between, against the rules written down a second time."""

    @initialize(
        batch=st.integers(1, 4),
        staleness=st.integers(0, 3),
        window=st.none() | st.integers(1, 8),
        lag=st.none() | st.integers(0, 3),
        timeout=st.none() | st.just(10.0),
    )
    def begin(self, batch: int, staleness: int, window: int | None, lag: int | None, timeout: float | None) -> None:
        self.clock = Clock()
        self.options = {
            "batch": batch,
            "max_staleness": staleness,
            "window": window,
            "max_token_lag": lag,
            "head_timeout_s": timeout,
            "clock": self.clock,
        }
        self.admission = Admission(**self.options)  # type: ignore[arg-type]
        self.running: set[int] = set()
        self.ready: dict[int, int] = {}
        self.ends: dict[int, str] = {}
        self.slow: set[int] = set()

    @precondition(lambda self: self.admission.capacity() > 0)
    @rule()
    def admit(self) -> None:
        self.running.add(self.admission.admit())

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.running)))
        version = data.draw(st.integers(0, self.admission.version))
        self.admission.finish(group, version)
        self.running.remove(group)
        self.ready[group] = version

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.running)))
        self.admission.fail(group)
        self.running.remove(group)
        self.ends[group] = "failed"

    @precondition(lambda self: self.running or self.ready)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted([*self.running, *self.ready])))
        self.admission.drop(group, "given_up")
        self.running.discard(group)
        self.ready.pop(group, None)
        self.ends[group] = "dropped"

    @rule()
    def take(self) -> None:
        selection = self.admission.take()
        for group in selection.stale:
            assert self.admission.version - self.ready.pop(group) > self.options["max_token_lag"]  # type: ignore[operator]
            self.ends[group] = "dropped"
        assert len(selection.groups) in (0, self.options["batch"])
        assert list(selection.groups) == sorted(selection.groups)
        heads = self.running - self.slow
        for group in selection.groups:
            version = self.ready.pop(group)
            if self.options["max_token_lag"] is not None:
                assert self.admission.version - version <= self.options["max_token_lag"]  # type: ignore[operator]
            if heads and self.options["head_timeout_s"] is None:
                assert group < min(heads) + self.admission.window
            self.ends[group] = "consumed"
        if selection.groups:
            # The oldest ones that there are.
            assert all(group > max(selection.groups) for group in self.ready)

    @rule()
    def publish(self) -> None:
        self.admission.publish(self.admission.version + 1)

    @rule(seconds=st.sampled_from([1.0, 9.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def save_and_load(self) -> None:
        state = msgpack.unpackb(msgpack.packb(self.admission.state()))
        before = self.admission
        self.admission = Admission(**self.options)  # type: ignore[arg-type]
        self.admission.load_state(state)
        assert self.admission.state() == before.state()
        assert self.admission.capacity() == before.capacity()

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        admission = self.admission
        assert admission.running == len(self.running)
        assert admission.ready == len(self.ready)
        ends = list(self.ends.values())
        assert admission.consumed == ends.count("consumed")
        assert admission.failed == ends.count("failed")
        assert admission.dropped.total() == ends.count("dropped")
        assert admission.submitted == len(self.running) + len(self.ready) + len(ends)

    @invariant()
    def the_house_is_never_too_full(self) -> None:
        admission = self.admission
        room = (admission.version + 1 + admission.max_staleness) * admission.batch
        taken = admission.consumed + admission.ready + admission.running
        assert taken + admission.capacity() == room


TestInterleavings = Interleavings.TestCase
