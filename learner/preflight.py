"""Checks of a configuration that need more than its text: are the tasks, the model and the sandbox really there?

Guarantees: everything that can be found out before a process is started is found out here, and reported all at once.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from learner.config import ConfigError, Mistake, TrainConfig
from learner.settings import check_sampling
from rollout.models import ModelNotFound, resolve_model
from rollout.store import StoreUnavailable
from rollout.urls import BadUrl, masked, redis_url
from rollout.valkey_server import ready
from sandbox.base import SandboxError, SandboxSpec
from sandbox.registry import get_backend, known_kinds
from tasks.base import Split, TaskSet
from tasks.registry import TaskSetError, load_task_set

PROBE_TIMEOUT_S = 30.0
BROKER_TIMEOUT_S = 5.0


async def check(config: TrainConfig, source: str) -> TaskSet:
    """All that training needs. Returns the task set. Raises `ConfigError` with every mistake."""
    splits: dict[Split, int] = {"train": 1}
    if config.eval.size and (config.eval.every or config.eval.at_start or config.eval.at_end):
        splits["test"] = config.eval.size
    return await check_rollout(config, source, splits, [Mistake(*found) for found in check_sampling(config.sampling)])


async def check_rollout(
    config: TrainConfig, source: str, splits: Mapping[Split, int], found: Sequence[Mistake] = ()
) -> TaskSet:
    """All that driving episodes needs: `splits` says how many tasks of which. `found` are mistakes known already."""
    mistakes = [*found, *_values(config), *await _broker(config)]
    tasks = _tasks(config, splits, mistakes)
    mistakes += _model(config)
    if tasks is not None:
        await _sandboxes(config, tasks, next(iter(splits)), mistakes)
    if mistakes or tasks is None:
        raise ConfigError(source, mistakes)
    return tasks


def _values(config: TrainConfig) -> list[Mistake]:
    """Values that are right by themselves, but not together or not here."""
    mistakes = []
    if config.batch.min_members > config.batch.group_size:
        allowed = f"at most batch.group_size = {config.batch.group_size}, or no group could ever be trained on"
        mistakes.append(Mistake("batch.min_members", str(config.batch.min_members), allowed))
    key = config.policy.api_key_env
    if key is not None and key not in os.environ:
        mistakes.append(Mistake("policy.api_key_env", repr(key), "no environment variable of that name is set"))
    return mistakes + _times(config)


async def _broker(config: TrainConfig) -> list[Mistake]:
    """Does a server answer where one is said to be?"""
    url = config.broker.url
    if url is None:
        return []
    try:
        redis_url(url)
    except BadUrl as error:
        return [Mistake("broker.url", masked(url), str(error))]
    try:
        async with asyncio.timeout(BROKER_TIMEOUT_S):
            while not await ready(url):  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.2)
    except TimeoutError:
        return [Mistake("broker.url", masked(url), f"no Valkey or Redis answered there within {BROKER_TIMEOUT_S:g} s")]
    except StoreUnavailable as error:
        return [Mistake("broker.url", masked(url), str(error))]
    return []


def _model(config: TrainConfig) -> list[Mistake]:
    try:
        folder = resolve_model(config.policy.model)
    except ModelNotFound as error:
        return [Mistake("policy.model", repr(config.policy.model), str(error))]
    positions = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    wanted = {"limits.max_tokens": config.limits.max_tokens, "engine.max_model_len": config.engine.max_model_len}
    return [
        Mistake(key, str(value), f"allowed: at most {positions}, the positions of policy.model = {config.policy.model!r}")
        for key, value in wanted.items()
        if value is not None and positions is not None and value > positions
    ]


def _times(config: TrainConfig) -> list[Mistake]:
    lease = config.lease
    if lease.renew_s * 2 > lease.ttl_s:
        allowed = f"at most half of lease.ttl_s = {lease.ttl_s:g}, or a busy worker loses its leases"
        return [Mistake("lease.renew_s", f"{lease.renew_s:g}", allowed)]
    return []


def _tasks(config: TrainConfig, splits: Mapping[Split, int], mistakes: list[Mistake]) -> TaskSet | None:
    try:
        tasks = load_task_set(config.tasks.set, **config.tasks.options)
    except TaskSetError as error:
        mistakes.append(Mistake("tasks.set", repr(config.tasks.set), str(error)))
        return None
    for split, size in splits.items():
        key = "tasks.set" if size == 1 else "eval.size"
        try:
            found: object = tasks.size(split)
        except Exception as error:
            mistakes.append(Mistake("tasks.set", repr(config.tasks.set), f"its {split} split has no size: {error!r}"))
            return None
        if not isinstance(found, int):
            told = f"its {split} split has the size {found!r}, expected a whole number"
            mistakes.append(Mistake("tasks.set", repr(config.tasks.set), told))
            return None
        if found < size:
            mistakes.append(Mistake(key, str(size), f"task set {config.tasks.set!r} has {found} tasks in its {split} split"))
    return tasks


async def _sandboxes(config: TrainConfig, tasks: TaskSet, split: Split, mistakes: list[Mistake]) -> None:
    """The run's sandbox with the first task's own fields over it: is its kind known, and does one start here?"""
    try:
        first: Mapping[str, Any] = tasks.task(split, 0).sandbox
    except Exception as error:
        mistakes.append(Mistake("tasks.set", repr(config.tasks.set), f"it cannot make {split}/0: {error!r}"))
        return
    try:
        spec = SandboxSpec.model_validate({**config.sandbox, **first})
    except ValidationError as error:
        for item in error.errors(include_url=False):
            key = ".".join(["sandbox", *map(str, item["loc"])])
            allowed = item["msg"]
            if item["type"] == "extra_forbidden":
                allowed = ", ".join(sorted(SandboxSpec.model_fields))
            mistakes.append(Mistake(key, repr(item["input"]), f"allowed: {allowed}"))
        return
    if spec.kind not in known_kinds():
        mistakes.append(Mistake("sandbox.kind", repr(spec.kind), f"allowed: {', '.join(known_kinds())}"))
        return
    if config.farm.workers == 0:
        # The workers, and with them the sandboxes, are elsewhere.
        return
    backend = get_backend(spec.kind)
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            sandbox = await backend.create(spec, labels={"made-by": "preflight"})
            await sandbox.kill()
    except (SandboxError, TimeoutError) as error:
        mistakes.append(Mistake("sandbox", f"no {spec.kind} sandbox starts here", str(error) or "no answer"))
    finally:
        await backend.close()
