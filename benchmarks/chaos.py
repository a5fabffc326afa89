"""Kill the processes of decoupled runs, and their store, at random moments; prove that nothing was lost or done twice.

Every run is a two-agent toy of two tiny models: 2 workers, 2 trainers, 1 evaluator. SIGKILL strikes them while they
start, warm up, make groups, publish, write checkpoints, or whenever. A run in SQLite is also struck by a loss of power:
all processes at once, and the store goes on as a copy of its file and its WAL, sometimes with a torn write at the end.
A run in PostgreSQL is also struck by SIGKILL of the whole server. After each run `cotrain.store.audit` checks the
store's records. At lag 0 the run folder must equal that of an unbroken run in one process, bit for bit; at other lags
the trainers make all of their steps again from the store, to the weights that were published.

    python benchmarks/chaos.py --kills 300 --seed 0
    python benchmarks/chaos.py --kills 1 --seed 17      # run 17 of the above again
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")])

from chaos_strikes import MEND_S, MODELS, UNBROKEN_S, Crew, Strike, call, draw_strikes, last_line, launch, strike

from cotrain.config import load_config
from cotrain.processes.joined import store_of
from cotrain.store.audit import audit
from cotrain.store.base import Store
from support_processes import differences
from support_store import Server, throw_away_postgres

STEPS = 5
TOY = Path(__file__).parents[1] / "tests" / "toy.py"
CONFIG = f"""
[models.first]
path = "tiny-llama"
optimizer = {{ lr = 3e-3 }}
[models.second]
path = "tiny-qwen3"
lora = {{ rank = 4 }}
optimizer = {{ lr = 3e-3 }}
[system]
name = "{TOY}:two_models"
[rewards]
metric = "{TOY}:vowels"
[data.train]
split = "train"
[data.eval.dev]
split = "dev"
limit = 4
[sampling]
strategy = "round_robin"
questions_per_step = 2
[loop]
steps = {STEPS}
checkpoint_every = 2
[warmup]
steps = 2
checkpoint_every = 1
[eval]
every = 2
bootstrap = 100
[store]
lease_s = 4.0
"""
ADDRESS = "COTRAIN_CHAOS_STORE"
LIMIT_S = 600.0
"""How long a run may take after its last strike, on the same machine."""


@dataclass(kw_only=True)
class Outcome:
    """A run that was struck: what hit it, and what is wrong with it. `own_deaths`: ends that nobody asked for."""

    seed: int
    store: str
    max_lag: int
    keeps_groups: bool
    kills: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    own_deaths: Sequence[str] = ()
    problems: Sequence[str] = ()
    seconds: float = 0.0


def write_toy(folder: Path) -> Path:
    """The configuration of the run."""
    path = folder / "run.toml"
    path.write_text(CONFIG)
    return path


@dataclass(frozen=True)
class Unbroken:
    """The same run in one process: its folder, and how much slower than usual it was made."""

    folder: Path
    pace: float


def run_unbroken(config: Path) -> Unbroken:
    """Make it in batches as workers make them."""
    folder, began = config.parent / "unbroken", time.monotonic()
    call(["train", str(config), "--out", str(folder), "--set", "engine.batching=group"], config.parent / "unbroken.log")
    return Unbroken(folder, max(1.0, (time.monotonic() - began) / UNBROKEN_S))


def run_struck(
    config: Path, unbroken: Unbroken, outcome: Outcome, strikes: Sequence[Strike], server: Server | None = None
) -> Path:
    """One run to its end, struck on the way; fills in the outcome and returns the folder of the run and its logs."""
    home = config.parent / f"run-{outcome.seed}-{outcome.store}-{outcome.max_lag}"
    folder, began = home / "run", time.monotonic()
    home.mkdir()
    chosen = [f"store.max_lag={outcome.max_lag}", f"store.keep_groups={str(outcome.keeps_groups).lower()}"]
    if server is not None:
        os.environ[ADDRESS] = server.place()
        chosen.append(f"store.url=env:{ADDRESS}")
    settings = [word for setting in chosen for word in ("--set", setting)]
    call(["begin", str(config), "--out", str(folder), *settings], home / "begin.log")
    crew = Crew(folder=folder, pace=unbroken.pace, server=server)
    try:
        crew.start()
        for blow in strikes:
            hits = strike(crew, blow)
            outcome.kills.update(kind for kind, _ in hits)
            outcome.moments.update(moment for _, moment in hits)
        until = time.monotonic() + LIMIT_S * unbroken.pace
        while crew.mend() and time.monotonic() < until:
            time.sleep(MEND_S)
    finally:
        crew.end()
    outcome.own_deaths = crew.own_deaths
    ends = {name: process.returncode for name, process in crew.running.items() if process.returncode}
    outcome.problems = [f"{name} did not end well: {last_line(crew.log(name))}" for name in ends]
    if server is None:  # only a server that is away excuses a process that gives up
        outcome.problems += [death for death in crew.own_deaths if death not in outcome.problems]
    outcome.problems = [*outcome.problems, *check(folder, unbroken.folder, outcome)]
    outcome.seconds = round(time.monotonic() - began, 1)
    if outcome.problems:
        (home / "outcome.json").write_text(json.dumps(vars(outcome), indent=1))
    return home


def check(folder: Path, unbroken: Path, outcome: Outcome) -> list[str]:
    """What is wrong with a run that ended; what the store holds is written beside it, to look at later."""
    config = load_config(folder / "config.toml")
    store = store_of(config, folder)
    try:
        problems = _records(store, folder)
        if not problems and outcome.max_lag == 0:
            problems = differences(folder, unbroken)
        elif not problems:
            problems = train_again(folder) or audit(store)
    finally:
        store.close()
    return problems


def _records(store: Store, folder: Path) -> list[str]:
    """What is wrong with the store."""
    status, events = store.status(), [asdict(event) for _, event in store.events()]
    kept = {"status": asdict(status), "ledger": [dict(row) for row in store.ledger()], "events": events}
    (folder.parent / "store.json").write_text(json.dumps(kept, indent=1))
    problems = audit(store)
    if set(status.heads.values()) != {STEPS} or status.written != STEPS:
        problems.append(f"the run ended at steps {dict(status.heads)}, written {status.written}, not at {STEPS}")
    if (file := folder / "store.sqlite").exists():
        connection = sqlite3.connect(file)
        found = connection.execute("PRAGMA integrity_check").fetchall()
        connection.close()
        problems += [] if found == [("ok",)] else [f"{file.name}: {found}"[:300]]
    return problems


def train_again(folder: Path) -> list[str]:
    """Have both trainers make all steps from the store once more; a step with other weights becomes an event."""
    for model in MODELS:
        shutil.rmtree(folder / "trainers" / model)
    logs = {name: folder.parent / f"{name}-again.log" for name in MODELS}
    found = {name: launch(["trainer", str(folder), "--model", name], log) for name, log in logs.items()}
    return [f"trainer of {name}, again: {last_line(logs[name])}" for name, process in found.items() if process.wait()]


@contextmanager
def servers(wanted: str) -> Iterator[Server | None]:
    """The PostgreSQL server to use: a throw-away one, the named one, or none."""
    if wanted == "auto":
        try:
            with throw_away_postgres() as server:
                yield server
            return
        except LookupError as error:
            print(f"SQLite only: {error}")
    if wanted in ("auto", "none"):
        yield None
        return
    server = Server(wanted)
    yield server
    for name in server.schemas:
        server.do(f"DROP SCHEMA {name} CASCADE")


def choose(
    seed: int, stores: Sequence[str], lags: Sequence[int], server: Server | None
) -> tuple[Outcome, list[Strike]]:
    """What the run of a seed is, and what strikes it."""
    pairs, draw = list(product(stores, lags)), random.Random(seed)
    store, lag = pairs[seed % len(pairs)]
    strikes_everything = {"sqlite": "power", "postgres": "server" if server and server.folder else None}
    strikes = draw_strikes(draw, strikes_everything[store], draw.randint(8, 14))
    keeps = lag > 0 or draw.random() < 0.75  # what trainers make again must be there
    return Outcome(seed=seed, store=store, max_lag=lag, keeps_groups=keeps), strikes


def show(outcome: Outcome, again: str) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.kills.items()))
    result = f"{len(outcome.problems)} PROBLEMS" if outcome.problems else "sound"
    kept = "" if outcome.keeps_groups else ", pruned"
    print(f"seed {outcome.seed}: {outcome.store}, max_lag {outcome.max_lag}{kept}: killed {kinds or 'nobody'} ", end="")
    print(f"in {outcome.seconds:.0f} s: {result}", flush=True)
    for death in outcome.own_deaths:
        print(f"  gave up: {death}")
    for problem in outcome.problems:
        print(f"  {problem}")
    if outcome.problems:
        print(f"  again: {again}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300, help="runs follow each other until as many were struck")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run; the next ones count up from it")
    parser.add_argument("--postgres", default="auto", help="URL of a server where schemas may be made, auto or none")
    parser.add_argument("--max-lag", type=int, nargs="+", default=[0, 2], help="the lags that runs take in turn")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # as Ctrl-C: the server and the processes end
    home, outcomes = Path(tempfile.mkdtemp(prefix="cotrain-chaos-")), list[Outcome]()
    with servers(chosen.postgres) as server:
        stores = ["sqlite", *(["postgres"] if server else [])]
        words = f"--postgres {chosen.postgres if chosen.postgres in ('auto', 'none') else 'URL'}"
        words += f" --max-lag {' '.join(map(str, chosen.max_lag))}"
        config = write_toy(home)
        unbroken = run_unbroken(config)
        while sum(outcome.kills.total() for outcome in outcomes) < chosen.kills:
            outcome, strikes = choose(chosen.seed + len(outcomes), stores, chosen.max_lag, server)
            used = server if outcome.store == "postgres" else None
            folder = run_struck(config, unbroken, outcome, strikes, used)
            outcomes.append(outcome)
            show(outcome, f"python benchmarks/chaos.py --kills 1 --seed {outcome.seed} {words}; kept: {folder}")
            if not outcome.problems:
                shutil.rmtree(folder)
    kills = sum((outcome.kills for outcome in outcomes), Counter[str]())
    moments = sum((outcome.moments for outcome in outcomes), Counter[str]())
    bad = [outcome.seed for outcome in outcomes if outcome.problems]
    results = {"seed": chosen.seed, "kills": kills, "total": kills.total(), "moments": moments, "bad_seeds": bad}
    text = json.dumps({**results, "runs": [vars(outcome) for outcome in outcomes]}, indent=1)
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n")
    if bad:
        raise SystemExit(1)
    shutil.rmtree(home)


if __name__ == "__main__":
    main()
