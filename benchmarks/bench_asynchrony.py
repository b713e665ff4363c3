"""How long each side of the quickstart waits, with staleness and without: two runs of `SECONDS` each, one after the other.

They differ in `async.max_staleness` alone. A short evaluation goes before each, so that no process is still starting.
"""

from __future__ import annotations

import tempfile

from benchmarks.bench_quickstart import train
from benchmarks.results import Row, write_results

SECONDS = 60


def main() -> None:
    short = (f"run.time_limit_s={SECONDS}", "eval.size=48", "eval.at_end=false")
    with tempfile.TemporaryDirectory() as folder:
        runs, _ = train(folder, "async", *short)
        waits, _ = train(folder, "sync", *short, "async.max_staleness=0")
    rows = [
        Row(
            name=f"quickstart: idle share of the {side}, asynchronous",
            value=runs["idle"][side],
            unit="",
            baseline=waits["idle"][side],
            against="max_staleness = 0",
        )
        for side in ("learner", "policy")
    ]
    rows.append(
        Row(
            name=f"quickstart: steps in {SECONDS} s, asynchronous",
            value=runs["steps"],
            unit="steps",
            baseline=waits["steps"],
            against="max_staleness = 0",
        )
    )
    write_results("asynchrony", rows)


if __name__ == "__main__":
    main()
