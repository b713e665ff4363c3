"""What every policy server does: one suite, run against the reference engine, its memory twin, and (where installed) vLLM.

A module runs it by subclassing `PolicyContract`, for a server `WireContract` too, and giving a fixture `target`, a fresh
`Target` for every test. The server behind it may be shared, so no test relies on the weight version it finds. Nothing here waits
by time: a test that needs a call in flight reads the server's own counters until it is.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from rollout.policy.base import Completion, Policy, PolicyAdmin, PolicyError, SamplingParams

DEADLINE_S = 60.0
PROMPT = (5, 6, 7, 8, 9, 10, 11, 12)
_serial = itertools.count()


@dataclass(kw_only=True)
class Target:
    """A server under test. `update_info(n)` leads to weight set n, 0 or 1; both have the vocabulary `vocab_size`.

    The model must have no end token, so that long answers stay long.
    """

    policy: Policy
    admin: PolicyAdmin
    vocab_size: int
    update_info: Callable[[int], Mapping[str, Any]]
    url: str | None = None
    """None: there is no HTTP, and the tests of the wire are skipped."""
    exact: bool = True
    """A seed gives the same tokens whatever else the server does. Not so for kernels that depend on the batch's shape."""
    tolerance: float = 1e-4
    """Between log-probs of one text computed twice."""
    long: int = 600
    """Tokens of an answer that takes long enough to be met in flight."""
    model: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


async def generate(target: Target, prompt: Sequence[int] = PROMPT, **sampling: Any) -> Completion:
    params = SamplingParams(**{"max_tokens": 16, "seed": 1, **sampling})
    call = target.policy.generate(prompt, params, request_id=f"contract-{next(_serial)}")
    return await asyncio.wait_for(call, DEADLINE_S)


async def until(condition: Callable[[], Any]) -> None:
    """Ask until the answer is true; the time out is the test's failure."""
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110 (the server has no event to wait for)
            await asyncio.sleep(0)


async def in_flight(target: Target, prompt: Sequence[int] = PROMPT, **sampling: Any) -> asyncio.Task[Completion]:
    """A long call that has made some tokens, and has more to make."""
    before = (await target.admin.load()).generated_tokens
    call = asyncio.create_task(generate(target, prompt, **{"max_tokens": target.long, **sampling}))

    async def moving() -> bool:
        return (await target.admin.load()).generated_tokens >= before + 10

    await until(moving)
    assert not call.done(), "the call is over already: raise Target.long"
    return call


async def push(target: Target, weights: int) -> int:
    """Pause, take weight set `weights`, resume. The new version."""
    await target.admin.pause("keep", clear_cache=True)
    try:
        version = await target.admin.version() + 1
        await target.admin.update_weights(target.update_info(weights), version)
    finally:
        await target.admin.resume()
    return version


def check_whole(completion: Completion, max_tokens: int) -> None:
    n = len(completion.token_ids)
    assert len(completion.logprobs) == n
    assert sum(count for _, count in completion.versions) == n
    assert all(count > 0 for _, count in completion.versions)
    assert all(a[0] != b[0] for a, b in itertools.pairwise(completion.versions))
    assert all(math.isfinite(value) and value <= 1e-6 for value in completion.logprobs)
    assert 1 <= n <= max_tokens
    if completion.finish_reason == "length":
        assert n == max_tokens


class PolicyContract:
    async def test_tokens_come_with_logprobs_and_a_version_each(self, target: Target) -> None:
        done = await generate(target, max_tokens=20)
        check_whole(done, 20)
        assert done.finish_reason == "length"
        assert done.versions == ((await target.admin.version(), 20),)
        assert all(0 <= token < target.vocab_size for token in done.token_ids)

    async def test_it_ends_at_a_stop_token_which_is_the_last(self, target: Target) -> None:
        free = await generate(target, max_tokens=24)
        stop = free.token_ids[10]
        first = free.token_ids.index(stop)
        done = await generate(target, max_tokens=24, stop_token_ids=(stop,))
        check_whole(done, 24)
        assert done.finish_reason == "stop"
        assert done.token_ids[-1] == stop
        assert stop not in done.token_ids[:-1]
        if target.exact:
            assert done.token_ids == free.token_ids[: first + 1]

    async def test_a_seed_repeats_and_another_differs(self, target: Target) -> None:
        first, again, other = [await generate(target, seed=seed, max_tokens=32) for seed in (3, 3, 4)]
        assert first.token_ids == again.token_ids
        assert first.token_ids != other.token_ids

    async def test_without_a_seed_answers_differ(self, target: Target) -> None:
        answers = await asyncio.gather(*(generate(target, seed=None, max_tokens=32) for _ in range(3)))
        assert len({answer.token_ids for answer in answers}) == 3

    async def test_many_calls_at_once_each_get_their_own(self, target: Target) -> None:
        prompts = [(*PROMPT, 20 + n) for n in range(40)]
        lengths = [4 + n % 7 for n in range(40)]
        done = await asyncio.gather(
            *(
                generate(target, prompt, seed=n, max_tokens=length)
                for n, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
            )
        )
        for each, length in zip(done, lengths, strict=True):
            check_whole(each, length)
            assert len(each.token_ids) == length
        if target.exact:
            alone = await generate(target, prompts[7], seed=7, max_tokens=lengths[7])
            assert alone.token_ids == done[7].token_ids

    async def test_logprobs_are_those_of_the_text(self, target: Target) -> None:
        done = await generate(target, max_tokens=24)
        scored = await target.admin.prompt_logprobs([*PROMPT, *done.token_ids])
        assert len(scored) == len(PROMPT) + 24 - 1
        assert scored[len(PROMPT) - 1 :] == pytest.approx(done.logprobs, abs=target.tolerance)

    async def test_cancelling_aborts_on_the_server(self, target: Target) -> None:
        before = (await target.admin.load()).generated_tokens
        call = await in_flight(target)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

        async def idle() -> bool:
            load = await target.admin.load()
            return load.running + load.waiting == 0

        await until(idle)
        assert (await target.admin.load()).generated_tokens - before < target.long

    async def test_a_call_cancelled_while_it_waits_leaves_nothing(self, target: Target) -> None:
        await target.admin.pause("keep")
        call = asyncio.create_task(generate(target))

        async def arrived() -> bool:
            load = await target.admin.load()
            return load.running + load.waiting == 1

        async def gone() -> bool:
            load = await target.admin.load()
            return load.running + load.waiting == 0

        await until(arrived)
        call.cancel()
        await until(gone)
        await target.admin.resume()

    @pytest.mark.parametrize("mode", ["keep", "abort"])
    @pytest.mark.parametrize("clear_cache", [True, False])
    async def test_a_pause_stops_the_tokens_and_a_resume_goes_on(self, target: Target, mode: Any, clear_cache: bool) -> None:
        whole = await generate(target, seed=9, max_tokens=target.long)
        call = await in_flight(target, seed=9)
        await target.admin.pause(mode, clear_cache=clear_cache)
        at = (await target.admin.load()).generated_tokens
        for _ in range(5):
            assert (await target.admin.load()).generated_tokens == at
        assert not call.done()
        await target.admin.resume()
        done = await call
        check_whole(done, target.long)
        assert done.finish_reason == "length"
        assert len(done.versions) == 1
        if target.exact:
            assert done.token_ids == whole.token_ids

    async def test_calls_that_arrive_in_a_pause_wait_for_its_end(self, target: Target) -> None:
        await target.admin.pause("keep")
        call = asyncio.create_task(generate(target))

        async def arrived() -> bool:
            load = await target.admin.load()
            return load.running + load.waiting == 1

        await until(arrived)
        for _ in range(5):
            await target.admin.load()
        assert not call.done()
        await target.admin.resume()
        check_whole(await call, 16)

    @pytest.mark.parametrize("mode", ["keep", "abort"])
    async def test_new_weights_in_flight_show_as_two_versions(self, target: Target, mode: Any) -> None:
        old = await push(target, 0)
        call = await in_flight(target)
        await target.admin.pause(mode, clear_cache=True)
        await target.admin.update_weights(target.update_info(1), old + 1)
        assert await target.admin.version() == old + 1
        await target.admin.resume()
        done = await call
        check_whole(done, target.long)
        assert done.finish_reason == "length"
        assert [version for version, _ in done.versions] == [old, old + 1]
        # What comes after the seam is what the new weights say of this text.
        seam = done.versions[0][1]
        scored = await target.admin.prompt_logprobs([*PROMPT, *done.token_ids])
        assert scored[len(PROMPT) - 1 + seam :] == pytest.approx(done.logprobs[seam:], abs=target.tolerance)

    async def test_a_call_that_waited_through_an_update_is_all_new(self, target: Target) -> None:
        await target.admin.pause("keep")
        call = asyncio.create_task(generate(target))

        async def arrived() -> bool:
            load = await target.admin.load()
            return load.running + load.waiting == 1

        await until(arrived)
        version = await target.admin.version() + 1
        await target.admin.update_weights(target.update_info(0), version)
        await target.admin.resume()
        assert (await call).versions == ((version, 16),)

    async def test_an_update_needs_a_pause(self, target: Target) -> None:
        version = await target.admin.version()
        with pytest.raises(PolicyError, match="pause"):
            await target.admin.update_weights(target.update_info(0), version + 1)
        assert await target.admin.version() == version
        check_whole(await generate(target), 16)

    async def test_a_pause_of_a_paused_server_and_a_resume_of_a_running_one_pass(self, target: Target) -> None:
        for _ in range(2):
            await target.admin.pause("keep")
        for _ in range(2):
            await target.admin.resume()
        check_whole(await generate(target), 16)

    async def test_bad_input_is_refused_and_the_server_lives(self, target: Target) -> None:
        for prompt in ([], [target.vocab_size], [1, 10**9], [-1]):
            with pytest.raises(PolicyError):
                await generate(target, prompt)
        check_whole(await generate(target), 16)

    async def test_health(self, target: Target) -> None:
        assert await target.admin.health()

    async def test_counters_count(self, target: Target) -> None:
        before = await target.admin.load()
        await generate(target, max_tokens=16)
        after = await target.admin.load()
        assert after.generated_tokens - before.generated_tokens == 16
        assert after.prompt_tokens - before.prompt_tokens == len(PROMPT)
        assert (after.running, after.waiting) == (0, 0)


class WireContract:
    """The part of the contract that only a server has: what is on the wire."""

    async def test_an_aborting_pause_answers_with_what_there_is(self, target: Target) -> None:
        async with wire(target) as http:
            call = asyncio.create_task(_post_generate(http, target, target.long))

            async def moving() -> bool:
                return (await target.admin.load()).running > 0

            await until(moving)
            await target.admin.pause("abort")
            answer = await asyncio.wait_for(call, DEADLINE_S)
            await target.admin.resume()
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert len(choice["token_ids"]) < target.long

    async def test_a_stream_ends_with_the_versions(self, target: Target) -> None:
        body = _generate_body(target, 12) | {"stream": True}
        async with wire(target) as http, http.post("/inference/v1/generate", json=body) as response:
            assert response.status == 200
            lines = [line async for line in response.content]
        events = [line.decode().removeprefix("data: ").strip() for line in lines if line.strip()]
        assert events[-1] == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events[:-1]]
        assert sum(len(choice["token_ids"]) for choice in choices) == 12
        assert choices[-1]["finish_reason"] == "length"
        assert [(span["start"], span["end"]) for span in choices[-1]["weight_versions"]] == [(0, 12)]

    async def test_tokenize_and_detokenize_are_inverse(self, target: Target) -> None:
        async with wire(target) as http:
            model = {"model": target.model} if target.model else {}
            async with http.post("/tokenize", json={**model, "prompt": "the quick brown fox"}) as response:
                answer = await response.json()
            assert answer["count"] == len(answer["tokens"])
            async with http.post("/detokenize", json={**model, "tokens": answer["tokens"]}) as response:
                assert (await response.json())["prompt"] == "the quick brown fox"
            messages = [{"role": "user", "content": "the dog"}]
            async with http.post("/tokenize", json={**model, "messages": messages}) as response:
                chat = (await response.json())["tokens"]
            async with http.post("/detokenize", json={**model, "tokens": chat}) as response:
                text = (await response.json())["prompt"]
        assert text == "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n"

    async def test_is_paused_version_and_models_answer(self, target: Target) -> None:
        async with wire(target) as http:
            for paused in (True, False):
                await (target.admin.pause("keep") if paused else target.admin.resume())
                async with http.get("/is_paused") as response:
                    assert await response.json() == {"is_paused": paused}
            async with http.get("/version") as response:
                assert (await response.json())["version"]
            async with http.get("/v1/models") as response:
                assert (await response.json())["data"][0]["max_model_len"] > target.long


def wire(target: Target) -> aiohttp.ClientSession:
    """The server without a client of ours in between."""
    assert target.url is not None
    return aiohttp.ClientSession(target.url, headers=target.headers, timeout=aiohttp.ClientTimeout(DEADLINE_S))


def _generate_body(target: Target, max_tokens: int) -> dict[str, Any]:
    model = {"model": target.model} if target.model else {}
    return {**model, "token_ids": list(PROMPT), "sampling_params": {"max_tokens": max_tokens, "logprobs": 0, "seed": 1}}


async def _post_generate(http: aiohttp.ClientSession, target: Target, max_tokens: int) -> Any:
    async with http.post("/inference/v1/generate", json=_generate_body(target, max_tokens)) as response:
        assert response.status == 200
        return await response.json()
