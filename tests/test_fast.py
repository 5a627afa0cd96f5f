"""Swapped layers and compiled passes compute the same as the plain model."""

import copy
import math
import pickle
import random
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import (
    GOLDEN,
    equal_up_to_rounding,
    file_limit,
    method_options,
    random_model,
    random_tokens,
    random_tree,
)
from torch import nn

from minispec import UserError, load, paths
from minispec.certify.toys import random_eagle3_head, random_mtp_head
from minispec.checkpoints.load import save
from minispec.fast import (
    Int8Linear,
    compiled,
    optimize,
    optimize_drafter,
    products,
    quantized_dtype,
    swap,
)
from minispec.fast.compiled import compile_passes
from minispec.fast.products import (
    INT8_PRODUCTS,
    PRODUCTS,
    TIMED_ROWS,
    DraftLinear,
    MeasuredLinear,
)
from minispec.generate import METHODS, decode
from minispec.generate.drafters import tree_costs
from minispec.methods.vocabulary import Compressed, Language


class EveryProduct(MeasuredLinear):
    """A layer whose product is another one for each row count."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer, [list(PRODUCTS)[i % len(PRODUCTS)] for i in range(len(TIMED_ROWS))])


LAYERS = [EveryProduct, Int8Linear]


def dense(layer: nn.Module, width: int) -> torch.Tensor:
    """The weight (out, in) that a layer multiplies by, found by applying it to the unit vectors."""
    eye = torch.eye(width, dtype=torch.float64)
    return (layer(eye) - layer(torch.zeros_like(eye[:1]))).T


def linear(seed: int, dtype: torch.dtype = torch.float64) -> nn.Linear:
    """A random layer of an odd size, with or without a bias."""
    torch.manual_seed(seed)
    sizes = random.Random(seed).choices([1, 3, 7, 13, 31, 65], k=2)
    return nn.Linear(*sizes, bias=bool(seed % 2), dtype=dtype).requires_grad_(False)


def modules(model) -> list[nn.Module]:
    """All modules that decoding runs: the model, a draft and heads."""
    values = [value for options in method_options(model).values() for value in options.values()]
    return [model, *dict.fromkeys(x for x in values if isinstance(x, nn.Module))]


# ---- swap


@pytest.mark.parametrize("make", LAYERS)
def test_every_linear_layer_is_replaced_and_nothing_else(make):
    for module in modules(random_model(qkv_bias=True, qk_norm=True)):
        before, others = dict(module.named_modules()), dict(module.named_parameters())
        swap(module, make)
        after = dict(module.named_modules())
        linears = {name for name, layer in before.items() if isinstance(layer, nn.Linear)}
        assert linears and after.keys() == before.keys()
        for name, layer in after.items():
            assert type(layer) is make if name in linears else layer is before[name]
        for name, p in module.named_parameters():
            assert p is others[name]


@pytest.mark.parametrize("tied", [False, True])
def test_a_swapped_model_is_saved_and_loaded_as_a_plain_one(tied, tmp_path):
    model = random_model(3, tied=tied)
    tokens = random_tokens(9)
    expected, names = model.logits(model(tokens)), set(model.state_dict())
    swap(model, EveryProduct)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert set(model.state_dict()) == names
    save(model, None, tmp_path)
    plain, _ = load(tmp_path, "float64", "cpu")
    assert equal_up_to_rounding(plain.logits(plain(tokens)), expected)
    swap(plain, EveryProduct)
    difference = plain.logits(plain(tokens)) - expected
    assert difference.abs().max() <= 1e-12 * expected.abs().max()


# ---- the layers


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("seed", range(4))
def test_every_product_equals_linear(product, seed, dtype, tolerance):
    plain = linear(seed, dtype)
    measured = MeasuredLinear(plain, [product] * len(TIMED_ROWS))
    shapes = [(), (0,), *((n,) for n in range(1, 67)), (1, 1), (2, 3), (1, 17), (5, 4), (3, 0)]
    for shape in shapes:
        x = torch.randn(*shape, plain.in_features, dtype=dtype)
        y = measured(x)
        assert y.is_contiguous()
        torch.testing.assert_close(y, plain(x), rtol=tolerance, atol=tolerance)
    x = torch.randn(4, 2 * plain.in_features, dtype=dtype)[:, ::2]  # not contiguous
    torch.testing.assert_close(measured(x), plain(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_a_convolution_equals_linear_with_two_threads(dtype, tolerance):
    """Only then does torch let oneDNN compute it in float32."""
    torch.manual_seed(0)
    weight, threads = torch.randn(577, 321, dtype=dtype), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for n in (1, 5, 8, 17, 64):
            rows = torch.randn(n, 321, dtype=dtype)
            expected = nn.functional.linear(rows, weight)
            error = PRODUCTS["convolved"](rows, weight) - expected
            assert error.norm() <= tolerance * expected.norm()
    finally:
        torch.set_num_threads(threads)


def test_the_row_count_selects_the_product(monkeypatch):
    used = []
    for name in PRODUCTS:
        monkeypatch.setitem(PRODUCTS, name, lambda rows, weight, name=name: used.append(name) or
                            rows.new_zeros(len(rows), 3))  # fmt: skip
    names = ["transposed", "weight_first"] * 3 + ["transposed"]
    layer = MeasuredLinear(nn.Linear(5, 3).requires_grad_(False), names)
    for n in range(1, 65):
        layer(torch.zeros(n, 5))
        timed = next(i for i, count in enumerate(TIMED_ROWS) if count >= n)
        assert used.pop() == names[timed] and not used
    layer(torch.zeros(65, 5))
    assert not used  # F.linear


def times_of(rng: random.Random) -> dict[str, list[float]]:
    return {name: [rng.choice([1, 2, 3, 4]) for _ in TIMED_ROWS] for name in PRODUCTS}


@pytest.mark.parametrize("seed", range(50))
def test_the_fastest_product_is_chosen_and_a_copy_only_if_it_pays(seed):
    times = times_of(random.Random(seed))
    no_copy = "rows_first", "weight_first", "convolved"
    without = [min(times[name][i] for name in no_copy) for i in range(7)]
    chosen = products.choose(times)
    seconds = [times[name][i] for i, name in enumerate(chosen)]
    if "transposed" in chosen:
        assert seconds == [min(pair) for pair in zip(without, times["transposed"])]
        assert sum(seconds[:4]) <= 0.8 * sum(without[:4])  # 1 to 8 rows
    else:
        assert seconds == without
        best = [min(pair) for pair in zip(without, times["transposed"])]
        assert sum(best[:4]) > 0.8 * sum(without[:4])
    slightly = {name: [1.0 if name == "rows_first" else 0.95] * 7 for name in PRODUCTS}
    assert products.choose(slightly) == ["rows_first"] * 7


def test_every_shape_is_timed_on_all_of_its_weights_and_only_once(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "CACHE", tmp_path / "new" / "folder")
    monkeypatch.setattr(products, "TIMED_BYTES", 8 * 4 * 10)
    seen = []
    for name in PRODUCTS:
        monkeypatch.setitem(PRODUCTS, name, lambda rows, weight: seen.append((len(rows), weight)))
    few, many = [torch.zeros(3, 8)], [torch.full((4, 8), float(i)) for i in range(7)]
    large = [torch.arange(33.0)[:, None].repeat(1, 8)]
    chosen = products.fastest_products(few + many + large)
    assert {n for n, _ in seen} == set(TIMED_ROWS)
    assert {w[0, 0].item() for _, w in seen if w.shape == (4, 8)} >= set(map(float, range(6)))
    assert {w[0, 0].item() for _, w in seen if w.shape == (10, 8)} == {0.0, 10.0, 20.0}
    seen.clear()
    key = products.key_of(large[0])
    assert products.fastest_products(large) == {key: chosen[key]}
    assert not seen
    products.fastest_products([large[0].double()])
    assert {w.dtype for _, w in seen} == {torch.float64}


KEY = '{"3x8 torch.float32":'
WRONG = ["1}", '["rows_first"]}', "[{}, 1, 2, 3, 4, 5, 6]}"]


@pytest.mark.parametrize("text", ["", "[]", "{", "null", *map(KEY.__add__, WRONG), "\xff"])
def test_a_damaged_file_of_choices_is_measured_again(text, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "CACHE", tmp_path)
    products.choices_file().write_text(text, encoding="latin-1")
    (names,) = products.fastest_products([torch.zeros(3, 8)]).values()
    assert len(names) == len(TIMED_ROWS)
    assert products.read_choices(products.choices_file()) == {"3x8 torch.float32": names}
    before = products.choices_file().read_bytes()
    with file_limit(50):
        products.write_choices(products.choices_file(), {"3x8 torch.float32": names * 9})
    assert products.choices_file().read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(paths, "CACHE", products.choices_file())  # a folder that cannot be made
    assert products.fastest_products([torch.zeros(3, 8)])


@pytest.mark.parametrize("int8", [False, True])
def test_heads_and_vocabularies_are_optimised_like_their_model(int8):
    model, plain = random_model(5), random_model(5)
    options = method_options(model)["fastmtp"]
    options["vocabulary"] = Compressed({"en": Language((3, 1, 4), (3, 2, 1))}, model)
    optimize_drafter(options, model)  # the model is plain, so nothing changes
    kinds = {type(layer) for layer in options["head"].modules()}
    assert nn.Linear in kinds and MeasuredLinear not in kinds
    prompt = random_tokens(20)
    before = decode(plain, None, prompt, "fastmtp", max_new_tokens=30, **options)
    optimize(model, int8)
    for _ in range(2):
        optimize_drafter(options, model)
        kinds = {type(layer) for layer in options["head"].modules()}
        assert MeasuredLinear in kinds and nn.Linear not in kinds
        run = decode(model, None, prompt, "fastmtp", max_new_tokens=30, **options)
        assert type(options["vocabulary"].select(prompt).rows) is MeasuredLinear
    if not int8:
        assert run.tokens == before.tokens and run.rounds == before.rounds


def test_measuring_a_tree_leaves_the_heads_as_they_will_be_saved():
    model = random_model(5)
    heads = method_options(model)["medusa"]["heads"]
    kinds = [type(module) for module in heads.modules()]
    assert tree_costs(model, heads, None)
    assert type(model.lm_head) is MeasuredLinear
    assert [type(module) for module in heads.modules()] == kinds


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("faster", [False, True])
def test_drafts_are_rounded_if_that_is_faster_and_answers_stay_the_same(faster, dtype, monkeypatch):
    monkeypatch.setattr("minispec.fast.faster_rounded", lambda weights: {
        products.key_of(weight): faster for weight in weights
    })  # fmt: skip
    monkeypatch.setattr("minispec.fast.ROUNDED_BYTES", 0)
    model = random_model(5, hidden_size=64, intermediate_size=128, vocab_size=130).to(dtype)
    options, prompt = method_options(model)["fastmtp"], random_tokens(20)
    options["head"] = random_mtp_head(model, 1)
    options["vocabulary"] = Compressed({"en": Language(tuple(range(90)), (1,) * 90)}, model)
    plain = decode(model, None, prompt, max_new_tokens=40)
    optimize(model)
    optimize_drafter(options, model)
    layers = [options["vocabulary"].select(prompt).rows, *options["head"].modules()]
    kinds = {type(layer) for layer in layers} & {MeasuredLinear, DraftLinear}
    assert kinds == {DraftLinear if faster and dtype != torch.float64 else MeasuredLinear}
    run = decode(model, None, prompt, "fastmtp", max_new_tokens=40, **options)
    assert dtype == torch.bfloat16 or run.tokens == plain.tokens


def test_the_time_of_rounded_weights_is_compared_per_weight(tmp_path, monkeypatch):
    """The parts that are timed have equally many bytes, so four times as many int8 weights."""
    monkeypatch.setattr(paths, "CACHE", tmp_path)
    monkeypatch.setattr(products, "TIMED_BYTES", 2**16)
    monkeypatch.setattr(products, "UNCACHED_BYTES", 2**17)
    weights = [torch.zeros(16, 64), torch.zeros(32, 64)]

    def times(groups: dict) -> dict:
        seconds = {torch.float32: {16: 1.0, 32: 1.0}, torch.int8: {16: 3.5, 32: 3.7}}
        return {
            key: {"a": [9.0] * 7, "b": [seconds[group[0].dtype][len(group[0])]] * 4 + [0.0] * 3}
            for key, group in groups.items()
        }

    monkeypatch.setattr(products, "time_products", times)
    expected = {products.key_of(weights[0]): True, products.key_of(weights[1]): False}
    assert products.faster_rounded(weights) == expected
    monkeypatch.setattr(products, "time_products", None)
    assert products.faster_rounded(weights) == expected  # from the file


@pytest.mark.parametrize("seed", range(20))
def test_int8_weights_are_rounded_to_the_nearest_multiple_of_a_scale(seed):
    plain = linear(seed)
    with torch.no_grad():
        plain.weight[0] = 0.0
        plain.weight[-1] *= 1e4  # each output has its own scale, so this must not affect the others
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
        # rounding the scale must not push a row's largest weight past 127, where int8 wraps to -128
        layer = linear(seed, dtype)
        near, exact = Int8Linear(layer).weight.double(), layer.weight.double()
        assert ((near - exact).abs() <= 0.01 * exact.abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("product", INT8_PRODUCTS)
def test_every_int8_product_equals_the_rounded_weights(product, seed):
    torch.manual_seed(seed)
    width, out = random.Random(seed).choice([64, 128, 192]), random.Random(seed).randint(1, 70)
    layer = Int8Linear(nn.Linear(width, out, bool(seed % 2)).bfloat16().requires_grad_(False))
    if not products.works(INT8_PRODUCTS[product], layer.rounded):
        pytest.skip("this version of torch does not offer the product")
    layer.products = [product] * len(TIMED_ROWS)
    for shape in (), (0,), (1,), (3,), (64,), (66,), (2, 3):
        x = torch.randn(*shape, width).bfloat16()
        expected = x.float() @ layer.weight.float().T
        expected = expected if layer.bias is None else expected + layer.bias.float()
        torch.testing.assert_close(layer(x).float(), expected, rtol=0.03, atol=0.03)
    x = torch.randn(4, 2 * width).bfloat16()[:, ::2]  # not contiguous
    assert layer(x).shape == (4, len(layer.rounded))


def test_a_product_that_torch_lacks_or_that_is_wrong_is_not_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "CACHE", tmp_path)

    def missing(*_) -> None:
        raise AttributeError

    def wrong(rows, rounded, scale) -> torch.Tensor:
        return products.dequantised(rows, rounded, 1.1 * scale)

    for other in missing, wrong:
        monkeypatch.setitem(INT8_PRODUCTS, "weight_only", other)
        weight = torch.randint(-127, 128, (9, 64), dtype=torch.int8)
        assert products.candidates(weight).keys() == {"dequantised"}
        model = random_model().bfloat16()
        optimize(model, int8=True)
        assert model.lm_head.products == ["dequantised"] * len(TIMED_ROWS)
        assert model.logits(model(random_tokens(5))).isfinite().all()


@pytest.mark.parametrize("width", [1, 7, 16, 65])
def test_rows_that_torch_would_read_past_their_end_are_dequantised(width):
    weight = torch.ones(3, width, dtype=torch.int8)
    assert products.candidates(weight).keys() == {"dequantised"}


def test_int8_products_are_timed_on_slices_of_a_large_weight_and_used(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "CACHE", tmp_path)
    monkeypatch.setattr(products, "TIMED_BYTES", 64 * 10)
    seen, model = [], random_model().bfloat16()
    for name in INT8_PRODUCTS:
        monkeypatch.setitem(INT8_PRODUCTS, name, lambda *args, name=name: seen.append(
            (name, len(args[0]))) or products.dequantised(*args))  # fmt: skip
    monkeypatch.setattr(products, "works", lambda *_: True)
    times = {"dequantised": [2.0] * 7, "weight_only": [1.0] * 3 + [3.0] * 4}
    large = torch.ones(33, 64, dtype=torch.int8)
    assert len(products.fastest_products([large])[products.key_of(large)]) == 7
    assert {n for _, n in seen} == set(TIMED_ROWS) and {name for name, _ in seen} == times.keys()
    monkeypatch.setattr(products, "time_products", lambda groups: {key: times for key in groups})
    optimize(model, int8=True)
    for n, name in (1, "weight_only"), (4, "weight_only"), (5, "dequantised"), (65, "dequantised"):
        seen.clear()
        model.logits(torch.ones(n, 16, dtype=torch.bfloat16))
        assert seen == [(name, n)]


def test_int8_models_are_in_the_faster_dtype_unless_another_is_asked_for(monkeypatch, capsys):
    for fastest in torch.float32, torch.bfloat16:
        monkeypatch.setattr("minispec.fast.int8_dtype", lambda fastest=fastest: fastest)
        assert quantized_dtype("auto", "cpu") == fastest
        assert quantized_dtype("float64", "cpu") == "float64"
        assert ("bfloat16" in capsys.readouterr().err) == (fastest == torch.bfloat16)
    monkeypatch.undo()
    assert quantized_dtype("auto", "cpu") in (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("tied", [False, True])
def test_an_int8_model_equals_a_plain_one_with_the_rounded_weights(tied):
    """All linear layers are rounded, including lm_head; the embedding is not."""
    model, oracle, plain = (random_model(4, tied=tied, vocab_size=70) for _ in range(3))
    for layer in [module for module in oracle.modules() if isinstance(module, nn.Linear)]:
        layer.weight = nn.Parameter(dense(Int8Linear(layer), layer.in_features))
    optimize(model, int8=True)
    tokens = random_tokens(9)
    logits, expected, others = (m.logits(m(tokens)) for m in (model, oracle, plain))
    assert (logits - expected).abs().max() < 1e-11 < 1e-4 < (others - expected).abs().max()
    assert torch.equal(model.model.embed_tokens.weight, plain.model.embed_tokens.weight)


# ---- optimised models


@pytest.mark.parametrize("variant", sorted(folder.name for folder in GOLDEN.iterdir()))
@pytest.mark.parametrize("int8", [False, True])
def test_an_optimised_checkpoint_computes_nearly_the_same_logits(variant, int8):
    """Whether in one pass or in several passes over a few rows each."""
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


def test_an_int8_model_cannot_be_saved(tmp_path):
    model = random_model()
    optimize(model, int8=True)
    with pytest.raises(UserError, match="int8 weights cannot be saved"):
        save(model, None, tmp_path)


# ---- compiled passes


@pytest.mark.parametrize("seed", range(4))
def test_the_inputs_of_a_graph_yield_the_plain_pass(seed):
    """Random trees, chains and commits, passed through the tensors that a graph takes."""
    rng, model, plain = random.Random(seed), random_model(seed), random_model(seed)
    model.compiled = compiled.CompiledPass(model.model)
    model.compiled.graphs[()] = compiled.FunctionalPass(plain.model)
    cache, plain_cache = model.new_cache(128), plain.new_cache(128)
    for _ in range(12):
        tree = random_tree(rng, rng.randint(1, 9))
        hidden = model(tree.tokens, cache, tree.depth, tree.mask)
        expected = plain(tree.tokens, plain_cache, tree.depth, tree.mask)
        assert (hidden - expected).abs().max() < 1e-10
        path = [0]
        while tree.children(path[-1]) and rng.random() < 0.8:
            path.append(rng.choice(tree.children(path[-1])))
        cache.commit(path)
        plain_cache.commit(path)


@pytest.mark.parametrize("product", INT8_PRODUCTS)
def test_a_graph_of_int8_weights_contains_the_product_for_one_row(product):
    model = random_model(hidden_size=64, head_dim=64, intermediate_size=128).bfloat16()
    swap(model.model, Int8Linear)
    for layer in model.model.modules():
        if isinstance(layer, Int8Linear):
            layer.products = [product] + ["dequantised"] * (len(TIMED_ROWS) - 1)
    with torch.no_grad():
        graph = compiled.export(model, compiled.FunctionalPass(model.model)).graph
    operators = [str(node.target) for node in graph.nodes]
    linears = 7 * model.config.layers
    assert operators.count("aten._weight_int8pack_mm.default") == (
        linears if product == "weight_only" else 0)  # fmt: skip


def test_copies_and_pickles_of_a_compiled_module_are_not_compiled(monkeypatch):
    monkeypatch.setattr(compiled, "cached_graph", lambda _, functional, *others: functional)
    model, tokens = random_model(), random_tokens(9)
    head = random_mtp_head(model, 2)
    compile_passes(model)  # the linear layers stay, as on a GPU
    optimize_drafter({"head": head}, model)
    for network, norm in (model, "model.norm"), (head, "final_layernorm"):
        assert network.compiled
        for other in copy.deepcopy(network), pickle.loads(pickle.dumps(network)):
            assert not other.compiled
            other.get_submodule(norm).requires_grad_(False).weight.zero_()
            hidden = torch.ones(1, 9, 16, dtype=torch.float64)
            inputs = (tokens,) if network is model else (hidden, hidden)
            assert network(*inputs, network.new_cache(64)).any()
            assert not other(*inputs, other.new_cache(64)).any()


@pytest.mark.parametrize("name", ["minispec.model", "minispec.methods.fastmtp", "minispec.cache",
                                  "minispec.fast.compiled"])  # fmt: skip
def test_a_graph_is_compiled_again_after_a_change_of_the_code(name, tmp_path, monkeypatch):
    head = random_mtp_head(random_model(), 2)
    functional, spec = compiled.FunctionalPass(head), sys.modules[name].__spec__
    key = compiled.graph_key(functional)
    assert compiled.graph_key(functional) == key
    edited = tmp_path / "edited.py"
    edited.write_text(Path(spec.origin).read_text(encoding="utf-8") + "# edited", encoding="utf-8")
    monkeypatch.setattr(spec, "origin", str(edited))
    assert compiled.graph_key(functional) != key


def test_graphs_differ_in_their_feature_layers_and_in_the_form_of_a_head():
    model, keys = random_model(), set()
    for layers in (), (0,), (0, 1):
        keys.add(compiled.graph_key(compiled.FunctionalPass(model.model, layers), layers))
    head = random_eagle3_head(model, 2)
    for head.midlayer.norm_before_residual in False, True:
        keys.add(compiled.graph_key(compiled.FunctionalPass(head)))
    assert len(keys) == 5


@pytest.mark.slow
@torch.no_grad()
def test_torch_traces_a_pass_for_a_gpu_in_one_piece():
    model = random_model()
    functional = compiled.FunctionalPass(model.model, (0,))
    traced = torch.compile(functional, backend="eager", fullgraph=True, dynamic=False)
    results, slots = [], torch.tensor([[0, 1, 2]])
    for run in functional, traced:
        cache = model.new_cache(64)
        mask = torch.zeros(1, 1, 3, 64, dtype=model.dtype)
        tensors = *model.rope(slots, model.dtype), mask, slots, cache.k, cache.v
        results.append((run([slots], *tensors), cache.kv))
    assert all(map(torch.equal, *results))


@pytest.mark.slow
def test_compiled_passes_decode_like_plain_ones_and_are_built_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paths, "CACHE", tmp_path)
    prompt = random_tokens(20)
    expected = decode(random_model(3), None, prompt, max_new_tokens=60).tokens
    for cached in False, True:
        model = random_model(3)
        optimize(model, compiled=True)
        options = method_options(model)
        optimize_drafter(options["fastmtp"], model)
        optimize_drafter(options["eagle3"], model)  # a graph more, after the layers were replaced
        assert ("compiling Backbone" in capsys.readouterr().err) == (not cached)
        assert options["fastmtp"]["head"].compiled
        layers = options["eagle3"]["head"].feature_layers
        assert options["eagle3"]["head"].compiled
        assert model.compiled.graphs.keys() == {(), layers}
        for method in METHODS:
            run = decode(model, None, prompt, method, max_new_tokens=60, **options[method])
            assert run.tokens == expected, method
    assert type(model.lm_head) is compiled.CompiledLinear
    plain = copy.deepcopy(model.lm_head)
    for rows in range(70):
        x = torch.randn(rows, 16, dtype=torch.float64)
        with torch.inference_mode():
            torch.testing.assert_close(model.lm_head(x), plain(x), rtol=1e-12, atol=1e-12)
    assert len(list(tmp_path.glob("*.pt2"))) == 5


def test_a_full_disk_is_reported_with_the_folders_of_graphs(tmp_path, monkeypatch):
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    arguments = full, {}, tmp_path / "graph.pt2"
    with pytest.raises(UserError, match=f"No space left on device in {tmp_path} or "):
        compiled.compile_graph(*arguments)
    full.side_effect = None
    monkeypatch.setattr(
        torch._inductor, "aoti_compile_and_package",
        lambda _, package_path, **options: package_path.write(b"x" * 1000),
    )  # fmt: skip
    arguments[2].write_text("earlier")
    with file_limit(500), pytest.raises(UserError, match=r"graph.pt2 cannot be written: .*large$"):
        compiled.compile_graph(*arguments)
    assert arguments[2].read_text() == "earlier" and list(tmp_path.iterdir()) == [arguments[2]]


def test_compiling_needs_a_folder_a_compiler_and_a_known_device(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(paths, "CACHE", file)
    with pytest.raises(UserError, match="set XDG_CACHE_HOME"):
        optimize(random_model(), compiled=True)
    monkeypatch.setattr(paths, "CACHE", tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        optimize(random_model(), compiled=True)
    with pytest.raises(UserError, match="on cpu and cuda, not on meta"):
        optimize(random_model().to("meta"), compiled=True)
