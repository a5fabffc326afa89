"""What `cotrain credit` counts, by hand; and that its shares are those of the trainer's own coefficients."""

import random
from dataclasses import replace

import numpy as np
import pytest

from cotrain.batch import make_samples, pack
from cotrain.recompute.effects import Effects, correlation, gradient_masses, sign_changed
from cotrain.runs import GroupRecord
from cotrain.types import Completion, Group, Question, Trajectory, Turn
from support_mgrpo import plan_of


def said(id, agent, num_tokens, *, model="sub", prompts=1, shared=0.5, **more):
    """`num_tokens` are sampled in each of `prompts` turns, none of which extends the one before."""
    completion = Completion(
        token_ids=(7,) * num_tokens, logprobs=(-1.0,) * num_tokens, version=0, stop="stop", text="x"
    )
    turns = tuple(Turn(prompt_ids=(i + 1, *map(ord, id)), completion=completion) for i in range(prompts))
    return Trajectory(
        id=id, question_id="q", rollout_id="0.0", pass_id=0, call=0, agent=agent, model=model, turns=turns,
        rewards={"shared": shared}, **more,
    )  # fmt: skip


def record(trajectories, advantages, weights, credits=None):
    group = Group(
        question=Question(id="q", text="?", answers=()), step=1, strategy="s", trajectories=tuple(trajectories)
    )
    return GroupRecord(group=group, credits=credits or {}, advantages=advantages, weights=weights)


# One batch of the model sub: scout with 2 and 4 tokens, coder with 8; main's model has a batch of its own.
BATCH = [
    record([said("s1", "scout", 2), said("m", "main", 5, model="main")], {"s1": 1.0, "m": -2.0}, {"s1": 1.0, "m": 3.0}),
    record([said("s2", "scout", 4), said("c", "coder", 8)], {"s2": -3.0, "c": 0.5}, {"s2": 0.5, "c": 2.5}),
]


def test_under_trajectory_a_mass_is_the_weighted_size_of_the_advantages():
    # sum w = 1 + 0.5 + 2.5 = 4. scout: (1 * 1 + 0.5 * 3) / 4; coder: 2.5 * 0.5 / 4; main: 3 * 2 / 3.
    expected = {("sub", "scout"): 2.5 / 4, ("sub", "coder"): 1.25 / 4, ("main", "main"): 2.0}
    assert gradient_masses(BATCH, "trajectory") == pytest.approx(expected)


def test_under_token_long_trajectories_have_more():
    # sum w n = 2 + 2 + 20 = 24. scout: (2 * 1 * 1 + 4 * 0.5 * 3) / 24; coder: 8 * 2.5 * 0.5 / 24.
    expected = {("sub", "scout"): 8 / 24, ("sub", "coder"): 10 / 24, ("main", "main"): 2.0}
    assert gradient_masses(BATCH, "token") == pytest.approx(expected)


def test_under_a_number_tokens_are_summed_and_divided_by_it():
    expected = {("sub", "scout"): 8 / (10 * 4), ("sub", "coder"): 10 / (10 * 4), ("main", "main"): 5 * 3 * 2 / (10 * 3)}
    assert gradient_masses(BATCH, 10) == pytest.approx(expected)


def test_who_gives_no_sample_has_no_mass():
    silent, frozen = said("a", "scout", 0), said("b", "scout", 3, trainable=False)
    idle = said("c", "coder", 3)
    assert gradient_masses([record([silent, frozen, idle], {"a": 1.0, "b": 1.0}, {})], "token") == {}
    assert gradient_masses([record([idle], {"c": 1.0}, {"c": 0.0})], "token") == {}  # nothing counts


@pytest.mark.parametrize("reduction", ["trajectory", "token", 7])
def test_masses_are_the_sums_of_the_trainers_coefficients(reduction):
    draw = random.Random(str(reduction))
    records = []
    for i in range(5):
        made = [
            said(f"t{i}.{j}", draw.choice(["scout", "coder"]), draw.randint(1, 5), prompts=draw.randint(1, 3))
            for j in range(6)
        ]
        kept = [t.id for t in made if draw.random() < 0.8]
        records.append(
            record(made, {i: draw.gauss(0, 1) for i in kept}, {i: draw.choice([0.5, 1.0, 3.0]) for i in kept})
        )
    samples = [s for r in records for s in make_samples(r.group, r.advantages, r.weights)]
    expected = dict.fromkeys([("sub", "scout"), ("sub", "coder")], 0.0)
    for part in pack(samples, tokens_per_pack=64, reduction=reduction):
        agent_N = np.array(part.agents)[part.trajectory_N]
        for agent in ("scout", "coder"):
            expected["sub", agent] += (part.coefficients_N * abs(part.advantages_N))[agent_N == agent].sum()
    assert gradient_masses(records, reduction) == pytest.approx(expected)


def test_correlation_is_pearsons_and_unknown_for_what_is_constant():
    assert correlation([1.0, 2.0, 3.0], [2.0, 4.0, 9.0]) == pytest.approx(7 / 52**0.5)  # 7/3 / sqrt(2/3 * 26/3)
    assert correlation([1.0, 2.0], [3.0, 1.0]) == pytest.approx(-1.0)
    assert correlation([1.0, 1.0 + 1e-12], [3.0, 1.0]) is None
    assert correlation([], []) is None


def test_zero_is_a_sign_of_its_own():
    assert sign_changed([1.0, -1.0, 0.0, 2.0], [2.0, 1.0, 0.5, 0.0]) == 0.75
    assert sign_changed([0.0, -1.0], [-0.0, -2.0]) == 0.0
    assert sign_changed([], []) is None


def test_an_effect_compares_both_sides_over_all_steps():
    plan = plan_of()
    step = BATCH[1]
    longer = replace(
        step,
        group=replace(step.group, trajectories=(*step.group.trajectories, said("s3", "scout", 4, shared=1.0))),
        credits={"s2": 1.0, "c": 0.0, "s3": 2.0},
        advantages={"s2": -3.0, "c": 0.5, "s3": 4.0},
    )
    anew = replace(longer, credits={"s2": 3.0, "c": 0.0, "s3": 3.0}, advantages={"s2": 2.0, "s3": 6.0})
    effects = Effects(plan, plan)
    none, zero = {"scout": {}}, {"coder": {"zero_variance": 1}}
    effects.add([longer], [none], [anew], [zero])
    effects.add([longer], [none], [longer], [none])
    summary = effects.summary(is_reproduced=True)
    scout, coder = summary["scout"], summary["coder"]
    assert (scout.model, scout.num_trajectories, scout.num_both) == ("sub", 4, 4)
    assert scout.stored == pytest.approx(
        {
            "shared_mean": 0.75, "shared_std": 0.25, "credit_mean": 1.5, "credit_std": 0.5,
            "advantage_size_mean": 3.5, "advantage_size_std": 0.5, "num_advantages": 4,
            "gradient_share": 2 * 5.5 / (2 * 5.5 + 2 * 1.25),  # w: s2 0.5, c 2.5, s3 1, over sum w = 4
        }
    )  # fmt: skip
    recomputed = (7 / 1.5 + 5.5 / 4) / (7 / 1.5 + 5.5 / 4 + 1.25 / 4)  # first step: (0.5 * 2 + 1 * 6) / 1.5 of scout's
    assert scout.recomputed["gradient_share"] == pytest.approx(recomputed)
    assert scout.difference["credit_mean"] == pytest.approx((3 + 3 + 1 + 2) / 4 - 1.5)
    assert scout.sign_changed == 0.25
    assert scout.correlation == pytest.approx(np.corrcoef([-3, 4, -3, 4], [2, 6, -3, 4])[0, 1])
    assert (coder.stored["dropped/zero_variance"], coder.recomputed["dropped/zero_variance"]) == (0, 1)
    assert (coder.difference["num_advantages"], coder.num_both, coder.sign_changed) == (-1, 1, 0.0)
    unsure = effects.summary(is_reproduced=False)["coder"]
    assert (unsure.stored["dropped/zero_variance"], unsure.difference["dropped/zero_variance"]) == (None, None)
    nobody = summary["main"]
    assert (nobody.num_trajectories, nobody.stored["credit_mean"], nobody.stored["gradient_share"]) == (0, None, None)
