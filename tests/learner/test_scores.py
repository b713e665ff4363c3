"""Scores of an evaluation: failures never count as zeros, and the interval is Wilson's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.scores import Evaluation, Tally, wilson
from rollout.trajectory import EpisodeEnd, Failure


def end(episode_id: str, reward: float | None) -> EpisodeEnd:
    failure = Failure(kind="sandbox", message="gone") if reward is None else None
    status = "failed" if reward is None else "completed"
    return EpisodeEnd(run="r", episode_id=episode_id, attempt=1, index=3, status=status, reward=reward, failure=failure)


@pytest.mark.parametrize(
    ("passed", "total", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (90, 100, 0.8256, 0.9448)],
)
def test_wilson_agrees_with_published_tables(passed: int, total: int, low: float, high: float) -> None:
    assert wilson(passed, total) == (pytest.approx(low, abs=5e-4), pytest.approx(high, abs=5e-4))


@given(st.integers(0, 500), st.integers(0, 500))
def test_wilson_holds_the_share_within_the_unit_interval(a: int, b: int) -> None:
    passed, total = min(a, b), max(a, b)
    low, high = wilson(passed, total)
    assert 0 <= low <= high <= 1
    if total:
        assert low - 1e-12 <= passed / total <= high + 1e-12


def test_a_failure_is_no_zero() -> None:
    evaluation = Evaluation({"a": "move", "b": "move", "c": "sort"})
    assert evaluation.add(end("a", 1.0))
    assert evaluation.add(end("b", 0.5))
    assert evaluation.missing == {"c"}
    assert evaluation.add(end("c", None))
    assert evaluation.complete
    row = evaluation.row()
    assert (row["score"], row["pass_rate"], row["scored"], row["failed"]) == (0.75, 0.5, 2, 1)
    assert evaluation.by_family() == {"move": Tally(2, 1, 1.5)}
    assert evaluation.failures() == {"sandbox": 1}


def test_strangers_and_repeated_ends_change_nothing() -> None:
    evaluation = Evaluation({"a": "move"})
    assert not evaluation.add(end("z", 1.0))
    evaluation.add(end("a", 1.0))
    evaluation.add(end("a", 0.0))
    assert evaluation.tally() == Tally(1, 1, 1.0)


def test_nothing_scored_is_no_score() -> None:
    row = Evaluation({"a": "x"}).row()
    assert row["score"] is None
    assert (row["low"], row["high"]) == (0.0, 1.0)
