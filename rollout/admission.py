"""Which group may start, and which may be trained on: admission, window and bound in one policy object.

Pure: no I/O and no tasks; time comes from the clock it is given. A group is `running` from `admit` until `finish` or `fail`,
then `ready` until it is consumed by a step, or dropped. Eval episodes do not pass through here.

Guarantees:

* Admission paces: consumed + ready + running <= (version + 1 + max_staleness) * batch, and never more than `steps` steps
  need. A group that failed or was dropped frees its place.
* The window orders: a step takes the oldest ready groups, none of them `window` or more places past the oldest one that is
  running. That one holds the window for at most `head_timeout_s`; then it is passed over, and may still be trained on later.
* The bound drops: a ready group whose oldest token is more than `max_token_lag` versions old is never part of a step.
* Every group ends as exactly one of consumed, dropped or failed, unless it is still open.
* With `max_staleness` 0 a step holds the first `batch` usable groups in submission order, whatever the order they finish in.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class AdmissionError(Exception):
    """A call that the group's state, or a full house, does not allow: a defect of the caller."""


@dataclass(frozen=True, slots=True)
class Selection:
    """`groups`: a whole step's, in submission order, or empty. `stale`: what the bound has dropped just now."""

    groups: tuple[int, ...]
    stale: tuple[int, ...]


@dataclass(slots=True)
class _Group:
    oldest: int | None = None
    """Version of the oldest token; None while running."""


class Admission:
    """`batch` groups a step. See the module for the rest; `window` None is `batch`, `steps` None has no end."""

    def __init__(
        self,
        *,
        batch: int,
        max_staleness: int,
        window: int | None = None,
        head_timeout_s: float | None = None,
        max_token_lag: int | None = None,
        steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.batch = batch
        self.max_staleness = max_staleness
        self.window = window or batch
        self.head_timeout_s = head_timeout_s
        self.max_token_lag = max_token_lag
        self.steps = steps
        self.version = 0
        self.consumed = 0
        self.failed = 0
        self.dropped: Counter[str] = Counter()
        """By reason."""
        self.passed_over = 0
        """Groups that outlived the head's deadline."""
        self._clock = clock
        self._next = 0
        self._open: dict[int, _Group] = {}
        self._overdue: set[int] = set()
        self._head: int | None = None
        self._head_since = clock()

    # Admission

    @property
    def running(self) -> int:
        return sum(group.oldest is None for group in self._open.values())

    @property
    def ready(self) -> int:
        return len(self._open) - self.running

    @property
    def submitted(self) -> int:
        return self._next

    def capacity(self) -> int:
        """Groups that may start now."""
        steps = self.version + 1 + self.max_staleness
        if self.steps is not None:
            steps = min(steps, self.steps)
        return max(0, steps * self.batch - self.consumed - len(self._open))

    def admit(self) -> int:
        """Start a group; returns its submission number, 0-based. Raises `AdmissionError` without capacity."""
        if not self.capacity():
            raise AdmissionError("no capacity: ask `capacity()` first")
        group = self._next
        self._next += 1
        self._open[group] = _Group()
        self._move_head()
        return group

    # What becomes of a group

    def finish(self, group: int, oldest_version: int) -> None:
        """The group can be trained on; `oldest_version` is that of its oldest token."""
        self._running(group).oldest = oldest_version
        self._overdue.discard(group)
        self._move_head()

    def fail(self, group: int) -> None:
        """Too few of its members are valid. Its place is free again."""
        self._running(group)
        self._close(group)
        self.failed += 1

    def drop(self, group: int, reason: str) -> None:
        """Give up an open group, running or ready. Its place is free again."""
        if group not in self._open:
            raise AdmissionError(f"group {group} is not open")
        self._close(group)
        self.dropped[reason] += 1

    def publish(self, version: int) -> None:
        """The policy serves `version` now."""
        if version < self.version:
            raise AdmissionError(f"version {version} after version {self.version}")
        self.version = version

    # Window and bound

    def take(self) -> Selection:
        """Consume the groups of one step, if there are enough of them in the window."""
        stale = tuple(group for group in sorted(self._open) if self._is_stale(self._open[group]))
        for group in stale:
            self.drop(group, "stale")
        groups = self._eligible()[: self.batch]
        if len(groups) < self.batch:
            return Selection((), stale)
        for group in groups:
            self._close(group)
        self.consumed += len(groups)
        return Selection(tuple(groups), stale)

    def deadline(self) -> float | None:
        """Clock time at which the head will be passed over, so that `take` may find more; None if nothing is held back."""
        self._expire()
        if self.head_timeout_s is None or self._head is None or not self.ready:
            return None
        return self._head_since + self.head_timeout_s

    def _is_stale(self, group: _Group) -> bool:
        if group.oldest is None or self.max_token_lag is None:
            return False
        return self.version - group.oldest > self.max_token_lag

    def _eligible(self) -> list[int]:
        """Ready groups within the window, oldest first. Those before the head slide the window as they are consumed."""
        self._expire()
        end = None if self._head is None else self._head + self.window
        return [
            group for group in sorted(self._open) if self._open[group].oldest is not None and (end is None or group < end)
        ]

    def _expire(self) -> None:
        if self.head_timeout_s is None:
            return
        while self._head is not None and self._clock() - self._head_since >= self.head_timeout_s:
            self._overdue.add(self._head)
            self.passed_over += 1
            self._move_head()

    def _move_head(self) -> None:
        """The head is the oldest running group that has not been passed over; its clock starts as it becomes the head."""
        running = (group for group, state in self._open.items() if state.oldest is None and group not in self._overdue)
        head = min(running, default=None)
        if head != self._head:
            self._head, self._head_since = head, self._clock()

    def _running(self, group: int) -> _Group:
        state = self._open.get(group)
        if state is None or state.oldest is not None:
            raise AdmissionError(f"group {group} is not running")
        return state

    def _close(self, group: int) -> None:
        del self._open[group]
        self._overdue.discard(group)
        self._move_head()

    # What is written down

    def metrics(self) -> dict[str, float]:
        """Figures of this moment, for the log."""
        held = sum(1 for state in self._open.values() if state.oldest is not None) - len(self._eligible())
        return {
            "running": self.running,
            "ready": self.ready,
            "held_back": held,
            "capacity": self.capacity(),
            "consumed": self.consumed,
            "failed": self.failed,
            "dropped": self.dropped.total(),
            "passed_over": self.passed_over,
        }

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {
            "version": self.version,
            "next": self._next,
            "open": [[group, state.oldest] for group, state in sorted(self._open.items())],
            "overdue": sorted(self._overdue),
            "consumed": self.consumed,
            "failed": self.failed,
            "dropped": dict(self.dropped),
            "passed_over": self.passed_over,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. The head's clock starts anew."""
        self.version = int(state["version"])
        self._next = int(state["next"])
        self._open = {int(group): _Group(oldest) for group, oldest in state["open"]}
        self._overdue = set(state["overdue"])
        self.consumed = int(state["consumed"])
        self.failed = int(state["failed"])
        self.dropped = Counter(state["dropped"])
        self.passed_over = int(state["passed_over"])
        self._head = None
        self._move_head()
