"""Control groups for the limits of a sandbox, version 2 or version 1, whichever this process may write.

One group per sandbox and hierarchy, below this process's own group (v1) or beside it (v2, where a group with processes
cannot hand controllers down). `FARMHAND_CGROUP` names another parent: a path below each hierarchy's mount point.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.base import SandboxError, SandboxSpec

PREFIX = "farmhand-"

HEADROOM_PIDS = 64
"""The supervisor and the entry of each running command count too; a fork bomb must not keep them from working."""

HEADROOM_MB = 8
"""The supervisor's own memory, and the kernel's for it."""

_CURE = "FARMHAND_CGROUP names another group to make them in. A worker with a real-time priority cannot have cpu limits"

_WANTED = ("memory", "pids", "cpu")


@dataclass(frozen=True, slots=True)
class Parents:
    """Controller: the folder in which groups are made. Controllers that cannot be had are absent."""

    version: int = 0
    folders: Mapping[str, Path] = field(default_factory=dict)

    def create(self, name: str, spec: SandboxSpec) -> list[str]:
        """Make the groups of one sandbox and set its limits. Returns their folders."""
        groups = sorted({str(folder / f"{PREFIX}{name}") for folder in self.folders.values()})
        try:
            for group in groups:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(group)
            for controller, folder in self.folders.items():
                for file, value in self._settings(controller, spec):
                    (folder / f"{PREFIX}{name}" / file).write_text(value)
        except OSError as error:
            remove(groups)
            raise SandboxError(
                f"cannot set the limits of a sandbox in {', '.join(groups)}: {error.strerror}; {_CURE}"
            ) from error
        return groups

    def _settings(self, controller: str, spec: SandboxSpec) -> Iterator[tuple[str, str]]:
        # What lies in the sandbox's tmpfs is charged to the same group, hence memory and disk together.
        memory = str((spec.memory_mb + spec.disk_mb + HEADROOM_MB) << 20)
        pids = str(spec.pids + HEADROOM_PIDS)
        quota, period = max(1000, round(spec.cpus * 100_000)), 100_000
        if self.version == 2:
            if controller == "memory":
                yield "memory.max", memory
                folder = self.folders["memory"]
                if any((group / "memory.swap.max").exists() for group in folder.glob(f"{PREFIX}*")):
                    yield "memory.swap.max", "0"
            elif controller == "pids":
                yield "pids.max", pids
            else:
                yield "cpu.max", f"{quota} {period}"
        elif controller == "memory":
            yield "memory.limit_in_bytes", memory
            if (self.folders["memory"] / "memory.memsw.limit_in_bytes").exists():
                yield "memory.memsw.limit_in_bytes", memory
        elif controller == "pids":
            yield "pids.max", pids
        else:
            yield "cpu.cfs_period_us", str(period)
            yield "cpu.cfs_quota_us", str(quota)


def join(groups: list[str], pid: int) -> None:
    """Move a process in. The kernel may make the caller wait some 10 ms, so not on an event loop.

    One that has ended meanwhile is no error here: why it ended is told where it was expected to answer.
    """
    for group in groups:
        try:
            Path(group, "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:
            return
        except OSError as error:
            raise SandboxError(f"cannot move a sandbox into its control group {group}: {error.strerror}; {_CURE}") from error


def members(groups: list[str]) -> list[int]:
    """Pids in the first group that can be read; empty if none can."""
    for group in groups:
        with contextlib.suppress(OSError):
            return [int(line) for line in Path(group, "cgroup.procs").read_text().split()]
    return []


def named(start: str) -> list[str]:
    """The groups of sandboxes whose id starts so, for one whose record is lost."""
    return sorted({str(group) for folder in find_parents().folders.values() for group in folder.glob(f"{PREFIX}{start}*")})


def remove(groups: list[str], *, deadline_s: float = 2.0) -> None:
    """Remove groups whose processes are dead or dying. Raises OSError (EBUSY) if some live on after the deadline."""
    deadline = time.monotonic() + deadline_s
    for group in groups:
        while True:
            try:
                os.rmdir(group)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.001)
                continue
            break


def find_parents(proc: Path = Path("/proc/self")) -> Parents:
    """What this process may write, found by making a group and removing it again."""
    mounts: dict[str, Path] = {}
    for line in (proc / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup2":
            mounts[""] = Path(left.split(" ")[4])
        elif kind == "cgroup":
            for name in options.rsplit(" ", 1)[-1].split(","):
                mounts[name] = Path(left.split(" ")[4])
    own: dict[str, str] = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            own[name] = path
    named = os.environ.get("FARMHAND_CGROUP")
    if "" in mounts:
        here = mounts[""] / (named or own.get("", "/")).lstrip("/")
        for parent in dict.fromkeys((here, here.parent) if here != mounts[""] else (here,)):
            if controllers := _usable_v2(parent):
                return Parents(2, {name: parent for name in controllers})
    folders = {}
    for name in _WANTED:
        if name in mounts:
            here = mounts[name] / (named or own.get(name, "/")).lstrip("/")
            if _can_make(here):
                folders[name] = here
    return Parents(1 if folders else 0, folders)


def _usable_v2(parent: Path) -> list[str]:
    try:
        available = set((parent / "cgroup.controllers").read_text().split()) & set(_WANTED)
        for name in available - set((parent / "cgroup.subtree_control").read_text().split()):
            with contextlib.suppress(OSError):
                (parent / "cgroup.subtree_control").write_text(f"+{name}")
        enabled = available & set((parent / "cgroup.subtree_control").read_text().split())
    except OSError:
        return []
    # To move a process in, the common ancestor's list must be writable as well.
    usable = enabled and os.access(parent / "cgroup.procs", os.W_OK) and _can_make(parent)
    return [name for name in _WANTED if name in enabled] if usable else []


def _can_make(parent: Path) -> bool:
    probe = parent / f"{PREFIX}probe-{os.getpid()}"
    try:
        probe.mkdir()
        writable = os.access(probe / "cgroup.procs", os.W_OK)
        probe.rmdir()
    except OSError:
        return False
    return writable
