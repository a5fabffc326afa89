"""The study: arms x seeds at equal numbers of sampled tokens. From the repository's root, after `scripts/research 0`:

    python recipes/research/study.py run [--seeds 0 1 2 3 4] [--arms co main-only ...]
    python recipes/research/study.py table

`run` may be broken off and called again: what is finished is left, what was begun goes on. `table` compares every arm
with the untrained team and with co-training: differences on the same held-out questions and seeds, 95 % intervals by
bootstrap over (seed, question) pairs, stratified by seed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from cotrain.runs import read_predictions

FOLDER = Path("runs/research")
RECIPE = Path(__file__).parent
ARMS: dict[str, tuple[str, ...]] = {
    "co": (),
    "duplicate": ('align={method="duplicate", size=1}',),
    "none": ("align.method=none",),
    "main-only": ("models.sub.trainable=false",),
    "sub-only": ("models.main.trainable=false",),
    "alone": (),
}


AGENTS = ("main", "researcher")


def cotrain(*arguments: str | Path) -> None:
    """Run a command."""
    subprocess.run([sys.executable, "-m", "cotrain.cli", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def train(arm: str, seed: int) -> None:
    """Start a run, go on with it, or leave it."""
    folder = FOLDER / f"{arm}-{seed}"
    if is_finished(folder):
        return
    recipe = RECIPE / ("alone.toml" if arm == "alone" else "run.toml")
    if arm == "alone" and not (FOLDER / "warm-alone/main/config.json").exists():
        begun = FOLDER / "warmup-alone"
        resume = ["--resume"] if (begun / "config.toml").exists() else []
        cotrain("train", RECIPE / "alone-warmup.toml", "--out", begun, *resume)
        cotrain("models", "export", begun, FOLDER / "warm-alone/main", "--model", "main")
    settings = (f"loop.seed={seed}", "loop.steps=1000", *ARMS[arm])  # the recipe's bound on tokens ends the run
    chosen = [part for setting in settings for part in ("--set", setting)]
    resume = ["--resume"] if (folder / "config.toml").exists() else []
    print(f"study: {arm}, seed {seed}", flush=True)
    cotrain("train", recipe, "--out", folder, *resume, *chosen)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, or none where it was not begun."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_finished(folder: Path) -> bool:
    """Whether the last step was evaluated."""
    steps = [row["step"] for row in rows(folder) if row["kind"] == "train"]
    evaluated = [row["step"] for row in rows(folder) if row["kind"] == "eval"]
    return bool(steps) and evaluated[-1:] == steps[-1:]


def scores(arm: str, seed: int, what: str, *, last: bool) -> dict[str, float]:
    """Question id -> exact match or an agent's credit, before RL or after it; without those that have none."""
    folder = FOLDER / f"{arm}-{seed}"
    step = rows(folder)[-1]["step"] if last else 0
    predictions = read_predictions(folder, step, "dev")
    if what == "em":
        return {p.question_id: p.em for p in predictions}
    return {p.question_id: p.credits[what] for p in predictions if what in p.credits}


def differences(before: list[dict[str, float]], after: list[dict[str, float]]) -> str:
    """The paired difference over the seeds, with its interval, as text."""
    mean, low, high = interval(
        [np.array([a[id] - b[id] for id in b if id in a]) for b, a in zip(before, after, strict=True)]
    )
    return f"{mean:+.3f} ({low:+.3f} ... {high:+.3f})"


def interval(differences: list[np.ndarray], seed: int = 0) -> tuple[float, float, float]:
    """Mean of the seeds' means, with a 95 % bootstrap interval that resamples questions within each seed."""
    rng = np.random.default_rng(seed)
    drawn = [np.mean([rng.choice(d, len(d)).mean() for d in differences]) for _ in range(2000)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(np.mean([d.mean() for d in differences])), float(low), float(high)


def table(seeds: list[int], arms: list[str]) -> None:
    """Print before, after and differences for each arm: exact match, and the agents' credits under co-training."""
    print(f"{'arm':10} {'score':18} seeds  before  after   after - before              after - co")
    for arm in arms:
        done = [seed for seed in seeds if is_finished(FOLDER / f"{arm}-{seed}")]
        for what in ("em", *AGENTS) if arm == "co" else ("em",):
            if not done:
                continue
            before, after = ([scores(arm, seed, what, last=last) for seed in done] for last in (False, True))
            against = ""
            if arm != "co" and (both := [seed for seed in done if is_finished(FOLDER / f"co-{seed}")]):
                co = [scores("co", seed, what, last=True) for seed in both]
                against = differences(co, [scores(arm, seed, what, last=True) for seed in both])
            means = [np.mean([np.mean(list(s.values())) for s in side]) for side in (before, after)]
            name = "exact match" if what == "em" else f"credit {what}"
            gain = differences(before, after)
            print(f"{arm:10} {name:18} {len(done):5}  {means[0]:.3f}   {means[1]:.3f}   {gain:27} {against}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    chosen = parser.parse_args()
    if chosen.what == "table":
        table(chosen.seeds, chosen.arms)
        return
    for seed in chosen.seeds:
        for arm in chosen.arms:
            train(arm, seed)


if __name__ == "__main__":
    main()
