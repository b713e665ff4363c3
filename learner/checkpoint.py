"""Checkpoints of a run: written whole or not at all, checked when read.

Guarantees:

* A checkpoint appears by one rename after everything in it is on the disk; whoever is killed, or runs out of disk, before
  that leaves the checkpoints from before as they were. Leftovers are removed by the next save or load.
* Every file has its size and SHA-256 in the manifest. One that is missing or differs is a `CheckpointDamaged` that names it;
  with `allow_previous` the newest one that is whole is taken, and the damaged ones are set aside under another name.
* A step may be saved again: the newest checkpoint is the one saved last.

The folder belongs to one process, which holds the run's lock.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from learner.run import RunError

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_TEMPORARY = ".partial-"
_ASIDE = "damaged-"
_MANIFEST = "manifest.json"
_TRAINER = "trainer"
FORMAT = 1


class CheckpointDamaged(RunError):
    """A file of a checkpoint is missing or is not what was written; the message names it and the setting to go on with."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`parts` as they were given to `save_checkpoint`; `trainer_folder` as its `save_trainer` left it."""

    step: int
    parts: Mapping[str, bytes]
    trainer_folder: Path


def save_checkpoint(
    folder: Path, step: int, parts: Mapping[str, bytes], save_trainer: Callable[[Path], None], keep: int
) -> Path:
    """Write one checkpoint and remove all but the newest `keep`. Returns its folder.

    `save_trainer` gets an empty folder to write into. Raises what it raises, and `OSError` as of a full disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    held = _held(folder)
    serial = 1 + max((number for number, _ in held), default=0)
    temporary = folder / f"{_TEMPORARY}{serial}"
    final = folder / f"{serial:06d}-step-{step}"
    try:
        (temporary / _TRAINER).mkdir(parents=True)
        for name, data in parts.items():
            (temporary / name).write_bytes(data)
        save_trainer(temporary / _TRAINER)
        files = {str(path.relative_to(temporary)): _digest(path) for path in sorted(_files(temporary))}
        manifest = {"format": FORMAT, "step": step, "parts": sorted(parts), "files": files}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        for path in (*_files(temporary), temporary / _TRAINER, temporary):
            _sync(path)
        temporary.rename(final)
        _sync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for _, old in held[: max(0, len(held) + 1 - keep)]:
        # Half removed, it must not look like a damaged one.
        doomed = old.rename(folder / f"{_TEMPORARY}{old.name}")
        shutil.rmtree(doomed)
    return final


def load_checkpoint(folder: Path, allow_previous: bool) -> Checkpoint | None:
    """The newest checkpoint, None if there is none. Raises `CheckpointDamaged`."""
    if not folder.is_dir():
        return None
    _remove_leftovers(folder)
    damaged: list[tuple[Path, CheckpointDamaged]] = []
    for _, path in reversed(_held(folder)):
        try:
            checkpoint = _read(path)
        except CheckpointDamaged as error:
            if not allow_previous:
                raise
            damaged.append((path, error))
            continue
        for bad, _ in damaged:
            bad.rename(bad.with_name(_ASIDE + bad.name))
        return checkpoint
    if damaged:
        raise CheckpointDamaged(f"{damaged[0][1]} But no checkpoint before it is whole.")
    return None


def _held(folder: Path) -> list[tuple[int, Path]]:
    """(serial, path) of every checkpoint, the oldest first."""
    return sorted((int(match.group(1)), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))


def _read(path: Path) -> Checkpoint:
    manifest = path / _MANIFEST
    try:
        told = json.loads(manifest.read_text())
        if told["format"] != FORMAT:
            raise _damaged(manifest, f"it has format {told['format']!r}, this version reads {FORMAT}")
        step, names, files = int(told["step"]), list(told["parts"]), dict(told["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(manifest, f"it cannot be read: {error!r}") from None
    for name, expected in files.items():
        try:
            found = _digest(path / name)
        except OSError as error:
            raise _damaged(path / name, f"it cannot be read: {error.strerror}") from None
        if found != expected:
            what = "size" if found["bytes"] != expected["bytes"] else "content"
            raise _damaged(path / name, f"its {what} is not what was written ({found['bytes']} bytes)")
    return Checkpoint(step, {name: (path / name).read_bytes() for name in names}, path / _TRAINER)


def _damaged(path: Path, what: str) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"{path} is damaged: {what}. With `checkpoint.allow_previous = true` the run goes on from the checkpoint before it."
    )


def _remove_leftovers(folder: Path) -> None:
    for left in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(left)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
