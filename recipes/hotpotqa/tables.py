"""The recorded runs against the untrained team, question by question: python recipes/hotpotqa/tables.py [RUN ...]

A RUN is a folder in `results/` (by default all, and the two seeds of fork on first by their mean on each question).
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from cotrain.evaluate import SCORES, Prediction, bootstrap
from cotrain.runs import read_predictions

RESULTS = Path(__file__).parent / "results"
SETS = ("hotpotqa", "2wikimultihopqa", "musique")


def predictions(run: str, held_out: str) -> dict[str, Prediction]:
    """Question id -> the last prediction of a run."""
    paths = sorted((RESULTS / run / "eval").glob(f"step-*-{held_out}.jsonl"))
    step = int(paths[-1].name.split("-")[1])
    return {p.question_id: p for p in read_predictions(RESULTS / run, step, held_out)}


def rows(runs: Sequence[str]) -> None:
    """Print before, after and paired difference of the mean over `runs`, for each set and score."""
    for held_out in SETS:
        before = predictions("untrained", held_out)
        after = [predictions(run, held_out) for run in runs]
        for score in SCORES:
            earlier = [getattr(before[id], score) for id in before]
            later = [fmean(getattr(of_run[id], score) for of_run in after) for id in before]
            gain = bootstrap([b - a for a, b in zip(earlier, later, strict=True)])
            print(
                f"{'+'.join(runs):20} {held_out:16} {score:9} {fmean(earlier):6.3f} -> {fmean(later):6.3f}"
                f"  {gain.mean:+.3f} ({gain.low:+.3f} … {gain.high:+.3f})"
            )


if __name__ == "__main__":
    for chosen in [[name] for name in sys.argv[1:]] or [["first-0"], ["first-1"], ["first-0", "first-1"], ["robin-0"]]:
        rows(chosen)
