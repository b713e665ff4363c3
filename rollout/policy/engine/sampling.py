"""Logits to tokens, for a whole batch at once, each row with its own parameters.

Guarantees:

* A row's token and log-prob depend on that row alone: its logits, its parameters, and a uniform from (seed, position).
* The log-prob is that of the distribution sampled from: after temperature, top-k and top-p. At temperature 0 the token is
  the argmax and the log-prob that of temperature 1, as in vLLM.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position): float64 [n] with 24 random bits.

    A counter in place of a generator's state: a request that goes on elsewhere from its tokens draws as it would have.
    """
    mixed = _splitmix(_splitmix(seeds) ^ positions.astype(np.uint64))
    return (mixed >> np.uint64(40)).astype(np.float64) * 2.0**-24


def sample(
    logits: torch.Tensor,
    temperature: NDArray[np.float32],
    top_p: NDArray[np.float32],
    top_k: NDArray[np.int64],
    draws: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Tokens [n], log-probs [n] and ranks [n] (1 is the likeliest) for `logits` [n, vocabulary] and parameters [n].

    `top_k` 0 and `top_p` 1 keep everything.
    """
    if not len(logits):
        return np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int64)
    logits = logits.float()
    greedy = temperature == 0
    if not (greedy | (temperature == 1)).all():
        logits = logits / torch.from_numpy(np.where(greedy, np.float32(1), temperature))[:, None]
    narrowed = ~greedy & ((top_p < 1) | (top_k > 0))
    if narrowed.any():
        rows = torch.from_numpy(np.flatnonzero(narrowed))
        kept = _narrow(logits[rows], torch.from_numpy(top_p[narrowed]), torch.from_numpy(top_k[narrowed]))
        logits = logits.index_copy(0, rows, kept)
    logprobs = torch.log_softmax(logits, dim=-1)
    if greedy.all():
        tokens = logprobs.argmax(-1, keepdim=True)
    else:
        # Float64, for the sum over a large vocabulary; its last entry is the total, which rounding keeps from being 1.
        cdf = logprobs.exp().double().cumsum(-1)
        thresholds = torch.from_numpy(draws)[:, None] * cdf[:, -1:]
        # The first entry above the threshold: one with probability 0 never is.
        tokens = torch.searchsorted(cdf, thresholds, right=True)
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy)[:, None], logprobs.argmax(-1, keepdim=True), tokens)
    chosen = logprobs.gather(1, tokens)
    ranks = (logprobs > chosen).sum(-1) + 1
    return tokens[:, 0].numpy(), chosen[:, 0].numpy(), ranks.numpy()


def _narrow(logits: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """`logits` [n, vocabulary] with -inf outside the `top_k` likeliest, then outside the smallest set of mass `top_p`."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if (top_k > 0).any():
        rank = torch.arange(logits.shape[1])
        ordered = ordered.masked_fill((top_k[:, None] > 0) & (rank >= top_k[:, None]), -torch.inf)
    if (top_p < 1).any():
        probs = torch.softmax(ordered, dim=-1).double()
        before = probs.cumsum(-1) - probs
        before[:, 0] = -1.0
        ordered = ordered.masked_fill((before >= top_p[:, None].double()) & (top_p[:, None] < 1), -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)
