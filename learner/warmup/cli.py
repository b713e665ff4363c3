"""`farmhand warmup`: make a policy that can already do a little. Its defaults make the package's `quickstart` model."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np

ARCHITECTURE: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
"""1.5 M parameters with the embeddings: 3 MB in bfloat16. Half the width needs ten times the steps to learn to copy a name."""

PLAY_TTL_S = 300.0
"""Of a demonstration's sandbox: those of a warm-up that was killed end by themselves."""

HASTE_RATE = 0.2
"""Learning rate of the hasty steps over that of the others."""


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of the new model.")
@click.option("--from", "start", default=None, help="Model to start from; a small one is made from nothing by default.")
@click.option("--tasks", "task_set", default="shell", show_default=True, help="Task set to demonstrate.")
@click.option("--demonstrations", default=4000, show_default=True, help="Train tasks whose oracle is played.")
@click.option("--steps", default=640, show_default=True, help="Supervised steps on demonstrations without slips.")
@click.option(
    "--haste",
    type=click.FloatRange(0, 1),
    default=0.6,
    show_default=True,
    help="Share of further demonstrations in which the oracle gives up early; such a policy has room to learn.",
)
@click.option("--hasty-steps", default=80, show_default=True, help="Steps on these, after the others.")
@click.option("--batch-size", default=64, show_default=True, help="Demonstrations a step.")
@click.option("--lr", "learning_rate", default=3e-3, show_default=True, help="Peak learning rate.")
@click.option(
    "--vocabulary", default=960, show_default=True, help="Tokens before the phrases, for a model made from nothing."
)
@click.option("--max-length", default=1024, show_default=True, help="Positions of a model made from nothing.")
@click.option("--tool-format", type=click.Choice(["hermes", "qwen3"]), default="hermes", show_default=True)
@click.option("--jobs", default=8, show_default=True, help="Sandboxes at once.")
@click.option("--threads", default=2, show_default=True, help="Threads of torch.")
@click.option("--seed", default=0, show_default=True)
def warmup(out: Path, **options: Any) -> None:
    """Play oracle solutions and take supervised steps on them."""
    if out.exists() and any(out.iterdir()):
        raise click.ClickException(f"{out} is not empty; name a new folder with --out or remove it first")
    loss = build(out, **options)
    click.echo(f"{out}: loss {loss:.4f} nats a token. Score it with: farmhand eval --model {out}")


def build(
    out: Path,
    *,
    start: str | None,
    task_set: str,
    demonstrations: int,
    haste: float,
    steps: int,
    hasty_steps: int,
    batch_size: int,
    learning_rate: float,
    vocabulary: int,
    max_length: int,
    tool_format: str,
    jobs: int,
    threads: int,
    seed: int,
) -> float:
    """Write a model folder to `out`, whole or not at all. Returns the final loss in nats a token."""
    import torch

    from learner.warmup.demonstrations import Demonstration, record, tokenise
    from learner.warmup.supervised import supervise
    from rollout.chat import ChatRenderer
    from rollout.models import load_model, load_tokenizer, resolve_model
    from sandbox.base import SandboxSpec
    from tasks.registry import load_task_set

    torch.set_num_threads(threads)
    tasks = load_task_set(task_set)
    chosen = np.random.default_rng(seed).choice(tasks.size("train"), size=demonstrations, replace=False).tolist()
    click.echo(f"playing {demonstrations} oracles of {task_set}")

    def play(indices: list[int], haste: float) -> list[Demonstration]:
        return asyncio.run(
            record(
                *(tasks, "train", indices),
                tool_format=tool_format,
                spec=SandboxSpec(ttl_s=PLAY_TTL_S),
                concurrency=jobs,
                haste=haste,
                seed=seed,
            )
        )

    demos = play(chosen, 0.0)
    hasty = play(chosen[: hasty_steps * batch_size], haste) if haste else []
    if hasty:
        mean = np.mean([demo.reward for demo in hasty])
        click.echo(f"and {len(hasty)}, {sum(demo.slipped for demo in hasty)} of them with a slip: mean reward {mean:.3f}")

    # Just before the first draw, so that nothing that came before has a part in it.
    torch.manual_seed(seed)
    if start is None:
        tokenizer, model = _from_nothing(demos, tool_format, vocabulary, max_length)
    else:
        path = resolve_model(start)
        tokenizer, model = load_tokenizer(path), load_model(path, torch.float32)
    renderer = ChatRenderer(tokenizer, tool_format)
    sequences = [tokenise(demo, renderer) for demo in demos]
    lengths = [len(item.tokens) for item in sequences]
    click.echo(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(tokenizer)} tokens in the vocabulary; "
        f"demonstrations of {np.mean(lengths):.0f} tokens (at most {max(lengths)})"
    )

    def progress(step: int, loss: float) -> None:
        if step % 50 == 0 or step == steps - 1:
            click.echo(f"step {step}: loss {loss:.4f}")

    loss = supervise(
        model, sequences, steps=steps, batch_size=batch_size, learning_rate=learning_rate, seed=seed, on_step=progress
    )
    if hasty:
        # Haste is quickly learned; what was learned before must not suffer from it.
        rate = HASTE_RATE * learning_rate
        last = [tokenise(demo, renderer) for demo in hasty]
        loss = supervise(model, last, steps=hasty_steps, batch_size=batch_size, learning_rate=rate, seed=seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        whole = Path(folder) / "model"
        model.to(torch.bfloat16).save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        for path in whole.iterdir():
            path.chmod(0o644)  # safetensors writes a file for its owner alone
        whole.rename(out)
    return loss


def _from_nothing(demos: list[Any], tool_format: str, vocabulary: int, max_length: int) -> tuple[Any, Any]:
    """A tokenizer of the demonstrations' own words, and a freshly initialised Llama over it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from envs.toolcalls import frames, system_text
    from learner.warmup.tokenizer import build_tokenizer

    phrases = {system_text(demo.reset, tool_format) for demo in demos}
    phrases |= {frame for demo in demos for frame in frames(demo.reset.tools, tool_format)}
    tokenizer = build_tokenizer(
        (text for demo in demos for text in demo.texts()),
        vocabulary=vocabulary,
        phrases=sorted(phrases),
        max_length=max_length,
    )
    config = LlamaConfig(
        **ARCHITECTURE,
        vocab_size=len(tokenizer),
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        # The usual 0.02 is for wide models; a narrow one starts slowly with it.
        initializer_range=ARCHITECTURE["hidden_size"] ** -0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # A head that begins by passing on what it looks at makes it easy to find that names are to be copied.
        for layer in model.model.layers:
            attention: Any = layer.self_attn
            attention.o_proj.weight.copy_(attention.v_proj.weight.T)
    return tokenizer, model
