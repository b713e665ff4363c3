"""The shell tasks, with a setup that takes its time: at any moment of a run there are episodes in the middle of one."""

from __future__ import annotations

from tasks.base import Split, Task
from tasks.shell import load as load_shell


class SlowTasks:
    name = "slow"

    def __init__(self, seconds: float) -> None:
        self._inner = load_shell(size_train=50, size_test=10)
        self._seconds = seconds

    def size(self, split: Split) -> int:
        return self._inner.size(split)

    def task(self, split: Split, index: int) -> Task:
        task = self._inner.task(split, index)
        verify = f"sleep {self._seconds}\n{task.params['verify']}"
        return task.model_copy(update={"params": {**task.params, "verify": verify}})


def load(seconds: float = 0.5) -> SlowTasks:
    return SlowTasks(seconds)


class BrokenTasks(SlowTasks):
    """Tasks whose verifier prints no reward."""

    def task(self, split: Split, index: int) -> Task:
        task = super().task(split, index)
        return task.model_copy(update={"params": {**task.params, "verify": "echo nonsense"}})


def broken() -> BrokenTasks:
    return BrokenTasks(0.0)
