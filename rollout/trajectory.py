"""The contract between hands and head: what one policy call and one finished episode look like.

Guarantees:

* A record survives `decode(encode(record))` bit for bit; token and log-prob arrays travel as raw little-endian bytes.
* A record that is malformed, or whose lengths disagree, is refused at construction with its key in the message.
* `(episode_id, attempt, index)` is the key of a segment; `parent` makes an episode's segments a tree.
* Token ids are those that the engine returned; `versions` covers exactly the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

import msgpack
import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = NDArray[np.int32]
Logprobs: TypeAlias = NDArray[np.float32]
Versions: TypeAlias = tuple[tuple[int, int], ...]
"""Run-length list of (weight version, number of sampled tokens)."""

Status = Literal["completed", "truncated", "failed"]
STATUSES: tuple[Status, ...] = ("completed", "truncated", "failed")
Purpose = Literal["train", "eval"]

FORMAT = 1
"""First byte of every encoded record; a reader refuses what it does not know."""


class MalformedRecord(ValueError):
    """Bytes or fields that are not a valid record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The order for one episode. The broker's message carries `(run, id)`; this record lies in the store."""

    run: str
    id: str
    task_set: str
    split: str
    task_index: int
    group: int
    """Submission number of the group: the window and the batch go by it."""
    member: int
    """0-based place in the group."""
    seed: int
    sandbox_kind: str = "local"
    purpose: Purpose = "train"
    max_attempts: int = 3
    version: int = 0
    """Weight version at dispatch."""
    submitted_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """One policy call.

    `env_tokens` (int32 [m]) were appended before the call and carry mask 0; `sampled_tokens` (int32 [n]) are what the
    policy returned, mask 1, with `logprobs` (float32 [n]) under the weights that sampled each, after temperature and
    top-p. `index` counts from 0 over the whole episode, attempts included; `parent` is the index of the segment whose
    tokens this one continues, None at a root; `branch` numbers the root-to-leaf paths in order of their beginning.
    """

    run: str
    episode_id: str
    attempt: int
    index: int
    parent: int | None
    branch: int
    env_tokens: Tokens
    sampled_tokens: Tokens
    logprobs: Logprobs
    versions: Versions
    finish_reason: str
    reward: float = 0.0
    """Paid by the environment for the action before this call; what came after the last call is in `EpisodeEnd.reward`."""
    timing: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase: `policy`, `env`, and `started_at` in Unix seconds."""

    def __post_init__(self) -> None:
        key = f"segment {self.key}"
        for name, dtype in (("env_tokens", np.int32), ("sampled_tokens", np.int32), ("logprobs", np.float32)):
            array = np.asarray(getattr(self, name), dtype=dtype)
            if array.ndim != 1:
                raise MalformedRecord(f"{key}: {name} has {array.ndim} dimensions, expected 1")
            object.__setattr__(self, name, array)
        n = len(self.sampled_tokens)
        if len(self.logprobs) != n:
            raise MalformedRecord(f"{key}: {n} sampled tokens but {len(self.logprobs)} log-probs")
        object.__setattr__(self, "versions", tuple((int(v), int(c)) for v, c in self.versions))
        if any(c <= 0 for _, c in self.versions) or sum(c for _, c in self.versions) != n:
            raise MalformedRecord(f"{key}: versions {self.versions} do not cover {n} sampled tokens")
        if not np.isfinite(self.reward):
            raise MalformedRecord(f"{key}: reward {self.reward} is not finite")
        if n and not np.isfinite(self.logprobs).all():
            raise MalformedRecord(f"{key}: a log-prob is not finite")
        if self.parent is not None and not 0 <= self.parent < self.index:
            raise MalformedRecord(f"{key}: parent {self.parent} does not come before it")

    @property
    def key(self) -> tuple[str, int, int]:
        return self.episode_id, self.attempt, self.index


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an episode failed. `kind` is a short stable word for counting: "sandbox", "policy", "env", "task", "lost"."""

    kind: str
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnd:
    """The last record of an episode. `index` is one past the last segment's.

    `failed` means infrastructure: `reward` is then None, and the episode is masked out of loss and statistics.
    """

    run: str
    episode_id: str
    attempt: int
    index: int
    status: Status
    reward: float | None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    timing: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        key = f"end of episode {self.episode_id} (attempt {self.attempt})"
        if self.status not in STATUSES:
            raise MalformedRecord(f"{key}: status {self.status!r}, expected one of {', '.join(STATUSES)}")
        if (self.status == "failed") != (self.failure is not None) or (self.status == "failed") != (self.reward is None):
            raise MalformedRecord(f"{key}: a failed episode has a failure and no reward; any other has a reward alone")
        if self.reward is not None and not np.isfinite(self.reward):
            raise MalformedRecord(f"{key}: reward {self.reward} is not finite")


Record: TypeAlias = Episode | Segment | EpisodeEnd

_KINDS: dict[str, type[Any]] = {"e": Episode, "s": Segment, "d": EpisodeEnd}
_LETTERS = {cls: letter for letter, cls in _KINDS.items()}
_FIELDS = {letter: tuple(f.name for f in fields(cls)) for letter, cls in _KINDS.items()}
_ARRAYS = {"env_tokens": "<i4", "sampled_tokens": "<i4", "logprobs": "<f4"}
_FAILURE_FIELDS = tuple(f.name for f in fields(Failure))


def encode(record: Record) -> bytes:
    """Record to bytes: the format byte, then one msgpack array of the record's kind and fields in order."""
    letter = _LETTERS[type(record)]
    row: list[Any] = [letter]
    for name in _FIELDS[letter]:
        value = getattr(record, name)
        if name in _ARRAYS:
            value = value.astype(_ARRAYS[name], copy=False).tobytes()
        elif isinstance(value, Failure):
            value = [getattr(value, f) for f in _FAILURE_FIELDS]
        row.append(value)
    packed: bytes = msgpack.packb(row)
    return bytes((FORMAT,)) + packed


def decode(data: bytes) -> Record:
    """Bytes to record. Raises `MalformedRecord`, never anything else, on bytes that are not one."""
    if not data or data[0] != FORMAT:
        raise MalformedRecord(f"unknown record format {data[:1].hex() or 'empty'}, expected {FORMAT:02x}")
    try:
        row = msgpack.unpackb(memoryview(data)[1:], use_list=False)
        letter, values = row[0], row[1:]
        names = _FIELDS[letter]
        if len(values) != len(names):
            raise MalformedRecord(f"record {letter!r} has {len(values)} fields, expected {len(names)}")
        kwargs: dict[str, Any] = dict(zip(names, values, strict=True))
        if letter == "s":
            for name, dtype in _ARRAYS.items():
                kwargs[name] = np.frombuffer(kwargs[name], dtype=dtype)
        elif letter == "d" and kwargs["failure"] is not None:
            kwargs["failure"] = Failure(**dict(zip(_FAILURE_FIELDS, kwargs["failure"], strict=True)))
        record: Record = _KINDS[letter](**kwargs)
        return record
    except MalformedRecord:
        raise
    except Exception as error:
        raise MalformedRecord(f"not a record ({len(data)} bytes): {type(error).__name__}: {error}") from error
