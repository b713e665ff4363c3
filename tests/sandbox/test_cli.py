"""`farmhand sandbox ...` as a person at a terminal meets it, and the choice of a backend by name."""

import asyncio
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from sandbox.base import SandboxSpec, SandboxUnavailable
from sandbox.cli import cli
from sandbox.local.backend import LocalBackend
from sandbox.memory import MemoryBackend
from sandbox.registry import UnknownSandbox, get_backend, known_kinds


@pytest.fixture
def runner(base: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("FARMHAND_SANDBOX_DIR", str(base))
    return CliRunner()


def test_run_is_the_command_s_output_and_exit_code(runner: CliRunner) -> None:
    result = runner.invoke(cli, ["run", "sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    result = runner.invoke(cli, ["run", "--timeout", "0.3", "sleep", "1000"])
    assert result.exit_code == 124
    assert "removed 0" in runner.invoke(cli, ["gc"]).stdout


def test_list_kill_and_collect(runner: CliRunner, base: Path) -> None:
    async def make() -> list[str]:
        backend = LocalBackend(base)
        try:
            long = await backend.create(SandboxSpec(ttl_s=100), labels={"episode": "e-17"})
            short = await backend.create(SandboxSpec(ttl_s=0.2))
            expires = (await short.info()).expires_at
            await asyncio.sleep(max(0.0, expires - time.time()) + 0.05)
            return [long.id, short.id]
        finally:
            await backend.close()

    long, short = asyncio.run(make())
    listing = runner.invoke(cli, ["ls"], env={"COLUMNS": "200"}).stdout
    assert long in listing
    assert "episode=e-17" in listing
    assert short not in listing
    assert runner.invoke(cli, ["gc"]).stdout == f"removed 1\n{short}\n"
    assert runner.invoke(cli, ["kill", long]).exit_code == 0
    again = runner.invoke(cli, ["kill", long])
    assert again.exit_code == 1
    assert long in again.stderr
    assert "removed 0" in runner.invoke(cli, ["gc"]).stdout


def test_an_unknown_kind_is_answered_with_the_known_ones(runner: CliRunner) -> None:
    result = runner.invoke(cli, ["ls", "--kind", "loacl"])
    assert result.exit_code == 1
    assert "'loacl'" in result.stderr
    assert "local, memory" in result.stderr


def test_the_registry() -> None:
    assert {"local", "memory"} <= set(known_kinds())
    assert isinstance(get_backend("memory"), MemoryBackend)
    with pytest.raises(UnknownSandbox, match="local"):
        get_backend("nothing")
    assert issubclass(UnknownSandbox, SandboxUnavailable)
