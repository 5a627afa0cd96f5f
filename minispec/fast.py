"""Everything that makes a model faster or smaller, applied to the plain model after loading.

The model itself knows nothing about this, and nothing is ever undone: to get the plain model back,
load it again.
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

TIMED_ROWS = 2, 4, 8, 16  # row counts at which the two products of SmallBatchLinear are timed
TIMED_BYTES = 2**26  # of weights read per timing: more than most CPU caches hold
GRAPH_ROWS = 1, 2, 4, 8, 16, 32, 64  # row counts of GPU graphs; no graph takes more than the last


def optimize(model: Transformer, int8: bool = False, compiled: bool = False) -> None:
    """Optimise a loaded model in place, as `generate` and `bench` do: int8 weights and compiled
    passes if requested and, for float32 on a CPU, the faster product for small batches, which is
    measured first. Raises UserError if compilation is impossible."""
    if int8:
        swap(model, Int8Linear)
    if compiled:
        compile_passes(model)
    if not int8 and model.device.type == "cpu" and model.dtype == torch.float32:
        layers: dict[torch.Size, list[nn.Linear]] = {}
        for module in model.modules():
            if isinstance(module, nn.Linear):
                layers.setdefault(module.weight.shape, []).append(module)
        row_counts = {shape: faster_row_counts(group) for shape, group in layers.items()}
        swap(model, lambda linear: SmallBatchLinear(linear, row_counts[linear.weight.shape]))


# ---- linear layers -------------------------------------------------------------------------------


def swap(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace each nn.Linear in the module by `make(linear)`, in place."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, make(child))
        else:
            swap(child, make)


class SmallBatchLinear(nn.Module):
    """A linear layer that for some row counts computes weight @ rowsᵀ instead of rows @ weightᵀ.
    For four rows this takes half as long on some CPUs and twice as long on others."""

    def __init__(
        self, linear: nn.Linear, row_counts: Collection[int] = range(2, TIMED_ROWS[-1] + 1)
    ):
        super().__init__()
        self.weight, self.bias, self.row_counts = linear.weight, linear.bias, row_counts

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (n, in)
        if len(rows) not in self.row_counts:
            return F.linear(x, self.weight, self.bias)
        y = (self.weight @ rows.T).T  # (n, out)
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], -1)


@torch.inference_mode()
def faster_row_counts(layers: list[nn.Linear]) -> list[int]:
    """The row counts for which weight @ rowsᵀ is clearly faster than rows @ weightᵀ on this
    machine. The `layers` have one shape. Each product is timed over many of them in sequence, so
    that the weights come from memory as they do in a pass."""
    layers = layers[: 1 + TIMED_BYTES // layers[0].weight.nbytes]
    faster, previous = [], 1
    for n in TIMED_ROWS:
        x = torch.ones(n, layers[0].in_features, dtype=layers[0].weight.dtype)

        def rows_first() -> None:
            for layer in layers:
                F.linear(x, layer.weight)

        def weight_first() -> None:
            for layer in layers:
                layer.weight @ x.T

        usual, swapped = interleaved_min_times([rows_first, weight_first], turn_seconds=0)
        if swapped < 0.9 * usual:
            faster += range(previous + 1, n + 1)
        previous = n
    return faster


class Int8Linear(nn.Module):
    """Weights rounded to 8 bits, with one scale per output: a quarter of the memory of float32."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach()
        precise = weight.to(torch.promote_types(weight.dtype, torch.float32))
        scale = precise.abs().amax(1).clamp(min=1e-12) / 127  # (out,)
        self.register_buffer("rounded", (precise / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.to(weight.dtype))
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """The dequantised weights."""
        return self.rounded * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.rounded.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias


# ---- passes as graphs ----------------------------------------------------------------------------


class FunctionalBackbone(nn.Module):
    """A backbone as a function of nothing but tensors, so that torch can compile it. It writes to
    `keys` and `values`, one (1, span, heads, head_dim) per layer."""

    def __init__(self, backbone: Backbone):
        super().__init__()
        self.backbone = backbone

    def forward(
        self, tokens: Tensor, cos: Tensor, sin: Tensor, attn_mask: Tensor, slots: Tensor,
        keys: list[Tensor], values: list[Tensor],
    ) -> Tensor:  # fmt: skip
        ctx = ForwardContext(cos, sin, attn_mask, CacheView(keys, values), slots)
        return Backbone.forward(self.backbone, tokens, ctx)


class CacheView:
    """The part of a cache that a graph uses."""

    def __init__(self, keys: list[Tensor], values: list[Tensor]):
        self.keys, self.values = keys, values

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Like KVCache.write, for one sequence."""
        self.keys[layer][:, slots[0]] = k
        self.values[layer][:, slots[0]] = v
        return self.keys[layer], self.values[layer]


def compile_passes(model: Transformer) -> None:
    """From now on run passes over 1 to 64 rows of one sequence as compiled graphs. All other
    passes, and those near the end of a cache, run as before."""
    device, uncompiled = model.device.type, model.model.forward
    if device == "cuda":
        check_compiler("cuda")
        # one graph per model, row count and cache capacity
        torch.compiler.config.recompile_limit = 64
        backbone = FunctionalBackbone(model.model)
        graph = torch.compile(backbone, mode="reduce-overhead", dynamic=False)
        run = partial(run_on_whole_cache, graph)
    elif device == "cpu":
        run = partial(run_on_committed_rows, cached_graph(model))
    else:
        raise UserError(f"--compile works on cpu and cuda, not on {device}")

    def forward(tokens: Tensor, ctx: ForwardContext) -> Tensor:
        n, cache = tokens.shape[1], ctx.cache
        if cache is None or len(cache.lengths) > 1 or n > GRAPH_ROWS[-1] or 2 * n > cache.free_rows:
            return uncompiled(tokens, ctx)
        return run(tokens, ctx)

    model.model.forward = forward


def check_compiler(device: str) -> None:
    """Raise UserError if no compiler is installed that torch could use for this device."""
    language, compilers = "C++", (os.environ.get("CXX", "g++"), "clang++", "c++", "cl")
    if device == "cuda":  # torch generates Triton code, and Triton a little C
        check_package("triton", "--compile")
        language, compilers = "C", (os.environ.get("CC", "gcc"), "clang", "cc", "cl")
    if not any(map(shutil.which, compilers)):
        raise UserError(
            f"--compile needs a {language} compiler such as {compilers[0]}: install one, or run "
            "without --compile"
        )


def run_on_committed_rows(graph: Callable, tokens: Tensor, ctx: ForwardContext) -> Tensor:
    """Run a graph that takes any number of rows, over those cache rows that the pass needs."""
    span = ctx.attn_mask.shape[-1]
    keys, values = ([layer[:, :span] for layer in kv] for kv in (ctx.cache.k, ctx.cache.v))
    return graph(tokens, ctx.cos, ctx.sin, ctx.attn_mask, ctx.slots, keys, values)


def run_on_whole_cache(graph: Callable, tokens: Tensor, ctx: ForwardContext) -> Tensor:
    """Run a graph that is compiled for each of GRAPH_ROWS and reads the whole cache. The pass is
    padded by repeating its last row; the padding is scratch that is never committed."""
    n, cache, span = tokens.shape[1], ctx.cache, ctx.attn_mask.shape[-1]
    count = next(count for count in GRAPH_ROWS if count >= n)
    rows = torch.arange(count, device=tokens.device).clamp(max=n - 1)
    slots = cache.row_ids[None, cache.length : cache.length + count]
    attn_mask = F.pad(ctx.attn_mask, (0, cache.capacity - span), value=-torch.inf)[:, :, rows]
    for layer in (*cache.k, *cache.v):  # written in place: their addresses are part of the graph
        torch._dynamo.mark_static_address(layer)
    cos, sin = ctx.cos[:, rows], ctx.sin[:, rows]
    return graph(tokens[:, rows], cos, sin, attn_mask, slots, cache.k, cache.v)[:, :n].clone()


def cached_graph(model: Transformer) -> Callable:
    """The graph of a model's passes on this CPU, compiled once and kept in the cache folder."""
    folder = places.CACHE
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--compile: {folder} cannot be created ({error.strerror}): set XDG_CACHE_HOME to a "
            "folder for the graphs"
        ) from None
    system = torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    digest = blake2b(repr((*system, model.dtype, model.config)).encode(), digest_size=12)
    for tensor in model.model.state_dict().values():  # includes buffers, such as int8 weights
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    path = folder / f"{digest.hexdigest()}.pt2"
    if not path.exists():
        check_compiler("cpu")
        print("compiling (only once; this takes minutes) …", file=sys.stderr, flush=True)
        compile_graph(model, path)
    try:
        return torch._inductor.aoti_load_package(str(path))
    except RuntimeError as error:
        raise UserError(f"{path} cannot be opened ({error}): delete it and try again") from None


def compile_graph(model: Transformer, path: Path) -> None:
    """Export the backbone for 1 to 64 rows and any number of cache rows, and compile it ahead of
    time (AOTInductor), with the weights in the layout that suits the compiled code."""
    n, span = torch.export.Dim("n", min=1, max=GRAPH_ROWS[-1]), torch.export.Dim("span")
    cache, slots = model.new_cache(128), torch.arange(60, 65)[None]
    cos, sin = model.rope(slots, model.dtype)
    inputs = torch.zeros_like(slots), cos, sin, cos.new_zeros(1, 1, 5, 128), slots
    layers = [{1: span}] * len(cache.k)
    shapes = {1: n}, {1: n}, {1: n}, {2: n, 3: span}, {1: n}, layers, layers
    partial_file = path.with_suffix(f".{os.getpid()}.pt2")
    try:
        with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
            backbone, arguments = FunctionalBackbone(model.model), (*inputs, cache.k, cache.v)
            program = torch.export.export(backbone, arguments, dynamic_shapes=shapes)
            options = {"freezing": True, "max_autotune_gemm": True}
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(partial_file), inductor_configs=options
            )
        partial_file.replace(path)
    except Exception as error:  # a compiler can raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UserError(f"--compile failed ({reason}): run without --compile") from None
    finally:
        partial_file.unlink(missing_ok=True)
