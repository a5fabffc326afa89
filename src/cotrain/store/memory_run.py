"""One run as plain objects: what `MemoryStore` has where `SqlStore` has tables, and the counting that goes with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from cotrain.errors import DataError, StoreError
from cotrain.store.base import Task, Terms, Weights
from cotrain.types import Sample

Key = tuple[int, int]
"""Step and place of a group."""
NEVER = float("inf")


@dataclass(slots=True)
class Model:
    """A trained model: how far it is, who leads it, what it published and dropped, by step."""

    max_lag: int
    head: int = -1
    saved: int = -1
    owner: str | None = None
    expires_s: float = 0.0
    published: dict[int, tuple[Weights, str]] = field(default_factory=dict)
    drops: dict[int, frozenset[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Lease:
    """Who makes a group, until when; `owner` is None where it was given back."""

    owner: str | None
    expires_s: float
    attempt: int


@dataclass(frozen=True, slots=True)
class Packed:
    """Samples that were checked: as put (kept alive, so that no others have their id), as taken, and their size."""

    given: object
    samples: tuple[Sample, ...]
    num_bytes: int
    versions: tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Group:
    """A finished group."""

    record: bytes
    parts: Mapping[str, Packed]
    num_bytes: int


@dataclass(slots=True)
class Run:
    """Everything about a run. `where` names it in errors.

    `following`: the first place that nobody began. `steps`: the groups that are there. `counts`: groups, tokens and
    bytes of a step; `sums`: tokens and bytes of all steps up to one whose groups were all put. `soonest`: no lease
    expires before.
    """

    where: str
    terms: Terms
    models: dict[str, Model]
    ended: int | None = None
    pruned: int = 0
    written: int = -1
    following: Key = (1, 0)
    complete: int = 0
    groups: int = 0
    sampled: int = 0
    num_bytes: int = 0
    changes: int = 0
    soonest: float = NEVER
    leases: dict[Key, Lease] = field(default_factory=dict)
    steps: dict[int, dict[int, Group]] = field(default_factory=dict)
    counts: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    sums: dict[int, tuple[int, int]] = field(default_factory=lambda: {0: (0, 0)})

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return self.terms.steps if self.ended is None else min(self.terms.steps, self.ended)

    def model(self, name: str) -> Model:
        """A trained model.

        Raises:
            StoreError: the run trains no such model.
        """
        if name not in self.models:
            self.refuse(f"model {name!r:.100}", "is not trained", "Name a trained model")
        return self.models[name]

    def adjust(self, terms: Terms) -> bool:
        """Take over what may change about a run that was begun; whether anything did."""
        lags = {name: model.max_lag for name, model in self.models.items()}
        if (self.terms.steps, self.terms.max_sampled, lags) == (terms.steps, terms.max_sampled, terms.max_lag):
            return False
        for name, lag in terms.max_lag.items():
            self.models[name].max_lag = lag
        furthest = max(model.head for model in self.models.values())
        is_over = (
            terms.max_sampled is not None and furthest >= 0 and self.sums[max(furthest, 0)][0] >= terms.max_sampled
        )
        self.terms, self.ended = terms, furthest if is_over else None
        return True

    def limit(self, max_waiting_bytes: int) -> int:
        """The last step of which groups may be handed out; 0 while a model has no weights."""
        slowest = min(model.head for model in self.models.values())
        if slowest < 0:
            return 0
        limit = min(self.last_step, *(model.head + 1 + model.max_lag for model in self.models.values()))
        return limit if self.num_bytes - self.sums[slowest][1] <= max_waiting_bytes else min(limit, slowest + 1)

    def next_key(self, now: float, limit: int) -> Key | None:
        """The group to hand out: the first whose lease expired, else the first that nobody began, up to a step."""
        if now >= self.soonest:
            expired = (key for key, lease in self.leases.items() if lease.expires_s <= now and key[0] <= limit)
            if (found := min(expired, default=None)) is not None:
                return found
            self.soonest = min((lease.expires_s for lease in self.leases.values()), default=NEVER)
        return self.following if self.following[0] <= limit else None

    def lease(self, key: Key, owner: str, expires_s: float) -> Task:
        """Hand out a group."""
        before, (step, place) = self.leases.get(key), key
        if key == self.following:
            self.following = (step, place + 1) if place + 1 < self.terms.places else (step + 1, 0)
            self.counts.setdefault(step, (0, 0, 0))
        attempt = 0 if before is None else before.attempt + 1
        self.leases[key] = Lease(owner, expires_s, attempt)
        self.soonest = min(self.soonest, expires_s)
        return Task(step=step, place=place, owner=owner, attempt=attempt)

    def num_leased(self, now: float) -> int:
        """How many groups are being made."""
        if now < self.soonest:
            return len(self.leases)
        return sum(lease.expires_s > now for lease in self.leases.values())

    def held(self, task: Task) -> Lease | None:
        """The task's lease, as long as it is the task's."""
        lease = self.leases.get((task.step, task.place))
        return lease if lease is not None and (lease.owner, lease.attempt) == (task.owner, task.attempt) else None

    def is_there(self, step: int) -> bool:
        """Whether all groups of a step were put; also of one that was pruned since."""
        return step >= 1 and self.counts.get(step, (0, 0, 0))[0] == self.terms.places

    def add(self, key: Key, group: Group, sampled: int) -> None:
        """Keep and count a finished group."""
        step, place = key
        self.steps.setdefault(step, {})[place] = group
        num_done, of_step, size = self.counts[step]
        self.counts[step] = (num_done + 1, of_step + sampled, size + group.num_bytes)
        self.groups, self.sampled = self.groups + 1, self.sampled + sampled
        self.num_bytes += group.num_bytes
        while self.is_there(self.complete + 1):
            tokens, size = self.sums[self.complete]
            self.complete += 1
            _, of_step, of_size = self.counts[self.complete]
            self.sums[self.complete] = (tokens + of_step, size + of_size)

    def check_next(self, name: str, step: int, dropped: Sequence[int]) -> None:
        """Refuse to publish anything but the model's next step.

        Raises:
            StoreError: it is another, one after the run's end, or its groups are not all there.
            DataError: `dropped` are not places of the step.
        """
        where, head = f"step {step} of model {name}", self.models[name].head
        if step != head + 1:
            self.refuse(where, f"is not the next, {head + 1}", "Publish that one")
        if step > self.last_step:
            self.refuse(where, f"the run ends after {self.last_step}", "Stop here")
        if step and not self.is_there(step):
            self.refuse(f"step {step}", "its groups are not all there", "Take its parts before publishing it")
        places = range(self.terms.places if step else 0)
        if len(set(dropped)) != len(dropped) or not set(dropped) <= set(places):
            found = f"dropped places {list(dropped)}"[:300]
            raise DataError(f"{where} of {self.where}", found, f"Name each of 0 to {self.terms.places - 1} once")

    def entry(self, name: str, step: int, place: int, packed: Packed) -> Mapping[str, int | str | None]:
        """A row of the ledger."""
        model = self.models[name]
        is_done, is_dropped = step <= model.head, place in model.drops.get(step, ())
        state = "waiting" if not is_done else "dropped" if is_dropped else "trained"
        sizes = {"num_samples": len(packed.samples), "num_bytes": packed.num_bytes}
        versions = dict(zip(("oldest", "newest"), packed.versions, strict=True))
        trained = {"state": state, "trained_step": step if state == "trained" else None}
        return {"step": step, "place": place, "model": name, **versions, **sizes, **trained}

    def refuse(self, what: str, found: str, fix: str) -> NoReturn:
        """Raise the StoreError that says so."""
        raise StoreError(f"{what} of {self.where}", found, fix)
