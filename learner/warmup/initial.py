"""Initial weights for a small Llama that is to copy names: training finds by itself what this gives, but takes far longer.

Which name belongs into a command depends on the words before it in the instruction. So:

* most heads begin by passing on what it look at (the output matrix is the value matrix transposed);
* head k of the first half of the first layer's heads begins by looking k tokens back. For that, all embeddings share a constant first coordinate; it
  moves all logits alike where the embeddings are tied to the output, and so changes no probability.

Nothing is fixed: all of it is trained afterwards.
"""

from __future__ import annotations

from typing import Any

import torch

SHARED = 0.3
"""The constant coordinate. After the norm it is about 3."""

SHARPNESS = 2.0
"""Weight from the constant coordinate to queries and keys: the token k back then leads its neighbours by some 4 nats."""

FREQUENCIES = 3
"""The fastest rotations that take part; slower ones hardly tell neighbours apart."""


@torch.no_grad()
def favour_copying(model: Any) -> None:
    """Change a fresh `LlamaForCausalLM` with as many key as query heads in place."""
    config, first = model.config, model.model.layers[0].self_attn
    local = config.num_attention_heads // 2
    for layer in model.model.layers:
        attention = layer.self_attn
        # What stands nearby is not to be passed on as if it stood here, so the heads that look back keep a random output.
        start = local * config.head_dim if attention is first else 0
        attention.o_proj.weight[:, start:] = attention.v_proj.weight.T[:, start:]
    model.model.embed_tokens.weight[:, 0] = SHARED
    half = config.head_dim // 2
    speeds = model.model.rotary_emb.inv_freq[:FREQUENCIES]
    for head in range(local):
        angles = (head + 1) * speeds
        rows = torch.arange(head * config.head_dim, head * config.head_dim + len(speeds))
        # A rotation acts on the coordinates i and i + half. The key is turned back by the distance, the query by head + 1.
        first.k_proj.weight[rows, 0] = SHARPNESS
        first.q_proj.weight[rows, 0] = SHARPNESS * angles.cos()
        first.q_proj.weight[rows + half, 0] = -SHARPNESS * angles.sin()
