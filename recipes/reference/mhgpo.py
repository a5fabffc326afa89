"""MHGPO on one page: a pipeline of agents that share one model, trained together without a critic.

The answer's reward flows backward, from reader to read; each agent adds a penalty for its own format; an agent's
outputs for one question are each other's baseline, although their prompts differ (the heterogeneous group).
Source: MHGPO, arXiv 2506.02718, as docs/methods.md reads it. It shares no code with the library.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cotrain.types import Group, Trajectory

Tokens = dict[str, Tensor]
"""Trajectory id -> one number per sampled token, in order: its turns' completions one after another."""


def penalty(output: Trajectory, penalties: dict[str, float]) -> float:
    """The penalty of the output's agent, once, however many of its format rules the output broke."""
    return penalties.get(output.agent, 0.0) if output.faults else 0.0


def shared(
    group: Group, output: Trajectory, penalties: dict[str, float], aggregate: str, propagate: str
) -> float | None:
    """shared(o) = its F1 where nobody reads o, else aggregate over the readers r of o of shared(r).

    With propagate "full" it is R(r) = shared(r) + penalty(r) that flows back. A reader whose reward is unknown is left
    out; where none is known, o's is unknown too, which is None and not 0.
    """
    readers = [r for r in group.trajectories if output.id in r.reads]
    if not readers:
        return output.rewards.get("shared")
    passed_back = []
    for reader in readers:
        reward = shared(group, reader, penalties, aggregate, propagate)
        if reward is not None:
            passed_back.append(reward + (penalty(reader, penalties) if propagate == "full" else 0.0))
    if not passed_back:
        return None
    return {"mean": sum(passed_back) / len(passed_back), "max": max(passed_back), "min": min(passed_back)}[aggregate]


def credits(
    group: Group, penalties: dict[str, float], aggregate: str = "mean", propagate: str = "shared"
) -> dict[str, float]:
    """R(o) = shared(o) + penalty(o) of every output that is trained: not the trunk's, and only where it is known."""
    credit = {}
    for output in group.trajectories:
        reward = shared(group, output, penalties, aggregate, propagate)
        if output.trainable and reward is not None:
            credit[output.id] = reward + penalty(output, penalties)
    return credit


def advantages(group: Group, credit: dict[str, float]) -> dict[str, float]:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6) over the peers of i: same question, same pass, same agent.

    std is the population's. A peer set of one, or of credits within 1e-8 of each other, has no advantage: nothing to
    learn, and no KL term either.
    """
    peer_sets: dict[tuple[int, str], list[str]] = {}
    for t in group.trajectories:
        if t.id in credit:
            peer_sets.setdefault((t.pass_id, t.agent), []).append(t.id)
    advantage = {}
    for ids in peer_sets.values():
        peers = [credit[id] for id in ids]
        if len(peers) < 2 or max(peers) - min(peers) <= 1e-8:
            continue
        mean = sum(peers) / len(peers)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in peers) / len(peers))
        for id in ids:
            advantage[id] = (credit[id] - mean) / (std + 1e-6)
    return advantage


def loss(
    groups: list[Group],
    new: Tokens,
    old: Tokens,
    reference: Tokens,
    *,
    penalties: dict[str, float],
    aggregate: str = "mean",
    propagate: str = "shared",
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
        j_i    = mean over the tokens t of output i of term_t
        J      = mean over i of j_i                 token_mean: mean of term_t over all tokens of all outputs
    """
    total, count = torch.zeros(()), 0
    for group in groups:
        credit = credits(group, penalties, aggregate, propagate)
        for id, advantage in advantages(group, credit).items():
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
