"""The evaluator: writes the run folder from the store, step by step, and evaluates where an evaluation is due.

It is the only writer of the folder's groups, metrics, predictions, report and `checkpoints`, which hold the weights of
evaluated steps for `cotrain eval`, `ask` and `models export`. Killed at any time it goes on after the last whole step.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cotrain import checkpoints, runs
from cotrain.assemble import Cast, load_cast, trained_models
from cotrain.curriculum import read_held_out
from cotrain.evaluate import UNTRAINED
from cotrain.loops import evaluate, is_evaluated, team_metrics
from cotrain.processes.joined import PATIENCE_S, Joined
from cotrain.progress import metrics_line
from cotrain.report import try_report
from cotrain.roster import Roster
from cotrain.runs import Metrics
from cotrain.trained import best_step
from cotrain.types import Question
from cotrain.weights import read_weights

log = logging.getLogger(__name__)

HeldOut = Mapping[str, tuple[Sequence[Question], Roster]]


@dataclass(frozen=True)
class _Seat:
    """The evaluator's view of a run: who plays, and the questions."""

    joined: Joined
    cast: Cast
    held_out: HeldOut


async def watch(joined: Joined) -> None:
    """Write and evaluate until the run is over and written, or the process shall stop."""
    read = read_held_out(joined.config)
    cast = load_cast(joined.plan)
    seat = _Seat(joined, cast, {name: (chosen, cast.roster(pages)) for name, (chosen, pages) in read.items()})
    store = joined.store
    with runs.only_writer(joined.folder):
        written = store.status().written
        rows = runs.read_metrics(joined.folder)
        runs.rewind(joined.folder, written, sum(int(str(row["step"])) <= written for row in rows))
        if written < 0:
            if not await _begin(seat):
                return
            written = 0
        while written < store.status().last_step and _await_step(joined, written + 1):
            written += 1
            await _write(seat, written)
        try_report(joined.folder)


def _await_step(joined: Joined, step: int) -> bool:
    """Wait until every model has published a step; False where the process shall stop or the run ends before it."""
    while not joined.stopped() and step <= (status := joined.store.status()).last_step:
        if all(head >= step for head in status.heads.values()):
            return True
        joined.store.wait(PATIENCE_S)
    return False


async def _begin(seat: _Seat) -> bool:
    """Evaluate before the warm-up and before RL; whether it came to that."""
    if seat.joined.config.warmup.steps:
        await _evaluate(seat, 0, UNTRAINED)
    if not _await_step(seat.joined, 0):
        return False
    _take_up(seat, 0)
    await _evaluate(seat, 0)
    seat.joined.store.wrote(0)
    return True


async def _write(seat: _Seat, step: int) -> None:
    """One step into the run folder: its groups, its metrics, and its evaluation where one is due."""
    store, folder, config = seat.joined.store, seat.joined.folder, seat.joined.config
    kept = store.records(step)
    assert kept is not None  # every model has trained on them
    made = [runs.load_record(data) for data in kept]
    records, seconds = [group.record for group in made], sum(group.time_s for group in made)
    dropped = sum((Counter(group.dropped) for group in made), Counter[str]())
    runs.write_groups(folder, step, records)
    metrics: dict[str, float | int | str | None] = {"kind": "train", "step": step}
    metrics |= team_metrics(seat.joined.plan, records, dropped)
    update_s = 0.0
    for name in trained_models(config):
        of_model = dict(store.metrics(name, step) or {})
        update_s += float(str(of_model.pop("time/update_s", 0.0)))
        metrics |= {key if key != "time/wait_s" else f"time/wait_{name}_s": value for key, value in of_model.items()}
    before = int(str(runs.last_train_row(folder).get("team/sampled", 0)))
    sampled = sum(record.group.num_sampled for record in records)
    metrics |= {"team/sampled": before + sampled, "time/rollout_s": seconds, "time/update_s": update_s}
    _tell(seat, metrics)
    if is_evaluated(config, step, last=step == store.status().last_step):
        _take_up(seat, step)
        await _evaluate(seat, step)
    store.wrote(step)
    if not config.store.keep_groups:
        store.prune()


def _take_up(seat: _Seat, step: int) -> None:
    """Give the models the weights of a step, and keep those among the run's checkpoints."""
    folder = seat.joined.folder
    target = folder / "checkpoints" / f"step-{step:06d}"
    with checkpoints.unfinished(target) as unfinished:
        for name in trained_models(seat.joined.config):
            weights = seat.joined.store.weights(name, step)
            assert weights is not None  # it was waited for, and is kept until it was written
            read_weights(folder, weights, seat.cast.models[name].network)
            seat.cast.engines[name].version = weights.version
            shutil.copytree(folder / weights.folder, unfinished / name, copy_function=os.link)
        checkpoints.write_json(unfinished / "state.json", {"step": step})


async def _evaluate(seat: _Seat, step: int, suffix: str = "") -> None:
    folder, config = seat.joined.folder, seat.joined.config
    for row in await evaluate(seat.joined.plan, seat.held_out, folder, step, suffix=suffix):
        _tell(seat, row)
    if not suffix:
        best = best_step(folder) if seat.held_out else None
        checkpoints.prune(folder / "checkpoints", config.loop.keep_last, best)
    try_report(folder)


def _tell(seat: _Seat, metrics: Metrics) -> None:
    runs.append_metrics(seat.joined.folder, metrics)
    log.info("%s", metrics_line(metrics))
