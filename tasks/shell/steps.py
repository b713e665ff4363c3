"""Families that take more than one step: look first and then act, or several changes that belong together."""

from __future__ import annotations

from tasks.shell.draft import Draft, draft, edit, folders, put, same, unchanged, view
from tasks.shell.words import Draw


def find_and_move(d: Draw) -> Draft:
    source, target, word, names, texts = d.word(), d.word(), d.word(), [d.file() for _ in range(4)], d.words(8)
    place = d.number(0, 3)
    files = [(name, [texts[2 * i], texts[2 * i + 1]]) for i, name in enumerate(names)]
    files[place][1][d.number(0, 1)] = word
    found, lines = files.pop(place)
    return draft(
        d.choice(
            (
                f"One file in {source} holds the word {word}. Move it to {target}.",
                f"Find the file in {source} that holds {word} and move it into {target}.",
                f"Move the file with the word {word} from {source} to {target}.",
            )
        ),
        setup=[
            folders(source, target),
            put(f"{source}/{found}", *lines),
            *(put(f"{source}/{name}", *text) for name, text in files),
        ],
        checks=[
            same(f"{target}/{found}", *lines),
            f"holds {target} 1",
            f"holds {source} 3",
            *unchanged([(f"{source}/{name}", text) for name, text in files]),
        ],
        oracle=[f"grep -l {word} {source}/*", f"mv {source}/{found} {target}/"],
    )


def find_and_delete(d: Draw) -> Draft:
    folder, word, names, texts = d.word(), d.word(), [d.file() for _ in range(4)], d.words(3)
    place = d.number(0, 3)
    found, kept = names[place], [*names[:place], *names[place + 1 :]]
    return draft(
        d.choice(
            (
                f"One file in {folder} holds the word {word}. Delete it.",
                f"Find the file in {folder} that holds {word} and delete it.",
                f"Delete the file with the word {word} from {folder} and no other.",
            )
        ),
        setup=[
            folders(folder),
            put(f"{folder}/{found}", word),
            *(put(f"{folder}/{name}", text) for name, text in zip(kept, texts, strict=True)),
        ],
        checks=[
            f"gone {folder}/{found}",
            f"holds {folder} 3",
            *(same(f"{folder}/{name}", text) for name, text in zip(kept, texts, strict=True)),
        ],
        oracle=[f"grep -l {word} {folder}/*", f"rm {folder}/{found}"],
    )


def follow_note(d: Draw) -> Draft:
    note, folder, name = d.file(), f"{d.word()}{d.number(0, 9)}", d.file()
    return draft(
        d.choice(
            (
                f"The file {note} names a folder. Make it and put an empty file {name} there.",
                f"Read {note}. Make the folder that it names, with an empty file {name} in it.",
            )
        ),
        setup=[put(note, folder)],
        checks=[f"folder {folder}", f"[ -f {folder}/{name} ]", f"[ ! -s {folder}/{name} ]", "holds . 2"],
        oracle=[f"cat {note}", f"mkdir {folder} && touch {folder}/{name}"],
    )


def look_up(d: Draw) -> Draft:
    source, target, keys = d.file(), d.file(), d.words(4)
    values = d.numbers(4, 10, 99)
    lines = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
    place = d.number(0, 3)
    return draft(
        d.choice(
            (
                f"Look up {keys[place]} in {source} and write its number into {target}.",
                f"Which number has {keys[place]} in {source}? Write it into {target}.",
                f"{source} has a number for {keys[place]}. Write only the number into {target}.",
            )
        ),
        setup=[put(source, *lines)],
        checks=[same(target, values[place]), same(source, *lines)],
        oracle=[f"grep {keys[place]} {source}", f"echo {values[place]} > {target}"],
    )


def set_value(d: Draw) -> Draft:
    source, keys = d.file("cfg"), d.words(3)
    *values, new = d.numbers(4, 10, 99)
    lines = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
    place = d.number(0, 2)
    changed = [*lines]
    changed[place] = f"{keys[place]}={new}"
    return draft(
        d.choice(
            (
                f"In {source}, set {keys[place]} to {new}.",
                f"Change the value of {keys[place]} in {source} to {new}.",
                f"Edit {source} so that {keys[place]} is {new}.",
            )
        ),
        setup=[put(source, *lines)],
        checks=[same(source, *changed)],
        oracle=[view(source), edit(source, lines[place], changed[place])],
    )


def swap(d: Draw) -> Draft:
    first, second, words = d.file(), d.file(), d.words(4)
    return draft(
        d.choice(
            (
                f"Swap the contents of {first} and {second}.",
                f"Exchange {first} and {second}: each should hold what the other held.",
            )
        ),
        setup=[put(first, *words[:2]), put(second, *words[2:])],
        checks=[same(first, *words[2:]), same(second, *words[:2]), "holds . 2"],
        oracle=[f"mv {first} spare && mv {second} {first} && mv spare {second}"],
    )


def gather(d: Draw) -> Draft:
    folder, (ending, other), target = d.word(), d.shuffled(("txt", "md", "log", "csv", "cfg"))[:2], d.file("dat")
    stems, kept = d.words(d.number(2, 4)), d.word()
    return draft(
        d.choice(
            (
                f"Make the folder {folder}, move all {ending} files into it and write their number into {target}.",
                f"Move all .{ending} files into a new folder {folder}. Write into {target} how many there are.",
            )
        ),
        setup=[*(put(f"{stem}.{ending}", stem) for stem in stems), put(f"{kept}.{other}", kept)],
        checks=[
            *(same(f"{folder}/{stem}.{ending}", stem) for stem in stems),
            same(f"{kept}.{other}", kept),
            same(target, len(stems)),
            f"holds {folder} {len(stems)}",
            "holds . 3",
        ],
        oracle=[f"mkdir {folder} && mv *.{ending} {folder}/", f"ls {folder} | wc -l > {target}"],
    )


def copy_and_change(d: Draw) -> Draft:
    source, target, old, new, others = d.file(), d.file(), d.word(), d.word(), d.words(2)
    lines = d.shuffled([f"{old} {others[0]}", others[1], old])
    return draft(
        d.choice(
            (
                f"Copy {source} to {target}, then replace {old} by {new} in {target}.",
                f"Make {target}, a copy of {source} with {new} in place of {old}.",
            )
        ),
        setup=[put(source, *lines)],
        checks=[same(source, *lines), same(target, *(line.replace(old, new) for line in lines))],
        oracle=[f"cp {source} {target}", f"sed -i s/{old}/{new}/g {target}"],
    )
