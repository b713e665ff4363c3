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
