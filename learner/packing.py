"""Token sequences to micro-batches that a model can run.

Guarantees: deterministic for a batch; every masked token is in exactly one micro-batch; a micro-batch has at most
`micro_batch_tokens` places, padding included; sequences of like length lie together, so that little is padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.batch import BadSequence, TokenSequence


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`tokens` int64 [rows, longest], padded at the end with 0. Of the n masked tokens of all rows: `places` int64 [n] is
    where the flattened rows predict each, `targets` int64 [n] its id, `logprobs` and `advantages` float32 [n]."""

    tokens: Tensor
    places: Tensor
    targets: Tensor
    logprobs: Tensor
    advantages: Tensor


def pack(sequences: Sequence[TokenSequence], micro_batch_tokens: int) -> Iterator[MicroBatch]:
    """The longest first: what does not fit into memory fails at once. Raises `BadSequence` for one that is too long."""
    # What follows the last token that is trained on would change nothing.
    needed = {i: int(np.flatnonzero(sequence.mask)[-1]) for i, sequence in enumerate(sequences) if sequence.mask.any()}
    order = sorted(needed, key=lambda i: (-needed[i], i))
    rows: list[int] = []
    for i in order:
        if needed[i] > micro_batch_tokens:
            raise BadSequence(
                f"{sequences[i].key}: {needed[i]} tokens do not fit into `batch.micro_batch_tokens` = {micro_batch_tokens}"
            )
        if rows and (len(rows) + 1) * needed[rows[0]] > micro_batch_tokens:
            yield _stack([(sequences[row], needed[row]) for row in rows])
            rows = []
        rows.append(i)
    if rows:
        yield _stack([(sequences[row], needed[row]) for row in rows])


def _stack(rows: Sequence[tuple[TokenSequence, int]]) -> MicroBatch:
    longest = max(length for _, length in rows)
    tokens = np.zeros((len(rows), longest), np.int64)
    trained = [np.flatnonzero(sequence.mask) for sequence, _ in rows]
    for row, (sequence, length) in enumerate(rows):
        tokens[row, :length] = sequence.tokens[:length]
    places = [row * longest + at - 1 for row, at in enumerate(trained)]

    def column(name: str) -> Tensor:
        return torch.from_numpy(
            np.concatenate([getattr(sequence, name)[at] for (sequence, _), at in zip(rows, trained, strict=True)])
        )

    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        places=torch.from_numpy(np.concatenate(places)),
        targets=column("tokens").long(),
        logprobs=column("logprobs"),
        advantages=column("advantages"),
    )
