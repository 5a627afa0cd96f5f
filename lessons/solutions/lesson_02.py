"""Lesson 02: logits become a distribution, and a loop draws; see also pure_02.py."""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from types import SimpleNamespace

import torch
from form import Oracle, Question, Task, Wrong
from torch import Tensor

from minispec import sampling
from minispec.cache import KVCache
from minispec.generate.run import Run, StopConditions
from solutions import engine
from solutions.lesson_01 import package_commit as commit
from solutions.pure_02 import RELEASE

# ---- solutions -----------------------------------------------------------------------------------


def warp(logits, temperature, top_k, top_p):
    if temperature == 0:
        one_hot = torch.zeros_like(logits)
        one_hot[logits.argmax()] = 1.0
        return one_hot
    logits = logits / temperature
    if 0 < top_k < len(logits):
        kth = logits.sort(descending=True).values[top_k - 1]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    p, order = logits.softmax(-1).sort(descending=True)
    p[p.cumsum(-1) - p >= top_p] = 0.0  # the more likely tokens reach top_p without this one
    kept = torch.zeros_like(p).scatter(-1, order, p)
    return kept / kept.sum()


def rounds(model, text, randomness, temperature, top_k, top_p):
    cache = model.new_cache()
    while cache.length < cache.capacity:
        new = text[cache.length :]
        hidden = model(new, cache)[0]
        cache.length = commit(cache.kv[:, :, 0], cache.length, list(range(len(new))))
        p = warp(model.logits(hidden[-1]).cpu().double(), temperature, top_k, top_p)
        text.append(randomness.categorical(p))
        yield text[-1:]


# ---- the package's functions, with the lesson's arguments ----------------------------------------


def package_warp(logits, temperature, top_k, top_p):
    settings = sampling.Sampling(temperature, top_k, top_p)
    return sampling.probs(logits[None], settings)[0].to(logits.dtype)


def package_release(text, stop):
    """One token that completes `text`, in a run that has shown nothing yet."""
    decoder = SimpleNamespace(push=lambda token: text)
    run = Run(
        "",
        [],
        iter(()),
        [KVCache(1, 1, 1, capacity=9)],
        sampling.Sampling(),
        StopConditions(stop=(stop,)),
        [],
        decoder,
        0,
    )
    run.tokens.append(0)
    run.texts.append("")
    ended = run.end_after(0) == "stop"
    return run.texts[-1], run.held_back, ended


def package_rounds(model, text, randomness, temperature, top_k, top_p):
    return engine.package_rounds(model, text, None, randomness, temperature, top_k, top_p)


# ---- warp ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Logits:
    """The arguments of `warp`."""

    logits: tuple[float, ...]
    temperature: float
    top_k: int
    top_p: float


def short(numbers) -> str:
    return "[" + " ".join(f"{x:.3g}" for x in numbers) + "]"


def tensor(numbers: Iterable[float]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.float64)


def softmax(logits: list[float]) -> list[float]:
    """In plain Python."""
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


def exact_warp(case: Logits) -> Tensor:
    """From the definitions, in plain Python. For top-p, all sets of tokens are tried."""
    V = len(case.logits)
    if case.temperature == 0:
        return tensor(float(x == max(case.logits)) for x in case.logits)
    p = softmax([x / case.temperature for x in case.logits])
    k = case.top_k or V
    p = [x if sum(y > x for y in p) < k else 0.0 for x in p]  # fewer than k are more likely
    p = [x / sum(p) for x in p]
    if case.top_p < 1:
        sets = (chosen for n in range(1, V + 1) for chosen in combinations(range(V), n))
        enough = [s for s in sets if sum(p[i] for i in s) >= case.top_p]
        kept = max(enough, key=lambda s: (-len(s), sum(p[i] for i in s)))
        p = [x if i in kept else 0.0 for i, x in enumerate(p)]
    return tensor(x / sum(p) for x in p)


def random_logits(seed: int) -> Logits:
    rng = random.Random(seed)
    logits = tuple(round(rng.gauss(0, 1.5), 3) for _ in range(6))
    temperature = rng.choice([0.5, 0.8, 1.0, 1.5])
    return Logits(logits, temperature, rng.choice([0, 2, 3, 4, 6, 9]), rng.choice([0.3, 0.6, 0.8]))


STEADY = (2.0, 0.5, 1.5, -1.0, 1.0)
SETTINGS = [
    Logits(STEADY, 1.0, 0, 1.0),
    Logits(STEADY, 0.5, 0, 1.0),
    Logits(STEADY, 2.0, 0, 1.0),
    Logits(STEADY, 0.0, 0, 1.0),
    Logits(STEADY, 1.0, 2, 1.0),
    Logits(STEADY, 1.0, 5, 1.0),
    Logits(STEADY, 1.0, 9, 1.0),
    Logits((1.0, 2.0, 0.0, 1.0), 1.0, 2, 1.0),  # two are equally likely, in second place
    Logits(STEADY, 1.0, 0, 0.7),
    Logits(STEADY, 1.0, 0, 0.01),
    Logits(STEADY, 0.0, 3, 0.5),
    *map(random_logits, range(40)),
]


def run_warp(function, case: Logits) -> Tensor:
    logits = tensor(case.logits)
    before = logits.clone()
    p = function(logits, case.temperature, case.top_k, case.top_p)
    if not torch.equal(logits, before):
        raise Wrong("it changes `logits`, which belongs to the caller")
    if not isinstance(p, Tensor) or p.shape != before.shape:
        shape = tuple(p.shape) if isinstance(p, Tensor) else type(p).__name__
        raise Wrong(f"it must return a tensor of shape (V,), here {tuple(before.shape)}: {shape}")
    if p.isnan().any():
        raise Wrong("it returns NaN")
    if p.dtype != before.dtype:
        names = [str(x.dtype).removeprefix("torch.") for x in (p, before)]
        raise Wrong("it returns {}; keep the dtype of the logits ({})".format(*names))
    return p


def tv(p: Tensor, q: Tensor) -> float:
    return float((p - q).abs().sum() / 2)


def show_settings(case: Logits) -> str:
    return f"logits = {short(case.logits)}, temperature = {case.temperature}, " \
           f"top_k = {case.top_k}, top_p = {case.top_p}"  # fmt: skip


def show_warp(case: Logits, got: Tensor, expected: Tensor) -> str:
    a, b = (short(p.tolist()) for p in (got, expected))
    return (
        f"{show_settings(case)}: it returns {a} instead of {b} (distance {tv(got, expected):.1e})"
    )


WRONG_DIMENSION = (
    "its softmax runs over the wrong dimension: over one row it is 1 for every token. It must run "
    "over the tokens, softmax(-1)"
)


def ignores_the_logits(results: list[tuple[Logits, Tensor, Tensor]]) -> bool:
    """Whether all tokens that are kept are equally likely, and it is not greedy decoding."""
    hot = [(case, got) for case, got, _ in results if case.temperature > 0]
    greedy = all(got.argmax() == tensor(case.logits).argmax() for case, got in hot)
    return not greedy and all(got[got > 0].unique().numel() == 1 for _, got in hot)


def diagnose_warp(results: list[tuple[Logits, Tensor, Tensor]]) -> str | None:
    """Say which of the settings is wrong."""
    if ignores_the_logits(results):
        return WRONG_DIMENSION
    if any(abs(float(got.sum()) - 1) > 1e-9 for _, got, _ in results):
        return "it does not sum to 1; divide by the sum of what is kept"
    wrong = [result for result in results if not tv(*result[1:]) <= 1e-9]
    plain = [r for r in wrong if r[0].top_p == 1 and not 0 < r[0].top_k < len(r[0].logits)]
    if any(((got == 0) & (expected > 0)).any() for _, got, expected in plain):
        return "top_p 1.0 must keep all tokens, but a sum can exceed 1 by rounding. Compare the " \
               "sum of the more likely tokens, without the token itself"  # fmt: skip
    if all(case.top_p < 1 for case, *_ in wrong):
        more = [bool(((got > 0) & (expected == 0)).any()) for _, got, expected in wrong]
        if all(more):
            return "top_p keeps too many tokens"
        if not any(more):
            return "top_p keeps too few tokens; those that are kept must sum to at least top_p"
        return "temperature and top_k are right; look at top_p"
    if all(case.top_k > 0 for case, *_ in wrong):
        return "without top_k it is right; look at top_k"
    return None


def keep_k(logits: Tensor, k: int) -> Tensor:
    """The logits after top-k; what is removed is at -inf."""
    if not 0 < k < len(logits):
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[-1], -torch.inf)


def reached(logits: Tensor, top_p: float) -> Tensor:
    """The tokens that top-p removes, as a mask in the order of the vocabulary."""
    p, order = logits.softmax(-1).sort(descending=True)
    return torch.empty_like(p, dtype=torch.bool).scatter(-1, order, p.cumsum(-1) - p >= top_p)


def keep_p(logits: Tensor, top_p: float) -> Tensor:
    """The logits after top-p."""
    return logits.masked_fill(reached(logits, top_p), -torch.inf)


def sampled(rule: Callable[[Tensor, float, int, float], Tensor]) -> Callable:
    """A mistake at temperatures above 0: `rule` returns logits or, in float64, probabilities."""

    def wrong(logits, temperature, top_k, top_p):
        if temperature == 0:
            return warp(logits, 0, 0, 1.0)
        return rule(logits, temperature, top_k, top_p)

    return wrong


def mask_in_sorted_order(logits, temperature, top_k, top_p):
    logits = keep_k(logits / temperature, top_k)
    p = logits.softmax(-1)
    ordered = p.sort(descending=True).values
    kept = p.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
    return kept / kept.sum()


def exactly_k(logits, temperature, top_k, top_p):
    logits = logits / temperature
    if 0 < top_k < len(logits):
        best = logits.topk(top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, best.indices, best.values)
    return keep_p(logits, top_p).softmax(-1)


def last_token_dropped(logits, temperature, top_k, top_p):
    logits = keep_k(logits / temperature, top_k)
    p, order = logits.softmax(-1).sort(descending=True)
    out = (p.cumsum(-1) > top_p) & torch.tensor(top_p < 1)
    out[0] = False
    return logits.masked_fill(torch.empty_like(out).scatter(-1, order, out), -torch.inf).softmax(-1)


def zero_logits(logits, temperature, top_k, top_p):
    hot = keep_k(logits / temperature, top_k)
    gone = hot.isinf() | reached(hot, top_p)
    return hot.masked_fill(gone, 0.0).softmax(-1)


def own_probability(logits, temperature, top_k, top_p):
    p = keep_k(logits / temperature, top_k).softmax(-1)
    kept = torch.where((p >= 1 - top_p) | (p == p.max()), p, 0.0)
    return kept / kept.sum()


def over_one_row(logits, temperature, top_k, top_p):
    """A softmax over the wrong axis of a tensor with one row."""
    hot = keep_k(logits / temperature, top_k)
    return keep_p(hot, top_p)[None].softmax(0).nan_to_num(0)[0]


def normed_over_one_row(*arguments):
    p = over_one_row(*arguments)
    return p / p.sum()


WARP_MISTAKES = {
    WRONG_DIMENSION: (sampled(over_one_row), sampled(normed_over_one_row)),
    "it multiplies by the temperature; divide": sampled(
        lambda x, t, k, p: keep_p(keep_k(x * t, k), p).softmax(-1)
    ),
    "it divides probabilities by the temperature, which the sum undoes; divide the logits": sampled(
        lambda x, t, k, p: keep_p(keep_k(x, k), p).softmax(-1)
    ),
    "at temperature 0 it divides by 0; put all probability on the largest logit": (
        lambda x, t, k, p: keep_p(keep_k(x / t, k), p).softmax(-1)
    ),
    "the temperature comes after top_p; a higher temperature must let more tokens through": sampled(
        lambda x, t, k, p: (keep_p(keep_k(x, k), p) / t).softmax(-1)
    ),
    "top_p sees the probabilities before top_k; it must see those of the tokens that top_k keeps": (
        sampled(lambda x, t, k, p: keep_k(keep_p(x / t, p), k).softmax(-1))
    ),
    "the token with which the sum reaches top_p is removed; it must stay": sampled(
        last_token_dropped
    ),
    "top_p compares each token's own probability; the sum of the kept ones must reach top_p": (
        sampled(own_probability)
    ),
    "the mask of top_p is in sorted order; put it back into the order of the vocabulary": sampled(
        mask_in_sorted_order
    ),
    "top_k drops tokens that tie with the k-th; compare with its logit": sampled(exactly_k),
    "removed tokens have the logit 0, which is a probability; use -inf": sampled(zero_logits),
    "the probabilities of removed tokens are missing in the sum; divide by the sum of what is "
    "kept": sampled(
        lambda x, t, k, p: (x / t).softmax(-1) * (warp(x, t, k, p) > 0)
    ),
}  # fmt: skip

# ---- rounds --------------------------------------------------------------------------------------

LOOPS = [
    engine.Loop(0, (2, 1), 4, 3), engine.Loop(1, (2,), 3, 3, sampling.Sampling(1.0)),
    engine.Loop(2, (0, 1, 1), 3, 4, sampling.Sampling(0.7, top_k=2)),
    engine.Loop(3, (2, 0), 3, 4, sampling.Sampling(1.3, top_p=0.6)),
    engine.Loop(4, (2, 0), 3, 4, sampling.Sampling(0.5, top_k=3, top_p=0.9), context=6),
]  # fmt: skip
LOOP_MISTAKES = {
    "it takes the most likely token; draw it: randomness.categorical(…)": engine.altered(
        rounds, ("randomness.categorical(p)", "int(p.argmax())")
    ),
    "it draws from the softmax of the logits; the settings go to your `warp`": engine.altered(
        rounds, ("temperature, top_k, top_p)\n        text", "1.0, 0, 1.0)\n        text")
    ),
    "its temperature is always 1; greedy decoding has temperature 0": engine.altered(
        rounds, ("temperature, top_k, top_p)\n        text", "1.0, top_k, top_p)\n        text")
    ),
    "top_k and top_p have no effect; hand them to `warp`": engine.altered(
        rounds, ("temperature, top_k, top_p)\n        text", "temperature, 0, 1.0)\n        text")
    ),
    "it draws after the first row; what follows the newest token is in the last row": (
        engine.altered(rounds, ("hidden[-1]", "hidden[0]"))
    ),
}  # fmt: skip

# ---- tasks ---------------------------------------------------------------------------------------

RANGES = {
    "kept_after_open": (1, 49152), "kept_after_fixed": (1, 49152), "distance_other_order": (0, 1),
    "equal_tokens": (0, 24),
}  # fmt: skip
TASKS = [
    Task(
        name="warp",
        package=package_warp,
        solution=warp,
        judge=Oracle(
            SETTINGS, run_warp, exact_warp, tv, show_warp, f"{len(SETTINGS)} distributions",
            arguments=show_settings, diagnose=diagnose_warp,
        ),
        hints=(
            "Removing a token means the logit -torch.inf: softmax turns it into 0, and divides by "
            "the sum of the others. For top_k, logits.topk(k).values[-1] is the k-th logit.",
            "For top_p, sort the probabilities in descending order; p.sort returns `order`, too. "
            "p.cumsum(-1) - p is the sum of all more likely tokens; a token is removed if that "
            "has reached top_p. torch.zeros_like(p).scatter(-1, order, p) undoes the sorting.",
        ),
        mistakes=WARP_MISTAKES,
        shows=(sampling.probs, sampling.warp),
    ),
    replace(RELEASE, package=package_release, shows=(Run.end_after,)),
    Task(
        name="rounds",
        package=package_rounds,
        solution=rounds,
        judge=engine.loops(LOOPS, f"the exact distribution of {len(LOOPS)} texts of toys"),
        hints=(
            "It is the loop of lesson 01; only how a token is chosen from the last row changes.",
            "p = warp(model.logits(hidden[-1]).double().cpu(), temperature, top_k, top_p), and "
            "then randomness.categorical(p). A chain needs no mask: it is the default.",
        ),
        mistakes=LOOP_MISTAKES,
        shows=(engine.package_rounds,),
    ),
]  # fmt: skip

# ---- the quiz ------------------------------------------------------------------------------------

QUIZ = [
    Question(
        "At temperature 0.8 two methods write different texts from the same seed. Can both be "
        "lossless?",
        True,
        "they spend their random numbers on different decisions, and only the distributions of "
        "their texts must be equal.",
    ),
    Question(
        "Four tokens have the probabilities 0.5, 0.3, 0.15 and 0.05. How many of them does top-p "
        "0.6 keep?",
        2,
        "0.5 falls short of 0.6, so the token that crosses it is kept as well.",
    ),
    Question(
        "And how many of them does top-k 2, followed by top-p 0.6, keep?",
        1,
        "top-p sees what top-k has left, 0.625 and 0.375, and the first of them reaches 0.6.",
    ),
    Question(
        "The temperature is raised from 1 to 2. How many tokens does top-p 0.9 keep then?",
        "c",
        "the temperature comes first and flattens the distribution, so it takes at least as many "
        "tokens to reach 0.9.",
        (
            "as many as before, because top-p looks at the order of the tokens only",
            "fewer, or as many as before",
            "more, or as many as before",
        ),
    ),
    Question(
        'The stop string is "###", and nothing of "a#b##" has been shown yet. How many of these '
        "five characters may be shown now?",
        3,
        'only the "##" at the end can still become the stop string.',
    ),
]
