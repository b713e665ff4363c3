"""The folder of a run: what lies where, who may write in it, and how it is opened again.

Guarantees:

* At most one trainer works in a folder: `RunFolder.lock` holds a file lock that ends with the process.
* `config.json` is written before anything starts, so that a run can be resumed from any point of its life.
* Files that others read while the run goes on are replaced whole, never half written.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from learner.config import ConfigError, Mistake, TrainConfig, check_form


class RunError(Exception):
    """The run cannot start or go on; the message says why and what to do."""


class RunFolder:
    """Paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.logs = path / "logs"
        self.broker = path / "broker"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.ledger = path / "ledger.json"
        self.summary = path / "summary.json"
        self.episodes = path / "episodes"

    @property
    def name(self) -> str:
        """The run's name in messages."""
        return self.path.name

    @property
    def key(self) -> str:
        """The run's name in the store and in sandbox labels: no other run, of whatever host, has the same."""
        note = self.path / ".key"
        if not note.exists():
            note.write_text(f"{self.name}-{secrets.token_hex(4)}\n")
        return note.read_text().strip()

    @classmethod
    def create(cls, config: TrainConfig, source: Path) -> RunFolder:
        """Make the folder of a new run. Raises `RunError` if the name is taken."""
        name = config.run.name or f"{source.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = cls((config.run.folder / name).absolute())
        try:
            folder.path.mkdir(parents=True)
        except FileExistsError:
            raise RunError(
                f"{folder.path} exists: go on with it by `farmhand train --resume {folder.path}`, or change `run.name`"
            ) from None
        except OSError as error:
            raise RunError(f"cannot make the run's folder {folder.path}: {error.strerror}; see `run.folder`") from error
        replace_json(folder.config, config.model_dump(mode="json", by_alias=True))
        return folder

    @classmethod
    def open(cls, path: Path) -> tuple[RunFolder, TrainConfig]:
        """A run that exists. Raises `ConfigError` if this is not one."""
        folder = cls(path.absolute())
        try:
            data = json.loads(folder.config.read_text())
        except (OSError, ValueError) as error:
            expected = "expected the folder of a run, which holds config.json"
            raise ConfigError(str(path), [Mistake("run", str(error), expected)]) from None
        return folder, check_form(data, str(folder.config))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder. Raises `RunError` while another process does."""
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"{self.path} is in use by another trainer; stop that one first") from None
            yield
        finally:
            os.close(descriptor)


def replace_json(path: Path, data: Any) -> None:
    """Write JSON whole or not at all."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(json.dumps(data, indent=2) + "\n")
    fresh.replace(path)
