"""`farmhand policy`: serve a model with the reference engine."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def policy() -> None:
    """Serve a policy with the reference engine."""


@policy.command()
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on. No route has authentication.")
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--port-file", type=click.Path(dir_okay=False, path_type=Path), help="File to write the URL to, as JSON.")
@click.option("--max-num-seqs", default=64, show_default=True, type=click.IntRange(1), help="Requests in the batch at once.")
@click.option("--max-model-len", type=click.IntRange(2), help="Tokens of prompt and answer; the model's own by default.")
@click.option("--max-prefill-tokens", default=512, show_default=True, type=click.IntRange(1), help="Prompt tokens per step.")
@click.option("--cached-rows", type=click.IntRange(0), help="Finished requests kept cached; default 2 x --max-num-seqs.")
@click.option("--paused", is_flag=True, help="Let requests wait until a resume, e.g. for weights to come first.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option(
    "--threads",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Threads of torch. With one, results are reproducible.",
)
def serve(
    *,
    model: str,
    host: str,
    port: int,
    port_file: Path | None,
    max_num_seqs: int,
    max_model_len: int | None,
    max_prefill_tokens: int,
    cached_rows: int | None,
    paused: bool,
    dtype: str,
    threads: int,
) -> None:
    """Serve MODEL, a folder or a known name, over vLLM's routes until SIGTERM."""
    import torch
    import uvloop

    from rollout.models import ModelNotFound, load_model, load_tokenizer, resolve_model
    from rollout.policy.engine.core import Engine, EngineOptions
    from rollout.policy.engine.kv import UnsupportedModel
    from rollout.policy.engine.server import PolicyServer, write_port_file
    from rollout.policy.engine.server import serve as run

    torch.set_num_threads(threads)
    try:
        path = resolve_model(model)
        loaded = load_model(path, getattr(torch, dtype))
        longest = loaded.config.max_position_embeddings
        if max_model_len is not None and max_model_len > longest:
            raise click.BadParameter(f"{max_model_len}, but the model has {longest} positions", param_hint="--max-model-len")
        options = EngineOptions(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len or longest,
            cached_rows=2 * max_num_seqs if cached_rows is None else cached_rows,
            max_prefill_tokens=max_prefill_tokens,
        )
        engine = Engine(loaded, options)
    except (ModelNotFound, UnsupportedModel) as error:
        raise click.ClickException(str(error)) from None
    tokenizer = load_tokenizer(path)

    def listening(url: str) -> None:
        click.echo(f"serving {model} at {url}")
        if port_file is not None:
            write_port_file(port_file, url)

    async def main() -> None:
        server = PolicyServer(engine, tokenizer, model, eos_ids(loaded))
        await run(server, host, port, listening, paused=paused)

    try:
        uvloop.run(main())
    except OSError as error:
        raise click.ClickException(f"cannot listen on --host {host} --port {port}: {error}") from error


def eos_ids(model: object) -> frozenset[int]:
    """Tokens that end an answer by the model's own configuration."""
    found: set[int] = set()
    for name in ("generation_config", "config"):
        value = getattr(getattr(model, name, None), "eos_token_id", None)
        found |= set(value) if isinstance(value, list | tuple) else set() if value is None else {value}
    return frozenset(found)
