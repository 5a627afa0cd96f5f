"""What a pass over n tokens costs on this machine: by this K, a tree or a window is chosen."""

import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

from minispec.cache import KVCache
from minispec.linear import joined_in, pack
from minispec.model import Transformer
from minispec.sampling import best

T = TypeVar("T")
COUNTS = 1, 2, 4, 8, 16, 32, 64  # rows at which the curve is measured
COPIED = 2**28  # bytes of the copy by which memory is timed
SIDES = {"cpu": 1024, "cuda": 8192}
MOMENT = 0.02  # seconds of a function's turn, at least


def least_in_turn(functions: list[Callable[[], object]], turns: int = 3) -> list[float]:
    """The least time of each function; what they compute must end on the host. They take turns, so
    that a noisy moment spoils a turn of each, and not every call of one. A turn lasts a MOMENT: the
    first calls behind another function, whose bytes lie in the processor's caches, take longer than
    those of plain decoding, which makes the same pass again and again (a call that is longer than
    that is behind another's, and loses less by it). Three turns: a run with `auto` waits for them.
    """
    times = [math.inf] * len(functions)
    for _ in range(turns):
        times = [min(least, *of_a_turn(each)) for least, each in zip(times, functions)]
    return times


def of_a_turn(function: Callable[[], object]) -> list[float]:
    """Seconds of each of its calls."""
    ends = [time.perf_counter()]
    while len(ends) < 2 or ends[-1] - ends[0] < MOMENT:
        function()
        ends.append(time.perf_counter())
    return [end - start for start, end in pairwise(ends)]


def least_seconds(function: Callable[[], object], repeat: int = 5) -> float:
    """The least time of several calls; what they compute must end on the host."""
    return least_in_turn([function], repeat)[0]


def one_copy(device: torch.device) -> Callable[[], object]:
    """A copy of COPIED bytes, to be timed."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return lambda: target.copy_(source)[-1].item()


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy."""
    return 2 * COPIED / least_seconds(one_copy(device))


def side_of(device: torch.device) -> int:
    """Of the square product by which a device's arithmetic is timed."""
    return SIDES.get(device.type, 2048)


def large_products(device: torch.device, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Products of two square matrices, to be timed: each byte is used so often that the speed of
    arithmetic decides. torch's plain one, and one whose weight is packed where that is possible:
    which of them is the fast one, by more than twice, depends on the processor's maker."""
    side = side_of(device)
    square = torch.full((side, side), 0.5, dtype=dtype, device=device)
    products, packed = [lambda: square @ square], pack(square)
    if packed is not None:
        products.append(lambda: packed.product(square, None))
    return [lambda product=product: product()[-1, -1].item() for product in products]


def bytes_per_pass(model: Transformer) -> int:
    """What a pass over one token must read: every weight but an untied embedding, as it is kept."""
    parts = *model.model.layers, model.lm_head
    total = sum(p.nbytes for part in parts for p in part.parameters())
    for joined in joined_in(model).values():
        if joined.packed is not None:
            total += joined.packed.nbytes - sum(part.weight.nbytes for part in joined.parts)
    return total


def products_per_row(model: Transformer) -> int:
    """How many numbers each row of a pass multiplies by its weights."""
    parts = *model.model.layers, model.lm_head
    return sum(p.numel() for part in parts for p in part.parameters() if p.dim() == 2)


def floor_seconds(model: Transformer) -> float:
    """The least time of a pass over one token at the speed of a copy."""
    return bytes_per_pass(model) / copy_bandwidth(model.device)


def floors_and_passes(
    model: Transformer, *others: Transformer
) -> tuple[float, float | None, list[float]]:
    """`floor_seconds`; the least time of a row's arithmetic, at the speed of the fastest of
    `large_products` (None in int8, whose products are of another kind); and what a pass over one
    token takes, of the model and of others. Timed in turn, as a shared machine's speed changes from
    minute to minute."""
    passes = [one_pass(each, 1) for each in (model, *others)]
    products = [] if model.quantized else large_products(model.device, model.dtype)
    copy, *times = least_in_turn([one_copy(model.device), *passes, *products], turns=5)
    own, its = times[: len(passes)], times[len(passes) :]
    row = products_per_row(model) * min(its) / side_of(model.device) ** 3 if its else None
    return bytes_per_pass(model) * copy / (2 * COPIED), row, own


def where_arithmetic_decides(floor: float, row: float, own: float, curve: dict[int, float]) -> str:
    """In words, why the cost curve bends where it does: `floor` and `row` as `floors_and_passes`
    has them, `curve` in passes over one token of `own` seconds."""
    over = {n: cost * own / max(floor, n * row) for n, cost in curve.items()}
    return (
        f"arithmetic takes {1e3 * row:.2f} ms a row at the speed of a large product, from "
        f"{math.floor(floor / row) + 1} rows on more than reading; over the larger of both: "
        + ", ".join(f"{n}: {each:.2f}" for n, each in over.items())
    )


def one_pass(model: Transformer, n: int, cache: KVCache | None = None) -> Callable[[], object]:
    """A pass over `n` tokens, to be timed, over an empty cache: what attention reads of a text is
    not in it (but graphs on a GPU read all of the cache)."""
    cache, tokens = cache or model.new_cache(max(n, 64)), [0] * n

    @torch.inference_mode()
    def run() -> list:
        return best(model.logits(model(tokens, cache))[0])

    return run


def pass_seconds(model: Transformer, n: int, repeat: int = 5) -> float:
    """The least time of a pass over `n` tokens."""
    return least_seconds(one_pass(model, n), repeat)


def in_passes(function: Callable[[], object], model: Transformer, n: int = 1) -> float:
    """What a call costs, in passes of the model over `n` tokens; both are timed in turn."""
    own, whole = least_in_turn([function, one_pass(model, n)])
    return own / whole


known: WeakKeyDictionary = WeakKeyDictionary()  # model -> what was measured of it


def mode(model: Transformer) -> tuple:
    """What its costs depend on: its device, its type, int8 or not, compiled or not."""
    return model.device, model.dtype, model.quantized, model.compiled is not None


def once(model: Transformer, what: object, measure: Callable[[], T]) -> T:
    """`measure()`, remembered as long as the model lives, in each `mode`."""
    place = known.setdefault(model, {})
    key = what, mode(model)
    if key not in place:
        place[key] = measure()
    return place[key]


def curve_at(curve: list[float], n: int) -> float:
    """The cost of `n` rows; of more than the curve knows, the last it knows."""
    return curve[min(n, len(curve) - 1)]


def cost_curve(model: Transformer) -> list[float]:
    """curve[n] = pass(n) / pass(1) for n from 1 to 64, or to the largest power of two in the
    context; measured once a model.

    Measured at powers of two, in turn, and linear between them (for graphs on a GPU, which fill up
    rows to the next, that one's cost); never falling, as more rows cannot cost less.
    """
    return once(model, "curve", lambda: measured_curve(model))


def measured_curve(model: Transformer) -> list[float]:
    """`cost_curve`, measured now."""
    counts = [n for n in COUNTS if n <= model.config.context]
    cache = model.new_cache(64)
    seconds = least_in_turn([one_pass(model, n, cache) for n in counts])
    filled_up = model.compiled is not None and model.compiled.whole
    curve = [0.0, 1.0]
    for (m, a), (n, b) in zip(zip(counts, seconds), zip(counts[1:], seconds[1:])):
        for i in range(m + 1, n + 1):
            cost = b if filled_up else a + (b - a) * (i - m) / (n - m)
            curve.append(max(curve[-1], cost / seconds[0]))
    return curve
