"""The batch's bookkeeping under arbitrary orders of arrivals, aborts, cleared caches and steps: no model, no time.

The store here keeps, for every place, the text up to it: exactly what keys and values are a function of. A step computes
them from the row as a model would, from what is cached, so that any mix-up of rows shows in the next token.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout.policy.engine.batch import WORTH_WAITING, Batch, Progress, Request, Step

ROWS, RUNNING, LENGTH, VOCABULARY = 6, 3, 24, 5


class HistoryStore:
    """One cell per row and place, in place of keys and values: the tokens up to there, or None."""

    def __init__(self) -> None:
        self.cells: list[list[tuple[int, ...] | None]] = [[None] * LENGTH for _ in range(ROWS)]

    def copy_row(self, source: int, target: int, length: int) -> None:
        self.cells[target][:length] = self.cells[source][:length]

    def swap_rows(self, a: int, b: int, length: int) -> None:
        self.cells[a][:length], self.cells[b][:length] = self.cells[b][:length], self.cells[a][:length]


def next_token(history: tuple[int, ...], seed: int) -> int:
    return hashlib.blake2b(repr((history, seed)).encode(), digest_size=4).digest()[0] % VOCABULARY


def expected(request: Request) -> tuple[list[int], str]:
    """What a request gets when nothing comes between."""
    text = tuple(request.prompt.tolist())
    while len(text) < request.limit:
        text = (*text, next_token(text, request.seed))
        if text[-1] in request.stop_ids:
            return list(text[len(request.prompt) :]), "stop"
    return list(text[len(request.prompt) :]), "length"


class BatchMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = HistoryStore()
        self.batch = Batch(self.store, rows=ROWS, max_running=RUNNING, max_length=LENGTH)
        self.open: dict[str, Request] = {}
        self.got: dict[str, list[int]] = {}
        self.count = 0
        self.versions = ["default"]

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        new=st.integers(1, 12),
        seed=st.integers(0, 3),
        stops=st.sets(st.integers(0, VOCABULARY - 1), max_size=1),
        priority=st.integers(0, 2),
        salt=st.integers(0, 1),
        stream=st.booleans(),
    )
    def arrive(self, prompt: list[int], new: int, **fields: Any) -> None:
        fields["stop_ids"] = frozenset(fields.pop("stops"))
        self.count += 1
        request = Request(id=str(self.count), prompt=np.array(prompt, np.int32), limit=len(prompt) + new, **fields)
        self.open[request.id], self.got[request.id] = request, []
        self.batch.add(request)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        news = self.batch.abort(request)
        assert news is not None
        assert news.finish_reason == "abort"
        self.take([news])
        assert self.batch.abort(request) is None

    @rule()
    def clear(self) -> None:
        self.batch.clear()
        self.store.cells = [[None] * LENGTH for _ in range(ROWS)]

    @rule()
    def new_version(self) -> None:
        self.versions.append(str(len(self.versions)))
        self.batch.set_version(self.versions[-1])

    @rule(budget=st.integers(1, 16))
    def step(self, budget: int) -> None:
        self.batch.admit()
        step = self.batch.plan(budget)
        if step is None:
            assert self.batch.running == 0
            return
        assert sum(chunk.length for chunk in step.chunks) <= budget
        tokens = np.array([self.run_row(row) for row in self.compute(step)], np.int64)
        zeros = np.zeros(len(tokens))
        self.take(self.batch.commit(step, tokens, zeros.astype(np.float32), zeros.astype(np.int64)))

    def compute(self, step: Step) -> list[int]:
        """Fill the cells that the step runs, each from the cell before it."""
        places = [(row, int(self.batch.length[row]), row) for row in range(step.decoding)]
        for chunk in step.chunks:
            places += [(chunk.row, chunk.start + n, chunk.offset + n) for n in range(chunk.length)]
        for row, place, at in places:
            before = self.store.cells[row][place - 1] if place else ()
            assert before is not None, "runs on what is not cached"
            self.store.cells[row][place] = (*before, int(step.tokens[at]))
        return [int(row) for row in step.sample_rows]

    def run_row(self, row: int) -> int:
        history = self.store.cells[row][int(self.batch.total[row]) - 1]
        assert history is not None
        return next_token(history, int(self.batch.seed[row]))

    def take(self, news: list[Progress]) -> None:
        for item in news:
            name = item.request.id
            self.got[name] += item.token_ids
            if not item.finish_reason:
                assert item.request.stream
                continue
            tokens, reason = expected(self.open.pop(name))
            if item.finish_reason == "abort":
                assert self.got[name] == tokens[: len(self.got[name])]
            else:
                assert (self.got[name], item.finish_reason) == (tokens, reason)
            ends = [0, *(end for _, _, end in item.spans)]
            assert [start for _, start, _ in item.spans] == ends[:-1]
            assert ends[-1] == len(self.got[name])
            order = [self.versions.index(version) for version, _, _ in item.spans]
            assert order == sorted(order)

    @invariant()
    def rows_are_in_order(self) -> None:
        batch = self.batch
        assert {request.id for request in batch.live()} == set(self.open)
        assert batch.running <= RUNNING
        assert batch.running + batch.waiting == len(self.open)
        running = [row for row in range(ROWS) if batch.requests[row] is not None]
        assert sorted([*range(batch.decoding), *batch.prefilling]) == running
        for row in running:
            request = batch.requests[row]
            assert request is not None
            assert request.row == row
            assert batch.length[row] < batch.total[row]
            if row < batch.decoding:
                assert batch.length[row] == batch.total[row] - 1
        for row in range(ROWS):
            tokens = tuple(batch.tokens[row, : batch.length[row]].tolist())
            assert [self.store.cells[row][n] for n in range(len(tokens))] == [tokens[: n + 1] for n in range(len(tokens))]

    def teardown(self) -> None:
        """Nothing waits for ever: with enough steps all requests end."""
        for _ in range(2000):
            if not self.open:
                break
            self.step(8)
        assert not self.open


TestBatch = BatchMachine.TestCase
TestBatch.settings = settings(max_examples=60, stateful_step_count=40)


def drain(batch: Batch, order: list[str]) -> None:
    while True:
        batch.admit()
        step = batch.plan(64)
        if step is None:
            return
        n = len(step.sample_rows)
        news = batch.commit(step, np.zeros(n, np.int64), np.zeros(n, np.float32), np.zeros(n, np.int64))
        order += [item.request.id for item in news if item.finish_reason]


def test_the_lower_priority_goes_first_then_who_came_first() -> None:
    batch = Batch(HistoryStore(), rows=1, max_running=1, max_length=LENGTH)
    for name, priority in (("late", 5), ("a", 1), ("b", 1), ("first", -1)):
        batch.add(Request(id=name, prompt=np.array([1], np.int32), limit=2, priority=priority))
    order: list[str] = []
    drain(batch, order)
    assert order == ["first", "a", "b", "late"]


def test_a_group_with_one_prompt_runs_it_once() -> None:
    batch = Batch(_Nowhere(), rows=8, max_running=8, max_length=512)
    prompt = np.arange(300, dtype=np.int32)
    for n in range(8):
        batch.add(Request(id=str(n), prompt=prompt, limit=310, seed=n))
    order: list[str] = []
    drain(batch, order)
    assert len(order) == 8
    assert batch.prefix_hits >= 7 * (299 - WORTH_WAITING)


class _Nowhere:
    def copy_row(self, source: int, target: int, length: int) -> None: ...

    def swap_rows(self, a: int, b: int, length: int) -> None: ...
