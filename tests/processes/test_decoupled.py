"""A run of several processes over a shared store equals that of one process, and survives whatever dies."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support_processes import differences, history
from support_store import postgres  # noqa: F401

CONFIG = """
[models.first]
path = "tiny-llama"
[models.first.optimizer]
lr = 3e-3
[models.first.critic]
warmup_steps = 1
[models.second]
path = "tiny-qwen3"
lora = { rank = 4 }
[models.second.optimizer]
lr = 3e-3
[system]
name = "{toy}:two_models"
[rewards]
metric = "{toy}:vowels"
threshold = 0.2
[advantage.agents]
scout = "gae"
[data.train]
split = "train"
[data.eval.dev]
split = "dev"
limit = 4
[sampling]
strategy = "round_robin"
questions_per_step = 2
[loop]
steps = 5
checkpoint_every = 2
[warmup]
steps = 2
[eval]
every = 2
bootstrap = 100
[store]
lease_s = 5.0
"""
SLOW = pytest.mark.slow
TOY = Path(__file__).parent.parent / "toy.py"


def cotrain(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "cotrain.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen, code: int = 0) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("decoupled")
    path = folder / "run.toml"
    path.write_text(CONFIG.replace("{toy}", str(TOY)))
    return path


@pytest.fixture(scope="module")
def unbroken(config) -> Path:
    """The same run in one process, its batches made by group as workers make them."""
    folder = config.parent / "one"
    finish(cotrain("train", config, "--out", folder, "--set", "engine.batching=group"))
    return folder


def assert_equal(folder: Path, other: Path) -> None:
    assert differences(folder, other) == []
    assert len(history(folder)) == 5 + 5  # steps, and evaluations: untrained, before RL, every second, the last
    assert len([*(folder / "groups").glob("*")]) == 5
    assert len([*(folder / "eval").glob("*")]) == 5
    assert (folder / "checkpoints/step-000005").is_dir()


def address(kind: str, request, monkeypatch) -> list[str]:
    """The settings that choose a store; PostgreSQL's address is in the environment alone."""
    if kind == "sqlite":
        return []
    monkeypatch.setenv("COTRAIN_STORE", request.getfixturevalue("postgres").place())
    return ["--set", "store.url=env:COTRAIN_STORE"]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_two_trainers_and_two_workers_equal_one_process_bit_for_bit(kind, config, unbroken, request, monkeypatch):
    folder = config.parent / f"two-{kind}"
    chosen = address(kind, request, monkeypatch)
    finish(cotrain("up", config, "--out", folder, "--workers", "2", *chosen))
    assert_equal(folder, unbroken)
    assert "://" not in (folder / "config.toml").read_text()


def processes(folder: Path) -> dict[str, list[str]]:
    run = str(folder)
    trainers = {f"trainer-{name}": ["trainer", run, "--model", name] for name in ("first", "second")}
    return {**trainers, "worker": ["worker", run], "evaluator": ["eval", run, "--watch"]}


@SLOW
def test_processes_killed_at_random_moments_go_on_to_the_same_run(config, unbroken):
    folder = config.parent / "killed"
    finish(cotrain("begin", config, "--out", folder))
    draw, wanted = random.Random(0), processes(folder)
    running = {name: cotrain(*arguments) for name, arguments in wanted.items()}
    kills, until = 0, time.monotonic() + 240
    while any(process.poll() != 0 for process in running.values()):
        assert time.monotonic() < until, {name: process.poll() for name, process in running.items()}
        time.sleep(draw.uniform(0.5, 3.0))
        name = draw.choice(sorted(running))
        if kills < 8 and running[name].poll() is None:
            running[name].send_signal(signal.SIGKILL)
            kills += 1
        for name, process in running.items():
            if kills and process.poll() is not None and process.returncode != 0:
                finish(process, -signal.SIGKILL)
                running[name] = cotrain(*wanted[name])
    for process in running.values():
        finish(process)
    assert kills == 8
    assert_equal(folder, unbroken)


def test_ctrl_c_stops_all_of_them_and_up_goes_on(config, unbroken):
    folder = config.parent / "stopped"
    process = cotrain("up", config, "--out", folder)
    until = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or '"step": 1' not in (folder / "metrics.jsonl").read_text():
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    finish(process)
    finish(cotrain("up", "--out", folder, "--workers", "2"))
    assert_equal(folder, unbroken)


def test_what_dies_again_and_again_stops_the_run_and_is_named(config):
    folder = config.parent / "dying"
    broken = ["--set", f"rewards.metric={config.parent / 'broken.py'}:score", "--set", "warmup.steps=0"]
    (config.parent / "broken.py").write_text("def score(answer, golds):\n    raise RuntimeError('no such luck')\n")
    output = finish(cotrain("up", config, "--out", folder, *broken), code=2)
    assert "process worker 1" in output.replace("evaluator", "worker 1")
    assert "no such luck" in output


def test_a_run_without_held_out_sets_is_written_too(config):
    folder = config.parent / "unseen"
    finish(cotrain("up", config, "--out", folder, "--set", "data.eval={}", "--set", "loop.steps=1"))
    assert [row["kind"] for row in history(folder)] == ["train"]
    assert (folder / "checkpoints/step-000001/first/weights.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "{config}", "--out", "{new}", "--set", "engine.batching=step"], "'step' needs all groups of a step"),
        (["up", "{config}", "--out", "{one}"], "it holds a run of one process"),
        (["train", "--resume", "--out", "{two}"], "it holds a run of several processes"),
        (["worker", "{new}"], "it holds no run"),
        (["trainer", "{two}", "--model", "frist"], "the run trains no such model"),
        (["up", "{config}", "--out", "{two}", "--set", "loop.seed=7"], "another configuration"),
        (["eval", "{two}", "--watch", "--on", "dev"], "it evaluates as the run's configuration says"),
        (["up", "{config}", "--out", "{new}", "--set", "store.url=postgresql://u:secret@h/d"], "password"),
    ],
)
def test_what_cannot_be_is_refused_in_three_parts(arguments, message, config, unbroken):
    two = config.parent / "founded"
    if not two.exists():
        finish(cotrain("begin", config, "--out", two))
    places = {"config": config, "new": config.parent / "new", "one": unbroken, "two": two}
    output = finish(cotrain(*(argument.format(**places) for argument in arguments)), code=2)
    assert message in output
    assert "to do" in output
    assert "secret" not in output
