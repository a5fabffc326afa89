"""One run in a database: its transactions, its counter of changes, and those who wait for one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from sqlalchemy import URL, Connection, select, update

from cotrain.store import schema as tables
from cotrain.store.base import Terms
from cotrain.store.database import Database
from cotrain.store.queries import AnyRow, Rows
from cotrain.store.wake import Watch

T = TypeVar("T")
Change = Mapping[str, object] | None
"""Columns of the run's row to set, for a change that others may wait for; None: nothing to wake them for."""


class Access:
    """Runs functions of a connection and the run's row as transactions, and rings the bell for their changes.

    Args:
        url: of SQLite or PostgreSQL; the tables are made or migrated.
        run: the run's name.
        clock: see `Database`.
        patience_s: see `Database`.
    """

    def __init__(self, url: URL, run: str, *, clock: Callable[[], float] | None, patience_s: float) -> None:
        self._database = Database(url, clock=clock, patience_s=patience_s)
        self.now = self._database.now
        self.rows = Rows(run, f"run {run} in {self._database.name}")
        if self._database.read(tables.version) != len(tables.MIGRATIONS):
            self._database.write(self._migrate)
        self._watch = Watch(self._database, run, self._changes)
        self.wait, self.looked = self._watch.wait, self._watch.looked

    def begin(self, terms: Terms) -> None:
        """Create the run's rows, or change in them what may change.

        Raises:
            ConfigError: something else differs.
        """

        def whole(connection: Connection, _again: bool) -> int | None:
            self._database.keep_others_out(connection)
            query = select(tables.runs.c.run).where(self.rows.mine(tables.runs))
            if connection.execute(query).one_or_none() is None:
                self.rows.create(connection, terms)
                self._database.ring(connection, self._watch.channel)
                return 1
            run = self.rows.find(connection, lock=True)
            return self._apply(connection, run, self.rows.adjust(connection, run, terms))

        self._tell_watch(self._database.write(whole))

    def read(self, work: Callable[[Connection, AnyRow], T]) -> T:
        """Run `work(connection, the run's row)` on one state of the run; it counts as a look.

        Raises:
            StoreError: the database cannot be reached, or the run was not begun.
        """

        def whole(connection: Connection) -> T:
            run = self.rows.find(connection, lock=False)
            self.looked(run.changes)
            return work(connection, run)

        return self._database.read(whole)

    def write(self, work: Callable[[Connection, AnyRow, bool], tuple[T, Change]]) -> T:
        """Run `work(connection, the run's locked row, whether an earlier try may count)`, and tell of its change.

        Raises:
            StoreError: the database cannot be reached, or the run was not begun.
        """

        def whole(connection: Connection, again: bool) -> tuple[T, int | None]:
            run = self.rows.find(connection, lock=True)
            result, change = work(connection, run, again)
            return result, self._apply(connection, run, change)

        result, changes = self._database.write(whole)
        self._tell_watch(changes)
        return result

    def write_alone(self, work: Callable[[Connection], T]) -> T:
        """Run `work(connection)` without the run's lock: for one statement, that wakes nobody.

        Raises:
            StoreError: the database cannot be reached.
        """
        return self._database.write(lambda connection, _again: work(connection))

    def close(self) -> None:
        """Let go of all connections."""
        self._watch.close()
        self._database.close()

    def _migrate(self, connection: Connection, _again: bool) -> None:
        self._database.keep_others_out(connection)
        tables.migrate(connection, self._database.name)

    def _changes(self) -> int:
        query = select(tables.runs.c.changes).where(self.rows.mine(tables.runs))
        return self._database.read(lambda connection: connection.execute(query).scalar_one_or_none() or 0)

    def _tell_watch(self, changes: int | None) -> None:
        if changes is not None:
            self._watch.changed(changes)

    def _apply(self, connection: Connection, run: AnyRow, change: Change) -> int | None:
        """Set the columns and count the change; returns the new count, or None where nothing changed."""
        if change is None:
            return None
        changes = int(run.changes) + 1
        connection.execute(update(tables.runs).where(self.rows.mine(tables.runs)).values(changes=changes, **change))
        self._database.ring(connection, self._watch.channel)
        return changes
