"""Checkpoints: a folder per step that is either whole or not there.

`save_checkpoint` writes into a hidden folder beside the target, flushes every file to the disk and renames; a run
killed at any moment leaves the older checkpoints as they were, and the next save sweeps up what it left. `latest`
finds the newest, `prune` removes old ones. One writer per folder.

    checkpoints/step-000005/state.json           the caller's own JSON values, and the step
    checkpoints/step-000005/<model>/...          what `Trainer.save` wrote
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cotrain.errors import TrainError

if TYPE_CHECKING:
    from torch import Tensor

    from cotrain.models import LoadedModel
    from cotrain.trainer import Trainer

WEIGHTS, REFERENCE = "weights.safetensors", "reference.safetensors"
_UNFINISHED, _REMOVED = ".unfinished-", ".removed-"


@dataclass(frozen=True)
class Files:
    """What the files of a set of weights are called, in a trainer's folder."""

    weights: str
    masters: str
    optimizer: str


POLICY = Files(WEIGHTS, "masters.safetensors", "optimizer.pt")
CRITIC = Files("critic.safetensors", "critic-masters.safetensors", "critic-optimizer.pt")


def save_checkpoint(folder: Path, step: int, trainers: Mapping[str, Trainer], state: Mapping[str, object]) -> Path:
    """Write `folder`/step-<step> atomically and return it; an older checkpoint of the same step is replaced.

    Raises:
        TrainError: `state` holds something that JSON cannot.
    """
    newest = latest(folder)
    with unfinished(folder / f"step-{step:06d}") as target:
        for name, trainer in trainers.items():
            trainer.save(target / name, None if newest is None else newest / name)
        write_json(target / "state.json", {**state, "step": step})
    return folder / f"step-{step:06d}"


@contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """A hidden folder to fill, which takes the place of `target` when the block ends without an error."""
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in [*folder.glob(f"{_UNFINISHED}*"), *folder.glob(f"{_REMOVED}*")]:
        shutil.rmtree(leftover)
    hidden = folder / f"{_UNFINISHED}{target.name}"
    hidden.mkdir()
    yield hidden
    flush(hidden)
    remove(target)
    hidden.rename(target)
    flush_one(folder)


def load_checkpoint(checkpoint: Path, trainers: Mapping[str, Trainer]) -> dict[str, object]:
    """Have every trainer take up its part of a checkpoint, in place; returns the saved state, with its `step`.

    Raises:
        TrainError: the checkpoint is not whole, or is one of other models.
    """
    state = read_json(checkpoint / "state.json")
    found = sorted(path.name for path in checkpoint.iterdir() if path.is_dir())
    if found != sorted(trainers):
        raise TrainError(
            f"checkpoint {checkpoint}",
            f"it holds models {found}, the run has {sorted(trainers)}",
            "Resume with the run's own configuration",
        )
    for name, trainer in trainers.items():
        trainer.load(checkpoint / name)
    return state


def load_weights(checkpoint: Path, models: Mapping[str, LoadedModel]) -> int:
    """Put a checkpoint's trained weights into models, to sample from them; returns the checkpoint's step.

    Models that are not trained keep their weights.

    Raises:
        TrainError: the checkpoint is not whole, or is one of other models.
    """
    step = int(str(read_json(checkpoint / "state.json")["step"]))
    for name, model in models.items():
        trained = {key: p for key, p in model.network.named_parameters() if p.requires_grad}
        if trained:
            read_tensors(checkpoint / name / WEIGHTS, trained)
    return step


def latest(folder: Path) -> Path | None:
    """The finished checkpoint of the highest step, or None."""
    finished = _finished(folder)
    return finished[max(finished)] if finished else None


def prune(folder: Path, keep_last: int, best: int | None = None) -> list[Path]:
    """Remove all checkpoints but the `keep_last` newest and that of step `best`; returns what was removed."""
    finished = _finished(folder)
    keep = {*sorted(finished)[-keep_last:], best} if keep_last else {best}
    removed = [path for step, path in sorted(finished.items()) if step not in keep]
    for path in removed:
        remove(path)
    return removed


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Write one JSON object.

    Raises:
        TrainError: a value that JSON cannot hold, NaN and infinity included.
    """
    try:
        text = json.dumps(values, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TrainError(
            str(path), f"state that is not JSON: {error}", "Keep numbers, strings, lists and dicts in it"
        ) from None
    path.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, object]:
    """Read one JSON object.

    Raises:
        TrainError: there is none.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainError(str(path), f"cannot be read: {error}", "Load another checkpoint") from None
    if not isinstance(values, dict):
        raise TrainError(str(path), f"holds {type(values).__name__}, not an object", "Load another checkpoint")
    return values


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors as safetensors; none, no file."""
    from safetensors.torch import save_file

    if tensors:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)


def read_tensors(path: Path, into: Mapping[str, Tensor]) -> None:
    """Copy a safetensors file into tensors of the same names, shapes and types.

    Raises:
        TrainError: the file is missing, or its tensors are others.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(path) if into or path.exists() else {}
    except (OSError, SafetensorError) as error:
        raise TrainError(str(path), f"cannot be read: {error}", "Load another checkpoint") from None
    signatures = [{name: (t.dtype, t.shape) for name, t in tensors.items()} for tensors in (into, found)]
    if signatures[0] != signatures[1]:
        differing = sorted(name for name, _ in signatures[0].items() ^ signatures[1].items())
        found_text = f"{len(differing)} tensors do not fit the model, such as {differing[0]}"
        raise TrainError(str(path), found_text, "Resume with the run's own configuration")
    for name, tensor in into.items():
        tensor.detach().copy_(found[name])


def read_optimizer(path: Path) -> dict[str, object]:
    """The optimiser state that `torch.save` wrote; nothing in the file is executed.

    Raises:
        TrainError: there is none.
    """
    import torch

    try:
        state: dict[str, object] = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise TrainError(str(path), f"cannot be read: {error}", "Load another checkpoint") from None
    return state


def link_reference(previous: Path, folder: Path, digest: str) -> bool:
    """Whether the save in `previous` holds the reference with this digest, and its file now is in `folder` too."""
    try:
        if read_json(previous / "trainer.json").get("reference") != digest:
            return False
        os.link(previous / REFERENCE, folder / REFERENCE)
    except (OSError, TrainError):  # no such save, or a file system without links
        return False
    return True


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names and bytes: equal for equal tensors."""
    import torch

    sha = hashlib.sha256()
    for name, tensor in tensors.items():
        sha.update(name.encode())
        sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _finished(folder: Path) -> dict[int, Path]:
    paths = [path for path in folder.glob("step-*") if path.name[5:].isdecimal() and (path / "state.json").is_file()]
    return {int(path.name[5:]): path for path in paths}


def remove(path: Path) -> None:
    """Hide before deleting: a half-deleted checkpoint must not pass for a whole one."""
    if path.exists():
        hidden = path.with_name(f"{_REMOVED}{path.name}")
        path.rename(hidden)
        shutil.rmtree(hidden)


def flush(folder: Path) -> None:
    """Have the system write a folder and all in it to the disk."""
    for path in folder.rglob("*"):
        flush_one(path)
    flush_one(folder)


def flush_one(path: Path) -> None:
    """Have the system write one file, or a folder's list of files, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
