"""The tables of the shared store, and the steps from one version of them to the next.

Every table has the run in its key, so that many runs share one database. What grows with the groups is found by key
only; what a claim, a put or a publication has to know of all groups is counted in the rows of `runs` and `steps`.
That a group was trained is not written into it: a model has trained all steps up to its `head`.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import BigInteger, Column, Connection, Double, Integer, LargeBinary, MetaData, Table, Text, inspect
from sqlalchemy import text as sql
from sqlalchemy.schema import SchemaItem

from cotrain.errors import StoreError

metadata = MetaData()


def _table(name: str, keys: list[Column[str] | Column[int]], *columns: SchemaItem) -> Table:
    return Table(f"cotrain_{name}", metadata, Column("run", Text, primary_key=True), *keys, *columns)


def _text(name: str) -> Column[str]:
    return Column(name, Text, primary_key=True)


def _number(name: str) -> Column[int]:
    return Column(name, Integer, primary_key=True, autoincrement=False)


def _count(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


# One row per run. next_step, next_place: the first place that nobody began. complete: steps whose groups, and those of
# all steps before, are all there. ended: the step at which max_sampled was reached. changes: counts what waiters see.
runs = _table(
    "runs",
    [],
    Column("config", Text, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("places", Integer, nullable=False),
    Column("max_sampled", BigInteger),
    Column("ended", Integer),
    *map(_count, ("written", "pruned", "next_step", "next_place", "complete")),
    *map(_count, ("groups", "sampled", "bytes", "events", "changes")),
)
models = _table(
    "models",
    [_text("model")],
    *map(_count, ("max_lag", "head", "saved")),
    Column("owner", Text),
    Column("expires_s", Double, nullable=False),
)
# num_done, sampled, bytes: of the step's groups. all_sampled, all_bytes: those of the steps before included; set when
# the step is complete.
steps = _table(
    "steps",
    [_number("step")],
    *map(_count, ("num_done", "sampled", "bytes")),
    Column("all_sampled", BigInteger),
    Column("all_bytes", BigInteger),
)
# Only places that were handed out and are not finished, so it stays as small as the number of workers.
leases = _table(
    "leases",
    [_number("step"), _number("place")],
    Column("owner", Text),
    _count("attempt"),
    Column("ticket", Text, nullable=False),
    Column("expires_s", Double, nullable=False),
)
groups = _table(
    "groups",
    [_number("step"), _number("place")],
    Column("ticket", Text, nullable=False),
    _count("num_bytes"),
    Column("record", LargeBinary, nullable=False),
)
parts = _table(
    "parts",
    [_text("model"), _number("step"), _number("place")],
    Column("oldest", Integer),
    Column("newest", Integer),
    *map(_count, ("num_samples", "num_bytes")),
    Column("data", LargeBinary, nullable=False),
)
drops = _table("drops", [_text("model"), _number("step"), _number("place")])
versions = _table(
    "versions",
    [_text("model"), _number("step")],
    _count("version"),
    Column("folder", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("metrics", Text, nullable=False),
)
events = _table(
    "events",
    [_number("number")],
    Column("time_s", Double, nullable=False),
    Column("process", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("details", Text, nullable=False),
    Column("ticket", Text, nullable=False),
)


def _create(connection: Connection) -> None:
    metadata.create_all(connection)


MIGRATIONS: tuple[Callable[[Connection], None], ...] = (_create,)
"""Step i makes version i + 1 of the tables out of version i; 0 is an empty database."""


def version(connection: Connection) -> int:
    """The version of the tables that are there; 0 where there are none."""
    if not inspect(connection).has_table("cotrain_schema"):
        return 0
    return int(connection.execute(sql("SELECT version FROM cotrain_schema")).scalar_one())


def migrate(connection: Connection, where: str) -> None:
    """Bring the tables to this code's version, in the connection's transaction; the caller keeps others out.

    Raises:
        StoreError: they are of a newer version.
    """
    found = version(connection)
    if found > len(MIGRATIONS):
        raise StoreError(
            where,
            f"its tables are of version {found}, this cotrain knows version {len(MIGRATIONS)}",
            "Use the cotrain that wrote it, or a newer one",
        )
    if found == len(MIGRATIONS):
        return
    for step in MIGRATIONS[found:]:
        step(connection)
    if found == 0:
        connection.execute(sql("CREATE TABLE cotrain_schema (version INTEGER NOT NULL)"))
        connection.execute(sql("INSERT INTO cotrain_schema (version) VALUES (0)"))
    connection.execute(sql("UPDATE cotrain_schema SET version = :version"), {"version": len(MIGRATIONS)})
