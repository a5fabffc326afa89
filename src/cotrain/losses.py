"""The losses: tensors in, a scalar and per-token terms out. No model, no batch, no state.

Every loss is a sum over the N sampled tokens of a pack, flat: loss = -sum_N coefficients_N * terms_N. The coefficients
contain the weights and the normalisation over the whole batch (see `batch.pack`), so losses of packs add up. Log-probs
are natural logarithms at the sampling temperature. The terms that come back are detached: they are for metrics.

Shapes: N sampled tokens. Gradients flow through `logprobs_N` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Ratio = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """Per-token quantities behind a loss, detached, so that they can be averaged over any set of tokens.

    `ratio_N`: the importance ratio used; `clipped_N`: 1.0 where the clip is active, that is where the clipped product
    is the smaller one and so no gradient flows; `kl_N`: the k3 estimate against the reference, 0 without one.
    """

    ratio_N: Tensor
    clipped_N: Tensor
    kl_N: Tensor


def clipped_surrogate(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    coefficients_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    beta: float = 0.0,
    ref_logprobs_N: Tensor | None = None,
    ratio: Ratio = "token",
    trajectory_N: Tensor | None = None,
) -> tuple[Tensor, Terms]:
    """The clipped policy-gradient objective with an optional KL penalty, negated.

        rho = exp(new - old)                                            ratio "token" (PPO, arXiv 1707.06347)
        rho = exp(mean over the trajectory's tokens of (new - old))     ratio "sequence" (GSPO, arXiv 2507.18071)
        term = min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A) - beta * k3(ref, new)
        loss = -sum_N coefficients * term

    `trajectory_N` (integers from 0) says which tokens form one sequence; all tokens of a trajectory must be present.

    Raises:
        ValueError: `beta` > 0 without `ref_logprobs_N`, or ratio "sequence" without `trajectory_N`.
    """
    ratio_N = importance_ratio(logprobs_N, old_logprobs_N, ratio, trajectory_N)
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_N
    kl_N = _penalty(logprobs_N, ref_logprobs_N, beta)
    loss = -(coefficients_N * (torch.minimum(plain_N, clipped_N) - beta * kl_N)).sum()
    is_clipped_N = (clipped_N < plain_N).to(logprobs_N.dtype)
    return loss, Terms(ratio_N=ratio_N.detach(), clipped_N=is_clipped_N, kl_N=kl_N.detach())


def cispo(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    coefficients_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    beta: float = 0.0,
    ref_logprobs_N: Tensor | None = None,
    ratio: Ratio = "token",
    trajectory_N: Tensor | None = None,
) -> tuple[Tensor, Terms]:
    """The clipped ratio as a weight without gradient, so that every token keeps its own. Called as `clipped_surrogate`.

        term = stop_gradient(clip(rho, 1 - clip_low, 1 + clip_high)) * A * new - beta * k3(ref, new)

    Source: CISPO, MiniMax-M1, arXiv 2506.13585. `Terms.clipped_N` is 1.0 where the weight was clipped.
    """
    ratio_N = importance_ratio(logprobs_N, old_logprobs_N, ratio, trajectory_N).detach()
    weight_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    kl_N = _penalty(logprobs_N, ref_logprobs_N, beta)
    loss = -(coefficients_N * (weight_N * advantages_N * logprobs_N - beta * kl_N)).sum()
    is_clipped_N = (weight_N != ratio_N).to(logprobs_N.dtype)
    return loss, Terms(ratio_N=ratio_N, clipped_N=is_clipped_N, kl_N=kl_N.detach())


def importance_ratio(
    logprobs_N: Tensor, old_logprobs_N: Tensor, ratio: Ratio, trajectory_N: Tensor | None = None
) -> Tensor:
    """rho_N: exp(new - old) per token, or of its mean over the token's trajectory.

    Raises:
        ValueError: ratio "sequence" without `trajectory_N`.
    """
    log_ratio_N = logprobs_N - old_logprobs_N
    if ratio == "sequence":
        if trajectory_N is None:
            raise ValueError("ratio 'sequence' needs trajectory_N")
        log_ratio_N = trajectory_mean(log_ratio_N, trajectory_N)
    return log_ratio_N.exp()


def _penalty(logprobs_N: Tensor, ref_logprobs_N: Tensor | None, beta: float) -> Tensor:
    if beta > 0.0:
        if ref_logprobs_N is None:
            raise ValueError("beta > 0 needs ref_logprobs_N")
        return k3(logprobs_N, ref_logprobs_N)
    return torch.zeros_like(logprobs_N)


def clipped_value(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, coefficients_N: Tensor, *, clip: float
) -> Tensor:
    """0.5 * sum_N coefficients * max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2). PPO's value loss.

    Source: Schulman et al., arXiv 1707.06347, as in its authors' implementation.
    """
    near_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    worst_N = torch.maximum((values_N - returns_N) ** 2, (near_N - returns_N) ** 2)
    return 0.5 * (coefficients_N * worst_N).sum()


Guard = Callable[[Tensor], Tensor]
"""log(pi_now / pi_sampled)_N of samples from older weights -> the weight of each token's advantage, 0 or more."""


def truncate(cap: float) -> Guard:
    """weight = min(rho, cap): truncated importance sampling (Espeholt et al., IMPALA, arXiv 1802.01561)."""
    return lambda log_rho_N: log_rho_N.exp().clamp(max=cap)


def mask(cap: float) -> Guard:
    """weight = rho where 1 / cap <= rho <= cap, else 0: masked importance sampling."""

    def guard(log_rho_N: Tensor) -> Tensor:
        rho_N = log_rho_N.exp()
        return torch.where((rho_N <= cap) & (rho_N >= 1.0 / cap), rho_N, torch.zeros_like(rho_N))

    return guard


def negative_log_likelihood(logprobs_N: Tensor, coefficients_N: Tensor) -> Tensor:
    """Supervised loss of demonstrated tokens: -sum_N coefficients * logprobs."""
    return -(coefficients_N * logprobs_N).sum()


def k3(logprobs_N: Tensor, ref_logprobs_N: Tensor) -> Tensor:
    """Estimate of KL(new || ref) per sampled token: exp(ref - new) - (ref - new) - 1, never negative.

    Source: Schulman, "Approximating KL divergence" (2020), estimator k3.
    """
    difference_N = ref_logprobs_N - logprobs_N
    return torch.expm1(difference_N) - difference_N


def trajectory_mean(values_N: Tensor, trajectory_N: Tensor) -> Tensor:
    """Every token's value replaced by the mean over its trajectory's tokens; gradients flow to all of them."""
    num_trajectories = int(trajectory_N.max()) + 1 if len(trajectory_N) else 0
    sums_K = values_N.new_zeros(num_trajectories).index_add(0, trajectory_N, values_N)
    counts_K = torch.bincount(trajectory_N, minlength=num_trajectories)
    return (sums_K / counts_K)[trajectory_N]
