"""What a study.toml may say, which runs it asks for, and what its tables and figure hold."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from cotrain.config import load_config
from cotrain.data.questions import load_set
from cotrain.errors import ConfigError, DataError
from cotrain.study.figure import common_curve, write_figure
from cotrain.study.pages import write_tables
from cotrain.study.plan import Arm, Budget, Collapse, Study, check, chosen_jobs, jobs_of, load_study
from cotrain.study.results import (
    check_fits,
    cost_of,
    curve_of,
    outcome_of,
    read_attempts,
    stability_of,
    state_of,
    usage_path,
)
from cotrain.study.table import finished, tables_of
from support_study import RUN, STUDY, evaluated, fake_run, planned, stepped, written

ROOT = Path(__file__).parents[2]
UNTRAINED = "[arms.untrained]\nupdates = 0\n"


# --- study.toml -------------------------------------------------------------------------------------------------------


def test_seeds_are_outside_and_arms_inside(tmp_path):
    study, jobs = planned(tmp_path, STUDY + UNTRAINED)
    assert list(jobs) == ["first-0", "second-0", "untrained-all", "first-1", "second-1"]
    assert [str(job) for job in jobs.values()][1:3] == ["second, seed 0", "untrained, all seeds"]
    loops = [(j.config.loop.seed, j.config.loop.steps, j.config.loop.max_sampled) for j in jobs.values()]
    assert loops == [(0, 2, None), (0, 2, None), (0, 0, None), (1, 2, None), (1, 2, None)]
    assert jobs["second-1"].config.sampling.strategy == "round_robin"
    assert [j.name for j in chosen_jobs(study, list(jobs.values()), ["first", "untrained"], [1])] == [
        "untrained-all",
        "first-1",
    ]


def test_a_budget_of_tokens_ends_the_runs_unless_the_arm_sets_steps(tmp_path):
    text = STUDY.replace("updates = 2", "sampled = 500") + '[arms.short]\nset = ["loop.steps=3"]\nseeds = [1, 5]\n'
    _, jobs = planned(tmp_path, text)
    loops = {name: (j.config.loop.steps, j.config.loop.max_sampled) for name, j in jobs.items()}
    assert loops["first-0"] == (1_000_000, 500)
    assert loops["short-1"] == loops["short-5"] == (3, 500)
    assert list(jobs)[-1] == "short-5"
    assert "short-0" not in jobs


def test_an_untrained_arm_that_is_warmed_up_is_run_for_every_seed(tmp_path):
    _, jobs = planned(tmp_path, STUDY + UNTRAINED + 'set = ["warmup.steps=2"]')
    assert {"untrained-0", "untrained-1"} <= jobs.keys()


def test_settings_for_all_arms_come_before_the_arms_own(tmp_path):
    common = 'set = ["sampling.group_size=5", "eval.every=0"]\n'
    _, jobs = planned(tmp_path, common + STUDY.replace('["sampling', '["sampling.group_size=3", "sampling'))
    assert [jobs[name].config.sampling.group_size for name in ("first-0", "second-0")] == [5, 3]
    assert jobs["second-0"].config.eval.every == 0


WRONG = {
    "unknown key": ("seeds =", "sedes =", "unknown key 'sedes'. Did you mean 'seeds'?"),
    "no seeds": ("seeds = [0, 1]", "", "study .*study.toml: seeds is missing. Give it a value"),
    "unknown key of an arm": ("[arms.first]", "[arms.first]\nbas = 'x'", "'arms.first.bas'. Did you mean 'base'?"),
    "unknown key of the budget": ("updates = 2", "update = 2", "unknown key 'budget.update'. Did you mean 'updates'?"),
    "two budgets": ("updates = 2", "updates = 2, sampled = 9", "set exactly one of sampled and updates"),
    "no budget": ("updates = 2", "", "set exactly one of sampled and updates"),
    "no baseline": ('baseline = "first"', 'baseline = "frist"', "baseline = 'frist' is no arm. Name one of first, sec"),
    "a seed twice": ("[0, 1]", "[0, 1, 0]", r"seeds = \[0, 1, 0\] has a seed twice"),
    "an arm's seed twice": ("[arms.first]", "[arms.first]\nseeds = [2, 2]", r"arms.first.seeds = \[2, 2\] has a seed"),
    "an arm that is no file": ("[arms.first]", "[arms.'a/b']", "the name 'a/b' cannot be a file's"),
    "an arm's updates": ("[arms.first]", "[arms.first]\nupdates = 3", "arms.first.updates = 3: Input should be 0"),
    "no score": ('"em"', '"exact"', "scores.1 = 'exact'"),
    "an arm's setting": ("sampling.strategy", "sampling.stragety", "arm second, .*Did you mean 'strategy'?"),
    "an arm's seed": ("sampling.strategy=round_robin", "loop.seed=3", "arm second: it sets loop.seed, which the study"),
    "an arm's loop": ("sampling.strategy=round_robin", "loop={steps=3}", "arm second: it sets loop, which the study"),
    "steps beside updates": ("sampling.strategy=round_robin", "loop.steps=3", "arm second: it sets loop.steps, which"),
    "no base": ('base = "', '# "', "arm first: it has no base. Name a run configuration"),
    "no such base": ("BASE", "gone.toml", "arm first, config gone.toml: no such file. Check the path"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named(tmp_path, wrong):
    old, new, found = WRONG[wrong]
    with pytest.raises(ConfigError, match=found):
        jobs_of(load_study(written(tmp_path, STUDY.replace(old, new, 1))))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"study .*none.toml: no such file"):
        load_study(tmp_path / "none.toml")


def test_a_rate_that_falls_over_steps_is_refused_where_tokens_end_the_run(tmp_path):
    run = RUN.replace("lr = 3e-3", 'lr = 3e-3\nschedule = "cosine"')
    planned(tmp_path, STUDY, run)  # a budget of updates is the schedule's end
    text = STUDY.replace("updates = 2", "sampled = 500")
    with pytest.raises(ConfigError, match=r"arm first, models.base.optimizer: schedule = 'cosine', whose end is"):
        planned(tmp_path, text, run)
    _, jobs = planned(tmp_path, 'set = ["loop.steps=9"]\n' + text + UNTRAINED, run)
    assert [jobs[name].config.loop.steps for name in ("second-0", "untrained-all")] == [9, 0]
    with pytest.raises(ConfigError, match=r"arm first: it sets loop.steps = 0. Set updates = 0"):
        planned(tmp_path, 'set = ["loop.steps=0"]\n' + text, run)


def test_unknown_arms_and_seeds_cannot_be_chosen(tmp_path):
    study, jobs = planned(tmp_path)
    with pytest.raises(ConfigError, match="--only third: the study has no such arm. Its arms: first, second"):
        chosen_jobs(study, list(jobs.values()), ["third"], [])
    with pytest.raises(ConfigError, match="--seeds 4: the study has no such seed. Its seeds: 0, 1"):
        chosen_jobs(study, list(jobs.values()), [], [4])


# --- before anything is run -------------------------------------------------------------------------------------------


def checked(folder, text):
    study, jobs = planned(folder, text)
    check(study, list(jobs.values()))


def test_arms_must_fit_together(tmp_path):
    checked(tmp_path, STUDY + UNTRAINED)
    with pytest.raises(ConfigError, match="arm second, align.factors: unknown name 'nobody'"):
        checked(tmp_path, STUDY.replace("sampling.strategy=round_robin", "align.factors.nobody=2.0"))
    with pytest.raises(ConfigError, match="arm second: none of its agents is trained. Train a model, or set updates"):
        checked(tmp_path, STUDY.replace("sampling.strategy=round_robin", "models.base.trainable=false"))


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ('data.eval={"other"={}}', "arm second: its held-out sets are other; those of arm first are dev"),
        (
            "data.eval.dev.limit=3",
            "arm second, held-out set dev: its 3 questions are not the 4 of arm first; .* differ",
        ),
        ("data.eval.dev.world.seed=1", "arm second, held-out set dev: its 4 questions are not the 4 of arm first"),
    ],
)
def test_arms_must_share_their_held_out_questions(tmp_path, setting, found):
    with pytest.raises(ConfigError, match=found):
        checked(tmp_path, STUDY.replace('"sampling.strategy=round_robin"', f"'{setting}'"))


def test_other_settings_may_choose_the_same_questions(tmp_path):
    _, jobs = planned(tmp_path)
    config = jobs["first-0"].config
    (tmp_path / "ids").write_text("\n".join(q.id for q in load_set(config.data.eval["dev"], config.corpus)[0]))
    checked(tmp_path, STUDY.replace("sampling.strategy=round_robin", f"data.eval.dev.ids={tmp_path}/ids"))


def test_the_research_study_has_the_arms_of_the_script(monkeypatch):
    monkeypatch.chdir(ROOT)
    jobs = jobs_of(load_study(Path("recipes/research/study.toml")))
    assert [job.arm for job in jobs[:6]] == ["co", "duplicate", "none", "main-only", "sub-only", "alone"]
    assert len(jobs) == 30
    assert {job.config.loop.max_sampled for job in jobs} == {150_000}
    configs = {job.arm: job.config for job in jobs}
    assert (configs["duplicate"].align.size, configs["none"].align.method) == (1, "none")
    frozen = {arm: [name for name, m in c.models.items() if not m.trainable] for arm, c in configs.items()}
    assert {arm: names for arm, names in frozen.items() if names} == {"main-only": ["sub"], "sub-only": ["main"]}
    assert configs["alone"].system.name.endswith(":alone")


def test_every_key_is_explained():
    page = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    for section in (Study, Arm, Budget, Collapse):
        for key in section.model_fields:
            assert f"`{key}`" in page, key


# --- run folders ------------------------------------------------------------------------------------------------------


def test_a_run_is_finished_once_its_budget_is_spent_and_its_last_step_evaluated(tmp_path):
    _, jobs = planned(tmp_path, STUDY.replace("updates = 2", "sampled = 100"))
    job = jobs["first-0"]
    assert state_of(job) == "missing"
    fake_run(job, [0.0], [1.0], sampled=(60,))
    assert state_of(job) == "begun"
    stepped(job.folder, 2, 120)
    assert state_of(job) == "begun"
    assert outcome_of(job) is None
    evaluated(job.folder, 2, [1.0])
    assert state_of(job) == "finished"
    check_fits(job)


def test_a_run_of_other_settings_or_beyond_the_budget_is_refused(tmp_path):
    _, jobs = planned(tmp_path, STUDY.replace("updates = 2", "sampled = 100"))
    job = jobs["first-0"]
    fake_run(job, [0.0], [1.0], sampled=(60, 120))
    other = replace(job, config=load_config(tmp_path / "run.toml", ["loss.beta=0.5"]))
    with pytest.raises(ConfigError, match=r"first-0: it was made with loss.beta = 0.001, the study says 0.5. Choose"):
        check_fits(other)
    stepped(job.folder, 3, 180)
    with pytest.raises(ConfigError, match="it sampled 180 tokens, and had all of 100 before its last step. Raise"):
        check_fits(job)
    _, jobs = planned(tmp_path)
    with pytest.raises(ConfigError, match="it made 3 updates, 2 are allowed"):
        check_fits(jobs["first-0"])


def test_an_untrained_run_fits_whatever_the_first_seed_is(tmp_path):
    _, jobs = planned(tmp_path, STUDY + UNTRAINED)
    fake_run(jobs["untrained-all"], [0.5], [], sampled=())
    _, jobs = planned(tmp_path, STUDY.replace("[0, 1]", "[1, 0]") + UNTRAINED)
    check_fits(jobs["untrained-all"])
    assert state_of(jobs["untrained-all"]) == "finished"


def test_costs_are_sums_over_the_run_and_over_its_attempts(tmp_path):
    _, jobs = planned(tmp_path)
    job = jobs["first-0"]
    fake_run(job, [0.0], [1.0])
    known = {"updates": 2.0, "sampled": 120.0, "rollout_s": 6.0, "update_s": 2.0, "eval_s": 2.0, "tokens_per_s": 15.0}
    assert cost_of(outcome_of(job)) == known
    first = {"code": -9, "wall_s": 5.0, "cpu_s": 2.0, "peak_bytes": 300}
    attempts(job, first, {"code": 0, "wall_s": 7.0, "cpu_s": 3.0, "peak_bytes": 200})
    assert cost_of(outcome_of(job)) == known | {"wall_s": 12.0, "cpu_s": 5.0, "peak_bytes": 300.0}
    attempts(job, {"pid": 1}, first)  # nobody saw the first one end
    assert cost_of(outcome_of(job)) == known
    usage_path(job).write_text("[]")
    with pytest.raises(DataError, match="not a run's usage"):
        read_attempts(usage_path(job))


def attempts(job, *found):
    usage_path(job).parent.mkdir(exist_ok=True)
    usage_path(job).write_text(json.dumps({"attempts": found}))


@pytest.mark.parametrize(
    ("scores", "faults", "settings", "reasons"),
    [
        ((0.4, 0.6, 0.31), 0.0, {}, []),
        ((0.4, 0.6, 0.29), 0.0, {}, ["reward 0.290 after 0.600"]),
        ((0.4, 0.6, 0.29), 0.0, {"of": "first"}, []),
        ((0.4, 0.6, 0.19), 0.0, {"of": "first"}, ["reward 0.190 after 0.400"]),
        ((0.4, 0.6, 0.31), 0.0, {"drop": 0.25, "score": "f1"}, ["f1 0.310 after 0.600"]),
        ((-0.2, -0.1, -0.2), 0.0, {}, []),  # there was nothing to lose
        ((0.1, 0.1, 0.1), 0.95, {}, ["scout faulty 0.95"]),
        ((0.1, 0.1, 0.1), 0.95, {"faults": 0.97}, []),
    ],
)
def test_when_a_run_counts_as_collapsed(tmp_path, scores, faults, settings, reasons):
    _, jobs = planned(tmp_path)
    job = jobs["first-0"]
    first, middle, last = ([score] * 4 for score in scores)
    fake_run(job, first, middle, sampled=(10,), **{"agent/scout/fault_rate": faults})
    stepped(job.folder, 2, 20, **{"agent/scout/fault_rate": faults})
    evaluated(job.folder, 2, last)
    assert list(stability_of(outcome_of(job), Collapse(**settings)).collapsed) == reasons


def test_stability_is_of_the_last_ten_steps(tmp_path):
    _, jobs = planned(tmp_path, STUDY.replace("updates = 2", "updates = 12"))
    job = jobs["first-0"]
    fake_run(job, [0.0], [], sampled=())
    for step in range(1, 13):
        known = {"agent/scout/kl": 0.25} if step == 12 else {}
        known |= {"agent/scout/entropy": 1.5, "agent/scout/fault_rate": 0.5, "agent/scout/fault/empty": 1.0}
        known |= {"model/base/grad_norm": float(step), "model/base/skipped": int(step < 3)}
        stepped(job.folder, step, step, **known)
    evaluated(job.folder, 12, [0.0])
    found = stability_of(outcome_of(job), Collapse())
    assert (found.grad_norm, found.entropy, found.kl) == ({"base": 7.5}, {"scout": 1.5}, {"scout": 0.25})
    assert (found.fault_rate, found.skipped) == ({"scout": 0.5}, 2)


# --- the table and the figure -----------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path):
    """(study, jobs) of three arms with three seeds, two of them short of a run."""
    study, jobs = planned(tmp_path, STUDY.replace("[0, 1]", "[0, 1, 2]") + UNTRAINED)
    for seed in range(3):
        fake_run(jobs[f"first-{seed}"], [0.0, 0.0, 0.5, 0.5], [1.0, 0.0, 1.0, 0.5])
        attempts(jobs[f"first-{seed}"], {"code": 0, "wall_s": 10.0, "cpu_s": 9.0, "peak_bytes": 400_000_000})
    for seed in range(2):
        fake_run(jobs[f"second-{seed}"], [0.0, 0.0, 0.5, 0.5], [0.5, 0.0, 1.0, 0.5], sampled=(30, 60))
        attempts(jobs[f"second-{seed}"], *[{"code": seed, "wall_s": 10.0, "cpu_s": 9.0, "peak_bytes": 500_000_000}] * 2)
    attempts(jobs["second-2"], {"code": 2})
    fake_run(jobs["untrained-all"], [0.25, 0.0, 0.5, 0.5], [], sampled=())
    return study, list(jobs.values())


def test_the_table_holds_what_a_reader_needs(made):
    study, jobs = made
    runs = finished(jobs)
    text = write_tables(tables_of(study, jobs, runs), study.folder)
    assert text == (study.folder / "table.md").read_text(encoding="utf-8")
    assert "Budget: 2 updates a run. Baseline: first. Finished: 6 of 7 runs." in text
    assert "- not finished: second, seed 2 (failed with code 2; see jobs/second-2.log)" in text
    cells = [re.split(r" *\| *", line.strip("| ")) for line in text.split("\n") if line.startswith("| Reward")]
    rows = {row[1]: row for row in cells}
    assert rows["first"][2:5] == ["3", "0.250", "0.625"]
    assert re.fullmatch(r"\+0\.375 \(\+0\.\d{3} … \+0\.\d{3}\) \[\+0\.\d{3} … \+0\.\d{3}\]", rows["first"][5])
    assert rows["first"][6:] == ["–", "0.625 0.625 0.625"]
    assert re.fullmatch(
        r"-0\.125 \(-0\.\d{3} … [+-]0\.000\)", rows["second"][6]
    )  # two seeds are too few for a second one
    assert rows["untrained"][2:6] == ["all", "–", "0.312", "–"]
    assert rows["untrained"][6].startswith("-0.312 (")
    assert "[" in rows["untrained"][6]  # against three seeds
    assert "one greedy evaluation stands for every seed" in text
    assert "- made in several attempts, so that wall time is their sum, with what was lost: second (seeds 0, 1)" in text
    assert "since nobody saw an attempt end: untrained (all seeds)" in text
    assert "| 60 (×0.50) " in text
    assert "20 s (×2.00)" in text
    assert "500 MB (×1.25)" in text
    assert "6.0 s, 60%" in text
    assert "**Nothing shows that this was defined before the runs.**" in text


def test_a_study_that_redefines_its_collapse_is_told_so(made):
    study, jobs = made
    (study.folder / "jobs" / "collapse.txt").write_text(f"{study.collapse}\n")
    assert "**" not in write_tables(tables_of(study, jobs, finished(jobs)), study.folder)
    study = study.model_copy(update={"collapse": Collapse(drop=0.9)})
    text = write_tables(tables_of(study, jobs, finished(jobs)), study.folder)
    assert (
        "**When the first run began, the definition was another one: the final reward is below 0.5 x the best" in text
    )


def test_a_collapsed_run_is_named_with_its_entropy(made):
    study, jobs = made
    job = next(job for job in jobs if job.name == "second-2")
    fake_run(job, [0.5] * 4, [0.0] * 4, **{"agent/scout/entropy": 0.125, "model/base/grad_norm": 1.0})
    text = write_tables(tables_of(study, jobs, finished(jobs)), study.folder)
    assert "- second, seed 2: reward 0.000 after 0.500; entropy then: scout 0.125" in text
    assert "1 of 3" in text


def test_the_json_holds_every_number(made):
    study, jobs = made
    write_tables(tables_of(study, jobs, finished(jobs)), study.folder)
    found = json.loads((study.folder / "table.json").read_text(encoding="utf-8"))
    row = next(r for r in found["scores"] if (r["arm"], r["score"]) == ("second", "em"))
    assert (row["seeds"], row["num_questions"], row["before"], row["by_seed"]) == ([0, 1], 4, 0.25, [0.5, 0.5])
    assert row["against"]["mean"] == -0.125
    assert row["against"]["num_seeds"] == 2
    assert row["against"]["seeds"] is None
    assert found["study"]["budget"] == {"sampled": None, "updates": 2}
    assert found["unfinished"] == {"second, seed 2": "failed with code 2; see jobs/second-2.log"}


def test_a_difference_over_fewer_seeds_than_the_arm_has_says_so(tmp_path):
    study, jobs = planned(tmp_path, STUDY)
    fake_run(jobs["first-0"], [0.0], [1.0])
    for name in ("second-0", "second-1"):
        fake_run(jobs[name], [0.0], [0.5])
    text = write_tables(tables_of(study, list(jobs.values()), finished(jobs.values())), study.folder)
    assert "-0.500 (-0.500 … -0.500) on 1 seeds" in text


def test_runs_that_end_before_the_budget_are_named(tmp_path):
    text = STUDY.replace("updates = 2", "sampled = 500").replace("set = [", 'set = ["loop.steps=2", ')
    study, jobs = planned(tmp_path, text)
    fake_run(jobs["second-0"], [0.0], [1.0])
    text = write_tables(tables_of(study, list(jobs.values()), finished(jobs.values())), study.folder)
    assert "500 sampled tokens a run; the step that reaches them is its last" in text
    assert "- ended by loop.steps, before the budget was spent: second (seeds 0)" in text


def test_a_study_without_a_finished_run_has_a_table_all_the_same(tmp_path):
    study, jobs = planned(tmp_path)
    text = write_tables(tables_of(study, list(jobs.values()), {}), study.folder)
    assert "Finished: 0 of 4 runs." in text
    assert "- not finished: second, seed 1 (not begun)" in text


def test_curves_are_compared_where_any_run_was_evaluated_up_to_the_shortest(made):
    study, jobs = made
    runs = finished(jobs)
    rows = {row.arm: row for row in tables_of(study, jobs, runs).scores if row.score == "reward"}
    assert curve_of(runs["first"][0], "dev", "reward") == ([0.0, 120.0], [0.25, 0.625])
    x, values_SX = common_curve([runs["first"][0], runs["second"][0]], rows["first"])
    assert x.tolist() == [0.0, 60.0]
    assert values_SX.tolist() == [[0.25, 0.4375], [0.25, 0.5]]


def test_equal_runs_give_equal_files(made):
    study, jobs = made

    def files():
        runs = finished(jobs)
        tables = tables_of(study, jobs, runs)
        write_tables(tables, study.folder)
        names = write_figure(tables, runs, study.folder)
        return {name: (study.folder / name).read_bytes() for name in ("table.md", "table.json", *names)}

    first = files()
    assert first == files()
    assert list(first) == ["table.md", "table.json", "figure.svg", "figure.png"]
    svg = first["figure.svg"].decode()
    assert "<dc:date>" not in svg
    assert all(f">{arm}<" in svg for arm in ("first", "second", "untrained"))
    assert first["figure.png"].startswith(b"\x89PNG")
