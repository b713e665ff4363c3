"""`farmhand report RUN`: where a run's episodes went, and how stale its tokens were when they were trained on.

Guarantees: reads `ledger.json` alone, which the trainer replaces whole after every step; a ledger that does not add up is said
to be so in the first line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from learner.metrics import TokenLag
from learner.run import RunError, RunFolder

BAR = 40
"""Characters of the longest bar."""


def render(folder: RunFolder) -> RenderableType:
    """Raises `RunError` if the run has no ledger yet."""
    try:
        ledger = json.loads(folder.ledger.read_text())
    except FileNotFoundError:
        raise RunError(f"{folder.path} has no ledger yet: it is written with the first step") from None
    return render_ledger(ledger)


def render_ledger(ledger: Mapping[str, Any]) -> RenderableType:
    """`ledger` is what `learner.ledger.Ledger.state` gives."""
    counts = ledger["counts"]
    parts = sum(counts[name] for name in ("trained", "failed", "dropped", "unfinished"))
    unaccounted = counts["dispatched"] - parts
    table = Table(title="Ledger of train episodes", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("dispatched", f"{counts['dispatched']}")
    table.add_row("= trained on", f"{counts['trained']}")
    for name in ("failed", "dropped"):
        table.add_row(f"+ {name}", f"{counts[name]}")
        for reason, count in sorted(ledger[name].items()):
            table.add_row(Text(f"    {reason}", style="dim"), Text(f"{count}", style="dim"))
    table.add_row("+ unfinished", f"{counts['unfinished']}")
    table.add_row("unaccounted for", f"{unaccounted}", style="bold red" if unaccounted else "bold")
    return Group(table, _histogram(TokenLag({int(lag): int(count) for lag, count in ledger["lag"].items()})))


def _histogram(lag: TokenLag) -> RenderableType:
    if not lag.total:
        return Text("No token has been trained on yet.")
    figures = lag.summary()
    title = (
        f"Trained tokens by lag in weight versions (mean {figures['mean']:.2f}, p95 {figures['p95']}, max {figures['max']})"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("lag", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    most = max(lag.counts.values())
    for versions in range(lag.max + 1):
        count = lag.counts.get(versions, 0)
        table.add_row(f"{versions}", f"{count}", f"{100 * count / lag.total:.1f} %", "█" * round(BAR * count / most))
    return table
