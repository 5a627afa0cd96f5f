"""The seam: all that makes passes faster or smaller, done to a plain model after loading.

The model knows nothing of this, and nothing is ever undone: to get the plain model back, load it
again.
"""

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Callable, Collection
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.checkpoints import places
from minispec.cost import interleaved_min_times
from minispec.errors import UserError, check_package
from minispec.model import Backbone, ForwardContext, Transformer

FEW = 2, 4, 8, 16  # numbers of rows at which the two products of WideLinear are timed
FEW_BYTES = 2**26  # of weights for this: more than most caches hold
GRAPH_ROWS = 1, 2, 4, 8, 16, 32, 64  # of graphs on a GPU; the last is the most of any graph


def optimize(model: Transformer, int8: bool = False, compiled: bool = False) -> None:
    """What `generate` and `bench` do after loading: int8 weights or compiled passes if asked for,
    and on a float32 CPU the faster product for few rows, which is measured first. Raises UserError
    if compiling is impossible."""
    if int8:
        swap(model, Int8Linear)
    if compiled:
        compile_passes(model)
    if not int8 and model.device.type == "cpu" and model.dtype == torch.float32:
        layers: dict[torch.Size, list[nn.Linear]] = {}
        for module in model.modules():
            if isinstance(module, nn.Linear):
                layers.setdefault(module.weight.shape, []).append(module)
        wide = {shape: rows_for_wide_product(each) for shape, each in layers.items()}
        swap(model, lambda linear: SmallBatchLinear(linear, wide[linear.weight.shape]))


# ---- linear layers -------------------------------------------------------------------------------


def swap(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace each nn.Linear in the module by `make(linear)`, in place."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, make(child))
        else:
            swap(child, make)


class SmallBatchLinear(nn.Module):
    """A linear layer that computes the product for some numbers of rows as weight @ rowsᵀ. Compared
    with rows @ weightᵀ this takes half as long for four rows on some CPUs, and twice as long on
    others."""

    def __init__(self, linear: nn.Linear, wide: Collection[int] = range(2, FEW[-1] + 1)):
        super().__init__()
        self.weight, self.bias, self.wide = linear.weight, linear.bias, wide

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (n, in)
        if len(rows) not in self.wide:
            return F.linear(x, self.weight, self.bias)
        y = (self.weight @ rows.T).T  # (n, out)
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], -1)


@torch.inference_mode()
def rows_for_wide_product(layers: list[nn.Linear]) -> list[int]:
    """The numbers of rows for which weight @ rowsᵀ is clearly faster than rows @ weightᵀ on this
    machine, for layers of one shape. Each product is timed over many layers, one after another, so
    that weights come from memory as they do in a pass."""
    layers = layers[: 1 + FEW_BYTES // layers[0].weight.nbytes]
    chosen, last = [], 1
    for n in FEW:
        x = torch.ones(n, layers[0].in_features, dtype=layers[0].weight.dtype)

        def tall() -> None:
            for layer in layers:
                F.linear(x, layer.weight)

        def wide() -> None:
            for layer in layers:
                layer.weight @ x.T

        tall_seconds, wide_seconds = interleaved_min_times([tall, wide], moment=0)
        if wide_seconds < 0.9 * tall_seconds:
            chosen += range(last + 1, n + 1)
        last = n
    return chosen


class Int8Linear(nn.Module):
    """Weights rounded to 8 bits, with a scale per output: a quarter of float32's memory."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach()
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        scale = wide.abs().amax(1).clamp(min=1e-12) / 127  # (out,)
        self.register_buffer("rounded", (wide / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.to(weight.dtype))
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """The weights that the rounded ones stand for."""
        return self.rounded * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.rounded.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias


# ---- passes as graphs ----------------------------------------------------------------------------


class Function(nn.Module):
    """A model's body as a function of tensors alone, which torch can compile: keys and values are
    the layers' (1, span, heads, head_dim), which it writes."""

    def __init__(self, body: Backbone):
        super().__init__()
        self.body = body

    def forward(
        self, tokens: Tensor, cos: Tensor, sin: Tensor, attn_mask: Tensor, slots: Tensor,
        keys: list[Tensor], values: list[Tensor],
    ) -> Tensor:  # fmt: skip
        return Backbone.forward(self.body, tokens, ForwardContext(cos, sin, attn_mask, Rows(keys, values), slots))


class Rows:
    """The part of a cache that a graph sees."""

    def __init__(self, keys: list[Tensor], values: list[Tensor]):
        self.keys, self.values = keys, values

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As KVCache.write, for one sequence."""
        self.keys[layer][:, slots[0]] = k
        self.values[layer][:, slots[0]] = v
        return self.keys[layer], self.values[layer]


def compile_passes(model: Transformer) -> None:
    """Run the model's passes over 1 to 64 rows of one sequence as graphs from now on; all other
    passes, and those near the end of a cache, run as before."""
    kind, plain = model.device.type, model.model.forward
    if kind == "cuda":
        check_compiler("cuda")
        # a graph for each model, number of rows and length of a cache
        torch.compiler.config.recompile_limit = 64
        graph = torch.compile(Function(model.model), mode="reduce-overhead", dynamic=False)
        run = partial(over_whole_cache, graph)
    elif kind == "cpu":
        run = partial(over_committed_rows, kept_graph(model))
    else:
        raise UserError(f"--compile works on cpu and cuda, not on {kind}")

    def forward(tokens: Tensor, ctx: ForwardContext) -> Tensor:
        n, cache = tokens.shape[1], ctx.cache
        if cache is None or len(cache.lengths) > 1 or n > GRAPH_ROWS[-1] or 2 * n > cache.free_rows:
            return plain(tokens, ctx)
        return run(tokens, ctx)

    model.model.forward = forward


def check_compiler(device: str) -> None:
    """Refuse --compile where there is nothing to compile with for such a device."""
    kind, known = "C++", (os.environ.get("CXX", "g++"), "clang++", "c++", "cl")
    if device == "cuda":  # torch writes Triton's code, and Triton a little C
        check_package("triton", "--compile")
        kind, known = "C", (os.environ.get("CC", "gcc"), "clang", "cc", "cl")
    if not any(map(shutil.which, known)):
        raise UserError(
            f"--compile needs a {kind} compiler such as {known[0]}: go on without, or install one"
        )


def over_committed_rows(graph: Callable, tokens: Tensor, ctx: ForwardContext) -> Tensor:
    """A pass of a graph for any number of rows: it sees the cache as far as the pass does."""
    span = ctx.attn_mask.shape[-1]
    keys, values = ([each[:, :span] for each in kept] for kept in (ctx.cache.k, ctx.cache.v))
    return graph(tokens, ctx.cos, ctx.sin, ctx.attn_mask, ctx.slots, keys, values)


def over_whole_cache(graph: Callable, tokens: Tensor, ctx: ForwardContext) -> Tensor:
    """A pass of a graph that is made for each of GRAPH_ROWS and sees all of the cache: rows are
    filled up with the pass's last one, as scratch that is never committed."""
    n, cache, span = tokens.shape[1], ctx.cache, ctx.attn_mask.shape[-1]
    count = next(count for count in GRAPH_ROWS if count >= n)
    rows = torch.arange(count, device=tokens.device).clamp(max=n - 1)
    slots = cache.row[None, cache.length : cache.length + count]
    attn_mask = F.pad(ctx.attn_mask, (0, cache.capacity - span), value=-torch.inf)[:, :, rows]
    for each in (*cache.k, *cache.v):  # written in place: their addresses belong to the graph
        torch._dynamo.mark_static_address(each)
    cos, sin = ctx.cos[:, rows], ctx.sin[:, rows]
    return graph(tokens[:, rows], cos, sin, attn_mask, slots, cache.k, cache.v)[:, :n].clone()


def kept_graph(model: Transformer) -> Callable:
    """The graph of a model's passes on this CPU, made once and kept in the user's cache folder."""
    folder = places.CACHE
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--compile: {folder} cannot be made ({error.strerror}): set XDG_CACHE_HOME to a "
            "folder for the graphs"
        ) from None
    place = torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    name = blake2b(repr((*place, model.dtype, model.config)).encode(), digest_size=12)
    for tensor in model.model.state_dict().values():  # buffers too: int8 weights are no parameters
        name.update(tensor.contiguous().view(torch.uint8).numpy())
    path = folder / f"{name.hexdigest()}.pt2"
    if not path.exists():
        check_compiler("cpu")
        print("compiling the passes, once: this takes minutes …", file=sys.stderr, flush=True)
        make_graph(model, path)
    try:
        return torch._inductor.aoti_load_package(str(path))
    except RuntimeError as error:
        raise UserError(f"{path} cannot be opened ({error}): delete it, then try again") from None


def make_graph(model: Transformer, path: Path) -> None:
    """Export the body for 1 to 64 rows and any number of cache rows, and compile it ahead of time
    (AOTInductor), with the weights laid out for it."""
    n, span = torch.export.Dim("n", min=1, max=GRAPH_ROWS[-1]), torch.export.Dim("span")
    cache, at = model.new_cache(128), torch.arange(60, 65)[None]
    cos, sin = model.rope(at, model.dtype)
    rows = torch.zeros_like(at), cos, sin, cos.new_zeros(1, 1, 5, 128), at
    layers = [{1: span}] * len(cache.k)
    shapes = {1: n}, {1: n}, {1: n}, {2: n, 3: span}, {1: n}, layers, layers
    part = path.with_suffix(f".{os.getpid()}.pt2")
    try:
        with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
            arguments = *rows, cache.k, cache.v
            program = torch.export.export(Function(model.model), arguments, dynamic_shapes=shapes)
            options = {"freezing": True, "max_autotune_gemm": True}
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(part), inductor_configs=options
            )
        part.replace(path)
    except Exception as error:  # whatever a compiler raises
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UserError(f"--compile failed ({said}): go on without it") from None
    finally:
        part.unlink(missing_ok=True)
