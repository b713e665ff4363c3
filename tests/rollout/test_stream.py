"""Exactly once at the learner: whatever is delivered twice, by whichever attempt, each turn is taken once."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.store import Lease
from rollout.stream import Dedup
from rollout.trajectory import EpisodeEnd, Record, Segment
from tests.rollout.store_contract import end, keys, order, segment


def seg(attempt: int, index: int, episode_id: str = "e0") -> Segment:
    return segment(Lease(order(episode_id), attempt, "w", 30.0), index)


def fin(attempt: int, index: int, episode_id: str = "e0") -> EpisodeEnd:
    return end(Lease(order(episode_id), attempt, "w", 30.0), index)


def accepted(dedup: Dedup, records: list[Record]) -> list[Record]:
    return [record for record in records if dedup.accept(record)]


def test_a_repeated_record_is_taken_once() -> None:
    one = [seg(1, 0), seg(1, 1)]
    two, last = seg(1, 2), fin(1, 3)
    assert accepted(Dedup(), [*one, *one, two, *one, last, last]) == [*one, two, last]


def test_an_older_attempt_is_fenced_and_what_it_did_before_the_resume_point_stays() -> None:
    records: list[Record] = [seg(1, 0), seg(1, 1), seg(2, 1), seg(1, 2), fin(1, 2), seg(2, 2), fin(2, 3)]
    taken = accepted(Dedup(), records)
    assert [key[2:] for key in keys(taken)] == [(1, 0), (1, 1), (2, 1), (2, 2), (2, 3)]


def test_an_end_closes_its_episode_and_no_other() -> None:
    dedup = Dedup()
    assert len(accepted(dedup, [seg(1, 0), fin(1, 1)])) == 2
    assert accepted(dedup, [seg(1, 1), seg(2, 1), fin(2, 2), fin(1, 1)]) == []
    assert dedup.accept(seg(1, 0, "e1"))


def test_an_episode_that_never_ran_can_end() -> None:
    assert Dedup().accept(fin(0, 0))


def test_a_forgotten_episode_costs_nothing_and_stays_refused() -> None:
    dedup = Dedup(remembered=2)
    for name in ("a", "b", "c"):
        assert len(accepted(dedup, [seg(1, 0, name), fin(1, 1, name)])) == 2
    assert len(dedup) == 3
    dedup.forget(["a", "b", "c"])
    assert len(dedup) == 0
    assert not dedup.accept(seg(1, 0, "c"))
    assert len(json.dumps(dedup.state())) < 100


@pytest.mark.parametrize("bad", [{}, {"episodes": {}}])
def test_a_state_of_something_else_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(KeyError):
        Dedup().load_state(bad)


@st.composite
def wire(draw: st.DrawFn) -> list[Record]:
    """What a store can have written for two episodes: attempts that go on from some index of what is there."""
    lines: list[list[Record]] = []
    for name in ("e0", "e1"):
        line: list[Record] = []
        there = attempt = 0
        for _ in range(draw(st.integers(1, 3))):
            attempt += 1
            there = draw(st.integers(max(0, there - 1), there))
            for _ in range(draw(st.integers(0, 3))):
                line.append(seg(attempt, there, name))
                there += 1
        if draw(st.booleans()):
            line.append(fin(attempt, there, name))
        lines.append(line)
    merged: list[Record] = []
    while any(lines):
        merged.append(draw(st.sampled_from([line for line in lines if line])).pop(0))
    return merged


@given(records=wire(), data=st.data())
def test_any_redelivery_gives_what_one_delivery_gives(records: list[Record], data: st.DataObject) -> None:
    assert accepted(Dedup(), records) == records
    dedup = Dedup()
    taken: list[Record] = []
    at = 0
    while at < len(records):
        # The learner reads on for a while and dies; it comes back with its checkpoint, and reads some of it again.
        stop = data.draw(st.integers(at + 1, len(records)))
        taken += accepted(dedup, records[data.draw(st.integers(0, at)) : stop])
        state = json.loads(json.dumps(dedup.state()))
        dedup = Dedup()
        dedup.load_state(state)
        at = stop
    assert taken == records
