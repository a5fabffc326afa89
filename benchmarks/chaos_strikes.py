"""The strikes of chaos.py: who is killed at which moment, and how a store loses its power."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cotrain.processes.command import SUPERVISOR
from support_store import Server

MODELS = ("first", "second")
TICK_S, MEND_S = 0.002, 0.2
PATIENCE_S, YOUNG_S = 30.0, 1.0
"""How long to lie in wait for a moment, then any will do; how old a process may be to count as one that starts."""
OWN_DEATHS = 10
"""How often the processes of a run may end with an error before it is given up."""

MOMENTS = {
    "worker": ("start", "group", "group", "any"),
    "trainer": ("start", "warm-up", "publication", "publication", "checkpoint", "any"),
    "evaluator": ("start", "checkpoint", "any"),
    "power": ("any", "group", "publication"),
    "server": ("any", "group", "publication"),
}
LONGEST_S = {"start": 6.0, "warm-up": 1.0, "group": 1.0, "publication": 0.02, "checkpoint": 0.02, "any": 4.0}
"""A strike comes up to so many seconds after its moment, on a machine that makes the unbroken run in UNBROKEN_S."""
UNBROKEN_S = 20.0
WORKERS, TRAINERS = ("worker-1", "worker-2"), tuple(f"trainer-{name}" for name in MODELS)
WATCHED = {"worker": WORKERS, "trainer": TRAINERS, "evaluator": ("evaluator",), "power": WORKERS, "server": WORKERS}
"""Whose moment it can be, for each kind of strike."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """Whom to kill `delay_s` after which moment of `name`, and how long to wait before starting it again."""

    kind: str
    name: str
    moment: str
    delay_s: float
    pause_s: float


def draw_strikes(draw: random.Random, whole: str | None, count: int) -> list[Strike]:
    """As many strikes, the same for the same seed. `whole`: power, server, or None where there is neither."""
    weights = {"worker": 4, "trainer": 4, "evaluator": 2, **({whole: 2} if whole else {})}
    found = []
    for kind in draw.choices(list(weights), list(weights.values()), k=count):
        moment, name = draw.choice(MOMENTS[kind]), draw.choice(WATCHED[kind])
        delay_s, pause_s = draw.uniform(0, LONGEST_S[moment]), draw.choice((0.0, draw.uniform(0, 6.0)))
        found.append(Strike(kind=kind, name=name, moment=moment, delay_s=delay_s, pause_s=pause_s))
    return found


@dataclass
class Crew:
    """The processes of one run; whoever was killed is started again when its time has come.

    `pace`: how much slower this machine is than the one for which the strikes' seconds are meant.
    """

    folder: Path
    pace: float = 1.0
    server: Server | None = None
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)
    due: dict[str, float] = field(default_factory=dict)
    own_deaths: list[str] = field(default_factory=list)

    def commands(self) -> dict[str, list[str]]:
        run = str(self.folder)
        trainers = {f"trainer-{name}": ["trainer", run, "--model", name] for name in MODELS}
        workers = {f"worker-{i}": ["worker", run] for i in (1, 2)}
        return {**trainers, **workers, "evaluator": ["eval", run, "--watch"]}

    def log(self, name: str) -> Path:
        return self.folder.parent / f"{name}.log"

    def start(self, names: Sequence[str] = ()) -> None:
        for name in names or self.commands():
            self.running[name] = launch(self.commands()[name], self.log(name))
            self.started[name] = time.monotonic()
            self.due.pop(name, None)

    def kill(self, names: Sequence[str], pause_s: float) -> list[str]:
        """SIGKILL those who run; returns them."""
        struck = [name for name in names if name in self.running and self.running[name].poll() is None]
        for name in struck:
            self.running[name].send_signal(signal.SIGKILL)
        for name in struck:
            self.running[name].wait()
            self.due[name] = time.monotonic() + self.pace * pause_s
        return struck

    def mend(self) -> bool:
        """Start again who is due; whether anybody is still to end well."""
        for name, process in self.running.items():
            if process.poll() not in (None, 0) and name not in self.due:
                self.own_deaths.append(f"{name} ended with code {process.returncode}: {last_line(self.log(name))}")
                self.due[name] = time.monotonic()
        self.start_due()
        return any(process.poll() != 0 for process in self.running.values()) and len(self.own_deaths) <= OWN_DEATHS

    def start_due(self) -> None:
        now = time.monotonic()
        if names := [name for name, when in self.due.items() if when <= now]:
            self.start(names)

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


def launch(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A process of cotrain that adds what it says to a log, and stops when this benchmark is gone."""
    more = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", SUPERVISOR: str(os.getpid())}
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "cotrain.cli", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
            env={**os.environ, **more},
        )


def call(arguments: Sequence[str], log: Path) -> None:
    """Run a command of cotrain to its end."""
    if code := launch(arguments, log).wait():
        raise SystemExit(f"cotrain {arguments[0]} ended with code {code}:\n{log.read_text(errors='replace')}")


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def strike(crew: Crew, blow: Strike) -> list[tuple[str, str]]:
    """Wait for the moment and kill; returns who was killed at which moment, nothing where the run was over before."""
    found = []
    if blow.moment == "start" and time.monotonic() - crew.started[blow.name] > YOUNG_S * crew.pace:
        if blow.name not in crew.due and crew.kill([blow.name], 0.0):
            found.append((blow.kind, "any"))
        crew.start_due()
    moment = _await_moment(crew, blow)
    _sleep(crew, crew.pace * blow.delay_s)
    if blow.kind == "power":
        struck = crew.kill(list(crew.running), blow.pause_s)
        lose_power(crew.folder, random.Random(blow.delay_s))
    elif blow.kind == "server":
        assert crew.server is not None
        struck = [name for name, process in crew.running.items() if process.poll() is None]
        kill_server(crew.server)
        _sleep(crew, blow.pause_s / 2)
        start_server(crew.server)
    else:
        struck = crew.kill([blow.name], blow.pause_s)
    return [*found, (blow.kind, moment)] if struck else found


def _await_moment(crew: Crew, blow: Strike) -> str:
    """Sleep until it is the moment, or there was none for too long; returns which it was."""
    log, since_s = crew.log(blow.name), time.time()
    size, until, next_mend = log.stat().st_size if log.exists() else 0, time.monotonic() + PATIENCE_S * crew.pace, 0.0
    while not _has_come(crew, blow, size, since_s):
        now = time.monotonic()
        is_past = blow.moment == "warm-up" and any((crew.folder / "weights" / _model(blow.name)).glob("step-*"))
        if now > until or is_past or crew.running[blow.name].poll() == 0:
            return "any"
        if now > next_mend:
            next_mend = now + MEND_S
            crew.mend()
        time.sleep(TICK_S)
    return blow.moment


def _model(name: str) -> str:
    return name.removeprefix("trainer-")


def _has_come(crew: Crew, blow: Strike, size: int, since_s: float) -> bool:
    """Whether it is the moment of a strike; `size` is that of the log when the waiting began, at `since_s`."""
    if blow.name in crew.due:
        return False
    said = {"warm-up": b"warm-up step", "group": b", group "}.get(blow.moment)
    if said is not None:
        with crew.log(blow.name).open("rb") as file:
            file.seek(size)
            return said in file.read()
    models = [_model(blow.name)] if blow.name in TRAINERS else MODELS
    if blow.moment == "publication":
        return _is_being_written((crew.folder / "weights" / name for name in models), since_s)
    if blow.moment == "checkpoint":
        ours = crew.folder / "trainers" / models[0] if blow.name in TRAINERS else crew.folder / "checkpoints"
        return _is_being_written([ours], since_s)
    return True


def _is_being_written(folders: Iterable[Path], since_s: float) -> bool:
    """Whether one holds a hidden folder that was not left there before by somebody who was killed."""
    try:
        return any(path.stat().st_mtime >= since_s for folder in folders for path in folder.glob(".*"))
    except FileNotFoundError:  # it was there a moment ago
        return True


def _sleep(crew: Crew, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        crew.start_due()
        time.sleep(min(left_s, MEND_S))


def lose_power(folder: Path, draw: random.Random) -> None:
    """Have the store go on as a copy of what is on the disk; all processes are dead. A torn write may end the WAL."""
    aside = folder.parent / "aside"
    aside.mkdir(exist_ok=True)
    files = [folder / f"store.sqlite{suffix}" for suffix in ("", "-wal")]
    kept = [Path(shutil.copy2(path, aside)) for path in files if path.exists()]
    for path in [*files, folder / "store.sqlite-shm"]:
        path.unlink(missing_ok=True)
    for path in kept:
        shutil.move(path, folder / path.name)
    if len(kept) == 2 and draw.random() < 0.5:
        with files[1].open("ab") as file:
            file.write(draw.randbytes(draw.randrange(1, 9000)))


def kill_server(server: Server) -> None:
    """SIGKILL the postmaster, then all that it started."""
    assert server.folder is not None
    head = int((server.folder / "data" / "postmaster.pid").read_text().split("\n")[0])
    children = _children(head)
    for pid in (head, *children):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # a session that ended meanwhile
    until = time.monotonic() + 30.0
    while any(_is_alive(pid) for pid in (head, *children)):
        assert time.monotonic() < until, "the server's processes do not die"
        time.sleep(0.01)


def start_server(server: Server) -> None:
    """Start it again; a session that was born while it was killed can hold its memory for a moment."""
    for left in reversed(range(10)):
        try:
            server.start()
        except AssertionError:
            if not left:
                raise
            time.sleep(1.0)
        else:
            return


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
