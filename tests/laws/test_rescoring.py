"""Scored again, a run's groups are what a run under these settings would have stored of the same rollouts."""

import random
from dataclasses import replace

import pytest

from cotrain.assemble import make_plan
from cotrain.config import dump_config, load_config
from cotrain.loops import judge, rollouts
from cotrain.recompute.rescore import differences, recompute, rescored
from cotrain.recompute.settings import make_plans
from cotrain.runs import read_groups, write_groups
from support import cast, chain, question, run
from support_mgrpo import Helper, Rollout, group_of, plan_of

STEPS = [1, 2, 3]


def steps_of_team(draw):
    """Groups of a main agent with helpers, before anybody judged them: some faulty, unread, or not judgeable."""

    def helper():
        said = draw.choice(["0", "0.25", "1", "failed"])
        faulty, read = draw.random() < 0.2, draw.random() < 0.9
        return Helper(said=said, agent=draw.choice(["scout", "coder"]), faulty=faulty, read=read)

    def rollout():
        said = draw.choice(["right", "right", "wrong", "unjudged"])
        helpers = tuple(helper() for _ in range(draw.randint(0, 4)))
        return Rollout(said=said, helpers=helpers, faulty=draw.random() < 0.3)

    return {s: [group_of([rollout() for _ in range(5)], id=f"q{s}.{i}", step=s) for i in range(3)] for s in STEPS}


def steps_of_chain(plan):
    """Groups of three agents in a row, as the plan's strategy samples them."""
    roster, _ = cast(plan.system)
    roster = replace(roster, agents=plan.agents)
    return {step: run(rollouts(plan, roster, [question(f"q{i}") for i in range(3)], step)) for step in STEPS}


def pipeline():
    return chain(3, penalties={"a0": -0.25, "a2": -1.0}, repeat_first=True)


def plan_of_chain(*settings):
    return make_plan(load_config(None, [f"system.name={__file__}:pipeline", "models.base.path=tiny-llama", *settings]))


def stored(folder, plan, steps):
    """The run folder; the groups as the plan scored them, by step."""
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(plan.config))
    records = {}

    def seated(group):
        made = (replace(t, trainable=t.trainable and plan.agents[t.agent].trainable) for t in group.trajectories)
        return replace(group, trajectories=tuple(made))

    for step, groups in steps.items():
        records[step], _ = run(judge(plan, list(map(seated, groups))))
        write_groups(folder, step, records[step])
    return records


def assert_as_if_run_so(tmp_path, plan_of_run, steps, before, after):
    """A run under `before`, scored again under `after`, against a run under both on the same rollouts."""
    stored(tmp_path / "run", plan_of_run(*before), steps)
    expected = stored(tmp_path / "other", plan_of_run(*before, *after), steps)
    old, new = make_plans(tmp_path / "run", after)
    moved = 0
    for step in STEPS:
        for kept, other in zip(read_groups(tmp_path / "run", step), expected[step], strict=True):
            assert rescored(old, kept.group).record == kept
            made = rescored(new, kept.group).record
            assert (made.credits, made.advantages, made.weights) == (other.credits, other.advantages, other.weights)
            assert not differences(other, made)
            moved += len(differences(kept, made))
    assert moved or not after
    outcome = recompute(tmp_path / "run", *make_plans(tmp_path / "run", after), STEPS)
    assert (outcome.num_differing, outcome.num_groups) == (0, 9)
    return outcome


TEAM = [
    ((), ()),
    ((), ("align.method=none",)),
    (("align.method=duplicate", "align.size=2"), ("align.method=duplicate", "align.size=3", "advantage.std=sample")),
    (("align.method=none",), ("align.method=weight", "align.factors.scout=3.0")),
    ((), ("rewards.credit.scout.weights={shared=1.0, expert=1.0}", "rewards.credit.coder.missing=renormalise")),
    (("rewards.credit.main.gate=false",), ("rewards.credit.main.gate=true",)),
    ((), ("rewards.credit.scout.gate=false", "rewards.aggregate=max", "advantage.estimator=no_std")),
    ((), ("advantage.estimator=role_baseline", "advantage.decay=0.5")),
    (("advantage.agents.coder=role_baseline",), ("advantage.agents.coder=leave_one_out",)),
    ((), ("agents.scout.trainable=false",)),
]


@pytest.mark.parametrize(("before", "after"), TEAM)
def test_a_team_with_judges_is_scored_as_if_it_had_run_so(tmp_path, before, after):
    fresh = plan_of.__wrapped__  # a plan that is kept would keep its averages too
    assert_as_if_run_so(tmp_path, fresh, steps_of_team(random.Random(repr(after))), before, after)


CHAIN = [
    ((), ()),
    ((), ("rewards.penalties.a0=-0.5", "rewards.propagate=full")),
    (("sampling.strategy=round_robin",), ("rewards.aggregate=min", "rewards.metric=exact_match")),
    (("sampling.strategy=independent",), ("advantage.estimator=agent_wise", "rewards.threshold=0.5")),
    (("rewards.credit.a2.gate=true",), ("rewards.credit.a2.gate=false", "rewards.metric=accuracy")),
    (("sampling.strategy=independent",), ("agents.a1.trainable=false", "advantage.estimator=agent_turn")),
    (("rewards.threshold=1.0", "advantage.estimator=role_baseline"), ("rewards.threshold=0.25",)),
    ((), ("rewards.credit.a1.overlong={limit=12, buffer=8}", "advantage.eps=0.5")),
]


@pytest.mark.parametrize(("before", "after"), CHAIN)
def test_a_pipeline_with_a_metric_is_scored_as_if_it_had_run_so(tmp_path, before, after):
    assert_as_if_run_so(tmp_path, plan_of_chain, steps_of_chain(plan_of_chain(*before)), before, after)


def test_a_run_with_a_critic_keeps_its_credits_and_may_be_compared_with_one_without(tmp_path):
    gae = ("advantage.estimator=gae", "models.base.critic.gamma=1.0")
    steps = steps_of_chain(plan_of_chain())
    stored(tmp_path / "run", plan_of_chain(*gae), steps)
    expected = stored(tmp_path / "other", plan_of_chain(), steps)
    old, new = make_plans(tmp_path / "run", ["advantage.estimator=group_relative"])
    outcome = recompute(tmp_path / "run", old, new, STEPS)
    there = recompute(tmp_path / "other", *make_plans(tmp_path / "other", ["advantage.estimator=gae"]), STEPS)
    for name in old.agents:
        effect, other = outcome.effects[name], there.effects[name]
        assert effect.estimators == ("gae", "group_relative")
        unknown = ("advantage_size_mean", "advantage_size_std", "gradient_share")
        assert all(effect.stored[key] is None is effect.difference[key] for key in unknown)
        assert all(effect.recomputed[key] == other.stored[key] is not None for key in unknown)
        assert effect.difference["credit_mean"] == other.difference["credit_mean"] == 0
        assert (effect.num_both, effect.correlation, effect.sign_changed) == (0, None, None)
        assert effect.recomputed["num_advantages"] == sum(
            t.agent == name and t.id in r.advantages for s in STEPS for r in expected[s] for t in r.group.trajectories
        )
    assert outcome.num_differing == there.num_differing == 0
