"""The shared store in SQLite or PostgreSQL: `Store` as transactions on the tables of `schema.py`.

Every change of a run begins by locking the run's row (SQLite: the database), so changes of one run happen one after
another, in one order for everybody, and cost the same however many groups are stored. Readers wait for nobody. Rows are
untrusted: what a method returns was checked. Repeating any method after a lost connection is safe: a claim, a group and
an event carry a ticket by which they are known again; everything else is the same when it is done twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from sqlalchemy import URL, ColumnElement, Connection, case, delete, func, insert, make_url, select, type_coerce, update
from sqlalchemy.types import NullType

from cotrain.errors import DataError, LeaseLostError
from cotrain.store import schema as tables
from cotrain.store.access import Access, Change
from cotrain.store.base import Event, Part, Status, Task, Terms, Weights
from cotrain.store.checks import check_name, check_terms, check_weights
from cotrain.store.encode import (
    decode_samples,
    encode_samples,
    pack_values,
    stored_bound,
    unpack_values,
    version_range,
)
from cotrain.store.queries import AnyRow
from cotrain.types import Sample


class SqlStore:
    """The store of one run; processes and machines have one each, threads may share it.

    Args:
        place: a file of SQLite, or a URL of SQLite or PostgreSQL. `sqlite://` is kept in memory, for one process.
        run: the run's name among those in the database.
        max_part_bytes: bound of a group's record and of each model's part of it, before compression.
        max_waiting_bytes: while the groups that a trainer still needs take more, only those of the step that the
            slowest trainer makes next are handed out: it could not go on without them.
        clock: seconds of the epoch, for leases and events; None: this machine's clock for SQLite, the server's for
            PostgreSQL.
        patience_s: how long to try again when the database is locked or cannot be reached.
    """

    def __init__(
        self,
        place: str | Path | URL,
        *,
        run: str = "run",
        max_part_bytes: int = 2**28,
        max_waiting_bytes: int = 2**32,
        clock: Callable[[], float] | None = None,
        patience_s: float = 60.0,
    ) -> None:
        self._max_part_bytes, self._max_waiting_bytes = max_part_bytes, max_waiting_bytes
        is_path = isinstance(place, Path) or (isinstance(place, str) and "://" not in place)
        url = URL.create("sqlite", database=str(place)) if is_path else make_url(cast("str | URL", place))
        self._access = Access(url, check_name("run", run), clock=clock, patience_s=patience_s)
        self._rows = self._access.rows

    def begin(self, terms: Terms) -> None:
        """See `Store`; the configurations must be the same text."""
        check_terms(terms, self._rows.run)
        self._access.begin(terms)

    def terms(self) -> Terms:
        """See `Store`."""

        def work(connection: Connection, run: AnyRow) -> Terms:
            return Terms(
                run=self._rows.run,
                config=run.config,
                steps=run.steps,
                places=run.places,
                max_lag={model.model: model.max_lag for model in self._rows.models(connection)},
                max_sampled=run.max_sampled,
            )

        return self._access.read(work)

    def claim(self, owner: str, lease_s: float) -> Task | None:
        """See `Store`; wakes nobody."""
        check_name("owner", owner)
        ticket, leases = uuid.uuid4().hex, tables.leases

        def work(connection: Connection, run: AnyRow, again: bool) -> tuple[Task | None, Change]:
            self._access.looked(run.changes)
            if again and (row := self._rows.first_lease(connection, leases.c.ticket == ticket)):
                return Task(step=row.step, place=row.place, owner=owner, attempt=row.attempt), None
            now = self._access.now(connection)
            lease = {"owner": owner, "expires_s": now + lease_s, "ticket": ticket}
            limit = self._rows.limit(connection, run, self._max_waiting_bytes)
            expired = self._rows.first_lease(connection, leases.c.expires_s <= now, leases.c.step <= limit)
            if expired is not None:
                task = Task(step=expired.step, place=expired.place, owner=owner, attempt=expired.attempt + 1)
                here = self._rows.at(leases, task.step, task.place)
                connection.execute(update(leases).where(here).values(attempt=task.attempt, **lease))
                return task, None
            if run.next_step > limit:
                return None, None
            return self._rows.begin_next(connection, run, owner, lease), None

        return self._access.write(work)

    def renew(self, task: Task, lease_s: float) -> None:
        """See `Store`; wakes nobody."""

        def work(connection: Connection) -> bool:
            expires_s = self._access.now(connection) + lease_s
            held = update(tables.leases).where(self._rows.held(task))
            return connection.execute(held.values(expires_s=expires_s)).rowcount == 1

        if not self._access.write_alone(work):
            raise LeaseLostError(
                f"group {task.step}/{task.place} of {self._rows.where}",
                f"{task.owner} does not hold it any more (attempt {task.attempt})",
                "Stop making it and claim another",
            )

    def release(self, task: Task) -> None:
        """See `Store`."""

        def work(connection: Connection, _run: AnyRow, _again: bool) -> tuple[None, Change]:
            held = update(tables.leases).where(self._rows.held(task))
            return None, {} if connection.execute(held.values(owner=None, expires_s=0.0)).rowcount else None

        self._access.write(work)

    def put(self, task: Task, parts: Mapping[str, Sequence[Sample]], record: bytes, sampled: int) -> bool:
        """See `Store`."""
        name = f"group {task.step}/{task.place} of {self._rows.where}"
        if len(record) > self._max_part_bytes or sampled < 0:
            raise DataError(name, f"record of {len(record)} bytes, {sampled} sampled tokens", "Raise max_part_bytes")
        key = {"run": self._rows.run, "step": task.step, "place": task.place}
        rows, ticket = [self._pack(key, model, samples) for model, samples in parts.items()], uuid.uuid4().hex
        num_bytes = len(record) + sum(len(row["data"]) for row in rows)

        def work(connection: Connection, run: AnyRow, _again: bool) -> tuple[bool, Change]:
            trained = {model.model for model in self._rows.models(connection)}
            if trained != set(parts):
                raise DataError(name, f"parts of {sorted(parts)}, trained are {sorted(trained)}", "Give one part each")
            here = self._rows.at(tables.groups, task.step, task.place)
            known = connection.execute(select(tables.groups.c.ticket).where(here)).scalar_one_or_none()
            if known is not None or 1 <= task.step <= run.pruned:
                return known == ticket, None
            here = self._rows.at(tables.leases, task.step, task.place)
            if not connection.execute(delete(tables.leases).where(here)).rowcount:
                self._rows.refuse(f"group {task.step}/{task.place}", "was never handed out", "Put what was claimed")
            group = {**key, "ticket": ticket, "num_bytes": num_bytes, "record": record}
            connection.execute(insert(tables.groups).values(**group))
            connection.execute(insert(tables.parts), rows)
            complete = self._rows.count(connection, run, task, sampled, num_bytes)
            sums = {"groups": run.groups + 1, "sampled": run.sampled + sampled, "bytes": run.bytes + num_bytes}
            return True, {**sums, "complete": complete}

        return self._access.write(work)

    def lead(self, model: str, owner: str, lease_s: float) -> None:
        """See `Store`; wakes nobody."""
        check_name("owner", owner)

        def work(connection: Connection, _run: AnyRow, _again: bool) -> tuple[None, Change]:
            row, now = self._rows.model(connection, model), self._access.now(connection)
            if row.owner not in (None, owner) and row.expires_s > now:
                raise LeaseLostError(
                    f"model {model} of {self._rows.where}",
                    f"{row.owner} leads it for another {row.expires_s - now:.0f} s",
                    "Wait until that trainer is gone, or stop it",
                )
            self._rows.set_model(connection, model, owner=owner, expires_s=now + lease_s)
            return None, None

        self._access.write(work)

    def resign(self, model: str, owner: str) -> None:
        """See `Store`."""

        def work(connection: Connection, _run: AnyRow, _again: bool) -> tuple[None, Change]:
            if self._rows.model(connection, model).owner != owner:
                return None, None
            self._rows.set_model(connection, model, owner=None)
            return None, {}

        self._access.write(work)

    def take(self, model: str, step: int) -> list[Part] | None:
        """See `Store`."""
        parts, where = tables.parts, f"step {step} of model {model} of {self._rows.where}"
        query = select(parts.c.place, self._within_bound(parts.c.data)).where(
            self._rows.mine(parts), parts.c.model == model, parts.c.step == step
        )

        def work(connection: Connection, run: AnyRow) -> Sequence[AnyRow] | None:
            self._rows.model(connection, model)
            if 1 <= step <= run.pruned:
                self._rows.refuse(f"step {step}", "was pruned", "Resume from the newest checkpoint")
            if not self._rows.is_there(connection, run, step):
                return None
            rows = connection.execute(query.order_by(parts.c.place)).all()
            if [row.place for row in rows] != list(range(run.places)):
                raise DataError(where, f"{len(rows)} rows for {run.places} places", "Look for what changed the table")
            return rows

        rows = self._access.read(work)
        return None if rows is None else [self._unpack(model, step, place, data) for place, data in rows]

    def publish(
        self,
        owner: str,
        weights: Weights,
        metrics: Mapping[str, float | int | str | None],
        *,
        dropped: Sequence[int] = (),
        saved: bool = False,
    ) -> bool:
        """See `Store`."""
        name, step = weights.model, weights.step
        where = f"step {step} of model {name} of {self._rows.where}"
        check_weights(weights, where)
        text = pack_values(metrics, where)

        def work(connection: Connection, run: AnyRow, _again: bool) -> tuple[bool, Change]:
            model = self._rows.model(connection, name)
            if model.owner != owner:
                raise LeaseLostError(where, f"{model.owner} leads the model, not {owner}", "Stop this trainer")
            newest_saved = max(model.saved, step) if saved else model.saved
            if step <= model.head:
                self._rows.set_model(connection, name, saved=newest_saved)
                known = self._rows.published(connection, name, step)
                return known is not None and known[0].digest == weights.digest, {}
            self._rows.check_next(connection, run, model, step, dropped)
            key = {"run": self._rows.run, "model": name, "step": step}
            values = {"version": weights.version, "folder": weights.folder, "digest": weights.digest, "metrics": text}
            connection.execute(insert(tables.versions).values(**key, **values))
            if dropped:
                connection.execute(insert(tables.drops), [{**key, "place": place} for place in dropped])
            self._rows.set_model(connection, name, head=step, saved=newest_saved)
            sampled = self._rows.totals(connection, step).all_sampled if step else 0
            is_end = run.ended is None and run.max_sampled is not None and sampled >= run.max_sampled
            return True, {"ended": step} if is_end else {}

        return self._access.write(work)

    def weights(self, model: str, step: int | None = None) -> Weights | None:
        """See `Store`."""

        def work(connection: Connection, _run: AnyRow) -> Weights | None:
            head = self._rows.model(connection, model).head
            found = self._rows.published(connection, model, head if step is None else step)
            return None if found is None else found[0]

        return self._access.read(work)

    def status(self) -> Status:
        """See `Store`."""
        leases = tables.leases

        def work(connection: Connection, run: AnyRow) -> Status:
            models = self._rows.models(connection)
            now = self._access.now(connection)
            made = select(func.count()).where(self._rows.mine(leases), leases.c.expires_s > now)
            return Status(
                heads={model.model: model.head for model in models},
                saved={model.model: model.saved for model in models},
                backlog={model.model: run.groups - max(model.head, 0) * run.places for model in models},
                complete=run.complete,
                leased=connection.execute(made).scalar_one(),
                sampled=run.sampled,
                last_step=self._rows.last_step(run),
                written=run.written,
            )

        return self._access.read(work)

    def records(self, step: int) -> list[bytes] | None:
        """See `Store`."""
        groups = tables.groups
        query = select(self._within_bound(groups.c.record)).where(self._rows.mine(groups), groups.c.step == step)

        def work(connection: Connection, run: AnyRow) -> list[bytes] | None:
            if step <= run.pruned or not self._rows.is_there(connection, run, step):
                return None
            records = connection.execute(query.order_by(groups.c.place)).scalars().all()
            if len(records) != run.places or not all(isinstance(record, bytes) for record in records):
                where = f"records of step {step} of {self._rows.where}"
                raise DataError(where, "one is missing, too large or no bytes", "Look for what changed the table")
            return list(records)

        return self._access.read(work)

    def metrics(self, model: str, step: int) -> Mapping[str, float | int | str | None] | None:
        """See `Store`."""
        found = self._access.read(lambda connection, _run: self._rows.published(connection, model, step))
        return None if found is None else unpack_values(found[1], f"metrics of {model}, step {step}")

    def wrote(self, step: int) -> None:
        """See `Store`."""

        def work(_connection: Connection, run: AnyRow, _again: bool) -> tuple[None, Change]:
            return None, {"written": step} if step > run.written else None

        self._access.write(work)

    def tell(self, process: str, kind: str, **details: float | int | str) -> None:
        """See `Store`."""
        check_name("process", process)
        values = {
            "process": process,
            "kind": check_name("kind", kind),
            "details": pack_values(details, f"event {kind}"),
        }
        events, ticket = tables.events, uuid.uuid4().hex

        def work(connection: Connection, run: AnyRow, again: bool) -> tuple[None, Change]:
            known = select(events.c.number).where(self._rows.mine(events), events.c.ticket == ticket)
            if again and connection.execute(known).one_or_none():
                return None, None
            key = {"run": self._rows.run, "number": run.events + 1, "ticket": ticket}
            time_s = self._access.now(connection)
            connection.execute(insert(events).values(**key, time_s=time_s, **values))
            return None, {"events": run.events + 1}

        self._access.write(work)

    def events(self, after: int = 0) -> list[tuple[int, Event]]:
        """See `Store`."""
        table = tables.events
        query = select(table).where(self._rows.mine(table), table.c.number > after).order_by(table.c.number)
        rows = self._access.read(lambda connection, _run: connection.execute(query).all())
        found = []
        for row in rows:
            details = unpack_values(row.details, f"event {row.number} of {self._rows.where}")
            known = {name: value for name, value in details.items() if value is not None}
            found.append((row.number, Event(time_s=row.time_s, process=row.process, kind=row.kind, details=known)))
        return found

    def ledger(self) -> list[Mapping[str, int | str | None]]:
        """See `Store`; a dropped part has no `trained_step`."""
        return self._access.read(self._rows.ledger)

    def prune(self, *, dry_run: bool = False) -> Mapping[str, int]:
        """See `Store`; one transaction per step, so that nobody waits long."""
        sums, step = {"groups": 0, "parts": 0, "bytes": 0}, 0
        while found := self._prune_one(step, dry_run):
            step = found.pop("step")
            sums = {name: sums[name] + number for name, number in found.items()}
        return sums

    def wait(self, timeout_s: float) -> bool:
        """See `Store`; claims and renewals wake nobody. Look and wait in the same thread, or see `wake.py`."""
        return self._access.wait(timeout_s)

    def close(self) -> None:
        """See `Store`; what is kept in memory is gone."""
        self._access.close()

    def _pack(self, key: Mapping[str, object], model: str, samples: Sequence[Sample]) -> dict[str, Any]:
        data = encode_samples(model, samples, self._max_part_bytes)
        oldest, newest = version_range(samples)
        sizes = {"num_samples": len(samples), "num_bytes": len(data)}
        return {**key, "model": model, **sizes, "oldest": oldest, "newest": newest, "data": data}

    def _unpack(self, model: str, step: int, place: int, data: object) -> Part:
        where = f"group {step}/{place} for model {model} of {self._rows.where}"
        if not isinstance(data, bytes):
            raise DataError(where, "too large, or no bytes", "Raise max_part_bytes, or look for what wrote it")
        samples = decode_samples(data, model, self._max_part_bytes, where)
        return Part(step=step, place=place, model=model, samples=samples)

    def _within_bound(self, column: ColumnElement[bytes]) -> ColumnElement[Any]:
        """The column, or NULL where it is larger than anything this store writes: that is not even fetched."""
        return case((func.length(column) <= stored_bound(self._max_part_bytes), type_coerce(column, NullType())))

    def _prune_one(self, after: int, dry_run: bool) -> dict[str, int] | None:
        """Remove the first finished step above `after` that is still there; None when there is none."""

        def work(connection: Connection, run: AnyRow, _again: bool) -> tuple[dict[str, int] | None, Change]:
            step = max(after, run.pruned) + 1
            if step > min(run.written, *(model.saved for model in self._rows.models(connection))):
                return None, None
            found = {**self._rows.remove(connection, step, dry_run=dry_run), "step": step}
            return found, None if dry_run else {"pruned": step}

        return self._access.write(work)
