"""`farmhand worker` and, from `rollout.policy.cli`, `farmhand policy`."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from rollout.policy.cli import policy
from rollout.queues import queue_of
from rollout.urls import redis_url

__all__ = ["policy", "worker"]


def worker_command(*, concurrency: int, kinds: tuple[str, ...], name: str = "worker", log_level: str = "info") -> list[str]:
    """What `farmhand worker` becomes: Celery's own worker with the flags that episodes need."""
    return [
        *(sys.executable, "-m", "celery", "-A", "rollout", "worker"),
        *("-Q", ",".join(queue_of(kind) for kind in kinds)),
        *("--concurrency", str(concurrency), "--hostname", f"{name}-%n@%h", "--loglevel", log_level),
        # Workers need nothing of each other, and every message of that kind costs each of them time.
        *("--without-gossip", "--without-mingle", "--without-heartbeat"),
    ]


@click.command()
@click.option(
    "--broker", envvar="FARMHAND_BROKER", required=True, help="URL of the farm's Valkey or Redis. [FARMHAND_BROKER]"
)
@click.option("--concurrency", default=128, show_default=True, type=click.IntRange(1), help="Episodes at once.")
@click.option("--kind", "kinds", multiple=True, default=("local",), show_default=True, help="Sandbox kinds to serve.")
@click.option("--name", default="worker", show_default=True, help="First part of the worker's name.")
@click.option("--log-level", default="info", show_default=True)
def worker(broker: str, concurrency: int, kinds: tuple[str, ...], name: str, log_level: str) -> NoReturn:
    """Drive episodes for a farm: the same as `celery -A rollout worker` with the right flags."""
    redis_url(broker)
    command = worker_command(concurrency=concurrency, kinds=kinds, name=name, log_level=log_level)
    os.execve(command[0], command, {**os.environ, "FARMHAND_BROKER": broker})  # noqa: S606 (no shell is wanted)
