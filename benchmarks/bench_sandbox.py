"""Local sandbox: create + run + destroy against bare bubblewrap, one command against a bare subprocess, and their CPU cost.

CPU is what the kernel accounts to this process and to its children, so that other load on the machine does not count.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import Row, write_results
from sandbox.base import SandboxSpec
from sandbox.local.backend import LocalBackend

ROUNDS = 100
MANY = 128
BWRAP = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]


@dataclass(frozen=True)
class Cost:
    """Of one round, in ms: median wall time; CPU of this process; CPU of its children, all they started included."""

    wall: float
    own: float
    children: float


def _children_cpu() -> float:
    """Seconds, of children that have ended and been waited for. A sandbox is one of them once it is killed."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


async def _measure(
    work: Callable[[], Awaitable[None]], rounds: int, end: Callable[[], Awaitable[None]] | None = None
) -> Cost:
    times = []
    own, children = time.process_time(), _children_cpu()
    for _ in range(rounds):
        start = time.perf_counter()
        await work()
        times.append(time.perf_counter() - start)
    own = time.process_time() - own
    if end is not None:
        await end()
    return Cost(statistics.median(times) * 1e3, own / rounds * 1e3, (_children_cpu() - children) / rounds * 1e3)


async def _bench(base: Path) -> list[Row]:
    backend = LocalBackend(base)
    spec = SandboxSpec()

    async def bare() -> None:
        subprocess.run(BWRAP, check=True)  # noqa: ASYNC221 - blocking is the baseline

    async def plain() -> None:
        subprocess.run(["/bin/sh", "-c", "true"], check=True)  # noqa: ASYNC221 - blocking is the baseline

    async def cycle() -> None:
        sandbox = await backend.create(spec)
        await sandbox.run("true")
        await sandbox.kill()

    await cycle()
    await bare()
    bwrap = await _measure(bare, ROUNDS)
    shell = await _measure(plain, ROUNDS)
    whole = await _measure(cycle, ROUNDS)
    sandbox = await backend.create(spec)

    async def one() -> None:
        await sandbox.run("true")

    run = await _measure(one, 5 * ROUNDS, end=sandbox.kill)
    sandbox = await backend.create(spec)

    async def write() -> None:
        await sandbox.write("file", b"x" * 1000)

    written = await _measure(write, ROUNDS)
    before = time.perf_counter()
    seen = await sandbox.run("head -c 300000000 /dev/zero")
    assert seen.truncated
    drain = 300 / (time.perf_counter() - before)
    await sandbox.kill()
    start = time.perf_counter()
    many = await asyncio.gather(*(backend.create(spec) for _ in range(MANY)))
    created = MANY / (time.perf_counter() - start)
    start = time.perf_counter()
    await asyncio.gather(*(each.run("true") for each in many for _ in range(5)))
    rate = 5 * MANY / (time.perf_counter() - start)
    start = time.perf_counter()
    await asyncio.gather(*(each.kill() for each in many))
    killed = MANY / (time.perf_counter() - start)
    await backend.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    against = "bwrap --unshare-all --ro-bind / / true"
    host = "sh -c true on the host"
    cycle_name = "local create + run true + destroy"
    return [
        Row(name=f"{cycle_name}, p50", value=whole.wall, unit="ms", baseline=bwrap.wall, against=against, target="<= 25"),
        Row(name=f"{cycle_name}, CPU inside", value=whole.children, unit="ms", baseline=bwrap.children, against=against),
        Row(name=f"{cycle_name}, CPU of the worker", value=whole.own, unit="ms", baseline=bwrap.own, against=against),
        Row(name="local run true, p50", value=run.wall, unit="ms", baseline=shell.wall, against=host),
        Row(name="local run true, CPU inside", value=run.children, unit="ms", baseline=shell.children, against=host),
        Row(name="local run true, CPU of the worker", value=run.own, unit="ms", baseline=shell.own, against=host),
        Row(name="local write 1 kB, p50", value=written.wall, unit="ms"),
        Row(name="local output drained", value=drain, unit="MB/s"),
        Row(name=f"local creates, {MANY} at once", value=created, unit="1/s"),
        Row(name=f"local runs, {5 * MANY} at once in {MANY} sandboxes", value=rate, unit="1/s"),
        Row(name=f"local kills, {MANY} at once", value=killed, unit="1/s"),
        Row(name="local worker's peak memory in all of this", value=peak, unit="MiB"),
    ]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="farmhand-bench-", dir="/tmp") as folder:
        Path(folder).chmod(0o711)
        write_results("sandbox", asyncio.run(_bench(Path(folder) / "sandboxes")))


if __name__ == "__main__":
    main()
