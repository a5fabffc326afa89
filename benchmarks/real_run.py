"""A small run of several processes, watched: what `simulate.py` is compared with, and where its times are from.

Starts `cotrain up` on a toy (two models of a few hundred thousand weights, one agent each, text that nobody reads) and
notes when the store committed each group and each step, in `commits.json` in the run folder. `simulate.py --from`
reads it.

    python benchmarks/real_run.py --out runs/real --workers 2 --max-lag 2
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from cotrain.config import load_config
from cotrain.errors import StoreError
from cotrain.processes.joined import store_of
from cotrain.store.base import Store

TOY = Path(__file__).parents[1] / "tests" / "toy.py"
LOOK_S = 0.05
CONFIG = """
[models.first]
path = "tiny-llama"
[models.second]
path = "tiny-qwen3"
[system]
name = "{toy}:two_models"
[agents.scout]
max_tokens = 8
[agents.speaker]
max_tokens = 8
[rewards]
metric = "{toy}:vowels"
[data.train]
split = "train"
[data.eval.dev]
split = "dev"
limit = 1
[sampling]
strategy = "round_robin"
questions_per_step = {places}
[loop]
steps = {steps}
checkpoint_every = 4
[eval]
bootstrap = 100
[store]
max_lag = {max_lag}
"""


def write_config(folder: Path, **numbers: int) -> Path:
    """The toy's files beside the run folder; where its configuration is."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.toml"
    path.write_text(CONFIG.format(toy=TOY, **numbers))
    return path


def watch(process: subprocess.Popen[bytes], store: Store) -> dict[str, list[list[object]]]:
    """When each group and each step was first seen, in seconds of the epoch, until the process ends."""
    groups: dict[tuple[object, object], float] = {}
    steps: dict[tuple[str, int], float] = {}
    before = None
    while process.poll() is None:
        time.sleep(LOOK_S)
        status, now = store.status(), time.time()
        if (seen := (status.backlog, status.heads)) == before:
            continue
        before = seen
        for row in store.ledger():
            groups.setdefault((row["step"], row["place"]), now)
        for model, head in status.heads.items():
            for step in range(head + 1):
                steps.setdefault((model, step), now)
    return {
        "groups": [[step, place, t] for (step, place), t in groups.items()],
        "steps": [[model, step, t] for (model, step), t in steps.items()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; it must not be there yet")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--max-lag", type=int, default=0)
    parser.add_argument("--places", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    chosen = parser.parse_args()
    config = write_config(
        chosen.out.with_name(chosen.out.name + "-config"),
        places=chosen.places,
        steps=chosen.steps,
        max_lag=chosen.max_lag,
    )
    command = [sys.executable, "-m", "cotrain.cli", "up", str(config), "--out", str(chosen.out)]
    process = subprocess.Popen(
        [*command, "--workers", str(chosen.workers)],
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
    try:
        while not (chosen.out / "config.toml").exists():
            if process.poll() is not None:
                raise StoreError(f"run {chosen.out}", "it did not begin", "Read what it said above")
            time.sleep(LOOK_S)
        store = store_of(load_config(chosen.out / "config.toml"), chosen.out)
        commits = watch(process, store)
        store.close()
    finally:
        process.terminate()
        code = process.wait()
    if code:
        raise StoreError(f"run {chosen.out}", f"it ended with code {code}", "Read what it said above")
    (chosen.out / "commits.json").write_text(json.dumps({"workers": chosen.workers, **commits}, indent=1) + "\n")


if __name__ == "__main__":
    main()
