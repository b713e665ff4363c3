"""The trainer: one model, one optimizer, and steps on batches. Blind to groups, rewards and the farm.

Guarantees:

* The gradient of a step is that of the loss's sum over the batch's sampled tokens, divided by their number, however the
  batch is split into micro-batches.
* A step whose loss or gradient is not finite changes nothing: neither weights, nor optimizer, nor counters.
* `load(folder)` after `save(folder)` goes on bit for bit on the same machine with the same number of threads.
* Weights live in float32, and go out in float32, whatever the dtype that steps are computed in.

One call at a time: the calls block, and none of them locks.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from learner.batch import Batch
from learner.objectives import OBJECTIVES
from learner.packing import MicroBatch, pack
from learner.run import RunError
from learner.settings import ObjectiveSettings, OptimizerSettings
from learner.tensorfile import write_tensors
from rollout.models import load_model, load_tokenizer

_LOGITS = 2**24
"""Logits held at once, 64 MiB in float32: a large vocabulary is run through in pieces."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class StepResult:
    """`metrics`: `loss`, `entropy` and `mismatch_kl` in nats a token, `grad_norm` before clipping, `clipped_share` of the
    sampled tokens, `ratio` (mean importance weight before clipping), `learning_rate`, `tokens` (prompts included),
    `sampled_tokens` and `seconds`."""

    metrics: dict[str, float]
    skipped: bool
    """The loss or the gradient was not finite, and nothing has changed."""


class Trainer:
    """`temperature` is that of sampling: log-probs are those of the logits divided by it."""

    def __init__(
        self,
        model_folder: Path,
        *,
        optimizer: OptimizerSettings,
        objective: ObjectiveSettings,
        micro_batch_tokens: int,
        temperature: float,
        seed: int,
    ) -> None:
        if optimizer.threads is not None:
            torch.set_num_threads(optimizer.threads)
        torch.manual_seed(seed)
        self._settings = optimizer
        self._objective = OBJECTIVES[objective.name]
        self._eps_low, self._eps_high = objective.eps_low, objective.eps_high
        self._micro_batch_tokens = micro_batch_tokens
        self._temperature = temperature
        self._folder = model_folder
        self._model = load_model(model_folder, torch.float32)
        # Named parameters hold a tied one once, under the name that comes first.
        self._masters: dict[str, torch.nn.Parameter] = dict(self._model.named_parameters())
        self._worker, self._copies = self._model, self._masters
        """What steps are computed with: the model itself, or a copy in another dtype."""
        if optimizer.dtype != "float32":
            self._worker = load_model(model_folder, getattr(torch, optimizer.dtype))
            self._worker.set_attn_implementation(_attention_in_float32())
            self._copies = dict(self._worker.named_parameters())
        self._check_head()
        self._adam = torch.optim.AdamW(
            self._masters.values(),
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self.steps = 0
        """Optimizer steps taken, skipped ones apart."""

    @property
    def positions(self) -> int:
        """Tokens of the longest sequence that the model takes."""
        return int(self._model.config.max_position_embeddings)

    @property
    def vocab_size(self) -> int:
        return int(self._model.get_output_embeddings().weight.shape[0])

    @torch.no_grad()
    def _check_head(self) -> None:
        """The head is run at chosen places alone, which is right only if nothing comes after it."""
        tokens = torch.arange(min(8, self.vocab_size))[None]
        whole = self._model(input_ids=tokens, use_cache=False).logits
        if not torch.allclose(_logits(self._model, _hidden(self._model, tokens)), whole[0], rtol=1e-3, atol=1e-3):
            raise RunError(
                f"{self._folder}: models of type {self._model.config.model_type!r} change the logits after the output"
                " embeddings, which the trainer does not support; choose another `policy.model`"
            )

    # The step

    def step(self, batch: Batch) -> StepResult:
        """Train on a batch. One without sampled tokens is a step that changes nothing."""
        began = time.perf_counter()
        sampled = batch.sampled_tokens
        learning_rate = self._learning_rate()
        metrics = {"learning_rate": learning_rate, "tokens": float(batch.tokens), "sampled_tokens": float(sampled)}
        skipped = False
        if sampled:
            sums: defaultdict[str, float] = defaultdict(float)
            for micro in pack(batch.sequences, self._micro_batch_tokens):
                self._accumulate(micro, sampled, sums)
            means = {name: total / sampled for name, total in sums.items()}
            norm = self._clip()
            metrics |= {"loss": means["loss"], "grad_norm": norm, "clipped_share": means.pop("clipped"), **means}
            skipped = not (math.isfinite(means["loss"]) and math.isfinite(norm))
            if not skipped:
                self._update(learning_rate)
            for parameter in self._masters.values():
                parameter.grad = None
        metrics["seconds"] = time.perf_counter() - began
        return StepResult(metrics, skipped)

    def _learning_rate(self) -> float:
        warm = min(1.0, (self.steps + 1) / max(1, self._settings.warmup_steps))
        return self._settings.learning_rate * warm

    def _accumulate(self, micro: MicroBatch, sampled: int, sums: defaultdict[str, float]) -> None:
        """Add a micro-batch's part to the masters' gradients and to the sums."""
        hidden = _hidden(self._worker, micro.tokens).index_select(0, micro.places)
        # The head goes through its places in pieces, each with its own backward pass down to the hidden states.
        cut = hidden.detach().requires_grad_()
        size = max(1, _LOGITS // self.vocab_size)
        for start in range(0, len(micro.places), size):
            piece = slice(start, start + size)
            logprobs = torch.log_softmax(_logits(self._worker, cut[piece]) / self._temperature, dim=-1)
            logp = logprobs.gather(1, micro.targets[piece, None]).squeeze(1)
            mask = torch.ones_like(logp, dtype=torch.bool)
            loss, figures = self._objective(
                logp,
                micro.logprobs[piece],
                micro.advantages[piece],
                mask,
                eps_low=self._eps_low,
                eps_high=self._eps_high,
            )
            (loss / sampled).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                figures |= {"loss": loss, "entropy": -(logprobs.exp() * logprobs).sum()}
            for name, figure in figures.items():
                sums[name] += figure.item()
        hidden.backward(cut.grad)  # type: ignore[no-untyped-call]
        if self._copies is not self._masters:
            for name, parameter in self._copies.items():
                if parameter.grad is not None:
                    grad = parameter.grad.float()
                    master = self._masters[name]
                    master.grad = grad if master.grad is None else master.grad.add_(grad)
                    parameter.grad = None

    def _clip(self) -> float:
        """Bound the gradient's norm; returns what it was. A norm that is not finite leaves the gradient alone."""
        grads = [parameter.grad for parameter in self._masters.values() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if torch.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self._settings.max_grad_norm, norm)
        return norm.item()

    def _update(self, learning_rate: float) -> None:
        self._adam.param_groups[0]["lr"] = learning_rate
        self._adam.step()
        self.steps += 1
        self._refresh_copies()

    @torch.no_grad()
    def _refresh_copies(self) -> None:
        if self._copies is not self._masters:
            for name, parameter in self._copies.items():
                parameter.copy_(self._masters[name])

    # Weights out

    @torch.no_grad()
    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """As `rollout.policy.base.PolicyAdmin.prompt_logprobs`: at temperature 1, computed in float32."""
        tokens = torch.tensor([token_ids])
        logprobs = torch.log_softmax(_logits(self._model, _hidden(self._model, tokens)[:-1]), dim=-1)
        values: list[float] = logprobs.gather(1, tokens[0, 1:, None]).squeeze(1).tolist()
        return values

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """A copy of the parameters in float32, contiguous, a tied one once, by the names that transformers gives them."""
        return {name: master.detach().clone(memory_format=torch.contiguous_format) for name, master in self._masters.items()}

    def export(self, folder: Path) -> None:
        """Write a folder that `rollout.models.load_model` and `load_tokenizer` read, in float32."""
        self._model.save_pretrained(folder)
        load_tokenizer(self._folder).save_pretrained(folder)

    # State

    def save(self, folder: Path) -> None:
        """Masters, optimizer and counters into a folder that exists or not."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {"rng": torch.get_rng_state()}
        for name, master in self._masters.items():
            tensors[f"model.{name}"] = master.detach().contiguous()
            state = self._adam.state.get(master, {})
            tensors |= {f"{moment}.{name}": state[moment].contiguous() for moment in _MOMENTS if moment in state}
        write_tensors(folder / "trainer.safetensors", tensors)
        (folder / "trainer.json").write_text(json.dumps({"steps": self.steps}) + "\n")

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote. Raises `RunError` if it is of another model."""
        tensors = load_file(folder / "trainer.safetensors")
        steps = int(json.loads((folder / "trainer.json").read_text())["steps"])
        for name, master in self._masters.items():
            found = tensors.get(f"model.{name}")
            if found is None or found.shape != master.shape:
                what = "nothing" if found is None else f"shape {list(found.shape)}"
                raise RunError(
                    f"{folder}: found {what} for the parameter {name!r}, expected shape {list(master.shape)};"
                    " was `policy.model` another one when the run began?"
                )
        state: dict[int, dict[str, Any]] = {}
        for i, (name, master) in enumerate(self._masters.items()):
            master.copy_(tensors[f"model.{name}"])
            moments = {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS if f"{moment}.{name}" in tensors}
            if moments:
                state[i] = {"step": torch.tensor(float(steps)), **moments}
        self._adam.load_state_dict({"state": state, "param_groups": self._adam.state_dict()["param_groups"]})
        torch.set_rng_state(tensors["rng"])
        self.steps = steps
        self._refresh_copies()


def _hidden(model: Any, tokens: Tensor) -> Tensor:
    """Last hidden states [places, width] of `tokens` [rows, longest]. Pads stand at the end: no place sees them."""
    hidden: Tensor = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1)


def _logits(model: Any, hidden: Tensor) -> Tensor:
    logits: Tensor = model.get_output_embeddings()(hidden)
    return logits.float()


def _attention_in_float32() -> str:
    """Register attention that computes in float32 whatever it is given, and return its name for transformers.

    Softmax loses the most in a narrow dtype, and torch's bfloat16 attention on CPUs takes several times as long.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        out, _ = sdpa_attention_forward(module, query.float(), key.float(), value.float(), *args, **kwargs)
        return out.to(query.dtype), None

    name = "sdpa_float32"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name
