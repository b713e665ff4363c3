"""Checkpoints: what was saved comes back, and nothing else is ever taken for one."""

import errno
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from learner import checkpoint as module
from learner.checkpoint import CheckpointDamaged, load_checkpoint, save_checkpoint

PARTS = {"buffer": b"\x00segments", "ledger.json": b"{}"}


def trainer_of(text: str) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        (folder / "weights").write_text(text)

    return save


def save(folder: Path, step: int, keep: int = 2) -> Path:
    return save_checkpoint(folder, step, {**PARTS, "step": str(step).encode()}, trainer_of(f"weights {step}"), keep)


def step_of(folder: Path, allow_previous: bool = False) -> int:
    loaded = load_checkpoint(folder, allow_previous)
    assert loaded is not None
    assert loaded.parts == {**PARTS, "step": str(loaded.step).encode()}
    assert (loaded.trainer_folder / "weights").read_text() == f"weights {loaded.step}"
    return loaded.step


@pytest.mark.parametrize("there", [True, False])
def test_no_checkpoint_is_none(tmp_path: Path, there: bool) -> None:
    assert load_checkpoint(tmp_path if there else tmp_path / "none", False) is None


def test_the_newest_is_loaded_and_only_so_many_are_kept(tmp_path: Path) -> None:
    for step in range(1, 13):
        save(tmp_path, step)
    assert step_of(tmp_path) == 12
    assert len(list(tmp_path.iterdir())) == 2


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 4, keep=1)
    save_checkpoint(tmp_path, 4, {"buffer": b"later"}, trainer_of("later"), 1)
    loaded = load_checkpoint(tmp_path, False)
    assert loaded is not None
    assert loaded.parts == {"buffer": b"later"}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped bit": flip,
    "cut short": lambda path: os.truncate(path, 1),
    "missing": lambda path: path.unlink(),
    "empty": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("file", ["buffer", "trainer/weights", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_can_be_stepped_over(tmp_path: Path, file: str, damage: str) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    if damage == "a flipped bit" and file == "manifest.json":
        (newest / file).write_text((newest / file).read_text().replace('"step": 2', '"stop": 2'))
    else:
        DAMAGES[damage](newest / file)
    with pytest.raises(CheckpointDamaged) as caught:
        load_checkpoint(tmp_path, False)
    assert str(newest / file) in str(caught.value)
    assert "checkpoint.allow_previous" in str(caught.value)
    assert step_of(tmp_path, allow_previous=True) == 1
    # The damaged one is out of the way for good, and the run goes on over it.
    assert step_of(tmp_path) == 1
    save(tmp_path, 2)
    assert step_of(tmp_path) == 2


def test_when_all_are_damaged_it_says_so(tmp_path: Path) -> None:
    for step in (1, 2):
        flip(save(tmp_path, step) / "buffer")
    with pytest.raises(CheckpointDamaged, match=r"step-2/buffer .*no checkpoint before it is whole"):
        load_checkpoint(tmp_path, True)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "weights")


def half(folder: Path) -> None:
    (folder / "weights").write_text("half")
    full()


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, keep=1)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, 2, PARTS, half, 1)
    monkeypatch.setattr(module, "_sync", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 3, keep=1)
    assert len(list(tmp_path.iterdir())) == 1
    assert step_of(tmp_path) == 1


def die(folder: Path) -> None:
    (folder / "weights").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_in_the_middle_leaves_the_checkpoint_before_and_its_leftovers_go(tmp_path: Path) -> None:
    save(tmp_path, 1)
    child = multiprocessing.get_context("fork").Process(target=save_checkpoint, args=(tmp_path, 2, PARTS, die, 1))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    assert step_of(tmp_path) == 1
    assert len(list(tmp_path.iterdir())) == 1
