"""Task sets by name: an entry point of the group `farmhand.tasks`, or `package.module:name`.

Guarantees: what is returned satisfies `TaskSet`; every other outcome is a `TaskSetError` that names the set, says what went
wrong in its loader, and for an unknown name lists the known ones.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import entry_points
from typing import Any

from tasks.base import TaskSet

GROUP = "farmhand.tasks"


class TaskSetError(Exception):
    """A task set that cannot be had; the message is for the person who named it."""


def known_task_sets() -> list[str]:
    """Names of the installed task sets, sorted."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def load_task_set(name: str, **options: Any) -> TaskSet:
    """Call the loader that `name` stands for with `options`. Raises `TaskSetError`."""
    loader = _loader(name)
    if not callable(loader):
        raise TaskSetError(f"task set {name!r}: {loader!r} is not callable; expected a loader that returns a TaskSet")
    try:
        found = loader(**options)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "none"
        raise TaskSetError(
            f"task set {name!r}: its loader raised {type(error).__name__}: {error} "
            f"(options: {given}; they are set under tasks.options)"
        ) from error
    if not isinstance(found, TaskSet):
        raise TaskSetError(
            f"task set {name!r}: its loader returned {type(found).__name__}, expected an object with name, size(split) and "
            "task(split, index); see tasks.base.TaskSet"
        )
    return found


def _loader(name: str) -> Any:
    if ":" not in name:
        for entry in entry_points(group=GROUP):
            if entry.name == name:
                return _imported(name, entry.value)
        raise TaskSetError(
            f"unknown task set {name!r}; known: {', '.join(known_task_sets()) or 'none'}; "
            "or name a loader as package.module:name"
        )
    return _imported(name, name)


def _imported(name: str, target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    # As with `python -m`: a set that is being written need not be installed.
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise TaskSetError(
            f"task set {name!r}: cannot import {target!r}: {type(error).__name__}: {error}; "
            f"known sets: {', '.join(known_task_sets())}"
        ) from error
    return found
