"""Which episodes a group is made of: the same for whoever asks, and every task before any comes again."""

from __future__ import annotations

from learner.groups import GroupPlan
from rollout.config import RolloutConfig
from tasks.shell import load


def plan(seed: int = 0, size: int = 20, run: str = "r") -> GroupPlan:
    return GroupPlan(run, RolloutConfig(), load(size_train=size), 4, seed)


def test_every_task_is_drawn_once_before_any_is_drawn_again() -> None:
    drawn = [plan().task_index(group) for group in range(60)]
    for epoch in range(3):
        assert sorted(drawn[20 * epoch : 20 * epoch + 20]) == list(range(20))
    assert drawn[:20] != drawn[20:40]


def test_a_trainer_that_resumes_writes_the_same_orders() -> None:
    first = plan()
    for group in range(30):
        first.episodes(group, 0)
    again = plan().episodes(29, 5)
    wanted = first.episodes(29, 0)
    assert [(e.id, e.task_index, e.seed, e.member) for e in again] == [
        (e.id, e.task_index, e.seed, e.member) for e in wanted
    ]


def test_members_differ_in_their_seeds_alone_and_runs_in_their_seed() -> None:
    members = plan().episodes(3, 0)
    assert len({episode.seed for episode in members}) == 4
    assert len({episode.task_index for episode in members}) == 1
    assert len({episode.id for group in range(50) for episode in plan().episodes(group, 0)}) == 200
    assert [plan(seed=1).task_index(i) for i in range(20)] != [plan().task_index(i) for i in range(20)]
