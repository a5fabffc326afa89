"""What the store's transactions are made of: the rows of one run, found by key, and the counting that goes with them.

Every function runs inside a transaction that holds the run's row (`lock`) or reads one state of it; none of them is
slower for more stored groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from sqlalchemy import Connection, Row, Table, and_, delete, func, insert, select, update
from sqlalchemy.sql import ColumnElement

from cotrain.errors import ConfigError, DataError, StoreError
from cotrain.store import schema as tables
from cotrain.store.base import Task, Terms, Weights
from cotrain.store.checks import check_weights, differing

if TYPE_CHECKING:
    AnyRow = Row[*tuple[Any, ...]]
else:
    AnyRow = Row  # SQLAlchemy 2.0 counts its type arguments differently


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one run; `where` names it in errors."""

    run: str
    where: str

    def mine(self, table: Table) -> ColumnElement[bool]:
        """The run's rows of a table."""
        return table.c.run == self.run

    def at(self, table: Table, step: int, place: int) -> ColumnElement[bool]:
        """The rows of one group."""
        return self.mine(table) & (table.c.step == step) & (table.c.place == place)

    def find(self, connection: Connection, *, lock: bool) -> AnyRow:
        """The run's row; with `lock`, nobody else changes the run before the transaction ends.

        Raises:
            StoreError: the run was not begun.
        """
        query = select(tables.runs).where(self.mine(tables.runs))
        row = connection.execute(query.with_for_update() if lock else query).one_or_none()
        if row is None:
            raise StoreError(self.where, "it was not begun here", "Begin it, or name another")
        return row

    def create(self, connection: Connection, terms: Terms) -> None:
        """Write the rows of a run that begins."""
        zero = dict.fromkeys(("pruned", "next_place", "complete", "groups", "sampled", "bytes", "events"), 0)
        fixed = {"config": terms.config, "steps": terms.steps, "places": terms.places, "max_sampled": terms.max_sampled}
        connection.execute(
            insert(tables.runs).values(run=self.run, **fixed, **zero, written=-1, next_step=1, changes=1)
        )
        none = {"head": -1, "saved": -1, "owner": None, "expires_s": 0.0}
        rows = [{"run": self.run, "model": model, "max_lag": lag, **none} for model, lag in terms.max_lag.items()]
        connection.execute(insert(tables.models), rows)

    def adjust(self, connection: Connection, run: AnyRow, terms: Terms) -> Mapping[str, object] | None:
        """Take over what may change about a run that was begun; returns what to set in its row.

        Raises:
            ConfigError: something else differs.
        """
        known = {model.model: model for model in self.models(connection)}
        lags = {name: model.max_lag for name, model in known.items()}
        if found := differing(terms, run.config, run.places, lags):
            raise ConfigError(self.where, f"it was begun with another {', '.join(found)}", "Choose another run folder")
        if (run.steps, run.max_sampled, lags) == (terms.steps, terms.max_sampled, terms.max_lag):
            return None
        for name, lag in terms.max_lag.items():
            self.set_model(connection, name, max_lag=lag)
        furthest = max(model.head for model in known.values())
        sampled = self.totals(connection, furthest).all_sampled if furthest > 0 else 0
        is_over = terms.max_sampled is not None and furthest >= 0 and sampled >= terms.max_sampled
        return {"steps": terms.steps, "max_sampled": terms.max_sampled, "ended": furthest if is_over else None}

    def models(self, connection: Connection) -> Sequence[AnyRow]:
        """The rows of the trained models."""
        query = select(tables.models).where(self.mine(tables.models)).order_by(tables.models.c.model)
        return connection.execute(query).all()

    def model(self, connection: Connection, name: str) -> AnyRow:
        """A trained model's row.

        Raises:
            StoreError: the run trains no such model.
        """
        query = select(tables.models).where(self.mine(tables.models), tables.models.c.model == name)
        row = connection.execute(query).one_or_none()
        return row if row is not None else self.refuse(f"model {name!r:.100}", "is not trained", "Name a trained model")

    def set_model(self, connection: Connection, name: str, **values: object) -> None:
        """Change columns of a model's row."""
        key = self.mine(tables.models) & (tables.models.c.model == name)
        connection.execute(update(tables.models).where(key).values(**values))

    def published(self, connection: Connection, model: str, step: int) -> tuple[Weights, str] | None:
        """The weights and the metrics' text of a published step.

        Raises:
            DataError: the row is not what weights can be.
        """
        table = tables.versions
        key = self.mine(table) & (table.c.model == model) & (table.c.step == step)
        row = connection.execute(select(table).where(key)).one_or_none()
        if row is None:
            return None
        weights = Weights(model=model, step=step, version=row.version, folder=row.folder, digest=row.digest)
        check_weights(weights, f"weights of {model}, step {step}, of {self.where}")
        return weights, row.metrics

    def last_step(self, run: AnyRow) -> int:
        """The step after which the run ends."""
        return int(run.steps if run.ended is None else min(run.steps, run.ended))

    def limit(self, connection: Connection, run: AnyRow, max_waiting_bytes: int) -> int:
        """The last step of which groups may be handed out; 0 while a model has no weights.

        When too much waits, it is the step that the slowest trainer makes next: that one needs all of its groups.
        """
        models = self.models(connection)
        slowest = min(model.head for model in models)
        if slowest < 0:
            return 0
        limit = min(self.last_step(run), *(model.head + 1 + model.max_lag for model in models))
        trained = self.totals(connection, slowest).all_bytes if slowest else 0
        return int(limit if run.bytes - trained <= max_waiting_bytes else min(limit, slowest + 1))

    def first_lease(self, connection: Connection, *which: ColumnElement[bool]) -> AnyRow | None:
        """The first of these leases in the order of step and place."""
        table = tables.leases
        query = select(table).where(self.mine(table), *which).order_by(table.c.step, table.c.place).limit(1)
        return connection.execute(query).one_or_none()

    def held(self, task: Task) -> ColumnElement[bool]:
        """The lease, as long as it is this task's."""
        table = tables.leases
        whose = (table.c.owner == task.owner) & (table.c.attempt == task.attempt)
        return self.at(table, task.step, task.place) & whose

    def begin_next(self, connection: Connection, run: AnyRow, owner: str, lease: Mapping[str, object]) -> Task:
        """Lease the first place that nobody began."""
        step, place = run.next_step, run.next_place
        if place == 0:
            connection.execute(insert(tables.steps).values(run=self.run, step=step, num_done=0, sampled=0, bytes=0))
        connection.execute(insert(tables.leases).values(run=self.run, step=step, place=place, attempt=0, **lease))
        follows = (step, place + 1) if place + 1 < run.places else (step + 1, 0)
        cursor = {"next_step": follows[0], "next_place": follows[1]}
        connection.execute(update(tables.runs).where(self.mine(tables.runs)).values(**cursor))
        return Task(step=step, place=place, owner=owner, attempt=0)

    def totals(self, connection: Connection, step: int) -> AnyRow:
        """A step's counts."""
        query = select(tables.steps).where(self.mine(tables.steps), tables.steps.c.step == step)
        return connection.execute(query).one()

    def is_there(self, connection: Connection, run: AnyRow, step: int) -> bool:
        """Whether all groups of a step were put; also of one that was pruned since."""
        if step >= run.next_step + (run.next_place > 0) or step < 1:
            return False
        return bool(self.totals(connection, step).num_done == run.places)

    def count(self, connection: Connection, run: AnyRow, task: Task, sampled: int, num_bytes: int) -> int:
        """Count a finished group in its step; returns up to which step all groups are there now."""
        key = self.mine(tables.steps) & (tables.steps.c.step == task.step)
        step = self.totals(connection, task.step)
        counts = {"num_done": step.num_done + 1, "sampled": step.sampled + sampled, "bytes": step.bytes + num_bytes}
        connection.execute(update(tables.steps).where(key).values(**counts))
        complete = run.complete
        while self.is_there(connection, run, complete + 1):
            self._sum_up(connection, complete + 1)
            complete += 1
        return int(complete)

    def check_next(self, connection: Connection, run: AnyRow, model: AnyRow, step: int, dropped: Sequence[int]) -> None:
        """Refuse to publish anything but the model's next step.

        Raises:
            StoreError: it is another, one after the run's end, or its groups are not all there.
            DataError: `dropped` are not places of the step.
        """
        if step != model.head + 1:
            self.refuse(f"step {step} of model {model.model}", f"is not the next, {model.head + 1}", "Publish that one")
        if step > self.last_step(run):
            self.refuse(f"step {step} of model {model.model}", f"the run ends after {self.last_step(run)}", "Stop here")
        if step and not self.is_there(connection, run, step):
            self.refuse(f"step {step}", "its groups are not all there", "Take its parts before publishing it")
        places = range(run.places if step else 0)
        if len(set(dropped)) != len(dropped) or not set(dropped) <= set(places):
            where = f"step {step} of model {model.model} of {self.where}"
            raise DataError(where, f"dropped places {list(dropped)}"[:300], f"Name each of 0 to {run.places - 1} once")

    def ledger(self, connection: Connection, run: AnyRow) -> list[Mapping[str, int | str | None]]:
        """One row per part that is there, without its samples."""
        parts, drops = tables.parts, tables.drops
        same = [parts.c[name] == drops.c[name] for name in ("run", "model", "step", "place")]
        columns = [parts.c[name] for name in ("step", "place", "model", "oldest", "newest", "num_samples", "num_bytes")]
        query = select(*columns, drops.c.place.label("dropped")).select_from(parts.outerjoin(drops, and_(*same)))
        heads = {model.model: model.head for model in self.models(connection)}
        found: list[Mapping[str, int | str | None]] = []
        ordered = query.where(self.mine(parts)).order_by(parts.c.step, parts.c.place, parts.c.model)
        for row in connection.execute(ordered).mappings():
            values = {name: row[name] for name in row if name != "dropped"}
            is_done, is_dropped = row["step"] <= heads.get(row["model"], -1), row["dropped"] is not None
            state = "waiting" if not is_done else "dropped" if is_dropped else "trained"
            found.append({**values, "state": state, "trained_step": row["step"] if state == "trained" else None})
        return found

    def remove(self, connection: Connection, step: int, *, dry_run: bool) -> dict[str, int]:
        """Remove a step's groups and parts; how many there were, and their bytes."""
        here = {
            table: self.mine(table) & (table.c.step == step) for table in (tables.groups, tables.parts, tables.drops)
        }
        size = select(func.count(), func.coalesce(func.sum(tables.groups.c.num_bytes), 0)).where(here[tables.groups])
        num_groups, num_bytes = connection.execute(size).one()
        models = select(tables.models.c.model).where(self.mine(tables.models))
        of_models = here[tables.parts] & tables.parts.c.model.in_(models)  # so that the key leads there
        num_parts = connection.execute(select(func.count()).select_from(tables.parts).where(of_models)).scalar_one()
        if not dry_run:
            connection.execute(delete(tables.groups).where(here[tables.groups]))
            connection.execute(delete(tables.parts).where(of_models))
            connection.execute(delete(tables.drops).where(here[tables.drops]))
        return {"groups": num_groups, "parts": num_parts, "bytes": int(num_bytes)}

    def refuse(self, what: str, found: str, fix: str) -> NoReturn:
        """Raise the StoreError that says so."""
        raise StoreError(f"{what} of {self.where}", found, fix)

    def _sum_up(self, connection: Connection, step: int) -> None:
        here, before = self.totals(connection, step), self.totals(connection, step - 1) if step > 1 else None
        totals = {
            "all_sampled": here.sampled + (before.all_sampled if before else 0),
            "all_bytes": here.bytes + (before.all_bytes if before else 0),
        }
        key = self.mine(tables.steps) & (tables.steps.c.step == step)
        connection.execute(update(tables.steps).where(key).values(**totals))
