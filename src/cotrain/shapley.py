"""Shapley credit: what each agent adds to the answer, by masking agents out.

A masked agent says nothing, and the system does what it does then: the search team searches for the question itself
and takes the first passages, a caller reads an empty finding. A coalition's value is the answer's shared reward when
only its agents speak. Tokens are drawn with the same noise as in the rollout itself, so what comes before the first
masked call is the same. Source: Shapley (1953); for LLM teams SHARP. Masked rollouts are scored and thrown away.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cotrain.engines.base import Cohort
from cotrain.sampling import Branches, Job, Strategy, masked_rollout
from cotrain.types import Group, Trajectory

Coalition = frozenset[str]

REWARD = "shapley"
"""The name of the reward."""


def shapley(agents: Sequence[str], values: Mapping[Coalition, float]) -> dict[str, float]:
    """phi_i = sum over S without i of |S|! (n - |S| - 1)! / n! * (v(S + i) - v(S)). All 2^n coalitions have a value."""
    n = len(agents)
    credit = {}
    for agent in agents:
        others = [other for other in agents if other != agent]
        marginals = [
            math.factorial(size)
            * math.factorial(n - size - 1)
            / math.factorial(n)
            * (values[frozenset(chosen) | {agent}] - values[frozenset(chosen)])
            for size in range(n)
            for chosen in itertools.combinations(others, size)
        ]
        credit[agent] = math.fsum(marginals)
    return credit


def shapley_sampled(orders: Sequence[Sequence[str]], values: Mapping[Coalition, float]) -> dict[str, float]:
    """The mean over orders of v(those before i, and i) - v(those before i): unbiased for orders drawn uniformly."""
    return {
        agent: math.fsum(
            values[frozenset(order[: order.index(agent) + 1])] - values[frozenset(order[: order.index(agent)])]
            for order in orders
        )
        / len(orders)
        for agent in orders[0]
    }


def with_shapley(strategy: Strategy, num_orders: int | None) -> Strategy:
    """The strategy, after which every trajectory has the reward `shapley` of its agent in its rollout.

    Exact over all coalitions, or over `num_orders` orders of the agents, drawn anew for each rollout. A rollout of
    which a masked one fails or cannot be judged gives no such reward.
    """

    async def credited(job: Job) -> Group:
        group = await strategy(job)
        agents = [agent.name for agent in job.system.agents]
        orders = {rollout: _orders(job, agents, num_orders, rollout) for rollout in group.by_rollout()}
        wanted = [(rollout, chosen) for rollout in orders for chosen in _coalitions(agents, orders[rollout])]
        made = await (job.cohort or Cohort()).gather(
            [masked_rollout(job, rollout, [a for a in agents if a not in chosen]) for rollout, chosen in wanted]
        )
        values = await _values(job, group, wanted, made)
        credit = {rollout: _credit(agents, orders[rollout], values[rollout]) for rollout in orders}
        return replace(
            group,
            trajectories=tuple(_rewarded(t, credit) for t in group.trajectories),
            dropped=dict(sum((_masked(branches.dropped) for branches in made), Counter(group.dropped))),
            unused=group.unused + sum(t.num_sampled for branches in made for t in branches.trajectories),
        )

    return credited


def _masked(dropped: Mapping[str, int]) -> Counter[str]:
    """What masked rollouts dropped, under names of its own: those that are trained on are still there."""
    return Counter({f"masked/{reason}": count for reason, count in dropped.items()})


def _orders(job: Job, agents: Sequence[str], count: int | None, rollout: str) -> list[list[str]]:
    """The orders to take the mean over; none: all coalitions."""
    draw = random.Random(f"{job.seed}:{job.step}:{job.question.id}:{rollout}:shapley")
    return [draw.sample(agents, len(agents)) for _ in range(count or 0)]


def _coalitions(agents: Sequence[str], orders: Sequence[Sequence[str]]) -> list[Coalition]:
    """Every coalition whose value is needed, but that of all, which is the rollout itself."""
    sizes = range(len(agents))
    if orders:
        needed = [frozenset(order[:size]) for order in orders for size in sizes]
    else:
        needed = [frozenset(chosen) for size in sizes for chosen in itertools.combinations(agents, size)]
    return list(dict.fromkeys(needed))


async def _values(
    job: Job, group: Group, wanted: Sequence[tuple[str, Coalition]], made: Sequence[Branches]
) -> dict[str, dict[Coalition, float]]:
    """Rollout -> coalition -> value, where it is known."""
    everyone = frozenset(agent.name for agent in job.system.agents)
    of_group = await job.worth(group)
    groups = [replace(group, trajectories=branches.trajectories) for branches in made]
    scored = await asyncio.gather(*map(job.worth, groups))
    values = {rollout: {everyone: of_group[rollout]} for rollout in group.by_rollout() if rollout in of_group}
    for (rollout, chosen), found in zip(wanted, scored, strict=True):
        if rollout in found:
            values.setdefault(rollout, {})[chosen] = found[rollout]
    return {rollout: values.get(rollout, {}) for rollout in group.by_rollout()}


def _credit(
    agents: Sequence[str], orders: Sequence[Sequence[str]], values: Mapping[Coalition, float]
) -> dict[str, float]:
    """Every agent's credit, or {} where a value is unknown."""
    needed = {frozenset(agents), *_coalitions(agents, orders)}
    if needed - values.keys():
        return {}
    return shapley_sampled(orders, values) if orders else shapley(agents, values)


def _rewarded(t: Trajectory, credit: Mapping[str, Mapping[str, float]]) -> Trajectory:
    known = credit.get(t.rollout_id or "", {})
    return replace(t, rewards={**t.rewards, REWARD: known[t.agent]}) if t.agent in known else t
