"""What older samples cost and save: max_lag x importance guard x seeds, each a run of several processes.

    python recipes/research/staleness.py run [--seeds 0 1 2] [--lags 0 1 2 4 8]
    python recipes/research/staleness.py table [--plot docs/staleness.svg]

From the repository's root, after `scripts/research 0`. Two workers, a trainer per model, an evaluator, the store in
SQLite. The trainers run at low priority: samples are then as old as the bound allows, as with many workers. At lag 0
there is nothing for a guard to correct, so it is one arm. `run` may be broken off and called again; the wall time of a
run that was broken off is not used. Intervals: bootstrap over questions within each seed, 95 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from study import differences, rows

from cotrain.config import load_config
from cotrain.processes.joined import store_of
from cotrain.runs import read_predictions

FOLDER = Path("runs/staleness")
RECIPE = Path(__file__).parent / "run.toml"
WORKERS, TRAINERS = 2, ("main", "sub")
LOW_PRIORITY = ["nice", "-n", "19"]
SAMPLED = 100_000
"""Tokens that a run samples."""
EVERY = 15
"""Steps between evaluations."""
LOOK_S = 0.2


def arms(lags: Sequence[int]) -> list[tuple[int, str]]:
    """(max_lag, guard) in the order of the runs."""
    return [(lag, guard) for lag in lags for guard in (("none",) if lag == 0 else ("none", "truncate"))]


def folder_of(lag: int, guard: str, seed: int) -> Path:
    """Where a run lies."""
    return FOLDER / f"lag-{lag}-{guard}-{seed}"


def train(lag: int, guard: str, seed: int) -> None:
    """Start a run, go on with it, or leave it."""
    folder = folder_of(lag, guard, seed)
    if (folder / "wall.json").exists():
        return
    print(f"staleness: max_lag {lag}, guard {guard}, seed {seed}", flush=True)
    is_whole = not (folder / "config.toml").exists()
    if is_whole:
        chosen = (
            f"loop.seed={seed}",
            "loop.steps=1000",
            f"loop.max_sampled={SAMPLED}",
            f"store.max_lag={lag}",
            f"loss.guard={guard}",
        )
        settings = [part for setting in (*chosen, f"eval.every={EVERY}") for part in ("--set", setting)]
        call = [sys.executable, "-m", "cotrain.cli", "begin", str(RECIPE), "--out", str(folder), *settings]
        subprocess.run(call, check=True, stdout=subprocess.DEVNULL)
    processes = [start(folder, ["trainer", str(folder), "--model", name], LOW_PRIORITY) for name in TRAINERS]
    processes += [start(folder, ["worker", str(folder)]) for _ in range(WORKERS)]
    processes.append(start(folder, ["eval", str(folder), "--watch"], LOW_PRIORITY))
    began, ended = watch(folder, processes)
    for process in processes:
        if process.wait():
            raise SystemExit(f"a process of {folder} ended with code {process.returncode}; see {folder}.log")
    wall = {"seconds": ended - began if is_whole else None}
    (folder / "wall.json").write_text(json.dumps(wall) + "\n")


def start(folder: Path, arguments: Sequence[str], before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """A process of the run, logging into its folder."""
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen([*before, sys.executable, "-m", "cotrain.cli", *arguments], stdout=log, stderr=log)


def watch(folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> tuple[float, float]:
    """When the models were first published, and when they had made their last step."""
    store = store_of(load_config(folder / "config.toml"), folder)
    began = ended = 0.0
    try:
        while any(process.poll() is None for process in processes):
            status, now = store.status(), time.monotonic()
            if not began and min(status.heads.values()) >= 0:
                began = now
            if not ended and status.is_over:
                ended = now
            time.sleep(LOOK_S)
    finally:
        store.close()
    return began, ended


def steps(folder: Path) -> list[dict[str, Any]]:
    """The metrics of the run's steps."""
    return [row for row in rows(folder) if row["kind"] == "train"]


def exact(folder: Path, step: int) -> dict[str, float]:
    """Question id -> exact match after a step."""
    return {p.question_id: p.em for p in read_predictions(folder, step, "dev")}


def table(seeds: Sequence[int], lags: Sequence[int]) -> None:
    """Print one line per arm."""
    print("max_lag  guard     seeds  lag main  lag sub  left out  wall / lag 0  exact match  against lag 0")
    for lag, guard in arms(lags):
        done = [s for s in seeds if (folder_of(lag, guard, s) / "wall.json").exists()]
        if not done:
            continue
        folders = [folder_of(lag, guard, seed) for seed in done]
        made = [row for folder in folders for row in steps(folder)]
        ages = [np.mean([row[f"model/{name}/lag_max"] for row in made]) for name in TRAINERS]
        stale = sum(row[f"model/{name}/stale"] for row in made for name in TRAINERS)
        after = [exact(folder, steps(folder)[-1]["step"]) for folder in folders]
        fresh = [folder_of(0, "none", seed) for seed in done]
        ratio, against = "", ""
        if all((folder / "wall.json").exists() for folder in fresh):
            ratio = wall_ratio(folders, fresh)
            against = differences([exact(folder, steps(folder)[-1]["step"]) for folder in fresh], after)
        em = np.mean([np.mean(list(found.values())) for found in after])
        counts = f"{len(done):5}  {ages[0]:8.2f}  {ages[1]:7.2f}  {stale:8.0f}"
        print(f"{lag:7}  {guard:8}  {counts}  {ratio:>12}  {em:11.3f}  {against}")


def wall_ratio(folders: Sequence[Path], fresh: Sequence[Path]) -> str:
    """Seconds per sampled token, over those of the runs at lag 0 with the same seeds: mean and range."""
    ratios = [pace(a) / pace(b) for a, b in zip(folders, fresh, strict=True) if pace(a) and pace(b)]
    return f"{np.mean(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-"


def pace(folder: Path) -> float:
    """Seconds per sampled token, from the first publication to the last; 0 where the run was broken off."""
    seconds = json.loads((folder / "wall.json").read_text())["seconds"]
    return float((seconds or 0.0) / steps(folder)[-1]["team/sampled"])


def plot(seeds: Sequence[int], lags: Sequence[int], path: Path) -> None:
    """Learning curves: exact match on held-out questions over sampled tokens, means over the seeds."""
    matplotlib.rcParams["svg.hashsalt"] = "cotrain"
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, guard in zip(panels, ("none", "truncate"), strict=True):
        for index, lag in enumerate(lags):
            chosen = "none" if lag == 0 else guard
            folders = [f for s in seeds if ((f := folder_of(lag, chosen, s)) / "wall.json").exists()]
            if folders:
                curves = [curve(folder) for folder in folders]
                length = min(map(len, curves))
                points = np.mean([c[:length] for c in curves], axis=0)
                panel.plot(points[:, 0], points[:, 1], color=f"C{index}", marker="o", markersize=3, label=str(lag))
        panel.set_title("no guard" if guard == "none" else "truncated importance weights", fontsize=10)
        panel.set_xlabel("sampled tokens")
    panels[0].set_ylabel("exact match, held out")
    panels[1].legend(title="max_lag", fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    print(path)


def curve(folder: Path) -> list[tuple[float, float]]:
    """(sampled tokens, exact match) of the evaluations."""
    sampled = {0: 0} | {row["step"]: row["team/sampled"] for row in steps(folder)}
    return [(sampled[row["step"]], row["em"]) for row in rows(folder) if row["kind"] == "eval"]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--plot", type=Path)
    chosen = parser.parse_args()
    if chosen.what == "run":
        for seed in chosen.seeds:
            for lag, guard in arms(chosen.lags):
                train(lag, guard, seed)
        return
    table(chosen.seeds, chosen.lags)
    if chosen.plot:
        plot(chosen.seeds, chosen.lags, chosen.plot)


if __name__ == "__main__":
    main()
