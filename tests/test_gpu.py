"""On a GPU (pytest -m gpu), every method generates what plain decoding does, compiled or not.

GPU_TESTS_DEVICE=cpu runs these tests without a GPU, except for those of compiled passes.
"""

import os

import pytest
import torch
from conftest import AUTO, method_options, random_model, random_tokens

from minispec.fast import optimize, optimize_drafter
from minispec.generate import METHODS, decode
from minispec.model import Transformer
from minispec.tree import Tree

pytestmark = pytest.mark.gpu
DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")


def changes_of(method: str) -> list[dict]:
    """No options, and each that may be "auto"."""
    return [{}, *({argument: "auto"} for name, argument in AUTO if name == method)]


@pytest.fixture(scope="module")
def plain() -> list[int]:
    model = random_model(3).to(DEVICE)
    return decode(model, None, random_tokens(20), max_new_tokens=60).tokens


@pytest.fixture(scope="module", params=[False, True], ids=["captured", "compiled and captured"])
def optimized(request) -> Transformer:
    """One model for all methods, so that each row count is captured once."""
    if DEVICE == "cpu":
        pytest.skip("there are no CUDA graphs, and compiling takes minutes")
    model = random_model(3).to(DEVICE)
    optimize(model, compiled=request.param)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_every_method_equals_plain_decoding(method, plain):
    model = random_model(3).to(DEVICE)
    options = method_options(model).get(method, {})
    for changes in changes_of(method):
        settings = options | changes
        run = decode(model, None, random_tokens(20), method, max_new_tokens=60, **settings)
        assert run.tokens == plain


@pytest.mark.parametrize("method", METHODS)
def test_every_method_equals_plain_decoding_with_graphs(method, plain, optimized):
    for changes in changes_of(method):
        options = method_options(optimized).get(method, {}) | changes
        optimize_drafter(options, optimized)
        for _ in range(2):  # graphs are captured, then replayed
            run = decode(optimized, None, random_tokens(20), method, max_new_tokens=60, **options)
            assert run.tokens == plain
        assert optimized.graphs.captured and not optimized.graphs.failed


def test_decoding_runs_in_bfloat16():
    model = random_model().to(DEVICE).bfloat16()
    for method in METHODS:
        options = {name: x.bfloat16() if hasattr(x, "bfloat16") else x
                   for name, x in method_options(model).get(method, {}).items()}  # fmt: skip
        run = decode(model, None, [1, 2, 3], method, max_new_tokens=40, **options)
        assert len(run.tokens) == 40


def test_a_pass_computes_the_same_as_on_the_cpu():
    model, tokens = random_model(dtype=torch.float32), random_tokens(40)
    expected = model.logits(model(tokens))
    on_gpu = model.to(DEVICE)
    cache = on_gpu.new_cache()
    on_gpu.prefill(tokens[:-5], cache)
    tree = Tree.chain(tokens[-5], tokens[-4:])
    hidden = on_gpu(tree.tokens, cache, tree.depth, tree.mask)
    torch.testing.assert_close(on_gpu.logits(hidden).cpu(), expected[:, -5:], rtol=1e-3, atol=1e-3)
