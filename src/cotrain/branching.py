"""Strategies that fork from one recorded rollout at each of its calls.

`counterfactual` freezes a rollout and asks, call by call, what else could have been said there. `tree` goes on from
one of the alternatives each time. Both train at each call only what was said at that call. Groups of other calls are
other passes. Draws are seeded as everywhere.
"""

from __future__ import annotations

import random

from cotrain.engines.base import Cohort
from cotrain.sampling import Branches, Job, Rollout, Strategy, fork, group_of, only_call
from cotrain.types import Group


async def counterfactual(job: Job) -> Group:
    """C3: freeze one rollout; at each of its top-level calls sample G alternatives and all that is downstream of them.

    The alternatives at a call share one prompt and are each other's peers; with `leave_one_out` their advantage is
    R_j minus the mean of the others. The frozen rollout itself is not trained on. Source: C3, arXiv 2603.06859.
    """
    first = await fork(job, at=0, size=1)
    frozen = only_call(first, -1)
    (base,) = first.rollouts.values() or (None,)
    if base is None:
        return group_of(job, "counterfactual", [first])
    cohort = job.cohort or Cohort()
    calls = range(base.num_asks)
    forks = await cohort.gather([fork(job, at=k, size=job.group_size, pass_id=k + 1, base=base) for k in calls])
    return group_of(job, "counterfactual", [frozen, *(only_call(found, k) for k, found in enumerate(forks))])


def tree(*, picks_best: bool = True) -> Strategy:
    """AT-GRPO: branch at every call, and continue from the best branch, or from a random one.

    Pass k holds G alternatives for call k, each played to its end; only call k of them is trained. The next pass
    replays the chosen one up to call k + 1. Best is by the shared reward of the rollout's answer, the first of equals.
    Source: AT-GRPO, arXiv 2510.11062.
    """

    async def strategy(job: Job) -> Group:
        passes: list[Branches] = []
        base: Rollout | None = None
        while base is None or len(passes) < base.num_asks:
            at = len(passes)
            found = await fork(job, at=at, size=job.group_size, pass_id=at, base=base)
            passes.append(only_call(found, at))
            if not found.rollouts:
                break
            base = await _best(job, found) if picks_best else _any(job, found, at)
        return group_of(job, "tree", passes)

    return strategy


async def _best(job: Job, found: Branches) -> Rollout:
    values = await job.worth(group_of(job, "tree", [found]))
    best = max(found.rollouts, key=lambda id: values.get(id, float("-inf")))
    return found.rollouts[best]


def _any(job: Job, found: Branches, at: int) -> Rollout:
    draw = random.Random(f"{job.seed}:{job.step}:{job.question.id}:{at}:tree")
    return found.rollouts[draw.choice(list(found.rollouts))]
