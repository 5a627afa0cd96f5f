"""Costs are measured once, and noise does not distort them."""

from functools import partial

import pytest
import torch
from conftest import AUTO, DECLARED, method_options, random_model

from minispec.cache import KVCache
from minispec.certify.toys import random_medusa_heads
from minispec.fast import cost
from minispec.generate import stream
from minispec.methods.vocabulary import Subset


def test_the_cost_curve_never_falls_and_is_measured_once():
    model = random_model(context=48)
    curve = cost.cost_curve(model)
    assert len(curve) == 33 and curve[1] == 1.0 and curve == sorted(curve)
    assert cost.cost_curve(model) is curve


def test_the_cost_of_heads_is_measured_again_when_the_vocabulary_changes():
    model = random_model(dtype=torch.float32)
    heads, subset = random_medusa_heads(model, 0, shared=True), Subset(model.lm_head.weight, [1, 2])
    measured = []
    for vocabulary in (None, None, subset, subset, None):
        cost.memoised(model, heads, lambda: measured.append(vocabulary), vocabulary)
    assert measured == [None, subset, None]


@pytest.mark.parametrize("rows", [200, 1536])
@pytest.mark.parametrize("method, name", [x for x in AUTO if DECLARED[x[0]].of_kind("weights")])
def test_costs_are_measured_with_the_capacity_of_decoding(method, name, rows, monkeypatch):
    """That of a short text. On a GPU, another capacity would need graphs of its own."""
    model, new_cache, capacities = random_model(context=rows), KVCache.__init__, set()

    def remember(cache, layers, heads, head_dim, capacity, *rest):
        capacities.add(capacity)
        new_cache(cache, layers, heads, head_dim, capacity, *rest)

    monkeypatch.setattr(KVCache, "__init__", remember)
    options = method_options(model)[method] | {name: "auto"}
    if "draft" in options:
        options["draft"] = random_model(1, context=rows)
    next(iter(stream(model, None, [1, 2], method, **options)))
    assert capacities == {min(rows, 1024)}


@pytest.mark.parametrize("turns, burst", [(3, 6), (5, 12)])
def test_a_burst_of_noise_does_not_distort_interleaved_times(turns, burst, monkeypatch):
    """All calls but one turn's are ten times slower, wherever this burst begins."""
    clock, calls = 0.0, 0
    monkeypatch.setattr(cost.time, "perf_counter", lambda: clock)

    def work(seconds: float):
        nonlocal clock, calls
        clock += seconds * (10 if start <= calls < start + burst else 1)
        calls += 1

    functions = [partial(work, n) for n in (1.0, 2.0, 4.0)]
    for start in range(3 * turns):
        clock, calls = 0.0, 0
        assert cost.interleaved_min_times(functions, turns) == [1.0, 2.0, 4.0]
        assert calls == 3 * turns
