"""One machine's run: starts all processes of a configuration, shows how they are doing, starts again what dies.

A process that ends with an error is started again, at most `RESTARTS` times within `WINDOW_S` seconds; then the run
stops and says which process failed and what it said last. It works on the store like any other process: it can be
killed, and the run goes on with the next `cotrain up`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cotrain.assemble import trained_models
from cotrain.config import RunConfig
from cotrain.errors import TrainError
from cotrain.processes.command import SUPERVISOR
from cotrain.processes.joined import store_of
from cotrain.processes.table import look, status_line, status_table
from cotrain.store.base import Store

RESTARTS = 5
"""How often a process may be started again within the window."""
WINDOW_S = 600.0
"""The window, in seconds."""
TICK_S = 0.5
LAST_LINES = 20


@dataclass(kw_only=True)
class Child:
    """A process that is kept running until it ends well."""

    name: str
    arguments: Sequence[str]
    process: subprocess.Popen[str]
    started: deque[float] = field(default_factory=deque)
    said: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))


def supervise(folder: Path, config: RunConfig, workers: int, stopped: Callable[[], bool]) -> None:
    """Run everything until the run is over or the user stops it.

    Raises:
        TrainError: a process died too often; everything else was stopped first.
    """
    console = Console(stderr=True)
    store = store_of(config, folder)
    children = [_start(name, arguments, console) for name, arguments in _commands(folder, config, workers)]
    try:
        _keep_running(children, stopped, store, folder, console)
    finally:
        _stop_all(children)
        store.close()


def _commands(folder: Path, config: RunConfig, workers: int) -> list[tuple[str, list[str]]]:
    run = str(folder)
    named = [(f"trainer {name}", ["trainer", run, "--model", name]) for name in trained_models(config)]
    named += [(f"worker {i + 1}", ["worker", run]) for i in range(workers)]
    return [*named, ("evaluator", ["eval", run, "--watch"])]


def _start(name: str, arguments: Sequence[str], console: Console, before: Child | None = None) -> Child:
    """Start a process in a group of its own, so that a terminal's Ctrl-C reaches it through us alone, once."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cotrain.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
        env={**os.environ, SUPERVISOR: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
    )
    child = Child(name=name, arguments=arguments, process=process)
    if before is not None:
        child.started = before.started
    child.started.append(time.monotonic())
    threading.Thread(target=_relay, args=(child, console), daemon=True).start()
    return child


def _relay(child: Child, console: Console) -> None:
    """Print what a process says, with its name before it."""
    assert child.process.stdout is not None
    for line in child.process.stdout:
        child.said.append(line.rstrip("\n"))
        console.print(Text(f"{child.name:>12} | {line.rstrip()}"), soft_wrap=True)


def _keep_running(
    children: list[Child], stopped: Callable[[], bool], store: Store, folder: Path, console: Console
) -> None:
    with Live(console=console, refresh_per_second=2, transient=True) as live:
        next_line = time.monotonic() + 30.0
        while not stopped():
            for place, child in enumerate(children):
                code = child.process.poll()
                if code:
                    children[place] = _again(child, code, console, store)
            if all(child.process.poll() == 0 for child in children):
                return
            if console.is_terminal:
                live.update(status_table(look(store, folder)))
            elif time.monotonic() >= next_line:
                console.print(Text(status_line(look(store, folder))), soft_wrap=True)
                next_line += 30.0
            time.sleep(TICK_S)


def _again(child: Child, code: int, console: Console, store: Store) -> Child:
    """The process once more, unless it died too often."""
    now = time.monotonic()
    while child.started and child.started[0] < now - WINDOW_S:
        child.started.popleft()
    cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    if len(child.started) > RESTARTS:
        lines = "\n".join(child.said)
        found = f"{cause}, for the {len(child.started)}th time in {WINDOW_S / 60:.0f} minutes; it said last:\n{lines}"
        raise TrainError(f"process {child.name}", found, "Mend what failed, then `cotrain up` again; nothing is lost")
    store.tell("up", "restart", child=child.name, cause=cause)
    console.print(Text(f"{child.name:>12} | {cause}; starting it again", style="yellow"))
    return _start(child.name, child.arguments, console, child)


def _stop_all(children: Sequence[Child], patience_s: float = 60.0) -> None:
    """Ask everybody to end, and end those who do not; a second Ctrl-C ends them at once."""
    running = [child.process for child in children if child.process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGINT)
    until = time.monotonic() + patience_s
    try:
        for process in running:
            process.wait(max(0.1, until - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        for process in running:
            process.kill()
            process.wait()
