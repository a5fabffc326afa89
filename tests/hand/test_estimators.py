"""Each named estimator, by hand."""

from dataclasses import replace
from functools import partial

import pytest

from cotrain.advantages import (
    Advantages,
    agent_turn,
    estimated,
    gae,
    group_relative,
    leave_one_out,
    named_estimators,
    population_std,
    role_baseline,
    same_turn,
)
from cotrain.errors import RewardError
from cotrain.types import Trajectory


def made(id, agent="a", rollout="0.0", pass_id=0, call=0, trainable=True):
    return Trajectory(
        id=id,
        question_id="q",
        rollout_id=rollout,
        pass_id=pass_id,
        call=call,
        agent=agent,
        model="m",
        trainable=trainable,
    )


THREE = [made("t0"), made("t1", rollout="0.1"), made("t2", rollout="0.2")]
CREDITS = {"t0": 1.0, "t1": 2.0, "t2": 6.0}
ONES = dict.fromkeys(CREDITS, 1.0)


@pytest.fixture
def known():
    return named_estimators(scale=population_std, eps=0.0, averages={}, decay=0.95)


def test_leave_one_out_subtracts_the_mean_of_the_others(known):
    result = known["leave_one_out"](THREE, CREDITS, ONES)
    assert list(result.values.values()) == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])


def test_leave_one_out_weighs_the_others():
    assert leave_one_out([1.0, 2.0, 6.0], [1.0, 1.0, 3.0]) == pytest.approx([20 / 4, 19 / 4, 3 / 2])


def test_no_std_subtracts_the_mean_alone(known):
    assert list(known["no_std"](THREE, CREDITS, ONES).values.values()) == pytest.approx([-2, -1, 3])


def test_agent_wise_compares_over_passes_and_the_default_does_not(known):
    two = [made("t0", pass_id=0), made("t1", pass_id=1)]
    credits, ones = {"t0": 0.0, "t1": 1.0}, {"t0": 1.0, "t1": 1.0}
    assert known["group_relative"](two, credits, ones) == Advantages(values={}, dropped={"singleton": 2})
    assert known["agent_wise"](two, credits, ones).values == {"t0": -1.0, "t1": 1.0}


def test_agent_turn_compares_what_is_said_for_the_same_time():
    said = [made(f"r{b}c{c}", rollout=f"0.{b}", call=c) for b in range(2) for c in (0, 2)]
    credits = {"r0c0": 0.0, "r0c2": 5.0, "r1c0": 1.0, "r1c2": 9.0}
    result = agent_turn(said, credits, dict.fromkeys(credits, 1.0), eps=0.0)
    assert result.values == {"r0c0": -1.0, "r1c0": 1.0, "r0c2": -1.0, "r1c2": 1.0}


def test_what_the_trunk_said_counts_as_turns():
    trunk = made("t", rollout=None, trainable=False)
    first, second = made("b0", call=2), made("b1", rollout="0.1", call=2)
    turn = same_turn([trunk, first, second])
    assert [turn(t) for t in (trunk, first, second)] == [("q", "a", 0), ("q", "a", 1), ("q", "a", 1)]


def test_the_role_baseline_is_read_before_it_is_updated():
    averages = {"a": 0.5}
    result = role_baseline(THREE, CREDITS, ONES, averages=averages, decay=0.9)
    b1 = 0.9 * 0.5 + 0.1 * 1.0
    b2 = 0.9 * b1 + 0.1 * 2.0
    assert list(result.values.values()) == pytest.approx([1.0 - 0.5, 2.0 - b1, 6.0 - b2])
    assert averages == {"a": pytest.approx(0.9 * b2 + 0.1 * 6.0)}


def test_the_role_baseline_begins_at_0_belongs_to_an_agent_and_takes_a_lone_trajectory():
    averages = {"b": 3.0}
    result = role_baseline([THREE[0]], {"t0": 1.0}, {"t0": 1.0}, averages=averages)
    assert result == Advantages(values={"t0": 1.0}, dropped={})
    assert averages == {"b": 3.0, "a": pytest.approx(0.05)}


def test_gae_without_a_critic_is_the_credit(known):
    assert known["gae"](THREE, CREDITS, ONES).values == CREDITS
    assert known["gae"]([THREE[0]], {}, {}).dropped == {"missing_reward": 1}


def test_gae_by_hand():
    # delta: 0 + 0.5 * 2 - 1 = 0, 0 + 0.5 * 3 - 2 = -0.5, 4 - 3 = 1; lambda * gamma = 0.25
    assert gae([0.0, 0.0, 4.0], [1.0, 2.0, 3.0], gamma=0.5, lam=0.5) == pytest.approx([-0.0625, -0.25, 1.0])


@pytest.mark.parametrize("name", ["group_relative", "agent_wise", "agent_turn", "leave_one_out", "no_std"])
def test_a_lone_trajectory_teaches_nothing_where_peers_are_compared(known, name):
    assert known[name]([THREE[0]], {"t0": 1.0}, {"t0": 1.0}) == Advantages(values={}, dropped={"singleton": 1})


def test_a_users_function_is_an_estimator():
    def halves(trajectories, credits, weights):
        return {t.id: credits[t.id] / 2 for t in trajectories if credits[t.id] > 1}

    assert estimated(halves, THREE, CREDITS, ONES) == Advantages(
        values={"t1": 1.0, "t2": 3.0}, dropped={"no_advantage": 1}
    )
    in_one_line = partial(group_relative, baseline=leave_one_out, eps=0.0)
    result = estimated(lambda t, c, w: in_one_line(t, c, weights=w), THREE, CREDITS, ONES)
    assert result.values["t2"] == pytest.approx(4.5 / (14 / 3) ** 0.5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"t9": 1.0}, "trajectory t9: an advantage although it is not trained on"),
        ({"t0": float("nan")}, "trajectory t0: the estimator gave nan"),
    ],
)
def test_what_a_users_function_gives_is_checked(given, words):
    with pytest.raises(RewardError, match=words):
        estimated(lambda t, c, w: given, THREE, CREDITS, ONES)


def test_a_trunks_trajectory_gets_no_advantage_from_a_users_function():
    trunk = [replace(t, trainable=False) for t in THREE]
    with pytest.raises(RewardError, match="not trained on"):
        estimated(lambda t, c, w: {"t0": 1.0}, trunk, CREDITS, ONES)
