"""The figures of a run: token lag, shares of time, rates, and the log that survives a resume."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.metrics import BusyShare, MetricsLog, Rate, Stopwatch, TokenLag, lag_of, read_rows


class Hand:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.dictionaries(st.integers(0, 12), st.integers(1, 50), min_size=1))
def test_token_lag_is_that_of_the_tokens_one_by_one(counts: dict[int, int]) -> None:
    lag = TokenLag(counts)
    tokens = np.repeat(list(counts), list(counts.values()))
    assert lag.total == len(tokens)
    assert lag.mean == pytest.approx(tokens.mean())
    assert lag.max == tokens.max()
    assert lag.percentile(0.95) == np.percentile(tokens, 95, method="inverted_cdf")


def test_token_lag_of_nothing_is_zero() -> None:
    assert TokenLag().summary() == {"mean": 0.0, "p95": 0, "max": 0}


def test_stopwatch_shows_the_share_also_while_it_runs() -> None:
    clock = Hand()
    watch = Stopwatch(clock)
    clock.now += 6
    with watch.running():
        clock.now += 2
        assert watch.share == pytest.approx(2 / 8)
    clock.now += 2
    assert watch.spent == 2
    assert watch.share == pytest.approx(2 / 10)


def test_stopwatch_goes_on_after_a_resume() -> None:
    clock = Hand()
    watch = Stopwatch(clock, elapsed=90.0, spent=30.0)
    clock.now += 10
    assert watch.elapsed == pytest.approx(100)
    assert watch.share == pytest.approx(0.3)


def test_rate_forgets_what_is_older_than_its_window() -> None:
    clock = Hand()
    rate = Rate(10.0, clock)
    rate.add(500)
    clock.now += 5
    assert rate.per_second == pytest.approx(100)
    clock.now += 6
    rate.add(20)
    assert rate.per_second == pytest.approx(2)
    assert rate.total == 520


def test_busy_share_survives_a_restart_of_the_server() -> None:
    clock = Hand()
    share = BusyShare(clock)
    assert share.idle == 0
    for step, counter in ((0, 40.0), (10, 45.0), (10, 2.5)):
        clock.now += step
        share.read(counter)
    assert share.busy == pytest.approx(7.5)
    assert share.idle == pytest.approx(1 - 7.5 / 20)


def test_rows_reach_the_file_and_tensorboard(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.jsonl", tmp_path / "board")
    log.write("step", 1, {"reward": 0.5, "lag_counts": {"0": 3, "2": 1}, "note": "text"})
    log.close()
    assert read_rows(tmp_path / "m.jsonl") == [
        {"kind": "step", "step": 1, "reward": 0.5, "lag_counts": {"0": 3, "2": 1}, "note": "text"}
    ]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert board.Scalars("step/reward")[0].value == pytest.approx(0.5)
    assert lag_of(read_rows(tmp_path / "m.jsonl")).counts == {0: 3, 2: 1}


def test_a_resume_drops_the_steps_that_are_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    rows = [{"kind": "eval", "step": 0}, {"kind": "step", "step": 1}, {"kind": "step", "step": 2}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "st')
    log = MetricsLog(path, tmp_path / "board", resume_step=1)
    log.write("step", 2, {"reward": 1.0})
    log.close()
    assert [(row["kind"], row["step"]) for row in read_rows(path)] == [("eval", 0), ("step", 1), ("step", 2)]
    assert read_rows(path)[-1]["reward"] == 1.0
