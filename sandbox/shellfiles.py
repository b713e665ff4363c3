"""File operations through `run`, for any place that has a shell and the usual small programs.

Everything happens inside the sandbox, with the rights of its commands: a hostile symbolic link can lead to no file that a
command could not reach. Names are passed as arguments, never as text of a script, and may hold any byte but NUL and `/`.
"""

from __future__ import annotations

import os
import posixpath
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

from sandbox.base import FileInfo, OnOutput, RunResult, SandboxFileError

FILE_TIMEOUT_S = 60.0

_REASONS = {
    "No such file": "ENOENT",
    "Directory nonexistent": "ENOENT",
    "nonexistent directory": "ENOENT",
    "Is a directory": "EISDIR",
    "Not a directory": "ENOTDIR",
    "not a directory": "ENOTDIR",
    "Permission denied": "EACCES",
    "Operation not permitted": "EPERM",
    "File name too long": "ENAMETOOLONG",
    "No space left": "ENOSPC",
    "Read-only file system": "EROFS",
    "File exists": "EEXIST",
    "Directory not empty": "ENOTEMPTY",
    "Too many levels of symbolic links": "ELOOP",
    "Device or resource busy": "EBUSY",
    "Resource temporarily unavailable": "EAGAIN",
    "Cannot fork": "EAGAIN",
    "Argument list too long": "E2BIG",
    "Invalid argument": "EINVAL",
    "to a subdirectory of itself": "EINVAL",
    "No such device or address": "ENXIO",
    "cannot overwrite": "EEXIST",
}
"""What programs print in the C locale: errno's name. The first that occurs in the message counts."""

_READ = """
if [ -e "$1" ] && [ ! -f "$1" ] && [ ! -d "$1" ]; then echo 'Invalid argument: not a regular file' >&2; exit 1; fi
exec head -c "$2" -- "$1"
"""
_WRITE = """
[ -d "$1" ] || mkdir -p -- "$1" || exit 1
if [ -e "$2" ] && [ ! -f "$2" ]; then
  if [ -d "$2" ]; then echo 'Is a directory' >&2; else echo 'Invalid argument: not a regular file' >&2; fi; exit 1
fi
[ -e "$2" ] || new=1
umask "$4"
cat >"$2" || exit 1
[ -n "$new" ] && [ "$5" = keep ] || exec chmod -- "$3" "$2"
"""
_FORMAT = "%y\\t%s\\t%m\\t%T@\\t%f\\0"
_TYPES: Mapping[bytes, Literal["file", "dir", "symlink"]] = {b"f": "file", b"d": "dir", b"l": "symlink"}


class ShellFiles(ABC):
    """A mixin: the file half of `sandbox.base.Sandbox` on top of its `run`."""

    @abstractmethod
    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float = 30.0,
        max_output: int = 64 * 1024,
        on_output: OnOutput | None = None,
    ) -> RunResult: ...

    @abstractmethod
    def resolve(self, path: str) -> str:
        """`path` as an absolute one inside."""
        ...

    async def _do(self, path: str, *words: str, stdin: bytes | None = None, max_output: int = 1 << 20) -> RunResult:
        try:
            result = await self.run(
                words, cwd="/", env={"LC_ALL": "C"}, stdin=stdin, timeout=FILE_TIMEOUT_S, max_output=max_output
            )
        except ValueError as error:
            raise SandboxFileError("EINVAL", path) from error
        if result.timed_out:
            raise SandboxFileError("ETIMEDOUT", path)
        if result.exit_code:
            # The message quotes the path, which may itself read like a reason: look behind it, from the end.
            message = result.stderr.decode(errors="replace").strip()
            last = re.split(r"['\"]?: ", message)[-1]
            for text in (last, message):
                for sign, reason in _REASONS.items():
                    if sign in text:
                        raise SandboxFileError(reason, path)
            raise SandboxFileError("EIO", f"{path}: {message or f'exit code {result.exit_code}'}")
        return result

    async def _script(
        self, path: str, script: str, *words: str, stdin: bytes | None = None, max_output: int = 65536
    ) -> bytes:
        return (await self._do(path, "/bin/sh", "-c", script, "sh", *words, stdin=stdin, max_output=max_output)).stdout

    async def read(self, path: str, *, max_bytes: int = 64 * 1024 * 1024) -> bytes:
        """The whole file. Raises `SandboxFileError`, with reason EFBIG if it is larger than `max_bytes`."""
        data = await self._script(path, _READ, self.resolve(path), str(max_bytes + 1), max_output=max_bytes + 1)
        if len(data) > max_bytes:
            raise SandboxFileError("EFBIG", path)
        return data

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        target = self.resolve(path)
        umask = f"{0o777 & ~mode:04o}"
        keep = "chmod" if mode & 0o7111 else "keep"
        await self._script(path, _WRITE, posixpath.dirname(target), target, f"{mode:04o}", umask, keep, stdin=data)

    async def list_dir(self, path: str) -> list[FileInfo]:
        """Sorted by name. A symbolic link is listed as itself."""
        folder = self.resolve(path)
        words = ("find", f"{folder}/", "-mindepth", "1", "-maxdepth", "1", "-printf", _FORMAT)
        result = await self._do(path, *words, max_output=32 << 20)
        if result.truncated:
            raise SandboxFileError("EFBIG", path)
        folder = posixpath.normpath(folder)
        return sorted((_info(line, folder) for line in result.stdout.split(b"\0")[:-1]), key=lambda info: info.name)

    async def stat(self, path: str) -> FileInfo:
        """Of a symbolic link itself."""
        target = posixpath.normpath(self.resolve(path))
        result = await self._do(path, "find", target, "-maxdepth", "0", "-printf", _FORMAT)
        return _info(result.stdout[:-1], posixpath.dirname(target))

    async def remove(self, path: str) -> None:
        """A file, a link, or a folder with all in it."""
        await self._do(path, "rm", "-r", "--", self.resolve(path))

    async def rename(self, old: str, new: str) -> None:
        await self._do(old, "mv", "-T", "--", self.resolve(old), self.resolve(new))

    async def make_dir(self, path: str) -> None:
        """With the parents it needs; one that exists is fine."""
        await self._do(path, "mkdir", "-p", "--", self.resolve(path))


def _info(line: bytes, folder: str) -> FileInfo:
    kind, size, mode, modified, name = line.split(b"\t", 4)
    text = os.fsdecode(name)
    return FileInfo(
        name=text,
        path=posixpath.join(folder, text),
        type=_TYPES.get(kind, "other"),
        size=int(size),
        mode=int(mode, 8),
        modified=float(modified),
    )
