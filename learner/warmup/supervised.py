"""Supervised steps on token sequences: the smallest loop that turns demonstrations into a policy.

Guarantees: deterministic for a seed on one machine; the loss is the mean negative log-likelihood of the assistant's tokens
of the batch; nothing is cut: a sequence longer than the model's positions is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from learner.warmup.demonstrations import TokenSequence

IGNORED = -100

MUON_RATE = 5.0
"""Muon's learning rate over AdamW's."""

PARTS = 2
"""A batch is carried out in so many parts of similar length: whole batches would be padding for the most part."""


def _batches(sequences: Sequence[TokenSequence], size: int, rng: np.random.Generator) -> Iterator[list[TokenSequence]]:
    """Endless shuffled batches."""
    while True:
        order = rng.permutation(len(sequences))
        for start in range(0, len(order) - len(order) % size or len(order), size):
            yield [sequences[i] for i in order[start : start + size]]


def _parts(batch: Sequence[TokenSequence], parts: int) -> list[list[TokenSequence]]:
    """The batch in parts of similar length each, so that little is padding."""
    ordered = sorted(batch, key=lambda item: len(item.tokens))
    size = -(-len(ordered) // parts)
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def collate(batch: Sequence[TokenSequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets), both int64 [batch, longest]; targets are shifted left and `IGNORED` off the assistant's tokens."""
    length = max(len(item.tokens) for item in batch)
    tokens = np.zeros((len(batch), length), dtype=np.int64)
    targets = np.full((len(batch), length), IGNORED, dtype=np.int64)
    for row, item in enumerate(batch):
        n = len(item.tokens)
        tokens[row, :n] = item.tokens
        targets[row, : n - 1] = np.where(item.mask[1:], item.tokens[1:], IGNORED)
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def _summed_loss(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    spoken = targets != IGNORED
    # The model is causal and pads stand at the end, so the pads change nothing before them. Only the assistant's
    # positions reach the vocabulary, which is a good part of a small model's work.
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return cross_entropy(model.get_output_embeddings()(hidden[spoken]).float(), targets[spoken], reduction="sum")


def _optimizers(model: Any, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, which needs far fewer steps than AdamW; AdamW for the rest."""
    vocabulary = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in vocabulary]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE * learning_rate, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def supervise(
    model: Any,
    sequences: Sequence[TokenSequence],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Train `model` (a transformers causal LM) in place. Returns the mean loss of the last tenth, nats a token."""
    longest = max(len(item.tokens) for item in sequences)
    limit = model.config.max_position_embeddings
    if longest > limit:
        raise ValueError(f"a demonstration has {longest} tokens, the model's positions end at {limit}: raise --max-length")
    optimizers = _optimizers(model, learning_rate)
    warm = max(1, steps // 20)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / warm) * (0.1 + 0.9 * (1 - step / max(1, steps)))
        )
        for optimizer in optimizers
    ]
    batches = _batches(sequences, batch_size, np.random.default_rng(seed))
    losses: list[float] = []
    model.train()
    for step in range(steps):
        model.zero_grad(set_to_none=True)
        batch = next(batches)
        spoken_in_all = sum(int(item.mask[1:].sum()) for item in batch)
        total = 0.0
        for part in _parts(batch, PARTS):
            loss: Any = _summed_loss(model, *collate(part)) / spoken_in_all
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        losses.append(total)
        on_step(step, losses[-1])
    model.eval()
    tail = losses[-max(1, steps // 10) :]
    return float(np.mean(tail)) if tail else float("nan")
