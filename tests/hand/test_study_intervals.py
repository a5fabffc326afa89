"""Intervals over questions, and over seeds and questions, worked out by hand."""

import numpy as np
import pytest

from cotrain.errors import DataError
from cotrain.evaluate import bootstrap
from cotrain.study.intervals import estimate, over_questions, over_seeds
from cotrain.study.results import differences, matrix


def test_with_one_seed_it_is_the_interval_of_one_evaluation():
    values = np.random.default_rng(3).random(40)
    assert over_questions(values[None]) == bootstrap(values.tolist())


def test_questions_are_drawn_for_each_seed_apart():
    values_SN = np.array([[0.0, 1.0, 5.0], [2.0, 2.0, 8.0]])
    draw = np.random.default_rng(7)
    drawn = [draw.integers(3, size=(50, 3), dtype=np.int32) for _ in values_SN]
    means = [
        sum(sum(values_SN[s][n] for n in drawn[s][r]) / 3 for s in range(2)) / 2  # mean of the seeds' means
        for r in range(50)
    ]
    found = over_questions(values_SN, resamples=50, seed=7)
    assert found.mean == pytest.approx(3.0)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(means, (0.025, 0.975))))


def test_seeds_are_drawn_too_and_one_sample_of_questions_for_all_of_them():
    values_SN = np.array([[0.0, 1.0], [4.0, 6.0], [9.0, 9.0]])
    draw = np.random.default_rng(5)
    seeds, questions = draw.integers(3, size=(60, 3)), draw.integers(2, size=(60, 2))
    means = [sum(values_SN[s][n] for s in seeds[r] for n in questions[r]) / 6 for r in range(60)]
    found = over_seeds(values_SN, resamples=60, seed=5)
    assert found.mean == pytest.approx(29 / 6)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(means, (0.025, 0.975))))


def test_seeds_that_differ_as_a_whole_are_certain_to_the_first_and_uncertain_to_the_second():
    values_SN = np.array([[0.0] * 4, [1.0] * 4])
    found = over_questions(values_SN)
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)
    found = over_seeds(values_SN)  # both seeds the same with probability 1/4 each
    assert (found.low, found.high) == (0.0, 1.0)


def test_questions_that_are_hard_for_all_seeds_stay_together_in_the_second():
    values_SN = np.tile([0.0, 1.0], (4, 1))
    within = over_questions(values_SN)  # the mean of 4 means of 2: 0 and 1 have probability 1/256 each
    assert (within.low, within.high) == (0.125, 0.875)
    beyond = over_seeds(values_SN)  # one mean of 2 for all: 0 and 1 have probability 1/4 each
    assert (beyond.low, beyond.high) == (0.0, 1.0)


def test_the_interval_with_seeds_is_wider_on_average_and_holds_the_truth_more_often():
    draw = np.random.default_rng(0)
    widths, hits = [], []
    for _ in range(60):
        hard, better = draw.normal(scale=0.3, size=40), draw.normal(scale=0.03, size=(4, 1))
        found = estimate(draw.normal(scale=0.3, size=(4, 40)) + hard + better, resamples=200)
        both = (found.questions, found.seeds)
        widths.append([interval.high - interval.low for interval in both])
        hits.append([interval.low <= 0.0 <= interval.high for interval in both])
    within, beyond = np.mean(widths, axis=0)
    assert within < beyond
    within, beyond = np.mean(hits, axis=0)
    assert within < 0.9 < beyond


@pytest.mark.parametrize(("num_seeds", "has_seeds"), [(1, False), (2, False), (3, True)])
def test_seeds_are_drawn_from_three_on(num_seeds, has_seeds):
    found = estimate(np.tile([0.0, 1.0], (num_seeds, 1)))
    assert (found.seeds is not None) == has_seeds
    assert found.num_seeds == num_seeds


def test_many_questions_are_drawn_in_parts(monkeypatch):
    monkeypatch.setattr("cotrain.study.intervals._VALUES_AT_ONCE", 25)
    found = over_seeds(np.tile(np.arange(10.0), (3, 1)), resamples=200)
    assert 2.0 < found.low < 4.5 < found.high < 7.0


@pytest.mark.parametrize("values", [np.empty((0, 0)), np.array([[1.0, np.nan]])])
@pytest.mark.parametrize("interval", [over_questions, over_seeds])
def test_no_values_and_no_numbers_are_refused(values, interval):
    with pytest.raises(DataError, match="bootstrap"):
        interval(values)


def test_differences_are_paired_by_seed_and_question_whatever_the_order():
    of = {0: {"a": 1.0, "b": 0.5}, 1: {"b": 1.0, "a": 1.0}, 2: {"a": 9.0, "b": 9.0}}
    against = {1: {"a": 0.25, "b": 0.0}, 0: {"b": 0.5, "a": 0.0}}
    assert differences(of, against).tolist() == [[1.0, 0.0], [0.75, 1.0]]


def test_a_side_without_a_seed_stands_for_every_seed_of_the_other():
    trained, still = {3: {"a": 1.0}, 4: {"a": 0.5}}, {None: {"a": 0.25}}
    assert differences(trained, still).tolist() == [[0.75], [0.25]]
    assert differences(still, trained).tolist() == [[-0.75], [-0.25]]
    assert differences(still, still).tolist() == [[0.0]]
    assert differences({7: {"a": 1.0}}, trained).size == 0


def test_sides_with_other_questions_are_refused():
    with pytest.raises(DataError, match="1 questions are not in all runs that are compared, such as b"):
        differences({0: {"a": 1.0}}, {0: {"a": 1.0, "b": 1.0}})
    with pytest.raises(DataError, match="such as c"):
        matrix({0: {"a": 1.0}, 1: {"a": 1.0, "c": 0.0}})
