"""`farmhand tasks validate` and the oracle behind it: bad tasks are found, named and counted."""

import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from envs.base import EnvError
from envs.cli import validate
from envs.oracle import oracle_calls
from tasks.base import Task

PLUGIN = """
from tasks.base import Task

SUBMIT = {"name": "submit", "arguments": {}}
DO = {"name": "bash", "arguments": {"command": "touch done"}}
GOOD = {"verify": "[ -e done ] && echo reward 1 || echo reward 0", "oracle": [DO, SUBMIT]}
PARAMS = {
    "good": GOOD,
    "free": {**GOOD, "verify": "echo reward 1"},
    "unsolved": {**GOOD, "oracle": [SUBMIT]},
    "broken": {**GOOD, "verify": "exit 3"},
    "bare": {"verify": "echo reward 0"},
}

class Set:
    name = "set"
    def __init__(self, *kinds): self.kinds = kinds
    def size(self, split): return len(self.kinds)
    def task(self, split, index):
        kind = self.kinds[index]
        return Task(id=f"set/{kind}", env="coding", instruction="x", family=kind, params=PARAMS[kind])

def good(): return Set("good", "good")
def empty(): return Set()
class Mute(Set):
    def size(self, split): raise RuntimeError("no size today")
def mute(): return Mute("good")
class Torn(Set):
    def task(self, split, index):
        if index == 1: raise RuntimeError("cannot draw it")
        return super().task(split, index)
def torn(): return Torn("good", "good", "good")
def bad(): return Set("good", "free", "unsolved", "broken", "bare")
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "validated_plugin.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "validated_plugin", raising=False)
    return "validated_plugin"


def test_valid_tasks_exit_0(plugin: str) -> None:
    result = CliRunner().invoke(validate, [f"{plugin}:good", "--split", "train"])
    assert result.exit_code == 0, result.output
    assert "2 tasks of validated_plugin:good/train are valid" in result.output


def test_each_invalid_task_is_named_with_what_is_wrong(plugin: str) -> None:
    result = CliRunner().invoke(validate, [f"{plugin}:bad", "--jobs", "2"])
    assert result.exit_code == 1
    text = result.output
    assert "set/free (free): oracle scored 1, doing nothing 1" in text
    assert "set/unsolved (unsolved): oracle scored 0, doing nothing 0" in text
    assert "set/broken (broken): task set/broken: verify ended with exit code 3" in text
    assert "set/bare (bare): task set/bare has no oracle" in text
    assert "4 of 5 tasks are not valid" in text


def test_the_generated_set_is_valid() -> None:
    result = CliRunner().invoke(validate, ["shell", "--count", "8", "--jobs", "4"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("oracle", [[], "ls", [{"name": "bash", "arguments": "ls"}], [{"tool": "bash"}]])
def test_an_oracle_that_is_no_list_of_calls_names_the_task(oracle: Any) -> None:
    with pytest.raises(EnvError, match="task o/1"):
        oracle_calls(Task(id="o/1", env="coding", instruction="x", params={"oracle": oracle}))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("empty", "size('test') of the set is 0, expected a whole number of at least 1"),
        ("mute", "RuntimeError: no size today"),
    ],
)
def test_a_set_without_a_size_is_not_valid(plugin: str, name: str, told: str) -> None:
    result = CliRunner().invoke(validate, [f"{plugin}:{name}"])
    assert result.exit_code == 1
    assert told in result.output


def test_a_task_that_cannot_be_made_is_one_finding_among_the_others(plugin: str) -> None:
    result = CliRunner().invoke(validate, [f"{plugin}:torn"])
    assert result.exit_code == 1
    assert "test/1" in result.output
    assert "it cannot be made: RuntimeError: cannot draw it" in result.output
    assert "1 of 3 tasks are not valid" in result.output
