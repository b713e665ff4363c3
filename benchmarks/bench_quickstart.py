"""The quickstart as a whole: its score before and after, its memory, and how long each side waits with and without staleness.

The full run is `make train`'s. The idle shares come from two further runs of `IDLE_S` seconds each, one after the other, that
differ in `async.max_staleness` alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.results import Row, write_results

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples" / "quickstart.toml"
IDLE_S = 60


def _train(folder: str, name: str, *overrides: str) -> tuple[dict[str, Any], float]:
    """The run's summary, and the largest memory of all its processes together in MiB (shared pages shared out)."""
    sets = [f"run.folder={folder}", f"run.name={name}", *overrides]
    command = [sys.executable, "-m", "learner", "train", str(CONFIG), *(part for text in sets for part in ("--set", text))]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, _memory(process.pid))
        time.sleep(2)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    summary: dict[str, Any] = json.loads((Path(folder) / name / "summary.json").read_text())
    return summary, peak


def _memory(pid: int) -> float:
    total = 0
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    for process in family:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total / 2**20


def main() -> None:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        summary, memory = _train(folder, "full")
        start, end = summary["score_start"], summary["score_end"]
        seconds = summary["train_seconds"]
        what = f"quickstart: score on the test split after {seconds:.0f} s of training"
        rows.append(
            Row(
                name=what,
                value=end,
                unit="",
                target="at least 0.9 within 300 s",
                baseline=start,
                against="before, at most 0.5",
            )
        )
        rows.append(Row(name="quickstart: memory of all processes", value=memory, unit="MiB", target="at most 4,096"))
        lag = summary["token_lag"]
        rows.append(Row(name="quickstart: token lag, mean", value=lag["mean"], unit="versions"))
        rows.append(Row(name="quickstart: token lag, maximum", value=lag["max"], unit="versions"))
        short = (f"run.time_limit_s={IDLE_S}", "eval.size=0")
        waits, _ = _train(folder, "async", *short)
        stops, _ = _train(folder, "sync", *short, "async.max_staleness=0")
        for side in ("learner", "policy"):
            rows.append(
                Row(
                    name=f"quickstart: idle share of the {side}, asynchronous",
                    value=waits["idle"][side],
                    unit="",
                    baseline=stops["idle"][side],
                    against="max_staleness = 0",
                )
            )
        rows.append(
            Row(
                name=f"quickstart: steps in {IDLE_S} s, asynchronous",
                value=waits["steps"],
                unit="steps",
                baseline=stops["steps"],
                against="max_staleness = 0",
            )
        )
    write_results("quickstart", rows)


if __name__ == "__main__":
    main()
