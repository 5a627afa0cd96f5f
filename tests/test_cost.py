"""Costs: measured once, and what noise cannot bend."""

from functools import partial

import pytest
from conftest import random_model

from minispec import cost


def test_the_cost_curve_never_falls_and_is_measured_once():
    model = random_model(context=48)
    curve = cost.cost_curve(model)
    assert len(curve) == 33 and curve[1] == 1.0 and curve == sorted(curve)
    assert cost.cost_curve(model) is curve


@pytest.mark.parametrize("turns, moment", [(3, 6), (5, 12)])
def test_a_noisy_moment_does_not_bend_what_is_timed_in_turn(turns, moment, monkeypatch):
    """Wherever so many calls in a row, all but a turn's, take ten times as long."""
    clock, calls = 0.0, 0
    monkeypatch.setattr(cost.time, "perf_counter", lambda: clock)

    def work(seconds: float):
        nonlocal clock, calls
        clock += seconds * (10 if noisy <= calls < noisy + moment else 1)
        calls += 1

    functions = [partial(work, n) for n in (1.0, 2.0, 4.0)]
    for noisy in range(3 * turns):
        clock, calls = 0.0, 0
        assert cost.least_in_turn(functions, turns) == [1.0, 2.0, 4.0]
        assert calls == 3 * turns
