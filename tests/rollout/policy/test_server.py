"""The engine's process: refusals on the wire, its life and its end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from click.testing import CliRunner

from rollout.policy.base import SamplingParams
from rollout.policy.cli import policy as policy_command
from rollout.policy.client import VllmAdmin, VllmPolicy
from tests.rollout.policy.contract import until
from tests.rollout.policy.tiny import MAX_LEN, EngineProcess

PROMPT = [5, 6, 7, 8]


async def _post(url: str, path: str, **kwargs: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession(url) as http, http.post(path, **kwargs) as response:
        return response.status, await response.json()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": []}, "token_ids"),
    ({"token_ids": [300]}, "300 is out of the vocabulary, which has 300 tokens"),
    ({"token_ids": [-1]}, "token_ids.0"),
    ({"token_ids": [10**30]}, "token_ids.0"),
    ({"token_ids": [1], "sampling_params": {"top_k": 10**30}}, "sampling_params.top_k"),
    ({"token_ids": [1], "sampling_params": {"stop_token_ids": [10**30]}}, "sampling_params.stop_token_ids.0"),
    ({"token_ids": ["1"]}, "token_ids.0"),
    ({"token_ids": [1] * MAX_LEN}, "--max-model-len is 1024"),
    ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
    ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ({"token_ids": [1], "sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
    ({"token_ids": [1], "sampling_params": {"n": 2}}, "sampling_params.n"),
    ({"token_ids": [1], "sampling_params": {"logprobs": 5}}, "sampling_params.logprobs"),
    ({"token_ids": [1], "sampling_params": {"stop": ["x"]}}, "sampling_params.stop"),
    ({"token_ids": [1], "sampling_params": {"frequency_penalty": 0.5}}, "sampling_params.frequency_penalty"),
    ({"token_ids": [1], "stream": True, "sampling_params": {"prompt_logprobs": 0}}, "does not go with stream"),
    ({}, "token_ids"),
]


@pytest.mark.parametrize(("body", "what"), REFUSED)
async def test_a_bad_request_is_400_and_says_what_is_wrong(
    engine_process: EngineProcess, body: dict[str, Any], what: str
) -> None:
    status, answer = await _post(engine_process.url, "/inference/v1/generate", json=body)
    assert status == 400
    assert what in answer["error"]["message"]


async def test_bodies_that_are_no_json_and_modes_that_are_none_are_400(engine_process: EngineProcess) -> None:
    url = engine_process.url
    assert (await _post(url, "/inference/v1/generate", data=b"{"))[0] == 400
    assert (await _post(url, "/inference/v1/generate", data=b"[]"))[0] == 400
    status, answer = await _post(url, "/pause?mode=later")
    assert (status, "keep, abort, wait" in answer["error"]["message"]) == (400, True)
    assert (await _post(url, "/pause?clear_cache=maybe"))[0] == 400
    assert (await _post(url, "/no/such/route"))[0] == 404
    async with aiohttp.ClientSession(url) as http, http.get("/is_paused") as response:
        assert await response.json() == {"is_paused": False}


async def test_messages_that_the_template_does_not_take_are_400(engine_process: EngineProcess) -> None:
    status, answer = await _post(engine_process.url, "/tokenize", json={"messages": [{"role": "user"}]})
    assert status == 400
    assert "chat template" in answer["error"]["message"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1e-40},
        {"temperature": 1e-5},
        {"temperature": 1e300},
        {"top_p": 1e-320},
        {"top_k": 2**31 - 1},
        {"seed": -(2**63)},
        {"stop_token_ids": [2**31 - 1]},
    ],
)
async def test_extreme_parameters_are_served(engine_process: EngineProcess, sampling: dict[str, Any]) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "logprobs": 0, **sampling}}
    status, answer = await _post(engine_process.url, "/inference/v1/generate", json=body)
    assert status == 200
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == 4
    assert all(-20 < entry["logprob"] <= 0 and 0 <= entry["token_id"] < 300 for entry in entries)


async def test_updates_out_of_order_are_409(engine_process: EngineProcess) -> None:
    url = engine_process.url
    for path, body in (("/start_weight_update", {}), ("/update_weights", {"update_info": {"path": "/x"}})):
        status, answer = await _post(url, path, json=body)
        assert status == 409
        assert "POST /pause?mode=keep" in answer["error"]["message"]


async def test_abort_goes_by_the_prefixed_id(engine_process: EngineProcess) -> None:
    url = engine_process.url
    body = {"request_id": "mine", "token_ids": PROMPT, "sampling_params": {"max_tokens": 1000}}
    call = asyncio.create_task(_post(url, "/inference/v1/generate", json=body))
    assert (await _post(url, "/abort_requests", json={"request_ids": ["mine"]}))[1]["aborted"] == 0

    async def aborted() -> bool:
        answer = await _post(url, "/abort_requests", json={"request_ids": ["generate-tokens-mine"]})
        return bool(answer[1]["aborted"])

    await until(aborted)
    answer = (await call)[1]
    assert answer["request_id"] == "generate-tokens-mine"
    assert answer["choices"][0]["finish_reason"] == "abort"


async def test_a_client_that_leaves_amid_a_waiting_pause_does_not_hurt(engine_process: EngineProcess) -> None:
    url = engine_process.url
    policy, admin = VllmPolicy(url, retry_s=5), VllmAdmin(url, retry_s=5)
    call = asyncio.create_task(policy.generate(PROMPT, SamplingParams(max_tokens=1000, seed=1), request_id="a"))

    async def running() -> bool:
        return (await admin.load()).running == 1

    await until(running)
    async with aiohttp.ClientSession(url) as http:
        with pytest.raises(TimeoutError):
            async with http.post("/pause?mode=wait", timeout=aiohttp.ClientTimeout(0.05)):
                pass
    assert len((await call).token_ids) == 1000

    async def paused() -> bool:
        async with aiohttp.ClientSession(url) as http, http.get("/is_paused") as response:
            return bool((await response.json())["is_paused"])

    await until(paused)
    await admin.resume()
    assert await admin.health()
    await policy.close()
    await admin.close()


async def test_the_busy_seconds_grow_with_work_only(engine_process: EngineProcess) -> None:
    policy, admin = VllmPolicy(engine_process.url), VllmAdmin(engine_process.url)
    idle = [(await admin.load()).busy_s for _ in range(2)]
    assert idle[0] == idle[1]
    await policy.generate(PROMPT, SamplingParams(max_tokens=50), request_id="a")
    after = (await admin.load()).busy_s
    assert after is not None
    assert idle[0] is not None
    assert after > idle[0]
    await policy.close()
    await admin.close()


async def test_it_listens_on_loopback_and_says_where(tiny_folder: Path, tmp_path: Path) -> None:
    with EngineProcess(tiny_folder, tmp_path) as engine:
        found = engine.wait_ready()
        assert found["pid"] == engine.process.pid
        assert found["url"] == f"http://127.0.0.1:{found['port']}"
        listening = [
            each.laddr.ip
            for each in psutil.Process(engine.process.pid).net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        ]
        assert listening == ["127.0.0.1"]
        assert set(os.listdir(tmp_path)) == {"port.json", "engine.log"}
        admin = VllmAdmin(engine.url)
        assert await admin.version() == 0

        # SIGTERM amid a request: it gets what there is, and the process ends well.
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1000, "logprobs": 0}}
        call = asyncio.create_task(_post(engine.url, "/inference/v1/generate", json=body))

        async def running() -> bool:
            return (await admin.load()).generated_tokens > 5

        await until(running)
        await admin.close()
        assert await asyncio.to_thread(engine.end, signal.SIGTERM) == 0
        status, answer = await call
        assert status == 200
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert 5 < len(answer["choices"][0]["token_ids"]) < 1000
        assert f"serving {tiny_folder} at {found['url']}" in engine.log.read_text()
        assert "Traceback" not in engine.log.read_text()


async def test_a_call_survives_the_death_and_restart_of_its_server(tiny_folder: Path, tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=900, seed=3)
    with EngineProcess(tiny_folder, tmp_path) as first:
        port = first.wait_ready()["port"]
        policy, admin = VllmPolicy(first.url, retry_s=90), VllmAdmin(first.url)
        whole = await policy.generate(PROMPT, sampling, request_id="whole")
        before = (await admin.load()).generated_tokens
        call = asyncio.create_task(policy.generate(PROMPT, sampling, request_id="broken"))

        async def moving() -> bool:
            return (await admin.load()).generated_tokens > before + 5

        await until(moving)
        await admin.close()
        assert not call.done()
        assert await asyncio.to_thread(first.end, signal.SIGKILL) == -signal.SIGKILL
    with EngineProcess(tiny_folder, tmp_path, "--port", str(port)):
        done = await asyncio.wait_for(call, 90)
    assert done.token_ids == whole.token_ids
    assert done.logprobs == whole.logprobs
    assert done.finish_reason == "length"
    await policy.close()


def test_a_port_that_is_taken_ends_with_a_reason(engine_process: EngineProcess, tiny_folder: Path) -> None:
    port = engine_process.wait_ready()["port"]
    result = CliRunner().invoke(policy_command, ["serve", str(tiny_folder), "--port", str(port), "--max-num-seqs", "1"])
    assert result.exit_code == 1
    assert f"--port {port}: " in result.output
    assert "in use" in result.output


@pytest.mark.parametrize(
    ("model", "options", "what"),
    [
        ("no-such-model", (), "known are quickstart, smollm2"),
        (None, ("--max-model-len", "5000"), "the model has 1024 positions"),
    ],
)
def test_what_cannot_be_served_ends_with_a_reason(
    tiny_folder: Path, model: str | None, options: tuple[str, ...], what: str
) -> None:
    result = CliRunner().invoke(policy_command, ["serve", model or str(tiny_folder), *options])
    assert result.exit_code != 0
    assert what in result.output
