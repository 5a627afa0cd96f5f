"""The checks: that a method's output is plain decoding's, in distribution and token for token."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from minispec.certify.others.statistics import FALSE_ALARM, chi_square_p
from minispec.certify.ours.cases import (
    BEST_TREE,
    GREEDY,
    LENGTH,
    RANK_TREES,
    SAMPLINGS,
    afresh,
    bound,
    every_path,
    greedy_cases,
    proofs,
    tree_method,
)
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.generate import METHODS, decode
from minispec.generate.api import common_prefix
from minispec.generate.run import Run
from minispec.model import Transformer
from minispec.sampling import Sampling, Seeded
from minispec.toys import (
    Method,
    Toy,
    ToyHeads,
    exact_distribution,
    first_tokens,
    letters,
    random_head,
    random_heads,
    small_model,
    switching,
    total_variation,
)

EXACT = 1e-12  # total variation that counts as none, for sums of float64 products
RUNS, JOINT = 400, 3  # runs of one statistical check, which tests so many tokens jointly


@dataclass(frozen=True)
class Verdict:
    """One row of the table."""

    check: str
    case: str
    passed: bool | None  # None: neither, as the detail explains
    detail: str


Check = Callable[..., Iterator[Verdict]]
# check(only="") yields a verdict for each case whose name contains `only`


# ---- exact ---------------------------------------------------------------------------------------


def check_exact(only: str = "") -> Iterator[Verdict]:
    """The distribution of the output, summed over every random outcome, equals plain decoding's."""
    prompt = [1, 0, 1, 1, 0]
    plain: dict[tuple, dict[tuple[int, ...], float]] = {}  # many cases share a model
    for proof in proofs():
        for label in proof.samplings:
            name, how = f"{proof.name}, {label}", (SAMPLINGS[label], proof.n)
            if only not in name:
                continue
            key = id(proof.model), *how
            if key not in plain:
                plain[key] = exact_distribution(bound("autoregressive"), proof.model, prompt, *how)
            ours = exact_distribution(proof.method, proof.model, prompt, *how)
            distance = max(total_variation(ours, plain[key]), abs(sum(ours.values()) - 1))
            detail = f"TV {distance:.1e} over {len(ours)} sequences of {proof.n} tokens"
            yield Verdict("exact", name, distance < EXACT, detail)


# ---- greedy --------------------------------------------------------------------------------------

MODELS, TOKENS = 3, 16  # random models of the greedy check, and tokens of each run


def check_greedy(only: str = "") -> Iterator[Verdict]:
    """Token identity with plain decoding on random Transformers in float64, twice in a row."""
    runs: dict[str, list[str | None]] = {}
    for seed in range(MODELS):
        model = small_model(seed)
        prompt = random.Random(seed).choices(range(24), k=1 + 6 * seed)
        expected = first_tokens(bound("autoregressive"), model, prompt, GREEDY, Seeded(), TOKENS)
        for name, method in greedy_cases(model, seed):
            if only not in name:
                continue
            for _ in range(2):
                tokens = first_tokens(method, model, prompt, GREEDY, Seeded(), TOKENS)
                wrong = None if tokens == expected else first_difference(tokens, expected)
                runs.setdefault(name, []).append(wrong and f"model {seed}: {wrong}")
    for name, found in runs.items():
        wrong = next(filter(None, found), None)
        detail = wrong or f"{len(found) // 2} models, {TOKENS} tokens, twice"
        yield Verdict("greedy", name, wrong is None, detail)
    if only in (name := "a draft that is the target"):
        refused = refused_of_itself()
        yield Verdict("greedy", name, refused == 0, f"{refused} tokens refused")


def refused_of_itself() -> int:
    """A draft that is the target must have every token accepted, sampled too."""
    model, refused = small_model(3), 0
    steps = METHODS["speculative"](model, [1, 2], Sampling(1.0), Seeded(0), draft=model, k=4)
    for step, _ in zip(steps, range(13)):
        refused += len(step.tree or ()) - len(step.path)
    return refused


def first_difference(a: Iterable[int], b: Iterable[int]) -> str:
    a, b = list(a), list(b)
    at = common_prefix(a, b)
    return f"differs at token {at}: {a[at : at + 3]} instead of {b[at : at + 3]}"


# ---- cache ---------------------------------------------------------------------------------------


def check_cache(only: str = "") -> Iterator[Verdict]:
    """After every round each committed row equals a fresh prefill's, and all but one are there."""
    model = small_model(7)
    for name, method in greedy_cases(model, 0):
        if only in name:
            error = worst_row(model, method)
            detail = f"largest difference of a row {error:.1e}"
            yield Verdict("cache", name, error < 1e-9, detail)


def worst_row(model: Transformer, method: Method, least: int = 9, most: int = 40) -> float:
    """The largest error of a committed row in `least` rounds; where proposals fork, rounds go on
    until rows had to be moved together, `most` of them."""
    cache, tokens, error = model.new_cache(), [3, 1, 4, 1, 5], 0.0
    forked = moved = False
    for round_, step in enumerate(method(model, tokens, Sampling(1.0), Seeded(1), cache=cache), 1):
        tokens = tokens + step.tokens
        forked |= step.tree is not None and len(step.tree) > max(step.tree.depths) + 1
        moved |= step.path != list(range(len(step.path)))
        if cache.length != len(tokens) - 1:
            return math.inf
        fresh = model.new_cache()
        model.prefill(tokens[:-1], fresh)
        kept = slice(cache.length)
        for ours, theirs in zip([*cache.k, *cache.v], [*fresh.k, *fresh.v]):
            error = max(error, float((ours[:, kept] - theirs[:, kept]).abs().max()))
        enough = moved or not forked or round_ == most or cache.free_rows < least
        if round_ >= least and enough:
            break
    return error


# ---- statistical ---------------------------------------------------------------------------------


def check_statistical(only: str = "") -> Iterator[Verdict]:
    """χ² of the first tokens of many seeded runs against their exact distribution: what the proofs
    by enumeration leave out, the real random numbers."""
    toy, draft, prompt = Toy(21, vocab=6), Toy(24, vocab=6), [1, 2, 3, 1, 2]
    model = small_model(21, vocab=6, layers=1)
    mtp = {"head": random_head(model, 2), "k": 2, "vocabulary": switching(model)}
    heads = random_heads(model, 1)
    cases = {
        "speculative": (toy, bound("speculative", draft=draft, k=3)),
        "tree, deep": (toy, tree_method(draft, "deep", "without replacement")),
        "medusa": (model, bound("medusa", heads=heads, tree=RANK_TREES["deep"])),
        "fastmtp": (model, bound("fastmtp", **mtp)),
        "lookahead": (toy, bound("lookahead", window=3, ngram=3, guesses=3)),
    }
    sampling = Sampling(1.0, top_p=0.9)
    for name, (target, method) in cases.items():
        if only not in name:
            continue
        exact = exact_distribution(bound("autoregressive"), target, prompt, sampling, JOINT)
        p = chi_square_p(
            Counter(
                first_tokens(method, target, prompt, sampling, Seeded(seed), JOINT)
                for seed in range(RUNS)
            ),
            exact,
        )
        detail = f"p = {p:.3f}, {RUNS} runs (below {FALSE_ALARM:.0e} fails)"
        yield Verdict("statistical", f"{name}, T=1 top-p 0.9", p > FALSE_ALARM, detail)


# ---- limits --------------------------------------------------------------------------------------

CONTEXT = 24


def endings() -> Iterator[tuple[str, tuple[int, ...], dict]]:
    """(name, end tokens, options): ways to end, each at every offset."""
    for n in range(9):
        yield f"max-new-tokens {n}", (), {"max_new_tokens": n}
    for eos in (0,), (1,), (2,), (0, 2), ():
        yield f"eos {eos}", eos, {"max_new_tokens": 14}
    for stop in "a", "b", "c d", "b a", "a c", "c c b":
        yield f"stop {stop!r}", (), {"stop": (stop,), "max_new_tokens": 14}
    yield "context", (), {"max_new_tokens": 3 * CONTEXT}


def check_limits(only: str = "") -> Iterator[Verdict]:
    """Tokens, text and reason to stop equal plain decoding's; the next turn finds a sound cache."""
    toys = {
        "speculative": {"draft": Toy(77), "k": 4},
        "speculative, self": {"draft": Toy(5), "k": 4},
        "speculative, auto": {"draft": Toy(77), "k": LENGTH},
        "prompt-lookup": {},
        "jacobi": {"block": 4},
        "lookahead": {"window": 3, "ngram": 3, "guesses": 4, "pool_from_prompt": True},
        "medusa": {"heads": ToyHeads(3), "tree": every_path(3, 16)},
        "medusa, auto": {"heads": ToyHeads(3), "tree": BEST_TREE},
    }
    plain = {}
    for name, options in toys.items():
        if only in name:
            targets = [(seed, lambda eos, seed=seed: Toy(seed, context=CONTEXT, eos=eos))
                       for seed in (5, 6)]  # fmt: skip
            yield ends_of(name, options, targets, plain)
    if only in "fastmtp":
        head = random_head(small_model(1, vocab=3, layers=1), 1)

        def transformer(eos: tuple[int, ...]) -> Transformer:
            return small_model(1, vocab=3, layers=1, context=CONTEXT, eos_ids=eos)

        yield ends_of("fastmtp", {"head": head, "k": 4}, [("transformer", transformer)], plain)


def ends_of(name: str, options: dict, targets: list[tuple], plain: dict) -> Verdict:
    """Every ending of one method on models made by `targets`; `plain` keeps plain decoding's."""
    failures, count, tokenizer = [], 0, letters(3)
    for key, make in targets:
        for label, eos, ending in endings():
            model = make(eos)
            for prompt in [0], [1, 2, 0, 1, 2, 0]:
                count += 1
                at = key, label, len(prompt)
                if at not in plain:
                    plain[at] = decode(model, tokenizer, prompt, **ending)
                method = name.split(",")[0]
                problem = ends_differently(
                    model, tokenizer, prompt, method, ending, options, plain[at]
                )
                if problem:
                    failures.append(f"{label}: {problem}")
    detail = failures[0] if failures else f"{count} endings, each with a turn after it"
    return Verdict("limits", name, not failures, detail)


def ends_differently(
    model: Toy, tokenizer: Tokenizer, prompt: list[int], method: str, ending: dict, options: dict,
    plain: Run | None = None,
) -> str | None:  # fmt: skip
    """What differs from plain decoding in a run that ends so, or in the turn after it."""
    plain = plain or decode(model, tokenizer, prompt, **ending)
    cache = model.new_cache()
    run = decode(model, tokenizer, prompt, method, cache=cache, **ending, **afresh(options))
    for field in ("tokens", "text", "finish_reason"):
        if getattr(run, field) != getattr(plain, field):
            return f"{field} {getattr(run, field)!r} instead of {getattr(plain, field)!r}"
    again = prompt + run.tokens + [1]
    if len(again) >= model.config.context or run.finish_reason == "context":
        return None
    few = {"max_new_tokens": 3}
    next_turn = decode(model, tokenizer, again, method, cache=cache, **few, **afresh(options))
    expected = decode(model, tokenizer, again, **few)
    return None if next_turn.tokens == expected.tokens else "the next turn's tokens differ"


CHECKS: dict[str, Check] = {
    "exact": check_exact,
    "greedy": check_greedy,
    "cache": check_cache,
    "statistical": check_statistical,
    "limits": check_limits,
}
