"""Intervals and comparisons against values worked out by hand, and the coverage that an interval promises."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cotrain.errors import DataError
from cotrain.evaluate import (
    Prediction,
    bootstrap,
    by_type,
    compare,
    compare_types,
    comparison_table,
    eval_row,
    paired,
    percentiles,
    summarise,
    summary_table,
)


def prediction(id, f1=0.0, *, em=0.0, accuracy=0.0, reward=None, type=""):
    return Prediction(
        question_id=id,
        answer="a",
        golds=("g",),
        em=em,
        f1=f1,
        accuracy=accuracy,
        reward=f1 if reward is None else reward,
        type=type,
    )


def text_of(renderable):
    console = Console(width=140, no_color=True)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_bootstrap_of_a_coin():
    # Resampled means of {0, 1} are 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4: both tails hold more than 2.5 %.
    interval = bootstrap([0.0, 1.0], resamples=2000, seed=1)
    assert (interval.mean, interval.low, interval.high) == (0.5, 0.0, 1.0)


def test_bootstrap_quantiles_of_a_binomial():
    # Means of {0, 0, 0, 4} are Binomial(4, 1/4): P(4) = 0.0039 and P(>= 3) = 0.0508, so the 97.5 % quantile is 3;
    # P(0) = 0.316, so the 2.5 % quantile is 0.
    interval = bootstrap([0.0, 0.0, 0.0, 4.0], resamples=20_000, seed=0)
    assert (interval.mean, interval.low, interval.high) == (1.0, 0.0, 3.0)


def test_bootstrap_width_is_that_of_the_normal_limit():
    # 200 zeros and 200 ones: standard error 0.5 / sqrt(400) = 0.025, so the interval is 0.5 -+ 1.96 * 0.025.
    interval = bootstrap([0.0, 1.0] * 200, resamples=20_000, seed=0)
    assert interval.low == pytest.approx(0.451, abs=0.003)
    assert interval.high == pytest.approx(0.549, abs=0.003)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_equal_values_have_an_interval_of_width_0(count):
    interval = bootstrap([0.1] * count, resamples=100, seed=0)
    assert interval.low == interval.mean == interval.high == 0.1


def test_equal_seeds_give_equal_intervals_and_others_do_not():
    values = list(np.random.default_rng(0).normal(size=31))
    assert bootstrap(values, seed=5) == bootstrap(values, seed=5)
    assert bootstrap(values, seed=5) != bootstrap(values, seed=6)


def test_chunks_of_resamples_lose_nothing(monkeypatch):
    values = [0.0, 0.0, 0.0, 4.0]
    monkeypatch.setattr("cotrain.evaluate._DRAWS_AT_ONCE", 4 * 7)  # 7 resamples at a time; 20,000 is no multiple
    interval = bootstrap(values, resamples=20_000, seed=0)
    assert (interval.low, interval.high) == (0.0, 3.0)


@pytest.mark.parametrize("shape", ["normal", "binary"])
def test_intervals_cover_the_true_mean_95_percent_of_the_time(shape):
    rng = np.random.default_rng(7)
    trials, n, covered = 500, 60, 0
    for trial in range(trials):
        values = rng.normal(0.3, 2.0, n) if shape == "normal" else (rng.random(n) < 0.3).astype(float)
        interval = bootstrap(list(values), resamples=400, seed=trial)
        covered += interval.low <= 0.3 <= interval.high
    # Binomial(500, 0.95) has a standard deviation of 1 %; percentile intervals of 60 values run 1-2 % short.
    assert 0.91 <= covered / trials <= 0.98


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.integers(0, 1000))
@settings(max_examples=50)
def test_the_interval_lies_inside_the_values_and_around_the_mean(values, seed):
    interval = bootstrap(values, resamples=50, seed=seed)
    tolerance = 1e-9 * max(map(abs, values))  # a mean of equal floats may round
    assert min(values) - tolerance <= interval.low <= interval.mean <= interval.high <= max(values) + tolerance


@pytest.mark.parametrize(
    ("values", "found"),
    [([], "no values"), ([0.0, float("nan")], "value 1 is nan"), ([float("inf")], "value 0 is inf")],
)
def test_bootstrap_refuses_what_has_no_mean(values, found):
    with pytest.raises(DataError) as error:
        bootstrap(values)
    assert error.value.found == found


def test_what_is_0_but_for_rounded_sums_is_0_and_not_excluded():
    assert np.mean([0.1, 0.2, -0.3]) != 0.0
    thrice = bootstrap([0.1, 0.2, -0.3])
    assert thrice.mean == 0.0
    upper = percentiles(-0.5, np.array([-1.0] * 50 + [-6.6e-18] * 50), least=-1.0, most=0.5)
    assert (upper.low, upper.high, upper.excludes_zero) == (-1.0, 0.0, False)
    small = percentiles(-2e-9, np.array([-3e-9, -1e-9]), least=-4e-9, most=0.0)
    assert small.high < 0.0
    assert small.excludes_zero


def test_bootstrap_refuses_0_resamples():
    with pytest.raises(DataError, match="0 resamples"):
        bootstrap([1.0], resamples=0)


def test_paired_matches_by_id_not_by_position():
    before = [prediction("a", 0.0), prediction("b", 0.5), prediction("c", 1.0)]
    after = [prediction("c", 1.25), prediction("a", 0.25), prediction("b", 0.75)]
    # Every question gained exactly 0.25: no spread is left, although the questions differ widely.
    difference = paired(before, after, "f1")
    assert (difference.mean, difference.low, difference.high) == (0.25, 0.25, 0.25)
    assert difference.excludes_zero


def test_paired_is_after_minus_before_of_the_named_field():
    before, after = [prediction("a", 1.0, em=1.0)], [prediction("a", 0.25, em=1.0)]
    assert paired(before, after, "f1").mean == -0.75
    assert paired(before, after, "em").mean == 0.0
    assert not paired(before, after, "em").excludes_zero


@pytest.mark.parametrize(
    ("before", "after", "where", "side"), [("ab", "abc", "c", "after"), ("abc", "bc", "a", "before")]
)
def test_paired_refuses_other_questions(before, after, where, side):
    with pytest.raises(DataError) as error:
        paired([prediction(i) for i in before], [prediction(i) for i in after], "f1")
    assert error.value.where == f"question {where}"
    assert f"only in the predictions {side}; 1 ids" in error.value.found
    assert error.value.fix


def test_paired_refuses_a_question_that_occurs_twice():
    with pytest.raises(DataError, match="question a: twice in the predictions after"):
        paired([prediction("a")], [prediction("a"), prediction("a")], "f1")


def test_summarise_has_every_score():
    predictions = [
        prediction("a", 0.5, em=0.0, accuracy=1.0, reward=-0.5),
        prediction("b", 1.0, em=1.0, accuracy=1.0, reward=1.0),
    ]
    summary = summarise(predictions, resamples=1000)
    assert list(summary) == ["em", "f1", "accuracy", "reward"]
    assert {field: interval.mean for field, interval in summary.items()} == {
        "em": 0.5,
        "f1": 0.75,
        "accuracy": 1.0,
        "reward": 0.25,
    }
    assert (summary["reward"].low, summary["reward"].high) == (-0.5, 1.0)


def test_eval_row_is_flat_and_names_its_set():
    row = eval_row(5, "dev", [prediction("a", 0.25, em=0.0, accuracy=1.0, reward=-0.75)], resamples=100)
    assert row == {
        "kind": "eval",
        "step": 5,
        "set": "dev",
        "num_questions": 1,
        "em": 0.0,
        "em_low": 0.0,
        "em_high": 0.0,
        "f1": 0.25,
        "f1_low": 0.25,
        "f1_high": 0.25,
        "accuracy": 1.0,
        "accuracy_low": 1.0,
        "accuracy_high": 1.0,
        "reward": -0.75,
        "reward_low": -0.75,
        "reward_high": -0.75,
    }


def test_types_are_compared_apart():
    before = [
        prediction("a", 0.0, type="bridge"),
        prediction("b", 1.0, type="yes/no"),
        prediction("c", 0.5, type="bridge"),
    ]
    after = [
        prediction("c", 1.0, type="bridge"),
        prediction("b", 0.5, type="yes/no"),
        prediction("a", 0.5, type="bridge"),
    ]
    assert {type: len(members) for type, members in by_type(before).items()} == {"bridge": 2, "yes/no": 1}
    types = compare_types(before, after)
    count, bridge = types["bridge"]
    assert (count, bridge.before.mean, bridge.after.mean, bridge.difference.mean) == (2, 0.25, 0.75, 0.5)
    assert types["yes/no"][1].difference.mean == -0.5


def test_comparison_table_shows_values_and_marks_what_excludes_0():
    before = [prediction(str(i), 0.25, em=float(i % 2), type="x") for i in range(8)]
    after = [prediction(str(i), 0.5, em=float((i + i // 4) % 2), type="y" if i else "x") for i in range(8)]
    lines = {
        line.split("│")[1].strip(): line
        for line in text_of(comparison_table(before, after)).splitlines()
        if "│" in line
    }
    assert [cell.strip() for cell in lines["F1"].split("│")[2:7]] == [
        "0.250",
        "0.500",
        "+0.250",
        "+0.250 … +0.250",
        "yes",
    ]
    assert [cell.strip() for cell in lines["Exact match"].split("│")[2:5]] == ["0.500", "0.500", "+0.000"]
    assert lines["Exact match"].split("│")[6].strip() == "no"
    assert compare(before, after)["em"].difference.low < 0 < compare(before, after)["em"].difference.high


def test_tables_show_types_as_plain_text():
    predictions = [prediction("a", 0.5, type="[red]x"), prediction("b", 1.0)]
    assert "F1, [red]x (1)" in text_of(summary_table(predictions, resamples=100))
    assert "F1, no type (1)" in text_of(comparison_table(predictions, predictions, resamples=100))
