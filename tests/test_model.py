"""The model agrees with transformers and with itself: with and without a cache, for chains and
trees.
"""

import json
import random

import pytest
import torch
from conftest import GOLDEN, SHARED, needs_shared, random_model, random_tokens, random_tree
from safetensors.torch import load_file

from minispec import load
from minispec.methods.autoregressive import autoregressive
from minispec.sampling import Sampling, Seeded

VARIANTS = sorted(folder.name for folder in GOLDEN.iterdir())


def greedy(model, prompt: list[int], n: int) -> list[int]:
    tokens: list[int] = []
    for step in autoregressive(model, prompt, Sampling(), Seeded()):
        tokens += step.tokens
        if len(tokens) >= n:
            return tokens[:n]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant):
    golden = load_file(GOLDEN / variant / "golden.safetensors")
    for dtype, key, tolerance in (
        (torch.float32, "logits32", 1e-5),
        (torch.float64, "logits64", 1e-10),
    ):
        model, _ = load(GOLDEN / variant, dtype=dtype, device="cpu")
        logits = model.logits(model(golden["tokens"]))[0]
        # relative to the largest logit, because CPUs sum in different orders
        assert (logits - golden[key]).abs().max() <= tolerance * golden[key].abs().max()
    assert greedy(model, golden["tokens"][:20].tolist(), 64) == golden["greedy"].tolist()


@needs_shared
@pytest.mark.parametrize("name", ["tinystories-656k", "stories260k"])
def test_real_checkpoints_reproduce_their_reference(name):
    folder = SHARED / "checkpoints" / name
    model, tokenizer = load(folder, dtype="float64", device="cpu")
    tensors = load_file(folder / "reference.safetensors")
    for i, case in enumerate(json.loads((folder / "reference.json").read_text())["cases"]):
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        logits = model.logits(model(tensors[f"{i}.tokens"]))[0]
        # the reference computed norms and angles in float32
        assert (logits - tensors[f"{i}.logits"]).abs().max() < 5e-5
        assert greedy(model, case["prompt_ids"], case["new_tokens"]) == case["greedy"]


@pytest.mark.parametrize("seed", range(10))
def test_any_split_into_passes_gives_the_same_hidden_states(seed):
    rng = random.Random(seed)
    model = random_model(seed, qk_norm=bool(seed % 2), qkv_bias=bool(seed % 3))
    tokens = random_tokens(rng.randint(2, 150), seed)
    expected = model(tokens)
    cache, parts = model.new_cache(capacity=len(tokens)), []
    while cache.length < len(tokens):
        part = tokens[cache.length : cache.length + rng.choice([1, 2, 3, 8, 64, 65])]
        parts.append(model(part, cache))
        cache.commit(list(range(len(part))))
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cached", [True, False])
def test_each_row_of_a_tree_equals_the_chain_through_its_ancestors(seed, cached):
    rng = random.Random(seed)
    model = random_model(seed)
    prefix = random_tokens(rng.choice([1, 5, 63, 64, 100]), seed) if cached else []
    tree = random_tree(rng, rng.choice([1, 2, 7, 20, 64]))
    cache = None
    if cached:
        cache = model.new_cache()
        model.prefill(prefix, cache, chunk=17)
    hidden = model(tree.tokens, cache, tree.depth, tree.mask)[0]
    for node in range(len(tree)):
        path = [node]
        while tree.parents[path[0]] >= 0:
            path.insert(0, tree.parents[path[0]])
        expected = model(prefix + tree.tokens_at(path))[0, -1]
        torch.testing.assert_close(hidden[node], expected, rtol=0, atol=1e-10)


def test_half_precision_does_not_change_the_rotary_frequencies():
    model = random_model(dtype=torch.float32)
    before = model.rope.frequencies.clone()
    model.to(torch.bfloat16)
    assert model.rope.frequencies.dtype == torch.float32 and torch.equal(
        model.rope.frequencies, before
    )
