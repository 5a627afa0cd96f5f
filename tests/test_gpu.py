"""On a GPU (pytest -m gpu), every method generates what plain decoding does, compiled or not.

GPU_TESTS_DEVICE=cpu runs these tests without a GPU, except for those of compiled passes.
"""

import os

import pytest
import torch
from conftest import method_options, random_model, random_tokens

from minispec.fast import optimize
from minispec.generate import decode
from minispec.model import Transformer
from minispec.tree import Tree

pytestmark = pytest.mark.gpu
DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
METHODS = ["autoregressive", "speculative", "prompt-lookup", "medusa", "jacobi", "lookahead",
           "fastmtp"]  # fmt: skip
ADAPTIVE = {"speculative": {"k": "auto"}, "medusa": {"tree": "auto"}, "fastmtp": {"k": "auto"}}


@pytest.fixture(scope="module")
def plain() -> list[int]:
    model = random_model(3).to(DEVICE)
    return decode(model, None, random_tokens(20), max_new_tokens=60).tokens


@pytest.fixture(scope="module")
def compiled() -> Transformer:
    """One model for all methods, so that each row count is compiled once."""
    if DEVICE == "cpu":
        pytest.skip("compiling takes minutes on a CPU")
    model = random_model(3).to(DEVICE)
    optimize(model, compiled=True)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_every_method_equals_plain_decoding(method, plain):
    model = random_model(3).to(DEVICE)
    options = method_options(model).get(method, {})
    for changes in {}, ADAPTIVE.get(method, {}):
        settings = options | changes
        run = decode(model, None, random_tokens(20), method, max_new_tokens=60, **settings)
        assert run.tokens == plain


@pytest.mark.parametrize("method", METHODS)
def test_every_method_equals_plain_decoding_when_compiled(method, plain, compiled):
    options = method_options(compiled).get(method, {})
    for _ in range(2):  # a graph is captured, then replayed
        run = decode(compiled, None, random_tokens(20), method, max_new_tokens=60, **options)
        assert run.tokens == plain


def test_a_policy_works_with_compiled_passes(plain, compiled):
    options = method_options(compiled)["fastmtp"] | {"k": "auto"}
    run = decode(compiled, None, random_tokens(20), "fastmtp", max_new_tokens=60, **options)
    assert run.tokens == plain


def test_decoding_runs_in_bfloat16():
    model = random_model().to(DEVICE).bfloat16()
    for method in "lookahead", "medusa":
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
