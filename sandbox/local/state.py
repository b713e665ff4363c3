"""Where sandboxes are known on a host: one folder each, so that any process finds, extends and removes them.

`BASE/boxes/SLOT/record.json` is written atomically; `BASE/boxes/SLOT/io` holds the pipes of running commands. Making the
folder is what allocates the slot, and the slot gives the sandbox its own user id when the worker is root; removing the
folder is the last act of a removal, so a user id is never used twice at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from sandbox.base import SandboxError, SandboxInfo, SandboxSpec, SandboxUnavailable
from sandbox.local.processes import ProcessRef

SLOTS = 1 << 16
_ID = re.compile(r"[0-9a-f]{16}")

UID_BASE = 1_900_000_000
"""Above 1879048191 systemd's allocation table hands out nothing, so these user ids are nobody's."""
UID_BASE_SMALL = 40_000
"""For hosts whose own user namespace maps only 65536 ids, where the slots wrap at `UIDS_SMALL`."""
UIDS_SMALL = 20_000


class Record(BaseModel):
    """All that is known of one sandbox. `init` is None until it is ready."""

    id: str
    spec: SandboxSpec
    supervisor: ProcessRef
    init: ProcessRef | None = None
    uid: int
    """Host user id that the sandbox's processes have."""
    isolated: bool = True
    created_at: float
    expires_at: float
    labels: dict[str, str] = Field(default_factory=dict)
    limits: dict[str, str] = Field(default_factory=dict)
    cgroups: list[str] = Field(default_factory=list)

    def info(self) -> SandboxInfo:
        return SandboxInfo(
            id=self.id,
            kind="local",
            created_at=self.created_at,
            expires_at=self.expires_at,
            labels=self.labels,
            limits=self.limits,
        )


def default_base() -> Path:
    """`FARMHAND_SANDBOX_DIR`, else a folder of this user's in memory (/run), else in the folder for temporary files."""
    if named := os.environ.get("FARMHAND_SANDBOX_DIR"):
        return Path(named)
    if os.geteuid() == 0 and os.access("/run", os.W_OK):
        return Path("/run/farmhand/sandboxes")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "farmhand" / "sandboxes"
    return Path(tempfile.gettempdir()) / f"farmhand-{os.geteuid()}" / "sandboxes"


class Boxes:
    """The folders of one base directory."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.folder = base / "boxes"

    def prepare(self) -> None:
        """Make the folders. Root's are passable, not listable, for the sandboxes' own users; a user's are closed.

        Raises `SandboxUnavailable` if somebody else owns them.
        """
        mode = 0o711 if os.geteuid() == 0 else 0o700
        for folder in (self.base, self.folder):
            try:
                folder.mkdir(mode=mode, parents=True, exist_ok=True)
                found = folder.lstat()
            except OSError as error:
                raise SandboxUnavailable(
                    f"cannot make the folder of sandboxes {folder}: {error.strerror}; "
                    "set FARMHAND_SANDBOX_DIR to one you can write"
                ) from error
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise SandboxUnavailable(
                    f"{folder} belongs to user {found.st_uid}, not to {os.geteuid()}; "
                    "set FARMHAND_SANDBOX_DIR to a folder of yours"
                )
            if stat.S_IMODE(found.st_mode) != mode:
                folder.chmod(mode)
        if os.geteuid() == 0:
            for parent in self.base.resolve().parents:
                if not parent.stat().st_mode & stat.S_IXOTH:
                    raise SandboxUnavailable(
                        f"{parent} is closed to other users, and a sandbox of root runs as a user of its own; "
                        "set FARMHAND_SANDBOX_DIR to a folder below passable ones (mode 711), "
                        f"or open it with `chmod o+x {parent}`"
                    )

    def allocate(self) -> str:
        """A new id, its folder made."""
        for _ in range(1000):
            sandbox_id = secrets.token_hex(8)
            try:
                self.path(sandbox_id).mkdir(mode=0o711 if os.geteuid() == 0 else 0o700)
            except FileExistsError:
                continue
            return sandbox_id
        raise SandboxError(
            f"no free slot in {self.folder}: {SLOTS} sandboxes at once is the most; run `farmhand sandbox gc`"
        )

    def path(self, sandbox_id: str) -> Path:
        return self.folder / sandbox_id[:4]

    def write(self, record: Record) -> None:
        target = self.path(record.id) / "record.json"
        draft = target.with_name(f"record.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(record.model_dump_json())
        draft.replace(target)

    def load(self, sandbox_id: str) -> Record | None:
        """None if there is no such sandbox, or its record is damaged."""
        if not _ID.fullmatch(sandbox_id):
            return None
        record = self._read(self.path(sandbox_id))
        return record if record is not None and record.id == sandbox_id else None

    def all(self) -> Iterator[tuple[Path, Record | None]]:
        """Every slot in use, with its record where that can be read."""
        try:
            slots = sorted(self.folder.iterdir())
        except FileNotFoundError:
            return
        for slot in slots:
            yield slot, self._read(slot)

    @staticmethod
    def _read(slot: Path) -> Record | None:
        try:
            return Record.model_validate_json((slot / "record.json").read_bytes())
        except (OSError, ValidationError):
            return None

    @staticmethod
    def age(slot: Path) -> float:
        """Seconds since the slot was last changed; 0 if it is gone."""
        try:
            return time.time() - slot.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    @staticmethod
    def release(slot: Path) -> None:
        """Fast for the usual case; whatever else is there goes too."""
        with contextlib.suppress(OSError):
            for folder in (slot / "io", slot):
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if not entry.is_dir(follow_symlinks=False):
                            os.unlink(entry.path)
                os.rmdir(folder)
            return
        shutil.rmtree(slot, ignore_errors=True)


def host_uid(sandbox_id: str) -> int:
    """The user id for a sandbox's processes: this user's own, or one per slot when this process is root."""
    if os.geteuid() != 0:
        return os.geteuid()
    slot = int(sandbox_id[:4], 16)
    mapped = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    for base, count in ((UID_BASE, SLOTS), (UID_BASE_SMALL, UIDS_SMALL)):
        if any(start <= base and base + count <= start + length for start, _, length in mapped):
            return base + slot % count
    raise SandboxUnavailable(
        f"root of this user namespace has too few user ids ({mapped}) to give a sandbox its own; "
        f"map at least {UID_BASE_SMALL + UIDS_SMALL} ids, or run the worker as an ordinary user"
    )
