"""The engine: one thread that runs steps while there is work, and commands between steps.

Guarantees:

* The model, the cache and the batch are touched by this thread alone. Others hand in requests and commands, and get news
  through `deliver`, which is called once per step with all of it.
* A command sees no half-done step. Paused, no step runs; requests that arrive wait.
* Weights change only while paused, whole or not at all.
* An exception in a step ends the engine: `failure` holds it, `ended` is set, and all later calls raise `EngineDead`.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from rollout.policy.engine.batch import MIN_TOKENS, Batch, Progress, Request, Step
from rollout.policy.engine.kv import ATTENTION, Plan, RowCache
from rollout.policy.engine.sampling import sample
from rollout.policy.engine.weights import WeightUpdate

T = TypeVar("T")
Deliver = Callable[[list[Progress]], None]
PauseMode = Literal["keep", "abort", "wait"]


class EngineDead(Exception):
    """The engine's thread has ended; the message says why."""


class Refused(Exception):
    """A command that the engine's state does not allow; the message says what to do first."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    max_num_seqs: int = 64
    max_model_len: int = 2048
    cached_rows: int = 128
    """Rows beyond the running ones, that keep what finished requests had cached."""
    max_prefill_tokens: int = 512
    """Prompt tokens run per step, beside one token for each decoding request."""


@dataclass(kw_only=True)
class Counters:
    steps: int = 0
    prompt_tokens: int = 0
    """Of all requests that were given a row."""
    cached_tokens: int = 0
    """Of those, found cached."""
    prefilled_tokens: int = 0
    """Run as chunks; more than the rest of the prompts where a cleared cache had to be filled anew."""
    generated_tokens: int = 0
    busy_s: float = 0.0
    weight_updates: int = 0
    running: int = 0
    waiting: int = 0


class Engine:
    """Serves `model`, a transformers causal language model in evaluation mode, from its own thread."""

    def __init__(self, model: Any, options: EngineOptions) -> None:
        self.model = model
        self.options = options
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.cache = RowCache(
            model.config, options.max_num_seqs + options.cached_rows, options.max_model_len, next(model.parameters()).dtype
        )
        model.set_attn_implementation(ATTENTION)
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._batch = Batch(
            self.cache,
            rows=options.max_num_seqs + options.cached_rows,
            max_running=options.max_num_seqs,
            max_length=options.max_model_len,
        )
        self.counters = Counters()
        self.paused = False
        self.failure: BaseException | None = None
        self.ended = threading.Event()
        self._draining: list[tuple[Future[None], bool]] = []
        self._update: WeightUpdate | None = None
        self._inbox: deque[tuple[Callable[[], None], Future[Any] | None]] = deque()
        self._inbox_lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._news: list[Progress] = []
        self._deliver: Deliver = lambda news: None
        self._on_end: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # For other threads

    def start(self, deliver: Deliver, on_end: Callable[[], None]) -> None:
        """`deliver` and `on_end` are called in the engine's thread."""
        self._deliver, self._on_end = deliver, on_end
        self._thread.start()

    def stop(self) -> None:
        """End after the current step; running requests get no more news. Waits for the thread."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    @property
    def version(self) -> str:
        return self._batch.version

    def submit(self, request: Request) -> None:
        self._put(lambda: self._batch.add(request))

    def abort(self, requests: Iterable[Request]) -> None:
        """End requests with what they have; those that have ended are left alone."""
        chosen = list(requests)
        self._put(lambda: self._abort(chosen))

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Run one of the commands below between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = command()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._put(run, future)
        return future

    def pause(self, mode: PauseMode, clear_cache: bool) -> Future[None]:
        """Resolves once no step runs: "keep" and "abort" at once, "wait" when the running requests have finished."""
        future: Future[None] = Future()

        def run() -> None:
            # From here on nobody can cancel it; the pause happens also when nobody waits for it any longer.
            if not future.set_running_or_notify_cancel():
                return
            if mode == "wait" and not self.paused and self._batch.running:
                self._draining.append((future, clear_cache))
                return
            if mode == "abort":
                self._abort(list(self._batch.live()))
            self._pause(clear_cache)
            future.set_result(None)

        self._put(run, future)
        return future

    # Commands, for `call`

    def resume(self) -> None:
        if self._update is not None:
            raise Refused("a weight update has begun; finish it with POST /finish_weight_update before POST /resume")
        self.paused = False
        for future, _ in self._draining:
            future.set_exception(Refused("resumed before the running requests had finished"))
        self._draining.clear()

    def start_update(self) -> None:
        """Begin anew: what an earlier update has staged is dropped."""
        self._need_pause()
        self._update = WeightUpdate(self.model)

    def stage_update(self, path: Path) -> None:
        """Raises `BadWeights`, and then the update is over."""
        self._need_pause()
        if self._update is None:
            raise Refused("no weight update has begun; POST /start_weight_update first")
        try:
            self._update.stage(path)
        except Exception:
            self._update = None
            raise

    def finish_update(self, version: str | None) -> None:
        """Raises `BadWeights`; the update is over either way."""
        self._need_pause()
        if self._update is None:
            raise Refused("no weight update has begun; POST /start_weight_update first")
        update, self._update = self._update, None
        update.apply()
        self.counters.weight_updates += 1
        if version is not None:
            self._batch.set_version(version)

    def set_version(self, version: str) -> None:
        self._batch.set_version(version)

    def clear_cache(self) -> None:
        self._batch.clear()

    def snapshot(self) -> Counters:
        self.counters.running, self.counters.waiting = self._batch.running, self._batch.waiting
        self.counters.prompt_tokens, self.counters.cached_tokens = self._batch.prompt_tokens, self._batch.prefix_hits
        return self.counters

    # The thread

    def _put(self, item: Callable[[], None], future: Future[Any] | None = None) -> None:
        with self._inbox_lock:
            if self.ended.is_set():
                raise self._dead()
            self._inbox.append((item, future))
        self._wake.set()

    def _dead(self) -> EngineDead:
        return EngineDead(f"the engine has ended: {self.failure!r}" if self.failure else "the engine has been stopped")

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._wake.clear()
                    while self._inbox:
                        self._inbox.popleft()[0]()
                    busy = not self.paused and self._step()
                    if self._news:
                        news, self._news = self._news, []
                        self._deliver(news)
                    if self._draining and not self._batch.running:
                        self._drained()
                    elif not busy and not self._inbox:
                        self._wake.wait()
        except BaseException as error:
            self.failure = error
        finally:
            with self._inbox_lock:
                self.ended.set()
            waiting = [future for _, future in self._inbox if future is not None and future.set_running_or_notify_cancel()]
            for unanswered in (*waiting, *(future for future, _ in self._draining)):
                unanswered.set_exception(self._dead())
            self._on_end()

    def _step(self) -> bool:
        """Run one step; False if there is nothing to run."""
        batch = self._batch
        if not self._draining:
            batch.admit()
        step = batch.plan(self.options.max_prefill_tokens)
        if step is None:
            return False
        began = time.perf_counter()
        logits = self._forward(step)
        rows = step.sample_rows
        sampled = sample(
            logits[: len(rows)], batch.temperature[rows], batch.top_p[rows], batch.top_k[rows], batch.draws(rows)
        )
        self._score(step, logits)
        self._news += batch.commit(step, *sampled)
        self.counters.steps += 1
        self.counters.generated_tokens += len(rows)
        self.counters.prefilled_tokens += len(step.tokens) - step.decoding
        self.counters.busy_s += time.perf_counter() - began
        return True

    def _forward(self, step: Step) -> torch.Tensor:
        """Logits [n, vocabulary]: for the places sampled from, in order, then for every place of the scored chunks."""
        n = len(step.tokens)
        padded = max(n, MIN_TOKENS)
        batch = self._batch
        plan = Plan(
            decode_positions=torch.from_numpy(batch.length[: step.decoding].copy()),
            chunks=step.chunks,
            tokens=n,
            heads=self.cache.heads,
            dtype=self.cache.keys.dtype,
        )
        ids = torch.zeros(1, padded, dtype=torch.int64)
        ids[0, :n] = torch.from_numpy(step.tokens)
        positions = torch.zeros(1, padded, dtype=torch.int64)
        positions[0, :n] = plan.positions
        places = [step.sample_at]
        places += [
            np.arange(chunk.offset, chunk.offset + chunk.length)
            for chunk in step.chunks
            if self._is_scored(chunk.row, chunk.start)
        ]
        keep = np.concatenate(places)
        keep = np.pad(keep, (0, max(0, MIN_TOKENS - len(keep))))
        self.cache.plan = plan
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=torch.from_numpy(keep),
            plan=plan,
            **{self._cache_name: self.cache},
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _is_scored(self, row: int, start: int) -> bool:
        request = self._batch.requests[row]
        return request is not None and request.prompt_logprobs and start < len(request.prompt) - 1

    def _score(self, step: Step, logits: torch.Tensor) -> None:
        """Keep the log-probs of the prompt tokens that the step's scored chunks predict."""
        at = len(step.sample_rows)
        for chunk in step.chunks:
            if not self._is_scored(chunk.row, chunk.start):
                continue
            request = self._batch.requests[chunk.row]
            assert request is not None
            if request.scores is None or request.score_ranks is None:
                request.scores = np.zeros(len(request.prompt), np.float32)
                request.score_ranks = np.zeros(len(request.prompt), np.int64)
            first, last = chunk.start + 1, min(chunk.start + chunk.length + 1, len(request.prompt))
            logprobs = torch.log_softmax(logits[at : at + last - first].float(), dim=-1)
            chosen = logprobs.gather(1, torch.from_numpy(request.prompt[first:last].astype(np.int64))[:, None])
            request.scores[first:last] = chosen[:, 0].numpy()
            request.score_ranks[first:last] = ((logprobs > chosen).sum(-1) + 1).numpy()
            at += chunk.length

    def _abort(self, requests: Iterable[Request]) -> None:
        self._news += [news for request in requests if (news := self._batch.abort(request)) is not None]

    def _pause(self, clear_cache: bool) -> None:
        self.paused = True
        if clear_cache:
            self._batch.clear()

    def _drained(self) -> None:
        self._pause(any(clear for _, clear in self._draining))
        for future, _ in self._draining:
            future.set_result(None)
        self._draining.clear()

    def _need_pause(self) -> None:
        if not self.paused:
            raise Refused("weights change only while paused; POST /pause?mode=keep first, and /resume afterwards")
