"""What the terminal shows while a run goes on: a live table, or plain lines where the output is no terminal.

Guarantees: the display only reads a `Status`; it never waits and never raises on missing values (they show as a dash).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text


@dataclass(slots=True)
class Status:
    """The state of a run at this moment. None: not known yet."""

    run: str = ""
    phase: str = "starting"
    step: int = 0
    steps: int | None = None
    seconds: float = 0.0
    time_limit_s: float | None = None
    reward_train: float | None = None
    reward_test: float | None = None
    tokens_in_s: float = 0.0
    tokens_out_s: float = 0.0
    lag_mean: float | None = None
    lag_max: int | None = None
    queue_depth: int = 0
    """Records on the stream that the learner has not read."""
    open_episodes: int = 0
    idle_learner: float | None = None
    idle_policy: float | None = None
    failures: Mapping[str, int] = field(default_factory=dict)

    @property
    def progress(self) -> str:
        step = f"{self.step}" if self.steps is None else f"{self.step}/{self.steps}"
        limit = "" if self.time_limit_s is None else f"/{self.time_limit_s:.0f}"
        return f"step {step}, {self.seconds:.0f}{limit} s"


class Display:
    """Prints events as lines, and keeps `status` in view where that is possible."""

    def __init__(self, status: Status, console: Console | None = None) -> None:
        self.status = status
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the table in view for the length of the block."""
        if not self.console.is_terminal:
            yield
            return
        self._live = Live(get_renderable=self._table, console=self.console, refresh_per_second=4, transient=True)
        try:
            with self._live:
                yield
        finally:
            self._live = None

    def hide(self) -> None:
        """Give the terminal back at once: for an exit that unwinds nothing."""
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """One line that stays."""
        self.console.print(Text(text))

    def stepped(self) -> None:
        """A step has ended: without a live table, its line is the only sign of life."""
        if self._live is None:
            self.say(line(self.status))

    def _table(self) -> Group:
        status = self.status
        grid = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
        for _ in range(2):
            grid.add_column(style="dim")
            grid.add_column(justify="right", min_width=12)
        failures = ", ".join(f"{kind} {n}" for kind, n in sorted(status.failures.items())) or "none"
        grid.add_row("reward, train", _number(status.reward_train), "reward, test", _number(status.reward_test))
        grid.add_row("tokens/s in", f"{status.tokens_in_s:,.0f}", "tokens/s out", f"{status.tokens_out_s:,.0f}")
        grid.add_row("staleness, mean", _number(status.lag_mean), "staleness, max", _number(status.lag_max))
        grid.add_row("open episodes", f"{status.open_episodes}", "queue depth", f"{status.queue_depth}")
        grid.add_row("learner idle", _percent(status.idle_learner), "policy idle", _percent(status.idle_policy))
        return Group(
            Text(f"{status.run}  {status.progress}  ({status.phase})", style="bold"), grid, Text(f"failures: {failures}")
        )


def line(status: Status) -> str:
    """A status as one line of plain text."""
    parts = [
        status.progress,
        f"reward {_number(status.reward_train)} (test {_number(status.reward_test)})",
        f"tokens/s {status.tokens_in_s:,.0f} in {status.tokens_out_s:,.0f} out",
        f"staleness {_number(status.lag_mean)} (max {_number(status.lag_max)})",
        f"queue {status.queue_depth}",
        f"idle learner {_percent(status.idle_learner)} policy {_percent(status.idle_policy)}",
    ]
    if status.failures:
        parts.append("failures " + ", ".join(f"{kind} {n}" for kind, n in sorted(status.failures.items())))
    return "  ".join(parts)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value}" if isinstance(value, int) else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
