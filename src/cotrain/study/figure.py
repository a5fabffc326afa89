"""A study's figure, `figure.svg` and `figure.png`: learning curves and final scores, a row per held-out set.

It draws the study's first score. Left: the held-out score over sampled tokens, an arm's mean over its seeds with their
range, each run joined by straight lines between its evaluations, as far as the arm's shortest run goes. Right: the
final scores with the intervals of the table, and each seed as a point. Equal results give equal files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cotrain.evaluate import SCORE_NAMES
from cotrain.study.results import Outcome, curve_of
from cotrain.study.table import ByArm, ScoreRow, Tables

_STYLE = {
    "svg.hashsalt": "cotrain",  # equal results give equal files
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.4,
}


def write_figure(tables: Tables, runs: ByArm, folder: Path) -> tuple[str, ...]:
    """Draw finished runs, one or more; returns the names of the files."""
    study = tables.study
    drawn = [row for row in tables.scores if row.score == study.scores[0]]
    sets = list(dict.fromkeys(row.set for row in drawn))
    with matplotlib.rc_context(_STYLE):
        height = max(2.6, 1.4 + 0.3 * len(runs)) * len(sets)
        figure = Figure(figsize=(9.0, height), layout="constrained")
        panels = figure.subplots(len(sets), 2, squeeze=False, width_ratios=(3, 2))
        for (curves, finals), name in zip(panels, sets, strict=True):
            rows = [row for row in drawn if row.set == name]
            _draw_curves(curves, rows, runs)
            _draw_finals(finals, rows)
            curves.set_title(f"{name}: mean and range over seeds", fontsize=9)
            finals.set_title(f"{name}: final; thick: over questions, thin: also seeds", fontsize=9)
        panels[0][0].legend(fontsize=8)
        files = (("figure.svg", {"Date": None, "Creator": None}), ("figure.png", {"Software": None}))
        for file, metadata in files:
            figure.savefig(folder / file, metadata=metadata, dpi=150)
    return tuple(file for file, _ in files)


def _draw_curves(axes: Axes, rows: Sequence[ScoreRow], runs: ByArm) -> None:
    for index, row in enumerate(rows):
        if row.gain is None:  # not trained
            axes.axhline(row.after.mean, color=f"C{index}", linestyle="--", linewidth=1.2, label=row.arm)
            continue
        x, values_SX = common_curve(runs[row.arm], row)
        axes.plot(x, values_SX.mean(axis=0), color=f"C{index}", marker="o", markersize=3, label=row.arm)
        axes.fill_between(x, values_SX.min(axis=0), values_SX.max(axis=0), color=f"C{index}", alpha=0.15, linewidth=0)
    axes.set_xlabel("sampled tokens")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel(f"{SCORE_NAMES[rows[0].score]}, held out")


def common_curve(runs: Sequence[Outcome], row: ScoreRow) -> tuple[np.ndarray, np.ndarray]:
    """(x, values_SX): the runs' curves at the places of all their evaluations, up to the end of the shortest."""
    curves = [curve_of(run, row.set, row.score) for run in runs]
    end = min(x[-1] for x, _ in curves)
    x = np.unique([place for places, _ in curves for place in places if place <= end])
    return x, np.stack([np.interp(x, *curve) for curve in curves])


def _draw_finals(axes: Axes, rows: Sequence[ScoreRow]) -> None:
    for index, row in enumerate(rows):
        color, after = f"C{index}", row.after
        if after.seeds is not None:
            axes.plot([after.seeds.low, after.seeds.high], [index, index], color=color, linewidth=1.0)
        axes.plot([after.questions.low, after.questions.high], [index, index], color=color, linewidth=3.5, alpha=0.6)
        axes.plot(row.by_seed, [index + 0.22] * len(row.by_seed), ".", color=color, markersize=3)
        axes.plot(after.mean, index, "o", color=color, markersize=5)
    axes.set_yticks(range(len(rows)), [row.arm for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"{SCORE_NAMES[rows[0].score]}, held out")
