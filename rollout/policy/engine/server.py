"""The engine's HTTP side: vLLM's routes over aiohttp, and the process around them.

Guarantees:

* Listens on loopback unless told otherwise; bodies are bounded; nothing is read from disk but safetensors files.
* A client that goes away aborts its request. SIGTERM and SIGINT end the process with status 0, requests with "abort".
* When the engine dies, /health answers 500 and the process ends with an error that carries the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from jinja2 import TemplateError

from rollout.policy.engine import wire
from rollout.policy.engine.batch import Progress, Request
from rollout.policy.engine.core import Engine, EngineDead, PauseMode, Refused
from rollout.policy.engine.metrics import render_metrics
from rollout.policy.engine.weights import BadWeights
from rollout.policy.engine.wire import BadRequest

T = TypeVar("T")
MODES: Mapping[str, PauseMode] = {"keep": "keep", "abort": "abort", "wait": "wait"}
MAX_BODY = 64 * 2**20
"""Bytes: a million token ids take about 8 MB."""


class PolicyServer:
    """Routes of one engine. `model` is the name that /v1/models and answers show."""

    def __init__(self, engine: Engine, tokenizer: Any, model: str, eos: frozenset[int]) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model = model
        self.eos = eos
        self.dead = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._news: dict[Request, asyncio.Queue[Progress | None]] = {}
        self._serial = itertools.count()

    def start(self) -> None:
        self.engine.start(
            lambda news: self._threadsafe(self._take, news),
            lambda: self._threadsafe(self._engine_ended),
        )

    def _threadsafe(self, callback: Callable[..., None], *args: Any) -> None:
        # The loop may be closed already when the engine stops last.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)

    def _take(self, news: list[Progress]) -> None:
        for item in news:
            queue = self._news.get(item.request)
            if queue is not None:
                queue.put_nowait(item)

    def _engine_ended(self) -> None:
        self.dead.set()
        for queue in self._news.values():
            queue.put_nowait(None)

    def abort_all(self) -> None:
        """End every request with what it has."""
        with contextlib.suppress(EngineDead):
            self.engine.abort(list(self._news))

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_errors])
        app.add_routes(
            [
                web.post("/inference/v1/generate", self.generate),
                web.post("/inference/v1/abort_requests", self.abort_requests),
                web.post("/abort_requests", self.abort_requests),
                web.post("/pause", self.pause),
                web.post("/resume", self.resume),
                web.get("/is_paused", self.is_paused),
                web.post("/init_weight_transfer_engine", self.init_weight_transfer),
                web.post("/start_weight_update", self.start_weight_update),
                web.post("/update_weights", self.update_weights),
                web.post("/finish_weight_update", self.finish_weight_update),
                web.post("/update_weight_version", self.update_weight_version),
                web.get("/weight_info", self.weight_info),
                web.post("/reset_prefix_cache", self.reset_prefix_cache),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                web.get("/health", self.health),
                web.get("/ping", self.health),
                web.get("/version", self.version),
                web.get("/v1/models", self.models),
                web.get("/metrics", self.metrics),
                web.get("/server_info", self.server_info),
            ]
        )
        return app

    # Generation

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body: wire.GenerateBody = wire.parse(wire.GenerateBody, await http.read())
        request = wire.to_request(
            body,
            serial=str(next(self._serial)),
            vocab_size=self.engine.vocab_size,
            max_model_len=self.engine.options.max_model_len,
            eos=self.eos,
            seed=secrets.randbits(63),
        )
        if request.stream and request.prompt_logprobs:
            raise BadRequest("sampling_params.prompt_logprobs does not go with stream")
        with_logprobs = body.sampling_params.logprobs is not None
        queue: asyncio.Queue[Progress | None] = asyncio.Queue()
        self._news[request] = queue
        try:
            self.engine.submit(request)
            if request.stream:
                return await self._stream(http, queue, with_logprobs)
            text = wire.render_answer(await self._next(queue), self.model, with_logprobs, self.eos)
            return web.Response(text=text, content_type="application/json")
        except BaseException:
            # The client has gone, or the answer failed: nobody waits for the rest.
            with contextlib.suppress(EngineDead):
                self.engine.abort([request])
            raise
        finally:
            del self._news[request]

    async def _next(self, queue: asyncio.Queue[Progress | None]) -> Progress:
        news = await queue.get()
        if news is None:
            raise EngineDead(self._cause())
        return news

    async def _stream(
        self, http: web.Request, queue: asyncio.Queue[Progress | None], with_logprobs: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        generated = 0
        while True:
            news = await self._next(queue)
            generated += len(news.token_ids)
            await response.write(wire.render_event(news, generated, with_logprobs, self.eos).encode())
            if news.finish_reason:
                break
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def abort_requests(self, http: web.Request) -> web.Response:
        body: wire.AbortBody = wire.parse(wire.AbortBody, await http.read())
        wanted = set(body.request_ids or ())
        chosen = [request for request in self._news if not wanted or request.id in wanted]
        self.engine.abort(chosen)
        return web.json_response({"status": "aborted", "aborted": len(chosen)})

    # Pauses and weights

    async def _command(self, command: Callable[[], T]) -> T:
        return await self._settled(self.engine.call(command))

    async def _settled(self, future: Future[T]) -> T:
        return await asyncio.wrap_future(future)

    async def pause(self, http: web.Request) -> web.Response:
        mode = http.query.get("mode", "abort")
        if mode not in MODES:
            raise BadRequest(f"mode: {mode!r}, allowed are {', '.join(MODES)}")
        await self._settled(self.engine.pause(MODES[mode], _flag(http, "clear_cache", True)))
        return web.json_response({"status": "paused"})

    async def resume(self, http: web.Request) -> web.Response:
        await self._command(self.engine.resume)
        return web.json_response({"status": "resumed"})

    async def is_paused(self, http: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.engine.paused})

    async def init_weight_transfer(self, http: web.Request) -> web.Response:
        return web.json_response({"message": "Weight transfer initialized"})

    async def start_weight_update(self, http: web.Request) -> web.Response:
        await self._command(self.engine.start_update)
        return web.json_response({"message": "Weight update started"})

    async def update_weights(self, http: web.Request) -> web.Response:
        body: wire.UpdateBody = wire.parse(wire.UpdateBody, await http.read())
        info = body.update_info[0] if isinstance(body.update_info, list) else body.update_info
        await self._command(lambda: self.engine.stage_update(Path(info.path)))
        return web.json_response({"message": "Weights updated"})

    async def finish_weight_update(self, http: web.Request) -> web.Response:
        body: wire.FinishBody = wire.parse(wire.FinishBody, await http.read())
        await self._command(lambda: self.engine.finish_update(body.weight_version))
        return web.json_response({"message": "Weight update finished"})

    async def update_weight_version(self, http: web.Request) -> web.Response:
        body: wire.VersionBody = wire.parse(wire.VersionBody, await http.read())
        await self._command(lambda: self.engine.set_version(body.new_version))
        return web.json_response({"success": True, "new_version": body.new_version})

    async def weight_info(self, http: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.engine.version})

    async def reset_prefix_cache(self, http: web.Request) -> web.Response:
        await self._command(self.engine.clear_cache)
        return web.json_response({"success": True})

    # Text

    async def tokenize(self, http: web.Request) -> web.Response:
        body: wire.TokenizeBody = wire.parse(wire.TokenizeBody, await http.read())
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("expected one of prompt and messages")
        if body.messages is not None:
            try:
                ids = self.tokenizer.apply_chat_template(
                    list(body.messages),
                    tools=body.tools,
                    add_generation_prompt=body.add_generation_prompt,
                    tokenize=True,
                    return_dict=True,
                )["input_ids"]
            except (TemplateError, TypeError, ValueError, KeyError) as error:
                raise BadRequest(f"messages: the model's chat template does not take them: {error}") from None
        else:
            ids = self.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens)["input_ids"]
        answer = {"count": len(ids), "max_model_len": self.engine.options.max_model_len, "tokens": ids, "token_strs": None}
        return web.json_response(answer)

    async def detokenize(self, http: web.Request) -> web.Response:
        body: wire.DetokenizeBody = wire.parse(wire.DetokenizeBody, await http.read())
        return web.json_response({"prompt": self.tokenizer.decode(list(body.tokens))})

    # State

    def _cause(self) -> str:
        return f"the engine has ended: {self.engine.failure!r}"

    async def health(self, http: web.Request) -> web.Response:
        if self.engine.ended.is_set():
            return _error(500, self._cause())
        return web.Response()

    async def version(self, http: web.Request) -> web.Response:
        from importlib.metadata import version

        return web.json_response({"version": f"farmhand-{version('farmhand')}"})

    async def models(self, http: web.Request) -> web.Response:
        entry = {
            "id": self.model,
            "object": "model",
            "owned_by": "farmhand",
            "max_model_len": self.engine.options.max_model_len,
        }
        return web.json_response({"object": "list", "data": [entry]})

    async def metrics(self, http: web.Request) -> web.Response:
        counters = await self._command(self.engine.snapshot)
        return web.Response(text=render_metrics(counters, self.engine.paused))

    async def server_info(self, http: web.Request) -> web.Response:
        options = self.engine.options
        return web.json_response(
            {
                "engine": "farmhand",
                "model": self.model,
                "vocab_size": self.engine.vocab_size,
                "max_model_len": options.max_model_len,
                "max_num_seqs": options.max_num_seqs,
                "logprobs_mode": "processed_logprobs",
            }
        )


def _flag(http: web.Request, name: str, default: bool) -> bool:
    text = http.query.get(name, str(default)).lower()
    if text not in ("true", "false", "1", "0"):
        raise BadRequest(f"{name}: {text!r}, allowed are true and false")
    return text in ("true", "1")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "BadRequestError", "code": status}}, status=status)


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Exceptions that have an answer, as vLLM's error objects."""
    try:
        return await handler(request)
    except (BadRequest, BadWeights) as error:
        return _error(400, str(error))
    except Refused as error:
        return _error(409, str(error))
    except EngineDead as error:
        return _error(500, str(error))
    except web.HTTPException as error:
        return _error(error.status, error.text or error.reason)


async def serve(
    server: PolicyServer, host: str, port: int, on_listening: Callable[[str], None], *, paused: bool = False
) -> None:
    """Run until SIGTERM or SIGINT; raises the engine's exception if it dies. `on_listening` gets the base URL."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=2.0)
    await runner.setup()
    with socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=4096
    ) as listener:
        site = web.SockSite(runner, listener, backlog=4096)
        server.start()
        try:
            if paused:
                await asyncio.wrap_future(server.engine.pause("keep", False))
            await site.start()
            shown = f"[{host}]" if ":" in host else host
            on_listening(f"http://{shown}:{listener.getsockname()[1]}")
            waits = [asyncio.create_task(event.wait()) for event in (stop, server.dead)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            server.abort_all()
        finally:
            await runner.cleanup()
            await asyncio.to_thread(server.engine.stop)
    if server.engine.failure is not None:
        raise server.engine.failure


def write_port_file(path: Path, url: str) -> None:
    """The URL and process id as JSON, whole or not at all: whoever polls for the file reads a complete one."""
    data = json.dumps({"url": url, "port": int(url.rsplit(":", 1)[1]), "pid": os.getpid()})
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        file.write(data + "\n")
    Path(file.name).replace(path)
