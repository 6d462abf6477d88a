"""The goodput benchmark: its model against closed forms, and the figures that it computes from a run's notes."""

import random
from math import exp

import pytest

from benchmarks.goodput import outcome_of
from benchmarks.goodput_model import WAYS, Constants, ettr, mean_lost
from benchmarks.goodput_notes import EVENTS, KINDS, KINDS_OF_NODES, plan_of


def constants(**changed: float) -> Constants:
    """A run whose snapshots are published at once, and whose failures hit a tenth of the steps."""
    values = {"step": 300.0, "restart": 60.0, "rate": 0.1, "generation": 0.0, "journaled": 0.0}
    return Constants(**values | {"publish": 0.0, "stall": 0.0, "save_every": 20} | changed)


def mean(run: Constants, way: str) -> float:
    return sum(ettr(run, way, seed) for seed in range(8)) / 8


def test_a_failure_costs_the_restart_and_half_a_step():
    # A share of the time r (R + T/2) / T is lost: 0.1 (60 + 150) / 300. Failures in a step make the loss a bit smaller.
    assert mean(constants(), "snapshots") == pytest.approx(1 - 0.1 * 210 / 300, abs=0.004)


def test_the_journal_saves_a_finished_generation():
    # With the share g of generation a failure costs T (g g / 2 + (1 - g) (1 - g) / 2).
    lost = 300 * (0.7**2 + 0.3**2) / 2
    assert mean(constants(generation=0.7), "snapshots and journal") == pytest.approx(
        1 - 0.1 * (60 + lost) / 300, abs=0.004
    )
    assert mean_lost(constants(generation=0.7), "snapshots and journal") == pytest.approx(lost, rel=0.1)


def test_saves_every_n_steps_need_n_steps_without_a_failure():
    # The expected time until a Poisson process of rate r leaves a gap of length L is (exp(r L) - 1) / r.
    expected = 20 / ((exp(0.1 * 20) - 1) / 0.1)
    assert mean(constants(restart=0.0), "saves") == pytest.approx(expected, rel=0.06)


def test_ways_are_ordered_and_equal_without_failures():
    figures = [ettr(constants(generation=0.7), way) for way in WAYS]
    assert figures == sorted(figures, reverse=True)
    assert [ettr(constants(rate=1e-9), way) for way in WAYS] == pytest.approx([1.0] * len(WAYS))
    assert ettr(constants(rate=1e-9, stall=0.25), "snapshots") == pytest.approx(0.8)


def test_a_snapshot_that_is_not_published_costs_the_step_before():
    assert ettr(constants(publish=300.0), "snapshots") < ettr(constants(), "snapshots") - 0.05


def test_lost_time_lasts_until_the_run_is_where_it_was():
    def notes(pid: int, *events: tuple[float, int, str]) -> list[dict]:
        return [{"time": time, "pid": pid, "step": step, "event": event} for time, step, event in events]

    begin, middle, _, _, end = EVENTS
    run = notes(1, (0, 1, begin), (1, 1, middle), (2, 1, end), (3, 2, begin), (4, 2, middle))
    run += [{"time": 4.5, "kind": "rank"}]
    run += notes(2, (10, 2, begin), (11, 2, middle), (12, 2, end))
    run += [{"time": 12.1, "kind": "supervisor"}]  # after the last event of a step whose snapshot is published
    run += notes(3, (20, 3, begin), (21, 3, end))
    outcome = outcome_of(run, 3)
    assert dict(outcome.lost) == {"rank": [7], "supervisor": [8]}
    assert (outcome.seconds, outcome.repeated, outcome.failures) == (21, 1, 2)


def test_a_cut_of_the_network_lasts_until_the_first_event_after_it():
    begin, end = EVENTS[0], EVENTS[-1]
    run = [{"time": time, "pid": 1, "step": step, "event": event} for time, step, event in ((0, 1, begin), (2, 1, end))]
    run += [{"time": 7, "kind": "network", "begun": 1.5}]
    run += [{"time": time, "pid": 1, "step": 2, "event": event} for time, event in ((7.5, begin), (9, end))]
    outcome = outcome_of(run, 2)
    assert dict(outcome.lost) == {"network": [6]}
    assert (outcome.repeated, outcome.failures) == (0, 1)


@pytest.mark.parametrize("kinds", [KINDS, KINDS_OF_NODES])
def test_failures_are_of_all_kinds_and_inside_the_run(kinds):
    for seed in range(20):
        failures = plan_of(100, 10, 20, 1.0, random.Random(seed), kinds)
        assert {failure.kind for failure in failures} == set(kinds)
        assert all(1 < failure.step < 100 for failure in failures)
        saves = [failure.step for failure in failures if failure.kind == "storage"]
        assert len(set(saves)) == len(saves)
        assert all(step % 20 == 0 for step in saves)
