"""From lines of `metrics.jsonl` to the charts and tables of a report, in sections.

`sections` knows the names of cotrain's metrics, and how to read each of them; a metric that it does not know gets a
chart under its own name. It computes nothing but sums over the run. What is absent in a step is unknown and leaves
its line out there; only counts that are absent are 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from cotrain.charts import MAX_POINTS, NUM_COLORS, Series, line_chart
from cotrain.evaluate import SCORE_NAMES, SCORES, UNTRAINED
from cotrain.runs import Metrics

Caption = tuple[str, str]
"""Title of a chart, and a sentence on how to read it."""

_NOT_DRAWN = ("version",)  # it counts the steps once more
_WARMUP_NOTE = "Supervised, on rule-made demonstrations of the formats, before RL."
_TEAM_CHARTS = {"team": ("Reward", "Mean credit of the answers.")}
_DROPPED_CHARTS = {"dropped": ("Dropped per step", "What gave no sample, by reason.")}
_TIME_CHARTS = {"time": ("Seconds per step", "By phase.")}
_AGENT_CHARTS = {
    "credit": ("Credit", "Mean of what each agent is trained on: shared reward and penalty."),
    "shared": ("Shared reward", "The answers' score, carried back from readers to what they read."),
    "penalty": ("Penalty", "Mean penalty for faulty outputs."),
    "fault_rate": ("Faulty outputs", "Share of outputs that broke a format rule."),
    "truncated_rate": ("Truncated outputs", "Share of outputs cut by a token limit."),
    "advantage_std": ("Spread of advantages", "Standard deviation over the step's samples."),
    "entropy": ("Entropy", "Nats per sampled token. Near 0: the agent has stopped exploring."),
    "kl": ("KL to the start of RL", "Nats per sampled token (k3 estimate)."),
    "clip_fraction": ("Clipped tokens", "Share of tokens whose ratio was clipped."),
    "length": ("Length", "Sampled tokens per output."),
    "samples": ("Samples", "Trajectories that were trained on."),
    "fault": ("Faults by rule", "Share of outputs that broke each rule."),
}
_MODEL_CHARTS = {
    "loss": ("Loss", "A policy-gradient loss is no measure of progress; watch it for jumps."),
    "grad_norm": ("Gradient norm", "Before clipping."),
    "lr": ("Learning rate", ""),
    "sampler_gap_mean": (
        "Sampler gap, mean",
        "|sampler's log-prob - trainer's| for equal weights, in nats per token.",
    ),
    "sampler_gap_max": ("Sampler gap, largest", "Of the step's tokens."),
    "tokens": (
        "Tokens",
        "Trained on; put through the model; and what that would be without sharing prefixes.",
    ),
}
_WARMUP_CHARTS = {**_MODEL_CHARTS, "loss": ("Loss", "Negative log-likelihood of the demonstrations, per token.")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawn chart; each entry of `legend` has `name`, `last` (newest value), `color` (its number) and `dashed`."""

    title: str
    help: str
    svg: Markup
    legend: tuple[dict[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the report: a table of totals (`name`, `total`, `share`) where it has one, and charts."""

    title: str
    charts: tuple[Chart, ...]
    note: str = ""
    rows: tuple[dict[str, str], ...] = ()
    rows_of: str = ""


def sections(train: Sequence[Metrics], held_out: Sequence[Metrics], warmup: Sequence[Metrics]) -> list[Section]:
    """The sections that have anything to show, from a run's lines of each kind, in the order of steps."""
    draw = _Pen()
    width = math.ceil(len(train) / MAX_POINTS)
    bins = f" Each point is the mean of {width} steps." if width > 1 else ""
    sampled = f"Of what was sampled for training, at training temperature.{bins}"
    sections = [
        Section(title="Held-out scores", charts=_held_out(held_out, draw)),
        Section(title="Team", note=sampled, charts=_curves(train, "team", _TEAM_CHARTS, draw)),
        Section(title="Agents", note=sampled, charts=_curves(train, "agent", _AGENT_CHARTS, draw)),
        Section(title="Models", note=bins.strip(), charts=_curves(train, "model", _MODEL_CHARTS, draw)),
        Section(title="Warm-up", note=_WARMUP_NOTE, charts=_curves(warmup, "model", _WARMUP_CHARTS, draw)),
        Section(
            title="Dropped",
            rows=_totals([*train, *held_out], "dropped"),
            rows_of="reason",
            charts=_curves(train, "dropped", _DROPPED_CHARTS, draw),
        ),
        Section(
            title="Time",
            rows=_totals([*train, *held_out], "time", " s"),
            rows_of="phase",
            charts=_curves(train, "time", _TIME_CHARTS, draw),
        ),
    ]
    return [section for section in sections if section.charts or section.rows]


class _Pen:
    """Draws charts, each with a number of its own in the page."""

    def __init__(self) -> None:
        self.drawn = 0

    def __call__(self, title: str, help: str, series: Sequence[Series]) -> Chart:
        self.drawn += 1
        legend = tuple(
            {
                "name": line.name,
                "last": _short(line.last),
                "color": index % NUM_COLORS,
                "dashed": index >= NUM_COLORS,
            }
            for index, line in enumerate(series)
        )
        return Chart(title=title, help=help, svg=Markup(line_chart(series, self.drawn)), legend=legend)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value + 0.0:.4g}"  # + 0.0: no -0


def _held_out(rows: Sequence[Metrics], draw: _Pen) -> tuple[Chart, ...]:
    """One chart per score: a line per set with its interval."""
    charts = []
    for score in SCORES:
        series = []
        for name in sorted(in_order(map(set_of, rows)), key=lambda name: name.endswith(UNTRAINED)):
            points = [row for row in rows if set_of(row) == name and _is_number(row.get(score))]
            if not points:
                continue
            bounds = {
                side: _column(points, f"{score}_{side}")
                for side in ("low", "high")
                if all(_is_number(row.get(f"{score}_{side}")) for row in points)
            }
            steps = tuple(float(step_of(row)) for row in points)
            series.append(Series(name=name, steps=steps, values=_column(points, score), **bounds))
        if series:
            charts.append(draw(SCORE_NAMES[score], "Mean over questions, with its 95 % interval.", series))
    return tuple(charts)


def _curves(rows: Sequence[Metrics], kind: str, known: Mapping[str, Caption], draw: _Pen) -> tuple[Chart, ...]:
    """The metrics `kind/...`, one chart per thing that is measured, the known ones first."""
    lines: dict[str, list[Series]] = {what: [] for what in known}
    for key in in_order(key for row in rows for key in row if key.startswith(f"{kind}/")):
        what, name = _place(key)
        points = [row for row in rows if _is_number(row.get(key)) or _counts_as_0(key, row)]
        if points and what not in _NOT_DRAWN:
            steps = tuple(float(row.get("warmup_step") or step_of(row)) for row in points)
            lines.setdefault(what, []).append(Series(name=name, steps=steps, values=_column(points, key)))
    captions = {what: known.get(what, (what, "")) for what in lines}
    return tuple(draw(*captions[what], series) for what, series in lines.items() if series)


def _counts_as_0(key: str, row: Metrics) -> bool:
    """Counts are written only where there was something to count; anything else that is absent is unknown."""
    agent, is_fault, _ = key.partition("/fault/")
    return key not in row and (key.startswith("dropped/") or bool(is_fault and f"{agent}/fault_rate" in row))


def _place(key: str) -> tuple[str, str]:
    """A metric's name -> (what it measures, which line of that chart it is)."""
    kind, name, *rest = key.split("/", 2)
    if not rest:
        return kind, name.removesuffix("_s") if kind == "time" else name
    what, _, part = rest[0].partition("/")
    if what.startswith("tokens_"):  # one chart for all of them
        what, part = "tokens", what.removeprefix("tokens_")
    return what, f"{name}: {part}" if part else name


def _totals(rows: Sequence[Metrics], kind: str, unit: str = "") -> tuple[dict[str, str], ...]:
    """Rows of a table: the sums over the run of the metrics `kind/...`, largest first, and their shares."""
    sums: Counter[str] = Counter()
    for row in rows:
        for key in row:
            if key.startswith(f"{kind}/"):
                sums[_place(key)[1]] += _number(row[key])  # type: ignore[assignment]
    total = math.fsum(sums.values()) or 1.0
    return tuple(
        {"name": name, "total": f"{value:,.0f}{unit}", "share": f"{value / total:.0%}"}
        for name, value in sums.most_common()
    )


def step_of(row: Metrics) -> int:
    """The step that a line belongs to."""
    return int(row.get("step") or 0)


def set_of(row: Metrics) -> str:
    """The held-out set of a line."""
    return str(row.get("set"))


def in_order(names: Iterable[str]) -> list[str]:
    """Distinct names in the order of their first appearance."""
    return list(dict.fromkeys(names))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def _column(rows: Sequence[Metrics], key: str) -> tuple[float, ...]:
    return tuple(_number(row.get(key)) for row in rows)
