"""Costs: measured once, and what noise cannot bend."""

from functools import partial

import pytest
import torch
from conftest import random_model

from minispec import cost
from minispec.methods.vocabulary import Subset
from minispec.toys import random_heads


def test_the_cost_curve_never_falls_and_is_measured_once():
    model = random_model(context=48)
    curve = cost.cost_curve(model)
    assert len(curve) == 33 and curve[1] == 1.0 and curve == sorted(curve)
    assert cost.cost_curve(model) is curve


def test_what_heads_cost_is_measured_once_for_each_vocabulary():
    model = random_model(dtype=torch.float32)
    heads, words = random_heads(model, 0, shared=True), Subset(model.lm_head.weight, [1, 2])
    measured = []
    for vocabulary in (None, None, words, words, None):
        cost.memoised(model, heads, lambda: measured.append(vocabulary), vocabulary)
    assert measured == [None, words, None]


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
        assert cost.interleaved_min_times(functions, turns) == [1.0, 2.0, 4.0]
        assert calls == 3 * turns
