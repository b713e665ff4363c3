"""Names and contents of the shell tasks: short lower-case ASCII words, endings and small numbers, drawn from one generator.

Guarantees: no word holds another, so that a search for one never finds another; no word holds an ending.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")

_POOL = (
    "acid acorn amber apple arrow atom autumn badge bagel basin beach berry birch blaze bloom board bonus brick brush "
    "cabin camel candy canoe cedar cello chalk cherry civic clay cliff clock cloud clover cobra coral crane creek crown "
    "cubic daisy delta denim diary dome dove dragon drum dune eagle ember equal fable falcon ferry fever fiber flame "
    "flint flora flute forest fossil frost fruit galaxy garlic ghost ginger globe grape gravel guitar gulf habit harbor "
    "hazel helmet heron hobby honey hotel igloo indigo ivory jacket jaguar jelly jewel juice jungle kayak kettle kiwi "
    "koala ladder lagoon lemon lilac lion lotus lunar magic mango maple marble medal melon meteor mint mirror mocha moss "
    "museum nectar nickel noble north oasis ocean olive onion opal orbit otter oxygen paddle palm panda paper pearl "
    "pepper piano pilot planet plum polar prism pulse quartz quiz"
)

WORDS: tuple[str, ...] = tuple(_POOL.split())

ENDINGS: tuple[str, ...] = ("txt", "md", "log", "csv", "cfg", "dat")


class Draw:
    """Draws of one task. Names drawn from the same object are all different."""

    def __init__(self, seed: str) -> None:
        self._random = Random(seed)  # noqa: S311 - reproducible tasks, not secrets
        self._used: set[str] = set()

    def word(self) -> str:
        while True:
            word = WORDS[int(self._random.random() * len(WORDS))]
            if word not in self._used:
                self._used.add(word)
                return word

    def words(self, count: int) -> list[str]:
        return [self.word() for _ in range(count)]

    def ending(self) -> str:
        return self.choice(ENDINGS)

    def file(self, ending: str | None = None) -> str:
        """A file name such as `lemon.txt`; its stem is unlike every other name."""
        return f"{self.word()}.{ending or self.ending()}"

    def number(self, low: int, high: int) -> int:
        """Both ends included."""
        return low + int(self._random.random() * (high - low + 1))

    def numbers(self, count: int, low: int, high: int) -> list[int]:
        """Different ones, in no order."""
        return self._random.sample(range(low, high + 1), count)

    def choice(self, items: Sequence[T]) -> T:
        return items[int(self._random.random() * len(items))]

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def shuffled(self, items: Sequence[T]) -> list[T]:
        return self._random.sample(items, len(items))
