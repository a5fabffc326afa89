"""What a configuration names is found, fitted and checked before anything heavy is loaded."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest

from cotrain.assemble import make_plan
from cotrain.config import load_config
from cotrain.errors import ConfigError, InfrastructureError
from cotrain.roster import System
from cotrain.systems.search_pipeline import search_pipeline
from cotrain.trained import check
from cotrain.types import Agent, Overlong, Trajectory


@pytest.fixture
def systems(monkeypatch):
    """A module of the user's own, `mine`, to put functions in."""
    module = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


def plan_of(*settings):
    return make_plan(load_config(None, settings))


def test_every_override_of_an_agent_takes_effect_and_the_rest_stays():
    plan = plan_of(
        "agents.rewriter.model=other",
        "agents.rewriter.prompt=Ask: {question}",
        "agents.rewriter.system=Hm.",
        "agents.rewriter.temperature=0.5",
        "agents.rewriter.top_p=0.9",
        "agents.rewriter.max_tokens=7",
        "agents.rewriter.stop=['.']",
        "agents.rewriter.trainable=false",
        "agents.answerer.system=''",
        "models.base.path=tiny-llama",
        "models.other.path=tiny-qwen3",
    )
    rewriter, answerer = plan.agents["rewriter"], plan.agents["answerer"]
    assert (rewriter.model, rewriter.prompt, rewriter.system, rewriter.trainable) == (
        "other", "Ask: {question}", "Hm.", False,
    )  # fmt: skip
    sampling = rewriter.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.stop) == (0.5, 0.9, 7, (".",))
    own = {agent.name: agent for agent in search_pipeline().agents}
    assert answerer == replace(own["answerer"], system="")
    assert plan.agents["reranker"] == own["reranker"]


def test_an_agent_learns_only_if_its_model_does():
    plan = plan_of("models.base.path=a", "models.still.path=b", "models.still.trainable=false",
                   "agents.reranker.model=still")  # fmt: skip
    assert {name: agent.trainable for name, agent in plan.agents.items()} == {
        "rewriter": True, "reranker": False, "answerer": True,
    }  # fmt: skip


def test_rewards_reach_every_rule():
    plan = plan_of("rewards.penalties.rewriter=-0.1", "rewards.aggregate=min", "rewards.propagate=full")
    assert {name: (r.penalty, r.aggregate, r.propagate) for name, r in plan.rules.items()} == {
        "rewriter": (-0.1, "min", "full"), "reranker": (-1.0, "min", "full"), "answerer": (-1.0, "min", "full"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["system.name=search_pipelin"], "unknown name 'search_pipelin'. Did you mean 'search_pipeline'"),
        (["system.name=no_such_module:f"], "cannot import 'no_such_module'"),
        (["system.settings.num_pick=3"], "unknown name 'num_pick'. Did you mean 'num_picks'"),
        (["agents.writer.model=base"], "unknown name 'writer'. Did you mean 'rewriter'"),
        (["agents.rewriter.model=bass"], "unknown name 'bass'. Did you mean 'base'"),
        (["models.base.path=a", "models.spare.path=b"], "models.spare: no agent is played by it"),
        (["rewards.metric=exact_macth"], "unknown name 'exact_macth'. Did you mean 'exact_match'"),
        (["rewards.penalties.writer=-1"], "rewards.penalties: unknown name 'writer'"),
        (["sampling.strategy=round_robin", "sampling.fork_probabilities=[1.0]"], "1 values for 3 agents"),
    ],
)
def test_a_name_that_does_not_fit_is_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        plan_of(*settings)
    assert message in str(caught.value)


def test_a_system_that_contradicts_itself_is_refused(systems):
    good = search_pipeline()
    cases = {
        "twins": (replace(good, agents=(*good.agents, good.agents[0])), "two agents of one name"),
        "strange": (replace(good, penalties={"rewritter": -1.0}), "unknown name 'rewritter'. Did you mean 'rewriter'"),
        "gift": (replace(good, penalties={"rewriter": 0.5}), "rewriter has 0.5"),
        "nan": (replace(good, penalties={"rewriter": float("nan")}), "rewriter has nan"),
        "nobody": (replace(good, agents=(), penalties={}), "has no agents"),
        "none": (None, "returned a NoneType"),
    }
    for name, (system, message) in cases.items():
        setattr(systems, name, lambda system=system: system)
        with pytest.raises(ConfigError) as caught:
            plan_of(f"system.name=mine:{name}")
        assert message in str(caught.value)


def test_a_system_s_function_gets_its_settings_and_may_take_any(systems):
    def needs(*, words):
        return search_pipeline(answer_words=words)

    def takes_any(**settings):
        return search_pipeline(**settings)

    systems.needs, systems.takes_any = needs, takes_any
    with pytest.raises(ConfigError, match=r"mine:needs cannot be called: missing a required argument: 'words'"):
        plan_of("system.name=mine:needs")
    plan_of("system.name=mine:needs", "system.settings.words=3")
    plan_of("system.name=mine:takes_any", "system.settings.num_picks=2")


def test_a_check_of_which_no_rollout_could_be_finished_fails(systems):
    def broken():
        async def run(team, question):
            raise InfrastructureError("tool search", "it is down", "Start it")

        return replace(search_pipeline(), run=run, agents=(Agent(name="a", model="base", prompt="x"),), penalties={})

    systems.broken = broken
    with pytest.raises(InfrastructureError, match="not one rollout could be finished"):
        check(load_config(None, ["models.base.path=tiny-llama", "system.name=mine:broken"]))


def test_a_file_of_the_user_s_is_read_once_and_may_hold_dataclasses(tmp_path):
    file = tmp_path / "random.py"  # as a module of the standard library, which it must not hide
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass, field\n"
        "from cotrain.systems.search_pipeline import search_pipeline\n"
        "seen = []\n"
        "@dataclass\n"
        "class Settings:\n"
        "    words: int = 3\n"
        "def team():\n"
        "    seen.append(1)\n"
        "    return search_pipeline(answer_words=Settings().words)\n"
        "def metric(answer, golds):\n"
        "    return float(len(seen))\n"
    )
    plan = plan_of(f"system.name={file}:team", f"rewards.metric={file}:metric")
    assert plan.metric("", ()) == 1.0
    assert "randint" in dir(__import__("random"))
    with pytest.raises(ConfigError, match="no such file"):
        plan_of(f"system.name={tmp_path}/nothing.py:team")


def test_a_system_brings_its_own_tools_beside_the_search(systems):
    def clock() -> str:
        return "noon"

    async def run(team, question):
        (first, *_) = await team.use("search", ("Truburg",), 1)
        return await team.ask("teller", time=await team.use("clock"), page=first.title)

    teller = Agent(name="teller", model="base", prompt="{time} {page}")
    systems.build = lambda: System(run=run, agents=(teller,), tools={"clock": clock})
    record, cast = check(load_config(None, ["system.name=mine:build", "models.base.path=tiny-llama"]))
    prompt = cast.models["base"].tokenizer.decode(record.group.trajectories[0].turns[0].prompt_ids)
    assert "noon Truburg" in prompt


def half(trajectories, credits, weights):
    return {t.id: credits[t.id] / 2 for t in trajectories}


def test_every_agent_has_the_estimator_that_is_named_for_it(systems):
    systems.half = half
    plan = plan_of("advantage.estimator=no_std", "advantage.agents.rewriter=mine:half")
    assert plan.estimators["rewriter"] is half
    peers = [trajectory("a", 1.0), trajectory("b", 3.0)]
    credits, ones = {"a": 1.0, "b": 3.0}, {"a": 1.0, "b": 1.0}
    assert plan.estimators["answerer"](peers, credits, ones).values == {"a": -1.0, "b": 1.0}


def trajectory(id, reward):
    return Trajectory(
        id=id, question_id="q", rollout_id=f"0.{id}", pass_id=0, call=0, agent="answerer", model="base",
        rewards={"shared": reward},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["advantage.estimator=groups"], "advantage.estimator: unknown name 'groups'"),
        (["advantage.agents.rewriter=no"], "advantage.agents.rewriter: unknown name 'no'"),
        (["advantage.agents.writer=no_std"], "advantage.agents: unknown name 'writer'. Did you mean 'rewriter'"),
        (["advantage.estimator=gae"], "'gae' for rewriter, whose model base has no critic. Add [models.base.critic]"),
        (["models.base.critic.lam=0.9"], "'group_relative' for rewriter, whose model base has a critic"),
        (["sampling.strategy=round_robin", "sampling.shapley=exact"], "shapley needs strategy 'fork_on_first'"),
        (["sampling.shapley=exact"], "sampling.shapley: no agent's credit weighs that reward"),
        (["judges.shapley.rule=coverage"], "judges.shapley: that reward is made by masking agents out"),
        (["sampling.continue_from=random"], "continue_from belongs to strategy 'tree'"),
        (["rewards.credit.rewriter.weights={shapley=1.0}"], "rewards.credit.rewriter.weights: unknown name 'shapley'"),
        (["rewards.credit.rewriter.overlong={limit=4,buffer=5}"], "buffer 5 exceeds limit 4"),
        (["loss.reduction=0"], "loss.reduction"),
        (["loss.guard=none", "loss.guard_cap=3.0"], "guard_cap bounds a guard, and there is none"),
        (["advantage.decay=0.5"], "decay belongs to estimator 'role_baseline'"),
        (["advantage.estimator=no_std", "advantage.std=sample"], "std and eps belong to group_relative, agent_wise"),
        (["advantage.estimator=no_std", "advantage.eps=0.1"], "std and eps belong to group_relative, agent_wise"),
        (["advantage.agents.reranker=role_baseline", "sampling.resample=1"], "gives reranker an advantage in every"),
        (
            ["models.base.critic={}", "advantage.estimator=gae", "sampling.resample=1"],
            "sampling.resample: 'gae' gives rewriter an advantage in every group",
        ),
    ],
)
def test_what_does_not_fit_an_estimator_or_a_strategy_is_refused(settings, words):
    with pytest.raises(ConfigError) as error:
        plan_of(*settings)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        ["advantage.agents.reranker=role_baseline", "advantage.decay=0.5"],
        ["advantage.estimator=no_std", "advantage.agents.reranker=agent_wise", "advantage.std=sample"],
        ["loss.guard_cap=3.0"],
        ["advantage.estimator=role_baseline", "agents.rewriter.trainable=false", "loss.guard=mask"],
    ],
)
def test_a_setting_that_something_chosen_reads_is_taken(settings):
    plan_of(*settings)


def test_shapley_credit_an_overlong_penalty_and_a_critic_are_configuration():
    plan = plan_of(
        "sampling.shapley=2",
        "rewards.credit.rewriter.weights={shapley=1.0}",
        "rewards.credit.rewriter.overlong={limit=40,buffer=10}",
        "models.base.critic.backbone=shared",
        "advantage.estimator=gae",
        "loss.reduction=48",
        "loss.objective=cispo",
    )
    assert plan.rules["rewriter"].weights == {"shapley": 1.0}
    assert plan.rules["rewriter"].overlong == Overlong(limit=40, buffer=10)
    assert plan.config.models["base"].critic.backbone == "shared"
