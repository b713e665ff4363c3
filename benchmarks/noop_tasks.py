"""A task set of no-op episodes, for the driver's benchmark: `benchmarks.noop_tasks:load`."""

from __future__ import annotations

from tasks.base import Limits, Split, Task


class NoopTasks:
    name = "noop"

    def __init__(self, turns: int) -> None:
        self._turns = turns

    def size(self, split: Split) -> int:
        return 1_000_000

    def task(self, split: Split, index: int) -> Task:
        return Task(
            id=f"noop/{index}",
            env="noop",
            instruction="Make the file answer.txt in the folder out, with the text: forty two",
            sandbox={"kind": "memory"},
            limits=Limits(max_turns=self._turns + 1, max_tokens=100_000, episode_timeout_s=3600),
            params={"turns": self._turns, "observation": "(no output)"},
        )


def load(turns: int = 10) -> NoopTasks:
    return NoopTasks(turns)
