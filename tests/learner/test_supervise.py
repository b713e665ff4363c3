"""Children of a run: they restart within a budget, fail with a clear message, and never outlive their owner."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from learner.supervise import ChildFailed, ChildSpec, Supervisor, backoff, tail

FOREVER = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = (
    "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
    "print('up', flush=True)\nwhile True: signal.pause()"
)


def python(name: str, code: str, **fields: object) -> ChildSpec:
    return ChildSpec(name=name, command=[sys.executable, "-c", code], **fields)  # type: ignore[arg-type]  # free-form fields


async def until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    for _ in range(int(timeout / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def says(path: Path, text: str) -> bool:
    return path.exists() and text in path.read_text()


async def test_leaving_ends_the_children_and_what_they_started(tmp_path: Path) -> None:
    log = tmp_path / "parent.log"
    code = (
        "import subprocess, sys, signal\n"
        f"child = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}])\n"
        "print('child', child.pid, flush=True)\n"
        "signal.pause()"
    )
    async with Supervisor(tmp_path) as family:
        child = await family.start(python("parent", code, grace_s=0.5))
        await until(lambda: says(log, "child") and says(log, "up"))
        inner = int(log.read_text().split("child ")[1].split()[0])
        outer = child.pid
        assert outer is not None
        assert json.loads((tmp_path / "children.json").read_text()) == {"parent": outer}
    assert gone(outer)
    assert gone(inner)
    assert not (tmp_path / "children.json").exists()


async def test_the_last_started_ends_first(tmp_path: Path) -> None:
    book = tmp_path / "order"
    code = "import signal, sys\n" + (
        f"def stop(*_):\n    open({str(book)!r}, 'a').write(sys.argv[1])\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\nprint('up', flush=True)\nsignal.pause()"
    )
    async with Supervisor(tmp_path) as family:
        for name in "abc":
            await family.start(ChildSpec(name=name, command=[sys.executable, "-c", code, name]))
            await until(lambda name=name: says(tmp_path / f"{name}.log", "up"))  # type: ignore[misc]  # bound at once
    assert book.read_text() == "cba"


async def test_a_killed_child_comes_back_and_the_owner_hears_of_it(tmp_path: Path) -> None:
    restarted = asyncio.Event()

    async def on_restart() -> None:
        restarted.set()

    async with Supervisor(tmp_path) as family:
        child = await family.start(python("phoenix", FOREVER, on_restart=on_restart))
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(10):
            await restarted.wait()
        assert child.pid not in {None, first}
        assert json.loads((tmp_path / "children.json").read_text()) == {"phoenix": child.pid}
        assert child.starts == 2


async def test_a_child_that_keeps_dying_ends_the_run_with_its_name_and_log(tmp_path: Path) -> None:
    async def live() -> None:
        async with Supervisor(tmp_path) as family:
            await family.start(python("mayfly", "print('cannot find my wings'); raise SystemExit(3)", restarts=1))
            await asyncio.sleep(30)

    with pytest.raises(ExceptionGroup) as caught:
        await live()
    (error,) = caught.value.exceptions
    assert isinstance(error, ChildFailed)
    assert error.name == "mayfly"
    assert "2 times" in str(error)
    assert "exit code 3" in str(error)
    assert "cannot find my wings" in str(error)


async def test_a_child_that_ends_before_it_is_ready_fails_the_start(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    async with Supervisor(tmp_path) as family:
        with pytest.raises(ChildFailed, match=r"(?s)early ended at its start with exit code 1.*no such port"):
            await family.start(python("early", "raise SystemExit('no such port')", ready=never))


async def test_a_silent_child_fails_the_start_and_is_ended(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    async with Supervisor(tmp_path) as family:
        with pytest.raises(ChildFailed, match=r"was not ready within 0.3 s"):
            await family.start(python("silent", FOREVER, ready=never, ready_timeout_s=0.3))
        assert family.pids() == {}


async def test_cancelling_the_stop_kills_at_once(tmp_path: Path) -> None:
    family = Supervisor(tmp_path)
    await family.__aenter__()
    child = await family.start(python("stubborn", STUBBORN, grace_s=60.0))
    await until(lambda: says(tmp_path / "stubborn.log", "up"))
    pid = child.pid
    assert pid is not None
    leaving = asyncio.create_task(family.__aexit__(None, None, None))
    await until(lambda: says(tmp_path / "stubborn.log", "asked"))
    leaving.cancel()
    await asyncio.wait([leaving], timeout=5)
    await until(lambda: gone(pid))


async def test_children_die_with_an_owner_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom learner.supervise import ChildSpec, Supervisor\n"
        "async def main():\n"
        f"    async with Supervisor(Path({str(tmp_path)!r})) as family:\n"
        f"        await family.start(ChildSpec(name='orphan', command=[sys.executable, '-c', {FOREVER!r}]))\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    try:
        await until(lambda: says(tmp_path / "orphan.log", "up"))
        pid = json.loads((tmp_path / "children.json").read_text())["orphan"]
    finally:
        owner.kill()
        await owner.wait()
    await until(lambda: gone(pid))


def test_backoff_grows_to_a_bound() -> None:
    waits = [backoff(n) for n in range(1, 12)]
    assert waits == sorted(waits)
    assert waits[0] < 1
    assert waits[-1] == 10


def test_the_tail_of_a_log_that_nobody_wrote(tmp_path: Path) -> None:
    assert "nothing was written" in tail(tmp_path / "none.log")
