"""Proves from a store's own records that its run trained on every group once, on samples that were allowed.

The store keeps what was put (`ledger`), what was published (`weights`, `metrics`) and what happened (`events`). Those
were written by different processes, so that they agree says something.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cotrain.errors import DataError, StoreError
from cotrain.store.base import Status, Store, Terms

Row = Mapping[str, int | str | None]


def audit(store: Store, *, max_lag: Mapping[str, int] | None = None) -> list[str]:
    """What is wrong with the records of a run at which nobody works at the moment; nothing: it is proven.

    - Every group of a finished step is there with one part for every model, and of the others none is there in part.
    - Every model trained on each part of its steps at that step, or dropped it because it was too old.
    - No sample that was trained on is newer than the weights before the update, or older than the lag allows.
    - Published steps are contiguous from 0, none comes after the run's last step, and versions only grow.
    - What trainers reported of a step agrees with its parts, and no step was made again to other weights.

    Of steps that were pruned only their weights and events are left to check.

    Args:
        store: the run's.
        max_lag: trained model -> how many versions behind its samples were allowed to be, where that is another number
            than now.

    Raises:
        StoreError: the store cannot be reached, or no such run has begun.
    """
    terms, status = store.terms(), store.status()
    rows = store.ledger()
    published = {name: _published(store, name, status) for name in terms.max_lag}
    allowed = max_lag or {}
    models = [
        _Model(name=name, head=status.heads[name], lag=allowed.get(name, lag), versions=_numbers(published[name]))
        for name, lag in terms.max_lag.items()
    ]
    problems = [*_whole(store, terms, status, rows)]
    for model in models:
        mine = [row for row in rows if row["model"] == model.name]
        problems += _steps(model, published[model.name], status.last_step)
        problems += (problem for row in mine for problem in _row(model, row))
        problems += _reports(store, model, mine)
    return [*problems, *_happenings(store)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """A trained model: its newest published step, its allowed lag, its version at each published step."""

    name: str
    head: int
    lag: int
    versions: Mapping[int, int]


def _published(store: Store, model: str, status: Status) -> dict[int, int | str]:
    """The version of every published step, or what is wrong with it; looks one step beyond the last that can be."""
    found: dict[int, int | str] = {}
    for step in range(max(status.last_step, *status.heads.values()) + 2):
        try:
            weights = store.weights(model, step)
        except DataError as error:
            found[step] = error.found
        else:
            if weights is not None:
                found[step] = weights.version
    return found


def _numbers(published: Mapping[int, int | str]) -> dict[int, int]:
    return {step: version for step, version in published.items() if isinstance(version, int)}


def _whole(store: Store, terms: Terms, status: Status, rows: Sequence[Row]) -> Iterator[str]:
    """Groups that are not there once for every model, where they ought to be."""
    found = Counter((_int(row["step"]), _int(row["place"]), str(row["model"])) for row in rows)
    for (step, place, name), count in found.items():
        where = f"step {step}, place {place}, model {name}"
        if step < 1 or not 0 <= place < terms.places or name not in terms.max_lag:
            yield f"{where}: the run has no such part"
        if count > 1:
            yield f"{where}: there {count} times"
    begun = defaultdict(set)
    for step, place, _ in found:
        begun[step].add(place)
    finished = max(status.complete, *status.heads.values())
    for step in sorted({*range(1, finished + 1), *begun}):
        if step <= finished and step not in begun:
            yield from _absent(store, terms, status, step)
            continue
        for place in range(terms.places) if step <= finished else sorted(begun[step]):
            for name in terms.max_lag:
                if not found[step, place, name]:
                    yield f"step {step}, place {place}, model {name}: missing"


def _absent(store: Store, terms: Terms, status: Status, step: int) -> Iterator[str]:
    """What is wrong with a finished step that has no parts: nothing, where it was pruned as it may be."""
    try:
        store.take(next(iter(terms.max_lag)), step)
    except DataError:
        yield f"step {step}: all of its parts are missing"
    except StoreError:  # it was pruned
        if step > min(status.written, *status.saved.values()):
            yield f"step {step}: pruned, but not every trainer has saved it, or it is not in the run folder"
    else:
        yield f"step {step}: all of its parts are missing"


def _steps(model: _Model, published: Mapping[int, int | str], last_step: int) -> Iterator[str]:
    """Published steps that are missing, damaged, too many, or went back."""
    for step in range(model.head + 1):
        if step not in published:
            yield f"step {step} of model {model.name}: nothing was published, but the newest step is {model.head}"
    for step, version in published.items():
        where = f"step {step} of model {model.name}"
        if isinstance(version, str):
            yield f"{where}: {version}"
        if step > model.head:
            yield f"{where}: published, but the newest step is {model.head}"
        if step > last_step:
            yield f"{where}: published, but the run ends after step {last_step}"
    ordered = sorted(model.versions.items())
    for (_, before), (step, version) in pairwise(ordered):
        if version <= before:
            yield f"step {step} of model {model.name}: version {version} follows version {before}"


def _row(model: _Model, row: Row) -> Iterator[str]:
    """What is wrong with one part's state and versions."""
    step, state = _int(row["step"]), row["state"]
    where = f"step {step}, place {row['place']}, model {model.name}"
    if step > model.head:
        if state != "waiting":
            yield f"{where}: {state}, but the model's newest step is {model.head}"
        newest = max(model.versions.values(), default=-1)
    else:
        if state not in ("trained", "dropped"):
            yield f"{where}: {state}, but the model's newest step is {model.head}"
        if state == "trained" and row["trained_step"] != step:
            yield f"{where}: trained at step {row['trained_step']}"
        if step - 1 not in model.versions:
            return
        newest = model.versions[step - 1]
    if row["oldest"] is None or row["newest"] is None:
        if state == "dropped":
            yield f"{where}: dropped, but it has no samples that could be too old"
        return
    if _int(row["newest"]) > newest:
        yield f"{where}: a sample of version {row['newest']}, but the weights were of version {newest}"
    is_old = _int(row["oldest"]) < newest - model.lag
    if state == "trained" and is_old:
        yield f"{where}: trained on a sample of version {row['oldest']}, more than {model.lag} behind {newest}"
    if state == "dropped" and not is_old:
        yield f"{where}: dropped, but version {row['oldest']} is not more than {model.lag} behind {newest}"


def _reports(store: Store, model: _Model, rows: Sequence[Row]) -> Iterator[str]:
    """Steps whose published metrics do not agree with the parts."""
    parts = defaultdict(list)
    for row in rows:
        parts[_int(row["step"])].append(row)
    for step, of_step in sorted(parts.items()):
        if step > model.head or step - 1 not in model.versions:
            continue
        try:
            metrics = store.metrics(model.name, step) or {}
        except DataError as error:
            yield f"metrics of step {step} of model {model.name}: {error.found}"
            continue
        oldest = [_int(row["oldest"]) for row in of_step if row["state"] == "trained" and row["oldest"] is not None]
        expected = {
            "lag_max": max((model.versions[step - 1] - version for version in oldest), default=0),
            "stale": sum(row["state"] == "dropped" for row in of_step),
        }
        for what, number in expected.items():
            reported = metrics.get(f"model/{model.name}/{what}", number)
            if reported != number:
                yield f"step {step} of model {model.name}: its trainer reported {what} {reported}, found is {number}"


def _happenings(store: Store) -> Iterator[str]:
    """Events that are missing, and those that tell of a step that was not repeated faithfully."""
    events = store.events()
    numbers = [number for number, _ in events]
    if numbers != list(range(1, len(numbers) + 1)):
        yield f"events: numbered {numbers}"[:200]
    for _, event in events:
        if event.kind == "other weights":
            where = f"step {event.details.get('step')} of model {event.details.get('model')}"
            yield f"{where}: {event.process} made it again, to other weights than were published"


def _int(value: int | str | None) -> int:
    return int(value or 0)
