"""Pictures of a run, made from its rows of metrics: `reward.png` and `staleness.png`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write both pictures; a run without steps gets none. Needs no display."""
    steps = [row for row in rows if row["kind"] == "step"]
    evals = [row for row in rows if row["kind"] == "eval"]
    if not steps:
        return []
    # The figure class is used without pyplot: no global state, no window system, safe beside other users of matplotlib.
    from matplotlib.figure import Figure

    reward = Figure(figsize=(7, 4), layout="constrained")
    axes = reward.subplots()
    axes.plot(
        [r["step"] for r in steps], [r["reward"] for r in steps], label="train, each step", color="tab:blue", alpha=0.8
    )
    if evals:
        marks = [r["step"] for r in evals]
        low = [max(0.0, r["score"] - r["low"]) for r in evals]
        high = [max(0.0, r["high"] - r["score"]) for r in evals]
        axes.errorbar(
            marks,
            [r["score"] for r in evals],
            yerr=[low, high],
            label="test, 95 % interval",
            color="tab:orange",
            marker="o",
            capsize=3,
        )
    axes.set(xlabel="step", ylabel="mean reward", title="Reward")
    axes.legend()

    staleness = Figure(figsize=(7, 4), layout="constrained")
    axes = staleness.subplots()
    axes.plot([r["step"] for r in steps], [r["lag_mean"] for r in steps], label="mean", color="tab:blue")
    axes.plot([r["step"] for r in steps], [r["lag_max"] for r in steps], label="max", color="tab:red", alpha=0.6)
    axes.set(xlabel="step", ylabel="weight versions behind", title="Staleness of trained tokens", ylim=(0, None))
    axes.legend()

    paths = []
    for name, figure in (("reward", reward), ("staleness", staleness)):
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120)
        paths.append(path)
    return paths
