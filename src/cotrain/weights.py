"""Published weights: how they travel from a trainer to whoever samples.

A version is a folder `weights/<model>/step-<step>` in the run folder with what is trained of the model (all weights,
or the adapter's), written whole or not at all, and known by the SHA-256 of its file. Nothing else is used.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save

from cotrain import checkpoints
from cotrain.cache import atomic_folder
from cotrain.engines.local import LocalEngine
from cotrain.errors import TrainError
from cotrain.store.base import Weights
from cotrain.trainer import Trainer


def write_weights(folder: Path, trainer: Trainer, step: int, *, is_known: bool) -> Weights:
    """Write what the trainer has as its model's weights of a step.

    With `is_known` they were published before, and a folder that is there is kept; else it is the remains of a writer
    that died before it could publish them.
    """
    model = trainer.model.name
    target = folder / "weights" / model / f"step-{step:06d}"
    tensors = {name: p.detach() for name, p in trainer.model.network.named_parameters() if p.requires_grad}
    data = save(tensors)
    if not is_known:
        checkpoints.remove(target)
    if not target.exists():
        with atomic_folder(target) as unfinished:
            (unfinished / checkpoints.WEIGHTS).write_bytes(data)
            checkpoints.write_json(unfinished / "trainer.json", {"version": trainer.version})
            checkpoints.flush(unfinished)
        checkpoints.flush_one(target.parent)
    digest, place = hashlib.sha256(data).hexdigest(), str(target.relative_to(folder))
    return Weights(model=model, step=step, version=trainer.version, folder=place, digest=digest)


def read_weights(folder: Path, weights: Weights, network: torch.nn.Module) -> None:
    """Copy published weights into a network.

    Raises:
        TrainError: the folder is gone, or its content is not what was published.
    """
    path = folder / weights.folder / checkpoints.WEIGHTS
    if not path.resolve().is_relative_to(folder.resolve()):
        raise TrainError(f"weights {weights.folder}", f"they lie outside of the run {folder}", "Do not use this store")
    found = file_digest(path)
    if found != weights.digest:
        what = f"their hash is {found[:12]}, but {weights.digest[:12]} was published"
        raise TrainError(f"weights {path}", what, "Find out who changed the file; the trainer can publish it again")
    checkpoints.read_tensors(path, {name: p for name, p in network.named_parameters() if p.requires_grad})


def sweep(folder: Path, model: str) -> None:
    """Remove what writers that died left unfinished; only the model's trainer may."""
    for path in (folder / "weights" / model).glob(".*"):
        shutil.rmtree(path)


def prune_weights(folder: Path, model: str, keep: Callable[[int], bool]) -> list[int]:
    """Remove the weights of the steps that `keep` does not want; returns them."""
    removed = []
    for path in sorted((folder / "weights" / model).glob("step-*")):
        step = int(path.name[5:])
        if not keep(step):
            checkpoints.remove(path)
            removed.append(step)
    return removed


def file_digest(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        TrainError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TrainError(f"weights {path}", f"cannot be read: {error.strerror}", "Use newer ones") from None


class Follower:
    """Keeps an engine at its model's newest published weights, which it takes up where no completion is under way.

    Args:
        folder: the run folder.
        engine: samples from the network that the weights go to.
        newest: model name -> the newest weights; None where there are none yet.
    """

    def __init__(self, folder: Path, model: str, engine: LocalEngine, newest: Callable[[str], Weights | None]) -> None:
        self.folder, self.model, self.engine, self.newest = folder, model, engine, newest
        self.wanted: Weights | None = None
        self.loaded: Weights | None = None
        engine.reload, engine.peek = self.take_up, self.is_behind

    def look(self) -> None:
        """See what is newest."""
        self.wanted = self.newest(self.model)

    def is_behind(self) -> bool:
        """Whether there are weights to take up."""
        return self.wanted != self.loaded

    def take_up(self) -> None:
        """Read the wanted weights into the engine's network; newer ones, where these were pruned meanwhile."""
        while self.wanted is not None and self.is_behind():
            wanted = self.wanted
            try:
                read_weights(self.folder, wanted, self.engine.network)
            except TrainError:
                self.look()
                if self.wanted == wanted:
                    raise
                continue
            self.loaded, self.engine.version = wanted, wanted.version
