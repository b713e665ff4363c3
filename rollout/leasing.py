"""Leasing as both stores see it: which record a lease covers, what a refusal means, how a doomed episode ends."""

from __future__ import annotations

from rollout.store import Lease, LeaseLost
from rollout.trajectory import EpisodeEnd, Failure, Segment

OFFER_S = 60.0
"""An offered episode that nobody has claimed for this long is offered again: its message may have died with a worker."""


def check_record(lease: Lease, record: Segment | EpisodeEnd) -> None:
    """A record that its lease does not cover is a defect of the caller: `ValueError`."""
    held = (lease.episode.run, lease.episode.id, lease.attempt)
    if (record.run, record.episode_id, record.attempt) != held:
        raise ValueError(f"a record of {(record.run, record.episode_id, record.attempt)} under the lease of {held}")


def lease_lost(lease: Lease) -> LeaseLost:
    return LeaseLost(f"attempt {lease.attempt} of episode {lease.episode.id} no longer holds its lease")


def refusal(lease: Lease, index: int, answer: str) -> Exception:
    """The error for a step that was not taken: "lost", "late", "gapN" or "againN", N being the index that the store expects."""
    if answer == "lost":
        return lease_lost(lease)
    if answer == "late":
        return ValueError(f"attempt {lease.attempt} of episode {lease.episode.id} cannot restart: it has appended already")
    if answer.startswith("gap"):
        # A server that died may have lost its last second. This attempt cannot go on; the next resumes from what is there.
        return LeaseLost(
            f"attempt {lease.attempt} of episode {lease.episode.id} wrote index {index}, but the store holds only the first"
            f" {answer[3:]} segments"
        )
    return ValueError(
        f"attempt {lease.attempt} of episode {lease.episode.id} wrote index {index} a second time and differently;"
        f" expected index {answer[5:]}"
    )


def doomed_end(run: str, episode_id: str, attempt: int, index: int, doom: str) -> EpisodeEnd:
    """The end of an episode that the store itself ends; `doom` is "cancelled:reason" or "lost:worker nonce"."""
    kind, _, text = doom.partition(":")
    if kind == "lost":
        text = f"attempt {attempt}, the last one allowed, died with worker {text.rpartition(' ')[0]}"
    failure = Failure(kind=kind, message=text)
    return EpisodeEnd(
        run=run, episode_id=episode_id, attempt=attempt, index=index, status="failed", reward=None, failure=failure
    )
