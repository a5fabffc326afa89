"""What a change of settings does to rewards, credits, advantages and the gradient's share, agent by agent.

`Effects` is fed with steps of a run, as stored and as scored again, keeps numbers alone, and sums them up. Pure: no
files, no configuration beyond the two plans, no output.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from cotrain.advantages import EQUAL_WITHIN
from cotrain.assemble import Plan
from cotrain.batch import Reduction, coefficients
from cotrain.recompute.settings import estimator_of, has_critic
from cotrain.runs import GroupRecord
from cotrain.types import Trajectory

Summary = Mapping[str, float | None]
"""What is known of one agent under one set of settings, by name; None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What the settings change for one agent.

    `estimators` are its old and its new one. `stored` and `recomputed` have equal keys: `shared_mean`, `shared_std`,
    `credit_mean`, `credit_std`, `advantage_size_mean`, `advantage_size_std` (of |advantage|; standard deviations are
    the population's), `num_advantages`, `dropped/<reason>` for each reason of either side, and `gradient_share` (see
    `gradient_masses`). `num_both` trajectories have an advantage on both sides: `correlation` (Pearson's) and
    `sign_changed` (a share) are over these.
    """

    model: str
    estimators: tuple[str, str]
    num_trajectories: int
    stored: Summary
    recomputed: Summary
    num_both: int
    correlation: float | None
    sign_changed: float | None

    @property
    def difference(self) -> Summary:
        """Recomputed - stored, where both are known."""
        pairs = {name: (old, self.recomputed[name]) for name, old in self.stored.items()}
        return {k: None if old is None or new is None else new - old for k, (old, new) in pairs.items()}


@dataclass(slots=True)
class _Tally:
    """The numbers of one agent on one side, over all steps."""

    shared: list[float] = field(default_factory=list)
    credits: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


class Effects:
    """Collects steps, then sums them up by agent."""

    def __init__(self, before: Plan, after: Plan) -> None:
        self._plans = (before, after)
        self._tallies = [{name: _Tally() for name in plan.agents} for plan in self._plans]
        self._masses: tuple[dict[tuple[str, str], float], ...] = ({}, {})
        self._pairs: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        self._num_trajectories: Counter[str] = Counter()

    def add(
        self,
        stored: Sequence[GroupRecord],
        stored_dropped: Iterable[Mapping[str, Mapping[str, int]]],
        made: Sequence[GroupRecord],
        made_dropped: Iterable[Mapping[str, Mapping[str, int]]],
    ) -> None:
        """Count one step: its groups as stored and as scored again, and what was dropped, by agent and reason."""
        for side, (records, dropped) in enumerate(((stored, stored_dropped), (made, made_dropped))):
            tallies = self._tallies[side]
            for record in records:
                _count(tallies, record)
            for by_agent in dropped:
                for name, reasons in by_agent.items():
                    tallies[name].dropped.update(reasons)
            reduction = self._plans[side].config.loss.reduction
            for place, mass in gradient_masses(records, reduction).items():
                self._masses[side][place] = self._masses[side].get(place, 0.0) + mass
        for old, new in zip(stored, made, strict=True):
            for t in old.group.trajectories:
                self._num_trajectories[t.agent] += 1
                if t.id in old.advantages and t.id in new.advantages:
                    before, after = self._pairs[t.agent]
                    before.append(old.advantages[t.id])
                    after.append(new.advantages[t.id])

    def summary(self, *, is_reproduced: bool) -> dict[str, Effect]:
        """Each agent's effect. Unless the stored values were reproduced, nobody knows why those were dropped."""
        plans, effects = self._plans, {}
        for name, agent in plans[1].agents.items():
            tallies = [by_agent[name] for by_agent in self._tallies]
            reasons = sorted(tallies[0].dropped | tallies[1].dropped)
            sides = []
            for side, tally in enumerate(tallies):
                counts = {f"dropped/{r}": tally.dropped[r] if side or is_reproduced else None for r in reasons}
                share = self._share(side, agent.model, name)
                sides.append({**_statistics(tally, has_critic(plans[side], name)), **counts, "gradient_share": share})
            old, new = self._pairs[name]
            is_compared = not any(has_critic(plan, name) for plan in plans)
            effects[name] = Effect(
                model=agent.model,
                estimators=(estimator_of(plans[0], name), estimator_of(plans[1], name)),
                num_trajectories=self._num_trajectories[name],
                stored=sides[0],
                recomputed=sides[1],
                num_both=len(old) if is_compared else 0,
                correlation=correlation(old, new) if is_compared else None,
                sign_changed=sign_changed(old, new) if is_compared else None,
            )
        return effects

    def _share(self, side: int, model: str, agent: str) -> float | None:
        """The agent's part of its model's gradient mass; None where there is none, or a critic makes some of it."""
        parts = {name: mass for (of, name), mass in self._masses[side].items() if of == model}
        total = sum(parts.values())
        known = self._plans[side].agents
        if not total or any(name in known and has_critic(self._plans[side], name) for name in parts):
            return None
        return parts.get(agent, 0.0) / total


def gradient_masses(records: Sequence[GroupRecord], reduction: Reduction) -> dict[tuple[str, str], float]:
    """(model, agent) -> sum over the agent's sampled tokens of coefficient * |advantage|, in one step's batches.

    A batch is what one model is trained on in the step, and the coefficients are those that `batch.pack` gives its
    tokens; so a trajectory of n tokens has n * coefficient * |A|: with W = sum w, w |A| / W under "trajectory",
    n w |A| / (sum w n) under "token", n w |A| / (c W) under a number c.

    Divided by the model's total it is a proxy of the agent's share of the gradient. In the first pass over a batch,
    where every ratio is 1 and nothing is clipped, the gradient of the loss's reward part is the sum over the tokens of
    -coefficient * A * (gradient of the token's log-prob). The mass is that sum's triangle bound where all log-prob
    gradients are equally long. So it says how much weight falls on an agent, not where its gradients point: they may
    cancel, and those of likely tokens are shorter. Left out are the KL term, clipping, the guard of older samples, and
    that a trainer may have passed over a group as too old.
    """
    batches: dict[str, list[tuple[Trajectory, GroupRecord]]] = {}
    for record in records:
        for t in record.group.trajectories:
            if t.trainable and t.id in record.advantages and t.num_sampled:
                batches.setdefault(t.model, []).append((t, record))
    masses: dict[tuple[str, str], float] = {}
    for model, parts in batches.items():
        weights = {t.id: record.weights.get(t.id, 1.0) for t, record in parts}
        if not any(weights.values()):
            continue
        of_token = coefficients(weights, {t.id: t.num_sampled for t, _ in parts}, reduction)
        for t, record in parts:
            mass = t.num_sampled * of_token[t.id] * abs(record.advantages[t.id])
            masses[model, t.agent] = masses.get((model, t.agent), 0.0) + mass
    return masses


def correlation(old: Sequence[float], new: Sequence[float]) -> float | None:
    """Pearson's; None where either is constant."""
    if not old or any(max(side) - min(side) <= EQUAL_WITHIN for side in (old, new)):
        return None
    return float(np.corrcoef(old, new)[0, 1])


def sign_changed(old: Sequence[float], new: Sequence[float]) -> float | None:
    """The share of pairs with different signs; 0 is a sign of its own. None without a pair."""
    return float(np.mean(np.sign(old) != np.sign(new))) if old else None


def _count(tallies: Mapping[str, _Tally], record: GroupRecord) -> None:
    for t in record.group.trajectories:
        if (tally := tallies.get(t.agent)) is None:
            continue  # the system has no such agent any more
        if "shared" in t.rewards:
            tally.shared.append(t.rewards["shared"])
        if t.id in record.credits:
            tally.credits.append(record.credits[t.id])
        if t.id in record.advantages:
            tally.sizes.append(abs(record.advantages[t.id]))


def _statistics(tally: _Tally, is_from_critic: bool) -> dict[str, float | None]:
    series = {
        "shared": tally.shared,
        "credit": tally.credits,
        "advantage_size": [] if is_from_critic else tally.sizes,
    }
    found: dict[str, float | None] = {}
    for name, values in series.items():
        found[f"{name}_mean"] = fmean(values) if values else None
        found[f"{name}_std"] = float(np.std(values)) if values else None
    return {**found, "num_advantages": len(tally.sizes)}
