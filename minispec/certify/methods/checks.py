"""Check that each method's output equals plain decoding's: in distribution, and token by token."""

import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import torch

from minispec import optimize
from minispec.certify import toys
from minispec.certify.common import GREEDY, Verdict, first_difference
from minispec.certify.methods import cases, planted
from minispec.certify.statistics import FALSE_ALARM, chi_square_p
from minispec.certify.toys import Toy, every_outcome, first_tokens, small_model
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.generate import METHODS, decode
from minispec.methods.declaration import Method
from minispec.model import Transformer
from minispec.sampling import Sampling, Seeded
from minispec.tree import Step, Tree

PLAIN_NAME = "autoregressive"
PLAIN = cases.bound(PLAIN_NAME)
TV_TOLERANCE = 1e-12  # total variation due to rounding, in sums of float64 products
RUNS = 400  # seeded runs of one statistical check
JOINT_TOKENS = 3  # tokens that it tests jointly

Methods = list[Method] | None  # None: those of the package
Check = Callable[..., Iterator[Verdict]]
# check(only="", methods=None) yields a verdict on every case whose name contains `only`


# ---- exact ---------------------------------------------------------------------------------------


def check_exact(only: str = "", methods: Methods = None) -> Iterator[Verdict]:
    """Check that the output distribution, summed over all random outcomes, is plain decoding's, and
    that the outcomes contain every kind of round that can occur (see `kinds_of`)."""
    plain = functools.cache(partial(toys.exact_distribution, PLAIN))
    for case in cases.exact_cases(methods):
        for label in case.samplings:
            name, settings = f"{case.name}, {label}", (cases.SAMPLINGS[label], case.n)
            if only not in name:
                continue
            arguments, ours = (case.model, case.prompt, *settings), Counter()
            seen, possible = Counter(), set()
            for (tokens, steps), weight in every_outcome(partial(outcome, case, settings)):
                ours[tokens] += weight
                found, could = kinds_of(steps, case.n, case.model.config.vocab_size)
                seen, possible = seen + found, possible | could
            expected = plain(*arguments)
            distance = max(toys.total_variation(ours, expected), abs(sum(ours.values()) - 1))
            detail = f"TV {distance:.1e} over {len(ours)} sequences of {case.n} tokens"
            missing = possible - seen.keys() if label == "T=1" else ()
            counts = ", ".join(f"{n} × {kind}" for kind, n in sorted(seen.items()))
            detail += f"; {counts}" * bool(counts)
            detail += f"; never {', '.join(sorted(missing))}" * bool(missing)
            yield Verdict("exact", name, distance < TV_TOLERANCE and not missing, detail)


def outcome(case: cases.ExactCase, settings: tuple, randomness) -> tuple[tuple, list[Step]]:
    """The first n tokens of a run, and its rounds."""
    (sampling, n), tokens, steps = settings, [], []
    for step in case.method(case.model, case.prompt, sampling, randomness):
        tokens, steps = tokens + step.tokens, [*steps, step]
        if len(tokens) >= n:
            return tuple(tokens[:n]), steps
    raise AssertionError("a method must never end")


def kinds_of(steps: list[Step], n: int, vocab: int) -> tuple[Counter[str], set[str]]:
    """How often the rounds of a run accepted 0, 1, … drafts and ended with a correction or a bonus
    token, within its first `n` tokens; and what such rounds could have done there. A node whose
    children are all tokens cannot be the last of a path."""
    seen, possible, start = Counter(), set(), 0
    for step in steps:
        tree, left = step.tree or Tree([0], [-1]), n - start
        start += len(step.tokens)
        if len(tree) == 1:
            continue
        for node, depth in enumerate(tree.depths):
            children = set(tree.tokens_at(tree.children(node)))
            if depth <= left and len(children) < vocab:
                possible.add(f"{depth} accepted")
                if depth < left:
                    possible.add("correction" if children else "bonus")
        accepted = len(step.path) - 1
        seen[f"{min(accepted, left)} accepted"] += 1
        if accepted < left:
            seen["correction" if tree.children(step.path[-1]) else "bonus"] += 1
    return seen, possible


# ---- greedy --------------------------------------------------------------------------------------

MODELS, RUN_TOKENS = 3, 16  # random models in the greedy check, and tokens per run


def check_greedy(only: str = "", methods: Methods = None) -> Iterator[Verdict]:
    """Check token identity with plain decoding on random float64 Transformers, twice in a row."""
    errors: dict[str, list[str | None]] = {}
    for seed in range(MODELS):
        model = small_model(seed)
        prompt = random.Random(seed).choices(range(24), k=1 + 6 * seed)
        expected = first_tokens(PLAIN, model, prompt, GREEDY, Seeded(), RUN_TOKENS)
        for name, method in cases.greedy_cases(model, seed, methods):
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
    if methods is None and only in (name := "target as its own draft"):
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


def check_cache(only: str = "", methods: Methods = None) -> Iterator[Verdict]:
    """Check after every round that the cache equals a fresh prefill of all tokens but the last."""
    model = small_model(7)
    for name, method in cases.greedy_cases(model, 0, methods):
        if only in name:
            error = worst_cache_error(model, method)
            yield Verdict("cache", name, error < 1e-9, f"largest error of a row {error:.1e}")


def worst_cache_error(
    model: Transformer, method: toys.Method, min_rounds: int = 9, max_rounds: int = 40
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


# ---- bits ----------------------------------------------------------------------------------------

BITS_TOKENS = 30  # of a run; after PROMPT_TOKENS, it crosses the first border of a block of keys
PROMPT_TOKENS = 50


def check_bits(
    only: str = "", methods: Methods = None, tokens: int = BITS_TOKENS
) -> Iterator[Verdict]:
    """Check that with `--bitwise`, on this machine, each committed cache row and hidden state has
    the bits that a plain decoder gives it, which runs on one token after the other. The cases of a
    method take turns with dtypes and samplings."""
    settings = [(dtype, sampling) for sampling in (GREEDY, Sampling(1.0))
                for dtype in (torch.float32, torch.bfloat16)]  # fmt: skip
    for i, (dtype, sampling) in enumerate(settings):
        # with three tokens, every drafter is right sometimes
        context = PROMPT_TOKENS + tokens + 50
        model = small_model(1, vocab=3, context=context, head_dim=16, dtype=dtype)
        optimize(model, bitwise=True)
        counts: Counter[str] = Counter()
        for name, method in cases.greedy_cases(model, 1, methods):
            counts[name.split()[0]] += 1
            label = f"{name}, T={sampling.temperature:g}, {dtype}".replace("torch.", "")
            if only in label and counts[name.split()[0]] % len(settings) == i:
                passed, detail = compare_bits(model, method, sampling, tokens)
                yield Verdict("bits", label, passed, detail)


def compare_bits(
    model: Transformer, method: toys.Method, sampling: Sampling, n: int
) -> tuple[bool, str]:
    """Run a method for `n` tokens, and plain passes over the same tokens. Returns whether all bits
    are equal, and how many cache rows and hidden states were compared or differ."""
    passes, hidden, accepted = [], [], 0
    size = model.config.hidden_size  # EAGLE-3 asks for more columns
    tokens = random.Random(0).choices(range(model.config.vocab_size), k=PROMPT_TOKENS)
    hook = model.register_forward_hook(lambda module, inputs, output: passes.append(output[0]))
    cache, end = model.new_cache(), len(tokens) + n
    for step in method(model, list(tokens), sampling, Seeded(2), cache=cache):
        tokens += step.tokens
        if step.tree:
            hidden.append(passes[-1][step.path, :size])
            accepted += len(step.path) - 1
        if len(tokens) > end:
            break
    hook.remove()
    plain, ours = model.new_cache(), torch.cat(hidden)
    expected = torch.cat(list(model.prefill_chunks(tokens[: cache.length], plain, chunk=1)), 1)
    states = (ours != expected[0, -len(ours) :]).any(-1)
    rows = (cache.kv != plain.kv)[:, :, 0, : cache.length].transpose(0, 2).flatten(1).any(-1)
    counts = f"{len(rows)} cache rows, {len(states)} hidden states, {accepted} drafts accepted"
    wrong = f"; {int(rows.sum())} rows and {int(states.sum())} states differ"
    passed = not rows.any() and not states.any()
    return passed, counts + ("" if passed else wrong)


# ---- statistical ---------------------------------------------------------------------------------


def check_statistical(only: str = "", methods: Methods = None) -> Iterator[Verdict]:
    """Test the first tokens of many seeded runs against their exact distribution with χ². This
    covers what enumeration replaces: the real random numbers. Each method has one row, of the case
    that enumerates most tokens."""
    sampling, most = Sampling(1.0, top_p=0.9), {}
    for case in cases.exact_cases(methods):
        if only in case.name and case.name != PLAIN_NAME:
            most.setdefault(case.name.split()[0], []).append(case)
    for of_method in most.values():
        case = max(of_method, key=lambda case: case.n)
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


def check_limits(only: str = "", methods: Methods = None) -> Iterator[Verdict]:
    """Check that tokens, text, finish reason and the next turn are those of plain decoding, for the
    first case of each method and those whose policies choose."""
    for each in cases.lossless_methods() if methods is None else methods:
        if each.function is cases.forest:
            continue
        toy, tried = cases.runs_on_toys(each, {}), 0
        for name, options in cases.cases_of(each, cases.target(toy, 3), 4):
            chosen = tried == 0 or "auto" in name
            tried += 1
            if chosen and only in name:
                targets = [partial(ending_target, toy, seed) for seed in ((5, 6) if toy else (4,))]
                yield check_endings(each.function, options, targets, name)


def ending_target(toy: bool, seed: int, eos: tuple[int, ...] = ()) -> cases.Target:
    if toy:
        return Toy(seed, context=CONTEXT, eos=eos)
    return small_model(seed, vocab=3, layers=1, context=CONTEXT, eos_ids=eos)


def check_endings(
    method: str | Callable, options: dict, targets: list[Callable], name: str = ""
) -> Verdict:
    """Check every ending of one method on the `targets`, which are functions of the end tokens."""
    failures, count, tokenizer = [], 0, toys.letter_tokenizer(3)
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
    model: Toy, tokenizer: Tokenizer, prompt: list[int], method: str | Callable, ending: dict,
    options: dict,
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


def check_planted(only: str = "", methods: Methods = None) -> Iterator[Verdict]:
    """Check that a method's own cases catch mistakes that are planted around it (see planted.py).
    By default, nothing: the tests plant more in the methods of the package."""
    return planted.check_planted(only, methods or [], [check_exact, check_greedy, check_cache])


CHECKS: dict[str, Check] = {
    "exact": check_exact,
    "greedy": check_greedy,
    "cache": check_cache,
    "bits": check_bits,
    "statistical": check_statistical,
    "limits": check_limits,
    "planted": check_planted,
}
