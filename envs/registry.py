"""Environments by name: built in, or entry points of the group `farmhand.envs`.

A factory takes `(task, sandbox)` and returns an `envs.base.Environment`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points

from envs.base import EnvError, Environment
from sandbox.base import Sandbox
from tasks.base import Task

GROUP = "farmhand.envs"

BUILT_IN: Mapping[str, str] = {"coding": "envs.coding:CodingEnv", "noop": "envs.memory:NoopEnv"}


def known_environments() -> list[str]:
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def make_environment(task: Task, sandbox: Sandbox) -> Environment:
    """The environment that `task.env` names, around `sandbox`. Raises `EnvError` naming the known ones."""
    if target := BUILT_IN.get(task.env):
        module, _, name = target.partition(":")
        factory = getattr(importlib.import_module(module), name)
    else:
        found = [entry for entry in entry_points(group=GROUP) if entry.name == task.env]
        if not found:
            raise EnvError(
                f"task {task.id}: unknown environment {task.env!r}; known: {', '.join(known_environments())}. "
                f"A package adds one by an entry point in the group {GROUP!r}"
            )
        factory = found[0].load()
    environment: Environment = factory(task, sandbox)
    return environment
