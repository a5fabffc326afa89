"""The loop: questions -> rollouts -> credits -> advantages -> samples -> update, and held-out evaluation.

`train` runs all of it in one process and leaves a run folder that `--resume` continues to exactly the same losses (on
the CPU). Each phase is a function of its own over plain values; nothing here knows a formula.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from cotrain import runs
from cotrain.advantages import estimated
from cotrain.batch import make_samples
from cotrain.config import RunConfig
from cotrain.engines.base import Cohort
from cotrain.errors import InfrastructureError
from cotrain.evaluate import Prediction, eval_row
from cotrain.judges import judged
from cotrain.rewards import METRICS, credits, penalty, propagate, score
from cotrain.roster import Roster
from cotrain.runs import GroupRecord, Metrics
from cotrain.sampling import Job, fork, fork_on_first
from cotrain.types import Group, Question, Sample

if TYPE_CHECKING:
    from cotrain.assemble import Plan

Progress = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, how much there is)."""


def quiet(phase: str, done: int, total: int) -> None:
    """A `Progress` that says nothing."""


async def rollouts(
    plan: Plan, roster: Roster, questions: Sequence[Question], step: int, attempt: int = 0
) -> list[Group]:
    """Have the team work on each question by the plan's strategy; one group per question, in order."""

    def job(question: Question, cohort: Cohort | None) -> Coroutine[object, object, Group]:
        return plan.strategy(
            Job(
                system=plan.system,
                roster=roster,
                question=question,
                step=step,
                seed=plan.config.loop.seed,
                group_size=plan.config.sampling.group_size,
                cohort=cohort,
                attempt=attempt,
                value=partial(answers_worth, plan),
            )
        )

    return await together(job, questions, plan.config.engine.batching)


async def answers_worth(plan: Plan, group: Group) -> dict[str, float]:
    """The shared reward of each rollout's answer, by rollout id, where it is known."""
    verdict = {name: judges for name, judges in plan.judges.items() if name == "shared"}
    (scored,), _ = await score_groups(replace(plan, judges=verdict), [group])
    return {str(t.rollout_id): t.rewards["shared"] for t in scored.sinks() if "shared" in t.rewards}


async def together(
    job: Callable[[Question, Cohort | None], Coroutine[object, object, Group]],
    questions: Sequence[Question],
    batching: str,
) -> list[Group]:
    """Run one job per question at once: in one cohort per step or per group, or in none (continuous batching)."""
    if batching == "continuous":
        return list(await asyncio.gather(*(job(question, None) for question in questions)))
    if batching == "group":

        async def alone(question: Question) -> Group:
            cohort = Cohort()
            cohort.enter()
            return await job(question, cohort)

        return list(await asyncio.gather(*map(alone, questions)))
    cohort = Cohort()
    cohort.enter()
    return await cohort.gather([job(question, cohort) for question in questions])


async def judge(plan: Plan, groups: Sequence[Group]) -> tuple[list[GroupRecord], Mapping[str, int]]:
    """Score the groups, carry rewards backward, align and compare peers; what was dropped, by reason."""
    scored, failed = await score_groups(plan, groups)
    records, dropped = [], Counter[str](failed)
    for group in scored:
        record, unused = compare(plan, group)
        records.append(record)
        dropped.update(group.dropped)
        dropped.update(unused)
    return records, dropped


async def resampled(
    plan: Plan, roster: Roster, step: int, judged: tuple[list[GroupRecord], Mapping[str, int]]
) -> tuple[list[GroupRecord], Mapping[str, int]]:
    """The judged groups of a step, those without any advantage sampled again, `sampling.resample` times at most.

    What an attempt dropped counts, and so do its tokens (`Group.unused`); "resampled" counts the attempts. Source:
    dynamic sampling, DAPO, arXiv 2503.14476, which takes other questions; here a group keeps its own.
    """
    records, dropped = list(judged[0]), Counter(judged[1])
    for attempt in range(1, plan.config.sampling.resample + 1):
        places = [i for i, record in enumerate(records) if record.group.trajectories and not record.advantages]
        if not places:
            break
        before = [records[i].group for i in places]
        again = await rollouts(plan, roster, [group.question for group in before], step, attempt)
        renewed, reasons = await judge(plan, again)
        dropped.update({**reasons, "resampled": len(places)})
        for place, old, record in zip(places, before, renewed, strict=True):
            kept, other = (record, old) if record.group.trajectories else (records[place], record.group)
            group = replace(kept.group, unused=kept.group.unused + other.num_sampled)
            records[place] = replace(kept, group=group)
    return records, dropped


def compare(plan: Plan, group: Group) -> tuple[GroupRecord, Mapping[str, int]]:
    """Credits, alignment and advantages of a scored group; the trajectories without an advantage, by reason."""
    credit = credits(group, plan.rules)
    weights = plan.align(group, credit)
    values: dict[str, float] = {}
    dropped: Counter[str] = Counter()
    for name, estimator in plan.estimators.items():
        of_agent = [t for t in group.trajectories if t.agent == name]
        result = estimated(estimator, of_agent, credit, weights)
        values |= result.values
        dropped.update(result.dropped)
    factors = {t.id: plan.config.align.factors.get(t.agent, 1.0) for t in group.trajectories}
    of_loss = {id: weights[id] * factors[id] for id in values}
    return GroupRecord(group=group, credits=credit, advantages=values, weights=of_loss), dropped


async def score_groups(plan: Plan, groups: Sequence[Group]) -> tuple[list[Group], Mapping[str, int]]:
    """Every reward of the groups, judges' included, carried backward; how many judgements failed, by reward."""
    judged_groups, failed = await judged(groups, plan.judges)
    metric = None if "shared" in plan.judges else plan.metric
    return [propagate(score(group, metric, plan.rules), plan.rules) for group in judged_groups], failed


def samples_by_model(records: Sequence[GroupRecord], models: Sequence[str]) -> dict[str, list[Sample]]:
    """What each model trains on; a model without samples has an empty list."""
    samples: dict[str, list[Sample]] = {model: [] for model in models}
    for record in records:
        for sample in make_samples(record.group, record.advantages, record.weights):
            samples[sample.model].append(sample)
    return samples


def team_metrics(plan: Plan, records: Sequence[GroupRecord], dropped: Mapping[str, int]) -> dict[str, float]:
    """Means over the step's trajectories: the sinks' credit, and each agent's rewards, faults, lengths."""
    metrics: dict[str, float] = {f"dropped/{reason}": count for reason, count in sorted(dropped.items())}
    sinks = [(t, r) for r in records for t in r.group.sinks() if t.id in r.credits]
    if sinks:
        metrics["team/reward"] = fmean(r.credits[t.id] for t, r in sinks)
        metrics["team/shared"] = fmean(t.rewards["shared"] for t, _ in sinks)
    for name in plan.agents:
        of_agent = [(t, r) for r in records for t in r.group.trajectories if t.agent == name]
        known = [(t, r) for t, r in of_agent if t.id in r.credits]
        if not known:
            continue
        metrics |= {
            f"agent/{name}/credit": fmean(r.credits[t.id] for t, r in known),
            f"agent/{name}/shared": fmean(t.rewards["shared"] for t, _ in known),
            f"agent/{name}/penalty": fmean(penalty(t, plan.rules[name]) for t, _ in known),
            f"agent/{name}/fault_rate": fmean(bool(t.faults) for t, _ in of_agent),
            f"agent/{name}/truncated_rate": fmean(t.status == "truncated" for t, _ in of_agent),
            f"agent/{name}/length": fmean(t.num_sampled for t, _ in of_agent),
            f"agent/{name}/turns": fmean(len(t.turns) for t, _ in of_agent),
            f"agent/{name}/per_rollout": len(of_agent) / max(1, sum(len(r.group.by_rollout()) for r in records)),
            f"agent/{name}/samples": float(sum(t.id in r.advantages for t, r in of_agent)),
        }
        for fault, count in sorted(Counter(f for t, _ in of_agent for f in t.faults).items()):
            metrics[f"agent/{name}/fault/{fault}"] = count / len(of_agent)
        for judge_name in plan.judges:
            if found := [t.rewards[judge_name] for t, _ in of_agent if judge_name in t.rewards]:
                metrics[f"agent/{name}/{judge_name}"] = fmean(found)
    return metrics


async def demonstrations(
    plan: Plan, roster: Roster, questions: Sequence[Question], step: int = 0
) -> tuple[dict[str, list[Sample]], Mapping[str, int]]:
    """What the system's rules would say to each question, as samples by model; what was dropped, by reason."""
    job = Job(system=plan.system, roster=roster, question=questions[0], step=step, group_size=1)
    job = replace(job, script=plan.system.demonstrate)
    jobs = [fork_on_first(replace(job, question=question)) for question in questions]
    records = [
        GroupRecord(group=group, advantages={t.id: 1.0 for t in group.trajectories})
        for group in await asyncio.gather(*jobs)
    ]
    dropped = Counter[str]()
    for record in records:
        dropped.update(record.group.dropped)
    return samples_by_model(records, list(plan.config.models)), dropped


async def predict(
    plan: Plan, roster: Roster, questions: Sequence[Question], *, progress: Progress = quiet, label: str = "evaluating"
) -> list[Prediction]:
    """Greedy answers of the team to each question, one rollout each, with their scores.

    Raises:
        InfrastructureError: a rollout could not be finished; an evaluation is of all its questions or of none.
    """
    greedy, predictions = roster.greedy(), []
    at_once = plan.config.engine.max_batch

    async def job(question: Question, cohort: Cohort | None) -> Group:
        work = Job(system=plan.system, roster=greedy, question=question, seed=plan.config.loop.seed, cohort=cohort)
        branches = await fork(work, at=0, size=1)
        return Group(question=question, step=0, strategy="greedy", trajectories=branches.trajectories)

    for start in range(0, len(questions), at_once):
        progress(label, start, len(questions))
        groups = await together(job, questions[start : start + at_once], "step")
        scored, _ = await score_groups(plan, groups)
        predictions += [prediction(plan, group) for group in scored]
    progress(label, len(questions), len(questions))
    return predictions


def prediction(plan: Plan, group: Group) -> Prediction:
    """The scores of a scored group with a single rollout."""
    if not group.trajectories:
        raise InfrastructureError(
            f"question {group.question.id}", "its rollout could not be finished", "Evaluate again"
        )
    (sink,) = group.sinks()
    golds, credit = group.question.answers, credits(group, plan.rules)
    if "shared" not in sink.rewards:
        raise InfrastructureError(
            f"question {group.question.id}", "its answer could not be judged", "Mend the judge, and evaluate again"
        )
    of_agent = {
        name: [credit[t.id] for t in group.trajectories if t.agent == name and t.id in credit] for name in plan.agents
    }
    return Prediction(
        question_id=group.question.id,
        answer=sink.output,
        golds=golds,
        em=METRICS["exact_match"](sink.output, golds),
        f1=METRICS["f1"](sink.output, golds),
        accuracy=METRICS["accuracy"](sink.output, golds),
        reward=credit.get(sink.id, sink.rewards["shared"]),  # `shapley` is known of training rollouts alone
        credits={name: fmean(values) for name, values in of_agent.items() if values},
        type=str(group.question.meta.get("type") or ""),
    )


def is_evaluated(config: RunConfig, step: int, *, last: bool) -> bool:
    """Whether the held-out sets are answered after an RL step, which may be the run's last."""
    return last or bool(config.eval.every and step % config.eval.every == 0)


async def evaluate(
    plan: Plan,
    held_out: Mapping[str, tuple[Sequence[Question], Roster]],
    folder: Path,
    step: int,
    *,
    suffix: str = "",
    progress: Progress = quiet,
) -> list[Metrics]:
    """Greedy answers to every held-out question: the predictions are written, the scores with intervals returned."""
    rows: list[Metrics] = []
    for name, (questions, roster) in held_out.items():
        times, label = Times(), name + suffix
        with times("eval"):
            predictions = await predict(plan, roster, questions, progress=progress, label=f"evaluating {label}")
        runs.write_predictions(folder, step, label, predictions)
        row = eval_row(step, label, predictions, plan.config.eval.bootstrap, plan.config.loop.seed)
        rows.append({**row, **times.metrics()})
    return rows


class Times:
    """Seconds spent by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time inside the `with` towards a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """The seconds by metric name."""
        return {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
