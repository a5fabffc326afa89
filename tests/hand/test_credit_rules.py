"""M-GRPO's credits: values worked out by hand from its formulas, and what becomes of an unknown reward."""

import pytest

from cotrain.rewards import at_least, credits, f1, propagate, score
from cotrain.systems.deep_research import deep_research
from cotrain.systems.single_agent import single_agent
from cotrain.types import CreditRule, Group, Question, Trajectory

RULES = deep_research().rules


def trajectory(id, agent, **more):
    fields = {"rollout_id": "0.0", "call": 0, "pass_id": 0, **more}
    return Trajectory(id=id, question_id="q", agent=agent, model=agent, **fields)


def main(answer="gold", faults=(), reads=("s",), rewards=None, **more):
    return trajectory("m", "main", output=answer, faults=faults, reads=reads, rewards=rewards or {}, **more)


def sub(expert=None, faults=(), id="s", caller="m", **more):
    rewards = {} if expert is None else {"expert": expert}
    return trajectory(id, "researcher", faults=faults, caller=caller, rewards=rewards, **more)


def group(*trajectories):
    question = Question(id="q", text="?", answers=("gold",))
    return Group(question=question, step=0, strategy="test", trajectories=trajectories)


CORRECT = at_least(f1, 0.9)


def credit_of(*trajectories, rules=RULES, metric=CORRECT):
    return credits(propagate(score(group(*trajectories), metric, rules), rules), rules)


def changed(**fields):
    """The team's rules, the researcher's with other settings."""
    values = {"weights": RULES["researcher"].weights, "gate": True, **fields}
    return {**RULES, "researcher": CreditRule(**values)}


def test_the_published_weights_are_the_teams_own():
    assert dict(RULES["main"].weights) == {"format": 0.1, "shared": 0.9}
    assert dict(RULES["researcher"].weights) == {"format": 0.1, "shared": 0.4, "expert": 0.5}
    assert all(rule.gate and rule.missing == "drop" for rule in RULES.values())
    assert dict(single_agent().rules["solver"].weights) == {"format": 0.1, "shared": 0.9}


@pytest.mark.parametrize(
    ("answer", "main_faults", "sub_faults", "expert", "of_main", "of_sub"),
    [
        ("gold", (), (), 1.0, 1.0, 1.0),  # 0.1 + 0.9; 0.1 + 0.4 + 0.5
        ("gold", (), (), 0.0, 1.0, 0.5),  # 0.1 + 0.4
        ("gold", (), (), 0.3, 1.0, 0.65),  # 0.1 + 0.4 + 0.15
        ("lead", (), (), 1.0, 0.1, 0.6),  # 0.1; 0.1 + 0.5
        ("lead", (), (), 0.0, 0.1, 0.1),
        ("gold", (), ("truncated",), 1.0, 1.0, 0.0),  # the sub-agent's own format gates it
        ("gold", ("long_answer",), (), 1.0, 0.0, 0.6),  # an invalid answer is not correct, but takes no finding away
        ("lead", ("long_answer",), (), 1.0, 0.0, 0.6),
        ("gold", ("a", "b"), ("c", "d"), 1.0, 0.0, 0.0),
    ],
)
def test_credits_by_hand(answer, main_faults, sub_faults, expert, of_main, of_sub):
    credit = credit_of(sub(expert, sub_faults), main(answer, main_faults))
    assert credit == pytest.approx({"m": of_main, "s": of_sub})


def test_correctness_is_0_or_1_at_the_threshold_and_graded_without():
    assert at_least(f1, 0.5)("gold ring lost", ("gold",)) == 1.0  # F1 = 2 / (3 + 1) = 0.5
    assert at_least(f1, 0.51)("gold ring lost", ("gold",)) == 0.0
    graded = credit_of(sub(1.0), main("gold ring lost"), metric=f1)
    assert graded == pytest.approx({"m": 0.1 + 0.45, "s": 0.1 + 0.2 + 0.5})


def test_without_the_gate_a_fault_costs_the_format_weight_alone():
    rules = {
        "main": CreditRule(weights={"format": 0.1, "shared": 0.9}),
        "researcher": CreditRule(weights={"format": 0.1, "shared": 0.4, "expert": 0.5}),
    }
    credit = credit_of(sub(1.0, ("truncated",)), main(faults=("long_answer",)), rules=rules)
    assert credit == pytest.approx({"m": 0.9, "s": 0.9})


def test_a_penalty_comes_on_top_of_the_gate_and_of_what_is_renormalised():
    assert credit_of(sub(1.0, ("a", "b")), main(), rules=changed(penalty=-0.25))["s"] == -0.25
    rules = changed(penalty=-0.25, missing="renormalise", gate=False)
    assert credit_of(sub(None, ("a",)), main(), rules=rules)["s"] == pytest.approx(0.4 / 0.5 - 0.25)


def test_a_missing_expert_score_drops_that_trajectory_alone():
    judged, failed = sub(0.5), sub(None, id="s1")
    credit = credit_of(judged, failed, main(reads=("s", "s1")))
    assert credit == pytest.approx({"s": 0.75, "m": 1.0})


def test_a_missing_correctness_drops_the_whole_rollout():
    assert credit_of(sub(1.0), sub(0.0, id="s1"), main(reads=("s", "s1")), metric=None) == {}
    assert credit_of(sub(1.0), main(), metric=None, rules=changed(missing="renormalise")) == {}


def test_a_missing_correctness_is_no_unknown_where_the_answers_format_is_invalid():
    credit = credit_of(sub(1.0), main(faults=("no_answer",)), metric=None)
    assert credit == pytest.approx({"m": 0.0, "s": 0.6})


def test_a_verdict_is_taken_where_there_is_no_metric_and_gated_like_one():
    assert credit_of(sub(1.0), main("x", rewards={"shared": 1.0}), metric=None) == pytest.approx({"m": 1.0, "s": 1.0})
    gated = credit_of(sub(1.0), main("x", ("f",), rewards={"shared": 1.0}), metric=None)
    assert gated == pytest.approx({"m": 0.0, "s": 0.6})


def test_a_verdict_about_a_finding_is_not_the_answers_correctness():
    finding = trajectory("s", "researcher", caller="m", rewards={"shared": 1.0, "expert": 1.0})
    assert credit_of(finding, main("x", rewards={"shared": 0.0}), metric=None) == pytest.approx({"m": 0.1, "s": 0.6})
    assert credit_of(finding, main("x"), metric=None) == {}  # the answer's is unknown
    scored = propagate(group(finding, main("x")), RULES)
    assert [dict(t.rewards) for t in scored.trajectories] == [{"expert": 1.0}, {}]
    assert credit_of(finding, main(reads=())) == {"m": 1.0}  # nobody read it


@pytest.mark.parametrize(("answer", "expected"), [("gold", 1.0), ("lead", 0.2)])
def test_renormalising_spreads_the_missing_weight_over_the_known(answer, expected):
    credit = credit_of(sub(None), main(answer), rules=changed(missing="renormalise"))
    assert credit["s"] == pytest.approx(expected)  # (0.1 + 0.4) / 0.5, 0.1 / 0.5
    weights = {"format": 0.2, "shared": 0.8, "expert": 1.0}  # they need not sum to 1: the full mark stays 2
    credit = credit_of(sub(None), main("gold"), rules=changed(weights=weights, missing="renormalise"))
    assert credit["s"] == pytest.approx(2.0)


def test_renormalising_changes_nothing_where_all_is_known_and_pays_no_faulty_output():
    assert credit_of(sub(0.3), main(), rules=changed(missing="renormalise")) == credit_of(sub(0.3), main())
    assert credit_of(sub(None, ("f",)), main(), rules=changed(missing="renormalise"))["s"] == 0.0


@pytest.mark.parametrize("weights", [{"format": 0.1, "expert": 0.9}, {"shared": 0.0, "expert": 1.0}])
def test_renormalising_never_pays_for_format_alone(weights):
    rules = changed(weights=weights, missing="renormalise")
    assert set(credit_of(sub(None), main(), rules=rules)) == {"m"}
    assert credit_of(sub(0.5), main(), rules=rules)["s"] == pytest.approx(
        0.9 * 0.5 + 0.1 if "format" in weights else 0.5
    )


def test_an_unknown_shared_reward_takes_the_credit_whatever_the_weights():
    for missing in ("drop", "renormalise"):
        rules = changed(weights={"expert": 1.0}, missing=missing)
        assert credit_of(sub(1.0), main(), metric=None, rules=rules) == {}
        assert credit_of(sub(1.0), main(), rules=rules)["s"] == 1.0


def test_a_helper_of_a_helper_has_the_answers_correctness_too():
    clerk = trajectory("c", "researcher", caller="s", rewards={"expert": 0.0})
    credit = credit_of(clerk, sub(1.0, reads=("c",)), main())
    assert credit == pytest.approx({"c": 0.5, "s": 1.0, "m": 1.0})
    assert credit_of(clerk, sub(1.0, reads=("c",)), main(faults=("f",))) == pytest.approx(
        {"c": 0.1, "s": 0.6, "m": 0.0}
    )


def test_rollouts_do_not_reach_into_each_other():
    right = [sub(1.0), main()]
    wrong = [
        sub(1.0, id="s1", caller="m1", rollout_id="0.1"),
        trajectory("m1", "main", output="lead", reads=("s1",), rollout_id="0.1"),
    ]
    assert credit_of(*right, *wrong) == pytest.approx({"s": 1.0, "m": 1.0, "s1": 0.6, "m1": 0.1})
