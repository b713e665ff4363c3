"""The in-memory twin holds to the contract, and plays scripts."""

from __future__ import annotations

import pytest

from rollout.policy.base import SamplingParams
from rollout.policy.memory import MemoryPolicy
from tests.rollout.policy.contract import PolicyContract, Target


@pytest.fixture
def target() -> Target:
    twin = MemoryPolicy(tokens_per_tick=1)
    return Target(policy=twin, admin=twin, vocab_size=256, update_info=lambda n: {"path": f"/weights-{n}"})


class TestMemory(PolicyContract):
    pass


async def test_a_script_says_the_tokens_and_stop_tokens_end_it() -> None:
    twin = MemoryPolicy(script=lambda prompt, sampling: [prompt[-1], 7, 8, 9])
    sampling = SamplingParams(max_tokens=3)
    assert (await twin.generate([4], sampling, request_id="a")).token_ids == (4, 7, 8)
    done = await twin.generate([4], SamplingParams(stop_token_ids=(7,)), request_id="b")
    assert (done.token_ids, done.finish_reason) == ((4, 7), "stop")


async def test_updates_are_recorded() -> None:
    twin = MemoryPolicy()
    await twin.pause()
    await twin.update_weights({"path": "/a"}, 3)
    assert twin.updates == [({"path": "/a"}, 3)]
    assert await twin.version() == 3
