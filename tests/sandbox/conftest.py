"""One place for all sandboxes of these tests, so that what a test leaves behind is seen."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture(scope="session")
def base() -> Iterator[Path]:
    """Passable for every user, as a folder of pytest's is not: each sandbox of root has a user of its own."""
    with TemporaryDirectory(prefix="farmhand-test-", dir="/tmp") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder) / "sandboxes"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder of the host that everybody may write."""
    with TemporaryDirectory(prefix="farmhand-test-", dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)
