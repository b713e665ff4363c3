"""The client against a server that is away, restarts, is overloaded, dies mid-request, or talks nonsense."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from rollout.policy import client as client_module
from rollout.policy.base import PolicyError, PolicyUnavailable, SamplingParams
from rollout.policy.client import VllmAdmin, VllmPolicy, parse_completion, parse_metrics, parse_version

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def answer(tokens: list[int], reason: str = "length", version: str = "3") -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -0.5 * token, "rank": 1, "top_logprobs": []} for token in tokens]
    spans = [{"version": version, "start": 0, "end": len(tokens)}] if tokens else []
    choice = {
        "index": 0,
        "finish_reason": reason,
        "token_ids": tokens,
        "weight_versions": spans,
        "logprobs": {"content": content},
    }
    return {"request_id": "generate-tokens-x", "choices": [choice]}


class Stub:
    """A server that plays one handler after the other, and the last one for ever; it keeps the bodies of all requests."""

    def __init__(self) -> None:
        self.script: list[Handler] = []
        self.bodies: list[Any] = []
        self.headers: list[Any] = []
        self.arrived = asyncio.Event()
        self._transports: list[asyncio.Transport] = []
        self._runner: web.AppRunner | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(request.headers)
        self.bodies.append(await request.json() if request.can_read_body else request.path_qs)
        assert request.transport is not None
        self._transports.append(request.transport)
        self.arrived.set()
        handler = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return await handler(request)

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        """As a process that is killed: its connections are reset."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            for transport in self._transports:
                transport.abort()
            await runner.cleanup()


def says(data: Any, status: int = 200) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(data, status=status)

    return handler


async def dies(request: web.Request) -> web.StreamResponse:
    """The connection breaks amid the answer."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"request_id":')
    assert request.transport is not None
    request.transport.abort()
    return response


async def hangs(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.fixture
async def stub(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stub]:
    monkeypatch.setattr(client_module, "FIRST_DELAY_S", 0.01)
    server = Stub()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def policy(stub: Stub) -> AsyncIterator[VllmPolicy]:
    made = VllmPolicy(stub.url, retry_s=20, request_timeout_s=20, model="policy")
    yield made
    await made.close()


async def test_the_request_is_the_wires(stub: Stub) -> None:
    stub.script = [says(answer([1, 2, 3]))]
    policy = VllmPolicy(stub.url + "/", model='we"ird', api_key="secret")
    sampling = SamplingParams(max_tokens=3, temperature=0.7, top_p=0.9, top_k=5, seed=4, stop_token_ids=(2, 9))
    done = await policy.generate([7, 8], sampling, request_id='ep"1', priority=2)
    await policy.close()
    assert stub.bodies == [
        {
            "request_id": 'ep"1',
            "model": 'we"ird',
            "priority": 2,
            "sampling_params": {
                **{"max_tokens": 3, "temperature": 0.7, "logprobs": 0, "top_p": 0.9, "top_k": 5, "seed": 4},
                "stop_token_ids": [2, 9],
            },
            "stream": False,
            "token_ids": [7, 8],
        }
    ]
    assert stub.headers[0]["Authorization"] == "Bearer secret"
    assert done.token_ids == (1, 2, 3)
    assert done.logprobs == (-0.5, -1.0, -1.5)
    assert done.versions == ((3, 3),)
    assert done.timing["policy"] > 0


@pytest.mark.parametrize("status", [429, 500, 502, 503])
async def test_an_overloaded_server_is_asked_again(stub: Stub, policy: VllmPolicy, status: int) -> None:
    stub.script = [says({"error": {"message": "busy"}}, status), says({}, status), says(answer([1]))]
    done = await policy.generate([7], SamplingParams(max_tokens=1), request_id="a")
    assert done.token_ids == (1,)
    assert len(stub.bodies) == 3


@pytest.mark.parametrize("status", [400, 403, 404, 409])
async def test_a_refusal_is_an_error_at_once_with_the_reason(stub: Stub, policy: VllmPolicy, status: int) -> None:
    stub.script = [says({"error": {"message": "token_ids: too many"}}, status)]
    with pytest.raises(
        PolicyError, match=rf"{stub.url}/inference/v1/generate answered {status}: token_ids: too many"
    ) as info:
        await policy.generate([7], SamplingParams(max_tokens=1), request_id="a")
    assert not isinstance(info.value, PolicyUnavailable)
    assert len(stub.bodies) == 1


async def test_a_connection_that_breaks_amid_the_answer_is_tried_again(stub: Stub, policy: VllmPolicy) -> None:
    stub.script = [dies, dies, says(answer([1, 2]))]
    assert (await policy.generate([7], SamplingParams(max_tokens=2), request_id="a")).token_ids == (1, 2)


async def test_a_server_that_is_away_is_waited_for(stub: Stub, policy: VllmPolicy) -> None:
    await stub.stop()
    call = asyncio.create_task(policy.generate([7], SamplingParams(max_tokens=1), request_id="a"))
    await asyncio.sleep(0)
    stub.script = [says(answer([1]))]
    await stub.start()
    assert (await asyncio.wait_for(call, 20)).token_ids == (1,)


async def test_a_server_that_restarts_amid_a_call_is_asked_again(stub: Stub, policy: VllmPolicy) -> None:
    stub.script = [hangs, says(answer([1]))]
    call = asyncio.create_task(policy.generate([7], SamplingParams(max_tokens=1), request_id="a"))
    await stub.arrived.wait()
    await stub.stop()
    await stub.start()
    assert (await asyncio.wait_for(call, 20)).token_ids == (1,)
    assert len(stub.bodies) == 2


async def test_a_server_that_hangs_is_given_up_on_and_asked_again(stub: Stub) -> None:
    stub.script = [hangs, says(answer([1]))]
    policy = VllmPolicy(stub.url, retry_s=20, request_timeout_s=0.1)
    assert (await policy.generate([7], SamplingParams(max_tokens=1), request_id="a")).token_ids == (1,)
    await policy.close()


async def test_an_unavailable_server_is_named_with_the_settings(stub: Stub) -> None:
    await stub.stop()
    policy = VllmPolicy(stub.url, retry_s=0.05)
    with pytest.raises(PolicyUnavailable) as info:
        await policy.generate([7], SamplingParams(max_tokens=1), request_id="a")
    await policy.close()
    for part in (stub.url, "policy.url", "policy.retry_s = 0.05", "attempts"):
        assert part in str(info.value)


async def test_the_budget_ends_an_overloaded_server_too(stub: Stub) -> None:
    stub.script = [says({"error": {"message": "engine is dead"}}, 500)]
    policy = VllmPolicy(stub.url, retry_s=0.05)
    with pytest.raises(PolicyUnavailable, match="engine is dead"):
        await policy.generate([7], SamplingParams(max_tokens=1), request_id="a")
    await policy.close()


@pytest.mark.parametrize("url", ["localhost:1", "ftp://127.0.0.1", "http://", "nonsense"])
async def test_a_url_that_is_none_is_an_error_at_once_that_names_the_setting(url: str) -> None:
    policy = VllmPolicy(url, retry_s=60)
    with pytest.raises(PolicyError, match=r"policy\.url"):
        await asyncio.wait_for(policy.generate([7], SamplingParams(max_tokens=1), request_id="a"), 20)
    await policy.close()


async def test_an_unasked_abort_is_gone_on_from(stub: Stub, policy: VllmPolicy) -> None:
    stub.script = [
        says(answer([1, 2], "abort", "3")),
        says(answer([], "abort")),
        says(answer([4], "abort", "4")),
        says(answer([5, 6], "length", "4")),
    ]
    done = await policy.generate([7], SamplingParams(max_tokens=5, seed=2), request_id="a")
    assert done.token_ids == (1, 2, 4, 5, 6)
    assert done.logprobs == (-0.5, -1.0, -2.0, -2.5, -3.0)
    assert done.versions == ((3, 2), (4, 3))
    assert done.finish_reason == "length"
    assert [body["token_ids"] for body in stub.bodies] == [[7], [7, 1, 2], [7, 1, 2], [7, 1, 2, 4]]
    assert [body["sampling_params"]["max_tokens"] for body in stub.bodies] == [5, 3, 3, 2]
    ids = [body["request_id"] for body in stub.bodies]
    assert ids[0] != ids[1] != ids[3] != ids[0]


async def test_an_abort_at_the_last_token_is_the_end(stub: Stub, policy: VllmPolicy) -> None:
    stub.script = [says(answer([1, 2], "abort"))]
    done = await policy.generate([7], SamplingParams(max_tokens=2), request_id="a")
    assert (done.token_ids, done.finish_reason) == ((1, 2), "length")
    assert len(stub.bodies) == 1


async def test_aborts_without_a_token_are_bounded_by_the_budget(stub: Stub) -> None:
    stub.script = [says(answer([], "abort"))]
    policy = VllmPolicy(stub.url, retry_s=0.05)
    with pytest.raises(PolicyUnavailable, match="aborted the request before its first token"):
        await policy.generate([7], SamplingParams(max_tokens=2), request_id="a")
    await policy.close()


async def test_cancelling_closes_the_connection(stub: Stub, policy: VllmPolicy) -> None:
    gone = asyncio.Event()

    async def waits(request: web.Request) -> web.StreamResponse:
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        raise AssertionError

    stub.script = [waits]
    call = asyncio.create_task(policy.generate([7], SamplingParams(max_tokens=2), request_id="a"))
    await stub.arrived.wait()
    call.cancel()
    await asyncio.wait_for(gone.wait(), 20)


def _changed(**choice: Any) -> dict[str, Any]:
    whole = answer([1, 2])
    whole["choices"][0].update(choice)
    return whole


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ({}, "choices"),
        ([], "without"),
        (_changed(logprobs=None), "without"),
        (_changed(logprobs={"content": [{"logprob": -1.0}]}), "2 tokens, 1 log-probs"),
        (_changed(weight_versions=None), "cover 0"),
        (_changed(weight_versions=[{"version": "1", "start": 0, "end": 1}]), "cover 1"),
        (_changed(weight_versions=[{"version": "1", "start": 1, "end": 2}]), "cover 0"),
        (_changed(weight_versions=[{"version": "v1", "start": 0, "end": 2}]), "'v1'"),
        (_changed(finish_reason="error"), "'error'"),
        (_changed(finish_reason=None), "None"),
    ],
)
def test_an_answer_that_is_not_whole_is_refused(data: Any, what: str) -> None:
    with pytest.raises(PolicyError, match=what) as info:
        parse_completion(data, "http://server")
    assert "http://server" in str(info.value)


async def test_an_answer_that_is_not_json_is_refused(stub: Stub, policy: VllmPolicy) -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>login</html>")

    stub.script = [page]
    with pytest.raises(PolicyError, match="<html>login"):
        await policy.generate([7], SamplingParams(max_tokens=2), request_id="a")


def test_version_labels() -> None:
    assert parse_version("default", "u") == 0
    assert parse_version("12", "u") == 12
    for label in ("v1", "", None, 3, "-1", "١"):
        with pytest.raises(PolicyError, match="u serves weight version"):
            parse_version(label, "u")


async def test_an_update_asks_for_the_pause_then_starts_updates_and_finishes(stub: Stub) -> None:
    stub.script = [says({"is_paused": True}), says({})]
    admin = VllmAdmin(stub.url, retry_s=5)
    await admin.update_weights({"path": "/w"}, 4)
    assert stub.bodies == ["/is_paused", "/start_weight_update", {"update_info": {"path": "/w"}}, {"weight_version": "4"}]
    stub.bodies.clear()
    stub.script = [says({"is_paused": False})]
    with pytest.raises(PolicyError, match="pause"):
        await admin.update_weights({"path": "/w"}, 5)
    assert stub.bodies == ["/is_paused"]
    await admin.close()


async def test_a_failed_update_is_not_repeated(stub: Stub) -> None:
    admin = VllmAdmin(stub.url, retry_s=20)
    stub.script = [says({"is_paused": True}), says({}), says({"error": {"message": "no memory"}}, 500)]
    with pytest.raises(PolicyError, match=r"weight version 4 was not taken.*no memory"):
        await admin.update_weights({"path": "/w"}, 4)
    assert len(stub.bodies) == 3
    stub.script = [says({"is_paused": True}), says({}), dies]
    with pytest.raises(PolicyUnavailable, match=r"policy\.url"):
        await admin.update_weights({"path": "/w"}, 4)
    await admin.close()


async def test_admin_calls_carry_their_arguments(stub: Stub) -> None:
    stub.script = [says({"weight_version": "default"})]
    admin = VllmAdmin(stub.url)
    assert await admin.version() == 0
    await admin.pause("abort", clear_cache=False)
    await admin.resume()
    await admin.init_weight_transfer({"backend": "x"})
    assert stub.bodies == [
        "/weight_info",
        "/pause?mode=abort&clear_cache=false",
        "/resume",
        {"init_info": {"backend": "x"}},
    ]
    await admin.close()


async def test_health_is_false_for_a_server_that_is_away_or_dead(stub: Stub) -> None:
    admin = VllmAdmin(stub.url, retry_s=60)
    stub.script = [says({"error": {"message": "dead"}}, 500)]
    assert not await admin.health()
    await stub.stop()
    assert not await admin.health()
    await admin.close()


def test_vllms_metrics_are_read_too() -> None:
    text = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="policy"} 2.0
vllm:num_requests_running{engine="1",model_name="policy"} 1.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 4.0
vllm:prompt_tokens_total{engine="0",model_name="policy"} 1.5e+06
vllm:generation_tokens_total{engine="0",model_name="policy"} 12.0
"""
    load = parse_metrics(text, "u")
    assert (load.running, load.waiting, load.prompt_tokens, load.generated_tokens) == (3, 4, 1_500_000, 12)
    assert load.busy_s is None
    with pytest.raises(PolicyError, match="u/metrics has no 'vllm:prompt_tokens_total'"):
        parse_metrics("", "u")
