"""Families about files as such: make, move, copy, rename, delete, link, allow, pack and unpack."""

from __future__ import annotations

from tasks.shell.draft import Draft, draft, folders, put, same
from tasks.shell.words import Draw


def make_file(d: Draw) -> Draft:
    name, (first, second), number = d.file(), d.words(2), d.number(0, 99)
    text = f"{first} {second} {number}"
    return draft(
        d.choice(
            (
                f"Create the file {name} with the text: {text}",
                f"Write {text} into the new file {name}.",
                f"Make a file {name} that holds the line {text}",
            )
        ),
        checks=[same(name, text)],
        oracle=[f"echo {text} > {name}"],
    )


def make_folders(d: Draw) -> Draft:
    first, second, name = d.word(), f"{d.word()}{d.number(0, 99)}", d.file()
    path = f"{first}/{second}"
    return draft(
        d.choice(
            (
                f"Make the folder {path} with an empty file {name} in it.",
                f"Create the empty file {path}/{name} and the folders it needs.",
                f"Put an empty file {name} into a new folder {path}.",
            )
        ),
        checks=[f"folder {path}", f"[ -f {path}/{name} ]", f"[ ! -s {path}/{name} ]", "holds . 1", f"holds {first} 1"],
        oracle=[f"mkdir -p {path} && touch {path}/{name}"],
    )


def move_file(d: Draw) -> Draft:
    source, target, name, other, text = d.word(), d.word(), d.file(), d.file(), d.word()
    return draft(
        d.choice(
            (
                f"Move {name} from {source} to {target}.",
                f"The file {name} in {source} belongs into {target}. Move it.",
                f"Move the file {source}/{name} into the folder {target}.",
            )
        ),
        setup=[folders(source, target), put(f"{source}/{name}", text), put(f"{source}/{other}", text)],
        checks=[f"gone {source}/{name}", same(f"{target}/{name}", text), same(f"{source}/{other}", text)],
        oracle=[f"mv {source}/{name} {target}/"],
    )


def copy_file(d: Draw) -> Draft:
    name, folder, copy, text = d.file(), d.word(), d.file(), d.word()
    target = f"{folder}/{copy}"
    return draft(
        d.choice(
            (
                f"Copy {name} to {target}.",
                f"Make a copy of {name} named {copy} in the folder {folder}.",
                f"Put a copy of {name} into {folder} and name it {copy}.",
            )
        ),
        setup=[folders(folder), put(name, text)],
        checks=[same(name, text), same(target, text), f"[ ! {name} -ef {target} ]"],
        oracle=[f"cp {name} {target}"],
    )


def rename_file(d: Draw) -> Draft:
    folder, old, new, text = d.word(), d.file(), d.file(), d.word()
    return draft(
        d.choice(
            (
                f"Rename {old} in {folder} to {new}.",
                f"In {folder}, give {old} the name {new}.",
                f"The file {folder}/{old} should be called {new}. Rename it.",
            )
        ),
        setup=[folders(folder), put(f"{folder}/{old}", text)],
        checks=[same(f"{folder}/{new}", text), f"holds {folder} 1"],
        oracle=[f"mv {folder}/{old} {folder}/{new}"],
    )


def rename_ending(d: Draw) -> Draft:
    folder, (old, new, other), stems = d.word(), d.shuffled(("txt", "md", "log", "csv", "cfg", "dat"))[:3], d.words(4)
    changed, kept = stems[: d.number(2, 3)], stems[3]
    return draft(
        d.choice(
            (
                f"In {folder}, change the ending of all {old} files to {new}.",
                f"Rename every .{old} file in {folder} to .{new}.",
                f"All {old} files in {folder} should end in {new}. Rename them.",
            )
        ),
        setup=[
            folders(folder),
            *(put(f"{folder}/{stem}.{old}", stem) for stem in changed),
            put(f"{folder}/{kept}.{other}", kept),
        ],
        checks=[
            *(same(f"{folder}/{stem}.{new}", stem) for stem in changed),
            f"holds {folder} {len(changed) + 1}",
            f"[ -f {folder}/{kept}.{other} ]",
        ],
        oracle=[f"for f in {folder}/*.{old}; do mv $f ${{f%.*}}.{new}; done"],
    )


def delete_ending(d: Draw) -> Draft:
    folder, (ending, other), stems = d.word(), d.shuffled(("txt", "md", "log", "csv", "cfg", "dat"))[:2], d.words(4)
    cut = d.number(1, 3)
    deleted, kept = stems[:cut], stems[cut:]
    return draft(
        d.choice(
            (
                f"Delete all {ending} files in {folder} and keep the rest.",
                f"Remove every .{ending} file from {folder}.",
                f"Clean {folder}: no {ending} file may stay.",
            )
        ),
        setup=[
            folders(folder),
            *(put(f"{folder}/{stem}.{ending}", stem) for stem in deleted),
            *(put(f"{folder}/{stem}.{other}", stem) for stem in kept),
        ],
        checks=[f"holds {folder} {len(kept)}", *(same(f"{folder}/{stem}.{other}", stem) for stem in kept)],
        oracle=[f"rm {folder}/*.{ending}"],
    )


def delete_folder(d: Draw) -> Draft:
    top, folder, other, name = d.word(), d.word(), d.word(), d.file()
    return draft(
        d.choice(
            (
                f"Delete the folder {folder} in {top} with all that is in it.",
                f"Remove {top}/{folder} and everything inside.",
                f"The folder {top}/{folder} is not needed. Delete it.",
            )
        ),
        setup=[folders(f"{top}/{folder}", f"{top}/{other}"), put(f"{top}/{folder}/{name}", other)],
        checks=[f"gone {top}/{folder}", f"folder {top}/{other}"],
        oracle=[f"rm -r {top}/{folder}"],
    )


def link(d: Draw) -> Draft:
    folder, name, alias, text = d.word(), d.file(), d.word(), d.word()
    return draft(
        d.choice(
            (
                f"Make a symbolic link {alias} to {folder}/{name}.",
                f"Create a symlink named {alias} that points to {folder}/{name}.",
                f"{alias} should be a symbolic link to the file {name} in {folder}.",
            )
        ),
        setup=[folders(folder), put(f"{folder}/{name}", text)],
        checks=[f"[ -L {alias} ]", f"[ {alias} -ef {folder}/{name} ]", same(f"{folder}/{name}", text)],
        oracle=[f"ln -s {folder}/{name} {alias}"],
    )


def executable(d: Draw) -> Draft:
    folder, word = d.word(), d.word()
    name, other = f"{d.word()}.sh", f"{d.word()}.sh"
    return draft(
        d.choice(
            (
                f"Make {folder}/{name} executable.",
                f"Allow the script {name} in {folder} to be executed.",
                f"Set the execute permission of {folder}/{name}, and of no other file.",
            )
        ),
        setup=[folders(folder), put(f"{folder}/{name}", f"echo {word}"), put(f"{folder}/{other}", "true")],
        checks=[f"[ -x {folder}/{name} ]", same(f"{folder}/{name}", f"echo {word}"), f"[ ! -x {folder}/{other} ]"],
        oracle=[f"chmod +x {folder}/{name}"],
    )


def pack(d: Draw) -> Draft:
    folder, archive, (first, second), text = d.word(), f"{d.word()}.tar", (d.file(), d.file()), d.word()
    return draft(
        d.choice(
            (
                f"Pack the folder {folder} into the tar archive {archive}.",
                f"Make {archive}, a tar archive of the folder {folder}.",
                f"Archive {folder} with tar as {archive}.",
            )
        ),
        setup=[folders(folder), put(f"{folder}/{first}", text), put(f"{folder}/{second}", second)],
        checks=[
            f"[ -f {archive} ]",
            "rm -rf .check",
            "mkdir .check",
            f"tar -xf {archive} -C .check 2>/dev/null",
            same(f".check/{folder}/{first}", text),
            same(f".check/{folder}/{second}", second),
            same(f"{folder}/{first}", text),
        ],
        oracle=[f"tar -cf {archive} {folder}"],
    )


def unpack(d: Draw) -> Draft:
    folder, archive, (first, second), text = d.word(), f"{d.word()}.tar", (d.file(), d.file()), d.word()
    return draft(
        d.choice(
            (
                f"Unpack {archive} into the new folder {folder}.",
                f"Make the folder {folder} and extract {archive} there.",
                f"Extract the archive {archive} into a new folder {folder}.",
            )
        ),
        setup=[put(first, text), put(second, second), f"tar -cf {archive} {first} {second}", f"rm {first} {second}"],
        checks=[
            f"folder {folder}",
            same(f"{folder}/{first}", text),
            same(f"{folder}/{second}", second),
            f"[ -f {archive} ]",
        ],
        oracle=[f"mkdir {folder} && tar -xf {archive} -C {folder}"],
    )
