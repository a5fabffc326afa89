"""A run's stored groups scored again: as they were, and under other settings, step by step.

The rewards that judges gave are kept, the sinks' `shared` is scored anew from the stored answers; all else is made by
the run's own functions (`rewards.propagate`, `loops.compare`). Scoring with the run's own settings must give what is
stored; where it does not, whatever made it has changed since, and that is told. No rollout, no judge, no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cotrain.assemble import Plan
from cotrain.errors import ConfigError
from cotrain.loops import compare
from cotrain.recompute.effects import Effect, Effects
from cotrain.recompute.settings import check_steps, counts_shapley
from cotrain.rewards import propagate, score
from cotrain.runs import GroupRecord, read_groups
from cotrain.types import CreditRule, Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """A group scored again; how many of each agent's trajectories got no advantage, by reason."""

    record: GroupRecord
    dropped: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the chosen settings would have changed.

    `unscored` are steps whose groups have no reward at all (the run was broken off while it scored them); they are
    left out. `differing` are ids of the first trajectories that the run's own settings score otherwise than is stored,
    `num_differing` is their number: 0 where the stored values are reproduced exactly.
    """

    steps: Sequence[int]
    unscored: Sequence[int]
    num_groups: int
    num_trajectories: int
    num_differing: int
    differing: Sequence[str]
    effects: Mapping[str, Effect]


def recompute(
    folder: Path,
    before: Plan,
    after: Plan,
    steps: Sequence[int],
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Outcome:
    """Compare the stored groups of these steps, in their order, with what `after` makes of them.

    Raises:
        ConfigError: the settings need more than is stored.
        DataError: a step's groups cannot be read.
        RewardError: a metric or an estimator gives something that is no finite number.
    """
    check_steps(before, after, steps)
    effects, unscored, differing = Effects(before, after), list[int](), list[str]()
    num_groups = num_trajectories = 0
    for place, step in enumerate(steps):
        progress("scoring again", place, len(steps))
        stored = read_groups(folder, step)
        trajectories = [t for record in stored for t in record.group.trajectories]
        if trajectories and not any(t.rewards for t in trajectories):
            unscored.append(step)
            continue
        num_groups, num_trajectories = num_groups + len(stored), num_trajectories + len(trajectories)
        as_was = [rescored(before, record.group) for record in stored]
        differing += [id for old, new in zip(stored, as_was, strict=True) for id in differences(old, new.record)]
        for record in stored:
            check_gates(before, after, record.group)
        anew = [rescored(after, record.group) for record in stored]
        effects.add(stored, [r.dropped for r in as_was], [r.record for r in anew], [r.dropped for r in anew])
    progress("scoring again", len(steps), len(steps))
    return Outcome(
        steps=[step for step in steps if step not in unscored],
        unscored=unscored,
        num_groups=num_groups,
        num_trajectories=num_trajectories,
        num_differing=len(differing),
        differing=differing[:3],
        effects=effects.summary(is_reproduced=not differing),
    )


def rescored(plan: Plan, group: Group) -> Rescored:
    """The group with its `shared` rewards, credits, alignment and advantages made anew by a plan.

    Where a judge named `shared` scores the answers, they keep what is stored.
    """

    def seated(t: Trajectory) -> Trajectory:
        agent = plan.agents.get(t.agent)
        return t if agent is None or agent.trainable or not t.trainable else replace(t, trainable=False)

    group = replace(group, trajectories=tuple(map(seated, group.trajectories)))
    metric = None if "shared" in plan.judges else plan.metric
    group = propagate(score(group, metric, plan.rules), plan.rules)
    by_agent = {name: compare(replace(plan, estimators={name: e}), group) for name, e in plan.estimators.items()}
    parts = [record for record, _ in by_agent.values()]
    record = replace(
        parts[0],
        advantages={id: value for part in parts for id, value in part.advantages.items()},
        weights={id: value for part in parts for id, value in part.weights.items()},
    )
    return Rescored(record=record, dropped={name: dropped for name, (_, dropped) in by_agent.items()})


def differences(stored: GroupRecord, made: GroupRecord) -> list[str]:
    """Ids of the trajectories whose rewards, credit, advantage or weight are not exactly those that are stored."""

    def values(record: GroupRecord, t: Trajectory) -> tuple[object, ...]:
        return t.rewards, record.credits.get(t.id), record.advantages.get(t.id), record.weights.get(t.id)

    pairs = zip(stored.group.trajectories, made.group.trajectories, strict=True)
    return [old.id for old, new in pairs if values(stored, old) != values(made, new)]


def check_gates(before: Plan, after: Plan, group: Group) -> None:
    """Refuse another gate on the answers where it decided about something that is not stored.

    Raises:
        ConfigError: it put 0 in place of a judge's verdict on an answer (the first one is named), or masked rollouts
            were scored under it.
    """
    for t in group.sinks():
        old, new = (plan.rules.get(t.agent, CreditRule()) for plan in (before, after))
        where, fix = f"rewards.credit.{t.agent}.gate", "Keep the gate, or train a new run"
        if "shared" in before.judges and t.faults and old.gate and not new.gate:
            found = f"it put 0 in place of the verdict on the faulty answer {t.id}, which is not stored"
            raise ConfigError(where, found, fix)
        if counts_shapley(after) and old.gate != new.gate:
            found = "the stored reward shapley was made with the old one, of masked rollouts that are not stored"
            raise ConfigError(where, found, fix)
