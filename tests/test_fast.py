"""The seam: layers are swapped, and what they compute stays what it was."""

import math
import random
from unittest import mock

import pytest
import torch
from conftest import GOLDEN, companions, random_model, random_tokens, random_tree
from torch import nn

from minispec import UserError, fast, load
from minispec.checkpoints import places
from minispec.checkpoints.load import save
from minispec.fast import Function, Int8Linear, SmallBatchLinear, optimize, swap
from minispec.generate import decode
from minispec.model import plan

LAYERS = [SmallBatchLinear, Int8Linear]


def dense(layer: nn.Module, width: int) -> torch.Tensor:
    """The weight (out, in) that a layer multiplies by: what it makes of the unit vectors."""
    eye = torch.eye(width, dtype=torch.float64)
    return (layer(eye) - layer(torch.zeros_like(eye[:1]))).T


def linear(seed: int, dtype: torch.dtype = torch.float64) -> nn.Linear:
    """A random layer of odd sizes, with or without a bias."""
    torch.manual_seed(seed)
    sizes = random.Random(seed).choices([1, 3, 7, 13, 31, 65], k=2)
    return nn.Linear(*sizes, bias=bool(seed % 2), dtype=dtype).requires_grad_(False)


def modules(model) -> list[nn.Module]:
    """All that decoding runs: the model, a draft, heads."""
    options = [x for each in companions(model).values() for x in each.values()]
    return [model, *dict.fromkeys(x for x in options if isinstance(x, nn.Module))]


# ---- swap


@pytest.mark.parametrize("make", LAYERS)
def test_every_linear_layer_is_replaced_and_nothing_else(make):
    for module in modules(random_model(qkv_bias=True, qk_norm=True)):
        before, others = dict(module.named_modules()), dict(module.named_parameters())
        swap(module, make)
        after = dict(module.named_modules())
        linears = {name for name, each in before.items() if isinstance(each, nn.Linear)}
        assert linears and after.keys() == before.keys()
        for name, each in after.items():
            assert type(each) is make if name in linears else each is before[name]
        for name, p in module.named_parameters():
            assert p is others[name]


@pytest.mark.parametrize("tied", [False, True])
def test_a_swapped_model_is_saved_and_loaded_as_the_plain_one(tied, tmp_path):
    model = random_model(3, tied=tied)
    tokens = random_tokens(9)
    expected, names = model.logits(model(tokens)), set(model.state_dict())
    swap(model, SmallBatchLinear)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert set(model.state_dict()) == names
    save(model, None, tmp_path)
    plain, _ = load(tmp_path, "float64", "cpu")
    assert torch.equal(plain.logits(plain(tokens)), expected)
    swap(plain, SmallBatchLinear)
    difference = plain.logits(plain(tokens)) - expected
    assert difference.abs().max() <= 1e-12 * expected.abs().max()


# ---- the layers


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("seed", range(8))
def test_the_wide_product_is_the_linear_layer(seed, dtype, tolerance):
    plain = linear(seed, dtype)
    wide = SmallBatchLinear(plain)
    shapes = [(), (0,), *((n,) for n in range(1, 21)), (1, 1), (2, 3), (1, 17), (5, 4), (3, 0)]
    for shape in shapes:
        x = torch.randn(*shape, plain.in_features, dtype=dtype)
        torch.testing.assert_close(wide(x), plain(x), rtol=tolerance, atol=tolerance)
    x = torch.randn(4, 2 * plain.in_features, dtype=dtype)[:, ::2]  # not contiguous
    torch.testing.assert_close(wide(x), plain(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("wins", [[], [2, 4], [16], [2, 4, 8, 16]])
def test_each_shape_uses_the_product_that_was_faster(wins, monkeypatch):
    """Whatever the machine: here the clock says that the wide product wins at some row counts."""
    rows = []

    def interleaved_min_times(functions, moment):
        with mock.patch.object(nn.functional, "linear", lambda x, weight: rows.append(len(x))):
            functions[0]()
        functions[1]()
        return [1.0, 0.5 if rows[-1] in wins else 0.95]

    monkeypatch.setattr(fast, "least_in_turn", interleaved_min_times)
    model = random_model(dtype=torch.float32)
    optimize(model)
    expected = {n for top in wins for n in range(top // 2 + 1, top + 1)}
    layers = [each for each in model.modules() if isinstance(each, SmallBatchLinear)]
    assert layers and all(set(each.wide) == expected for each in layers)
    assert set(rows) == {2, 4, 8, 16}


@pytest.mark.parametrize("seed", range(20))
def test_int8_weights_are_the_nearest_multiples_of_a_scale(seed):
    plain = linear(seed)
    with torch.no_grad():
        plain.weight[0] = 0.0
        plain.weight[-1] *= 1e4  # a scale per output: large ones do not spoil the others
    rounded = Int8Linear(plain)
    weight = dense(rounded, plain.in_features)
    scale = plain.weight.abs().amax(1, keepdim=True) / 127
    assert ((weight - plain.weight).abs() <= 0.5001 * scale).all()
    steps = weight / scale.clamp(min=1e-30)
    assert (steps - steps.round()).abs().max() < 1e-6
    for shape in (), (1,), (9,), (2, 3):
        x = torch.randn(*shape, plain.in_features, dtype=torch.float64)
        expected = nn.functional.linear(x, weight, plain.bias)
        torch.testing.assert_close(rounded(x), expected, rtol=1e-12, atol=1e-12)
    stored = sum(t.numel() * t.itemsize for t in rounded.state_dict().values())
    assert stored <= plain.weight.numel() + 16 * plain.out_features
    for dtype in torch.float32, torch.bfloat16:
        # the scale's rounding must not carry a row's largest beyond 127, which is -128 in 8 bits
        layer = linear(seed, dtype)
        near, exact = Int8Linear(layer).weight.double(), layer.weight.double()
        assert ((near - exact).abs() <= 0.01 * exact.abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize("tied", [False, True])
def test_int8_is_the_plain_model_of_the_rounded_weights(tied):
    """Every product is rounded, lm_head's too; the embedding stays as it is."""
    model, oracle, plain = (random_model(4, tied=tied, vocab_size=70) for _ in range(3))
    for layer in [each for each in oracle.modules() if isinstance(each, nn.Linear)]:
        layer.weight = nn.Parameter(dense(Int8Linear(layer), layer.in_features))
    optimize(model, int8=True)
    tokens = random_tokens(9)
    logits, expected, others = (m.logits(m(tokens)) for m in (model, oracle, plain))
    assert (logits - expected).abs().max() < 1e-11 < 1e-4 < (others - expected).abs().max()
    assert torch.equal(model.model.embed_tokens.weight, plain.model.embed_tokens.weight)


# ---- what decoding makes of it


@pytest.mark.parametrize("variant", sorted(folder.name for folder in GOLDEN.iterdir()))
@pytest.mark.parametrize("int8", [False, True])
def test_a_quickened_checkpoint_computes_nearly_what_it_did(variant, int8):
    """In one pass, or a row and then a few at a time."""
    model, _ = load(GOLDEN / variant, "float32", "cpu")
    tokens = random_tokens(25, vocab=64)
    expected = model.logits(model(tokens))[0]
    optimize(model, int8)
    cache, parts = model.new_cache(64), []
    for n in (1, 2, 5, 1, 16):
        parts.append(model(tokens[cache.length : cache.length + n], cache)[0])
        cache.commit(list(range(n)))
    for hidden in model(tokens)[0], torch.cat(parts):
        error = (model.logits(hidden) - expected).norm() / expected.norm()
        assert error < (0.05 if int8 else 1e-5) and math.isfinite(error)


def test_an_int8_model_is_not_saved_as_half_a_checkpoint(tmp_path):
    model = random_model()
    optimize(model, int8=True)
    with pytest.raises(UserError, match="int8 weights cannot be saved"):
        save(model, None, tmp_path)


# ---- passes as graphs


@pytest.mark.parametrize("runner", [fast.over_committed_rows, fast.over_whole_cache])
@pytest.mark.parametrize("seed", range(4))
def test_what_a_graph_is_given_makes_the_plain_pass(runner, seed):
    """Trees, chains and commits at random, through the tensors that a graph takes."""
    rng, model = random.Random(seed), random_model(seed)
    function = Function(model.model)
    ours, theirs = model.new_cache(128), model.new_cache(128)
    for _ in range(12):
        tree = random_tree(rng, rng.randint(1, 9))
        ctx = plan(model.rope, model.model.norm.weight, len(tree), ours, tree.depth, tree.mask)
        hidden = runner(function, torch.tensor([tree.tokens]), ctx)
        expected = model(tree.tokens, theirs, tree.depth, tree.mask)
        assert (hidden - expected).abs().max() < 1e-10
        path = [0]
        while tree.children(path[-1]) and rng.random() < 0.8:
            path.append(rng.choice(tree.children(path[-1])))
        for cache in ours, theirs:
            cache.commit(path)


@pytest.mark.slow
def test_compiled_passes_decode_what_plain_ones_do_and_are_made_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(places, "CACHE", tmp_path)
    prompt = random_tokens(20)
    expected = decode(random_model(3), None, prompt, max_new_tokens=60).tokens
    for opened in range(2):
        model = random_model(3)
        optimize(model, compiled=True)
        assert ("compiling" in capsys.readouterr().err) == (not opened)
        for method in "autoregressive", "prompt-lookup", "lookahead":
            run = decode(model, None, prompt, method, max_new_tokens=60)
            assert run.tokens == expected
    assert len(list(tmp_path.iterdir())) == 1


def test_no_compiler_no_folder_and_other_devices_are_one_line(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(places, "CACHE", file)
    with pytest.raises(UserError, match="set XDG_CACHE_HOME"):
        optimize(random_model(), compiled=True)
    monkeypatch.setattr(places, "CACHE", tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        optimize(random_model(), compiled=True)
    with pytest.raises(UserError, match="on cpu and cuda, not on meta"):
        optimize(random_model().to("meta"), compiled=True)
