"""`kill -9` of every part of a run, in the middle of episodes: no episode is lost, and the run comes to its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from sandbox.registry import get_backend
from tests.farm.conftest import Run, alive

pytestmark = pytest.mark.farm


def sandboxes(run: Run) -> list[str]:
    """Ids of the run's sandboxes on this host."""

    async def found() -> list[str]:
        backend = get_backend("local")
        try:
            return [info.id for info in await backend.sandboxes() if info.labels.get("run", "").startswith(run.name)]
        finally:
            await backend.close()

    return asyncio.run(found())


def assert_nothing_lost(run: Run, steps: int = 5) -> None:
    summary = run.summary()
    assert summary["outcome"] == "finished"
    assert summary["steps"] == steps
    ledger = summary["ledger"]
    assert ledger == {"dispatched": 30, "trained": 30, "failed": 0, "dropped": 0, "unfinished": 0}
    assert [row["step"] for row in run.rows() if row["kind"] == "step"] == list(range(1, steps + 1))
    episodes = run.episodes()
    assert len({row["episode"] for row in episodes}) == len(episodes) == 30
    assert all(row["status"] != "failed" for row in episodes)
    assert sandboxes(run) == []


def attempts(run: Run) -> list[int]:
    return [row["attempt"] for row in run.episodes()]


def test_kill_9_of_the_worker(run: Run) -> None:
    run.begin()
    run.until(lambda: run.step() >= 1 and bool(sandboxes(run)))
    run.kill("worker-1")
    assert run.ends() == 0, run.output()
    assert_nothing_lost(run)
    assert max(attempts(run)) == 2


def test_kill_9_of_the_policy_server(run: Run) -> None:
    run.begin()
    run.until(lambda: run.step() >= 1 and bool(sandboxes(run)))
    run.kill("policy")
    assert run.ends() == 0, run.output()
    assert_nothing_lost(run)
    # Every push after the restart was compared with the trainer's log-probs.
    assert all(row["push"]["difference"] < 0.002 for row in run.rows())


def test_kill_9_of_the_broker(run: Run) -> None:
    run.begin()
    run.until(lambda: run.step() >= 1 and bool(sandboxes(run)))
    run.kill("broker")
    assert run.ends() == 0, run.output()
    assert_nothing_lost(run)


def test_kill_9_of_the_trainer(run: Run) -> None:
    run.begin()
    run.until(lambda: run.step() >= 2 and bool(sandboxes(run)))
    children = run.children()
    left = sandboxes(run)
    os.kill(run.pid, signal.SIGKILL)
    assert run.ends() == -signal.SIGKILL
    wait_for_end_of(children)
    assert set(sandboxes(run)) & set(left), "a sandbox outlives the worker that made it"
    run.resume()
    assert run.ends() == 0, run.output()
    assert_nothing_lost(run)
    assert max(attempts(run)) == 2


def test_ctrl_c_leaves_nothing_behind_and_the_run_goes_on(run: Run) -> None:
    run.begin()
    run.until(lambda: run.step() >= 1 and bool(sandboxes(run)))
    children = run.children()
    os.kill(run.pid, signal.SIGINT)
    assert run.ends() == 130, run.output()
    assert [name for name, pid in children.items() if alive(pid)] == []
    assert sandboxes(run) == []
    assert list(run.folder.rglob("*.sock")) == []
    summary = run.summary()
    assert summary["outcome"] == "interrupted"
    counts: dict[str, Any] = summary["ledger"]
    assert counts["dispatched"] == counts["trained"] + counts["unfinished"]
    run.resume()
    assert run.ends() == 0, run.output()
    assert_nothing_lost(run)


def test_a_policy_server_that_does_not_come_back_stops_the_run_with_its_name(run: Run) -> None:
    run.begin("policy.url=http://127.0.0.1:9", "policy.retry_s=1", "publish.timeout_s=2")
    assert run.ends() == 1
    assert "http://127.0.0.1:9" in run.log.read_text()
    assert "policy.url" in run.log.read_text()
    assert "Traceback" not in run.log.read_text()


def test_a_full_disk_stops_the_run_clearly_and_it_goes_on_once_there_is_space(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    # A checkpoint takes about 18 MB.
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    subprocess.run([*root, "mount", "-t", "tmpfs", "-o", "size=12m", "farmhand-test", str(disk)], check=True)
    subprocess.run([*root, "chmod", "777", str(disk)], check=True)
    try:
        run = Run(disk)
        try:
            run.begin()
            assert run.ends() == 1, run.output()
            said = run.log.read_text()
            assert "the disk is full" in said
            assert "farmhand train --resume" in said
            assert "Traceback" not in said
            subprocess.run([*root, "mount", "-o", "remount,size=400m", str(disk)], check=True)
            run.resume()
            assert run.ends() == 0, run.output()
            assert_nothing_lost(run)
        finally:
            run.clean_up()
    finally:
        subprocess.run([*root, "umount", "-l", str(disk)], check=True)


def wait_for_end_of(children: dict[str, int]) -> None:
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in children.values()):
        assert time.monotonic() < deadline, f"children outlive their owner: {children}"
        time.sleep(0.02)
