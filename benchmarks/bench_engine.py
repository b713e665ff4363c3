"""Reference engine: tokens per second at batch 32 against batch 1, in the engine and through HTTP, and parity with
transformers.

The model is a random Llama of the quickstart model's size, in float32, on one thread. Batch 1 and batch 32 alternate, and the
median of each is taken, so that what else the machine does falls on both.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.results import Row, write_results
from rollout.policy.base import SamplingParams
from rollout.policy.client import VllmPolicy
from rollout.policy.engine.batch import Progress, Request
from rollout.policy.engine.core import Engine, EngineOptions

NEW, BATCH = 128, 32
SHORT, LONG = 64, 512
"""Prompt tokens: those that a turn adds to a cached episode, and an episode that is not cached."""
VOCABULARY = 900


def make_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=2048,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    return model.eval()


def prompts(n: int, seed: int, length: int) -> list[list[int]]:
    return [np.random.default_rng((seed, each)).integers(0, VOCABULARY, length).tolist() for each in range(n)]


class Direct:
    """The engine in this process, without HTTP."""

    def __init__(self) -> None:
        self.engine = Engine(make_model(), EngineOptions(max_num_seqs=BATCH, max_model_len=2048, cached_rows=BATCH))
        self._left = 0
        self._done = threading.Event()
        self.answers: dict[str, list[int]] = {}
        self.engine.start(self._deliver, lambda: None)

    def _deliver(self, news: list[Progress]) -> None:
        for item in news:
            self.answers[item.request.id] = item.token_ids
        self._left -= len(news)
        if not self._left:
            self._done.set()

    def run(self, texts: list[list[int]], **fields: Any) -> list[list[int]]:
        self._left = len(texts)
        self._done.clear()
        for n, text in enumerate(texts):
            prompt = np.array(text, np.int32)
            self.engine.submit(Request(id=str(n), prompt=prompt, limit=len(text) + NEW, seed=n, **fields))
        assert self._done.wait(300)
        return [self.answers[str(n)] for n in range(len(texts))]


def measure(run: Callable[[list[list[int]]], object], length: int, rounds: int) -> tuple[float, float, float]:
    """Tokens per second at batch 1 and at batch 32, and the median of their ratios in neighbouring runs."""
    run(prompts(BATCH, 0, length))
    single: list[float] = []
    batched: list[float] = []
    for round_ in range(1, rounds + 1):
        for n, rates in ((1, single), (BATCH, batched)):
            texts = prompts(n, 1000 * n + round_, length)
            began = time.perf_counter()
            run(texts)
            rates.append(n * NEW / (time.perf_counter() - began))
    ratio = statistics.median(b / s for s, b in zip(single, batched, strict=True))
    return statistics.median(single), statistics.median(batched), ratio


def parity(direct: Direct) -> tuple[float, float]:
    """Share of greedy tokens that are those of transformers' `generate`, and its tokens per second at batch 32."""
    texts = prompts(BATCH, 7, SHORT)
    ours = direct.run(texts, temperature=0)
    ids = torch.tensor(texts)
    model = make_model()
    with torch.inference_mode():
        began = time.perf_counter()
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )[:, SHORT:].tolist()
    rate = BATCH * NEW / (time.perf_counter() - began)
    same = sum(a == b for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True))
    return same / (BATCH * NEW), rate


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of an engine in a process of its own."""
    make_model().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=words).save_pretrained(folder)
    port_file = folder / "port.json"
    command = [sys.executable, "-c", "from rollout.policy.cli import policy; policy()", "serve", str(folder)]
    command += ["--port-file", str(port_file), "--max-num-seqs", str(BATCH)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not port_file.exists():
            assert process.poll() is None, "the engine ended"
            assert time.monotonic() < deadline, "the engine did not get ready"
            time.sleep(0.05)
        yield str(json.loads(port_file.read_text())["url"])
    finally:
        process.terminate()
        process.wait(20)


def through_http(url: str) -> tuple[float, float, float]:
    with asyncio.Runner() as runner:
        policy = VllmPolicy(url)

        async def calls(texts: list[list[int]]) -> None:
            await asyncio.gather(
                *(
                    policy.generate(text, SamplingParams(max_tokens=NEW, seed=n), request_id=f"{time.monotonic_ns()}-{n}")
                    for n, text in enumerate(texts)
                )
            )

        try:
            return measure(lambda texts: runner.run(calls(texts)), SHORT, rounds=7)
        finally:
            runner.run(policy.close())


def main() -> None:
    torch.set_num_threads(1)
    direct = Direct()
    single, batched, ratio = measure(direct.run, SHORT, rounds=7)
    _, _, long_ratio = measure(direct.run, LONG, rounds=3)
    share, plain = parity(direct)
    direct.engine.stop()
    with tempfile.TemporaryDirectory(prefix="farmhand-bench-") as folder, served(Path(folder)) as url:
        http_single, http_batched, http_ratio = through_http(url)
    shape = f"Llama 4 x 192, {SHORT} + {NEW} tokens"
    pairs = f"batch {BATCH} over batch 1, median of pairs"
    write_results(
        "engine",
        [
            Row(name=f"engine, batch 1 ({shape})", value=single, unit="tokens/s"),
            Row(name=f"engine, batch {BATCH}", value=batched, unit="tokens/s", baseline=single, against="engine, batch 1"),
            Row(name=f"engine, {pairs}", value=ratio, unit="x", target=">= 8"),
            Row(name=f"engine, {pairs}, {LONG} + {NEW} tokens, nothing cached", value=long_ratio, unit="x"),
            Row(name="engine over HTTP, batch 1", value=http_single, unit="tokens/s"),
            Row(
                name=f"engine over HTTP, batch {BATCH}",
                value=http_batched,
                unit="tokens/s",
                baseline=http_single,
                against="engine over HTTP, batch 1",
            ),
            Row(name=f"engine over HTTP, {pairs}", value=http_ratio, unit="x", target=">= 8"),
            Row(
                name=f"engine against transformers, greedy, batch {BATCH}",
                value=batched,
                unit="tokens/s",
                baseline=plain,
                against="transformers generate",
            ),
            Row(name="greedy tokens equal to transformers' generate", value=100 * share, unit="%", target="100"),
        ],
    )


if __name__ == "__main__":
    main()
