"""The one shape of a benchmark's result, its file, and the table made of all files."""

from __future__ import annotations

import datetime
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Row:
    """`ratio` is `value / baseline` in the same run; what the baseline is stands in `against`."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    against: str = ""
    target: str = ""
    command: str = ""

    @property
    def ratio(self) -> float | None:
        return self.value / self.baseline if self.baseline else None


def cpu() -> str:
    """Model and number of the processors this process may use."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model} x {len(os.sched_getaffinity(0))}"


def write_results(name: str, rows: list[Row]) -> Path:
    """Write `results/NAME.json` and print it."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = f"python -m benchmarks {name}"
    data = [
        {**asdict(row), "command": row.command or command, "ratio": row.ratio, "date": today, "cpu": cpu()} for row in rows
    ]
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(data, indent=2) + "\n")
    for row in rows:
        print(f"{row.name}: {_number(row.value)} {row.unit}" + (f" (target {row.target})" if row.target else ""))
    return path


def render_table() -> str:
    """All results as one Markdown table."""
    lines = ["| benchmark | value | target | baseline | ratio | command | date | cpu |", "|---|---|---|---|---|---|---|---|"]
    for path in sorted(FOLDER.glob("*.json")):
        for row in json.loads(path.read_text()):
            baseline = f"{_number(row['baseline'])} ({row.get('against', '')})" if row.get("baseline") else ""
            ratio = f"{row['ratio']:.2f}" if row.get("ratio") else ""
            lines.append(
                f"| {row['name']} | {_number(row['value'])} {row['unit']} | {row.get('target', '')} | {baseline} | {ratio} "
                f"| `{row['command']}` | {row['date']} | {row['cpu']} |"
            )
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
