"""The central claim: every method's output is plain decoding's.

                  exact    the distribution of its first tokens, over every random outcome
    method   ×    greedy   the same tokens, on random Transformers in float64
                  cache    after every round each committed row is that of a fresh prefill
                  limits   every way to end, at every offset, and the next turn after it

`python -m minispec.certify` does the same in many more cases, 130 of the exact check alone, and
shows that each check can fail; here each method has one or two.
"""

import random

import pytest
import torch
from conftest import GOLDEN, SHARED, needs_shared

from minispec import load
from minispec.certify.ours.cases import BEST_TREE, GREEDY, LENGTH, bound, every_path, tree_method
from minispec.certify.ours.checks import CONTEXT, EXACT, ends_of, worst_row
from minispec.generate import METHODS, decode
from minispec.model import Transformer
from minispec.sampling import Sampling, Seeded
from minispec.toys import (
    Toy,
    ToyHeads,
    exact_distribution,
    first_tokens,
    random_head,
    random_heads,
    small_model,
    switching,
    total_variation,
)

# small enough to enumerate; all seeds here are arbitrary, and drafts have others than targets
TOY, TRANSFORMER = Toy(5), small_model(4, vocab=3, layers=1)
WINDOW = {"window": 3, "ngram": 3, "guesses": 3}


def drafts_and_heads(model: Toy | Transformer) -> dict[str, tuple[str, dict]]:
    """name -> (method, options) for a target of either kind."""
    if isinstance(model, Toy):
        draft, heads, tree = Toy(77), ToyHeads(3), [(0, 0), (1,)]
    else:
        vocab = model.config.vocab_size
        draft, heads = small_model(9, vocab), random_heads(model, 1, 3)
        tree = every_path(3, 16)
    cases = {
        "plain": ("autoregressive", {}),
        "draft": ("speculative", {"draft": draft, "k": 1}),
        "draft, k auto": ("speculative", {"draft": draft, "k": LENGTH}),
        "prompt lookup": ("prompt-lookup", {"k": 2}),
        "medusa": ("medusa", {"heads": heads, "tree": tree}),
        "medusa, tree auto": ("medusa", {"heads": heads, "tree": BEST_TREE}),
        "jacobi": ("jacobi", {"block": 3}),
        "lookahead": ("lookahead", WINDOW | {"pool_from_prompt": True}),
    }
    if isinstance(model, Toy):
        return cases
    mtp = {"head": random_head(model, 2), "k": 2}
    words = {"vocabulary": switching(model)}
    heads = {"heads": random_heads(model, 1, 3, shared=True), "tree": tree}
    cases["medusa, small vocabulary"] = "medusa", heads | words
    cases["fastmtp"] = "fastmtp", mtp
    cases["fastmtp, small vocabulary"] = "fastmtp", mtp | words
    return cases


NAMES = list(drafts_and_heads(TRANSFORMER))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def test_the_table_has_every_method_that_promises_it():
    of_the_table = {method for method, _ in drafts_and_heads(TRANSFORMER).values()}
    assert of_the_table | {"medusa-typical"} == set(METHODS)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_k=2), GREEDY], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_exact(name, sampling):
    target = TRANSFORMER if name not in drafts_and_heads(TOY) else TOY
    method, options = drafts_and_heads(target)[name]
    prompt, n = [1, 0, 1, 1, 0], 2 if target is TRANSFORMER else 3
    ours = exact_distribution(bound(method, **options), target, prompt, sampling, n)
    plain = exact_distribution(bound("autoregressive"), target, prompt, sampling, n)
    assert total_variation(ours, plain) < EXACT and abs(sum(ours.values()) - 1) < EXACT


@pytest.mark.parametrize(
    "shape, kind",
    [("chain", "with replacement"), ("wide", "one-hot"), ("wide", "without replacement")],
)
def test_exact_of_drafted_trees(shape, kind):
    method, prompt, hot = tree_method(Toy(77), shape, kind), [1, 0, 1], Sampling(1.0)
    ours = exact_distribution(method, TOY, prompt, hot, 2)
    plain = exact_distribution(bound("autoregressive"), TOY, prompt, hot, 2)
    assert total_variation(ours, plain) < EXACT


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", NAMES)
def test_greedy(name, seed):
    model = small_model(seed)
    prompt = random.Random(seed).choices(range(24), k=1 + 11 * seed)
    plain = first_tokens(bound("autoregressive"), model, prompt, GREEDY, Seeded(), 24)
    method, options = drafts_and_heads(model)[name]
    for _ in range(2):  # nothing is kept between runs
        ours = first_tokens(bound(method, **options), model, prompt, GREEDY, Seeded(), 24)
        assert ours == plain


@pytest.mark.parametrize("name", NAMES)
def test_cache(name):
    model = small_model(7)
    method, options = drafts_and_heads(model)[name]
    assert worst_row(model, bound(method, **options)) < 1e-9


@pytest.mark.parametrize("name", [name for name in NAMES if "vocabulary" not in name])
def test_limits(name):
    if name.startswith("fastmtp"):
        method, options = drafts_and_heads(TRANSFORMER)[name]

        def target(eos):
            return small_model(4, vocab=3, layers=1, context=CONTEXT, eos_ids=eos)
    else:
        method, options = drafts_and_heads(TOY)[name]

        def target(eos):
            return Toy(5, context=CONTEXT, eos=eos)

    verdict = ends_of(method, options, targets=[("toy", target)], plain={})
    assert verdict.passed, verdict.detail


@pytest.mark.parametrize("family", sorted(p.name for p in GOLDEN.iterdir() if p.is_dir()))
@pytest.mark.parametrize("method", ["prompt-lookup", "jacobi", "lookahead"])
def test_every_family(family, method):
    model, _ = load(GOLDEN / family, "float64", "cpu")
    plain = decode(model, None, [3, 1, 4], max_new_tokens=24, ignore_eos=True)
    run = decode(model, None, [3, 1, 4], method, max_new_tokens=24, ignore_eos=True)
    assert run.tokens == plain.tokens


@needs_shared
@pytest.mark.parametrize("name", ["tinystories-656k", "stories260k"])
@pytest.mark.parametrize("method", ["jacobi", "lookahead"])
def test_real_checkpoints(name, method):
    model, tokenizer = load(SHARED / "checkpoints" / name, "float64", "cpu")
    plain = decode(model, tokenizer, "Once upon a time", max_new_tokens=40)
    run = decode(model, tokenizer, "Once upon a time", method, max_new_tokens=40)
    assert run.tokens == plain.tokens
