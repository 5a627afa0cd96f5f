"""Matrix products on a CPU: several ways to compute one, equal up to rounding. Which of them is
fastest depends on the processor, the number of rows and the shape, so they are timed once on the
machine at hand, and the choice is kept in the cache folder.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec import distributed, paths
from minispec.checkpoints.weights import write_json
from minispec.cli import UserError
from minispec.fast.cost import interleaved_min_times
from minispec.machine import processor

TIMED_ROWS = 1, 2, 4, 8, 16, 32, 64  # a row count between two of them uses the choice of the larger
TIMED_BYTES = 2**24  # of weights per timing: a part's first product is slower
TURNS = 3  # timings of each product; the shortest counts
MAX_TIME_RATIO = 0.9  # a product replaces another if it takes at most this share of its time
MAX_TIME_RATIO_WITH_COPY = 0.8  # the same for a product that needs a second copy of the weights
COPY_ROWS = 8  # a copy, or rounding, must pay for row counts up to this one, taken together
FEW = sum(n <= COPY_ROWS for n in TIMED_ROWS)
ROUNDED_BYTES = 2**18  # smaller weights of a draft's layers stay in a processor's caches
UNCACHED_BYTES = 2**26  # of weights, so that they come from memory

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


def convolved(rows: Tensor, weight: Tensor) -> Tensor:
    """The product as a 1 × 1 convolution: the weight is an image of `out` pixels with `in`
    channels, each row a kernel. With several threads, float32 then runs in oneDNN, which is faster
    on some processors, from 5 rows on."""
    image = weight[None, None].permute(0, 3, 1, 2)  # (1, in, 1, out), channels last: no copy
    maps = F.conv2d(image, rows[:, :, None, None])  # (1, n, 1, out)
    return maps.view(len(rows), len(weight)).contiguous()


# each maps rows (n, in) and weights (out, in), for `transposed` a copy (in, out), to (n, out)
PRODUCTS = {"rows_first": F.linear, "weight_first": weight_first, "convolved": convolved,
            "transposed": torch.matmul}  # fmt: skip


def dequantised(rows: Tensor, rounded: Tensor, scale: Tensor) -> Tensor:
    return F.linear(rows, rounded.to(rows.dtype)) * scale


def weight_only(rows: Tensor, rounded: Tensor, scale: Tensor) -> Tensor:
    """Reads a quarter of the bytes of float32. torch documents no product of rows with int8 weights
    on a CPU, so this is one of its private operators, and `works` checks it before it is used."""
    return torch.ops.aten._weight_int8pack_mm(rows.contiguous(), rounded, scale)


# each maps rows (n, in), int8 weights (out, in) and their scales (out,) to (n, out)
INT8_PRODUCTS = {"dequantised": dequantised, "weight_only": weight_only}
WIDTH = 64  # rows whose length is a multiple of this are safe for `weight_only`
INT8_ROWS = torch.bfloat16  # in float32, `weight_only` is several times slower than `dequantised`


def works(product: Callable[..., Tensor], rounded: Tensor) -> bool:
    """Whether the product exists in this version of torch and is right for weights of this shape.
    torch's operator reads beyond the end of rows of odd lengths, so these are not even tried."""
    if rounded.shape[1] % WIDTH:
        return product is dequantised
    rows = torch.randn(2, rounded.shape[1], generator=torch.Generator().manual_seed(0))
    inputs = rows.to(INT8_ROWS), rounded, torch.full(rounded.shape[:1], 0.01, dtype=INT8_ROWS)
    try:
        y, expected = product(*inputs).float(), dequantised(*inputs).float()
    except (RuntimeError, AttributeError):  # it does not exist, or not for this shape
        return False
    return bool((y - expected).norm() <= 0.02 * expected.norm())


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
        product = product_for(len(rows), self.products, "rows_first")
        if product == "rows_first":
            return F.linear(x, self.weight, self.bias)
        weight = self.weight_t if product == "transposed" else self.weight
        y = PRODUCTS[product](rows, weight)  # (n, out)
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], -1)


class Int8Linear(nn.Module):
    """Weights rounded to 8 bits, with one scale per output: a quarter of the memory of float32.
    The layer's `name` in its model determines how ranks share it. `products` are as in
    MeasuredLinear."""

    def __init__(self, linear: nn.Linear, name: str = ""):
        super().__init__()
        weight = linear.weight.detach()
        precise = weight.to(torch.promote_types(weight.dtype, torch.float32))
        largest = distributed.largest_in_rows(precise, f"{name}.weight")
        scale = largest.clamp(min=1e-12) / 127  # (out,)
        self.register_buffer("rounded", (precise / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.to(weight.dtype))
        self.bias = linear.bias
        self.products = ["dequantised"] * len(TIMED_ROWS)

    @property
    def weight(self) -> Tensor:
        """The dequantised weights."""
        return self.rounded * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (n, in)
        product = self.products[0]  # the only one of a compiled pass, whatever its row count
        if not torch.compiler.is_compiling():
            product = product_for(len(rows), self.products, "dequantised")
        y = INT8_PRODUCTS[product](rows, self.rounded, self.scale)  # (n, out)
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], len(self.rounded))

    def extra_repr(self) -> str:
        return self.products[0]  # part of what a compiled pass is made from


class DraftLinear(Int8Linear):
    """An Int8Linear that computes in bfloat16, whatever the dtype of its input."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear)
        self.scale = self.scale.to(INT8_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(INT8_ROWS)).to(x.dtype)


def product_for(n: int, products: list[str], otherwise: str) -> str:
    """The product for `n` rows, given those for TIMED_ROWS, which are the powers of two."""
    return products[(n - 1).bit_length()] if 0 < n <= TIMED_ROWS[-1] else otherwise


# ---- the choice ----------------------------------------------------------------------------------

Times = dict[str, list[float]]  # product -> seconds for a part at each of TIMED_ROWS


def candidates(weight: Tensor) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """The products to choose from for weights of this shape and dtype."""
    if weight.dtype != torch.int8:
        return PRODUCTS
    scale = torch.ones(len(weight), dtype=INT8_ROWS)

    def unscaled(product: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda rows, part: product(rows, part, scale[: len(part)])

    return {name: unscaled(f) for name, f in INT8_PRODUCTS.items() if works(f, weight)}


def key_of(weight: Tensor) -> str:
    """What the choice depends on, apart from the machine: the weight's shape and dtype."""
    out, width = weight.shape
    return f"{out}x{width} {weight.dtype}"


def fastest_products(weights: Iterable[Tensor]) -> dict[str, list[str]]:
    """The fastest products for weights on the CPU, by `key_of`: one for each of TIMED_ROWS."""
    return remembered(
        weights, choices_file(), are_names,
        lambda groups: {key: choose(times) for key, times in time_products(groups).items()},
    )  # fmt: skip


def faster_rounded(weights: Iterable[Tensor]) -> dict[str, bool]:
    """Whether a few rows are multiplied faster if the weights are rounded to int8, by `key_of`."""

    def measure(groups: dict[str, list[Tensor]]) -> dict[str, bool]:
        like = {key: torch.ones_like(group[0], dtype=torch.int8) for key, group in groups.items()}
        both = {key: many(group[0]) for key, group in groups.items()}
        both |= {f"rounded {key}": many(weight) for key, weight in like.items()}
        times = time_products(both)
        seconds = {key: few_rows(times[key]) / size(both[key]) for key in both}
        return {key: seconds[f"rounded {key}"] < MAX_TIME_RATIO * seconds[key] for key in groups}

    def few_rows(times: Times) -> float:
        return sum(min(seconds) for seconds in [*zip(*times.values())][:FEW])

    def size(weights: list[Tensor]) -> int:  # of a part, which is what was timed
        return sum(weight.numel() for weight in split(weights)[0])

    return remembered(weights, choices_file("drafts"), lambda x: isinstance(x, bool), measure)


def many(weight: Tensor) -> list[Tensor]:
    """Enough copies of a weight to overflow most processors' caches."""
    return [weight.clone() for _ in range(1 + UNCACHED_BYTES // max(1, weight.nbytes))]


def are_names(products: list) -> bool:
    return len(products) == len(TIMED_ROWS) and KNOWN >= {*products}


def choose(times: Times) -> list[str]:
    """The product for each of TIMED_ROWS, given the seconds that each took."""
    if "rows_first" not in times:  # int8
        return [min(times, key=lambda name: times[name][i]) for i in range(len(TIMED_ROWS))]
    best = []
    for i, linear in enumerate(times["rows_first"]):
        faster = min("weight_first", "convolved", key=lambda name: times[name][i])
        best.append(faster if times[faster][i] < MAX_TIME_RATIO * linear else "rows_first")
    seconds = [times[name][i] for i, name in enumerate(best)]
    with_copy = [min(pair) for pair in zip(seconds, times["transposed"])]
    if sum(with_copy[:FEW]) > MAX_TIME_RATIO_WITH_COPY * sum(seconds[:FEW]):
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
    products = {key: candidates(group[0]) for key, group in groups.items()}
    timings = [(n, name, key) for n in TIMED_ROWS for key in groups for name in products[key]]
    functions = []
    for n, name, key in timings:
        weights = copies[key] if name == "transposed" else parts[key]
        dtype = INT8_ROWS if groups[key][0].dtype == torch.int8 else groups[key][0].dtype
        rows = torch.ones(n, groups[key][0].shape[1], dtype=dtype)
        functions.append(partial(multiply, products[key][name], rows, weights))
    seconds = dict(zip(timings, interleaved_min_times(functions, TURNS, turn_seconds=0)))
    return {
        key: {name: [seconds[n, name, key] for n in TIMED_ROWS] for name in products[key]}
        for key in groups
    }


@torch.inference_mode()
def int8_dtype() -> torch.dtype:
    """The dtype, bfloat16 or float32, in which a row is multiplied faster with int8 weights."""
    weight = torch.ones(16, 512, 1024, dtype=torch.int8)
    working = [name for name, f in INT8_PRODUCTS.items() if works(f, weight[0])]
    ways = [(torch.float32, "dequantised"), *((INT8_ROWS, name) for name in working)]
    functions = []
    for dtype, name in ways:
        row, scale = torch.ones(1, 1024, dtype=dtype), torch.ones(512, dtype=dtype)
        product, parts = partial(INT8_PRODUCTS[name], scale=scale), itertools.cycle(weight[:, None])
        functions.append(partial(multiply, product, row, parts))
    seconds = interleaved_min_times(functions, TURNS, turn_seconds=0)
    return ways[seconds.index(min(seconds))][0]


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


# ---- the files -----------------------------------------------------------------------------------

KNOWN = {*PRODUCTS, *INT8_PRODUCTS}
T = TypeVar("T")  # a choice


def remembered(
    weights: Iterable[Tensor], path: Path, valid: Callable[[T], bool],
    measure: Callable[[dict[str, list[Tensor]]], dict[str, T]],
) -> dict[str, T]:  # fmt: skip
    """The choices for weights, by `key_of`: from a file in the cache folder or, if a key is new,
    measured now for groups of weights with the same key."""
    groups: dict[str, list[Tensor]] = {}
    for weight in weights:
        groups.setdefault(key_of(weight), []).append(weight.detach())
    known = read_choices(path, valid)
    new = {key: group for key, group in groups.items() if key not in known}
    if new:
        known |= measure(new)
        write_choices(path, known)
    return {key: known[key] for key in groups}


def read_choices(path: Path, valid: Callable[[T], bool] = are_names) -> dict[str, T]:
    """The choices in a file, by `key_of`; none if it is damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        choices = json.loads(path.read_text(encoding="utf-8"))
        if all(map(valid, choices.values())):
            return choices
    return {}


def write_choices(path: Path, choices: dict[str, T]) -> None:
    """Write a file; if that is impossible, the next process measures again."""
    with contextlib.suppress(UserError):
        write_json(path, choices, indent=1)


def choices_file(kind: str = "products") -> Path:
    """The file for this processor, instruction set, number of threads, torch and products."""
    machine = processor(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    known = torch.__version__, TIMED_ROWS, *PRODUCTS
    digest = blake2b(repr(machine + known).encode(), digest_size=8).hexdigest()
    return paths.CACHE / f"{kind}-{digest}.json"
