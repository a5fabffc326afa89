"""A study's results to keep and to read: `table.json` with every number, `table.md` with what a reader needs.

Equal run folders give equal files, byte for byte: there is no date in them. Every table says what its numbers are; what
is unknown is a dash.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from cotrain.evaluate import SCORE_NAMES, Interval
from cotrain.runs import write_text
from cotrain.study.intervals import FEWEST_SEEDS, Estimate
from cotrain.study.results import LAST
from cotrain.study.table import CostRow, ScoreRow, StabilityRow, Tables

DASH = "–"
_REMARKS = {
    "resumed": "made in several attempts, so that wall time is their sum, with what was lost",
    "unseen": "without wall time and memory, since nobody saw an attempt end",
    "short": "ended by loop.steps, before the budget was spent",
}


def write_tables(tables: Tables, folder: Path) -> str:
    """Write `table.json` and `table.md` into a folder; returns the text of the latter."""
    text = markdown(tables)
    write_text(folder / "table.json", as_json(tables))
    write_text(folder / "table.md", text)
    return text


def as_json(tables: Tables) -> str:
    """All results as one JSON object."""
    found = {
        "study": tables.study.model_dump(mode="json"),
        "budget": str(tables.study.budget),
        "collapse": str(tables.study.collapse),
        "collapse_before": tables.defined_before,
        "unfinished": dict(tables.unfinished),
        **{name: [asdict(row) for row in getattr(tables, name)] for name in ("scores", "costs", "stability")},
    }
    return json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def markdown(tables: Tables) -> str:
    """The results as a page of Markdown."""
    study, done = tables.study, tables.num_runs - len(tables.unfinished)
    lines = [
        f"# Study {study.out}",
        "",
        f"Budget: {study.budget}. Baseline: {study.baseline}. Finished: {done} of {tables.num_runs} runs.",
        "",
        *(f"- not finished: {name} ({why})" for name, why in tables.unfinished.items()),
        "",
    ]
    if done:
        lines += [*_scores(tables), *_costs(tables), *_stability(tables)]
    return "\n".join(lines).rstrip() + "\n"


def _scores(tables: Tables) -> Iterator[str]:
    study = tables.study
    yield "## Scores"
    yield ""
    yield (
        "Means over seeds and held-out questions, greedy; before: at the start of RL. 95 % bootstrap intervals, "
        f"{study.bootstrap} resamples: (…) over questions within these seeds; […] over seeds and questions, from "
        f"{FEWEST_SEEDS} seeds on. Differences are paired by seed and question."
    )
    if any(None in row.seeds for row in tables.scores):
        yield "An arm whose seeds are `all` is not trained: one greedy evaluation stands for every seed."
    for name in dict.fromkeys(row.set for row in tables.scores):
        rows = [row for row in tables.scores if row.set == name]
        yield from ("", f"### {name}: {rows[0].num_questions} questions", "")
        head = ("score", "arm", "seeds", "before", "after", "after − before", f"arm − {study.baseline}", "by seed")
        yield from _grid(head, [_score_cells(row) for row in rows])
    yield ""


def _score_cells(row: ScoreRow) -> list[str]:
    return [
        SCORE_NAMES[row.score],
        row.arm,
        _seeds(row.seeds),
        f"{row.before:.3f}" if row.gain else DASH,
        f"{row.after.mean:.3f}",
        _estimate(row.gain),
        _estimate(row.against) + _on_fewer(row),
        " ".join(f"{value:.3f}" for value in row.by_seed),
    ]


def _on_fewer(row: ScoreRow) -> str:
    """A note where the baseline lacks some of the arm's seeds."""
    if row.against is None or None in row.seeds or row.against.num_seeds == len(row.seeds):
        return ""
    return f" on {row.against.num_seeds} seeds"


def _seeds(seeds: Sequence[int | None]) -> str:
    return "all" if None in seeds else str(len(seeds))


def _estimate(found: Estimate | None) -> str:
    if found is None:
        return DASH
    beyond = f" [{_range(found.seeds)}]" if found.seeds else ""
    return f"{found.mean:+.3f} ({_range(found.questions)}){beyond}"


def _range(interval: Interval) -> str:
    return f"{interval.low:+.3f} … {interval.high:+.3f}"


def _costs(tables: Tables) -> Iterator[str]:
    base = tables.study.baseline
    yield "## Cost"
    yield ""
    yield (
        f"Means over seeds; (×…): ratio to {base}, over the seeds of both. Phases: seconds, and share of all timed "
        "seconds. Tokens/s: sampled tokens over all timed seconds but evaluation's. Wall time, CPU "
        "time and peak memory are the whole process's, start and checkpoints included."
    )
    for what, text in _REMARKS.items():
        found = [f"{row.arm} ({_list(getattr(row, what))})" for row in tables.costs if getattr(row, what)]
        if found:
            yield f"- {text}: {'; '.join(found)}"
    yield ""
    names = dict.fromkeys(name for row in tables.costs for name in row.mean)
    phases = [name for name in names if name.endswith("_s") and name not in ("wall_s", "cpu_s", "tokens_per_s")]
    columns: list[tuple[str, Callable[[CostRow], str]]] = [
        ("updates", lambda row: _cost(row, "updates", "{:.1f}")),
        ("sampled tokens", lambda row: _cost(row, "sampled", "{:,.0f}")),
        ("wall time", lambda row: _cost(row, "wall_s", "{:,.0f} s")),
        ("CPU time", lambda row: _cost(row, "cpu_s", "{:,.0f} s")),
        *((name.removesuffix("_s"), lambda row, name=name: _phase(row, name, phases)) for name in phases),
        ("tokens/s", lambda row: _cost(row, "tokens_per_s", "{:,.0f}")),
        ("peak memory", lambda row: _cost(row, "peak_bytes", "{:,.0f} MB", 1e-6)),
    ]
    yield from _grid(
        ("arm", *(name for name, _ in columns)), [[row.arm, *(of(row) for _, of in columns)] for row in tables.costs]
    )
    yield ""


def _list(seeds: Sequence[int | None]) -> str:
    return "all seeds" if None in seeds else f"seeds {', '.join(map(str, seeds))}"


def _cost(row: CostRow, name: str, form: str, scale: float = 1.0) -> str:
    if name not in row.mean:
        return DASH
    ratio = f" (×{row.ratio[name]:.2f})" if name in row.ratio else ""
    return form.format(row.mean[name] * scale) + ratio


def _phase(row: CostRow, name: str, phases: Sequence[str]) -> str:
    total = sum(row.mean.get(phase, 0.0) for phase in phases) or 1.0
    return _cost(row, name, f"{{:,.1f}} s, {row.mean.get(name, 0.0) / total:.0%}")


def _stability(tables: Tables) -> Iterator[str]:
    yield "## Stability"
    yield ""
    yield f"Means over seeds of the last {LAST} steps; entropy and KL in nats per sampled token."
    yield f"Collapsed: {tables.study.collapse}."
    if tables.defined_before is None:
        yield "**Nothing shows that this was defined before the runs.**"
    elif tables.defined_before != str(tables.study.collapse):
        yield f"**When the first run began, the definition was another one: {tables.defined_before}.**"
    yield ""
    head = ("arm", "seeds", "gradient norm", "entropy", "KL", "faults", "skipped updates", "collapsed")
    trained = [row for row in tables.stability if any(run.fault_rate or run.grad_norm for run in row.runs)]
    yield from _grid(head, [_stability_cells(row) for row in trained])
    for row in tables.stability:
        for seed, run in zip(row.seeds, row.runs, strict=True):
            if run.collapsed:
                yield f"- {row.arm}, seed {seed}: {'; '.join(run.collapsed)}; entropy then: {_named(run.entropy)}"
    yield ""


def _stability_cells(row: StabilityRow) -> list[str]:
    collapsed = sum(bool(run.collapsed) for run in row.runs)
    return [
        row.arm,
        _seeds(row.seeds),
        *(_named(_joined([getattr(run, what) for run in row.runs])) for what in ("grad_norm", "entropy", "kl")),
        _named(_joined([run.fault_rate for run in row.runs])),
        str(sum(run.skipped for run in row.runs)),
        f"{collapsed} of {len(row.runs)}",
    ]


def _joined(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean by name, over the runs that have it."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for name, value in run.items():
            found.setdefault(name, []).append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in found.items()}


def _named(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in numbers.items()) or DASH


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table of Markdown whose columns line up as text, too."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for cells in (head, ["-" * width for width in widths], *rows):
        yield f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |".rstrip()
