"""A run in stages asks each stage's questions in its steps, and resumes across a boundary as if it had not stopped."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from cotrain import runs
from cotrain.config import dump_config, load_config
from cotrain.data.questions import load_set
from cotrain.errors import ConfigError
from cotrain.train import train

TOY = Path(__file__).parents[1] / "toy.py"
CONFIG = """
[models.base]
path = "tiny-llama"
optimizer = {{ lr = 3e-3 }}
[system]
name = "{toy}:toy"
[rewards]
metric = "{toy}:vowels"
[data.train]
limit = 4
[data.eval.dev]
limit = 2
[sampling]
questions_per_step = 2
[loop]
steps = {steps}
checkpoint_every = {checkpoint_every}
keep_last = 9
[eval]
every = 0
bootstrap = 100
"""
STAGE = """
[[data.stages]]
after_step = {after}
limit = 4
world = {{ seed = {seed}, entities = 40, questions = 40 }}
"""
TRAIN = (
    "import sys; from pathlib import Path; from cotrain.config import load_config; from cotrain.train import train; "
    "train(load_config(sys.argv[1]), Path(sys.argv[2]), resume=True)"
)


def written(path, *stages, steps=6, checkpoint_every=2):
    """A configuration file with stages of (after_step, seed of the world)."""
    text = CONFIG.format(toy=TOY, steps=steps, checkpoint_every=checkpoint_every)
    path.write_text(text + "".join(STAGE.format(after=after, seed=seed) for after, seed in stages))
    return path


def start(config, folder):
    return subprocess.Popen([sys.executable, "-c", TRAIN, str(config), str(folder)], stderr=subprocess.PIPE, text=True)


def finish(process):
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def kill_in_step(step, config, folder):
    """Kill a run with its update of a step under way."""
    process = start(config, folder)
    while process.poll() is None and not runs.groups_path(folder, step).exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode in (-signal.SIGKILL, 0), errors


def history(folder):
    """All metrics of training but the times."""
    rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in runs.read_metrics(folder)]
    return [row for row in rows if row["kind"] == "train"]


def asked(folder, step):
    return [record.group.question.id for record in runs.read_groups(folder, step)]


def ids_of(chosen, corpus):
    return {question.id for question in load_set(chosen, corpus)[0]}


def test_each_step_asks_questions_of_its_stage_also_in_a_run_that_was_killed_on_either_side(tmp_path):
    path = written(tmp_path / "run.toml", (3, 7))
    config = load_config(path)
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    finish(start(path, unbroken))
    first, second = (ids_of(chosen, config.corpus) for chosen in (config.data.train, config.data.stages[0]))
    assert (len(first), len(second), first & second) == (4, 4, set())
    steps = {step: asked(unbroken, step) for step in range(1, 7)}
    assert {*steps[1], *steps[2]} == first  # an epoch of two steps
    assert set(steps[3]) < first
    assert {*steps[4], *steps[5]} == second  # the stage begins with an epoch of its own
    assert set(steps[6]) < second
    kill_in_step(4, path, broken)  # its checkpoint is of step 2, a step before the boundary
    kill_in_step(5, path, broken)  # of step 4, a step after it
    finish(start(path, broken))
    assert [row["step"] for row in history(unbroken)] == [1, 2, 3, 4, 5, 6]
    assert history(broken) == history(unbroken)
    for step in range(1, 7):
        assert runs.groups_path(broken, step).read_bytes() == runs.groups_path(unbroken, step).read_bytes()
    weights = sorted((unbroken / "checkpoints" / "step-000006").rglob("*.safetensors"))
    assert weights
    for file in weights:
        ours, theirs = load_file(broken / file.relative_to(unbroken)), load_file(file)
        assert ours.keys() == theirs.keys()
        assert all((ours[key] == theirs[key]).all() for key in ours)


def test_a_stage_still_to_come_may_be_added_changed_or_taken_away_and_a_past_one_may_not(tmp_path):
    def given(*stages, steps):
        return load_config(written(tmp_path / "run.toml", *stages, steps=steps, checkpoint_every=1))

    def refused(config, found):
        before = (folder / "config.toml").read_text(), json.dumps(history(folder))
        for _ in range(2):  # refused again: the refusal has not written the configuration that it refused
            with pytest.raises(ConfigError) as caught:
                train(config, folder, resume=True)
            assert caught.value.where == f"run folder {folder}"
            assert caught.value.found == found
            assert "stages still to come may change" in caught.value.fix
        assert ((folder / "config.toml").read_text(), json.dumps(history(folder))) == before

    folder, whole = tmp_path / "run", tmp_path / "whole"
    train(given(steps=2), folder)
    refused(given((1, 7), steps=4), "the run began with data.stages.0.source = None, now it is 'world'")
    train(given((2, 7), (9, 8), steps=3), folder, resume=True)  # from the very next step on
    second = ids_of(given((2, 7), steps=3).data.stages[0], given(steps=3).corpus)
    assert set(asked(folder, 3)) < second
    refused(given((2, 5), (9, 8), steps=5), "the run began with data.stages.0.world.seed = 7, now it is 5")
    refused(given((1, 7), (9, 8), steps=5), "the run began with data.stages.0.after_step = 2, now it is 1")
    refused(given(steps=5), "the run began with data.stages.0.source = 'world', now it is None")
    train(given((2, 7), (3, 5), steps=4), folder, resume=True)  # the second stage comes sooner, with other questions
    train(given((2, 7), (3, 5), steps=4), whole)  # all of it known from the start: the same run
    assert [asked(folder, step) for step in range(1, 5)] == [asked(whole, step) for step in range(1, 5)]
    assert history(folder) == history(whole)


def test_a_stage_needs_questions_enough_for_a_step(tmp_path):
    path = written(tmp_path / "run.toml", (3, 7))
    path.write_text(path.read_text().replace("after_step = 3\nlimit = 4", "after_step = 3\nlimit = 1"))
    with pytest.raises(ConfigError, match=r"sampling\.questions_per_step: 2, but data\.stages\.0 has 1 questions"):
        train(load_config(path), tmp_path / "run")
    assert not (tmp_path / "run" / "groups").exists()


def test_the_run_s_configuration_keeps_its_stages(tmp_path):
    config = load_config(written(tmp_path / "run.toml", (3, 7), (5, 8)))
    (tmp_path / "again.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.toml") == config
    assert [(stage.after_step, stage.world.seed, stage.split) for stage in config.data.stages] == [
        (3, 7, "train"),
        (5, 8, "train"),
    ]
