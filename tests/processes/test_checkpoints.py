"""Checkpoints are whole or not there, whenever the process that writes them dies."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cotrain.checkpoints import latest, load_checkpoint, load_weights, prune, save_checkpoint
from cotrain.errors import TrainError


class Counter:
    """A stand-in for a trainer: one number in one file."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.previous: Path | None = None

    def save(self, folder: Path, previous: Path | None = None) -> None:
        self.previous = previous
        folder.mkdir()
        (folder / "value").write_text(str(self.value))

    def load(self, folder: Path) -> None:
        self.value = int((folder / "value").read_text())


def save(folder: Path, step: int, **state: object) -> Path:
    return save_checkpoint(folder, step, {"base": Counter(step)}, state)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, 12, {"main": Counter(3), "sub": Counter(4)}, {"best": [7, 0.5]})
    assert checkpoint == tmp_path / "step-000012" == latest(tmp_path)
    trainers = {"main": Counter(), "sub": Counter()}
    assert load_checkpoint(checkpoint, trainers) == {"best": [7, 0.5], "step": 12}
    assert (trainers["main"].value, trainers["sub"].value) == (3, 4)
    with pytest.raises(TrainError, match=r"\['main', 'sub'\], the run has \['main'\]"):
        load_checkpoint(checkpoint, {"main": Counter()})


def test_a_trainer_is_told_of_its_previous_save(tmp_path: Path) -> None:
    counter = Counter()
    save_checkpoint(tmp_path, 1, {"base": counter}, {})
    assert counter.previous is None
    save_checkpoint(tmp_path, 2, {"base": counter}, {})
    assert counter.previous == tmp_path / "step-000001" / "base"


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 5, note="old")
    save(tmp_path, 5, note="new")
    assert names(tmp_path) == ["step-000005"]
    assert json.loads((tmp_path / "step-000005" / "state.json").read_text()) == {"note": "new", "step": 5}


def test_latest_is_by_number_and_ignores_what_is_not_whole(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    for step in (2, 1_000_000, 999_999):
        save(tmp_path, step)
    (tmp_path / "step-2000000").mkdir()  # without a state
    (tmp_path / "step-final").mkdir()
    assert latest(tmp_path) == tmp_path / "step-1000000"


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(5):
        save(tmp_path, step)
    assert [path.name for path in prune(tmp_path, 2, best=1)] == ["step-000000", "step-000002"]
    assert names(tmp_path) == ["step-000001", "step-000003", "step-000004"]
    assert prune(tmp_path, 3) == []
    prune(tmp_path, 1, best=4)
    assert names(tmp_path) == ["step-000004"]


@pytest.mark.parametrize("value", [float("nan"), {1, 2}], ids=["nan", "set"])
def test_state_that_is_not_json_is_refused_and_the_older_checkpoint_stays(tmp_path: Path, value: object) -> None:
    save(tmp_path, 1)
    with pytest.raises(TrainError, match="not JSON"):
        save(tmp_path, 2, value=value)
    assert latest(tmp_path) == tmp_path / "step-000001"


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1)
    (checkpoint / "state.json").write_text("{")
    with pytest.raises(TrainError, match=r"state\.json"):
        load_checkpoint(checkpoint, {"base": Counter()})


def test_weights_alone_go_into_models_that_are_trained(tmp_path: Path) -> None:
    from cotrain.checkpoints import WEIGHTS, write_tensors

    class Writer(Counter):
        def save(self, folder: Path, previous: Path | None = None) -> None:
            folder.mkdir()
            write_tensors(folder / WEIGHTS, {"weight": torch.full((2, 3), 7.0)})

    checkpoint = save_checkpoint(tmp_path, 4, {"base": Writer()}, {})
    trained, frozen = torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(3, 2).requires_grad_(False)
    before = frozen.weight.clone()
    models = {"base": SimpleNamespace(network=trained), "judge": SimpleNamespace(network=frozen)}
    assert load_weights(checkpoint, models) == 4
    assert trained.weight.tolist() == [[7.0] * 3] * 2
    assert torch.equal(frozen.weight, before)
    with pytest.raises(TrainError, match="do not fit"):
        load_weights(checkpoint, {"base": SimpleNamespace(network=torch.nn.Linear(3, 3, bias=False))})


KILLED = """
import os, pathlib, shutil, signal, sys
from cotrain import checkpoints

folder, moment = pathlib.Path(sys.argv[1]), sys.argv[2]

def die(*arguments, **settings):
    os.kill(os.getpid(), signal.SIGKILL)

class Dying:
    def save(self, folder, previous=None):
        folder.mkdir()
        (folder / "value").write_text("9")
        if moment == "saving":
            die()

if moment == "state":
    checkpoints.write_json = die
if moment == "flush":
    os.fsync = die
if moment == "rename":
    pathlib.Path.rename = die
if moment == "prune":
    shutil.rmtree = die
    checkpoints.prune(folder, 1)
checkpoints.save_checkpoint(folder, 3, {"base": Dying()}, {})
"""


@pytest.mark.parametrize("moment", ["saving", "state", "flush", "rename", "prune"])
def test_a_kill_in_the_middle_leaves_the_older_checkpoint_and_the_next_save_sweeps_up(
    tmp_path: Path, moment: str
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, note="whole")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), moment], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == (2 if moment == "prune" else 3)  # something unfinished, or hidden, is there
    checkpoint = latest(tmp_path)
    assert checkpoint == tmp_path / "step-000002"
    trainer = Counter()
    assert load_checkpoint(checkpoint, {"base": trainer}) == {"note": "whole", "step": 2}
    assert trainer.value == 2
    save(tmp_path, 3)
    assert [name for name in names(tmp_path) if name.startswith(".")] == []
    assert latest(tmp_path) == tmp_path / "step-000003"
