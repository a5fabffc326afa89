"""A study as data: study.toml, the runs that it asks for, and what must hold before the first of them.

Strict like a run's configuration: an unknown key is an error with a suggestion. `jobs_of` gives the runs in the order
in which they are made, seeds outside, arms inside, so that a study broken off has all arms of its first seeds. The
harness itself sets `loop.seed` and the budget; whoever sets them otherwise is refused. Nothing is run here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from cotrain.config import RunConfig, explain, load_config, read_toml
from cotrain.errors import ConfigError
from cotrain.evaluate import SCORES, Score
from cotrain.sections import NonNegative, Positive, Section, file_name

ENDLESS = 1_000_000
"""`loop.steps` where sampled tokens end the run."""


class Budget(Section):
    """What every trained run may spend: exactly one of the two."""

    sampled: Positive | None = None
    """Tokens that all agents together sample; the run ends with the step that reaches it."""
    updates: Positive | None = None
    """RL updates."""

    @model_validator(mode="after")
    def _one(self) -> Budget:
        if (self.sampled is None) == (self.updates is None):
            raise ValueError("set exactly one of sampled and updates")
        return self

    def __str__(self) -> str:
        if self.sampled is not None:
            return f"{self.sampled:,} sampled tokens a run; the step that reaches them is its last"
        return f"{self.updates:,} updates a run"


class Arm(Section):
    """One kind of run."""

    base: str | None = None
    """Its run configuration; the study's by default."""
    set: tuple[str, ...] = ()
    """`key=value` settings over the base, after the study's."""
    seeds: tuple[NonNegative, ...] | None = None
    """Its seeds; the study's by default."""
    updates: Literal[0] | None = None
    """0: it is not trained by RL, only evaluated."""


class Collapse(Section):
    """When a run counts as collapsed; either condition is enough.

    The final held-out score is below (1 - drop) x an earlier one of the run, where that is above 0; or an agent's
    fault rate, averaged over the last 10 steps, is above `faults`.
    """

    score: Score = "reward"
    """Which score, on the first held-out set."""
    drop: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The share of it that is lost."""
    of: Literal["best", "first"] = "best"
    """Against which earlier evaluation: the best one, or the one before RL."""
    faults: Annotated[float, Field(gt=0, le=1)] = 0.9
    """The fault rate that is too high."""

    def __str__(self) -> str:
        earlier = "the best one measured earlier in the run" if self.of == "best" else "the one before RL"
        return (
            f"the final {self.score} is below {1 - self.drop:g} x {earlier}, where that is above 0, or an agent's mean "
            f"fault rate over the last 10 steps is above {self.faults:g}"
        )


class Study(Section):
    """Arms x seeds, all under one budget."""

    out: str
    """Folder of the study: its runs, tables and figure."""
    base: str | None = None
    """The run configuration of every arm that has none of its own. Relative to the working directory."""
    set: tuple[str, ...] = ()
    """`key=value` settings for all arms."""
    seeds: Annotated[tuple[NonNegative, ...], Field(min_length=1)]
    """Values of `loop.seed`, in the order in which they are run."""
    baseline: str
    """The arm that the others are compared with."""
    scores: Annotated[tuple[Score, ...], Field(min_length=1)] = SCORES
    """What the tables hold; the figure draws the first one."""
    budget: Budget
    """What every trained run may spend."""
    bootstrap: Annotated[int, Field(ge=100)] = 2000
    """Resamples behind each interval."""
    collapse: Collapse = Collapse()
    """When a run counts as collapsed."""
    arms: Annotated[dict[str, Arm], Field(min_length=1)]
    """The arms by name."""

    @field_validator("arms")
    @classmethod
    def _arm_names(cls, value: dict[str, Arm]) -> dict[str, Arm]:
        return {file_name(name): arm for name, arm in value.items()}

    @property
    def folder(self) -> Path:
        """`out` as a path."""
        return Path(self.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a study; without a seed it stands for all of them."""

    arm: str
    seed: int | None
    folder: Path
    config: RunConfig

    @property
    def name(self) -> str:
        """Its folder's name."""
        return self.folder.name

    def __str__(self) -> str:
        return f"{self.arm}, all seeds" if self.seed is None else f"{self.arm}, seed {self.seed}"


def load_study(path: Path) -> Study:
    """Read a study.toml.

    Raises:
        ConfigError: the first thing that is wrong with it.
    """
    try:
        study = Study.model_validate(read_toml(path, "study"))
    except ValidationError as error:
        raise explain(error, f"study {path}", Study) from None
    if study.baseline not in study.arms:
        raise ConfigError(
            f"study {path}", f"baseline = '{study.baseline}' is no arm", f"Name one of {', '.join(study.arms)}"
        )
    for name, seeds in [("seeds", study.seeds), *((f"arms.{n}.seeds", a.seeds or ()) for n, a in study.arms.items())]:
        if len(set(seeds)) < len(seeds):
            raise ConfigError(f"study {path}", f"{name} = {list(seeds)} has a seed twice", "Name each seed once")
    return study


def jobs_of(study: Study) -> list[Job]:
    """All runs of a study, in the order in which they are made.

    Raises:
        ConfigError: an arm's configuration is wrong, or sets what the study sets.
    """
    configs = {name: _config(study, name) for name in study.arms}
    seeds_of = {name: arm.seeds or study.seeds for name, arm in study.arms.items()}
    jobs = []
    for seed in _seeds(study):
        for name, config in configs.items():
            if seed in seeds_of[name] and (is_seeded(config) or seed == seeds_of[name][0]):
                loop = config.loop.model_copy(update={"seed": seed})
                own = seed if is_seeded(config) else None
                jobs.append(
                    Job(
                        arm=name,
                        seed=own,
                        folder=study.folder / f"{name}-{'all' if own is None else own}",
                        config=config.model_copy(update={"loop": loop}),
                    )
                )
    return jobs


def _seeds(study: Study) -> list[int]:
    """All seeds of all arms, the study's first."""
    return list(dict.fromkeys([*study.seeds, *(seed for arm in study.arms.values() for seed in arm.seeds or ())]))


def is_seeded(config: RunConfig) -> bool:
    """Whether a run's scores depend on `loop.seed`: greedy answers of models that nothing trained do not."""
    return config.loop.steps > 0 or config.warmup.steps > 0


def chosen_jobs(study: Study, jobs: Sequence[Job], arms: Sequence[str], seeds: Sequence[int]) -> list[Job]:
    """The jobs of some arms and seeds; an empty choice is of all. A job without a seed belongs to every seed.

    Raises:
        ConfigError: the study has no such arm or seed.
    """
    for name in arms:
        if name not in study.arms:
            raise ConfigError(f"--only {name}", "the study has no such arm", f"Its arms: {', '.join(study.arms)}")
    known = dict.fromkeys([*study.seeds, *(seed for arm in study.arms.values() for seed in arm.seeds or ())])
    for seed in seeds:
        if seed not in known:
            raise ConfigError(
                f"--seeds {seed}", "the study has no such seed", f"Its seeds: {', '.join(map(str, known))}"
            )
    return [j for j in jobs if (not arms or j.arm in arms) and (not seeds or j.seed is None or j.seed in seeds)]


def check(study: Study, jobs: Sequence[Job]) -> None:
    """Refuse arms that cannot be put together, that train nobody, or that do not share their held-out sets.

    Raises:
        CotrainError: the first thing that is wrong; nothing was run.
    """
    from cotrain.assemble import make_plan

    first = {job.arm: job for job in reversed(jobs)}
    for job in (first[name] for name in study.arms):
        try:
            plan = make_plan(job.config)
        except ConfigError as error:
            raise _of_arm(job.arm, error) from None
        if job.config.loop.steps and not any(agent.trainable for agent in plan.agents.values()):
            found, fix = "none of its agents is trained", "Train a model, or set updates = 0 to evaluate it only"
            raise ConfigError(f"arm {job.arm}", found, fix)
    like, *others = (first[name] for name in study.arms)
    for other in others:
        _check_held_out(like, other)


def _config(study: Study, name: str) -> RunConfig:
    """An arm's configuration under the study's budget, for any seed."""
    arm = study.arms[name]
    base = arm.base or study.base
    if base is None:
        raise ConfigError(f"arm {name}", "it has no base", "Name a run configuration: base, the arm's or the study's")
    keys = [setting.partition("=")[0].strip() for setting in (*study.set, *arm.set)]
    sets_steps = "loop.steps" in keys
    for key in keys:
        if key in ("loop", "loop.seed", "loop.max_sampled") or (key == "loop.steps" and study.budget.updates):
            fix = "Leave it out, and use the study's seeds and budget (updates = 0 for an arm that is not trained)"
            raise ConfigError(f"arm {name}", f"it sets {key}, which the study sets", fix)
    try:
        config = load_config(base, (*study.set, *arm.set))
    except ConfigError as error:
        raise _of_arm(name, error) from None
    if sets_steps and config.loop.steps == 0 and arm.updates is None:
        raise ConfigError(f"arm {name}", "it sets loop.steps = 0", "Set updates = 0 in the arm in its place")
    loop: dict[str, int | None] = {"steps": 0, "max_sampled": None}
    if arm.updates is None:
        steps = study.budget.updates or (config.loop.steps if sets_steps else ENDLESS)
        loop = {"steps": steps, "max_sampled": study.budget.sampled}
        if steps == ENDLESS:
            _check_schedules(name, config)
    return config.model_copy(update={"loop": config.loop.model_copy(update=loop)})


def _check_schedules(name: str, config: RunConfig) -> None:
    """A learning rate that falls until `loop.steps` would not fall where tokens end the run."""
    for model, chosen in config.models.items():
        rates = {"optimizer": chosen.optimizer}
        if chosen.critic is not None:
            rates["critic.optimizer"] = chosen.critic.optimizer
        for key, rate in rates.items() if chosen.trainable else ():
            if rate.schedule == "constant":
                continue
            found = f"schedule = '{rate.schedule}', whose end is at loop.steps, but tokens end the run"
            fix = f'Take a constant one, a budget of updates, or give arms.{name} set = ["loop.steps=N"] to fall over'
            raise ConfigError(f"arm {name}, models.{model}.{key}", found, fix)


def _of_arm(name: str, error: ConfigError) -> ConfigError:
    return ConfigError(f"arm {name}, {error.where}", error.found, error.fix)


def _check_held_out(like: Job, other: Job) -> None:
    ours, theirs = like.config.data.eval, other.config.data.eval
    fix = "Give all arms the same [data.eval]: differences are paired by question"
    if list(ours) != list(theirs):
        found = f"its held-out sets are {', '.join(theirs)}; those of arm {like.arm} are {', '.join(ours)}"
        raise ConfigError(f"arm {other.arm}", found, fix)
    for name in ours:
        if ours[name] == theirs[name]:
            continue  # equal settings choose equal questions; there is no need to read them
        left, right = (list(_questions(job, name)) for job in (like, other))
        if left != right:
            id, *_ = next(b or a for a, b in zip_longest(left, right, fillvalue=()) if a != b)
            found = f"its {len(right)} questions are not the {len(left)} of arm {like.arm}; the first to differ: {id}"
            raise ConfigError(f"arm {other.arm}, held-out set {name}", found, fix)


def _questions(job: Job, name: str) -> Iterator[tuple[str, ...]]:
    from cotrain.data.questions import load_set

    for question in load_set(job.config.data.eval[name], job.config.corpus)[0]:
        yield question.id, question.text, *question.answers
