"""The tiny model on disk, twice (two sets of weights), and one engine that serves it to all tests of a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rollout.policy.tiny import EngineProcess, make_model, make_tokenizer, save_weights


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model and tokenizer, weights of seed 0; beside it `weights-0.safetensors`, `weights-1.safetensors`."""
    base = tmp_path_factory.mktemp("tiny")
    folder = base / "model"
    for seed in (0, 1):
        model = make_model(seed)
        save_weights(model, base / f"weights-{seed}.safetensors")
        if seed == 0:
            model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def engine_process(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with EngineProcess(tiny_folder, tmp_path_factory.mktemp("engine"), "--max-num-seqs", "32") as engine:
        engine.wait_ready()
        yield engine
