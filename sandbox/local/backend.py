"""The local backend: makes, finds and removes bubblewrap sandboxes of this host.

It refuses rather than runs unprotected: `create` raises `SandboxUnavailable` with the reason and the cure, unless the spec
says `unsafe`. All state is on the host (see `sandbox.local.state`), so any number of workers may use one base directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from math import ceil
from pathlib import Path

from sandbox.base import SandboxDied, SandboxError, SandboxInfo, SandboxSpec, SandboxUnavailable
from sandbox.local import cgroup, lifecycle, supervisor
from sandbox.local.etc import prepare_etc
from sandbox.local.processes import ProcessRef
from sandbox.local.sandbox import LocalSandbox
from sandbox.local.state import Boxes, Record, default_base, host_uid
from sandbox.local.tools import explain, find_tools

START_DEADLINE_S = 20.0

HALF_MADE_S = 60.0
"""A folder without a ready sandbox is given this long before it counts as left behind by a dead worker."""


class LocalBackend:
    """See `sandbox.base.SandboxBackend`. `base` is the folder of all state, shared by the host's workers."""

    kind = "local"

    def __init__(self, base: Path | None = None) -> None:
        self._boxes = Boxes(base or default_base())
        self._parents: cgroup.Parents | None = None
        self._handles: set[LocalSandbox] = set()
        self._prepared = False

    async def create(self, spec: SandboxSpec, *, labels: Mapping[str, str] | None = None) -> LocalSandbox:
        _check(spec)
        try:
            return await self._create(spec, labels or {}, isolated=True)
        except SandboxUnavailable:
            if not spec.unsafe:
                raise
        return await self._create(spec, labels or {}, isolated=False)

    async def _create(self, spec: SandboxSpec, labels: Mapping[str, str], *, isolated: bool) -> LocalSandbox:
        tools = find_tools(isolation=isolated)
        if not self._prepared:
            await asyncio.to_thread(self._prepare)
            self._prepared = True
        lifecycle.collect_children()
        assert self._parents is not None
        limits = _describe(self._parents, isolated)
        sandbox_id = self._boxes.allocate()
        slot = self._boxes.path(sandbox_id)
        record: Record | None = None
        try:
            uid = host_uid(sandbox_id)
            io = slot / "io"
            line = supervisor.arguments(
                tools,
                spec,
                uid=uid,
                etc=self._boxes.base / "etc",
                io=io,
                isolated=isolated,
                memory="memory" not in self._parents.folders,
            )
            boot = _make_io(io, uid)
            environment = dict(supervisor.BASE_ENV)
            if not isolated:
                _make_root(slot / "root", spec.workdir, uid)
                environment |= {"FARMHAND_SANDBOX": sandbox_id, "HOME": f"{slot}/root{spec.workdir}"}
            try:
                pid = lifecycle.spawn(line, environment)
                now = time.time()
                started = ProcessRef.of(pid)
                assert started is not None, "a child that was not waited for exists"
                _expose(pid)
                groups = self._parents.create(sandbox_id, spec)
                record = Record(
                    id=sandbox_id,
                    spec=spec,
                    supervisor=started,
                    uid=uid,
                    isolated=isolated,
                    created_at=now,
                    expires_at=now + spec.ttl_s,
                    labels=dict(labels),
                    limits=limits,
                    cgroups=groups,
                )
                self._boxes.write(record)
                if groups:
                    await asyncio.to_thread(cgroup.join, groups, pid)
                if "cpu" not in self._parents.folders:
                    cpus = sorted(os.sched_getaffinity(0))
                    os.sched_setaffinity(pid, random.sample(cpus, min(len(cpus), ceil(spec.cpus))))
                init_pid = await self._boot(io, boot, pid)
            finally:
                os.close(boot)
            init = ProcessRef.of(init_pid)
            watch = init.open() if init is not None else None
            if init is None or watch is None:
                raise SandboxDied(f"sandbox {sandbox_id} ended as soon as it was started")
            record = record.model_copy(update={"init": init})
            self._boxes.write(record)
            return self._handle(record, watch)
        except BaseException:
            # Also on cancellation: nothing half-made stays. Blocking, for there is nobody left to wait in the background.
            lifecycle.destroy(self._boxes, slot, record, certain=True)
            raise

    def _prepare(self) -> None:
        self._boxes.prepare()
        self._parents = cgroup.find_parents()
        if not (self._boxes.base / "etc").exists():
            prepare_etc(self._boxes.base)

    async def _boot(self, io: Path, boot: int, supervisor_pid: int) -> int:
        """Say `start`, and return the host pid of init once the sandbox is complete."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[bytes] = loop.create_future()
        heard = bytearray()

        def listen() -> None:
            data = os.read(boot, 65536)
            heard.extend(data)
            if (not data or heard.endswith(supervisor.READY)) and not done.done():
                done.set_result(bytes(heard))

        control = await _open_control(f"{io}/ctl", supervisor_pid)
        try:
            os.write(control, b"start\n")
        finally:
            os.close(control)
        loop.add_reader(boot, listen)
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                said = await done
        except TimeoutError as error:
            raise SandboxError(
                f"bwrap did not finish within {START_DEADLINE_S:.0f} s; it said: {heard.decode(errors='replace')}"
            ) from error
        finally:
            loop.remove_reader(boot)
        if not said.endswith(supervisor.READY):
            raise SandboxUnavailable(explain(_without_json(said)))
        try:
            return int(json.loads(said.removesuffix(supervisor.READY))["child-pid"])
        except (ValueError, KeyError) as error:
            raise SandboxUnavailable(explain(said.decode(errors="replace"))) from error

    def _handle(self, record: Record, watch: int) -> LocalSandbox:
        handle = LocalSandbox(self._boxes, record, watch, self._handles.discard)
        self._handles.add(handle)
        return handle

    async def attach(self, sandbox_id: str) -> LocalSandbox:
        record = self._boxes.load(sandbox_id)
        if record is None or record.init is None or not record.supervisor.alive() or time.time() >= record.expires_at:
            raise SandboxDied(f"there is no live local sandbox {sandbox_id!r} in {self._boxes.base}")
        watch = record.init.open()
        if watch is None:
            raise SandboxDied(f"local sandbox {sandbox_id!r} has ended")
        return self._handle(record, watch)

    async def sandboxes(self) -> list[SandboxInfo]:
        """Those that live."""
        return [
            record.info()
            for _, record in self._boxes.all()
            if record is not None and record.init is not None and record.init.alive() and record.expires_at > time.time()
        ]

    async def reap(self, keep: Callable[[SandboxInfo], Awaitable[bool]] | None = None) -> list[str]:
        lifecycle.collect_children()
        removed = []
        for slot, record in self._boxes.all():
            if not self._left_behind(slot, record) and (
                keep is None or record is None or record.init is None or await keep(record.info())
            ):
                continue
            if record is None and self._boxes.age(slot) < HALF_MADE_S:
                continue
            await asyncio.to_thread(lifecycle.destroy, self._boxes, slot, record)
            removed.append(record.id if record is not None else slot.name)
        return removed

    @staticmethod
    def _left_behind(slot: Path, record: Record | None) -> bool:
        if record is None or time.time() >= record.expires_at or not record.supervisor.alive():
            return True
        if record.init is None:
            return time.time() - record.created_at > HALF_MADE_S
        return not record.init.alive()

    async def close(self) -> None:
        for handle in list(self._handles):
            handle.detach()
        lifecycle.collect_children()


def _check(spec: SandboxSpec) -> None:
    if spec.image is not None:
        raise SandboxUnavailable(
            f'the local backend has no images (got image = {spec.image!r}); leave it out, or use kind = "docker"'
        )
    if not spec.workdir.startswith("/") or "\0" in spec.workdir:
        raise SandboxUnavailable(f"workdir must be an absolute path, got {spec.workdir!r}")
    top = spec.workdir.split("/")[1]
    if top in ("", "usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "proc", "dev", "sys"):
        raise SandboxUnavailable(
            f'workdir = {spec.workdir!r} lies in the read-only system; choose another, such as "/workspace"'
        )


def _describe(parents: cgroup.Parents, isolated: bool) -> dict[str, str]:
    group = f"cgroup v{parents.version}"
    limits = {
        "memory": group if "memory" in parents.folders else "rlimit, per process",
        "pids": f"rlimit and {group}" if "pids" in parents.folders else "rlimit",
        "cpu": group if "cpu" in parents.folders else "affinity, advisory",
        "disk": "tmpfs size",
        "network": "namespace",
        "isolation": "bubblewrap",
    }
    if not isolated:
        limits |= {"disk": "none", "network": "none", "isolation": "none (unsafe)"}
    return limits


def _make_io(io: Path, uid: int) -> int:
    """The folder of pipes, and the open end of the one that tells how the start went."""
    io.mkdir(mode=0o700)
    for name in ("ctl", "boot"):
        os.mkfifo(io / name, 0o600)
    if os.geteuid() == 0:
        for path in (io / "ctl", io / "boot", io):
            os.chown(path, uid, uid)
    return os.open(io / "boot", os.O_RDONLY | os.O_NONBLOCK)


def _expose(pid: int) -> None:
    """Out of memory, the sandbox goes before the host's own processes. Written by root, it cannot be taken back inside."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(supervisor.OOM_SUPERVISOR))


def _make_root(root: Path, workdir: str, uid: int) -> None:
    path = Path(f"{root}{workdir}")
    path.mkdir(parents=True)
    if os.geteuid() == 0:
        while path != root.parent:
            os.chown(path, uid, uid)
            path = path.parent


async def _open_control(path: str, supervisor_pid: int) -> int:
    """Wait until the supervisor listens."""
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        with contextlib.suppress(OSError):
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        alive = ProcessRef.of(supervisor_pid)
        if alive is None or not alive.alive() or time.monotonic() > deadline:
            raise SandboxUnavailable(
                "the sandbox's supervisor did not start: setpriv could not change to an unprivileged user, or /bin/sh "
                "failed. "
                "Run the worker as an ordinary user, or with the capabilities SETUID and SETGID"
            )
        await asyncio.sleep(0.0005)


def _without_json(said: bytes) -> str:
    return said[said.rfind(b"}") + 1 :].decode(errors="replace")
