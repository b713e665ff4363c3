"""The /etc of a sandbox: a few generated files, and of the host's what programs need and nobody keeps secrets in."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path

from sandbox.local.supervisor import HOME, INSIDE_UID

_GENERATED = {
    "passwd": f"root:x:0:0:root:/root:/usr/sbin/nologin\nagent:x:{INSIDE_UID}:{INSIDE_UID}:agent:{HOME}:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": f"root:x:0:\nagent:x:{INSIDE_UID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost sandbox\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}

_COPIED = (
    "alternatives", "ca-certificates", "debian_version", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "magic",
    "mime.types", "os-release", "pki/tls/certs", "protocols", "resolv.conf", "services", "ssl/certs", "ssl/openssl.cnf",
    "timezone",
)  # fmt: skip


def prepare_etc(base: Path) -> Path:
    """Make the folder anew, readable for every user, and return it; a folder is kept as long as sandboxes may use it."""
    target = base / "etc"
    draft = base / f"etc.{secrets.token_hex(4)}"
    draft.mkdir(mode=0o755)
    for name, text in _GENERATED.items():
        (draft / name).write_text(text)
    for name in _COPIED:
        source, copy = Path("/etc", name), draft / name
        with contextlib.suppress(OSError, shutil.Error):
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, copy, symlinks=True)
            elif source.exists():
                shutil.copyfile(source, copy)
    for parent, folders, files in os.walk(draft):
        for name in (*folders, *files):
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                os.chmod(path, 0o755 if os.path.isdir(path) else 0o644)
    os.chmod(draft, 0o755)  # noqa: S103 - the sandbox has another user
    try:
        draft.rename(target)
    except OSError:
        # Another worker was first. Its copy is as good: both are of this host.
        shutil.rmtree(draft)
    return target
