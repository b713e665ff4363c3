"""The command `farmhand`. It mounts each folder's own commands, and imports a command only when it is used."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import click

COMMANDS: Mapping[str, tuple[str, str]] = {
    "train": ("learner.commands:train", "Train a policy on a set of tasks, or go on with a run."),
    "eval": ("learner.commands:evaluate", "Score a policy on a set of tasks, without training."),
    "report": ("learner.commands:report", "Print where a run's episodes went and how stale its tokens were."),
    "warmup": ("learner.warmup.cli:warmup", "Take supervised steps on oracle demonstrations."),
    "worker": ("rollout.cli:worker", "Drive episodes for a farm."),
    "policy": ("rollout.cli:policy", "Serve a policy with the reference engine."),
    "tasks": ("tasks.cli:cli", "List, show and validate tasks."),
    "sandbox": ("sandbox.cli:cli", "Look after sandboxes."),
}
"""Name: where the command lives, and its line in `farmhand --help`, which therefore imports none of them."""

MOUNTS: Mapping[str, Mapping[str, str]] = {"tasks": {"validate": "envs.cli:validate"}}
"""Commands of a folder that appear in another one's group: `tasks` may not import `envs`."""


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = _load(COMMANDS[name][0])
        for inner, target in MOUNTS.get(name, {}).items():
            assert isinstance(command, click.Group)
            command.add_command(_load(target), inner)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            from learner.errors import explain

            known = explain(error)
            if known is None:
                raise
            message, code = known
            click.echo(f"farmhand: {message}", err=True)
            ctx.exit(code)


def _load(target: str) -> click.Command:
    module, _, name = target.partition(":")
    command: click.Command = getattr(importlib.import_module(module), name)
    return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="farmhand")
def main() -> None:
    """Train LLM agents by reinforcement learning while they work."""
    # Torch's threads would otherwise wait for each other by spinning, on the cores that the sandboxes need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
