"""Waiting for a commit: LISTEN on PostgreSQL, a bounded and jittered poll of one number on SQLite.

Every commit that others may wait for raises the run's counter `changes`. A thread remembers the counter at its first
look since it last waited, and `wait` returns at once where the counter is no longer that: what was committed between
the look and the wait is not lost. A thread's own commits do not count. So look and wait in the same thread; a thread
that did not look yet waits for what came after the store was opened.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from sqlalchemy.exc import SQLAlchemyError

from cotrain.store.database import Database

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy import Connection

_SHORTEST_S, _LONGEST_S = 0.02, 0.1


@dataclass(slots=True)
class _Mark:
    value: int
    looked: bool = False


class Watch:
    """The counter's value at each thread's last look, and how to sleep until it is another.

    Args:
        database: where the run is kept.
        run: the run's name.
        changes: reads the counter.
    """

    def __init__(self, database: Database, run: str, changes: Callable[[], int]) -> None:
        self._database, self._changes = database, changes
        self.channel = "cotrain_" + hashlib.sha256(run.encode()).hexdigest()[:32]
        self._opened_at = changes()
        self._threads = threading.local()
        self._listeners: list[Connection] = []

    def looked(self, value: int) -> None:
        """This thread saw the run at this value of the counter; only its first look since it waited counts."""
        mark = self._mark()
        if not mark.looked:
            mark.value, mark.looked = value, True

    def changed(self, value: int) -> None:
        """This thread itself raised the counter to this value."""
        mark = self._mark()
        if mark.value == value - 1:
            mark.value = value

    def wait(self, timeout_s: float) -> bool:
        """Sleep until the counter is not this thread's mark, or the time is over; whether it is not."""
        mark, deadline = self._mark(), time.monotonic() + timeout_s
        pause_s = _SHORTEST_S
        while True:
            listener = self._listener() if self._database.is_postgres else None  # before the counter is read
            value = self._changes()
            left_s = deadline - time.monotonic()
            if value != mark.value or left_s <= 0:
                found, mark.value, mark.looked = value != mark.value, value, False
                return found
            if listener is not None:
                _hear(listener, left_s)
            else:
                time.sleep(min(left_s, pause_s * random.uniform(0.5, 1.0)))
                pause_s = min(1.5 * pause_s, _LONGEST_S)

    def close(self) -> None:
        """Close the listening connections."""
        while self._listeners:
            _drop(self._listeners.pop())

    def _mark(self) -> _Mark:
        if not hasattr(self._threads, "mark"):
            self._threads.mark = _Mark(self._opened_at)
        mark: _Mark = self._threads.mark
        return mark

    def _listener(self) -> Connection:
        """This thread's own connection, that hears what was committed since it was made."""
        listener: Connection | None = getattr(self._threads, "listener", None)
        if listener is not None and not listener.closed:
            _hear(listener, 0.0)  # what came while nobody waited
        if listener is None or listener.closed:
            listener = self._threads.listener = self._database.retry(self._listen)
            self._listeners[:] = [one for one in self._listeners if not one.closed] + [listener]
        return listener

    def _listen(self, _again: bool) -> Connection:
        connection = self._database.engine.connect()
        try:
            connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql(f"LISTEN {self.channel}")
            connection.detach()
        except SQLAlchemyError:
            connection.close()
            raise
        return connection


def _hear(listener: Connection, timeout_s: float) -> None:
    """Return at the first notification, or when the time is over, or when the connection is lost: that closes it."""
    from psycopg import OperationalError

    try:
        for _ in _driver(listener).notifies(timeout=timeout_s, stop_after=1):
            pass
    except OperationalError:
        _drop(listener)


def _drop(listener: Connection) -> None:
    """Close it without a word to the server, which may be gone."""
    if not listener.closed:
        _driver(listener).close()
        listener.invalidate()
        listener.close()


def _driver(listener: Connection) -> psycopg.Connection:
    return cast("psycopg.Connection", listener.connection.dbapi_connection)
