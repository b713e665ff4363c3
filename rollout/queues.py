"""Names of the queues: one for each sandbox kind, so that a worker can serve only what its host can run."""

from __future__ import annotations

BASE = "episodes"


def queue_of(sandbox_kind: str) -> str:
    """`episodes` for the local sandbox, `episodes.KIND` for any other."""
    return BASE if sandbox_kind == "local" else f"{BASE}.{sandbox_kind}"
