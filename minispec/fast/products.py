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
TIMED_BYTES = 2**23  # of weights per timing
UNCACHED_BYTES = 2**26
COPIED_PARTS = 16  # of a shape's weights, which are timed in turn
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


def pack(weight: Tensor) -> Tensor:
    """A copy of weights (out, in) in the layout that oneDNN, torch's library for matrix products,
    multiplies fastest. Without it, torch rearranges bfloat16 weights again in every product."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)


def packed(rows: Tensor, weight: Tensor) -> Tensor:
    """The product with weights from `pack`, in a half to a third of the time if rows are few. torch
    has no public name for either function: its compiler uses them. So `candidates` checks them."""
    return torch.ops.mkldnn._linear_pointwise(rows.contiguous(), weight, None, "none", [], "")


# each maps rows (n, in) and weights (out, in), for `packed` a copy of them, to (n, out)
PRODUCTS = {"rows_first": F.linear, "weight_first": weight_first, "packed": packed}


def dequantised(rows: Tensor, rounded: Tensor, scale: Tensor) -> Tensor:
    return F.linear(rows, rounded.to(rows.dtype)) * scale


def weight_only(rows: Tensor, rounded: Tensor, scale: Tensor) -> Tensor:
    """Reads a quarter of the bytes of float32. torch documents no product of rows with int8 weights
    on a CPU, so this is one of its private operators, and `candidates` checks it."""
    return torch.ops.aten._weight_int8pack_mm(rows.contiguous(), rounded, scale)


# each maps rows (n, in), int8 weights (out, in) and their scales (out,) to (n, out)
INT8_PRODUCTS = {"dequantised": dequantised, "weight_only": weight_only}
WIDTH = 64  # rows whose length is a multiple of this are safe for `weight_only`
INT8_ROWS = torch.bfloat16  # in float32, `weight_only` is several times slower than `dequantised`


def works(product: Callable[..., Tensor], like: Callable[..., Tensor], *inputs: Tensor) -> bool:
    """Whether a product exists in this version of torch, and is right for these inputs."""
    try:
        y, expected = product(*inputs).float(), like(*inputs).float()
    except (RuntimeError, AttributeError):  # it does not exist, or not for this shape or dtype
        return False
    return bool((y - expected).norm() <= 0.02 * expected.norm())


class MeasuredLinear(nn.Module):
    """A linear layer that computes each pass by the product that was fastest for its row count.
    `products` holds a name for each of TIMED_ROWS."""

    def __init__(self, linear: nn.Linear, products: list[str]):
        super().__init__()
        self.weight, self.bias, self.products = linear.weight, linear.bias, products
        self.packed: Tensor | None = None  # a copy, from the first pass on that uses it

    def __getstate__(self) -> dict:
        """Copies and pickles pack the weights again: the packed ones can be neither."""
        return self.__dict__ | {"packed": None}

    def forward(self, x: Tensor) -> Tensor:
        # a compiled graph has its own products, and the packed one has no gradient
        if torch.compiler.is_compiling() or torch.is_grad_enabled() and x.requires_grad:
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, x.shape[-1])  # (n, in)
        product = product_for(len(rows), self.products, "rows_first")
        if product == "rows_first":
            return F.linear(x, self.weight, self.bias)
        if product == "packed" and self.packed is None:
            self.packed = pack(self.weight)
        y = PRODUCTS[product](rows, self.packed if product == "packed" else self.weight)  # (n, out)
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
    """The same for rows of any dtype: they, too, are rounded."""

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
    """The products to choose from for weights of this shape and dtype. torch's private operators
    are among them if they work; the one for int8 reads beyond the end of rows of odd lengths."""
    random = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(0))
    if weight.dtype != torch.int8:
        inputs = random.to(weight.dtype), split([weight])[0][0]
        works_packed = works(lambda rows, weight: packed(rows, pack(weight)), F.linear, *inputs)
        return {name: f for name, f in PRODUCTS.items() if name != "packed" or works_packed}

    scale = torch.full((len(weight),), 0.01, dtype=INT8_ROWS)
    inputs = random.to(INT8_ROWS), weight, scale

    def unscaled(product: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda rows, part: product(rows, part, torch.ones_like(scale[: len(part)]))

    return {
        name: unscaled(f) for name, f in INT8_PRODUCTS.items()
        if f is dequantised or weight.shape[1] % WIDTH == 0 and works(f, dequantised, *inputs)
    }  # fmt: skip


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
        return sum(min(seconds) for seconds in [*zip(*times.values())][:few])

    def size(weights: list[Tensor]) -> int:  # of a part, which is what was timed
        return sum(weight.numel() for weight in split(weights)[0])

    few = sum(n <= COPY_ROWS for n in TIMED_ROWS)
    return remembered(weights, choices_file("drafts"), lambda x: isinstance(x, bool), measure)


def many(weight: Tensor) -> list[Tensor]:
    """So many copies of a weight that the processor's caches do not hold them."""
    return [weight.clone() for _ in range(1 + UNCACHED_BYTES // max(1, weight.nbytes))]


def are_names(products: list) -> bool:
    return len(products) == len(TIMED_ROWS) and KNOWN >= {*products}


def choose(times: Times) -> list[str]:
    """The product for each of TIMED_ROWS, given the seconds that each took."""
    if "rows_first" not in times:  # int8
        return [min(times, key=lambda name: times[name][i]) for i in range(len(TIMED_ROWS))]
    best = [
        "weight_first" if turned < MAX_TIME_RATIO * linear else "rows_first"
        for linear, turned in zip(times["rows_first"], times["weight_first"])
    ]
    seconds = [times[name][i] for i, name in enumerate(best)]
    copied = times.get("packed", seconds)  # with float64, there is none
    with_copy = [min(pair) for pair in zip(seconds, copied)]
    few = sum(n <= COPY_ROWS for n in TIMED_ROWS)
    if sum(with_copy[:few]) > MAX_TIME_RATIO_WITH_COPY * sum(seconds[:few]):
        return best
    return [
        "packed" if with_copy < MAX_TIME_RATIO * without else name
        for name, without, with_copy in zip(best, seconds, copied)
    ]


def without_copies(names: list[str]) -> list[str]:
    """The products to use if there is no memory for copies of the weights."""
    return ["rows_first" if name == "packed" else name for name in names]


@torch.inference_mode()
def time_products(groups: dict[str, list[Tensor]]) -> dict[str, Times]:
    """Time every product for every shape. The shapes take turns, and each timing uses the next of a
    shape's weights, so that weights come from memory as they do in a pass."""
    parts = {key: itertools.cycle(split(group)) for key, group in groups.items()}
    products = {key: candidates(group[0]) for key, group in groups.items()}
    copies = {
        key: itertools.cycle([[*map(pack, part)] for part in split(groups[key])[:COPIED_PARTS]])
        for key in groups if "packed" in products[key]
    }  # fmt: skip
    timings = [(n, name, key) for n in TIMED_ROWS for key in groups for name in products[key]]
    functions = []
    for n, name, key in timings:
        weights = copies[key] if name == "packed" else parts[key]
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
    ways = [(torch.float32, "dequantised"), *((INT8_ROWS, name) for name in candidates(weight[0]))]
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
T = TypeVar("T")  # of a choice


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
    """The file for this processor, instruction set, torch version and number of threads."""
    instructions = torch.backends.cpu.get_cpu_capability()
    system = processor(), instructions, torch.__version__, torch.get_num_threads()
    digest = blake2b(repr((*system, TIMED_ROWS, sorted(KNOWN))).encode(), digest_size=8).hexdigest()
    return paths.CACHE / f"{kind}-{digest}.json"
