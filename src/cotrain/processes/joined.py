"""What every process of a run does first and meanwhile: take up the run, hold its lease, see whether to stop."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cotrain import runs
from cotrain.assemble import Plan, make_plan, max_lag, trained_models
from cotrain.config import RunConfig, dump_config, lasting, load_config
from cotrain.curriculum import read_sets
from cotrain.errors import ConfigError, DataError, StoreError
from cotrain.store.base import Store, Terms
from cotrain.store.connect import open_store

PATIENCE_S = 1.0
"""Longest wait for the store before a process looks whether it was asked to stop."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A process's view of a run. `owner` names the process in leases, `stopped` says that it shall end."""

    folder: Path
    config: RunConfig
    plan: Plan
    store: Store
    owner: str
    stopped: Callable[[], bool]


def found(config: RunConfig, folder: Path) -> None:
    """Lay the ground of a run: its folder, its configuration, its place in the store. Again for one that is there.

    Raises:
        ConfigError: the configuration cannot be run by several processes, or the run began with another one.
        DataError: the folder holds something else, or the sets of questions cannot be read or overlap.
    """
    _check(config)
    make_plan(config)
    written = folder / "config.toml"
    if not written.exists():
        read_sets(config)
    known = load_config(written).store.run if written.exists() else None
    name = config.store.run or known or run_name(config, folder)
    config = config.model_copy(update={"store": config.store.model_copy(update={"run": name})})
    if folder.exists() and not written.exists() and any(folder.iterdir()):
        raise DataError(f"run folder {folder}", "it is not empty and holds no run", "Choose another folder")
    if written.exists() and not (folder / "weights").exists():
        raise DataError(
            f"run folder {folder}", "it holds a run of one process", "Resume it with `cotrain train --resume`"
        )
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    store = store_of(config, folder)
    try:
        store.begin(terms(config, folder))
    finally:
        store.close()
    runs.write_text(written, dump_config(config))


def store_of(config: RunConfig, folder: Path) -> Store:
    """The run's store."""
    chosen = config.store
    return open_store(chosen.url, folder, run_name(config, folder), max_waiting_bytes=chosen.max_waiting_bytes)


def run_name(config: RunConfig, folder: Path) -> str:
    """The run's name in its store; what `found` wrote down stays when the folder moves."""
    return config.store.run or (folder.resolve().name if config.store.url else "run")


def terms(config: RunConfig, folder: Path) -> Terms:
    """What the run's processes agree on; of the configuration what may not change when a run goes on."""
    open_to_change = {"store": type(config.store)(), "engine": type(config.engine)()}
    models = {name: model.model_copy(update={"max_lag": None}) for name, model in config.models.items()}
    return Terms(
        run=run_name(config, folder),
        config=dump_config(lasting(config).model_copy(update={**open_to_change, "models": models})),
        steps=config.loop.steps,
        places=config.sampling.questions_per_step,
        max_lag={name: max_lag(config, name) for name in trained_models(config)},
        max_sampled=config.loop.max_sampled,
    )


@contextmanager
def joined(folder: Path, role: str, stopped: Callable[[], bool]) -> Iterator[Joined]:
    """Take up a run that was founded.

    Raises:
        DataError: there is no run in the folder.
    """
    if not (folder / "config.toml").exists():
        raise DataError(f"run folder {folder}", "it holds no run", "Start one with `cotrain up CONFIG --out FOLDER`")
    config = load_config(folder / "config.toml")
    _check(config)
    if config.engine.batching == "auto":
        engine = config.engine.model_copy(update={"batching": "group"})
        config = config.model_copy(update={"engine": engine})
    store = store_of(config, folder)
    store.terms()
    owner = f"{role}@{socket.gethostname()}:{os.getpid()}"
    try:
        yield Joined(folder=folder, config=config, plan=make_plan(config), store=store, owner=owner, stopped=stopped)
    finally:
        store.close()


@contextmanager
def held(renew: Callable[[], None], lease_s: float) -> Iterator[None]:
    """Renew a lease from a thread while the block works; a lease that is lost shows when its holder commits."""
    over = threading.Event()

    def keep() -> None:
        while not over.wait(lease_s / 3):
            try:
                renew()
            except StoreError:  # a lost lease, or a store that is away: whoever commits next is told
                return

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _check(config: RunConfig) -> None:
    """Refuse what several processes cannot do as one would."""
    if config.engine.batching == "step":
        found = "'step' needs all groups of a step in one process"
        raise ConfigError("engine.batching", found, "Leave it out, or set 'group', or 'continuous' for slow tools")
    if "role_baseline" in (config.advantage.estimator, *config.advantage.agents.values()):
        found = "role_baseline keeps an average over all groups in their order"
        raise ConfigError("advantage", found, "Choose another estimator, or train in one process (`cotrain train`)")
    if not trained_models(config):
        raise ConfigError("models", "none of them is trained", "Set trainable = true for one")
