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


def _batches(sequences: Sequence[TokenSequence], size: int, rng: np.random.Generator) -> Iterator[list[TokenSequence]]:
    """Endless shuffled batches; neighbours in a batch have similar lengths, so that little is padding."""
    while True:
        order = rng.permutation(len(sequences))
        pool = [
            sorted(order[i : i + size * 8], key=lambda k: len(sequences[k].tokens)) for i in range(0, len(order), size * 8)
        ]
        groups = [part[i : i + size] for part in pool for i in range(0, len(part), size)]
        for k in rng.permutation(len(groups)):
            yield [sequences[i] for i in groups[k]]


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm) * (0.1 + 0.9 * (1 - step / max(1, steps)))
    )
    batches = _batches(sequences, batch_size, np.random.default_rng(seed))
    losses: list[float] = []
    model.train()
    for step in range(steps):
        tokens, targets = collate(next(batches))
        # The model is causal and pads stand at the end, so the pads change nothing before them.
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        on_step(step, losses[-1])
    model.eval()
    tail = losses[-max(1, steps // 10) :]
    return float(np.mean(tail)) if tail else float("nan")
