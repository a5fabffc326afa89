"""What goes wrong during a run costs nothing that was computed before it, and a resumed run ends as an unbroken one."""

import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from cotrain import loops, report, runs
from cotrain import train as training
from cotrain.checkpoints import latest
from cotrain.config import load_config
from cotrain.curriculum import questions_of_step
from cotrain.errors import ConfigError, InfrastructureError, TrainError
from cotrain.evaluate import Prediction
from cotrain.rewards import METRICS
from cotrain.trained import evaluate_run, find_checkpoint, use_checkpoint
from cotrain.trainer import Trainer
from cotrain.types import Question
from toy import vowels

TOY = Path(__file__).parents[1] / "toy.py"
SETTINGS = [
    "models.base.path=tiny-llama",
    "models.base.optimizer.lr=3e-3",
    f"system.name={TOY}:toy",
    f"rewards.metric={TOY}:vowels",
    "data.eval.dev.limit=2",
    "sampling.questions_per_step=2",
    "loop.steps=4",
    "loop.checkpoint_every=100",
    "eval.every=0",
    "eval.bootstrap=100",
]


def config_of(*settings):
    return load_config(None, [*SETTINGS, *settings])


def losses(folder):
    return [row["model/base/loss"] for row in runs.read_metrics(folder) if row["kind"] == "train"]


def weights(folder, step):
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "base" / "weights.safetensors")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    training.train(config_of(), folder)
    return folder


def assert_same_end(folder, unbroken):
    assert losses(folder) == losses(unbroken)
    ours, theirs = weights(folder, 4), weights(unbroken, 4)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_a_metric_that_raises_leaves_the_groups_and_a_checkpoint_of_the_step_before(tmp_path, unbroken, monkeypatch):
    def breaks_at_step_3(answer, golds):
        if (tmp_path / "run" / "groups" / "step-000002.jsonl").exists():
            raise ZeroDivisionError
        return vowels(answer, golds)

    monkeypatch.setitem(METRICS, f"{TOY}:vowels", breaks_at_step_3)
    with pytest.raises(ZeroDivisionError):
        training.train(config_of(), tmp_path / "run")
    monkeypatch.undo()
    assert latest(tmp_path / "run" / "checkpoints").name == "step-000002"
    assert len(runs.read_groups(tmp_path / "run", 3)) == 2
    training.train(config_of(), tmp_path / "run", resume=True)
    assert_same_end(tmp_path / "run", unbroken)


def test_an_update_that_is_broken_off_is_not_saved_as_a_finished_step(tmp_path, unbroken, monkeypatch):
    update = Trainer.update

    def breaks_after_step_3(self, samples):
        metrics = update(self, samples)
        if self.version == 3:
            raise TrainError("model base", "it broke", "Mend it")
        return metrics

    monkeypatch.setattr(Trainer, "update", breaks_after_step_3)
    with pytest.raises(TrainError):
        training.train(config_of(), tmp_path / "run")
    monkeypatch.undo()
    assert latest(tmp_path / "run" / "checkpoints").name == "step-000000"
    training.train(config_of(), tmp_path / "run", resume=True)
    assert_same_end(tmp_path / "run", unbroken)


def test_a_step_without_one_finished_rollout_stops_the_run_which_can_be_resumed(tmp_path, unbroken, monkeypatch):
    rollouts = training.rollouts

    async def down_at_step_2(plan, roster, questions, step):
        groups = await rollouts(plan, roster, questions, step)
        lost = {"infrastructure": 4}
        return [type(g)(question=g.question, step=step, strategy=g.strategy, trajectories=(), dropped=lost)
                for g in groups] if step == 2 else groups  # fmt: skip

    monkeypatch.setattr(training, "rollouts", down_at_step_2)
    with pytest.raises(InfrastructureError, match="step 2: not one rollout"):
        training.train(config_of(), tmp_path / "run")
    monkeypatch.undo()
    assert latest(tmp_path / "run" / "checkpoints").name == "step-000001"
    training.train(config_of(), tmp_path / "run", resume=True)
    assert_same_end(tmp_path / "run", unbroken)


def test_a_report_that_cannot_be_drawn_does_not_end_the_run(tmp_path, unbroken, monkeypatch, caplog):
    def breaks(folder):
        raise ZeroDivisionError("no chart")

    monkeypatch.setattr(report, "write_report", breaks)
    with caplog.at_level(logging.WARNING):
        training.train(config_of(), tmp_path / "run")
    assert_same_end(tmp_path / "run", unbroken)
    assert "the report could not be written: ZeroDivisionError: no chart" in caplog.text


def test_the_best_step_is_kept_also_between_checkpoints(tmp_path, monkeypatch):
    rewards = iter([0.1, 0.9, 0.3, 0.2, 0.4])

    async def predict(plan, roster, questions, **_):
        reward = next(rewards)
        return [Prediction(question_id="q", answer="", golds=("a",), em=0, f1=0, accuracy=0, reward=reward)]

    monkeypatch.setattr(loops, "predict", predict)
    folder = tmp_path / "run"
    training.train(config_of("eval.every=1", "loop.keep_last=1"), folder)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000001", "step-000004"]
    assert find_checkpoint(folder, "best").name == "step-000001"


def test_a_resumed_run_says_which_setting_differs(unbroken):
    with pytest.raises(ConfigError, match=r"began with models\.base\.optimizer\.lr = 0\.003, now it is 0\.1"):
        training.train(config_of("models.base.optimizer.lr=0.1"), unbroken, resume=True)
    training.train(config_of("eval.every=3", "loop.keep_last=5"), unbroken, resume=True)  # nothing left to do


def test_what_cannot_be_trained_is_refused_before_models_are_loaded(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match=r"cannot be written: Not a directory"):
        training.train(config_of(), tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match=r"agents: none of them is trained"):
        training.train(config_of("models.base.trainable=false"), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"sampling.questions_per_step: 3, but data.train has 2"):
        training.train(config_of("sampling.questions_per_step=3", "data.train.limit=2"), tmp_path / "run")


def test_no_step_has_a_question_twice_and_no_epoch_either():
    questions = [Question(id=str(i), text="", answers=("",)) for i in range(10)]
    steps = [[q.id for q in questions_of_step(questions, step, 4, seed=1)] for step in range(1, 9)]
    assert all(len(set(step)) == 4 for step in steps)
    epochs = [steps[i] + steps[i + 1] for i in range(0, 8, 2)]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4  # another order each time
    assert {id for step in steps for id in step} == {q.id for q in questions}


def test_an_evaluation_with_other_settings_leaves_the_run_s_predictions_alone(unbroken):
    path = unbroken / "eval" / "step-000004-dev.jsonl"
    before = path.read_bytes()
    path.unlink()
    evaluate_run(load_config(unbroken / "config.toml", ["data.eval.dev.limit=1"]), unbroken)
    assert not path.exists()
    evaluate_run(load_config(unbroken / "config.toml"), unbroken)
    assert path.read_bytes() == before


def test_a_checkpoint_s_version_counts_the_warm_up(tmp_path):
    settings = ["warmup.steps=2", "warmup.questions_per_step=2", "loop.steps=1"]
    config = config_of(*settings, "models.still.path=tiny-llama", "models.still.trainable=false",
                       "agents.speaker.model=still")  # fmt: skip
    training.train(config, tmp_path / "run")
    cast = training.load_cast(training.make_plan(config))
    assert use_checkpoint(cast, tmp_path / "run", "latest") == 1
    assert {name: engine.version for name, engine in cast.engines.items()} == {"base": 3, "still": 0}
    (record, *_) = runs.read_groups(tmp_path / "run", 1)
    assert {t.agent: t.trainable for t in record.group.trajectories} == {"scout": True, "speaker": False}


def test_a_second_ctrl_c_ends_at_once_and_the_run_can_be_resumed(tmp_path, unbroken):
    folder = tmp_path / "run"
    code = "import sys; from pathlib import Path; from cotrain.config import load_config; "
    code += "from cotrain.train import train; train(load_config(None, sys.argv[2:]), Path(sys.argv[1]))"
    slow = ["warmup.steps=100000", "warmup.questions_per_step=1"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder), *SETTINGS, *slow], stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and len(runs.read_metrics(folder)) < 3:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert any("press Ctrl-C again" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    assert process.wait() != 0
    process.stderr.close()
    assert (folder / "report.html").exists()
    config = config_of("warmup.steps=1", "warmup.questions_per_step=1", "loop.steps=1")
    (folder / "config.toml").write_text(training.dump_config(config))
    training.train(config, folder, resume=True)  # nothing was saved yet: it begins again
    kinds = [json.loads(line)["kind"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["eval", "warmup", "eval", "train", "eval"]


def test_a_second_process_in_the_same_folder_is_refused(unbroken):
    before = (unbroken / "metrics.jsonl").read_bytes()
    with (
        runs.only_writer(unbroken),
        pytest.raises(TrainError, match="another process is training in it"),
    ):
        training.train(config_of(), unbroken, resume=True)
    assert (unbroken / "metrics.jsonl").read_bytes() == before
