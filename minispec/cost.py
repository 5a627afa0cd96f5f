"""What a pass over n tokens costs on this machine: `--k auto` and `--tree auto` choose by it."""

import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import torch

from minispec.cache import KVCache
from minispec.methods.fastmtp import Drafter, MTPHead
from minispec.methods.medusa import RANKS, MedusaHeads, best_candidates
from minispec.methods.vocabulary import FullVocabulary, Vocabulary
from minispec.model import Transformer

T = TypeVar("T")
COUNTS = 1, 2, 4, 8, 16, 32, 64  # rows at which the curve is measured
MOMENT = 0.02  # seconds of a function's turn, at least


def interleaved_min_times(
    functions: list[Callable[[], object]], turns: int = 3, moment: float | None = None
) -> list[float]:
    """The shortest time of one call of each function, in seconds; each must end on the host. The
    functions take turns, so that a noisy moment spoils one turn of each. A turn repeats its
    function for at least `moment` (default: MOMENT) seconds, as decoding repeats the same pass:
    right after another function, with cold caches, a call takes longer."""
    moment = MOMENT if moment is None else moment
    times = [math.inf] * len(functions)
    for _ in range(turns):
        times = [min(least, *of_a_turn(each, moment)) for least, each in zip(times, functions)]
    return times


def of_a_turn(function: Callable[[], object], moment: float) -> list[float]:
    """Seconds of each of its calls, for at least `moment` seconds."""
    ends = [time.perf_counter()]
    while len(ends) < 2 or ends[-1] - ends[0] < moment:
        function()
        ends.append(time.perf_counter())
    return [end - start for start, end in pairwise(ends)]


def one_pass(model: Transformer, n: int, cache: KVCache | None = None) -> Callable[[], object]:
    """A pass over `n` tokens, to be timed, over an empty cache: so the cost of attending to earlier
    text is not included."""
    cache, tokens = cache or model.new_cache(2 * max(n, 64)), [0] * n

    @torch.inference_mode()
    def run() -> list:
        return model.logits(model(tokens, cache)[0]).argmax(-1).tolist()

    return run


def in_passes(function: Callable[[], object], model: Transformer) -> float:
    """What a call costs, in passes of the model over one token; both are timed in turn."""
    own, whole = interleaved_min_times([function, one_pass(model, 1)])
    return own / whole


def memoised(
    model: Transformer, what: object, measure: Callable[[], T], vocabulary: Vocabulary | None = None
) -> T:
    """`measure()`, the cost of `what` next to the model, kept in the model's memo until the passes,
    the device, the dtype or the vocabulary change."""
    passes = type(model.lm_head), vars(model.model).get("forward")
    state = model.device, model.dtype, *passes, vocabulary
    if what not in model.memo or model.memo[what][0] != state:
        model.memo[what] = state, measure()
    return model.memo[what][1]


def cost_curve(model: Transformer) -> list[float]:
    """curve[n] = pass(n) / pass(1) for n from 1 to 64, or to the largest power of two in the
    context; measured once a model, at powers of two, in turn, and linear between them. It never
    falls, as more rows cannot cost less."""
    return memoised(model, model, lambda: measured_curve(model))


def measured_curve(model: Transformer) -> list[float]:
    """`cost_curve`, measured now."""
    counts = [n for n in COUNTS if n <= model.config.context]
    seconds = interleaved_min_times([one_pass(model, n) for n in counts])
    curve = [0.0, 1.0]
    for (m, a), (n, b) in pairwise(zip(counts, seconds)):
        for i in range(m + 1, n + 1):
            curve.append(max(curve[-1], (a + (b - a) * (i - m) / (n - m)) / seconds[0]))
    return curve


# ---- what a draft costs, in passes of the target over one token ----------------------------------


def draft_cost(model: Transformer, draft: Transformer) -> float:
    """One token of a draft model."""
    if draft is model:  # its curve may be in the memo
        return 1.0
    return memoised(model, draft, lambda: in_passes(one_pass(draft, 1), model))


def head_cost(model: Transformer, head: MTPHead, vocabulary: Vocabulary | None = None) -> float:
    """One token of a FastMTP head, over all languages of its vocabulary (None: the full one)."""
    drafter = Drafter(head, model, 8, offset=0)
    hidden = model.model.norm.weight.new_zeros(1, model.config.hidden_size)
    words = (vocabulary or FullVocabulary(model)).select([])

    @torch.inference_mode()
    def one_draft() -> list:
        return words.logits(drafter.run(hidden, [0])).argmax(-1).tolist()

    return memoised(model, head, lambda: in_passes(one_draft, model), vocabulary)


def heads_cost(
    model: Transformer, heads: MedusaHeads, vocabulary: Vocabulary | None = None
) -> float:
    """A round's work of Medusa heads, timed right after a target pass, as in decoding; `vocabulary`
    as for `head_cost`."""
    words = (vocabulary or FullVocabulary(model)).select([])
    hidden, before = model.model.norm.weight, one_pass(model, 1)

    @torch.inference_mode()
    def both() -> list:
        before()
        return best_candidates(heads, words, hidden, RANKS)

    return memoised(model, heads, lambda: max(0.0, in_passes(both, model) - 1), vocabulary)
