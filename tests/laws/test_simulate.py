"""Schedules that can be worked out by hand, and what holds for every simulated run."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain.errors import ConfigError, StoreError
from cotrain.simulate import Setup, Times, simulate
from cotrain.store.memory import MemoryStore
from cotrain.store.sql import SqlStore

PLACES, GROUP_S, UPDATE_S = 3, 2.0, 5.0


def setup(**values) -> Setup:
    return Setup(**{"workers": 1, "models": 1, "places": PLACES, "steps": 12, "max_lag": 0, **values})


def fixed(group=GROUP_S, update=UPDATE_S, **values) -> Times:
    return Times(group=[group], update=[[update]], **values)


def periods(outcome) -> list[float]:
    return [after - before for before, after in zip(outcome.published, outcome.published[1:], strict=False)]


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_without_lag_a_step_is_its_groups_and_then_its_update(workers):
    outcome = simulate(setup(workers=workers, models=2), fixed())
    period = math.ceil(PLACES / workers) * GROUP_S + UPDATE_S
    assert periods(outcome) == [pytest.approx(period)] * 12
    assert outcome.wall_s == pytest.approx(12 * period)
    assert outcome.workers_busy() == pytest.approx(PLACES * GROUP_S / workers / period)
    assert outcome.trainers_busy() == pytest.approx(UPDATE_S / period)
    assert outcome.steps_per_hour() == pytest.approx(3600 / period)
    assert outcome.lags == {0: 12 * PLACES * 2}


@pytest.mark.parametrize("max_lag", [1, 2, 4])
@pytest.mark.parametrize("update", [1.0, 6.0, 9.0])
def test_with_lag_the_slower_side_sets_the_pace(max_lag, update):
    outcome = simulate(setup(max_lag=max_lag, steps=40), fixed(update=update))
    first, *later = periods(outcome)
    assert first == pytest.approx(PLACES * GROUP_S + update)
    assert later == [pytest.approx(max(PLACES * GROUP_S, update))] * 39
    span = outcome.middle
    assert outcome.trainers_busy(span) == pytest.approx(update / max(PLACES * GROUP_S, update))
    assert outcome.workers_busy(span) == pytest.approx(PLACES * GROUP_S / max(PLACES * GROUP_S, update))


def test_a_slow_trainer_is_as_far_behind_as_it_may_be():
    outcome = simulate(setup(max_lag=3, steps=20), fixed(update=60.0))
    assert max(outcome.lags) == 3
    assert outcome.max_backlog == 4 * PLACES
    assert outcome.published[1] == pytest.approx(PLACES * GROUP_S + 60.0)
    # Of the step that the trainer makes next and the three after it; a step's groups are made in its first 6 seconds.
    made = [0, 1, 2]
    waits = sum((3 * PLACES + n) * GROUP_S for n in made) + 4 * PLACES * (60.0 - PLACES * GROUP_S)
    assert outcome.backlog_mean(outcome.middle) == pytest.approx(waits / 60.0)


def test_the_slowest_model_sets_the_pace_for_all():
    times = Times(group=[GROUP_S], update=[[1.0], [4.0], [30.0]])
    for max_lag, period in ((0, PLACES * GROUP_S + 30.0), (2, 30.0)):
        outcome = simulate(setup(models=3, max_lag=max_lag), times)
        assert periods(outcome)[1:] == [pytest.approx(period)] * 11
        assert outcome.trainers_busy(outcome.middle) == pytest.approx((1.0 + 4.0 + 30.0) / 3 / period)


def test_what_happens_between_adds_to_a_step():
    outcome = simulate(setup(), fixed(between=[0.5], publish=[[0.25]], wake=[0.125]))
    # After the publication the worker wakes, after the last group the trainer.
    period = 0.125 + PLACES * (0.5 + GROUP_S) + 0.125 + UPDATE_S + 0.25
    assert periods(outcome)[1:] == [pytest.approx(period)] * 11
    assert outcome.workers_busy((outcome.published[1], outcome.published[-1])) == pytest.approx(6.0 / period)


def test_each_part_is_trained_once_and_everything_is_trained():
    stores = []

    def kept(clock):
        stores.append(MemoryStore(run="simulation", clock=clock))
        return stores[0]

    outcome = simulate(setup(workers=5, models=3, max_lag=2, keep_groups=True), fixed(), kept)
    rows = stores[0].ledger()
    assert len({(row["step"], row["place"], row["model"]) for row in rows}) == len(rows) == 12 * PLACES * 3
    assert all(row["trained_step"] == row["step"] for row in rows)
    assert outcome.lags.total() == len(rows)
    lags = [row["step"] - 1 - row["oldest"] for row in rows]
    assert outcome.lags == {lag: lags.count(lag) for lag in set(lags)}


seconds = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4)
setups = st.builds(
    Setup,
    workers=st.integers(1, 7),
    models=st.integers(1, 4),
    places=st.integers(1, 5),
    steps=st.integers(1, 8),
    max_lag=st.integers(0, 4),
    seed=st.integers(0, 99),
)
times = st.builds(Times, group=seconds, update=st.lists(seconds, min_size=1, max_size=2), between=seconds, wake=seconds)


@settings(max_examples=25)
@given(setups, times)
def test_what_holds_for_every_run(setup, times):
    outcome = simulate(setup, times)
    assert max(outcome.lags) <= setup.max_lag
    assert outcome.lags.total() == setup.steps * setup.places * setup.models
    assert outcome.max_backlog <= (setup.max_lag + 1) * setup.places
    assert len(outcome.groups) == setup.steps * setup.places
    assert len(outcome.updates) == setup.steps * setup.models
    assert outcome.published == sorted(outcome.published)
    worked = sum(end - start for start, end in outcome.groups) / (setup.workers * outcome.wall_s)
    updated = sum(end - start for start, end in outcome.updates) / (setup.models * outcome.wall_s)
    assert outcome.workers_busy() == pytest.approx(worked)
    assert outcome.trainers_busy() == pytest.approx(updated)
    assert max(worked, updated) <= 1.0 + 1e-9
    assert simulate(setup, times) == outcome


def test_the_store_of_a_database_gives_the_same_run():
    chosen, times = setup(workers=3, models=2, max_lag=1, steps=4), Times(group=[1.0, 2.5], update=[[2.0, 7.0]])

    def in_database(clock):
        return SqlStore("sqlite://", run="simulation", clock=clock)

    assert simulate(chosen, times) == simulate(chosen, times, in_database)
    assert simulate(Setup(**{**vars(chosen), "seed": 1}), times) != simulate(chosen, times)


def test_a_store_that_hands_out_nothing_is_reported():
    class Empty(MemoryStore):
        def claim(self, owner, lease_s):
            return None

    with pytest.raises(StoreError, match="everybody waits after step 0"):
        simulate(setup(), fixed(), lambda clock: Empty(run="simulation", clock=clock))


@pytest.mark.parametrize("values", [{"workers": 0}, {"models": 0}, {"places": 0}, {"steps": 0}, {"max_lag": -1}])
def test_what_cannot_be_simulated_is_refused(values):
    with pytest.raises(ConfigError, match="at least one of each"):
        setup(**values)
