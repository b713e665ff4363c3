"""What happens to a local sandbox as a whole: start, find its processes, remove. Blocking calls; callers use a thread."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path

from sandbox.local import cgroup
from sandbox.local.processes import Population, ProcessRef, every_pid, in_environment, pid_namespace, send, with_folder
from sandbox.local.state import Boxes, Record

KILL_DEADLINE_S = 5.0
DISMISS_DEADLINE_S = 0.5

_LIBC = ctypes.CDLL(None)
_KEYCTL = {"x86_64": 250, "aarch64": 219}
_JOIN_SESSION_KEYRING = 1

_children: set[int] = set()
"""Supervisors that this process started and has not waited for."""


def spawn(line: list[str], env: Mapping[str, str]) -> int:
    """Start a supervisor in a session of its own, with that environment and descriptors and no others. Returns its pid."""
    spawned: Future[int] = Future()

    def work() -> None:
        _leave_keyring()
        try:
            spawned.set_result(_spawn(line, env))
        except OSError as error:
            spawned.set_exception(error)

    # A thread of its own, for a keyring belongs to a thread.
    thread = threading.Thread(target=work, name="sandbox-spawn")
    thread.start()
    thread.join()
    pid = spawned.result(timeout=0)
    _children.add(pid)
    return pid


def _leave_keyring() -> None:
    """Give this thread a new, empty session keyring: its children would have the worker's (Kerberos tickets, passwords)."""
    number = _KEYCTL.get(platform.machine())
    if number is not None:
        _LIBC.syscall(number, _JOIN_SESSION_KEYRING, None)


def _spawn(line: list[str], env: Mapping[str, str]) -> int:
    null = os.open("/dev/null", os.O_RDWR)
    try:
        return os.posix_spawn(
            line[0],
            line,
            env,
            file_actions=[
                *((os.POSIX_SPAWN_DUP2, null, descriptor) for descriptor in (0, 1, 2)),
                *((os.POSIX_SPAWN_CLOSE, descriptor) for descriptor in _inheritable()),
            ],
            setsid=True,
        )
    finally:
        os.close(null)


def _inheritable() -> list[int]:
    """Descriptors beyond the standard ones that a child would get: whoever started the worker may have left it some."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


def collect_children() -> None:
    """Wait for supervisors of this process that have ended, so that no zombie stays."""
    for pid in list(_children):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                continue
        _children.discard(pid)


def tell(io: str, line: str) -> None:
    """One line to a supervisor. Raises OSError if there is none."""
    control = os.open(f"{io}/ctl", os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(control, line.encode() + b"\n")
    finally:
        os.close(control)


def population(record: Record) -> Population:
    """The processes of a sandbox that is ready."""
    assert record.init is not None
    candidates: Callable[[], Iterable[int]] = every_pid
    if record.cgroups:
        groups = record.cgroups
        candidates = lambda: cgroup.members(groups)  # noqa: E731
    if not record.isolated:
        marker = f"FARMHAND_SANDBOX={record.id}".encode()
        return Population(record.init, record.supervisor, candidates, lambda pid: in_environment(pid, marker))
    space = pid_namespace(record.init.pid)
    return Population(
        record.init, record.supervisor, candidates, lambda pid: space is not None and pid_namespace(pid) == space
    )


def destroy(boxes: Boxes, slot: Path, record: Record | None, *, certain: bool = False) -> None:
    """Kill every process, then remove the control groups and the folder. Idempotent, also beside others doing the same.

    `certain`: the slot is the record's, although nothing may be written there yet. A sandbox long gone may have left its
    slot to another one, which must not be hit: then only what the record itself names is ended.
    """
    mine = certain or record is None or boxes.load(record.id) is not None
    orderly = False
    if record is not None:
        if not record.isolated and record.init is not None:
            population(record).kill_all()
        if record.init is not None:
            _end(record.init)
        if record.supervisor.exists():
            orderly = True
            if record.init is not None and mine:
                _dismiss(record.supervisor, str(slot / "io"))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(record.supervisor.pid, signal.SIGKILL)
    if not orderly and mine:
        for pid in with_folder(slot):
            send(pid, signal.SIGKILL)
    if record is not None:
        _reap(record.supervisor)
    groups = record.cgroups if record is not None else cgroup.named(slot.name)
    with contextlib.suppress(OSError):
        cgroup.remove(groups)
    if mine:
        boxes.release(slot)


def _dismiss(supervisor: ProcessRef, io: str) -> None:
    """Let it wait for its children and end. One that does not answer in time is left to the kill that follows."""
    descriptor = supervisor.open()
    if descriptor is None:
        return
    try:
        tell(io, "end")
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll(DISMISS_DEADLINE_S * 1000)
    except OSError:
        return
    finally:
        os.close(descriptor)


def _end(process: ProcessRef) -> None:
    """Kill, and wait until all that its pid namespace held is gone with it."""
    descriptor = process.open()
    if descriptor is None:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll(KILL_DEADLINE_S * 1000)
    finally:
        os.close(descriptor)


def _reap(supervisor: ProcessRef) -> None:
    if supervisor.pid in _children:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(supervisor.pid, 0)
        _children.discard(supervisor.pid)
        return
    deadline = time.monotonic() + KILL_DEADLINE_S
    while supervisor.alive() and time.monotonic() < deadline:
        time.sleep(0.001)
