"""What the run folders of a study show: pure functions over them.

A run is judged by its folder alone, whoever made it: `state_of` says whether it is finished under the study's budget,
`check_fits` refuses a folder made with other settings or more than the budget, `outcome_of` reads a finished one. Costs
and stability come from `metrics.jsonl`, so what a kill threw away is not in them; wall time and memory come from the
attempts in `jobs/<run>.usage.json`, where it is. What was not logged is absent, never 0.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np

from cotrain.config import RunConfig, by_dotted_key, lasting, load_config
from cotrain.curves import set_of, step_of
from cotrain.errors import ConfigError, DataError
from cotrain.evaluate import UNTRAINED, Prediction, Score
from cotrain.runs import Metrics, read_metrics, read_predictions
from cotrain.study.intervals import Matrix
from cotrain.study.plan import Collapse, Job, Study

LAST = 10
"""Steps at a run's end that its stability is averaged over."""

Values = Mapping[int | None, Mapping[str, float]]
"""Seed -> question id -> value; the seed None stands for all seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished run: its predictions by held-out set before RL and after the last step, its metrics, its attempts."""

    job: Job
    before: Mapping[str, Sequence[Prediction]]
    after: Mapping[str, Sequence[Prediction]]
    train: Sequence[Metrics]
    held_out: Sequence[Metrics]
    attempts: Sequence[Mapping[str, object]]


def state_of(job: Job) -> Literal["missing", "begun", "finished"]:
    """How far a run is: finished once its budget is spent and every held-out set was answered after the last step."""
    if not (job.folder / "config.toml").exists():
        return "missing"
    rows = read_metrics(job.folder)
    train, held_out = _of_kind(rows, "train"), _of_kind(rows, "eval")
    last, loop = _last_step(train), job.config.loop
    most = math.inf if loop.max_sampled is None else loop.max_sampled
    evaluated = {set_of(row) for row in held_out if step_of(row) == last}
    is_over = last >= loop.steps or _sampled(train) >= most
    return "finished" if is_over and evaluated.issuperset(job.config.data.eval) else "begun"


def check_fits(job: Job) -> None:
    """Refuse a folder whose run is not the one that the study asks for.

    Raises:
        ConfigError: it was made with other settings, or went on beyond the budget.
    """
    where = f"run folder {job.folder}"
    if not (job.folder / "config.toml").exists():
        return
    made, asked = (_settings(c, job) for c in (load_config(job.folder / "config.toml"), job.config))
    for key in made | asked:
        if made.get(key) != asked.get(key):
            found = f"it was made with {key} = {made.get(key)!r}, the study says {asked.get(key)!r}"
            raise ConfigError(where, found, "Choose another `out`, or remove the folder to make the run again")
    train, loop = _of_kind(read_metrics(job.folder), "train"), job.config.loop
    found = ""
    if _last_step(train) > loop.steps:
        found = f"it made {_last_step(train)} updates, {loop.steps} are allowed"
    elif loop.max_sampled is not None and _sampled(train[:-1]) >= loop.max_sampled:
        found = f"it sampled {_sampled(train):,} tokens, and had all of {loop.max_sampled:,} before its last step"
    if found:
        raise ConfigError(where, found, "Raise the budget, or remove the folder to make the run again")


def outcome_of(job: Job) -> Outcome | None:
    """What a finished run shows; None for any other.

    Raises:
        DataError: its predictions cannot be read.
    """
    if state_of(job) != "finished":
        return None
    rows = read_metrics(job.folder)
    train = _of_kind(rows, "train")
    sets, last = list(job.config.data.eval), _last_step(train)
    return Outcome(
        job=job,
        before={name: read_predictions(job.folder, 0, name) for name in sets},
        after={name: read_predictions(job.folder, last, name) for name in sets},
        train=train,
        held_out=[row for row in _of_kind(rows, "eval") if not set_of(row).endswith(UNTRAINED)],
        attempts=read_attempts(usage_path(job)),
    )


def usage_path(job: Job) -> Path:
    """Where the attempts at a run are written down."""
    return job.folder.parent / "jobs" / f"{job.name}.usage.json"


def read_attempts(path: Path) -> list[dict[str, object]]:
    """The attempts at a run, oldest first; [] where none was written down.

    Raises:
        DataError: the file holds something else.
    """
    try:
        attempts: list[dict[str, object]] = json.loads(path.read_text(encoding="utf-8"))["attempts"]
    except FileNotFoundError:
        return []
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(str(path), f"not a run's usage: {error!r}", "Remove the file; times are then unknown") from None
    return attempts


def defined_before(study: Study) -> str | None:
    """What counted as a collapse when the study's first run began, as text."""
    path = collapse_path(study)
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def collapse_path(study: Study) -> Path:
    """Where that is written down."""
    return study.folder / "jobs" / "collapse.txt"


# --- scores -----------------------------------------------------------------------------------------------------------


def values(runs: Iterable[Outcome], name: str, score: Score, when: Literal["before", "after"]) -> Values:
    """A score of one arm's runs on a held-out set."""
    return {run.job.seed: {p.question_id: float(getattr(p, score)) for p in getattr(run, when)[name]} for run in runs}


def matrix(of: Values, ids: Sequence[str] | None = None) -> Matrix:
    """The values, seeds x questions, in the order of `ids` or of the first seed.

    Raises:
        DataError: a seed has other questions.
    """
    chosen = list(next(iter(of.values()), {})) if ids is None else list(ids)
    for seed, by_id in of.items():
        if odd := sorted(by_id.keys() ^ set(chosen)):
            found = f"{len(odd)} questions are not in all runs that are compared, such as {odd[0]}"
            raise DataError(f"seed {seed}", found, "Compare runs on the same held-out questions")
    return np.array([[by_id[id] for id in chosen] for by_id in of.values()], dtype=np.float64)


def differences(of: Values, against: Values) -> Matrix:
    """`of` - `against`, matched by seed and question, for the seeds that both have; one without a seed has every seed.

    Raises:
        DataError: the two sides do not have the same questions.
    """
    seeds = [seed for seed in (against if None in of else of) if None in of or None in against or seed in against]
    left, right = ({seed: v[seed] if seed in v else v[None] for seed in seeds} for v in (of, against))
    ids = list(next(iter(left.values()), {}))
    return matrix(left, ids) - matrix(right, ids)


# --- costs and stability ----------------------------------------------------------------------------------------------


def cost_of(run: Outcome) -> dict[str, float]:
    """What a run took, as far as it is known.

    `updates`, `sampled` (tokens), `<phase>_s` for each timed phase, `tokens_per_s` (sampled / all timed phases but
    evaluation); `wall_s` and `cpu_s` (sums over the attempts) and `peak_bytes` (the largest), where every attempt has
    them.
    """
    phases: dict[str, float] = defaultdict(float)
    for row in (*run.train, *run.held_out):
        for key, value in row.items():
            if key.startswith("time/") and isinstance(value, (int, float)):
                phases[key.removeprefix("time/")] += value
    cost = {"updates": float(len(run.train)), "sampled": float(_sampled(run.train)), **phases}
    if spent := sum(seconds for name, seconds in phases.items() if name != "eval_s"):
        cost["tokens_per_s"] = cost["sampled"] / spent
    for name, joined in (("wall_s", sum), ("cpu_s", sum), ("peak_bytes", max)):
        known = [v for attempt in run.attempts if isinstance(v := attempt.get(name), (int, float))]
        if run.attempts and len(known) == len(run.attempts):
            cost[name] = float(joined(known))
    return cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Stability:
    """How a run ended: means over its last 10 steps by model or agent, skipped updates of all steps.

    `collapsed` has a reason for each condition of the study that holds; empty: the run did not collapse.
    """

    grad_norm: Mapping[str, float]
    entropy: Mapping[str, float]
    kl: Mapping[str, float]
    fault_rate: Mapping[str, float]
    skipped: int
    collapsed: tuple[str, ...]


def stability_of(run: Outcome, collapse: Collapse) -> Stability:
    """How a run ended, and whether it collapsed by the study's definition."""
    faults = _last_means(run.train, "agent", "fault_rate")
    skipped = sum(
        int(value or 0)
        for row in run.train
        for key, value in row.items()
        if key.startswith("model/") and key.endswith("/skipped")
    )
    reasons = [f"{name} faulty {rate:.2f}" for name, rate in faults.items() if rate > collapse.faults]
    first_set = next(iter(run.before))
    scores = [float(row[collapse.score] or 0.0) for row in run.held_out if set_of(row) == first_set]
    *earlier, final = scores
    if earlier:
        before = max(earlier) if collapse.of == "best" else earlier[0]
        if before > 0 and final < (1 - collapse.drop) * before:
            reasons.insert(0, f"{collapse.score} {final:.3f} after {before:.3f}")
    return Stability(
        grad_norm=_last_means(run.train, "model", "grad_norm"),
        entropy=_last_means(run.train, "agent", "entropy"),
        kl=_last_means(run.train, "agent", "kl"),
        fault_rate=faults,
        skipped=skipped,
        collapsed=tuple(reasons),
    )


def curve_of(run: Outcome, name: str, score: Score) -> tuple[list[float], list[float]]:
    """(sampled tokens, score) of a run's evaluations of a held-out set."""
    sampled = {0: 0.0} | {step_of(row): float(row.get("team/sampled") or 0.0) for row in run.train}
    rows = [row for row in run.held_out if set_of(row) == name]
    return [sampled[step_of(row)] for row in rows], [float(row[score] or 0.0) for row in rows]


def _last_means(train: Sequence[Metrics], kind: str, what: str) -> dict[str, float]:
    """Name -> mean of `<kind>/<name>/<what>` over those of the last steps that have it."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in train[-LAST:]:
        for key, value in row.items():
            if key.startswith(f"{kind}/") and key.endswith(f"/{what}") and isinstance(value, (int, float)):
                name = key[len(kind) + 1 : -len(what) - 1]
                if "/" not in name:
                    found[name].append(value)
    return {name: fmean(numbers) for name, numbers in found.items()}


def _of_kind(rows: Iterable[Metrics], kind: str) -> list[Metrics]:
    return [row for row in rows if row.get("kind") == kind]


def _last_step(train: Sequence[Metrics]) -> int:
    return step_of(train[-1]) if train else 0


def _sampled(train: Sequence[Metrics]) -> int:
    return int(train[-1].get("team/sampled") or 0) if train else 0


def _settings(config: RunConfig, job: Job) -> dict[str, object]:
    """What a run shares with the study's wish, by dotted key."""
    values = lasting(config).model_dump()
    if job.seed is None:
        values["loop"]["seed"] = None  # it stands for every seed
    return by_dotted_key(values)
