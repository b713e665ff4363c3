"""Finished episodes as Parquet: what the stream said, failures with their traceback, nothing twice after a resume."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pyarrow.parquet as pq

from learner.archive import EpisodeArchive
from rollout.context import make_renderer
from rollout.trajectory import Episode, EpisodeEnd, Failure, Segment

ENV = make_renderer("quickstart", "hermes").encode_assistant("make the file")
SAID = make_renderer("quickstart", "hermes").encode_assistant("done now")


def order(n: int) -> Episode:
    return Episode(run="r", id=f"e{n}", task_set="shell", split="train", task_index=n, group=n, member=0, seed=0)


def turn(n: int, index: int, attempt: int = 1, version: int = 3) -> Segment:
    return Segment(
        run="r",
        episode_id=f"e{n}",
        attempt=attempt,
        index=index,
        parent=index - 1 if index else None,
        branch=0,
        env_tokens=ENV,
        sampled_tokens=SAID,
        logprobs=[-0.5] * len(SAID),
        versions=((version, len(SAID)),),
        finish_reason="stop",
    )


def end(n: int, index: int, attempt: int = 1, failure: Failure | None = None) -> EpisodeEnd:
    return EpisodeEnd(
        run="r",
        episode_id=f"e{n}",
        attempt=attempt,
        index=index,
        status="completed" if failure is None else "failed",
        reward=1.0 if failure is None else None,
        failure=failure,
        timing={"seconds": 2.5},
    )


def read(folder: Path) -> list[dict[str, object]]:
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_a_row_says_what_was_sampled_under_which_weights_and_reads_as_text(tmp_path: Path) -> None:
    archive = EpisodeArchive(tmp_path, "train", "quickstart")
    archive.dispatch([order(0)])
    for record in (turn(0, 0), turn(0, 1, version=4), end(0, 2)):
        archive.add(record)
    archive.flush()
    (row,) = read(tmp_path)
    assert (row["episode"], row["status"], row["reward"], row["turns"], row["seconds"]) == ("e0", "completed", 1.0, 2, 2.5)
    assert row["tokens"] == [*ENV, *SAID] * 2
    n, m = len(ENV), len(SAID)
    assert row["sampled"] == [*[False] * n, *[True] * m] * 2
    assert row["versions"] == [*[-1] * n, *[3] * m, *[-1] * n, *[4] * m]
    assert row["text"].count("make the file") == 2  # type: ignore[attr-defined]


def test_failures_keep_their_traceback_and_an_attempt_that_began_anew_replaces_the_old(tmp_path: Path) -> None:
    archive = EpisodeArchive(tmp_path, "train", "quickstart")
    archive.dispatch([order(0), order(1)])
    archive.add(end(0, 0, failure=Failure(kind="env", message="oops", traceback="line 1")))
    for record in (turn(1, 0), turn(1, 1), turn(1, 0, attempt=2), end(1, 1, attempt=2)):
        archive.add(record)
    archive.flush()
    failed, anew = read(tmp_path)
    assert (failed["status"], failed["failure"], failed["message"], failed["traceback"]) == (
        "failed",
        "env",
        "oops",
        "line 1",
    )
    assert (anew["turns"], anew["attempt"]) == (1, 2)


def test_a_resumed_archive_has_every_episode_once(tmp_path: Path) -> None:
    archive = EpisodeArchive(tmp_path, "train", "quickstart")
    archive.dispatch([order(n) for n in range(3)])
    for record in (turn(0, 0), end(0, 1), turn(1, 0), end(1, 1), turn(2, 0)):
        archive.add(record)
    assert archive.flush(at_least=10) is None
    state = msgpack.unpackb(msgpack.packb(archive.state()))
    archive.flush()
    resumed = EpisodeArchive(tmp_path, "train", "quickstart")
    resumed.load_state(state)
    resumed.discard_later()
    resumed.add(end(2, 1))
    resumed.flush()
    assert sorted(str(row["episode"]) for row in read(tmp_path)) == ["e0", "e1", "e2"]
