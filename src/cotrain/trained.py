"""What is done with a team besides training it: check its configuration, ask it, evaluate a run's checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from cotrain import runs
from cotrain.assemble import Cast, load_cast, make_plan
from cotrain.checkpoints import latest, load_weights, read_json
from cotrain.config import RunConfig, load_config
from cotrain.curriculum import read_sets
from cotrain.data.questions import load_set
from cotrain.errors import ConfigError, InfrastructureError, TrainError
from cotrain.evaluate import Prediction
from cotrain.loops import Progress, judge, predict, quiet, rollouts
from cotrain.runs import GroupRecord
from cotrain.sampling import Job, fork
from cotrain.sections import QuestionSet
from cotrain.types import Group, Question


def check(config: RunConfig, *, progress: Progress = quiet) -> tuple[GroupRecord, Cast]:
    """Everything but training: resolve all names, load all data and models, and work on one training question.

    Raises:
        CotrainError: the first thing that is wrong.
    """
    plan = make_plan(config)
    progress("loading questions", 0, 1)
    questions, corpus = read_sets(config)[0][0]
    progress("loading models", 0, 1)
    cast = load_cast(plan)
    progress("asking one question", 0, 1)
    (group,) = asyncio.run(rollouts(plan, cast.roster(corpus), questions[:1], step=0))
    if not group.trajectories:
        raise InfrastructureError(
            f"question {questions[0].id}", "not one rollout could be finished", "Mend what failed"
        )
    records, _ = asyncio.run(judge(plan, [group]))
    return records[0], cast


def ask_team(
    config: RunConfig, folder: Path | None, text: str, *, checkpoint: str = "latest", corpus: str | None = None
) -> tuple[Group, Cast]:
    """Have a team answer a question that has no gold answer, greedily; searches go to a set's corpus.

    Args:
        config: of the run.
        folder: the run whose weights to take, or None for the models as configured.
        text: the question.
        checkpoint: `latest`, `best`, `untrained` or a step.
        corpus: name of the held-out set whose corpus is searched; by default the training corpus.
    """
    plan = make_plan(config)
    chosen = config.data.train if corpus is None else _set_named(config, corpus)
    _, pages = load_set(chosen, config.corpus)
    cast = load_cast(plan)
    if folder is not None:
        use_checkpoint(cast, folder, checkpoint)
    question = Question(id="asked", text=text, answers=())
    job = Job(system=plan.system, roster=cast.roster(pages).greedy(), question=question, seed=config.loop.seed)
    branches = asyncio.run(fork(job, at=0, size=1))
    if not branches.trajectories:
        raise InfrastructureError(f"question {text!r}", "its rollout could not be finished", "Mend what failed")
    return Group(question=question, step=0, strategy="asked", trajectories=branches.trajectories), cast


def evaluate_run(
    config: RunConfig,
    folder: Path | None,
    *,
    sets: Sequence[str] | None = None,
    checkpoint: str = "latest",
    progress: Progress = quiet,
) -> dict[str, list[Prediction]]:
    """Evaluate a checkpoint (or the models as configured) on held-out sets; by default on all of them.

    With a folder and its own configuration, the predictions are also written into it, under the checkpoint's step.
    """
    plan = make_plan(config)
    chosen = {name: _set_named(config, name) for name in (sets or list(config.data.eval))}
    held_out = {name: load_set(which, config.corpus) for name, which in chosen.items()}
    cast = load_cast(plan)
    step = use_checkpoint(cast, folder, checkpoint) if folder is not None else 0
    is_its_own = folder is not None and config == load_config(folder / "config.toml")
    results = {}
    for name, (questions, corpus) in held_out.items():
        work = predict(plan, cast.roster(corpus), questions, progress=progress, label=f"evaluating {name}")
        results[name] = asyncio.run(work)
        if folder is not None and is_its_own:
            label = f"{name}@untrained" if checkpoint == "untrained" else name
            runs.write_predictions(folder, step, label, results[name])
    return results


def use_checkpoint(cast: Cast, folder: Path, checkpoint: str) -> int:
    """Give the cast's models the weights of one of a run's checkpoints, and return its step.

    Raises:
        TrainError: the run has no such checkpoint.
    """
    if checkpoint == "untrained":
        return 0
    path = find_checkpoint(folder, checkpoint)
    step = load_weights(path, cast.models)
    for name, engine in cast.engines.items():
        if (path / name / "trainer.json").exists():  # a model that is not trained has none, and stays at version 0
            engine.version = int(str(read_json(path / name / "trainer.json")["version"]))
    return step


def find_checkpoint(folder: Path, checkpoint: str) -> Path:
    """The folder of a run's checkpoint: `latest`, `best` or a step.

    Raises:
        TrainError: the run has no such checkpoint.
    """
    checkpoints = folder / "checkpoints"
    newest = latest(checkpoints)
    if newest is None:
        raise TrainError(f"run {folder}", "it has no checkpoint yet", "Let it train longer, or resume it")
    if checkpoint == "latest":
        return newest
    if checkpoint == "best":
        step = best_step(folder)
    elif checkpoint.isdecimal():
        step = int(checkpoint)
    else:
        raise TrainError(f"checkpoint {checkpoint!r}", "no such name", "Use latest, best, untrained or a step")
    path = checkpoints / f"step-{step:06d}"
    if not path.exists():
        there = ", ".join(str(int(p.name[5:])) for p in sorted(checkpoints.glob("step-*")))
        raise TrainError(f"run {folder}", f"it has no checkpoint of step {step}", f"It has these: {there}")
    return path


def best_step(folder: Path) -> int:
    """The step whose held-out reward, on the first set, was the highest."""
    rows = [row for row in runs.read_metrics(folder) if row.get("kind") == "eval" and "@" not in str(row.get("set"))]
    if not rows:
        raise TrainError(f"run {folder}", "it has no evaluation yet", "Use the latest checkpoint")
    first = [row for row in rows if row["set"] == rows[0]["set"]]
    return int(str(max(first, key=_reward)["step"]))


def _reward(row: Mapping[str, object]) -> float:
    return float(str(row["reward"]))


def _set_named(config: RunConfig, name: str) -> QuestionSet:
    if name not in config.data.eval:
        raise ConfigError(f"held-out set {name!r}", "no such set", f"Known: {', '.join(config.data.eval)}")
    return config.data.eval[name]
