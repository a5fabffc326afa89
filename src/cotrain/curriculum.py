"""Which questions a run works on, step by step: its stages in turn, and the held-out sets.

Everything here follows from the configuration alone, so every process of a run comes to the same questions.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cotrain.assemble import Cast
from cotrain.config import RunConfig
from cotrain.data.corpus import Corpus
from cotrain.data.questions import load_set
from cotrain.errors import ConfigError, DataError
from cotrain.roster import Roster
from cotrain.sections import QuestionSet
from cotrain.types import Question

Pages = tuple[Sequence[Question], Corpus]
"""Questions, and the corpus that is searched for them."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the curriculum, from the step after `after_step` on: its questions, and who plays over its corpus."""

    after_step: int
    questions: Sequence[Question]
    roster: Roster


def read_stages(config: RunConfig) -> dict[int, Pages]:
    """What each stage trains on, by the step after which it begins, in order.

    Raises:
        DataError, ConfigError: a set cannot be read, or has too few questions for a step.
    """
    read = {0: _training_set(config, "data.train", config.data.train)}
    for i, stage in enumerate(config.data.stages):
        read[stage.after_step] = _training_set(config, f"data.stages.{i}", stage)
    return read


def read_held_out(config: RunConfig) -> dict[str, Pages]:
    """The held-out sets by name."""
    return {name: load_set(chosen, config.corpus) for name, chosen in config.data.eval.items()}


def read_sets(config: RunConfig) -> tuple[dict[int, Pages], dict[str, Pages]]:
    """`read_stages` and `read_held_out`, apart from each other: no question is trained on and held out at once.

    Raises:
        DataError, ConfigError: as `read_stages`; or a held-out set has a question that is trained on as well.
    """
    stages, held_out = read_stages(config), read_held_out(config)
    trained = {question.id for questions, _ in stages.values() for question in questions}
    for name, (questions, _) in held_out.items():
        if shared := [question.id for question in questions if question.id in trained]:
            found = f"{len(shared)} of its {len(questions)} questions are trained on too, such as {shared[0]}"
            raise DataError(f"data.eval.{name}", found, "Keep the two apart by split, ids or limit")
    return stages, held_out


def seat(cast: Cast, read: Mapping[int, Pages]) -> list[Stage]:
    """The stages with the cast that plays in them."""
    return [Stage(after, questions, cast.roster(corpus)) for after, (questions, corpus) in read.items()]


def stage_of(stages: Sequence[Stage], step: int) -> Stage:
    """The stage that a step (from 1) belongs to: the last one that has begun."""
    return [stage for stage in stages if stage.after_step < step][-1]


def questions_at(stages: Sequence[Stage], step: int, config: RunConfig) -> list[Question]:
    """The questions of the run's RL step number `step` (from 1)."""
    stage = stage_of(stages, step)
    count, seed = config.sampling.questions_per_step, config.loop.seed
    return questions_of_step(stage.questions, step - stage.after_step, count, seed)


def questions_of_step(questions: Sequence[Question], step: int, count: int, seed: int) -> list[Question]:
    """The questions of a set's step number `step` (from 1): `count` in a row from an order reshuffled each epoch.

    A step lies within one epoch, so it never has a question twice; the few that are left over at an epoch's end have
    their turn in others. A set of fewer than `count` questions is taken whole.
    """
    epoch, place = divmod(step - 1, max(1, len(questions) // count))
    order = list(range(len(questions)))
    random.Random(f"{seed}:{epoch}:order").shuffle(order)
    return [questions[i] for i in order[place * count : (place + 1) * count]]


def _training_set(config: RunConfig, name: str, chosen: QuestionSet) -> tuple[Sequence[Question], Corpus]:
    """The questions and corpus of a training set that has enough of them for a step."""
    questions, corpus = load_set(chosen, config.corpus)
    if not questions:
        raise DataError(name, "no questions are left after its filters", "Loosen split, ids or limit")
    counts = {"sampling": config.sampling.questions_per_step}
    if config.warmup.steps and name == "data.train":
        counts["warmup"] = config.warmup.questions_per_step
    for section, count in counts.items():
        if count > len(questions):
            found = f"{count}, but {name} has {len(questions)} questions"
            raise ConfigError(f"{section}.questions_per_step", found, "Lower it, or give more questions")
    return questions, corpus
