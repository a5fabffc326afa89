"""How sure a mean over seeds and questions is: two 95 % percentile bootstraps, which answer two questions.

`over_questions`: would these very runs come out alike on other questions? Questions are drawn within each seed.
`over_seeds`: would other runs, on other questions? Seeds are drawn too, and one sample of questions for all of them
(the pigeonhole bootstrap of Owen 2007): the runs answer the same questions, so a hard one is hard for all of them, and
drawing apart for each seed would hide that. Both are seeded: equal values give equal intervals.

Shapes: S seeds, N questions, R resamples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cotrain.errors import DataError
from cotrain.evaluate import Interval, percentiles, resampled_means

Matrix = NDArray[np.float64]
"""One value per seed and question."""

FEWEST_SEEDS = 3
"""From how many seeds on they are drawn; fewer say nothing about others."""

_VALUES_AT_ONCE = 2_000_000  # bounds the memory of a bootstrap


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The mean of the seeds' means; its interval over questions, and over seeds and questions from 3 seeds on."""

    mean: float
    questions: Interval
    seeds: Interval | None
    num_seeds: int


def estimate(values_SN: Matrix, *, resamples: int = 2000) -> Estimate:
    """The mean and what is known of its intervals.

    Raises:
        DataError: no values, or one that is not finite.
    """
    within = over_questions(values_SN, resamples=resamples)
    beyond = over_seeds(values_SN, resamples=resamples) if len(values_SN) >= FEWEST_SEEDS else None
    return Estimate(mean=within.mean, questions=within, seeds=beyond, num_seeds=len(values_SN))


def over_questions(values_SN: Matrix, *, resamples: int = 2000, seed: int = 0) -> Interval:
    """mean = mean_s mean_n v[s, n]; a resample draws N questions with replacement, for each seed apart.

    With one seed this is `evaluate.bootstrap`.

    Raises:
        DataError: no values, or one that is not finite.
    """
    _check(values_SN)
    rng = np.random.default_rng(seed)
    means_R = np.mean([resampled_means(values_N, resamples, rng) for values_N in values_SN], axis=0)
    least, most = values_SN.min(axis=1).mean(), values_SN.max(axis=1).mean()
    return percentiles(float(values_SN.mean()), means_R, least=least, most=most)


def over_seeds(values_SN: Matrix, *, resamples: int = 2000, seed: int = 0) -> Interval:
    """mean = mean_s mean_n v[s, n]; a resample draws S seeds and N questions with replacement, these for all seeds.

    With few seeds it is too narrow: a bootstrap's variance between S seeds is (S - 1) / S of what it should be.

    Raises:
        DataError: no values, or one that is not finite.
    """
    _check(values_SN)
    rng, parts = np.random.default_rng(seed), []
    num_seeds, num_questions = values_SN.shape
    rows = max(1, _VALUES_AT_ONCE // num_questions)
    for start in range(0, resamples, rows):
        count = min(rows, resamples - start)
        seeds_RS = rng.integers(num_seeds, size=(count, num_seeds))
        shares_RS = np.stack([np.bincount(drawn, minlength=num_seeds) for drawn in seeds_RS]) / num_seeds
        questions_RN = rng.integers(num_questions, size=(count, num_questions))
        parts.append(np.take_along_axis(shares_RS @ values_SN, questions_RN, axis=1).mean(axis=1))
    return percentiles(float(values_SN.mean()), np.concatenate(parts), least=values_SN.min(), most=values_SN.max())


def _check(values_SN: Matrix) -> None:
    if values_SN.size == 0:
        raise DataError("bootstrap", "no values", "Evaluate at least one question with one seed")
    if not np.isfinite(values_SN).all():
        s, n = np.argwhere(~np.isfinite(values_SN))[0]
        found = f"value {n} of seed number {s} is {values_SN[s, n]}"
        raise DataError("bootstrap", found, "Leave out what has no score, or score it")
