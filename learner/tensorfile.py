"""Tensors to safetensors files, with failures that read like those of any other file.

Guarantees: `write_tensors` raises `OSError` with its number and the path, a full disk included.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

_OS_ERROR = re.compile(r"os error (\d+)")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Contiguous tensors that share no memory to a new file. The file may be half written if this raises."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        found = _OS_ERROR.search(str(error))
        number = int(found.group(1)) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error
