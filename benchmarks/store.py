"""What the shared store costs: groups a second, flat cost per group, long rows, and how soon who waits is woken.

SQLite in a file and PostgreSQL, each as it comes: every commit reaches the disk. Producers claim and put in processes
of their own; consumers take and publish. Without --postgres a throw-away server is started where the programs are.

    python benchmarks/store.py --quick
    python benchmarks/store.py --rows 1000000 --out benchmarks/results/store.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import sqlalchemy
from sqlalchemy import insert, make_url, update
from sqlalchemy import text as sql

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from cotrain.store import schema as tables
from cotrain.store.base import Task, Terms, Weights
from cotrain.store.encode import encode_samples
from cotrain.store.sql import SqlStore
from cotrain.types import Sample
from support_store import Server, throw_away_postgres

MODELS = ("main", "sub")
PLACES = 16


def sample(model: str, num_tokens: int, seed: int) -> Sample:
    draw = random.Random(seed)
    mask = tuple(i >= num_tokens // 2 for i in range(num_tokens))
    return Sample(
        trajectory_id=f"q{seed}/0",
        agent="agent",
        model=model,
        token_ids=tuple(draw.randrange(150_000) for _ in mask),
        mask=mask,
        logprobs=tuple(-draw.random() * m for m in mask),
        versions=tuple(3 * m for m in mask),
        advantages=tuple(0.7 * m for m in mask),
    )


def begin(store: SqlStore, steps: int) -> None:
    lags = dict.fromkeys(MODELS, steps)
    store.begin(Terms(run="run", config="", steps=steps, places=PLACES, max_lag=lags))
    for model in MODELS:
        store.lead(model, "trainer", 10_000.0)
        publish(store, model, 0)


def publish(store: SqlStore, model: str, step: int) -> None:
    weights = Weights(model=model, step=step, version=step, folder=f"w/{step}", digest=f"{step:064x}")
    store.publish("trainer", weights, {"loss": 0.1})


def produce(url: str, num_tokens: int) -> int:
    """Claim and put until nothing is left; how many groups."""
    store, num_groups = SqlStore(url), 0
    parts = {model: [sample(model, num_tokens, i) for i in range(4)] for model in MODELS}
    print("ready", flush=True)
    sys.stdin.readline()
    while (task := store.claim(f"process {os.getpid()}", 600.0)) is not None:
        store.put(task, parts, b"record", num_tokens)
        num_groups += 1
    store.close()
    return num_groups


def consume(url: str, model: str, steps: int) -> None:
    store = SqlStore(url)
    for step in range(1, steps + 1):
        while store.take(model, step) is None:
            store.wait(5.0)
        publish(store, model, step)
    store.close()


def throughput(url: str, num_producers: int, steps: int) -> float:
    """Groups a second through producers in processes and one consumer thread per model."""
    begin(store := SqlStore(url), steps)
    command = [sys.executable, __file__, "--produce", url]
    pipe = subprocess.PIPE
    producers = [subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) for _ in range(num_producers)]
    for producer in producers:
        assert producer.stdout is not None
        assert producer.stdout.readline() == "ready\n"
    consumers = [threading.Thread(target=consume, args=(url, model, steps)) for model in MODELS]
    start = time.perf_counter()
    for thread in consumers:
        thread.start()
    for producer in producers:
        assert producer.stdin is not None
        producer.stdin.write("go\n")
        producer.stdin.flush()
    for thread in consumers:
        thread.join()
    taken = time.perf_counter() - start
    made = sum(int(producer.communicate()[0]) for producer in producers)
    assert made == steps * PLACES, made
    store.close()
    return steps * PLACES / taken


def fill(store: SqlStore, first: int, last: int, data: dict[str, bytes]) -> None:
    """Write groups of the steps `first` to `last` straight into the tables, as if they had been put and trained."""
    for start in range(first, last + 1, 64):
        batch = range(start, min(start + 64, last + 1))
        store._access.write_alone(partial(write_rows, steps=batch, data=data))


def write_rows(connection: sqlalchemy.Connection, steps: range, data: dict[str, bytes]) -> None:
    size, done = sum(map(len, data.values())), steps[-1] * PLACES
    groups = [{"run": "run", "step": step, "place": place} for step in steps for place in range(PLACES)]
    connection.execute(
        insert(tables.groups), [{**g, "ticket": "x" * 32, "num_bytes": size, "record": b""} for g in groups]
    )
    for model, packed in data.items():
        part = {"model": model, "num_samples": 1, "num_bytes": len(packed), "oldest": 3, "newest": 3, "data": packed}
        connection.execute(insert(tables.parts), [{**group, **part} for group in groups])
    counts = {"run": "run", "num_done": PLACES, "sampled": PLACES, "bytes": PLACES * size}
    totals = [{"step": s, "all_sampled": s * PLACES, "all_bytes": s * PLACES * size} for s in steps]
    connection.execute(insert(tables.steps), [{**counts, **total} for total in totals])
    sums = {"groups": done, "sampled": done, "bytes": done * size, "complete": steps[-1]}
    connection.execute(update(tables.runs).values(**sums, next_step=steps[-1] + 1, next_place=0))
    connection.execute(update(tables.models).values(head=steps[-1]))


def claimed(store: SqlStore) -> Task:
    """The next group to be made, of which there is one."""
    task = store.claim("worker", 600.0)
    assert task is not None
    return task


def cost_of_a_step(store: SqlStore, parts: dict[str, list[Sample]]) -> float:
    """Milliseconds that the store takes for a group: claim, put, and its share of taking and publishing the step."""
    start = time.perf_counter()
    for _ in range(PLACES):
        task = claimed(store)
        store.put(task, parts, b"record", 1)
    for model in MODELS:
        assert store.take(model, task.step) is not None
        publish(store, model, task.step)
    return 1000 * (time.perf_counter() - start) / PLACES


def flatness(make: Callable[[], str], sizes: list[int], num_steps: int) -> dict[str, float]:
    """Cost per group where so many rows (of 64 tokens, one per group and model) are stored already, in milliseconds.

    One database per size, measured in turn: what else the machine does meets all sizes alike.
    """
    parts = {model: [sample(model, 64, 1)] for model in MODELS}
    data = {model: encode_samples(model, samples, 2**20) for model, samples in parts.items()}
    stores = {size: SqlStore(make()) for size in sizes}
    for size, store in stores.items():
        begin(store, 10**7)
        fill(store, 1, max(1, size // (PLACES * len(MODELS))), data)
        settle(store)
        cost_of_a_step(store, parts)  # what is made once is made now
    costs = [{size: cost_of_a_step(store, parts) for size, store in stores.items()} for _ in range(num_steps)]
    for store in stores.values():
        store.close()
    medians = {f"{size}": statistics.median(cost[size] for cost in costs) for size in sizes}
    ratios = {
        f"{size} / {sizes[0]}": statistics.median(cost[size] / cost[sizes[0]] for cost in costs) for size in sizes
    }
    return {**medians, **dict(list(ratios.items())[1:])}


def settle(store: SqlStore) -> None:
    """Let the database finish what a large load leaves it to do, so that it is not counted as a group's cost."""
    engine = store._access._database.engine
    if engine.dialect.name == "postgresql":
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for statement in ("VACUUM ANALYZE", "CHECKPOINT"):
                connection.execute(sql(statement))
        return
    file = sqlite3.connect(engine.url.database or "")
    file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    file.close()


def long_rows(url: str, num_rows: int) -> dict[str, float]:
    """Rows of one 32k-token sample each: milliseconds to put a group of two, to take a row, and bytes per token."""
    begin(store := SqlStore(url), 10**6)
    parts = {model: [sample(model, 32_768, 2)] for model in MODELS}
    puts, takes = [], []
    for _ in range(max(1, num_rows // (PLACES * len(MODELS)))):
        for _ in range(PLACES):
            task = claimed(store)
            start = time.perf_counter()
            store.put(task, parts, b"record", 1)
            puts.append(time.perf_counter() - start)
        start = time.perf_counter()
        taken = store.take("main", task.step)
        takes.append((time.perf_counter() - start) / PLACES)
        assert taken is not None
        for model in MODELS:
            publish(store, model, task.step)
    num_bytes = store.ledger()[0]["num_bytes"]
    assert isinstance(num_bytes, int)
    store.close()
    medians = {"put_ms": 1000 * statistics.median(puts), "take_ms": 1000 * statistics.median(takes)}
    return {"rows": len(puts) * len(MODELS), **medians, "bytes_per_token": num_bytes / 32_768}


def wake_latency(url: str, repeats: int) -> dict[str, float]:
    """Milliseconds from a publication's commit to the claim that it lets through, in a thread that waited."""
    store, other = SqlStore(url), SqlStore(url)
    store.begin(Terms(run="run", config="", steps=10**6, places=1, max_lag={"main": 0}))
    store.lead("main", "trainer", 10_000.0)
    publish(store, "main", 0)
    claimed: list[float] = []
    ready = threading.Event()

    def claim() -> None:
        for _ in range(repeats + 1):
            while (task := other.claim("worker", 600.0)) is None:
                ready.set()
                assert other.wait(30.0)
            claimed.append(time.perf_counter())
            other.put(task, {"main": []}, b"", 0)

    thread = threading.Thread(target=claim)
    thread.start()
    taken = []
    for step in range(1, repeats + 1):
        while store.status().complete < step:
            store.wait(5.0)
        ready.wait(30.0)
        ready.clear()
        time.sleep(0.3 + 0.1 * random.random())  # long enough for a poll to be at its slowest
        publish(store, "main", step)
        committed = time.perf_counter()
        while len(claimed) <= step:
            time.sleep(0.0005)
        taken.append(1000 * (claimed[step] - committed))
    thread.join()
    store.close()
    other.close()
    return {"median_ms": statistics.median(taken), "max_ms": max(taken)}


@contextmanager
def places(given: str | None) -> Iterator[dict[str, Callable[[], str]]]:
    """What makes the URL of an empty database, for each of the two."""
    with tempfile.TemporaryDirectory() as folder:
        made = iter(range(10**6))
        found: dict[str, Callable[[], str]] = {"sqlite": lambda: f"sqlite:///{folder}/{next(made)}.sqlite"}
        if given:
            url = make_url(given).set(drivername="postgresql+psycopg")
            yield {**found, "postgres": Server(url.render_as_string(hide_password=False)).place}
            return
        try:
            with throw_away_postgres() as server:
                yield {**found, "postgres": server.place}
        except LookupError as error:
            print(f"without PostgreSQL: {error}")
            yield found


def measure(make: Callable[[], str], rows: int, quick: bool) -> dict[str, object]:
    steps = 4 if quick else 20
    producers = {n: throughput(make(), n, steps) for n in ((1, 2) if quick else (1, 2, 4, 8))}
    sizes = [size for size in (10**2, 10**4, 10**6) if size <= rows]
    return {
        "groups_per_s": producers,
        "ms_per_group_at_rows": flatness(make, sizes, 5 if quick else 30),
        "long_rows": long_rows(make(), 32 if quick else 1000),
        "wake": wake_latency(make(), 5 if quick else 20),
    }


def machine() -> dict[str, str]:
    versions = {"python": platform.python_version(), "sqlalchemy": sqlalchemy.__version__}
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    known = {"machine": platform.machine(), "cores": str(os.cpu_count()), "load at the start": load}
    return {**known, **versions, "sqlite": sqlite3.sqlite_version}


def show(name: str, figures: dict[str, object]) -> None:
    print(f"\n{name}")
    for title, values in figures.items():
        assert isinstance(values, dict)
        print(f"  {title:22}" + "   ".join(f"{key}: {value:.4g}" for key, value in values.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--postgres", help="URL of a database where schemas may be made")
    parser.add_argument("--rows", type=int, default=10**6, help="most rows stored while the cost per group is measured")
    parser.add_argument("--quick", action="store_true", help="few repeats, and at most 10^4 rows")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--produce", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.produce:
        print(produce(chosen.produce, 64))
        return
    about = machine()
    print("   ".join(f"{key} {value}" for key, value in about.items()))
    results: dict[str, object] = {"about": about}
    with places(chosen.postgres) as found:
        for name, make in found.items():
            results[name] = measure(make, min(chosen.rows, 10**4) if chosen.quick else chosen.rows, chosen.quick)
            show(name, results[name])  # type: ignore[arg-type]
    if chosen.out:
        chosen.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
