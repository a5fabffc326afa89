"""The audit passes what a run can leave behind, and finds every kind of row that it cannot."""

import pytest
from sqlalchemy import delete, insert, update

from cotrain.errors import StoreError
from cotrain.store import schema as tables
from cotrain.store.audit import audit
from cotrain.store.base import Task
from cotrain.store.sql import SqlStore
from support_store import MODELS, begun, group, terms, weights


def step(store, number: int, version: int, models=MODELS, **values) -> None:
    """Make and train a step whose samples are of a version."""
    for _ in range(2):
        task = store.claim("worker", 100.0)
        store.put(task, group(version=version), b"record", 10)
    for model in models:
        report = {f"model/{model}/lag_max": 0, f"model/{model}/stale": 0, **values.pop("metrics", {})}
        store.publish("trainer", weights(model, number), report, **values)


@pytest.fixture
def store():
    """Two steps of two places and two models trained, a third one complete, a fourth one begun."""
    store = begun(SqlStore("sqlite://"), max_lag={"main": 2, "sub": 2})
    step(store, 1, 0)
    step(store, 2, 1)
    step(store, 3, 2, models=())
    store.claim("worker", 100.0)
    yield store
    store.close()


def tamper(store, *statements) -> None:
    for statement in statements:
        store._access._database.write(lambda connection, _again, done=statement: connection.execute(done))


def at(table, number: int, place: int | None = None, model: str | None = None):
    found = table.c.step == number
    if place is not None:
        found &= table.c.place == place
    return found if model is None else found & (table.c.model == model)


def parts(number: int, place: int, of: str = "main", /, **values):
    return update(tables.parts).where(at(tables.parts, number, place, of)).values(**values)


def versions(number: int, model: str = "main", **values):
    return update(tables.versions).where(at(tables.versions, number, model=model)).values(**values)


def model(name: str = "main", **values):
    return update(tables.models).where(tables.models.c.model == name).values(**values)


def published(number: int, **values):
    row = {"run": "run", "model": "main", "step": number, "version": number, "folder": "w", "metrics": "{}"}
    return insert(tables.versions).values(**{**row, "digest": "0" * 64, **values})


def test_a_run_that_goes_on_and_one_that_is_over_are_sound(store):
    assert audit(store) == []
    for name in MODELS:
        store.publish("trainer", weights(name, 3), {})
    store.put(Task(step=4, place=0, owner="worker", attempt=0), group(version=3), b"record", 10)
    store.put(store.claim("worker", 100.0), group(version=1), b"record", 10)
    for name in MODELS:
        store.publish("trainer", weights(name, 4), {f"model/{name}/lag_max": 2})
    assert store.status().is_over
    assert audit(store) == []


def test_a_run_that_did_not_begin_is_refused_and_one_without_groups_is_sound():
    store = SqlStore("sqlite://")
    with pytest.raises(StoreError, match="was not begun"):
        audit(store)
    store.begin(terms())
    assert audit(store) == []


def test_dropped_parts_are_sound_where_they_were_too_old_and_lags_may_have_been_others():
    store = begun(SqlStore("sqlite://"), max_lag={"main": 2, "sub": 2})
    step(store, 1, 0)
    step(store, 2, 0, models=())
    for name in MODELS:
        store.publish("trainer", weights(name, 2), {f"model/{name}/stale": 2}, dropped=[0, 1])
    problems = audit(store)
    assert len(problems) == 4
    assert "step 2, place 0, model main: dropped, but version 0 is not more than 2 behind 1" in problems
    assert audit(store, max_lag={"main": 0, "sub": 0}) == []


def test_pruned_steps_are_sound_where_they_were_saved_and_written(store):
    for name in MODELS:
        store.publish("trainer", weights(name, 2), {}, saved=True)
    store.wrote(2)
    assert store.prune()["groups"] == 4
    assert audit(store) == []
    tamper(store, model(saved=1))
    assert audit(store) == ["step 2: pruned, but not every trainer has saved it, or it is not in the run folder"]


PROBLEMS = {
    "part of a trained step is gone": (
        [delete(tables.parts).where(at(tables.parts, 1, 0, "main"))],
        "step 1, place 0, model main: missing",
    ),
    "part of a waiting group is gone": (
        [delete(tables.parts).where(at(tables.parts, 3, 1, "sub"))],
        "step 3, place 1, model sub: missing",
    ),
    "all parts of a step are gone": (
        [delete(tables.parts).where(at(tables.parts, 2))],
        "step 2: all of its parts are missing",
    ),
    "part of another place": ([parts(3, 1, place=7)], "step 3, place 7, model main: the run has no such part"),
    "part of another model": ([parts(3, 1, model="else")], "step 3, place 1, model main: missing"),
    "sample newer than the weights": (
        [parts(2, 1, newest=2)],
        "step 2, place 1, model main: a sample of version 2, but the weights were of version 1",
    ),
    "waiting sample of weights that are not there": (
        [parts(3, 1, newest=3)],
        "step 3, place 1, model main: a sample of version 3, but the weights were of version 2",
    ),
    "sample older than allowed": (
        [parts(2, 1, oldest=-2)],
        "step 2, place 1, model main: trained on a sample of version -2, more than 2 behind 1",
    ),
    "dropped without need": (
        [insert(tables.drops).values(run="run", model="main", step=2, place=0)],
        "step 2, place 0, model main: dropped, but version 1 is not more than 2 behind 1",
    ),
    "dropped without samples": (
        [
            parts(2, 0, oldest=None, newest=None),
            insert(tables.drops).values(run="run", model="main", step=2, place=0),
        ],
        "step 2, place 0, model main: dropped, but it has no samples that could be too old",
    ),
    "dropped, not reported": (
        [parts(2, 0, oldest=-2), insert(tables.drops).values(run="run", model="main", step=2, place=0)],
        "step 2 of model main: its trainer reported stale 0, found is 1",
    ),
    "trained on other parts than these": (
        [parts(2, 0, oldest=0)],
        "step 2 of model main: its trainer reported lag_max 0, found is 1",
    ),
    "metrics are damaged": ([versions(2, metrics="{")], "metrics of step 2 of model main:"),
    "published step is gone": (
        [delete(tables.versions).where(at(tables.versions, 1, model="main"))],
        "step 1 of model main: nothing was published, but the newest step is 2",
    ),
    "head went back": ([model(head=1)], "step 2 of model main: published, but the newest step is 1"),
    "head runs ahead": ([model(head=4)], "step 4 of model main: nothing was published, but the newest step is 4"),
    "trained on half a step": ([model(head=4), published(3), published(4)], "step 4: all of its parts are missing"),
    "version went back": ([versions(2, version=0)], "step 2 of model main: version 0 follows version 1"),
    "version stayed": ([versions(2, version=1)], "step 2 of model main: version 1 follows version 1"),
    "weights are damaged": ([versions(2, folder="../else")], "step 2 of model main: folder '../else'"),
    "went on after the end": (
        [update(tables.runs).values(ended=1)],
        "step 2 of model main: published, but the run ends after step 1",
    ),
    "event is gone": (
        [
            insert(tables.events).values(
                run="run", number=2, time_s=1.0, process="p", kind="k", details="{}", ticket="t"
            )
        ],
        "events: numbered [2]",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_kind_of_tampered_row_is_found(name, store):
    statements, problem = PROBLEMS[name]
    tamper(store, *statements)
    problems = audit(store)
    assert any(found.startswith(problem) for found in problems), problems


def test_a_step_made_again_to_other_weights_is_found(store):
    store.tell("trainer-main@host:1", "restart", child="worker 1")
    assert audit(store) == []
    assert not store.publish("trainer", weights("main", 2, digest="f" * 64), {})
    store.tell("trainer-main@host:1", "other weights", model="main", step=2)
    assert audit(store) == [
        "step 2 of model main: trainer-main@host:1 made it again, to other weights than were published"
    ]


@pytest.mark.parametrize(
    ("number", "change", "problem"),
    [
        (1, {"state": "waiting", "trained_step": None}, "waiting, but the model's newest step is 2"),
        (1, {"trained_step": 2}, "trained at step 2"),
        (3, {"state": "trained", "trained_step": 3}, "trained, but the model's newest step is 2"),
        (2, None, "there 2 times"),
    ],
)
def test_what_only_another_kind_of_store_could_hold_is_found(number, change, problem, store, monkeypatch):
    """This store's tables cannot say these: a key forbids them, or they are computed."""
    rows = store.ledger()
    index = next(i for i, row in enumerate(rows) if (row["step"], row["place"], row["model"]) == (number, 0, "main"))
    changed = [*rows, rows[index]] if change is None else [*rows[:index], {**rows[index], **change}, *rows[index + 1 :]]
    monkeypatch.setattr(store, "ledger", lambda: changed)
    assert f"step {number}, place 0, model main: {problem}" in audit(store)
