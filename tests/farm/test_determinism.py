"""Two runs with one seed and no staleness give the same rewards, whatever the order in which their episodes end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.farm.conftest import Run

pytestmark = pytest.mark.farm


def test_one_seed_and_no_staleness_give_the_same_rewards(tmp_path: Path) -> None:
    figures = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        run = Run(tmp_path / name)
        try:
            run.begin("async.max_staleness=0", "tasks.set=shell", "batch.groups_per_step=6", "batch.group_size=4")
            assert run.ends() == 0, run.output()
            steps = [row for row in run.rows() if row["kind"] == "step"]
            episodes = sorted((row["group"], row["member"], row["reward"], row["text"]) for row in run.episodes())
            figures.append(([row["reward"] for row in steps], [row["trainer"]["loss"] for row in steps], episodes))
        finally:
            run.clean_up()
    assert len(figures[0][0]) == 5
    assert figures[0] == figures[1]
    assert all(row["lag_max"] == 0 for row in steps)
