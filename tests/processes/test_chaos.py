"""A short version of benchmarks/chaos.py: few strikes, each at a moment where it could do harm."""

import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import chaos
from chaos_strikes import Strike, draw_strikes

SLOW = pytest.mark.slow


def blow(kind: str, name: str, moment: str, delay_s: float = 0.0) -> Strike:
    return Strike(kind=kind, name=name, moment=moment, delay_s=delay_s, pause_s=0.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return chaos.write_toy(tmp_path_factory.mktemp("chaos"))


@SLOW
def test_a_run_in_sqlite_survives_a_loss_of_power_and_equals_the_unbroken_one(config):
    outcome = chaos.Outcome(seed=0, store="sqlite", max_lag=0, keeps_groups=True)
    strikes = [blow("trainer", "trainer-first", "publication"), blow("power", "worker-1", "group", 0.1)]
    unbroken = chaos.run_unbroken(config)
    folder = chaos.run_struck(config, unbroken, outcome, strikes) / "run"
    assert outcome.problems == []
    assert outcome.kills == {"trainer": 1, "power": 1}
    name = Path("groups") / "step-000002.jsonl"
    (folder / name).write_text((folder / name).read_text().replace('"step": 2', '"step": 1'))
    assert chaos.differences(folder, unbroken.folder) == [f"{name}: not as in the unbroken run"]


@SLOW
def test_a_run_in_postgres_at_lag_2_survives_the_kill_of_the_server(config, monkeypatch):
    monkeypatch.setenv(chaos.ADDRESS, "")
    outcome = chaos.Outcome(seed=1, store="postgres", max_lag=2, keeps_groups=True)
    strikes = [blow("server", "worker-1", "group", 0.1), blow("worker", "worker-2", "group", 0.1)]
    with chaos.servers("auto") as server:
        if server is None:
            pytest.skip("PostgreSQL is not installed")
        chaos.run_struck(config, chaos.Unbroken(config.parent, 1.0), outcome, strikes, server)
    assert outcome.problems == []
    assert outcome.kills == {"server": 1, "worker": 1}


def test_strikes_are_drawn_by_the_seed_and_hit_everybody_at_every_moment():
    drawn = [draw_strikes(random.Random(seed), "power", 200) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert {strike.kind for strike in drawn[0]} == {"worker", "trainer", "evaluator", "power"}
    moments = {"start", "warm-up", "group", "publication", "checkpoint", "any"}
    assert {strike.moment for strike in drawn[0]} == moments
    assert "server" not in {strike.kind for strike in draw_strikes(random.Random(0), None, 200)}
