"""What a run measures about itself, and the log of it.

Guarantees:

* Durations and rates come from this process's monotonic clock; wall-clock times of other processes are never subtracted.
* A row of `metrics.jsonl` is one JSON object with a `kind` ("step" or "eval"), the `step`, and `seconds` of training so far.
  After a resume, rows of steps that the checkpoint does not hold are gone, so that no step stands in the file twice.
* Every number of a row is in TensorBoard too, under the row's kind.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Clock = Callable[[], float]


class TokenLag:
    """Histogram of the staleness of trained tokens: trainer's version minus the token's, one count for each token."""

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts: Counter[int] = Counter(counts or {})

    def add(self, counts: Mapping[int, int]) -> None:
        self.counts.update(counts)

    @property
    def total(self) -> int:
        return self.counts.total()

    @property
    def mean(self) -> float:
        return sum(lag * n for lag, n in self.counts.items()) / self.total if self.total else 0.0

    @property
    def max(self) -> int:
        return max(self.counts, default=0)

    def percentile(self, share: float) -> int:
        """The smallest lag that at least `share` of the tokens do not exceed."""
        needed = math.ceil(share * self.total)
        seen = 0
        for lag in sorted(self.counts):
            seen += self.counts[lag]
            if seen >= needed:
                return lag
        return 0

    def summary(self) -> dict[str, float]:
        return {"mean": round(self.mean, 4), "p95": self.percentile(0.95), "max": self.max}


class Stopwatch:
    """Adds up the time spent in `with watch.running():` blocks, and knows the time since it was made."""

    def __init__(self, clock: Clock = time.monotonic, *, elapsed: float = 0.0, spent: float = 0.0) -> None:
        self._clock = clock
        self._origin = clock() - elapsed
        self._spent = spent
        self._since: float | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        self._since = self._clock()
        try:
            yield
        finally:
            self._spent += self._clock() - self._since
            self._since = None

    @property
    def elapsed(self) -> float:
        return self._clock() - self._origin

    @property
    def spent(self) -> float:
        return self._spent + (self._clock() - self._since if self._since is not None else 0.0)

    @property
    def share(self) -> float:
        """Time in the blocks over all time, 0 to 1."""
        return self.spent / self.elapsed if self.elapsed > 0 else 0.0


class Rate:
    """Events per second over a sliding window."""

    def __init__(self, window_s: float = 20.0, clock: Clock = time.monotonic) -> None:
        self._window = window_s
        self._clock = clock
        self._events: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._origin = clock()
        self.total = 0

    def add(self, count: int) -> None:
        self._events.append((self._clock(), count))
        self._sum += count
        self.total += count

    @property
    def per_second(self) -> float:
        now = self._clock()
        while self._events and self._events[0][0] < now - self._window:
            self._sum -= self._events.popleft()[1]
        span = min(self._window, now - self._origin)
        return self._sum / span if span > 0 else 0.0


class BusyShare:
    """Share of time that a server was busy, from readings of its own counter of busy seconds.

    A counter that goes back belongs to a restarted server: it counts from zero again, and what was added up stays. Time in
    which the server does not answer is idle, as there is no busy time in it.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[float, float] | None = None
        self.busy = 0.0
        self.elapsed = 0.0

    def read(self, busy_seconds: float) -> None:
        now = self._clock()
        if self._last is not None:
            before, counter = self._last
            added = busy_seconds - counter if busy_seconds >= counter else busy_seconds
            self.elapsed += now - before
            self.busy += min(max(0.0, added), now - before)
        self._last = (now, busy_seconds)

    @property
    def idle(self) -> float:
        """Share without work, 0 to 1; 0 before the second reading."""
        return 1 - self.busy / self.elapsed if self.elapsed > 0 else 0.0


class MetricsLog:
    """Appends rows to `metrics.jsonl` and to TensorBoard. Call `close` at the end."""

    def __init__(self, path: Path, tensorboard: Path, *, resume_step: int | None = None) -> None:
        # Imported here: it costs a second that `farmhand report` need not pay.
        from torch.utils.tensorboard import SummaryWriter

        if resume_step is not None:
            kept = [row for row in read_rows(path) if row["step"] <= resume_step]
            fresh = path.with_name(f".{path.name}.new")
            fresh.write_text("".join(json.dumps(row) + "\n" for row in kept))
            fresh.replace(path)
        self._file = path.open("a", buffering=1)
        purge = None if resume_step is None else resume_step + 1
        self._board = SummaryWriter(str(tensorboard), purge_step=purge, flush_secs=10)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_finite({"kind": kind, "step": step, **values}), allow_nan=False) + "\n")
        for name, value in _numbers(values):
            self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        self._board.close()


def _finite(value: Any) -> Any:
    """JSON has no number that is not finite: null stands for it."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a `metrics.jsonl`; a last line that is being written, or was cut off, is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def lag_of(rows: list[dict[str, Any]]) -> TokenLag:
    """The token-lag histogram of all steps together."""
    lag = TokenLag()
    for row in rows:
        lag.add({int(key): int(count) for key, count in row.get("lag_counts", {}).items()})
    return lag
