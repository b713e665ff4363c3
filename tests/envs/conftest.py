"""Sandboxes for the tests of environments."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest_asyncio

from sandbox.base import Sandbox, SandboxSpec
from sandbox.registry import get_backend

NewSandbox = Callable[[], Awaitable[Sandbox]]


@pytest_asyncio.fixture
async def new_sandbox() -> AsyncIterator[NewSandbox]:
    """Makes fresh local sandboxes; all of them are removed after the test."""
    backend = get_backend("local")
    made: list[Sandbox] = []

    async def create() -> Sandbox:
        made.append(await backend.create(SandboxSpec(ttl_s=300), labels={"made-by": "tests"}))
        return made[-1]

    try:
        yield create
    finally:
        for sandbox in made:
            await sandbox.kill()
        await backend.close()


@pytest_asyncio.fixture
async def sandbox(new_sandbox: NewSandbox) -> Sandbox:
    return await new_sandbox()
