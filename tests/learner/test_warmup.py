"""Warm-up: a tokenizer that loses nothing, demonstrations laid out as the driver lays them out, slips, a loadable model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from envs.base import ToolCall
from envs.oracle import oracle_calls
from learner.warmup.cli import warmup
from learner.warmup.demonstrations import Demonstration, OracleFailed, TokenSequence, record, tokenise
from learner.warmup.slips import slip
from learner.warmup.supervised import IGNORED, collate
from learner.warmup.tokenizer import build_tokenizer
from rollout.chat import ChatRenderer
from rollout.models import load_model, load_tokenizer, resolve_model
from sandbox.base import SandboxSpec
from tasks.registry import load_task_set
from tasks.shell.words import WORDS

TASKS = load_task_set("shell")
TOKENIZER = build_tokenizer(
    [TASKS.task("train", index).instruction for index in range(400)],
    vocabulary=1000,
    phrases=["a phrase of words", '"}}\n</tool_call>'],
    max_length=1024,
)


async def played(indices: list[int], haste: float, seed: int = 0) -> list[Demonstration]:
    return await record(
        TASKS, "train", indices, tool_format="hermes", spec=SandboxSpec(), concurrency=4, haste=haste, seed=seed
    )


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_a_name_is_one_token_wherever_it_stands() -> None:
    def tokens(text: str) -> list[int]:
        return list(TOKENIZER.encode(text, add_special_tokens=False))

    whole = [word for word in WORDS if len(tokens(word)) == 1]
    assert len(whole) > 0.9 * len(WORDS)
    for word in whole[:20]:
        assert tokens(word)[0] in tokens(f"mv a/{word}.txt b")
        assert tokens(word)[0] in tokens(f"the file '{word}'")
    assert len(tokens("a phrase of words")) == 1


async def test_a_demonstration_is_laid_out_as_an_episode_is() -> None:
    """What the driver would have: the opening, each sampled turn with its end, the bridge to the next."""
    renderer = ChatRenderer(TOKENIZER, "hermes")
    (demo,) = await played([2], 0)
    sequence = tokenise(demo, renderer)
    opening = renderer.open(demo.reset)
    assert sequence.tokens[: len(opening)].tolist() == opening
    assert not sequence.mask[: len(opening)].any()
    assert len(demo.turns) == 3
    assert not demo.slipped
    assert demo.reward == 1
    spoken = np.split(
        sequence.tokens[sequence.mask], np.flatnonzero(sequence.tokens[sequence.mask] == renderer.stop_token_ids[0]) + 1
    )
    calls = [call for turn in spoken[:-1] for call in renderer.parse(turn.tolist()).calls]
    assert calls == oracle_calls(TASKS.task("train", 2))
    assert not len(spoken[-1]), "the last turn is closed too"
    whole = TOKENIZER.decode(sequence.tokens)
    assert f"<|im_start|>user\n{TASKS.task('train', 2).instruction}<|im_end|>\n<|im_start|>assistant\n" in whole
    assert demo.turns[0][1].messages[0]["content"] in whole


def test_only_what_the_assistant_says_is_learned() -> None:
    tokens = np.arange(10, 16, dtype=np.int32)
    item = TokenSequence(tokens, np.array([False, False, True, True, False, True]))
    _, targets = collate([item, TokenSequence(tokens[:3], np.array([False, True, True]))])
    assert targets.tolist() == [
        [IGNORED, 12, 13, IGNORED, 15, IGNORED],
        [11, 12, IGNORED, IGNORED, IGNORED, IGNORED],
    ]


@given(st.integers(0, 300), st.integers(0, 50))
def test_a_slip_leaves_out_what_comes_last_and_still_ends_the_episode(index: int, seed: int) -> None:
    calls = oracle_calls(TASKS.task("train", index))
    slipped = slip(calls, np.random.default_rng(seed))
    assert slipped != calls
    assert slipped == slip(calls, np.random.default_rng(seed))
    assert slipped[-1] == calls[-1]
    assert len(slipped) < len(calls)
    assert slipped[:-1] == calls[: len(slipped) - 1]


def test_a_slip_needs_work_to_slip_in() -> None:
    calls = [ToolCall("answer", {"value": 3})]
    assert slip(calls, np.random.default_rng(0)) == calls


async def test_haste_is_the_share_of_demonstrations_with_a_slip() -> None:
    demos = await played(list(range(40)), 0.5)
    slipped = [demo for demo in demos if demo.slipped]
    assert 10 <= len(slipped) <= 30
    assert all(demo.reward == 1 for demo in demos if not demo.slipped)
    assert np.mean([demo.reward for demo in slipped]) < 0.3
    assert [demo.slipped for demo in await played(list(range(8)), 0.5)] == [demo.slipped for demo in demos[:8]]


async def test_an_oracle_that_fails_stops_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"setup": "", "verify": "echo reward 0", "oracle": [{"name": "submit", "arguments": {}}]}
    task = TASKS.task("train", 0)
    monkeypatch.setattr(TASKS, "task", lambda split, index: task.model_copy(update={"params": broken}))
    with pytest.raises(ExceptionGroup) as caught:
        await played([0], 0)
    assert caught.group_contains(OracleFailed, match=r"shell/train/0: its oracle scored 0, expected 1")


def warm(out: Path, *options: str) -> list[float]:
    """Losses that it printed."""
    small = (
        "--demonstrations",
        "48",
        "--steps",
        "30",
        "--hasty-steps",
        "4",
        "--batch-size",
        "8",
        "--threads",
        "1",
        "--out",
        str(out),
    )
    result = CliRunner().invoke(warmup, [*small, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return [float(line.split("loss ")[1]) for line in result.output.splitlines() if line.startswith("step ")]


def test_a_warm_up_learns_and_leaves_a_model(tmp_path: Path) -> None:
    losses = warm(tmp_path / "one")
    assert losses[-1] < 0.7 * losses[0]
    folder = resolve_model(tmp_path / "one")
    model, tokenizer = load_model(folder, torch.float32), load_tokenizer(folder)
    renderer = ChatRenderer(tokenizer, "hermes")
    assert model.config.vocab_size >= len(tokenizer)
    assert renderer.stop_token_ids == (tokenizer.eos_token_id,)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id

    assert warm(tmp_path / "same") == losses
    assert _digest(tmp_path / "same") == _digest(tmp_path / "one")

    assert warm(tmp_path / "more", "--from", str(tmp_path / "one"))[0] < losses[0], "it starts from the model that was named"


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    result = CliRunner().invoke(warmup, ["--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "is not empty" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_package_ships_a_small_model_that_knows_the_tools() -> None:
    folder = resolve_model("quickstart")
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 8_000_000
    model, tokenizer = load_model(folder, torch.float32), load_tokenizer(folder)
    renderer = ChatRenderer(tokenizer, "hermes")
    assert renderer.stop_token_ids == (tokenizer.eos_token_id,)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.max_position_embeddings >= 1024
