"""Processes of the host as /proc shows them: identity that survives pid reuse, and the killing of exact trees.

A command's tree is what descends from it, what shares a session with that, and every orphan of the sandbox that started
after it and belongs to no other command: a child that called setsid or forked twice is thus found, and what an earlier
command left running is not touched. (A daemon that an *earlier* background process forks twice during the command counts as
an orphan; killing one too many is the sound side to err on.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

EXITING = 0x4
"""PF_EXITING, in the flags of /proc/PID/stat."""


@dataclass(frozen=True, slots=True)
class Stat:
    pid: int
    state: str
    parent: int
    session: int
    flags: int
    started: int
    """Clock ticks since boot."""


def read_stat(pid: int) -> Stat | None:
    """None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The name in parentheses may hold anything, also spaces and parentheses.
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(pid, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[6]), int(fields[19]))


class ProcessRef(BaseModel):
    """One process for good: a pid may be used again, the pair of pid and start time is not."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessRef | None:
        found = read_stat(pid)
        return None if found is None else cls(pid=pid, started=found.started)

    def alive(self) -> bool:
        """A process that has begun to end counts as dead."""
        found = read_stat(self.pid)
        return found is not None and found.started == self.started and found.state not in "ZX" and not found.flags & EXITING

    def exists(self) -> bool:
        """Also true of one that is ending or not yet waited for."""
        found = read_stat(self.pid)
        return found is not None and found.started == self.started

    def open(self) -> int | None:
        """A pidfd, readable once the process has ended; None if it is gone."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.exists():
            return descriptor
        os.close(descriptor)
        return None


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def every_pid() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def pid_namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def with_folder(folder: Path) -> list[int]:
    """Processes of the host whose current folder lies in `folder`."""
    inside = f"{folder}/"
    found = []
    for pid in every_pid():
        with contextlib.suppress(OSError):
            if f"{os.readlink(f'/proc/{pid}/cwd')}/".startswith(inside):
                found.append(pid)
    return found


def in_environment(pid: int, marker: bytes) -> bool:
    """Whether the process was started with `marker` (NAME=value) in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker in file.read().split(b"\0")
    except OSError:
        return False


class Population:
    """The processes of one sandbox, seen from the host.

    `candidates` lists the pids to look at (its cgroup, or all of the host's), `inside` says which of them run in it.
    """

    def __init__(
        self,
        init: ProcessRef,
        supervisor: ProcessRef,
        candidates: Callable[[], Iterable[int]],
        inside: Callable[[int], bool],
    ):
        self._init = init
        self._supervisor = supervisor
        self._candidates = candidates
        self._inside = inside

    def _look(self) -> tuple[dict[int, Stat], dict[int, Stat]]:
        """Live processes inside (without init), and those that serve it outside: the supervisor's session."""
        inside: dict[int, Stat] = {}
        outside: dict[int, Stat] = {}
        for pid in self._candidates():
            found = read_stat(pid)
            if found is None or found.state in "ZX" or pid in (self._init.pid, self._supervisor.pid):
                continue
            if found.session == self._supervisor.pid:
                outside[pid] = found
            elif self._inside(pid):
                inside[pid] = found
        return inside, outside

    def kill_all(self, *, deadline_s: float = 5.0) -> None:
        """Kill everything inside but init."""
        self._kill(lambda inside, outside: set(inside), set(), deadline_s)

    def kill_command(self, token: str, since: int | None, *, deadline_s: float = 5.0) -> None:
        """Kill the tree of the command that carries `token`. `since`: ticks at its start, for its orphans.

        What cannot be stopped within the deadline ends with everything else inside.
        """
        marker = f"FARMHAND_RUN={token}".encode()
        hosts: set[int] = set()

        def choose(inside: dict[int, Stat], outside: dict[int, Stat]) -> set[int]:
            hosts.update(pid for pid in outside if in_environment(pid, marker))
            mine = _closure(
                inside, {pid for pid, found in inside.items() if found.parent in hosts or in_environment(pid, marker)}
            )
            others = _closure(
                inside,
                {
                    pid
                    for pid, found in inside.items()
                    if pid not in mine and found.parent in outside and found.parent not in hosts
                },
            )
            start = min((inside[pid].started for pid in mine), default=since) if since is None else since
            if start is not None:
                mine |= _closure(
                    inside,
                    {
                        pid
                        for pid, found in inside.items()
                        if found.started >= start
                        and found.parent not in inside
                        and found.parent not in outside
                        and pid not in others
                    },
                )
            return mine - others

        if not self._kill(choose, hosts, deadline_s):
            self.kill_all()

    def _kill(
        self, choose: Callable[[dict[int, Stat], dict[int, Stat]], set[int]], hosts: set[int], deadline_s: float
    ) -> bool:
        """Stop, then kill, until nothing is chosen any more. Stopping first is what wins against a fork bomb."""
        deadline = time.monotonic() + deadline_s
        stopped: set[int] = set()
        while time.monotonic() < deadline:
            chosen = choose(*self._look())
            fresh = chosen - stopped
            if fresh:
                for pid in fresh:
                    send(pid, signal.SIGSTOP)
                stopped |= fresh
                continue
            for pid in chosen:
                send(pid, signal.SIGKILL)
            # nsenter stops itself when its child is stopped, and would never report its end.
            for pid in hosts or self._look()[1]:
                send(pid, signal.SIGCONT)
            if not chosen:
                return True
            time.sleep(0.0005)
        return False


def _closure(table: dict[int, Stat], seeds: set[int]) -> set[int]:
    """Seeds, all that descends from them, and all that shares a session with one of these."""
    found = set(seeds)
    while True:
        sessions = {table[pid].session for pid in found}
        more = {
            pid for pid, entry in table.items() if pid not in found and (entry.parent in found or entry.session in sessions)
        }
        if not more:
            return found
        found |= more


def ticks_now() -> int:
    """Now, in the clock ticks of `Stat.started`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
