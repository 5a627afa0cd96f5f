"""Costs: what is counted, what is measured once, and what noise cannot bend."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import random_model, random_tokens
from torch.utils.flop_counter import FlopCounterMode

from minispec import cost, linear
from minispec.compiled import Compiled


def test_the_cost_curve_never_falls_and_is_measured_once():
    model = random_model(context=48)
    curve = cost.cost_curve(model)
    assert len(curve) == 33 and curve[1] == 1.0 and curve == sorted(curve)
    assert cost.cost_curve(model) is curve


def test_graphs_that_fill_rows_up_cost_what_the_next_power_of_two_does(monkeypatch):
    model = random_model(context=20)
    monkeypatch.setattr(cost, "least_in_turn", lambda tasks: [2.0, 3.0, 5.0, 9.0, 12.0])
    assert cost.measured_curve(model)[:10] == [0, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 4.6875]
    for whole in True, False:
        model.compiled = Compiled(model, None, whole)
        curve = cost.measured_curve(model)
        assert curve[9] == (6 if whole else 4.6875) and curve[8] == 4.5 and len(curve) == 17


def test_what_is_known_is_known_of_one_way_to_run():
    """A pass in another type, in int8 or compiled costs something else."""
    model, measured = random_model(), []

    def known() -> int:
        return cost.once(model, "x", lambda: measured.append(None) or len(measured))

    ways = [known()]
    model.float()
    ways.append(known())
    model.prepare(quantize=True)
    ways.append(known())
    model.compiled = object()
    ways.append(known())
    model.compiled = None
    assert ways == [1, 2, 3, 4] and known() == 3 and len(measured) == 4
    assert cost.once(random_model(), "x", lambda: 9) == 9


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


def test_a_call_is_timed_behind_others_of_its_own(monkeypatch):
    """Each of the first two behind another's takes as long again."""
    clock, last, row = 0.0, None, 0
    monkeypatch.setattr(cost.time, "perf_counter", lambda: clock)
    monkeypatch.setattr(cost, "MOMENT", 11.0)

    def work(seconds: float):
        nonlocal clock, last, row
        row = row + 1 if last == seconds else 0
        clock, last = clock + seconds * (2 if row < 2 else 1), seconds

    functions = [partial(work, n) for n in (1.0, 2.0, 12.0, 2.5)]
    assert cost.least_in_turn(functions, turns=2) == [1.0, 2.0, 24.0, 2.5]  # 12 fills a moment


@pytest.mark.parametrize(
    "changes", [{}, {"tied": False}, {"qk_norm": True, "qkv_bias": True}, {"layers": 3}]
)
@pytest.mark.parametrize("n", [1, 5])
def test_a_row_s_products_are_those_that_torch_counts(n, changes):
    model = random_model(**changes)
    with FlopCounterMode(display=False) as counter:
        model.logits(model(random_tokens(n)))
    counts = counter.get_flop_counts()["Global"]
    counted = sum(flops for op, flops in counts.items() if "mm" in str(op) and "bmm" not in str(op))
    assert 2 * n * cost.products_per_row(model) == counted
    for quantize in False, True:
        packed = random_model(dtype=torch.float32, **changes).prepare(quantize)
        assert cost.products_per_row(packed) == cost.products_per_row(model)


@pytest.mark.parametrize("plain, packed", [(5.0, 2.0), (2.0, 5.0)])
def test_the_floors_are_times_of_the_whole_model(plain, packed, monkeypatch):
    """A copy of 2^20 bytes takes a second here, products of 64^3 two and five, passes three and
    four."""
    seconds = {"copy": 1.0, "plain": plain, "packed": packed}
    monkeypatch.setattr(cost, "one_copy", lambda device: "copy")
    monkeypatch.setattr(cost, "large_products", lambda device, dtype: ["plain", "packed"])
    monkeypatch.setattr(cost, "one_pass", lambda model, n: model)
    monkeypatch.setattr(
        cost, "least_in_turn", lambda tasks, turns: [seconds[each] for each in tasks]
    )
    model, other = random_model(), random_model(1)
    seconds |= {model: 3.0, other: 4.0}
    floor, row, passes = cost.floors_and_passes(model, other)
    assert floor == cost.bytes_per_pass(model) / 2**21 and passes == [3.0, 4.0]
    assert row == cost.products_per_row(model) * 2 / 64**3
    model.prepare(quantize=True)
    assert cost.floors_and_passes(model)[1] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_large_products_are_plain_and_where_there_is_such_packed(dtype, monkeypatch):
    monkeypatch.setitem(cost.SIDES, "cpu", 1024)
    square, cpu = torch.full((1024, 1024), 0.5, dtype=dtype), torch.device("cpu")
    products = cost.large_products(cpu, dtype)
    assert len(products) == 1 + linear.packable(square)
    assert [product() for product in products] == [256.0] * len(products)
    another = SimpleNamespace(product=lambda x, bias: torch.full_like(x, 2.0))
    for packed, values in ((None, [256.0]), (another, [256.0, 2.0])):
        monkeypatch.setattr(cost, "pack", lambda weight: packed)
        assert [product() for product in cost.large_products(cpu, dtype)] == values


def test_where_arithmetic_decides_is_said():
    """Reading takes 9 ms, a row 2 ms: five rows take longer."""
    text = cost.where_arithmetic_decides(9e-3, 2e-3, 12e-3, {2: 1.0, 16: 4.0})
    assert text == (
        "arithmetic takes 2.00 ms a row at the speed of a large product, from 5 rows on more than "
        "reading; over the larger of both: 2: 1.33, 16: 1.50"
    )
