"""From credits to advantages: every critic-free estimator is (peer key, baseline, scale).

Pure functions, but for `role_baseline`, which keeps an average from group to group. A peer set of one, or one whose
credits are equal within 1e-8, teaches nothing: it yields no advantage (so no sample and no KL term) and is counted. A
peer set of one must never become "mean 0, std 1". An `Estimator` may be chosen per agent; any function of its shape is
one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial

from cotrain.errors import RewardError
from cotrain.types import Trajectory

PeerKey = Callable[[Trajectory], Hashable]
"""Trajectories with equal keys are compared with each other."""

Statistic = Callable[[Sequence[float], Sequence[float]], float]
"""(credits, weights) of a peer set -> a number, such as its scale."""

Baseline = Callable[[Sequence[float], Sequence[float]], float | Sequence[float]]
"""(credits, weights) of a peer set -> what is subtracted from all of its credits, or from each."""

EQUAL_WITHIN = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Trajectory id -> advantage, and how many trainable trajectories got none, by reason."""

    values: Mapping[str, float]
    dropped: Mapping[str, int]


Estimator = Callable[
    [Sequence[Trajectory], Mapping[str, float], Mapping[str, float]], "Advantages | Mapping[str, float]"
]
"""(all trajectories of one agent in a group, trunk included; credits; weights, both by trajectory id) -> advantages, or
advantages by trajectory id: a trainable trajectory with a credit that is not among them is dropped ("no_advantage")."""


def same_pass(trajectory: Trajectory) -> Hashable:
    """Peers of MHGPO: one agent, one question, one pass. Their prompts may differ: a heterogeneous group."""
    return trajectory.question_id, trajectory.pass_id, trajectory.agent


def same_agent(trajectory: Trajectory) -> Hashable:
    """Peers of Dr. MAS (arXiv 2602.08847): all outputs of one agent for the question, whatever their pass."""
    return trajectory.question_id, trajectory.agent


def same_turn(trajectories: Iterable[Trajectory]) -> PeerKey:
    """Peers of AT-GRPO (arXiv 2510.11062): one agent, one question, the i-th time that it acts in its rollout.

    What it did on the trunk counts. Where it was asked or delegated to several times, the order is the record's.
    """
    acted: Counter[Hashable] = Counter()
    turns: dict[str, Hashable] = {}
    for t in trajectories:
        own = (t.question_id, t.pass_id, t.agent, t.rollout_id)
        on_trunk = acted[(t.question_id, t.pass_id, t.agent, None)] if t.rollout_id is not None else 0
        turns[t.id] = (t.question_id, t.agent, on_trunk + acted[own])
        acted[own] += 1
    return lambda t: turns[t.id]


def mean(credits: Sequence[float], weights: Sequence[float]) -> float:
    """sum w R / sum w."""
    return math.fsum(w * r for w, r in zip(weights, credits, strict=True)) / math.fsum(weights)


def leave_one_out(credits: Sequence[float], weights: Sequence[float]) -> list[float]:
    """b_i = sum over j != i of w_j R_j / sum over j != i of w_j: the mean of the others. RLOO, arXiv 2402.14740."""
    total, of_all = math.fsum(weights), math.fsum(w * r for w, r in zip(weights, credits, strict=True))
    return [(of_all - w * r) / (total - w) for w, r in zip(weights, credits, strict=True)]


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
    baseline: Baseline = mean,
    scale: Statistic | None = population_std,
    weights: Mapping[str, float] | None = None,
    eps: float = 1e-6,
) -> Advantages:
    """A_i = (R_i - baseline_i(R)) / (scale(R) + eps) over each peer set; without a scale, A_i = R_i - baseline_i(R).

    Only trainable trajectories are compared. Source: MHGPO, arXiv 2506.02718; GRPO, arXiv 2402.03300.

    Args:
        trajectories: of one question or of many.
        credits: by trajectory id; one that is absent is unknown, and its trajectory is dropped ("missing_reward").
        peer_key: who is compared with whom.
        baseline: what is subtracted, from all alike or from each.
        scale: what divides, before eps is added.
        weights: by trajectory id, in the statistics; 1 by default. One with weight 0 is dropped ("aligned_away").
        eps: added to the scale.

    Returns:
        Values by trajectory id; counts of "missing_reward", "aligned_away", "singleton" and "zero_variance".
    """
    known, dropped = _known(trajectories, credits, weights)
    peer_sets: dict[Hashable, list[str]] = {}
    for t in known:
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
        centers = [center] * len(ids) if isinstance(center, float) else center
        divisor = scale(rewards, shares) + eps if scale else 1.0
        values.update({id: (r - c) / divisor for id, r, c in zip(ids, rewards, centers, strict=True)})
    return Advantages(values=values, dropped=dict(dropped))


def _known(
    trajectories: Iterable[Trajectory], credits: Mapping[str, float], weights: Mapping[str, float] | None
) -> tuple[list[Trajectory], Counter[str]]:
    """The trainable trajectories that have a credit and a weight; how many have not, by reason."""
    known: list[Trajectory] = []
    dropped: Counter[str] = Counter()
    for t in trajectories:
        if not t.trainable:
            continue
        if t.id not in credits:
            dropped["missing_reward"] += 1
        elif weights is not None and weights[t.id] == 0.0:
            dropped["aligned_away"] += 1
        else:
            known.append(t)
    return known, dropped


def estimated(
    estimator: Estimator,
    trajectories: Sequence[Trajectory],
    credits: Mapping[str, float],
    weights: Mapping[str, float],
) -> Advantages:
    """What an estimator gives, checked: advantages of trajectories of its own that can be trained on, and finite.

    Raises:
        RewardError: it gave something else.
    """
    given = estimator(trajectories, credits, weights)
    known = {t.id for t in trajectories if t.trainable and t.id in credits}
    if not isinstance(given, Advantages):
        left_out = len(known - given.keys())
        given = Advantages(values=given, dropped={"no_advantage": left_out} if left_out else {})
    for id, value in given.values.items():
        where = f"trajectory {id}"
        if id not in known:
            raise RewardError(where, "an advantage although it is not trained on", "Mend the estimator")
        if not math.isfinite(value):
            raise RewardError(where, f"the estimator gave {value}", "Mend the estimator")
    return given


def role_baseline(
    trajectories: Sequence[Trajectory],
    credits: Mapping[str, float],
    weights: Mapping[str, float],
    *,
    averages: MutableMapping[str, float],
    decay: float = 0.95,
) -> Advantages:
    """A_i = R_i - b; then b <- decay * b + (1 - decay) * R_i, one trajectory after another; b belongs to the agent.

    `averages` (agent -> b, 0 at first) is read and updated. There are no peers: a lone trajectory counts too. Source:
    SPIRAL's role-conditioned advantage estimation (arXiv 2506.24119), with b read before it is updated.
    """
    known, dropped = _known(trajectories, credits, weights)
    values: dict[str, float] = {}
    for t in known:
        before = averages.get(t.agent, 0.0)
        values[t.id] = credits[t.id] - before
        averages[t.agent] = decay * before + (1.0 - decay) * credits[t.id]
    return Advantages(values=values, dropped=dict(dropped))


def returns(
    trajectories: Sequence[Trajectory], credits: Mapping[str, float], weights: Mapping[str, float]
) -> Advantages:
    """A_i = R_i: what every token of the trajectory led to. A critic makes advantages of it (`gae`)."""
    known, dropped = _known(trajectories, credits, weights)
    return Advantages(values={t.id: credits[t.id] for t in known}, dropped=dict(dropped))


def gae(rewards_T: Sequence[float], values_T: Sequence[float], *, gamma: float, lam: float) -> list[float]:
    """A_t = delta_t + gamma * lam * A_(t+1), delta_t = r_t + gamma * V_(t+1) - V_t; A and V are 0 after the last token.

    T: sampled tokens of one trajectory; `values_T[t]` is the value before token t. Source: arXiv 1506.02438.
    """
    advantages: list[float] = []
    following, value_after = 0.0, 0.0
    for reward, value in zip(reversed(rewards_T), reversed(values_T), strict=True):
        following = reward + gamma * value_after - value + gamma * lam * following
        value_after = value
        advantages.append(following)
    return advantages[::-1]


def agent_turn(
    trajectories: Sequence[Trajectory],
    credits: Mapping[str, float],
    weights: Mapping[str, float],
    *,
    scale: Statistic | None = population_std,
    eps: float = 1e-6,
) -> Advantages:
    """`group_relative` among those who act for the same time: see `same_turn`."""
    return group_relative(
        trajectories, credits, peer_key=same_turn(trajectories), scale=scale, weights=weights, eps=eps
    )


def named_estimators(
    *, scale: Statistic, eps: float, averages: MutableMapping[str, float], decay: float
) -> dict[str, Estimator]:
    """The estimators that a configuration may name; docs/methods.md has their formulas side by side."""

    def peers(scale: Statistic | None, peer_key: PeerKey = same_pass, baseline: Baseline = mean) -> Estimator:
        return lambda trajectories, credits, weights: group_relative(
            trajectories, credits, peer_key=peer_key, baseline=baseline, scale=scale, weights=weights, eps=eps
        )

    return {
        "group_relative": peers(scale),
        "agent_wise": peers(scale, same_agent),
        "agent_turn": partial(agent_turn, scale=scale, eps=eps),
        "leave_one_out": peers(None, baseline=leave_one_out),
        "no_std": peers(None),
        "role_baseline": partial(role_baseline, averages=averages, decay=decay),
        "gae": returns,
    }
