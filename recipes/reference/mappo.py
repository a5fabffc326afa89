"""MAPPO on one page: a pipeline of agents that share one actor, with a critic instead of peers.

Rewards and penalties are MHGPO's. Each token pays for leaving the reference model, an agent's last token earns its
credit, and the critic's values say what was to be expected (GAE). Sources: PPO, arXiv 1707.06347; GAE, arXiv
1506.02438; MAPPO, arXiv 2103.01955; as docs/methods.md reads them. It shares no code with the library.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cotrain.types import Group, Trajectory

Tokens = dict[str, Tensor]
"""Trajectory id -> one number per sampled token, in order: its turns' completions one after another."""


def shared(group: Group, output: Trajectory) -> float | None:
    """shared(o) = its F1 where nobody reads o, else the mean over the readers r of o of shared(r), as far as known."""
    readers = [r for r in group.trajectories if output.id in r.reads]
    if not readers:
        return output.rewards.get("shared")
    known = [reward for r in readers if (reward := shared(group, r)) is not None]
    return sum(known) / len(known) if known else None


def credits(group: Group, penalties: dict[str, float]) -> dict[str, float]:
    """R(o) = shared(o) + penalty of its agent * [o is faulty], of every output that is trained, where it is known."""
    credit = {}
    for output in group.trajectories:
        reward = shared(group, output)
        if output.trainable and reward is not None:
            credit[output.id] = reward + (penalties.get(output.agent, 0.0) if output.faults else 0.0)
    return credit


def token_rewards(credit: float, old: Tensor, reference: Tensor, beta: float) -> list[float]:
    """r_t = -beta * (old_t - reference_t) + credit * [t is the output's last token]."""
    rewards = [-beta * (float(o) - float(r)) for o, r in zip(old, reference, strict=True)]
    rewards[-1] += credit
    return rewards


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum over l >= 0 of (gamma lam)^l delta_(t+l), delta_t = r_t + gamma V_(t+1) - V_t.

    V_t is the value of the state before token t; after the last token it is 0.
    """
    following = [*values[1:], 0.0]
    delta = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, following, strict=True)]
    return [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, len(delta))) for t in range(len(delta))]


def whiten(advantages: dict[str, list[float]]) -> dict[str, list[float]]:
    """(A - mean) / (std + 1e-8) over all sampled tokens of the batch; std is the population's."""
    every = [a for of_output in advantages.values() for a in of_output]
    mean = sum(every) / len(every)
    std = math.sqrt(sum((a - mean) ** 2 for a in every) / len(every))
    return {id: [(a - mean) / (std + 1e-8) for a in of_output] for id, of_output in advantages.items()}


def advantages_and_returns(
    groups: list[Group],
    old: Tokens,
    reference: Tokens,
    values: Tokens,
    *,
    penalties: dict[str, float],
    beta: float = 0.001,
    gamma: float = 1.0,
    lam: float = 0.95,
    whitened: bool = False,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """A_t by GAE over an output's sampled tokens and its returns A_t + V_t; whitening comes after the returns."""
    advantages: dict[str, list[float]] = {}
    returns: dict[str, list[float]] = {}
    for group in groups:
        for id, credit in credits(group, penalties).items():
            if len(old[id]) == 0:  # it said nothing: there is nothing to train
                continue
            critic = [float(v) for v in values[id]]
            advantages[id] = gae(token_rewards(credit, old[id], reference[id], beta), critic, gamma, lam)
            returns[id] = [a + v for a, v in zip(advantages[id], critic, strict=True)]
    return (whiten(advantages) if whitened and advantages else advantages), returns


def losses(
    advantages: dict[str, list[float]],
    returns: dict[str, list[float]],
    new: Tokens,
    old: Tokens,
    new_values: Tokens,
    old_values: Tokens,
    *,
    clip: float = 0.2,
    value_clip: float = 0.2,
    value_coefficient: float = 0.1,
    token_mean: bool = False,
) -> tuple[Tensor, Tensor]:
    """(-J of the actor, the critic's loss), over the whole batch at once; their sum is what a step minimises.

    rho_t    = exp(new_t - old_t)
    policy_t = min(rho_t A_t, clip(rho_t, 1 - clip, 1 + clip) A_t)          the KL is in the rewards, not here
    value_t  = 0.5 max((V_t - R_t)^2, (clip(V_t, V_old_t - value_clip, V_old_t + value_clip) - R_t)^2)
    J        = mean over outputs i of the mean over its tokens of policy_t
    critic   = value_coefficient * the same mean of value_t     token_mean: both are means over all tokens
    """
    policy, value, count = torch.zeros(()), torch.zeros(()), 0
    for id, of_output in advantages.items():
        length = len(of_output)
        weight = 1 if token_mean else 1 / length
        for t in range(length):
            rho = torch.exp(new[id][t] - old[id][t])
            clipped = torch.clamp(rho, 1 - clip, 1 + clip)
            policy = policy + weight * torch.minimum(rho * of_output[t], clipped * of_output[t])
            v, v_old, target = new_values[id][t], float(old_values[id][t]), returns[id][t]
            v_clipped = torch.clamp(v, v_old - value_clip, v_old + value_clip)
            value = value + weight * 0.5 * torch.maximum((v - target) ** 2, (v_clipped - target) ** 2)
        count += length if token_mean else 1
    return (-policy / count, value_coefficient * value / count) if count else (policy, value)
