"""vLLM's JSON for the engine: requests parsed and checked, answers written. No sockets, no threads.

Guarantees: a body that cannot be served is a `BadRequest` that says what was found, what is allowed, and which setting of
the server decides it. Fields of vLLM's that change nothing here pass; those that would change the result are refused.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout.policy.engine.batch import Progress, Request

PREFIX = "generate-tokens-"
"""vLLM's prefix of request ids: /abort_requests goes by the prefixed id."""

_INT32 = 2**31 - 1
COLDEST = 1e-5
"""Below this temperature is greedy, as in vLLM: logits divided by less would not be finite."""

_Token = Annotated[int, Field(ge=0, le=_INT32, strict=True)]


class BadRequest(Exception):
    """A request that is refused; the message is for its sender."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class SamplingBody(_Body):
    max_tokens: int | None = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, le=_INT32)
    seed: int | None = None
    stop_token_ids: Sequence[_Token] | None = Field(default=(), max_length=256)
    ignore_eos: bool = False
    logprobs: Literal[0] | None = None
    prompt_logprobs: Literal[0] | None = None
    n: Literal[1] = 1
    min_tokens: Literal[0] = 0
    min_p: Literal[0] = 0
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    repetition_penalty: Literal[1] = 1
    stop: None = None
    logit_bias: None = None
    bad_words: None = None
    allowed_token_ids: None = None
    structured_outputs: None = None


class GenerateBody(_Body):
    token_ids: Sequence[_Token] = Field(min_length=1)
    request_id: str | None = Field(default=None, max_length=256)
    model: str | None = None
    sampling_params: SamplingBody = SamplingBody()
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    priority: int = 0
    stream: bool = False
    output_mode: Literal["tokens"] = "tokens"


class UpdateInfo(_Body):
    path: str = Field(min_length=1)


class UpdateBody(_Body):
    update_info: UpdateInfo | Annotated[list[UpdateInfo], Field(min_length=1, max_length=1)]


class FinishBody(_Body):
    weight_version: str | None = Field(default=None, min_length=1, max_length=256)


class VersionBody(_Body):
    new_version: str = Field(min_length=1, max_length=256)


class AbortBody(_Body):
    request_ids: Sequence[str] | None = None


class TokenizeBody(_Body):
    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True


class DetokenizeBody(_Body):
    tokens: Sequence[_Token]


def parse(kind: type[_Body], data: bytes) -> Any:
    """A body of `kind`. Raises `BadRequest` naming every field that is wrong."""
    try:
        return kind.model_validate_json(data or b"{}")
    except ValidationError as error:
        found = [
            f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}, found {_short(e['input'])}" for e in error.errors()[:5]
        ]
        raise BadRequest("; ".join(found)) from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def to_request(
    body: GenerateBody, *, serial: str, vocab_size: int, max_model_len: int, eos: frozenset[int], seed: int
) -> Request:
    """The engine's request. `serial` and `seed` serve where the body has none. Raises `BadRequest`."""
    sampling = body.sampling_params
    prompt = np.array(body.token_ids, np.int64)
    if prompt.max() >= vocab_size:
        raise BadRequest(f"token_ids: {int(prompt.max())} is out of the vocabulary, which has {vocab_size} tokens")
    if len(prompt) >= max_model_len:
        raise BadRequest(
            f"token_ids: {len(prompt)} tokens leave no room for another; the server's --max-model-len is {max_model_len}"
        )
    most = max_model_len - len(prompt)
    # As in vLLM: what would go beyond the model's length ends there, with "length".
    limit = len(prompt) + (most if sampling.max_tokens is None else min(sampling.max_tokens, most))
    salt = 0
    if body.cache_salt:
        salt = int.from_bytes(hashlib.blake2b(body.cache_salt.encode(), digest_size=7).digest(), "little")
    return Request(
        id=PREFIX + (body.request_id or serial),
        prompt=prompt.astype(np.int32),
        limit=limit,
        temperature=sampling.temperature if sampling.temperature >= COLDEST else 0.0,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        seed=(seed if sampling.seed is None else sampling.seed) % 2**64,
        stop_ids=frozenset(sampling.stop_token_ids or ()) | (frozenset() if sampling.ignore_eos else eos),
        salt=salt,
        priority=body.priority,
        prompt_logprobs=sampling.prompt_logprobs is not None,
        stream=body.stream,
    )


def _choice(news: Progress, with_logprobs: bool, eos: frozenset[int]) -> str:
    """One entry of `choices`. Written by hand: this is most of what the server writes, some hundred objects an answer."""
    content = "null"
    if with_logprobs:
        tokens = [
            f'{{"token_id":{token},"logprob":{logprob!r},"rank":{rank}}}'
            for token, logprob, rank in zip(news.token_ids, news.logprobs, news.ranks, strict=True)
        ]
        content = '{"content":[' + ",".join([f'{token[:-1]},"top_logprobs":[{token}]}}' for token in tokens]) + "]}"
    stop_reason = None if news.stop_reason in eos else news.stop_reason
    versions = [{"version": version, "start": start, "end": end} for version, start, end in news.spans]
    return (
        f'{{"index":0,"finish_reason":{json.dumps(news.finish_reason or None)},"stop_reason":{json.dumps(stop_reason)},'
        f'"token_ids":{json.dumps(news.token_ids)},"routed_experts":null,"sampling_mask":null,'
        f'"weight_versions":{json.dumps(versions) if news.finish_reason else "null"},"logprobs":{content}}}'
    )


def _usage(prompt: int, generated: int) -> str:
    return f'{{"prompt_tokens":{prompt},"completion_tokens":{generated},"total_tokens":{prompt + generated}}}'


def render_answer(news: Progress, model: str, with_logprobs: bool, eos: frozenset[int]) -> str:
    """The whole answer to a call that does not stream."""
    request = news.request
    return (
        f'{{"request_id":{json.dumps(request.id)},"model":{json.dumps(model)},"created":{int(time.time())},'
        f'"usage":{_usage(len(request.prompt), len(news.token_ids))},"output_mode":"tokens",'
        f'"choices":[{_choice(news, with_logprobs, eos)}],"prompt_logprobs":{_prompt_logprobs(request)}}}'
    )


def render_event(news: Progress, generated: int, with_logprobs: bool, eos: frozenset[int]) -> str:
    """One server-sent event of a stream; `generated` counts the tokens so far."""
    request = news.request
    return (
        f'data: {{"request_id":{json.dumps(request.id)},"usage":{_usage(len(request.prompt), generated)},'
        f'"output_mode":"tokens","choices":[{_choice(news, with_logprobs, eos)}]}}\n\n'
    )


def _prompt_logprobs(request: Request) -> str:
    """vLLM's shape: null for the first token, then one object by token id for each."""
    if request.scores is None or request.score_ranks is None:
        return "null"
    entries = zip(request.prompt[1:].tolist(), request.scores[1:].tolist(), request.score_ranks[1:].tolist(), strict=True)
    return "[null" + "".join(f',{{"{token}":{{"logprob":{lp!r},"rank":{rank}}}}}' for token, lp, rank in entries) + "]"
