"""The trainer on a model of a few thousand parameters."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from learner.batch import Batch, TokenSequence
from learner.run import RunError
from learner.settings import ObjectiveSettings, OptimizerSettings
from learner.trainer import Trainer
from rollout.models import load_model, load_tokenizer

VOCABULARY = 37
TEMPERATURE = 0.7


def make_model(folder: Path, *, width: int = 16, tied: bool = True) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        pad_token="w0",
        eos_token="w1",
        chat_template="{{ messages[0]['content'] }}",
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def make_trainer(folder: Path, *, micro_batch_tokens: int = 256, objective: str = "cispo", **optimizer: object) -> Trainer:
    settings = OptimizerSettings.model_validate({"learning_rate": 1e-2, "threads": 1, **optimizer})
    return Trainer(
        folder,
        optimizer=settings,
        objective=ObjectiveSettings.model_validate({"name": objective}),
        micro_batch_tokens=micro_batch_tokens,
        temperature=TEMPERATURE,
        seed=0,
    )


def make_batch(seed: int = 0, sequences: int = 6) -> Batch:
    rng = np.random.default_rng(seed)
    items = []
    for i in range(sequences):
        n = int(rng.integers(5, 20))
        mask = rng.random(n) < 0.5
        mask[0], mask[-1] = False, True
        items.append(
            TokenSequence(
                key=f"episode {i}",
                tokens=rng.integers(0, VOCABULARY, n, dtype=np.int32),
                mask=mask,
                logprobs=np.where(mask, rng.normal(-3.5, 0.5, n), 0),
                versions=np.where(mask, 0, -1),
                advantages=np.where(mask, rng.normal(), 0),
            )
        )
    return Batch(groups=(0,), sequences=tuple(items))


def of_lists(**lists: Any) -> TokenSequence:
    return TokenSequence(key="k", **{name: np.array(values) for name, values in lists.items()})


def weights_of(trainer: Trainer) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in trainer.weights().items()}


def reference_gradient(folder: Path, batch: Batch) -> dict[str, torch.Tensor]:
    """CISPO's gradient with one sequence at a time, straight from the model's own logits."""
    model = load_model(folder, torch.float32)
    for item in batch.sequences:
        tokens = torch.from_numpy(item.tokens.astype(np.int64))
        logprobs = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1] / TEMPERATURE, -1)
        logp = logprobs.gather(1, tokens[1:, None])[:, 0]
        weight = (logp.detach() - torch.from_numpy(item.logprobs[1:])).exp().clamp(0, 5)
        mask = torch.from_numpy(item.mask[1:])
        loss = -(weight * torch.from_numpy(item.advantages[1:]) * logp)[mask].sum() / batch.sampled_tokens
        loss.backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("micro_batch_tokens", [20, 50, 1000])
def test_the_gradient_is_that_of_one_sequence_at_a_time(
    model_folder: Path, micro_batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch()
    trainer = make_trainer(model_folder, micro_batch_tokens=micro_batch_tokens, max_grad_norm=1e9)
    # A plain step of gradient descent shows the gradient from outside: the change of the weights.
    before = trainer.weights()
    trainer._adam = torch.optim.SGD(trainer._masters.values(), lr=1.0)  # type: ignore[assignment]
    result = trainer.step(batch)
    expected = reference_gradient(model_folder, batch)
    rate = result.metrics["learning_rate"]
    for name, after in trainer.weights().items():
        torch.testing.assert_close((before[name] - after) / rate, expected[name], rtol=1e-3, atol=1e-4)
    norm = math.sqrt(sum(float((grad**2).sum()) for grad in expected.values()))
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_pieces_of_the_head_change_nothing(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = make_trainer(model_folder), make_trainer(model_folder)
    first = whole.step(make_batch())
    monkeypatch.setattr("learner.trainer._LOGITS", 3 * VOCABULARY)
    second = pieces.step(make_batch())
    assert second.metrics["grad_norm"] == pytest.approx(first.metrics["grad_norm"], rel=1e-5)
    assert second.metrics["entropy"] == pytest.approx(first.metrics["entropy"], rel=1e-5)


def test_steps_raise_the_probability_of_what_was_rewarded(model_folder: Path) -> None:
    trainer = make_trainer(model_folder)
    tokens = [3, 5, 7, 11, 13]
    before = sum(trainer.prompt_logprobs(tokens))
    for _ in range(5):
        item = of_lists(
            tokens=tokens,
            mask=[False, True, True, True, True],
            logprobs=[0.0, *trainer.prompt_logprobs(tokens)],
            versions=[-1, 0, 0, 0, 0],
            advantages=[0, 1, 1, 1, 1],
        )
        trainer.step(Batch(groups=(0,), sequences=(item,)))
    assert sum(trainer.prompt_logprobs(tokens)) > before + 1


def test_metrics_at_the_behaviour_policy(model_folder: Path) -> None:
    trainer = make_trainer(model_folder, objective="dis")
    trainer._temperature = 1.0
    tokens = [3, 5, 7, 11]
    item = of_lists(
        tokens=tokens,
        mask=[False, True, True, True],
        logprobs=[0.0, *trainer.prompt_logprobs(tokens)],
        versions=[-1, 0, 0, 0],
        advantages=[0, 1, 1, 1],
    )
    metrics = trainer.step(Batch(groups=(0,), sequences=(item,))).metrics
    assert metrics["mismatch_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["clipped_share"] == 0
    assert metrics["loss"] == pytest.approx(-sum(item.logprobs) / 3, rel=1e-5)
    assert 0 < metrics["entropy"] <= math.log(VOCABULARY)
    assert (metrics["tokens"], metrics["sampled_tokens"]) == (4, 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_trainer_goes_on_bit_for_bit(model_folder: Path, tmp_path: Path, dtype: str) -> None:
    straight = make_trainer(model_folder, dtype=dtype, warmup_steps=4)
    for seed in range(4):
        straight.step(make_batch(seed))

    stopped = make_trainer(model_folder, dtype=dtype, warmup_steps=4)
    for seed in range(2):
        stopped.step(make_batch(seed))
    stopped.save(tmp_path / "state")
    resumed = make_trainer(model_folder, dtype=dtype, warmup_steps=4)
    resumed.load(tmp_path / "state")
    for seed in range(2, 4):
        result = resumed.step(make_batch(seed))

    straight.save(tmp_path / "straight")
    resumed.save(tmp_path / "resumed")
    for name in ("trainer.safetensors", "trainer.json"):
        assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes()
    assert result.metrics["learning_rate"] == pytest.approx(1e-2)


def test_a_trainer_that_has_taken_no_step_can_be_saved(model_folder: Path, tmp_path: Path) -> None:
    make_trainer(model_folder).save(tmp_path)
    resumed, fresh = make_trainer(model_folder), make_trainer(model_folder)
    resumed.load(tmp_path)
    resumed.step(make_batch())
    fresh.step(make_batch())
    assert weights_of(resumed) == weights_of(fresh)


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_a_step_that_is_not_finite_changes_nothing(model_folder: Path, tmp_path: Path, bad: str) -> None:
    trainer = make_trainer(model_folder)
    trainer.step(make_batch())
    trainer.save(tmp_path / "before")
    batch = make_batch(1)
    poisoned = replace(batch.sequences[0], advantages=np.where(batch.sequences[0].mask, np.float32(bad), 0))
    result = trainer.step(replace(batch, sequences=(poisoned, *batch.sequences[1:])))
    assert result.skipped
    assert not math.isfinite(result.metrics["loss"])
    trainer.save(tmp_path / "after")
    assert (tmp_path / "before" / "trainer.safetensors").read_bytes() == (
        tmp_path / "after" / "trainer.safetensors"
    ).read_bytes()
    # And nothing of it is left over for the next step.
    clean = make_trainer(model_folder)
    clean.load(tmp_path / "before")
    assert trainer.step(batch).metrics["grad_norm"] == clean.step(batch).metrics["grad_norm"]


def test_an_empty_batch_is_a_step_that_changes_nothing(model_folder: Path) -> None:
    trainer = make_trainer(model_folder)
    trainer.step(make_batch())
    before = weights_of(trainer)
    result = trainer.step(Batch(groups=(1,), sequences=()))
    assert not result.skipped
    assert weights_of(trainer) == before


def test_the_gradient_is_clipped_to_its_norm(model_folder: Path) -> None:
    trainer = make_trainer(model_folder, max_grad_norm=1e-3)
    before = trainer.weights()
    trainer._adam = torch.optim.SGD(trainer._masters.values(), lr=1.0)  # type: ignore[assignment]
    result = trainer.step(make_batch())
    assert result.metrics["grad_norm"] > 1e-3
    moved = math.sqrt(sum(float(((before[n] - t) ** 2).sum()) for n, t in trainer.weights().items()))
    assert moved == pytest.approx(1e-3 * result.metrics["learning_rate"], rel=1e-2)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_have_the_names_of_the_state_dict_and_a_tied_head_once(tmp_path: Path, tied: bool) -> None:
    trainer = make_trainer(make_model(tmp_path, tied=tied), dtype="bfloat16")
    weights = trainer.weights()
    names = set(load_model(tmp_path, torch.float32).state_dict())
    assert set(weights) == (names - {"lm_head.weight"} if tied else names)
    assert all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in weights.values())


def test_weights_are_a_copy(model_folder: Path) -> None:
    trainer = make_trainer(model_folder)
    weights = trainer.weights()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    trainer.step(make_batch())
    assert all(torch.equal(weights[name], before[name]) for name in weights)


def test_an_exported_model_loads_and_gives_the_same_log_probs(model_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model_folder)
    trainer.step(make_batch())
    trainer.export(tmp_path / "exported")
    tokens = [4, 8, 15, 16, 23]
    model = load_model(tmp_path / "exported", torch.float32)
    logprobs = torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0], -1)
    expected = [logprobs[i, token].item() for i, token in enumerate(tokens[1:])]
    assert trainer.prompt_logprobs(tokens) == pytest.approx(expected, abs=1e-5)
    tokenizer = load_tokenizer(tmp_path / "exported")
    assert tokenizer.chat_template == load_tokenizer(model_folder).chat_template
    assert tokenizer.convert_ids_to_tokens(7) == "w7"


def test_a_checkpoint_of_another_model_is_refused(model_folder: Path, tmp_path: Path) -> None:
    make_trainer(make_model(tmp_path / "wide", width=32)).save(tmp_path / "state")
    trainer = make_trainer(model_folder)
    before = weights_of(trainer)
    with pytest.raises(RunError, match=r"expected shape \[37, 16\].*policy\.model"):
        trainer.load(tmp_path / "state")
    assert weights_of(trainer) == before


def test_steps_in_bfloat16_go_the_same_way(model_folder: Path) -> None:
    narrow, wide = make_trainer(model_folder, dtype="bfloat16"), make_trainer(model_folder)
    first, second = narrow.step(make_batch()).metrics, wide.step(make_batch()).metrics
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=0.05)
    assert first["loss"] == pytest.approx(second["loss"], rel=0.05)
    assert weights_of(narrow) != weights_of(make_trainer(model_folder))
