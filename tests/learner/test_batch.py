"""Batches: what does not fit together is refused by name, and a saved batch comes back bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.batch import BadSequence, Batch, TokenSequence, load_batch, save_batch


def sequence(key: str, length: int, seed: int) -> TokenSequence:
    rng = np.random.default_rng(seed)
    mask = rng.random(length) < 0.5
    mask[:1] = False
    return TokenSequence(
        key=key,
        tokens=rng.integers(0, 100, length, dtype=np.int32),
        mask=mask,
        logprobs=np.where(mask, rng.normal(size=length), 0),
        versions=np.where(mask, rng.integers(0, 4, length), -1),
        advantages=np.where(mask, 0.25, 0),
    )


def of_lists(**lists: Any) -> TokenSequence:
    return TokenSequence(key="k", **{name: np.array(values) for name, values in lists.items()})


def test_a_saved_batch_comes_back_bit_for_bit(tmp_path: Path) -> None:
    batch = Batch(
        groups=(3, 4),
        sequences=(sequence("a", 7, 0), sequence("b", 1, 1), sequence("c", 9, 2)),
        trained=("a", "c"),
        rewards=(1.0, 0.1),
        dropped={"no_signal": 2},
    )
    save_batch(batch, tmp_path / "deep" / "batch.safetensors")
    again = load_batch(tmp_path / "deep" / "batch.safetensors")
    assert (again.groups, again.trained, again.rewards, again.dropped) == (
        batch.groups,
        batch.trained,
        batch.rewards,
        batch.dropped,
    )
    for one, other in zip(batch.sequences, again.sequences, strict=True):
        assert one.key == other.key
        for name in ("tokens", "mask", "logprobs", "versions", "advantages"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()


def test_an_empty_batch_comes_back(tmp_path: Path) -> None:
    save_batch(Batch(groups=(1,), sequences=()), tmp_path / "empty")
    again = load_batch(tmp_path / "empty")
    assert (again.groups, again.sequences, again.sampled_tokens) == ((1,), (), 0)


def test_arrays_of_different_lengths_are_refused_by_key() -> None:
    good = sequence("episode 5 branch 0", 4, 0)
    with pytest.raises(BadSequence, match="episode 5 branch 0: lengths disagree: 4 tokens, 3 mask"):
        TokenSequence(
            key=good.key,
            tokens=good.tokens,
            mask=good.mask[:3],
            logprobs=good.logprobs,
            versions=good.versions,
            advantages=good.advantages,
        )


def test_a_first_token_cannot_be_trained_on() -> None:
    with pytest.raises(BadSequence, match="first token"):
        of_lists(tokens=[1], mask=[True], logprobs=[0], versions=[0], advantages=[1])


def test_lag_counts_trained_tokens_only_and_is_never_negative() -> None:
    item = of_lists(
        tokens=[1, 2, 3, 4],
        mask=[False, True, True, True],
        logprobs=[0, 0, 0, 0],
        versions=[-1, 3, 5, 6],
        advantages=[0, 1, 1, 1],
    )
    assert Batch(groups=(0,), sequences=(item,)).lag(5) == {2: 1, 0: 2}
