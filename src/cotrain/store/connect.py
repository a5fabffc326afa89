"""Which database a run uses, and how its password is kept out of everything that is written down.

The configuration names the place of the credentials (`env:NAME`, `file:PATH`), never the credentials.
"""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from cotrain.errors import ConfigError
from cotrain.store.base import Store
from cotrain.store.sql import SqlStore

_WHERE = "the store's url"


def open_store(url: str | None, folder: Path, run: str, *, max_waiting_bytes: int = 2_000_000_000) -> Store:
    """The shared store of a run.

    Args:
        url: None for SQLite in the run folder; `env:NAME` or `file:PATH` for a URL that is in an environment variable
            or a file; or a URL without a password.
        folder: the run folder.
        run: the run's name among those in the database.
        max_waiting_bytes: as `SqlStore`.

    Raises:
        ConfigError: the URL holds a password, cannot be found, or is of no database that cotrain knows.
        StoreError: the database cannot be reached.
    """
    if url is None:
        folder.mkdir(parents=True, exist_ok=True)
        return SqlStore(folder / "store.sqlite", run=run, max_waiting_bytes=max_waiting_bytes)
    return SqlStore(_resolve(url), run=run, max_waiting_bytes=max_waiting_bytes)


def _resolve(url: str) -> URL:
    kind, _, name = url.partition(":")
    if kind == "env":
        if not os.environ.get(name):
            raise ConfigError(_WHERE, f"the environment variable {name} is not set", "Set it to the database's URL")
        return _parse(os.environ[name], f"the URL in the environment variable {name}")
    if kind == "file":
        try:
            return _parse(Path(name).read_text(encoding="utf-8").strip(), f"the URL in the file {name}")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(
                _WHERE, f"the file {name} cannot be read: {why}", "Write the database's URL in it"
            ) from None
    parsed = _parse(url, _WHERE)
    if parsed.password is not None or "password" in parsed.query:
        raise ConfigError(
            _WHERE,
            "it holds a password, and the configuration is stored and shown",
            "Put the URL in an environment variable and give env:NAME, or in a file and give file:PATH",
        )
    return parsed


def _parse(url: str, where: str) -> URL:
    """The URL with the driver that cotrain uses; errors do not show it."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigError(where, "it is no URL of a database", "Write postgresql://user@host/database") from None
    if parsed.drivername in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("postgresql+psycopg", "sqlite"):
        raise ConfigError(where, "it is of neither SQLite nor PostgreSQL", "Write postgresql://user@host/database")
    return parsed
