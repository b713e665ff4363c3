"""A run stops when too many of its episodes fail, and shows why."""

from __future__ import annotations

import pytest

from learner.failures import FailureBudget, TooManyFailures
from rollout.trajectory import EpisodeEnd, Failure


def end(n: int, kind: str | None) -> EpisodeEnd:
    failure = None if kind is None else Failure(kind=kind, message=f"no {kind} today", traceback="Traceback: line 7")
    status = "completed" if kind is None else "failed"
    reward = 1.0 if kind is None else None
    return EpisodeEnd(run="r", episode_id=f"e{n}", attempt=1, index=0, status=status, reward=reward, failure=failure)


def test_over_the_budget_the_run_stops_with_kinds_and_one_example_in_full() -> None:
    budget = FailureBudget(0.5, 4)
    for n, kind in enumerate(["sandbox", None, "policy"]):
        budget.add(end(n, kind))
    with pytest.raises(TooManyFailures) as caught:
        budget.add(end(3, "sandbox"))
    text = str(caught.value)
    parts = ("3 of the last 4", "sandbox 2", "policy 1", "e3", "no sandbox today", "line 7")
    assert [part for part in parts if part not in text] == []
    assert budget.kinds == {"sandbox": 2, "policy": 1}


def test_old_failures_are_forgiven() -> None:
    budget = FailureBudget(0.5, 4)
    for n, kind in enumerate(["sandbox", "sandbox", None, None, "sandbox", "sandbox", None, None] * 5):
        budget.add(end(n, kind))
    assert budget.kinds == {"sandbox": 20}


def test_what_the_run_cancelled_itself_is_no_failure() -> None:
    budget = FailureBudget(0.5, 4)
    for n in range(20):
        budget.add(end(n, "cancelled"))
    assert budget.kinds == {}
