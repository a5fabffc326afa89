"""M-GRPO on one page: a main agent delegates to sub-agents as often as it likes; each model has its own loss.

Main's correctness flows back to the sub-agents whose findings it read; a sub-agent's trajectories of all K rollouts of
a question are each other's baseline; alignment says how much each counts, since rollouts delegate unequally often.
Source: M-GRPO, arXiv 2511.13288, as docs/methods.md reads it. It shares no code with the library.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cotrain.types import Group, Trajectory

Tokens = dict[str, Tensor]
"""Trajectory id -> one number per sampled token, in order: its turns' completions one after another."""

MAIN = {"format": 0.1, "shared": 0.9}
SUB = {"format": 0.1, "shared": 0.4, "expert": 0.5}


def shared(group: Group, t: Trajectory) -> float | None:
    """Main: 1 if its answer is correct, 0 if it is not or is faulty. Sub: the mean over its readers of theirs.

    None, which is not 0: the judge failed, or nobody whose reward is known read the finding.
    """
    readers = [r for r in group.trajectories if t.id in r.reads]
    if t.caller is None and not readers:
        return 0.0 if t.faults else t.rewards.get("shared")
    known = [reward for r in readers if (reward := shared(group, r)) is not None]
    return sum(known) / len(known) if known else None


def credits(group: Group, *, renormalise: bool = False) -> dict[str, float]:
    """Of every trajectory that is trained and whose rewards are known:

        main:  gate * (0.1 format + 0.9 shared)
        sub:   gate * (0.1 format + 0.4 shared + 0.5 expert)     gate = format = 1 for an output without faults, else 0

    An unknown `shared` drops every trajectory of its rollout; an unknown `expert` drops that trajectory, or, with
    `renormalise`, is left out and the other weights are scaled up to the same sum.
    """
    credit = {}
    for t in group.trajectories:
        correct, is_clean = shared(group, t), 0.0 if t.faults else 1.0
        if not t.trainable or correct is None:
            continue
        rewards = {**t.rewards, "format": is_clean, "shared": correct}
        weights = MAIN if t.caller is None else SUB
        known = {name: weight for name, weight in weights.items() if name in rewards}
        if known != weights and not renormalise:
            continue
        scale = sum(weights.values()) / sum(known.values())
        credit[t.id] = is_clean * scale * sum(weight * rewards[name] for name, weight in known.items())
    return credit


def counts(
    group: Group, credit: dict[str, float], align: str, copies: dict[str, int] | None = None
) -> dict[str, float]:
    """How much each trajectory with a credit counts, in the statistics and in the loss alike; main's count once.

    weight:     1 / d_k, where rollout k has d_k trajectories of that kind of sub-agent
    duplicate:  the number of its copies, drawn so that every rollout that delegated has d; they are given
    none:       1
    """
    count = {}
    for t in group.trajectories:
        if t.id not in credit:
            continue
        kind = [s for s in group.trajectories if (s.rollout_id, s.agent) == (t.rollout_id, t.agent) and s.id in credit]
        aligned = {"weight": 1 / len(kind), "duplicate": (copies or {}).get(t.id, 0), "none": 1.0}[align]
        count[t.id] = 1.0 if t.caller is None else aligned
    return count


def advantages(group: Group, credit: dict[str, float], count: dict[str, float]) -> dict[str, float]:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6) over the trajectories of one agent in all K rollouts of the question.

        mean(R) = sum_i w_i R_i / sum_i w_i     std(R) = sqrt(sum_i w_i (R_i - mean)^2 / sum_i w_i)     w_i: its count

    One trajectory alone, or credits within 1e-8 of each other, have no advantage: nothing to learn, no KL term either.
    """
    advantage = {}
    for agent in {t.agent for t in group.trajectories}:
        ids = [t.id for t in group.trajectories if t.agent == agent and count.get(t.id, 0) > 0]
        peers = [credit[id] for id in ids]
        if len(peers) < 2 or max(peers) - min(peers) <= 1e-8:
            continue
        weight = sum(count[id] for id in ids)
        mean = sum(count[id] * credit[id] for id in ids) / weight
        std = math.sqrt(sum(count[id] * (credit[id] - mean) ** 2 for id in ids) / weight)
        for id in ids:
            advantage[id] = (credit[id] - mean) / (std + 1e-6)
    return advantage


def loss(
    groups: list[Group],
    model: str,
    new: Tokens,
    old: Tokens,
    reference: Tokens,
    *,
    align: str = "weight",
    copies: dict[str, int] | None = None,
    renormalise: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    beta: float = 0.0,
    token_mean: bool = False,
) -> Tensor:
    """-J of one model, over its whole batch at once. Log-probs of the sampled tokens: `new` of the weights that are
    trained, `old` as the sampler recorded them, `reference` of the weights at the start (not looked at with beta 0).

        rho_t  = exp(new_t - old_t)
        KL_t   = exp(reference_t - new_t) - (reference_t - new_t) - 1
        term_t = min(rho_t A_i, clip(rho_t, 1 - clip_low, 1 + clip_high) A_i) - beta KL_t
        j_i    = mean over the tokens t of trajectory i of term_t
        J      = sum_i w_i j_i / sum_i w_i      token_mean: sum_i w_i sum_t term_t / sum_i w_i length_i
    """
    total, normaliser = torch.zeros(()), 0.0
    for group in groups:
        credit = credits(group, renormalise=renormalise)
        count = counts(group, credit, align, copies)
        advantage = advantages(group, credit, count)
        for t in group.trajectories:
            if t.model != model or t.id not in advantage or len(new[t.id]) == 0:
                continue
            sum_of_terms = torch.zeros(())
            for i, (new_t, old_t) in enumerate(zip(new[t.id], old[t.id], strict=True)):
                rho = torch.exp(new_t - old_t)
                clipped = torch.clamp(rho, 1 - clip_low, 1 + clip_high)
                sum_of_terms = sum_of_terms + torch.minimum(rho * advantage[t.id], clipped * advantage[t.id])
                if beta > 0:
                    log_ratio = reference[t.id][i] - new_t
                    sum_of_terms = sum_of_terms - beta * (torch.exp(log_ratio) - log_ratio - 1)
            length = len(new[t.id])
            total = total + count[t.id] * (sum_of_terms if token_mean else sum_of_terms / length)
            normaliser += count[t.id] * (length if token_mean else 1)
    return -total / normaliser if normaliser else total
