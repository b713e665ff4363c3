"""Advantages of a group: hand-computed, and never NaN."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from learner.advantages import group_mean


def test_the_mean_of_the_valid_members_is_subtracted() -> None:
    assert group_mean(np.array([1.0, 0.0, np.nan, 0.5])).tolist() == [0.5, -0.5, 0.0, 0.0]


def test_one_valid_member_has_nothing_to_be_compared_with() -> None:
    assert group_mean(np.array([np.nan, 3.0])).tolist() == [0.0, 0.0]


def test_equal_rewards_give_exact_zeros() -> None:
    assert not group_mean(np.full(7, 0.1)).any()


@given(npst.arrays(np.float64, st.integers(0, 9), elements=st.one_of(st.just(np.nan), st.floats(-1e6, 1e6))))
def test_advantages_are_finite_and_sum_to_zero(rewards: np.ndarray) -> None:
    advantages = group_mean(rewards)
    assert np.isfinite(advantages).all()
    assert abs(advantages.sum()) <= 1e-6
    assert not advantages[np.isnan(rewards)].any()
