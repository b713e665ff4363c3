"""An episode's tree of segments to token sequences, one for each root-to-leaf path.

Guarantees: every sampled token is trained on exactly once, in the first path that holds it; later paths carry it as context.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from learner.batch import ENV, TokenSequence
from rollout.trajectory import Segment


def linearise(episode_id: str, segments: Sequence[Segment], advantage: float) -> list[TokenSequence]:
    """Paths of the tree in the order of their leaves; those that sampled nothing of their own are left out.

    `segments[i].index` is i. Every sampled token of the episode gets `advantage`.
    """
    parents = {segment.parent for segment in segments}
    trained: set[int] = set()
    paths = []
    for leaf in segments:
        if leaf.index in parents:
            continue
        chain = [leaf]
        while (parent := chain[-1].parent) is not None:
            chain.append(segments[parent])
        chain.reverse()
        fresh = [segment for segment in chain if segment.index not in trained and len(segment.sampled_tokens)]
        if fresh:
            paths.append(_join(f"episode {episode_id} branch {leaf.branch}", chain, {s.index for s in fresh}, advantage))
            trained.update(segment.index for segment in fresh)
    return paths


def _join(key: str, chain: Sequence[Segment], fresh: set[int], advantage: float) -> TokenSequence:
    length = sum(len(segment.env_tokens) + len(segment.sampled_tokens) for segment in chain)
    tokens = np.empty(length, np.int32)
    mask = np.zeros(length, np.bool_)
    logprobs = np.zeros(length, np.float32)
    versions = np.full(length, ENV, np.int32)
    at = 0
    for segment in chain:
        start = at + len(segment.env_tokens)
        end = start + len(segment.sampled_tokens)
        tokens[at:start] = segment.env_tokens
        tokens[start:end] = segment.sampled_tokens
        if len(segment.sampled_tokens):
            versions[start:end] = np.repeat(*np.array(segment.versions, np.int32).T)
        if segment.index in fresh:
            mask[start:end] = True
            logprobs[start:end] = segment.logprobs
        at = end
    # Nothing predicts the first token of a sequence.
    mask[:1] = False
    logprobs[:1] = 0.0
    return TokenSequence(
        key=key,
        tokens=tokens,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
    )
