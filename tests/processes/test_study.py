"""A study runs its arms in processes of their own: killed, broken off or failed, it ends with all its runs."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from cotrain.cli import app
from cotrain.interrupts import Stop
from cotrain.runs import read_predictions
from cotrain.study import running
from cotrain.study.results import read_attempts, state_of, usage_path
from support_study import STUDY, fake_run, planned, written

LEAN = "import sys; from cotrain import train; train.try_report = lambda folder: None; "
LEAN += "from cotrain.cli import app; app(sys.argv[1:])"


def silent(*what):
    pass


def cotrain(*arguments):
    """The exit code of a command line."""
    with pytest.raises(SystemExit) as end:
        app([str(argument) for argument in arguments])
    return end.value.code or 0


def when(condition, action):
    """Act in a thread as soon as a condition holds."""

    def wait():
        until = time.monotonic() + 300
        while not condition() and time.monotonic() < until:
            time.sleep(0.01)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.fixture
def lean(monkeypatch):
    """Real runs, but for their reports, which take most of the time of runs this small."""
    whole = running.command_of
    command = lambda job, resume: [sys.executable, "-c", LEAN, *whole(job, resume)[3:]]  # noqa: E731
    monkeypatch.setattr(running, "command_of", command)


@pytest.fixture
def stand_in(monkeypatch):
    """Set the shell command that takes the place of a run; `made` is the folder of a finished one."""

    def use(command_of):
        monkeypatch.setattr(running, "command_of", lambda job, resume: ["sh", "-c", command_of(job)])

    return use


def made(job, folder):
    """A shell command that makes a run at once."""
    if not (folder / job.name).exists():
        fake_run(replace(job, folder=folder / job.name), [0.0, 0.5], [1.0, 0.5])
    return f"cp -r {folder / job.name} {job.folder}"


def attempts(job):
    return read_attempts(usage_path(job))


def test_a_study_whose_run_is_killed_makes_the_others_and_goes_on_with_it(tmp_path, capsys, lean):
    text = STUDY.replace("[0, 1]", "[1]")
    file = written(tmp_path, text)
    _, jobs = planned(tmp_path, text)
    killed, other = jobs["first-1"], jobs["second-1"]
    reached = killed.folder / "groups" / "step-000001.jsonl"
    killer = when(reached.exists, lambda: os.kill(attempts(killed)[0]["pid"], signal.SIGKILL))
    assert cotrain("study", file) == 1
    killer.join()
    printed = capsys.readouterr()
    assert "first, seed 1 (1 of 2): failed, killed by SIGKILL" in printed.err
    assert "- not finished: first, seed 1 (failed with code -9; see jobs/first-1.log)" in printed.out
    assert (state_of(killed), state_of(other)) == ("begun", "finished")

    assert cotrain("study", file) == 0
    printed = capsys.readouterr()
    assert "Finished: 2 of 2 runs." in printed.out
    assert "several attempts, so that wall time is their sum, with what was lost: first (seeds 1)" in printed.out
    assert "second, seed 1 (2 of 2): finished before" in printed.err
    assert [(a["resumed"], a["code"]) for a in attempts(killed)] == [(False, -9), (True, 0)]
    (usage,) = attempts(other)
    assert usage["peak_bytes"] > 100_000_000
    assert usage["cpu_s"] > 0
    assert usage["versions"].keys() >= {"python", "torch", "transformers", "cotrain"}
    assert usage["machine"]["cores"] == os.cpu_count()
    found = json.loads((tmp_path / "out" / "table.json").read_text(encoding="utf-8"))
    means = {row["arm"]: row["after"]["mean"] for row in found["scores"] if row["score"] == "reward"}
    for job in jobs.values():
        assert means[job.arm] == pytest.approx(fmean(p.reward for p in read_predictions(job.folder, 2, "dev")))
    assert (tmp_path / "out" / "figure.svg").exists()


def test_a_run_that_fails_is_named_with_its_last_words_and_tried_again_next_time(tmp_path, stand_in):
    _, jobs = planned(tmp_path)
    stand_in(lambda job: made(job, tmp_path) if job.arm == "first" else "echo no such thing >&2; exit 3")
    said = []
    summary = running.run_jobs(list(jobs.values()), Stop(), said.append, silent)
    assert list(summary.failed) == ["second, seed 0", "second, seed 1"]
    assert summary.failed["second, seed 0"].startswith("ended with code 3;")
    assert summary.failed["second, seed 0"].endswith("no such thing")
    assert [state_of(job) for job in jobs.values()] == ["finished", "missing", "finished", "missing"]
    stand_in(lambda job: made(job, tmp_path))
    assert running.run_jobs(list(jobs.values()), Stop(), said.append, silent) == running.Summary()
    assert [[a["code"] for a in attempts(job)] for job in jobs.values()] == [[0], [3, 0], [0], [3, 0]]
    assert said[-1] == "second, seed 1 (4 of 4): log in " + str(tmp_path / "out" / "jobs" / "second-1.log")


def test_ctrl_c_reaches_the_run_and_ends_the_study_after_it(tmp_path, stand_in):
    _, jobs = planned(tmp_path)
    stand_in(lambda job: f"trap 'exit 0' INT; touch {tmp_path}/ready; while :; do sleep 0.02; done")
    stop = Stop()
    asker = when((tmp_path / "ready").exists, lambda: setattr(stop, "asked", True))
    summary = running.run_jobs(list(jobs.values()), stop, silent, silent)
    asker.join()
    assert summary == running.Summary(is_broken_off=True)
    assert [a["code"] for a in attempts(jobs["first-0"])] == [0]
    assert attempts(jobs["second-0"]) == []


def test_a_second_ctrl_c_ends_a_run_that_does_not_listen(tmp_path, stand_in, monkeypatch):
    _, jobs = planned(tmp_path)
    stand_in(lambda job: f"trap '' INT; touch {tmp_path}/ready; while :; do sleep 0.02; done")
    monkeypatch.setattr(running, "LOOK_S", 0.0)
    stop, looks = Stop(), []

    def show(*what):
        looks.append(what)
        if (tmp_path / "ready").exists():
            if stop.asked:
                raise KeyboardInterrupt
            stop.asked = True

    assert running.run_jobs(list(jobs.values()), stop, silent, show) == running.Summary(is_broken_off=True)
    assert [a["code"] for a in attempts(jobs["first-0"])] == [-signal.SIGKILL]
    assert looks[0] == ("first, seed 0, updates", 0, 2)


def test_what_another_process_trains_is_left_to_it(tmp_path, stand_in):
    _, jobs = planned(tmp_path)
    stand_in(lambda job: made(job, tmp_path))
    with running._claimed(jobs["second-0"]):
        summary = running.run_jobs(list(jobs.values()), Stop(), silent, silent)
    assert summary == running.Summary(elsewhere=["second, seed 0"])
    assert [state_of(job) for job in jobs.values()] == ["finished", "missing", "finished", "finished"]


def test_a_run_whose_study_was_killed_keeps_its_lock(tmp_path):
    file = written(tmp_path, STUDY)
    _, jobs = planned(tmp_path)
    job = jobs["first-0"]
    code = (
        "import sys; from pathlib import Path; from cotrain.interrupts import Stop; from cotrain.study import running; "
        "from cotrain.study.plan import jobs_of, load_study; running.command_of = lambda job, resume: ['sleep', '60']; "
        "running.run_jobs(jobs_of(load_study(Path(sys.argv[1]))), Stop(), print, print)"
    )
    harness = subprocess.Popen([sys.executable, "-c", code, file], stdout=subprocess.DEVNULL)
    while not attempts(job):
        time.sleep(0.02)
    harness.kill()
    harness.wait()
    with running._claimed(job) as lock:
        assert lock is None
    (left,) = attempts(job)
    assert "code" not in left  # nobody saw it end
    os.kill(left["pid"], signal.SIGKILL)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with running._claimed(job) as lock:
            if lock is not None:
                break
        time.sleep(0.02)
    assert lock is not None


def test_peak_memory_and_time_are_the_childs_own(tmp_path, stand_in):
    _, jobs = planned(tmp_path)
    use = "import time; kept = bytearray(b'x') * (1 << 30); time.sleep(0.3)"
    stand_in(lambda job: f'exec {sys.executable} -S -c "{use}"')
    running.run_jobs([jobs["first-0"]], Stop(), silent, silent)
    (found,) = attempts(jobs["first-0"])
    assert 1 << 30 <= found["peak_bytes"] < 4 << 30
    assert found["wall_s"] > 0.3


def test_what_was_killed_before_it_began_is_begun_anew(tmp_path, stand_in):
    _, jobs = planned(tmp_path)
    job = jobs["first-0"]
    job.folder.mkdir(parents=True)
    (job.folder / ".lock").touch()
    stand_in(lambda job: f"test ! -e {job.folder} && {made(job, tmp_path)}")
    assert running.run_jobs([job], Stop(), silent, silent) == running.Summary()
    assert attempts(job)[0]["resumed"] is False
    other = jobs["second-0"]
    other.folder.mkdir()
    (other.folder / "notes.txt").touch()  # somebody else's: `cotrain train` will refuse it
    running.run_jobs([other], Stop(), silent, silent)
    assert (other.folder / "notes.txt").exists()


def test_the_command_line_chooses_what_is_run(tmp_path, capsys, stand_in):
    file = written(tmp_path)
    _, jobs = planned(tmp_path)
    stand_in(lambda job: made(job, tmp_path))
    assert cotrain("study", file, "--only", "second", "--seeds", 1) == 0
    assert [state_of(job) for job in jobs.values()] == ["missing", "missing", "missing", "finished"]
    assert (tmp_path / "out" / "jobs" / "collapse.txt").read_text().startswith("the final reward is below 0.5 x")
    assert "Finished: 1 of 4 runs." in capsys.readouterr().out
    assert cotrain("study", file, "--table") == 0
    assert "**" not in capsys.readouterr().out  # the definition is the one of the beginning
    assert attempts(jobs["first-0"]) == []
    assert cotrain("study", file, "--table", "--only", "second") == 2
    assert "nothing is run" in capsys.readouterr().err
    Path(file).write_text(file.read_text().replace("round_robin", "independent"))
    assert cotrain("study", file, "--table") == 2
    assert "it was made with sampling.strategy = 'round_robin'" in capsys.readouterr().err
