"""int8 weights: each way of keeping them against the same whole numbers in float64."""

import pytest
import torch

from minispec import int8
from minispec.int8 import (
    LONGEST,
    MANY,
    SMALLEST,
    Int8,
    Lines,
    Tiles,
    for_graphs,
    in_digits,
    multiplies_bytes,
    tiles,
)
from minispec.linear import Joined

needs_bytes = pytest.mark.skipif(not multiplies_bytes(), reason="no products of bytes here")
KINDS = ["lines", pytest.param("tiles", marks=needs_bytes)]


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    """All weights kept in one way."""
    monkeypatch.setattr(int8, "LARGE", 0 if request.param == "tiles" else 2**62)
    return {"lines": Lines, "tiles": Tiles}[request.param]


SIZES = [(48, 64), (7, 10), (300, 33), (1000, 70), (192, 1), (1, 5), (384, 9), (576, 6), (960, 5)]


@pytest.mark.parametrize("size", SIZES)
def test_products_are_those_of_the_nearest_multiples(size, kind):
    torch.manual_seed(sum(size))
    layer = torch.nn.Linear(*reversed(size), bias=size[0] % 2 == 0)
    weight, joined = layer.weight.detach().clone(), Joined(layer, quantize=True)
    assert isinstance(joined.packed.kept, kind)
    scale = weight.abs().amax(1, keepdim=True) / 127
    assert ((joined.dense() - weight).abs() <= 0.5001 * scale).all()
    assert torch.equal(joined.rows(torch.arange(size[0])), joined.dense())
    for wrong in ([-1], [0, size[0]]):
        with pytest.raises(IndexError):
            joined.rows(torch.tensor(wrong))
    for n in (0, 1, 2, 17, MANY, MANY + 1):
        x = torch.randn(1, n, size[1])
        expected = torch.nn.functional.linear(x, joined.dense(), joined.bias)
        torch.testing.assert_close(joined(x), expected)
    double, whole = x.double(), joined.dense().double()
    bias = None if joined.bias is None else joined.bias.double()
    wide = joined.packed.product(double, bias)
    torch.testing.assert_close(
        wide, torch.nn.functional.linear(double, whole, bias), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("out", [400, 384, 192, 64])
def test_each_row_gets_what_it_gets_alone(kind, out):
    """So a pass over a draft computes what passes over one token do, as far as its products go."""
    joined = Joined(torch.nn.Linear(64, out), quantize=True)
    x = torch.randn(1, 17, 64) * torch.logspace(-3, 3, 17)[:, None]
    whole = joined(x)
    for i in range(17):
        assert torch.equal(joined(x[:, i : i + 1]), whole[:, i : i + 1])
    apart = torch.randn(3, 64, 2)[..., 0]
    for strided in (apart, apart[:1], torch.randn(64, 9).t(), torch.randn(1, 1).expand(2, 64)):
        assert torch.equal(joined(strided), joined(strided.contiguous()))


@pytest.mark.parametrize(
    "out, threads, block",
    [(384, 1, 384), (384, 2, 192), (576, 2, 288), (960, 2, 240), (100, 8, 128), (130, 2, 96)],
)
def test_lines_are_long_but_leave_a_block_to_each_thread(out, threads, block, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert Lines(torch.ones(out, 3, dtype=torch.int8)).block == block


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_types(dtype, kind):
    layer = torch.nn.Linear(50, 200, dtype=dtype)
    weight, joined = layer.weight.detach().clone(), Joined(layer, quantize=True)
    assert joined.dense().dtype == joined.rows(torch.tensor([3])).dtype == dtype
    for n in (1, 5, MANY + 1):
        x = 9 * torch.randn(1, n, 50, dtype=dtype)
        expected = torch.nn.functional.linear(x, joined.dense(), joined.bias)
        most = 1e-13 if dtype == torch.float64 else 0.02
        assert (joined(x) - expected).abs().max() < most * expected.abs().max()
    assert (joined.dense() - weight).abs().max() < 0.01 * weight.abs().max()


def test_rows_of_all_magnitudes_have_their_own_scales(kind):
    """Nearly down to float32's end, and rows of zeros."""
    layer = torch.nn.Linear(70, 40, bias=False)
    layer.weight.data = torch.randn(40, 70) * torch.logspace(-35, 37, 40)[:, None]
    layer.weight.data[[5, 17]] = 0
    weight, joined = layer.weight.detach().clone(), Joined(layer, quantize=True)
    most = weight.abs().amax(1, keepdim=True)
    assert ((joined.dense() - weight).abs() <= most / 253).all()


@pytest.mark.parametrize("seed", range(30))
def test_three_digits_hold_24_bits_of_each_number(seed):
    """Rows of all magnitudes; the largest number of a row is where a digit would run over."""
    torch.manual_seed(seed)
    x = torch.randn(40, 1 + 7 * seed) * torch.logspace(-37, 38, 40)[:, None]
    x = x.clamp(-3e38, 3e38)
    x[3], x[4] = 0, x[4].abs().amax() * torch.randn_like(x[4]).sign()
    digits, counts = in_digits(x)
    assert digits.dtype == torch.uint8
    digits = digits.view(40, 3, -1).double() - 128
    held = (digits * counts.double()[..., None]).sum(1)
    most = x.abs().amax(1, keepdim=True).double().clamp(min=SMALLEST)
    off = (held - x).abs() / most * 2**23
    assert off.max() <= 1.5 and off.mean() < 0.4  # as rounded, not as cut off


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_no_number_is_made_of_what_is_none(number, kind):
    joined = Joined(torch.nn.Linear(20, 30, bias=False), quantize=True)
    x = torch.randn(3, 20)
    x[1, 7] = number
    finite = joined(x).isfinite()
    assert finite[[0, 2]].all() and not finite[1].any()


@needs_bytes
@pytest.mark.parametrize("seed", range(8))
def test_tiles_are_as_exact_as_products_of_floats(seed):
    """Against float64, beside float32's own products of the same numbers."""
    torch.manual_seed(seed)
    size = int(torch.randint(1, 500, ())), int(torch.randint(1, 3000, ()))
    whole = torch.randint(-127, 128, size, dtype=torch.int8)
    x = torch.randn(5, size[1]) * torch.randn(size[1]).exp()
    kept, expected = Tiles(prepacked(whole), size), x.double() @ whole.double().t()
    ours = (kept.product(x, torch.ones(size[0])) - expected).abs().max()
    assert ours <= 1e-6 * (x.double().abs() @ whole.double().abs().t()).max()
    assert torch.equal(kept.dense(), whole)


def prepacked(whole: torch.Tensor) -> torch.Tensor:
    return torch.ops.onednn.qlinear_prepack(whole, None)


@needs_bytes
def test_tiles_are_for_large_weights_of_a_known_layout(monkeypatch):
    large = torch.zeros(2048, 2048, dtype=torch.int8)
    assert tiles(large[1:]) is None
    assert tiles(large) is not None
    shifted = Tiles.rows
    monkeypatch.setattr(Tiles, "rows", lambda self, ids: shifted(self, ids) + 1)
    assert tiles(large) is None
    monkeypatch.undo()
    monkeypatch.setattr(int8, "multiplies_bytes", lambda: False)
    assert tiles(large) is None


def test_products_of_bytes_that_are_not_exact_are_none(monkeypatch):
    """Without VNNI the sum of two of them ends at 2^15, whatever the processor says of itself."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    for exact in True, False:
        pairs = 2 * 127 * 127 if exact else 255 * 127 * 2 - 2**15
        out = torch.full((3, 64), 128.0 * pairs)
        monkeypatch.setattr(int8, "of_bytes", lambda *inputs, out=out: out)
        assert multiplies_bytes.__wrapped__() == (exact and torch.backends.mkldnn.is_available())


@needs_bytes
def test_no_sum_of_bytes_leaves_32_bits(monkeypatch):
    monkeypatch.setattr(int8, "LARGE", 0)
    for inputs, kept in ((LONGEST, Tiles), (LONGEST + 9000, Lines)):
        joined = Joined(layer_of(torch.ones(2, inputs)), quantize=True)
        assert isinstance(joined.packed.kept, kept)
        for sign in -1, 1:
            y = joined(torch.full((1, inputs), float(sign)))
            assert (y / inputs - sign).abs().max() < 1e-3
        with for_graphs([joined.packed]):
            assert isinstance(joined.packed.kept, Lines) == (kept is Lines)


def layer_of(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(*reversed(weight.shape), bias=False)
    layer.weight.data = weight
    return layer


def test_graphs_are_made_of_the_same_numbers(kind, monkeypatch):
    """Here operator by operator; a slow test of compiled passes makes graphs."""
    weight = Int8(torch.randn(70, 33))
    monkeypatch.setattr(int8, "multiplies_bytes", lambda: False)
    with for_graphs([weight]):
        assert isinstance(weight.kept, kind)
    monkeypatch.setattr(int8, "multiplies_bytes", lambda: True)
    before, x, ids = weight.dense(), torch.randn(2, 5, 33), torch.tensor([[3, 69], [0, 3]])
    expected = weight.product(x, None)
    with for_graphs([weight]):
        assert not isinstance(weight.kept, kind)
        assert torch.equal(weight.dense(), before)
        assert weight.kept.whole.is_contiguous()  # others would be misread without a word
        assert torch.equal(weight.rows(ids), before[ids])
        torch.testing.assert_close(weight.product(x, None), expected)
    assert isinstance(weight.kept, kind)


def test_what_a_gpu_computes_is_the_same_model():
    """There the whole numbers lie as they are, and floats are made of them."""
    weight, x, ids = Int8(torch.randn(70, 33)), torch.randn(2, 5, 33), torch.tensor([[3, 69]])
    before, expected, rows = weight.dense(), weight.product(x, None), weight.rows(ids)
    weight.kept, weight.whole = None, weight.numbers()
    assert torch.equal(weight.dense(), before)
    assert torch.equal(weight.rows(ids), rows)
    torch.testing.assert_close(weight.product(x, None), expected)
