"""Packed and half-size products against plain ones."""

import pytest
import torch
import torch.nn.functional as F

from minispec.linear import (
    KERNELS,
    WIDTHS,
    Half,
    Joined,
    for_graphs,
    half,
    on_intel,
    pack,
    packable,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_layouts_of_other_processors_are_found(width, dtype, monkeypatch):
    """Their memory is made up, so only where numbers are looked up can be seen here."""
    monkeypatch.setattr("minispec.linear.SMALL", 0)
    weight = torch.randn(211, 70, dtype=dtype)
    each = 4 // weight.element_size()
    lying = F.pad(weight, (0, 10, 0, -211 % width)).view(-1, width, 80 // each, each)
    lying = lying.transpose(1, 2).flatten()
    monkeypatch.setattr("minispec.linear.laid_out", lambda memory, kind: lying)
    if packable(weight):
        assert pack(weight).blocks.shape[2] == width
        assert torch.equal(pack(weight).rows(torch.arange(211)), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "size", [(2112, 64), (3000, 70), (1337, 193), (131, 1024), (70000, 1), (64, 2048)]
)
def test_packed_memory_is_read_where_each_number_lies(size, dtype, monkeypatch):
    monkeypatch.setattr("minispec.linear.SMALL", 2**16)
    layer = torch.nn.Linear(*reversed(size), dtype=dtype)
    weight, x = layer.weight.detach().clone(), torch.randn(1, 1, size[1], dtype=dtype)
    fits, expected, joined = packable(weight), layer(x).detach(), Joined(layer)
    assert (joined.packed is not None) == fits
    if fits:  # one row is read as lines, the faster way, where oneDNN fills up no inputs
        whole = joined.packed.blocks.shape[1] == size[1]
        assert joined.packed.in_lines == (dtype == torch.float32 and whole)
    assert torch.equal(joined.rows(torch.arange(size[0])), weight)
    assert torch.equal(joined.dense(), weight)
    for out in (joined(x), joined(x.expand(1, 3, -1))[:, 1:2], joined(x.mT.contiguous().mT)):
        torch.testing.assert_close(out, expected)
    assert joined(x[:, :0]).shape == (1, 0, size[0])
    strided = torch.randn(size[1], 2, dtype=dtype)[None, :, 0]
    for x in (strided, torch.randn(1, 1, dtype=dtype).expand(1, size[1])):
        assert torch.equal(joined(x), joined(x.clone()))
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


def layer_of(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(*reversed(weight.shape), bias=False)
    layer.weight.data = weight.clone()
    return layer


def exact(size: tuple[int, int], kind: str) -> torch.Tensor:
    """A float32 weight of numbers that were stored in a narrower type."""
    weight = torch.randn(size) * torch.logspace(-2, 1, size[0])[:, None]
    if kind == "subnormal float16":
        return (weight * 1e-4).half().float()
    dtype, scale = {"float16": (torch.float16, 1), "small bfloat16": (torch.bfloat16, 1e-7),
                    "huge bfloat16": (torch.bfloat16, 1e20)}[kind]  # fmt: skip
    return (weight * scale).to(dtype).float()


has_halves = torch.backends.quantized.engine in KERNELS
needs_halves = pytest.mark.skipif(not has_halves, reason="torch has no kernel for halves here")


@needs_halves
@pytest.mark.parametrize(
    "kind", ["float16", "subnormal float16", "small bfloat16", "huge bfloat16"]
)
@pytest.mark.parametrize("size", [(48, 64), (7, 10), (300, 33), (1000, 577), (192, 1), (1, 5)])
def test_what_float16_holds_is_kept_so_and_multiplied_in_float32(size, kind, monkeypatch):
    """The slow oracle is the plain layer, and its own product of each row alone."""
    monkeypatch.setattr("minispec.linear.SMALL", 0)
    monkeypatch.setattr("minispec.linear.WHOLE", 2**16)  # the largest in several parts
    torch.manual_seed(sum(size))
    layer = torch.nn.Linear(*reversed(size), bias=size[0] % 2 == 0)
    weight = exact(size, kind)
    layer.weight.data = weight.clone()
    joined = Joined(layer, looked_up=True)
    assert isinstance(joined.packed, Half) and layer.weight.is_meta
    assert (joined.packed.powers is None) == (kind in ("float16", "subnormal float16"))
    assert torch.equal(joined.dense(), weight)
    assert torch.equal(joined.rows(torch.arange(size[0])), weight)
    for wrong in ([-1], [0, size[0]]):
        with pytest.raises(IndexError):
            joined.rows(torch.tensor(wrong))
    for n in (0, 1, 2, 5, 14, 15, 33):
        x = torch.randn(1, n, size[1])
        y = joined(x)
        expected = x.double() @ weight.double().T + (0 if joined.bias is None else joined.bias)
        assert y.shape == expected.shape
        most = x.double().abs() @ weight.double().abs().T  # of each sum
        assert ((y - expected).abs() <= 2e-6 * (most + (joined.bias is not None))).all()
        for i in range(n):
            assert torch.equal(joined(x[:, i : i + 1]), y[:, i : i + 1])
    assert torch.equal(joined(x[0, 0]), y[0, 0])
    strided = torch.randn(3, size[1], 2)[..., 0]  # not one piece of memory
    assert torch.equal(joined(strided), joined(strided.clone()))
    seldom = Joined(layer_of(weight))
    assert torch.equal(seldom.rows(torch.arange(size[0])), weight)
    x = torch.randn(2, size[1], requires_grad=True)
    seldom(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, -1), rtol=1e-4, atol=1e-4)
    joined.undo()
    assert torch.equal(layer.weight, weight)


@needs_halves
@pytest.mark.parametrize("parts", [1, 3])
def test_a_product_does_not_ask_packed_parts_for_another_function(parts, monkeypatch):
    """Where they have none, torch learns it by an exception: twice the time of a small product."""
    monkeypatch.setattr("minispec.linear.SMALL", 0)
    monkeypatch.setattr("minispec.linear.WHOLE", 64 * 64 if parts > 1 else 2**24)
    joined = Joined(layer_of(torch.randn(64 * parts, 64).bfloat16().float()))
    assert isinstance(joined.packed, Half) and len(joined.packed.parts) == parts
    expected, asked = joined(torch.ones(2, 64)), []
    answer = classmethod(lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(torch.ScriptObject, "__torch_function__", answer, raising=False)
    torch.ops.quantized.linear_dynamic_fp16(torch.ones(2, 64), joined.packed.parts[0])
    assert len(asked) == 1  # torch still asks
    assert torch.equal(joined(torch.ones(2, 64)), expected) and len(asked) == 1


@pytest.mark.parametrize("kind", ["plain", "half", "packed", "int8"])
@pytest.mark.parametrize("trained", [True, False])
def test_what_inference_made_and_gave_back_can_be_trained(kind, trained, monkeypatch):
    """Tensors made in inference mode have no gradients, some of them without a word."""
    monkeypatch.setattr("minispec.linear.SMALL", 2**62 if kind == "plain" else 0)
    weight = torch.randn(70, 30)
    layer = layer_of(weight.bfloat16().float() if kind == "half" else weight)
    layer.weight.requires_grad_(trained)
    with torch.inference_mode():
        joined = Joined(layer, quantize=kind == "int8")
    x = torch.randn(2, 30, requires_grad=True)
    joined(x).sum().backward()
    assert x.grad.any()
    with torch.inference_mode():
        joined.undo()
    x = torch.randn(2, 30, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(2, -1))
    assert layer.weight.requires_grad == trained == (layer.weight.grad is not None)


def test_parts_have_biases_or_none_has():
    with pytest.raises(AssertionError, match="biases of all parts, or of none"):
        Joined(torch.nn.Linear(3, 4), torch.nn.Linear(3, 4, bias=False))


@needs_halves
@pytest.mark.parametrize("number", [1 / 3, torch.inf, torch.nan, 1e-9])
def test_what_float16_does_not_hold_is_kept_otherwise(number, monkeypatch):
    """A third is too fine, 1e-9 beside 1000 too small."""
    monkeypatch.setattr("minispec.linear.SMALL", 0)
    weight = torch.full((40, 30), 1000.0)
    assert half(weight, False) is not None
    weight[3, 5] = number
    assert half(weight, False) is None
    assert half(weight.bfloat16(), False) is half(weight.double(), False) is None
    torch.testing.assert_close(
        Joined(layer_of(weight)).dense(), weight, rtol=0, atol=0, equal_nan=True
    )


@needs_halves
@pytest.mark.parametrize("whole, parts", [(2**24, 1), (2**16, 16)])
def test_graphs_take_halves_as_they_are(whole, parts, monkeypatch):
    """The kernel and the packed parts stand in the exported program, and no plain weight does; a
    slow test of compiled passes makes graphs of it."""
    monkeypatch.setattr("minispec.linear.SMALL", 0)
    monkeypatch.setattr("minispec.linear.WHOLE", whole)
    joined = Joined(layer_of(exact((1000, 577), "huge bfloat16")))
    assert joined.packed.powers is not None and len(joined.packed.parts) == parts

    class Product(torch.nn.Module):
        def forward(self, x):
            return joined(x)

    x, n = torch.randn(5, 577), torch.export.Dim("n", min=2, max=64)
    with torch.no_grad(), for_graphs([joined]):
        program = torch.export.export(Product(), (x,), dynamic_shapes=({0: n},), strict=False)
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    kernel = torch.ops.quantized.linear_dynamic_fp16.default
    assert calls.count(kernel) == parts
    assert {len(each) for each in program.constants.values() if torch.is_tensor(each)} == {1000}
    for rows in (5, 2, 33):
        x = torch.randn(rows, 577)
        assert torch.equal(program.module()(x), joined(x))
    assert not hasattr(torch.ScriptObject, "tracing_mode")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_are_made_of_plain_weights_where_these_are_packed(dtype, monkeypatch):
    monkeypatch.setattr("minispec.linear.SMALL", 0)
    layer = torch.nn.Linear(193, 337, dtype=dtype)
    weight, joined = layer.weight.detach().clone(), Joined(layer)
    packed, x = joined.packed, torch.randn(3, 193, dtype=dtype)
    expected = joined(x)
    with pytest.raises(ZeroDivisionError), for_graphs([joined]):
        assert joined.packed is None and torch.equal(joined.weight, weight)
        torch.testing.assert_close(joined(x), expected)
        raise ZeroDivisionError
    assert joined.packed is packed and (joined.weight is None) == (packed is not None)
    assert torch.equal(joined(x), expected)


def test_weights_that_need_32_bits_are_plain_up_to_a_larger_size_on_intel(monkeypatch):
    monkeypatch.setattr("minispec.linear.SMALL", 2**10)
    monkeypatch.setattr("minispec.linear.QUICK", 8)
    wide = torch.randn(128, 32)
    exact = wide.half().float()
    small, middle, large = slice(32), slice(128), slice(None)  # 2^10, 2^12 and 2^14 numbers
    wide, exact = (torch.cat([each] * 4) for each in (wide, exact))
    if torch.backends.quantized.engine in KERNELS:
        assert half(exact[small], False) is None
        assert half(exact[middle], False) and half(exact[large], False)
    assert not packable(wide[small]) and not packable(wide[middle])
    assert packable(wide[large]) == torch.backends.mkldnn.is_available()
    layer = torch.nn.Linear(32, 128, bias=False)
    layer.weight.data = wide[middle].clone()
    joined = Joined(layer)
    assert joined.packed is None and joined.weight.stride() == (1, 128)
    torch.testing.assert_close(joined(x := torch.randn(3, 32)), x @ wide[middle].T)


@pytest.mark.parametrize("text", ["vendor_id : GenuineIntel", "vendor_id : AuthenticAMD", None])
def test_whose_processor_it_is(text, monkeypatch):
    def read_text(path):
        if text is None:  # no Linux
            raise FileNotFoundError
        return text

    monkeypatch.setattr("pathlib.Path.read_text", read_text)
    monkeypatch.setattr("platform.processor", lambda: "Intel64, GenuineIntel")
    intel = text is None or "Intel" in text
    assert on_intel() == (intel and torch.backends.mkl.is_available())
