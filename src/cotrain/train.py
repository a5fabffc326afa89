"""The main job: train a team and leave a run folder that can be read, resumed and evaluated.

A step is: rollouts, credits, samples, one update per model, metrics. The folder is consistent after every step; a run
that was interrupted or killed continues from its last checkpoint to the losses of an unbroken run, bit for bit on the
CPU, because everything that is drawn is keyed by the seed and the step. An error saves what was computed before it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cotrain import runs
from cotrain.assemble import Cast, Plan, load_cast, make_plan, make_trainer, trained_models
from cotrain.checkpoints import latest, load_checkpoint, prune, read_json, save_checkpoint
from cotrain.config import RunConfig, by_dotted_key, dump_config, lasting, load_config
from cotrain.curriculum import Stage, questions_at, questions_of_step, read_sets, seat, stage_of
from cotrain.errors import ConfigError, InfrastructureError, TrainError
from cotrain.evaluate import UNTRAINED
from cotrain.interrupts import Stop, interrupts
from cotrain.loops import (
    Progress,
    Times,
    demonstrations,
    evaluate,
    is_evaluated,
    judge,
    quiet,
    resampled,
    rollouts,
    samples_by_model,
    team_metrics,
)
from cotrain.report import try_report
from cotrain.roster import Roster
from cotrain.runs import GroupRecord, Metrics
from cotrain.trainer import Trainer
from cotrain.types import Question


@dataclass(kw_only=True)
class Run:
    """A run in progress: its parts, and how far it is."""

    folder: Path
    plan: Plan
    cast: Cast
    trainers: Mapping[str, Trainer]
    stages: Sequence[Stage]
    held_out: Mapping[str, tuple[Sequence[Question], Roster]]
    progress: Progress
    on_metrics: Callable[[Metrics], None]
    step: int = 0
    saved: int = -1
    warmed: int = 0  # steps of the warm-up
    has_begun: bool = False  # RL has: the warm-up is over, and the weights are the reference
    sampled: int = 0  # tokens, over all steps and agents
    is_updating: bool = False  # some models may be a step ahead of the others
    best: tuple[int, float] | None = None  # step and score of the best evaluation so far

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return self.plan.config

    @property
    def is_over(self) -> bool:
        """Whether the run has made its steps, or sampled all the tokens it may."""
        most = self.config.loop.max_sampled
        return self.step >= self.config.loop.steps or (most is not None and self.sampled >= most)


def train(
    config: RunConfig,
    folder: Path,
    *,
    resume: bool = False,
    progress: Progress = quiet,
    on_metrics: Callable[[Metrics], None] = lambda metrics: None,
) -> None:
    """Train a team, from the start or from the last checkpoint in `folder`.

    The first Ctrl-C ends the run after the step in progress, with a checkpoint; the second one at once.

    Raises:
        ConfigError: the configuration does not fit together, or differs from that of the run to be resumed.
        TrainError: the folder holds a run already (without `resume`) or cannot be written, or updates fail.
    """
    _check_folder(folder, config, resume)
    run = _prepare(config, folder, progress, on_metrics)
    with runs.only_writer(folder), interrupts() as stop:
        runs.write_text(folder / "config.toml", dump_config(config))
        num_metrics = 0
        if resume and (checkpoint := latest(folder / "checkpoints")):
            state = load_checkpoint(checkpoint, run.trainers)
            run.step = run.saved = int(str(state["step"]))
            run.best = _best(state["best"])
            run.sampled, run.warmed = int(str(state["sampled"])), int(str(state["warmed"]))
            run.plan.averages.update(_averages(state.get("averages", {})))
            run.has_begun, num_metrics = bool(state["has_begun"]), int(str(state["num_metrics"]))
        runs.rewind(folder, run.saved, num_metrics)
        try:
            asyncio.run(_train(run, stop))
        except Exception:
            # An update that was broken off leaves the models at different steps: the last checkpoint is the way back.
            if run.step > run.saved >= 0 and not run.is_updating:
                _save(run)
            raise
        finally:
            try_report(folder)


def _best(value: object) -> tuple[int, float] | None:
    """The step and score of the best evaluation, as a checkpoint's JSON holds them."""
    if not isinstance(value, list):
        return None
    step, score = value
    return int(step), float(score)


def _averages(value: object) -> dict[str, float]:
    """The plan's averages, as a checkpoint's JSON holds them."""
    assert isinstance(value, dict)
    return {str(agent): float(average) for agent, average in value.items()}


def _check_folder(folder: Path, config: RunConfig, resume: bool) -> None:
    """Refuse a folder that holds another run, or something else."""
    written = folder / "config.toml"
    if written.exists() and (folder / "weights").exists():
        raise TrainError(f"run folder {folder}", "it holds a run of several processes", "Go on with `cotrain up`")
    if written.exists():
        if not resume:
            raise TrainError(f"run folder {folder}", "it holds a run already", "Add --resume, or choose another folder")
        checkpoint = latest(folder / "checkpoints")
        step = int(str(read_json(checkpoint / "state.json")["step"])) if checkpoint else 0
        began, goes_on = (_lasting(c, step) for c in (load_config(written), config))
        for key in began | goes_on:
            if began.get(key) != goes_on.get(key):
                raise ConfigError(
                    f"run folder {folder}",
                    f"the run began with {key} = {began.get(key)!r}, now it is {goes_on.get(key)!r}",
                    "Resume with the same settings (loop.steps, eval.every and stages still to come may change), or "
                    "choose another folder",
                )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not written.exists() and any(folder.iterdir()):
            raise TrainError(f"run folder {folder}", "it is not empty and holds no run", "Choose another folder")
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        found = f"cannot be written: {error.strerror or error}"
        raise TrainError(f"run folder {folder}", found, "Choose another folder") from None


def _lasting(config: RunConfig, step: int) -> dict[str, object]:
    """The settings, by dotted key, that a run resumed after `step` shares with its beginning; of stages, the begun."""
    kept = lasting(config).model_copy(update={"data": config.data.model_copy(update={"stages": ()})})
    begun = {str(i): s.model_dump() for i, s in enumerate(config.data.stages) if s.after_step < step}
    return by_dotted_key(kept.model_dump()) | by_dotted_key(begun, "data.stages.")


def _prepare(config: RunConfig, folder: Path, progress: Progress, on_metrics: Callable[[Metrics], None]) -> Run:
    plan = make_plan(config)
    if config.loop.steps and not any(agent.trainable for agent in plan.agents.values()):
        raise ConfigError("agents", "none of them is trained", "Set trainable = true for an agent and its model")
    progress("loading questions", 0, 1)
    read, held_out = read_sets(config)
    progress("loading models", 0, 1)
    cast = load_cast(plan)
    return Run(
        folder=folder,
        plan=plan,
        cast=cast,
        trainers={name: make_trainer(plan, cast.models[name]) for name in trained_models(config)},
        stages=seat(cast, read),
        held_out={name: (chosen, cast.roster(pages)) for name, (chosen, pages) in held_out.items()},
        progress=progress,
        on_metrics=on_metrics,
    )


async def _train(run: Run, stop: Stop) -> None:
    config = run.config
    if not run.has_begun:
        if config.warmup.steps and run.saved < 0:
            await _evaluate(run, suffix=UNTRAINED)
        await _warm_up(run, stop)
        if run.warmed < config.warmup.steps:
            return
        for trainer in run.trainers.values():
            trainer.begin_rl()
        await _evaluate(run)
        run.has_begun = True
        _save(run)
    while not run.is_over and not stop.asked:
        run.progress("training", run.step, config.loop.steps)
        before = dict(run.plan.averages)
        try:
            await _train_step(run)
        except Exception:  # the checkpoint that follows is of the step before
            run.plan.averages.clear()
            run.plan.averages.update(before)
            raise
        last = run.is_over
        if is_evaluated(config, run.step, last=last):
            await _evaluate(run)
        is_best = run.best is not None and run.best[0] == run.step
        if last or stop.asked or is_best or run.step % config.loop.checkpoint_every == 0:
            _save(run)
    run.progress("training", run.step, config.loop.steps)


async def _train_step(run: Run) -> None:
    """Rollouts of the next step's questions, and one update of each model from them."""
    step, times = run.step + 1, Times()
    config = run.config
    questions, roster = questions_at(run.stages, step, config), stage_of(run.stages, step).roster
    for name, trainer in run.trainers.items():
        run.cast.engines[name].version = trainer.version
    with times("rollout"):
        groups = await rollouts(run.plan, roster, questions, step)
    if not any(group.trajectories for group in groups):
        raise InfrastructureError(f"step {step}", "not one rollout could be finished", "Mend what failed, then resume")
    try:
        judged = await judge(run.plan, groups)
        with times("rollout"):
            records, dropped = await resampled(run.plan, roster, step, judged)
    except Exception:  # a metric of the user's may raise anything
        runs.write_groups(run.folder, step, [GroupRecord(group=group) for group in groups])
        raise
    runs.write_groups(run.folder, step, records)
    metrics: dict[str, float | int | str | None] = {"kind": "train", "step": step}
    metrics |= team_metrics(run.plan, records, dropped)
    run.is_updating = True
    with times("update"):
        for name, samples in samples_by_model(records, list(config.models)).items():
            if name in run.trainers:
                metrics |= run.trainers[name].update(samples)
    run.step, run.is_updating = step, False
    run.sampled += sum(record.group.num_sampled for record in records)
    _tell(run, metrics | {"team/sampled": run.sampled} | times.metrics())


async def _warm_up(run: Run, stop: Stop) -> None:
    """The supervised steps that are left, on what the system's rules would say; some of them leave a checkpoint."""
    config = run.config.warmup
    for step in range(run.warmed + 1, config.steps + 1):
        run.progress("warming up", step - 1, config.steps)
        questions = questions_of_step(run.stages[0].questions, step, config.questions_per_step, run.config.loop.seed)
        metrics: dict[str, float | int | str | None] = {"kind": "warmup", "step": 0, "warmup_step": step}
        by_model, dropped = await demonstrations(run.plan, run.stages[0].roster, questions, step)
        metrics |= {f"dropped/{reason}": count for reason, count in sorted(dropped.items())}
        for name, samples in by_model.items():
            if name in run.trainers:
                metrics |= run.trainers[name].warmup(samples, config.lr)
        _tell(run, metrics)
        run.warmed = step
        if stop.asked or step % config.checkpoint_every == 0:
            _save(run)
        if stop.asked:
            return
    run.progress("warming up", config.steps, config.steps)


async def _evaluate(run: Run, suffix: str = "") -> None:
    """Greedy answers to every held-out question, with scores and intervals."""
    rows = await evaluate(run.plan, run.held_out, run.folder, run.step, suffix=suffix, progress=run.progress)
    for place, row in enumerate(rows):
        _tell(run, row)
        reward = float(str(row["reward"]))
        if place == 0 and not suffix and (run.best is None or reward > run.best[1]):
            run.best = (run.step, reward)
    try_report(run.folder)


def _save(run: Run) -> None:
    """Write a checkpoint of the finished steps, and remove those that retention lets go."""
    checkpoints = run.folder / "checkpoints"
    save_checkpoint(checkpoints, run.step, run.trainers, _state(run))
    run.saved = run.step
    prune(checkpoints, run.config.loop.keep_last, run.best[0] if run.best else None)


def _state(run: Run) -> dict[str, object]:
    """What a checkpoint holds besides the models and the step."""
    own: dict[str, object] = {
        "best": run.best,
        "sampled": run.sampled,
        "warmed": run.warmed,
        "has_begun": run.has_begun,
    }
    own["averages"] = run.plan.averages
    return {**own, "num_metrics": len(runs.read_metrics(run.folder))}


def _tell(run: Run, metrics: Metrics) -> None:
    runs.append_metrics(run.folder, metrics)
    run.on_metrics(metrics)
