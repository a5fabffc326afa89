"""What `Team` and `fork` promise to a system: order, replay, errors in three parts, cohorts that never hang."""

import asyncio
from dataclasses import replace

import pytest

from cotrain.engines.base import Cohort
from cotrain.engines.scripted import ScriptedEngine
from cotrain.errors import InfrastructureError, ReplayError, WorkflowError
from cotrain.roster import System
from cotrain.sampling import Job, fork, fork_on_first, independent
from cotrain.team import Team
from cotrain.types import Agent
from support import CharTokenizer, cast, chain, question, random_words, run


def job(system, script=random_words, tools=None, **settings):
    roster, engine = cast(system, script, tools)
    return Job(system=system, roster=roster, question=question(), **settings), engine


def system_of(coroutine, *names):
    agents = tuple(Agent(name=n, model="base", prompt=n + " {said}") for n in names)
    return System(run=coroutine, agents=agents)


def in_cohort(work, strategy):
    """Run a strategy as the only member of a cohort, with a time limit that only a hang can reach."""

    async def main():
        cohort = Cohort()
        cohort.enter()
        group = await asyncio.wait_for(strategy(replace(work, cohort=cohort)), 30)
        assert (cohort.live, cohort.waiting) == (1, 0)
        return group

    return run(main())


def test_tools_are_recorded_and_replayed_and_run_once_per_trunk_and_once_per_branch_after_it():
    calls = []

    def count(*args):
        calls.append(args)
        return len(calls)

    async def workflow(team, q):
        before = await team.use("count", "before")
        first = await team.ask("a", said=before)
        between = await team.use("count", "between", first.output)
        return await team.ask("b", said=between, reads=[first])

    work, _ = job(system_of(workflow, "a", "b"), tools={"count": count})
    branches = run(fork(work, at=1, size=3))
    assert len(calls) == 2  # the whole record is before the fork
    assert len({t.turns[0].prompt_ids for t in branches.trajectories if t.agent == "b"}) == 1
    calls.clear()
    run(fork(work, at=0, size=3))
    assert [args[0] for args in calls] == ["before", "between", "between", "between"]


def test_async_tools_and_unknown_names():
    async def shout(text):
        await asyncio.sleep(0)
        return str(text).upper()

    async def workflow(team, q):
        loud = await team.use("shout", "hello")
        return await team.ask("a", said=loud)

    work, engine = job(system_of(workflow, "a"), tools={"shout": shout})
    run(fork_on_first(work))
    assert "HELLO" in CharTokenizer().decode(engine.requests[0].prompt_ids)
    work, _ = job(system_of(workflow, "a"))
    with pytest.raises(WorkflowError, match="tool 'shout', which it does not have. Known tools: none"):
        run(fork_on_first(work))

    async def stranger(team, q):
        return await team.ask("b", said="")

    work, _ = job(system_of(stranger, "a"))
    with pytest.raises(WorkflowError, match="asks 'b', who is not on the roster. Known agents: a"):
        run(fork_on_first(work))


def test_a_workflow_that_makes_other_calls_on_replay_is_an_error_that_names_both():
    seen = []

    async def moody(team, q):
        seen.append(team)
        first = await team.ask("a" if len(seen) == 1 else "b", said="x")
        return await team.ask("b", said=first.output, reads=[first])

    work, _ = job(system_of(moody, "a", "b"))
    with pytest.raises(ReplayError, match=r"call 0: on replay the system makes ask 'b' .* it had made ask 'a'"):
        run(fork(work, at=1, size=2))


def test_a_workflow_that_stops_before_its_record_ends_is_an_error():
    seen = []

    async def lazy(team, q):
        seen.append(team)
        first = await team.ask("a", said="x")
        if len(seen) > 1:
            return first
        await team.use("nothing")
        return await team.ask("b", said="y", reads=[first])

    work, _ = job(system_of(lazy, "a", "b"), tools={"nothing": lambda: 0})
    with pytest.raises(WorkflowError, match=r"on replay the system made 1 calls, where it had made 2"):
        run(fork(work, at=1, size=2))


def test_a_fork_beyond_the_last_ask_is_an_error():
    work, _ = job(chain(2))
    with pytest.raises(WorkflowError, match="a fork at ask 2 was due, but the system made only 2 asks"):
        run(fork(work, at=2, size=2))


def test_an_output_that_nobody_reads_or_scores_is_an_error():
    async def forgetful(team, q):
        await team.ask("a", said="x")
        return await team.ask("b", said="y")

    work, _ = job(system_of(forgetful, "a", "b"))
    with pytest.raises(WorkflowError, match=r"agent a: nobody reads its output .*reads=\[\.\.\.\]"):
        run(fork_on_first(work))

    async def early(team, q):
        first = await team.ask("a", said="x")
        await team.ask("b", said="y", reads=[first])
        return first

    work, _ = job(system_of(early, "a", "b"))
    with pytest.raises(WorkflowError, match="nobody reads its output and it is not the answer"):
        run(fork_on_first(work))


def test_a_prompt_field_that_was_not_given_is_an_error():
    async def workflow(team, q):
        return await team.ask("a")

    work, _ = job(system_of(workflow, "a"))
    with pytest.raises(WorkflowError, match="agent a: its prompt has the field {said}"):
        run(fork_on_first(work))


def test_infrastructure_failures_remove_the_rollout_and_are_counted():
    def fails_in_branch_one(prompt, request):
        if request.key[3] == "0.1" and request.key[4] == 1:
            raise InfrastructureError("engine", "it is down", "Wait")
        return random_words(prompt, request)

    work, _ = job(chain(3), fails_in_branch_one)
    group = run(fork_on_first(work))
    assert set(group.by_rollout()) == {"0.0", "0.2", "0.3"}
    assert dict(group.dropped) == {"infrastructure": 1}

    def fails_on_the_trunk(prompt, request):
        raise InfrastructureError("engine", "it is down", "Wait")

    work, _ = job(chain(3), fails_on_the_trunk)
    branches = run(fork(work, at=1, size=4))
    assert branches.trajectories == ()
    assert dict(branches.dropped) == {"infrastructure": 4}


def test_other_errors_of_a_system_are_raised_as_they_are():
    async def broken(team, q):
        await team.ask("a", said="x")
        raise ZeroDivisionError

    work, _ = job(system_of(broken, "a"))
    with pytest.raises(ZeroDivisionError):
        run(fork(work, at=0, size=2))


def test_a_prompt_beyond_the_context_is_counted_gives_no_sample_and_its_empty_output_is_scored():
    system = chain(2)
    roster, _ = cast(system)
    small = ScriptedEngine(random_words, CharTokenizer(), context=30)
    work = Job(system=system, roster=replace(roster, engines={"base": small}), question=question(), group_size=4)
    long = replace(work, question=replace(question(), text="x" * 40))
    group = run(fork_on_first(long))
    assert dict(group.dropped) == {"context_full": 8}
    assert {(t.output, t.status, t.trainable, len(t.turns)) for t in group.trajectories} == {
        ("", "truncated", False, 0)
    }


@pytest.mark.parametrize("strategy", [fork_on_first, independent])
def test_in_a_cohort_a_group_gives_the_same_as_outside_it(strategy):
    work, _ = job(chain(3), seed=4)
    inside = in_cohort(work, strategy)
    assert inside.trajectories == run(strategy(work)).trajectories


def test_asks_that_run_at_once_do_not_hang_a_cohort():
    async def both(team, q):
        a, b = await asyncio.gather(team.ask("a", said="1"), team.ask("b", said="2"))
        return await team.ask("c", said=a.output + b.output, reads=[a, b])

    work, engine = job(system_of(both, "a", "b", "c"))
    group = in_cohort(work, fork_on_first)
    assert len(group.trajectories) == len(engine.requests) == 12
    assert [len(group.readers(t)) for t in group.trajectories if t.agent == "a"] == [1] * 4
    branches = run(fork(work, at=1, size=2))  # the ask in flight at the fork belongs to the trunk
    assert [t.agent for t in branches.trajectories if t.rollout_id is None] == ["a"]


def test_a_script_answers_in_place_of_the_engine_and_may_leave_it_to_it():
    def only_first(agent, q, fields):
        return "red old river" if agent == "a0" else None

    work, engine = job(chain(2), script=random_words)
    group = run(fork_on_first(replace(work, script=only_first)))
    assert len(engine.requests) == 4
    assert {t.output for t in group.trajectories if t.agent == "a0"} == {"red old river"}
    assert group.trajectories[0].turns[0].completion.token_ids[-1] == CharTokenizer.eos_token_id


def test_team_writes_down_calls_in_the_order_of_issue():
    system = chain(2)
    roster, _ = cast(system)

    async def main():
        team = Team(roster, question())
        await system.run(team, question())
        return [(call.kind, call.name) for call in team.record.calls]

    assert run(main()) == [("ask", "a0"), ("ask", "a1")]


def test_under_a_script_only_its_own_words_are_lessons():
    def only_first(agent, q, fields):
        return "red old river" if agent == "a0" else None

    work, _ = job(chain(2), script=random_words)
    group = run(fork_on_first(replace(work, script=only_first)))
    assert {(t.agent, t.trainable) for t in group.trajectories} == {("a0", True), ("a1", False)}


def test_a_demonstration_that_does_not_fit_the_context_is_counted_and_no_lesson():
    system = chain(1)
    roster, _ = cast(system)
    prompt = len("user: a0 what is q1? \n")
    for room, fits in ((4, True), (3, False)):  # "red" and the end of the turn
        small = ScriptedEngine(random_words, CharTokenizer(), context=prompt + room)
        work = Job(
            system=system,
            roster=replace(roster, engines={"base": small}),
            question=question(),
            group_size=1,
            script=lambda *_: "red",
        )
        group = run(fork_on_first(work))
        assert [t.trainable for t in group.trajectories] == [fits]
        assert dict(group.dropped) == ({} if fits else {"context_full": 1})


@pytest.mark.parametrize("prompt", ["{said.missing}", "{said[0}", "{", "{0}"])
def test_a_prompt_that_is_no_template_is_an_error(prompt):
    async def workflow(team, q):
        return await team.ask("a", said="x")

    system = System(run=workflow, agents=(Agent(name="a", model="base", prompt=prompt),))
    work, _ = job(system)
    with pytest.raises(WorkflowError, match="agent a: its prompt"):
        run(fork_on_first(work))
