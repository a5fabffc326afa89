"""How much each trajectory counts: values worked out by hand."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from cotrain import align
from cotrain.advantages import group_relative, population_std, sample_std
from cotrain.types import Group, Question, Trajectory


def trajectory(id, agent="scout", rollout="0.0", caller="main", trainable=True, pass_id=0):
    return Trajectory(
        id=id, question_id="q", rollout_id=rollout, pass_id=pass_id, call=0, agent=agent, model="m", caller=caller,
        trainable=trainable,
    )  # fmt: skip


def group(*trajectories, id="q", step=1):
    question = Question(id=id, text="?", answers=("gold",))
    return Group(question=question, step=step, strategy="test", trajectories=trajectories)


def all_known(group):
    return {t.id: 0.5 for t in group.trajectories}


# Rollout 0: three scouts and a coder; 1: one scout; 2: two coders; 3: nobody.
TEAM = group(
    *(trajectory(id, caller="m0") for id in ("s0", "s1", "s2")),
    trajectory("c0", "coder", caller="m0"),
    trajectory("m0", "main", caller=None),
    trajectory("s3", "scout", "0.1", "m1"),
    trajectory("m1", "main", "0.1", None),
    trajectory("c1", "coder", "0.2", "m2"),
    trajectory("c2", "coder", "0.2", "m2"),
    trajectory("m2", "main", "0.2", None),
    trajectory("m3", "main", "0.3", None),
)
MAINS = {"m0": 1.0, "m1": 1.0, "m2": 1.0, "m3": 1.0}


def test_none_counts_everybody_once():
    assert align.none(TEAM, all_known(TEAM)) == {t.id: 1.0 for t in TEAM.trajectories}


def test_weight_shares_one_among_a_rollouts_helpers_of_one_kind():
    third = 1 / 3
    assert align.weight(TEAM, all_known(TEAM)) == {
        **MAINS, "s0": third, "s1": third, "s2": third, "s3": 1.0, "c0": 1.0, "c1": 0.5, "c2": 0.5,
    }  # fmt: skip


def test_duplicate_gives_exactly_d_of_each_kind_to_every_rollout_that_delegated():
    for seed in range(50):
        counts = align.duplicate(2, seed)(TEAM, all_known(TEAM))
        assert set(counts) == {t.id for t in TEAM.trajectories}
        assert {id: counts[id] for id in MAINS} == MAINS
        assert sorted(counts[id] for id in ("s0", "s1", "s2")) == [0.0, 1.0, 1.0]  # 3 > 2: two of them, each once
        assert counts["s3"] == counts["c0"] == 2.0  # 1 < 2: itself and a copy of it
        assert counts["c1"] == counts["c2"] == 1.0  # 2 = 2: nothing is drawn


def test_duplicate_keeps_each_of_fewer_than_d_and_fills_up_with_copies():
    seen = Counter()
    for seed in range(200):
        counts = align.duplicate(5, seed)(TEAM, all_known(TEAM))
        scouts = tuple(counts[id] for id in ("s0", "s1", "s2"))
        assert min(scouts) >= 1
        assert sum(scouts) == 5
        seen[scouts] += 1
    # Two copies among three: 3, 1, 1 in some order (1/9 each) or 2, 2, 1 in some order (2/9 each).
    assert len(seen) == 6
    for shape, n in seen.items():
        p = 1 / 9 if 3.0 in shape else 2 / 9
        assert abs(n - 200 * p) < 4 * math.sqrt(200 * p * (1 - p))


def test_duplicates_draws_differ_by_seed_step_question_rollout_and_agent_and_repeat():
    def draws(seed=0, step=1, id="q", rollout="0.0", agent="scout"):
        ids = [f"t{i}" for i in range(12)]
        made = group(*(trajectory(i, agent, rollout) for i in ids), id=id, step=step)
        counts = align.duplicate(6, seed)(made, all_known(made))
        return tuple(counts[i] for i in ids)  # one of 924

    assert draws() == draws()
    others = [draws(seed=1), draws(step=2), draws(id="r"), draws(rollout="0.1"), draws(agent="coder")]
    assert len({draws(), *others}) == 6


def test_who_has_no_credit_or_is_not_trained_is_not_counted_in_d_k():
    made = group(
        trajectory("a"), trajectory("b"), trajectory("unknown"), trajectory("unread", trainable=False),
        trajectory("main", "main", caller=None),
    )  # fmt: skip
    credits = {"a": 0.0, "b": 1.0, "unread": 1.0, "main": 1.0}
    assert align.weight(made, credits) == {"a": 0.5, "b": 0.5, "main": 1.0}
    assert align.none(made, credits) == {"a": 1.0, "b": 1.0, "main": 1.0}
    assert align.duplicate(2, 0)(made, credits) == {"a": 1.0, "b": 1.0, "main": 1.0}


def test_a_helper_of_a_helper_is_counted_per_rollout_whoever_called_it():
    made = group(
        trajectory("x", "clerk", caller="a"), *(trajectory(id, "clerk", caller="b") for id in "yz"),
        trajectory("a"), trajectory("b"), trajectory("main", "main", caller=None),
    )  # fmt: skip
    weights = align.weight(made, all_known(made))
    assert [weights[id] for id in "xyz"] == [1 / 3] * 3
    assert [weights[id] for id in ("a", "b", "main")] == [0.5, 0.5, 1.0]


def test_who_is_asked_by_the_system_itself_stands_alone_however_often():
    made = group(trajectory("a", caller=None), trajectory("b", caller=None), trajectory("c"), trajectory("d"))
    assert align.weight(made, all_known(made)) == {"a": 1.0, "b": 1.0, "c": 0.5, "d": 0.5}
    counts = align.duplicate(3, 0)(made, all_known(made))
    assert counts["a"] == counts["b"] == 1.0
    assert counts["c"] + counts["d"] == 3.0


def test_rollouts_of_different_passes_are_different():
    made = group(trajectory("a"), trajectory("b", pass_id=1))
    assert align.weight(made, all_known(made)) == {"a": 1.0, "b": 1.0}


def test_an_empty_group_has_no_weights():
    assert align.none(group(), {}) == align.weight(group(), {}) == align.duplicate(3, 0)(group(), {}) == {}


def test_the_drawn_away_are_dropped_and_counted():
    made = group(*(trajectory(f"t{i}") for i in range(5)), trajectory("u", rollout="0.1"))
    credits = {t.id: i / 10 for i, t in enumerate(made.trajectories)}
    weights = align.duplicate(2, 7)(made, credits)
    result = group_relative(made.trajectories, credits, weights=weights)
    assert set(result.values) == {id for id, count in weights.items() if count}
    assert len(result.values) == 3
    assert result.dropped == {"aligned_away": 3}


def test_copies_of_one_are_no_peers_of_each_other():
    made = group(trajectory("a"))
    weights = align.duplicate(8, 0)(made, {"a": 1.0})
    assert weights == {"a": 8.0}
    assert group_relative(made.trajectories, {"a": 1.0}, weights=weights).dropped == {"singleton": 1}


def test_weights_enter_mean_and_std_by_hand():
    """Credits {0}, {0, 1}: mean 1/4; variance (1 * 1/16 + 1/2 * 1/16 + 1/2 * 9/16) / 2 = 3/16."""
    made = group(trajectory("a"), trajectory("b", rollout="0.1"), trajectory("c", rollout="0.1"))
    credits = {"a": 0.0, "b": 0.0, "c": 1.0}
    result = group_relative(made.trajectories, credits, weights=align.weight(made, credits), eps=0.0)
    root = math.sqrt(3)
    assert result.values == pytest.approx({"a": -1 / root, "b": -1 / root, "c": root})


@pytest.mark.parametrize(("scale", "std"), [(population_std, (2 / 9) ** 0.5), (sample_std, (1 / 3) ** 0.5)])
def test_copies_enter_mean_and_std_by_hand(scale, std):
    """Credits 0 (one copy) and 1 (two): mean 2/3; squares 4/9 + 1/9 + 1/9 = 2/3, over 3 or over 2."""
    made = group(trajectory("a"), trajectory("b", rollout="0.1"))
    credits, weights = {"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 2.0}
    result = group_relative(made.trajectories, credits, weights=weights, scale=scale, eps=0.0)
    assert result.values == pytest.approx({"a": -2 / 3 / std, "b": 1 / 3 / std})


def test_group_order_does_not_change_weights():
    mirrored = replace(TEAM, trajectories=TEAM.trajectories[::-1])
    assert align.weight(mirrored, all_known(TEAM)) == align.weight(TEAM, all_known(TEAM))


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([], 1),
        ([0, 0, 0], 1),
        ([4], 4),
        ([1, 9, 2], 9),
        ([1] * 98 + [7, 9], 7),  # 99 of 100 are at most 7
        ([1] * 99 + [9], 1),
        ([1] * 99 + [9, 9], 9),  # 99 of 101 are fewer than 99 in 100
        ([1] * 198 + [5, 6], 1),
        ([2] * 197 + [5, 6, 7], 5),
        ([9, *[3] * 99], 3),
    ],
)
def test_percentile_99(counts, expected):
    assert align.percentile_99(counts) == expected
