"""How well a team does on its training questions before it is trained on them: success rates, delegations, tokens.

A probe samples whole rollouts as training would, judges them, and says of each question how often it is answered.
Questions within a band of success rates make a training set for a later stage; the distribution of delegations gives
M-GRPO's number of sub samples d (arXiv 2511.13288). Nothing is trained, and no weights are written.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rich.table import Table

from cotrain.align import percentile_99
from cotrain.assemble import Plan, load_cast, make_plan
from cotrain.config import RunConfig
from cotrain.data.questions import load_questions, load_set, write_questions
from cotrain.errors import ConfigError, DataError, InfrastructureError
from cotrain.evaluate import plain_table
from cotrain.loops import Progress, judge, quiet, rollouts
from cotrain.roster import Roster
from cotrain.runs import GroupRecord
from cotrain.sampling import fork_on_first
from cotrain.trained import use_checkpoint
from cotrain.types import Group, Question

RATE = "success_rate"
"""The field of `Question.meta` that holds a probed question's success rate, or None where it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a probe found: the groups, what was dropped by reason, and the names of the sub-agents."""

    records: Sequence[GroupRecord]
    dropped: Mapping[str, int]
    delegates: Sequence[str]


def probe(
    config: RunConfig,
    folder: Path | None = None,
    *,
    count: int = 64,
    checkpoint: str = "latest",
    keep: Path | None = None,
    progress: Progress = quiet,
) -> Probe:
    """Probe the models as configured, or a run's checkpoint, on `count` questions of the training set.

    Args:
        config: of the run; `sampling.group_size` rollouts a question, all of them from the start on, whatever
            `sampling.strategy` says.
        folder: the run whose weights to take, or None for the models as configured.
        count: how many questions are drawn (all, if there are no more); a larger number draws the same ones first.
        checkpoint: `latest`, `best`, `untrained` or a step.
        keep: a JSONL file that holds the rated questions; written after every batch, so that what is sampled is kept.
        progress: is told of every batch.

    Raises:
        InfrastructureError: no answer to any of the questions could be judged.
    """
    plan = make_plan(config)
    progress("loading questions", 0, 1)
    questions, corpus = load_set(config.data.train, config.corpus)
    progress("loading models", 0, 1)
    cast = load_cast(plan)
    if folder is not None:
        use_checkpoint(cast, folder, checkpoint)

    def kept(records: Sequence[GroupRecord]) -> None:
        if keep is not None:
            write_questions(keep, rated(records))

    chosen = draw(questions, count, config.loop.seed)
    return asyncio.run(sample(plan, cast.roster(corpus), chosen, on_batch=kept, progress=progress))


async def sample(
    plan: Plan,
    roster: Roster,
    questions: Sequence[Question],
    *,
    on_batch: Callable[[Sequence[GroupRecord]], None] = lambda records: None,
    progress: Progress = quiet,
) -> Probe:
    """Whole rollouts of each question, judged; `on_batch` gets all records so far as soon as one of them has a rate.

    Raises:
        InfrastructureError: no answer to any of the questions could be judged.
    """
    plan = replace(plan, strategy=fork_on_first)
    at_once = max(1, plan.config.engine.max_batch // plan.config.sampling.group_size)
    records: list[GroupRecord] = []
    dropped = Counter[str]()
    for start in range(0, len(questions), at_once):
        progress("probing", start, len(questions))
        groups = await rollouts(plan, roster, questions[start : start + at_once], 0)
        judged, lost = await judge(plan, groups)
        records += judged
        dropped.update(lost)
        if any(success_rate(record.group) is not None for record in records):
            on_batch(records)
    progress("probing", len(questions), len(questions))
    if all(success_rate(record.group) is None for record in records):
        found = f"not one of {len(records)} questions has an answer that could be judged (dropped: {_counts(dropped)})"
        raise InfrastructureError("probe", found, "Mend what failed, and probe again")
    delegates = dict.fromkeys(name for agent in plan.agents.values() for name in agent.delegates)
    return Probe(records=records, dropped=dropped, delegates=tuple(delegates))


def draw(questions: Sequence[Question], count: int, seed: int) -> list[Question]:
    """`count` questions in a seeded order, or all of them if there are no more."""
    order = list(questions)
    random.Random(f"{seed}:probe").shuffle(order)
    return order[:count]


def success_rate(group: Group) -> float | None:
    """The mean of `shared` over the answers of a judged group that have it; None where no answer does."""
    known = [t.rewards["shared"] for t in group.sinks() if "shared" in t.rewards]
    return fmean(known) if known else None


def rated(records: Sequence[GroupRecord]) -> list[Question]:
    """The questions of judged groups, each with its success rate in `meta`."""
    return [replace(r.group.question, meta={**r.group.question.meta, RATE: success_rate(r.group)}) for r in records]


def load_rated(path: Path) -> list[Question]:
    """The questions that an earlier probe wrote down.

    Raises:
        DataError: the file cannot be read, or one of its questions was not probed.
    """
    questions = load_questions(path)
    for question in questions:
        value = question.meta.get(RATE, "absent")
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            found = f"its {RATE} is {value}" if value != "absent" else f"it has no {RATE}"
            raise DataError(f"{path}, question {question.id}", found, "Give the file that a probe wrote with --out")
    return questions


def in_band(questions: Sequence[Question], low: float, high: float) -> list[Question]:
    """The rated questions with low < success rate < high, both bounds excluded; an unknown rate is in no band."""
    return [q for q in questions if (rate := _rate(q)) is not None and low < rate < high]


def write_band(path: Path, questions: Sequence[Question], low: float, high: float) -> int:
    """Write the rated questions within the band, and return their number.

    Raises:
        DataError: there is none, with the distribution of the rates; or the file cannot be written.
    """
    kept = in_band(questions, low, high)
    if not kept:
        spread = ", ".join(f"{name}: {number}" for name, number in distribution(questions).items() if number)
        found = f"none of {len(questions)} success rates lies strictly between {low:g} and {high:g} ({spread})"
        fix = "Choose another band (of the kept FILE.all.jsonl, nothing is sampled), or probe more or other questions"
        raise DataError(f"band of {path}", found, fix)
    write_questions(path, kept)
    return len(kept)


def distribution(questions: Sequence[Question]) -> dict[str, int]:
    """How many success rates are exactly 0 or 1, in each quarter between (its lower end included), elsewhere, unknown.

    The last two are there only if they are not 0.
    """
    quarters = (("0 to 0.25", 0.25), ("0.25 to 0.5", 0.5), ("0.5 to 0.75", 0.75), ("0.75 to 1", 1.0))

    def place(rate: float | None) -> str:
        if rate is None:
            return "unknown"
        if rate in (0, 1):
            return f"{rate:g}"
        return next((name for name, end in quarters if 0 < rate < end), "below 0 or above 1")

    counts = Counter(place(_rate(q)) for q in questions)
    names = ["0", *(name for name, _ in quarters), "1"]
    return {name: counts[name] for name in names} | {n: c for n, c in counts.items() if n not in names}


def delegations(records: Sequence[GroupRecord], agent: str) -> list[int]:
    """d_k of each rollout with a judged answer: how many of the agent's findings had a part in that answer.

    These are what `align` counts when no other judge fails: an unread finding or an empty episode gives no sample. A
    rollout whose answer has no `shared` is left out, since nothing of it would be trained on.
    """
    counts = []
    for record in records:
        answers = {t.rollout_id for t in record.group.sinks() if "shared" in t.rewards}
        for id, trajectories in record.group.by_rollout().items():
            if id in answers:
                of_agent = [t for t in trajectories if t.agent == agent and t.caller is not None]
                counts.append(sum(bool(t.turns) and "shared" in t.rewards for t in of_agent))
    return counts


def rate_table(questions: Sequence[Question], low: float, high: float) -> Table:
    """The success rates of rated questions: their mean, their distribution, and how many lie within the band."""
    known = [rate for q in questions if (rate := _rate(q)) is not None]
    table = plain_table("success rates", "success rate", "questions", "share")
    for name, number in distribution(questions).items():
        table.add_row(name, str(number), _share(number, len(questions)))
    table.add_section()
    kept = len(in_band(questions, low, high))
    table.add_row(f"in band, {low:g} < rate < {high:g}", str(kept), _share(kept, len(questions)))
    table.add_row("mean", f"{fmean(known):.3f}" if known else "unknown", "")
    return table


def work_tables(found: Probe) -> list[Table]:
    """Sampled tokens per agent; and, where there are sub-agents, the distribution of their d_k.

    The 99th percentile of d_k is M-GRPO's choice of d, `align.size`.
    """
    tokens = plain_table("sampled tokens", "agent", "trajectories", "tokens", "mean", "longest")
    lengths: dict[str, list[int]] = {}
    for t in (t for record in found.records for t in record.group.trajectories):
        lengths.setdefault(t.agent, []).append(t.num_sampled)
    for agent, sampled in lengths.items():
        tokens.add_row(agent, str(len(sampled)), str(sum(sampled)), f"{fmean(sampled):.1f}", str(max(sampled)))
    kinds = plain_table(
        "delegations per rollout", "sub-agent", "rollouts", "mean", "d_k: rollouts", "suggested align.size"
    )
    for agent in found.delegates:
        counts = delegations(found.records, agent)
        spread = ", ".join(f"{d}: {number}" for d, number in sorted(Counter(counts).items()))
        kinds.add_row(agent, str(len(counts)), f"{fmean(counts):.2f}", spread, str(percentile_99(counts)))
    return [tokens, kinds] if found.delegates else [tokens]


def dropped_line(found: Probe) -> str:
    """What a training step on these groups would have left out, by reason (docs/methods.md)."""
    return f"dropped: {_counts(found.dropped)}"


def check_wish(low: float, high: float, outs: Sequence[Path]) -> None:
    """Refuse, before anything is sampled, a band that can hold nothing, and files that cannot be written or are there.

    Raises:
        ConfigError: not low < high.
        DataError: a file of `outs` exists already, or its folder cannot be written.
    """
    if not low < high:
        raise ConfigError(f"--band {low:g} {high:g}", "no number lies between these", "Give the lower bound first")
    for out in outs:
        if out.exists():
            fix = "Choose another --out, or remove it (a kept FILE.all.jsonl can be probed again without sampling)"
            raise DataError(str(out), "it exists already, and is not written over", fix)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=out.parent).close()
        except OSError as error:
            found = f"cannot be written: {error.strerror or error}"
            raise DataError(str(out), found, "Choose another --out") from None


def sidecar(out: Path) -> Path:
    """Where a probe that writes `out` keeps the rates of all questions: hard.jsonl has hard.all.jsonl."""
    return out.with_name(f"{out.stem}.all.jsonl")


def _rate(question: Question) -> float | None:
    value = question.meta[RATE]
    return float(value) if isinstance(value, (int, float)) else None


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {number}" for name, number in sorted(counts.items())) or "nothing"


def _share(number: int, total: int) -> str:
    return f"{100 * number / total:.1f} %"
