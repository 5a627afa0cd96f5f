"""int8 weights for inference: a quarter of the bytes, and inputs that stay as exact as floats
beside the largest of their row.

A processor multiplies bytes several times as fast as it turns them into floats. So a row of inputs
is taken apart into three bytes for each number, and the products of bytes are whole numbers, exact.
For one row and a small weight that is too many operators: then floats are summed as they are read.
"""

import contextlib
import ctypes
from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # outputs that oneDNN lays side by side in a packed weight of bytes
LARGE = 2**22  # numbers from which a weight on a CPU is `Tiles`
BLOCKS = 384, 288, 256, 240, 192, 128, 96, 64  # outputs in a line of `Lines`
ROWS = 2**10  # of a weight that are quantised at once
LONGEST = 2**31 // 2**14  # inputs whose products of bytes 32 bits always hold
MANY = 64  # rows up to which `Lines` are summed: more are multiplied with floats made of them
KEPT = 2**18  # length up to which lists of lines are kept: of longer ones that gains little
FIXED = 2**23 - 2**16  # a row's largest magnitude in fixed point
MIDDLE = 128 * 0x010101  # makes it positive, and each of its bytes 128 more than the digit is
SHIFTS = torch.tensor([[0], [8], [16]], dtype=torch.int32)  # of the bytes, (3, 1)
UNITS = torch.tensor([1.0, 2.0**8, 2.0**16]) / FIXED  # of the digits, (3,)
SMALLEST = 1e-30  # magnitude of a row that fixed point is still fitted to
TINY = torch.finfo(torch.float32).tiny


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of a weight (out, in) as int8 multiples of a scale, a 127th of its largest
    magnitude; and the scales (out,), float32."""
    scale = (weight.abs().amax(1).float() / 127).clamp(min=TINY)
    return (weight / scale[:, None]).round().to(torch.int8), scale


class Int8:
    """A weight (out, in) as int8, a scale for each output: its nearest multiples, no further than
    half of it away (before they are rounded to a narrow type).

    On a CPU `kept` holds the whole numbers as its products read them; on other devices they lie in
    `whole` (out, in), and a product is one of floats made of them.
    """

    def __init__(self, weight: Tensor):
        (self.out, self.inputs), self.dtype = weight.shape, weight.dtype
        found = [quantized(rows) for rows in weight.split(ROWS)]
        whole, self.scale = (torch.cat(each) for each in zip(*found))
        self.whole: Tensor | None = None
        self.kept: Tiles | Lines | Graphed | None = None
        if weight.device.type == "cpu":
            self.kept = tiles(whole) or Lines(whole)
        else:
            self.whole = whole
        self.nbytes = (whole if self.kept is None else self.kept).nbytes  # that one row reads

    def numbers(self) -> Tensor:
        """The whole numbers, (out, in) int8."""
        return self.whole if self.kept is None else self.kept.dense()

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight that they stand for, (out, in), by default in its own type."""
        dtype = dtype or self.dtype
        return (self.numbers().to(dtype) * self.scale[:, None]).to(dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Some rows of `dense()`, (..., in). Raises IndexError for others than it has."""
        scale = F.embedding(ids, self.scale[:, None])  # which knows them; zeros lie behind them
        whole = self.whole[ids] if self.kept is None else self.kept.rows(ids)
        return (whole.to(self.dtype) * scale).to(self.dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x (..., in) -> (..., out)."""
        if self.kept is None or x.dtype == torch.float64:
            y = F.linear(x, self.dense(x.dtype))
        else:
            y = self.kept.product(x.reshape(-1, self.inputs).float(), self.scale)
            y = y.view(*x.shape[:-1], self.out).to(x.dtype)
        return y if bias is None else y + bias


def in_digits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of floats (n, in) as whole numbers of 24 bits: three bytes each (3n, in), 128 more than
    the digits in base 256, and what a unit of those stands for, (n, 3). No number is further off
    than a 2^22nd of its row's largest magnitude (of SMALLEST, if that is less): two or three of
    float32's roundings."""
    most = x.abs().amax(-1, keepdim=True).clamp_(min=SMALLEST)
    fixed = (x / most).mul_(FIXED).round_().to(torch.int32).add_(MIDDLE)
    digits = (fixed[:, None] >> SHIFTS).to(torch.uint8)  # which keeps the last byte
    return digits.reshape(-1, x.shape[-1]), most * UNITS


class Tiles:
    """Whole numbers (out, in) as oneDNN lays them out, for products of bytes by bytes.

    `blocks` is the same memory as it lies, filled up with zeros, (out / 64, in / 4, 64, 4): of 64
    outputs four inputs each, side by side. What each row of x gets it gets alone, bit for bit.
    """

    def __init__(self, memory: Tensor, size: tuple[int, int]):
        self.memory, (self.out, self.inputs) = memory, size
        count = -(-self.out // BLOCK)
        held = laid_out(memory, torch.int8)  # behind the blocks: an int32 for each output
        held = held[: (len(held) // BLOCK // count - 4) * BLOCK * count]
        self.blocks = held.view(count, -1, BLOCK, 4)
        self.nbytes = held.nbytes
        self.zero = torch.zeros(self.out, dtype=torch.int32, device="cpu")

    def product(self, x: Tensor, scale: Tensor) -> Tensor:
        """x (n, in), scale (out,) -> (n, out)."""
        digits, counts = in_digits(x)
        y = of_bytes(digits, self.memory, scale, self.zero).view(-1, 3, self.out)
        return torch.bmm(counts[:, None], y)[:, 0]

    def rows(self, ids: Tensor) -> Tensor:
        """Some rows of `dense()`, (..., in)."""
        return rows_of_blocks(self.blocks, ids, self.inputs)

    def dense(self) -> Tensor:
        """The whole numbers, (out, in) int8."""
        return self.memory.to_dense().t().contiguous()


def tiles(whole: Tensor) -> Tiles | None:
    """None where that does not pay, where there are no exact products of bytes, or where oneDNN's
    layout is another: each number is looked up where it should lie."""
    if whole.numel() < LARGE or whole.shape[1] > LONGEST or not multiplies_bytes():
        return None
    memory, count = torch.ops.onednn.qlinear_prepack(whole, None), -(-len(whole) // BLOCK)
    length = torch.ops.mkldnn._nbytes(memory)
    if length % (4 * BLOCK * count) or length < BLOCK * count * (whole.shape[1] + 4):
        return None
    found = Tiles(memory, whole.shape)
    return found if lies_so(found, whole) else None


def of_bytes(digits: Tensor, memory: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Bytes (n, in), less 128, times a weight (out, in) that oneDNN packed, times the outputs'
    scales: (n, out), float32. `zero` is int32's, of each output."""
    return torch.ops.onednn.qlinear_pointwise(
        digits, 1.0, 128, memory, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )


@lru_cache
def multiplies_bytes() -> bool:
    """Whether this processor and torch have exact products of bytes: without VNNI, or where oneDNN
    is told not to use it, two of them are added in 16 bits, too few."""
    if not torch.backends.mkldnn.is_available() or not torch.cpu._is_vnni_supported():
        return False
    most = torch.full((BLOCK, 256), 127, dtype=torch.int8, device="cpu")
    digits = torch.full((3, 256), 255, dtype=torch.uint8, device="cpu")
    ones = torch.ones(BLOCK, dtype=torch.int32, device="cpu")
    memory = torch.ops.onednn.qlinear_prepack(most, None)
    return bool((of_bytes(digits, memory, ones.float(), 0 * ones) == 127 * 127 * 256).all())


def rows_of_blocks(blocks: Tensor, ids: Tensor, inputs: int) -> Tensor:
    """Some rows, (..., in), of a weight that lies in blocks (out / 64, in / V, 64, V)."""
    each = blocks.shape[2]
    return blocks[ids // each, :, ids % each].flatten(-2)[..., :inputs]


def lies_so(packed, weight: Tensor) -> bool:
    """Whether each of its numbers is where `packed.rows` looks it up."""
    ids = torch.arange(len(weight), device="cpu").split(BLOCK)
    return all(torch.equal(packed.rows(i), rows) for i, rows in zip(ids, weight.split(BLOCK)))


def laid_out(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a weight that oneDNN packed, as they lie. They live as long as `memory`."""
    length = torch.ops.mkldnn._nbytes(memory)
    seen = (ctypes.c_byte * length).from_address(torch.ops.mkldnn.data_ptr(memory))
    seen.memory = memory  # lives as long as what views it
    return torch.frombuffer(seen, dtype=dtype)


class Graphed:
    """Whole numbers (out, in) in a product as Inductor knows it, which makes one of bytes of it.
    They must be contiguous: it would read others as if they were, without a word."""

    def __init__(self, whole: Tensor):
        self.whole, self.zero = whole, torch.zeros(len(whole), dtype=torch.long)

    def product(self, x: Tensor, scale: Tensor) -> Tensor:
        """x (n, in), scale (out,) -> (n, out)."""
        known, (digits, counts) = torch.ops.quantized_decomposed, in_digits(x)
        digits = known.dequantize_per_tensor(digits, 1.0, 128, 0, 255, torch.uint8)
        weight = known.dequantize_per_channel(
            self.whole, scale, self.zero, 0, -128, 127, torch.int8
        )
        y = F.linear(digits, weight).view(-1, 3, len(self.whole))
        return (y * counts[..., None]).sum(1)

    def rows(self, ids: Tensor) -> Tensor:
        """Some rows of `dense()`, (..., in)."""
        return self.whole[ids]

    def dense(self) -> Tensor:
        """The whole numbers, (out, in) int8."""
        return self.whole


@contextlib.contextmanager
def for_graphs(weights: Iterable[Int8]) -> Iterator[None]:
    """Within, a CPU's graphs are made of products that are `Graphed`."""
    import torch.ao.quantization.fx._decomposed  # noqa: F401  it registers what those call

    short = [each for each in weights if each.inputs <= LONGEST] if multiplies_bytes() else []
    kept = [(each, each.kept) for each in short]
    for each, _ in kept:
        each.kept = Graphed(each.numbers())
    try:
        yield
    finally:
        for each, before in kept:
            each.kept = before


class Lines:
    """Whole numbers (out, in) as a CPU's kernel for sums of lines reads them: of a block of outputs
    the line of each input, 128 added to each number, and at its end the scale and offset that the
    kernel applies; those are 1 and -128, as Int8's scales belong to the outputs. The kernel takes
    128 times each input away as it adds the lines, so it rounds like numbers of that size, and
    overflows from inputs of 1e36 over their number on.
    """

    def __init__(self, whole: Tensor):
        self.out, self.inputs = whole.shape
        self.block = min(BLOCKS, key=self.worth)
        shape = -(-self.out // self.block), self.inputs, self.block + 8
        self.lines = torch.full(shape, 128, dtype=torch.uint8, device="cpu")
        ends = torch.tensor([1.0, -128.0], dtype=torch.float32, device="cpu")
        self.lines[..., self.block :] = ends.view(torch.uint8)
        for lines, rows in zip(self.lines, whole.split(self.block)):
            lines[:, : len(rows)] = rows.t().short() + 128
        self.table = self.lines.view(-1, self.block + 8)
        self.nbytes = self.lines.nbytes

    def worth(self, size: int) -> tuple[int, bool, int]:
        """Lines of `size` outputs are the better the less they are filled up, if there is a block
        for each thread, and the longer (rows of 288 bytes are read faster than of 96)."""
        count = -(-self.out // size)
        return count * size, count < torch.get_num_threads(), -size

    def product(self, x: Tensor, scale: Tensor) -> Tensor:
        """x (n, in), scale (out,) -> (n, out)."""
        n = x.shape[0]
        if torch.compiler.is_compiling() or 0 < n <= MANY:  # compiled passes are of few rows
            y = self.sums_of_lines(x)
        else:  # a block's floats at a time, which stay in a processor's cache
            blocks = (lines[:, : self.block].to(x.dtype) - 128 for lines in self.lines)
            y = torch.cat([x @ block for block in blocks], -1)
        return (y if y.shape[1] == self.out else y[:, : self.out]) * scale

    def sums_of_lines(self, x: Tensor) -> Tensor:
        """Of x (n, in) each block's lines times each row: (n, blocks · block). The rows take turns
        within a block, which stays in a processor's cache."""
        count, n = len(self.lines), x.shape[0]  # as len() would tie a graph to it
        lines, first = in_turn(count, n, self.inputs)
        # faster than repeat(); of a single block a view, but the kernel reads on without strides
        scales = x.expand(count, n, self.inputs).flatten().contiguous()
        y = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
            self.table, lines, first, per_sample_weights=scales
        )
        if not torch.compiler.is_compiling() and n == 1:  # in a graph the number of rows is open
            return y.view(1, -1)
        return y.view(count, n, self.block).transpose(0, 1).reshape(n, -1)

    def rows(self, ids: Tensor) -> Tensor:
        """Some rows of `dense()`, (..., in)."""
        found = self.lines[ids // self.block, :, ids % self.block]
        return (found.short() - 128).to(torch.int8)

    def dense(self) -> Tensor:
        """The whole numbers, (out, in) int8."""
        lines = self.lines[..., : self.block].mT.reshape(-1, self.inputs)[: self.out]
        return (lines.short() - 128).to(torch.int8).contiguous()


def in_turn(blocks: int, n: int, size: int) -> tuple[Tensor, Tensor]:
    """The numbers of each block's `size` lines, n times in turn, and where each time begins. Short
    lists are kept: they are the same in each layer."""
    keep = not torch.compiler.is_compiling() and blocks * n * size <= KEPT
    return (made_once if keep else made)(blocks, n, size)


def made(blocks: int, n: int, size: int) -> tuple[Tensor, Tensor]:
    """What `in_turn` returns."""
    lines = torch.arange(blocks * size, dtype=torch.int32, device="cpu").view(blocks, 1, size)
    first = torch.arange(0, blocks * n * size, size, dtype=torch.int32, device="cpu")
    return lines.expand(-1, n, -1).contiguous().view(-1), first


made_once = lru_cache(maxsize=32)(made)
