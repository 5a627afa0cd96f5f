"""Packed and int8 products against plain ones."""

import pytest
import torch

from minispec.linear import Joined, packable, product_int8, quantized


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(2112, 64), (3000, 70), (1337, 193), (131, 1024)])
def test_packed_memory_is_read_where_each_number_lies(size, dtype):
    layer = torch.nn.Linear(*reversed(size), dtype=dtype)
    weight, x = layer.weight.detach().clone(), torch.randn(1, 1, size[1], dtype=dtype)
    fits, expected, joined = packable(weight), layer(x).detach(), Joined(layer)
    assert (joined.packed is not None) == fits
    assert torch.equal(joined.rows(torch.arange(size[0])), weight)
    assert torch.equal(joined.dense(), weight)
    for out in (joined(x), joined(x.expand(1, 3, -1))[:, 1:2], joined(x.mT.contiguous().mT)):
        torch.testing.assert_close(out, expected)
    assert joined(x[:, :0]).shape == (1, 0, size[0])
    for wrong in ([-1], [0, size[0]]):  # behind the last row of the packed memory lie zeros
        with pytest.raises(IndexError):
            joined.rows(torch.tensor(wrong))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_only_small_float32_weights_are_transposed(dtype, monkeypatch):
    """For others that was measured to be slower, up to 20 times where bfloat16 is not packed."""
    monkeypatch.setattr("minispec.linear.packable", lambda weight: False)
    layer = torch.nn.Linear(40, 30, dtype=dtype)
    x = torch.randn(1, 5, 40, dtype=dtype)
    expected, joined = layer(x), Joined(layer)
    assert joined.weight.is_contiguous() == (dtype != torch.float32)
    torch.testing.assert_close(joined(x), expected)
    joined.undo()
    assert layer.weight.is_contiguous()  # as safetensors wants it
    torch.testing.assert_close(layer(x), expected)


def test_the_int8_kernel_gives_each_row_what_it_gives_it_alone():
    """So a pass over a draft computes what passes over one token do, as far as its products go."""
    weight, scale = quantized(torch.randn(48, 64))
    x = torch.randn(1, 17, 64)
    whole = product_int8(x, weight, scale, None)
    for i in range(17):
        assert torch.equal(product_int8(x[:, i : i + 1], weight, scale, None), whole[:, i : i + 1])
    odd = product_int8(torch.randn(3, 10), *quantized(torch.randn(7, 10)), None)  # no kernel fits
    assert odd.shape == (3, 7)
