"""Objectives against numbers worked out by hand, and against finite differences."""

import math

import pytest
import torch

from learner.objectives import OBJECTIVES

RATIOS = torch.tensor([1.0, 1.4, 2.0, 2.5, 0.5, 0.4], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -1.0, 1.0, -2.0, 1.0, 3.0], dtype=torch.float64)
LOGP = torch.tensor([-1.0, -0.5, -2.0, -0.25, -1.5, -3.0], dtype=torch.float64)
ALL = torch.ones(6, dtype=torch.bool)


def run(name: str, mask: torch.Tensor = ALL, **eps: float) -> tuple[torch.Tensor, dict[str, float], torch.Tensor]:
    logp = LOGP.clone().requires_grad_()
    loss, sums = OBJECTIVES[name](logp, LOGP - RATIOS.log(), ADVANTAGES, mask, **eps)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    return loss.detach(), {key: value.item() for key, value in sums.items()}, logp.grad


def test_double_sided_leaves_out_what_is_outside_the_band_whatever_its_sign() -> None:
    loss, sums, grad = run("dis", eps_low=0.45, eps_high=1.2)
    # Inside are 1.0, 1.4 and 2.0: -(1 * 1 * -1) - (1.4 * -1 * -0.5) - (2 * 1 * -2).
    assert loss.item() == pytest.approx(1.0 - 0.7 + 4.0)
    assert grad.tolist() == pytest.approx([-1.0, 1.4, -2.0, 0.0, 0.0, 0.0])
    assert sums["clipped"] == 3


def test_the_band_of_double_sided_is_open_at_both_edges() -> None:
    one = torch.zeros(1, dtype=torch.float64)
    for ratio in (0.5, 2.0):
        behaviour = -torch.tensor([ratio], dtype=torch.float64).log()
        _, sums = OBJECTIVES["dis"](one, behaviour, one + 1, one == 0, eps_low=0.5, eps_high=1.0)
        assert sums["clipped"] == 1, ratio


def test_cispo_bounds_the_weight_and_keeps_every_gradient() -> None:
    loss, sums, grad = run("cispo", eps_low=0.5, eps_high=1.0)
    weights = [1.0, 1.4, 2.0, 2.0, 0.5, 0.5]
    expected = [-w * a for w, a in zip(weights, ADVANTAGES.tolist(), strict=True)]
    assert grad.tolist() == pytest.approx(expected)
    assert loss.item() == pytest.approx(sum(g * p for g, p in zip(expected, LOGP.tolist(), strict=True)))
    assert sums["clipped"] == 2


@pytest.mark.parametrize("name", OBJECTIVES)
def test_at_the_behaviour_policy_it_is_the_plain_policy_gradient(name: str) -> None:
    logp = LOGP.clone().requires_grad_()
    loss, sums = OBJECTIVES[name](logp, LOGP, ADVANTAGES, ALL)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    assert logp.grad.tolist() == (-ADVANTAGES).tolist()
    assert sums["clipped"] == 0
    assert sums["mismatch_kl"] == 0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_token_off_the_mask_counts_nowhere(name: str) -> None:
    mask = torch.tensor([True, True, True, False, False, False])
    _, sums, grad = run(name, mask)
    assert grad[3:].tolist() == [0, 0, 0]
    assert sums["ratio"] == pytest.approx(4.4)
    assert sums["mismatch_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in (1.0, 1.4, 2.0)))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_the_weighted_log_prob_with_the_weight_held_fixed(name: str) -> None:
    """Finite differences of w A log pi for a small softmax policy, w taken once at the starting point."""
    torch.manual_seed(0)
    logits = torch.randn(6, 5, dtype=torch.float64)
    chosen = torch.tensor([0, 1, 2, 3, 4, 0])
    behaviour = torch.log_softmax(logits, -1)[range(6), chosen] - RATIOS.log()

    def logp(at: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(at, -1)[range(6), chosen]

    leaf = logits.clone().requires_grad_()
    OBJECTIVES[name](logp(leaf), behaviour, ADVANTAGES, ALL)[0].backward()  # type: ignore[no-untyped-call]
    objective = OBJECTIVES[name]
    low, high = 1 - objective.eps_low, 1 + objective.eps_high
    weight = RATIOS * ((low < RATIOS) & (high > RATIOS)) if name == "dis" else RATIOS.clamp(low, high)
    step = 1e-6
    # Ratios 2.0 and 0.5 lie on the edges of a default band, where rounding decides.
    for i in (0, 1, 3, 5):
        for j in range(5):
            nudge = torch.zeros_like(logits)
            nudge[i, j] = step
            change = (logp(logits + nudge) - logp(logits - nudge))[i] / (2 * step)
            assert leaf.grad is not None
            assert leaf.grad[i, j].item() == pytest.approx((-weight[i] * ADVANTAGES[i] * change).item(), abs=1e-7)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_ratio_beyond_all_floats_leaves_the_sums_finite(name: str) -> None:
    logp = torch.zeros(1, requires_grad=True)
    loss, sums = OBJECTIVES[name](logp, torch.tensor([-500.0]), torch.ones(1), torch.ones(1, dtype=torch.bool))
    assert torch.isfinite(loss)
    assert all(torch.isfinite(value) for value in sums.values())
