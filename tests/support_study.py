"""Studies of the toy, and run folders made up for them."""

from pathlib import Path

from cotrain.config import dump_config
from cotrain.evaluate import Prediction, eval_row
from cotrain.runs import append_metrics, write_predictions
from cotrain.study.plan import jobs_of, load_study

TOY = Path(__file__).parent / "toy.py"
RUN = f"""
[models.base]
path = "tiny-llama"
[models.base.optimizer]
lr = 3e-3
[system]
name = "{TOY}:toy"
[rewards]
metric = "{TOY}:vowels"
[data.eval.dev]
split = "dev"
limit = 4
[sampling]
questions_per_step = 2
group_size = 2
[loop]
checkpoint_every = 1
max_sampled = 7
[eval]
every = 1
bootstrap = 100
"""
STUDY = """
out = "OUT"
base = "BASE"
seeds = [0, 1]
baseline = "first"
scores = ["reward", "em"]
bootstrap = 100
budget = { updates = 2 }
[arms.first]
[arms.second]
set = ["sampling.strategy=round_robin"]
"""


def written(folder, text=STUDY, run=RUN):
    """A study.toml in a folder, with its base beside it."""
    (folder / "run.toml").write_text(run)
    (folder / "study.toml").write_text(text.replace("OUT", f"{folder}/out").replace("BASE", f"{folder}/run.toml"))
    return folder / "study.toml"


def planned(folder, text=STUDY, run=RUN):
    """(study, jobs by the names of their folders)."""
    study = load_study(written(folder, text, run))
    return study, {job.name: job for job in jobs_of(study)}


def predictions(values, ids="abcdefgh"):
    return [
        Prediction(question_id=id, answer="", golds=("g",), em=value, f1=value, accuracy=value, reward=value)
        for id, value in zip(ids, values, strict=False)
    ]


def evaluated(folder, step, values, name="dev"):
    write_predictions(folder, step, name, predictions(values))
    append_metrics(folder, {**eval_row(step, name, predictions(values), resamples=100), "time/eval_s": 1.0})


def stepped(folder, step, sampled, **more):
    times = {"time/rollout_s": 3.0, "time/update_s": 1.0}
    append_metrics(folder, {"kind": "train", "step": step, "team/sampled": sampled, **times, **more})


def fake_run(job, before, after, *, sampled=(60, 120), **more):
    """The folder of a finished run: one value per question before and after, tokens so far after each step."""
    job.folder.mkdir(parents=True)
    (job.folder / "config.toml").write_text(dump_config(job.config))
    evaluated(job.folder, 0, before)
    for step, tokens in enumerate(sampled, start=1):
        stepped(job.folder, step, tokens, **more)
    if sampled:
        evaluated(job.folder, len(sampled), after)
