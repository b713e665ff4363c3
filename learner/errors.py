"""Which errors are for the user, and how they read: one clear message, no traceback, an exit code.

Everything else is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

CONFIG, FAILED = 2, 1


def explain(error: BaseException) -> tuple[str, int] | None:
    """Message and exit code of an error that is known, also from within a group of errors; None for any other.

    A group with a defect of ours in it is not explained: the traceback is worth more.
    """
    found: list[tuple[str, int]] = []
    for leaf in leaves(error):
        known = _explain_one(leaf)
        if known is None:
            return None
        if known not in found:
            found.append(known)
    if not found:
        return None
    return "\n".join(message for message, _ in found), max(code for _, code in found)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The single errors of a group, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def _explain_one(error: BaseException) -> tuple[str, int] | None:
    from learner.config import ConfigError
    from learner.run import RunError
    from learner.supervise import ChildFailed
    from rollout.policy.base import PolicyError
    from rollout.store import StoreUnavailable
    from rollout.urls import BadUrl
    from sandbox.base import SandboxError

    if isinstance(error, ConfigError | BadUrl):
        return str(error), CONFIG
    if isinstance(error, RunError | ChildFailed | PolicyError | StoreUnavailable | SandboxError):
        return str(error), FAILED
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        where = f" ({error.filename})" if error.filename else ""
        return f"the disk is full{where}: free some space, then go on with `farmhand train --resume RUN`", FAILED
    return None
