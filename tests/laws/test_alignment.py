"""Alignment in expectation: `duplicate` agrees with `weight` in all that is linear in the counts, and varies."""

import itertools
import math
import random
from functools import cache
from statistics import fmean, pvariance, variance

import pytest

from cotrain import align
from cotrain.advantages import group_relative
from support_mgrpo import Helper, Rollout, group_of

SEEDS = range(3000)
SHAPES = [(1, 3), (2, 5), (1, 2, 4), (3, 3), (0, 1, 6), (5, 2, 0, 1)]
SIZES = [1, 2, 3, 4, 7]


def scouts(shape, credit=lambda k, i: 0.0):
    """Rollouts that delegated d_0, d_1, ... times, the credit of each trajectory, and the ids by rollout."""
    group = group_of([Rollout(helpers=(Helper(),) * d) for d in shape])
    ids = [[f"q/{k}/{i}" for i in range(d)] for k, d in enumerate(shape) if d]
    credits = {id: credit(int(id.split("/")[1]), int(id.split("/")[2])) for row in ids for id in row}
    return group, credits, ids


@cache
def draws(shape, size):
    """The counts of `duplicate` under each seed."""
    group, credits, _ = scouts(shape)
    return [align.duplicate(size, seed)(group, credits) for seed in SEEDS]


def variance_of_count(d_k, size):
    """Of a binomial count of size - d_k draws at 1 / d_k, or of being among size of d_k."""
    p = size / d_k
    return p * (1 - p) if d_k > size else (size - d_k) * (1 / d_k) * (1 - 1 / d_k)


def variance_of_sum(values, size):
    """Of the sum over one rollout's drawn trajectories: with replacement, or without it."""
    if len(values) <= size:
        return (size - len(values)) * pvariance(values)
    return size * (1 - size / len(values)) * variance(values)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_duplicates_counts_are_d_times_weight_in_expectation_and_weight_never_varies(shape, size):
    group, credits, ids = scouts(shape)
    weights = align.weight(group, credits)
    for row in ids:
        spread = variance_of_count(len(row), size)
        for id in row:
            counts = [counts[id] for counts in draws(shape, size)]
            assert weights[id] == 1 / len(row)
            error = math.sqrt(spread / len(SEEDS))
            assert fmean(counts) == pytest.approx(size * weights[id], abs=5 * error + 1e-12)
            assert pvariance(counts) == pytest.approx(spread, rel=0.25, abs=1e-12)
            assert (spread > 0) == (len(row) not in (1, size))
        assert all(sum(counts[id] for id in row) == size for counts in draws(shape, size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_moments_of_credits_and_the_gradient_at_fixed_advantages_agree_in_expectation(shape, size):
    """Ratios sum w x / sum w. Under both, sum w is no random number: K, or d K, of the rollouts that delegated."""
    noise = random.Random(repr((shape, size)))
    group, credits, ids = scouts(shape, lambda k, i: noise.random())
    weights = align.weight(group, credits)
    gradients = {id: [noise.gauss(0, 1) for _ in range(3)] for id in credits}
    advantages = {id: noise.gauss(0, 1) for id in credits}
    quantities = [credits, {id: r * r for id, r in credits.items()}]
    quantities += [{id: advantages[id] * gradients[id][j] for id in credits} for j in range(3)]
    assert math.fsum(weights[id] for id in credits) == pytest.approx(len(ids))
    for x in quantities:
        exact = math.fsum(weights[id] * x[id] for id in credits) / len(ids)
        drawn = [math.fsum(c[id] * x[id] for id in credits) / (size * len(ids)) for c in draws(shape, size)]
        spread = sum(variance_of_sum([x[id] for id in row], size) for row in ids) / (size * len(ids)) ** 2
        assert fmean(drawn) == pytest.approx(exact, abs=5 * math.sqrt(spread / len(SEEDS)) + 1e-12)
        assert pvariance(drawn) == pytest.approx(spread, rel=0.25, abs=1e-12)
        if any(len(row) not in (1, size) for row in ids):
            assert pvariance(drawn) > 0
        assert {math.fsum(align.weight(group, credits)[id] * x[id] for id in credits) / len(ids)} == {exact}


def test_draws_of_different_rollouts_are_independent():
    """Over the rollouts of one group and seed the mean has the error of independent draws."""
    shape = (3,) * 2000
    group, credits, ids = scouts(shape)
    counts = align.duplicate(4, 0)(group, credits)  # one copy among three
    firsts = [counts[row[0]] for row in ids]
    assert fmean(firsts) == pytest.approx(4 / 3, abs=5 * math.sqrt(2 / 9 / len(shape)))
    both = fmean(a == b == 2.0 for a, b in itertools.pairwise(firsts))
    assert both == pytest.approx(1 / 9, abs=5 * math.sqrt(1 / 9 / len(shape)))


def winners_coefficient(group, credits, weights):
    """sum over the trajectories with credit 1 of w_i A_i / sum_j w_j: their pull on the update."""
    result = group_relative(group.trajectories, credits, weights=weights, eps=0.0)
    total = math.fsum(weights[id] for id in credits)
    return math.fsum(weights[id] * result.values.get(id, 0.0) * credits[id] for id in credits) / total


def test_normalised_advantages_do_not_agree_in_expectation():
    """Credits {0}, {0, 1} and d = 1: sqrt(3)/4 = 0.43 under weight, 0.25 under duplicate.

    weight: w = 1, 1/2, 1/2; mean 1/4, std sqrt(3)/4, A of the winner sqrt(3); (1/2) sqrt(3) / 2.
    duplicate: with 1/2 the winner is drawn, credits {0, 1}, A = 1: 1/2; else {0, 0}, no sample: 0. In the mean 1/4.
    """
    group, credits, _ = scouts((1, 2), lambda k, i: float((k, i) == (1, 1)))
    assert winners_coefficient(group, credits, align.weight(group, credits)) == pytest.approx(math.sqrt(3) / 4)
    drawn = [winners_coefficient(group, credits, align.duplicate(1, seed)(group, credits)) for seed in SEEDS]
    assert set(drawn) == {0.0, 0.5}
    assert fmean(drawn) == pytest.approx(0.25, abs=5 * 0.25 / math.sqrt(len(SEEDS)))


def test_normalised_advantages_agree_as_the_number_of_rollouts_grows():
    """The same two rollouts, m times: p of 2m draws win, A = (1 - p) / sqrt(p (1 - p)), p A = sqrt(p (1 - p))."""
    gaps = []
    for m in (1, 4, 16, 64):
        group, credits, ids = scouts((1, 2) * m, lambda k, i: float(k % 2 == 1 and i == 1))
        exact = winners_coefficient(group, credits, align.weight(group, credits))
        assert exact == pytest.approx(math.sqrt(3) / 4)
        expected = 0.0
        for wins in range(m + 1):  # by exact enumeration: which m draws win does not matter, only how many
            counts = {row[0]: 1.0 for row in ids if len(row) == 1}
            for j, (lost, won) in enumerate(row for row in ids if len(row) == 2):
                counts |= {lost: float(j >= wins), won: float(j < wins)}
            expected += math.comb(m, wins) / 2**m * winners_coefficient(group, credits, counts)
        gaps.append(exact - expected)
    assert gaps[0] == pytest.approx(math.sqrt(3) / 4 - 0.25)
    assert all(after < before / 3 for before, after in itertools.pairwise(gaps))  # it falls like 1 / K
    assert 0 < gaps[-1] < 0.005
