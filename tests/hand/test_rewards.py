import math

import pytest

from cotrain.errors import RewardError, WorkflowError
from cotrain.rewards import accuracy, credits, exact_match, f1, normalize, overlong, penalty, propagate, score
from cotrain.types import CreditRule, Group, Overlong, Question, Trajectory


def trajectory(id, agent="x", reads=(), output="", faults=(), rewards=None, rollout="0.0"):
    return Trajectory(
        id=id, question_id="q", rollout_id=rollout, pass_id=0, call=0, agent=agent, model="base", reads=reads,
        output=output, faults=faults, rewards=rewards or {},
    )  # fmt: skip


def group(*trajectories, answers=("gold",)):
    return Group(
        question=Question(id="q", text="?", answers=answers), step=0, strategy="test", trajectories=trajectories
    )


def test_normalisation_is_squads():
    assert normalize("The  U.S. President's   a-cat, an Apple!") == ["us", "presidents", "acat", "apple"]


@pytest.mark.parametrize(
    ("answer", "golds", "em", "f1_value", "acc"),
    [
        ("Paris", ("Paris",), 1, 1, 1),
        ("the paris.", ("Paris",), 1, 1, 1),
        ("It is Paris, France", ("Paris",), 0, 2 / 5, 1),  # P 1/4, R 1
        ("New York City", ("New York",), 0, 4 / 5, 1),  # P 2/3, R 1
        ("York New", ("New York",), 0, 1, 0),  # a bag has no order, a run has
        ("no idea", ("Paris",), 0, 0, 0),
        ("to be be", ("be be be",), 0, 4 / 6, 0),  # two of three common on both sides
        ("", ("Paris",), 0, 0, 0),
        ("the", ("an",), 1, 1, 0),  # both empty after normalisation
        ("Seine", ("Paris", "the Seine"), 1, 1, 1),  # the best gold counts
        ("Paris", (), 0, 0, 0),
    ],
)
def test_metrics(answer, golds, em, f1_value, acc):
    assert exact_match(answer, golds) == em
    assert f1(answer, golds) == pytest.approx(f1_value)
    assert accuracy(answer, golds) == acc


def test_score_touches_sinks_alone():
    scored = score(group(trajectory("a", output="gold"), trajectory("b", reads=("a",), output="gold ring")))
    assert [dict(t.rewards) for t in scored.trajectories] == [{}, {"shared": pytest.approx(2 / 3)}]


def test_score_refuses_what_is_not_finite():
    with pytest.raises(RewardError, match=r"trajectory b: the metric gave nan for the answer 'x'"):
        score(group(trajectory("b", output="x")), lambda answer, golds: math.nan)


def diamond(**rewards):
    """a is read by b and c; both are read by nobody."""
    return group(
        trajectory("a", "rewriter", faults=("f", "g")),
        trajectory("b", "left", reads=("a",), rewards={"shared": 0.2}, faults=("f",)),
        trajectory("c", "right", reads=("a",), rewards=rewards or {"shared": 0.6}),
    )


@pytest.mark.parametrize(("aggregate", "expected"), [("mean", 0.4), ("max", 0.6), ("min", 0.2)])
def test_rewards_flow_from_readers_to_what_they_read(aggregate, expected):
    carried = propagate(diamond(), {"rewriter": CreditRule(aggregate=aggregate)})
    assert carried.trajectories[0].rewards["shared"] == pytest.approx(expected)


def test_full_propagation_carries_the_readers_penalties():
    rules = {"rewriter": CreditRule(propagate="full", penalty=-0.5), "left": CreditRule(penalty=-1.0)}
    carried = propagate(diamond(), rules)
    assert carried.trajectories[0].rewards["shared"] == pytest.approx((0.2 - 1.0 + 0.6) / 2)
    assert credits(carried, rules) == pytest.approx({"a": -0.1 - 0.5, "b": 0.2 - 1.0, "c": 0.6})


def test_a_penalty_applies_once_however_many_faults():
    assert penalty(trajectory("a", faults=("f", "g", "h")), CreditRule(penalty=-0.5)) == -0.5
    assert penalty(trajectory("a"), CreditRule(penalty=-0.5)) == 0.0


def test_an_unknown_reward_stays_unknown_and_is_never_zero():
    carried = propagate(diamond(other=1.0), {})
    assert carried.trajectories[0].rewards["shared"] == 0.2  # the known reader alone
    assert "shared" not in carried.trajectories[2].rewards
    assert set(credits(carried, {})) == {"a", "b"}


def test_a_circle_of_reads_is_an_error():
    with pytest.raises(WorkflowError, match="reads itself in a circle"):
        propagate(group(trajectory("a", reads=("b",)), trajectory("b", reads=("a",))), {})


def test_a_reader_counts_once_however_often_it_names_what_it_read():
    known = [
        trajectory("b", reads=("a", "a"), rewards={"shared": 1.0}),
        trajectory("c", reads=("a",), rewards={"shared": 0.0}),
    ]
    scored = propagate(group(trajectory("a"), *known), {})
    assert scored.trajectories[0].rewards == {"shared": 0.5}


def test_a_read_that_leads_out_of_the_group_is_an_error():
    with pytest.raises(WorkflowError, match="trajectory b: it reads z, which is not in its group"):
        propagate(group(trajectory("b", reads=("z",))), {})


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("-inf")])
def test_what_is_no_finite_number_is_no_reward(value):
    with pytest.raises(RewardError, match="trajectory a: the metric gave"):
        score(group(trajectory("a")), lambda answer, golds: value)


@pytest.mark.parametrize(("length", "expected"), [(5, 0.0), (6, 0.0), (7, -0.25), (9, -0.75), (10, -1.0), (30, -1.0)])
def test_length_costs_more_and_more_over_the_buffer(length, expected):
    assert overlong(length, Overlong(limit=10, buffer=4)) == pytest.approx(expected)
    assert overlong(length, Overlong(limit=10, buffer=4, penalty=-2.0)) == pytest.approx(2 * expected)
    assert overlong(length, None) == 0.0
