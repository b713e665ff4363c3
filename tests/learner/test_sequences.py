"""Trees of segments to paths: hand-made trees, and every sampled token trained on once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from learner.batch import ENV
from learner.sequences import linearise
from rollout.trajectory import Segment


def segment(
    index: int, parent: int | None, env: list[int], sampled: list[int], branch: int = 0, version: int = 0
) -> Segment:
    return Segment(
        run="r",
        episode_id="e",
        attempt=1,
        index=index,
        parent=parent,
        branch=branch,
        env_tokens=np.array(env),
        sampled_tokens=np.array(sampled),
        logprobs=-np.array(sampled, dtype=float),
        versions=((version, len(sampled)),) if sampled else (),
        finish_reason="stop",
    )


def test_a_chain_is_one_sequence() -> None:
    (path,) = linearise("e", [segment(0, None, [1, 2], [3, 4]), segment(1, 0, [5], [6], version=2)], 0.5)
    assert path.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert path.mask.tolist() == [False, False, True, True, False, True]
    assert path.logprobs.tolist() == [0, 0, -3, -4, 0, -6]
    assert path.versions.tolist() == [ENV, ENV, 0, 0, ENV, 2]
    assert path.advantages.tolist() == [0, 0, 0.5, 0.5, 0, 0.5]


def test_a_shared_turn_is_trained_on_once_and_is_context_afterwards() -> None:
    tree = [segment(0, None, [1], [2]), segment(1, 0, [3], [4]), segment(2, 0, [5], [6], branch=1)]
    first, second = linearise("e", tree, 1.0)
    assert first.tokens[first.mask].tolist() == [2, 4]
    assert second.tokens.tolist() == [1, 2, 5, 6]
    assert second.tokens[second.mask].tolist() == [6]


def test_a_branch_that_sampled_nothing_of_its_own_is_left_out() -> None:
    tree = [segment(0, None, [1], [2]), segment(1, 0, [3], [4]), segment(2, 0, [5], [], branch=1)]
    assert [path.tokens.tolist() for path in linearise("e", tree, 1.0)] == [[1, 2, 3, 4]]


def test_a_sampled_token_with_nothing_before_it_is_not_trained_on() -> None:
    (path,) = linearise("e", [segment(0, None, [], [7, 8])], 1.0)
    assert path.mask.tolist() == [False, True]


@st.composite
def trees(draw: st.DrawFn) -> list[Segment]:
    parents = [draw(st.none() | st.integers(0, i - 1)) if i else None for i in range(draw(st.integers(1, 8)))]
    return [
        segment(i, parent, [i], [100 + 10 * i + k for k in range(draw(st.integers(0, 3)))])
        for i, parent in enumerate(parents)
    ]


@given(trees())
def test_every_sampled_token_is_trained_on_exactly_once(tree: list[Segment]) -> None:
    trained = [int(token) for path in linearise("e", tree, 1.0) for token in path.tokens[path.mask]]
    assert sorted(trained) == sorted(int(token) for part in tree for token in part.sampled_tokens)
