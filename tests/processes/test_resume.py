"""A run that dies at any moment continues to the losses and weights of an unbroken one, bit for bit."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

CONFIG = """
[models.base]
path = "tiny-llama"
{model}
[models.base.optimizer]
lr = 3e-3
[system]
name = "{toy}:toy"
[rewards]
metric = "{toy}:vowels"
[data.train]
split = "train"
[data.eval.dev]
split = "dev"
limit = 4
[sampling]
strategy = "round_robin"
questions_per_step = 2
[loop]
steps = 6
checkpoint_every = 2
[warmup]
steps = 3
checkpoint_every = 2
[eval]
every = 3
bootstrap = 100
[advantage]
estimator = "{estimator}"
"""
CRITIC = 'critic = { backbone = "own", warmup_steps = 1, optimizer = { lr = 1e-2 } }'
TRAIN = (
    "import sys; from pathlib import Path; from cotrain.config import load_config; from cotrain.train import train; "
)
TRAIN += "train(load_config(sys.argv[1]), Path(sys.argv[2]), resume=True)"


def start(config: Path, folder: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", TRAIN, str(config), str(folder)], stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> None:
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def history(folder: Path) -> list[dict]:
    """All metrics but the times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


def assert_same(folder: Path, unbroken: Path) -> None:
    assert history(folder) == history(unbroken)
    for name in ("groups", "eval"):
        files = sorted(p.name for p in (unbroken / name).iterdir())
        assert [p.name for p in sorted((folder / name).iterdir())] == files
        for file in files:
            assert (folder / name / file).read_bytes() == (unbroken / name / file).read_bytes()
    weights = sorted((unbroken / "checkpoints" / "step-000006").rglob("*.safetensors"))
    assert weights
    for path in weights:
        ours = load_file(folder / path.relative_to(unbroken))
        theirs = load_file(path)
        assert ours.keys() == theirs.keys()
        assert all((ours[k] == theirs[k]).all() for k in ours)


@pytest.mark.parametrize(
    ("model", "estimator"),
    [
        ("", "group_relative"),
        ("lora = { rank = 4 }", "group_relative"),
        ("", "role_baseline"),
        (CRITIC, "gae"),
    ],
    ids=["full", "lora", "role baseline", "critic"],
)
def test_killed_at_random_moments_a_run_ends_as_the_unbroken_one(tmp_path, model, estimator):
    toy = Path(__file__).parents[1] / "toy.py"
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(toy=toy, model=model, estimator=estimator))
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    finish(start(config, unbroken))
    draw = random.Random(model)
    for step in sorted(draw.sample(range(1, 6), 2)):
        process = start(config, broken)
        while process.poll() is None and not (broken / "groups" / f"step-{step:06d}.jsonl").exists():
            time.sleep(0.01)
        time.sleep(draw.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finish(start(config, broken))
    assert_same(broken, unbroken)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_warm_up_continues_from_its_checkpoint(tmp_path, how):
    toy = Path(__file__).parents[1] / "toy.py"
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(toy=toy, model="", estimator="group_relative").replace("steps = 3", "steps = 12"))
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    finish(start(config, unbroken))
    process = start(config, broken)
    while process.poll() is None and not (broken / "checkpoints" / "step-000000").exists():
        time.sleep(0.01)
    process.send_signal(how)
    process.communicate()
    state = json.loads((broken / "checkpoints" / "step-000000" / "state.json").read_text())
    assert 2 <= state["warmed"] < 12
    assert not state["has_begun"]
    finish(start(config, broken))
    assert_same(broken, unbroken)


def test_ctrl_c_ends_after_the_step_with_a_checkpoint_from_which_the_run_continues(tmp_path):
    toy = Path(__file__).parents[1] / "toy.py"
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(toy=toy, model="", estimator="group_relative"))
    folder = tmp_path / "run"
    process = start(config, folder)
    while process.poll() is None and not (folder / "groups" / "step-000001.jsonl").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    finish(process)
    done = max(row["step"] for row in history(folder))
    assert (folder / "checkpoints" / f"step-{done:06d}").is_dir()
    finish(start(config, folder))
    unbroken = tmp_path / "unbroken"
    finish(start(config, unbroken))
    assert_same(folder, unbroken)  # being interrupted leaves no trace, such as an evaluation between the due ones
