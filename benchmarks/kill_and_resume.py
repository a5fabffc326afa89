"""Kill a run at random moments, resume it, and compare losses and weights with an unbroken run, bit for bit.

The run is the two-agent toy of the tests on a tiny model: warm-up, evaluations, checkpoints, a report. Each try is a
run of its own, killed once at a moment drawn from the unbroken run's duration, then resumed to its end.

    python benchmarks/kill_and_resume.py --kills 20 --seed 0
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import signal
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("test_resume", HERE / "tests" / "processes" / "test_resume.py")
assert SPEC is not None
assert SPEC.loader is not None
resume = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(resume)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    config = folder / "run.toml"
    config.write_text(resume.CONFIG.format(toy=HERE / "tests" / "toy.py", model=""))
    resume.finish(resume.start(config, folder / "first"))  # fills the caches
    start = time.perf_counter()
    resume.finish(resume.start(config, folder / "unbroken"))
    duration = time.perf_counter() - start
    draw = random.Random(chosen.seed)
    for number in range(chosen.kills):
        broken = folder / f"broken-{number}"
        moment = draw.uniform(0.2, 1.0) * duration
        process = resume.start(config, broken)
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        lines = (broken / "metrics.jsonl").read_text().count("\n") if (broken / "metrics.jsonl").exists() else 0
        resume.finish(resume.start(config, broken))
        resume.assert_same(broken, folder / "unbroken")
        print(f"kill {number + 1:2d} at {moment:5.1f} s, after {lines:2d} lines of metrics: identical", flush=True)
    print(f"all {chosen.kills} ended with the unbroken run's losses and weights (seed {chosen.seed})")


if __name__ == "__main__":
    main()
