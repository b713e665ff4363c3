"""A config file's mistakes: the file, the key, what was found, what is allowed, all at once and before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from learner.cli import main
from learner.config import ConfigError, TrainConfig, check_form, load_config
from learner.preflight import check

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def mistakes(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
async def test_the_examples_pass_every_check(path: Path) -> None:
    await check(load_config(path), str(path))


def test_all_mistakes_come_at_once_with_file_key_found_and_allowed(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        [run]
        steps = 0
        [batch]
        group_sise = 4
        [objective]
        name = "ppo"
        [sampling]
        temperature = "warm"
        """,
    )
    text = mistakes(path)
    assert text.startswith(f"{path}: 4 mistakes")
    assert "run.steps: found 0; allowed: greater than or equal to 1" in text
    assert "batch.group_sise: found an unknown key; did you mean 'group_size'?" in text
    assert "objective.name: found \"ppo\"; allowed: 'dis' or 'cispo'" in text
    assert 'sampling.temperature: found "warm"; allowed: ' in text


def test_an_unknown_section_names_the_known_ones(tmp_path: Path) -> None:
    text = mistakes(write(tmp_path, "[run]\nsteps = 1\n[optimiser]\n"))
    assert "optimiser: found an unknown section; did you mean 'optimizer'?" in text
    assert "async" in text


@pytest.mark.parametrize(
    ("content", "told"), [("[run", "expected TOML"), ("", "neither `steps` nor `time_limit_s`"), ("\x00", "expected TOML")]
)
def test_a_file_that_is_no_config(tmp_path: Path, content: str, told: str) -> None:
    assert told in mistakes(write(tmp_path, content))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "nothing at this path" in mistakes(tmp_path / "no.toml")


def test_overrides_are_toml_or_else_text(tmp_path: Path) -> None:
    path = write(tmp_path, "[run]\nsteps = 1\n")
    config = load_config(path, ["run.steps=7", "policy.model=some/folder", "eval.at_end=false", "tasks.options={seed = 3}"])
    assert config.run.steps == 7
    assert config.policy.model == "some/folder"
    assert config.eval.at_end is False
    assert config.tasks.options == {"seed": 3}


def test_another_task_set_does_not_get_the_options_of_the_files_own(tmp_path: Path) -> None:
    path = write(tmp_path, '[run]\nsteps = 1\n[tasks]\nset = "shell"\noptions = {seed = 3}\n')
    assert load_config(path).tasks.options == {"seed": 3}
    assert load_config(path, ["tasks.set=wordcount:WordCount"]).tasks.options == {}
    assert load_config(path, ["tasks.set=shell", "tasks.options.seed=4"]).tasks.options == {"seed": 4}


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_a_figure_that_is_not_finite_is_a_mistake(tmp_path: Path, value: str) -> None:
    text = mistakes(write(tmp_path, "[run]\nsteps = 1\n"), f"optimizer.learning_rate={value}")
    assert "optimizer.learning_rate" in text


async def test_preflight_asks_a_broker_that_is_said_to_run() -> None:
    text = await preflight(broker={"url": "redis://:secret@127.0.0.1:1"})
    assert "broker.url: found redis://:***@127.0.0.1:1; no Valkey or Redis answered there" in text


@pytest.mark.parametrize("override", ["steps", "=3", "run..steps=1", "run.steps.more=1"])
def test_an_override_that_cannot_be_applied(tmp_path: Path, override: str) -> None:
    assert "expected section.key=value" in mistakes(write(tmp_path, "[run]\nsteps = 1\n"), override)


def test_what_a_run_keeps_loads_back_to_the_same() -> None:
    config = load_config(ROOT / "examples" / "quickstart.toml", ["async.max_staleness=5"])
    kept = json.loads(json.dumps(config.model_dump(mode="json", by_alias=True)))
    assert check_form(kept, "kept") == config
    assert set(config.rollout().model_dump()) == {"policy", "sampling", "tasks", "limits", "lease", "sandbox"}


async def preflight(**sections: dict[str, object]) -> str:
    data = {"run": {"steps": 1}, "eval": {"size": 0}, **sections}
    with pytest.raises(ConfigError) as caught:
        await check(TrainConfig.model_validate(data), "x.toml")
    return str(caught.value)


async def test_preflight_finds_what_is_not_there_and_names_what_is() -> None:
    text = await preflight(
        tasks={"set": "shel"}, policy={"model": "gpt"}, sampling={"temperature": 0, "top_p": 0.9}, lease={"renew_s": 29}
    )
    assert "5 mistakes" in text
    assert "tasks.set: found 'shel'; unknown task set 'shel'; known: shell" in text
    assert "policy.model: found 'gpt'" in text
    assert "known are quickstart, smollm2" in text
    assert "sampling.temperature" in text
    assert "sampling.top_p" in text
    assert "lease.renew_s" in text


async def test_preflight_knows_the_size_of_a_split() -> None:
    text = await preflight(eval={"size": 5000}, tasks={"options": {"size_test": 20}})
    assert "eval.size: found 5000; task set 'shell' has 20 tasks in its test split" in text


async def test_preflight_refuses_a_sandbox_that_nobody_makes() -> None:
    assert "sandbox.kind: found 'docke'; allowed: local" in await preflight(sandbox={"kind": "docke"})
    text = await preflight(sandbox={"memory": 1})
    assert "sandbox.memory: found 1; allowed: cpus, disk_mb, env" in text


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"batch": {"group_size": 1}}, "batch.min_members: found 2; at most batch.group_size = 1"),
        ({"broker": {"url": "redis://:secret@"}}, "broker.url: found redis://:***@"),
        ({"limits": {"max_tokens": 5000}}, "limits.max_tokens: found 5000; allowed: at most 1024"),
        ({"policy": {"api_key_env": "NO_SUCH_KEY"}}, "policy.api_key_env: found 'NO_SUCH_KEY'; no environment variable"),
    ],
)
async def test_preflight_finds_values_that_do_not_fit_together(sections: dict[str, dict[str, object]], told: str) -> None:
    assert told in await preflight(**sections)


def test_urls_of_an_unknown_form_are_mistakes(tmp_path: Path) -> None:
    path = write(tmp_path, '[run]\nsteps = 1\n[policy]\nurl = "localhost:8000"\n[broker]\nurl = "amqp://x"\n')
    text = mistakes(path)
    assert 'policy.url: found "localhost:8000"' in text
    assert 'broker.url: found "amqp://x"' in text


def test_the_command_prints_mistakes_without_a_traceback(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["train", str(write(tmp_path, "[run]\nsteps = -1\n"))])
    assert result.exit_code == 2
    assert "run.steps" in result.output
    assert "Traceback" not in result.output
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("arguments", [["train"], ["train", "a.toml", "--resume", "b"]])
def test_train_wants_a_config_or_a_run(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "either a config file or --resume RUN" in result.output


def test_help_names_every_command_quickly() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for name in ("train", "eval", "report", "warmup", "worker", "policy", "tasks", "sandbox"):
        assert name in result.output
