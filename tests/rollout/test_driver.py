"""One attempt of an episode: what it writes, how it ends, and what the next attempt finds when this one is cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from envs.base import Action, EnvError, Reset, Score, Step
from envs.toolcalls import render
from rollout import driver
from rollout.chat import ChatRenderer
from rollout.config import RolloutConfig
from rollout.context import RunContext, make_renderer
from rollout.driver import drive, seed_of
from rollout.memory_store import MemoryStore, MemoryStream
from rollout.policy.base import Completion, PolicyUnavailable, SamplingParams
from rollout.store import Lease, LeaseLost, Resume
from rollout.trajectory import Episode, EpisodeEnd, Record, Segment
from sandbox.base import SandboxDied
from sandbox.memory import MemoryBackend
from tasks.base import Limits, Split, Task

RUN = "r"


class OneTask:
    name = "one"

    def __init__(self, **limits: Any) -> None:
        self.limits = Limits(**limits)

    def size(self, split: Split) -> int:
        return 1

    def task(self, split: Split, index: int) -> Task:
        if index:
            raise IndexError(index)
        return Task(id="one/0", env="scripted", instruction="Say it.", sandbox={"kind": "memory"}, limits=self.limits)


class ScriptedEnv:
    """Ends after `turns` turns; `act` is called with the number of each turn. Counts what was done to it."""

    def __init__(self, turns: int = 2, act: Callable[[int], Any] | None = None) -> None:
        self.turns = turns
        self.act = act
        self.taken = 0
        self.log: list[str] = []
        self.scored = Score(1.0, {"all": 1.0})

    async def reset(self) -> Reset:
        self.log.append("reset")
        return Reset([{"role": "user", "content": "Say it."}])

    async def step(self, action: Action) -> Step:
        self.log.append(f"step {self.taken}")
        if self.act is not None:
            await self.act(self.taken)
        return self._answer("seen")

    async def interrupted(self, action: Action) -> Step:
        self.log.append(f"interrupted {self.taken}")
        return self._answer("interrupted")

    def _answer(self, text: str) -> Step:
        self.taken += 1
        if self.taken >= self.turns:
            return Step((), reward=0.25, done=True)
        return Step([{"role": "user", "content": text}], reward=0.25)

    async def score(self) -> Score:
        self.log.append("score")
        return self.scored

    def state(self) -> dict[str, Any]:
        return {"taken": self.taken}

    async def restore(self, state: Mapping[str, Any]) -> Reset:
        self.log.append("restore")
        self.taken = state["taken"]
        return Reset([{"role": "user", "content": "Say it."}])

    async def close(self) -> None:
        self.log.append("close")


class ScriptedPolicy:
    """Says "a b c" each turn. `before` runs first and may wait or raise."""

    def __init__(self, renderer: ChatRenderer, before: Callable[[int], Any] | None = None) -> None:
        self.turn = renderer.encode_assistant("a b c")
        self.before = before
        self.prompts: list[list[int]] = []
        self.seeds: list[int | None] = []
        self.limits: list[int] = []

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str, priority: int = 0
    ) -> Completion:
        self.prompts.append(list(token_ids))
        self.seeds.append(sampling.seed)
        self.limits.append(sampling.max_tokens)
        if self.before is not None:
            await self.before(len(self.prompts) - 1)
        tokens = tuple(self.turn[: sampling.max_tokens])
        reason = "stop" if len(tokens) == len(self.turn) else "length"
        return Completion(tokens, (-0.5,) * len(tokens), ((7, len(tokens)),), reason)

    async def close(self) -> None:
        return None


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, env: ScriptedEnv, **limits: Any) -> None:
        self.renderer = make_renderer("quickstart", "hermes")
        self.policy = ScriptedPolicy(self.renderer)
        self.store = MemoryStore()
        self.stream = MemoryStream(self.store, RUN)
        self.backend = MemoryBackend()
        self.env = env
        self.tasks = OneTask(**limits)
        monkeypatch.setattr(driver, "make_environment", lambda task, sandbox: self.env)

    async def submit(self) -> None:
        episode = Episode(
            run=RUN, id="e", task_set="one", split="train", task_index=0, group=0, member=0, seed=5, sandbox_kind="memory"
        )
        await self.store.submit([episode])

    async def claim(self) -> tuple[Lease, Resume]:
        claimed = await self.store.claim(RUN, "e", "w", 30.0)
        assert claimed is not None
        return claimed

    async def drive(self, lease: Lease, resume: Resume) -> None:
        sampling = SamplingParams(stop_token_ids=self.renderer.stop_token_ids)
        context = RunContext(RolloutConfig(), self.tasks, self.renderer, self.policy, sampling)
        await drive(lease, resume, store=self.store, context=context, backend_for=lambda kind: self.backend)

    async def play(self) -> list[Record]:
        await self.submit()
        await self.drive(*await self.claim())
        return await self.records()

    async def records(self) -> list[Record]:
        return [delivery.record for delivery in await self.stream.read(max_records=100, wait_s=0)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    def make(env: ScriptedEnv | None = None, **limits: Any) -> World:
        return World(monkeypatch, env or ScriptedEnv(), **limits)

    return make


def end_of(records: list[Record]) -> EpisodeEnd:
    last = records[-1]
    assert isinstance(last, EpisodeEnd)
    return last


async def test_an_episode_is_its_turns_and_its_end(world: Callable[..., World]) -> None:
    w = world(ScriptedEnv(turns=3))
    records = await w.play()
    segments = [record for record in records if isinstance(record, Segment)]
    assert [s.index for s in segments] == [0, 1, 2]
    assert [s.parent for s in segments] == [None, 0, 1]
    assert all(s.versions == ((7, len(w.policy.turn)),) for s in segments)
    end = end_of(records)
    assert (end.status, end.index, end.failure) == ("completed", 3, None)
    assert await w.backend.sandboxes() == []


async def test_no_token_is_made_twice_what_the_policy_saw_is_what_the_segments_hold(world: Callable[..., World]) -> None:
    w = world(ScriptedEnv(turns=3))
    records = await w.play()
    held: list[int] = []
    for record, prompt in zip(records, w.policy.prompts, strict=False):
        assert isinstance(record, Segment)
        held += record.env_tokens.tolist()
        assert prompt == held
        held += record.sampled_tokens.tolist()


async def test_rewards_of_turns_are_neither_lost_nor_counted_twice(world: Callable[..., World]) -> None:
    records = await world(ScriptedEnv(turns=3)).play()
    segments = [record for record in records if isinstance(record, Segment)]
    # The environment pays 0.25 for each of three turns, and 1 at the end.
    assert [s.reward for s in segments] == [0.0, 0.25, 0.25]
    assert end_of(records).reward == 1.25


@pytest.mark.parametrize("limits", [{"max_turns": 2}, {"max_tokens": 40, "turn_tokens": 4}])
async def test_a_limit_truncates_and_the_episode_is_scored(world: Callable[..., World], limits: dict[str, int]) -> None:
    w = world(ScriptedEnv(turns=50), **limits)
    end = end_of(await w.play())
    assert end.status == "truncated"
    assert end.reward is not None
    assert w.env.log[-2:] == ["score", "close"]


async def test_turns_are_cut_at_the_room_that_is_left(world: Callable[..., World]) -> None:
    w = world(ScriptedEnv(turns=50), max_tokens=60, turn_tokens=50)
    records = await w.play()
    tokens = sum(len(r.env_tokens) + len(r.sampled_tokens) for r in records if isinstance(r, Segment))
    assert tokens <= 60


async def test_a_step_that_outlasts_the_episode_truncates_it(world: Callable[..., World]) -> None:
    async def hang(turn: int) -> None:
        await asyncio.Event().wait()

    end = end_of(await world(ScriptedEnv(act=hang), episode_timeout_s=0.05).play())
    assert (end.status, end.reward) == ("truncated", 1.0)


async def test_time_lost_to_the_policy_is_a_failure_and_no_zero(world: Callable[..., World]) -> None:
    async def hang(call: int) -> None:
        await asyncio.Event().wait()

    w = world(episode_timeout_s=0.05)
    w.policy.before = hang
    end = end_of(await w.play())
    assert end.status == "failed"
    assert end.reward is None
    assert end.failure is not None
    assert end.failure.kind == "policy"
    assert "episode_timeout_s" in end.failure.message


async def boom(_: int) -> None:
    raise ZeroDivisionError("oops")


async def broken_task(_: int) -> None:
    raise EnvError("the verifier is broken")


async def died(_: int) -> None:
    raise SandboxDied("gone")


@pytest.mark.parametrize(
    ("act", "kind", "told"),
    [(boom, "env", "ZeroDivisionError: oops"), (broken_task, "task", "verifier is broken"), (died, "sandbox", "gone")],
)
async def test_what_raises_in_an_environment_fails_the_episode_with_its_traceback(
    world: Callable[..., World], act: Callable[[int], Any], kind: str, told: str
) -> None:
    w = world(ScriptedEnv(act=act))
    end = end_of(await w.play())
    assert (end.status, end.reward, end.index) == ("failed", None, 1)
    assert end.failure is not None
    assert end.failure.kind == kind
    assert told in end.failure.message
    assert "Traceback" in end.failure.traceback
    assert await w.backend.sandboxes() == []


async def test_a_policy_that_is_gone_fails_the_episode(world: Callable[..., World]) -> None:
    async def gone(call: int) -> None:
        raise PolicyUnavailable("no answer from http://x; see policy.url")

    w = world()
    w.policy.before = gone
    end = end_of(await w.play())
    assert end.failure is not None
    assert end.failure.kind == "policy"
    assert "policy.url" in end.failure.message


async def test_a_task_that_does_not_exist_fails_the_episode(world: Callable[..., World]) -> None:
    w = world()
    episode = Episode(run=RUN, id="e", task_set="one", split="train", task_index=9, group=0, member=0, seed=5)
    await w.store.submit([episode])
    await w.drive(*await w.claim())
    end = end_of(await w.records())
    assert end.failure is not None
    assert end.failure.kind == "task"


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def stop_at_second_call(w: World) -> None:
    """Drive until the policy is asked a second time, then stop as a worker that ends does."""
    waiting = asyncio.Event()

    async def wait_at_second(call: int) -> None:
        if call == 1:
            waiting.set()
            await asyncio.Event().wait()

    w.policy.before = wait_at_second
    await w.submit()
    task = asyncio.create_task(w.drive(*await w.claim()))
    await waiting.wait()
    await cancel(task)
    w.policy.before = None


async def test_stopped_while_it_waits_for_the_policy_it_goes_on_as_if_nothing_had_been(world: Callable[..., World]) -> None:
    """The observation was made, but the policy had not answered it: the next attempt asks again with the same tokens."""
    w = world(ScriptedEnv(turns=3))
    await stop_at_second_call(w)
    assert len(await w.backend.sandboxes()) == 1

    w.env = ScriptedEnv(turns=3)
    lease, resume = await w.claim()
    assert lease.attempt == 2
    await w.drive(lease, resume)
    assert w.env.log == ["restore", "step 1", "step 2", "score", "close"]
    assert w.policy.prompts[2] == w.policy.prompts[1]
    assert w.policy.seeds[2] == w.policy.seeds[1] == seed_of(5, 1)
    records = await w.records()
    assert [(r.attempt, r.index) for r in records if isinstance(r, Segment)] == [(1, 0), (2, 1), (2, 2)]
    assert end_of(records).reward == 1.25
    assert await w.backend.sandboxes() == []


@pytest.mark.parametrize("turns", [2, 3])
async def test_killed_in_an_action_the_next_attempt_does_not_repeat_it(world: Callable[..., World], turns: int) -> None:
    w = world(ScriptedEnv(turns=turns))
    acting = asyncio.Event()

    async def hang_at_second(turn: int) -> None:
        if turn == 1:
            acting.set()
            await asyncio.Event().wait()

    w.env.act = hang_at_second
    await w.submit()
    task = asyncio.create_task(w.drive(*await w.claim()))
    await acting.wait()
    # As after kill -9: nothing is given back, the lease runs out.
    claimed = None
    w.store._clock = lambda: 1e12
    claimed = await w.store.claim(RUN, "e", "w2", 30.0)
    assert claimed is not None
    w.env = ScriptedEnv(turns=turns)
    await w.drive(*claimed)
    assert w.env.log[:2] == ["restore", "interrupted 1"]
    records = await w.records()
    assert [(r.attempt, r.index) for r in records if isinstance(r, Segment)][:2] == [(1, 0), (1, 1)]
    assert end_of(records).attempt == 2
    assert end_of(records).reward == 1.25
    await cancel(task)


async def test_an_attempt_that_was_overtaken_stops_without_a_word(world: Callable[..., World]) -> None:
    w = world(ScriptedEnv(turns=3))

    async def overtake(turn: int) -> None:
        w.store._clock = lambda: 1e12
        assert await w.store.claim(RUN, "e", "w2", 30.0) is not None

    w.env.act = overtake
    await w.submit()
    with pytest.raises(LeaseLost):
        await w.drive(*await w.claim())
    assert [type(record) for record in await w.records()] == [Segment]


async def test_a_world_that_is_gone_is_begun_anew(world: Callable[..., World]) -> None:
    w = world(ScriptedEnv(turns=3))
    await stop_at_second_call(w)
    for info in await w.backend.sandboxes():
        await (await w.backend.attach(info.id)).kill()

    w.env = ScriptedEnv(turns=3)
    await w.drive(*await w.claim())
    assert w.env.log[0] == "reset"
    records = await w.records()
    assert [(r.attempt, r.index) for r in records if isinstance(r, Segment)] == [(1, 0), (2, 0), (2, 1), (2, 2)]
    assert end_of(records).index == 3


async def test_malformed_tool_calls_are_answered_and_the_episode_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real coding environment: the answer names what is wrong, and the next turn can submit."""
    from sandbox.registry import get_backend

    w = World(monkeypatch, ScriptedEnv())
    monkeypatch.undo()
    texts = ['<tool_call>\n{"name": "bash", "arguments": oops\n</tool_call>', render([], "hermes")]
    submit = '<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call>'
    turns = [w.renderer.encode_assistant(text) for text in (texts[0], "no call at all", submit)]

    async def generate(token_ids: Sequence[int], sampling: SamplingParams, **_: Any) -> Completion:
        tokens = tuple(turns[len(w.policy.prompts)])
        w.policy.prompts.append(list(token_ids))
        return Completion(tokens, (-0.1,) * len(tokens), ((0, len(tokens)),), "stop")

    monkeypatch.setattr(w.policy, "generate", generate)
    task = Task(id="t", env="coding", instruction="x", params={"setup": "", "verify": "echo reward 0.5", "oracle": []})
    monkeypatch.setattr(w.tasks, "task", lambda split, index: task)
    w.backend = get_backend("local")  # type: ignore[assignment]
    try:
        end = end_of(await w.play())
    finally:
        await w.backend.close()
    assert (end.status, end.reward, end.index) == ("completed", 0.5, 3)
    seen = w.renderer.parse(w.policy.prompts[1]).text
    assert "tool call 1: not JSON" in seen
    assert "No tool was called" in w.renderer.parse(w.policy.prompts[2]).text
