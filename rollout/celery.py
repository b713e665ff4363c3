"""The Celery app: `celery -A rollout worker -Q episodes`.

`FARMHAND_BROKER` is the URL of the Valkey or Redis that is broker, store and stream in one (`redis://`, `rediss://` or
`unix://`; default redis://127.0.0.1:6379/0). Messages are JSON and carry ids alone.
"""

from __future__ import annotations

import os

from celery import Celery

from rollout.queues import BASE
from rollout.urls import celery_url

DEFAULT_BROKER = "redis://127.0.0.1:6379/0"


def make_app(url: str) -> Celery:
    """An app on the broker at `url`."""
    app = Celery("farmhand")
    app.conf.update(
        broker_url=celery_url(url),
        farmhand_store=url,
        worker_pool="rollout.pool:EpisodePool",
        # One message for each free place, so that no episode waits in a worker that is full.
        worker_disable_prefetch=True,
        worker_prefetch_multiplier=1,
        # The episode's own lease takes over at once; see docs of rollout.pool.
        task_acks_late=False,
        task_ignore_result=True,
        task_serializer="json",
        accept_content=["json"],
        task_default_queue=BASE,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        worker_send_task_events=False,
        worker_hijack_root_logger=True,
    )

    @app.task(name="rollout.episode")  # type: ignore[untyped-decorator]
    def episode(run: str, episode_id: str) -> None:
        raise RuntimeError("episodes need the pool of this app: start the worker without -P, or with `farmhand worker`")

    return app


app = make_app(os.environ.get("FARMHAND_BROKER", DEFAULT_BROKER))
