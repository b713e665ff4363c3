"""`farmhand report`: the ledger with its reasons, and the histogram of token lag."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from learner.cli import main
from learner.config import check_form
from learner.ledger import Ledger
from learner.run import RunFolder


def folder(tmp_path: Path) -> RunFolder:
    config = check_form({"run": {"steps": 1, "name": "r", "folder": str(tmp_path)}}, "test")
    return RunFolder.create(config, Path("test.toml"))


def report(run: RunFolder) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["report", str(run.path)])
    return result.exit_code, result.output


def test_every_episode_is_in_one_line_of_the_ledger(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.dispatch(f"e{n}" for n in range(10))
    for n in range(5):
        ledger.train(f"e{n}")
    ledger.fail("e5", "sandbox")
    ledger.fail("e6", "policy")
    ledger.drop("e7", "stale")
    ledger.lag.add({0: 60, 2: 20})
    run = folder(tmp_path)
    run.ledger.write_text(json.dumps(ledger.state()))
    code, text = report(run)
    lines = {" ".join(line.replace("│", " ").split()) for line in text.splitlines()}
    assert code == 0
    assert {"dispatched 10", "= trained on 5", "+ failed 2", "sandbox 1", "policy 1", "+ dropped 1", "stale 1"} <= lines
    assert {"+ unfinished 2", "unaccounted for 0"} <= lines
    assert "mean 0.50, p95 2, max 2" in text
    assert any(line.startswith("0 60 75.0 %") for line in lines)
    assert any(line.startswith("1 0 0.0 %") for line in lines)


def test_a_ledger_that_does_not_add_up_says_by_how_much(tmp_path: Path) -> None:
    run = folder(tmp_path)
    state = Ledger().state()
    state["counts"]["dispatched"] = 3
    run.ledger.write_text(json.dumps(state))
    assert "unaccounted for" in report(run)[1]
    assert " 3 " in report(run)[1].split("unaccounted for")[1].splitlines()[0]


def test_a_run_without_steps_and_a_folder_that_is_none(tmp_path: Path) -> None:
    code, text = report(folder(tmp_path))
    assert code == 1
    assert "has no ledger yet" in text
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert "expected the folder of a run" in result.output
