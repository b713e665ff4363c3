"""Families about what files hold: count, search, replace, sort, cut, join, add. The answer goes into a file."""

from __future__ import annotations

from tasks.shell.draft import Draft, draft, folders, put, same
from tasks.shell.words import Draw


def count_lines(d: Draw) -> Draft:
    source, target, lines = d.file(), d.file(), [f"{word} {d.number(0, 9)}" for word in d.words(d.number(3, 19))]
    return draft(
        d.choice(
            (
                f"Count the lines of {source} and write the number into {target}.",
                f"How many lines has {source}? Write the number into {target}.",
                f"Write into {target} how many lines {source} has.",
            )
        ),
        setup=[put(source, *lines)],
        checks=[same(target, len(lines)), same(source, *lines)],
        oracle=[f"wc -l < {source} > {target}"],
    )


def count_files(d: Draw) -> Draft:
    folder, target, names = d.word(), d.file(), [d.file() for _ in range(d.number(3, 15))]
    return draft(
        d.choice(
            (
                f"Count the files in {folder} and write the number into {target}.",
                f"How many files are in {folder}? Write the number into {target}.",
                f"Write into {target} how many files {folder} has.",
            )
        ),
        setup=[folders(folder), *(f": > {folder}/{name}" for name in names)],
        checks=[same(target, len(names)), f"holds {folder} {len(names)}"],
        oracle=[f"ls {folder} | wc -l > {target}"],
    )


def _lines_with(d: Draw, word: str, hits: int, misses: int) -> list[str]:
    """Lines of two words, `hits` of them with `word`."""
    others = iter(d.words(hits + 2 * misses))
    lines = [f"{word} {next(others)}" if d.chance(0.5) else f"{next(others)} {word}" for _ in range(hits)]
    lines += [f"{next(others)} {next(others)}" for _ in range(misses)]
    return d.shuffled(lines)


def count_matches(d: Draw) -> Draft:
    source, target, word = d.file(), d.file(), d.word()
    lines = _lines_with(d, word, hits := d.number(2, 9), d.number(2, 4))
    return draft(
        d.choice(
            (
                f"Count the lines of {source} with the word {word} and write the number into {target}.",
                f"How many lines of {source} hold {word}? Write the number into {target}.",
                f"Write into {target} how many lines of {source} hold {word}.",
            )
        ),
        setup=[put(source, *lines)],
        checks=[same(target, hits), same(source, *lines)],
        oracle=[f"grep -c {word} {source} > {target}"],
    )


def search(d: Draw) -> Draft:
    source, target, word = d.file(), d.file(), d.word()
    lines = _lines_with(d, word, d.number(1, 3), d.number(2, 4))
    found = [line for line in lines if word in line]
    return draft(
        d.choice(
            (
                f"Write all lines of {source} with the word {word} into {target}.",
                f"Find the lines of {source} that hold {word} and save them in {target}.",
                f"Search {source} for {word} and write the lines into {target}.",
            )
        ),
        setup=[put(source, *lines)],
        checks=[same(target, *found), same(source, *lines)],
        oracle=[f"grep {word} {source} > {target}"],
    )


def search_sorted(d: Draw) -> Draft:
    source, target, word = d.file(), d.file(), d.word()
    lines = _lines_with(d, word, d.number(2, 4), d.number(1, 3))
    found = sorted(line for line in lines if word in line)
    return draft(
        d.choice(
            (
                f"Write the lines of {source} with {word} into {target}, sorted.",
                f"Find the lines of {source} that hold {word}, sort them and save them in {target}.",
            )
        ),
        setup=[put(source, *lines)],
        checks=[same(target, *found), same(source, *lines)],
        oracle=[f"grep {word} {source} | sort > {target}"],
    )


def replace(d: Draw) -> Draft:
    source, old, new, others = d.file(), d.word(), d.word(), d.words(4)
    lines = d.shuffled([f"{old} {others[0]} {old}", f"{others[1]} {old}", f"{others[2]} {others[3]}"])
    return draft(
        d.choice(
            (
                f"In {source}, replace every {old} by {new}.",
                f"Change the word {old} to {new} everywhere in {source}.",
                f"Replace {old} with {new} in the file {source}.",
            )
        ),
        setup=[put(source, *lines)],
        checks=[same(source, *(line.replace(old, new) for line in lines))],
        oracle=[f"sed -i s/{old}/{new}/g {source}"],
    )


def sort_lines(d: Draw) -> Draft:
    source, target, lines, reverse = d.file(), d.file(), d.words(d.number(4, 7)), d.chance(0.3)
    order = " in reverse order" if reverse else ""
    return draft(
        d.choice(
            (
                f"Sort the lines of {source} into {target}{order}.",
                f"Write the sorted lines of {source} into {target}{order}.",
                f"Put the lines of {source} into {target}, sorted{order}.",
            )
        ),
        setup=[put(source, *lines)],
        checks=[same(target, *sorted(lines, reverse=reverse)), same(source, *lines)],
        oracle=[f"sort {'-r ' if reverse else ''}{source} > {target}"],
    )


def sort_numbers(d: Draw) -> Draft:
    source, target = d.file(), d.file()
    # A number of each length, so that the order of the digits is a different one.
    lines = d.shuffled([d.number(6, 9), d.number(30, 59), *d.numbers(3, 100, 499)])
    return draft(
        d.choice(
            (
                f"Sort the numbers of {source} into {target}, smallest first.",
                f"Write the numbers of {source} into {target} from small to large.",
            )
        ),
        setup=[put(source, *lines)],
        checks=[same(target, *sorted(lines)), same(source, *lines)],
        oracle=[f"sort -n {source} > {target}"],
    )


def largest(d: Draw) -> Draft:
    source, target = d.file(), d.file()
    lines = d.shuffled([d.number(6, 9), d.number(60, 99), *d.numbers(3, 100, 499)])
    return draft(
        d.choice(
            (
                f"Write the largest number of {source} into {target}.",
                f"Find the largest number in {source} and save it in {target}.",
            )
        ),
        setup=[put(source, *lines)],
        checks=[same(target, max(lines)), same(source, *lines)],
        oracle=[f"sort -n {source} | tail -n 1 > {target}"],
    )


def drop_repeats(d: Draw) -> Draft:
    source, target, words = d.file(), d.file(), d.words(4)
    lines = d.shuffled([*words, *words[: d.number(1, 3)]])
    return draft(
        d.choice(
            (
                f"Sort {source} without repeated lines into {target}.",
                f"Write each line of {source} once into {target}, sorted.",
                f"Sort {source}, drop repeated lines, and save it as {target}.",
            )
        ),
        setup=[put(source, *lines)],
        checks=[same(target, *sorted(words)), same(source, *lines)],
        oracle=[f"sort -u {source} > {target}"],
    )


def first_lines(d: Draw) -> Draft:
    source, target, lines = d.file(), d.file(), d.words(d.number(7, 9))
    count, first = d.number(2, 5), d.chance(0.5)
    which = "first" if first else "last"
    return draft(
        d.choice(
            (
                f"Write the {which} {count} lines of {source} into {target}.",
                f"Save the {which} {count} lines of {source} as {target}.",
                f"{target} should hold the {which} {count} lines of {source}.",
            )
        ),
        setup=[put(source, *lines)],
        checks=[same(target, *(lines[:count] if first else lines[-count:])), same(source, *lines)],
        oracle=[f"{'head' if first else 'tail'} -n {count} {source} > {target}"],
    )


def concatenate(d: Draw) -> Draft:
    first, second, target, words = d.file(), d.file(), d.file(), d.words(4)
    return draft(
        d.choice(
            (
                f"Join {first} and {second} into {target}.",
                f"Write {first} and then {second} into the new file {target}.",
                f"{target} should hold {first} followed by {second}.",
            )
        ),
        setup=[put(first, *words[:2]), put(second, *words[2:])],
        checks=[same(target, *words), same(first, *words[:2]), same(second, *words[2:])],
        oracle=[f"cat {first} {second} > {target}"],
    )


def append(d: Draw) -> Draft:
    source, words, line = d.file(), d.words(2), f"{d.word()} {d.number(0, 99)}"
    return draft(
        d.choice(
            (
                f"Add the line {line} at the end of {source}.",
                f"Append {line} to the file {source}.",
                f"The last line of {source} should be {line} and the rest stay.",
            )
        ),
        setup=[put(source, *words)],
        checks=[same(source, *words, line)],
        oracle=[f"echo {line} >> {source}"],
    )


def column(d: Draw) -> Draft:
    source, target, number = d.file("csv"), d.file(), d.number(1, 3)
    rows = [(d.word(), str(d.number(0, 99)), d.word()) for _ in range(3)]
    lines = [",".join(row) for row in rows]
    return draft(
        d.choice(
            (
                f"Write column {number} of {source} into {target}.",
                f"Cut column {number} out of {source} and save it in {target}.",
                f"{target} should hold only column {number} of {source}.",
            )
        ),
        setup=[put(source, *lines)],
        checks=[same(target, *(row[number - 1] for row in rows)), same(source, *lines)],
        oracle=[f"cut -d , -f {number} {source} > {target}"],
    )


def total(d: Draw) -> Draft:
    source, target, numbers = d.file(), d.file(), [d.number(1, 99) for _ in range(d.number(3, 6))]
    return draft(
        d.choice(
            (
                f"Add the numbers in {source} and write the sum into {target}.",
                f"Write the sum of the numbers of {source} into {target}.",
                f"What is the sum of all lines of {source}? Write it into {target}.",
            )
        ),
        setup=[put(source, *numbers)],
        checks=[same(target, sum(numbers)), same(source, *numbers)],
        oracle=[f"awk '{{s+=$1}} END {{print s}}' {source} > {target}"],
    )
