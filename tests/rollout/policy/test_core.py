"""The engine's arithmetic against transformers' own, and what company, reuse and new weights may and may not change."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest
import torch

from rollout.policy.engine.batch import Progress, Request
from rollout.policy.engine.core import Engine, EngineDead, EngineOptions, Refused
from rollout.policy.engine.kv import UnsupportedModel
from rollout.policy.engine.weights import BadWeights
from tests.rollout.policy.tiny import make_model, save_weights

DEADLINE_S = 60
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "odd": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 301},
}


class Running:
    """An engine in this process; its news by request."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.engine = Engine(
            model, EngineOptions(**{"max_num_seqs": 32, "max_model_len": 1024, "cached_rows": 8, **options})
        )
        self.seen: list[Progress] = []
        self._news: queue.SimpleQueue[Progress] = queue.SimpleQueue()
        self._done: dict[str, Progress] = {}

    def __enter__(self) -> Running:
        self.engine.start(self._deliver, lambda: None)
        return self

    def _deliver(self, news: list[Progress]) -> None:
        for item in news:
            self._news.put(item)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.engine.stop()

    def ends(self, *ids: str) -> list[Progress]:
        """Last news of requests, in the order asked for."""
        while not set(ids) <= set(self._done):
            news = self._news.get(timeout=DEADLINE_S)
            self.seen.append(news)
            if news.finish_reason:
                self._done[news.request.id] = news
        return [self._done.pop(name) for name in ids]

    def first_tokens(self, name: str, n: int) -> None:
        """Return when the streaming request `name` has made n tokens."""
        while n > 0:
            news = self._news.get(timeout=DEADLINE_S)
            self.seen.append(news)
            assert news.request.id == name
            assert not news.finish_reason, "over already"
            n -= len(news.token_ids)

    def run(self, *requests: Request) -> list[Progress]:
        for request in requests:
            self.engine.submit(request)
        return self.ends(*(request.id for request in requests))

    def call(self, command: Any) -> Any:
        return self.engine.call(command).result(DEADLINE_S)


def ask(name: str, prompt: Sequence[int], new: int, **fields: Any) -> Request:
    return Request(id=name, prompt=np.array(prompt, np.int32), limit=len(prompt) + new, **fields)


def text(seed: int, n: int, vocab: int = 300) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, n)]


def recomputed(model: Any, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of `tokens` after `prompt` by one forward pass over all, with transformers' plain attention."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.inference_mode():
        logits = model(ids).logits[0].float()
    logprobs = torch.log_softmax(logits / temperature, -1)
    places = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    return logprobs[places, ids[0, len(prompt) :]].tolist()


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_output_is_that_of_transformers(shape: str) -> None:
    reference = make_model(3, **SHAPES[shape])
    prompts = [text(n, length) for n, length in enumerate((1, 2, 9, 127, 128, 129, 300))]
    with Running(make_model(3, **SHAPES[shape])) as running:
        done = running.run(*(ask(str(n), prompt, 40, temperature=0) for n, prompt in enumerate(prompts)))
    for prompt, each in zip(prompts, done, strict=True):
        ids = torch.tensor([prompt])
        # The mask is given, since `generate` would take a token that happens to be the pad token for padding.
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0
        )
        assert each.token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_are_those_of_a_full_forward_pass(shape: str) -> None:
    reference = make_model(4, **SHAPES[shape])
    prompts = [text(n, length) for n, length in enumerate((1, 40, 200, 600))]
    with Running(make_model(4, **SHAPES[shape]), max_prefill_tokens=64) as running:
        done = running.run(*(ask(str(n), prompt, 60, seed=n) for n, prompt in enumerate(prompts)))
        warm = running.run(ask("warm", prompts[1], 60, temperature=0.7, seed=5))[0]
    for prompt, each in zip(prompts, done, strict=True):
        assert each.logprobs == pytest.approx(recomputed(reference, prompt, each.token_ids), abs=1e-4)
    assert warm.logprobs == pytest.approx(recomputed(reference, prompts[1], warm.token_ids, 0.7), abs=1e-4)


def test_logprobs_of_a_narrowed_distribution_sum_to_one_over_what_is_left() -> None:
    reference = make_model(4)
    prompt = text(0, 12)
    with torch.inference_mode():
        logprobs = torch.log_softmax(reference(torch.tensor([prompt])).logits[0, -1], -1)
    top = logprobs.topk(3)
    with Running(make_model(4)) as running:
        done = running.run(*(ask(str(n), prompt, 1, top_k=3, seed=n) for n in range(60)))
        nucleus = running.run(*(ask(f"p{n}", prompt, 1, top_p=float(top.values[0].exp()) * 0.99, seed=n) for n in range(5)))
    expected = dict(zip(top.indices.tolist(), (top.values - top.values.logsumexp(0)).tolist(), strict=True))
    for each in done:
        assert each.logprobs[0] == pytest.approx(expected[each.token_ids[0]], abs=1e-4)
    assert {each.token_ids[0] for each in done} == set(expected)
    assert {(each.token_ids[0], each.logprobs[0]) for each in nucleus} == {(int(top.indices[0]), 0.0)}


def test_sampled_tokens_follow_the_distribution() -> None:
    reference = make_model(4)
    prompt = text(0, 12)
    with torch.inference_mode():
        expected = torch.softmax(reference(torch.tensor([prompt])).logits[0, -1], -1).numpy()
    n = 2000
    with Running(make_model(4)) as running:
        done = running.run(*(ask(str(seed), prompt, 1, seed=seed) for seed in range(n)))
    counts = np.bincount([each.token_ids[0] for each in done], minlength=300)
    likely = expected * n >= 20
    assert likely.sum() > 3
    assert np.all(np.abs(counts[likely] - n * expected[likely]) < 5 * np.sqrt(n * expected[likely]))


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 6},
        {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
    ],
    ids=["tiny", "as wide as quickstart", "as wide as smollm2"],
)
def test_company_and_reuse_change_no_bit(shape: dict[str, Any]) -> None:
    """Alone, among 20 others of all lengths, and again from a warm cache: same tokens, same log-probs.

    From how many rows on a matrix kernel rounds each alike depends on its width.
    """
    prompt = text(0, 150)
    requests = [ask(f"other-{n}", text(n, 1 + 37 * n % 400), 20 + 7 * n, seed=n) for n in range(1, 21)]
    with Running(make_model(5, **shape)) as running:
        alone = running.run(ask("alone", prompt, 120, seed=11))[0]
        warm = running.run(ask("warm", prompt, 120, seed=11))[0]
        assert running.call(running.engine.snapshot).cached_tokens >= len(prompt) - 1
        turn = running.run(ask("turn", [*prompt, *alone.token_ids[:60]], 60, seed=11))[0]
        running.call(running.engine.clear_cache)
        crowd = running.run(*requests[:10], ask("crowd", prompt, 120, seed=11), *requests[10:])[10]
    with Running(make_model(5, **shape), max_prefill_tokens=7) as running:
        chunked = running.run(*requests[:3], ask("chunked", prompt, 120, seed=11))[3]
    for other in (warm, crowd, chunked):
        assert other.token_ids == alone.token_ids
        assert other.logprobs == alone.logprobs
    # Draws go by the place in the text, so a later turn that starts amid an answer goes on as the answer did.
    assert turn.token_ids == alone.token_ids[60:]
    assert turn.logprobs == alone.logprobs[60:]


def test_the_likelihood_of_a_prompt_is_that_of_a_forward_pass_also_in_chunks_and_when_cached() -> None:
    reference = make_model(4)
    prompt = text(0, 300)
    expected = recomputed(reference, prompt[:1], prompt[1:])
    with Running(make_model(4), max_prefill_tokens=64) as running:
        for name in ("cold", "cached"):
            done = running.run(ask(name, prompt, 1, prompt_logprobs=True), ask(f"{name}-beside", text(1, 30), 5))[0]
            assert done.request.scores is not None
            assert done.request.scores[1:].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("clear", [True, False])
def test_the_rest_of_an_answer_comes_from_the_new_weights(tmp_path: Path, clear: bool) -> None:
    prompt = text(0, 50)
    path = save_weights(make_model(7), tmp_path / "new.safetensors")
    with Running(make_model(6)) as running:
        engine = running.engine
        engine.submit(ask("long", prompt, 900, seed=3, stream=True))
        running.first_tokens("long", 20)
        engine.pause("keep", clear).result(DEADLINE_S)
        running.call(engine.start_update)
        running.call(lambda: engine.stage_update(path))
        running.call(lambda: engine.finish_update("v1"))
        running.call(engine.resume)
        end = running.ends("long")[0]
    (old, start, seam), (new, again, n) = end.spans
    assert (old, start, new, again, n) == ("default", 0, "v1", seam, 900)
    tokens = [token for news in running.seen for token in news.token_ids]
    logprobs = [value for news in running.seen for value in news.logprobs]
    assert len(tokens) == 900
    before = recomputed(make_model(6), prompt, tokens)
    after = recomputed(make_model(7), prompt, tokens)
    assert logprobs[:seam] == pytest.approx(before[:seam], abs=1e-4)
    if clear:
        assert logprobs[seam:] == pytest.approx(after[seam:], abs=1e-4)
    else:
        # Old keys and values under new weights: neither model's distribution, which is the price of not clearing.
        assert np.abs(np.array(logprobs[seam : seam + 50]) - np.array(after[seam : seam + 50])).max() > 1e-2


def test_a_bad_file_changes_nothing_and_says_what_is_wrong(tmp_path: Path) -> None:
    good = make_model(7)
    extra = {**dict(good.named_parameters()), "model.extra": torch.zeros(2)}
    missing = {name: value for name, value in good.named_parameters() if name != "lm_head.weight"}
    shape = {**dict(good.named_parameters()), "lm_head.weight": torch.zeros(3, 3)}
    infinite = {**dict(good.named_parameters()), "model.norm.weight": torch.full((64,), torch.nan)}
    integers = {**dict(good.named_parameters()), "model.norm.weight": torch.ones(64, dtype=torch.int32)}
    cases = {
        "model.extra": extra,
        "lacks tensors 'lm_head.weight'": missing,
        r"shape \[3, 3\], the model's has \[300, 64\]": shape,
        "not finite": infinite,
        "dtype torch.int32": integers,
    }
    (tmp_path / "broken").write_bytes(b"\x00" * 100)
    with Running(make_model(6)) as running:
        engine = running.engine
        before = running.run(ask("before", text(0, 20), 30, seed=1))[0]
        engine.pause("keep", True).result(DEADLINE_S)

        def update(path: Path) -> None:
            engine.start_update()
            engine.stage_update(path)
            engine.finish_update("bad")

        for n, (what, tensors) in enumerate(cases.items()):
            from safetensors.torch import save_file

            path = tmp_path / f"{n}.safetensors"
            save_file({name: value.detach().clone().contiguous() for name, value in tensors.items()}, path)
            with pytest.raises(BadWeights, match=what):
                running.call(lambda path=path: update(path))
        with pytest.raises(BadWeights, match="not a safetensors file"):
            running.call(lambda: update(tmp_path / "broken"))
        with pytest.raises(BadWeights, match="no such file"):
            running.call(lambda: update(tmp_path / "none"))
        running.call(engine.resume)
        after = running.run(ask("after", text(0, 20), 30, seed=1))[0]
    assert engine.version == "default"
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


def test_tied_weights_come_under_either_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    new = make_model(7, tie_word_embeddings=True)
    tensors = {name: value.detach().clone() for name, value in new.named_parameters()}
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "new.safetensors")
    with Running(make_model(6, tie_word_embeddings=True)) as running:
        engine = running.engine
        engine.pause("keep", True).result(DEADLINE_S)
        running.call(engine.start_update)
        running.call(lambda: engine.stage_update(tmp_path / "new.safetensors"))
        running.call(lambda: engine.finish_update("1"))
        running.call(engine.resume)
        done = running.run(ask("a", text(0, 20), 30, seed=1))[0]
    assert done.logprobs == pytest.approx(recomputed(new, text(0, 20), done.token_ids), abs=1e-4)


def test_commands_out_of_order_are_refused() -> None:
    with Running(make_model(6)) as running:
        engine = running.engine
        for command in (engine.start_update, lambda: engine.stage_update(Path("x")), lambda: engine.finish_update("1")):
            with pytest.raises(Refused, match="pause"):
                running.call(command)
        engine.pause("keep", True).result(DEADLINE_S)
        for command in (lambda: engine.stage_update(Path("x")), lambda: engine.finish_update("1")):
            with pytest.raises(Refused, match="start_weight_update"):
                running.call(command)
        running.call(engine.start_update)
        with pytest.raises(Refused, match="finish_weight_update"):
            running.call(engine.resume)


def test_a_waiting_pause_lets_the_running_finish_and_holds_the_rest() -> None:
    with Running(make_model(6), max_num_seqs=1) as running:
        engine = running.engine
        engine.submit(ask("running", text(0, 5), 200, stream=True))
        running.first_tokens("running", 1)
        engine.submit(ask("held", text(1, 5), 5))
        engine.pause("wait", True).result(DEADLINE_S)
        assert len(running.ends("running")[0].request.prompt) == 5
        assert running.call(engine.snapshot).waiting == 1
        running.call(engine.resume)
        assert running.ends("held")[0].finish_reason == "length"


def test_nobody_waiting_for_a_command_any_longer_does_not_hurt_the_engine() -> None:
    """A client that disconnects cancels the future of its command, also of one that is under way."""
    with Running(make_model(6)) as running:
        engine = running.engine
        engine.submit(ask("running", text(0, 5), 300, stream=True))
        running.first_tokens("running", 1)
        futures = [engine.pause("wait", True), *(engine.call(engine.clear_cache) for _ in range(20))]
        for future in futures:
            future.cancel()
        running.call(engine.resume)
        assert running.ends("running")[0].finish_reason == "length"
        assert running.run(ask("after", text(0, 5), 5))[0].finish_reason == "length"


def test_a_failing_step_ends_the_engine_with_its_cause() -> None:
    model = make_model(6)
    with Running(model) as running:
        engine = running.engine

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("out of luck")

        model.forward = broken
        engine.submit(ask("a", text(0, 5), 5))
        assert engine.ended.wait(DEADLINE_S)
        with pytest.raises(EngineDead, match="out of luck"):
            engine.submit(ask("b", text(0, 5), 5))
        with pytest.raises(EngineDead, match="out of luck"):
            engine.call(engine.resume)


def test_models_that_attend_otherwise_are_refused() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=64,
    )
    with pytest.raises(UnsupportedModel, match="sliding_window = 64"):
        Engine(MistralForCausalLM(config), EngineOptions())
