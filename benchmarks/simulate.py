"""Utilisation, lag and backlog of a large run against max_lag, in simulated time (`cotrain.simulate`).

    python benchmarks/simulate.py --plot docs/simulation.svg          1,000 workers, 100 trainers, the times below
    python benchmarks/simulate.py --from runs/mine --workers 16       the times of a run of several processes
    python benchmarks/simulate.py --validate runs/real                a run as it was, and as it is predicted

A run's own records hold what a group and an update took. `commits.json`, which `real_run.py` writes beside them, adds
what happens between: taking up weights, writing, waking. Without it that counts as nothing, and --wake-s as waking.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from cotrain.config import load_config
from cotrain.errors import DataError
from cotrain.processes.joined import store_of
from cotrain.runs import load_record
from cotrain.simulate import Outcome, Setup, Span, Times, simulate
from cotrain.store.base import Store

SEEDS = 40
Step = tuple[str, int]
Place = tuple[int, int]

# Seconds of a toy of two tiny models, three groups a step, on two cores that other work kept busy:
#   python benchmarks/real_run.py --out runs/real && python benchmarks/simulate.py --from runs/real --show
# fmt: off
MEASURED = Times(
    group=[0.34, 1.82, 3.01, 3.04, 2.63, 2.51, 2.8, 3.29, 3.49, 3.93, 3.9, 3.31, 3.89, 3.59, 2.69, 3.6, 3.76,
           2.75, 3.3, 3.36, 4.09, 4.91, 4.52, 3.96, 3.07, 2.6, 3.06, 2.78, 2.75, 3.0, 3.11, 2.93, 2.76],
    update=[
        [1.38, 0.0, 0.0, 0.79, 1.48, 0.87, 1.17, 0.14, 0.96, 1.32, 0.0],
        [3.25, 1.6, 1.69, 2.55, 3.21, 2.32, 2.95, 1.85, 2.09, 3.45, 1.66],
    ],
    between=[0.17, 0.37, 0.23, 0.22, 0.3, 0.42, 0.27, 0.4, 0.35, 0.26, 0.34,
             0.41, 0.28, 0.5, 0.31, 0.38, 0.26, 0.29, 0.2, 0.34, 0.29, 0.27],
    publish=[
        [0.53, 0.81, 1.43, 0.88, 0.65, 0.85, 2.35, 0.78, 0.72, 0.71, 1.91],
        [0.71, 0.44, 1.22, 0.73, 0.69, 1.1, 1.98, 0.6, 1.13, 1.0, 1.32],
    ],
    wake=[0.05, 0.0, 0.0, 0.0, 0.0, 0.05, 0.21, 0.0, 0.04, 0.05, 0.0, 0.05, 0.06, 0.0, 0.0, 0.08,
          0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Made:
    """A group as the run recorded it."""

    key: Place
    seconds: float
    worker: str


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What a run holds about its own time; `put` and `published` (seconds of the epoch) only where it was watched."""

    setup: Setup
    models: tuple[str, ...]
    groups: tuple[Made, ...]
    updates: dict[Step, float]
    waits: dict[Step, float]
    lags: tuple[int, ...]
    put: dict[Place, float]
    published: dict[Step, float]


def recorded(folder: Path) -> Recorded:
    """Read a run of several processes that is over.

    Raises:
        DataError: its groups are not all there.
    """
    config = load_config(folder / "config.toml")
    store = store_of(config, folder)
    try:
        return read(folder, store)
    finally:
        store.close()


def read(folder: Path, store: Store) -> Recorded:
    terms, status = store.terms(), store.status()
    models, steps = tuple(terms.max_lag), range(1, min(status.heads.values()) + 1)
    groups = []
    for step in steps:
        kept = store.records(step)
        if kept is None:
            raise DataError(f"run {folder}", f"the groups of step {step} were removed", "Set store.keep_groups = true")
        for place, data in enumerate(kept):
            made = load_record(data)
            groups.append(Made(key=(step, place), seconds=made.time_s, worker=made.worker))
    metrics = {(model, step): dict(store.metrics(model, step) or {}) for model in models for step in steps}
    old = [(int(row["step"] or 0), row["oldest"]) for row in store.ledger() if row["state"] == "trained"]
    first = {weights.step: weights.version for model in models if (weights := store.weights(model, 0)) is not None}
    commits = (
        json.loads(path.read_text()) if (path := folder / "commits.json").exists() else {"groups": [], "steps": []}
    )
    setup = Setup(
        workers=len({group.worker for group in groups}),
        models=len(models),
        places=terms.places,
        steps=len(steps),
        max_lag=max(terms.max_lag.values()),
    )
    return Recorded(
        setup=setup,
        models=models,
        groups=tuple(groups),
        updates={key: float(str(values["time/update_s"])) for key, values in metrics.items()},
        waits={key: float(str(values["time/wait_s"])) for key, values in metrics.items()},
        lags=tuple(first[0] + step - 1 - int(version) for step, version in old if version is not None),
        put={(step, place): at for step, place, at in commits["groups"]},
        published={(model, step): at for model, step, at in commits["steps"]},
    )


def times_of(run: Recorded, wake_s: Sequence[float]) -> Times:
    """What the run's work took after its first step; from its records alone where nobody watched it."""

    def of_models(values: dict[Step, float]) -> list[list[float]]:
        return [[value for (name, step), value in values.items() if name == model and step > 1] for model in run.models]

    groups = [group for group in run.groups if group.key[0] > 1]
    times = Times(group=[group.seconds for group in groups], update=of_models(run.updates), wake=wake_s)
    if not run.put:
        return times
    between, last = [], dict[str, Made]()
    for group in sorted(groups, key=lambda group: run.put[group.key]):
        before, last[group.worker] = last.get(group.worker), group
        if before is not None and before.key[0] == group.key[0]:  # else it may have waited for a publication
            between.append(max(0.0, run.put[group.key] - run.put[before.key] - group.seconds))
    rest, wake = {}, []
    complete: dict[int, float] = defaultdict(float)
    for (step, _), at in run.put.items():
        complete[step] = max(complete[step], at)
    for (model, step), update_s in run.updates.items():
        start, waited = run.published[model, step - 1], run.waits[model, step]
        rest[model, step] = max(0.0, run.published[model, step] - start - waited - update_s)
        if step > 1 and complete[step] > start:
            wake.append(max(0.0, start + waited - complete[step]))
    return replace(times, between=between or (0.0,), publish=of_models(rest), wake=wake or wake_s)


def busy(run: Recorded, span: Span) -> tuple[float, float]:
    """The shares of their time that workers and trainers really worked in a span."""
    made = [(run.put[group.key] - group.seconds, run.put[group.key]) for group in run.groups]
    worked = sum(max(0.0, min(end, span[1]) - max(start, span[0])) for start, end in made)
    updated = sum(seconds for key, seconds in run.updates.items() if span[0] < run.published[key] <= span[1])
    length = span[1] - span[0]
    return worked / (run.setup.workers * length), updated / (run.setup.models * length)


def validate(run: Recorded, name: str, times: Times) -> None:
    """Print a run as it was and as it is predicted, from the first step to the last: processes start at various times.

    Raises:
        DataError: nobody noted when it committed.
    """
    if not run.put:
        raise DataError(f"run {name}", "it has no commits.json", "Make one with benchmarks/real_run.py")
    setup, last = run.setup, run.setup.steps
    start, end = (max(run.published[model, step] for model in run.models) for step in (1, last))
    worked, updated = busy(run, (start, end))
    lag = statistics.mean(run.lags)
    print(
        f"\n{name}: {setup.workers} workers, {setup.models} trainers, {setup.places} groups a step, {last} steps, ",
        end="",
    )
    print(f"max_lag {setup.max_lag}; steps 2 to {last}")
    print(f"{'':24}{'seconds':>9}{'ratio':>7}{'workers':>9}{'trainers':>10}{'mean lag':>10}{'max lag':>9}")
    print(f"{'real':24}{end - start:9.1f}{'':7}{worked:9.0%}{updated:10.0%}{lag:10.2f}{max(run.lags):9}")
    alone = replace(times, between=(0.0,), publish=((0.0,),), wake=(0.0,))
    for what, chosen in (("predicted", times), ("from the records alone", alone)):
        played = [simulate(replace(setup, seed=seed), chosen) for seed in range(SEEDS)]
        spans = [(one.published[1], one.published[last]) for one in played]
        seconds = [until - since for since, until in spans]
        figures = [
            statistics.mean(one.workers_busy(span) for one, span in zip(played, spans, strict=True)),
            statistics.mean(one.trainers_busy(span) for one, span in zip(played, spans, strict=True)),
            statistics.mean(one.lag_mean for one in played),
        ]
        mean, spread = statistics.mean(seconds), statistics.stdev(seconds)
        shown = f"{mean:9.1f}{mean / (end - start):7.2f}{figures[0]:9.0%}{figures[1]:10.0%}{figures[2]:10.2f}"
        print(f"{what:24}{shown}{max(max(one.lags) for one in played):9}   ± {spread:.1f} s over {SEEDS} seeds")


def sweep(setup: Setup, times: Times, lags: Sequence[int]) -> list[Outcome]:
    """Play one run per max_lag and print a line for each, of the middle of the run."""
    print(f"{setup.workers} workers, {setup.models} trainers, {setup.places} groups a step, {setup.steps} steps")
    group, update = statistics.mean(times.group), statistics.mean(map(statistics.mean, times.update))
    print(f"a group {group:.2f} s and an update {update:.2f} s on average")
    print("max_lag  workers busy  trainers busy  mean lag  max lag  backlog  max backlog  steps/h  seconds to simulate")
    played = []
    for lag in lags:
        start = time.process_time()
        one = simulate(replace(setup, max_lag=lag), times)
        taken, span = time.process_time() - start, one.middle
        played.append(one)
        print(
            f"{lag:7}{one.workers_busy(span):14.0%}{one.trainers_busy(span):15.0%}{one.lag_mean:10.2f}"
            f"{max(one.lags):9}{one.backlog_mean(span):9.0f}{one.max_backlog:13}{one.steps_per_hour(span):9.1f}"
            f"{taken:21.1f}",
            flush=True,
        )
    return played


def plot(played: Sequence[Outcome], path: Path) -> None:
    """Draw the sweep, on white: a figure in a document cannot follow the reader's theme."""
    lags = [one.setup.max_lag for one in played]
    panels: list[tuple[str, dict[str, list[float]]]] = [
        (
            "share of time busy",
            {
                "workers": [one.workers_busy(one.middle) for one in played],
                "trainers": [one.trainers_busy(one.middle) for one in played],
            },
        ),
        ("steps per hour", {"": [one.steps_per_hour(one.middle) for one in played]}),
        (
            "versions behind",
            {"mean": [one.lag_mean for one in played], "most": [float(max(one.lags)) for one in played]},
        ),
        (
            "steps' worth of groups that wait",
            {
                "mean": [one.backlog_mean(one.middle) / one.setup.places for one in played],
                "most": [one.max_backlog / one.setup.places for one in played],
            },
        ),
    ]
    with matplotlib.rc_context({"svg.hashsalt": "cotrain", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        for axes, (title, lines) in zip(figure.subplots(2, 2).flat, panels, strict=True):
            for label, values in lines.items():
                axes.plot(range(len(lags)), values, marker="o", markersize=3.5, label=label)
            axes.set_xticks(range(len(lags)), [str(lag) for lag in lags])
            axes.set(title=title, xlabel="max_lag")
            axes.set_ylim(bottom=0.0)
            axes.grid(linewidth=0.4)
            axes.spines[["top", "right"]].set_visible(False)
            if len(lines) > 1:
                axes.legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="source", type=Path, help="folder of a run whose times are drawn")
    parser.add_argument("--validate", type=Path, nargs="+", default=[], help="folders of watched runs to predict")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--places", type=int, default=1000, help="groups per step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wake-s", type=float, nargs="+", default=[0.0], help="seconds until who waits looks")
    parser.add_argument("--show", action="store_true", help="print the times, as MEASURED is written")
    parser.add_argument("--plot", type=Path, help="write the figure, as SVG")
    chosen = parser.parse_args()
    times = times_of(recorded(chosen.source), chosen.wake_s) if chosen.source else MEASURED
    if chosen.show:
        for name, values in vars(times).items():
            print(f"    {name}={json.loads(json.dumps(values), parse_float=lambda text: round(float(text), 2))},")
        return
    if chosen.validate:
        for folder in chosen.validate:
            run = recorded(folder)
            validate(run, folder.name, times if chosen.source else times_of(run, chosen.wake_s))
        return
    numbers = {name: getattr(chosen, name) for name in ("workers", "models", "places", "steps", "seed")}
    played = sweep(Setup(**numbers, max_lag=0), times, chosen.lags)
    if chosen.plot:
        plot(played, chosen.plot)


if __name__ == "__main__":
    main()
