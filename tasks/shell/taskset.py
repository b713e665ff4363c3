"""The task set `shell`: families of real shell and file work, generated without end from a seed.

Guarantees:

* `task(split, index)` is pure: it depends on the seed, the families, the split and the index, in any process.
* Neighbouring indices are of different families: family `index % number of families`.
* The splits are disjoint in content. What a task sets up and checks decides its split by a hash: draws are repeated until
  one falls into the split that was asked for, so that no train task can come up under `test`, whatever the seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import count

from tasks.base import Limits, Split, Task
from tasks.shell import files, steps, text
from tasks.shell.draft import Draft
from tasks.shell.words import Draw

Family = Callable[[Draw], Draft]

FAMILIES: Mapping[str, Family] = {
    family.__name__: family
    for family in (
        files.make_file,
        text.count_lines,
        steps.find_and_move,
        files.make_folders,
        text.search,
        files.move_file,
        text.count_files,
        steps.look_up,
        files.copy_file,
        text.replace,
        files.rename_ending,
        text.sort_lines,
        steps.set_value,
        files.rename_file,
        text.count_matches,
        files.delete_ending,
        text.first_lines,
        steps.gather,
        files.delete_folder,
        text.concatenate,
        files.pack,
        text.append,
        steps.find_and_delete,
        files.unpack,
        text.column,
        files.link,
        text.drop_repeats,
        steps.swap,
        text.total,
        files.executable,
        text.sort_numbers,
        steps.follow_note,
        text.search_sorted,
        steps.copy_and_change,
        text.largest,
    )
}
"""In the order in which they take turns; kinds are mixed, so that a short stretch of indices has some of each."""

TEST_SHARE = 0.25
"""Share of all contents that belongs to the test split."""

LIMITS = Limits(max_turns=6, max_tokens=1024, turn_tokens=160, command_timeout_s=5.0, episode_timeout_s=120.0)


class ShellTasks:
    """See the module. `size` counts indices; two of them hold the same content only by a rare accident of the draw."""

    name = "shell"

    def __init__(self, families: Sequence[str], seed: int, size_train: int, size_test: int) -> None:
        self._families = tuple(families)
        self._seed = seed
        self._sizes = {"train": size_train, "test": size_test}

    @property
    def families(self) -> tuple[str, ...]:
        return self._families

    def size(self, split: Split) -> int:
        return self._sizes[split]

    def task(self, split: Split, index: int) -> Task:
        if not 0 <= index < self.size(split):
            raise IndexError(f"shell/{split} has the indices 0 to {self.size(split) - 1}, not {index}")
        name = self._families[index % len(self._families)]
        found = self._draw(name, split, index)
        return Task(
            id=f"shell/{split}/{index}",
            env="coding",
            instruction=found.instruction,
            family=name,
            limits=LIMITS,
            params={"setup": found.setup, "verify": found.verify, "oracle": list(found.oracle)},
        )

    def _draw(self, name: str, split: Split, index: int) -> Draft:
        for attempt in count():
            found = FAMILIES[name](Draw(f"{self._seed}/{name}/{split}/{index}/{attempt}"))
            if split_of(found) == split:
                return found
        raise AssertionError("count() does not end")


def split_of(found: Draft) -> Split:
    digest = blake2b(f"{found.setup}\0{found.verify}".encode(), digest_size=4).digest()
    return "test" if int.from_bytes(digest, "big") < TEST_SHARE * 2**32 else "train"


def load(
    families: Sequence[str] | None = None, seed: int = 0, size_train: int = 100_000, size_test: int = 2_000
) -> ShellTasks:
    """The loader behind the name `shell`. `families` chooses and orders some of `FAMILIES`; all by default."""
    chosen = list(FAMILIES) if families is None else list(families)
    unknown = [name for name in chosen if name not in FAMILIES]
    if unknown or not chosen:
        raise ValueError(f"families: found {unknown or 'none'}, allowed are {', '.join(FAMILIES)}")
    if size_train < 1 or size_test < 1:
        raise ValueError(f"size_train and size_test must be positive, got {size_train} and {size_test}")
    return ShellTasks(chosen, seed, size_train, size_test)
