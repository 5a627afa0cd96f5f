"""After any sequence of writes, commits and truncations, the cache equals a fresh prefill."""

import random

import pytest
import torch
from conftest import random_model, random_tokens, random_tree


def assert_fresh(model, cache, tokens: list[int]) -> None:
    fresh = model.new_cache()
    model.prefill(tokens, fresh)
    for kept, expected in zip([*cache.k, *cache.v], [*fresh.k, *fresh.v]):
        torch.testing.assert_close(
            kept[:, : len(tokens)], expected[:, : len(tokens)], rtol=0, atol=1e-10
        )


@pytest.mark.parametrize("seed", range(12))
def test_random_rounds_equal_a_fresh_prefill(seed):
    rng = random.Random(seed)
    model = random_model(seed % 3)
    cache, tokens = model.new_cache(), []
    for _ in range(12):
        if rng.random() < 0.3 and tokens:
            tokens = tokens[: rng.randint(0, len(tokens))]
            cache.truncate(len(tokens))
        tree = random_tree(rng, rng.randint(1, 12))
        model(tree.tokens, cache, tree.depth, tree.mask)
        if rng.random() < 0.2:
            continue  # the whole round is rejected
        path = [0]
        while rng.random() < 0.8 and tree.children(path[-1]):
            path.append(rng.choice(tree.children(path[-1])))
        cache.commit(path)
        tokens += tree.tokens_at(path)
        assert cache.length == len(tokens)
        assert_fresh(model, cache, tokens)


def test_a_pass_does_not_advance_the_cache_and_scratch_is_overwritten():
    model = random_model()
    tokens = random_tokens(10)
    cache = model.new_cache()
    model(random_tokens(30, 1), cache)
    assert cache.length == 0
    model.prefill(tokens, cache)
    assert_fresh(model, cache, tokens)


def test_rows_that_do_not_fit_raise_an_error():
    model = random_model()
    cache = model.new_cache(capacity=8)
    model.prefill(random_tokens(6), cache)
    model(random_tokens(2), cache)
    assert cache.free_rows == 2
    with pytest.raises(ValueError, match="3 more tokens do not fit: the cache holds 8 and 6"):
        model(random_tokens(3), cache)


def test_nothing_is_allocated_after_construction():
    model = random_model()
    cache = model.new_cache(capacity=64)
    before = [tensor.data_ptr() for tensor in (*cache.k, *cache.v)]
    model.prefill(random_tokens(20), cache)
    tree = random_tree(random.Random(0), 9)
    model(tree.tokens, cache, tree.depth, tree.mask)
    cache.commit([0, 1])
    assert [tensor.data_ptr() for tensor in (*cache.k, *cache.v)] == before
