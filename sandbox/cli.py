"""`farmhand sandbox`: run one command in a fresh sandbox, list, kill, and remove what was left behind."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine
from typing import TypeVar

import click
from rich.console import Console
from rich.table import Table

from sandbox.base import SandboxError, SandboxSpec
from sandbox.registry import get_backend, known_kinds

T = TypeVar("T")

_KIND = click.option("--kind", default="local", show_default=True, help=f"One of {', '.join(known_kinds())}.")


def _await(work: Coroutine[object, object, T]) -> T:
    try:
        return asyncio.run(work)
    except SandboxError as error:
        raise click.ClickException(str(error)) from error


@click.group(name="sandbox")
def cli() -> None:
    """Look after sandboxes."""


@cli.command(context_settings={"allow_interspersed_args": False})
@_KIND
@click.option("--timeout", default=60.0, show_default=True, type=click.FloatRange(0, 86400, min_open=True), help="Seconds.")
@click.option("--network/--no-network", default=False, help="Share the host's network, its loopback included.")
@click.option("--unsafe", is_flag=True, help="Where the host cannot isolate, run without isolation.")
@click.argument("command", nargs=-1, required=True)
def run(kind: str, timeout: float, network: bool, unsafe: bool, command: tuple[str, ...]) -> None:
    """Run COMMAND in a fresh sandbox; its output and exit code are the command's own. Options stand before COMMAND."""

    def show(stream: str, data: bytes) -> None:
        click.echo(data, nl=False, err=stream == "stderr")

    async def work() -> int:
        backend = get_backend(kind)
        try:
            spec = SandboxSpec(kind=kind, network="open" if network else "none", ttl_s=timeout + 60, unsafe=unsafe)
            sandbox = await backend.create(spec, labels={"made-by": "farmhand sandbox run"})
            try:
                return (await sandbox.run(command, timeout=timeout, on_output=show)).exit_code
            finally:
                await sandbox.kill()
        finally:
            await backend.close()

    sys.exit(_await(work()))


@cli.command(name="ls")
@_KIND
def list_sandboxes(kind: str) -> None:
    """List the live sandboxes of this host."""

    async def work() -> Table:
        backend = get_backend(kind)
        try:
            table = Table("id", "age", "time left", "labels", "limits")
            now = time.time()
            for info in await backend.sandboxes():
                labels, limits = (
                    ", ".join(f"{key}={value}" for key, value in pairs.items()) for pairs in (info.labels, info.limits)
                )
                table.add_row(info.id, f"{now - info.created_at:.0f} s", f"{info.expires_at - now:.0f} s", labels, limits)
            return table
        finally:
            await backend.close()

    Console().print(_await(work()))


@cli.command()
@_KIND
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
def kill(kind: str, ids: tuple[str, ...]) -> None:
    """Remove sandboxes and everything in them."""

    async def work() -> None:
        backend = get_backend(kind)
        try:
            for sandbox_id in ids:
                await (await backend.attach(sandbox_id)).kill()
        finally:
            await backend.close()

    _await(work())


@cli.command()
@_KIND
def gc(kind: str) -> None:
    """Remove sandboxes that have expired or were left behind."""

    async def work() -> list[str]:
        backend = get_backend(kind)
        try:
            return await backend.reap()
        finally:
            await backend.close()

    removed = _await(work())
    click.echo(f"removed {len(removed)}" + "".join(f"\n{sandbox_id}" for sandbox_id in removed))
