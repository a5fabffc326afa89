"""The fault table of a deep-research run, a row a test: what is scored, dropped and counted, and what the user reads.

Without faults main's credits are 1, 1, 0.1, 0.1 and the researcher's 1, 1, 0.6, 0.6 (see `support_research`). A fault
happens in rollout 0.1; whatever it is, the other rollouts keep their credits.
"""

import asyncio
import logging
from dataclasses import replace

import pytest

from cotrain import runs
from cotrain import train as training
from cotrain.checkpoints import latest
from cotrain.config import load_config
from cotrain.engines.scripted import ScriptedEngine
from cotrain.errors import InfrastructureError
from cotrain.loops import team_metrics
from support_research import (
    COVERAGE,
    Result,
    lines,
    main_says,
    only,
    plan_of,
    researcher_says,
    roster_of,
    visit,
)
from support_server import closed_url, serve

MAIN = {0: 1.0, 1: 1.0, 2: 0.1, 3: 0.1}
RESEARCHER = {0: 1.0, 1: 1.0, 2: 0.6, 3: 0.6}
ALL, OTHERS = [0, 1, 2, 3], [0, 2, 3]


def without(credits, branch=1):
    return pytest.approx({b: value for b, value in credits.items() if b != branch})


def read_by_main(result, branch=1):
    """What main's delegation gave it, and the whole prompt in which it read that."""
    main = result.of("main", branch)
    shown = "".join(map(chr, main.turns[1].prompt_ids))
    return main.turns[0].calls[0], shown


def removed(result, reason):
    """Rollout 0.1 is gone and counted; the others are scored and trained as without it."""
    assert set(result.group.by_rollout()) == {"0.0", "0.2", "0.3"}
    assert result.dropped == {reason: 1}
    assert result.credits("main") == without(MAIN)
    assert result.credits("researcher") == without(RESEARCHER)
    assert result.trained("main") == result.trained("researcher") == OTHERS


def test_without_faults_nothing_is_dropped():
    plan = plan_of()
    result = Result(plan, roster_of(plan))
    assert result.dropped == {}
    assert result.credits("main") == pytest.approx(MAIN)
    assert result.credits("researcher") == pytest.approx(RESEARCHER)
    assert result.trained("main") == result.trained("researcher") == ALL


def test_a_tool_that_takes_too_long_is_tried_again_and_then_removes_the_rollout(caplog):
    attempts = []

    async def slow(title):
        if title == "slow":
            attempts.append(title)
            await asyncio.sleep(3600)
        return visit(title)

    plan = plan_of("tools.timeout_s=0.01", "tools.retries=2")
    says = only(1, lines("visit: slow"), researcher_says)
    with caplog.at_level(logging.WARNING):
        removed(Result(plan, roster_of(plan, researcher=says, tools={"visit": slow})), "tool_timeout")
    assert len(attempts) == 3
    assert [f"tool visit, attempt {i} of 3: no result within 0.01 s" in caplog.text for i in (1, 2, 3)] == [True] * 3
    assert (
        "question q1, step 1: removed by a failure: tool 'visit': 3 attempts failed, the last with no result within "
        "0.01 s. Mend the tool or its service, or raise tools.timeout_s and tools.retries."
    ) in caplog.text


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_tool_that_raises_is_tried_again_and_then_removes_the_rollout(kind, caplog):
    attempts = []

    def broken(title):
        if title == "broken":
            attempts.append(title)
            raise OSError("disk gone")
        return visit(title)

    async def broken_later(title):
        await asyncio.sleep(0)
        return broken(title)

    plan = plan_of("tools.retries=1")
    says = only(1, lines("visit: broken"), researcher_says)
    tool = broken if kind == "plain" else broken_later
    with caplog.at_level(logging.WARNING):
        removed(Result(plan, roster_of(plan, researcher=says, tools={"visit": tool})), "tool_failed")
    assert len(attempts) == 2
    assert "tool 'visit': 2 attempts failed, the last with OSError: disk gone. Mend the tool" in caplog.text


def test_a_tool_that_mends_itself_within_its_retries_costs_nothing_but_a_warning(caplog):
    failures = iter([OSError("busy"), OSError("busy")])

    def shaky(title):
        for failure in failures:
            raise failure
        return visit(title)

    plan = plan_of("tools.retries=2")
    with caplog.at_level(logging.WARNING):
        result = Result(plan, roster_of(plan, tools={"visit": shaky}))
    assert result.dropped == {}
    assert result.credits("researcher") == pytest.approx(RESEARCHER)
    assert [r.getMessage() for r in caplog.records] == [f"tool visit, attempt {i} of 3: OSError: busy" for i in (1, 2)]


def test_what_a_tool_refuses_is_told_to_the_agent_once_and_scored(caplog):
    asked = []

    def refusing(title):
        asked.append(title)
        return visit(title)

    plan = plan_of()
    says = only(1, lines("visit: Gonin", "answer: Ann Bee"), researcher_says)
    with caplog.at_level(logging.WARNING):
        result = Result(plan, roster_of(plan, researcher=says, tools={"visit": refusing}))
    (call,) = result.of("researcher", 1).turns[0].calls
    assert (call.is_error, call.result) == (True, "error: no page has the title 'Gonin'")
    assert "error: no page has the title 'Gonin'" in "".join(map(chr, result.of("researcher", 1).turns[1].prompt_ids))
    assert asked.count("Gonin") == 1  # asking again would not help
    # Format and the team's answer are right; the finding is a guess that no page showed.
    assert result.credits("researcher") == pytest.approx({**RESEARCHER, 1: 0.1 + 0.4})
    assert result.dropped == {}
    assert result.trained("researcher") == ALL
    assert caplog.records == []


def judge_at(url, name="expert"):
    of_agents = ("judges.expert.agents=['researcher']",) if name == "expert" else COVERAGE
    return (f"judges.{name}.url={url}", f"judges.{name}.model=m", f"judges.{name}.retries=1", *of_agents)


def assert_no_expert_reward(plan, result):
    assert result.dropped == {"judge_failed/expert": 4, "missing_reward": 4}
    assert result.credits("researcher") == {}
    assert "expert" not in {name for t in result.group.trajectories for name in t.rewards}
    assert result.credits("main") == pytest.approx(MAIN)
    assert (result.trained("main"), result.trained("researcher")) == (ALL, [])
    metrics = team_metrics(plan, [result.record], result.dropped)
    assert (metrics["dropped/judge_failed/expert"], metrics["dropped/missing_reward"]) == (4, 4)


def test_a_judge_that_is_down_leaves_the_reward_missing_and_drops_what_needs_it():
    plan = plan_of(judges=judge_at(closed_url()))
    assert_no_expert_reward(plan, Result(plan, roster_of(plan)))


def test_a_judge_that_talks_gibberish_is_asked_again_and_leaves_the_reward_missing():
    with serve("A fine finding, 9 of 10!") as server:
        plan = plan_of(judges=judge_at(server.url))
        assert_no_expert_reward(plan, Result(plan, roster_of(plan)))
    assert len(server.requests) == 2  # the four judgements are of equal texts: one request, and one retry


def test_a_judge_that_is_down_may_have_its_weight_spread_over_what_is_known():
    plan = plan_of("rewards.credit.researcher.missing=renormalise", judges=judge_at(closed_url()))
    result = Result(plan, roster_of(plan))
    assert result.dropped == {"judge_failed/expert": 4}
    # (0.1 + 0.4 shared) / 0.5
    assert result.credits("researcher") == pytest.approx({0: 1.0, 1: 1.0, 2: 0.2, 3: 0.2})
    assert result.trained("researcher") == ALL


def test_a_missing_correctness_drops_its_whole_rollout_and_no_other():
    def reply(request):
        return "?" if "Ann Bee, surely" in str(request) else "verdict: correct"

    says = only(1, lines("researcher: leader of Ginon", "answer: Ann Bee, surely"), main_says)
    with serve(reply) as server:
        plan = plan_of(judges=judge_at(server.url, "shared"))
        result = Result(plan, roster_of(plan, main=says))
    assert result.credits("main") == pytest.approx({0: 1.0, 2: 1.0, 3: 1.0})
    assert result.credits("researcher") == pytest.approx({0: 1.0, 2: 1.0, 3: 1.0})  # never its own verdict instead
    assert result.dropped["judge_failed/shared"] == 1
    assert result.dropped["missing_reward"] == 2
    assert result.dropped["zero_variance"] == 6  # the judge likes everyone else
    gave_answers = {str(request).count("Ann Bee, surely") for request in server.requests}
    assert gave_answers == {0, 1}


LONG_CALL, LONGER_CALL = "visit: " + " " * 16 + "Ginon", "visit: " + " " * 10 + "Ginon"


@pytest.mark.parametrize(
    ("settings", "says", "num_turns", "num_calls", "stop", "status", "fault"),
    [
        (["system.settings.researcher_turns=2"], ["visit: Ginon"] * 2, 2, 1, "turns", "truncated", "no_answer"),
        (["agents.researcher.max_calls=1"], ["visit: Ginon"] * 2, 2, 1, "calls", "truncated", "no_answer"),
        (["agents.researcher.max_calls=1"], ["visit: Ginon\nvisit: Ginon"], 1, 0, "calls", "truncated", "no_answer"),
        (["agents.researcher.max_sampled=29"], [LONG_CALL], 1, 1, "tokens", "truncated", "no_answer"),
        (["agents.researcher.max_sampled=29"], [LONGER_CALL, "answer: Ann Bee"], 2, 1, "tokens", "truncated",
         "truncated"),
        ([], ["I think it is Ann Bee."], 1, 0, "malformed", "failed", "malformed"),
        ([], ["visit: Ginon", "visit: Ginon\nThen I answer."], 2, 1, "malformed", "failed", "malformed"),
    ],
    ids=["turns", "calls", "calls at once", "tokens", "tokens in a reply", "malformed", "malformed later"],
)  # fmt: skip
def test_a_researcher_that_does_not_answer_is_scored_and_main_is_told_that_there_is_no_finding(
    settings, says, num_turns, num_calls, stop, status, fault
):
    plan = plan_of(*settings)
    result = Result(plan, roster_of(plan, researcher=only(1, lines(*says), researcher_says)))
    found = result.of("researcher", 1)
    assert (len(found.turns), sum(len(t.calls) for t in found.turns)) == (num_turns, num_calls)
    assert (found.stop, found.status, found.faults) == (stop, status, (fault,))
    call, shown = read_by_main(result)
    assert (call.result, call.is_error, call.trajectory_id) == ("no finding", True, found.id)
    assert "no finding" in shown
    assert result.dropped == {}
    assert result.credits("researcher") == pytest.approx({**RESEARCHER, 1: 0.0})  # gated, though main was right
    assert result.credits("main") == pytest.approx(MAIN)
    assert result.trained("main") == result.trained("researcher") == ALL


def test_an_episode_beyond_its_time_removes_the_rollout(caplog):
    async def slow(title):
        if title == "slow":
            await asyncio.sleep(3600)
        return visit(title)

    # Under "step" and "group" a batch waits for the slow rollout, and the time of the others runs out with it.
    plan = plan_of("agents.researcher.max_time_s=0.2", "engine.batching=continuous")
    says = only(1, lines("visit: slow"), researcher_says)
    with caplog.at_level(logging.WARNING):
        removed(Result(plan, roster_of(plan, researcher=says, tools={"visit": slow})), "time_limit")
    assert (
        "question q1, step 1: removed by a failure: trajectory 1:q1:0.1:0.0.0: the episode took longer than "
        "max_time_s = 0.2. Raise the limit."
    ) in caplog.text


def test_main_s_time_covers_those_it_delegates_to(caplog):
    async def slow(title):
        if title == "slow":
            await asyncio.sleep(3600)
        return visit(title)

    plan = plan_of("agents.main.max_time_s=0.2", "engine.batching=continuous")
    says = only(1, lines("visit: slow"), researcher_says)
    with caplog.at_level(logging.WARNING):
        removed(Result(plan, roster_of(plan, researcher=says, tools={"visit": slow})), "time_limit")
    assert "trajectory 1:q1:0.1:0: the episode took longer" in caplog.text


def test_a_task_too_long_for_the_researcher_s_context_gives_an_empty_trajectory():
    plan = plan_of()
    usual = Result(plan, roster_of(plan)).of("researcher", 0).turns
    context = len(usual[-1].prompt_ids) + len(usual[-1].completion.token_ids)
    says = only(1, lines("researcher: " + "why " * 90, "answer: Ann Bee"), main_says)
    result = Result(plan, roster_of(plan, main=says, contexts={"sub": context}))
    empty = result.of("researcher", 1)
    assert (empty.turns, empty.output, empty.stop, empty.status) == ((), "", "context", "truncated")
    assert read_by_main(result)[0].result == "no finding"
    assert result.dropped_rollouts == result.dropped == {"context_full": 1}
    assert result.credits("main") == pytest.approx(MAIN)
    assert (result.trained("main"), result.trained("researcher")) == (ALL, OTHERS)  # nothing was sampled


def test_a_context_that_fills_up_later_leaves_the_finding_unread():
    plan = plan_of()
    usual = Result(plan, roster_of(plan)).of("main", 0).turns
    context = len(usual[-1].prompt_ids) + len(usual[-1].completion.token_ids)
    says = only(1, lines("researcher: leader of" + " " * 20 + "Ginon"), main_says)
    result = Result(plan, roster_of(plan, main=says, contexts={"main": context}))
    main, finding = result.of("main", 1), result.of("researcher", 1)
    assert (len(main.turns), main.output, main.stop, main.faults) == (1, "", "context", ("no_answer",))
    assert (finding.output, finding.stop, finding.trainable) == ("Ann Bee", "answer", False)
    assert main.reads == ()
    assert result.dropped == {"context_full": 1, "unread_finding": 1}
    assert result.credits("main") == pytest.approx({**MAIN, 1: 0.0})
    assert result.credits("researcher") == without(RESEARCHER)  # main's reward does not reach it
    assert (result.trained("main"), result.trained("researcher")) == (ALL, OTHERS)


def test_tokens_that_run_out_after_a_delegation_leave_the_finding_unread():
    plan = plan_of("agents.main.max_sampled=60")  # the usual two turns take 28 + 16
    says = only(1, lines("researcher: leader of" + " " * 33 + "Ginon"), main_says)
    result = Result(plan, roster_of(plan, main=says))
    assert (result.of("main", 1).stop, result.of("main", 1).num_sampled) == ("tokens", 60)
    assert result.dropped == {"unread_finding": 1}
    assert result.credits("main") == pytest.approx({**MAIN, 1: 0.0})
    assert (result.trained("main"), result.trained("researcher")) == (ALL, OTHERS)


@pytest.mark.parametrize("reply", ["It was Ann Bee.", "finder: Ann Bee", "answer: Ann Bee\nresearcher: Ginon"])
def test_a_malformed_reply_of_main_has_no_reward_and_is_trained_on(reply):
    plan = plan_of()
    result = Result(plan, roster_of(plan, main=only(1, lines(reply), main_says)))
    main = result.of("main", 1)
    assert (main.stop, main.faults, main.rewards["shared"]) == ("malformed", ("malformed",), 0.0)
    assert result.dropped == {}
    assert result.credits("main") == pytest.approx({**MAIN, 1: 0.0})
    assert result.credits("researcher") == without(RESEARCHER)
    assert (result.trained("main"), result.trained("researcher")) == (ALL, OTHERS)


def test_where_main_never_delegates_it_is_trained_alone():
    plan = plan_of()
    result = Result(plan, roster_of(plan, main=lambda b, *_: "answer: Ann Bee" if b < 2 else "answer: nobody"))
    assert result.dropped == {}
    assert result.credits("main") == pytest.approx(MAIN)
    assert result.trained("main") == ALL
    assert result.samples["sub"] == []


def test_rollouts_that_all_fail_leave_an_empty_group_that_is_counted(caplog):
    def down(title):
        raise InfrastructureError("web", "it is down", "Start it", "web_down")

    plan = plan_of("tools.retries=0")
    with caplog.at_level(logging.WARNING):
        result = Result(plan, roster_of(plan, tools={"visit": down}))
    assert result.group.trajectories == ()
    assert result.dropped == {"tool_failed": 4}
    assert caplog.text.count("removed by a failure: tool 'visit': 1 attempts failed") == 4


def scripted_cast(is_down):
    """`load_cast` with engines that speak as in `support_research`, and a web that `is_down()` says the state of."""
    load = training.load_cast

    def load_scripted(plan):
        def script_of(says):
            return lambda prompt, request: says(int(str(request.key[3])[-1]), int(request.key[5]), prompt)

        def web(title):
            if is_down():
                raise OSError("no route")
            return "Ginon was led by Ann Bee."

        cast = load(plan)
        says = {"main": main_says, "sub": researcher_says}
        engines = {n: ScriptedEngine(script_of(says[n]), m.tokenizer) for n, m in cast.models.items()}
        tools = {"visit": lambda corpus: web}
        return replace(cast, plan=replace(plan, system=replace(plan.system, corpus_tools=tools)), engines=engines)

    return load_scripted


def test_a_step_of_which_every_rollout_failed_stops_the_run_which_goes_on_to_the_same_losses(tmp_path, monkeypatch):
    names = ("system.name=deep_research", "models.main.path=tiny-llama", "models.sub.path=tiny-qwen3")
    agents = ("agents.researcher.max_turns=3", "loss.beta=0.0", "tools.retries=0")
    world = [f"data.{s}.world={{entities=40, questions=40}}" for s in ("train", "eval.dev")]
    sizes = ("data.eval.dev.limit=1", "sampling.questions_per_step=1", "loop.steps=3", "eval.every=0")
    # The vowels of "Ann Bee" and "nobody": 4/7 and 2/6.
    config = load_config(
        None, [*names, *agents, *world, *sizes, *COVERAGE, f"rewards.metric={__file__}:vowels"]
    )  # fmt: skip
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    load = training.load_cast
    monkeypatch.setattr(training, "load_cast", scripted_cast(lambda: False))
    training.train(config, unbroken)

    monkeypatch.setattr(training, "load_cast", load)
    is_down = (broken / "groups" / "step-000001.jsonl").exists
    monkeypatch.setattr(training, "load_cast", scripted_cast(is_down))
    with pytest.raises(InfrastructureError) as raised:
        training.train(config, broken)
    assert str(raised.value) == "step 2: not one rollout could be finished. Mend what failed, then resume."
    assert latest(broken / "checkpoints").name == "step-000001"
    assert [row["step"] for row in runs.read_metrics(broken) if row["kind"] == "train"] == [1]
    assert (broken / "groups" / "step-000001.jsonl").read_bytes() == (
        unbroken / "groups" / "step-000001.jsonl"
    ).read_bytes()

    monkeypatch.setattr(training, "load_cast", load)
    monkeypatch.setattr(training, "load_cast", scripted_cast(lambda: False))
    training.train(config, broken, resume=True)
    losses = [
        [(row["model/main/loss"], row["model/sub/loss"]) for row in runs.read_metrics(folder) if row["kind"] == "train"]
        for folder in (unbroken, broken)
    ]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]


def vowels(answer, golds):
    """A metric that tells main's two answers apart on any question."""
    return sum(c in "aeiou" for c in answer.lower()) / max(1, len(answer))
