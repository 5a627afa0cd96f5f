"""Linear layers for inference: several of one input as one product, whose weights are packed for
the rows of a draft, or int8. A pass waits for its weights, so how they lie decides its speed.
"""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALL = 2**16  # float32 weights up to this size stay plain: oneDNN's call costs more than it gains
BLOCK = 64  # outputs that oneDNN lays side by side in a packed weight


class Joined:
    """Several linear layers of one input as one product, for inference.

    On a CPU bfloat16 weights and large float32 ones are `Packed` where their layout is known; with
    `quantize` all are int8 (`quantized`). The layers give such weights up: until `undo` theirs are
    on the meta device. Others stay plain, small float32 ones on a CPU transposed: read faster so.
    """

    def __init__(self, *parts: nn.Linear, quantize: bool = False):
        self.parts, self.dtype = parts, parts[0].weight.dtype
        self.bias = None if parts[0].bias is None else torch.cat([p.bias for p in parts]).detach()
        weight = torch.cat([p.weight for p in parts]) if len(parts) > 1 else parts[0].weight
        self.weight: Tensor | None = weight.detach()  # (out, in)
        self.packed = None if quantize else pack(self.weight)
        self.scale: Tensor | None = None
        if not quantize and self.packed is None:
            if small(self.weight):
                self.weight = self.weight.t().contiguous().t()
            self.share(self.weight)
            return
        for part in parts:
            hold(part, torch.empty_like(part.weight, device="meta"))
            part.forward = given_up
        self.weight, self.scale = quantized(self.weight) if quantize else (None, None)

    def share(self, weight: Tensor) -> None:
        """Give the parts their rows of `weight` as views."""
        for part, rows in zip(self.parts, weight.split([len(part.weight) for part in self.parts])):
            hold(part, rows)
            vars(part).pop("forward", None)

    def undo(self) -> None:
        """Give the parts plain weights again: what was quantised stays what that made of it."""
        self.share(self.dense().contiguous())

    def dense(self) -> Tensor:
        """The weights that the product stands for, (out, in)."""
        if self.scale is not None:
            return self.weight.to(self.dtype) * self.scale.to(self.dtype)[:, None]
        return self.weight if self.packed is None else self.packed.memory.to_dense()

    def rows(self, ids: Tensor) -> Tensor:
        """Some rows of `dense()`, (..., in)."""
        if self.packed is not None:
            return self.packed.rows(ids)
        if self.scale is None:
            return F.embedding(ids, self.weight)
        return self.weight[ids].to(self.dtype) * self.scale[ids].to(self.dtype)[..., None]

    def __call__(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():  # packed products have no gradient
            return F.linear(x, self.dense(), self.bias)
        if self.scale is not None:
            return product_int8(x, self.weight, self.scale, self.bias)
        if self.packed is not None:
            return self.packed.product(x, self.bias)
        return F.linear(x, self.weight, self.bias)


def hold(layer: nn.Linear, weight: Tensor) -> None:
    """Another weight for the layer, trained or frozen as its own was."""
    layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)


def given_up(*inputs: Tensor) -> Tensor:
    """In the place of a layer's `forward`, whose weight is packed or quantised: torch would compute
    with an empty one, without a word."""
    raise RuntimeError("this layer's weights are packed: use the model's own methods, or undo()")


class Packed:
    """A weight (out, in) as oneDNN lays it out: the rows of a draft cost little more than one.

    `blocks` is the same memory as it lies, filled up with zeros, (out / 64, in / V, 64, V): of 64
    outputs V inputs each, side by side, V = 1 in float32 and 2 in bfloat16.
    """

    def __init__(self, memory: Tensor, blocks: Tensor, size: tuple[int, int]):
        self.memory, self.blocks, (self.out, self.inputs) = memory, blocks, size
        self.lines: Tensor | None = None
        if blocks.dtype == torch.float32:  # of each block in turn the line of each input
            count = blocks.shape[0] * blocks.shape[1]
            numbers = torch.arange(count, dtype=torch.int32, device="cpu").view(len(blocks), -1)
            self.lines = numbers[:, : self.inputs].flatten()  # (out / 64 · in)
            self.first = self.lines.new_tensor(range(0, len(self.lines), self.inputs))  # (out / 64)
            self.table = blocks.view(-1, BLOCK)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x (..., in) -> (..., out)."""
        if x.numel() != self.inputs or self.lines is None:
            return torch.ops.mkldnn._linear_pointwise(x, self.memory, bias, "none", [], "")
        # of one row a sum of lines, each times its input: read faster so than by oneDNN
        scales = x.view(1, -1).expand(len(self.first), -1).reshape(-1)
        y, *_ = torch.embedding_bag(
            self.table, self.lines, self.first, mode=0, per_sample_weights=scales
        )
        y = y.view(-1)[: self.out].view(*x.shape[:-1], self.out)
        return y if bias is None else y + bias

    def rows(self, ids: Tensor) -> Tensor:
        """Some rows of the weight, (..., in). Raises IndexError for others than it has."""
        low, high = (int(each) for each in ids.aminmax()) if ids.numel() else (0, 0)
        if low < 0 or high >= self.out:  # behind the last row lie zeros
            raise IndexError(f"rows {low} to {high} of a weight of {self.out}")
        return self.blocks[ids // BLOCK, :, ids % BLOCK].flatten(-2)[..., : self.inputs]


def pack(weight: Tensor) -> Packed | None:
    """None where that does not pay, or where this processor's layout is another: each number is
    looked up where it should lie."""
    if not packable(weight):
        return None
    memory, each = torch.ops.mkldnn._reorder_linear_weight(weight, 8), weight.element_size()
    length, count = torch.ops.mkldnn._nbytes(memory), -(-weight.shape[0] // BLOCK)
    if length % (4 * BLOCK * count) or length < each * BLOCK * count * weight.shape[1]:
        return None
    seen = (ctypes.c_byte * length).from_address(torch.ops.mkldnn.data_ptr(memory))
    seen.memory = memory  # lives as long as what views it
    blocks = torch.frombuffer(seen, dtype=weight.dtype).view(count, -1, BLOCK, 4 // each)
    packed = Packed(memory, blocks, weight.shape)
    ids = torch.arange(len(weight), device="cpu").split(BLOCK)
    same = all(torch.equal(packed.rows(i), rows) for i, rows in zip(ids, weight.split(BLOCK)))
    return packed if same else None


def packable(weight: Tensor) -> bool:
    """Whether oneDNN's packed products take such weights on this processor, and pay."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 and not small(weight)


def small(weight: Tensor) -> bool:
    """Whether it stays plain on a CPU for its size."""
    on_cpu = weight.device.type == "cpu"
    return on_cpu and weight.dtype == torch.float32 and weight.numel() <= SMALL


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 weights and the scale of each row, in bfloat16 as the CPU's kernel wants it: the nearest
    multiples of the scale, no further than half of it away."""
    whole, scales = [], []
    for rows in weight.split(4096):  # of a large vocabulary, no second copy
        scale = (rows.abs().amax(1).float() / 126).clamp(min=1e-12).bfloat16()
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        whole.append((wide / scale.to(wide.dtype)[:, None]).round().to(torch.int8))
        scales.append(scale)
    return torch.cat(whole), torch.cat(scales)


def product_int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., in) times int8 rows (out, in). On a CPU the kernel takes and gives bfloat16."""
    out, size = weight.shape
    fits = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)
    if fits and size % 32 == 0 and out % 16 == 0:
        rows = x.reshape(-1, size).bfloat16()
        y = torch._weight_int8pack_mm(rows, weight, scale).to(x.dtype).view(*x.shape[:-1], out)
    else:
        y = F.linear(x, weight.to(x.dtype)) * scale.to(x.dtype)
    return y if bias is None else y + bias
