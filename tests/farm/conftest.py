"""Whole runs in processes of their own, on a task set whose episodes are long enough to be caught in the middle."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]

CONFIG = """
[run]
name = "{name}"
folder = "{folder}"
steps = 5
seed = 3
max_failed_share = 1.0

[tasks]
set = "tests.farm.slow_tasks:load"

[limits]
max_turns = 2
max_tokens = 400
turn_tokens = 24

[batch]
groups_per_step = 2
group_size = 3
no_signal = "keep"

[async]
max_staleness = 1

[optimizer]
learning_rate = 1e-3
threads = 1

[lease]
ttl_s = 2.0
renew_s = 0.5

[checkpoint]
every = 1

[eval]
size = 0

[farm]
concurrency = 16
"""


class Run:
    """One `farmhand train`, and what it leaves."""

    def __init__(self, folder: Path) -> None:
        # No two runs of this host share a name: their sandboxes carry it.
        self.name = f"run-{secrets.token_hex(4)}"
        self.folder = folder / self.name
        self.config = folder / "config.toml"
        self.config.write_text(CONFIG.format(folder=folder, name=self.name))
        self.log = folder / "output.txt"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "learner", "train", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                start_new_session=True,
            )

    def begin(self, *overrides: str) -> None:
        sets = [part for text in overrides for part in ("--set", text)]
        self.start(str(self.config), *sets)

    def resume(self) -> None:
        self.start("--resume", str(self.folder))

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def until(self, what: Callable[[], bool], timeout: float = 90.0) -> None:
        """Wait for a state of the run; fails at once if the run has ended."""
        assert self.process is not None
        deadline = time.monotonic() + timeout
        while not what():
            assert self.process.poll() is None, f"the run ended with {self.process.returncode}:\n{self.output()}"
            assert time.monotonic() < deadline, f"nothing came of it within {timeout} s:\n{self.output()}"
            time.sleep(0.02)

    def ends(self, timeout: float = 120.0) -> int:
        assert self.process is not None
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end within {timeout} s:\n{self.output()}")

    def output(self) -> str:
        parts = [self.log, *sorted((self.folder / "logs").glob("*.log"))]
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in parts if path.exists())

    def children(self) -> dict[str, int]:
        try:
            found: dict[str, int] = json.loads((self.folder / "logs" / "children.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    def kill(self, child: str) -> None:
        os.kill(self.children()[child], signal.SIGKILL)

    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def step(self) -> int:
        return max((row["step"] for row in self.rows()), default=0)

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    def episodes(self) -> list[dict[str, Any]]:
        """Rows of the archive."""
        paths = sorted((self.folder / "episodes").glob("train-*.parquet"))
        return [row for path in paths for row in pq.read_table(path).to_pylist()]

    def clean_up(self) -> None:
        for pid in (*self.children().values(), *([self.pid] if self.process is not None else [])):
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if self.process is not None:
            self.process.wait(10)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    try:
        yield made
    finally:
        made.clean_up()


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
