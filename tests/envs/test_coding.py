"""`CodingEnv` in a real sandbox: what the agent sees, what it cannot break, and when an episode fails instead of scoring."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from envs.base import Action, EnvError, Environment, Score, Step, ToolCall
from envs.coding import CodingEnv, clip, parse_score
from envs.memory import NoopEnv
from envs.registry import make_environment
from sandbox.base import RunResult, Sandbox, SandboxSpec
from sandbox.memory import MemoryBackend
from tasks.base import Limits, Task

NewSandbox = Callable[[], Awaitable[Sandbox]]


BACKGROUND = "sleep 611"

LOOK = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -q 'sleep [6]11' && echo running || echo none"
"""Whether `BACKGROUND` runs in the sandbox."""


def task(*, timeout: float = 10.0, **params: Any) -> Task:
    params = {"verify": "echo reward 0", "observation_chars": 400, **params}
    limits = Limits(command_timeout_s=timeout)
    return Task(id="t/1", env="coding", instruction="Do it.", limits=limits, params=params)


def act(*calls: tuple[str, dict[str, Any]], errors: tuple[str, ...] = ()) -> Action:
    return Action("", tuple(ToolCall(name, arguments) for name, arguments in calls), errors)


def bash(command: str) -> Action:
    return act(("bash", {"command": command}))


async def say(env: Environment, action: Action) -> str:
    step = await env.step(action)
    assert not step.done
    assert len(step.messages) == 1
    return step.messages[0]["content"]


async def test_reset_sets_up_and_tells_of_the_tools(sandbox: Sandbox) -> None:
    env = CodingEnv(task(setup="echo hello > a.txt"), sandbox)
    reset = await env.reset()
    assert [message["role"] for message in reset.messages] == ["system", "user"]
    assert reset.messages[1]["content"] == "Do it."
    assert [tool["function"]["name"] for tool in reset.tools] == ["bash", "view", "edit", "submit"]
    assert await sandbox.read("a.txt") == b"hello\n"


async def test_bash_shows_output_errors_and_exit_codes(sandbox: Sandbox) -> None:
    env = CodingEnv(task(), sandbox)
    assert await say(env, bash("echo one; echo two >&2")) == "one\ntwo"
    assert await say(env, bash("true")) == "(no output)"
    assert await say(env, bash("echo oh; exit 3")) == "oh\n[exit code 3]"
    assert "[exit code 127]" in await say(env, bash("no-such-command"))


async def test_a_command_that_runs_too_long_is_killed_and_said_so(sandbox: Sandbox) -> None:
    env = CodingEnv(task(timeout=0.3), sandbox)
    assert await say(env, bash("echo begun; sleep 60")) == "begun\n[timed out after 0.3 s and was killed]"


async def test_huge_output_is_bounded_and_keeps_both_ends(sandbox: Sandbox) -> None:
    seen = await say(CodingEnv(task(), sandbox), bash("echo first; seq 1 200000; echo last"))
    assert len(seen) < 500
    assert seen.startswith("first\n1\n")
    assert seen.endswith("\nlast")
    assert "[... more than " in seen


async def test_binary_output_is_decoded_with_replacement(sandbox: Sandbox) -> None:
    seen = await say(CodingEnv(task(), sandbox), bash(r"printf 'a\377\376b\000c'"))
    assert seen.startswith("a\ufffd\ufffdb")
    seen.encode()


async def test_view_shows_lines_and_bounds(sandbox: Sandbox) -> None:
    env = CodingEnv(task(setup="seq 1 1000 > n; : > empty; mkdir d; printf 'a\\377' > raw"), sandbox)
    await env.reset()
    assert await say(env, act(("view", {"path": "n", "start": 3, "end": 5}))) == "3\n4\n5"
    assert await say(env, act(("view", {"path": "n", "start": "999"}))) == "999\n1000"
    assert "characters left out" in await say(env, act(("view", {"path": "n"})))
    assert await say(env, act(("view", {"path": "empty"}))) == "(empty)"
    assert await say(env, act(("view", {"path": "raw"}))) == "a\ufffd"
    assert await say(env, act(("view", {"path": "n", "start": 2000}))) == "error: n has 1000 lines"
    assert "ENOENT" in await say(env, act(("view", {"path": "gone"})))
    assert "EISDIR" in await say(env, act(("view", {"path": "d"})))


async def test_edit_changes_one_place_and_keeps_bytes_and_mode(sandbox: Sandbox) -> None:
    env = CodingEnv(task(setup="printf 'a\\377 old\\nb b\\n' > f; chmod 750 f"), sandbox)
    await env.reset()
    assert await say(env, act(("edit", {"path": "f", "old": "old", "new": "new"}))) == "edited"
    assert await sandbox.read("f") == b"a\xff new\nb b\n"
    assert (await sandbox.stat("f")).mode == 0o750
    assert "2 times" in await say(env, act(("edit", {"path": "f", "old": "b", "new": "c"})))
    assert "0 times" in await say(env, act(("edit", {"path": "f", "old": "old", "new": "c"})))
    assert "old is empty" in await say(env, act(("edit", {"path": "f", "old": "", "new": "c"})))
    assert "ENOENT" in await say(env, act(("edit", {"path": "g", "old": "a", "new": "c"})))
    assert await sandbox.read("f") == b"a\xff new\nb b\n"


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (act(("fly", {})), "unknown tool 'fly'; the tools are bash, view, edit, submit"),
        (act(("bash", {})), "command is missing"),
        (act(("bash", {"command": 3})), "command: Input should be a valid string"),
        (act(("bash", {"command": "a\0b"})), "NUL"),
        (act(("bash", {"command": "\udcff"})), "not valid Unicode"),
        (act(("submit", {"really": True})), "really is not an argument"),
        (act(errors=("tool call 1: not JSON",)), "error: tool call 1: not JSON"),
        (act(("x" * 5000, {})), "unknown tool 'xxx"),
        (act(("bash", {"y" * 9000: 1})), "is not an argument"),
    ],
)
async def test_malformed_calls_are_answered_and_the_episode_goes_on(sandbox: Sandbox, action: Action, said: str) -> None:
    env = CodingEnv(task(), sandbox)
    seen = await say(env, action)
    assert said in seen
    assert len(seen) < 600
    assert await say(env, bash("echo still here")) == "still here"


async def test_a_turn_without_a_call_is_reminded(sandbox: Sandbox) -> None:
    step = await CodingEnv(task(), sandbox).step(Action("I think."))
    assert [message["role"] for message in step.messages] == ["user"]
    assert "submit" in step.messages[0]["content"]
    assert not step.done


async def test_several_calls_are_run_in_order_up_to_a_bound(sandbox: Sandbox) -> None:
    env = CodingEnv(task(), sandbox)
    calls = [("bash", {"command": f"echo {number} | tee -a log"}) for number in range(20)]
    step = await env.step(act(*calls, errors=("late",)))
    answers = [message["content"] for message in step.messages]
    assert answers[:8] == [str(number) for number in range(8)]
    assert answers[8:] == ["error: only the first 8 of 20 calls were carried out", "error: late"]
    assert (await sandbox.read("log")).split() == [str(number).encode() for number in range(8)]


async def test_submit_ends_the_episode_and_nothing_after_it_runs(sandbox: Sandbox) -> None:
    env = CodingEnv(task(), sandbox)
    step = await env.step(act(("bash", {"command": "touch a"}), ("submit", {}), ("bash", {"command": "touch b"})))
    assert step == Step((), done=True)
    assert {info.name for info in await sandbox.list_dir(".")} == {"a"}
    assert env.state() == {"submitted": True}


async def test_the_score_is_the_verifiers_after_the_agents_processes_have_ended(sandbox: Sandbox) -> None:
    verify = f'if [ "$({LOOK})$LEAK" = none ]; then echo part clean 0.5; echo reward 0.75; else echo reward 0; fi'
    env = CodingEnv(task(verify=verify), sandbox)
    await say(env, bash(f"export LEAK=1; {BACKGROUND} >/dev/null 2>&1 &"))
    assert await say(env, bash(LOOK)) == "running"
    assert await env.score() == Score(0.75, {"clean": 0.5})


@pytest.mark.parametrize("escape", ["chmod 000 .", "mv $PWD /tmp/away", "chmod 000 . && mv $PWD /tmp/away"])
async def test_an_agent_does_not_escape_judgement_by_losing_its_folder(sandbox: Sandbox, escape: str) -> None:
    env = CodingEnv(task(verify="[ -e done ] && echo reward 1 || echo reward 0"), sandbox)
    await env.step(bash(escape))
    assert await env.score() == Score(0.0)


@pytest.mark.parametrize(
    ("verify", "said"),
    [
        ("exit 4", "verify ended with exit code 4"),
        ("echo reward 1; exit 1", "exit code 1"),
        ("true", "did not print `reward NUMBER`"),
        ("echo reward 1; echo done", "did not print `reward NUMBER`"),
        ("echo reward much", "'much' where a finite number belongs"),
        ("echo reward nan", "'nan' where a finite number belongs"),
        ("echo reward inf", "finite"),
        ("echo part a b; echo reward 1", "'b' where a finite number belongs"),
        ("echo reward 1 2", "did not print"),
        ("echo broken >&2; exit 2", "broken"),
    ],
)
async def test_a_broken_verifier_fails_the_episode(sandbox: Sandbox, verify: str, said: str) -> None:
    with pytest.raises(EnvError) as caught:
        await CodingEnv(task(verify=verify), sandbox).score()
    assert said in str(caught.value)
    assert "t/1" in str(caught.value)


async def test_a_broken_setup_fails_the_episode(sandbox: Sandbox) -> None:
    with pytest.raises(EnvError, match=r"t/1: setup ended with exit code 1: .*gone"):
        await CodingEnv(task(setup="cat /gone"), sandbox).reset()


async def test_a_verifier_that_hangs_fails_the_episode() -> None:
    backend = MemoryBackend(lambda sandbox, command, stdin: RunResult(124, b"reward 1\n", timed_out=True))
    env = CodingEnv(task(), await backend.create(SandboxSpec(kind="memory")))
    with pytest.raises(EnvError, match="verify did not end within"):
        await env.score()


@pytest.mark.parametrize("params", [{"verify": ""}, {"vefiry": "x"}, {"observation_chars": 1}, {"setup": 3}])
async def test_params_that_do_not_fit_name_the_task(sandbox: Sandbox, params: dict[str, Any]) -> None:
    with pytest.raises(EnvError, match="task t/1: params do not fit"):
        CodingEnv(task(**params), sandbox)


async def test_an_interrupted_command_is_not_run_again_and_said_so(sandbox: Sandbox) -> None:
    env = CodingEnv(task(), sandbox)
    step = await env.interrupted(act(("bash", {"command": "touch a"}), ("bash", {"command": "touch b"}), ("submit", {})))
    assert not step.done
    assert [message["role"] for message in step.messages] == ["tool"] * 3
    assert all("may have happened" in message["content"] for message in step.messages)
    assert await sandbox.list_dir(".") == []


async def test_an_interrupted_submit_is_a_submit_and_an_interrupted_thought_a_reminder(sandbox: Sandbox) -> None:
    assert (await CodingEnv(task(), sandbox).interrupted(act(("submit", {})))).done
    assert (await CodingEnv(task(), sandbox).interrupted(Action("hm"))).messages[0]["role"] == "user"


async def test_state_goes_over_to_another_worker_in_the_same_sandbox(sandbox: Sandbox) -> None:
    one = task(setup="echo x >> f", verify='[ "$(cat f)" = x ] && echo reward 1 || echo reward 0')
    first = CodingEnv(one, sandbox)
    opening = await first.reset()
    second = CodingEnv(one, sandbox)
    assert await second.restore(first.state()) == opening
    assert (await second.score()).reward == 1


async def test_cancelling_a_step_does_not_leave_the_command_running(sandbox: Sandbox) -> None:
    env = CodingEnv(task(timeout=60), sandbox)
    running = asyncio.create_task(env.step(bash(f"touch begun; exec {BACKGROUND}")))
    async with asyncio.timeout(10):
        while not await sandbox.list_dir("."):  # noqa: ASYNC110 - a file in a sandbox sets no event
            await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await say(env, bash(LOOK)) == "none"


@pytest.mark.parametrize(("text", "limit"), [("", 10), ("a" * 10, 10), ("ab" * 500, 100)])
def test_clip_keeps_short_texts_and_both_ends_of_long_ones(text: str, limit: int) -> None:
    clipped = clip(text, limit)
    assert len(clipped) <= limit + 60
    assert clipped == text or (text.startswith(clipped[: limit // 2]) and text.endswith(clipped[-limit // 2 :]))


def test_parts_before_the_reward_are_kept() -> None:
    assert parse_score("noise\npart a 0.5\npart b 1\n\nreward 0.5\n") == Score(0.5, {"a": 0.5, "b": 1.0})


def test_environments_by_name() -> None:
    assert isinstance(make_environment(Task(id="n", env="noop", instruction="x"), object()), NoopEnv)
    with pytest.raises(EnvError, match=r"task n: unknown environment 'chess'; known: coding, noop"):
        make_environment(Task(id="n", env="chess", instruction="x"), object())


async def test_the_noop_environment_takes_its_turns_and_goes_on_after_a_restore() -> None:
    one = Task(id="n", env="noop", instruction="x", params={"turns": 3, "reward": 0.5})
    env = NoopEnv(one)
    assert (await env.reset()).messages == [{"role": "user", "content": "x"}]
    assert not (await env.step(Action("a"))).done
    other = NoopEnv(one)
    await other.restore(env.state())
    assert not (await other.step(Action("b"))).done
    assert (await other.step(Action("c"))).done
    assert await other.score() == Score(0.5)
    with pytest.raises(EnvError, match="noop"):
        NoopEnv(Task(id="n", env="noop", instruction="x", params={"turns": 0}))
