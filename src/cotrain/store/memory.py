"""The shared store as plain objects of one process: for simulations and tests, fast and gone with the process.

It answers as `SqlStore` does (tests/agreement/test_store_memory.py). Samples are checked by encoding and decoding them;
a tuple of samples that was put before is not checked again, so the same few can be put a million times.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cotrain.errors import ConfigError, DataError, LeaseLostError, StoreError
from cotrain.store.base import Event, Part, Status, Task, Terms, Weights
from cotrain.store.checks import check_name, check_terms, check_weights, differing
from cotrain.store.encode import decode_samples, encode_samples, pack_values, unpack_values, version_range
from cotrain.store.memory_run import Group, Model, Packed, Run
from cotrain.types import Sample

Values = Mapping[str, float | int | str | None]
_KNOWN = 20_000


class MemoryStore:
    """The store of one run, for one process; threads may share it. Arguments as of `SqlStore`."""

    def __init__(
        self,
        *,
        run: str = "run",
        max_part_bytes: int = 2**28,
        max_waiting_bytes: int = 2**32,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._name, self._clock = check_name("run", run), clock
        self._where = f"run {run} in memory"
        self._max_part_bytes, self._max_waiting_bytes = max_part_bytes, max_waiting_bytes
        self._begun: Run | None = None
        self._events: list[Event] = []
        self._packed: dict[tuple[str, int], Packed] = {}
        self._changed, self._marks = threading.Condition(threading.RLock()), threading.local()

    def begin(self, terms: Terms) -> None:
        """See `Store`."""
        check_terms(terms, self._name)
        with self._changed:
            if self._begun is None:
                models = {name: Model(lag) for name, lag in sorted(terms.max_lag.items())}
                self._begun = Run(self._where, terms, models)
                self._change()
                return
            known = self._begun.terms
            if found := differing(terms, known.config, known.places, known.max_lag):
                what = f"it was begun with another {', '.join(found)}"
                raise ConfigError(self._where, what, "Choose another run folder")
            if self._begun.adjust(terms):
                self._change()

    def terms(self) -> Terms:
        """See `Store`."""
        with self._changed:
            run = self._look()
            return replace(run.terms, max_lag={name: model.max_lag for name, model in run.models.items()})

    def claim(self, owner: str, lease_s: float) -> Task | None:
        """See `Store`."""
        check_name("owner", owner)
        with self._changed:
            run, now = self._look(), self._clock()
            key = run.next_key(now, run.limit(self._max_waiting_bytes))
            return None if key is None else run.lease(key, owner, now + lease_s)

    def renew(self, task: Task, lease_s: float) -> None:
        """See `Store`."""
        with self._changed:
            run = self._look()
            lease = run.held(task)
            if lease is None:
                raise LeaseLostError(
                    f"group {task.step}/{task.place} of {self._where}",
                    f"{task.owner} does not hold it any more (attempt {task.attempt})",
                    "Stop making it and claim another",
                )
            lease.expires_s = self._clock() + lease_s
            run.soonest = min(run.soonest, lease.expires_s)

    def release(self, task: Task) -> None:
        """See `Store`."""
        with self._changed:
            run = self._look()
            if (lease := run.held(task)) is not None:
                lease.owner, lease.expires_s, run.soonest = None, 0.0, 0.0
                self._change()

    def put(self, task: Task, parts: Mapping[str, Sequence[Sample]], record: bytes, sampled: int) -> bool:
        """See `Store`."""
        name = f"group {task.step}/{task.place} of {self._where}"
        if len(record) > self._max_part_bytes or sampled < 0:
            raise DataError(name, f"record of {len(record)} bytes, {sampled} sampled tokens", "Raise max_part_bytes")
        with self._changed:
            packed = {model: self._pack(model, samples) for model, samples in parts.items()}
            run, key = self._look(), (task.step, task.place)
            if set(run.models) != set(parts):
                found = f"parts of {sorted(parts)}, trained are {sorted(run.models)}"
                raise DataError(name, found, "Give one part each")
            if task.place in run.steps.get(task.step, ()) or 1 <= task.step <= run.pruned:
                return False
            if run.leases.pop(key, None) is None:
                run.refuse(f"group {task.step}/{task.place}", "was never handed out", "Put what was claimed")
            num_bytes = len(record) + sum(part.num_bytes for part in packed.values())
            run.add(key, Group(record, packed, num_bytes), sampled)
            self._change()
            return True

    def lead(self, model: str, owner: str, lease_s: float) -> None:
        """See `Store`."""
        check_name("owner", owner)
        with self._changed:
            found, now = self._look().model(model), self._clock()
            if found.owner not in (None, owner) and found.expires_s > now:
                raise LeaseLostError(
                    f"model {model} of {self._where}",
                    f"{found.owner} leads it for another {found.expires_s - now:.0f} s",
                    "Wait until that trainer is gone, or stop it",
                )
            found.owner, found.expires_s = owner, now + lease_s

    def resign(self, model: str, owner: str) -> None:
        """See `Store`."""
        with self._changed:
            if (found := self._look().model(model)).owner == owner:
                found.owner = None
                self._change()

    def take(self, model: str, step: int) -> list[Part] | None:
        """See `Store`."""
        with self._changed:
            run = self._look()
            run.model(model)
            if 1 <= step <= run.pruned:
                run.refuse(f"step {step}", "was pruned", "Resume from the newest checkpoint")
            if not run.is_there(step):
                return None
            groups = run.steps[step]
            return [
                Part(step=step, place=place, model=model, samples=groups[place].parts[model].samples)
                for place in range(run.terms.places)
            ]

    def publish(
        self,
        owner: str,
        weights: Weights,
        metrics: Values,
        *,
        dropped: Sequence[int] = (),
        saved: bool = False,
    ) -> bool:
        """See `Store`."""
        name, step = weights.model, weights.step
        where = f"step {step} of model {name} of {self._where}"
        check_weights(weights, where)
        text = pack_values(metrics, where)
        with self._changed:
            run = self._look()
            model = run.model(name)
            if model.owner != owner:
                raise LeaseLostError(where, f"{model.owner} leads the model, not {owner}", "Stop this trainer")
            newest_saved = max(model.saved, step) if saved else model.saved
            if step <= model.head:
                model.saved = newest_saved
                self._change()
                return model.published[step][0].digest == weights.digest
            run.check_next(name, step, dropped)
            model.published[step], model.drops[step] = (weights, text), frozenset(dropped)
            model.head, model.saved = step, newest_saved
            bound = run.terms.max_sampled
            if run.ended is None and bound is not None and (run.sums[step][0] if step else 0) >= bound:
                run.ended = step
            self._change()
            return True

    def weights(self, model: str, step: int | None = None) -> Weights | None:
        """See `Store`."""
        with self._changed:
            found = self._look().model(model)
            known = found.published.get(found.head if step is None else step)
            return None if known is None else known[0]

    def status(self) -> Status:
        """See `Store`."""
        with self._changed:
            run, now = self._look(), self._clock()
            places = run.terms.places
            return Status(
                heads={name: model.head for name, model in run.models.items()},
                saved={name: model.saved for name, model in run.models.items()},
                backlog={name: run.groups - max(model.head, 0) * places for name, model in run.models.items()},
                complete=run.complete,
                leased=run.num_leased(now),
                sampled=run.sampled,
                last_step=run.last_step,
                written=run.written,
            )

    def records(self, step: int) -> list[bytes] | None:
        """See `Store`."""
        with self._changed:
            run = self._look()
            if step <= run.pruned or not run.is_there(step):
                return None
            return [run.steps[step][place].record for place in range(run.terms.places)]

    def metrics(self, model: str, step: int) -> Values | None:
        """See `Store`."""
        with self._changed:
            run = self._look()
            found = run.models.get(model)
            known = None if found is None else found.published.get(step)
            return None if known is None else unpack_values(known[1], f"metrics of {model}, step {step}")

    def wrote(self, step: int) -> None:
        """See `Store`."""
        with self._changed:
            if step > (run := self._look()).written:
                run.written = step
                self._change()

    def tell(self, process: str, kind: str, **details: float | int | str) -> None:
        """See `Store`."""
        check_name("process", process)
        pack_values(details, f"event {check_name('kind', kind)}")
        with self._changed:
            self._look()
            self._events.append(Event(time_s=self._clock(), process=process, kind=kind, details=details))
            self._change()

    def events(self, after: int = 0) -> list[tuple[int, Event]]:
        """See `Store`."""
        with self._changed:
            self._look()
            return list(enumerate(self._events, start=1))[max(0, after) :]

    def ledger(self) -> list[Mapping[str, int | str | None]]:
        """See `Store`."""
        with self._changed:
            run = self._look()
            return [
                run.entry(name, step, place, packed)
                for step, groups in sorted(run.steps.items())
                for place, group in sorted(groups.items())
                for name, packed in sorted(group.parts.items())
            ]

    def prune(self, *, dry_run: bool = False) -> Mapping[str, int]:
        """See `Store`."""
        with self._changed:
            run = self._look()
            last = min(run.written, *(model.saved for model in run.models.values()))
            steps = range(run.pruned + 1, last + 1)
            groups = [group for step in steps for group in run.steps[step].values()]
            if not dry_run and steps:
                run.pruned = last
                for step in steps:
                    del run.steps[step]
                self._change()
            parts = sum(len(group.parts) for group in groups)
            return {"groups": len(groups), "parts": parts, "bytes": sum(group.num_bytes for group in groups)}

    def wait(self, timeout_s: float) -> bool:
        """See `Store`; look and wait in the same thread, as with `SqlStore`."""
        with self._changed:
            mark = self._mark()

            def value() -> int:
                return self._begun.changes if self._begun is not None else 0

            found = self._changed.wait_for(lambda: value() != mark[0], timeout_s)
            mark[:] = [value(), 0]
            return found

    def close(self) -> None:
        """See `Store`; there is nothing to let go of."""

    def _look(self) -> Run:
        """The run; it counts as this thread's look at it."""
        if self._begun is None:
            raise StoreError(self._where, "it was not begun here", "Begin it, or name another")
        mark = self._mark()
        if not mark[1]:
            mark[:] = [self._begun.changes, 1]
        return self._begun

    def _change(self) -> None:
        """Wake the other threads that wait."""
        assert self._begun is not None
        mark = self._mark()
        if mark[0] == self._begun.changes:
            mark[0] += 1
        self._begun.changes += 1
        self._changed.notify_all()

    def _mark(self) -> list[int]:
        """The count of changes at this thread's first look since it waited, and whether it looked."""
        if not hasattr(self._marks, "mark"):
            self._marks.mark = [0, 0]
        mark: list[int] = self._marks.mark
        return mark

    def _pack(self, model: str, samples: Sequence[Sample]) -> Packed:
        key = (model, id(samples))
        if (known := self._packed.get(key)) is not None:
            return known
        data = encode_samples(model, samples, self._max_part_bytes)
        decoded = decode_samples(data, model, self._max_part_bytes, f"samples of model {model}")
        packed = Packed(samples, decoded, len(data), version_range(samples))
        if isinstance(samples, tuple):  # anything else could be changed meanwhile
            if len(self._packed) >= _KNOWN:
                self._packed.clear()
            self._packed[key] = packed
        return packed
