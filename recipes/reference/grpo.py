"""GRPO on one page: one agent answers a question G times, and the answers are each other's baseline.

Rewards become credits, credits become advantages, advantages weigh the tokens of the loss; there is no critic.
Source: DeepSeekMath, arXiv 2402.03300, as docs/methods.md reads it. It shares no code with the library.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cotrain.types import Group

Tokens = dict[str, Tensor]
"""Trajectory id -> one number per sampled token, in order: its turns' completions one after another."""


def credits(group: Group, penalty: float = 0.0, gate: bool = False, format_weight: float = 0.0) -> dict[str, float]:
    """R_i = gate_i * (f * format_i + (1 - f) * shared_i) + penalty * [answer i is faulty].

    f is the format's weight; format_i is 1 for an answer without faults, else 0. With a gate, gate_i = format_i, and a
    faulty answer is wrong whatever its judge says. An unknown reward is no credit: never 0, and never the format alone.
    """
    credit = {}
    for t in group.trajectories:
        is_clean = 0.0 if t.faults else 1.0
        shared = 0.0 if gate and t.faults else t.rewards.get("shared")
        if not t.trainable or shared is None:
            continue
        reward = format_weight * is_clean + (1.0 - format_weight) * shared
        credit[t.id] = (is_clean if gate else 1.0) * reward + (penalty if t.faults else 0.0)
    return credit


def advantages(credit: dict[str, float]) -> dict[str, float]:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6) over the answers to one question; std is the population's.

    One answer alone, or answers within 1e-8 of each other, have no advantage: nothing to learn, and no KL term either.
    """
    peers = list(credit.values())
    if len(peers) < 2 or max(peers) - min(peers) <= 1e-8:
        return {}
    mean = sum(peers) / len(peers)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in peers) / len(peers))
    return {id: (reward - mean) / (std + 1e-6) for id, reward in credit.items()}


def loss(
    groups: list[Group],
    new: Tokens,
    old: Tokens,
    reference: Tokens,
    *,
    penalty: float = 0.0,
    gate: bool = False,
    format_weight: float = 0.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta: float = 0.001,
    token_mean: bool = False,
) -> Tensor:
    """-J, over the whole batch at once. Log-probs of the sampled tokens: `new` of the weights that are trained, `old`
    as the sampler recorded them, `reference` of the weights at the start.

        rho_t  = exp(new_t - old_t)
        KL_t   = exp(reference_t - new_t) - (reference_t - new_t) - 1
        term_t = min(rho_t A_i, clip(rho_t, 1 - clip_low, 1 + clip_high) A_i) - beta KL_t
        j_i    = mean over the tokens t of answer i of term_t
        J      = mean over i of j_i                 token_mean: mean of term_t over all tokens of all answers
    """
    total, count = torch.zeros(()), 0
    for group in groups:
        for id, advantage in advantages(credits(group, penalty, gate, format_weight)).items():
            num_tokens = len(new[id])
            if num_tokens == 0:  # it said nothing: its credit was a peer's, but there is nothing to train
                continue
            terms = []
            for new_t, old_t, reference_t in zip(new[id], old[id], reference[id], strict=True):
                rho = torch.exp(new_t - old_t)
                clipped = torch.clamp(rho, 1 - clip_low, 1 + clip_high)
                kl = torch.exp(reference_t - new_t) - (reference_t - new_t) - 1
                terms.append(torch.minimum(rho * advantage, clipped * advantage) - beta * kl)
            total = total + (sum(terms) if token_mean else sum(terms) / num_tokens)
            count += num_tokens if token_mean else 1
    return -total / count if count else total
