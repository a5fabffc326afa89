"""A run of several processes played in simulated time: who is busy, how old samples get, what waits for whom.

Simulated workers and trainers call a real `Store`, whose clock is the simulation's; only the work itself is replaced by
time, drawn from lists of measured seconds. A worker claims a group, spends the time between two groups (taking up
weights, writing) and the time of a group, and puts one tiny sample per model, of the version that was newest when it
claimed. A trainer takes its parts of its next step, spends the time of an update and of a publication, and publishes.

Who finds nothing looks again after the next commit that can change the answer, each after a delay of its own: for
workers a publication of the slowest model, for trainers the last group of a step. Equal seeds give equal runs.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle

from cotrain.errors import ConfigError, StoreError
from cotrain.store.base import Part, Status, Store, Task, Terms, Weights
from cotrain.store.memory import MemoryStore
from cotrain.types import Sample

Span = tuple[float, float]
_LEASE_S = 1e12  # nobody dies here


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds that each kind of work took, to draw from.

    `group`: making a group. `between`: what a worker does besides, per group. `wake`: from a commit until who waits for
    it looks. Of every model, or of a few that the others are like, in turn: `update`: an update; `publish`: what a
    trainer does besides, per step.
    """

    group: Sequence[float]
    update: Sequence[Sequence[float]]
    between: Sequence[float] = (0.0,)
    publish: Sequence[Sequence[float]] = ((0.0,),)
    wake: Sequence[float] = (0.0,)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is simulated: one trainer per model, `places` groups per step. `keep_groups` keeps all groups in the store.

    Raises:
        ConfigError: a number is out of range.
    """

    workers: int
    models: int
    places: int
    steps: int
    max_lag: int
    seed: int = 0
    keep_groups: bool = False

    def __post_init__(self) -> None:
        if min(self.workers, self.models, self.places, self.steps) < 1 or self.max_lag < 0:
            raise ConfigError("the simulation", f"{self}", "Give at least one of each, and no lag below 0")


@dataclass(kw_only=True)
class Outcome:
    """What happened. `published`: when the slowest model had published each step, from step 0.

    `groups` and `updates` are the spans in which workers and trainers were busy, `lags` counts trained samples by how
    many versions they were behind, `backlogs` are (time, parts that wait per model, on average) after every commit.
    """

    setup: Setup
    published: list[float] = field(default_factory=list)
    groups: list[Span] = field(default_factory=list)
    updates: list[Span] = field(default_factory=list)
    lags: Counter[int] = field(default_factory=Counter)
    backlogs: list[tuple[float, float]] = field(default_factory=list)
    max_backlog: int = 0

    @property
    def wall_s(self) -> float:
        """From the weights before the first step to the last publication."""
        return self.published[-1] - self.published[0]

    @property
    def middle(self) -> Span:
        """Without the first quarter of the steps, where stocks fill, and the last ones, for which workers ran ahead.

        The whole run where that leaves nothing.
        """
        first, last = self.setup.steps // 4, self.setup.steps - self.setup.max_lag - 1
        return (
            (self.published[first], self.published[last]) if last > first else (self.published[0], self.published[-1])
        )

    @property
    def lag_mean(self) -> float:
        """How many versions a trained sample was behind, on average."""
        return sum(lag * number for lag, number in self.lags.items()) / self.lags.total()

    def workers_busy(self, span: Span | None = None) -> float:
        """The share of their time that workers made groups, in a span of time (the whole run)."""
        return self._busy(self.groups, self.setup.workers, span)

    def trainers_busy(self, span: Span | None = None) -> float:
        """The share of their time that trainers made updates."""
        return self._busy(self.updates, self.setup.models, span)

    def backlog_mean(self, span: Span | None = None) -> float:
        """Parts that waited for a model, on average over models and time."""
        start, end = span or (self.published[0], self.published[-1])
        ends = [time for time, _ in self.backlogs[1:]] + [end]
        waits = zip(self.backlogs, ends, strict=True)
        return sum(parts * _overlap((time, until), (start, end)) for (time, parts), until in waits) / (end - start)

    def steps_per_hour(self, span: Span | None = None) -> float:
        """Steps that all models published, per hour."""
        start, end = span or (self.published[0], self.published[-1])
        return 3600.0 * sum(start < time <= end for time in self.published) / (end - start)

    def _busy(self, spans: Sequence[Span], number: int, span: Span | None) -> float:
        within = span or (self.published[0], self.published[-1])
        return sum(_overlap(one, within) for one in spans) / (number * (within[1] - within[0]))


def simulate(setup: Setup, times: Times, make_store: Callable[[Callable[[], float]], Store] | None = None) -> Outcome:
    """Play a whole run.

    Args:
        setup: how many of everybody.
        times: what their work takes.
        make_store: makes an empty store, of the run `simulation`, with this clock; None: a `MemoryStore`.

    Raises:
        StoreError: everybody waits and nobody works, which no store that keeps its promises lets happen.
    """
    play = _Play(setup, times, make_store or (lambda clock: MemoryStore(run="simulation", clock=clock)))
    play.run()
    return play.outcome


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def _sample(model: str, version: int) -> Sample:
    """The smallest there is."""
    return Sample(
        trajectory_id="q/0",
        agent="agent",
        model=model,
        token_ids=(1,),
        mask=(True,),
        logprobs=(0.0,),
        versions=(version,),
        advantages=(0.0,),
    )


class _Play:
    """The simulation under way: a heap of what happens when, and who waits."""

    def __init__(self, setup: Setup, times: Times, make_store: Callable[[Callable[[], float]], Store]) -> None:
        self._setup, self._times, self._draw = setup, times, random.Random(setup.seed)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()  # events of one moment happen in the order in which they were planned
        self._models = [f"model-{number}" for number in range(setup.models)]
        self._update = dict(zip(self._models, cycle(times.update), strict=False))
        self._rest = dict(zip(self._models, cycle(times.publish), strict=False))
        self._store = make_store(lambda: self._now)
        self._idle_workers: list[str] = []
        self._idle_trainers: list[tuple[str, int]] = []
        self._newest: dict[str, tuple[Sample, ...]] = {}  # what would be sampled now
        self._status: Status | None = None
        self.outcome = Outcome(setup=setup)

    def run(self) -> None:
        setup = self._setup
        lags = dict.fromkeys(self._models, setup.max_lag)
        self._store.begin(Terms(run="simulation", config="", steps=setup.steps, places=setup.places, max_lag=lags))
        for model in self._models:
            self._store.lead(model, f"trainer of {model}", _LEASE_S)
            self._publish(model, 0)
        for number in range(setup.workers):
            self._plan(0.0, partial(self._claim, f"worker {number}"))
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        self._store.close()
        if len(self.outcome.published) <= setup.steps:
            found = f"everybody waits after step {len(self.outcome.published) - 1}"
            raise StoreError("the simulation", found, "Look for what the store does not hand out")

    def _plan(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._numbers), happen))

    def _seconds(self, of: Sequence[float]) -> float:
        return self._draw.choice(of)

    # Workers

    def _claim(self, worker: str) -> None:
        task = self._store.claim(worker, _LEASE_S)
        if task is None:
            self._idle_workers.append(worker)
            return
        between, making = self._seconds(self._times.between), self._seconds(self._times.group)
        start = self._now + between
        self.outcome.groups.append((start, start + making))
        self._plan(between + making, partial(self._put, worker, task, self._newest))

    def _put(self, worker: str, task: Task, parts: dict[str, tuple[Sample, ...]]) -> None:
        is_new = self._store.put(task, parts, b"", 1)
        assert is_new  # nobody else was given this group
        self._committed()
        self._claim(worker)

    # Trainers

    def _take(self, model: str, step: int) -> None:
        parts = self._store.take(model, step)
        if parts is None:
            self._idle_trainers.append((model, step))
            return
        self._check(model, step, parts)
        update, rest = self._seconds(self._update[model]), self._seconds(self._rest[model])
        self.outcome.updates.append((self._now, self._now + update))
        self._plan(update + rest, partial(self._publish, model, step))

    def _check(self, model: str, step: int, parts: Sequence[Part]) -> None:
        """Count how old the samples are; every place is there once."""
        assert [part.place for part in parts] == list(range(self._setup.places))
        newest = step - 1  # the version that the update starts from
        self.outcome.lags.update(newest - sample.versions[0] for part in parts for sample in part.samples)

    def _publish(self, model: str, step: int) -> None:
        weights = Weights(model=model, step=step, version=step, folder=f"weights/{step}", digest=f"{step:064x}")
        self._store.publish(f"trainer of {model}", weights, {}, saved=True)
        self._committed()
        self._newest = {**self._newest, model: (_sample(model, step),)}  # groups under way keep theirs
        if step < self._setup.steps:
            self._take(model, step + 1)

    # Commits

    def _committed(self) -> None:
        """Look at the run, note what waits, and wake those whom this commit can have given something to do."""
        before, status = self._status, self._store.status()
        self._status = status
        waiting = status.backlog.values()
        self.outcome.backlogs.append((self._now, sum(waiting) / len(waiting)))
        self.outcome.max_backlog = max(self.outcome.max_backlog, *waiting)
        if before is None or min(status.heads.values()) > min(before.heads.values()):
            if (slowest := min(status.heads.values())) >= 0:
                self._written(slowest)
            idle, self._idle_workers = self._idle_workers, []
            for worker in idle:
                self._plan(self._seconds(self._times.wake), partial(self._claim, worker))
        if before is not None and status.complete > before.complete:
            waits, self._idle_trainers = self._idle_trainers, []
            for model, step in waits:
                self._plan(self._seconds(self._times.wake), partial(self._take, model, step))

    def _written(self, step: int) -> None:
        """All models published a step: what the evaluator does then, at no cost."""
        self.outcome.published.append(self._now)
        self._store.wrote(step)
        if not self._setup.keep_groups:
            self._store.prune()
