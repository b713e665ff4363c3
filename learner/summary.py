"""`summary.json`: what a run came to, in the few figures that others compare."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator
from rich.table import Table

from learner.run import replace_json


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LagFigures(_Part):
    """Versions between a token and the step that trained on it."""

    mean: float
    p95: int
    max: int


class IdleShares(_Part):
    """Shares of the time of training, 0 to 1."""

    learner: float = Field(ge=0, le=1)
    """Waiting for a batch."""
    policy: float = Field(ge=0, le=1)
    """No running request, or paused."""


class LedgerCounts(_Part):
    """Train episodes. Raises where they do not add up: an episode that is unaccounted for is a defect."""

    dispatched: int = Field(ge=0)
    trained: int = Field(ge=0)
    failed: int = Field(ge=0)
    dropped: int = Field(ge=0)
    unfinished: int = Field(ge=0)

    @model_validator(mode="after")
    def _adds_up(self) -> LedgerCounts:
        parts = self.trained + self.failed + self.dropped + self.unfinished
        if parts != self.dispatched:
            raise ValueError(f"the ledger does not add up: {self.dispatched} dispatched, {parts} accounted for")
        return self


class Summary(_Part):
    run: str
    outcome: str
    """"finished", "interrupted", or the failure in a word."""
    score_start: float | None
    score_end: float | None
    train_seconds: float
    steps: int
    weight_pushes: int
    token_lag: LagFigures
    idle: IdleShares
    ledger: LedgerCounts

    def write(self, path: Path) -> None:
        replace_json(path, self.model_dump(mode="json"))

    def table(self) -> Table:
        """For the end of a run's output."""
        table = Table(title=f"{self.run}: {self.outcome}", show_header=False, title_justify="left")
        table.add_column(style="dim")
        table.add_column(justify="right")
        score = f"{_score(self.score_start)} -> {_score(self.score_end)}"
        table.add_row("score on test, start -> end", score)
        table.add_row("steps, weight pushes", f"{self.steps}, {self.weight_pushes}")
        table.add_row("seconds of training", f"{self.train_seconds:.1f}")
        table.add_row(
            "token staleness, mean / p95 / max", f"{self.token_lag.mean:.2f} / {self.token_lag.p95} / {self.token_lag.max}"
        )
        table.add_row("idle, learner / policy", f"{100 * self.idle.learner:.0f} % / {100 * self.idle.policy:.0f} %")
        counts = self.ledger
        table.add_row("episodes dispatched", f"{counts.dispatched}")
        for name in ("trained", "failed", "dropped", "unfinished"):
            table.add_row(f"  {name}", f"{getattr(counts, name)}")
        return table


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
