"""New weights for a living model: staged from safetensors files, checked whole, then copied in at once.

Guarantees: a file that is unreadable, or has a tensor that is extra, of another shape or not finite, is a `BadWeights` that
names it, as is a set of files that lacks one; the model's weights are touched only after every check has passed.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open


class BadWeights(Exception):
    """Weights that do not fit the model; the message names the file and the tensor."""


class WeightUpdate:
    """One update: `stage` each file, then `apply`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._targets = dict(model.named_parameters())
        # A tied parameter appears once among the parameters, but a file may hold it under either name.
        by_place = {id(parameter): name for name, parameter in self._targets.items()}
        self._aliases = {
            name: by_place[id(parameter)]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name not in self._targets
        }
        self._staged: dict[str, torch.Tensor] = {}

    def stage(self, path: Path) -> None:
        """Read and check one file. Raises `BadWeights`; what was staged before stays."""
        read: dict[str, torch.Tensor] = {}
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    target = self._aliases.get(name, name)
                    if target not in self._targets:
                        raise BadWeights(f"{path}: tensor {name!r} is not one of the model's")
                    tensor = self._checked(path, name, target, file.get_tensor(name))
                    if target in read and not torch.equal(read[target], tensor):
                        raise BadWeights(f"{path}: {name!r} and {target!r} are tied in the model, but differ in the file")
                    read[target] = tensor
        except FileNotFoundError:
            raise BadWeights(f"{path}: no such file on the server's machine") from None
        except (SafetensorError, OSError) as error:
            raise BadWeights(f"{path}: not a safetensors file that can be read: {error}") from None
        self._staged.update(read)

    def _checked(self, path: Path, name: str, target: str, tensor: torch.Tensor) -> torch.Tensor:
        expected = self._targets[target]
        if tensor.shape != expected.shape:
            raise BadWeights(
                f"{path}: tensor {name!r} has shape {list(tensor.shape)}, the model's has {list(expected.shape)}"
            )
        if not tensor.dtype.is_floating_point:
            raise BadWeights(f"{path}: tensor {name!r} has dtype {tensor.dtype}, expected a floating point one")
        tensor = tensor.to(expected.dtype)
        if not torch.isfinite(tensor).all():
            raise BadWeights(f"{path}: tensor {name!r} has values that are not finite")
        return tensor

    def check_complete(self) -> None:
        """Raises `BadWeights` with the names that no staged file held."""
        missing = [name for name in self._targets if name not in self._staged]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise BadWeights(f"the update lacks tensors {', '.join(map(repr, missing[:3]))}{more}")

    def apply(self) -> None:
        """Copy everything into the model. Raises `BadWeights` if it is not complete."""
        self.check_complete()
        with torch.no_grad():
            for name, target in self._targets.items():
                target.copy_(self._staged[name])
