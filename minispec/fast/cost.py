"""Measure what a pass over n tokens costs on this machine, for `--k auto` and `--tree auto`."""

import math
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch

from minispec import distributed
from minispec.cache import KVCache
from minispec.methods.adaptive import FixedNodes
from minispec.methods.fastmtp import RecurrentHead
from minispec.methods.medusa import RANKS, MedusaHeads, best_candidates
from minispec.methods.vocabulary import Vocabulary
from minispec.model import Transformer

T = TypeVar("T")
# rows per pass at which the curve is measured: densely where it is steepest and most used, and
# after 16, since many kernels take 16 rows at once
ROW_COUNTS = 1, 2, 3, 4, 5, 6, 8, 16, 17, 32, 64
CAPACITY = 1024  # of caches, as in decoding a short text: on a GPU each needs its own graphs
TURN_SECONDS = 0.02  # minimum length of a function's turn


def interleaved_min_times(
    functions: list[Callable[[], object]], turns: int = 3, turn_seconds: float | None = None
) -> list[float]:
    """The shortest time of one call of each function, in seconds. Each must end with its result on
    the host. The functions take turns, so that a burst of noise spoils only one turn of each. A
    turn repeats its function for at least `turn_seconds` (default: TURN_SECONDS), as decoding
    repeats the same pass: the first call after another function is slower, with cold caches."""
    if distributed.tensor_parallel.size > 1:  # all ranks must run equally many passes
        turn_seconds = 0
    turn_seconds = TURN_SECONDS if turn_seconds is None else turn_seconds
    times = [math.inf] * len(functions)
    for _ in range(turns):
        times = [min(t, *call_times(f, turn_seconds)) for t, f in zip(times, functions)]
    return times


def call_times(function: Callable[[], object], turn_seconds: float) -> list[float]:
    """Call the function for at least `turn_seconds`. Returns how many seconds each call took."""
    ends = [time.perf_counter()]
    while len(ends) < 2 or ends[-1] - ends[0] < turn_seconds:
        function()
        ends.append(time.perf_counter())
    return [end - start for start, end in pairwise(ends)]


def one_pass(model: Transformer, n: int, cache: KVCache | None = None) -> Callable[[], object]:
    """Return a function to be timed, which runs a pass over `n` tokens. The cache is empty, so the
    cost of attending to earlier text is not included."""
    cache, tokens = cache or model.new_cache(capacity_for(model)), [0] * n

    @torch.inference_mode()
    def run() -> list:
        return model.logits(model(tokens, cache)[0]).argmax(-1).tolist()

    return run


def capacity_for(model: Transformer) -> int:
    """The capacity of the caches that measurements use."""
    return min(CAPACITY, model.config.context)


def costs_after_pass(functions: list[Callable[[], object]], model: Transformer) -> list[float]:
    """The cost of a call of each function right after a pass of the model over one token, in such
    passes. In decoding, too, a pass has just displaced the drafter's weights from the CPU's caches.
    """
    target_pass = one_pass(model, 1)

    @torch.inference_mode()
    def after_pass(function: Callable[[], object]) -> None:
        target_pass()
        function()

    both = [partial(after_pass, function) for function in functions]
    *seconds, pass_seconds = interleaved_min_times([*both, target_pass], turns=5)
    return [max(0.0, t / pass_seconds - 1) for t in seconds]


def memoised(
    model: Transformer, key: object, measure: Callable[[], T], vocabulary: Vocabulary | None = None
) -> T:
    """Return `measure()`, the cost that `key` stands for, as rank 0 measures it. It is kept in the
    model's memo and measured again only after the passes, the device, the dtype or the vocabulary
    have changed."""
    passes = type(model.lm_head), model.graphs, model.compiled
    state = model.device, model.dtype, passes, vocabulary
    if key not in model.memo or model.memo[key][0] != state:
        cost = measure()
        model.memo[key] = state, distributed.from_rank_0(lambda: cost)
    return model.memo[key][1]


def cost_curve(model: Transformer) -> list[float]:
    """curve[n] = pass(n) / pass(1) for n from 1 to 64, or to the largest of ROW_COUNTS within
    the context. Measured once per model, interleaved, at ROW_COUNTS, and linear between them. The
    curve never falls, since more rows cannot cost less."""
    return memoised(model, "curve", lambda: measure_curve(model))


def measure_curve(model: Transformer) -> list[float]:
    """Measure `cost_curve`."""
    counts = [n for n in ROW_COUNTS if n <= model.config.context]
    cache = model.new_cache(capacity_for(model))
    seconds = interleaved_min_times([one_pass(model, n, cache) for n in counts])
    curve = [0.0, 1.0]
    for (m, a), (n, b) in pairwise(zip(counts, seconds)):
        for i in range(m + 1, n + 1):
            curve.append(max(curve[-1], (a + (b - a) * (i - m) / (n - m)) / seconds[0]))
    return curve


# ---- the cost of drafts, in passes of the target over one token ----------------------------------


def draft_cost(model: Transformer, draft: Transformer) -> float:
    """The cost of one token of a draft model."""
    return memoised(model, draft, lambda: costs_after_pass([one_pass(draft, 1)], model)[0])


def head_costs(
    model: Transformer, head: RecurrentHead, vocabulary: Vocabulary | None = None,
    widths: tuple[int, ...] = (1,),
) -> dict[int, float]:  # fmt: skip
    """The cost of one step of a head, by how many tokens it drafts from, in a round that
    takes in two hidden states and has three steps. `widths` are these numbers; the first is 1.
    Drafts are from all languages of `vocabulary` (None: full)."""
    draft_head = head.vocabulary(model, vocabulary).select([])

    def measure() -> dict[int, float]:
        size = model.config.hidden_size * (1 + len(head.feature_layers))
        hidden = model.model.norm.weight.new_zeros(2, size)
        drafter = head.start(model, head.new_cache(capacity_for(model)))

        def round_of_three(width: int) -> None:
            drafter.enqueue(hidden, [0, 0])
            drafter.flush_and_expand(FixedNodes(1, (width, 3)), draft_head).tolist()
            drafter.cache.truncate(0)

        rounds = [partial(round_of_three, width) for width in widths]
        chain, *wider = (cost / 3 for cost in costs_after_pass(rounds, model))
        # the first step always drafts from a single token, and more tokens cannot cost less
        others = (max(chain, (3 * cost - chain) / 2) for cost in wider)
        return {1: chain} | dict(zip(widths[1:], others))

    return memoised(model, (head, widths), measure, vocabulary)


def heads_cost(
    model: Transformer, heads: MedusaHeads, vocabulary: Vocabulary | None = None
) -> float:
    """The cost of Medusa heads in one round. `vocabulary` is as for `head_costs`."""
    draft_head = heads.vocabulary(model, vocabulary).select([])
    hidden = model.model.norm.weight

    def candidates() -> list:
        return best_candidates(heads, draft_head, hidden, RANKS)

    return memoised(model, heads, lambda: costs_after_pass([candidates], model)[0], vocabulary)
