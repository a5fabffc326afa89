"""The deep-research team and its single-agent baseline: what their rules demonstrate, and which configurations fit."""

import asyncio
import sys
from dataclasses import replace
from types import ModuleType

import pytest

from cotrain.assemble import make_plan
from cotrain.config import load_config
from cotrain.data.corpus import Corpus
from cotrain.data.world import generate
from cotrain.engines.scripted import ScriptedEngine
from cotrain.errors import ConfigError
from cotrain.loops import demonstrations, judge
from cotrain.roster import Roster
from cotrain.sampling import Job, fork_on_first
from cotrain.sections import CorpusConfig, WorldConfig
from cotrain.systems.deep_research import deep_research
from cotrain.systems.single_agent import single_agent
from cotrain.tools import calculator
from cotrain.types import Agent, Completion, Question, ToolCall, Turn
from support import CharRenderer, CharTokenizer

MODELS = ("models.main.path=tiny-llama", "models.sub.path=tiny-qwen3")
SHARED = ("rewards.credit.researcher.weights={shared=1.0}",)
EXPERT = ("judges.expert.rule=coverage", "judges.expert.agents=['researcher']")


def plan_of(*settings, name="deep_research", judges=EXPERT, models=MODELS):
    return make_plan(load_config(None, [f"system.name={name}", "rewards.metric=exact_match", *models, *judges,
                                        *settings]))  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Questions of one to three hops, and their pages."""
    made = generate(WorldConfig(entities=120, hops=(1, 2, 3), questions=60))
    settings = CorpusConfig(cache=str(tmp_path_factory.mktemp("index")))
    return made.questions, Corpus.open(made.passages, settings)


def roster_of(plan, corpus):
    """The plan's cast on engines that must not be asked."""

    def asked(prompt, request):
        raise AssertionError(f"an engine was asked: {request.key}")

    agents = plan.agents
    models = {a.model for a in agents.values()}
    tools = {name: make(corpus) for name, make in plan.system.corpus_tools.items()}
    return Roster(
        agents=agents,
        engines={name: ScriptedEngine(asked, CharTokenizer(), context=100_000) for name in models},
        renderers=dict.fromkeys(models, CharRenderer()),
        tools={**tools, **plan.system.tools},
    )


def demonstrated(plan, world):
    """The demonstrations of all questions, judged."""
    questions, corpus = world

    async def work():
        roster = roster_of(plan, corpus)
        jobs = [
            fork_on_first(
                Job(system=plan.system, roster=roster, question=q, group_size=1, script=plan.system.demonstrate)
            )
            for q in questions
        ]
        return await judge(plan, await asyncio.gather(*jobs))

    return asyncio.run(work())


def test_what_the_rules_demonstrate_is_right_in_every_reward_and_no_engine_is_asked(world):
    records, dropped = demonstrated(plan_of(), world)
    trajectories = [t for r in records for t in r.group.trajectories]
    assert {(t.agent, t.stop, t.faults, t.trainable) for t in trajectories} == {
        ("main", "answer", (), True), ("researcher", "answer", (), True),
    }  # fmt: skip
    assert {t.rewards["shared"] for t in trajectories} == {1.0}
    assert {t.rewards["expert"] for t in trajectories if t.agent == "researcher"} == {1.0}
    assert [value for r in records for value in r.credits.values()] == pytest.approx([1.0] * len(trajectories))
    assert set(dropped) == {"singleton", "zero_variance"}
    for record in records:
        hops = len(record.group.question.supporting_titles)
        assert [t.agent for t in record.group.trajectories] == ["researcher"] * hops + ["main"]
    assert {len(r.group.trajectories) for r in records} == {2, 3, 4}


def test_the_single_agent_s_demonstrations_are_right_too(world):
    plan = plan_of("agents.solver.max_tokens=100", name="single_agent", judges=(), models=MODELS[:1])
    records, _ = demonstrated(plan, world)
    for record in records:
        (solver,) = record.group.trajectories
        assert record.credits == {solver.id: pytest.approx(1.0)}
        assert len(solver.turns) == 2 * len(record.group.question.supporting_titles) + 1


def test_demonstrations_become_samples_of_the_model_that_plays_the_agent(world):
    plan, (questions, corpus) = plan_of(), world
    samples, dropped = asyncio.run(demonstrations(plan, roster_of(plan, corpus), questions[:9]))
    hops = sum(len(q.supporting_titles) for q in questions[:9])
    assert (len(samples["main"]), len(samples["sub"])) == (9, hops)
    assert {s.agent for s in samples["main"]} == {"main"}
    assert {s.advantages[-1] for s in samples["sub"]} == {1.0}
    assert dropped == {}
    said = ["".join(map(chr, (i for i, m in zip(s.token_ids, s.mask, strict=True) if m))) for s in samples["sub"]]
    for text in said:  # what the tools said is in between, and is no part of the lesson
        search, visit, answer, rest = text.split("\0")
        assert (search[:8], visit[:7], answer[:8], rest) == ("search: ", "visit: ", "answer: ", "")


def test_what_no_page_shows_is_not_claimed_by_the_researcher_nor_by_main(world):
    records, _ = demonstrated(plan_of("system.settings.page_words=15"), world)
    for record in records:
        *researchers, main = record.group.trajectories
        assert main.output == researchers[-1].output
        assert {t.rewards["expert"] for t in researchers if t.output == "unknown"} <= {0.5}
    mains = [r.group.trajectories[-1] for r in records]
    assert {t.output == "unknown": t.rewards["shared"] for t in mains} == {True: 0.0, False: 1.0}


def test_main_demonstrates_no_finding_as_an_unknown_answer():
    call = ToolCall(tool="researcher", argument="T, r", result="no finding", is_error=True)
    said = Completion(token_ids=(1,), logprobs=(0.0,), version=0, stop="stop", text="")
    turn = Turn(prompt_ids=(1,), completion=said, calls=(call,))
    q = Question(id="q", text="?", answers=("x",), meta={"relations": ["r"], "supporting_titles": ["T"]})
    assert deep_research().demonstrate("main", q, {"turns": (turn,)}) == "answer: unknown"


@pytest.mark.parametrize("system", [deep_research(), single_agent()])
def test_a_question_whose_hops_are_not_known_is_left_to_the_engine(system):
    fields = {"turns": (), "task": "x"}
    for meta in ({}, {"relations": ["a"], "supporting_titles": []}, {"supporting_titles": ["Ginon"]}):
        q = Question(id="q", text="?", answers=("x",), meta=meta)
        assert {system.demonstrate(a.name, q, fields) for a in system.agents} == {None}
    known = Question(id="q", text="?", answers=("x",), meta={"relations": ["r"], "supporting_titles": ["T"]})
    assert system.demonstrate(system.agents[0].name, known, fields) is not None


def test_a_researcher_s_task_that_no_hop_has_is_left_to_the_engine():
    q = Question(id="q", text="?", answers=("x",), meta={"relations": ["r"], "supporting_titles": ["T"]})
    demonstrate = deep_research().demonstrate
    assert demonstrate("researcher", q, {"turns": (), "task": "T, r"}) == "search: T"
    assert demonstrate("researcher", q, {"turns": (), "task": "T"}) is None
    assert demonstrate("stranger", q, {"turns": (), "task": "T, r"}) is None


def test_the_settings_of_the_systems_reach_their_agents_and_tools(world):
    _, corpus = world
    system = deep_research(
        max_delegations=2,
        main_turns=3,
        researcher_turns=5,
        num_hits=1,
        snippet_words=2,
        page_words=3,
        reason="calculator",
    )
    main, researcher = system.agents
    assert (main.max_calls, main.max_turns, researcher.max_turns) == (2, 3, 5)
    assert (main.tools, main.delegates, system.tools) == (("reason",), ("researcher",), {"reason": calculator})
    title = corpus.passages[0].title
    line = system.corpus_tools["search"](corpus)(title)
    assert line.count("\n") == 0
    assert line.split(": ", 1)[0] == title
    assert len(line.split(": ", 1)[1].split()) == 2
    assert len(system.corpus_tools["visit"](corpus)(title).split()) == 3
    assert deep_research().tools == {}
    assert single_agent(max_turns=7, reason="calculator").agents[0].tools == ("search", "visit", "reason")
    assert single_agent(max_turns=7).agents[0].max_turns == 7


def test_an_answer_of_too_many_words_is_a_fault_of_main_and_gated(world):
    questions, corpus = world
    plan = plan_of("system.settings.answer_words=3")
    roster = roster_of(plan, corpus)

    def script(agent, q, fields):
        return "answer: one two three four" if agent == "main" else None

    async def work():
        job = Job(system=plan.system, roster=roster, question=questions[0], group_size=1, script=script)
        return await judge(plan, [await fork_on_first(job)])

    (record,), _ = asyncio.run(work())
    (main,) = record.group.trajectories
    assert (main.faults, main.stop, main.rewards["shared"]) == (("long_answer",), "answer", 0.0)
    assert record.credits == {main.id: 0.0}


def test_the_plan_has_the_credits_of_the_paper():
    rules = plan_of().rules
    assert (rules["main"].weights, rules["main"].gate) == ({"format": 0.1, "shared": 0.9}, True)
    assert (rules["researcher"].weights, rules["researcher"].gate) == (
        {"format": 0.1, "shared": 0.4, "expert": 0.5}, True,
    )  # fmt: skip
    changed = plan_of("rewards.credit.researcher.weights={shared=1.0}", "rewards.credit.main.gate=false").rules
    assert (changed["researcher"].weights, changed["researcher"].gate) == ({"shared": 1.0}, True)
    assert (changed["main"].weights, changed["main"].gate) == ({"format": 0.1, "shared": 0.9}, False)


def test_a_threshold_makes_correctness_of_a_graded_metric():
    metric = plan_of("rewards.metric=f1", "rewards.threshold=0.5").metric
    gold = ("red old river",)  # F1 of "red": 2 * 1 / 4; of "red x y": 2 * 1 / 6
    assert [metric(answer, gold) for answer in ("red old river", "red", "red x y")] == [1.0, 1.0, 0.0]
    assert plan_of("rewards.metric=f1").metric("red", gold) == 0.5


@pytest.mark.parametrize(
    ("settings", "judges", "message"),
    [
        (SHARED, ("judges.expert.rule=coverage", "judges.expert.agents=['reseacher']"),
         "judges.expert.agents: unknown name 'reseacher'. Did you mean 'researcher'"),
        (SHARED, ("judges.expert.rule=coverage",), "judges.expert: it judges nobody. Set judges.expert.agents"),
        ((), ("judges.expert.rule=covrage", "judges.expert.agents=['researcher']"),
         "judges.expert.rule: unknown name 'covrage'. Did you mean 'coverage'"),
        ((), ("judges.expert.rule=coverage", "judges.expert.url=http://a/v1", "judges.expert.agents=['researcher']"),
         "set exactly one of rule and url"),
        ((), ("judges.expert.url=ftp://a", "judges.expert.agents=['researcher']"), "endpoint base_url"),
        (SHARED, ("judges.format.rule=coverage", "judges.format.agents=['main']"),
         "judges.format: the format reward is made from faults"),
        ((), ("judges.expert.rule=coverage", "judges.expert.agents=['researcher']", "judges.expert.budget=5",
              "judges.expert.model=m"), "model, budget: a rule asks no endpoint"),
        (SHARED, (*EXPERT, "judges.shared.rule=coverage", "judges.shared.agents=['main']"),
         "judges.shared.agents: it judges the final answers, whoever gives them"),
        ((), (), "rewards.credit.researcher.weights: unknown name 'expert'"),
        (("rewards.credit.main.weights={shraed=1.0}",), EXPERT,
         "rewards.credit.main.weights: unknown name 'shraed'. Did you mean 'shared'"),
        (("rewards.credit.main.weights={expert=1.0}",), EXPERT, "rewards.credit.main.weights: unknown name 'expert'"),
        (("rewards.credit.man.gate=true",), EXPERT, "rewards.credit: unknown name 'man'. Did you mean 'main'"),
        (("rewards.credit.main.weights={shared=0.0}",), EXPERT, "the weights sum to 0"),
        (("align.size=8",), EXPERT, "size belongs to method 'duplicate'"),
        (("align.method=duplicate",), EXPERT, "size belongs to method 'duplicate', which needs one"),
        (("align.factors={mian=0.5}",), EXPERT, "align.factors: unknown name 'mian'. Did you mean 'main'"),
        (("rewards.threshold=0",), EXPERT, "rewards.threshold"),
        (("agents.researcher.max_turns=1",), EXPERT,
         "agent researcher: may call search, visit in max_turns = 1. Allow a turn for the call and one for the answer"),
        (("agents.main.max_turns=1",), EXPERT, "agent main: may call researcher in max_turns = 1"),
        (("agents.main.delegates=['x']",), EXPERT, "agents.main.delegates"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(settings, judges, message):
    with pytest.raises(ConfigError) as caught:
        plan_of(*settings, judges=judges)
    assert message in str(caught.value)


@pytest.fixture
def systems(monkeypatch):
    module = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


def caller(name, **more):
    return Agent(name=name, model="base", prompt="{task}", **{"max_turns": 2, **more})


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        ((caller("a", tools=("look",)),),
         "agent a's tools: unknown name 'look'. Known (the system's tools): reason, visit, search"),
        ((caller("a", tools=("resaon",)),), "agent a's tools: unknown name 'resaon'. Did you mean 'reason'"),
        ((caller("a", delegates=("bee",)), caller("be")),
         "agent a's delegates: unknown name 'bee'. Did you mean 'be'"),
        ((caller("a", delegates=("reason",), tools=("reason",)), caller("reason")),
         "agent a: may call reason, reason. Give each its own name, none of them 'answer'"),
        ((caller("a", tools=("reason", "reason")),), "agent a: may call reason, reason"),
        ((caller("a", delegates=("answer",)), caller("answer")),
         "agent a: may call answer. Give each its own name, none of them 'answer'"),
        ((caller("a", delegates=("a",)),), "the system's agents: delegation goes in a circle: a -> a"),
        ((caller("a", delegates=("b",)), caller("b", delegates=("c",)), caller("c", delegates=("a",))),
         "delegation goes in a circle: "),
        ((caller("a", tools=("reason",), max_turns=1),), "agent a: may call reason in max_turns = 1"),
    ],
)  # fmt: skip
def test_agents_whose_calls_do_not_fit_are_refused(systems, agents, message):
    own = deep_research(reason="calculator")
    system = replace(own, agents=agents, rules={}, corpus_tools={"visit": own.corpus_tools["visit"]})
    systems.build = lambda: system
    with pytest.raises(ConfigError) as caught:
        make_plan(load_config(None, ["system.name=mine:build"]))
    assert message in str(caught.value)


def test_two_callers_may_share_a_delegate(systems):
    agents = (caller("a", delegates=("b", "c")), caller("b", delegates=("c",)), caller("c", max_turns=1))
    systems.build = lambda: replace(deep_research(), agents=agents, rules={})
    assert set(make_plan(load_config(None, ["system.name=mine:build"])).agents) == {"a", "b", "c"}


def test_a_rule_for_an_agent_that_does_not_exist_is_refused(systems):
    systems.build = lambda: replace(deep_research(), agents=(caller("mian"),))
    with pytest.raises(ConfigError, match=r"the system's rules: unknown name 'main'. Did you mean 'mian'"):
        make_plan(load_config(None, ["system.name=mine:build"]))


def test_reason_is_a_calculator_another_model_or_an_endpoint():
    main = deep_research(reason="calculator").agents[0]
    assert (main.tools, main.delegates) == (("reason",), ("researcher",))
    thinking = deep_research(reason="model")
    assert thinking.agents[0].delegates == ("researcher", "reason")
    assert [(a.name, a.model) for a in thinking.agents[2:]] == [("reason", "reason")]
    assert asyncio.iscoroutinefunction(deep_research(reason="http://localhost:1/v1", reason_model="m").tools["reason"])
    with pytest.raises(ConfigError, match="reason = 'http://localhost:1/v1' with reason_model = ''"):
        deep_research(reason="http://localhost:1/v1")
    with pytest.raises(ConfigError, match="reason = 'calculater'"):
        single_agent(reason="calculater")
    config = load_config(None, ["system.name=deep_research", "system.settings={reason='model'}", *MODELS, *EXPERT,
                                "models.reason={path='tiny-llama', trainable=false}"])  # fmt: skip
    assert [a.trainable for a in make_plan(config).agents.values()] == [True, True, False]
