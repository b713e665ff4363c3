"""`CodingEnv`: an agent works in a sandbox with bash, view, edit and submit; the task's verifier judges what it left.

Guarantees:

* Whatever the agent does is answered by an observation: bounded, decoded with replacement, saying so when output was cut,
  a command failed or ran out of time.
* The score comes from the task's own script, run after every process of the agent was ended, with nothing of the agent's
  environment variables. A verifier that fails, times out or does not print a finite reward is an `EnvError`: the episode
  fails, and is never a zero.
* The place is the state: beside the sandbox only the submission is carried over by `state` and `restore`.

`Task.params`: `setup` (sh script, may be empty), `verify` (sh script whose last line is `reward NUMBER`, with lines
`part NAME NUMBER` before it), `oracle` (tool calls that solve the task), `observation_chars` (bound of an observation).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envs.base import Action, EnvError, Message, Reset, Score, Step, ToolCall
from envs.tools import Toolbox, ToolMistake, tool
from sandbox.base import RunResult, Sandbox, SandboxFileError
from tasks.base import Task

SYSTEM = "You work in a Linux shell. Use the tools, then submit."

REMINDER = "No tool was called. Call a tool, or submit when you are done."

INTERRUPTED = (
    "The machine that ran this was lost meanwhile: it may have happened in full, in part or not at all. "
    "Look before you go on."
)

MAX_CALLS = 8
"""Tool calls of one turn that are carried out; each may take the whole command timeout."""

VIEW_BYTES = 1 << 20

SCRIPT_TIMEOUT_S = 60.0
"""For setup and verifier, which are the task's: the agent's own commands have `limits.command_timeout_s`."""

SCRIPT_ENV: Mapping[str, str] = {"LC_ALL": "C"}


class CodingParams(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    setup: str = ""
    verify: str = Field(min_length=1)
    oracle: Sequence[Mapping[str, Any]] = ()
    observation_chars: int = Field(default=4000, ge=100)


class CodingEnv:
    """See `envs.base.Environment`. Raises `EnvError` for a task whose params do not fit."""

    def __init__(self, task: Task, sandbox: Sandbox) -> None:
        try:
            self._params = CodingParams.model_validate(dict(task.params))
        except ValidationError as error:
            raise EnvError(f"task {task.id}: params do not fit the environment 'coding': {error}") from error
        self._task = task
        self._sandbox = sandbox
        self._tools = Toolbox(self)
        self._submitted = False

    # The tools. Their signatures and docstrings are what the policy reads.

    @tool
    async def bash(self, command: str) -> str:
        """Run a shell command."""
        limit = self._params.observation_chars
        timeout = self._task.limits.command_timeout_s
        result = await self._sandbox.run(command, timeout=timeout, max_output=max(8 * limit, 4096))
        return _observation(result, limit, timeout)

    @tool
    async def view(self, path: str, start: int | None = None, end: int | None = None) -> str:
        """Show the lines of a file.

        start: first line, from 1
        end: last line
        """
        text = (await self._read(path)).decode(errors="replace")
        lines = text.removesuffix("\n").split("\n") if text else []
        first, last = max(1, start or 1), len(lines) if end is None else end
        if lines and first > len(lines):
            raise ToolMistake(f"{path} has {len(lines)} lines")
        return clip("\n".join(lines[first - 1 : max(0, last)]), self._params.observation_chars) or "(empty)"

    @tool
    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs once in a file."""
        text = (await self._read(path)).decode(errors="surrogateescape")
        if not old:
            raise ToolMistake("old is empty")
        if (times := text.count(old)) != 1:
            raise ToolMistake(f"old occurs {times} times in {path}, expected once")
        changed = text.replace(old, new).encode(errors="surrogateescape")
        try:
            await self._sandbox.write(path, changed, mode=(await self._sandbox.stat(path)).mode)
        except SandboxFileError as error:
            raise ToolMistake(str(error)) from error
        return "edited"

    @tool
    async def submit(self) -> str:
        """Finish."""
        self._submitted = True
        return ""

    async def _read(self, path: str) -> bytes:
        try:
            return await self._sandbox.read(path, max_bytes=VIEW_BYTES)
        except SandboxFileError as error:
            raise ToolMistake(str(error)) from error

    # The protocol.

    async def reset(self) -> Reset:
        if self._params.setup:
            result = await self._script("setup", self._params.setup)
            if result.exit_code:
                raise EnvError(f"task {self._task.id}: setup ended with exit code {result.exit_code}: {_tail(result)}")
        return self._opening()

    def _opening(self) -> Reset:
        messages: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": self._task.instruction},
        ]
        return Reset(messages, self._tools.schemas)

    async def step(self, action: Action) -> Step:
        messages: list[Message] = []
        for call in action.calls[:MAX_CALLS]:
            messages.append({"role": "tool", "content": await self._call(call)})
            if self._submitted:
                return Step((), done=True)
        if len(action.calls) > MAX_CALLS:
            text = f"error: only the first {MAX_CALLS} of {len(action.calls)} calls were carried out"
            messages.append({"role": "tool", "content": text})
        messages.extend({"role": "tool", "content": f"error: {error}"} for error in action.errors)
        return Step(messages or [{"role": "user", "content": REMINDER}])

    async def _call(self, call: ToolCall) -> str:
        try:
            return await self._tools.call(call)
        except ToolMistake as error:
            return clip(f"error: {error}", self._params.observation_chars)

    async def interrupted(self, action: Action) -> Step:
        if not action.calls:
            return await self.step(action)
        if action.calls[0].name == "submit":
            # Nothing else was under way, and to submit again changes nothing.
            self._submitted = True
            return Step((), done=True)
        calls = min(len(action.calls), MAX_CALLS)
        return Step([{"role": "tool", "content": INTERRUPTED} for _ in range(calls)])

    async def score(self) -> Score:
        await self._sandbox.kill_processes()
        result = await self._script("verify", self._params.verify)
        if result.exit_code and await self._gave_back_folder():
            result = await self._script("verify", self._params.verify)
        if result.exit_code:
            raise EnvError(f"task {self._task.id}: verify ended with exit code {result.exit_code}: {_tail(result)}")
        try:
            return parse_score(result.stdout.decode(errors="replace"))
        except ValueError as error:
            raise EnvError(f"task {self._task.id}: verify {error}: {_tail(result)}") from error

    async def _gave_back_folder(self) -> bool:
        """Whether the agent had moved its working folder away or shut it; then there is an open one now.

        No verifier can start without it, and an agent is not to escape judgement that way.
        """
        try:
            folder = await self._sandbox.stat(".")
        except SandboxFileError:
            await self._sandbox.make_dir(".")
            return True
        if folder.mode & 0o700 == 0o700:
            return False
        await self._sandbox.run(["chmod", "u+rwx", folder.path], cwd="/")
        return True

    async def _script(self, name: str, script: str) -> RunResult:
        result = await self._sandbox.run(script, env=SCRIPT_ENV, timeout=SCRIPT_TIMEOUT_S)
        if result.timed_out:
            raise EnvError(f"task {self._task.id}: {name} did not end within {SCRIPT_TIMEOUT_S:g} s")
        return result

    def state(self) -> dict[str, Any]:
        return {"submitted": self._submitted}

    async def restore(self, state: Mapping[str, Any]) -> Reset:
        self._submitted = bool(state["submitted"])
        return self._opening()

    async def close(self) -> None:
        return None


def parse_score(output: str) -> Score:
    """Read a verifier's output. Raises `ValueError` with what is wrong."""
    lines = [line.split() for line in output.splitlines() if line.strip()]
    if not lines or len(lines[-1]) != 2 or lines[-1][0] != "reward":
        raise ValueError("did not print `reward NUMBER` as its last line")
    parts = {line[1]: _finite(line[2]) for line in lines if len(line) == 3 and line[0] == "part"}
    return Score(_finite(lines[-1][1]), parts)


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"printed {text[:40]!r} where a finite number belongs")
    return value


def clip(text: str, limit: int, *, more: bool = False) -> str:
    """About `limit` characters at most: the head, a note of how much was left out (or `more` than that), and the tail."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    left_out = len(text) - limit
    return f"{text[:head]}\n[... {'more than ' if more else ''}{left_out} characters left out ...]\n{text[-tail:]}"


def _observation(result: RunResult, limit: int, timeout: float) -> str:
    output = (result.stdout + result.stderr).decode(errors="replace").rstrip("\n")
    parts = [clip(output, limit, more=result.truncated)] if output else []
    if result.timed_out:
        parts.append(f"[timed out after {timeout:g} s and was killed]")
    elif result.exit_code:
        parts.append(f"[exit code {result.exit_code}]")
    return "\n".join(parts) or "(no output)"


def _tail(result: RunResult) -> str:
    text = (result.stderr or result.stdout).decode(errors="replace").strip()
    return text[-500:] or "it printed nothing"
