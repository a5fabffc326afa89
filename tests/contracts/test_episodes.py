"""What episodes promise to a system: calls at once, nested delegation, lineage, forks around them, equal batches."""

import asyncio
import random
from dataclasses import replace

import pytest

from cotrain.advantages import group_relative
from cotrain.batch import make_samples
from cotrain.engines.base import Cohort
from cotrain.engines.scripted import ScriptedEngine
from cotrain.errors import ConfigError, InfrastructureError, WorkflowError
from cotrain.loops import together
from cotrain.rewards import credits, propagate, score
from cotrain.roster import Roster, System
from cotrain.sampling import Job, fork, fork_on_first, independent, round_robin
from cotrain.team import Team
from cotrain.types import Agent, SamplingParams
from support import CharRenderer, CharTokenizer, question, run

LONG = SamplingParams(max_tokens=400)


def agent(name, model="base", **more):
    menu = "\n{tools}" if more.get("tools") or more.get("delegates") else ""
    return Agent(name=name, model=model, prompt=name + " {task}" + menu, sampling=LONG, **more)


def ask_first(*agents):
    """A system that asks its first agent and nobody else."""

    async def run_it(team, q):
        return await team.ask(agents[0].name, task=q.text)

    return System(run=run_it, agents=agents)


def look(text):
    """Look something up.

    The first line is all that an agent is told.
    """
    return f"seen {text}"


def roster_of(system, script, **more):
    """An engine per model; a script is asked `script(agent, turn, prompt, request)`."""

    def says(prompt, request):
        return script(prompt.split()[1], request.key[5], prompt, request)

    models = {a.model for a in system.agents}
    return Roster(
        agents={a.name: a for a in system.agents},
        engines={name: ScriptedEngine(says, CharTokenizer()) for name in sorted(models)},
        renderers=dict.fromkeys(models, CharRenderer()),
        **{"tools": {"look": look}, **more},
    )


def play(system, script, strategy=fork_on_first, batching="step", size=2, questions=("q1",), **more):
    """The groups, and the roster whose engines were asked; a time limit that only a hang can reach."""
    roster = roster_of(system, script, **more)

    def job(q, cohort):
        return strategy(Job(system=system, roster=roster, question=q, group_size=size, cohort=cohort))

    work = together(job, [question(id) for id in questions], batching)
    return run(asyncio.wait_for(work, 60)), roster


def waves_of(engine):
    """The keys of every batch that an engine will start, in the order of the batch."""
    waves, start = [], engine._room._start

    def noted(tickets):
        waves.append([t.request.key for t in tickets])
        start(tickets)

    engine._room._start = noted
    return waves


def text_of(ids):
    return "".join(map(chr, ids))


def test_all_calls_of_a_reply_run_at_once_and_their_results_come_in_their_order():
    meeting = None

    async def meet(text):
        """Wait until three are here."""
        nonlocal meeting
        meeting = meeting or asyncio.Barrier(3)
        await meeting.wait()
        return f"met {text}"

    system = ask_first(agent("a", tools=("meet", "look"), max_turns=2))
    says = ["meet: x\nlook: y\nmeet: z\nmeet: w", "answer: done"]
    (group,), _ = play(system, lambda name, turn, *_: says[turn], size=1, tools={"meet": meet, "look": look})
    first, second = group.trajectories[0].turns
    assert [(c.tool, c.argument, c.result) for c in first.calls] == [
        ("meet", "x", "met x"), ("look", "y", "seen y"), ("meet", "z", "met z"), ("meet", "w", "met w"),
    ]  # fmt: skip
    said = text_of(first.prompt_ids + first.completion.token_ids)
    assert text_of(second.prompt_ids) == said + "results: met x | seen y | met z | met w\n"


def boss_and_hands(**more):
    return ask_first(agent("boss", delegates=("hand",), max_turns=4), agent("hand", "sub", tools=("look",), **more))


def three_at_once(name, turn, prompt, request):
    if name == "boss":
        return "hand: x\nhand: y\nhand: z" if turn == 0 else "answer: all"
    return "look: it" if turn == 0 else "answer: found"


def test_delegations_of_one_reply_are_one_batch_of_the_engine():
    system = boss_and_hands(max_turns=2)
    roster = roster_of(system, three_at_once)
    waves = {name: waves_of(engine) for name, engine in roster.engines.items()}

    def job(q, cohort):
        return fork_on_first(Job(system=system, roster=roster, question=q, group_size=2, cohort=cohort))

    run(asyncio.wait_for(together(job, [question("q1"), question("q2")], "step"), 60))
    places = [f"0.0.{i}" for i in range(3)]
    rollouts = [(q, b) for q in ("q1", "q2") for b in ("0.0", "0.1")]
    assert waves["base"] == [[(0, 0, q, b, 0, turn) for q, b in rollouts] for turn in (0, 1)]
    assert waves["sub"] == [[(0, 0, q, b, place, turn) for q, b in rollouts for place in places] for turn in (0, 1)]


def test_batches_are_the_same_however_long_tools_and_siblings_take():
    """Hands take one to three turns, depending on their task; their tools come back in another order every time."""
    system = boss_and_hands(max_turns=4)

    def script(name, turn, prompt, request):
        if name == "boss":
            return ("hand: 1\nhand: 3\nhand: 2", "hand: 2\nhand: 1", "answer: all")[turn]
        lasts = int(prompt.split()[2])
        return "look: it" if turn < lasts else "answer: found"

    def attempt(seed):
        draw = random.Random(seed)

        async def slow(text):
            for _ in range(draw.randint(0, 6)):
                await asyncio.sleep(0)
            return "seen"

        roster = roster_of(system, script, tools={"look": slow})
        waves = {name: waves_of(engine) for name, engine in roster.engines.items()}

        def job(q, cohort):
            return fork_on_first(Job(system=system, roster=roster, question=q, group_size=3, cohort=cohort))

        return run(asyncio.wait_for(together(job, [question("q1"), question("q2")], "step"), 60)), waves

    first = attempt(0)
    assert [len(wave) for wave in first[1]["sub"]] == [18, 18, 12, 6, 12, 12, 6]
    assert all(attempt(seed) == first for seed in range(1, 6))


def nested():
    return ask_first(
        agent("chief", "top", delegates=("lead",), max_turns=3),
        agent("lead", delegates=("hand",), max_turns=3, about="one who knows hands. Ask well."),
        agent("hand", tools=("look",), max_turns=3, about="one who looks."),
    )


def three_levels(name, turn, prompt, request):
    replies = {"chief": ["lead: l0\nlead: l1", "answer: c"], "lead": ["hand: h0", "hand: h1", "answer: l"],
               "hand": ["look: it", "answer: h"]}  # fmt: skip
    return replies[name][turn]


def test_delegation_nests_and_every_trajectory_knows_its_caller_and_its_task():
    (group,), roster = play(nested(), three_levels, size=1)
    own = {t.id: t for t in group.trajectories}
    chief = "0:q1:0.0:0"
    assert list(own) == [
        f"{chief}.0.0.0.0", f"{chief}.0.0.1.0", f"{chief}.0.0", f"{chief}.0.1.0.0", f"{chief}.0.1.1.0", f"{chief}.0.1",
        chief,
    ]  # fmt: skip
    lead = own[f"{chief}.0.1"]
    hand = own[f"{chief}.0.1.1.0"]
    assert (lead.caller, lead.task, lead.agent, lead.call) == (chief, "l1", "lead", 0)
    assert (hand.caller, hand.task, hand.agent, hand.call) == (lead.id, "h1", "hand", 0)
    assert own[chief].reads == (f"{chief}.0.0", f"{chief}.0.1")
    assert lead.reads == (f"{chief}.0.1.0.0", hand.id)
    assert [c.trajectory_id for turn in lead.turns for c in turn.calls] == [f"{chief}.0.1.0.0", hand.id]
    assert group.sinks() == (own[chief],)
    assert group.by_rollout() == {"0.0": group.trajectories}
    assert text_of(lead.turns[0].prompt_ids) == "user: lead l1\nhand: one who looks\n"
    assert len({r.key for e in roster.engines.values() for r in e.requests}) == 14 + 2  # 4 x 2, 2 x 3 turns, and 2


def test_a_reward_reaches_all_levels_and_each_kind_is_compared_with_its_own():
    def script(name, turn, prompt, request):
        said = three_levels(name, turn, prompt, request)
        return "answer: red old river" if said == "answer: c" and request.key[3] == "0.1" else said

    (group,), _ = play(nested(), script, size=2)
    carried = propagate(score(group), {})
    assert {(t.rollout_id, t.rewards["shared"]) for t in carried.trajectories} == {("0.0", 0.0), ("0.1", 1.0)}
    result = group_relative(carried.trajectories, credits(carried, {}))
    signs = {(t.agent, t.rollout_id): result.values[t.id] for t in carried.trajectories}
    assert signs == pytest.approx(
        {(a, b): sign for a in ("chief", "lead", "hand") for b, sign in (("0.0", -1.0), ("0.1", 1.0))}, abs=1e-5
    )


def test_findings_below_a_finding_that_nobody_read_have_no_reward():
    system = ask_first(
        agent("chief", "top", delegates=("lead",), max_turns=3, max_sampled=len("lead: l0\nlead: l1") + 1),
        *nested().agents[1:],
    )
    (group,), _ = play(system, three_levels, size=2)
    assert dict(group.dropped) == {"unread_finding": 4}  # two leads in each rollout; their own hands were read
    assert {t.agent: t.trainable for t in group.trajectories} == {"chief": True, "lead": False, "hand": True}
    carried = propagate(score(group), {})
    assert {t.agent for t in carried.trajectories if "shared" in t.rewards} == {"chief"}
    result = group_relative(carried.trajectories, credits(carried, {}))
    assert result.dropped == {"missing_reward": 8, "zero_variance": 2}


def two_kinds():
    return ask_first(
        agent("main", delegates=("finder", "checker"), max_turns=4),
        agent("finder", "small", tools=("look",), max_turns=2, system="You find.", about="finds"),
        Agent(name="checker", model="other", prompt="checker of {question} checks {task}\n{tools}", tools=("count",),
              max_turns=3, max_calls=1, sampling=replace(LONG, max_tokens=30), about="checks"),
    )  # fmt: skip


def count(text):
    """Count the letters."""
    return len(text)


def test_kinds_of_sub_agents_have_prompts_tools_and_limits_of_their_own():
    def script(name, turn, prompt, request):
        if request.key[4] == 0:
            return ("finder: f\nchecker: {question}", "answer: done")[turn]
        return ("look: it", "look: again", "answer: never")[turn] if name == "You" else (
            "count: abc", "count: abcd")[turn]  # fmt: skip

    (group,), roster = play(two_kinds(), script, size=1, tools={"look": look, "count": count})
    finder, checker, main = group.trajectories
    assert text_of(main.turns[0].prompt_ids) == "user: main what is q1?\nfinder: finds\nchecker: checks\n"
    assert text_of(finder.turns[0].prompt_ids) == "system: You find.\nuser: finder f\nlook: Look something up\n"
    # A task is text: no field of a prompt, whatever it looks like.
    shown = "user: checker of what is q1? checks {question}\ncount: Count the letters\n"
    assert text_of(checker.turns[0].prompt_ids) == shown
    assert (finder.stop, len(finder.turns), finder.model) == ("turns", 2, "small")
    assert (checker.stop, len(checker.turns), checker.model) == ("calls", 2, "other")
    assert [c.result for c in checker.turns[0].calls] == ["3"]
    assert {r.params.max_tokens for r in roster.engines["other"].requests} == {30}
    assert main.reads == (finder.id, checker.id)


def test_one_kind_cannot_use_the_other_s_tools_and_main_has_none():
    def script(name, turn, prompt, request):
        if request.key[4] == 0:
            return "finder: f\nchecker: c" if turn == 0 else "look: it"
        return "count: x" if name == "You" else "look: x"

    (group,), _ = play(two_kinds(), script, size=1, tools={"look": look, "count": count})
    assert [(t.stop, t.faults) for t in group.trajectories] == [("malformed", ("malformed",))] * 3


def test_what_an_episode_may_still_sample_is_the_limit_of_its_next_turn():
    system = ask_first(agent("a", tools=("look",), max_turns=9, max_sampled=420))
    says = ["look: xx", "look: yyyy", "answer: z"]
    (group,), roster = play(system, lambda name, turn, *_: says[turn], size=1)
    assert [r.params.max_tokens for r in roster.engines["base"].requests] == [400, 400, 400]
    tight = ask_first(replace(system.agents[0], max_sampled=30))
    (group,), roster = play(tight, lambda name, turn, *_: says[turn], size=1)
    assert [r.params.max_tokens for r in roster.engines["base"].requests] == [30, 30 - 9, 30 - 9 - 11]
    assert group.trajectories[0].output == "z"
    assert group.trajectories[0].num_sampled == 30


def pipeline():
    """planner -> main, an episode with two researchers -> writer, who reads main."""

    async def run_it(team, q):
        plan = await team.ask("planner", task=q.text)
        found = await team.ask("main", task=plan.output, reads=[plan])
        return await team.ask("writer", task=found.output, reads=[found])

    agents = (
        agent("planner"),
        agent("main", delegates=("hand",), max_turns=3),
        agent("hand", tools=("look",), max_turns=3),
        agent("writer"),
    )
    return System(run=run_it, agents=agents)


def draws(name, turn, prompt, request):
    replies = {"planner": ["plan"], "main": ["hand: x\nhand: y", "answer: m"], "hand": ["look: it", "answer: h"]}
    said = replies.get(name, ["w"])[turn]
    return said + random.Random(repr(request.key)).choice(" abc") if "look" not in said and "hand" not in said else said


def test_an_episode_before_the_fork_is_run_once_and_none_of_it_is_trained():
    looked = []

    def looks(text):
        looked.append(text)
        return look(text)

    (group,), roster = play(pipeline(), draws, round_robin([0, 0, 0, 1]), size=3, tools={"look": looks})
    trunk = [t for t in group.trajectories if t.rollout_id is None]
    assert [t.agent for t in trunk] == ["planner", "hand", "hand", "main"]
    assert [t.agent for t in group.trajectories if t.rollout_id is not None] == ["writer"] * 3
    assert {t.trainable for t in trunk} == {False}
    assert looked == ["it"] * 2
    assert len(roster.engines["base"].requests) == 1 + 2 * 2 + 2 + 3
    assert [t.agent for t in group.by_rollout()["0.2"]] == ["planner", "hand", "hand", "main", "writer"]
    assert [t.caller for t in trunk] == [None, trunk[3].id, trunk[3].id, None]
    assert set(trunk[3].reads) == {t.id for t in trunk[:3]}
    everyone = {t.id: 1.0 for t in group.trajectories}
    assert {s.agent for s in make_samples(group, everyone)} == {"writer"}


def test_a_fork_at_an_episode_gives_whole_episodes_that_are_trained():
    (group,), _ = play(pipeline(), draws, round_robin([0, 1, 0, 0]), size=3)
    assert [t.agent for t in group.trajectories if t.rollout_id is None] == ["planner"]
    rollout = group.by_rollout()["0.1"]
    assert [(t.agent, t.call, t.trainable) for t in rollout] == [
        ("planner", 0, False), ("hand", 1, True), ("hand", 1, True), ("main", 1, True), ("writer", 2, True),
    ]  # fmt: skip
    assert {t.caller for t in rollout if t.agent == "hand"} == {"0:q1:0.1:1"}


def test_those_who_are_delegated_to_are_no_place_to_fork():
    seen = {play(pipeline(), draws, round_robin(), questions=(f"q{i}",))[0][0].trajectories[0].agent for i in range(9)}
    assert seen == {"planner"}  # the trunk's first, or where nothing is before the fork a rollout's
    points = set()
    for i in range(20):
        (group,), _ = play(pipeline(), draws, round_robin(), questions=(f"q{i}",), size=2)
        points.add(sum(t.rollout_id is None and t.caller is None for t in group.trajectories))
    assert points == {0, 1, 2}
    with pytest.raises(ConfigError, match=r"fork_probabilities: 0\.5 for hand, which works for its caller"):
        play(pipeline(), draws, round_robin([0, 0.5, 0.5, 0]))


def test_independent_sampling_has_a_pass_for_each_ask_and_trains_an_episode_with_all_it_delegated():
    (group,), roster = play(pipeline(), draws, independent, size=2)
    trained = [(t.pass_id, t.agent) for t in group.trajectories if t.trainable]
    assert trained == [
        *[(0, "planner")] * 2, *[(1, "hand"), (1, "hand"), (1, "main")] * 2, *[(2, "writer")] * 2,
    ]  # fmt: skip
    ids = [t.id for t in group.trajectories]
    assert len(set(ids)) == len(ids)
    keys = [r.key for r in roster.engines["base"].requests]
    assert len(set(keys)) == len(keys)


def test_a_trunk_s_unread_findings_are_counted_once():
    system = pipeline()
    short = replace(system.agents[1], max_sampled=len("hand: x\nhand: y") + 1)
    system = replace(system, agents=(system.agents[0], short, *system.agents[2:]))
    (group,), _ = play(system, draws, round_robin([0, 0, 0, 1]), size=3)
    assert dict(group.dropped) == {"unread_finding": 2}
    assert [t.stop for t in group.trajectories if t.agent == "main"] == ["tokens"]


def test_a_greedy_roster_is_greedy_at_every_level():
    roster = roster_of(nested(), three_levels)
    run(fork(Job(system=nested(), roster=roster.greedy(), question=question()), at=0, size=1))
    requests = [r for e in roster.engines.values() for r in e.requests]
    assert len(requests) == 16
    assert {(r.params.temperature, r.params.top_p) for r in requests} == {(0.0, 1.0)}
    run(fork(Job(system=nested(), roster=roster, question=question()), at=0, size=1))
    assert {r.params.temperature for r in roster.engines["base"].requests[14:]} == {1.0}


def test_a_script_sees_the_turns_so_far_and_speaks_at_every_level():
    seen = []

    def script(name, q, fields):
        seen.append((name, fields["task"], [c.result for t in fields["turns"] for c in t.calls]))
        return three_levels(name, len(fields["turns"]), "", None)

    roster = roster_of(nested(), three_levels)
    work = Job(system=nested(), roster=roster, question=question(), script=script, group_size=1)
    group = run(fork_on_first(work))
    assert all(e.requests == [] for e in roster.engines.values())
    assert {t.trainable for t in group.trajectories} == {True}
    assert ("lead", "l1", ["h", "h"]) in seen
    assert ("chief", "what is q1?", ["l", "l"]) in seen


def test_an_episode_in_which_an_engine_spoke_is_no_lesson_and_what_it_delegated_may_be():
    def script(name, q, fields):
        turn = len(fields["turns"])
        return None if (name, turn) == ("lead", 2) else three_levels(name, turn, "", None)

    roster = roster_of(nested(), three_levels)
    group = run(fork_on_first(Job(system=nested(), roster=roster, question=question(), script=script, group_size=1)))
    assert {t.agent: t.trainable for t in group.trajectories} == {"chief": True, "lead": False, "hand": True}
    assert [r.key[4:] for r in roster.engines["base"].requests] == [("0.0.0", 2), ("0.0.1", 2)]


def test_a_delegate_that_fails_removes_its_rollout_after_its_siblings_have_ended():
    def script(name, turn, prompt, request):
        if name == "hand" and request.key[3] == "0.1" and prompt.split()[2] == "y":
            raise InfrastructureError("engine", "it is down", "Wait")
        return three_at_once(name, turn, prompt, request)

    (one, two), roster = play(boss_and_hands(max_turns=2), script, questions=("q1", "q2"), size=3)
    for group in (one, two):
        assert dict(group.dropped) == {"infrastructure": 1}
        assert set(group.by_rollout()) == {"0.0", "0.2"}
        assert len(group.trajectories) == 2 * 4
    asked = [r.key for r in roster.engines["sub"].requests if r.key[2:4] == ("q1", "0.1")]
    assert sorted(key[4:] for key in asked) == [("0.0.0", 0), ("0.0.0", 1), ("0.0.1", 0), ("0.0.2", 0), ("0.0.2", 1)]


def test_a_time_out_of_somebody_else_is_not_taken_for_the_episode_s():
    def script(name, turn, prompt, request):
        raise TimeoutError("the engine's own")

    system = ask_first(agent("a", tools=("look",), max_turns=2, max_time_s=100.0))
    with pytest.raises(TimeoutError, match="the engine's own"):
        play(system, script)


def test_a_tool_or_delegate_that_is_not_on_the_roster_is_an_error():
    system = ask_first(agent("a", tools=("fly",), max_turns=2))
    with pytest.raises(WorkflowError, match="tool 'fly', which it does not have. Known tools: look"):
        play(system, lambda *_: "")
    system = ask_first(agent("a", delegates=("b",), max_turns=2))
    with pytest.raises(WorkflowError, match="'b', who is not on the roster. Known agents: a"):
        play(system, lambda *_: "")


def test_an_episode_within_asks_that_run_at_once_does_not_hang_a_cohort():
    async def both(team, q):
        first, second = await asyncio.gather(team.ask("boss", task="1"), team.ask("boss", task="2"))
        return await team.ask("hand", task="3", reads=[first, second])

    system = System(run=both, agents=boss_and_hands(max_turns=2).agents)
    (group,), _ = play(system, three_at_once, size=2)
    assert len(group.trajectories) == 2 * (4 + 4 + 1)
    for rollout in group.by_rollout().values():
        assert [t.call for t in rollout] == [0] * 4 + [1] * 4 + [2]
        assert {t.caller for t in rollout if t.agent == "hand"} == {
            rollout[3].id, rollout[7].id, None,
        }  # fmt: skip


def test_calls_that_are_cancelled_before_they_began_leave_the_cohort():
    async def main():
        cohort = Cohort()
        cohort.enter()
        tasks = [asyncio.create_task(cohort.gather([asyncio.sleep(9) for _ in range(3)]))]
        await asyncio.sleep(0)  # the three have been made, none has begun
        tasks[0].cancel()
        await asyncio.wait(tasks)
        return cohort.live

    assert run(main()) == 1


REPLIES = ["look: x", "look: x\nlook: y", "answer: red", "answer: red old river", "hm", "answer: old", ""]


def random_team(draw):
    """boss -> lead -> hand, on one to three models, with limits of every kind."""
    models = draw.choice([("m", "m", "m"), ("m", "n", "n"), ("m", "n", "o")])
    below = {"boss": ("lead", "hand"), "lead": ("hand",), "hand": ()}
    return ask_first(
        *(
            agent(name, model, tools=("look",), delegates=below[name], max_turns=draw.randint(2, 4),
                  max_calls=draw.choice([None, 3]), max_sampled=draw.choice([None, 60]))
            for name, model in zip(below, models, strict=True)
        )
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_any_episodes_keep_their_lineage_under_any_batching(seed):
    draw = random.Random(seed)
    system = random_team(draw)

    def script(name, turn, prompt, request):
        if seed % 4 == 0 and random.Random(f"{seed}{request.key}").random() < 0.02:
            raise InfrastructureError("engine", "it is down", "Wait")
        pick = random.Random(f"{request.key}")
        calls = {"boss": ["lead: a\nhand: b", "lead: c"], "lead": ["hand: d\nhand: e"], "hand": []}[name]
        return pick.choice(calls * 3 + REPLIES)

    async def slow(text):
        for _ in range(random.Random(f"{seed}{text}").randint(0, 4)):
            await asyncio.sleep(0)
        return "seen"

    results = []
    for batching in ("step", "group", "continuous"):
        groups, roster = play(system, script, batching=batching, size=3, questions=("q1", "q2"), tools={"look": slow})
        results.append(groups)
        keys = [r.key for e in roster.engines.values() for r in e.requests]
        assert len(set(keys)) == len(keys)
    assert results[0] == results[1] == results[2]
    for group in results[0]:
        own = {t.id: t for t in group.trajectories}
        assert len(own) == len(group.trajectories)
        assert len(group.by_rollout()) == 3 - group.dropped.get("infrastructure", 0)
        unread = 0
        for rollout in group.by_rollout().values():
            assert [t.agent for t in rollout if t.caller is None] == ["boss"]
            for t in rollout:
                delegated = [c.trajectory_id for turn in t.turns for c in turn.calls if c.trajectory_id]
                assert [own[id].caller for id in delegated] == [t.id] * len(delegated)
                assert set(t.reads) <= set(delegated)
                unread += len(delegated) - len(t.reads)
                assert {own[id].trainable for id in set(delegated) - set(t.reads)} <= {False}
                assert all(own[id].rollout_id == t.rollout_id for id in delegated)
        if not group.dropped.get("infrastructure"):
            assert group.dropped.get("unread_finding", 0) == unread


def test_a_fork_after_an_episode_repeats_its_result_and_none_of_its_calls():
    teams = []

    async def run_it(team, q):
        teams.append(team)
        main = await team.ask("main", task=q.text)
        return await team.ask("writer", task=main.output, reads=[main])

    system = System(run=run_it, agents=pipeline().agents[1:])
    (group,), _ = play(system, draws, round_robin([0, 0, 1]), size=2)
    assert [t.agent for t in group.trajectories] == ["hand", "hand", "main", "writer", "writer"]
    assert [len(team.trajectories) for team in teams] == [3, 1, 1]
    assert all(isinstance(team, Team) for team in teams)
