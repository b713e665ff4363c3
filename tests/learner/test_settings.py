"""Settings: what cannot be trained on is named, with what is allowed."""

import pytest
from pydantic import ValidationError

from learner.objectives import OBJECTIVES
from learner.settings import BatchSettings, ObjectiveSettings, OptimizerSettings, check_sampling
from rollout.config import SamplingConfig


def test_full_sampling_at_any_temperature_can_be_trained_on() -> None:
    assert check_sampling(SamplingConfig(temperature=0.6)) == []


def test_every_truncation_of_the_distribution_is_named() -> None:
    mistakes = check_sampling(SamplingConfig(temperature=0, top_p=0.9, top_k=20))
    assert [(key, found) for key, found, _ in mistakes] == [
        ("sampling.temperature", "0.0"),
        ("sampling.top_p", "0.9"),
        ("sampling.top_k", "20"),
    ]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_can_be_chosen(name: str) -> None:
    assert ObjectiveSettings.model_validate({"name": name}).name == name


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (BatchSettings, {"groups_per_step": 0}),
        (BatchSettings, {"group_sizes": 8}),
        (ObjectiveSettings, {"name": "ppo"}),
        (OptimizerSettings, {"learning_rate": 0}),
        (OptimizerSettings, {"dtype": "float16"}),
    ],
)
def test_what_makes_no_sense_is_refused(section: type, values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        section.model_validate(values)  # type: ignore[attr-defined]
