"""Line charts as inline SVG, for a page that has a light and a dark theme.

`line_chart` draws with matplotlib and returns markup whose colours are CSS variables (`--ink`, `--grid`, `--series-0`
to `--series-7`) and whose text uses the page's font. Nothing that a user or a model wrote goes into the SVG: titles
and legends belong to the page. It draws what it is given, gaps included, and knows no metric.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

NUM_COLORS = 8
"""Series beyond these repeat the colours, dashed."""

MAX_POINTS = 150
"""Longer series are averaged in bins, so that a page stays small however long the run."""

# Colours that matplotlib writes and the page replaces; any that occur nowhere else will do.
_INK, _GRID = "#0a0c01", "#0a0c02"
_SERIES = [f"#0a0b{number:02x}" for number in range(NUM_COLORS)]
_THEME = {_INK: "var(--ink)", _GRID: "var(--grid)"} | {c: f"var(--series-{i})" for i, c in enumerate(_SERIES)}
_STYLE = {
    "svg.fonttype": "none",  # text stays text: small, selectable, in the page's font
    "svg.hashsalt": "cotrain",  # equal data give equal files
    "font.size": 11,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.limits": (-3, 6),
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line: P points, with the bounds of an interval around each where there are any."""

    name: str
    steps: tuple[float, ...]
    values: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @property
    def last(self) -> float:
        """The newest value."""
        return self.values[-1]


def line_chart(series: Sequence[Series], number: int) -> str:
    """The series over steps, as an `<svg>` element without size, whose ids begin with `chart{number}-`.

    Values that are not finite leave gaps. Series need not share their steps.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.2, 2.6), layout="constrained")
        axes = figure.add_subplot()
        for index, line in enumerate(series):
            line, color = binned(line), _SERIES[index % NUM_COLORS]
            style = "-" if index < NUM_COLORS else "--"
            marker = "o" if len(line.steps) <= 30 else ""
            axes.plot(
                line.steps,
                line.values,
                color=color,
                linestyle=style,
                linewidth=1.6,
                marker=marker,
                markersize=3.5,
            )
            if line.low:
                axes.fill_between(line.steps, line.low, line.high, color=color, alpha=0.15, linewidth=0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.tick_params(length=0)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _themed(buffer.getvalue(), f"chart{number}-")


def binned(series: Series) -> Series:
    """The series itself, or at most `MAX_POINTS` means over equal runs of its points (bounds are averaged likewise).

    The last bin may hold fewer points; a bin without a finite value is a gap.
    """
    width = math.ceil(len(series.steps) / MAX_POINTS)
    if width <= 1:
        return series
    starts = range(0, len(series.steps), width)

    def means(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(_mean(values[start : start + width]) for start in starts) if values else ()

    return Series(
        name=series.name,
        steps=means(series.steps),
        values=means(series.values),
        low=means(series.low),
        high=means(series.high),
    )


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def _themed(svg: str, prefix: str) -> str:
    """The bare `<svg>` element, fit to stand in a page beside others."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style .*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}', svg).replace("url(#", f"url(#{prefix}")
    svg = re.sub(r" font-family: [^;\"]*;", "", svg)
    for color, variable in _THEME.items():
        svg = svg.replace(color, variable)
    return re.sub(r"\s*\n\s*", "\n", svg)
