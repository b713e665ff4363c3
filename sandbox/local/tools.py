"""The host's programs that the local backend needs, and what to tell a person whose host cannot isolate."""

from __future__ import annotations

import functools
import os
import shutil
from dataclasses import dataclass

from sandbox.base import SandboxUnavailable

PACKAGES = {
    "bwrap": "bubblewrap",
    "nsenter": "util-linux",
    "env": "coreutils",
    "setpriv": "util-linux",
    "setsid": "util-linux",
    "sleep": "coreutils",
}
"""Program: the package (Debian, Ubuntu, Fedora, Arch, Alpine name it alike) that holds it."""

ISOLATION = ("bwrap", "nsenter", "env")

UNSAFE_HINT = "or set `unsafe = true` in the sandbox settings to run commands without isolation."


@dataclass(frozen=True, slots=True)
class Tools:
    """Absolute paths."""

    bwrap: str
    nsenter: str
    env: str
    setpriv: str
    setsid: str
    sleep: str


def find_tools(*, isolation: bool = True) -> Tools:
    """Raises `SandboxUnavailable` naming every program that is missing. Without `isolation`, those of `ISOLATION` may be."""
    return _find(os.environ.get("PATH", os.defpath), isolation)


@functools.lru_cache
def _find(path: str, isolation: bool) -> Tools:
    """Only what was found is remembered: who installs a program meanwhile need not start again."""
    found = {name: shutil.which(name, path=path) for name in PACKAGES}
    missing = [name for name, path in found.items() if path is None and (isolation or name not in ISOLATION)]
    if missing:
        packages = sorted({PACKAGES[name] for name in missing})
        raise SandboxUnavailable(
            f"the local sandbox needs {', '.join(missing)}, not found on PATH. "
            f"Install {', '.join(packages)} (for example `apt-get install {' '.join(packages)}`)"
            + (f", {UNSAFE_HINT}" if isolation else ".")
        )
    return Tools(**{name: path or "" for name, path in found.items()})


def explain(message: str) -> str:
    """What bubblewrap said, and the cure that fits it."""
    said = message.strip() or "bwrap ended without a message"
    if "uid map" in said or "namespace" in said or "Operation not permitted" in said:
        cure = (
            "This host does not let programs make user namespaces. On Ubuntu 24.04: "
            "`sysctl kernel.apparmor_restrict_unprivileged_userns=0` or an AppArmor profile that allows bwrap `userns`. "
            "On older Debian: `sysctl kernel.unprivileged_userns_clone=1`. `sysctl user.max_user_namespaces` must not be 0. "
            "Inside Docker: start the container with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "--security-opt systempaths=unconfined`;"
        )
    else:
        cure = "Run the same as this user to see it: `bwrap --unshare-all --ro-bind / / true`;"
    return f"bubblewrap cannot isolate here: {said}. {cure} {UNSAFE_HINT}"
