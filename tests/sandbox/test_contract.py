"""What every backend guarantees (`sandbox.base`), asked of each of them in the same words.

A new backend joins by one entry in `BACKENDS`. The in-memory twin runs no programs, so it is asked the file and life-cycle
half only.
"""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.base import Sandbox, SandboxBackend, SandboxDied, SandboxFileError, SandboxInfo, SandboxSpec
from sandbox.local.backend import LocalBackend
from sandbox.memory import MemoryBackend
from sandbox.output import Capture

BACKENDS: dict[str, Callable[[Path], SandboxBackend]] = {
    "memory": lambda base: MemoryBackend(),
    "local": LocalBackend,
}
SHELLS = ["local"]
"""Those that run programs."""


@pytest.fixture(params=BACKENDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture
async def backend(kind: str, base: Path) -> AsyncIterator[SandboxBackend]:
    made = BACKENDS[kind](base)
    yield made

    async def nobody(info: SandboxInfo) -> bool:
        return False

    await made.reap(nobody)
    assert await made.sandboxes() == []
    await made.close()


@pytest_asyncio.fixture
async def sandbox(backend: SandboxBackend, kind: str) -> Sandbox:
    return await backend.create(spec(kind))


def spec(kind: str, **fields: object) -> SandboxSpec:
    return SandboxSpec.model_validate({"kind": kind, "ttl_s": 300, **fields})


async def reason(work: Awaitable[object]) -> str:
    with pytest.raises(SandboxFileError) as caught:
        await work
    return caught.value.reason


only_shells = pytest.mark.parametrize("kind", SHELLS, indirect=True)


# Commands


@only_shells
@pytest.mark.parametrize("code", [0, 1, 3, 126, 255])
async def test_the_exit_code_is_the_command_s(sandbox: Sandbox, code: int) -> None:
    result = await sandbox.run(f"exit {code}")
    assert (result.exit_code, result.timed_out, result.truncated) == (code, False, False)


@only_shells
async def test_death_by_a_signal_is_128_plus_the_signal(sandbox: Sandbox) -> None:
    assert (await sandbox.run("kill -TERM $$")).exit_code == 143
    assert (await sandbox.run("kill -KILL $$")).exit_code == 137
    assert (await sandbox.run(["sh", "-c", "kill -SEGV $$"])).exit_code == 139
    assert (await sandbox.run("echo alive")).stdout == b"alive\n"


@only_shells
async def test_streams_come_apart_and_a_missing_program_is_127(sandbox: Sandbox) -> None:
    result = await sandbox.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")
    result = await sandbox.run(["no-such-program"])
    assert result.exit_code == 127
    assert b"no-such-program" in result.stderr


@only_shells
@pytest.mark.parametrize(
    "word",
    ["", " ", "a b", "'", '"', "$(id)", "`id`", "\\", "*", "--", "-n", "\n", "ü☃", "\udcff\udc80", "#", "~", "!!", ";"],
)
async def test_words_are_passed_as_they_are(sandbox: Sandbox, word: str) -> None:
    result = await sandbox.run(["printf", "%s|", word, word])
    assert result.stdout == os.fsencode(word) * 1 + b"|" + os.fsencode(word) + b"|"


@only_shells
async def test_a_nul_byte_and_an_empty_command_are_the_caller_s_mistakes(sandbox: Sandbox) -> None:
    for command in ("echo \0", ["echo", "\0"], []):
        with pytest.raises(ValueError, match=r"NUL|at least one word"):
            await sandbox.run(command)
    with pytest.raises(ValueError, match="environment variable"):
        await sandbox.run("true", env={"A B": "1"})
    assert (await sandbox.run("true")).exit_code == 0


@only_shells
async def test_environment_of_spec_and_call_and_nothing_else(backend: SandboxBackend, kind: str) -> None:
    os.environ["FARMHAND_TEST_SECRET"] = "leak"
    try:
        sandbox = await backend.create(spec(kind, env={"ONE": "spec", "TWO": "spec's $HOME 'q'\n"}))
        seen = (await sandbox.run(["env", "-0"], env={"ONE": "call"})).stdout
    finally:
        del os.environ["FARMHAND_TEST_SECRET"]
    pairs = dict(line.split(b"=", 1) for line in seen.split(b"\0")[:-1])
    assert pairs[b"ONE"] == b"call"
    assert pairs[b"TWO"] == b"spec's $HOME 'q'\n"
    allowed = {
        b"PATH",
        b"HOME",
        b"USER",
        b"LOGNAME",
        b"SHELL",
        b"LANG",
        b"TERM",
        b"PWD",
        b"OLDPWD",
        b"SHLVL",
        b"_",
        b"HOSTNAME",
    }
    assert set(pairs) - allowed == {b"ONE", b"TWO"}
    # Names and text are UTF-8, whatever the host's own setting.
    assert (await sandbox.run("echo $LANG; locale charmap 2>/dev/null || echo UTF-8")).stdout == b"C.UTF-8\nUTF-8\n"


@only_shells
async def test_cwd(sandbox: Sandbox) -> None:
    assert (await sandbox.run("pwd")).stdout == b"/workspace\n"
    assert (await sandbox.run("pwd", cwd="/tmp")).stdout == b"/tmp\n"
    await sandbox.make_dir("a 'b/c")
    assert (await sandbox.run("pwd", cwd="a 'b/c")).stdout == b"/workspace/a 'b/c\n"
    missing = await sandbox.run("pwd", cwd="nowhere")
    assert missing.exit_code != 0
    assert b"nowhere" in missing.stderr


@only_shells
async def test_stdin_is_passed_whole_and_ends(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 4096
    result = await sandbox.run("cat", stdin=data, max_output=len(data))
    assert result.stdout == data
    assert (await sandbox.run("cat; echo end", stdin=b"")).stdout == b"end\n"
    assert (await sandbox.run("cat; echo end")).stdout == b"end\n"
    # A command that does not read its input is not waited for.
    assert (await sandbox.run("echo done", stdin=data * 8, timeout=20)).stdout == b"done\n"
    assert (await sandbox.run("head -c 3", stdin=data * 8, timeout=20)).stdout == data[:3]


@only_shells
async def test_what_is_kept_of_much_output_is_its_head_and_tail(sandbox: Sandbox) -> None:
    result = await sandbox.run("seq 1 100000; echo small >&2", max_output=1000)
    assert result.truncated
    assert len(result.stdout) == 1000
    assert result.stdout.startswith(b"1\n2\n3\n")
    assert result.stdout.endswith(b"99999\n100000\n")
    assert result.stderr == b"small\n"
    exact = await sandbox.run("printf 12345", max_output=5)
    assert (exact.stdout, exact.truncated) == (b"12345", False)
    none = await sandbox.run("printf 1", max_output=0)
    assert (none.stdout, none.truncated) == (b"", True)


@only_shells
async def test_binary_output_is_untouched(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 16
    await sandbox.write("binary", data)
    assert (await sandbox.run("cat binary; cat binary >&2")).stdout == data


@only_shells
async def test_endless_output_ends_at_the_timeout_within_bounds(sandbox: Sandbox) -> None:
    result = await sandbox.run("yes", timeout=0.5, max_output=10_000)
    assert (result.exit_code, result.timed_out, result.truncated, len(result.stdout)) == (124, True, True, 10_000)
    assert result.seconds < 10


@only_shells
async def test_output_is_shown_as_it_comes(sandbox: Sandbox) -> None:
    heard: list[tuple[str, bytes]] = []
    shown = asyncio.Event()

    def hear(stream: str, data: bytes) -> None:
        heard.append((stream, data))
        shown.set()

    running = asyncio.create_task(
        sandbox.run("echo one; until [ -e go ]; do sleep 0.02; done; echo two >&2", on_output=hear)
    )
    await asyncio.wait_for(shown.wait(), 20)
    assert heard == [("stdout", b"one\n")]
    await sandbox.write("go", b"")
    assert (await running).exit_code == 0
    assert heard[-1] == ("stderr", b"two\n")


@only_shells
async def test_a_listener_s_fault_is_raised_to_its_caller_and_ends_the_command(sandbox: Sandbox) -> None:
    def hear(stream: str, data: bytes) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await sandbox.run("echo x; sleep 1000", on_output=hear)
    assert await beating(sandbox, "sleep 1000") == 0


# Time


async def beating(sandbox: Sandbox, words: str) -> int:
    """How many processes inside have that command line."""
    script = r"""
n=0; for p in /proc/[0-9]*; do
  c=$(tr '\0' ' ' <"$p/cmdline" 2>/dev/null) || continue
  s=$(cut -d' ' -f3 "$p/stat" 2>/dev/null)
  [ "$c" = "$1 " ] && [ "$s" != Z ] && n=$((n+1)); done; echo $n
"""
    return int((await sandbox.run(["sh", "-c", script, "sh", words])).stdout)


TREES = {
    "plain": "sleep 4321",
    "background": "sleep 4321 & sleep 4321",
    "setsid": "setsid sleep 4321 & sleep 4321",
    "nohup": "nohup sleep 4321 >/dev/null 2>&1 & sleep 4321",
    "double fork": "( ( setsid sleep 4321 & ) & ); sleep 4321",
    "deaf": "trap '' TERM HUP INT; ( trap '' TERM HUP INT; sleep 4321 ) & sleep 4321; sleep 4321",
    "closed": "setsid sh -c 'exec <&- >&- 2>&-; (sleep 4321 &) ; sleep 4321' & sleep 4321",
    "stopped": "sh -c 'sleep 4321 & sleep 4321 & kill -STOP $$'",
}


@only_shells
@pytest.mark.parametrize("tree", TREES)
async def test_a_timeout_kills_the_whole_tree_and_keeps_the_output(sandbox: Sandbox, tree: str) -> None:
    begun = time.monotonic()
    result = await sandbox.run(f"echo partial; {TREES[tree]}", timeout=0.7)
    assert time.monotonic() - begun < 10
    assert (result.exit_code, result.timed_out, result.stdout) == (124, True, b"partial\n")
    assert await beating(sandbox, "sleep 4321") == 0


@only_shells
@pytest.mark.parametrize("tree", TREES)
async def test_kill_processes_ends_what_commands_left(sandbox: Sandbox, tree: str) -> None:
    await sandbox.write("kept", b"1")
    left = await sandbox.run(
        f"({TREES[tree]}) >/dev/null 2>&1 & until pgrep -f '^sleep 4321'; do sleep 0.01; done", timeout=20
    )
    assert left.exit_code == 0
    assert await beating(sandbox, "sleep 4321") > 0
    await sandbox.kill_processes()
    assert await beating(sandbox, "sleep 4321") == 0
    assert await sandbox.read("kept") == b"1"


@only_shells
async def test_a_daemon_survives_its_command_and_another_s_timeout(sandbox: Sandbox) -> None:
    begun = time.monotonic()
    # It even holds the command's stdout: the command has ended all the same.
    assert (await sandbox.run("setsid sleep 4322 & echo up", timeout=20)).stdout == b"up\n"
    assert time.monotonic() - begun < 10
    assert (await sandbox.run("sleep 4321", timeout=0.3)).timed_out
    assert await beating(sandbox, "sleep 4322") == 1


@only_shells
async def test_a_timeout_hits_its_own_command_only(sandbox: Sandbox) -> None:
    slow = asyncio.create_task(sandbox.run("until [ -e go ]; do sleep 0.02; done; echo survived", timeout=30))
    quick = await asyncio.gather(*(sandbox.run("(setsid sleep 4321 &); sleep 4321", timeout=0.3) for _ in range(3)))
    assert all(each.timed_out for each in quick)
    await sandbox.write("go", b"")
    assert (await slow).stdout == b"survived\n"


@only_shells
async def test_a_cancelled_run_leaves_no_process(sandbox: Sandbox) -> None:
    started = asyncio.Event()
    task = asyncio.create_task(sandbox.run("echo; setsid sleep 4321 & sleep 4321", on_output=lambda *_: started.set()))
    await asyncio.wait_for(started.wait(), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await beating(sandbox, "sleep 4321") == 0


@only_shells
async def test_commands_run_side_by_side(sandbox: Sandbox) -> None:
    results = await asyncio.gather(*(sandbox.run(f"cat; echo {n}", stdin=b"in ") for n in range(20)))
    assert [result.stdout for result in results] == [f"in {n}\n".encode() for n in range(20)]


# Files


async def test_a_file_comes_back_as_written(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 1000
    await sandbox.write("deep/er/file.bin", data, mode=0o640)
    assert await sandbox.read("/workspace/deep/er/file.bin") == data
    info = await sandbox.stat("deep/er/file.bin")
    assert (info.name, info.path, info.type, info.size, info.mode) == (
        "file.bin",
        "/workspace/deep/er/file.bin",
        "file",
        len(data),
        0o640,
    )
    assert abs(info.modified - time.time()) < 60
    await sandbox.write("deep/er/file.bin", b"")
    assert await sandbox.read("deep/er/file.bin") == b""


@pytest.mark.parametrize(
    "name", ["a b", "'\"$x", "-rf", "--", "ü☃", "\udcff", "new\nline", "a*b?", "tab\t", "\\", "." * 3, "x" * 255]
)
async def test_any_name_will_do(sandbox: Sandbox, name: str) -> None:
    await sandbox.write(name, b"1")
    await sandbox.rename(name, f"./d-{name[:200]}")
    await sandbox.rename(f"./d-{name[:200]}", name)
    assert [info.name for info in await sandbox.list_dir(".")] == [name]
    assert (await sandbox.stat(name)).size == 1
    assert await sandbox.read(name) == b"1"
    await sandbox.remove(name)
    assert await sandbox.list_dir("/workspace") == []


async def test_listing_is_sorted_and_typed(sandbox: Sandbox) -> None:
    await sandbox.make_dir("b/inner")
    await sandbox.make_dir("b")
    await sandbox.write("c", b"123")
    await sandbox.write("a/x", b"")
    assert [(info.name, info.path, info.type) for info in await sandbox.list_dir("")] == [
        ("a", "/workspace/a", "dir"),
        ("b", "/workspace/b", "dir"),
        ("c", "/workspace/c", "file"),
    ]
    assert [info.path for info in await sandbox.list_dir("./b/../b/")] == ["/workspace/b/inner"]


async def test_reasons(sandbox: Sandbox) -> None:
    await sandbox.make_dir("dir/inner")
    await sandbox.write("file", b"12345")
    assert await reason(sandbox.read("none")) == "ENOENT"
    assert await reason(sandbox.read("dir")) == "EISDIR"
    assert await reason(sandbox.read("file/below")) == "ENOTDIR"
    assert await reason(sandbox.read("file", max_bytes=4)) == "EFBIG"
    assert await sandbox.read("file", max_bytes=5) == b"12345"
    assert await reason(sandbox.write("dir", b"")) == "EISDIR"
    assert await reason(sandbox.write("file/below", b"")) in ("ENOTDIR", "EEXIST")
    assert await reason(sandbox.write("x" * 256, b"")) == "ENAMETOOLONG"
    assert await reason(sandbox.write("nul\0", b"")) == "EINVAL"
    assert await reason(sandbox.list_dir("none")) == "ENOENT"
    assert await reason(sandbox.list_dir("file")) == "ENOTDIR"
    assert await reason(sandbox.stat("none")) == "ENOENT"
    assert await reason(sandbox.stat("file/below")) == "ENOTDIR"
    assert await reason(sandbox.remove("none")) == "ENOENT"
    assert await reason(sandbox.rename("none", "other")) == "ENOENT"
    assert await reason(sandbox.rename("file", "none/other")) == "ENOENT"
    assert await reason(sandbox.rename("dir", "dir/inner/dir")) == "EINVAL"
    assert await reason(sandbox.make_dir("file")) in ("EEXIST", "ENOTDIR")
    assert await reason(sandbox.make_dir("file/below")) in ("EEXIST", "ENOTDIR")
    # A name that reads like an error is not one.
    assert await reason(sandbox.read("Is a directory: Permission denied")) == "ENOENT"
    await sandbox.remove("dir")
    assert await reason(sandbox.stat("dir/inner")) == "ENOENT"


async def test_rename_replaces_a_file(sandbox: Sandbox) -> None:
    await sandbox.write("old", b"old")
    await sandbox.write("new", b"new")
    await sandbox.rename("old", "new")
    assert await sandbox.read("new") == b"old"
    assert await reason(sandbox.stat("old")) == "ENOENT"
    await sandbox.make_dir("dir")
    await sandbox.rename("dir", "moved")
    assert (await sandbox.stat("moved")).type == "dir"
    assert await reason(sandbox.rename("new", "moved")) in ("EEXIST", "EISDIR")


async def test_the_disk_is_bounded(backend: SandboxBackend, kind: str) -> None:
    sandbox = await backend.create(spec(kind, disk_mb=4))
    await sandbox.write("fits", bytes(1 << 20))
    assert await reason(sandbox.write("too-much", bytes(8 << 20))) == "ENOSPC"
    assert len(await sandbox.read("fits")) == 1 << 20


@only_shells
async def test_modes(sandbox: Sandbox) -> None:
    await sandbox.write("tool", b"#!/bin/sh\necho ran\n", mode=0o755)
    assert (await sandbox.run("./tool")).stdout == b"ran\n"
    await sandbox.write("secret", b"", mode=0o600)
    assert (await sandbox.run("stat -c %a secret")).stdout == b"600\n"
    await sandbox.write("closed", b"x", mode=0o000)
    assert (await sandbox.stat("closed")).mode == 0


@only_shells
async def test_links_are_seen_as_links(sandbox: Sandbox) -> None:
    await sandbox.run("echo x >target; ln -s target good; ln -s nowhere broken; ln -s loop loop; mkfifo pipe; ln -s / root")
    types = {info.name: info.type for info in await sandbox.list_dir(".")}
    assert types == {
        "broken": "symlink", "good": "symlink", "loop": "symlink", "pipe": "other", "root": "symlink", "target": "file",
    }  # fmt: skip
    assert (await sandbox.stat("broken")).type == "symlink"
    assert await sandbox.read("good") == b"x\n"
    assert await reason(sandbox.read("broken")) == "ENOENT"
    assert await reason(sandbox.read("loop")) == "ELOOP"
    # A pipe without a writer would hold a reader for ever.
    assert await reason(sandbox.read("pipe")) == "EINVAL"
    assert await reason(sandbox.write("pipe", b"x")) == "EINVAL"
    await sandbox.remove("root")
    await sandbox.remove("good")
    assert await sandbox.read("target") == b"x\n"


@only_shells
async def test_a_link_leads_nowhere_outside(sandbox: Sandbox, open_folder: Path) -> None:
    """The agent places links to the host's paths, and the host's own file calls follow them: inside, not on the host."""
    outside = open_folder
    (outside / "secret").write_text("host")
    (outside / "secret").chmod(0o666)
    await sandbox.run(f"ln -s {outside}/secret link; ln -s {outside} folder; ln -s ../../../../../..{outside} up")
    for path in ("link", "folder/secret", "up/secret", f"{outside}/secret", f"../../../../..{outside}/secret"):
        assert await reason(sandbox.read(path)) == "ENOENT"
    for path in ("link", "folder/new", "up/new", f"{outside}/new"):
        try:
            await sandbox.write(path, b"agent")
        except SandboxFileError as error:
            assert error.reason in ("ENOENT", "EEXIST")  # noqa: PT017
    assert (outside / "secret").read_text() == "host"
    assert [path.name for path in outside.iterdir()] == ["secret"]
    for path in ("folder", "up"):
        with pytest.raises(SandboxFileError):
            await sandbox.list_dir(f"{path}/none")


# Life


async def test_info_says_what_was_asked(backend: SandboxBackend, kind: str) -> None:
    before = time.time()
    sandbox = await backend.create(spec(kind, ttl_s=50), labels={"episode": "7"})
    info = await sandbox.info()
    assert (info.id, info.kind, info.labels) == (sandbox.id, kind, {"episode": "7"})
    assert re.fullmatch(r"[A-Za-z0-9_-]{8,64}", info.id)
    assert before - 1 <= info.created_at <= time.time() + 1
    assert 48 < info.expires_at - info.created_at < 52
    assert info.limits
    assert [each.id for each in await backend.sandboxes()] == [sandbox.id]


async def test_attach_finds_the_same_files(backend: SandboxBackend, sandbox: Sandbox) -> None:
    await sandbox.write("file", b"1")
    again = await backend.attach(sandbox.id)
    assert again.id == sandbox.id
    assert await again.read("file") == b"1"
    await again.kill()
    with pytest.raises(SandboxDied):
        await sandbox.read("file")


@only_shells
async def test_attach_from_another_backend_object(backend: SandboxBackend, sandbox: Sandbox, kind: str, base: Path) -> None:
    await sandbox.write("file", b"1")
    await backend.close()
    other = BACKENDS[kind](base)
    try:
        assert [info.id for info in await other.sandboxes()] == [sandbox.id]
        again = await other.attach(sandbox.id)
        assert await again.read("file") == b"1"
        assert (await again.info()).labels == {}
        await again.kill()
    finally:
        await other.close()


@pytest.mark.parametrize("name", ["", "0" * 16, "..", "../../etc", "x/y", "\0", "a" * 1000])
async def test_attach_to_nothing(backend: SandboxBackend, name: str) -> None:
    with pytest.raises(SandboxDied):
        await backend.attach(name)


async def test_kill_is_idempotent_and_everything_after_it_says_died(backend: SandboxBackend, sandbox: Sandbox) -> None:
    await sandbox.kill()
    await sandbox.kill()
    for work in (
        sandbox.run("true"),
        sandbox.read("x"),
        sandbox.write("x", b""),
        sandbox.list_dir("."),
        sandbox.stat("."),
        sandbox.remove("x"),
        sandbox.rename("x", "y"),
        sandbox.make_dir("x"),
        sandbox.set_ttl(5),
        sandbox.info(),
        sandbox.kill_processes(),
        backend.attach(sandbox.id),
    ):
        with pytest.raises(SandboxDied):
            await work
    assert await backend.sandboxes() == []


@only_shells
async def test_kill_ends_a_running_command_with_died(sandbox: Sandbox) -> None:
    started = asyncio.Event()
    running = asyncio.create_task(sandbox.run("echo; sleep 4321", on_output=lambda *_: started.set()))
    await asyncio.wait_for(started.wait(), 20)
    await sandbox.kill()
    with pytest.raises(SandboxDied):
        await asyncio.wait_for(running, 10)


@only_shells
async def test_the_deadline_ends_a_running_command_with_died(backend: SandboxBackend, kind: str) -> None:
    sandbox = await backend.create(spec(kind, ttl_s=1.0))
    begun = time.monotonic()
    with pytest.raises(SandboxDied, match="deadline"):
        await sandbox.run("sleep 4321", timeout=30)
    assert time.monotonic() - begun < 8


async def test_set_ttl_moves_the_deadline(backend: SandboxBackend, kind: str) -> None:
    sandbox = await backend.create(spec(kind, ttl_s=2))
    await sandbox.set_ttl(100)
    assert 95 < (await sandbox.info()).expires_at - time.time() <= 101
    other = await backend.create(spec(kind, ttl_s=100))
    await other.set_ttl(0.3)
    deadline = time.monotonic() + 10
    while other.id in [info.id for info in await backend.sandboxes()]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    with pytest.raises(SandboxDied):
        await other.stat(".")
    for bad in (0, -1):
        with pytest.raises(ValueError, match="ttl"):
            await sandbox.set_ttl(bad)
    await asyncio.sleep(max(0.0, (await sandbox.info()).created_at + 2.2 - time.time()))
    assert (await sandbox.stat(".")).type == "dir"


async def test_reap_takes_the_expired_and_the_unwanted(backend: SandboxBackend, kind: str) -> None:
    expired = await backend.create(spec(kind, ttl_s=0.5), labels={"episode": "1"})
    deadline = (await expired.info()).expires_at
    unwanted = await backend.create(spec(kind), labels={"episode": "2"})
    wanted = await backend.create(spec(kind), labels={"episode": "3"})
    await asyncio.sleep(max(0.0, deadline - time.time()) + 0.05)

    async def keep(info: SandboxInfo) -> bool:
        return info.labels["episode"] != "2"

    assert set(await backend.reap(keep)) == {expired.id, unwanted.id}
    assert [info.id for info in await backend.sandboxes()] == [wanted.id]
    assert await backend.reap() == []
    assert (await wanted.stat(".")).type == "dir"


async def test_twenty_at_once_are_twenty_apart(backend: SandboxBackend, kind: str) -> None:
    made = await asyncio.gather(*(backend.create(spec(kind)) for _ in range(20)))
    assert len({sandbox.id for sandbox in made}) == 20
    await asyncio.gather(*(sandbox.write("mine", sandbox.id.encode()) for sandbox in made))
    assert await asyncio.gather(*(sandbox.read("mine") for sandbox in made)) == [sandbox.id.encode() for sandbox in made]
    await asyncio.gather(*(sandbox.kill() for sandbox in made))
    assert await backend.sandboxes() == []


# The bound on output


@given(st.lists(st.binary(max_size=50), max_size=30), st.integers(0, 60))
@settings(max_examples=300)
def test_capture_keeps_head_and_tail_of_the_whole(parts: list[bytes], limit: int) -> None:
    capture = Capture(limit)
    for part in parts:
        capture.feed(part)
    whole = b"".join(parts)
    assert capture.truncated == (len(whole) > limit)
    if not capture.truncated:
        assert capture.value() == whole
    else:
        head = limit // 2
        tail = limit - head
        assert capture.value() == whole[:head] + (whole[-tail:] if tail else b"")
