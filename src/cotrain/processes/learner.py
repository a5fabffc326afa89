"""The trainer's process: leads one model, takes its parts of each step in order, updates, publishes the new weights.

A checkpoint is written every `loop.checkpoint_every` steps. After a crash the steps since the last one are made again
from the store's rows, to the same weights (bit for bit on the CPU), so what was published stays true.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from cotrain.assemble import load_cast, make_trainer, max_lag, trained_models
from cotrain.checkpoints import latest, load_checkpoint, prune, save_checkpoint
from cotrain.curriculum import questions_of_step, read_stages, seat
from cotrain.errors import ConfigError, LeaseLostError
from cotrain.loops import Times, demonstrations, is_evaluated
from cotrain.models import load_model
from cotrain.processes.joined import PATIENCE_S, Joined, held
from cotrain.store.base import Part, Status
from cotrain.trainer import Trainer
from cotrain.types import Sample
from cotrain.weights import prune_weights, sweep, write_weights

log = logging.getLogger(__name__)


def learn(joined: Joined, model: str) -> None:
    """Train one model until the run is over or the process shall stop.

    Raises:
        ConfigError: the run trains no such model.
        LeaseLostError: another process leads the model by now.
    """
    if model not in trained_models(joined.config):
        known = ", ".join(trained_models(joined.config))
        raise ConfigError(f"model {model!r}", "the run trains no such model", f"Choose one of: {known}")
    lease_s = joined.config.store.lease_s
    while not _leads(joined, model):
        joined.store.wait(PATIENCE_S)
        if joined.stopped():
            return
    with held(lambda: joined.store.lead(model, joined.owner, lease_s), lease_s):
        try:
            _learn(joined, model)
        finally:
            joined.store.resign(model, joined.owner)


def fresh(parts: Sequence[Part], oldest: int) -> tuple[list[Sample], list[int]]:
    """The samples of the parts with no token from before version `oldest`; the places of the parts left out."""
    samples: list[Sample] = []
    dropped: list[int] = []
    for part in parts:
        if min(_versions(part.samples), default=oldest) < oldest:
            dropped.append(part.place)
        else:
            samples += part.samples
    return samples, dropped


def _versions(samples: Sequence[Sample]) -> list[int]:
    return [v for s in samples for v, is_sampled in zip(s.versions, s.mask, strict=True) if is_sampled]


def _leads(joined: Joined, model: str) -> bool:
    try:
        joined.store.lead(model, joined.owner, joined.config.store.lease_s)
    except LeaseLostError as error:
        log.info("waiting: %s", error.found)
        return False
    return True


def _learn(joined: Joined, model: str) -> None:
    config, store, folder = joined.config, joined.store, joined.folder / "trainers" / model
    sweep(joined.folder, model)
    trainer, state = _resume(joined, model, folder)
    if state is None:
        return
    step, saved = int(str(state["step"])), True
    _publish(joined, trainer, step, state, saved=True)
    log.info("ready at step %d", step)
    while not joined.stopped() and step < store.status().last_step:
        times = Times()
        with times("wait"):
            parts = _await_parts(joined, model, step + 1)
        if parts is None:
            continue
        step += 1
        newest = config.warmup.steps + step - 1  # the weights that this update starts from
        samples, dropped = fresh(parts, newest - max_lag(config, model))
        with times("update"):
            metrics = trainer.update(samples)
        metrics |= {
            f"model/{model}/lag_max": newest - min(_versions(samples), default=newest),
            f"model/{model}/samples": len(samples),
            f"model/{model}/stale": len(dropped),
        }
        state = {"warmed": config.warmup.steps, "metrics": metrics | times.metrics(), "dropped": dropped}
        saved = step % config.loop.checkpoint_every == 0
        _keep(joined, trainer, folder, step, state, saved=saved)
        log.info("step %d: %d samples, loss %s", step, len(samples), metrics.get(f"model/{model}/loss", "none"))
    if not saved:
        _keep(joined, trainer, folder, step, state, saved=True)


def _keep(
    joined: Joined, trainer: Trainer, folder: Path, step: int, state: Mapping[str, object], *, saved: bool
) -> None:
    """Write a checkpoint of the step, if it shall be `saved`, and publish its weights."""
    if saved:
        save_checkpoint(folder, step, {trainer.model.name: trainer}, state)
        prune(folder, joined.config.loop.keep_last)
    _publish(joined, trainer, step, state, saved=saved)


def _await_parts(joined: Joined, model: str, step: int) -> list[Part] | None:
    """The model's parts of a step; None when the process shall stop or the run has ended before."""
    while not joined.stopped() and step <= joined.store.status().last_step:
        parts = joined.store.take(model, step)
        if parts is not None:
            return parts
        joined.store.wait(PATIENCE_S)
    return None


def _resume(joined: Joined, model: str, folder: Path) -> tuple[Trainer, Mapping[str, object] | None]:
    """The trainer at its last checkpoint or at the end of its warm-up, and the state that is published with it.

    No state: the process was stopped in the warm-up.
    """
    config, newest = joined.config, latest(folder)
    if newest is None and config.warmup.steps == 0:
        trainer = make_trainer(joined.plan, load_model(model, config.models[model]))
        trainer.begin_rl()
        state: dict[str, object] = {"warmed": 0, "metrics": {}, "dropped": []}
        save_checkpoint(folder, 0, {model: trainer}, state)
        return trainer, {**state, "step": 0}
    if newest is not None:
        trainer = make_trainer(joined.plan, load_model(model, config.models[model]))
        loaded = load_checkpoint(newest, {model: trainer})
        if int(str(loaded["warmed"])) == config.warmup.steps:
            return trainer, loaded
    return _warm_up(joined, model, folder)


def _warm_up(joined: Joined, model: str, folder: Path) -> tuple[Trainer, Mapping[str, object] | None]:
    """The supervised steps, from the last checkpoint on. Loads all models: demonstrations speak for all agents."""
    config = joined.config
    read = read_stages(config)
    cast = load_cast(joined.plan)
    trainer, first = make_trainer(joined.plan, cast.models[model]), seat(cast, read)[0]
    newest = latest(folder)
    begin = 0 if newest is None else int(str(load_checkpoint(newest, {model: trainer})["warmed"]))
    for step in range(begin + 1, config.warmup.steps + 1):
        questions = questions_of_step(first.questions, step, config.warmup.questions_per_step, config.loop.seed)
        samples, _ = asyncio.run(demonstrations(joined.plan, first.roster, questions, step))
        metrics = trainer.warmup(samples[model], config.warmup.lr)
        log.info("warm-up step %d: loss %s", step, metrics.get(f"model/{model}/loss", "none"))
        if step == config.warmup.steps:
            trainer.begin_rl()
        if joined.stopped() or step % config.warmup.checkpoint_every == 0 or step == config.warmup.steps:
            save_checkpoint(folder, 0, {model: trainer}, {"warmed": step, "metrics": {}, "dropped": []})
        if joined.stopped() and step < config.warmup.steps:
            return trainer, None
    return trainer, {"step": 0, "warmed": config.warmup.steps, "metrics": {}, "dropped": []}


def _publish(joined: Joined, trainer: Trainer, step: int, state: Mapping[str, object], *, saved: bool) -> None:
    """Write and publish the weights of a step, and let go of those that nobody will ask for."""
    store, model = joined.store, trainer.model.name
    weights = write_weights(joined.folder, trainer, step, is_known=store.weights(model, step) is not None)
    metrics, dropped = state["metrics"], state["dropped"]
    assert isinstance(metrics, dict)
    assert isinstance(dropped, list)
    if not store.publish(joined.owner, weights, metrics, dropped=dropped, saved=saved):
        store.tell(joined.owner, "other weights", model=model, step=step)
        log.warning("step %d was made again, to other weights than the first time", step)
    status = store.status()
    prune_weights(joined.folder, model, lambda old: _is_wanted(joined, status, model, old))


def _is_wanted(joined: Joined, status: Status, model: str, step: int) -> bool:
    """Whether somebody may still ask for a step's weights: workers for the newest, the evaluator for what it is due."""
    is_due = step > status.written and (step == 0 or is_evaluated(joined.config, step, last=step == status.last_step))
    return is_due or step >= status.heads[model] - 1
