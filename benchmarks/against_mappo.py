"""One step of MHGPO against one of MAPPO: time and peak memory, as ratios from one run.

The same team, questions, rollouts and penalties (fork on first, G chains a question), one update each. MAPPO has a
critic of its own, a copy of the policy. Each arm runs in a process of its own, in turns, so that its peak memory is
its own and a slow minute of the machine hits both. The first step of each process is not counted. MHGPO leaves out peer
sets of equal credits, which MAPPO trains on: `tokens` says how many tokens each passed through the policy in an update.

    python benchmarks/against_mappo.py --repeats 3
    python benchmarks/against_mappo.py --backbone shared
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = """
[models.base]
path = "{model}"
dtype = "{dtype}"
optimizer = {{ lr = 1e-6 }}
[system]
settings = {{ num_passages = 4, num_picks = 2, passage_words = 40, answer_words = 6 }}
[data.train.world]
hops = [1]
[data.eval.dev]
limit = 1
[sampling]
group_size = 4
questions_per_step = 8
[loss]
beta = 0.001
[loop]
steps = {steps}
checkpoint_every = 100
[eval]
every = 0
"""


def arms(backbone: str) -> dict[str, tuple[str, ...]]:
    return {"mhgpo": (), "mappo": ("advantage.estimator=gae", f"models.base.critic.backbone={backbone}")}


def run(config: str, settings: tuple[str, ...]) -> tuple[list[dict[str, float]], float]:
    """The steps' metrics after the first one, and the peak memory of the process in GiB."""
    with tempfile.TemporaryDirectory() as home:
        folder, recipe = Path(home) / "run", Path(home) / "run.toml"
        recipe.write_text(config)
        chosen = [part for setting in settings for part in ("--set", setting)]
        call = [sys.executable, "-m", "cotrain.cli", "train", str(recipe), "--out", str(folder), *chosen]
        process = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(call)} ended with code {process.returncode}")
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [row for row in rows if row["kind"] == "train"][1:], usage.ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of each process; the first one is not counted")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backbone", choices=["own", "shared"], default="own")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    chosen = parser.parse_args()
    ratios: dict[str, list[float]] = {"update": [], "rollout": [], "step": [], "memory": [], "tokens": []}
    for _ in range(chosen.repeats):
        found: dict[str, dict[str, float]] = {}
        for arm, settings in arms(chosen.backbone).items():
            rows, memory = run(CONFIG.format(model=chosen.model, dtype=chosen.dtype, steps=chosen.steps), settings)
            times = {what: statistics.fmean(row[f"time/{what}_s"] for row in rows) for what in ("update", "rollout")}
            tokens = statistics.fmean(row["model/base/tokens_computed"] for row in rows)
            found[arm] = {**times, "step": sum(times.values()), "memory": memory, "tokens": tokens}
            print(f"{arm}: " + ", ".join(f"{what} {value:.2f}" for what, value in found[arm].items()), flush=True)
        for what, values in ratios.items():
            values.append(found["mappo"][what] / found["mhgpo"][what])
    for what, values in ratios.items():
        print(f"{what}: MAPPO / MHGPO {statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})")
    if chosen.out:
        chosen.out.write_text(
            json.dumps({"model": chosen.model, "backbone": chosen.backbone, "ratios": ratios}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
