"""Held-out scores: what a run's evaluations say, and how sure they are.

Pure functions over `Prediction`s, one per held-out question. Intervals are 95 % percentile bootstraps over
questions (Efron 1979), seeded, so equal predictions give equal intervals. Differences are paired: the same question
before and after, which removes the spread between easy and hard questions. An interval says how the mean would
move with other questions of the same kind; it knows nothing of other seeds of the training run.

Shapes: N questions, R resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as with_default
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from cotrain.errors import DataError

Score = Literal["em", "f1", "accuracy", "reward"]
"""A field of `Prediction` that can be averaged."""

SCORES: tuple[Score, ...] = get_args(Score)
"""All of them, in the order of every table."""

SCORE_NAMES: Mapping[Score, str] = {
    "em": "Exact match",
    "f1": "F1",
    "accuracy": "Accuracy",
    "reward": "Reward",
}
"""How tables and charts call them."""

UNTRAINED = "@untrained"
"""Suffix of a held-out set's name for its evaluation before a warm-up."""

_DRAWS_AT_ONCE = 2_000_000  # bounds the memory of a bootstrap (about 24 MB), whatever N and R


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the team answered to one held-out question, and its scores.

    `em`, `f1` and `accuracy` compare the answer with the golds; `reward` is the credit of the sink, its penalty
    included. `credits` is the mean credit of each agent, where it is known: an agent that was not asked has none.
    `type` is the question's `meta["type"]`, or "" where the data set names none.
    """

    question_id: str
    answer: str
    golds: tuple[str, ...]
    em: float
    f1: float
    accuracy: float
    reward: float
    credits: Mapping[str, float] = with_default(default_factory=dict)
    type: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """True when 0 lies outside the interval."""
        return self.low > 0.0 or self.high < 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One score of the same questions at two times; `difference` is after - before, paired by question."""

    before: Interval
    after: Interval
    difference: Interval


def bootstrap(values: Sequence[float], *, resamples: int = 2000, seed: int = 0) -> Interval:
    """Mean of N values and its 95 % percentile interval over R resamples drawn with replacement.

    low, high = the 2.5 % and 97.5 % quantiles of the R means. N equal values give an interval of width 0.

    Raises:
        DataError: no values, a value that is not finite, or fewer than one resample.
    """
    values_N = np.asarray(values, dtype=np.float64)
    if values_N.size == 0:
        raise DataError("bootstrap", "no values", "Evaluate at least one question")
    if not np.isfinite(values_N).all():
        position = int(np.flatnonzero(~np.isfinite(values_N))[0])
        raise DataError(
            "bootstrap",
            f"value {position} is {values_N[position]}",
            "Leave out what has no score, or score it",
        )
    if resamples < 1:
        raise DataError("bootstrap", f"{resamples} resamples", "Take at least 1; 2000 is usual")
    means_R = resampled_means(values_N, resamples, np.random.default_rng(seed))
    return percentiles(float(values_N.mean()), means_R, least=values_N.min(), most=values_N.max())


def percentiles(mean: float, means_R: NDArray[np.float64], *, least: float, most: float) -> Interval:
    """A mean with the 2.5 % and 97.5 % quantiles of its resamples; all of them lie within `least` and `most`."""
    low, high = np.quantile(means_R, (0.025, 0.975))
    # Rounded sums could put the mean of equal values outside them; a skewed sample's can lie beyond a quantile.
    mean, low, high = np.clip([mean, low, high], least, most).tolist()
    # What is 0 but for rounded sums is 0: a bound of -1e-17 does not exclude it.
    noise = 1e-12 * max(abs(least), abs(most))
    mean, low, high = (0.0 if abs(value) <= noise else value for value in (mean, low, high))
    return Interval(mean=mean, low=min(low, mean), high=max(high, mean))


def resampled_means(values_N: NDArray[np.float64], resamples: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """The means of R samples of N values drawn with replacement."""
    rows = max(1, _DRAWS_AT_ONCE // values_N.size)
    parts = []
    for start in range(0, resamples, rows):
        shape = (min(rows, resamples - start), values_N.size)
        parts.append(values_N[rng.integers(values_N.size, size=shape, dtype=np.int32)].mean(axis=1))
    return np.concatenate(parts)


def paired(
    before: Sequence[Prediction],
    after: Sequence[Prediction],
    field: Score,
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Interval of the mean of `after.field - before.field`, matched by question id, in any order.

    Raises:
        DataError: the two sides do not hold the same questions, each once, or hold none.
    """
    earlier, later = _by_id(before, "before"), _by_id(after, "after")
    odd = sorted(earlier.keys() ^ later.keys())
    if odd:
        side = "before" if odd[0] in earlier else "after"
        raise DataError(
            f"question {odd[0]}",
            f"only in the predictions {side}; {len(odd)} ids in all have no partner",
            "Compare two evaluations of the same set of questions",
        )
    differences_N = [_score(later[id], field) - _score(earlier[id], field) for id in earlier]
    return bootstrap(differences_N, resamples=resamples, seed=seed)


def _by_id(predictions: Sequence[Prediction], side: str) -> dict[str, Prediction]:
    by_id: dict[str, Prediction] = {}
    for prediction in predictions:
        if prediction.question_id in by_id:
            raise DataError(
                f"question {prediction.question_id}",
                f"twice in the predictions {side}",
                "Give each held-out question its own id",
            )
        by_id[prediction.question_id] = prediction
    return by_id


def _score(prediction: Prediction, field: Score) -> float:
    return float(getattr(prediction, field))


def summarise(predictions: Sequence[Prediction], resamples: int = 2000, seed: int = 0) -> dict[Score, Interval]:
    """Score -> its mean and interval.

    Raises:
        DataError: there are no predictions, or a score is not finite.
    """
    return {field: _interval(predictions, field, resamples, seed) for field in SCORES}


def eval_row(
    step: int, name: str, predictions: Sequence[Prediction], resamples: int = 2000, seed: int = 0
) -> dict[str, float | str | int]:
    """The line of `metrics.jsonl` for one evaluated set, as the report reads it.

    `kind` "eval", `step`, `set`, `num_questions`, and for each score `f1`, `f1_low`, `f1_high`.

    Raises:
        DataError: there are no predictions, or a score is not finite.
    """
    row: dict[str, float | str | int] = {
        "kind": "eval",
        "step": step,
        "set": name,
        "num_questions": len(predictions),
    }
    for field, interval in summarise(predictions, resamples, seed).items():
        row |= {field: interval.mean, f"{field}_low": interval.low, f"{field}_high": interval.high}
    for agent, known in credits_by_agent(predictions).items():
        row[f"agent/{agent}/credit"] = float(np.mean(list(known.values())))
    return row


def credits_by_agent(predictions: Sequence[Prediction]) -> dict[str, dict[str, float]]:
    """Agent -> question id -> its credit there, of the questions where it has one."""
    agents = dict.fromkeys(agent for prediction in predictions for agent in prediction.credits)
    return {a: {p.question_id: p.credits[a] for p in predictions if a in p.credits} for a in agents}


def compare_credits(
    before: Sequence[Prediction], after: Sequence[Prediction], resamples: int = 2000, seed: int = 0
) -> dict[str, tuple[int, Comparison]]:
    """Agent -> on how many questions it has a credit both times, and the comparison over these."""
    earlier, later = credits_by_agent(before), credits_by_agent(after)
    compared = {}
    for agent in earlier:
        ids = [id for id in earlier[agent] if id in later.get(agent, {})]
        if ids:
            sides = [[side[agent][id] for id in ids] for side in (earlier, later)]
            differences = [b - a for a, b in zip(*sides, strict=True)]
            intervals = [bootstrap(v, resamples=resamples, seed=seed) for v in (*sides, differences)]
            compared[agent] = len(ids), Comparison(before=intervals[0], after=intervals[1], difference=intervals[2])
    return compared


def compare(
    before: Sequence[Prediction], after: Sequence[Prediction], resamples: int = 2000, seed: int = 0
) -> dict[Score, Comparison]:
    """Score -> before, after and their paired difference.

    Raises:
        DataError: as `paired`.
    """
    return {field: _compare(before, after, field, resamples, seed) for field in SCORES}


def _compare(
    before: Sequence[Prediction], after: Sequence[Prediction], field: Score, resamples: int, seed: int
) -> Comparison:
    return Comparison(
        before=_interval(before, field, resamples, seed),
        after=_interval(after, field, resamples, seed),
        difference=paired(before, after, field, resamples=resamples, seed=seed),
    )


def _interval(predictions: Sequence[Prediction], field: Score, resamples: int, seed: int) -> Interval:
    return bootstrap([_score(p, field) for p in predictions], resamples=resamples, seed=seed)


def by_type(predictions: Sequence[Prediction]) -> dict[str, tuple[Prediction, ...]]:
    """Question type -> its predictions, types in alphabetical order; untyped questions are under ""."""
    types = sorted({prediction.type for prediction in predictions})
    return {type: tuple(p for p in predictions if p.type == type) for type in types}


def summary_table(predictions: Sequence[Prediction], *, title: str = "", resamples: int = 2000, seed: int = 0) -> Table:
    """One row per score, mean and interval; then, where questions have several types, F1 per type."""
    table = plain_table(title or f"{len(predictions)} questions", "score", "mean", "95 % interval")
    for field, interval in summarise(predictions, resamples, seed).items():
        table.add_row(SCORE_NAMES[field], f"{interval.mean:.3f}", _range(interval))
    types = by_type(predictions)
    if len(types) > 1:
        table.add_section()
        for type, members in types.items():
            interval = _interval(members, "f1", resamples, seed)
            table.add_row(_type_name(type, len(members)), f"{interval.mean:.3f}", _range(interval))
    return table


def comparison_table(
    before: Sequence[Prediction],
    after: Sequence[Prediction],
    *,
    title: str = "",
    resamples: int = 2000,
    seed: int = 0,
) -> Table:
    """One row per score: before, after, paired difference with its interval, and a mark when that excludes 0.

    Where questions have several types, F1 per type follows.

    Raises:
        DataError: as `paired`.
    """
    table = plain_table(
        title or f"{len(before)} questions",
        "score",
        "before",
        "after",
        "difference",
        "95 % interval",
        "excludes 0",
    )
    for field, result in compare(before, after, resamples, seed).items():
        table.add_row(Text(SCORE_NAMES[field]), *_comparison_cells(result))
    table.add_section()
    for agent, (count, result) in compare_credits(before, after, resamples, seed).items():
        table.add_row(Text(f"Credit of {agent} ({count})"), *_comparison_cells(result))
    types = compare_types(before, after, resamples, seed)
    if len(types) > 1:
        table.add_section()
        for type, (count, result) in types.items():
            table.add_row(_type_name(type, count), *_comparison_cells(result))
    return table


def compare_types(
    before: Sequence[Prediction], after: Sequence[Prediction], resamples: int = 2000, seed: int = 0
) -> dict[str, tuple[int, Comparison]]:
    """Question type -> its number of questions, and F1 before, after and in between.

    Raises:
        DataError: as `paired`.
    """
    partner = _by_id(after, "after")
    types = {}
    for type, earlier in by_type(before).items():
        later = [partner[p.question_id] for p in earlier if p.question_id in partner]
        types[type] = len(earlier), _compare(earlier, later, "f1", resamples, seed)
    return types


def _comparison_cells(result: Comparison) -> tuple[str, ...]:
    difference = result.difference
    return (
        f"{result.before.mean:.3f}",
        f"{result.after.mean:.3f}",
        f"{difference.mean:+.3f}",
        f"{difference.low:+.3f} … {difference.high:+.3f}",
        "yes" if difference.excludes_zero else "no",
    )


def _type_name(type: str, count: int) -> Text:
    return Text(f"F1, {type or 'no type'} ({count})")


def _range(interval: Interval) -> str:
    return f"{interval.low:.3f} … {interval.high:.3f}"


def plain_table(title: str, first: str, *others: str) -> Table:
    """An empty table whose first column is text and whose others are numbers."""
    table = Table(title=Text(title), title_justify="left")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
