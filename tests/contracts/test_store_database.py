"""What a store does with its database: passwords, migrations, servers that go away, one package less."""

from __future__ import annotations

import logging
import re
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy import text as sql

from cotrain.errors import ConfigError, StoreError
from cotrain.store import schema
from cotrain.store.connect import open_store
from cotrain.store.sql import SqlStore
from support_store import PASSWORD, begun, fill, put, terms, throw_away_postgres, train


def test_without_a_url_the_store_is_a_file_in_the_run_folder(tmp_path):
    store = open_store(None, tmp_path / "run", "run")
    store.begin(terms())
    store.close()
    assert (tmp_path / "run" / "store.sqlite").exists()
    with sqlite3.connect(tmp_path / "run" / "store.sqlite") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        assert len(tables) == 10
    connection.close()


def test_a_url_is_named_by_variable_or_file(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path / 'else.sqlite'}"
    monkeypatch.setenv("STORE_URL", url)
    (tmp_path / "url").write_text(url + "\n")
    for given in ("env:STORE_URL", f"file:{tmp_path / 'url'}", url):
        open_store(given, tmp_path, "run").close()
    assert not (tmp_path / "store.sqlite").exists()


@pytest.mark.parametrize(
    ("url", "found"),
    [
        (f"postgresql://me:{PASSWORD}@host/db", "it holds a password"),
        ("postgresql://me:@host/db", "it holds a password"),
        (f"postgresql://me@host/db?password={PASSWORD}", "it holds a password"),
        ("env:NOT_SET_ANYWHERE", "NOT_SET_ANYWHERE is not set"),
        ("file:/not/anywhere", "cannot be read"),
        (f"mysql://me:{PASSWORD}@host/db", "neither"),
        (f"nonsense {PASSWORD}", "no URL"),
        (f"postgresql://me:{PASSWORD}@host:port/db", "no URL"),
        ("env:BAD", "the environment variable BAD: it is no URL"),
    ],
)
def test_urls_that_cannot_be_are_refused_without_showing_a_password(tmp_path, monkeypatch, url, found):
    monkeypatch.setenv("BAD", f"postgresql://me:{PASSWORD}@host:port/db")
    with pytest.raises(ConfigError, match=found) as caught:
        open_store(url, tmp_path, "run")
    assert PASSWORD not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_missing_driver_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'cotrain[postgres]'")):
        open_store("postgresql://me@host/db", tmp_path, "run")


def test_importing_cotrain_loads_no_database():
    code = "import sys, cotrain; print({'sqlalchemy', 'psycopg'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# The tables


def test_a_newer_schema_is_refused_and_an_older_one_is_migrated(tmp_path, monkeypatch):
    file = tmp_path / "store.sqlite"
    begun(store := SqlStore(file))
    fill(store, 2)
    store.close()

    def add_column(connection):
        connection.execute(sql("ALTER TABLE cotrain_runs ADD COLUMN note TEXT"))

    with monkeypatch.context() as newer:
        newer.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, add_column))
        store = SqlStore(file)
        assert len(store.take("main", 1)) == 2
        store.close()
        SqlStore(file).close()
    with pytest.raises(StoreError, match="of version 2, this cotrain knows version 1"):
        SqlStore(file)


def test_a_migration_that_fails_leaves_the_older_tables(tmp_path, monkeypatch):
    file = tmp_path / "store.sqlite"
    SqlStore(file).close()

    def fail(connection):
        connection.execute(sql("CREATE TABLE half (done INTEGER)"))
        raise StoreError("the migration", "failed", "Try again")

    with monkeypatch.context() as newer:
        newer.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, fail))
        with pytest.raises(StoreError, match="failed"):
            SqlStore(file)
    SqlStore(file).close()
    with sqlite3.connect(file) as connection:
        assert not connection.execute("SELECT * FROM sqlite_master WHERE name = 'half'").fetchall()
    connection.close()


def test_many_that_open_and_begin_at_once_make_one_run(tmp_path, request):
    for url in (str(tmp_path / "store.sqlite"), request.getfixturevalue("postgres").place()):
        failed = []

        def start(url=url, failed=failed):
            try:
                store = SqlStore(url)
                store.begin(terms())
                assert store.terms() == terms()
                store.close()
            except BaseException as error:
                failed.append(error)
                raise

        threads = [threading.Thread(target=start) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed


# A database that is not there, or busy


def test_a_file_that_is_no_database_is_refused_at_once(tmp_path):
    (tmp_path / "store.sqlite").write_text("this is no database, and it is long enough to be seen as none" * 9)
    start = time.monotonic()
    with pytest.raises(StoreError, match="not a database"):
        SqlStore(tmp_path / "store.sqlite")
    with pytest.raises(StoreError, match="unable to open"):
        SqlStore(tmp_path / "no folder" / "store.sqlite")
    assert time.monotonic() - start < 5.0


def test_a_locked_file_is_waited_for_within_the_patience(tmp_path, monkeypatch):
    monkeypatch.setattr("cotrain.store.database._BUSY_S", 0.1)
    store = SqlStore(tmp_path / "store.sqlite", patience_s=1.0)
    store.begin(terms())
    lock = sqlite3.connect(tmp_path / "store.sqlite", isolation_level=None, check_same_thread=False)
    lock.execute("BEGIN IMMEDIATE")
    assert store.status().complete == 0  # readers wait for nobody
    with pytest.raises(StoreError, match="database is locked"):
        store.tell("worker", "event")
    timer = threading.Timer(0.5, lock.rollback)
    timer.start()
    store.tell("worker", "event")
    assert len(store.events()) == 1
    timer.join()
    lock.close()
    store.close()


def test_a_connection_that_the_server_ends_is_made_again(postgres):
    url = postgres.place()
    store, other = begun(SqlStore(url)), SqlStore(url)
    engine = create_engine(url, isolation_level="AUTOCOMMIT")

    def end_all():
        others = "FROM pg_stat_activity WHERE datname = :name AND pid != pg_backend_pid()"
        query = sql(f"SELECT pg_terminate_backend(pid) {others}")
        with engine.connect() as connection:
            assert connection.execute(query, {"name": make_url(url).database}).all()

    end_all()
    fill(store, 1)
    woken = []

    def wait():
        other.status()
        woken.append(other.wait(30.0))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.5)
    end_all()
    time.sleep(0.5)
    assert not woken
    fill(store, 1)
    waiting.join(timeout=15.0)
    assert woken == [True]
    assert len(store.take("main", 1)) == 2
    engine.dispose()
    store.close()
    other.close()


def test_a_server_that_is_killed_and_comes_back_loses_nothing_that_was_committed():
    try:
        with throw_away_postgres() as server:
            work_through_a_restart(server)
    except LookupError as error:
        pytest.skip(str(error))


def work_through_a_restart(server):
    store = begun(SqlStore(server.url), steps=10, places=2)
    acknowledged, stop = [], threading.Event()

    def work():
        own = SqlStore(server.url)
        while not stop.is_set():
            task = own.claim("worker", 1.0)
            if task is None:
                own.wait(1.0)
            elif put(own, task):
                acknowledged.append((task.step, task.place))
        own.close()

    def lead():
        try:
            for step in range(1, 11):
                while store.take("main", step) is None:
                    store.wait(1.0)
                train(store, step)
        finally:
            stop.set()

    with ThreadPoolExecutor(3) as pool:
        doing = [pool.submit(work), pool.submit(work), pool.submit(lead)]
        for num_done in (4, 12):
            while len(acknowledged) < num_done and not stop.is_set():
                time.sleep(0.01)
            server.stop()
            time.sleep(0.5)
            server.start()
    assert [one.result() for one in doing] == [None] * 3
    assert sorted(acknowledged) == [(step, place) for step in range(1, 11) for place in range(2)]
    assert store.status().is_over
    assert store.status().sampled == 200
    server.stop()
    impatient = time.monotonic()
    with pytest.raises(StoreError):
        SqlStore(server.url, patience_s=0.5)
    assert time.monotonic() - impatient < 10.0
    store.close()
    server.start()


# Passwords


def test_a_password_is_used_and_shown_nowhere(postgres, tmp_path, monkeypatch, caplog):
    if postgres.folder is None:
        pytest.skip("needs a server whose rules it knows")
    caplog.set_level(logging.DEBUG)
    url = postgres.place()
    postgres.do(f"CREATE ROLE secretive LOGIN SUPERUSER PASSWORD '{PASSWORD}'")
    caplog.clear()
    secret = make_url(url).set(username="secretive", password=PASSWORD).render_as_string(hide_password=False)
    monkeypatch.setenv("STORE_URL", secret.replace("+psycopg", ""))
    store = open_store("env:STORE_URL", tmp_path, "run")
    begun(store)
    shown = [repr(store), str(vars(store)), repr(store._access._database.engine), caplog.text]
    with pytest.raises(StoreError) as missing:
        store.lead("judge", "trainer", 1.0)
    shown.append(str(missing.value))
    monkeypatch.setenv("STORE_URL", secret.replace("s3cret", "s3cret-not"))
    start = time.monotonic()
    with pytest.raises(StoreError, match="authentication failed") as wrong:
        open_store("env:STORE_URL", tmp_path, "run")
    assert time.monotonic() - start < 10.0
    shown.append(str(wrong.value))
    rows = store._access._database.read(
        lambda connection: [connection.execute(table.select()).all() for table in schema.metadata.tables.values()]
    )
    shown.append(str(rows))
    assert not [text for text in shown if "hunter2" in text or "s3cret" in text]
    store.close()
