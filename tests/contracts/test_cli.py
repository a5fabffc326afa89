"""What each command hands to the library and prints, and how it fails.

Training and evaluation are stand-ins here; `test_calls_fit_the_library` holds their calls against the real functions.
"""

import importlib
import inspect
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.progress import Progress

from cotrain.cli import app
from cotrain.config import RunConfig, dump_config
from cotrain.data.questions import write_questions
from cotrain.evaluate import Prediction
from cotrain.progress import Display, metrics_line
from cotrain.reference import configuration_reference
from cotrain.runs import GroupRecord, append_metrics, write_groups
from cotrain.types import Completion, Group, Question, Trajectory, Turn

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def cotrain(capsys):
    """Run a command line: (exit code, standard output, standard error)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            app([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return end.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def calls(monkeypatch):
    """The calls that commands make to stand-ins: (function, arguments)."""
    made = []

    def predictions(config, folder, *, sets, checkpoint, progress):
        made.append(
            ("evaluate_run", ((config, folder), {"sets": sets, "checkpoint": checkpoint, "progress": progress}))
        )
        progress("evaluating dev", 1, 2)
        score = 0.25 if checkpoint == "untrained" else 0.75
        return {
            "dev": [
                Prediction(question_id=str(i), answer="", golds=(), em=0.0, f1=score, accuracy=0.0, reward=score)
                for i in range(3)
            ]
        }

    def train(*arguments, **named):
        made.append(("train", (arguments, named)))
        named["progress"]("training", 1, 4)
        named["on_metrics"]({"kind": "train", "step": 1, "team/reward": 0.5, "dropped/x": 2, "time/a_s": 1.0})

    def check(*arguments, **named):
        made.append(("check", (arguments, named)))
        return record("dry"), None

    def ask_team(*arguments, **named):
        made.append(("ask_team", (arguments, named)))
        return record("asked").group, None

    trained = SimpleNamespace(evaluate_run=predictions, check=check, ask_team=ask_team)
    monkeypatch.setitem(sys.modules, "cotrain.train", SimpleNamespace(train=train))
    monkeypatch.setitem(sys.modules, "cotrain.trained", trained)
    monkeypatch.setattr("cotrain.show.decoders_of", lambda models, group: {})
    return made


def record(id, step=1, answer="Ann Bee"):
    completion = Completion(token_ids=(1,), logprobs=(-0.5,), version=0, stop="stop", text=answer)
    said = Trajectory(
        id=f"t-{id}",
        question_id=id,
        rollout_id="0.0",
        pass_id=0,
        call=0,
        agent="answerer",
        model="base",
        turns=(Turn(prompt_ids=(0, 1), completion=completion),),
        output=answer,
        rewards={"shared": 0.5},
    )
    group = Group(
        question=Question(id=id, text=f"{id}?", answers=("x",)), step=step, strategy="s", trajectories=(said,)
    )
    return GroupRecord(group=group, credits={said.id: 0.5}, advantages={said.id: 1.5})


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(RunConfig.model_validate({"loop": {"steps": 7}})))
    for step in (1, 2):
        write_groups(folder, step, [record("q1", step, f"one {step}"), record("q2", step, f"two {step}")])
    return folder


def test_help_is_quick_because_nothing_heavy_is_imported():
    code = (
        "import sys\nfrom cotrain.cli import app\n"
        "try: app(['--help'])\nexcept SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'bm25s', 'peft', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("train", "eval", "probe", "show", "check", "ask", "models", "data", "report", "config"):
        assert f"  {command} " in done.stdout


def test_an_error_has_three_parts_and_no_traceback(cotrain, tmp_path, calls):
    file = tmp_path / "run.toml"
    file.write_text("[loop]\nstepz = 3\n")
    code, out, err = cotrain("train", file, "--out", tmp_path / "new")
    assert (code, out, calls) == (2, "", [])
    assert err.splitlines() == [
        f"error  {file}",
        "       unknown key 'loop.stepz'",
        "to do  Did you mean 'steps'?",
    ]


def test_text_in_an_error_is_not_markup(cotrain, tmp_path):
    code, _, err = cotrain("train", "--out", tmp_path / "new", "--set", "[red]x[/nothing]=1")
    assert code == 2
    assert "[red]x[/nothing]" in err


def test_train_passes_configuration_folder_and_progress(cotrain, tmp_path, calls):
    file = tmp_path / "run.toml"
    file.write_text("[loop]\nsteps = 3\nseed = 5\n")
    code, out, err = cotrain("train", file, "--out", tmp_path / "new", "--set", "loop.steps=4")
    assert code == 0
    ((name, ((config, folder), named)),) = calls
    assert (name, folder, named["resume"]) == ("train", tmp_path / "new", False)
    assert (config.loop.steps, config.loop.seed) == (4, 5)
    assert out == f"report: {tmp_path / 'new' / 'report.html'}\n"
    assert err.splitlines() == ["training: 1 of 4", "step 1: reward 0.500, dropped 2, 1.0 s"]


def test_train_without_a_file_uses_the_defaults(cotrain, tmp_path, calls):
    assert cotrain("train", "--out", tmp_path / "new")[0] == 0
    assert calls[0][1][0][0] == RunConfig()


def test_train_refuses_a_folder_with_anything_in_it(cotrain, run_folder, calls):
    code, _, err = cotrain("train", "--out", run_folder)
    assert (code, calls) == (2, [])
    assert err.splitlines() == [
        f"error  run {run_folder}",
        "       it is not empty",
        "to do  Add --resume to go on, or choose another --out",
    ]


def test_resume_takes_the_run_s_own_configuration(cotrain, run_folder, calls):
    assert cotrain("train", "--out", run_folder, "--resume", "--set", "eval.every=2")[0] == 0
    (config, folder), named = calls[0][1]
    assert (config.loop.steps, config.eval.every, folder, named["resume"]) == (7, 2, run_folder, True)


def test_resume_needs_a_run(cotrain, tmp_path, calls):
    code, _, err = cotrain("train", "--out", tmp_path / "none", "--resume")
    assert (code, calls) == (2, [])
    assert "there is no run to resume" in err


def test_eval_prints_one_table_per_set(cotrain, run_folder, calls):
    code, out, err = cotrain("eval", run_folder, "--on", "dev", "--checkpoint", "best", "--set", "eval.bootstrap=100")
    assert code == 0
    (config, folder), named = calls[0][1]
    assert (config.eval.bootstrap, config.loop.steps, folder) == (100, 7, run_folder)
    assert (named["sets"], named["checkpoint"]) == (["dev"], "best")
    assert "dev: 3 questions, best" in out
    assert "0.750 … 0.750" in out
    assert "evaluating dev: 1 of 2" in err


def test_eval_against_compares_the_later_with_the_earlier(cotrain, run_folder, calls):
    code, out, _ = cotrain("eval", run_folder, "--against", "untrained")
    assert code == 0
    assert [named["checkpoint"] for _, (_, named) in calls] == ["latest", "untrained"]
    assert "latest against untrained" in out
    f1 = next(line for line in out.splitlines() if "F1" in line)
    assert [cell.strip() for cell in f1.split("│")[2:5]] == ["0.250", "0.750", "+0.500"]


def test_eval_of_a_file_evaluates_its_models_as_they_are(cotrain, tmp_path, calls):
    file = tmp_path / "run.toml"
    file.write_text("[loop]\nsteps = 3\n")
    code, out, _ = cotrain("eval", file)
    assert code == 0
    assert calls[0][1][0][1] is None
    assert "untrained" in out
    assert cotrain("eval", file, "--against", "best")[0] == 2


def test_show_picks_the_last_step_and_its_first_question(cotrain, run_folder, calls):
    assert "output: one 2" in cotrain("show", run_folder)[1]
    assert "output: two 1" in cotrain("show", run_folder, "--step", "1", "--question", "q2")[1]
    assert "credit 0.500  advantage +1.500" in cotrain("show", run_folder)[1]


def test_show_says_what_there_is_instead(cotrain, run_folder, tmp_path, calls):
    code, _, err = cotrain("show", run_folder, "--step", "9")
    assert code == 2
    assert "It has steps 1 to 2" in err
    code, _, err = cotrain("show", run_folder, "--question", "q7")
    assert code == 2
    assert "Questions there: q1, q2" in err
    code, _, err = cotrain("show", tmp_path)
    assert code == 2
    assert "it has no groups yet" in err


def test_check_shows_the_group_of_a_dry_run(cotrain, calls):
    code, out, _ = cotrain("check", "--set", "loop.steps=2")
    assert code == 0
    assert calls[0][1][0][0].loop.steps == 2
    assert "question dry" in out
    assert "The configuration is sound." in out


def test_ask_shows_the_answer(cotrain, run_folder, calls):
    code, out, _ = cotrain("ask", run_folder, "Who built it?", "--checkpoint", "2")
    assert code == 0
    (config, folder, text), named = calls[0][1]
    assert (config.loop.steps, folder, text) == (7, run_folder, "Who built it?")
    assert named == {"checkpoint": "2", "corpus": None}
    assert "output: Ann Bee" in out


def test_calls_fit_the_library(cotrain, run_folder, calls, monkeypatch, tmp_path):
    cotrain("train", "--out", tmp_path / "new")
    cotrain("eval", run_folder)
    cotrain("check")
    cotrain("ask", run_folder, "Who?")
    monkeypatch.undo()  # takes the stand-ins away
    modules = {"train": "cotrain.train", "evaluate_run": "cotrain.trained"}
    assert [name for name, _ in calls] == ["train", "evaluate_run", "check", "ask_team"]
    for name, (arguments, named) in calls:
        real = getattr(importlib.import_module(modules.get(name, "cotrain.trained")), name)
        inspect.signature(real).bind(*arguments, **named)


@pytest.fixture
def probes(monkeypatch):
    """The calls made to a stand-in of the probe, which rates q1 with 0.5 and q2 with 0."""
    made = []
    probing = importlib.import_module("cotrain.probe")
    real = inspect.signature(probing.probe)

    def sampled(*arguments, **named):
        real.bind(*arguments, **named)
        made.append((arguments, named))
        named["progress"]("probing", 0, 2)
        records = [record("q1"), record("q2")]
        (wrong,) = records[1].group.trajectories
        group = replace(records[1].group, trajectories=(replace(wrong, rewards={"shared": 0.0}),))
        records[1] = replace(records[1], group=group)
        if named["keep"] is not None:
            write_questions(named["keep"], probing.rated(records))
        return probing.Probe(records=records, dropped={"singleton": 2}, delegates=("helper",))

    monkeypatch.setattr(probing, "probe", sampled)
    return made


def test_probe_prints_rates_delegations_and_what_was_dropped(cotrain, run_folder, probes, tmp_path):
    code, out, err = cotrain("probe", run_folder, "--questions", "2", "--checkpoint", "best", "--set", "loop.seed=3")
    assert code == 0
    ((config, folder), named) = probes[0]
    assert (config.loop.steps, config.loop.seed, folder) == (7, 3, run_folder)
    assert (named["count"], named["checkpoint"], named["keep"]) == (2, "best", None)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert ["answerer", "2", "2", "1.0", "1"] in rows
    assert ["helper", "2", "0.00", "0: 2", "1"] in rows
    assert ["0", "1", "50.0 %"] in rows
    assert ["0.5 to 0.75", "1", "50.0 %"] in rows
    assert ["in band, 0 < rate < 1", "1", "50.0 %"] in rows
    assert ["mean", "0.250", ""] in rows
    assert "dropped: singleton: 2" in out
    assert out.splitlines()[0] == f"{run_folder}, best: 2 questions"
    assert "probing: 0 of 2" in err
    file = tmp_path / "run.toml"
    file.write_text("[loop]\nsteps = 3\n")
    code, out, _ = cotrain("probe", file)
    assert code == 0
    assert probes[1][0][1] is None
    assert probes[1][1]["count"] == 64
    assert out.splitlines()[0] == f"{file}, untrained: 2 questions"


def test_probe_writes_the_band_and_keeps_all_rates_for_another_one(cotrain, run_folder, probes, tmp_path):
    some, kept = tmp_path / "some.jsonl", tmp_path / "some.all.jsonl"
    code, out, _ = cotrain("probe", run_folder, "--out", some)
    assert code == 0
    assert out.splitlines()[-1] == f"{some}: 1 questions"
    assert [json.loads(line)["id"] for line in some.read_text().splitlines()] == ["q1"]
    assert [json.loads(line)["success_rate"] for line in kept.read_text().splitlines()] == [0.5, 0.0]
    code, _, err = cotrain("probe", run_folder, "--out", some)
    assert (code, len(probes)) == (2, 1)  # nothing was sampled for a file that cannot be written
    assert "it exists already" in err
    code, out, _ = cotrain("probe", kept, "--band", "-1", "0.5", "--out", tmp_path / "zeros.jsonl")
    assert (code, len(probes)) == (0, 1)  # nor for rates that are known
    assert [json.loads(line)["id"] for line in (tmp_path / "zeros.jsonl").read_text().splitlines()] == ["q2"]
    code, out, err = cotrain("probe", kept, "--band", "0.6", "0.9", "--out", tmp_path / "none.jsonl")
    assert code == 2
    assert "in band, 0.6 < rate < 0.9" in out
    assert err.splitlines()[:2] == [
        f"error  band of {tmp_path / 'none.jsonl'}",
        "       none of 2 success rates lies strictly between 0.6 and 0.9 (0: 1, 0.5 to 0.75: 1)",
    ]
    assert not (tmp_path / "none.jsonl").exists()
    code, _, err = cotrain("probe", run_folder, "--band", "1", "0")
    assert (code, len(probes)) == (2, 1)
    assert "Give the lower bound first" in err


def test_report_prints_where_it_is(cotrain, run_folder):
    append_metrics(run_folder, {"kind": "train", "step": 1, "team/reward": 0.5})
    code, out, _ = cotrain("report", run_folder)
    assert (code, out) == (0, f"{run_folder / 'report.html'}\n")
    assert (run_folder / "report.html").exists()
    assert cotrain("report", run_folder / "nowhere")[0] == 2


def test_models_export_asks_which_of_several(cotrain, run_folder, tmp_path):
    config = RunConfig.model_validate({"models": {"one": {}, "two": {}}})
    (run_folder / "config.toml").write_text(dump_config(config))
    code, _, err = cotrain("models", "export", run_folder, tmp_path / "out")
    assert code == 2
    assert "it has several models: one, two" in err
    code, _, err = cotrain("models", "export", run_folder, tmp_path / "out", "--model", "three")
    assert code == 2
    assert "It has: one, two" in err


def test_data_world_writes_what_peek_shows(cotrain, tmp_path):
    target = tmp_path / "world"
    code, out, _ = cotrain("data", "world", target, "--set", "entities=30", "--set", "questions=12")
    assert code == 0
    assert f"{target}: 12 questions" in out
    questions = [json.loads(line) for line in (target / "questions.jsonl").read_text().splitlines()]
    assert (target / "corpus.jsonl").exists()
    code, out, _ = cotrain("data", "peek", target / "questions.jsonl", "-n", "2")
    assert code == 0
    assert [questions[i]["id"] in out for i in range(4)] == [True, True, False, False]
    assert "12 questions in all" in out
    code, _, err = cotrain("data", "world", target, "--set", "entitees=30")
    assert code == 2
    assert "Did you mean 'entities'?" in err


def test_data_import_reads_a_plain_file(cotrain, tmp_path):
    source = tmp_path / "mine.jsonl"
    source.write_text(json.dumps({"question": "Who?", "answer": "Ann"}) + "\n")
    code, out, _ = cotrain("data", "import", "plain", source, tmp_path / "data", "--split", "dev")
    assert (code, out) == (0, f"{tmp_path / 'data'}: 1 questions, 0 passages\n")
    code, _, err = cotrain("data", "import", "plane", source, tmp_path / "data")
    assert code == 2
    assert "unknown format 'plane'" in err


def test_the_configuration_page_is_up_to_date(cotrain):
    code, out, _ = cotrain("config")
    assert (code, out) == (0, configuration_reference())
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == out, "run: cotrain config > docs/configuration.md"


def test_the_configuration_page_names_every_key_with_its_meaning():
    page = configuration_reference()
    assert "| `steps` | integer ≥ 0 | `20` | RL updates. |" in page
    assert '| `std` | `"population"`, `"sample"` | `"population"` |' in page
    assert "| `context` | integer ≥ 1 | unset |" in page
    assert "## `[models.<name>.lora]`" in page
    keys = {key for section in sections_of(RunConfig) for key, field in section.model_fields.items()}
    assert {
        key for key in keys if f"| `{key}` |" not in page and f"{key}]`" not in page and f"{key}." not in page
    } == set()
    assert "|  |" not in page  # a key without a meaning


def sections_of(section):
    from cotrain.reference import _inner

    yield section
    for field in section.model_fields.values():
        if inner := _inner(field.annotation):
            yield from sections_of(inner)


def test_without_a_terminal_progress_is_at_most_eleven_lines_per_count(capsys):
    shown = Display(Console(), None)
    for done in range(101):
        shown.update("a [red]label[/]", done, 100)
    shown.update("loading", 0, 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"a [red]label[/]: {done} of 100" for done in range(0, 101, 10)] + ["loading"]


def test_a_count_that_begins_again_is_shown_again(capsys):
    shown = Display(Console(), None)
    for done in (0, 2, 0):
        shown.update("rollouts", done, 2)
    assert capsys.readouterr().out.splitlines() == ["rollouts: 0 of 2", "rollouts: 2 of 2", "rollouts: 0 of 2"]


def test_on_a_terminal_each_count_has_a_bar():
    console = Console(force_terminal=True, width=100, file=io.StringIO())
    bars = Progress(console=console, auto_refresh=False)
    shown = Display(console, bars)
    for label, done, total in (("loading", 0, 1), ("a [red]b", 1, 4), ("a [red]b", 3, 4), ("other", 2, 2)):
        shown.update(label, done, total)
    tasks = [(task.description, task.completed, task.total, task.visible) for task in bars.tasks]
    assert tasks == [("loading", 0, 1, False), (r"a \[red]b", 3, 4, True), ("other", 2, 2, True)]
    shown.update("a [red]b", 0, 8)
    assert (bars.tasks[1].completed, bars.tasks[1].total) == (0, 8)


def test_metrics_line_says_unknown_where_a_number_is_missing():
    assert metrics_line({"kind": "train", "step": 3}) == "step 3: reward unknown, dropped 0, 0.0 s"
    row = {
        "kind": "eval",
        "step": 3,
        "set": "dev",
        "f1": 0.5,
        "f1_low": 0.25,
        "f1_high": 0.75,
        "em": 0.0,
        "reward": -1.0,
    }
    assert metrics_line(row) == "step 3, dev: F1 0.500 (0.250 … 0.750), exact match 0.000, reward -1.000"
    warm = {"kind": "warmup", "step": 0, "warmup_step": 2, "model/base/loss": 1.5}
    assert metrics_line(warm) == "warm-up step 2: loss base 1.500"


@pytest.mark.parametrize("extra", [("--questions", "5"), ("--checkpoint", "best"), ("--set", "loop.seed=3")])
def test_probe_of_kept_rates_refuses_what_would_sample(cotrain, tmp_path, extra):
    code, _, err = cotrain("probe", tmp_path / "kept.all.jsonl", *extra)
    assert code == 2
    assert "nothing is sampled" in err
