"""Groups that teach nothing are sampled again, a bounded number of times; evaluations do without training's rewards."""

import asyncio
from dataclasses import replace

import pytest

from cotrain.assemble import make_plan
from cotrain.config import load_config
from cotrain.loops import judge, prediction, resampled, rollouts
from cotrain.types import Group
from support import cast, chain, question


def team():
    return chain(2)


def settings(*more):
    return make_plan(load_config(None, ["system.name=test_resampling_team:team", "sampling.group_size=3", *more]))


@pytest.fixture
def plan(monkeypatch):
    import sys
    from types import ModuleType

    module = ModuleType("test_resampling_team")
    module.team = team
    monkeypatch.setitem(sys.modules, "test_resampling_team", module)
    return settings


def work(plan, script):
    roster, engine = cast(plan.system, script)

    async def step():
        judged = await judge(plan, await rollouts(plan, roster, [question("q1"), question("q2")], 1))
        return judged, await resampled(plan, roster, 1, judged)

    return *asyncio.run(step()), engine


def test_a_group_without_an_advantage_is_sampled_again_until_it_has_one(plan):
    seeds = set()

    def script(prompt, request):
        seeds.add(request.key[0])
        differs = request.key[2] == "q1" or request.key[0] > 2_000_000_000
        return "red old river" if differs and request.key[3] == "0.0" else "blue"

    _, (records, dropped), engine = work(plan("sampling.resample=5"), script)
    assert len(seeds) == 3  # the first attempt and two more
    assert dropped["resampled"] == 2
    assert all(record.advantages for record in records)
    assert [record.group.question.id for record in records] == ["q1", "q2"]
    assert records[0].group.unused == 0
    assert sum(record.group.num_sampled for record in records) == sum(
        len("red old river" if r.key[3] == "0.0" and (r.key[2] == "q1" or r.key[0] > 2_000_000_000) else "blue") + 1
        for r in engine.requests
    )


def test_it_ends_after_the_given_number_of_attempts(plan):
    _, (records, dropped), engine = work(plan("sampling.resample=2"), lambda prompt, request: "blue")
    assert dropped["resampled"] == 4
    assert not any(record.advantages for record in records)
    assert len(engine.requests) == 3 * 2 * 3 * 2


def test_without_resampling_nothing_changes(plan):
    judged, again, _ = work(plan(), lambda prompt, request: "blue")
    assert again[0] == judged[0]


def test_an_evaluation_needs_no_shapley_reward(plan):
    chosen = plan("sampling.shapley=exact", "rewards.credit.a1.weights={shapley=1.0}")
    roster, _ = cast(chosen.system, lambda prompt, request: "red old river")
    (group,) = asyncio.run(rollouts(plan(), roster, [question()], 1))
    rollout = [replace(t, rewards={"shared": 1.0}) for t in group.by_rollout()["0.0"]]
    found = prediction(chosen, Group(question=group.question, step=0, strategy="greedy", trajectories=tuple(rollout)))
    assert (found.reward, found.em) == (1.0, 1.0)
