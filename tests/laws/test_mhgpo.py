"""The laws of MHGPO (docs/methods.md), over random chains, group sizes and seeds."""

import math
from collections import Counter, defaultdict
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain.advantages import group_relative, population_std
from cotrain.rewards import credits, f1, propagate, score
from cotrain.sampling import Job, fork, fork_on_first, independent, round_robin
from cotrain.types import CreditRule
from support import GOLD, cast, chain, question, run

SEEDS = st.integers(0, 10**6)
SIZES = st.integers(2, 6)
CHAINS = st.integers(2, 4)


def job(system, seed, size, id="q1"):
    roster, engine = cast(system)
    return Job(system=system, roster=roster, question=question(id), seed=seed, step=1, group_size=size), engine


def judged(group, rules=None):
    rules = rules or {}
    scored = propagate(score(group), rules)
    credit = credits(scored, rules)
    return scored, credit, group_relative(scored.trajectories, credit)


def grpo(rewards):
    """The reference: plain GRPO on a list of rewards."""
    center = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - center) ** 2 for r in rewards) / len(rewards))
    return [(r - center) / (std + 1e-6) for r in rewards]


@settings(max_examples=60)
@given(SEEDS, SIZES, CHAINS)
def test_fork_on_first_gives_a_chain_one_advantage_equal_to_grpo_on_its_f1(seed, size, num_agents):
    work, engine = job(chain(num_agents), seed, size)
    group = run(fork_on_first(work))
    assert len(engine.requests) == num_agents * size
    scored, _, result = judged(group)
    chains = scored.by_rollout().values()
    rewards = [f1(chain[-1].output, GOLD) for chain in chains]
    if max(rewards) - min(rewards) <= 1e-8:
        assert result.values == {}
        assert result.dropped == {"zero_variance": num_agents * size}
        return
    for members, expected in zip(chains, grpo(rewards), strict=True):
        assert len(members) == num_agents
        assert [result.values[t.id] for t in members] == pytest.approx([expected] * num_agents)


@settings(max_examples=60)
@given(SEEDS, SIZES, CHAINS, st.data())
def test_round_robin_shares_one_advantage_from_the_fork_on(seed, size, num_agents, data):
    at = data.draw(st.integers(0, num_agents - 1))
    probabilities = [float(k == at) for k in range(num_agents)]
    work, engine = job(chain(num_agents), seed, size)
    group = run(round_robin(probabilities)(work))
    assert len(engine.requests) == at + size * (num_agents - at)
    scored, _, result = judged(group)
    trunk = [t for t in scored.trajectories if t.rollout_id is None]
    assert [t.agent for t in trunk] == [f"a{i}" for i in range(at)]
    assert not any(t.trainable for t in trunk)
    assert not any(t.id in result.values for t in trunk)
    rewards = [f1(members[-1].output, GOLD) for members in scored.by_rollout().values()]
    if trunk:  # the output just before the fork, and everything before it
        assert [t.rewards["shared"] for t in trunk] == pytest.approx([fmean(rewards)] * at)
    for members in scored.by_rollout().values():
        assert len(members) == num_agents  # the trunk included
        assert len({result.values.get(t.id) for t in members if t.rollout_id is not None}) == 1
    if max(rewards) - min(rewards) > 1e-8:
        assert len(result.values) == size * (num_agents - at)


def test_trunk_outputs_give_no_sample_when_the_same_agent_acts_again_after_the_fork():
    system = chain(2, repeat_first=True)  # a0, a1, a0, a1
    work, _ = job(system, seed=3, size=4)
    branches = run(fork(work, at=1, size=4))
    by_agent = defaultdict(list)
    for t in branches.trajectories:
        by_agent[t.agent, t.rollout_id is None].append(t.trainable)
    assert by_agent["a0", True] == [False]
    assert by_agent["a0", False] == [True] * 4
    assert by_agent["a1", False] == [True] * 8


@settings(max_examples=40)
@given(SEEDS, SIZES, CHAINS)
def test_independent_trains_only_the_forked_call_of_each_pass_and_its_prompts_are_one(seed, size, num_agents):
    work, engine = job(chain(num_agents), seed, size)
    group = run(independent(work))
    assert len(engine.requests) == sum(k + size * (num_agents - k) for k in range(num_agents))
    _, _, result = judged(group)
    for k in range(num_agents):
        of_pass = [t for t in group.trajectories if t.pass_id == k]
        trained = [t for t in of_pass if t.trainable]
        assert {t.agent for t in trained} == {f"a{k}"}
        assert len(trained) == size
        assert len({t.turns[0].prompt_ids for t in trained}) == 1
        assert all(t.trainable for t in of_pass if t.id in result.values)


@pytest.mark.parametrize(
    ("strategy", "calls", "trained"),
    [
        (fork_on_first, 12, 12),
        (round_robin([1.0, 0.0, 0.0]), 12, 12),
        (round_robin([0.0, 1.0, 0.0]), 9, 8),
        (round_robin([0.0, 0.0, 1.0]), 6, 4),
        (independent, 27, 12),
    ],
)
def test_call_counts_for_three_agents_and_four_branches(strategy, calls, trained):
    work, engine = job(chain(3), seed=1, size=4)
    group = run(strategy(work))
    assert len(engine.requests) == calls
    assert sum(t.trainable for t in group.trajectories) == trained


def test_fork_on_first_is_round_robin_with_all_weight_on_the_first():
    first, _ = job(chain(3), seed=5, size=4)
    other, _ = job(chain(3), seed=5, size=4)
    assert run(fork_on_first(first)).trajectories == run(round_robin([1.0, 0.0, 0.0])(other)).trajectories


def test_round_robin_draws_are_seeded_per_run_seed_step_and_question_and_uniform_by_default():
    def fork_of(seed, step, id):
        work, engine = job(chain(3), seed, 2, id)
        run(round_robin()(replace(work, step=step)))
        return 6 - len(engine.requests)  # 6 / 5 / 4 calls for k = 0 / 1 / 2

    keys = [(seed, step, f"q{i}") for seed in range(3) for step in range(10) for i in range(10)]
    draws = [fork_of(*key) for key in keys]
    assert draws[:20] == [fork_of(*key) for key in keys[:20]]
    counts = Counter(draws)
    assert set(counts) == {0, 1, 2}
    assert all(70 <= n <= 130 for n in counts.values())  # 300 draws, 100 expected, std 8.2


@settings(max_examples=40)
@given(SEEDS, SIZES, CHAINS)
def test_with_one_reader_everywhere_mean_max_and_min_agree(seed, size, num_agents):
    work, _ = job(chain(num_agents), seed, size)
    group = run(fork_on_first(work))
    results = []
    for aggregate in ("mean", "max", "min"):
        rules = {f"a{i}": CreditRule(aggregate=aggregate) for i in range(num_agents)}
        results.append(judged(group, rules)[1])
    assert results[0] == results[1] == results[2]


@settings(max_examples=60)
@given(SEEDS, SIZES, CHAINS, st.booleans())
def test_advantages_of_a_peer_set_sum_to_zero_and_have_std_one(seed, size, num_agents, weighted):
    rules = {f"a{i}": CreditRule(penalty=-0.3 * i) for i in range(num_agents)}
    work, _ = job(chain(num_agents), seed, size)
    scored = propagate(score(run(fork_on_first(work))), rules)
    weights = {t.id: 1.0 + (i % 3) * weighted for i, t in enumerate(scored.trajectories)}
    credit = credits(scored, rules)
    result = group_relative(scored.trajectories, credit, weights=weights)
    for i in range(num_agents):
        ids = [t.id for t in scored.trajectories if t.agent == f"a{i}" and t.id in result.values]
        if not ids:
            continue
        total = math.fsum(weights[id] for id in ids)
        assert math.fsum(weights[id] * result.values[id] for id in ids) == pytest.approx(0, abs=1e-9)
        square = math.fsum(weights[id] * result.values[id] ** 2 for id in ids) / total
        std = population_std([credit[id] for id in ids], [weights[id] for id in ids])
        assert math.sqrt(square) == pytest.approx(std / (std + 1e-6))  # 1, up to eps


@settings(max_examples=40)
@given(SEEDS, SIZES, st.floats(-5, 5))
def test_a_constant_added_to_a_peer_sets_credits_changes_nothing(seed, size, constant):
    work, _ = job(chain(3), seed, size)
    scored, credit, result = judged(run(fork_on_first(work)))
    moved = {t.id: credit[t.id] + constant * (t.agent == "a1") for t in scored.trajectories}
    again = group_relative(scored.trajectories, moved)
    assert again.dropped == result.dropped
    assert again.values == pytest.approx(result.values, abs=1e-5)


@settings(max_examples=40)
@given(SEEDS, SIZES, st.sampled_from(["a0", "a1", "a2"]))
def test_one_agents_penalty_changes_no_other_agents_advantage(seed, size, punished):
    work, _ = job(chain(3), seed, size)
    group = run(fork_on_first(work))
    _, _, free = judged(group)
    _, _, fined = judged(group, {punished: CreditRule(penalty=-0.7)})
    others = {t.id for t in group.trajectories if t.agent != punished}
    assert {k: v for k, v in free.values.items() if k in others} == {
        k: v for k, v in fined.values.items() if k in others
    }


def test_under_full_propagation_a_penalty_reaches_those_whom_the_reader_read():
    work, _ = job(chain(3), seed=11, size=4)
    group = run(fork_on_first(work))
    rules = {name: CreditRule(penalty=-0.7 * (name == "a2"), propagate="full") for name in ("a0", "a1", "a2")}
    scored, credit, _ = judged(group, rules)
    assert any(t.faults for t in group.sinks())
    for members in scored.by_rollout().values():
        sink = members[-1]
        expected = f1(sink.output, GOLD) - 0.7 * bool(sink.faults)
        assert [credit[t.id] for t in members] == pytest.approx([expected] * 3)
