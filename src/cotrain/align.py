"""How a rollout's sub trajectories are brought to a fixed number: M-GRPO's trajectory alignment.

K rollouts of a question delegate d_k times each to one kind of sub-agent; alignment says how much each trajectory
counts, in its peers' statistics and in the loss alike. A whole weight is a number of copies: copies would be equal in
every term, so none is ever computed twice. Source: M-GRPO, arXiv 2511.13288. No torch, no loss.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from cotrain.types import Group, Trajectory

Align = Callable[[Group, Mapping[str, float]], dict[str, float]]
"""(group, credits by trajectory id) -> how much each trainable trajectory with a credit counts, by id."""


def none(group: Group, credits: Mapping[str, float]) -> dict[str, float]:
    """Every trajectory once: weight 1, so a rollout that delegates often counts more."""
    return dict.fromkeys((t.id for t in _known(group, credits)), 1.0)


def weight(group: Group, credits: Mapping[str, float]) -> dict[str, float]:
    """Every trajectory once, with weight 1 / d_k: the expectation of `duplicate`'s counts over d, less variance.

    d_k is the number of rollout k's trajectories of that sub-agent that have a credit. Whoever was not delegated to
    has weight 1.
    """
    return {id: 1.0 / len(ids) for ids in _siblings(group, credits) for id in ids}


def duplicate(size: int, seed: int) -> Align:
    """Exactly d = `size` sub samples of each kind from every rollout that delegated to it, as published.

    d_k < d: every trajectory once, and d - d_k copies drawn with replacement from the rollout's own; d_k > d: d of
    them, drawn without replacement, the others have weight 0. Draws are seeded per (seed, step, question, rollout,
    agent). Whoever was not delegated to has weight 1.
    """

    def align(group: Group, credits: Mapping[str, float]) -> dict[str, float]:
        agents = {t.id: t for t in group.trajectories}
        weights: dict[str, float] = {}
        for ids in _siblings(group, credits):
            first = agents[ids[0]]
            if first.caller is None:
                weights[first.id] = 1.0
                continue
            key = f"{seed}:{group.step}:{group.question.id}:{first.rollout_id}:{first.agent}:duplicate"
            weights |= _copies(ids, size, random.Random(key))
        return weights

    return align


def _copies(ids: Sequence[str], size: int, draw: random.Random) -> dict[str, float]:
    drawn = draw.sample(ids, size) if len(ids) > size else [*ids, *draw.choices(ids, k=size - len(ids))]
    counts = Counter(drawn)
    return {id: float(counts[id]) for id in ids}


def _siblings(group: Group, credits: Mapping[str, float]) -> list[list[str]]:
    """Ids that share a rollout's place: one kind of sub-agent in one rollout; anyone else stands alone."""
    places: dict[object, list[str]] = {}
    for t in _known(group, credits):
        key = t.id if t.caller is None else (t.pass_id, t.rollout_id, t.agent)
        places.setdefault(key, []).append(t.id)
    return list(places.values())


def _known(group: Group, credits: Mapping[str, float]) -> Iterable[Trajectory]:
    return (t for t in group.trajectories if t.trainable and t.id in credits)


def percentile_99(counts: Sequence[int]) -> int:
    """The smallest number that at least 99 in 100 of the counts do not exceed, at least 1: M-GRPO's choice of d."""
    if not counts:
        return 1
    ordered = sorted(counts)
    return max(1, ordered[-(-99 * len(ordered) // 100) - 1])
