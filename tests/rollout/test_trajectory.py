"""The records survive the wire bit for bit, and nothing malformed gets past construction or decoding."""

import itertools
from dataclasses import fields

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollout.trajectory import FORMAT, Episode, EpisodeEnd, Failure, MalformedRecord, Record, Segment, decode, encode

tokens = hnp.arrays(np.int32, st.integers(0, 40), elements=st.integers(0, 2**31 - 1))
timing = st.dictionaries(st.text(max_size=8), st.floats(allow_nan=False), max_size=3)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    sampled = draw(tokens)
    index = draw(st.integers(0, 500))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(sampled) - 1)), max_size=3))) if len(sampled) > 1 else []
    edges = [0, *cuts, len(sampled)] if len(sampled) else [0]
    return Segment(
        run=draw(st.text(max_size=10)),
        episode_id=draw(st.text(min_size=1, max_size=10)),
        attempt=draw(st.integers(1, 9)),
        index=index,
        parent=draw(st.none() | st.integers(0, index - 1)) if index else None,
        branch=draw(st.integers(0, 9)),
        env_tokens=draw(tokens),
        sampled_tokens=sampled,
        logprobs=draw(hnp.arrays(np.float32, len(sampled), elements=finite)),
        versions=tuple((v, b - a) for v, (a, b) in enumerate(itertools.pairwise(edges))),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        reward=draw(finite),
        timing=draw(timing),
    )


failures = st.builds(Failure, kind=st.text(max_size=8), message=st.text(), traceback=st.text())
ends = st.builds(
    lambda failed, failure, reward, status, **rest: EpisodeEnd(
        status="failed" if failed else status, reward=None if failed else reward, failure=failure if failed else None, **rest
    ),
    failed=st.booleans(),
    failure=failures,
    reward=finite,
    status=st.sampled_from(["completed", "truncated"]),
    run=st.text(max_size=8),
    episode_id=st.text(max_size=8),
    attempt=st.integers(0, 9),
    index=st.integers(0, 500),
    reward_parts=st.dictionaries(st.text(max_size=5), finite, max_size=3),
    timing=timing,
)
episodes = st.builds(
    Episode,
    run=st.text(max_size=8),
    id=st.text(max_size=8),
    task_set=st.text(max_size=8),
    split=st.sampled_from(["train", "test"]),
    task_index=st.integers(0, 2**40),
    group=st.integers(0, 2**40),
    member=st.integers(0, 64),
    seed=st.integers(0, 2**63 - 1),
)


def _same(a: Record, b: Record) -> bool:
    def equal(x: object, y: object) -> bool:
        if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
            return x.dtype == y.dtype and x.tobytes() == y.tobytes()
        return x == y

    return type(a) is type(b) and all(equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))


@given(st.one_of(segments(), ends, episodes))
def test_a_record_survives_the_wire(record: Record) -> None:
    assert _same(decode(encode(record)), record)


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda b: bytes((FORMAT,)) + b))
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedRecord):
        decode(data)


@given(segments(), st.data())
def test_a_cut_record_is_refused(segment: Segment, data: st.DataObject) -> None:
    whole = encode(segment)
    with pytest.raises(MalformedRecord):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


def test_a_record_of_another_format_or_shape_is_refused() -> None:
    with pytest.raises(MalformedRecord, match="unknown record format 7f, expected 01"):
        decode(b"\x7f" + msgpack.packb(["s"]))
    with pytest.raises(MalformedRecord, match="has 1 fields"):
        decode(bytes((FORMAT,)) + msgpack.packb(["s", 1]))


def _segment(**changes: object) -> Segment:
    base: dict[str, object] = {
        "run": "r",
        "episode_id": "e7",
        "attempt": 2,
        "index": 3,
        "parent": 2,
        "branch": 0,
        "env_tokens": [1, 2],
        "sampled_tokens": [3, 4],
        "logprobs": [-0.5, -1.0],
        "versions": ((4, 1), (5, 1)),
        "finish_reason": "stop",
    }
    return Segment(**(base | changes))  # type: ignore[arg-type]  # the test hands over what a caller might


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [-0.5]}, "2 sampled tokens but 1 log-probs"),
        ({"versions": ((4, 1),)}, "do not cover 2 sampled tokens"),
        ({"versions": ((4, 3), (5, -1))}, "do not cover 2 sampled tokens"),
        ({"logprobs": [-0.5, float("nan")]}, "not finite"),
        ({"logprobs": [-0.5, float("-inf")]}, "not finite"),
        ({"parent": 3}, "parent 3 does not come before it"),
        ({"env_tokens": [[1]]}, "2 dimensions"),
    ],
)
def test_a_malformed_segment_is_refused_with_its_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(MalformedRecord, match=message) as caught:
        _segment(**changes)
    assert "('e7', 2, 3)" in str(caught.value)


@pytest.mark.parametrize(
    ("status", "reward", "failure"),
    [
        ("failed", 0.0, Failure(kind="sandbox", message="gone")),
        ("failed", None, None),
        ("completed", None, None),
        ("completed", 1.0, Failure(kind="sandbox", message="gone")),
        ("completed", float("nan"), None),
        ("done", 1.0, None),
    ],
)
def test_a_failure_is_never_a_reward(status: str, reward: float | None, failure: Failure | None) -> None:
    with pytest.raises(MalformedRecord, match="end of episode e7"):
        EpisodeEnd(
            run="r",
            episode_id="e7",
            attempt=1,
            index=1,
            status=status,  # type: ignore[arg-type]  # one case is a status that does not exist
            reward=reward,
            failure=failure,
        )


def test_arrays_travel_as_raw_bytes() -> None:
    n = 1000
    record = _segment(sampled_tokens=np.full(n, 49151), logprobs=np.full(n, -1.5), versions=((0, n),))
    assert len(encode(record)) < 8 * n + 200
