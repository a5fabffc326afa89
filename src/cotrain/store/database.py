"""A SQLite or PostgreSQL database: transactions that are tried again, a clock that all machines agree on, a bell.

A transaction is repeated when the database is locked or the connection is lost, until `patience_s` is over; it may have
been committed before the connection was lost, so its work is told when it is not the first try. Errors never hold the
password: not the message, not the URL in it.
"""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Concatenate, ParamSpec, TypeVar
from urllib.parse import quote, quote_plus

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy import text as sql
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import QueuePool, StaticPool

from cotrain.errors import ConfigError, StoreError

T = TypeVar("T")
P = ParamSpec("P")

_BUSY_S = 5.0
_LOCK_KEY = 0x636F7472  # an advisory lock of PostgreSQL is a number: the first letters of the package's name
_HOPELESS = ("authentication failed", "no password supplied", "does not exist", "no pg_hba.conf entry")
# A machine that vanishes in the middle of a transaction must not hold its lock until the operating system notices.
_SETTINGS = "-c idle_in_transaction_session_timeout=20s -c lock_timeout=30s -c tcp_keepalives_idle=15"
_CONNECTION: dict[str, object] = {
    "application_name": "cotrain",
    "connect_timeout": 10,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}


class Database:
    """Runs functions of a connection as transactions; threads may share it.

    Args:
        url: of SQLite or PostgreSQL; SQLite without a file is in memory and of this object alone.
        clock: seconds of the epoch; None: this machine's for SQLite, the server's for PostgreSQL.
        patience_s: how long to try again before giving up.
    """

    def __init__(self, url: URL, *, clock: Callable[[], float] | None, patience_s: float) -> None:
        self.is_postgres = url.get_backend_name() == "postgresql"
        self.name = url.render_as_string(hide_password=True)
        self._password, self._clock, self._patience_s = url.password, clock, patience_s
        in_memory = not self.is_postgres and url.database in (None, "", ":memory:")
        self._turn = threading.RLock() if in_memory else nullcontext()
        self.engine = _postgres(url) if self.is_postgres else _sqlite(url, in_memory)
        reads = {"isolation_level": "REPEATABLE READ"} if self.is_postgres else {"begin": "BEGIN"}
        writes = {"isolation_level": "READ COMMITTED"} if self.is_postgres else {"begin": "BEGIN IMMEDIATE"}
        self._reader = self.engine.execution_options(**reads)
        self._writer = self.engine.execution_options(**writes)

    def read(self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` on one consistent state of the database.

        Raises:
            StoreError: the database cannot be reached.
        """

        def once(_again: bool) -> T:
            with self._turn, self._reader.begin() as connection:
                return work(connection, *args, **kwargs)

        return self.retry(once)

    def write(self, work: Callable[[Connection, bool], T]) -> T:
        """Run `work(connection, again)` and commit; what it raises undoes all. `again`: an earlier try may count.

        Raises:
            StoreError: the database cannot be reached.
        """

        def once(again: bool) -> T:
            with self._turn, self._writer.begin() as connection:
                return work(connection, again)

        return self.retry(once)

    def retry(self, once: Callable[[bool], T]) -> T:
        """Call `once(whether it was called before)` until the database lets it through.

        Raises:
            StoreError: it does not, for `patience_s`, or never will.
        """
        deadline, pause_s, again = time.monotonic() + self._patience_s, 0.02, False
        while True:
            try:
                return once(again)
            except (SQLAlchemyError, sqlite3.Error) as error:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not _may_pass(error):
                    raise StoreError(self.name, self._hide(error), "Look after the database, then resume") from None
            again = True
            time.sleep(min(left_s, pause_s * random.uniform(0.5, 1.0)))
            pause_s = min(2 * pause_s, 2.0)

    def now(self, connection: Connection) -> float:
        """The time that leases follow, in seconds of the epoch; PostgreSQL's own, so that machines need not agree."""
        if self._clock is not None:
            return self._clock()
        if not self.is_postgres:
            return time.time()
        return float(connection.execute(sql("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())

    def keep_others_out(self, connection: Connection) -> None:
        """Let no other transaction that calls this pass before this one ends; SQLite has one writer anyway."""
        if self.is_postgres:
            connection.execute(sql("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})

    def ring(self, connection: Connection, channel: str) -> None:
        """Wake, once this transaction is committed, those who listen to the channel."""
        if self.is_postgres:
            connection.execute(sql("SELECT pg_notify(:channel, '')"), {"channel": channel})

    def close(self) -> None:
        """Close the connections that are not in use."""
        self.engine.dispose()

    def _hide(self, error: Exception) -> str:
        cause = error.orig if isinstance(error, DBAPIError) else error
        text = " ".join(str(cause).split())[:500]
        for secret in {self._password, *(f(self._password or "") for f in (quote, quote_plus))}:
            text = text.replace(str(secret), "***") if secret else text
        return f"{type(cause).__name__}: {text}".rstrip(".")


def _may_pass(error: Exception) -> bool:
    """Whether trying again can help: a lock, a lost connection, a server that starts."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, sqlite3.Error):
        code = getattr(cause, "sqlite_errorcode", None)
        return code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    passing = lost or isinstance(error, (OperationalError, InterfaceError))
    return passing and not any(words in str(cause) for words in _HOPELESS)


def _postgres(url: URL) -> Engine:
    settings = {name: value for name, value in _CONNECTION.items() if name not in url.query}
    settings["options"] = f"{_SETTINGS} {url.query.get('options', '')}"
    try:
        return create_engine(url, hide_parameters=True, max_overflow=-1, connect_args=settings)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the shared store", f"PostgreSQL needs the package {error.name}", "Run: pip install 'cotrain[postgres]'"
        ) from None


def _sqlite(url: URL, in_memory: bool) -> Engine:
    arguments = {"check_same_thread": False, "timeout": _BUSY_S}
    if in_memory:
        engine = create_engine(url, hide_parameters=True, connect_args=arguments, poolclass=StaticPool)
    else:
        engine = create_engine(url, hide_parameters=True, connect_args=arguments, poolclass=QueuePool, max_overflow=-1)

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # SQLAlchemy's BEGIN below is the only one
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))

    return engine
