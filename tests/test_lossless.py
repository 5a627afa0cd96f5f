"""The central claim: every method produces the output of plain decoding.

                  exact    the distribution of the first tokens, over all random outcomes
    method   ×    greedy   the same tokens, on random Transformers in float64
                  cache    after every round each committed row equals that of a fresh prefill
                  limits   every way to end, at every offset, and the next turn after it

`python -m minispec.certify` checks many more cases, 130 with the exact check alone, and shows that
each check can fail. Here each method has one or two cases.
"""

import random

import pytest
import torch
from conftest import GOLDEN, SHARED, needs_shared

from minispec import load
from minispec.certify.common import GREEDY
from minispec.certify.methods.cases import (
    ADAPTIVE_K,
    ADAPTIVE_NODES,
    ADAPTIVE_TREE,
    PROBING_K,
    PROBING_TREE,
    bound,
    every_path,
    tree_method,
)
from minispec.certify.methods.checks import CONTEXT, TV_TOLERANCE, check_endings, worst_cache_error
from minispec.certify.toys import (
    Toy,
    ToyHeads,
    exact_distribution,
    first_tokens,
    random_eagle3_head,
    random_medusa_heads,
    random_mtp_head,
    small_model,
    total_variation,
    two_languages,
)
from minispec.generate import METHODS, decode
from minispec.model import Transformer
from minispec.sampling import Sampling, Seeded

# small enough to enumerate; seeds are arbitrary, but differ between targets and drafts
TOY, TRANSFORMER = Toy(5), small_model(4, vocab=3, layers=1)
LOOKAHEAD = {"window": 3, "ngram": 3, "guesses": 3}


def method_cases(model: Toy | Transformer) -> dict[str, tuple[str, dict]]:
    """Map case names to (method, options), for a Toy or a Transformer as target."""
    if isinstance(model, Toy):
        draft, heads, tree = Toy(77), ToyHeads(3), [(0, 0), (1,)]
    else:
        vocab = model.config.vocab_size
        draft, heads = small_model(9, vocab), random_medusa_heads(model, 1, 3)
        tree = every_path(3, 16)
    cases = {
        "plain": ("autoregressive", {}),
        "draft": ("speculative", {"draft": draft, "k": 1}),
        "draft, k auto": ("speculative", {"draft": draft, "k": ADAPTIVE_K}),
        "draft, probing": ("speculative", {"draft": draft, "k": PROBING_K}),
        "prompt lookup": ("prompt-lookup", {"k": 2}),
        "prompt lookup, probing": ("prompt-lookup", {"k": PROBING_K}),
        "medusa": ("medusa", {"heads": heads, "tree": tree}),
        "medusa, tree auto": ("medusa", {"heads": heads, "tree": ADAPTIVE_TREE}),
        "medusa, probing": ("medusa", {"heads": heads, "tree": PROBING_TREE}),
        "jacobi": ("jacobi", {"block": 3}),
        "lookahead": ("lookahead", LOOKAHEAD | {"pool_from_prompt": True}),
    }
    if isinstance(model, Toy):
        return cases
    mtp = {"head": random_mtp_head(model, 2), "k": 2}
    small = {"vocabulary": two_languages(model)}
    heads = {"heads": random_medusa_heads(model, 1, 3, shared=True), "tree": tree}
    cases["medusa, small vocabulary"] = "medusa", heads | small
    cases["fastmtp"] = "fastmtp", mtp
    cases["fastmtp, probing"] = "fastmtp", mtp | {"k": PROBING_K}
    cases["fastmtp, tree auto"] = "fastmtp", mtp | {"tree": ADAPTIVE_NODES}
    cases["fastmtp, small vocabulary"] = "fastmtp", mtp | small
    eagle3 = {"head": random_eagle3_head(model, 2)}
    cases["eagle3"] = "eagle3", eagle3 | {"k": 2}
    cases["eagle3, a tree"] = "eagle3", eagle3 | {"tree": 5}
    cases["hybrid"] = "hybrid", mtp
    cases["hybrid, eagle3"] = "hybrid", eagle3 | {"k": 2}
    cases["hybrid, draft"] = "hybrid", {"draft": draft, "k": 2, "lookup_k": 3}
    cases["hybrid, probing"] = "hybrid", mtp | {"k": PROBING_K, "lookup_k": PROBING_K}
    return cases


NAMES = list(method_cases(TRANSFORMER))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def test_every_lossless_method_has_a_case():
    covered = {method for method, _ in method_cases(TRANSFORMER).values()}
    assert covered | {"medusa-typical"} == set(METHODS)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_k=2), GREEDY], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_exact(name, sampling):
    target = TRANSFORMER if name not in method_cases(TOY) else TOY
    method, options = method_cases(target)[name]
    prompt, n = [1, 0, 1, 1, 0, 1], 2 if target is TRANSFORMER else 3
    ours = exact_distribution(bound(method, **options), target, prompt, sampling, n)
    plain = exact_distribution(bound("autoregressive"), target, prompt, sampling, n)
    assert total_variation(ours, plain) < TV_TOLERANCE
    assert abs(sum(ours.values()) - 1) < TV_TOLERANCE


@pytest.mark.parametrize(
    "shape, kind",
    [("chain", "with replacement"), ("wide", "one-hot"), ("wide", "without replacement")],
)
def test_exact_for_drafted_trees(shape, kind):
    method, prompt, sampling = tree_method(Toy(77), shape, kind), [1, 0, 1], Sampling(1.0)
    ours = exact_distribution(method, TOY, prompt, sampling, 2)
    plain = exact_distribution(bound("autoregressive"), TOY, prompt, sampling, 2)
    assert total_variation(ours, plain) < TV_TOLERANCE


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", NAMES)
def test_greedy(name, seed):
    model = small_model(seed)
    prompt = random.Random(seed).choices(range(24), k=1 + 11 * seed)
    plain = first_tokens(bound("autoregressive"), model, prompt, GREEDY, Seeded(), 24)
    method, options = method_cases(model)[name]
    for _ in range(2):  # twice, as no state may be kept between runs
        ours = first_tokens(bound(method, **options), model, prompt, GREEDY, Seeded(), 24)
        assert ours == plain


@pytest.mark.parametrize("name", NAMES)
def test_cache(name):
    model = small_model(7)
    method, options = method_cases(model)[name]
    assert worst_cache_error(model, bound(method, **options)) < 1e-9


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow if "," in name or name.endswith("auto") else ())
    for name in NAMES if "vocabulary" not in name
])  # fmt: skip
def test_limits(name):
    if name.startswith(("fastmtp", "eagle3", "hybrid")):
        method, options = method_cases(TRANSFORMER)[name]

        def target(eos):
            return small_model(4, vocab=3, layers=1, context=CONTEXT, eos_ids=eos)
    else:
        method, options = method_cases(TOY)[name]

        def target(eos):
            return Toy(5, context=CONTEXT, eos=eos)

    verdict = check_endings(method, options, targets=[target])
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
