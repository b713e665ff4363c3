"""One command's pipes between a worker and a supervisor: named pipes in the sandbox's `io` folder, read on the event loop.

The worker opens its ends before it sends the request, so nothing is lost and nothing waits in `open`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence

from sandbox.base import OnOutput, StreamName
from sandbox.output import Capture

_CHUNK = 64 * 1024
_NAMES: tuple[StreamName, StreamName] = ("stdout", "stderr")


def quote(value: bytes) -> bytes:
    """One word of POSIX shell. Raises ValueError for a NUL byte, which no argument can hold."""
    if b"\0" in value:
        raise ValueError("a command, its arguments and its environment must not contain NUL bytes")
    return b"'" + value.replace(b"'", b"'\"'\"'") + b"'"


def script(command: str | Sequence[str], *, cwd: str, env: Mapping[str, str], marked: bool) -> bytes:
    """What the supervisor reads before it enters the sandbox: `set -- ARGUMENTS`.

    Environment and folder are set by the shell inside, so that neither touches a program on the host. The text of a `str`
    command stays on its own first line, so that the shell's messages number its lines as the author does. `marked`: the
    command's processes keep the mark of their run in the environment, where nothing else tells whose they are.
    """
    prelude = b"" if marked else b"unset FARMHAND_RUN; "
    for name, value in env.items():
        if not (name.isascii() and name.isidentifier()):
            raise ValueError(f"environment variable {name!r}: a name is made of letters, digits and underscores")
        prelude += b"export " + name.encode() + b"=" + quote(os.fsencode(value)) + b"; "
    # 'cd' would search CDPATH, and print what it found there.
    prelude += b"CDPATH= cd " + quote(os.fsencode(cwd)) + b" || exit 126; "
    if isinstance(command, str):
        words = [b"/bin/sh", b"-c", prelude + os.fsencode(command), b"sh"]
    else:
        if not command:
            raise ValueError("a command needs at least one word")
        words = [b"/bin/sh", b"-c", prelude + b'exec "$@"', b"sh", *map(os.fsencode, command)]
    return b"set -- " + b" ".join(map(quote, words)) + b"\n"


class Exchange:
    """Lives from `open` to `close`; `code` resolves to the exit code, or None if the supervisor's part was killed."""

    def __init__(
        self, folder: str, *, owner: int | None, max_output: int, stdin: bytes | None, on_output: OnOutput | None
    ) -> None:
        self.token = secrets.token_hex(8)
        self.captures = [Capture(max_output), Capture(max_output)]
        self.drained = asyncio.Event()
        """Set once both streams have ended."""
        self._loop = asyncio.get_running_loop()
        self.code: asyncio.Future[int | None] = self._loop.create_future()
        self._prefix = f"{folder}/{self.token}."
        self._folder = folder
        self._owner = owner
        self._stdin = memoryview(stdin) if stdin is not None else None
        self._on_output = on_output
        self._fault: Exception | None = None
        self._status = b""
        self._readers: dict[int, int] = {}
        self._status_fd: int | None = None
        self._stdin_fd: int | None = None
        self._stdin_open = False

    def open(self, arguments: bytes, init: int) -> None:
        """Make the pipes and send the request. Raises OSError (ENXIO, ENOENT) if there is no supervisor any more."""
        descriptor = os.open(f"{self._prefix}cmd", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.write(descriptor, arguments)
        finally:
            os.close(descriptor)
        for index, name in enumerate(("out", "err")):
            reader = self._pipe(name, os.O_RDONLY)
            self._readers[reader] = index
            self._loop.add_reader(reader, self._read, reader)
        self._status_fd = self._pipe("rc", os.O_RDONLY)
        self._loop.add_reader(self._status_fd, self._read_status, self._status_fd)
        if self._stdin is not None:
            # Read and write, so that the pipe keeps what is written before the command opens its end.
            self._stdin_fd = self._pipe("in", os.O_RDWR)
            self._write()
        control = os.open(f"{self._folder}/ctl", os.O_WRONLY | os.O_NONBLOCK)
        try:
            mode = "none" if self._stdin is None else "pipe"
            os.write(control, f"run {self.token} {init} {mode}\n".encode())
        finally:
            os.close(control)

    def _pipe(self, name: str, flags: int) -> int:
        path = self._prefix + name
        os.mkfifo(path, 0o600)
        if self._owner is not None:
            os.chown(path, self._owner, self._owner)
        return os.open(path, flags | os.O_NONBLOCK)

    def _read(self, reader: int) -> None:
        try:
            data = os.read(reader, _CHUNK)
        except BlockingIOError:
            return
        index = self._readers[reader]
        if not data:
            self._close_reader(reader)
            return
        self.captures[index].feed(data)
        if self._on_output is not None and self._fault is None:
            try:
                self._on_output(_NAMES[index], data)
            except Exception as error:
                # The caller's fault belongs to the caller: the command is ended and `result` raises it there.
                self._fault = error
                self._finish(None)

    def _read_status(self, reader: int) -> None:
        try:
            data = os.read(reader, 64)
        except BlockingIOError:
            return
        self._status += data
        *lines, _ = self._status.split(b"\n")
        if b"open" in lines and not self._stdin_open:
            self._stdin_open = True
            self._end_stdin()
        codes = [line for line in lines if line != b"open"]
        if codes or not data:
            self._loop.remove_reader(reader)
            self._finish(int(codes[0]) if codes else None)

    def _finish(self, code: int | None) -> None:
        if not self.code.done():
            self.code.set_result(code)

    def _write(self) -> None:
        assert self._stdin is not None
        assert self._stdin_fd is not None
        try:
            written = os.write(self._stdin_fd, self._stdin[:_CHUNK]) if self._stdin else 0
        except BlockingIOError:
            written = 0
        self._stdin = self._stdin[written:]
        if self._stdin:
            self._loop.add_writer(self._stdin_fd, self._write)
        else:
            self._end_stdin()

    def _end_stdin(self) -> None:
        """Close once all is written and the command has its end open; a pipe that nobody has open forgets its content."""
        if self._stdin_fd is None or self._stdin is None:
            return
        if not self._stdin:
            self._loop.remove_writer(self._stdin_fd)
            if self._stdin_open:
                os.close(self._stdin_fd)
                self._stdin_fd = None

    def _close_reader(self, reader: int) -> None:
        self._loop.remove_reader(reader)
        os.close(reader)
        del self._readers[reader]
        if not self._readers:
            self.drained.set()

    @property
    def fault(self) -> Exception | None:
        """What `on_output` raised."""
        return self._fault

    def forget_request(self) -> None:
        """A request that was not started yet will not be."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._prefix}cmd")

    def close(self) -> None:
        for reader in list(self._readers):
            self._close_reader(reader)
        if self._status_fd is not None:
            self._loop.remove_reader(self._status_fd)
            os.close(self._status_fd)
            self._status_fd = None
        if self._stdin_fd is not None:
            self._loop.remove_writer(self._stdin_fd)
            os.close(self._stdin_fd)
            self._stdin_fd = None
        for name in ("cmd", "out", "err", "rc", "in"):
            with contextlib.suppress(OSError):
                os.unlink(self._prefix + name)
