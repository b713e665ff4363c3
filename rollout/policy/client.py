"""The policy protocol over vLLM's `/inference/v1/generate`, for vLLM and for the reference engine alike.

Guarantees:

* A server that is away, overloaded or restarting (no connection, 429, 5xx) is tried again with jittered back-off until
  `retry_s` have passed without progress; then `PolicyUnavailable` names it. Any other refusal is a `PolicyError` at once.
* An abort that was not asked for is never taken for an end: the call goes on from the tokens it has. Tokens of a connection
  that broke are lost with it, and the call starts again from there.
* A completion has as many log-probs and versions as tokens, or the answer is refused.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp

from rollout.policy.base import Completion, PauseMode, PolicyError, PolicyUnavailable, SamplingParams, ServerLoad
from rollout.trajectory import Versions

T = TypeVar("T")
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
CONNECT_TIMEOUT_S = 10.0
BROKEN = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
"""What a server that dies, restarts or hangs looks like from here."""


class _Overloaded(Exception):
    """An answer that asks to come again: 429 or 5xx."""


class _Connection:
    """One session to one server; opened at the first call, within the loop that makes it."""

    def __init__(self, url: str, *, api_key: str | None, retry_s: float, request_timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self.retry_s = retry_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = aiohttp.ClientTimeout(total=request_timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Requests wait at the server, in its order; a limit here would only hide them from its scheduler.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
                headers=self._headers,
                timeout=self._timeout,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def fetch(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """One call, no retry: the answer's body. Raises `BROKEN`, `_Overloaded`, `PolicyError`."""
        try:
            async with (self._session or self._open()).request(method, self.url + path, data=body) as response:
                data = await response.read()
        except BROKEN:
            raise
        except aiohttp.ClientError as error:
            # No server gives such an answer by being away: the address is not one, or belongs to something else.
            raise PolicyError(f"{self.url}{path}: {type(error).__name__}: {error}. Check policy.url") from error
        if response.status != 200:
            reason = f"{self.url}{path} answered {response.status}: {_reason(data)}"
            if response.status == 429 or response.status >= 500:
                raise _Overloaded(reason)
            raise PolicyError(reason)
        return data

    async def request(self, method: str, path: str, body: bytes | None = None) -> Any:
        """As `fetch`, with the answer parsed from JSON; None for an empty one."""
        data = await self.fetch(method, path, body)
        try:
            return json.loads(data) if data else None
        except ValueError as error:
            raise PolicyError(f"{self.url}{path} answered {data[:200]!r}, which is not JSON: {error}") from None

    async def retried(self, call: Callable[[], Awaitable[T]]) -> T:
        """`call` until it succeeds, or until `retry_s` have passed since its first failure: `PolicyUnavailable`."""
        attempt = 0
        began = 0.0
        while True:
            try:
                return await call()
            except (*BROKEN, _Overloaded) as error:
                now = time.monotonic()
                began = began if attempt else now
                delay = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2**attempt) * random.uniform(0.5, 1.0)  # noqa: S311 (no secret)
                if now + delay - began > self.retry_s:
                    raise self.unavailable(error, attempt + 1) from error
                attempt += 1
                await asyncio.sleep(delay)

    def unavailable(self, error: BaseException, attempts: int) -> PolicyUnavailable:
        reason = str(error) or type(error).__name__
        return PolicyUnavailable(
            f"no answer from the policy server {self.url} in {attempts} attempts: {reason}. "
            f"Check that it runs and that policy.url is right; policy.retry_s = {self.retry_s:g} says how long to wait"
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _reason(data: bytes) -> str:
    try:
        error = json.loads(data)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return data[:500].decode(errors="replace") or "(no text)"


class VllmPolicy:
    """`Policy` over HTTP. `retry_s` and `request_timeout_s` as in `rollout.config.PolicyConfig`."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        retry_s: float = 120.0,
        request_timeout_s: float = 300.0,
    ) -> None:
        self._http = _Connection(url, api_key=api_key, retry_s=retry_s, request_timeout_s=request_timeout_s)
        self._model = "" if model is None else f'"model":{json.dumps(model)},'

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str, priority: int = 0
    ) -> Completion:
        """See `Policy.generate`."""
        began = time.perf_counter()
        prompt = list(map(int, token_ids))
        done = await self._once(prompt, sampling, sampling.max_tokens, request_id, priority)
        part = 0
        while done.finish_reason == "abort":
            part += 1
            left = sampling.max_tokens - len(done.token_ids)
            if left <= 0:
                done = _join(done, Completion((), (), (), "length"))
                break
            rest = await self._once([*prompt, *done.token_ids], sampling, left, f"{request_id}-{part}", priority)
            done = _join(done, rest)
        timing = {"policy": time.perf_counter() - began}
        return Completion(done.token_ids, done.logprobs, done.versions, done.finish_reason, timing)

    async def _once(
        self, prompt: list[int], sampling: SamplingParams, max_tokens: int, request_id: str, priority: int
    ) -> Completion:
        """One request, retried. An abort with nothing to show for it counts as a failure, so that the budget bounds them."""
        body = self._body(prompt, sampling, max_tokens, request_id, priority)

        async def call() -> Completion:
            completion = parse_completion(await self._http.request("POST", "/inference/v1/generate", body), self._http.url)
            if completion.finish_reason == "abort" and not completion.token_ids:
                raise _Overloaded(f"{self._http.url} aborted the request before its first token")
            return completion

        return await self._http.retried(call)

    def _body(self, prompt: list[int], sampling: SamplingParams, max_tokens: int, request_id: str, priority: int) -> bytes:
        params = f'"max_tokens":{max_tokens},"temperature":{sampling.temperature!r},"logprobs":0'
        if sampling.top_p < 1:
            params += f',"top_p":{sampling.top_p!r}'
        if sampling.top_k:
            params += f',"top_k":{sampling.top_k}'
        if sampling.seed is not None:
            params += f',"seed":{sampling.seed}'
        if sampling.stop_token_ids:
            params += f',"stop_token_ids":{json.dumps(sampling.stop_token_ids)}'
        # vLLM refuses a priority unless it was started to schedule by it.
        order = f'"priority":{priority},' if priority else ""
        return (
            f'{{"request_id":{json.dumps(request_id)},{self._model}{order}"sampling_params":{{{params}}},'
            f'"stream":false,"token_ids":{json.dumps(prompt)}}}'
        ).encode()

    async def close(self) -> None:
        await self._http.close()


class VllmAdmin:
    """`PolicyAdmin` over HTTP. vLLM has these routes with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out only."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        retry_s: float = 120.0,
        timeout_s: float = 300.0,
    ) -> None:
        self._http = _Connection(url, api_key=api_key, retry_s=retry_s, request_timeout_s=timeout_s)
        self._model = model

    @property
    def url(self) -> str:
        return self._http.url

    async def health(self) -> bool:
        """True if the server answers and its engine lives. Never raises for a server that is away."""
        try:
            await self._http.request("GET", "/health")
        except (*BROKEN, _Overloaded, PolicyError):
            return False
        return True

    async def version(self) -> int:
        answer = await self._retried("GET", "/weight_info")
        return parse_version(answer["weight_version"], self._http.url)

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = True) -> None:
        await self._retried("POST", f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}")

    async def resume(self) -> None:
        await self._retried("POST", "/resume")

    async def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Once per server, before the first update."""
        await self._retried("POST", "/init_weight_transfer_engine", {"init_info": dict(init_info)})

    async def update_weights(self, update_info: Mapping[str, Any], version: int) -> None:
        """See `PolicyAdmin.update_weights`. Not retried: what a server that went away holds now is unknown.

        Asks for the pause first, since vLLM does not refuse an update while it runs, but dies of it.
        """
        try:
            state = await self._http.request("GET", "/is_paused")
            if not state["is_paused"]:
                raise PolicyError(f"{self._http.url} is not paused; weights change only while paused, so call pause first")
            await self._http.request("POST", "/start_weight_update")
            await self._http.request("POST", "/update_weights", json.dumps({"update_info": dict(update_info)}).encode())
            await self._http.request("POST", "/finish_weight_update", json.dumps({"weight_version": str(version)}).encode())
        except _Overloaded as error:
            raise PolicyError(f"weight version {version} was not taken: {error}") from error
        except BROKEN as error:
            raise self._http.unavailable(error, 1) from error

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        body: dict[str, Any] = {
            "token_ids": list(map(int, token_ids)),
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
        }
        if self._model is not None:
            body["model"] = self._model
        answer = await self._retried("POST", "/inference/v1/generate", body)
        entries = answer.get("prompt_logprobs")
        if not isinstance(entries, list) or len(entries) != len(token_ids):
            raise PolicyError(f"{self._http.url} gave no prompt_logprobs for {len(token_ids)} tokens: {str(entries)[:200]}")
        try:
            return [
                float(entry[str(int(token))]["logprob"]) for token, entry in zip(token_ids[1:], entries[1:], strict=True)
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise PolicyError(f"{self._http.url} gave prompt_logprobs without {error}: {str(entries)[:200]}") from error

    async def load(self) -> ServerLoad:
        """Read from /metrics, where vLLM has all but the busy seconds."""
        text = await self._http.retried(lambda: self._http.fetch("GET", "/metrics"))
        return parse_metrics(text.decode(errors="replace"), self._http.url)

    async def _retried(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        return await self._http.retried(lambda: self._http.request(method, path, data))

    async def close(self) -> None:
        await self._http.close()


def parse_version(label: Any, url: str) -> int:
    """A weight version's label on the wire: "default" is 0, else a number."""
    if label == "default":
        return 0
    if isinstance(label, str) and label.isascii() and label.isdigit():
        return int(label)
    raise PolicyError(f"{url} serves weight version {label!r}; expected a number, or 'default' before the first push")


def parse_metrics(text: str, url: str) -> ServerLoad:
    """Prometheus' text format, summed over labels. Raises `PolicyError` if a counter that vLLM has too is not in it."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.split("{", 1)[0]
            try:
                sums[name] = sums.get(name, 0.0) + float(value)
            except ValueError:
                raise PolicyError(f"{url}/metrics has a line that is no metric: {line[:200]!r}") from None
    try:
        return ServerLoad(
            prompt_tokens=int(sums["vllm:prompt_tokens_total"]),
            generated_tokens=int(sums["vllm:generation_tokens_total"]),
            running=int(sums["vllm:num_requests_running"]),
            waiting=int(sums["vllm:num_requests_waiting"]),
            busy_s=sums.get("farmhand:busy_seconds_total"),
        )
    except KeyError as error:
        raise PolicyError(f"{url}/metrics has no {error}; expected the metrics of vLLM or of the reference engine") from None


def parse_completion(answer: Any, url: str) -> Completion:
    """The answer of `/inference/v1/generate`. Raises `PolicyError` if it is not whole."""
    try:
        choice = answer["choices"][0]
        token_ids = choice["token_ids"]
        reason = choice["finish_reason"]
        content = choice["logprobs"]["content"] if token_ids else ()
        logprobs = [entry["logprob"] for entry in content]
        spans = choice["weight_versions"] or ()
        runs: list[tuple[int, int]] = []
        covered = 0
        for span in spans:
            if span["start"] != covered:
                break
            covered = span["end"]
            if covered > span["start"]:
                runs.append((parse_version(span["version"], url), covered - span["start"]))
    except (KeyError, IndexError, TypeError) as error:
        raise PolicyError(f"{url} gave an answer without {error}: {str(answer)[:300]}") from error
    n = len(token_ids)
    if len(logprobs) != n or covered != n:
        raise PolicyError(
            f"{url} gave {n} tokens, {len(logprobs)} log-probs and weight versions that cover {covered}: {spans}"
        )
    if reason not in ("stop", "length", "abort"):
        raise PolicyError(f"{url} gave finish_reason {reason!r}; expected stop, length or abort")
    return Completion(tuple(token_ids), tuple(logprobs), tuple(runs), reason)


def _join(first: Completion, second: Completion) -> Completion:
    return Completion(
        first.token_ids + second.token_ids,
        first.logprobs + second.logprobs,
        join_versions(first.versions, second.versions),
        second.finish_reason,
    )


def join_versions(first: Versions, second: Versions) -> Versions:
    """Two run-length lists one after the other."""
    if first and second and first[-1][0] == second[0][0]:
        return (*first[:-1], (first[-1][0], first[-1][1] + second[0][1]), *second[1:])
    return first + second
