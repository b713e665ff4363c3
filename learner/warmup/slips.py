"""Slips: an oracle's calls with one mistake in them, so that a policy which imitates them has something left to learn.

Guarantees: generic over oracles, for only the calls are looked at; the last call, which ends the episode, stays; the same
generator state gives the same slip; at least one thing differs from the oracle, unless the oracle is the last call alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envs.base import ToolCall

SHARE_OF_HURRY = 0.5
"""Share of slips that end the episode too early; the others lose a word of a call."""


def slip(calls: Sequence[ToolCall], rng: np.random.Generator) -> list[ToolCall]:
    """One of two mistakes: end before all was done, or leave a word out of one call."""
    *work, last = calls
    if not work:
        return [last]
    wordy = [place for place, call in enumerate(work) if _word_places(call)]
    if not wordy or rng.random() < SHARE_OF_HURRY:
        return [*work[: rng.integers(len(work))], last]
    place = wordy[rng.integers(len(wordy))]
    return [*work[:place], _without_a_word(work[place], rng), *work[place + 1 :], last]


def _word_places(call: ToolCall) -> list[tuple[str, int]]:
    """(argument, index of a word) of all words that are not alone in their argument.

    What is left of a broken pipe may print one thing or another, as its ends are timed; a pipe is kept whole.
    """
    texts = {name: value for name, value in call.arguments.items() if isinstance(value, str) and "|" not in value}
    words = {name: value.split(" ") for name, value in texts.items()}
    return [(name, index) for name, found in words.items() if len(found) > 1 for index in range(len(found))]


def _without_a_word(call: ToolCall, rng: np.random.Generator) -> ToolCall:
    places = _word_places(call)
    name, index = places[rng.integers(len(places))]
    words = str(call.arguments[name]).split(" ")
    return ToolCall(call.name, {**call.arguments, name: " ".join([*words[:index], *words[index + 1 :]])})
