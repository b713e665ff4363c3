"""The promises that the folders make: light imports, the SDK's name left alone, a package that carries its data."""

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import docker

ROOT = Path(__file__).parent.parent


def test_import_docker_is_the_sdk() -> None:
    assert hasattr(docker, "DockerClient")
    assert not list((ROOT / "docker").rglob("*.py"))


def test_the_contract_imports_neither_torch_nor_celery() -> None:
    code = "import sys, rollout.trajectory, tasks.base, envs.base, sandbox.base; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    assert not {"torch", "transformers", "celery"} & set(loaded)


def test_each_package_is_typed() -> None:
    for name in ("envs", "sandbox", "rollout", "learner", "tasks"):
        assert (files(name) / "py.typed").is_file(), name


def test_the_quickstart_model_ships_within_eight_megabytes() -> None:
    folder = ROOT / "rollout" / "models" / "quickstart"
    sizes = [path.stat().st_size for path in folder.iterdir()]
    assert (folder / "model.safetensors").is_file()
    assert sum(sizes) <= 8 * 1024 * 1024


def test_the_plugin_of_the_readme_is_valid_as_it_stands(tmp_path: Path) -> None:
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "wordcount.py").write_text(code)
    command = [sys.executable, "-m", "learner", "tasks", "validate", "wordcount:WordCount", "--count", "4"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    options = ["--set", "tasks.set=wordcount:WordCount", "--set", "run.steps=1", "--set", "eval.size=0"]
    small = ["--set", "batch.groups_per_step=2", "--set", "batch.group_size=2", "--set", "run.time_limit_s=60"]
    command = [sys.executable, "-m", "learner", "train", str(ROOT / "examples" / "quickstart.toml"), *options, *small]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
