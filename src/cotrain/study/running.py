"""Runs a study's jobs: each in a child process, what is finished left, what was begun gone on with.

A run that fails is named and the others go on. Several `cotrain study` may work on one study: a run's lock is held by
who trains it, and by the child itself, so that nothing is trained twice even where a harness was killed and left its
child behind. Everything about a run but the run itself lies in `jobs/` under its name: `.toml` (its configuration),
`.log` (what it said), `.usage.json` (an entry per attempt), `.lock`.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from cotrain.config import dump_config
from cotrain.interrupts import Stop
from cotrain.runs import last_train_row, write_text
from cotrain.study.plan import Job, Study
from cotrain.study.results import collapse_path, read_attempts, state_of, usage_path

TICK_S = 0.1
LOOK_S = 2.0
"""Seconds between looks at how far a run is."""
LAST_LINES = 12
PACKAGES = ("cotrain", "torch", "transformers", "numpy")

Show = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, how much there is)."""


@dataclass(kw_only=True)
class Summary:
    """How the jobs ended: which failed and with what last words, which others are at, and whether the user stopped."""

    failed: dict[str, str] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)
    is_broken_off: bool = False


def begin(study: Study) -> None:
    """Write down what counts as a collapse, unless that was done: what is defined after the runs proves nothing."""
    if not collapse_path(study).exists():
        write_text(collapse_path(study), f"{study.collapse}\n")


def run_jobs(jobs: Sequence[Job], stop: Stop, say: Callable[[str], None], show: Show) -> Summary:
    """Make every run that is not finished, one after the other."""
    summary = Summary()
    for number, job in enumerate(jobs, start=1):
        if stop.asked:
            summary.is_broken_off = True
            break
        place = f"{job} ({number} of {len(jobs)})"
        with _claimed(job) as lock:
            if lock is None:
                summary.elsewhere.append(str(job))
                say(f"{place}: another process is at it")
            elif state_of(job) == "finished":
                say(f"{place}: finished before")
            else:
                say(f"{place}: log in {_beside(job, 'log')}")
                code = _attempt(job, lock, stop, show)
                is_finished = state_of(job) == "finished"
                if stop.asked and not is_finished:
                    summary.is_broken_off = True
                elif not is_finished:
                    summary.failed[str(job)] = words = _last_words(job, code)
                    say(f"{place}: failed, {words}")
    return summary


def command_of(job: Job, resume: bool) -> list[str]:
    """The command line that makes a run."""
    arguments = ["train", str(_beside(job, "toml")), "--out", str(job.folder), *(["--resume"] if resume else [])]
    return [sys.executable, "-m", "cotrain.cli", *arguments]


def _beside(job: Job, kind: str) -> Path:
    return job.folder.parent / "jobs" / f"{job.name}.{kind}"


@contextmanager
def _claimed(job: Job) -> Iterator[TextIO | None]:
    """The run's lock, to hand on to the child, or None where another process has it."""
    path = _beside(job, "lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield None
        else:
            yield file


def _attempt(job: Job, lock: TextIO, stop: Stop, show: Show) -> int:
    """Train in a child until it ends, and write down what that took; its exit code (minus the signal's number)."""
    write_text(_beside(job, "toml"), dump_config(job.config))
    _sweep(job.folder)
    resume = (job.folder / "config.toml").exists()
    earlier, began = read_attempts(usage_path(job)), time.monotonic()
    this: dict[str, object] = {"started": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "resumed": resume, **_machine()}
    with _beside(job, "log").open("ab") as log:
        process = subprocess.Popen(
            command_of(job, resume),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,  # a terminal's Ctrl-C reaches it through us alone, once
            pass_fds=(lock.fileno(),),  # the lock is the child's as well, for as long as it lives
        )
    # Without an end, in case we do not see it: what that attempt took is then unknown.
    _write_attempts(job, [*earlier, {**this, "pid": process.pid}])
    code, seconds_cpu, peak_bytes = _wait(process, job, stop, show)
    this |= {"code": code, "wall_s": time.monotonic() - began, "cpu_s": seconds_cpu, "peak_bytes": peak_bytes}
    _write_attempts(job, [*earlier, this])
    return code


def _wait(process: subprocess.Popen[bytes], job: Job, stop: Stop, show: Show) -> tuple[int, float, int]:
    """(exit code, CPU seconds, peak bytes of memory); passes on the first Ctrl-C, and ends the child at the second.

    The system counts as the child's peak at least that of the process that started it: this one, which loads no model.
    """
    is_told, next_look = False, 0.0
    while True:
        try:
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if stop.asked and not is_told:
                os.kill(process.pid, signal.SIGINT)
                is_told = True
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + LOOK_S
                _show(job, show)
            time.sleep(TICK_S)
        except KeyboardInterrupt:
            os.kill(process.pid, signal.SIGKILL)
    process.returncode = os.waitstatus_to_exitcode(status)  # it was waited for here, not by subprocess
    peak_bytes = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return process.returncode, used.ru_utime + used.ru_stime, peak_bytes


def _show(job: Job, show: Show) -> None:
    """How much of its budget the run has spent."""
    row, loop = last_train_row(job.folder), job.config.loop
    if loop.max_sampled is not None:
        show(f"{job}, tokens", min(int(row.get("team/sampled") or 0), loop.max_sampled), loop.max_sampled)
    else:
        show(f"{job}, updates", int(row.get("step") or 0), max(1, loop.steps))


def _sweep(folder: Path) -> None:
    """Remove what a run left that was killed before it wrote its configuration: `cotrain train` would refuse it."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {".lock", "config.toml.partial"}:
        shutil.rmtree(folder)


def _last_words(job: Job, code: int) -> str:
    cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    log = _beside(job, "log")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join([f"{cause}; {log} ends:", *lines])


def _write_attempts(job: Job, attempts: Sequence[dict[str, object]]) -> None:
    write_text(usage_path(job), json.dumps({"attempts": attempts}, indent=1) + "\n")


def _machine() -> dict[str, object]:
    """Versions and machine, as far as they can be known without loading anything."""
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES}
    machine = {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "load": os.getloadavg()[0],
    }
    return {"versions": versions, "machine": machine}


def _processor() -> str:
    """The processor's name; Linux keeps it where `platform` does not look."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
