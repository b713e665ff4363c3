"""`farmhand eval`: a pass rate with its interval, trajectories on disk, and failures that are no zeros."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.farm.conftest import ROOT

pytestmark = pytest.mark.farm


def evaluate(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "learner", "eval", "--count", "40", "--concurrency", "16", "--out", str(out), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)


def test_the_quickstart_policy_has_room_to_learn_and_knows_something(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = evaluate(out)
    assert result.returncode == 0, result.stderr
    assert "95 % interval" in result.stdout
    figures = json.loads((out / "eval.json").read_text())
    assert (figures["scored"], figures["failed"]) == (40, 0)
    assert 0.1 < figures["score"] < 0.7
    assert figures["low"] < figures["pass_rate"] < figures["high"]
    assert len(figures["families"]) > 12
    rows = pq.read_table(next((out / "episodes").glob("*.parquet"))).to_pylist()
    assert len(rows) == 40
    assert sum(row["reward"] for row in rows) / 40 == pytest.approx(figures["score"])
    assert all("<|im_start|>user" in row["text"] for row in rows)

    again = evaluate(out)
    assert again.returncode == 1
    assert "holds a result already" in again.stderr


def test_failures_are_counted_beside_the_score(tmp_path: Path) -> None:
    result = evaluate(tmp_path / "out", "--tasks", "tests.farm.slow_tasks:broken", "--set", "eval.size=4")
    assert result.returncode == 1
    assert "no episode could be scored" in result.stderr
    figures = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert (figures["score"], figures["scored"], figures["failed"]) == (None, 0, 4)
    assert figures["failures"] == {"task": 4}
    assert "failed: task" in result.stdout


def test_a_policy_server_that_is_not_there_is_named_at_once(tmp_path: Path) -> None:
    result = evaluate(tmp_path / "out", "--policy-url", "http://127.0.0.1:9", "--set", "policy.retry_s=1")
    assert result.returncode == 1
    assert "no policy server answered at http://127.0.0.1:9" in result.stderr
    assert "Traceback" not in result.stderr
