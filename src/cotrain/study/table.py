"""A study's results as rows: scores, costs and stability of every arm.

Scores: before RL, after it, the difference of the two and the one to the baseline arm, paired on the same seeds and
questions, each with its intervals (`intervals.py`). Costs and stability: means over an arm's seeds, and ratios to the
baseline arm over the seeds that both have. They are of finished runs alone; the others are named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from cotrain.evaluate import Score
from cotrain.study.intervals import Estimate, estimate
from cotrain.study.plan import Job, Study
from cotrain.study.results import (
    Outcome,
    Stability,
    cost_of,
    defined_before,
    differences,
    matrix,
    outcome_of,
    read_attempts,
    stability_of,
    state_of,
    usage_path,
    values,
)

ByArm = Mapping[str, Sequence[Outcome]]
"""Finished runs by arm, seeds in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """One score of one arm on one held-out set; `gain` is after - before, `against` is this arm - the baseline."""

    set: str
    score: Score
    arm: str
    seeds: tuple[int | None, ...]
    num_questions: int
    before: float
    after: Estimate
    by_seed: tuple[float, ...]
    gain: Estimate | None
    against: Estimate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """What an arm's runs took: means over its seeds by name, and over the baseline's on the seeds that both have.

    A number is averaged over the seeds that know it. `resumed`: seeds whose run took several attempts, so that its wall
    time holds what was lost; `unseen`: seeds with an attempt of which nobody knows what it took; `short`: seeds that
    ended before they had sampled the budget.
    """

    arm: str
    mean: Mapping[str, float]
    ratio: Mapping[str, float]
    resumed: tuple[int | None, ...]
    unseen: tuple[int | None, ...]
    short: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StabilityRow:
    """How each of an arm's runs ended."""

    arm: str
    seeds: tuple[int | None, ...]
    runs: tuple[Stability, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """A study's results; `defined_before`: what counted as a collapse when its first run began, where that is known."""

    study: Study
    defined_before: str | None
    unfinished: Mapping[str, str]
    num_runs: int
    scores: tuple[ScoreRow, ...]
    costs: tuple[CostRow, ...]
    stability: tuple[StabilityRow, ...]


def finished(jobs: Iterable[Job]) -> dict[str, list[Outcome]]:
    """The finished runs by arm.

    Raises:
        DataError: one of them cannot be read.
    """
    found: dict[str, list[Outcome]] = {}
    for job in jobs:
        if (outcome := outcome_of(job)) is not None:
            found.setdefault(job.arm, []).append(outcome)
    return found


def tables_of(study: Study, jobs: Sequence[Job], runs: ByArm) -> Tables:
    """All results, arms in the study's order."""
    arms = [arm for arm in study.arms if arm in runs]
    sets = list(jobs[0].config.data.eval)
    return Tables(
        study=study,
        defined_before=defined_before(study),
        unfinished={str(job): _why(job) for job in jobs if state_of(job) != "finished"},
        num_runs=len(jobs),
        scores=tuple(
            _score_row(study, runs, arm, name, score) for name in sets for score in study.scores for arm in arms
        ),
        costs=tuple(_cost_row(study, runs, arm) for arm in arms),
        stability=tuple(
            StabilityRow(
                arm=arm,
                seeds=tuple(run.job.seed for run in runs[arm]),
                runs=tuple(stability_of(run, study.collapse) for run in runs[arm]),
            )
            for arm in arms
        ),
    )


def _why(job: Job) -> str:
    attempts = read_attempts(usage_path(job))
    if state_of(job) == "missing" and not attempts:
        return "not begun"
    code = attempts[-1].get("code") if attempts else None
    return f"failed with code {code}; see jobs/{job.name}.log" if code else "begun"


def _score_row(study: Study, runs: ByArm, arm: str, name: str, score: Score) -> ScoreRow:
    before, after = (values(runs[arm], name, score, when) for when in ("before", "after"))
    after_SN = matrix(after)
    is_trained = study.arms[arm].updates is None
    against = None
    if arm != study.baseline and study.baseline in runs:
        against_SN = differences(after, values(runs[study.baseline], name, score, "after"))
        against = estimate(against_SN, resamples=study.bootstrap) if len(against_SN) else None
    return ScoreRow(
        set=name,
        score=score,
        arm=arm,
        seeds=tuple(after),
        num_questions=after_SN.shape[1],
        before=float(matrix(before).mean()),
        after=estimate(after_SN, resamples=study.bootstrap),
        by_seed=tuple(after_SN.mean(axis=1).tolist()),
        gain=estimate(differences(after, before), resamples=study.bootstrap) if is_trained else None,
        against=against,
    )


def _cost_row(study: Study, runs: ByArm, arm: str) -> CostRow:
    ours = {run.job.seed: cost_of(run) for run in runs[arm]}
    base = {run.job.seed: cost_of(run) for run in runs.get(study.baseline, ())}
    ratio: dict[str, float] = {}
    for name in _names(ours.values()) if arm != study.baseline else ():
        both = [seed for seed in ours if name in ours[seed] and name in base.get(seed, {})]
        if total := sum(base[seed][name] for seed in both):
            ratio[name] = sum(ours[seed][name] for seed in both) / total
    budget = study.budget.sampled or 0
    is_trained = study.arms[arm].updates is None
    return CostRow(
        arm=arm,
        mean={name: fmean(c[name] for c in ours.values() if name in c) for name in _names(ours.values())},
        ratio=ratio,
        resumed=tuple(run.job.seed for run in runs[arm] if len(run.attempts) > 1),
        unseen=tuple(seed for seed, cost in ours.items() if "wall_s" not in cost),
        short=tuple(seed for seed, cost in ours.items() if is_trained and cost["sampled"] < budget),
    )


def _names(costs: Iterable[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for cost in costs for name in cost))
