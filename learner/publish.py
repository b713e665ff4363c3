"""New weights to the policy servers, while their requests wait.

Guarantees:

* A weights file appears whole or not at all. The newest one stays for servers that restart.
* A server is resumed whatever happens between its pause and its resume.
* After `publish` and `catch_up` every server serves the version, and its log-probs of a probe are the trainer's within
  `publish.tolerance`; else they raise: `PushNotVerified`, with the figure.
* A server that goes away during a push is tried again until `publish.timeout_s` after its first failure; then
  `PolicyUnavailable`. A push that a server refuses `REFUSALS` times is its `PolicyError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import psutil
import torch

from learner.run import RunError
from learner.settings import PublishSettings
from learner.tensorfile import write_tensors
from rollout.policy.base import PolicyAdmin, PolicyError, PolicyUnavailable

T = TypeVar("T")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (a folder of our own is made in it, closed to others)
TOLERANCE = {"float32": 0.002, "bfloat16": 0.1}
"""Mean absolute difference of the probe's log-probs, nats a token."""
OWNER = "owner"
"""File with the trainer's process id."""
REFUSALS = 3
"""A server that restarted in the middle of a push refuses the rest of it, once for each restart."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.05, 1.0


class PushNotVerified(RunError):
    """A server does not serve what was pushed. The message has the difference, the server and the settings."""


class Source(Protocol):
    """What weights are published of: the `Trainer`."""

    @property
    def vocab_size(self) -> int: ...

    def weights(self) -> dict[str, torch.Tensor]: ...

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]: ...


@dataclass(frozen=True, slots=True)
class PushReport:
    """`pause_seconds` is that of the server that was paused the longest; `difference` is the largest of the servers' mean
    absolute differences in nats a token, None without verification."""

    version: int
    seconds: float
    pause_seconds: float
    difference: float | None


@dataclass(frozen=True, slots=True)
class _Release:
    """One version as it is pushed. `expected` are the trainer's log-probs of `probe`; empty without verification."""

    version: int
    path: Path
    probe: list[int]
    expected: list[float]


@dataclass(frozen=True, slots=True)
class _Push:
    pause_seconds: float
    difference: float | None


class Publisher:
    """Owns the folder of weights files. `dtype` is the servers'. Calls take turns."""

    def __init__(self, settings: PublishSettings, run_folder: Path, admins: Sequence[PolicyAdmin], *, dtype: str) -> None:
        self._settings = settings
        self._admins = admins
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._tolerance = TOLERANCE[dtype] if settings.tolerance is None else settings.tolerance
        # Runs of one machine may share a folder; the same run finds, and removes, what it left behind when it was killed.
        run = hashlib.sha256(str(run_folder.absolute()).encode()).hexdigest()[:16]
        fallback = run_folder / "weights"
        if settings.folder is None:
            self._folders = [SHARED_MEMORY / f"farmhand-{run}", fallback]
        else:
            self._folders = [Path(settings.folder).absolute() / f"farmhand-{run}"]
        for folder in (*self._folders, *_orphans()):
            _remove(folder)
        self._fresh: list[Path] = []
        """Folders of versions that exist, the newest last."""
        self._release: _Release | None = None
        self._turn = asyncio.Lock()

    async def publish(self, trainer: Source, version: int) -> PushReport:
        """Bring every server to the trainer's weights as `version`. The trainer must not take a step meanwhile."""
        began = time.monotonic()
        async with self._turn:
            self._release = await asyncio.to_thread(self._prepare, trainer, version)
            return await self._to_all(self._release, began, self._push)

    async def catch_up(self, trainer: Source, version: int) -> PushReport:
        """Push to the servers that do not serve the newest version already: to one that restarted, to all on resume.

        What was published last is pushed again from its file, so that the trainer may be in a step. If nothing was published
        yet, `version` is made from the trainer, which must then be idle.
        """
        began = time.monotonic()
        async with self._turn:
            if self._release is None:
                self._release = await asyncio.to_thread(self._prepare, trainer, version)
            return await self._to_all(self._release, began, self._push_if_needed)

    def close(self) -> None:
        """Remove the files in shared memory; those on a disk stay."""
        for folder in self._fresh:
            if folder.is_relative_to(SHARED_MEMORY):
                _remove(folder.parent)
        self._fresh = [folder for folder in self._fresh if folder.exists()]
        self._release = None

    # The file

    def _prepare(self, trainer: Source, version: int) -> _Release:
        weights = {name: tensor.to(self._dtype) for name, tensor in trainer.weights().items()}
        folder = self._write(weights, version)
        probe: list[int] = []
        expected: list[float] = []
        if self._settings.verify:
            # Another probe for each version: a server must not answer from what it has cached of an older one.
            draw = random.Random(f"probe {version}")  # noqa: S311 (no secret)
            probe = [draw.randrange(trainer.vocab_size) for _ in range(self._settings.probe_tokens)]
            expected = trainer.prompt_logprobs(probe)
        self._fresh.append(folder)
        while len(self._fresh) > self._settings.keep:
            _remove(self._fresh.pop(0))
        return _Release(version, folder / "model.safetensors", probe, expected)

    def _write(self, weights: Mapping[str, torch.Tensor], version: int) -> Path:
        """The folder of the new version, in the first place that takes it. Raises `OSError` of the last one."""
        *others, last = self._folders
        for place in others:
            try:
                return _write_to(place, weights, version)
            except OSError:
                # Shared memory that is missing, foreign or full is no failure: there is the run's folder.
                continue
        return _write_to(last, weights, version)

    # The servers

    async def _to_all(
        self, release: _Release, began: float, push: Callable[[PolicyAdmin, str, _Release], Awaitable[_Push]]
    ) -> PushReport:
        names = [str(getattr(admin, "url", f"{i} of {len(self._admins)}")) for i, admin in enumerate(self._admins, 1)]
        calls = [
            self._persist(name, partial(push, admin, name, release)) for name, admin in zip(names, self._admins, strict=True)
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        pushes: list[_Push] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            pushes.append(result)
        differences = [push.difference for push in pushes if push.difference is not None]
        return PushReport(
            version=release.version,
            seconds=time.monotonic() - began,
            pause_seconds=max((push.pause_seconds for push in pushes), default=0.0),
            difference=max(differences, default=None),
        )

    async def _persist(self, name: str, push: Callable[[], Awaitable[_Push]]) -> _Push:
        """Push again after a failure that a restart of the server explains, within the deadline."""
        began: float | None = None
        refusals = 0
        delay = FIRST_DELAY_S
        while True:
            try:
                return await push()
            except (PolicyError, TimeoutError) as error:
                now = time.monotonic()
                began = now if began is None else began
                if isinstance(error, PolicyUnavailable | TimeoutError):
                    if isinstance(error, TimeoutError) or now + delay - began > self._settings.timeout_s:
                        raise self._unavailable(name, error) from error
                else:
                    refusals += 1
                    if refusals >= REFUSALS:
                        raise
                await asyncio.sleep(delay)
                delay = min(LONGEST_DELAY_S, 2 * delay)

    def _unavailable(self, name: str, error: BaseException) -> PolicyUnavailable:
        reason = str(error) or "no answer"
        return PolicyUnavailable(
            f"policy server {name} took no weights within `publish.timeout_s` = {self._settings.timeout_s:g}: {reason}"
        )

    async def _call(self, call: Awaitable[T]) -> T:
        async with asyncio.timeout(self._settings.timeout_s):
            return await call

    async def _push_if_needed(self, admin: PolicyAdmin, name: str, release: _Release) -> _Push:
        if await self._call(admin.version()) == release.version:
            # It may have started paused, to wait for what it has already.
            await self._call(admin.resume())
            difference = await self._difference(admin, release)
            if difference is None or difference <= self._tolerance:
                return _Push(0.0, difference)
        return await self._push(admin, name, release)

    async def _push(self, admin: PolicyAdmin, name: str, release: _Release) -> _Push:
        began = time.monotonic()
        async with self._paused(admin):
            await self._call(admin.update_weights({"path": str(release.path)}, release.version))
        pause_seconds = time.monotonic() - began
        difference = await self._difference(admin, release)
        served = await self._call(admin.version())
        if served != release.version:
            # Also what explains a difference: it restarted since.
            raise PolicyUnavailable(f"it serves version {served} after a push of version {release.version}")
        if difference is not None and not difference <= self._tolerance:
            raise PushNotVerified(
                f"policy server {name} does not serve the weights of version {release.version} that were pushed to it:"
                f" its log-probs of {len(release.probe)} probe tokens differ from the trainer's by {difference:.4g} nats a"
                f" token, `publish.tolerance` allows {self._tolerance:g}. Is `policy.model` the model it serves? If it is,"
                " and the difference is one of precision, raise `publish.tolerance`, or set `publish.verify = false`"
            )
        return _Push(pause_seconds, difference)

    @contextlib.asynccontextmanager
    async def _paused(self, admin: PolicyAdmin) -> AsyncIterator[None]:
        """Requests wait for the length of the block. They go on after it fails, or the answer to the pause was lost, too."""
        try:
            await self._call(admin.pause("keep", clear_cache=self._settings.clear_cache))
            yield
        except BaseException as error:
            try:
                await self._call(admin.resume())
            except (PolicyError, TimeoutError) as second:
                # A server that restarted is not paused; the first failure says more.
                error.add_note(f"resuming the policy server failed as well: {second}")
            raise
        await self._call(admin.resume())

    async def _difference(self, admin: PolicyAdmin, release: _Release) -> float | None:
        """Mean absolute difference of the probe's log-probs, nats a token; None without verification."""
        if not release.expected:
            return None
        served = await self._call(admin.prompt_logprobs(release.probe))
        return sum(abs(a - b) for a, b in zip(served, release.expected, strict=True)) / len(release.expected)


def _write_to(place: Path, weights: Mapping[str, torch.Tensor], version: int) -> Path:
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    if place.stat(follow_symlinks=False).st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "the folder belongs to another user", str(place))
    (place / OWNER).write_text(f"{os.getpid()}\n")
    # A name that was never used: the policy servers may still read the version before it.
    fresh = Path(tempfile.mkdtemp(prefix=f"version-{version}-", dir=place))
    try:
        half = fresh / ".model.safetensors"
        write_tensors(half, weights)
        half.rename(fresh / "model.safetensors")
    except BaseException:
        _remove(fresh)
        raise
    return fresh


def _orphans() -> list[Path]:
    """Folders in shared memory whose trainer died and was never resumed."""
    found = []
    for owner in SHARED_MEMORY.glob(f"farmhand-*/{OWNER}"):
        with contextlib.suppress(OSError, ValueError):
            if owner.stat().st_uid == os.geteuid() and not psutil.pid_exists(int(owner.read_text())):
                found.append(owner.parent)
    return found


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
