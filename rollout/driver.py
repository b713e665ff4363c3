"""Drives one attempt of one episode, from its lease to its end: policy call, segment, action, observation, and again.

Guarantees:

* A segment is on the stream before its action is carried out. An attempt that takes over after a death therefore never samples
  a turn again whose action may have happened: the environment answers by `interrupted`, in the sandbox as it was left.
* A cancelled attempt (its worker stops) leaves the sandbox alive, saves the observation that the policy has not answered yet,
  and gives the lease back.
* Whatever goes wrong ends the episode as `failed` with its kind and traceback; only a lost lease or store passes through.
* Reaching a limit ends the episode as `truncated`, and it is scored. Time spent waiting for the policy is infrastructure: a
  deadline that falls into it is a failure of kind "policy", not a truncation.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import traceback
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Literal

from envs.base import EnvError, Environment, Reset, Score, Step
from envs.registry import make_environment
from rollout.context import RunContext
from rollout.policy.base import PolicyError
from rollout.store import EpisodeStore, Lease, LeaseLost, Resume, StoreUnavailable
from rollout.trajectory import EpisodeEnd, Failure, MalformedRecord, Segment, Status
from sandbox.base import Sandbox, SandboxBackend, SandboxDied, SandboxError
from tasks.base import Task

PARK_TIMEOUT_S = 5.0
CLEAN_TIMEOUT_S = 30.0
TRACEBACK_CHARS = 8000
OVERTIME_S = 180.0
"""Beyond the episode's own time: for a verifier that runs after it. Whoever hangs longer has failed."""

Phase = Literal["opening", "policy", "append", "env", "score"]


async def drive(
    lease: Lease, resume: Resume, *, store: EpisodeStore, context: RunContext, backend_for: Callable[[str], SandboxBackend]
) -> None:
    """Play the attempt to its end and write the end. Raises `LeaseLost` and `StoreUnavailable`."""
    attempt = _Attempt(lease, resume, store, context, backend_for)
    try:
        end = await attempt.play()
        await store.finish(lease, end)
    except asyncio.CancelledError:
        # The worker stops; what is saved here is a kindness to the next attempt, so it may not hold the worker up.
        with contextlib.suppress(TimeoutError, LeaseLost, StoreUnavailable):
            async with asyncio.timeout(PARK_TIMEOUT_S):
                await attempt.park()
        raise
    await attempt.clean()


def seed_of(episode_seed: int, turn: int) -> int:
    """Sampling seed of a turn: the same for every attempt, so that a run can be repeated."""
    digest = blake2b(f"{episode_seed}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def failure_of(error: Exception) -> Failure:
    """The kind by where the error came from: "policy", "sandbox", "task", and "env" for everything that was not foreseen."""
    if isinstance(error, PolicyError | MalformedRecord):
        kind = "policy"
    elif isinstance(error, SandboxError):
        kind = "sandbox"
    elif isinstance(error, EnvError):
        kind = "task"
    else:
        kind = "env"
    text = "".join(traceback.format_exception(error))
    message = f"{type(error).__name__}: {error}"
    return Failure(kind=kind, message=message[:TRACEBACK_CHARS], traceback=text[-TRACEBACK_CHARS:])


def _finite(what: str, value: float) -> float:
    if not math.isfinite(value):
        raise EnvError(f"the environment gave {value!r} as {what}, expected a finite number")
    return float(value)


class _Attempt:
    def __init__(
        self,
        lease: Lease,
        resume: Resume,
        store: EpisodeStore,
        context: RunContext,
        backend_for: Callable[[str], SandboxBackend],
    ) -> None:
        self._lease = lease
        self._resume = resume
        self._store = store
        self._context = context
        self._backend_for = backend_for
        self._phase: Phase = "opening"
        self._started = time.time()
        self._clock = time.monotonic()
        self._seconds = {"policy": 0.0, "env": 0.0}
        self._tokens: list[int] = []
        """Everything the policy has seen and said."""
        self._pending: list[int] = []
        """What it has not seen yet: the opening, or the last observation."""
        self._turn = len(resume.segments)
        self._earned = 0.0
        """Paid by the environment for the last action."""
        self._done = False
        self._sandbox: Sandbox | None = None
        self._env: Environment | None = None
        self._reset: Reset = Reset(())

    @property
    def _environment(self) -> Environment:
        assert self._env is not None
        return self._env

    async def play(self) -> EpisodeEnd:
        episode = self._lease.episode
        try:
            task = self._context.task(episode.split, episode.task_index)
            limit = self._context.limits(task).episode_timeout_s
            async with asyncio.timeout(limit + OVERTIME_S) as clock:
                status, score = await self._played(task, limit)
            reward = _finite("score", score.reward) + self._earned
            parts = {name: _finite(f"part {name!r} of the score", value) for name, value in score.parts.items()}
            return self._end(status, reward=reward, parts=parts)
        except (LeaseLost, StoreUnavailable):
            raise
        except TimeoutError as error:
            if not clock.expired():
                return self._end("failed", failure=failure_of(error))
            what = f"{self._phase} did not end within limits.episode_timeout_s = {limit:g} and {OVERTIME_S:g} s more"
            return self._end("failed", failure=failure_of(EnvError(what)))
        except Exception as error:
            return self._end("failed", failure=failure_of(error))

    async def _played(self, task: Task, limit: float) -> tuple[Status, Score]:
        deadline = asyncio.get_running_loop().time() + limit
        await self._open(task)
        status: Status = "completed" if self._done else await self._turns(task, deadline)
        self._phase = "score"
        return status, await self._environment.score()

    def _end(
        self,
        status: Status,
        *,
        reward: float | None = None,
        parts: dict[str, float] | None = None,
        failure: Failure | None = None,
    ) -> EpisodeEnd:
        episode = self._lease.episode
        seconds = time.monotonic() - self._clock
        return EpisodeEnd(
            run=episode.run,
            episode_id=episode.id,
            attempt=self._lease.attempt,
            index=self._turn,
            status=status,
            reward=reward,
            reward_parts=parts or {},
            failure=failure,
            timing={"started_at": self._started, "seconds": seconds, **self._seconds},
        )

    # The opening

    async def _open(self, task: Task) -> None:
        episode = self._lease.episode
        spec = self._context.sandbox_spec(task)
        backend = self._backend_for(spec.kind)
        if await self._reopen(task, backend):
            return
        labels = {"run": episode.run, "episode": episode.id, "attempt": str(self._lease.attempt)}
        self._sandbox = await backend.create(spec, labels=labels)
        self._env = make_environment(task, self._sandbox)
        self._reset = await self._timed("env", self._env.reset())
        self._pending = self._context.renderer.open(self._reset)

    async def _reopen(self, task: Task, backend: SandboxBackend) -> bool:
        """Go on where the last attempt stopped. False if there is nothing to go on from: the episode begins anew."""
        point = self._resume.point
        if "env" not in point:
            await self._restart()
            return False
        try:
            self._sandbox = await backend.attach(point["sandbox"])
        except SandboxDied:
            # Its world is gone with its host, or has outlived its deadline: the episode begins anew.
            await self._restart()
            return False
        self._env = make_environment(task, self._sandbox)
        self._reset = await self._env.restore(point["env"])
        for segment in self._resume.segments:
            self._tokens += segment.env_tokens.tolist()
            self._tokens += segment.sampled_tokens.tolist()
        self._earned = float(point["earned"])
        if point["pending"] is not None:
            self._pending = list(point["pending"])
            return True
        # The command that was under way has lost its worker, but may run on.
        await self._sandbox.kill_processes()
        last = self._resume.segments[-1]
        sampled = last.sampled_tokens.tolist()
        action = self._context.renderer.parse(sampled, self._reset.tools)
        self._take(await self._timed("env", self._environment.interrupted(action)), sampled, last.finish_reason)
        return True

    async def _restart(self) -> None:
        if self._turn:
            await self._store.restart(self._lease)
            self._turn = 0

    # The turns

    async def _turns(self, task: Task, deadline: float) -> Status:
        limits = self._context.limits(task)
        while not self._done:
            room = limits.max_tokens - len(self._tokens) - len(self._pending)
            if self._turn >= limits.max_turns or room <= 0:
                return "truncated"
            segment = await self._call(min(limits.turn_tokens, room), deadline)
            sampled = segment.sampled_tokens.tolist()
            action = self._context.renderer.parse(sampled, self._reset.tools)
            self._phase = "env"
            try:
                async with asyncio.timeout_at(deadline) as clock:
                    step = await self._timed("env", self._environment.step(action))
            except TimeoutError:
                if not clock.expired():
                    raise
                return "truncated"
            self._take(step, sampled, segment.finish_reason)
        return "completed"

    async def _call(self, max_tokens: int, deadline: float) -> Segment:
        """One policy call, as a segment that is safe on the stream."""
        episode = self._lease.episode
        sampling = self._context.sampling.model_copy(
            update={"max_tokens": max_tokens, "seed": seed_of(episode.seed, self._turn)}
        )
        self._phase = "policy"
        started, before = time.time(), self._seconds["policy"]
        request_id = f"{episode.id}-{self._lease.attempt}-{self._turn}"
        try:
            async with asyncio.timeout_at(deadline) as clock:
                completion = await self._timed(
                    "policy",
                    self._context.policy.generate([*self._tokens, *self._pending], sampling, request_id=request_id),
                )
        except TimeoutError:
            if not clock.expired():
                raise
            raise PolicyError(
                f"the attempt's time was over while it waited for the policy at turn {self._turn}; "
                "limits.episode_timeout_s is its wall clock"
            ) from None
        segment = Segment(
            run=episode.run,
            episode_id=episode.id,
            attempt=self._lease.attempt,
            index=self._turn,
            parent=self._turn - 1 if self._turn else None,
            branch=0,
            env_tokens=self._pending,  # type: ignore[arg-type]  # made an array by the record
            sampled_tokens=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            reward=self._earned,
            timing={"started_at": started, "policy": self._seconds["policy"] - before},
        )
        self._phase = "append"
        await self._store.append(self._lease, segment, self._point(pending=None, earned=0.0))
        self._tokens += self._pending
        self._tokens += completion.token_ids
        self._pending = []
        self._earned = 0.0
        self._turn += 1
        return segment

    def _take(self, step: Step, sampled: list[int], finish_reason: str) -> None:
        self._earned = _finite("reward of a turn", step.reward)
        self._done = step.done
        if not step.done:
            self._pending = self._context.renderer.bridge(sampled, finish_reason, step.messages)

    async def _timed(self, name: str, call: Any) -> Any:
        before = time.monotonic()
        try:
            return await call
        finally:
            self._seconds[name] += time.monotonic() - before

    # Resumption

    def _point(self, *, pending: list[int] | None, earned: float) -> dict[str, Any]:
        """`pending` None: the action of the last segment is under way."""
        assert self._sandbox is not None
        return {"sandbox": self._sandbox.id, "env": self._environment.state(), "pending": pending, "earned": earned}

    async def park(self) -> None:
        """Give the episode back for another attempt to go on with."""
        if self._phase == "policy":
            await self._store.checkpoint(self._lease, self._point(pending=self._pending, earned=self._earned))
        await self._store.release(self._lease)
        if self._phase == "opening" and self._sandbox is not None and not self._resume.point:
            # Half set up, and known to nobody: the next attempt makes its own.
            await self._sandbox.kill()

    async def clean(self) -> None:
        """The episode has ended: nothing of it stays. What cannot be removed now is left to the reaper."""
        with contextlib.suppress(TimeoutError, SandboxError):
            async with asyncio.timeout(CLEAN_TIMEOUT_S):
                try:
                    if self._env is not None:
                        await self._env.close()
                finally:
                    if self._sandbox is not None:
                        await self._sandbox.kill()
