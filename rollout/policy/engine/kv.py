"""Keys and values by row, and attention over them.

A step runs a flat list of tokens through the model, `[1, tokens]`: first one for each decoding row (rows `0..decoding-1` of
the cache), then the chunks of rows that are being prefilled, then padding. `Plan` says which token belongs to which
row and position; the model knows nothing of it, since `RowCache` writes the keys and values where they belong and
`attend` reads them there, both through transformers' own interfaces.

Shapes are chosen so that a token's result does not depend on its company: queries come at least `MIN_QUERIES` together, and
sums over keys are taken block by block of `KEY_BLOCK`, so that a token decoded alone and the same token inside a prefilled
chunk take the same arithmetic. A fused attention kernel would be a little faster, but splits its sums by total length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, Cache, PretrainedConfig

from rollout.policy.engine.batch import Chunk

MIN_QUERIES = 4
"""Matrix kernels take other paths, with other rounding, for one to three rows; from four on a row's result is its own."""
KEY_BLOCK = 128
"""Keys are padded to whole blocks with masked ones, which add exact zeros; one block is less than a kernel would split."""
GROUP = 16
"""Decoding rows that share one call of attention, padded to the longest of them."""
TILE = 64
"""Tokens of a chunk that share one call: scores of more would leave the processor's cache."""

ATTENTION = "farmhand_rows"


class UnsupportedModel(Exception):
    """The engine cannot serve this architecture; the message says what of it."""


@dataclass(frozen=True, slots=True)
class Span:
    """One call of attention: `tokens` of the flat list are the queries of cache rows `rows`. A tile of a chunk has one row.

    `mask` is [rows x kv heads, queries, keys], 0 or -inf.
    """

    tokens: slice
    rows: slice
    mask: torch.Tensor


class Plan:
    """Where the tokens of one step belong. Masks are made once and serve all layers."""

    def __init__(
        self,
        *,
        decode_positions: torch.Tensor,
        chunks: Sequence[Chunk],
        tokens: int,
        heads: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        """`decode_positions` int64 [decoding]; `tokens` counts without padding; `heads`: (kv heads, query heads each)."""
        self.tokens = tokens
        kv_heads, shared = heads
        decoding = len(decode_positions)
        self.rows = torch.empty(tokens, dtype=torch.int64)
        self.positions = torch.empty(tokens, dtype=torch.int64)
        self.rows[:decoding] = torch.arange(decoding)
        self.positions[:decoding] = decode_positions
        self.decode: list[Span] = []
        queries = max(shared, MIN_QUERIES)
        for first in range(0, decoding, GROUP):
            place = slice(first, min(first + GROUP, decoding))
            mask = _mask(decode_positions[place], dtype)[:, None, None]
            mask = mask.expand(-1, kv_heads, queries, -1).reshape(-1, queries, mask.shape[-1])
            self.decode.append(Span(place, place, mask))
        self.tiles: list[Span] = []
        for chunk in chunks:
            positions = torch.arange(chunk.start, chunk.start + chunk.length)
            place = slice(chunk.offset, chunk.offset + chunk.length)
            self.rows[place] = chunk.row
            self.positions[place] = positions
            for first in range(0, chunk.length, TILE):
                ends = positions[first : first + TILE].repeat_interleave(shared)
                ends = torch.cat([ends, ends[-1:].expand(max(0, MIN_QUERIES - len(ends)))])
                tile = slice(place.start + first, min(place.start + first + TILE, place.stop))
                mask = _mask(ends, dtype).expand(kv_heads, -1, -1)
                self.tiles.append(Span(tile, slice(chunk.row, chunk.row + 1), mask))


def _blocks(n: int, block: int) -> int:
    return -(-n // block) * block


def _mask(ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 up to and with position `ends` [n], -inf after it: [n, keys], keys being whole blocks."""
    keys = _blocks(int(ends.max()) + 1, KEY_BLOCK)
    return torch.zeros(len(ends), keys, dtype=dtype).masked_fill_(torch.arange(keys) > ends[:, None], -torch.inf)


class RowCache(Cache):
    """Keys and values of all rows and layers: two tensors [layers, rows, kv heads, max length, head dim]."""

    def __init__(self, config: PretrainedConfig, rows: int, max_length: int, dtype: torch.dtype) -> None:
        super().__init__(layers=[])
        check_supported(config)
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.heads = (kv_heads, heads // kv_heads)
        shape = (config.num_hidden_layers, rows, kv_heads, _blocks(max_length, KEY_BLOCK), dim)
        # Zeros, since masked garbage that is not finite would still spoil a sum. Untouched pages take no memory.
        self.keys = torch.zeros(shape, dtype=dtype)
        self.values = torch.zeros(shape, dtype=dtype)
        self.plan: Plan | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the step's keys and values `[1, kv heads, tokens, dim]` to their rows; returns the layer's whole cache."""
        plan = self.plan
        assert plan is not None
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[plan.rows, :, plan.positions] = key_states[0, :, : plan.tokens].transpose(0, 1)
        values[plan.rows, :, plan.positions] = value_states[0, :, : plan.tokens].transpose(0, 1)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Part of the interface; positions are always given, so that nothing is derived from it."""
        return 0

    def copy_row(self, source: int, target: int, length: int) -> None:
        for tensor in (self.keys, self.values):
            tensor[:, target, :, :length] = tensor[:, source, :, :length]

    def swap_rows(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` positions of two rows."""
        for tensor in (self.keys, self.values):
            held = tensor[:, a, :, :length].clone()
            tensor[:, a, :, :length] = tensor[:, b, :, :length]
            tensor[:, b, :, :length] = held


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    plan: Plan,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the step's queries `[1, heads, tokens, dim]` over their rows; returns `[1, tokens, heads, dim]`.

    The heads that share a key head are stacked as queries of it, so that keys are never repeated.
    """
    heads, tokens, dim = query.shape[1:]
    kv_heads = key.shape[1]
    shared = heads // kv_heads
    scale = dim**-0.5 if scaling is None else scaling
    stacked = query[0].transpose(0, 1).reshape(tokens, kv_heads, shared, dim)
    out = torch.zeros(tokens, kv_heads, shared, value.shape[-1], dtype=query.dtype)
    for span in plan.decode:
        queries = _at_least(stacked[span.tokens], span.mask.shape[1])
        out[span.tokens] = _attention(queries, key[span.rows], value[span.rows], span.mask, scale)[:, :, :shared]
    for span in plan.tiles:
        # [1, kv heads, tokens x shared, dim]: the queries of one position stand together.
        queries = _at_least(stacked[span.tokens].transpose(0, 1).reshape(1, kv_heads, -1, dim), span.mask.shape[1])
        result = _attention(queries, key[span.rows], value[span.rows], span.mask, scale)[0]
        n = span.tokens.stop - span.tokens.start
        out[span.tokens] = result[:, : n * shared].reshape(kv_heads, n, shared, -1).transpose(0, 1)
    return out.reshape(1, tokens, heads, -1), None


def _at_least(queries: torch.Tensor, n: int) -> torch.Tensor:
    """`queries` [rows, kv heads, m, dim] with the last repeated up to n of them."""
    missing = n - queries.shape[2]
    return queries if missing <= 0 else torch.cat([queries, queries[:, :, -1:].expand(-1, -1, missing, -1)], dim=2)


def _attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """[rows, kv heads, n, dim] over the first `mask.shape[-1]` of keys and values [rows, kv heads, max length, dim]."""
    length = mask.shape[-1]
    shape = queries.shape
    q, k, v = queries.flatten(0, 1), keys.flatten(0, 1)[:, :length], values.flatten(0, 1)[:, :length]
    weights = torch.softmax(torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale), dim=-1)
    out = torch.bmm(weights[:, :, :KEY_BLOCK], v[:, :KEY_BLOCK])
    for at in range(KEY_BLOCK, length, KEY_BLOCK):
        out.baddbmm_(weights[:, :, at : at + KEY_BLOCK], v[:, at : at + KEY_BLOCK])
    return out.view(*shape[:3], -1)


def check_supported(config: PretrainedConfig) -> None:
    """Raises `UnsupportedModel` unless every layer attends to all that precedes, the standard way."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise UnsupportedModel(
            f"{config.model_type} has layers of kind {', '.join(sorted(kinds))}; the engine has full attention only"
        )
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise UnsupportedModel(
            f"{config.model_type} has sliding_window = {config.sliding_window}; the engine has full attention only"
        )
    for name in ("attn_logit_softcapping", "alibi", "kv_lora_rank"):
        if getattr(config, name, None):
            raise UnsupportedModel(
                f"{config.model_type} has {name} = {getattr(config, name)!r}, which the engine does not have"
            )


AttentionInterface.register(ATTENTION, attend)
