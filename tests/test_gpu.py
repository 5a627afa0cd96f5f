"""On a GPU (pytest -m gpu): every method says what plain decoding says, compiled or not."""

import pytest
import torch
from conftest import random_model, random_tokens

from minispec.fast import quicken
from minispec.generate import decode
from minispec.toys import random_head, random_heads
from minispec.tree import Tree

pytestmark = pytest.mark.gpu


def options_of(method: str) -> dict:
    return {
        "speculative": {"draft": random_model(1).cuda(), "k": "auto"},
        "medusa": {"heads": random_heads(random_model(), 0).cuda(), "tree": "auto"},
        "fastmtp": {"head": random_head(random_model(), 0).cuda(), "k": "auto"},
    }.get(method, {})


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "method",
    ["autoregressive", "speculative", "prompt-lookup", "medusa", "jacobi", "lookahead", "fastmtp"],
)
def test_every_method_equals_plain_decoding(method, compiled):
    plain = decode(random_model(3).cuda(), None, random_tokens(20), max_new_tokens=60)
    model = random_model(3).cuda()
    if compiled:
        quicken(model, compiled=True)
    for _ in range(2):  # a graph is captured, then replayed
        run = decode(model, None, random_tokens(20), method, max_new_tokens=60,
                     **options_of(method))  # fmt: skip
        assert run.tokens == plain.tokens


def test_it_runs_in_bfloat16():
    model = random_model().cuda().bfloat16()
    for method in "lookahead", "medusa":
        options = {name: each.bfloat16() if hasattr(each, "bfloat16") else each
                   for name, each in options_of(method).items()}  # fmt: skip
        run = decode(model, None, [1, 2, 3], method, max_new_tokens=40, **options)
        assert len(run.tokens) == 40


def test_a_pass_computes_what_the_cpu_computes():
    model, tokens = random_model(dtype=torch.float32), random_tokens(40)
    expected = model.logits(model(tokens))
    on_gpu = model.to("cuda")
    cache = on_gpu.new_cache()
    on_gpu.prefill(tokens[:-5], cache)
    tree = Tree.chain(tokens[-5], tokens[-4:])
    hidden = on_gpu(tree.tokens, cache, tree.depth, tree.mask)
    torch.testing.assert_close(on_gpu.logits(hidden).cpu(), expected[:, -5:], rtol=1e-3, atol=1e-3)
