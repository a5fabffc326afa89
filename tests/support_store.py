"""Stores for tests: a throw-away PostgreSQL server, places to open stores in, samples to put into them."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy import text as sql

from cotrain.store.base import Task, Terms, Weights
from cotrain.store.sql import SqlStore
from cotrain.types import Sample

MODELS = ("main", "sub")
PASSWORD = "hunter2/s3cret"


@dataclass
class Server:
    """A PostgreSQL server; `folder` is None where the environment named one that is not ours to stop."""

    url: str
    folder: Path | None = None
    programs: Path = Path()
    user: str | None = None
    schemas: list[str] = field(default_factory=list)

    def control(self, *arguments: str) -> None:
        assert self.folder is not None
        log = self.folder / "log"
        command = [str(self.programs / "pg_ctl"), "-D", str(self.folder / "data"), "-l", str(log), "-w", *arguments]
        done = subprocess.run(
            command, user=self.user, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
        )
        assert done.returncode == 0, log.read_text() if log.exists() else command

    def start(self, *settings: str) -> None:
        options = " ".join(f"-c {setting}" for setting in (f"unix_socket_directories={self.folder}", *settings))
        self.control("-o", f"-c listen_addresses='' {options}", "start")

    def stop(self, mode: str = "immediate") -> None:
        self.control("-m", mode, "stop")

    def place(self) -> str:
        """The URL of a place without tables: a new schema, which costs less than a new database."""
        name = f"test_{secrets.token_hex(6)}"
        self.do(f"CREATE SCHEMA {name}")
        self.schemas.append(name)
        url = make_url(self.url).update_query_dict({"options": f"-c search_path={name}"})
        return url.render_as_string(hide_password=False)

    def do(self, statement: str) -> None:
        engine = create_engine(self.url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(sql(statement))
        engine.dispose()


@contextmanager
def throw_away_postgres(*settings: str) -> Iterator[Server]:
    """A server of its own on a Unix socket; raises LookupError with the reason where there can be none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: -int(path.parts[4].split(".")[0]))
    programs = found[0].parent if found else Path(shutil.which("initdb") or "").parent
    if not (programs / "pg_ctl").exists():
        raise LookupError("PostgreSQL is not installed")
    user = None
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        names = [entry.pw_name for entry in pwd.getpwall() if entry.pw_name in ("postgres", "nobody")]
        if not names:
            raise LookupError("PostgreSQL does not run as root, and there is no other user")
        user = "postgres" if "postgres" in names else names[0]
    folder = Path(tempfile.mkdtemp(prefix="cotrain-postgres-"))
    try:
        if user:
            shutil.chown(folder, user)
        server = Server(f"postgresql+psycopg://postgres@/postgres?host={folder}", folder, programs, user)
        command = [str(programs / "initdb"), "-D", str(folder / "data"), "-U", "postgres", "-A", "trust", "-E", "UTF8"]
        subprocess.run([*command, "--no-sync"], user=user, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        rules = folder / "data" / "pg_hba.conf"
        rules.write_text("local all secretive scram-sha-256\n" + rules.read_text())
        server.start(*settings)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """COTRAIN_TEST_POSTGRES (a user that may create schemas), or a throw-away server, or a skip."""
    if url := os.environ.get("COTRAIN_TEST_POSTGRES"):
        server = Server(url)
        yield server
        for name in server.schemas:
            server.do(f"DROP SCHEMA {name} CASCADE")
        return
    try:
        with throw_away_postgres("fsync=off") as server:
            yield server
    except LookupError as error:
        pytest.skip(str(error))


@dataclass
class Clock:
    """A clock that the test moves."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Place:
    """Where stores of one database are opened; in memory there is only one, that everybody shares."""

    url: str
    clock: Clock = field(default_factory=Clock)
    opened: list[SqlStore] = field(default_factory=list)

    @property
    def in_memory(self) -> bool:
        return self.url == "sqlite://"

    def open(self, **settings) -> SqlStore:
        if self.in_memory and self.opened:
            assert not settings, "one store in memory: give its settings when it is opened first"
            return self.opened[0]
        self.opened.append(SqlStore(self.url, **{"clock": self.clock, "patience_s": 20.0, **settings}))
        return self.opened[-1]


def terms(**values) -> Terms:
    return Terms(
        **{"run": "run", "config": "x = 1\n", "steps": 4, "places": 2, "max_lag": {"main": 0, "sub": 0}, **values}
    )


def weights(model: str = "main", step: int = 0, **values) -> Weights:
    named = {"folder": f"weights/{model}/step-{step:06d}", "digest": f"{step:064x}", "version": step}
    return Weights(**{"model": model, "step": step, **named, **values})


def sample(model: str = "main", *, num_tokens: int = 4, version: int = 0, name: str = "t0", **values) -> Sample:
    mask = tuple(i % 2 == 1 for i in range(num_tokens))
    fields = {
        "trajectory_id": name,
        "agent": f"{model} agent",
        "model": model,
        "token_ids": tuple(range(7, 7 + num_tokens)),
        "mask": mask,
        "logprobs": tuple(-0.1 * i * m for i, m in enumerate(mask)),
        "versions": tuple(version * m for m in mask),
        "advantages": tuple(0.3 * m for m in mask),
        "weight": 0.5,
    }
    return Sample(**{**fields, **values})


def group(models: Sequence[str] = MODELS, **values) -> dict[str, list[Sample]]:
    return {model: [sample(model, name="t0", **values), sample(model, name="t1", **values)] for model in models}


def put(store: SqlStore, task: Task, models: Sequence[str] = MODELS, sampled: int = 10) -> bool:
    return store.put(task, group(models), f"record {task.step}/{task.place}".encode(), sampled)


def begun(store: SqlStore, **values) -> SqlStore:
    """Begin a run and publish the weights before it."""
    agreed = terms(**values)
    store.begin(agreed)
    for model in agreed.max_lag:
        store.lead(model, "trainer", 1000.0)
        store.publish("trainer", weights(model), {})
    return store


def fill(store: SqlStore, num_groups: int, models: Sequence[str] = MODELS, sampled: int = 10) -> list[Task]:
    """Claim and put groups; returns their tasks."""
    tasks = []
    for _ in range(num_groups):
        task = store.claim("worker", 100.0)
        assert task is not None
        assert put(store, task, models, sampled)
        tasks.append(task)
    return tasks


def train(store: SqlStore, step: int, models: Sequence[str] = MODELS, **values) -> None:
    for model in models:
        assert store.publish("trainer", weights(model, step), {"loss": 0.5}, **values)
