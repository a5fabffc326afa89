"""From credits to advantages: every critic-free estimator is (peer key, baseline, scale).

Pure functions. A peer set of one, or one whose credits are equal within 1e-8, teaches nothing: it yields no advantage
(so no sample and no KL term) and is counted. A peer set of one must never become "mean 0, std 1".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cotrain.types import Trajectory

PeerKey = Callable[[Trajectory], Hashable]
"""Trajectories with equal keys are compared with each other."""

Statistic = Callable[[Sequence[float], Sequence[float]], float]
"""(credits, weights) of a peer set -> a number: a baseline or a scale."""

EQUAL_WITHIN = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Trajectory id -> advantage, and how many trainable trajectories got none, by reason."""

    values: Mapping[str, float]
    dropped: Mapping[str, int]


def same_pass(trajectory: Trajectory) -> Hashable:
    """Peers of MHGPO: one agent, one question, one pass. Their prompts may differ: a heterogeneous group."""
    return trajectory.question_id, trajectory.pass_id, trajectory.agent


def mean(credits: Sequence[float], weights: Sequence[float]) -> float:
    """sum w R / sum w."""
    return math.fsum(w * r for w, r in zip(weights, credits, strict=True)) / math.fsum(weights)


def population_std(credits: Sequence[float], weights: Sequence[float]) -> float:
    """sqrt(sum w (R - mean)^2 / sum w)."""
    center = mean(credits, weights)
    return math.sqrt(mean([(r - center) ** 2 for r in credits], weights))


def sample_std(credits: Sequence[float], weights: Sequence[float]) -> float:
    """population std * sqrt(n / (n - 1)), n the number of peers; a whole weight counts as so many copies of one."""
    n = math.fsum(weights) if all(float(w).is_integer() for w in weights) else len(credits)
    return population_std(credits, weights) * math.sqrt(n / (n - 1))


def group_relative(
    trajectories: Iterable[Trajectory],
    credits: Mapping[str, float],
    *,
    peer_key: PeerKey = same_pass,
    baseline: Statistic = mean,
    scale: Statistic | None = population_std,
    weights: Mapping[str, float] | None = None,
    eps: float = 1e-6,
) -> Advantages:
    """A_i = (R_i - baseline(R)) / (scale(R) + eps) over each peer set; without a scale, A_i = R_i - baseline(R).

    Only trainable trajectories are compared. Source: MHGPO, arXiv 2506.02718; GRPO, arXiv 2402.03300.

    Args:
        trajectories: of one question or of many.
        credits: by trajectory id; one that is absent is unknown, and its trajectory is dropped ("missing_reward").
        peer_key: who is compared with whom.
        baseline: what is subtracted.
        scale: what divides, before eps is added.
        weights: by trajectory id, in the statistics; 1 by default. One with weight 0 is dropped ("aligned_away").
        eps: added to the scale.

    Returns:
        Values by trajectory id; counts of "missing_reward", "aligned_away", "singleton" and "zero_variance".
    """
    dropped: Counter[str] = Counter()
    peer_sets: dict[Hashable, list[str]] = {}
    for t in trajectories:
        if not t.trainable:
            continue
        if t.id not in credits:
            dropped["missing_reward"] += 1
        elif weights is not None and weights[t.id] == 0.0:
            dropped["aligned_away"] += 1
        else:
            peer_sets.setdefault(peer_key(t), []).append(t.id)
    values: dict[str, float] = {}
    for ids in peer_sets.values():
        rewards = [credits[id] for id in ids]
        if len(ids) == 1:
            dropped["singleton"] += 1
            continue
        if max(rewards) - min(rewards) <= EQUAL_WITHIN:
            dropped["zero_variance"] += len(ids)
            continue
        shares = [1.0 if weights is None else weights[id] for id in ids]
        center = baseline(rewards, shares)
        divisor = scale(rewards, shares) + eps if scale else 1.0
        values.update({id: (r - center) / divisor for id, r in zip(ids, rewards, strict=True)})
    return Advantages(values=values, dropped=dict(dropped))
