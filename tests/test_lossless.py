"""The central claim: every method produces the output of plain decoding.

                  exact    the distribution of the first tokens, over all random outcomes
    method   ×    greedy   the same tokens, on Transformers in float64
                  cache    after every round each committed row equals that of a fresh prefill
                  limits   every way to end, at every offset, and the next turn after it

`minispec certify` checks many more cases and shows that each check can fail. Here each method has a
few of its cases (see `kinds_of_cases`). Greedy runs use texts that repeat themselves and drafters
that are often right and often wrong.
"""

import contextlib
import functools
from collections import Counter

import pytest
from conftest import GOLDEN, SHARED, kinds_of_cases, needs_shared
from half_right import repeating_model

from minispec import UserError, load
from minispec.certify.common import GREEDY
from minispec.certify.methods import cases
from minispec.certify.methods.cases import bound, runs_on_toys, tree_method
from minispec.certify.methods.checks import (
    TV_TOLERANCE,
    check_endings,
    ending_target,
    kinds_of,
    outcome,
    worst_cache_error,
)
from minispec.certify.toys import (
    Toy,
    every_outcome,
    total_variation,
)
from minispec.generate import METHODS, decode
from minispec.methods import find_method
from minispec.sampling import Sampling, Seeded, probs
from minispec.verify import accept, accept_block

LOSSLESS = [name for name in METHODS if find_method(name).lossless]  # greedy, the others are, too
UNTRAINED = [name for name in METHODS if not find_method(name).of_kind("weights")]
PROMPT = [0, 1, 2, 3, 0, 1, 2, 3]  # a circle of the repeating model


pytestmark = pytest.mark.usefixtures("half_right_drafters")
EACH = [(method, name) for method in LOSSLESS
        for name in kinds_of_cases(method, cases.target(False, 3), first=True)]  # fmt: skip


# ---- plain decoding, by passes over the whole text -----------------------------------------------


def next_probs(model, tokens: tuple[int, ...], sampling: Sampling) -> list[float]:
    p = probs(model.logits(model([*tokens])[0, -1:]), sampling)[0]
    return p.tolist()


@functools.cache
def plain_distribution(model, prompt: tuple, sampling: Sampling, n: int) -> dict:
    """The probability of each sequence of the first `n` tokens."""
    found = {(): 1.0}
    for _ in range(n):
        found = {
            (*tokens, x): weight * p for tokens, weight in found.items()
            for x, p in enumerate(next_probs(model, prompt + tokens, sampling)) if p > 0
        }  # fmt: skip
    return found


def plain_tokens(model, prompt: list[int], n: int) -> list[int]:
    """The greedy tokens."""
    tokens = []
    for _ in range(n):
        tokens.append(next_probs(model, (*prompt, *tokens), GREEDY).index(1.0))
    return tokens


# ---- exact ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "name"), [pytest.param(*case, id=case[1]) for case in EACH])
def test_exact(method, name):
    """Over three tokens or, if drafts may be sampled, over two; three tokens of each text, or two
    if trees are drawn. At temperature 1, the outcomes must contain every kind of round that can
    occur."""
    declared = find_method(method)
    vocab = 2 if declared.of_kind("sampling") else 3
    options = kinds_of_cases(method, cases.target(False, vocab), 4, first=True)[name]
    if toy := runs_on_toys(declared, options):
        options = kinds_of_cases(method, cases.target(True, vocab), 4, first=True)[name]
    model = cases.target(toy, vocab)
    drawn = not toy and options.get("tree", 0) != 0 and "draft_sampling" not in options
    samplings = cases.SAMPLINGS if toy else ["T=1"]
    check_exact(bound(method, **options), model, samplings, 2 if drawn else 3)


def check_exact(method, model, samplings, n=3) -> None:
    case = cases.ExactCase("", method, model=model, n=n)
    for label in samplings:
        settings = cases.SAMPLINGS[label], case.n
        ours, seen, possible = Counter(), Counter(), set()
        outcomes = every_outcome(functools.partial(outcome, case, settings))
        for (tokens, steps), weight in outcomes:
            ours[tokens] += weight
            found, could = kinds_of(steps, case.n, model.config.vocab_size)
            seen, possible = seen + found, possible | could
        expected = plain_distribution(model, case.prompt, *settings)
        assert total_variation(ours, expected) < TV_TOLERANCE, label
        assert abs(sum(ours.values()) - 1) < TV_TOLERANCE
        assert possible <= seen.keys() or label != "T=1"


@pytest.mark.parametrize(
    "shape, kind",
    [("chain", "with replacement"), ("wide", "one-hot"), ("wide", "without replacement")],
)
def test_exact_for_drafted_trees(shape, kind):
    check_exact(tree_method(Toy(77, 2), shape, kind), Toy(5, 2), ["T=1"])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_block_verification_keeps_at_least_as_many_drafts(k):
    """The expected number of tokens of a round, over all its outcomes. With one draft, both rules
    are one."""
    gains = []
    for seed in range(8):
        means = []
        for rule in accept, accept_block:
            options = {"draft": Toy(seed + 50, 2), "k": k, "rule": rule}
            first_round = functools.partial(tokens_of_first_round, Toy(seed, 2), options)
            outcomes = every_outcome(first_round)
            means.append(sum(tokens * weight for tokens, weight in outcomes))
        gains.append(means[1] - means[0])
    assert min(gains) > -1e-12
    assert max(gains) < 1e-12 if k == 1 else sum(gain > 1e-3 for gain in gains) > 4


def tokens_of_first_round(model: Toy, options: dict, randomness) -> int:
    rounds = METHODS["speculative"](model, [1, 0, 1], Sampling(1.0), randomness, **options)
    next(rounds)
    return len(next(rounds).tokens)


# ---- greedy, cache and limits --------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_greedy(method):
    """On two targets, on the second one from the first token on. Over all of a method's cases, some
    drafts are accepted and some rejected."""
    drafted = accepted = 0
    for seed, prompt in (0, PROMPT), (5, [1]):
        model = repeating_model(seed)
        plain = plain_tokens(model, prompt, 24)
        for name, options in kinds_of_cases(method, model, seed).items():
            for _ in range(2):  # twice, as no state may be kept between runs
                tokens, rounds = [], bound(method, **options)(model, prompt, GREEDY, Seeded())
                while len(tokens) < 24:
                    step = next(rounds)
                    tokens += step.tokens
                    drafted += len(step.tree or [0]) - 1
                    accepted += len(step.path or [0]) - 1
                assert tokens[:24] == plain, name
    assert 0 < accepted < drafted or method == "autoregressive"


@pytest.mark.parametrize("method", METHODS)
def test_cache(method):
    model = repeating_model(7)
    for name, options in kinds_of_cases(method, model).items():
        assert worst_cache_error(model, bound(method, **options)) < 1e-9, name


def ending_cases(method: str) -> dict[str, dict]:
    """The last case that fits into the context, and those whose policies choose."""
    toy = runs_on_toys(find_method(method), {})
    found = dict(cases.cases_of(find_method(method), cases.target(toy, 3), 4))
    chosen = {name: options for name, options in found.items() if "=auto" in name}
    for name in [name for name in reversed(found) if name not in chosen]:
        with contextlib.suppress(UserError):
            decode(ending_target(toy, 4), None, [0], method, max_new_tokens=1, **found[name])
            return {name: found[name]} | chosen
    raise AssertionError("no case fits")


@pytest.mark.parametrize(("method", "name"), [
    pytest.param(method, name, id=name, marks=pytest.mark.slow if i else ())
    for method in METHODS for i, name in enumerate(ending_cases(method))
])  # fmt: skip
def test_limits(method, name):
    toy = runs_on_toys(find_method(method), {})
    target = functools.partial(ending_target, toy, 5 if toy else 8)
    verdict = check_endings(method, ending_cases(method)[name], targets=[target])
    assert verdict.passed, verdict.detail


# ---- real checkpoints ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(p.name for p in GOLDEN.iterdir() if p.is_dir()))
def test_every_family(family):
    model, _ = load(GOLDEN / family, "float64", "cpu")
    plain = decode(model, None, [3, 1, 4], max_new_tokens=24, ignore_eos=True)
    for method in UNTRAINED:
        run = decode(model, None, [3, 1, 4], method, max_new_tokens=24, ignore_eos=True)
        assert run.tokens == plain.tokens, method


@needs_shared
@pytest.mark.parametrize("name", ["tinystories-656k", "stories260k"])
def test_real_checkpoints(name):
    model, tokenizer = load(SHARED / "checkpoints" / name, "float64", "cpu")
    plain = decode(model, tokenizer, "Once upon a time", max_new_tokens=40)
    for method in UNTRAINED:
        run = decode(model, tokenizer, "Once upon a time", method, max_new_tokens=40)
        assert run.tokens == plain.tokens, method
