"""The laws of M-GRPO (docs/methods.md), over rollouts that delegate any number of times to several kinds of helpers."""

import itertools
import math
import random
from dataclasses import replace
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain.batch import make_samples, pack
from cotrain.engines.scripted import ScriptedEngine
from cotrain.errors import InfrastructureError
from cotrain.loops import judge, samples_by_model
from cotrain.roster import Roster
from cotrain.runs import read_groups, write_groups
from cotrain.sampling import Job, fork_on_first
from support import CharRenderer, CharTokenizer, question, run
from support_mgrpo import (
    HELPERS,
    SPREADS,
    Helper,
    Rollout,
    copies,
    group_of,
    plan_of,
    reference_advantages,
    reference_credits,
    siblings,
)

# --- Who is compared with whom ------------------------------------------------------------------------------------

SCORES = st.sampled_from(["0", "0.25", "0.5", "1"])
FINDINGS = st.builds(
    Helper,
    said=SCORES,
    agent=st.sampled_from(HELPERS),
    faulty=st.booleans(),
    read=st.sampled_from([True] * 5 + [False]),
)
ROLLOUTS = st.builds(
    Rollout,
    said=st.sampled_from(["right", "wrong"]),
    helpers=st.lists(FINDINGS, max_size=4).map(tuple),
    faulty=st.sampled_from([False] * 4 + [True]),
)
TEAMS = st.lists(ROLLOUTS, min_size=1, max_size=6)
METHODS = st.sampled_from(["weight", "none", "duplicate"])
STDS = st.sampled_from(["population", "sample"])


def settings_of(method, size=3, std="population"):
    return (f"align.method={method}", *([f"align.size={size}"] * (method == "duplicate")), f"advantage.std={std}")


def check(record, method, size, std):
    """A record's weights, and its advantages against means and stds over written-out copies."""
    group = record.group
    credits = reference_credits(group)
    assert record.credits == pytest.approx(credits)
    plan = plan_of(*settings_of(method, size, std))
    counts = plan.align(group, credits)
    if method == "duplicate":
        for (agent, _), ids in siblings(group, credits).items():
            drawn = [counts[id] for id in ids]
            assert sum(drawn) == (1 if agent == "main" else size)
            assert agent == "main" or min(drawn) >= (len(ids) <= size)
            assert max(drawn) <= (1 if len(ids) >= size else size)
    else:
        shares = siblings(group, credits).values()
        assert counts == {id: 1 / len(ids) if method == "weight" else 1.0 for ids in shares for id in ids}
        written = copies(group, credits, method)
        counts = written
    expected = reference_advantages(group, credits, counts, SPREADS[std])
    if method == "weight" and std == "sample":  # n is the number of trajectories, not of the copies written out
        for agent in ("main", *HELPERS):
            ids = [id for (name, _), row in siblings(group, credits).items() if name == agent for id in row]
            pool = [credits[id] for id in ids for _ in range(counts[id])]
            if len(ids) > 1:
                spread = pstdev(pool) * math.sqrt(len(ids) / (len(ids) - 1))
                expected |= {id: (credits[id] - fmean(pool)) / (spread + 1e-6) for id in ids if id in expected}
    assert record.advantages == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert set(record.weights) == set(expected)


@settings(max_examples=300)
@given(TEAMS, METHODS, st.integers(1, 5), STDS)
def test_peers_are_one_agents_trajectories_of_one_question_over_all_rollouts(rollouts, method, size, std):
    (record,), _ = run(judge(plan_of(*settings_of(method, size, std)), [group_of(rollouts)]))
    check(record, method, size, std)


@settings(max_examples=100)
@given(st.lists(TEAMS, min_size=2, max_size=3), METHODS)
def test_questions_do_not_touch_each_other(teams, method):
    plan = plan_of(*settings_of(method))
    groups = [group_of(rollouts, id=f"q{i}") for i, rollouts in enumerate(teams)]
    together, dropped = run(judge(plan, groups))
    alone = [run(judge(plan, [group])) for group in groups]
    assert together == [record for (record,), _ in alone]
    assert dropped == {reason: sum(d.get(reason, 0) for _, d in alone) for reason in dropped}


@settings(max_examples=100)
@given(TEAMS, METHODS, st.integers(1, 5))
def test_weighted_advantages_sum_to_0_and_have_std_1(rollouts, method, size):
    (record,), _ = run(judge(plan_of(*settings_of(method, size)), [group_of(rollouts)]))
    for agent in ("main", *HELPERS):
        ids = [t.id for t in record.group.trajectories if t.agent == agent and t.id in record.advantages]
        if ids:
            total = math.fsum(record.weights[id] for id in ids)
            moment = [math.fsum(record.weights[id] * record.advantages[id] ** n for id in ids) / total for n in (1, 2)]
            assert moment[0] == pytest.approx(0, abs=1e-9)
            assert math.sqrt(moment[1]) == pytest.approx(1, abs=1e-4)  # stds of these credits are 0.01 or more


@settings(max_examples=100)
@given(st.lists(st.sampled_from(["right", "wrong"]), min_size=1, max_size=6), METHODS)
def test_where_nobody_delegates_there_is_no_sub_update_and_main_is_grpo(answers, method):
    records, _ = run(judge(plan_of(*settings_of(method)), [group_of([Rollout(said) for said in answers])]))
    samples = samples_by_model(records, ["main", "sub"])
    assert samples["sub"] == []
    credits = [0.1 + 0.9 * (said == "right") for said in answers]
    if len(set(credits)) == 1:
        assert samples["main"] == []
        return
    expected = [(r - fmean(credits)) / (pstdev(credits) + 1e-6) for r in credits]
    assert [sample.advantages[-1] for sample in samples["main"]] == pytest.approx(expected)
    assert {sample.weight for sample in samples["main"]} == {1.0}


@pytest.mark.parametrize("method", ["weight", "none", "duplicate"])
def test_sub_advantages_are_never_made_over_one_rollout(method):
    """Within each rollout all credits are equal, so a rollout for itself would teach nothing."""
    rollouts = [Rollout("right", (Helper("0.5"),) * 2), Rollout("wrong", (Helper("0.5"),) * 2), Rollout("wrong")]
    (record,), _ = run(judge(plan_of(*settings_of(method, 2)), [group_of(rollouts)]))
    of_scouts = {id: value for id, value in record.advantages.items() if id.count("/") == 2}
    assert of_scouts == pytest.approx({"q/0/0": 1, "q/0/1": 1, "q/1/0": -1, "q/1/1": -1}, abs=1e-5)


def test_kinds_of_helpers_are_not_compared_and_are_aligned_apart():
    rollouts = [
        Rollout("right", (Helper("1"), Helper("0"), Helper("0"), Helper("1", "coder"))),
        Rollout("right", (Helper("0"), Helper("0", "coder"), Helper("0", "coder"))),
    ]
    (record,), dropped = run(judge(plan_of(*settings_of("weight")), [group_of(rollouts)]))
    weights = {"q/0/0": 1 / 3, "q/0/1": 1 / 3, "q/0/2": 1 / 3, "q/1/0": 1.0, "q/0/3": 1.0, "q/1/1": 0.5, "q/1/2": 0.5}
    assert record.weights == pytest.approx(weights)
    root = math.sqrt(5)  # scouts: mean 1/6 of the way up, std sqrt(5)/6; coders: 1/2 and 1/2
    scouts = {"q/0/0": root, "q/0/1": -1 / root, "q/0/2": -1 / root, "q/1/0": -1 / root}
    assert record.advantages == pytest.approx({**scouts, "q/0/3": 1, "q/1/1": -1, "q/1/2": -1}, abs=1e-4)
    assert dropped == {"zero_variance": 2}  # both answers are right


@settings(max_examples=60)
@given(TEAMS, st.integers(2, 4), st.data())
def test_under_weight_a_rollout_that_says_all_of_it_again_changes_nothing_for_the_others(rollouts, times, data):
    """Who delegates more often with the same outcome counts as before; without alignment it does not."""
    k = data.draw(st.integers(0, len(rollouts) - 1))
    louder = [replace(r, helpers=r.helpers * (times if i == k else 1)) for i, r in enumerate(rollouts)]
    plan = plan_of(*settings_of("weight"))
    (before,), _ = run(judge(plan, [group_of(rollouts)]))
    (after,), _ = run(judge(plan, [group_of(louder)]))
    shared = before.advantages.keys() & after.advantages.keys()
    assert {id: after.advantages[id] for id in shared} == pytest.approx(dict(before.advantages), abs=1e-9)


def test_without_alignment_the_rollout_that_delegates_most_has_the_mean():
    rollouts = [Rollout("right", (Helper("1"),)), Rollout("right", (Helper("0"),) * 3)]
    means = {}
    for method in ("none", "weight"):
        (record,), _ = run(judge(plan_of(*settings_of(method)), [group_of(rollouts)]))
        means[method] = record.advantages["q/0/0"]
    assert means == pytest.approx({"none": math.sqrt(3), "weight": 1.0}, abs=1e-4)  # 0.75 / sqrt(3/16), 0.5 / 0.5


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 6), METHODS)
def test_played_episodes_have_the_same_peers_as_groups_made_by_hand(seed, size, method):
    """A scripted team that delegates at random, to several at once and in several turns."""

    def script(prompt, request):
        noise = random.Random(f"{seed}{request.key}")
        if prompt.startswith("user: look"):
            return noise.choice(["0", "0.25", "0.5", "1"])
        if noise.random() < 0.5:
            return noise.choice(["answer: right", "answer: wrong", "answer: wrong", "hm"])
        return "\n".join(f"{noise.choice(HELPERS)}: look" for _ in range(noise.randint(1, 3)))

    plan = plan_of(*settings_of(method))
    engine = ScriptedEngine(script, CharTokenizer())
    models = ("main", "sub")
    cast = Roster(
        agents=plan.agents, engines=dict.fromkeys(models, engine), renderers=dict.fromkeys(models, CharRenderer())
    )
    work = Job(system=plan.system, roster=cast, question=question(), seed=seed, step=1, group_size=size)
    group = run(fork_on_first(work))
    assert len(group.by_rollout()) == size
    (record,), dropped = run(judge(plan, [group]))
    check(record, method, 3, "population")
    assert dropped.get("infrastructure", 0) == 0


# --- A judge that fails -------------------------------------------------------------------------------------------

FALLIBLE = st.lists(
    st.builds(
        Rollout,
        said=st.sampled_from(["right", "wrong", "unjudged"]),
        helpers=st.lists(
            st.builds(
                Helper,
                said=st.sampled_from(["0", "0.5", "1", "failed"]),
                agent=st.sampled_from(HELPERS),
                faulty=st.booleans(),
            ),
            max_size=4,
        ).map(tuple),
        faulty=st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


def without(group, ids):
    kept = [replace(t, reads=tuple(i for i in t.reads if i not in ids)) for t in group.trajectories if t.id not in ids]
    return replace(group, trajectories=tuple(kept))


@settings(max_examples=200)
@given(FALLIBLE, METHODS)
def test_what_could_not_be_judged_is_as_if_it_were_not_there(rollouts, method):
    """A failed expert takes its trajectory, a failed verdict its rollout; nothing is 0 and nothing a gift for it."""
    group, plan = group_of(rollouts), plan_of(*settings_of(method))
    gone, failed_verdicts, failed_scores = set(), 0, 0
    for k, rollout in enumerate(rollouts):
        ids = [f"q/{k}/{i}" for i in range(len(rollout.helpers))]
        failed = [id for id, helper in zip(ids, rollout.helpers, strict=True) if helper.said == "failed"]
        is_unknown = rollout.said == "unjudged" and not rollout.faulty
        gone |= {f"q/{k}", *ids} if is_unknown else set(failed)
        failed_verdicts += rollout.said == "unjudged"
        failed_scores += len(failed)
    (record,), dropped = run(judge(plan, [group]))
    (other,), others_dropped = run(judge(plan, [without(group, gone)]))
    assert set(record.credits) == {t.id for t in group.trajectories} - gone
    assert record.credits == other.credits
    assert record.advantages == other.advantages
    assert record.weights == other.weights
    assert dropped.get("missing_reward", 0) == len(gone)
    assert dropped.get("judge_failed/shared", 0) == failed_verdicts
    assert dropped.get("judge_failed/expert", 0) == failed_scores
    for reason in ("singleton", "zero_variance", "aligned_away"):
        assert dropped.get(reason, 0) == others_dropped.get(reason, 0)


@settings(max_examples=200)
@given(FALLIBLE, METHODS)
def test_under_renormalise_a_failed_expert_rescales_that_credit_and_a_failed_verdict_pays_nobody(rollouts, method):
    group = group_of(rollouts)
    renormalise = [f"rewards.credit.{name}.missing=renormalise" for name in HELPERS]
    (record,), _ = run(judge(plan_of(*settings_of(method), *renormalise), [group]))
    expected = reference_credits(group, missing="renormalise")
    assert record.credits == pytest.approx(expected)
    (dropping,), _ = run(judge(plan_of(*settings_of(method)), [group]))
    assert {id: record.credits[id] for id in dropping.credits} == dropping.credits
    by_id = {t.id: t for t in group.trajectories}
    assert all(by_id[id].output == "failed" for id in record.credits.keys() - dropping.credits.keys())
    counts = (
        copies(group, expected, method)
        if method != "duplicate"
        else plan_of(*settings_of(method)).align(group, expected)
    )
    assert record.advantages == pytest.approx(reference_advantages(group, expected, counts), rel=1e-6, abs=1e-9)


def test_a_judge_that_raises_is_a_judge_that_fails():
    async def down(group, trajectory):
        raise InfrastructureError("judge", "it is down", "Start it")

    plan = plan_of(*settings_of("weight"))
    rollouts = [Rollout("right", (Helper("1"), Helper("0"))), Rollout("wrong", (Helper("0.5"),))]
    group = group_of(rollouts)
    no_expert = replace(plan, judges={**plan.judges, "expert": dict.fromkeys(HELPERS, down)})
    (record,), dropped = run(judge(no_expert, [group]))
    assert record.credits == pytest.approx({"q/0": 1.0, "q/1": 0.1})
    assert dropped == {"judge_failed/expert": 3, "missing_reward": 3}
    no_verdict = replace(plan, judges={**plan.judges, "shared": {"main": down}})
    (record,), dropped = run(judge(no_verdict, [group]))
    assert record.credits == record.advantages == record.weights == {}
    assert dropped == {"judge_failed/shared": 2, "missing_reward": 5}


# --- Shares of the loss -------------------------------------------------------------------------------------------

SHAPES_OF_TWO_KINDS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=2, max_size=4)


@settings(max_examples=100)
@given(SHAPES_OF_TWO_KINDS, METHODS, st.integers(1, 4), st.sampled_from([1.0, 0.5, 3.0]), st.integers(8, 60))
def test_main_and_sub_weigh_1_to_1_under_weight_and_1_to_d_under_duplicate(shape, method, size, factor, tokens):
    """All played by one model: the coefficients of its batch, over the packs, by rollout and agent."""
    numbers = itertools.count(1)  # no two findings are worth the same, whatever the answer
    rollouts = [
        Rollout(
            "right" if k % 2 else "wrong",
            tuple(
                Helper(str(next(numbers) / 64), name)
                for name, d in zip(HELPERS, (scout, coder), strict=True)
                for _ in range(d)
            ),
        )
        for k, (scout, coder) in enumerate(shape)
    ]
    plan = plan_of(
        "models.one.path=tiny-llama",
        *(f"agents.{name}.model=one" for name in ("main", *HELPERS)),
        *settings_of(method, size),
        f"align.factors.scout={factor}",
    )
    (record,), dropped = run(judge(plan, [group_of(rollouts, model="one")]))
    packs = pack(make_samples(record.group, record.advantages, record.weights), tokens_per_pack=tokens)
    mass = {}
    for part in packs:
        for coefficient, place in zip(part.coefficients_N, part.trajectory_N, strict=True):
            key = part.agents[place], part.trajectories[place].split("/")[1]
            mass[key] = mass.get(key, 0.0) + coefficient
    assert math.fsum(mass.values()) == pytest.approx(1.0)
    coders = [d for _, d in shape if d]
    trains = len(coders) > 1 or (coders and min(coders[0], size if method == "duplicate" else 4) > 1)
    for k, (scout, coder) in enumerate(shape):
        main = mass["main", str(k)]
        share = {"weight": lambda d: 1, "duplicate": lambda d: size, "none": lambda d: d}[method]
        assert mass["scout", str(k)] / main == pytest.approx(share(scout) * factor)
        assert mass.get(("coder", str(k)), 0.0) / main == pytest.approx(share(coder) if coder and trains else 0)
    assert set(dropped) <= {"aligned_away", "singleton"}


def test_factors_touch_the_loss_and_not_the_statistics():
    rollouts = [Rollout("right", (Helper("1"), Helper("0"))), Rollout("wrong", (Helper("0.5"),))]
    plain, factored = (
        run(judge(plan_of(*settings_of("weight"), *factors), [group_of(rollouts)]))[0][0]
        for factors in ((), ("align.factors.scout=2.5",))
    )
    assert factored.advantages == plain.advantages
    assert plain.weights == {"q/0": 1.0, "q/1": 1.0, "q/0/0": 0.5, "q/0/1": 0.5, "q/1/0": 1.0}
    assert factored.weights == {"q/0": 1.0, "q/1": 1.0, "q/0/0": 1.25, "q/0/1": 1.25, "q/1/0": 2.5}


@settings(max_examples=40)
@given(TEAMS, METHODS)
def test_a_judged_group_is_read_back_as_it_was_trained_on(tmp_path_factory, rollouts, method):
    folder = tmp_path_factory.mktemp("run")
    records, _ = run(judge(plan_of(*settings_of(method)), [group_of(rollouts)]))
    write_groups(folder, 1, records)
    (again,) = read_groups(folder, 1)
    assert again == records[0]
    assert make_samples(again.group, again.advantages, again.weights) == make_samples(
        records[0].group, records[0].advantages, records[0].weights
    )
