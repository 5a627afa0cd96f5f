"""Check that each method's output equals plain decoding's: in distribution, and token by token."""

import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from minispec.certify import toys
from minispec.certify.common import GREEDY, Verdict, first_difference
from minispec.certify.methods import cases
from minispec.certify.statistics import FALSE_ALARM, chi_square_p
from minispec.certify.toys import Method, Toy, ToyHeads, first_tokens, small_model
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.generate import METHODS, decode
from minispec.model import Transformer
from minispec.sampling import Sampling, Seeded

PLAIN = cases.bound("autoregressive")
TV_TOLERANCE = 1e-12  # total variation due to rounding, in sums of float64 products
RUNS = 400  # seeded runs of one statistical check
JOINT_TOKENS = 3  # tokens that it tests jointly
SEEDED_CASES = (  # the names of its cases
    "speculative k=2", "tree, deep, without replacement", "medusa, deep", "lookahead W=3 N=3 G=3",
    "fastmtp, k=2, compressed", "eagle3, k=2, sampled drafts", "hybrid, k=2, compressed, new text",
)  # fmt: skip

Check = Callable[..., Iterator[Verdict]]
# check(only="") yields a verdict on every case whose name contains `only`


# ---- exact ---------------------------------------------------------------------------------------


def check_exact(only: str = "") -> Iterator[Verdict]:
    """Check that the output distribution, summed over all random outcomes, is plain decoding's."""
    plain = functools.cache(partial(toys.exact_distribution, PLAIN))
    for case in cases.exact_cases():
        for label in case.samplings:
            name, settings = f"{case.name}, {label}", (cases.SAMPLINGS[label], case.n)
            if only not in name:
                continue
            arguments = case.model, case.prompt, *settings
            ours, expected = toys.exact_distribution(case.method, *arguments), plain(*arguments)
            distance = max(toys.total_variation(ours, expected), abs(sum(ours.values()) - 1))
            detail = f"TV {distance:.1e} over {len(ours)} sequences of {case.n} tokens"
            yield Verdict("exact", name, distance < TV_TOLERANCE, detail)


# ---- greedy --------------------------------------------------------------------------------------

MODELS, RUN_TOKENS = 3, 16  # random models in the greedy check, and tokens per run


def check_greedy(only: str = "") -> Iterator[Verdict]:
    """Check token identity with plain decoding on random float64 Transformers, twice in a row."""
    errors: dict[str, list[str | None]] = {}
    for seed in range(MODELS):
        model = small_model(seed)
        prompt = random.Random(seed).choices(range(24), k=1 + 6 * seed)
        expected = first_tokens(PLAIN, model, prompt, GREEDY, Seeded(), RUN_TOKENS)
        for name, method in cases.greedy_cases(model, seed):
            if only not in name:
                continue
            for _ in range(2):
                tokens = first_tokens(method, model, prompt, GREEDY, Seeded(), RUN_TOKENS)
                error = None if tokens == expected else first_difference(tokens, expected)
                errors.setdefault(name, []).append(error and f"model {seed}: {error}")
    for name, of_runs in errors.items():
        error = next(filter(None, of_runs), None)
        detail = error or f"{len(of_runs) // 2} models, {RUN_TOKENS} tokens, twice"
        yield Verdict("greedy", name, error is None, detail)
    if only in (name := "target as its own draft"):
        rejected = rejected_self_drafts()
        yield Verdict("greedy", name, rejected == 0, f"{rejected} tokens rejected")


def rejected_self_drafts() -> int:
    """Count rejections, with sampling, when the target is its own draft; there must be none."""
    model, rejected = small_model(3), 0
    steps = METHODS["speculative"](model, [1, 2], Sampling(1.0), Seeded(0), draft=model, k=4)
    for step, _ in zip(steps, range(13)):
        rejected += len(step.tree or ()) - len(step.path)
    return rejected


# ---- cache ---------------------------------------------------------------------------------------


def check_cache(only: str = "") -> Iterator[Verdict]:
    """Check after every round that the cache equals a fresh prefill of all tokens but the last."""
    model = small_model(7)
    for name, method in cases.greedy_cases(model, 0):
        if only in name:
            error = worst_cache_error(model, method)
            yield Verdict("cache", name, error < 1e-9, f"largest error of a row {error:.1e}")


def worst_cache_error(
    model: Transformer, method: Method, min_rounds: int = 9, max_rounds: int = 40
) -> float:
    """Return the largest error of a committed row over `min_rounds` rounds. If drafts branch,
    continue until a commit has to move rows, for at most `max_rounds`."""
    cache, tokens, error = model.new_cache(), [3, 1, 4, 1, 5, 3, 1, 4], 0.0
    branched = moved = False
    for round_, step in enumerate(method(model, tokens, Sampling(1.0), Seeded(1), cache=cache), 1):
        tokens = tokens + step.tokens
        branched |= step.tree is not None and len(step.tree) > max(step.tree.depths) + 1
        moved |= step.path != list(range(len(step.path)))
        if cache.length != len(tokens) - 1:
            return math.inf
        fresh = model.new_cache()
        model.prefill(tokens[:-1], fresh)
        kept = slice(cache.length)
        for ours, theirs in zip([*cache.k, *cache.v], [*fresh.k, *fresh.v]):
            error = max(error, float((ours[:, kept] - theirs[:, kept]).abs().max()))
        done = moved or not branched or round_ == max_rounds or cache.free_rows < min_rounds
        if round_ >= min_rounds and done:
            break
    return error


# ---- statistical ---------------------------------------------------------------------------------


def check_statistical(only: str = "") -> Iterator[Verdict]:
    """Test the first tokens of many seeded runs against their exact distribution with χ². This
    covers what enumeration replaces: the real random numbers."""
    sampling = Sampling(1.0, top_p=0.9)
    for case in cases.exact_cases():
        if case.name not in SEEDED_CASES or only not in case.name:
            continue
        arguments = case.model, case.prompt, sampling
        exact = toys.exact_distribution(PLAIN, *arguments, JOINT_TOKENS)
        runs = (first_tokens(case.method, *arguments, Seeded(i), JOINT_TOKENS) for i in range(RUNS))
        p = chi_square_p(Counter(runs), exact)
        detail = f"p = {p:.3f}, {RUNS} runs (below {FALSE_ALARM:.0e} fails)"
        yield Verdict("statistical", f"{case.name}, T=1 top-p 0.9", p > FALSE_ALARM, detail)


# ---- limits --------------------------------------------------------------------------------------

CONTEXT = 24


def endings() -> Iterator[tuple[str, tuple[int, ...], dict]]:
    """Yield (name, end tokens, options) for every way to end, at every offset in a round."""
    for n in range(9):
        yield f"max-new-tokens {n}", (), {"max_new_tokens": n}
    for eos in (0,), (1,), (2,), (0, 2), ():
        yield f"eos {eos}", eos, {"max_new_tokens": 14}
    for stop in "a", "b", "c d", "b a", "a c", "c c b":
        yield f"stop {stop!r}", (), {"stop": (stop,), "max_new_tokens": 14}
    yield "context", (), {"max_new_tokens": 3 * CONTEXT}


def check_limits(only: str = "") -> Iterator[Verdict]:
    """Check that tokens, text, finish reason and the next turn are those of plain decoding."""

    def transformer(eos: tuple[int, ...] = ()) -> Transformer:
        return small_model(1, vocab=3, layers=1, context=CONTEXT, eos_ids=eos)

    tables = [lambda eos, seed=seed: Toy(seed, context=CONTEXT, eos=eos) for seed in (5, 6)]
    head = toys.random_mtp_head(transformer(), 1)
    draft = small_model(2, vocab=3, layers=1)
    for name, options in {
        "speculative": {"draft": Toy(77), "k": 4},
        "speculative, self": {"draft": Toy(5), "k": 4},
        "speculative, auto": {"draft": Toy(77), "k": cases.ADAPTIVE_K},
        "speculative, probing": {"draft": Toy(77), "k": cases.PROBING_K},
        "prompt-lookup": {},
        "prompt-lookup, probing": {"k": cases.PROBING_K},
        "jacobi": {"block": 4},
        "lookahead": {"window": 3, "ngram": 3, "guesses": 4, "pool_from_prompt": True},
        "medusa": {"heads": ToyHeads(3), "tree": cases.every_path(3, 16)},
        "medusa, auto": {"heads": ToyHeads(3), "tree": cases.ADAPTIVE_TREE},
        "medusa, probing": {"heads": ToyHeads(3), "tree": cases.PROBING_TREE},
        "fastmtp": {"head": head, "k": 4},
        "fastmtp, probing": {"head": head, "k": cases.PROBING_K},
        "eagle3": {"head": toys.random_eagle3_head(transformer(), 1), "k": 4},
        "hybrid": {"head": head, "k": 4},
        "hybrid, probing": {"head": head, "k": cases.PROBING_K, "lookup_k": cases.PROBING_K},
        "hybrid, draft model": {"draft": draft, "k": 2, "lookup_k": cases.ADAPTIVE_K},
    }.items():
        if only in name:
            targets = [transformer] if name.startswith(("fastmtp", "eagle3", "hybrid")) else tables
            yield check_endings(name, options, targets)


def check_endings(name: str, options: dict, targets: list[Callable]) -> Verdict:
    """Check every ending of one method on the `targets`, which are functions of the end tokens."""
    failures, count, tokenizer, method = [], 0, toys.letter_tokenizer(3), name.split(",")[0]
    for make in targets:
        for label, eos, ending in endings():
            model = make(eos)
            for prompt in [0], [1, 2, 0, 1, 2, 0]:
                count += 1
                problem = ending_difference(model, tokenizer, prompt, method, ending, options)
                if problem:
                    failures.append(f"{label}: {problem}")
    detail = failures[0] if failures else f"{count} endings, each followed by another turn"
    return Verdict("limits", name, not failures, detail)


def ending_difference(
    model: Toy, tokenizer: Tokenizer, prompt: list[int], method: str, ending: dict, options: dict
) -> str | None:
    """Describe how a run with this ending, or the turn after it, differs from plain decoding."""
    plain = decode(model, tokenizer, prompt, **ending)
    cache, fresh = model.new_cache(), cases.fresh_options(options)
    run = decode(model, tokenizer, prompt, method, cache=cache, **ending, **fresh)
    for field in ("tokens", "text", "finish_reason"):
        if getattr(run, field) != getattr(plain, field):
            return f"{field} {getattr(run, field)!r} instead of {getattr(plain, field)!r}"
    longer = prompt + run.tokens + [1]
    if len(longer) >= model.config.context or run.finish_reason == "context":
        return None
    few, fresh = {"max_new_tokens": 3}, cases.fresh_options(options)
    next_turn = decode(model, tokenizer, longer, method, cache=cache, **few, **fresh)
    expected = decode(model, tokenizer, longer, **few)
    return None if next_turn.tokens == expected.tokens else "the next turn's tokens differ"


CHECKS: dict[str, Check] = {
    "exact": check_exact,
    "greedy": check_greedy,
    "cache": check_cache,
    "statistical": check_statistical,
    "limits": check_limits,
}
