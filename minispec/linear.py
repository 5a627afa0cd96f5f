"""Linear layers for inference: several of one input as one product, whose weights are packed for
the rows of a draft, read as float16 where that loses nothing, or int8 (int8.py). A pass waits for
its weights, so how they lie decides its speed.
"""

import contextlib
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec import int8
from minispec.int8 import BLOCK, Int8, in_turn, laid_out, lies_so, rows_of_blocks


def on_intel() -> bool:
    """Whether torch multiplies by MKL, and on a processor of its maker."""
    try:
        kind = Path("/proc/cpuinfo").read_text()
    except OSError:  # no Linux
        kind = platform.processor()
    return torch.backends.mkl.is_available() and "GenuineIntel" in kind


SMALL = 2**15  # numbers of a float32 weight that stays plain: calls of other products cost too much
QUICK = 8 if on_intel() else 1  # times as many if it needs 32 bits: MKL reads it as quickly there
KERNELS = "x86", "fbgemm"  # of torch's engines for narrow weights those that have Half's kernel
WIDTHS = 64, 32  # outputs that oneDNN lays side by side (32 in bfloat16, where AMX is)
WHOLE = 2**24  # of which at most this many numbers are packed at once: float32 copies are made


class Joined:
    """Several linear layers of one input as one product, for inference.

    On a CPU float32 weights that are not small are `Half` where that is exact; others, and
    bfloat16 ones, are `Packed` where their layout is known; with `quantize` all are `Int8`. The
    layers give such weights up: until `undo` theirs are on the meta device. The rest stays plain,
    in float32 on a CPU transposed: read faster so. `looked_up`: `rows` is called often.
    """

    @torch.inference_mode(False)  # what is made here may be trained later
    @torch.no_grad()
    def __init__(self, *parts: nn.Linear, quantize: bool = False, looked_up: bool = False):
        assert len({part.bias is None for part in parts}) == 1, "biases of all parts, or of none"
        self.parts = parts
        self.bias = None if parts[0].bias is None else torch.cat([p.bias for p in parts]).detach()
        weight = torch.cat([p.weight for p in parts]) if len(parts) > 1 else parts[0].weight
        self.weight: Tensor | None = weight.detach()  # (out, in)
        self.packed: Half | Packed | Int8 | None = (
            Int8(self.weight) if quantize else fastest(self.weight, looked_up)
        )
        if self.packed is None:
            if small(self.weight, QUICK):
                self.weight = self.weight.t().contiguous().t()
            self.share(self.weight)
            return
        self.weight = None
        for part in parts:
            hold(part, torch.empty_like(part.weight, device="meta"))
            part.forward = given_up

    def share(self, weight: Tensor) -> None:
        """Give the parts their rows of `weight` as views."""
        for part, rows in zip(self.parts, weight.split([len(part.weight) for part in self.parts])):
            hold(part, rows)
            vars(part).pop("forward", None)

    @torch.inference_mode(False)
    @torch.no_grad()
    def undo(self) -> None:
        """Give the parts plain weights again: what was quantised stays what that made of it."""
        self.share(self.dense().contiguous())

    def dense(self) -> Tensor:
        """The weights that the product stands for, (out, in)."""
        return self.weight if self.packed is None else self.packed.dense()

    def rows(self, ids: Tensor) -> Tensor:
        """Some rows of `dense()`, (..., in). Raises IndexError for others than it has."""
        return F.embedding(ids, self.weight) if self.packed is None else self.packed.rows(ids)

    def __call__(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():  # packed products have no gradient
            return F.linear(x, self.dense(), self.bias)
        if self.packed is not None:
            return self.packed.product(x, self.bias)
        return F.linear(x, self.weight, self.bias)


def joined_in(module: nn.Module) -> dict[str, Joined]:
    """The products that stand for its linear layers, by where they are kept."""
    return {
        f"{name}.{key}": value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, Joined)
    }


@contextlib.contextmanager
def for_graphs(products: Iterable[Joined]) -> Iterator[None]:
    """Within, a CPU's graphs can be made of products: those of `Half` as they are, of int8 weights
    as `int8.for_graphs` has them, and what oneDNN packed is plain, as Inductor packs it itself."""
    kept = [(joined, joined.packed) for joined in products]
    packed = [(joined, each) for joined, each in kept if isinstance(each, Packed)]
    try:
        for joined, each in packed:
            joined.weight, joined.packed = each.dense(), None
        with (
            int8.for_graphs([each for _, each in kept if isinstance(each, Int8)]),
            traced([each for _, each in kept if isinstance(each, Half)]),
        ):
            yield
    finally:
        for joined, each in packed:
            joined.packed, joined.weight = each, None


def hold(layer: nn.Linear, weight: Tensor) -> None:
    """Another weight for the layer, trained or frozen as its own was."""
    layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)


def given_up(*inputs: Tensor) -> Tensor:
    """In the place of a layer's `forward`, whose weight is packed or quantised: torch would compute
    with an empty one, without a word."""
    raise RuntimeError("this layer's weights are packed: use the model's own methods, or undo()")


class Half:
    """A float32 weight (out, in) whose rows, divided by powers of two, float16 holds exactly.

    torch's kernel turns them back as it reads them and computes in float32: half the bytes to read,
    the same product but for the order of its sums (and for overflow, as powers come last: sums of x
    below 1e33 are safe), and each row of x gets bit for bit what it gets alone. Its layout fills
    the inputs up to a multiple of 512, so it saves reading, and memory only where they are many.
    `powers` (out,) are None where all are 1; `halves` (out, in) are kept where `rows` is called
    often.
    """

    def __init__(self, halves: Tensor, powers: Tensor | None, looked_up: bool):
        some = max(BLOCK, WHOLE // halves.shape[1] // BLOCK * BLOCK)
        pieces = halves.split(some)
        self.parts = [torch.ops.quantized.linear_prepack_fp16(p.float(), None) for p in pieces]
        self.sizes = [len(piece) for piece in pieces]
        self.halves, self.powers = halves if looked_up else None, powers
        self.nbytes = halves.nbytes  # that a product reads

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x (..., in) -> (..., out)."""
        if x.dim() == 1:  # which the kernel refuses
            return self.product(x[None], bias)[0]
        # 7 of a call's 10 us are saved: `_op` is past a search of the arguments for tracing's
        # stand-ins, and within the block torch does not ask whether a packed part brings a function
        # of its own, which it learns by an exception
        times, (first, *more) = torch.ops.quantized.linear_dynamic_fp16._op, self.parts
        with torch._C.DisableTorchFunctionSubclass():
            y = times(x, first)
            if more:
                y = torch.cat([y, *(times(x, part) for part in more)], -1)
        if self.powers is not None:
            y *= self.powers
        return y if bias is None else y + bias

    def rows(self, ids: Tensor) -> Tensor:
        """Some rows of the weight, (..., in). Raises IndexError for others than it has."""
        if self.halves is None:
            return F.embedding(ids, self.dense())
        found = F.embedding(ids, self.halves).float()
        return found if self.powers is None else found * self.powers[ids, None]

    def dense(self) -> Tensor:
        """The weight, (out, in)."""
        parts = [torch.ops.quantized.linear_unpack_fp16(part)[0] for part in self.parts]
        weight = torch.cat(parts) if parts[1:] else parts[0]
        return weight if self.powers is None else weight.mul_(self.powers[:, None])


@contextlib.contextmanager
def traced(weights: Iterable[Half]) -> Iterator[None]:
    """Within, torch.export and Inductor take Half's kernel as it is: they are told the shape that
    it returns, and neither to look into packed parts nor to compare them, which they cannot."""
    sizes = {hash(part): size for each in weights for part, size in zip(each.parts, each.sizes)}

    def returned(x: Tensor, part: torch.ScriptObject, reduce_range: bool = False) -> Tensor:
        return x.new_empty(*x.shape[:-1], sizes[hash(part)])

    with (
        torch.library._scoped_library("quantized", "IMPL") as library,
        torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
    ):
        library.impl("linear_dynamic_fp16", returned, "Meta")
        torch.ScriptObject.tracing_mode = lambda part: "real"  # which torch asks for by name
        try:
            yield
        finally:
            del torch.ScriptObject.tracing_mode


def half(weight: Tensor, looked_up: bool) -> Half | None:
    """None where that does not pay, is not exact, or where torch has no such kernel."""
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    if not on_cpu or small(weight) or torch.backends.quantized.engine not in KERNELS:
        return None
    most = torch.linalg.vector_norm(weight, torch.inf, dim=1)  # unlike abs() without a copy
    if not most.isfinite().all():  # the kernel would take float16's largest number
        return None
    # bfloat16 reaches further than float16, but seldom within a row, whose largest number shall lie
    # just below float16's end, 2^16
    for powers in None, torch.ldexp(torch.ones_like(most), torch.frexp(most)[1] - 16):
        halves = narrowed(weight, powers)
        if halves is not None:
            return Half(halves, powers, looked_up)
    return None


def narrowed(weight: Tensor, powers: Tensor | None) -> Tensor | None:
    """The weight (out, in) over its rows' powers (None: 1) in float16; None where that is not
    exact. Some rows at a time: no second copy in float32."""
    halves = torch.empty_like(weight, dtype=torch.float16)
    power = weight.new_ones(len(weight)) if powers is None else powers
    for into, rows, by in zip(*(each.split(BLOCK) for each in (halves, weight, power[:, None]))):
        into.copy_(rows / by)
        if not torch.equal(into.float() * by, rows):
            return None
    return halves


class Packed:
    """A weight (out, in) as oneDNN lays it out: the rows of a draft cost little more than one.

    `blocks` is the same memory as it lies, filled up with zeros, (out / B, in / V, B, V): of B
    outputs V inputs each, side by side, V = 1 in float32 and 2 in bfloat16. B is the processor's.
    """

    def __init__(self, memory: Tensor, blocks: Tensor, size: tuple[int, int]):
        self.memory, self.blocks, (self.out, self.inputs) = memory, blocks, size
        self.nbytes = blocks.nbytes  # that a product reads
        # of each block a line for each input, where none are filled up; else oneDNN multiplies
        _, lines, width, each = blocks.shape
        self.in_lines = (lines, each) == (self.inputs, 1)
        if self.in_lines:
            self.table = blocks.view(-1, width)
            self.lines, self.first = in_turn(len(blocks), 1, self.inputs)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x (..., in) -> (..., out)."""
        if x.numel() != self.inputs or not self.in_lines:
            return torch.ops.mkldnn._linear_pointwise(x, self.memory, bias, "none", [], "")
        # of one row a sum of lines, each times its input: read faster so than by oneDNN (and added
        # one by one, so that of 10,000 inputs the sum is ten times as far off as of two rows)
        scales = x.reshape(1, -1).expand(len(self.first), -1).flatten().contiguous()
        y, *_ = torch._embedding_bag_forward_only(  # what embedding_bag calls, without its wrapper
            self.table, self.lines, self.first, per_sample_weights=scales
        )
        y = y.view(*x.shape[:-1], -1)[..., : self.out]
        return y if bias is None else y + bias

    def rows(self, ids: Tensor) -> Tensor:
        """Some rows of the weight, (..., in). Raises IndexError for others than it has."""
        low, high = (int(each) for each in ids.aminmax()) if ids.numel() else (0, 0)
        if low < 0 or high >= self.out:  # behind the last row lie zeros
            raise IndexError(f"rows {low} to {high} of a weight of {self.out}")
        return rows_of_blocks(self.blocks, ids, self.inputs)

    def dense(self) -> Tensor:
        """The weight, (out, in)."""
        return self.memory.to_dense()


def pack(weight: Tensor) -> Packed | None:
    """None where that does not pay, or where this processor's layout is another: each number is
    looked up where it should lie."""
    if not packable(weight):
        return None
    memory, each = torch.ops.mkldnn._reorder_linear_weight(weight, 8), weight.element_size()
    lying = laid_out(memory, weight.dtype)
    for width in WIDTHS:
        count = -(-weight.shape[0] // width)
        length = len(lying) // count  # of a block
        if len(lying) % count or length % (width * 4 // each) or length < width * weight.shape[1]:
            continue
        packed = Packed(memory, lying.view(count, -1, width, 4 // each), weight.shape)
        if lies_so(packed, weight):
            return packed
    return None


def fastest(weight: Tensor, looked_up: bool = False) -> Half | Packed | None:
    """A weight (out, in) as it is read fastest; None where that is as it lies."""
    return half(weight, looked_up) or pack(weight)


def packable(weight: Tensor) -> bool:
    """Whether oneDNN's packed products take such weights on this processor, and pay."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 and not small(weight, QUICK)


def small(weight: Tensor, times: int = 1) -> bool:
    """Whether it is float32, on a CPU, and of at most so many times SMALL numbers."""
    on_cpu = weight.device.type == "cpu"
    return on_cpu and weight.dtype == torch.float32 and weight.numel() <= SMALL * times
