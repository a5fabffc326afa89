import pytest

from cotrain.advantages import group_relative, mean, population_std, sample_std
from cotrain.types import Trajectory


def peers(*agents, trainable=True):
    return [
        Trajectory(
            id=f"t{i}", question_id="q", rollout_id=f"0.{i}", pass_id=0, call=0, agent=a, model="m", trainable=trainable
        )
        for i, a in enumerate(agents)
    ]


def credit(*values):
    return {f"t{i}": v for i, v in enumerate(values)}


def test_hand_values():
    result = group_relative(peers(*"aaaa"), credit(0.0, 0.0, 1.0, 1.0))
    assert list(result.values.values()) == pytest.approx([-1, -1, 1, 1], abs=3e-6)  # mean 0.5, std 0.5
    result = group_relative(peers(*"aaa"), credit(1.0, 2.0, 6.0), eps=1e-12)
    std = (14 / 3) ** 0.5  # mean 3; squares 4, 1, 9
    assert list(result.values.values()) == pytest.approx([-2 / std, -1 / std, 3 / std])


def test_sample_std_divides_by_n_minus_1():
    result = group_relative(peers(*"aaa"), credit(1.0, 2.0, 6.0), scale=sample_std, eps=1e-12)
    std = 7**0.5
    assert list(result.values.values()) == pytest.approx([-2 / std, -1 / std, 3 / std])


def test_without_a_scale_only_the_baseline_is_subtracted():
    assert list(group_relative(peers(*"aaa"), credit(1.0, 2.0, 6.0), scale=None).values.values()) == [-2, -1, 3]


def test_weights_enter_mean_and_std():
    assert mean([0.0, 1.0], [3.0, 1.0]) == 0.25
    assert population_std([0.0, 1.0], [3.0, 1.0]) == pytest.approx((0.75 * 0.25**2 + 0.25 * 0.75**2) ** 0.5)
    result = group_relative(peers("a", "a"), credit(0.0, 1.0), weights=credit(3.0, 1.0), eps=0.0)
    assert list(result.values.values()) == pytest.approx([-0.25 / 0.1875**0.5, 0.75 / 0.1875**0.5])


def test_peers_are_one_agents_and_a_set_of_one_gives_nothing():
    """The trap: a peer set of one must not become mean 0, std 1, which would make the raw reward its advantage."""
    result = group_relative(peers("a", "b", "a"), credit(0.0, 5.0, 1.0))
    assert result.values == {"t0": pytest.approx(-1, abs=3e-6), "t2": pytest.approx(1, abs=3e-6)}
    assert result.dropped == {"singleton": 1}


def test_equal_credits_give_nothing_and_are_counted():
    assert group_relative(peers(*"aaa"), credit(0.5, 0.5 + 1e-9, 0.5)).dropped == {"zero_variance": 3}
    assert group_relative(peers(*"aaa"), credit(0.5, 0.5 + 1e-7, 0.5)).dropped == {}


def test_an_unknown_credit_is_dropped_and_counted_and_untrained_trajectories_are_neither():
    result = group_relative(peers(*"aaa"), {"t0": 0.0, "t1": 1.0})
    assert set(result.values) == {"t0", "t1"}
    assert result.dropped == {"missing_reward": 1}
    assert group_relative(peers(*"aa", trainable=False), credit(0.0, 1.0)).values == {}
