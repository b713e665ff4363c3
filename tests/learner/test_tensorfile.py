"""Tensor files: a failure to write is an OSError like any other."""

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from learner.tensorfile import write_tensors


def test_tensors_come_back(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", {"a": torch.arange(3), "b": torch.ones(2, dtype=torch.bfloat16)})
    again = load_file(tmp_path / "file")
    assert again["a"].tolist() == [0, 1, 2]
    assert again["b"].dtype == torch.bfloat16


def test_a_disk_that_takes_no_more_is_an_os_error_with_its_number(tmp_path: Path) -> None:
    """The real writer against a real limit: files of this process may not pass 4 KiB."""
    code = (
        "import pathlib, sys, torch\n"
        "from learner.tensorfile import write_tensors\n"
        "try: write_tensors(pathlib.Path(sys.argv[1]), {'a': torch.zeros(10000)})\n"
        "except OSError as error: print(error.errno, error.filename)"
    )
    path = tmp_path / "file"
    done = subprocess.run(
        [sys.executable, "-c", code, path],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == [str(errno.EFBIG), str(path)], done.stderr
    assert not path.exists()


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_tensors(tmp_path / "nowhere" / "file", {"a": torch.zeros(1)})
