"""Micro-batches: nothing lost, nothing twice, never more places than allowed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.batch import BadSequence, TokenSequence
from learner.packing import pack


def sequence(key: int, length: int, trained: list[int]) -> TokenSequence:
    """Token i of sequence `key` is 100 * key + i, and so are its log-prob and advantage."""
    ids = 100 * key + np.arange(length, dtype=np.int32)
    mask = np.isin(np.arange(length), trained)
    return TokenSequence(
        key=str(key),
        tokens=ids,
        mask=mask,
        logprobs=np.where(mask, -ids, 0),
        versions=np.where(mask, 0, -1),
        advantages=np.where(mask, ids, 0),
    )


@st.composite
def batches(draw: st.DrawFn) -> list[TokenSequence]:
    lengths = draw(st.lists(st.integers(1, 20), max_size=12))
    masks = [draw(st.sets(st.integers(1, length - 1))) if length > 1 else set() for length in lengths]
    return [sequence(i, length, sorted(mask)) for i, (length, mask) in enumerate(zip(lengths, masks, strict=True))]


@given(batches(), st.integers(20, 60))
def test_every_trained_token_is_predicted_once_from_the_token_before_it(batch: list[TokenSequence], limit: int) -> None:
    seen: list[int] = []
    for micro in pack(batch, limit):
        assert micro.tokens.numel() <= limit
        before = micro.tokens.flatten()[micro.places]
        assert (before + 1 == micro.targets).all()
        assert micro.advantages.tolist() == micro.targets.tolist()
        assert micro.logprobs.tolist() == (-micro.targets).tolist()
        seen += micro.targets.tolist()
    assert sorted(seen) == sorted(int(token) for item in batch for token in item.tokens[item.mask])


@given(batches(), st.integers(20, 60))
def test_packing_is_deterministic(batch: list[TokenSequence], limit: int) -> None:
    once, again = list(pack(batch, limit)), list(pack(batch, limit))
    assert [micro.tokens.tolist() for micro in once] == [micro.tokens.tolist() for micro in again]


def test_like_lengths_share_a_micro_batch_and_the_longest_come_first() -> None:
    batch = [sequence(i, length, [length - 1]) for i, length in enumerate([5, 50, 6, 49, 5])]
    assert [tuple(micro.tokens.shape) for micro in pack(batch, 100)] == [(2, 49), (3, 5)]


def test_what_follows_the_last_trained_token_is_not_run() -> None:
    (micro,) = pack([sequence(0, 20, [3, 4])], 100)
    assert micro.tokens.tolist() == [[0, 1, 2, 3]]


def test_a_sequence_that_does_not_fit_is_named_with_the_setting() -> None:
    with pytest.raises(BadSequence, match=r"^7: 30 tokens .*batch\.micro_batch_tokens. = 20"):
        list(pack([sequence(7, 31, [30])], 20))
