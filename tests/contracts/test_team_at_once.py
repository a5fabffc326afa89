"""Calls that run at once: they neither hang a cohort nor confuse a replay, and nothing of a failed one stays behind."""

import asyncio
import random

import pytest

from cotrain import record
from cotrain.engines.base import Cohort
from cotrain.engines.scripted import ScriptedEngine
from cotrain.errors import InfrastructureError, ReplayError, WorkflowError
from cotrain.loops import together
from cotrain.roster import Roster, System
from cotrain.sampling import Job, fork, fork_on_first, independent, round_robin
from cotrain.types import Agent, Group
from support import CharRenderer, CharTokenizer, cast, chain, question, random_words, run

NAMES = "abcde"


def system_of(coroutine):
    return System(run=coroutine, agents=tuple(Agent(name=n, model="base", prompt=n + " {said}") for n in NAMES))


async def two_chains(team, q):
    """a -> b beside c -> d, of different lengths in tools; e reads both."""

    async def chain(first, second, nested):
        if nested:
            (said,) = await asyncio.gather(team.ask(first, said=q.text))
        else:
            said = await team.ask(first, said=q.text)
        found = await team.use("echo", said.output)
        return await team.ask(second, said=found, reads=[said])

    left, right = await asyncio.gather(chain("a", "b", False), chain("c", "d", True))
    return await team.ask("e", said=left.output + right.output, reads=[left, right])


def work_on(system, strategy, batching, script=random_words, tools=None, seconds=30):
    """Two questions at once, with a time limit that only a hang can reach."""
    roster, engine = cast(system, script, tools or {"echo": lambda text: text})

    def job(q, cohort):
        return strategy(Job(system=system, roster=roster, question=q, cohort=cohort))

    return run(asyncio.wait_for(together(job, [question("q1"), question("q2")], batching), seconds)), engine


@pytest.mark.parametrize("batching", ["step", "group", "continuous"])
@pytest.mark.parametrize(
    ("strategy", "num_calls"),
    [(fork_on_first, 20), (round_robin([0, 0, 0, 1, 0]), 11), (independent, 20 + 17 + 14 + 11 + 8)],
    ids=["first", "robin", "independent"],
)
def test_chains_that_run_side_by_side_fork_anywhere(batching, strategy, num_calls):
    groups, engine = work_on(system_of(two_chains), strategy, batching)
    assert [len(group.trajectories) for group in groups] == [num_calls, num_calls]
    assert len(engine.requests) == 2 * num_calls
    for group in groups:
        for rollout in group.by_rollout().values():
            assert sorted(t.agent for t in rollout) == list(NAMES)
            assert [t.call for t in rollout] == [0, 1, 2, 3, 4]


def test_the_batching_does_not_change_what_equal_keys_say():
    step, group = (work_on(system_of(two_chains), independent, mode)[0] for mode in ("step", "group"))
    assert step == group
    in_a_row = [work_on(chain(3), independent, mode)[0] for mode in ("step", "group", "continuous")]
    assert in_a_row[0] == in_a_row[1] == in_a_row[2]


@pytest.mark.parametrize("at", range(5))
def test_a_fork_is_at_the_call_that_the_trunk_was_about_to_make(at):
    roster, _ = cast(system_of(two_chains), tools={"echo": lambda text: text})

    async def main():
        cohort = Cohort()
        cohort.enter()
        work = Job(system=system_of(two_chains), roster=roster, question=question(), cohort=cohort)
        return await asyncio.wait_for(fork(work, at=at, size=2), 30)

    trajectories = run(main()).trajectories
    order = "acbde"  # both first asks are in flight before either chain goes on
    assert [t.agent for t in trajectories if t.rollout_id is None] == list(order[:at])
    assert [t.agent for t in trajectories if t.call == at] == [order[at]] * 2
    assert len({t.turns[0].prompt_ids for t in trajectories if t.call == at}) == 1


def test_calls_come_back_on_replay_in_the_order_of_the_record():
    """The slow tool comes back last, so c's chain asks first; a replay in the order of issue would swap them."""

    async def slow(text):
        await asyncio.sleep(0.01)
        return text

    async def workflow(team, q):
        async def chain(tool, agent):
            return await team.ask(agent, said=await team.use(tool, q.text))

        left, right = await asyncio.gather(chain("slow", "a"), chain("quick", "c"))
        return await team.ask("e", said="", reads=[left, right])

    async def quick(text):
        await asyncio.sleep(0)
        return text

    system = system_of(workflow)
    roster, _ = cast(system, tools={"slow": slow, "quick": quick})
    branches = run(fork(Job(system=system, roster=roster, question=question()), at=2, size=3))
    assert [(t.agent, t.call, t.rollout_id) for t in branches.trajectories[:3]] == [
        ("c", 0, None), ("a", 1, None), ("e", 2, "0.0"),
    ]  # fmt: skip


def test_a_call_that_fails_takes_its_siblings_along_and_the_other_rollouts_go_on():
    async def breaks(rollout_text):
        await asyncio.sleep(0)
        raise InfrastructureError("tool", "it is down", "Wait")

    cancelled = []

    async def waits(text):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(text)
            raise

    async def workflow(team, q):
        first = await team.ask("a", said=q.text)
        if "stone" in first.output:
            await asyncio.gather(team.use("breaks", ""), team.ask("b", said="x"), team.use("waits", "w"))
        return await team.ask("c", said=first.output, reads=[first])

    (one, two), _ = work_on(system_of(workflow), fork_on_first, "step", tools={"breaks": breaks, "waits": waits})
    lost = one.dropped["infrastructure"] + two.dropped["infrastructure"]
    assert 0 < lost < 8
    assert len(cancelled) == lost
    assert len(one.by_rollout()) + len(two.by_rollout()) == 8 - lost
    assert {t.agent for g in (one, two) for t in g.trajectories} == {"a", "c"}


def test_failures_in_a_task_group_are_infrastructure_too_unless_another_error_is_among_them():
    def workflow_with(error):
        async def fail():
            raise error

        async def workflow(team, q):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())
                asked = tasks.create_task(team.ask("a", said="x"))
            return asked.result()

        return system_of(workflow)

    groups, _ = work_on(workflow_with(InfrastructureError("tool", "it is down", "Wait")), fork_on_first, "step")
    assert [dict(group.dropped) for group in groups] == [{"infrastructure": 4}] * 2
    with pytest.raises(ExceptionGroup) as raised:
        work_on(workflow_with(ZeroDivisionError()), fork_on_first, "step")
    assert raised.group_contains(ZeroDivisionError)


def test_a_failure_that_the_system_handles_is_replayed_like_a_result():
    calls = []

    def breaks():
        calls.append("breaks")
        raise InfrastructureError("tool", "it is down", "Wait")

    async def workflow(team, q):
        first = await team.ask("a", said="x")
        try:
            await team.use("breaks")
        except InfrastructureError as error:
            return await team.ask("b", said=str(error), reads=[first])

    system = system_of(workflow)
    roster, _ = cast(system, tools={"breaks": breaks})
    branches = run(fork(Job(system=system, roster=roster, question=question()), at=1, size=3))
    assert [t.agent for t in branches.trajectories] == ["a", "b", "b", "b"]
    assert branches.dropped == {}
    assert calls == ["breaks"]


def test_a_system_that_returns_before_its_calls_have_come_back_is_an_error():
    async def workflow(team, q):
        answer = await team.ask("b", said="y")
        forgotten.append(asyncio.ensure_future(team.use("never")))
        await asyncio.sleep(0)
        return answer

    forgotten = []

    async def never():
        await asyncio.sleep(3600)

    with pytest.raises(WorkflowError, match=r"rollout 0.0: the system returned while 1 of its calls .* under way"):
        work_on(system_of(workflow), fork_on_first, "continuous", tools={"never": never})
    assert all(task.cancelled() for task in forgotten)


def test_a_replay_that_waits_for_a_call_that_never_comes_is_an_error(monkeypatch):
    monkeypatch.setattr(record, "PATIENCE_S", 1)
    seen = []

    async def workflow(team, q):
        seen.append(team)
        names = "ab" if len(seen) == 1 else "a"
        read = await asyncio.gather(*(team.ask(name, said=name) for name in names))
        return await team.ask("c", said="", reads=read)

    system = system_of(workflow)
    roster, _ = cast(system)
    with pytest.raises(ReplayError, match=r"call 1: on replay the system waits for ask 'a' .* ask 'b'"):
        run(fork(Job(system=system, roster=roster, question=question()), at=2, size=2))


def test_an_output_named_twice_in_reads_is_read_once():
    async def workflow(team, q):
        first = await team.ask("a", said="x")
        return await team.ask("b", said="y", reads=[first, first])

    system = system_of(workflow)
    roster, _ = cast(system)
    branches = run(fork(Job(system=system, roster=roster, question=question()), at=0, size=2))
    assert [len(t.reads) for t in branches.trajectories] == [0, 1, 0, 1]


def random_tree(draw, depth):
    """A workflow: an agent or a tool, or a list of workflows to do in a row or at once."""
    kind = draw.choice(["ask", "plain", "slow", "row", "at_once", "at_once"][: 6 if depth else 3])
    if kind in ("row", "at_once"):
        return kind, [random_tree(draw, depth - 1) for _ in range(draw.randint(1, 3))]
    return kind, draw.choice("abc")


def num_asks(tree):
    kind, inside = tree
    return sum(map(num_asks, inside)) if kind in ("row", "at_once") else int(kind == "ask")


async def walk(team, tree, path):
    """Do a workflow; the outputs of its asks."""
    kind, inside = tree
    if kind == "ask":
        return [await team.ask(inside, said=path)]
    if kind in ("plain", "slow"):
        await team.use(kind, path)
        return []
    parts = (walk(team, part, f"{path}{i}") for i, part in enumerate(inside))
    done = await asyncio.gather(*parts) if kind == "at_once" else [await part for part in parts]
    return [output for outputs in done for output in outputs]


@pytest.mark.parametrize("seed", range(60))
def test_any_workflow_forks_at_any_ask_under_any_batching_and_loses_failed_rollouts_alone(seed):
    draw = random.Random(seed)
    tree = "at_once", [random_tree(draw, 3) for _ in range(3)]
    at, size, batching = draw.randrange(num_asks(tree) + 1), 3, ("step", "group", "continuous")[seed % 3]

    async def workflow(team, q):
        return await team.ask("c", said="end", reads=await walk(team, tree, "p"))

    def script(prompt, request):
        if seed % 4 == 0 and random.Random(repr(request.key)).random() < 0.05:
            raise InfrastructureError("engine", "it is down", "Wait")
        return random_words(prompt, request)

    async def slow(path):
        for _ in range(random.Random(f"{path}{seed}").randint(0, 5)):
            await asyncio.sleep(0)

    agents = [Agent(name=n, model="other" if n == "b" else "base", prompt=n + " {said}") for n in "abc"]
    roster = Roster(
        agents={agent.name: agent for agent in agents},
        engines={name: ScriptedEngine(script, CharTokenizer()) for name in ("base", "other")},
        renderers={name: CharRenderer() for name in ("base", "other")},
        tools={"plain": len, "slow": slow},
    )
    system = System(run=workflow, agents=tuple(agents))

    async def job(q, cohort):
        work = Job(system=system, roster=roster, question=q, cohort=cohort)
        forked = await fork(work, at=at, size=size)
        return Group(question=q, step=0, strategy="x", trajectories=forked.trajectories, dropped=forked.dropped)

    for group in run(asyncio.wait_for(together(job, [question("q1"), question("q2")], batching), 30)):
        left = size - group.dropped.get("infrastructure", 0)
        assert len(group.trajectories) == (at + left * (num_asks(tree) + 1 - at) if left else 0)
        for rollout in group.by_rollout().values():
            assert [t.call for t in rollout] == list(range(num_asks(tree) + 1))
        forked = {(t.agent, t.turns[0].prompt_ids) for t in group.trajectories if t.call == at}
        assert len(forked) == (1 if left else 0)
