"""What the trainer trains on: token sequences with everything per token, and a step's worth of them.

Guarantees: arrays of one sequence have one length, or construction raises with the sequence's key; `save_batch` and
`load_batch` carry a batch over bit for bit, so that a bad step can be replayed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from rollout.trajectory import Logprobs, Tokens

ENV = -1
"""Version of a token that no policy sampled."""
_ARRAYS = {
    "tokens": np.int32,
    "mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "advantages": np.float32,
}


class BadSequence(ValueError):
    """A sequence whose arrays disagree, or hold what no model can give; the message has its key."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSequence:
    """One root-to-leaf path of an episode; all arrays are [tokens].

    `mask` is true where a token is trained on: sampled, and not trained on already as part of an earlier path. Off the
    mask, `logprobs` and `advantages` are 0; `versions` is `ENV` where nothing was sampled.
    """

    key: str
    """Episode id and branch, for messages."""
    tokens: Tokens
    mask: NDArray[np.bool_]
    logprobs: Logprobs
    versions: NDArray[np.int32]
    advantages: NDArray[np.float32]

    def __post_init__(self) -> None:
        for name, dtype in _ARRAYS.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=dtype))
        lengths = {name: len(getattr(self, name)) for name in _ARRAYS}
        if len(set(lengths.values())) != 1:
            told = ", ".join(f"{n} {name}" for name, n in lengths.items())
            raise BadSequence(f"{self.key}: lengths disagree: {told}")
        if self.mask[:1].any():
            raise BadSequence(f"{self.key}: the mask is true at the first token, which nothing predicts")

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One step's work. `trained` episodes have their tokens in `sequences`; `rewards` are of all valid members, those of
    groups without signal included."""

    groups: tuple[int, ...]
    sequences: tuple[TokenSequence, ...]
    trained: tuple[str, ...] = ()
    rewards: tuple[float, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)
    """Episodes of these groups that were left out, by reason."""

    @property
    def tokens(self) -> int:
        return sum(len(sequence) for sequence in self.sequences)

    @property
    def sampled_tokens(self) -> int:
        """The denominator of the loss."""
        return sum(int(sequence.mask.sum()) for sequence in self.sequences)

    def lag(self, version: int) -> Counter[int]:
        """Trained tokens by lag: `version`, that trained from, minus the token's, at least 0."""
        counts: Counter[int] = Counter()
        for sequence in self.sequences:
            lags, n = np.unique(np.maximum(0, version - sequence.versions[sequence.mask]), return_counts=True)
            counts.update(dict(zip(lags.tolist(), n.tolist(), strict=True)))
        return counts


def save_batch(batch: Batch, path: Path) -> None:
    """One safetensors file: the arrays of all sequences end to end, the rest as JSON in its header."""
    arrays = {
        name: np.concatenate([getattr(sequence, name) for sequence in batch.sequences] or [np.zeros(0, dtype)])
        for name, dtype in _ARRAYS.items()
    }
    arrays["lengths"] = np.array([len(sequence) for sequence in batch.sequences], dtype=np.int64)
    meta = {
        "keys": [sequence.key for sequence in batch.sequences],
        "groups": batch.groups,
        "trained": batch.trained,
        "rewards": batch.rewards,
        "dropped": batch.dropped,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, path, metadata={"batch": json.dumps(meta)})


def load_batch(path: Path) -> Batch:
    """What `save_batch` wrote."""
    with safe_open(path, framework="np") as file:
        meta = json.loads(file.metadata()["batch"])
        cuts = np.cumsum(file.get_tensor("lengths"))[:-1]
        columns = {name: np.split(file.get_tensor(name), cuts) for name in _ARRAYS}
    sequences: Sequence[TokenSequence] = [
        TokenSequence(key=key, **{name: columns[name][i] for name in _ARRAYS}) for i, key in enumerate(meta["keys"])
    ]
    return Batch(
        groups=tuple(meta["groups"]),
        sequences=tuple(sequences),
        trained=tuple(meta["trained"]),
        rewards=tuple(meta["rewards"]),
        dropped=meta["dropped"],
    )
