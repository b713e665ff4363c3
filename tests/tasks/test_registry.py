"""Task sets by name: what is found, and what a person reads when it is not."""

import sys
from pathlib import Path

import pytest

from tasks.base import TaskSet
from tasks.registry import TaskSetError, known_task_sets, load_task_set

PLUGIN = """
from tasks.base import Task

class Words:
    name = "words"
    def __init__(self, text="hello"): self.text = text
    def size(self, split): return 1
    def task(self, split, index): return Task(id=f"words/{split}/{index}", env="coding", instruction=self.text)

class Holder:
    inner = Words

def broken(): raise RuntimeError("no data here")
def wrong(): return 7
value = 3
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "plugin_for_tests.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "plugin_for_tests", raising=False)
    return "plugin_for_tests"


def test_the_shell_set_is_known_and_loads_by_name() -> None:
    assert "shell" in known_task_sets()
    assert load_task_set("shell").name == "shell"


def test_a_module_in_the_working_folder_is_a_plugin_and_takes_options(plugin: str) -> None:
    found = load_task_set(f"{plugin}:Words", text="do it")
    assert isinstance(found, TaskSet)
    assert found.task("train", 0).instruction == "do it"
    assert load_task_set(f"{plugin}:Holder.inner").name == "words"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(TaskSetError, match=r"unknown task set 'shel'; known: .*shell.*package\.module:name"):
        load_task_set("shel")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module_anywhere:Words", "No module named"),
        ("plugin_for_tests:nothing", "nothing"),
        ("plugin_for_tests:value", "not callable"),
        ("plugin_for_tests:broken", "RuntimeError: no data here"),
        ("plugin_for_tests:wrong", "returned int"),
    ],
)
def test_a_loader_that_cannot_be_used_is_named_with_the_reason(plugin: str, name: str, said: str) -> None:
    with pytest.raises(TaskSetError) as caught:
        load_task_set(name)
    assert repr(name) in str(caught.value)
    assert said in str(caught.value)


def test_a_wrong_option_is_reported_with_what_was_given() -> None:
    with pytest.raises(TaskSetError, match=r"families.*'dance'.*make_file.*tasks\.options"):
        load_task_set("shell", families=["dance"])
    with pytest.raises(TaskSetError, match="speed=3"):
        load_task_set("shell", speed=3)
