"""What the terminal shows."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from learner.console import Display, Status, line
from learner.plots import draw
from learner.summary import IdleShares, LagFigures, LedgerCounts, Summary

STATUS = Status(
    run="demo", phase="training", step=3, steps=40, seconds=12.3, time_limit_s=300, reward_train=0.625, reward_test=0.5,
    tokens_in_s=1234.5, tokens_out_s=567.8, lag_mean=0.75, lag_max=2, queue_depth=7, open_episodes=96, idle_learner=0.25,
    idle_policy=0.125, failures={"sandbox": 2, "lost": 1},
)  # fmt: skip
EVERYTHING = ["3/40", "0.625", "0.500", "1,23", "568", "0.750", "2", "7", "25 %", "12 %", "sandbox 2", "lost 1"]


def test_a_plain_output_gets_one_line_a_step_with_every_figure() -> None:
    out = io.StringIO()
    display = Display(STATUS, Console(file=out, width=60, soft_wrap=True, highlight=False))
    with display.shown():
        display.stepped()
    lines = out.getvalue().splitlines()
    assert len(lines) == 1
    assert [text for text in EVERYTHING if text not in lines[0]] == []


def test_a_terminal_gets_a_table_with_every_figure() -> None:
    out = io.StringIO()
    display = Display(STATUS, Console(file=out, width=100, force_terminal=True, color_system=None, highlight=False))
    with display.shown():
        display.stepped()
        display.say("evaluated: 0.5")
    text = out.getvalue()
    assert [part for part in [*EVERYTHING, "evaluated: 0.5", "96"] if part not in text] == []


def test_what_is_not_known_yet_is_a_dash() -> None:
    assert "reward - (test -)" in line(Status())
    assert "failures" not in line(Status())


def test_pictures_of_a_run(tmp_path: Path) -> None:
    rows = [{"kind": "step", "step": n, "reward": n / 4, "lag_mean": 1.0, "lag_max": n} for n in (1, 2, 3)]
    rows += [{"kind": "eval", "step": 0, "score": 0.4, "low": 0.3, "high": 0.5}]
    paths = draw(rows, tmp_path)
    assert [path.name for path in paths] == ["reward.png", "staleness.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert draw(rows[-1:], tmp_path) == []


def counts(**changes: int) -> dict[str, int]:
    return {"dispatched": 10, "trained": 6, "failed": 1, "dropped": 1, "unfinished": 2} | changes


def test_a_ledger_that_does_not_add_up_is_refused() -> None:
    assert LedgerCounts(**counts()).dispatched == 10
    with pytest.raises(ValidationError, match="10 dispatched, 11 accounted for"):
        LedgerCounts(**counts(trained=7))


def test_the_summary_prints_and_reads_back(tmp_path: Path) -> None:
    summary = Summary(
        run="demo", outcome="finished", score_start=0.41, score_end=None, train_seconds=12.5, steps=3, weight_pushes=3,
        token_lag=LagFigures(mean=0.5, p95=2, max=3), idle=IdleShares(learner=0.2, policy=0.1),
        ledger=LedgerCounts(**counts()),
    )  # fmt: skip
    summary.write(tmp_path / "summary.json")
    assert Summary.model_validate_json((tmp_path / "summary.json").read_text()) == summary
    out = io.StringIO()
    Console(file=out, width=100).print(summary.table())
    assert [
        text
        for text in ("0.410 -> -", "0.50 / 2 / 3", "20 % / 10 %", "dispatched", "unfinished")
        if text not in out.getvalue()
    ] == []
