"""The commands of a run of several processes: `worker`, `trainer`, `eval --watch` and `up`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cotrain.config import load_config
from cotrain.interrupts import interrupts

if TYPE_CHECKING:
    from cotrain.processes.joined import Joined

SUPERVISOR = "COTRAIN_SUPERVISOR"
"""Environment variable with the process id of the `cotrain up` that started a process: without it, it stops."""

RunFolder = Annotated[Path, typer.Argument(help="The folder of a run that `cotrain up` or `cotrain begin` made.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a configuration key.")]


def worker(run: RunFolder) -> None:
    """Make groups for a run until it is over.

    Start as many as there are machines for; each may come and go at any time. Ctrl-C: after the group in progress.
    """
    from cotrain.processes.worker import work

    with _process(run, "worker") as joined:
        asyncio.run(work(joined))


def trainer(run: RunFolder, model: Annotated[str, typer.Option(help="Name of the model.")]) -> None:
    """Train one model of a run until it is over.

    A second trainer of a model waits until the first one is gone. Ctrl-C: after the step in progress.
    """
    from cotrain.processes.learner import learn

    with _process(run, f"trainer-{model}") as joined:
        learn(joined, model)


def watch(run: Path) -> None:
    """Write a run's folder from its store, and evaluate where an evaluation is due, until the run is over."""
    from cotrain.processes.evaluator import watch as evaluate

    with _process(run, "evaluator") as joined:
        asyncio.run(evaluate(joined))


def begin(
    config: Annotated[Path, typer.Argument(help="A TOML file.")],
    out: Annotated[Path, typer.Option(help="Folder of the run, which every process can reach.")],
    settings: Settings = None,
) -> None:
    """Make the folder and the store of a run of several processes, and start none."""
    from cotrain.processes.joined import found

    found(load_config(config, settings or ()), out)
    print(f"{out}: begun. Start its processes, wherever the folder and the store can be reached:")
    for arguments in (f"trainer {out} --model NAME", f"worker {out}", f"eval {out} --watch"):
        print(f"  cotrain {arguments}")


def audit(run: RunFolder) -> None:
    """Prove from the store's own records that every group was trained exactly once, by weights that were new enough.

    For a run that is at rest. Ends with code 1 and names what is wrong, if anything is.
    """
    from cotrain.store.audit import audit as problems_of

    with _process(run, "audit") as joined:
        problems = problems_of(joined.store)
        status = joined.store.status()
    for problem in problems:
        print(problem)
    if problems:
        raise typer.Exit(1)
    print(f"{run}: sound, {min(status.heads.values())} steps of {len(status.heads)} models")


def up(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; none: the one in --out, to go on.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/latest"),
    workers: Annotated[int, typer.Option(min=1, help="Number of workers.")] = 1,
    settings: Settings = None,
) -> None:
    """Run all processes of a configuration on this machine: a trainer per model, workers, an evaluator.

    What dies is started again, within limits. A run that is in the folder already goes on. Ctrl-C stops all of them.
    """
    chosen = load_config(config or out / "config.toml", settings or ())
    from cotrain.processes.joined import found
    from cotrain.processes.up import supervise

    found(chosen, out)
    with interrupts() as stop:
        supervise(out, load_config(out / "config.toml"), workers, lambda: stop.asked)


@contextmanager
def _process(run: Path, role: str) -> Iterator[Joined]:
    """A process of a run: it logs to standard output, and stops when asked to or when its supervisor is gone."""
    from cotrain.processes.joined import joined

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("cotrain").setLevel(logging.INFO)
    with interrupts() as stop, joined(run, role, _stopped(lambda: stop.asked)) as found:
        yield found


def _stopped(asked: Callable[[], bool]) -> Callable[[], bool]:
    supervisor = os.environ.get(SUPERVISOR)
    if supervisor is None:
        return asked
    return lambda: asked() or os.getppid() != int(supervisor)
