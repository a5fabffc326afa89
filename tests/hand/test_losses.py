"""Losses, ratios and learning rates against numbers worked out by hand."""

from math import log

import pytest
import torch
from torch import Tensor, tensor

from cotrain.losses import (
    cispo,
    clipped_surrogate,
    clipped_value,
    k3,
    mask,
    negative_log_likelihood,
    trajectory_mean,
    truncate,
)
from cotrain.sections import OptimizerConfig
from cotrain.trainer import lr_at


def surrogate(
    ratios: list[float], advantages: list[float], **settings: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, gradient by logprobs, ratio, clipped) with old log-probs of -1 and coefficients of 1/N."""
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    new = (old + tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    coefficients = torch.full_like(old, 1.0 / len(ratios))
    options = {"clip_low": 0.2, "clip_high": 0.3} | settings
    loss, terms = clipped_surrogate(new, old, tensor(advantages, dtype=torch.float64), coefficients, **options)
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad, terms.ratio_N, terms.clipped_N


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "slope"),
    [
        (1.0, 2.0, 2.0, 2.0),  # on policy: the gradient of the plain policy gradient
        (1.1, 2.0, 2.2, 2.2),  # inside: rho A, and d(rho A)/d(log pi) = rho A
        (1.5, 2.0, 2.6, 0.0),  # above 1.3 with A > 0: clipped to 1.3 * 2
        (0.5, 2.0, 1.0, 1.0),  # below 0.8 with A > 0: min keeps 0.5 * 2, and its gradient
        (1.5, -2.0, -3.0, -3.0),  # above 1.3 with A < 0: min keeps 1.5 * -2, and its gradient
        (0.5, -2.0, -1.6, 0.0),  # below 0.8 with A < 0: clipped to 0.8 * -2
        (0.9, -2.0, -1.8, -1.8),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_surrogate_of_one_token(ratio: float, advantage: float, term: float, slope: float) -> None:
    loss, gradient, ratio_N, clipped_N = surrogate([ratio], [advantage])
    assert loss.item() == pytest.approx(-term)
    assert gradient.item() == pytest.approx(-slope)
    assert ratio_N.item() == pytest.approx(ratio)
    assert clipped_N.item() == float(slope == 0.0 and advantage != 0.0)


def test_loss_is_the_sum_of_coefficients_times_terms() -> None:
    old = tensor([-1.0, -2.0, -3.0])
    new = old + tensor([1.1, 1.5, 0.5]).log()
    loss, terms = clipped_surrogate(
        new, old, tensor([1.0, 1.0, -1.0]), tensor([0.5, 0.25, 0.1]), clip_low=0.2, clip_high=0.2
    )
    assert loss.item() == pytest.approx(-(0.5 * 1.1 + 0.25 * 1.2 + 0.1 * -0.8))
    assert terms.clipped_N.tolist() == [0.0, 1.0, 1.0]
    assert terms.kl_N.tolist() == [0.0, 0.0, 0.0]


def test_kl_penalty() -> None:
    new = tensor([log(0.5)], requires_grad=True)
    ref = tensor([log(0.25)])
    # ref / new = 1/2: k3 = 1/2 - log(1/2) - 1 = log 2 - 1/2, and its slope by log pi is 1 - 1/2
    assert k3(new, ref).item() == pytest.approx(log(2) - 0.5)
    loss, terms = clipped_surrogate(
        new, new.detach(), tensor([3.0]), tensor([1.0]), clip_low=0.2, clip_high=0.2, beta=0.1, ref_logprobs_N=ref
    )
    loss.backward()
    assert loss.item() == pytest.approx(-(3.0 - 0.1 * (log(2) - 0.5)))
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(-(3.0 - 0.1 * 0.5))
    assert terms.kl_N.item() == pytest.approx(log(2) - 0.5)


def test_kl_still_pulls_where_the_surrogate_is_clipped() -> None:
    old = tensor([-1.0])
    new = (old + log(2.0)).requires_grad_()
    loss, _ = clipped_surrogate(
        new, old, tensor([1.0]), tensor([1.0]), clip_low=0.2, clip_high=0.2, beta=1.0, ref_logprobs_N=old
    )
    loss.backward()
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(0.5)  # 1 - exp(ref - new)


def test_sequence_ratio_is_the_geometric_mean_and_all_tokens_share_its_gradient() -> None:
    trajectory_N = tensor([0, 0, 1])
    # trajectory 0: ratios 2 and 0.5, geometric mean 1: not clipped, though both tokens would be
    loss, gradient, ratio_N, clipped_N = surrogate(
        [2.0, 0.5, 1.2], [1.0, 1.0, -1.0], ratio="sequence", trajectory_N=trajectory_N
    )
    assert ratio_N.tolist() == pytest.approx([1.0, 1.0, 1.2])
    assert loss.item() == pytest.approx(-(1.0 + 1.0 - 1.2) / 3)
    # d/d(log pi_t) of sum over the two tokens of s A / 3 = 2 * s * (1/2) * A / 3
    assert gradient.tolist() == pytest.approx([-1 / 3, -1 / 3, 1.2 / 3])
    assert clipped_N.tolist() == [0.0, 0.0, 0.0]


def test_sequence_ratio_is_clipped_as_a_whole() -> None:
    loss, gradient, ratio_N, clipped_N = surrogate(
        [2.0, 1.125], [1.0, 1.0], ratio="sequence", trajectory_N=tensor([0, 0])
    )
    assert ratio_N.tolist() == pytest.approx([1.5, 1.5])  # sqrt(2.25)
    assert loss.item() == pytest.approx(-1.3)
    assert gradient.tolist() == [0.0, 0.0]
    assert clipped_N.tolist() == [1.0, 1.0]


def test_what_a_setting_needs_must_be_there() -> None:
    one = tensor([1.0])
    with pytest.raises(ValueError, match="trajectory_N"):
        clipped_surrogate(one, one, one, one, clip_low=0.2, clip_high=0.2, ratio="sequence")
    with pytest.raises(ValueError, match="ref_logprobs_N"):
        clipped_surrogate(one, one, one, one, clip_low=0.2, clip_high=0.2, beta=0.1)


def test_negative_log_likelihood() -> None:
    logprobs = tensor([-1.0, -3.0], requires_grad=True)
    loss = negative_log_likelihood(logprobs, tensor([0.25, 0.5]))
    loss.backward()
    assert loss.item() == pytest.approx(1.75)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.25, -0.5]


def test_trajectory_mean() -> None:
    assert trajectory_mean(tensor([1.0, 5.0, 3.0]), tensor([1, 0, 1])).tolist() == [2.0, 5.0, 2.0]


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5]),
    ],
)
def test_learning_rate(schedule: str, rates: list[float]) -> None:
    optimizer = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=2)
    assert [lr_at(step, optimizer, 6) for step in range(6)] == pytest.approx(rates)


def test_learning_rate_after_the_end_and_in_a_run_that_is_all_warmup() -> None:
    linear = OptimizerConfig(lr=2.0, schedule="linear", warmup_steps=4)
    assert lr_at(9, linear, 8) == 0.0
    assert [lr_at(step, linear, 4) for step in range(4)] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert lr_at(0, OptimizerConfig(lr=2.0), 1) == 2.0


def test_guards_weigh_by_the_ratio_up_to_the_cap_or_leave_tokens_out():
    log_rho = tensor([1.0, 1.5, 3.0, 0.5, 0.4], dtype=torch.float64).log()
    assert truncate(2.0)(log_rho).tolist() == pytest.approx([1.0, 1.5, 2.0, 0.5, 0.4])
    assert mask(2.0)(log_rho).tolist() == pytest.approx([1.0, 1.5, 0.0, 0.5, 0.0])


def test_cispo_keeps_the_gradient_of_every_token() -> None:
    old = torch.full((3,), -1.0, dtype=torch.float64)
    new = (old + tensor([1.5, 0.5, 1.1], dtype=torch.float64).log()).requires_grad_()
    advantages, coefficients = tensor([2.0, 2.0, -1.0]).double(), tensor([0.5, 0.25, 0.25]).double()
    loss, terms = cispo(new, old, advantages, coefficients, clip_low=0.2, clip_high=0.3)
    loss.backward()
    weights = [1.3, 0.8, 1.1]
    expected = -sum(
        c * w * a * n
        for c, w, a, n in zip([0.5, 0.25, 0.25], weights, [2.0, 2.0, -1.0], new.detach().tolist(), strict=True)
    )
    assert loss.item() == pytest.approx(expected)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-0.5 * 1.3 * 2.0, -0.25 * 0.8 * 2.0, 0.25 * 1.1 * 1.0])
    assert terms.clipped_N.tolist() == [1.0, 1.0, 0.0]


def test_the_clipped_value_loss_takes_the_worse_of_two_errors() -> None:
    values = tensor([1.0, 0.5, 0.1], requires_grad=True)
    loss = clipped_value(values, tensor([0.0, 0.4, 0.5]), tensor([1.0, 1.0, 1.0]), tensor([0.5, 0.3, 0.2]), clip=0.2)
    # near: 0.2, 0.5, 0.3; errors 0.8, 0.5, 0.9 (the plain value's is the larger one in the third)
    assert loss.item() == pytest.approx(0.5 * (0.5 * 0.64 + 0.3 * 0.25 + 0.2 * 0.81))
    loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, 0.3 * -0.5, 0.2 * -0.9])
