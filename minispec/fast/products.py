"""Matrix products on a CPU: several ways to compute one, equal up to rounding. Which of them is
fastest depends on the processor, the number of rows and the shape, so they are timed once on the
machine at hand, and the choice is kept in the cache folder.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec import paths
from minispec.fast.cost import interleaved_min_times
from minispec.machine import processor

TIMED_ROWS = 1, 2, 4, 8, 16, 32, 64  # a row count between two of them uses the choice of the larger
TIMED_BYTES = 2**23  # of weights per timing
TURNS = 3  # timings of each product; the shortest counts
MAX_TIME_RATIO = 0.9  # a product replaces another if it takes at most this share of its time
MAX_TIME_RATIO_WITH_COPY = 0.8  # the same for a product that needs a second copy of the weights
COPY_ROWS = 8  # the copy must pay for row counts up to this one, taken together

# ---- the candidates ------------------------------------------------------------------------------


def weight_first(rows: Tensor, weight: Tensor) -> Tensor:
    """weight @ rowsᵀ, turned round. For four rows this takes half as long on some processors and
    twice as long on others. A single row is doubled: a product with a vector may use only one core.
    """
    n = len(rows)
    if n % 2:
        rows = torch.cat([rows, rows[-1:]])
    # contiguous, since the next product takes several times as long on rows stored as columns
    return (weight @ rows.contiguous().T).T[:n].contiguous()


# each maps rows (n, in) and weights (out, in), for `transposed` a copy (in, out), to (n, out)
PRODUCTS = {"rows_first": F.linear, "weight_first": weight_first, "transposed": torch.matmul}


class MeasuredLinear(nn.Module):
    """A linear layer that computes each pass by the product that was fastest for its row count.
    `products` holds a name for each of TIMED_ROWS."""

    def __init__(self, linear: nn.Linear, products: list[str]):
        super().__init__()
        self.weight, self.bias, self.products = linear.weight, linear.bias, products
        if "transposed" in products:  # neither a parameter nor a buffer: it is not saved
            self.weight_t = linear.weight.detach().T.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # a compiled graph has its own products
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, x.shape[-1])  # (n, in)
        n = len(rows)
        product = "rows_first"
        if 0 < n <= TIMED_ROWS[-1]:
            product = self.products[(n - 1).bit_length()]  # TIMED_ROWS are the powers of two
        if product == "rows_first":
            return F.linear(x, self.weight, self.bias)
        weight = self.weight_t if product == "transposed" else self.weight
        y = PRODUCTS[product](rows, weight)  # (n, out)
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], -1)


# ---- the choice ----------------------------------------------------------------------------------

Times = dict[str, list[float]]  # product -> seconds for a part at each of TIMED_ROWS


def key_of(weight: Tensor) -> str:
    """What the choice depends on, apart from the machine: the weight's shape and dtype."""
    out, width = weight.shape
    return f"{out}x{width} {weight.dtype}"


def fastest_products(weights: Iterable[Tensor]) -> dict[str, list[str]]:
    """The fastest products for weights on the CPU, by `key_of`: from the cache folder or, if a key
    is new, measured now."""
    groups: dict[str, list[Tensor]] = {}
    for weight in weights:
        groups.setdefault(key_of(weight), []).append(weight.detach())
    path = choices_file()
    known = read_choices(path)
    new = {key: group for key, group in groups.items() if key not in known}
    if new:
        known |= {key: choose(times) for key, times in time_products(new).items()}
        write_choices(path, known)
    return {key: known[key] for key in groups}


def choose(times: Times) -> list[str]:
    """The product for each of TIMED_ROWS, given the seconds that each took."""
    best = [
        "weight_first" if turned < MAX_TIME_RATIO * linear else "rows_first"
        for linear, turned in zip(times["rows_first"], times["weight_first"])
    ]
    seconds = [times[name][i] for i, name in enumerate(best)]
    with_copy = [min(pair) for pair in zip(seconds, times["transposed"])]
    few = sum(n <= COPY_ROWS for n in TIMED_ROWS)
    if sum(with_copy[:few]) > MAX_TIME_RATIO_WITH_COPY * sum(seconds[:few]):
        return best
    return [
        "transposed" if copied < MAX_TIME_RATIO * without else name
        for name, without, copied in zip(best, seconds, times["transposed"])
    ]


@torch.inference_mode()
def time_products(groups: dict[str, list[Tensor]]) -> dict[str, Times]:
    """Time every product for every shape. The shapes take turns, and each timing uses the next of a
    shape's weights, so that weights come from memory as they do in a pass."""
    parts = {key: itertools.cycle(split(group)) for key, group in groups.items()}
    copies = {key: itertools.repeat([w.T.contiguous() for w in next(parts[key])]) for key in groups}
    timings = list(itertools.product(TIMED_ROWS, PRODUCTS, groups))
    functions = []
    for n, name, key in timings:
        weights = copies[key] if name == "transposed" else parts[key]
        rows = torch.ones_like(groups[key][0][:1]).repeat(n, 1)  # (n, in)
        functions.append(partial(multiply, PRODUCTS[name], rows, weights))
    seconds = dict(zip(timings, interleaved_min_times(functions, TURNS, turn_seconds=0)))
    return {
        key: {name: [seconds[n, name, key] for n in TIMED_ROWS] for name in PRODUCTS}
        for key in groups
    }


def multiply(
    product: Callable[[Tensor, Tensor], Tensor], rows: Tensor, weights: Iterator[list[Tensor]]
) -> None:
    """Compute the product of the rows with all weights of the next part."""
    for weight in next(weights):
        product(rows, weight)


def split(weights: list[Tensor]) -> list[list[Tensor]]:
    """Divide weights of one shape into parts of about TIMED_BYTES each; a larger weight is cut into
    slices of its rows."""
    rows = max(1, TIMED_BYTES // max(1, weights[0][:1].nbytes))
    if rows < len(weights[0]):
        slices = [part for weight in weights for part in weight.split(rows)]
        return [[part] for part in slices if len(part) == rows]
    size = max(1, rows // max(1, len(weights[0])))
    return [weights[i : i + size] for i in range(0, len(weights) - size + 1, size)] or [weights]


# ---- the file ------------------------------------------------------------------------------------


def choices_file() -> Path:
    """The file for this processor, instruction set, torch version and number of threads."""
    instructions = torch.backends.cpu.get_cpu_capability()
    system = processor(), instructions, torch.__version__, torch.get_num_threads(), TIMED_ROWS
    digest = blake2b(repr(system).encode(), digest_size=8).hexdigest()
    return paths.CACHE / f"products-{digest}.json"


def read_choices(path: Path) -> dict[str, list[str]]:
    """The choices in a file, by `key_of`; none if it is damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        choices = json.loads(path.read_text(encoding="utf-8"))
        lists = choices.values()
        if all(len(names) == len(TIMED_ROWS) and PRODUCTS.keys() >= set(names) for names in lists):
            return choices
    return {}


def write_choices(path: Path, choices: dict[str, list[str]]) -> None:
    """Write a file in one step; if that is impossible, the next process measures again."""
    partial_file = path.with_suffix(f".{os.getpid()}.json")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_file.write_text(json.dumps(choices, indent=1), encoding="utf-8")
        partial_file.replace(path)
