"""`cotrain credit` on a trained toy: what it shows, that it changes nothing, and what it refuses in which words."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cotrain.cli import app
from cotrain.config import load_config
from cotrain.errors import ConfigError
from cotrain.recompute.rescore import recompute
from cotrain.recompute.settings import check_key, make_plans, parse_steps, spans
from cotrain.runs import read_groups, write_groups
from cotrain.train import train
from support import run
from support_mgrpo import Helper, Rollout, group_of, plan_of

TOY = Path(__file__).parents[1] / "toy.py"
CONFIG = f"""
[models.base]
path = "tiny-llama"
[models.base.optimizer]
lr = 3e-3
[system]
name = "{TOY}:toy"
[rewards]
metric = "{TOY}:vowels"
[sampling]
questions_per_step = 2
[data.train.world]
entities = 40
questions = 40
[data.eval.dev]
limit = 1
[data.eval.dev.world]
entities = 40
questions = 40
[loop]
steps = 3
[eval]
every = 0
bootstrap = 100
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three steps of two groups of four rollouts of scout and speaker."""
    folder = tmp_path_factory.mktemp("credit")
    (folder / "run.toml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COTRAIN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.setattr("cotrain.train.try_report", lambda folder: None)  # which takes longer than the rest
        train(load_config(folder / "run.toml"), folder / "run")
    return folder / "run"


@pytest.fixture
def credit(trained, capsys, monkeypatch):
    """Run the command on the trained toy: (exit code, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments, folder=trained):
        with pytest.raises(SystemExit) as end:
            app(["credit", str(folder), *map(str, arguments)])
        captured = capsys.readouterr()
        return end.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of the trained toy that a test may change."""
    (tmp_path / "config.toml").write_bytes((trained / "config.toml").read_bytes())
    for step in (1, 2, 3):
        write_groups(tmp_path, step, read_groups(trained, step))
    return tmp_path


def cells(out, agent, row):
    """The three numbers of a row of an agent's table."""
    lines = out[out.index(f"{agent} on ") :].splitlines()
    return [cell.strip() for cell in next(line for line in lines if row in line).split("│")[2:5]]


def test_without_settings_the_stored_values_come_out_exactly(credit, trained):
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    code, out, err = credit()
    assert code == 0
    assert out.startswith(f"{trained}, steps 1-3: 6 groups, 48 trajectories\nnothing is set: the run's own settings\n")
    assert "the stored advantages are reproduced exactly with the run's own settings" in out
    assert "scout on base: 24 trajectories" in out
    assert cells(out, "speaker", "credit, mean")[2] == "+0.000"
    assert cells(out, "speaker", "with an advantage")[2] == "+0"
    assert "correlation 1.000, 0.0% changed their sign" in out
    assert out.splitlines()[-1].endswith(" s")
    assert "scoring again: 3 of 3" in err
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before


def test_settings_change_what_they_are_about(credit):
    code, out, _ = credit("--set", "rewards.metric=exact_match", "--set", "rewards.penalties.scout=-0.5")
    assert code == 0
    assert "set: rewards.metric=exact_match, rewards.penalties.scout=-0.5\n" in out
    stored, recomputed, difference = cells(out, "speaker", "shared reward, mean")
    assert float(stored) > 0 == float(recomputed)
    assert float(difference) == -float(stored)
    assert cells(out, "speaker", "dropped: zero_variance")[1] == "24"
    assert cells(out, "speaker", "share of base's gradient")[1] == "?"
    assert "no trajectory has an advantage on both sides" in out


def test_json_has_the_same_and_more(credit, trained):
    code, out, _ = credit("--json", "--steps", "2,3", "--set", "advantage.estimator=no_std")
    assert code == 0
    found = json.loads(out)
    assert found["run"] == str(trained)
    assert (found["set"], found["steps"], found["unscored"]) == (["advantage.estimator=no_std"], [2, 3], [])
    assert (found["num_groups"], found["num_trajectories"], found["is_reproduced"]) == (4, 32, True)
    assert found["time_s"] > 0
    speaker = found["agents"]["speaker"]
    assert (speaker["model"], speaker["estimators"]) == ("base", ["group_relative", "no_std"])
    for side in ("stored", "recomputed"):
        assert sum(agent[side]["gradient_share"] for agent in found["agents"].values()) == pytest.approx(1.0)
    assert speaker["sign_changed"] == 0.0  # a scale turns no sign
    assert speaker["difference"]["advantage_size_mean"] < 0 == speaker["difference"]["credit_mean"]


def test_what_was_changed_since_is_told_apart_from_the_settings(credit, copied):
    records = read_groups(copied, 2)
    id = next(iter(records[0].advantages))
    records[0] = replace(records[0], advantages={**records[0].advantages, id: 9.0})
    write_groups(copied, 2, records)
    code, out, _ = credit(folder=copied)
    assert code == 0
    assert "the stored advantages cannot be reproduced: with the run's own settings 1 trajectories come out" in out
    assert f"otherwise, such as {id}" in out
    assert "reproduced exactly" not in out
    found = json.loads(credit("--json", folder=copied)[1])
    assert (found["is_reproduced"], found["num_differing"], found["differing"]) == (False, 1, [id])


def test_a_step_that_was_never_scored_is_left_out(credit, copied):
    records = read_groups(copied, 3)
    bare = [[replace(t, rewards={}) for t in record.group.trajectories] for record in records]
    groups = [replace(r.group, trajectories=tuple(b)) for r, b in zip(records, bare, strict=True)]
    write_groups(copied, 3, [replace(records[0], group=g, credits={}, advantages={}, weights={}) for g in groups])
    code, out, _ = credit(folder=copied)
    assert code == 0
    assert "steps 1-2: 4 groups, 32 trajectories" in out
    assert "left out, as no trajectory has a reward: steps 3" in out
    assert "reproduced exactly" in out


def test_gae_ends_at_the_credits(credit):
    code, out, _ = credit("--set", "advantage.estimator=gae")
    assert code == 0
    assert "gae: its advantages are made in the trainer, from a critic's values" in out
    assert cells(out, "scout", "|advantage|, mean")[1:] == ["?", "?"]
    assert cells(out, "scout", "credit, mean")[2] == "+0.000"


CAN = "Set rewards, advantage, align, loss.reduction and agents.<name>.trainable, or train a new run."
REFUSED = {
    "judges.expert.rule=coverage": "a judge cannot be asked again, its stored rewards are all there is. Change what "
    "its rewards count (rewards.credit.<agent>.weights), or train a new run.",
    "sampling.group_size=8": f"sampling.group_size shapes the rollouts, and none is made again. {CAN}",
    "models.base.path=x": f"models.base.path shapes the rollouts, and none is made again. {CAN}",
    "agents.scout.max_tokens=3": f"agents.scout.max_tokens shapes the rollouts, and none is made again. {CAN}",
    "loop.seed=3": f"loop.seed shapes the rollouts, and none is made again. {CAN}",
    "loop.steps=9": f"loop.steps acts after the advantages, and nothing is trained or evaluated again. {CAN}",
    "loss.beta=0": f"loss.beta acts after the advantages, and nothing is trained or evaluated again. {CAN}",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_cannot_be_computed_again_is_refused_with_the_reason(setting):
    with pytest.raises(ConfigError) as refused:
        check_key(setting)
    assert str(refused.value) == f"--set {setting}: {REFUSED[setting]}"


def test_the_command_shows_a_refusal_in_three_parts(credit):
    code, out, err = credit("--set", "loss.clip_low=0.1")
    assert (code, out) == (2, "")
    assert err.startswith("error  --set loss.clip_low=0.1\n       loss.clip_low acts after the advantages")
    assert "\nto do  Set rewards, advantage," in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "reward.metric=f1"], "unknown key 'reward'"),
        (["--set", "rewards.metrik=f1"], "unknown key 'rewards.metrik'"),
        (["--set", "agents.scribe.trainable=false"], "unknown name 'scribe'"),
        (["--set", "align.method"], "no key=value pair"),
        (["--steps", "3-2"], "'3-2' names no steps"),
        (["--steps", "2-4"], "the run has no groups of step 4"),
    ],
)
def test_what_does_not_exist_is_refused(credit, arguments, message):
    code, out, err = credit(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_a_folder_without_groups_is_refused(credit, tmp_path):
    assert "no such file" in credit(folder=tmp_path)[2]
    (tmp_path / "config.toml").write_text(CONFIG)
    assert "it has no groups yet" in credit(folder=tmp_path)[2]


def test_steps_are_named_by_spans():
    assert parse_steps("", [1, 2, 4]) == [1, 2, 4]
    assert parse_steps("4, 1-2,2", [1, 2, 3, 4]) == [1, 2, 4]
    assert spans([1, 2, 4, 7, 8, 9]) == "1-2, 4, 7-9"
    for text, found in {
        "x": "'x' names no steps. Write it like 1-20 or 1,5,9.",
        "1,": "'' names no steps. Write it like 1-20 or 1,5,9.",
        "1-4": "the run has no groups of step 3. It has those of steps 1-2, 4.",
        "0-999999999999": "the run has no groups of step 0. It has those of steps 1-2, 4.",
    }.items():
        with pytest.raises(ConfigError) as refused:
            parse_steps(text, [1, 2, 4])
        assert str(refused.value) == f"--steps {text}: {found}"


def test_role_baseline_needs_all_steps_from_the_first(trained):
    plans = make_plans(trained, ["advantage.agents.speaker=role_baseline"])
    for steps in ([2, 3], [1, 3]):
        with pytest.raises(ConfigError) as refused:
            recompute(trained, *plans, steps)
        assert str(refused.value) == (
            f"--steps {spans(steps)}: role_baseline (the new estimator of speaker) averages over all credits since "
            "step 1. Choose steps from 1 on without a gap, such as --steps 1-20."
        )
    with pytest.raises(ConfigError, match="the run's estimator of speaker"):
        recompute(trained, *reversed(plans), [2])
    assert recompute(trained, *plans, [1, 2]).num_differing == 0


def judged_run(folder, *settings):
    """A run of one step whose answers a judge scored; one of them is faulty."""
    from cotrain.config import dump_config
    from cotrain.loops import judge

    plan = plan_of(*settings)
    (folder / "config.toml").write_text(dump_config(plan.config))
    helpers = (Helper(),)
    group = group_of([Rollout(helpers=helpers), Rollout(said="wrong"), Rollout(faulty=True)])
    records, _ = run(judge(plan, [group]))
    write_groups(folder, 1, records)
    return folder


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "rewards.credit.main.gate=false",
            "rewards.credit.main.gate: it put 0 in place of the verdict on the faulty answer q/2, which is not "
            "stored. Keep the gate, or train a new run.",
        ),
        (
            "rewards.metric=accuracy",
            "rewards.metric: the judge named shared scores the answers, no metric does. Leave it out, or train a new "
            "run without judges.shared.",
        ),
        (
            "agents.coder.trainable=true",
            "agents.coder.trainable: its trajectories were not trained on, and which of them could have been is not "
            "stored. Leave it false, or train a new run.",
        ),
    ],
)
def test_what_is_not_stored_is_refused(tmp_path, setting, message):
    folder = judged_run(tmp_path, "agents.coder.trainable=false")
    with pytest.raises(ConfigError) as refused:
        recompute(folder, *make_plans(folder, [setting]), [1])
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ("rewards.metric=accuracy", "Give shapley the weight 0, or train a new run."),
        ("rewards.threshold=0.5", "Give shapley the weight 0, or train a new run."),
        ("rewards.credit.speaker.gate=true", "Keep the gate, or train a new run."),
    ],
)
def test_masked_rollouts_are_not_scored_again(copied, setting, fix):
    text = (copied / "config.toml").read_text().replace("[sampling]", '[sampling]\nshapley = "exact"')
    text += "\n[rewards.credit.scout.weights]\nshared = 1.0\nshapley = 0.0\n"
    (copied / "config.toml").write_text(text)
    counted = "rewards.credit.scout.weights={shapley=1.0, shared=1.0}"
    with pytest.raises(ConfigError) as refused:
        recompute(copied, *make_plans(copied, [counted, setting]), [1, 2, 3])
    assert str(refused.value) == (
        f"{setting.partition('=')[0]}: the stored reward shapley was made with the old one, of masked rollouts that "
        f"are not stored. {fix}"
    )
    recompute(copied, *make_plans(copied, [setting]), [1, 2, 3])


def test_a_gate_may_be_lifted_where_it_hid_no_verdict(tmp_path):
    folder = judged_run(tmp_path)
    outcome = recompute(folder, *make_plans(folder, ["rewards.credit.scout.gate=false"]), [1])
    assert outcome.num_differing == 0  # a helper's own rewards are all stored
