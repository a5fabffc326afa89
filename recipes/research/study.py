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


def train(arm: str, seed: int) -> None:
    """Start a run, go on with it, or leave it."""
    folder = FOLDER / f"{arm}-{seed}"
    if is_finished(folder):
        return
    recipe = RECIPE / ("alone.toml" if arm == "alone" else "run.toml")
    settings = (f"loop.seed={seed}", "loop.steps=1000", *ARMS[arm])  # the recipe's bound on tokens ends the run
    chosen = [part for setting in settings for part in ("--set", setting)]
    resume = ["--resume"] if (folder / "config.toml").exists() else []
    command = [sys.executable, "-m", "cotrain.cli", "train", str(recipe), "--out", str(folder), *resume, *chosen]
    print(f"study: {arm}, seed {seed}", flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def rows(folder: Path) -> list[dict]:
    """The metrics of a run, or none where it was not begun."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_finished(folder: Path) -> bool:
    """Whether the last step was evaluated."""
    steps = [row["step"] for row in rows(folder) if row["kind"] == "train"]
    evaluated = [row["step"] for row in rows(folder) if row["kind"] == "eval"]
    return bool(steps) and evaluated[-1:] == steps[-1:]


def scores(arm: str, seed: int, *, last: bool) -> dict[str, float]:
    """Question id -> exact match, before RL or after it."""
    folder = FOLDER / f"{arm}-{seed}"
    step = rows(folder)[-1]["step"] if last else 0
    return {p.question_id: p.em for p in read_predictions(folder, step, "dev")}


def interval(differences: list[np.ndarray], seed: int = 0) -> tuple[float, float, float]:
    """Mean of the seeds' means, with a 95 % bootstrap interval that resamples questions within each seed."""
    rng = np.random.default_rng(seed)
    drawn = [np.mean([rng.choice(d, len(d)).mean() for d in differences]) for _ in range(2000)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(np.mean([d.mean() for d in differences])), float(low), float(high)


def table(seeds: list[int]) -> None:
    """Print before, after and differences for each arm."""
    print(f"{'arm':10} seeds  before  after   after - before              after - co")
    for arm in ARMS:
        done = [seed for seed in seeds if is_finished(FOLDER / f"{arm}-{seed}")]
        if not done:
            continue
        before = [scores(arm, seed, last=False) for seed in done]
        after = [scores(arm, seed, last=True) for seed in done]
        gain = interval([np.array([a[i] - b[i] for i in b]) for b, a in zip(before, after, strict=True)])
        co = [seed for seed in done if is_finished(FOLDER / f"co-{seed}")]
        against = ""
        if co and arm != "co":
            pairs = [(scores("co", seed, last=True), scores(arm, seed, last=True)) for seed in co]
            mean, low, high = interval([np.array([a[i] - c[i] for i in c]) for c, a in pairs])
            against = f"{mean:+.3f} ({low:+.3f} ... {high:+.3f})"
        means = [np.mean([np.mean(list(s.values())) for s in side]) for side in (before, after)]
        print(
            f"{arm:10} {len(done):5}  {means[0]:.3f}   {means[1]:.3f}   "
            f"{gain[0]:+.3f} ({gain[1]:+.3f} ... {gain[2]:+.3f})   {against}"
        )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    chosen = parser.parse_args()
    if chosen.what == "table":
        table(chosen.seeds)
        return
    for seed in chosen.seeds:
        for arm in chosen.arms:
            train(arm, seed)


if __name__ == "__main__":
    main()
