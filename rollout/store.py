"""Where episodes live while they live: orders, leases, and the stream of records, as two protocols.

Guarantees of every implementation (Valkey in `rollout/valkey_store.py`, in memory in `rollout/memory_store.py`):

* At most one attempt of an episode can append: a claim raises the attempt number, and an append or a finish with an older
  one raises `LeaseLost` and writes nothing.
* Segment, resume point and lease renewal of one turn are written atomically.
* Every submitted episode gets exactly one `EpisodeEnd` on the stream, unless it is still open: an attempt that dies is
  offered again until `max_attempts`, then ended as `failed` with kind "lost".
* A record is delivered to the learner at least once, in the order written, until it is acknowledged. `rollout.stream.Dedup`
  makes that exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.trajectory import Episode, EpisodeEnd, Record, Segment


class StoreUnavailable(Exception):
    """The server did not answer within the reconnect budget; the message names its URL and the setting `broker.url`."""


class LeaseLost(Exception):
    """Another attempt, a cancellation or an end has overtaken this one: stop without a word."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Proof of the right to append. Valid until `expires_at` (Unix seconds of the store's clock) unless renewed."""

    episode: Episode
    attempt: int
    worker: str
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Resume:
    """Where an earlier attempt stood: its segments in order, its sandbox, and what the driver saved beside them."""

    segments: tuple[Segment, ...]
    point: Mapping[str, Any]
    """JSON of the last `append` or `checkpoint`: {"sandbox": id, "env": state, ...}; {} for a first attempt."""


@dataclass(frozen=True, slots=True)
class Delivery:
    entry_id: str
    record: Record


class EpisodeStore(Protocol):
    """The hands' side, shared by dispatcher, workers and janitor."""

    async def put_run(self, run: str, config: Mapping[str, Any]) -> None:
        """Publish the run's rollout config (JSON), which workers read by the run's name."""
        ...

    async def get_run(self, run: str) -> Mapping[str, Any]: ...

    async def submit(self, episodes: Sequence[Episode]) -> None:
        """Write the orders. Idempotent by episode id. Sending the broker's message is `rollout.dispatch`'s work."""
        ...

    async def claim(self, run: str, episode_id: str, worker: str, ttl_s: float) -> tuple[Lease, Resume] | None:
        """Lease an episode as its next attempt; None when it is leased, ended, cancelled or unknown."""
        ...

    async def checkpoint(self, lease: Lease, point: Mapping[str, Any]) -> None:
        """Save a resume point without a segment (the sandbox's id before the first turn, a park between turns)."""
        ...

    async def restart(self, lease: Lease) -> None:
        """Begin the episode anew: forget its segments and resume point. What the stream holds, the next segments replace."""
        ...

    async def append(self, lease: Lease, segment: Segment, point: Mapping[str, Any]) -> None:
        """One turn: stream the segment, keep it for resumption, save `point`, renew the lease."""
        ...

    async def finish(self, lease: Lease, end: EpisodeEnd) -> None: ...

    async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """Renew many at once; returns those that are lost."""
        ...

    async def release(self, lease: Lease) -> None:
        """Give an unfinished episode back; `open_episodes` shows it at once and the attempt does not count as a death."""
        ...

    async def cancel(self, run: str, episode_ids: Sequence[str], reason: str) -> None:
        """End open episodes as `failed` with kind "cancelled". Their workers see `LeaseLost`."""
        ...

    async def sweep(self, run: str) -> list[Episode]:
        """Expired or released episodes to be enqueued again; those out of attempts are ended as `failed`, kind "lost"."""
        ...

    async def open_episodes(self, run: str) -> list[str]:
        """Ids submitted and not ended."""
        ...

    async def close(self) -> None: ...


class RecordStream(Protocol):
    """The head's side: one consumer group per run."""

    async def read(self, *, max_records: int, wait_s: float) -> list[Delivery]:
        """Undelivered records, oldest first; after a restart, first those delivered but never acknowledged.

        A record that does not decode is acknowledged, kept aside (`quarantined()`), and counted; it never stops the stream.
        """
        ...

    async def ack(self, entry_ids: Sequence[str]) -> None:
        """The records are safe in a checkpoint: forget them."""
        ...

    async def depth(self) -> int:
        """Records written and not yet read."""
        ...

    async def close(self) -> None: ...
