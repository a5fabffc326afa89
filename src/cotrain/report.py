"""A run as one HTML file: before and after, curves, drops, time, sample groups, configuration.

`write_report` reads a run folder and replaces its `report.html` in one move, so a reader never sees half a page. The
file is self-contained (no script, no request, charts inline), follows the reader's light or dark theme, and escapes
every text that came from models, data or users. It may be written at any time, also before the first step: what is
not there yet is said to be missing. It computes no metric of training; it draws what `metrics.jsonl` holds.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from rich.table import Table

from cotrain import curves
from cotrain.config import RunConfig, load_config
from cotrain.curves import in_order, set_of, step_of
from cotrain.errors import CotrainError, DataError
from cotrain.evaluate import (
    SCORE_NAMES,
    SCORES,
    UNTRAINED,
    Comparison,
    compare,
    compare_types,
    comparison_table,
)
from cotrain.runs import GroupRecord, Metrics, read_groups, read_metrics, read_predictions
from cotrain.show import rollouts_of, shorten, visible
from cotrain.types import Trajectory

_EXAMPLES_PER_STEP = 2

log = logging.getLogger(__name__)


def try_report(folder: Path) -> None:
    """Write the report; a page that cannot be drawn is no reason to lose a run."""
    try:
        write_report(folder)
    except Exception as error:
        log.warning("the report could not be written: %s: %s", type(error).__name__, error)


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run folder and return its path.

    Raises:
        DataError: there is no such folder, or its metrics cannot be read.
    """
    if not folder.is_dir():
        raise DataError(f"run {folder}", "no such folder", "Name the folder of a run")
    page = _render(folder)
    path = folder / "report.html"
    partial = path.with_name("report.html.partial")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, path)
    return path


def _render(folder: Path) -> str:
    rows = _latest(read_metrics(folder))
    train = [row for row in rows if row["kind"] == "train"]
    held_out = [row for row in rows if row["kind"] == "eval"]
    config, config_text = _config(folder)
    environment = Environment(
        autoescape=True, finalize=_readable, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        name=folder.resolve().name,
        status=_status(train, config),
        has_metrics=bool(rows),
        outcomes=_outcomes(folder, held_out, config),
        sections=curves.sections(train, held_out, [row for row in rows if row["kind"] == "warmup"]),
        examples=_examples(folder, [step_of(row) for row in train]),
        config=config_text,
        written=f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}",
    )


def _readable(value: object) -> object:
    """Control characters in text become visible; Jinja then escapes it. Charts are markup and stay as they are."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _latest(rows: Iterable[Metrics]) -> list[Metrics]:
    """The last line of each place in the run, in order: a resumed run may have written some twice."""
    newest = {(row.get("kind"), row.get("set"), *_place_in_run(row)): {"kind": "", **row} for row in rows}
    return sorted(newest.values(), key=_place_in_run)


def _place_in_run(row: Metrics) -> tuple[int, int]:
    return step_of(row), int(row.get("warmup_step") or 0)


def _config(folder: Path) -> tuple[RunConfig | None, str]:
    path = folder / "config.toml"
    if not path.exists():
        return None, ""
    text = path.read_text(encoding="utf-8")
    try:
        return load_config(path), text
    except CotrainError:  # of another version of cotrain: still worth showing
        return None, text


def _status(train: Sequence[Metrics], config: RunConfig | None) -> str:
    done = step_of(train[-1]) if train else 0
    parts = [f"Step {done}" + (f" of {config.loop.steps}" if config else "")]
    if config:
        parts.append(f"system {config.system.name}")
        parts.extend(f"model {name}: {model.path}" for name, model in config.models.items())
    return " · ".join(parts)


# --- before and after -------------------------------------------------------------------------------------------------


def _outcomes(folder: Path, held_out: Sequence[Metrics], config: RunConfig | None) -> list[dict[str, object]]:
    """Of each set: what the warm-up gained, if there was one, and what RL has gained so far."""
    outcomes: list[dict[str, object]] = []
    for name, start, end in stretches(held_out):
        if start == end:
            outcomes.append({"name": name, "caption": f"{_moment(start)}; no later evaluation yet", "rows": []})
        else:
            outcomes.append({"name": name} | _outcome(folder, start, end, config))
    return outcomes


def stretches(held_out: Sequence[Metrics]) -> list[tuple[str, tuple[str, int], tuple[str, int]]]:
    """(set, start, end) of each stretch of training to be judged; start and end are (evaluated set, step).

    A warm-up's stretch, from the untrained models to the start of RL, is apart from RL's, which ends with the last
    evaluation. Before there are two evaluations, start and end are the same.
    """
    found = []
    for name in in_order(set_of(row).removesuffix(UNTRAINED) for row in held_out):
        trained = [(name, step_of(row)) for row in held_out if set_of(row) == name]
        untrained = [(set_of(row), step_of(row)) for row in held_out if set_of(row) == name + UNTRAINED]
        points = [*untrained[:1], *trained[:1], *trained[-1:]]
        pairs = [(start, end) for start, end in itertools.pairwise(points) if start != end] or [(points[0], points[0])]
        found += [(name, start, end) for start, end in pairs]
    return found


def gains(folder: Path, resamples: int = 2000, seed: int = 0) -> list[Table]:
    """A table per held-out set and stretch of training, before and after, paired by question."""
    held_out = [row for row in read_metrics(folder) if row["kind"] == "eval"]
    return [
        comparison_table(
            read_predictions(folder, start[1], start[0]),
            read_predictions(folder, end[1], end[0]),
            title=f"{name}: {_moment(start)} against {_moment(end)}",
            resamples=resamples,
            seed=seed,
        )
        for name, start, end in stretches(held_out)
        if start != end
    ]


def _outcome(folder: Path, start: tuple[str, int], end: tuple[str, int], config: RunConfig | None) -> dict[str, object]:
    caption = f"{_moment(start)} against {_moment(end)}"
    resamples, seed = (config.eval.bootstrap, config.loop.seed) if config else (2000, 0)
    try:
        before, after = (read_predictions(folder, step, name) for name, step in (start, end))
        compared = compare(before, after, resamples, seed)
        types = compare_types(before, after, resamples, seed)
    except DataError as error:
        return {"caption": f"{caption}: cannot be compared. {error}", "rows": []}
    rows = [_comparison_row(SCORE_NAMES[score], compared[score]) for score in SCORES]
    if len(types) > 1:
        rows += [_comparison_row(f"F1, {type or 'no type'} ({n})", c) for type, (n, c) in types.items()]
    return {"caption": f"{caption}, {len(before)} questions", "rows": rows}


def _moment(point: tuple[str, int]) -> str:
    return "untrained" if point[0].endswith(UNTRAINED) else f"step {point[1]}"


def _comparison_row(name: str, result: Comparison) -> dict[str, str]:
    difference = result.difference
    return {
        "name": name,
        "before": f"{result.before.mean:.3f}",
        "after": f"{result.after.mean:.3f}",
        "difference": f"{difference.mean:+.3f}",
        "interval": f"{difference.low:+.3f} … {difference.high:+.3f}",
        "excludes_zero": "yes" if difference.excludes_zero else "no",
        "mood": ("good" if difference.mean > 0 else "bad") if difference.excludes_zero else "",
    }


# --- sample groups ----------------------------------------------------------------------------------------------------


def _examples(folder: Path, steps: Sequence[int]) -> list[dict[str, object]]:
    """The first groups of the first and of the last step, or what is wrong with their file."""
    examples = []
    for step in sorted({steps[0], steps[-1]} if steps else ()):
        try:
            examples += [_example(record) for record in read_groups(folder, step)[:_EXAMPLES_PER_STEP]]
        except DataError as error:
            examples.append({"step": step, "problem": str(error)})
    return examples


def _example(record: GroupRecord) -> dict[str, object]:
    group = record.group
    return {
        "step": group.step,
        "problem": "",
        "question": group.question.text,
        "gold": " | ".join(group.question.answers),
        "dropped": ", ".join(f"{count} {reason}" for reason, count in sorted(group.dropped.items())),
        "rollouts": [
            {
                "name": f"rollout {id}" if id is not None else f"trunk of pass {pass_id}",
                "trajectories": [_said(t, record) for t in trajectories],
            }
            for pass_id, id, trajectories in rollouts_of(group)
        ],
    }


def _said(t: Trajectory, record: GroupRecord) -> dict[str, str]:
    facts = [f"{name} {value:.3f}" for name, value in t.rewards.items()]
    facts.append(f"credit {record.credits[t.id]:.3f}" if t.id in record.credits else "credit unknown")
    has_advantage = t.id in record.advantages
    facts.append(f"advantage {record.advantages[t.id]:+.3f}" if has_advantage else "no advantage")
    facts.append(f"{t.num_sampled} tokens")
    return {
        "agent": t.agent,
        "status": t.status,
        "facts": " · ".join(facts),
        "faults": ", ".join(t.faults),
        "output": shorten(t.output, 600) or "(empty)",
    }
