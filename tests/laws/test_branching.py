"""Laws of the strategies that fork from a recorded rollout, and of Shapley credit."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain.advantages import named_estimators, population_std
from cotrain.branching import counterfactual, tree
from cotrain.errors import InfrastructureError
from cotrain.rewards import credits, f1, propagate, score
from cotrain.roster import System
from cotrain.sampling import Job, fork_on_first, independent, round_robin
from cotrain.shapley import shapley, shapley_sampled, with_shapley
from cotrain.types import Agent, CreditRule, SamplingParams
from support import GOLD, cast, chain, question, random_words, run

SEEDS = st.integers(0, 10**6)
SIZES = st.integers(2, 4)
CHAINS = st.integers(2, 4)


async def worth(group):
    return {t.rollout_id: f1(t.output, GOLD) for t in group.sinks()}


def job(system, seed, size=3):
    roster, engine = cast(system)
    made = Job(system=system, roster=roster, question=question(), seed=seed, step=1, group_size=size, value=worth)
    return made, engine


def prompts(trajectories):
    return {t.turns[0].prompt_ids for t in trajectories}


def branches_of(group, pass_id):
    return [r for id, r in group.by_rollout().items() if id.startswith(f"{pass_id}.")]


@settings(max_examples=40)
@given(SEEDS, SIZES, CHAINS)
def test_counterfactuals_of_a_call_share_one_prompt_and_the_frozen_record(seed, size, n):
    work, engine = job(chain(n), seed, size)
    group = run(counterfactual(work))
    assert len(engine.requests) == n + size * sum(n - k for k in range(n))
    (base,) = branches_of(group, 0)
    assert not any(t.trainable for t in base)
    for k in range(n):
        rollouts = branches_of(group, k + 1)
        assert len(rollouts) == size
        alternatives = [r[k] for r in rollouts]
        assert len(prompts(alternatives)) == 1
        assert all(t.trainable and t.agent == f"a{k}" for t in alternatives)
        assert [t.output for t in rollouts[0][:k]] == [t.output for t in base[:k]]
        assert not any(t.trainable for r in rollouts for t in r if t not in alternatives)


@settings(max_examples=40)
@given(SEEDS, SIZES, CHAINS)
def test_c3_is_the_reward_minus_the_mean_of_the_other_alternatives(seed, size, n):
    work, _ = job(chain(n), seed, size)
    group = propagate(score(run(counterfactual(work))), {})
    credit = credits(group, {})
    estimator = named_estimators(scale=population_std, eps=0.0, averages={}, decay=0.95)["leave_one_out"]
    for k in range(n):
        own = [t for t in group.trajectories if t.agent == f"a{k}"]
        values = estimator(own, credit, dict.fromkeys(credit, 1.0)).values
        rewards = [f1(r[-1].output, GOLD) for r in branches_of(group, k + 1)]
        expected = [r - (sum(rewards) - r) / (size - 1) for r in rewards]
        if max(rewards) - min(rewards) > 1e-8:
            found = [values[r[k].id] for r in branches_of(group, k + 1)]
            assert found == pytest.approx(expected)
        else:
            assert values == {}


@settings(max_examples=40)
@given(SEEDS, SIZES, CHAINS)
def test_the_tree_goes_on_from_the_best_branch(seed, size, n):
    work, engine = job(chain(n), seed, size)
    group = run(tree()(work))
    assert len(engine.requests) == size * sum(n - k for k in range(n))
    before = None
    for k in range(n):
        rollouts = branches_of(group, k)
        candidates = [r[k] for r in rollouts]
        assert len(prompts(candidates)) == 1
        assert {t.id for r in rollouts for t in r if t.trainable} == {t.id for t in candidates}
        if before is not None:
            assert [t.output for t in rollouts[0][:k]] == [t.output for t in before[:k]]
        best = max(f1(r[-1].output, GOLD) for r in rollouts)
        before = next(r for r in rollouts if f1(r[-1].output, GOLD) == best)


def test_a_random_branch_is_drawn_by_the_seed():
    chosen = set()
    for seed in range(20):
        work, _ = job(chain(2), seed, 4)
        outputs = []
        for _ in range(2):
            group = run(tree(picks_best=False)(work))
            (trunk,) = {r[0].output for r in branches_of(group, 1)}
            outputs.append(trunk)
        assert outputs[0] == outputs[1]
        firsts = [r[0].output for r in branches_of(group, 0)]
        chosen.add(firsts.index(trunk))
    assert len(chosen) > 1


def test_what_a_branch_takes_over_reads_and_is_read_within_its_own_pass():
    work, _ = job(chain(3), 5, 2)
    group = run(tree()(work))
    of_pass = {t.id: t.pass_id for t in group.trajectories}
    assert len(of_pass) == len(group.trajectories)
    assert all(of_pass[id] == t.pass_id for t in group.trajectories for id in t.reads)
    trunk = [t for t in group.trajectories if t.pass_id == 2 and t.rollout_id is None]
    assert [t.id for t in trunk] == ["1:q1:2.trunk:0", "1:q1:2.trunk:1"]
    assert trunk[1].reads == (trunk[0].id,)


def test_forks_of_a_team_that_delegates_take_the_delegates_over_too():
    async def work(team, question):
        main = await team.ask("main", question=question.text)
        return await team.ask("judge", said=main.output, reads=[main])

    many = SamplingParams(max_tokens=200)
    system = System(
        run=work,
        agents=(
            Agent(name="main", model="base", prompt="{question}", sampling=many, delegates=("sub",), max_turns=2),
            Agent(name="sub", model="base", prompt="sub {task}", sampling=many),
            Agent(name="judge", model="base", prompt="judge {said}", sampling=many),
        ),
    )

    def script(prompt, request):
        if "sub " in prompt and "judge" not in prompt:
            return f"found {request.key[-2]}"
        if "results:" in prompt:
            return "answer: " + prompt.split("results: ")[1].split("\n")[0]
        return "judged" if prompt.startswith("user: judge") else "sub: look\nsub: again"

    roster, _ = cast(system, script)
    made = Job(system=system, roster=roster, question=question(), seed=1, step=1, group_size=2, value=worth)
    group = run(tree()(made))
    trunk = [t for t in group.trajectories if t.pass_id == 1 and t.rollout_id is None]
    assert [t.agent for t in trunk] == ["sub", "sub", "main"]
    main = trunk[2]
    assert [t.caller for t in trunk] == [main.id, main.id, None]
    assert main.reads == (trunk[0].id, trunk[1].id)
    assert [call.trajectory_id for call in main.turns[0].calls] == [trunk[0].id, trunk[1].id]
    assert all(main.id in r[-1].reads for r in branches_of(group, 1))


@pytest.mark.parametrize(
    "strategy", [fork_on_first, round_robin(), independent, counterfactual, tree(), with_shapley(fork_on_first, None)]
)
def test_a_group_counts_the_tokens_that_were_sampled_for_it(strategy):
    for seed in range(10):
        work, engine = job(chain(3), seed, 3)
        lengths = []

        def script(prompt, request, lengths=lengths):
            said = random_words(prompt, request)
            lengths.append(len(said) + 1)
            return said

        engine.script = script
        assert run(strategy(work)).num_sampled == sum(lengths)


@pytest.mark.parametrize("strategy", [counterfactual, tree()])
def test_rollouts_that_fail_are_counted_and_the_others_stay(strategy):
    def script(prompt, request):
        if request.key[3] == "0.1" or (request.key[3].startswith("2.") and request.key[4] == 2):
            raise InfrastructureError("the engine", "it is down", "Start it")
        return random_words(prompt, request)

    roster, _ = cast(chain(3), script)
    made = Job(system=chain(3), roster=roster, question=question(), seed=3, step=1, group_size=3, value=worth)
    group = run(strategy(made))
    assert group.dropped["infrastructure"] > 0
    assert group.trajectories
    assert "0.1" not in group.by_rollout()


def test_a_masked_rollout_that_fails_is_counted_apart():
    def script(prompt, request):
        if prompt.startswith("user: a1") and prompt.rstrip().endswith("?"):  # nobody spoke before
            raise InfrastructureError("the engine", "it is down", "Start it")
        return random_words(prompt, request)

    roster, _ = cast(chain(2), script)
    made = Job(system=chain(2), roster=roster, question=question(), seed=3, step=1, group_size=2, value=worth)
    group = run(with_shapley(fork_on_first, None)(made))
    assert group.dropped == {"masked/infrastructure": 2}
    assert not any("shapley" in t.rewards for t in group.trajectories)


AGENTS = st.lists(st.sampled_from("abcde"), min_size=1, max_size=4, unique=True)


def game(agents, draw):
    coalitions = [frozenset(c) for n in range(len(agents) + 1) for c in itertools.combinations(agents, n)]
    return {c: draw.random() for c in coalitions}


@given(AGENTS, st.randoms(use_true_random=False))
def test_shapley_is_efficient_symmetric_and_linear(agents, draw):
    first, second = game(agents, draw), game(agents, draw)
    credit = shapley(agents, first)
    everyone = frozenset(agents)
    assert math.fsum(credit.values()) == pytest.approx(first[everyone] - first[frozenset()])
    both = shapley(agents, {c: 2 * first[c] + second[c] for c in first})
    other = shapley(agents, second)
    assert both == pytest.approx({a: 2 * credit[a] + other[a] for a in agents})
    null = {c: v for c, v in first.items() if agents[0] not in c}
    idle = shapley(agents, {c: null[c - {agents[0]}] for c in first})
    assert idle[agents[0]] == pytest.approx(0.0)


@given(AGENTS, st.randoms(use_true_random=False))
def test_all_orders_give_the_exact_shapley_value(agents, draw):
    values = game(agents, draw)
    orders = list(itertools.permutations(agents))
    assert shapley_sampled(orders, values) == pytest.approx(shapley(agents, values))


def test_shapley_by_hand():
    # a alone earns 1, b alone 2, both 6: a gets (1 + 4) / 2, b (2 + 5) / 2
    values = {frozenset(): 0.0, frozenset("a"): 1.0, frozenset("b"): 2.0, frozenset("ab"): 6.0}
    assert shapley("ab", values) == {"a": 2.5, "b": 3.5}
    assert shapley_sampled(["ab"], values) == {"a": 1.0, "b": 5.0}


@settings(max_examples=20)
@given(SEEDS, CHAINS)
def test_every_rollouts_shapley_rewards_add_up_to_what_its_answer_earned(seed, n):
    work, engine = job(chain(n), seed, 2)
    group = run(with_shapley(fork_on_first, None)(work))
    plain = run(fork_on_first(job(chain(n), seed, 2)[0]))
    assert [replace(t, rewards={}) for t in group.trajectories] == list(plain.trajectories)
    for members in group.by_rollout().values():
        assert math.fsum(t.rewards["shapley"] for t in members) == pytest.approx(f1(members[-1].output, GOLD))
    made = sum(len(c) for s in range(n) for c in itertools.combinations(range(n), s) for c in [c])
    assert len(engine.requests) == 2 * (n + made)


def test_shapley_is_a_reward_that_a_credit_may_weigh():
    work, _ = job(chain(2), 3, 2)
    group = propagate(score(run(with_shapley(fork_on_first, 2)(work))), {})
    rule = CreditRule(weights={"shared": 0.5, "shapley": 0.5})
    for t in group.trajectories:
        expected = 0.5 * t.rewards["shared"] + 0.5 * t.rewards["shapley"]
        assert credits(group, {t.agent: rule})[t.id] == pytest.approx(expected)


def test_a_coalition_that_cannot_be_judged_takes_the_rollouts_reward():
    async def unsure(group):
        values = await worth(group)
        silent = any(not t.turns and t.agent == "a0" for t in group.trajectories)
        return {} if silent and "0.1" in values else values

    work, _ = job(chain(2), 3, 2)
    group = run(with_shapley(fork_on_first, None)(replace(work, value=unsure)))
    assert {t.rollout_id for t in group.trajectories if "shapley" in t.rewards} == {"0.0"}
