"""One shell task as its family wrote it, and the few scripts that all families are made of.

A verifier is a POSIX sh script that prints `reward 1` or `reward 0`. It reads regular files only, a bounded part of each, so
that a pipe, a device or a huge file left in an answer's place is a wrong answer and cannot stall it. It forks little: the
checks are shell builtins where there is one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Call = dict[str, Any]
"""A tool call as in `Task.params["oracle"]`: {"name", "arguments"}."""

CHECKS = """\
is() { [ -f "$1" ] && [ ! -L "$1" ] && [ "$(head -c 4000 "$1")" = "$2" ]; }
folder() { [ -d "$1" ] && [ ! -L "$1" ]; }
gone() { [ ! -e "$1" ] && [ ! -L "$1" ]; }
holds() { n=$2; set -- "$1"/*; [ $# = "$n" ]; }
"""


@dataclass(frozen=True, slots=True)
class Draft:
    instruction: str
    setup: str
    verify: str
    oracle: tuple[Call, ...]


def draft(instruction: str, *, setup: Iterable[str] = (), checks: Iterable[str], oracle: Iterable[Call | str]) -> Draft:
    """`setup` lines run first; the task is solved when all `checks` hold; a `str` in `oracle` is a command for bash."""
    lines = list(setup)
    calls = [bash(item) if isinstance(item, str) else item for item in oracle]
    return Draft(
        instruction=instruction,
        setup="\n".join(("set -e", *lines)) if lines else "",
        verify=f"{CHECKS}if {' && '.join(checks)}; then echo reward 1; else echo reward 0; fi",
        oracle=(*calls, {"name": "submit", "arguments": {}}),
    )


def bash(command: str) -> Call:
    return {"name": "bash", "arguments": {"command": command}}


def view(path: str) -> Call:
    return {"name": "view", "arguments": {"path": path}}


def edit(path: str, old: str, new: str) -> Call:
    return {"name": "edit", "arguments": {"path": path, "old": old, "new": new}}


def put(path: str, *lines: object) -> str:
    """Setup: a file of these lines."""
    quoted = " ".join(shlex.quote(str(line)) for line in lines)
    return f"printf '%s\\n' {quoted} > {path}"


def folders(*paths: str) -> str:
    return f"mkdir -p {' '.join(paths)}"


def same(path: str, *lines: object) -> str:
    """Check: a regular file of exactly these lines; a missing last newline is forgiven."""
    text = "\n".join(str(line) for line in lines)
    return f"is {path} {shlex.quote(text)}"


def unchanged(files: Sequence[tuple[str, Sequence[object]]]) -> list[str]:
    return [same(path, *lines) for path, lines in files]
