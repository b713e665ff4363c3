"""The state of all rows, and what the next step runs: continuous batching and prefix reuse, without a model.

A row holds the tokens of one request and, of those, `length` whose keys and values are cached. Rows `0..decoding-1` decode:
all their tokens but the last are cached. Rows in `prefilling` have more to cache. All others are idle, and keep what they
hold until the room is needed, so that the next turn of an episode finds its past.

Guarantees:

* What a request gets does not depend on which row it has, whom it shares the batch with, or what was reused.
* Waiting requests enter by (priority, arrival), lower first. None waits for ever: rows of finished requests come free.
* Work done per step in Python is per batch, not per row; only requests that join or leave cost more.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.policy.engine.sampling import uniforms

MIN_TOKENS = 16
"""A step is padded to this many tokens: matrix kernels round differently for the smallest sizes."""
WORTH_WAITING = 64
"""A request is held back a step or two when another is just caching this many more tokens of its prompt."""


class Rows(Protocol):
    """Where the keys and values lie."""

    def copy_row(self, source: int, target: int, length: int) -> None: ...

    def swap_rows(self, a: int, b: int, length: int) -> None: ...


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One call of generate. `prompt` is int32 [n], n >= 1; `limit` is the largest total length, at most the row's."""

    id: str
    prompt: NDArray[np.int32]
    limit: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    salt: int = 0
    """Only rows of the same salt are reused."""
    priority: int = 0
    prompt_logprobs: bool = False
    stream: bool = False
    row: int = -1
    """-1: waits."""
    spans: list[tuple[str, int]] = field(default_factory=list)
    """(weight version, first generated token under it)."""
    sent: int = 0
    """Generated tokens already handed over, of a stream."""
    scores: NDArray[np.float32] | None = None
    """With `prompt_logprobs`, float32 [n]: of each prompt token given what precedes it; the first is not defined."""
    score_ranks: NDArray[np.int64] | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """News of one request: tokens with log-probs and ranks since the last news. `finish_reason` "" means more will come."""

    request: Request
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    finish_reason: str = ""
    stop_reason: int | None = None
    spans: tuple[tuple[str, int, int], ...] = ()
    """(weight version, start, end) over all generated tokens; on the last news only."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """`length` tokens of one row from position `start`, at `offset` in the step's flat list of tokens."""

    row: int
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class Step:
    """What to run: tokens int64 [tokens] (decoding rows, then chunks) and which places are sampled from, for which rows."""

    decoding: int
    chunks: tuple[Chunk, ...]
    tokens: NDArray[np.int64]
    sample_at: NDArray[np.int64]
    sample_rows: NDArray[np.int64]


class Batch:
    """`rows` rows of at most `max_length` tokens, `max_running` of them at work at once."""

    def __init__(self, store: Rows, *, rows: int, max_running: int, max_length: int) -> None:
        if rows < max_running:
            raise ValueError(f"{rows} rows cannot hold {max_running} running requests")
        self.store = store
        self.max_running = max_running
        self.version = "default"
        self.decoding = 0
        self.prefilling: list[int] = []
        self.requests: list[Request | None] = [None] * rows
        self.prompt_tokens = 0
        self.prefix_hits = 0
        self._waiting: list[tuple[int, int, Request]] = []
        self._arrivals = itertools.count()
        self._clock = itertools.count(1)
        self.tokens = np.zeros((rows, max_length), np.int32)
        self.logprobs = np.zeros((rows, max_length), np.float32)
        self.ranks = np.zeros((rows, max_length), np.int32)
        self.total = np.zeros(rows, np.int64)
        self.length = np.zeros(rows, np.int64)
        self.limit = np.zeros(rows, np.int64)
        self.temperature = np.ones(rows, np.float32)
        self.top_p = np.ones(rows, np.float32)
        self.top_k = np.zeros(rows, np.int64)
        self.seed = np.zeros(rows, np.uint64)
        self.stop_ids = np.full((rows, 4), -1, np.int64)
        self.salt = np.zeros(rows, np.int64)
        self.used = np.zeros(rows, np.int64)
        self._columns: tuple[NDArray[Any], ...] = (
            *(self.tokens, self.logprobs, self.ranks, self.total, self.length, self.limit, self.used, self.salt),
            *(self.temperature, self.top_p, self.top_k, self.seed),
        )

    # Requests in and out

    @property
    def running(self) -> int:
        return self.decoding + len(self.prefilling)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        heapq.heappush(self._waiting, (request.priority, next(self._arrivals), request))

    def live(self) -> Iterator[Request]:
        """All requests that run or wait."""
        yield from (request for request in self.requests if request is not None)
        yield from (request for _, _, request in self._waiting)

    def abort(self, request: Request) -> Progress | None:
        """End a request now with what it has. None if it has ended already."""
        if request.ended:
            return None
        if request.row < 0:
            self._waiting = [entry for entry in self._waiting if entry[2] is not request]
            heapq.heapify(self._waiting)
            request.ended = True
            return Progress(request, [], [], [], "abort")
        row = request.row
        progress = self._finish(row, "abort", None)
        if row < self.decoding:
            self._leave(row)
        else:
            self.prefilling.remove(row)
        return progress

    def set_version(self, version: str) -> None:
        """Tokens sampled from here on carry `version`."""
        self.version = version
        for row, request in enumerate(self.requests):
            if request is not None:
                request.spans.append((version, int(self.total[row]) - len(request.prompt)))

    def clear(self) -> None:
        """Forget all keys and values. Running requests keep their tokens, and cache them anew."""
        for row, request in enumerate(self.requests):
            self.length[row] = 0
            if request is None:
                self.total[row] = 0
        self.prefilling = [*range(self.decoding), *self.prefilling]
        self.decoding = 0

    # A step

    def admit(self) -> None:
        """Give rows to waiting requests while there is room."""
        held: list[tuple[int, int, Request]] = []
        while self._waiting and self.running < self.max_running:
            entry = heapq.heappop(self._waiting)
            if not self._place(entry[2]):
                held.append(entry)
        for entry in held:
            heapq.heappush(self._waiting, entry)

    def plan(self, prefill_tokens: int) -> Step | None:
        """The next step: all decoding rows, and at most `prefill_tokens` of the rows in prefill. None: nothing is due."""
        n = self.decoding
        chunks: list[Chunk] = []
        offset, left = n, prefill_tokens
        for row in self.prefilling:
            start = int(self.length[row])
            length = min(int(self.total[row]) - start, left)
            if length <= 0:
                break
            chunks.append(Chunk(row, start, length, offset))
            offset, left = offset + length, left - length
        if not offset:
            return None
        whole = [chunk for chunk in chunks if chunk.start + chunk.length == self.total[chunk.row]]
        tokens = np.empty(offset, np.int64)
        tokens[:n] = self.tokens[np.arange(n), self.total[:n] - 1]
        for chunk in chunks:
            tokens[chunk.offset : chunk.offset + chunk.length] = self.tokens[
                chunk.row, chunk.start : chunk.start + chunk.length
            ]
        return Step(
            decoding=n,
            chunks=tuple(chunks),
            tokens=tokens,
            sample_at=np.array([*range(n), *(chunk.offset + chunk.length - 1 for chunk in whole)], np.int64),
            sample_rows=np.array([*range(n), *(chunk.row for chunk in whole)], np.int64),
        )

    def draws(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """The uniforms of the next token of `rows`: by seed and place in the sequence."""
        return uniforms(self.seed[rows], self.total[rows])

    def commit(
        self, step: Step, token_ids: NDArray[np.int64], logprobs: NDArray[np.float32], ranks: NDArray[np.int64]
    ) -> list[Progress]:
        """Take in what was cached and sampled (for `step.sample_rows`, in order). Returns the news."""
        rows = step.sample_rows
        places = self.total[rows]
        self.tokens[rows, places] = token_ids
        self.logprobs[rows, places] = logprobs
        self.ranks[rows, places] = ranks
        self.length[: step.decoding] += 1
        for chunk in step.chunks:
            self.length[chunk.row] += chunk.length
        self.total[rows] += 1
        stopped = (token_ids[:, None] == self.stop_ids[rows]).any(1)
        ended = stopped | (self.total[rows] >= self.limit[rows])

        news: list[Progress] = []
        for index in np.flatnonzero(ended):
            stop = int(token_ids[index]) if stopped[index] else None
            news.append(self._finish(int(rows[index]), "length" if stop is None else "stop", stop))
        for row in sorted((int(row) for row in rows[ended] if row < step.decoding), reverse=True):
            self._leave(row)
        ready = [int(row) for row in rows[step.decoding :]]
        requests = [self.requests[row] for row in ready]
        self.prefilling = [row for row in self.prefilling if row not in ready]
        for request in requests:
            if request is not None:
                self._swap(request.row, self.decoding)
                self.decoding += 1
        news += [self._news(request) for request in self.requests[: self.decoding] if request is not None and request.stream]
        return news

    # Inside

    def _place(self, request: Request) -> bool:
        """Find the request a row, with as much of its prompt cached as any row has. False: better a little later."""
        prompt = request.prompt
        idle = np.array([row is None for row in self.requests])
        source, reused = -1, 0
        if not request.prompt_logprobs:
            # The last token is always run, for its logits.
            same = np.where(self.salt == request.salt, self._common(prompt[:-1]), 0)
            cached = np.minimum(same, self.length)
            source = int(cached.argmax())
            reused = int(cached[source])
            pending = max((int(same[row]) for row in self.prefilling), default=0)
            if pending >= reused + WORTH_WAITING:
                return False
        if reused and idle[source] and reused == self.length[source]:
            row = source
        else:
            # The row unused for longest; a source that holds more than the common prefix stays for its own successor.
            candidates = np.flatnonzero(idle)
            row = int(candidates[np.where(self.length[candidates] == 0, 0, self.used[candidates]).argmin()])
            if reused and row != source:
                self.store.copy_row(source, row, reused)
        n = len(prompt)
        self.prompt_tokens += n
        self.prefix_hits += reused
        self.tokens[row, :n] = prompt
        self.total[row], self.length[row], self.limit[row] = n, reused, request.limit
        self.temperature[row], self.top_p[row], self.top_k[row] = request.temperature, request.top_p, request.top_k
        self.seed[row], self.salt[row] = request.seed, request.salt
        self._set_stop_ids(row, sorted(request.stop_ids))
        self.requests[row] = request
        request.row = row
        request.spans.append((self.version, 0))
        self.prefilling.append(row)
        return True

    def _common(self, prompt: NDArray[np.int32]) -> NDArray[np.int64]:
        """Length of the prefix that each row's tokens share with `prompt`: int64 [rows]."""
        n = len(prompt)
        differs = np.ones((len(self.requests), n + 1), np.bool_)
        np.not_equal(self.tokens[:, :n], prompt, out=differs[:, :n])
        common: NDArray[np.int64] = np.minimum(differs.argmax(1), self.total)
        return common

    def _set_stop_ids(self, row: int, stop_ids: Sequence[int]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(stop_ids)] = stop_ids

    def _finish(self, row: int, reason: str, stop: int | None) -> Progress:
        """The last news of a row's request. The row is idle from here on; its place in the batch is the caller's to mend."""
        request = self.requests[row]
        assert request is not None
        progress = self._news(request, reason, stop)
        request.ended = True
        request.row = -1
        self.requests[row] = None
        self.used[row] = next(self._clock)
        return progress

    def _news(self, request: Request, reason: str = "", stop: int | None = None) -> Progress:
        row, n = request.row, len(request.prompt)
        total = int(self.total[row])
        new = slice(n + request.sent, total)
        request.sent = total - n
        spans: tuple[tuple[str, int, int], ...] = ()
        if reason:
            ends = [start for _, start in request.spans[1:]] + [total - n]
            spans = tuple(
                (version, start, end) for (version, start), end in zip(request.spans, ends, strict=True) if end > start
            )
        return Progress(
            request,
            self.tokens[row, new].tolist(),
            self.logprobs[row, new].tolist(),
            self.ranks[row, new].tolist(),
            reason,
            stop,
            spans,
        )

    def _leave(self, row: int) -> None:
        """Take an idle row out of the decoding ones."""
        self.decoding -= 1
        self._swap(row, self.decoding)

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self.store.swap_rows(a, b, int(max(self.length[a], self.length[b])))
        both, reverse = [a, b], [b, a]
        for column in (*self._columns, self.stop_ids):
            column[both] = column[reverse]
        self.requests[a], self.requests[b] = self.requests[b], self.requests[a]
        for row in both:
            request = self.requests[row]
            if request is not None:
                request.row = row
        self.prefilling = [b if row == a else a if row == b else row for row in self.prefilling]
