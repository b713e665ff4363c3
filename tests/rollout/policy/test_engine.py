"""The reference engine, as a process behind HTTP, holds to the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollout.policy.client import VllmAdmin, VllmPolicy
from tests.rollout.policy.contract import PolicyContract, Target, WireContract
from tests.rollout.policy.tiny import EngineProcess


@pytest.fixture
async def target(engine_process: EngineProcess, tiny_folder: Path) -> AsyncIterator[Target]:
    url = engine_process.url
    policy, admin = VllmPolicy(url, retry_s=5), VllmAdmin(url, retry_s=5)
    yield Target(
        policy=policy,
        admin=admin,
        vocab_size=300,
        update_info=lambda n: {"path": str(tiny_folder.parent / f"weights-{n}.safetensors")},
        url=url,
        long=400,
    )
    await admin.resume()
    await policy.close()
    await admin.close()


class TestEngine(PolicyContract, WireContract):
    pass
