"""The local backend against an agent that wants out, will not end, and eats all it gets; and against workers that die."""

import asyncio
import ctypes
import os
import platform
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from sandbox.base import Sandbox, SandboxDied, SandboxError, SandboxInfo, SandboxSpec, SandboxUnavailable
from sandbox.local import cgroup
from sandbox.local.backend import LocalBackend
from sandbox.local.sandbox import LocalSandbox
from sandbox.local.state import Boxes, Record
from sandbox.local.tools import PACKAGES

ROOT = Path(__file__).parent.parent.parent
PYTHON = "/usr/bin/python3"
AS_ROOT = os.geteuid() == 0
GROUPS = cgroup.find_parents().folders


@pytest_asyncio.fixture
async def backend(base: Path) -> AsyncIterator[LocalBackend]:
    made = LocalBackend(base)
    yield made

    async def nobody(info: SandboxInfo) -> bool:
        return False

    await made.reap(nobody)
    await made.close()
    assert list((base / "boxes").glob("*")) == []


@pytest_asyncio.fixture
async def sandbox(backend: LocalBackend) -> LocalSandbox:
    return await backend.create(SandboxSpec(ttl_s=300))


def record_of(base: Path, sandbox: Sandbox) -> Record:
    record = Boxes(base).load(sandbox.id)
    assert record is not None
    return record


async def until(truth: Callable[[], bool], seconds: float = 15.0) -> None:
    """Polls what no event tells of."""
    deadline = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.02)


async def python(sandbox: Sandbox, code: str, timeout: float = 30) -> str:
    result = await sandbox.run([PYTHON, "-c", code], timeout=timeout)
    return (result.stdout + result.stderr).decode()


def host_pids(words: str) -> list[int]:
    """Live processes of the host with that command line."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        if " ".join(process.info["cmdline"] or []) == words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.info["pid"])
    return found


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def own_oom_score() -> int:
    return oom_score(os.getpid())


def mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


# Ways out


async def test_every_namespace_is_its_own(sandbox: LocalSandbox) -> None:
    names = ("net", "pid", "mnt", "ipc", "uts", "user", "cgroup")
    seen = (await sandbox.run(["readlink", *(f"/proc/self/ns/{name}" for name in names)])).stdout.decode().split()
    assert len(seen) == len(names)
    assert not set(seen) & {os.readlink(f"/proc/self/ns/{name}") for name in names if name != "cgroup"}


async def test_no_way_to_the_network(sandbox: LocalSandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(b"\0farmhand-test-%d" % os.getpid())
        abstract.listen()
        port = tcp.getsockname()[1]
        said = await python(
            sandbox,
            f"""
import socket
for family, kind, address in ((socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", {port})),
                        (socket.AF_INET, socket.SOCK_STREAM, ("192.0.2.1", 80)),
                        (socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 53)),
                        (socket.AF_UNIX, socket.SOCK_STREAM, b"\\0farmhand-test-{os.getpid()}")):
    s = socket.socket(family, kind); s.settimeout(5)
    try:
        s.connect(address); print("REACHED", address)
    except OSError as error:
        print("refused", error.errno)
try:
    socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print("REACHED raw")
except OSError:
    print("refused raw")
""",
        )
        assert said.count("refused") == 5, said
        interfaces = await sandbox.run("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '")
        assert set(interfaces.stdout.decode().split()) <= {"lo"}


async def test_open_network_is_the_host_s(backend: LocalBackend) -> None:
    sandbox = await backend.create(SandboxSpec(network="open"))
    with socket.create_server(("127.0.0.1", 0)) as tcp:
        said = await python(
            sandbox, f"import socket; socket.create_connection(('127.0.0.1', {tcp.getsockname()[1]})); print('ok')"
        )
    assert said == "ok\n"


async def test_host_processes_are_neither_seen_nor_reached(sandbox: LocalSandbox) -> None:
    victim = await asyncio.create_subprocess_exec("sleep", "8765")
    try:
        listing = await sandbox.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert b"8765" not in listing.stdout
        pids = (await sandbox.run("ls /proc | grep -c '^[0-9]'")).stdout
        assert int(pids) < 8
        killed = await sandbox.run(f"kill -9 {victim.pid} {os.getpid()}")
        assert killed.exit_code != 0
        assert victim.returncode is None
        assert host_pids("sleep 8765") == [victim.pid]
    finally:
        victim.kill()
        await victim.wait()


async def test_killing_everything_inside_does_not_end_the_sandbox(sandbox: LocalSandbox) -> None:
    await sandbox.write("file", b"1")
    for command in ("kill -9 -1", "kill -9 1", "kill -STOP 1", "kill -TERM 1; kill -INT 1; kill -HUP 1"):
        await sandbox.run(command)
        assert await sandbox.read("file") == b"1"


@pytest.mark.parametrize(
    "target",
    [
        *("/usr/x", "/bin/x", "/usr/lib/x", "/etc/x", "/etc/passwd", "/dev/x", "/sys/x", "/proc/sys/kernel/hostname"),
        *(
            "/proc/sysrq-trigger",
            "/proc/sys/user/max_user_namespaces",
            "/proc/1/mem",
            "/usr/bin/env",
        ),
    ],
)
async def test_the_system_is_read_only(sandbox: LocalSandbox, target: str) -> None:
    result = await sandbox.run(["sh", "-c", 'echo 1 >"$1"', "sh", target])
    assert result.exit_code != 0, result
    assert (await sandbox.run(["mv", "-T", target, "/tmp/moved"])).exit_code != 0


async def test_mounts_and_namespaces_cannot_be_changed(sandbox: LocalSandbox) -> None:
    for command in (
        "mount -o remount,rw /usr",
        "mount -t tmpfs none /mnt",
        "mount --bind /tmp /etc",
        "umount /etc",
        "unshare -U true",
        "unshare -Ur true",
        "unshare -m true",
        "unshare -n true",
        "nsenter -t 1 -m true",
        "nsenter -t 1 -U true",
        "chroot / true",
        "mknod /tmp/disk b 8 0",
        "rmdir /usr /etc /dev",
        "su -c true",
        "hostname evil",
    ):
        assert (await sandbox.run(command)).exit_code != 0, command
    # Nothing on the way was worth anything.
    assert (await sandbox.run("touch /usr/x")).exit_code != 0


async def test_no_host_file_is_seen(sandbox: LocalSandbox, open_folder: Path) -> None:
    (open_folder / "file").write_text("host")
    hidden = [
        "/root",
        "/home/root",
        "/etc/shadow",
        "/etc/ssh",
        "/etc/sudoers",
        "/sys/kernel",
        "/boot",
        "/var/log",
        "/var/lib",
    ]
    hidden += [str(ROOT), str(Path(sys.executable)), str(open_folder), "/run/farmhand", "/run/systemd", "/run/docker.sock"]
    for path in hidden:
        if path.startswith("/usr/"):
            continue
        assert (await sandbox.run(["ls", "-d", path])).exit_code != 0, path
    assert b"root:!" not in (await sandbox.run("cat /etc/passwd /etc/group")).stdout
    tops = set((await sandbox.run("ls -A /")).stdout.decode().split())
    system = {"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "proc", "dev"}
    assert tops - system == {"tmp", "run", "var", "home", "workspace"}
    devices = set((await sandbox.run("ls -A /dev")).stdout.decode().split())
    assert devices <= {"null", "zero", "full", "random", "urandom", "tty", "fd", "stdin", "stdout", "stderr", "shm"}


async def test_no_descriptor_root_or_folder_leads_outside(sandbox: LocalSandbox) -> None:
    script = """
for p in /proc/[0-9]*; do
  readlink $p/root $p/cwd; ls -l $p/fd 2>/dev/null | sed -n 's/.*-> //p'
  ls -A $p/root/ 2>/dev/null | tr '\\n' ' '; echo; tr '\\0' '\\n' <$p/environ 2>/dev/null
done
"""
    seen = (await sandbox.run(script)).stdout.decode()
    # The one name of the host that shows is that of the pipe which is a command's own output.
    seen = re.sub(r"/\S+/boxes/[0-9a-f]{4}/io/[0-9a-f]{16}\.(out|err)\n", "", seen)
    assert "/workspace" in seen
    for sign in ("farmhand", str(ROOT), "/root", "/boxes/", "ctl"):
        assert sign not in seen, sign


async def test_no_descriptor_of_the_worker_is_inherited(backend: LocalBackend, open_folder: Path) -> None:
    secret = os.open(open_folder / "secret", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(secret, b"host")
    os.set_inheritable(secret, True)
    try:
        sandbox = await backend.create(SandboxSpec())
        said = await python(sandbox, f"import os; print(os.listdir('/proc/self/fd')); print(os.pread({secret}, 4, 0))")
        listing = await sandbox.run("ls /proc/self/fd")
    finally:
        os.close(secret)
    assert "Bad file descriptor" in said
    # `ls` has the folder itself open.
    assert set(listing.stdout.split()) == {b"0", b"1", b"2", b"3"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of the system calls are this machine's")
async def test_the_worker_s_keyring_is_not_inherited(backend: LocalBackend) -> None:
    add_key, keyctl, join, read, own_session = 248, 250, 1, 11, -3
    libc = ctypes.CDLL(None)
    if libc.syscall(keyctl, join, None) < 0:
        pytest.skip("this kernel has no keyrings")
    key = libc.syscall(add_key, b"user", b"farmhand-test", b"secret", 6, own_session)
    buffer = ctypes.create_string_buffer(6)
    assert libc.syscall(keyctl, read, key, buffer, 6) == 6
    sandbox = await backend.create(SandboxSpec())
    code = f"""
import ctypes
buffer = ctypes.create_string_buffer(6)
print(ctypes.CDLL(None).syscall({keyctl}, {read}, {key}, buffer, 6), buffer.raw)
"""
    assert await python(sandbox, code) == f"-1 {bytes(6)!r}\n"
    assert libc.syscall(keyctl, read, key, buffer, 6) == 6


async def test_host_environment_is_invisible(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    sandbox = await backend.create(SandboxSpec())
    seen = (await sandbox.run("env; cat /proc/*/environ")).stdout
    assert b"hf_very_secret" not in seen
    assert b"FARMHAND" not in (await sandbox.run("env")).stdout


async def test_commands_have_no_privilege_on_the_host(sandbox: LocalSandbox, base: Path) -> None:
    running = asyncio.create_task(sandbox.run("exec sleep 7654"))
    await until(lambda: bool(host_pids("sleep 7654")))
    (pid,) = host_pids("sleep 7654")
    status = status_of(pid)
    uids = {int(uid) for uid in status["Uid"].split()}
    assert 0 not in uids
    if AS_ROOT:
        assert uids == {record_of(base, sandbox).uid}
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"
    assert not AS_ROOT or set(status["Groups"].split()) <= {"65534"}
    assert own_oom_score() < oom_score(record_of(base, sandbox).supervisor.pid) < oom_score(pid)
    # The processes on the host's side that serve the sandbox have none either.
    record = record_of(base, sandbox)
    for process in [psutil.Process(record.supervisor.pid), *psutil.Process(record.supervisor.pid).children()]:
        assert 0 not in process.uids() or not AS_ROOT
    await sandbox.kill_processes()
    assert (await running).exit_code == 137
    assert (await sandbox.run("id -u")).stdout == b"1000\n"


async def test_sandboxes_do_not_see_each_other(backend: LocalBackend, base: Path) -> None:
    one, two = await asyncio.gather(backend.create(SandboxSpec()), backend.create(SandboxSpec()))
    await one.write("/tmp/secret", b"one")
    await one.write("secret", b"one")
    await one.write("/dev/shm/secret", b"one")
    await one.run("setsid sleep 6543 >/dev/null 2>&1 &")
    for path in ("/tmp/secret", "secret", "/dev/shm/secret"):
        assert (await two.run(["cat", path])).exit_code != 0
    assert b"6543" not in (await two.run("cat /proc/[0-9]*/cmdline")).stdout
    if AS_ROOT:
        assert record_of(base, one).uid != record_of(base, two).uid


# What will not end


async def test_a_fork_bomb_is_bounded_and_the_others_go_on(backend: LocalBackend) -> None:
    bombed, other = await asyncio.gather(backend.create(SandboxSpec(pids=32)), backend.create(SandboxSpec()))
    bomb = asyncio.create_task(bombed.run("f() { f | f & }; f; f; sleep 4000", timeout=2))
    while not bomb.done():
        assert (await other.run("true", timeout=20)).exit_code == 0
        await asyncio.sleep(0.05)
    result = await bomb
    assert result.timed_out or result.exit_code != 0
    await bombed.kill_processes()
    assert int((await bombed.run("ls /proc | grep -c '^[0-9]'")).stdout) < 8
    assert (await bombed.run("echo alive")).stdout == b"alive\n"


async def test_the_number_of_processes_is_bounded(backend: LocalBackend) -> None:
    sandbox = await backend.create(SandboxSpec(pids=16))
    code = """
import os, time
n = 0
try:
    for _ in range(200):
        if os.fork() == 0:
            os.setsid(); time.sleep(1000)
        n += 1
except OSError as error:
    print(n, error.errno, flush=True)
"""
    count, error = (await python(sandbox, code)).split()
    assert int(count) <= 16
    assert error == "11"
    # From outside it is ended all the same.
    await sandbox.kill_processes()
    assert (await sandbox.run("echo room")).stdout == b"room\n"


async def test_memory_is_bounded(backend: LocalBackend) -> None:
    sandbox = await backend.create(SandboxSpec(memory_mb=64, disk_mb=8))
    said = await python(sandbox, "b = bytearray(1 << 30)\nfor i in range(0, 1 << 30, 4096): b[i] = 1\nprint('GOT IT ALL')")
    assert "GOT IT ALL" not in said
    with suppress(SandboxDied):
        assert (await sandbox.run("echo alive")).stdout == b"alive\n"


@pytest.mark.skipif("memory" not in GROUPS, reason="without a memory cgroup the bound is per process")
async def test_memory_of_many_processes_is_bounded_together(backend: LocalBackend) -> None:
    sandbox = await backend.create(SandboxSpec(memory_mb=64, disk_mb=8, pids=64))
    hog = "import time; b = bytearray(40 << 20); b[::4096] = b'1' * len(b[::4096]); print('held', flush=True); time.sleep(2)"
    command = f'for n in 1 2 3 4 5 6; do {PYTHON} -c "{hog}" & done; wait'
    with suppress(SandboxDied):
        result = await sandbox.run(command, timeout=30)
        assert result.stdout.count(b"held") < 6


async def test_everything_that_can_be_written_is_bounded_together(backend: LocalBackend) -> None:
    sandbox = await backend.create(SandboxSpec(disk_mb=16))
    script = """
for d in /workspace /tmp /var/tmp /dev/shm /home/agent /run/shm / /run /var /dev; do
  head -c 12000000 /dev/zero >$d/fill 2>/dev/null; done
cat /workspace/fill /tmp/fill /var/tmp/fill /dev/shm/fill /home/agent/fill /fill /run/fill /var/fill 2>/dev/null | wc -c
"""
    result = await sandbox.run(script, timeout=60)
    # /dev/shm and /run/shm are one folder, so that file counts once on disk and once in this sum at most.
    assert int(result.stdout) <= 17 << 20
    assert (await sandbox.run("echo still")).stdout == b"still\n"
    await sandbox.run("rm -f /workspace/fill")
    await sandbox.write("small", b"1")


async def test_a_flood_of_output_costs_the_worker_no_memory(sandbox: LocalSandbox) -> None:
    before = psutil.Process().memory_info().rss
    result = await sandbox.run("head -c 200000000 /dev/zero; head -c 50000000 /dev/zero >&2", timeout=60)
    assert result.truncated
    assert len(result.stdout) == 64 * 1024
    assert psutil.Process().memory_info().rss - before < 50 << 20


# Workers that die

WORKER = """
import asyncio, sys
from pathlib import Path
from sandbox.base import SandboxSpec
from sandbox.local.backend import LocalBackend

async def main():
    backend = LocalBackend(Path(sys.argv[1]))
    sandbox = await backend.create(SandboxSpec(ttl_s=float(sys.argv[2])))
    await sandbox.write("file", b"kept")
    print(sandbox.id, flush=True)
    await sandbox.run("echo started >>file; setsid sleep 5432 & sleep 5432", timeout=1000)

asyncio.run(main())
"""


async def orphan(base: Path, sandbox_ttl: float) -> str:
    """A sandbox whose maker was killed while a command ran in it."""
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, str(base), str(sandbox_ttl), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    sandbox_id = (await asyncio.wait_for(worker.stdout.readline(), 30)).decode().strip()
    await until(lambda: len(host_pids("sleep 5432")) == 2)
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    return sandbox_id


async def test_a_sandbox_outlives_the_killed_worker_that_made_it(backend: LocalBackend, base: Path) -> None:
    sandbox = await backend.attach(await orphan(base, 300))
    assert await sandbox.read("file") == b"keptstarted\n"
    assert (await sandbox.run("echo works")).stdout == b"works\n"
    await sandbox.kill_processes()
    assert host_pids("sleep 5432") == []
    await sandbox.kill()
    assert await backend.sandboxes() == []


async def test_a_killed_worker_s_command_ends_with_the_deadline(backend: LocalBackend, base: Path) -> None:
    sandbox_id = await orphan(base, 5)
    await until(lambda: host_pids("sleep 5432") == [])
    with pytest.raises(SandboxDied):
        await backend.attach(sandbox_id)
    assert await backend.reap() == [sandbox_id]
    assert await backend.reap() == []


async def test_the_sandbox_of_a_dead_supervisor_is_gone(backend: LocalBackend, sandbox: LocalSandbox, base: Path) -> None:
    record = record_of(base, sandbox)
    running = asyncio.create_task(sandbox.run("setsid sleep 5431 & sleep 5431"))
    await until(lambda: len(host_pids("sleep 5431")) == 2)
    os.kill(record.supervisor.pid, signal.SIGKILL)
    with pytest.raises(SandboxDied):
        await asyncio.wait_for(running, 10)
    await until(lambda: host_pids("sleep 5431") == [])
    assert await backend.reap() == [sandbox.id]


async def test_a_damaged_or_half_made_folder_is_reaped(backend: LocalBackend, sandbox: LocalSandbox, base: Path) -> None:
    slot = Boxes(base).path(sandbox.id)
    groups = record_of(base, sandbox).cgroups
    (slot / "record.json").write_text("{")
    half = base / "boxes" / "beef"
    half.mkdir()
    assert await backend.reap() == []
    for folder in (slot, half):
        os.utime(folder, (time.time() - 1000,) * 2)
    assert set(await backend.reap()) == {slot.name, "beef"}
    assert [group for group in groups if os.access(group, os.F_OK)] == []
    with pytest.raises(SandboxDied):
        await sandbox.run("true")


async def test_nothing_is_left_after_kill(backend: LocalBackend, sandbox: LocalSandbox, base: Path) -> None:
    record = record_of(base, sandbox)
    await sandbox.run("setsid sleep 5430 >/dev/null 2>&1 & nohup sleep 5430 >/dev/null 2>&1 &")
    running = asyncio.create_task(sandbox.run("sleep 5430"))
    await until(lambda: len(host_pids("sleep 5430")) == 3)
    await sandbox.kill()
    with pytest.raises(SandboxDied):
        await running
    assert host_pids("sleep 5430") == []
    assert not psutil.pid_exists(record.supervisor.pid)
    if AS_ROOT:
        uids = [process.info["uids"] for process in psutil.process_iter(["uids"])]
        assert not [found for found in uids if found and found.real == record.uid]
    assert str(base) not in mounts()
    assert list((base / "boxes").iterdir()) == []
    assert [group for group in record.cgroups if os.access(group, os.F_OK)] == []


async def test_orphans_that_end_leave_no_zombie_inside(sandbox: LocalSandbox) -> None:
    """Each would count against the bound on processes for good."""
    await sandbox.run("n=0; while [ $n -lt 40 ]; do (setsid sh -c 'sleep 0.05' >/dev/null 2>&1 &); n=$((n+1)); done")
    deadline = time.monotonic() + 15
    while int((await sandbox.run("ls /proc | grep -c '^[0-9]'")).stdout) > 6:
        assert time.monotonic() < deadline
    assert b"Z (zombie)" not in (await sandbox.run("cat /proc/[0-9]*/status")).stdout


async def test_killing_again_does_not_hit_who_has_the_slot_now(
    backend: LocalBackend, sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sandbox.kill()
    monkeypatch.setattr("sandbox.local.state.secrets.token_hex", lambda size: sandbox.id[:4] + "0" * (2 * size - 4))
    heir = await backend.create(SandboxSpec())
    monkeypatch.undo()
    assert heir.id[:4] == sandbox.id[:4]
    assert heir.id != sandbox.id
    await sandbox.kill()
    assert (await heir.run("echo alive")).stdout == b"alive\n"
    assert (await backend.attach(heir.id)).id == heir.id


async def test_a_cancelled_creation_leaves_nothing(backend: LocalBackend, base: Path) -> None:
    await (await backend.create(SandboxSpec())).kill()
    for turns in range(12):
        task = asyncio.create_task(backend.create(SandboxSpec()))
        for _ in range(turns):
            await asyncio.sleep(0.001)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await (await task).kill()
        assert list((base / "boxes").iterdir()) == []


async def test_128_at_once(backend: LocalBackend) -> None:
    made = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(128)))
    results = await asyncio.gather(*(sandbox.run(f"echo {n}", timeout=60) for n, sandbox in enumerate(made)))
    assert [result.stdout for result in results] == [f"{n}\n".encode() for n in range(128)]
    await asyncio.gather(*(sandbox.kill() for sandbox in made))


# Hosts that cannot isolate


def path_without(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in PACKAGES:
        found = shutil.which(name)
        if name not in names and found:
            (folder / name).symlink_to(found)
    return folder


async def refused(work: Awaitable[object]) -> str:
    with pytest.raises(SandboxUnavailable) as caught:
        await work
    return str(caught.value)


async def test_without_bubblewrap_it_refuses_and_says_the_cure(
    backend: LocalBackend, open_folder: Path, monkeypatch: pytest.MonkeyPatch, base: Path
) -> None:
    monkeypatch.setenv("PATH", str(path_without(open_folder / "bin", "bwrap")))
    said = await refused(backend.create(SandboxSpec()))
    for part in ("bwrap", "apt-get install bubblewrap", "unsafe = true"):
        assert part in said
    assert await backend.sandboxes() == []


async def test_unsafe_is_a_choice_and_is_shown(
    backend: LocalBackend, open_folder: Path, monkeypatch: pytest.MonkeyPatch, base: Path
) -> None:
    monkeypatch.setenv("PATH", str(path_without(open_folder / "bin", "bwrap", "nsenter")))
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    sandbox = await backend.create(SandboxSpec(unsafe=True))
    info = await sandbox.info()
    assert info.limits["isolation"] == "none (unsafe)"
    assert info.limits["network"] == "none"
    await sandbox.write("dir/file", b"1")
    assert (await sandbox.run("cat dir/file; env")).stdout.startswith(b"1")
    assert b"hf_very_secret" not in (await sandbox.run("env")).stdout
    timed = await sandbox.run("echo partial; setsid sleep 5429 & sleep 5429", timeout=0.7)
    assert (timed.timed_out, timed.stdout) == (True, b"partial\n")
    assert host_pids("sleep 5429") == []
    await sandbox.run("setsid sleep 5429 >/dev/null 2>&1 &")
    await sandbox.kill()
    assert host_pids("sleep 5429") == []
    assert list((base / "boxes").iterdir()) == []


async def test_unsafe_isolates_all_the_same_where_it_can(backend: LocalBackend) -> None:
    sandbox = await backend.create(SandboxSpec(unsafe=True))
    assert (await sandbox.info()).limits["isolation"] == "bubblewrap"


@pytest.mark.parametrize(
    ("message", "cure"),
    [
        ("bwrap: setting up uid map: Permission denied", "apparmor_restrict_unprivileged_userns"),
        ("bwrap: No permissions to create new namespace", "systempaths=unconfined"),
        ("bwrap: execvp /bin/sh: No such file or directory", "bwrap --unshare-all"),
        ("", "without a message"),
    ],
)
async def test_a_bubblewrap_that_fails_is_explained(
    backend: LocalBackend, open_folder: Path, monkeypatch: pytest.MonkeyPatch, base: Path, message: str, cure: str
) -> None:
    folder = path_without(open_folder / "bin", "bwrap")
    (folder / "bwrap").write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
    (folder / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    said = await refused(backend.create(SandboxSpec()))
    assert message in said
    assert cure in said
    assert "unsafe = true" in said
    assert list((base / "boxes").iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"image": "python:3.11"}, "image"),
        ({"workdir": "relative"}, "workdir"),
        ({"workdir": "/usr/x"}, "read-only"),
        ({"workdir": "/"}, "read-only"),
    ],
)
async def test_what_it_cannot_honour_it_refuses(backend: LocalBackend, fields: dict[str, str], part: str) -> None:
    assert part in await refused(backend.create(SandboxSpec.model_validate(fields)))


@pytest.mark.parametrize("workdir", ["/work", "/root/project", "/tmp/x/../y", "/home/agent/a b", "/var/tmp/x"])
async def test_any_other_workdir_will_do(backend: LocalBackend, workdir: str) -> None:
    sandbox = await backend.create(SandboxSpec(workdir=workdir))
    await sandbox.write("file", b"1")
    assert (await sandbox.run("cat file; touch made")).exit_code == 0
    assert {info.name for info in await sandbox.list_dir(".")} == {"file", "made"}


@pytest.mark.skipif(not AS_ROOT, reason="only root can take on another user")
async def test_a_closed_folder_above_is_named(open_folder: Path) -> None:
    os.chmod(open_folder, 0o700)
    said = await refused(LocalBackend(open_folder / "deep" / "boxes").create(SandboxSpec()))
    assert str(open_folder) in said
    assert "chmod o+x" in said


async def test_a_folder_of_another_user_is_refused(open_folder: Path) -> None:
    if not AS_ROOT:
        pytest.skip("only root can give a folder away")
    (open_folder / "boxes").mkdir()
    os.chown(open_folder / "boxes", 12345, 12345)
    assert "belongs to user 12345" in await refused(LocalBackend(open_folder / "boxes").create(SandboxSpec()))


@pytest.mark.skipif(not AS_ROOT, reason="only root can take on another user")
async def test_an_ordinary_user_has_sandboxes_too(open_folder: Path) -> None:
    """The same cycle in a process without root's rights."""
    code = f"""
import asyncio, os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from sandbox.base import SandboxSpec
from sandbox.local.backend import LocalBackend

async def main():
    backend = LocalBackend(Path({str(open_folder)!r}) / "mine")
    sandbox = await backend.create(SandboxSpec())
    await sandbox.write("file", b"1")
    result = await sandbox.run("cat file; id -u; (setsid sleep 5428 &); sleep 5428", timeout=0.7)
    print(result.stdout, result.timed_out)
    await sandbox.kill()
    await backend.close()
    print(os.listdir({str(open_folder)!r} + "/mine/boxes"))

asyncio.run(main())
"""
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import concurrent.futures.thread, asyncio.runners\nimport sandbox.local.backend\n" + code,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(worker.communicate(), 60)
    assert out.decode() == "b'11000\\n' True\n[]\n", (out, err)
    assert host_pids("sleep 5428") == []


def test_all_errors_are_sandbox_errors() -> None:
    assert issubclass(SandboxUnavailable, SandboxError)
    assert issubclass(SandboxDied, SandboxError)
