"""The quickstart as a whole, as `make train` runs it: its score before and after, its staleness and its memory."""

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


def train(folder: str, name: str, *overrides: str) -> tuple[dict[str, Any], float]:
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
        summary, memory = train(folder, "full")
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
    write_results("quickstart", rows)


if __name__ == "__main__":
    main()
