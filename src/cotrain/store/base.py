"""What the processes of a run share: tasks, finished groups, versions of weights, and nothing else.

A step has a fixed number of places, one group each. A worker claims a place (`Task`), makes the group and puts it: one
`Part` per trained model, all of them or none. A trainer leads one model, takes its own parts of its next step in the
order of the places, and publishes the weights that came of them; the publication marks the parts as trained, in one
transaction. Versions are counted in RL steps: step 0 is the weights before RL, step s those after update s.

Guarantees of every implementation (tests/contracts/test_store.py): a group is visible to trainers whole or not at all;
a put or a publication that is repeated changes nothing; an expired lease can be taken over: then a trainer's old holder
can no longer publish, and of two workers the first to finish counts; no published step is ever replaced by another
one's number; what was committed survives a power loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cotrain.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all processes of a run must agree on; fixed when the store is begun, but for `steps` and the lags.

    `places`: groups per step. `max_lag`: trained model -> how many versions behind its samples may be.
    `config`: the run's configuration as TOML, without credentials.
    """

    run: str
    config: str
    steps: int
    places: int
    max_lag: Mapping[str, int]
    max_sampled: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A lease on one group: place `place` (from 0) of step `step` (from 1), until it expires."""

    step: int
    place: int
    owner: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One model's samples of one finished group; none where the group gave it none."""

    step: int
    place: int
    model: str
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Published weights of a model: `step` RL updates, `version` updates in all, a folder and its SHA-256.

    `folder` is relative to the run folder and never leads out of it.
    """

    model: str
    step: int
    version: int
    folder: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something worth remembering: who, what, and its details. `time_s` is the store's clock, seconds of the epoch."""

    time_s: float
    process: str
    kind: str
    details: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One look at the run: for the live table, and for whoever waits.

    `heads`: trained model -> the newest published step (-1 before step 0). `saved`: model -> step of its newest
    checkpoint. `backlog`: model -> parts that wait for it. `complete`: the last step up to which all groups are there.
    `leased`: groups being made. `sampled`: tokens of all finished groups. `last_step`: the step after which the run
    ends. `written`: the last step that is in the run folder, evaluations included.
    """

    heads: Mapping[str, int]
    saved: Mapping[str, int]
    backlog: Mapping[str, int]
    complete: int
    leased: int
    sampled: int
    last_step: int
    written: int

    @property
    def is_over(self) -> bool:
        """Whether every trained model has made its last step."""
        return all(head >= self.last_step for head in self.heads.values())


class Store(Protocol):
    """The shared store of one run. Methods raise StoreError when the store cannot be reached, after bounded retries."""

    def begin(self, terms: Terms) -> None:
        """Create the run, or check that it is the same one; `steps`, `max_lag` and `max_sampled` may change.

        Raises:
            ConfigError: the store holds this run with another configuration, number of places or set of models.
        """

    def terms(self) -> Terms:
        """What `begin` agreed on.

        Raises:
            StoreError: no such run has begun.
        """

    def claim(self, owner: str, lease_s: float) -> Task | None:
        """Lease the next group: the first expired one, else the first that nobody began, in the order (step, place).

        A group of step s is handed out only while every model has published step 0 and step s - 1 - max_lag or later,
        the run has not ended before s, and the parts that wait do not exceed the store's bound (groups of the step that
        the slowest trainer makes next always are). None: nothing to do at present.
        """

    def renew(self, task: Task, lease_s: float) -> None:
        """Hold the lease for longer.

        Raises:
            LeaseLostError: it expired and somebody else took it, or the group is there already.
        """

    def release(self, task: Task) -> None:
        """Give a group back unmade; without effect when the lease is lost."""

    def put(self, task: Task, parts: Mapping[str, Sequence[Sample]], record: bytes, sampled: int) -> bool:
        """Commit a finished group, whole: the samples of every trained model, the record, the number of sampled tokens.

        Returns False, and changes nothing, where the group is there already. A late put of a lost lease is accepted if
        nobody else finished first: the work is the same.

        Raises:
            DataError: a model is missing or unknown, a sample is another model's, a value is not finite, or a part is
                larger than the store's bound.
        """

    def lead(self, model: str, owner: str, lease_s: float) -> None:
        """Become the model's only trainer, or stay it.

        Raises:
            LeaseLostError: another owner's lease has not expired.
        """

    def resign(self, model: str, owner: str) -> None:
        """Stop leading; without effect when somebody else does."""

    def take(self, model: str, step: int) -> list[Part] | None:
        """The model's parts of a step in the order of the places, or None while a group is missing.

        Raises:
            DataError: a row is not what a part can be (sizes, types, shapes, values, model).
            StoreError: the step was pruned.
        """

    def publish(
        self,
        owner: str,
        weights: Weights,
        metrics: Mapping[str, float | int | str | None],
        *,
        dropped: Sequence[int] = (),
        saved: bool = False,
    ) -> bool:
        """Commit the model's next step: its weights, its metrics, and its parts as trained, in one transaction.

        `dropped` are the places whose samples were too old; they count as dropped, not as trained. `saved` says that
        a checkpoint of this step lies in the run folder. Publishing a step again (after a restart) changes nothing but
        `saved`, and returns whether the digest is the same as before; the first publication of a step returns True.
        When the sampled tokens of all steps up to this one reach `max_sampled`, it ends the run here.

        Raises:
            LeaseLostError: the owner does not lead the model.
            StoreError: the step is not the next one, is after the end, or misses groups.
        """

    def weights(self, model: str, step: int | None = None) -> Weights | None:
        """The published weights of a step (None: the newest), or None where there are none."""

    def status(self) -> Status:
        """How far everybody is."""

    def records(self, step: int) -> list[bytes] | None:
        """The records of a step's groups in the order of the places; None while one is missing or when pruned."""

    def metrics(self, model: str, step: int) -> Mapping[str, float | int | str | None] | None:
        """What the model's trainer published with a step."""

    def wrote(self, step: int) -> None:
        """Say that the run folder holds everything up to this step; never goes back."""

    def tell(self, process: str, kind: str, **details: float | int | str) -> None:
        """Add an event."""

    def events(self, after: int = 0) -> list[tuple[int, Event]]:
        """Events with a number above `after`, in order, with their numbers."""

    def ledger(self) -> list[Mapping[str, int | str | None]]:
        """One row per (step, place, model) that is not pruned: when it was trained and with which versions.

        Keys: step, place, model, state (waiting, trained, dropped), trained_step, oldest, newest (versions; None
        without samples), num_samples, num_bytes.
        """

    def prune(self, *, dry_run: bool = False) -> Mapping[str, int]:
        """Remove the groups of the steps that every trainer has saved and the run folder holds; what was removed.

        Keys: groups, parts, bytes. The published versions, metrics and events stay.
        """

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something was committed by anyone, or the time is over; whether something was. No busy loop."""

    def close(self) -> None:
        """Let go of the connection; leases stay until they expire."""
