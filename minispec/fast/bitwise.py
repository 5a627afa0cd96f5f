"""Bit for bit: a pass over many rows gives each row the very numbers of a pass over that row alone.

A floating-point sum depends on its order, and a product of one row with a matrix is summed in
another order than a product of four. So speculative decoding in float32 or bfloat16 leaves plain
decoding's text where two tokens are nearly tied. Here every sum has one order, whatever shares its
pass:

- A linear layer uses one product, on rows filled up to a multiple of some number: one for which
  this machine was seen to give each row the same bits, however many rows there are.
- Attention sums over blocks of keys, counted from the start of the text, one after the other. The
  keys of a tree's node, which are scattered over the cache, are put in order first.

- Functions such as exp and cos have one kernel for whole vectors of numbers and another for what is
  left over. So the columns of an activation are filled up, and rotations are read from a table.

`check` compares all modules.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec import distributed
from minispec.cache import KVCache
from minispec.cli import UserError, note
from minispec.fast.products import (
    INT8_ROWS,
    KNOWN,
    MAX_TIME_RATIO_WITH_COPY,
    TIMED_ROWS,
    Int8Linear,
    MeasuredLinear,
    Times,
    candidates,
    choices_file,
    key_of,
    remembered,
    time_products,
)
from minispec.model import MLP, Attention, Transformer, additive_mask, attend
from minispec.tree import Tree

MULTIPLES = 1, 2, 4, 8, 16  # of rows that are tried
MAX_ROWS = TIMED_ROWS[-1]  # of one product; more are computed in parts
SAMPLES = 2**10  # sums per row that are compared, at least
TYPICAL_ROWS = 1, 4, 8  # of a pass: their time decides between products
BLOCK = 64  # keys that one product sums over
VECTOR = 64  # a multiple of the numbers that processors compute at once
SERIAL = 2**15  # torch computes at most this many numbers on one thread
COLUMNS = 16  # the sizes of heads are filled up to a multiple of this
QUERIES = 4  # rows of queries are filled up to a multiple of this
CHUNK = 32  # rows whose attention is computed together
NOT_COMPILED = "--bitwise and --compile cannot be combined: omit one of them"
CHECKED_ROWS = 21  # of the passes that `check` compares


def make_bitwise(model: Transformer) -> None:
    """Give every row of the model's passes the bits of a pass over that row alone, from now on.
    Raises UserError if this machine's operations do not allow it."""
    if model.device.type != "cpu" or distributed.tensor_parallel.size > 1:
        raise UserError("--bitwise needs --device cpu and a single process")
    choices = choose_products(model)
    attention = BlockAttention()
    model.rope = RopeTable(model)
    for module in list(model.modules()):
        if isinstance(module, Attention):
            module.attend = attention
        if isinstance(module, MLP):
            module.activation = steady_silu
        for name, layer in module.named_children():
            if isinstance(layer, nn.Linear | Int8Linear):
                setattr(module, name, SteadyLinear(layer, choices[key_of(stored(layer))]))
    check(model)


def filled(x: Tensor, multiple: int) -> Tensor:
    """Fill up x (..., rows, columns) with zeros to a multiple of rows."""
    extra = -x.shape[-2] % multiple
    return F.pad(x, (0, 0, 0, extra)) if extra else x


def aligned(x: Tensor) -> Tensor:
    """A product may be summed in another order at addresses that are no multiples of 64 bytes."""
    return x.clone() if x.data_ptr() % 64 else x


# ---- elementwise functions -----------------------------------------------------------------------


def steady_silu(x: Tensor) -> Tensor:
    """SiLU of x (..., columns), in parts of whole vectors that need no second thread."""
    width, extra = x.shape[-1], -x.shape[-1] % VECTOR
    if not extra and x.numel() <= SERIAL:
        return F.silu(x)
    parts = F.pad(x.reshape(-1, width), (0, extra)).split(max(1, SERIAL // (width + extra)))
    return torch.cat([F.silu(part)[:, :width] for part in parts]).view_as(x)


class RopeTable:
    """The rotations of all positions in a model's context, computed once."""

    def __init__(self, model: Transformer):
        positions = torch.arange(model.config.context)
        self.tables = [table.contiguous() for table in model.rope(positions, model.dtype)]

    def __call__(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See Rope."""
        cos, sin = (table[position] for table in self.tables)
        return cos, sin


# ---- linear layers -------------------------------------------------------------------------------

Choice = tuple[str, int, int]  # a product, the multiple of rows, and the most rows at once


class SteadyLinear(nn.Module):
    """A linear layer that uses one product, on rows filled up to a multiple, and not too many at
    once."""

    def __init__(self, layer: nn.Linear | Int8Linear, choice: Choice):
        super().__init__()
        product, self.multiple, self.most = choice
        products = [product] * len(TIMED_ROWS)
        if isinstance(layer, Int8Linear):
            layer.products = products
        elif product != "rows_first":
            layer = MeasuredLinear(layer, products)
        self.layer = layer

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[:-1].numel()
        rows = filled(x.reshape(n, x.shape[-1]), self.multiple)
        if n <= self.most:
            y = self.layer(aligned(rows))
        else:
            y = torch.cat([self.layer(aligned(part)) for part in rows.split(self.most)])
        return y[:n].reshape(*x.shape[:-1], -1)


def stored(layer: nn.Linear | Int8Linear) -> Tensor:
    return layer.rounded if isinstance(layer, Int8Linear) else layer.weight.detach()


def choose_products(model: Transformer) -> dict[str, Choice]:
    """The fastest product that gives a row the same bits among any number of rows, by `key_of`."""
    layers = [x for x in model.modules() if isinstance(x, nn.Linear | Int8Linear)]
    file = choices_file(f"bitwise-{model.dtype}")
    return remembered(map(stored, layers), file, is_choice, partial(measure, dtype=model.dtype))


def is_choice(choice: list) -> bool:
    product, multiple, most = choice
    return product in KNOWN and multiple in MULTIPLES and most in TIMED_ROWS


@torch.inference_mode()
def measure(groups: dict[str, list[Tensor]], dtype: torch.dtype) -> dict[str, Choice]:
    """Choose a product for each group of weights, for rows of this dtype."""
    note("--bitwise: finding matrix products that sum in one order, only once")
    chosen = {}
    for key, times in time_products(groups).items():
        weight = groups[key][0]
        products = candidates(weight)
        if weight.dtype == torch.int8 and dtype != INT8_ROWS:
            products = {"dequantised": products["dequantised"]}
        choices = [
            (name, *rows) for name, product in products.items()
            for rows in steady_rows(name, product, weight, dtype) if all(rows)
        ]  # fmt: skip
        chosen[key] = min(choices, key=partial(seconds, times))
    return chosen


def steady_rows(
    name: str, product: Callable[[Tensor, Tensor], Tensor], like: Tensor, dtype: torch.dtype
) -> list[tuple[int, int]]:
    """Each multiple with the largest number of rows, a power of two, up to which the product of
    every multiple gives each row the same bits, with weights `like` (out, in). Larger multiples
    count only if they reach more."""
    found = [(0, 0)]
    for multiple in MULTIPLES:
        if found[-1][1] == MAX_ROWS:
            break
        most = MAX_ROWS
        for seed in range(max(2, SAMPLES // len(like))):
            rows, weight = sums_of_rounding_errors(like, dtype, seed)
            weight = weight.T.contiguous() if name == "transposed" else weight
            alone = [product(aligned(filled(row, multiple)), weight)[:1] for row in rows.split(1)]
            for n in range(multiple, most + 1, multiple):
                if not torch.equal(product(rows[:n], weight), torch.cat(alone[:n])):
                    most = 1 << (n - multiple).bit_length() >> 1
                    break
        found += [(multiple, most)] * (most > found[-1][1])
    return found[1:]


def sums_of_rounding_errors(like: Tensor, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Rows (MAX_ROWS, in) of this dtype, and weights `like` (out, in). Each product is zero but for
    rounding errors, so it shows the order of the sum even in bfloat16."""
    generator, width = torch.Generator().manual_seed(seed), like.shape[1]
    rows = torch.randn(MAX_ROWS, width, generator=generator)
    weight = 50 * torch.randn(like.shape, generator=generator)
    columns, half = torch.randperm(width, generator=generator), width // 2
    one, other = columns[: 2 * half].chunk(2)
    rows[:, other], weight[:, other] = -rows[:, one], weight[:, one]
    rows[:, columns[2 * half :]] *= 2**-22  # of an odd width: about as small as the errors
    return rows.to(dtype), weight.clamp(-127, 127).to(like.dtype)


def seconds(times: Times, choice: Choice) -> float:
    """How long passes over TYPICAL_ROWS take with this choice."""
    product, multiple, most = choice
    total = 0.0
    for n in TYPICAL_ROWS:
        rows = min(max(n, multiple), most)
        total += -(-n // most) * times[product][TIMED_ROWS.index(rows)]
    return total / (MAX_TIME_RATIO_WITH_COPY if product == "transposed" else 1)


# ---- attention -----------------------------------------------------------------------------------


class BlockAttention:
    """`attend` of model.py for one sequence, in float32 or better, with sums in one order. Its
    layers share an instance, since they share a pass's mask."""

    def __init__(self):
        self.mask: Tensor | None = None  # of the latest pass
        self.plans: list[tuple[Tensor, Tensor | None]] = []  # of its chunks

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
        if attn_mask is None or len(q) > 1:  # no text to continue, or several
            return attend(q, k, v, attn_mask)
        dtype = torch.promote_types(q.dtype, torch.float32)
        if attn_mask is not self.mask:
            self.mask = attn_mask
            chunks = (attn_mask[0, 0] == 0).split(CHUNK)
            self.plans = [plan(seen, dtype) for seen in chunks]
        size, slots, columns = q.shape[-1], -k.shape[1] % BLOCK, -q.shape[-1] % COLUMNS
        queries = F.pad(q[0].to(dtype) / math.sqrt(size), (0, columns))
        # fill up to whole blocks, (kv_heads, slots, head_dim)
        keys, values = (F.pad(x[0].transpose(0, 1).to(dtype), (0, columns, 0, slots))
                        for x in (k, v))  # fmt: skip
        parts = zip(queries.split(CHUNK), self.plans)
        y = torch.cat([attend_in_order(part, keys, values, *plan) for part, plan in parts])
        return y.to(q.dtype)[None, :, :, :size]


def plan(seen: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return what rows attend to that see the slots `seen` (n, span): slots in order from 0 on, to
    which the mask (n, shared + own) is added. If a row sees others than the slots up to its own,
    the last `own` ones are different for each row, (n, own)."""
    count = seen.sum(-1, keepdim=True)
    slots = torch.arange(-(-seen.shape[1] // BLOCK) * BLOCK)
    mask = torch.zeros(len(seen), len(slots), dtype=dtype).masked_fill(slots >= count, -math.inf)
    if torch.equal(seen, slots[: seen.shape[1]] < count):
        return mask, None
    shared = int(seen.all(0).long().cumprod(0).sum()) // BLOCK * BLOCK
    own = -(-(int(count.max()) - shared) // BLOCK) * BLOCK
    order = torch.argsort(~seen[:, shared:], dim=1, stable=True)[:, :own] + shared
    return mask[:, : shared + own], F.pad(order, (0, own - order.shape[1]))


def attend_in_order(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, own: Tensor | None
) -> Tensor:
    """Attention of queries (n, heads, head_dim) over keys and values (kv_heads, slots, head_dim).
    The query heads that share a key head are rows of one product, `g` for each of n rows."""
    n, kv_heads = len(queries), len(keys)
    queries = queries.unflatten(1, (kv_heads, -1)).transpose(0, 1)  # (kv_heads, n, g, head_dim)
    g, shared = queries.shape[2], mask.shape[1] - (0 if own is None else own.shape[1])

    rows = queries.flatten(1, 2)[:, None]
    scores = in_fours(rows, blocks(keys[:, :shared]).mT)  # (kv_heads, blocks, n · g, BLOCK)
    if own is not None:
        own_scores = in_fours(queries[:, :, None], blocks(keys[:, own]).mT)
        scores = torch.cat([scores, own_scores.transpose(1, 2).flatten(2, 3)], 1)

    scores = scores.transpose(1, 2).flatten(2)  # (kv_heads, n · g, slots)
    p = (scores + mask.repeat_interleave(g, 0)).softmax(-1)
    p = p.unflatten(-1, (-1, BLOCK)).transpose(1, 2)  # (kv_heads, blocks, n · g, BLOCK)

    count = shared // BLOCK
    sums = in_fours(p[:, :count], blocks(values[:, :shared]))  # (kv_heads, blocks, n · g, head_dim)
    if own is not None:
        weights = p[:, count:].unflatten(2, (n, g)).transpose(1, 2)
        own_sums = in_fours(weights, blocks(values[:, own]))  # (kv_heads, n, blocks, g, head_dim)
        sums = torch.cat([sums, own_sums.transpose(1, 2).flatten(2, 3)], 1)
    y = sums.cumsum(1)[:, -1]  # one block after the other
    return y.unflatten(1, (n, g)).transpose(0, 1).flatten(1, 2)  # (n, heads, head_dim)


def blocks(x: Tensor) -> Tensor:
    """(..., slots, head_dim) -> (..., blocks, BLOCK, head_dim)."""
    return x.unflatten(-2, (-1, BLOCK))


def in_fours(rows: Tensor, matrices: Tensor) -> Tensor:
    """The product of rows and matrices, with the rows filled up to a multiple of QUERIES."""
    return (filled(rows, QUERIES) @ matrices)[..., : rows.shape[-2], :]


# ---- the check -----------------------------------------------------------------------------------


@torch.inference_mode()
def check(model: Transformer) -> None:
    """Compare the outputs of attention and of each module for rows alone and together. Raises
    UserError with the name of the first that differs."""
    rows = torch.arange(CHECKED_ROWS)
    chain, tree = list(range(-1, CHECKED_ROWS - 1)), [-1, *(rows[1:] // 3).tolist()]
    differs = [
        f"attention to a {name}" for name, parents in (("chain", chain), ("tree", tree))
        if not attention_is_steady(model, Tree([0] * len(parents), parents).mask)
    ]  # fmt: skip
    cache, alone = model.new_cache(2 * CHECKED_ROWS), []
    ids = rows % model.config.vocab_size
    for token in ids:
        alone.append(outputs(model, token[None], cache))
        cache.commit([0])
    cache.truncate(0)
    for name, together in outputs(model, ids, cache).items():
        if not torch.equal(together, torch.cat([each[name] for each in alone])):
            differs.append(name)
    if differs:
        raise UserError(f"--bitwise: on this machine, the numbers of a row in {differs[0]} depend "
                        f"on how many rows share its pass, in {model.dtype}; omit --bitwise")


def attention_is_steady(model: Transformer, mask: Tensor) -> bool:
    """Whether rows that see each other by `mask` (n, n), across the border of a block, get the same
    bits as alone, when their keys are in order."""
    c, n, generator = model.config, len(mask), torch.Generator().manual_seed(0)
    dtype = torch.promote_types(model.dtype, torch.float32)  # in which attention computes
    sizes = (n, c.heads), (2 * BLOCK + n // 2, c.kv_heads), (2 * BLOCK + n // 2, c.kv_heads)
    q, k, v = (torch.randn(1, *size, c.head_dim, generator=generator, dtype=dtype)
               for size in sizes)  # fmt: skip
    seen = F.pad(mask, (k.shape[1] - n, 0), value=True)  # (n, slots)
    attend = BlockAttention()
    together = attend(q, k, v, additive_mask(seen[None, None], q))[0]
    alone = []
    for i, slots in enumerate(seen):
        attn_mask = q.new_zeros(1, 1, 1, int(slots.sum()))
        alone.append(attend(q[:, i : i + 1], k[:, slots], v[:, slots], attn_mask)[0])
    return torch.equal(together, torch.cat(alone))


def outputs(model: Transformer, tokens: Tensor, cache: KVCache) -> dict[str, Tensor]:
    """What each module of the model returns for these tokens, (n, size), in order of execution."""
    found: dict[str, Tensor] = {}

    def record(name: str, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        if output.shape[:2] == (1, len(tokens)):  # not within a SteadyLinear
            found[name] = output.reshape(len(tokens), -1)

    hooks = [
        module.register_forward_hook(partial(record, name or "the model"))
        for name, module in model.named_modules() if not isinstance(module, nn.ModuleList)
    ]  # fmt: skip
    model.logits(model(tokens, cache))
    for hook in hooks:
        hook.remove()
    return found
