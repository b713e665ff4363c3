"""A tiny random Llama with a ChatML tokenizer, and the reference engine as a process that serves it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MAX_LEN = 1024


def make_tokenizer() -> Any:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    kind: Any = PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_object=bpe, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def make_model(seed: int, **changes: Any) -> Any:
    """Weights wide enough that its distributions are far from uniform, so that a wrong one shows. It has no end token."""
    torch.manual_seed(seed)
    fields: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LEN,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**{**fields, **changes}))
    return model.eval()


def save_weights(model: Any, path: Path) -> Path:
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in model.named_parameters()}, path)
    return path


class EngineProcess:
    """`farmhand policy serve` in a process of its own; a context manager that leaves none behind."""

    def __init__(self, model: Path, folder: Path, *options: str) -> None:
        self.port_file = folder / "port.json"
        self.log = folder / "engine.log"
        # A test run that is killed takes its engines with it.
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            sys.executable,
            "-c",
            "from rollout.policy.cli import policy; policy()",
            "serve",
            str(model),
        ]
        command += ["--port-file", str(self.port_file), *options]
        self.port_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def wait_ready(self, timeout_s: float = 90.0) -> dict[str, Any]:
        """What stands in the port file, once it is there."""
        deadline = time.monotonic() + timeout_s
        while not self.port_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the engine did not get ready (exit {self.process.poll()}): {self.log.read_text()}")
            time.sleep(0.02)
        found: dict[str, Any] = json.loads(self.port_file.read_text())
        return found

    @property
    def url(self) -> str:
        return str(self.wait_ready()["url"])

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 20.0) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
