"""Forward passes as compiled graphs."""

import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec import paths
from minispec.cli import UserError, check_package, check_writable, note
from minispec.methods.fastmtp import MTPHead
from minispec.model import Backbone, ForwardContext, Transformer

GRAPH_ROWS = 1, 2, 4, 8, 16, 32, 64  # row counts of GPU graphs; no graph takes more than the last


class FunctionalPass(nn.Module):
    """The pass of a backbone or an MTP head as a function of nothing but tensors, so that torch can
    compile it. It writes to `keys` and `values`, one (1, span, heads, head_dim) per layer."""

    def __init__(self, module: Backbone | MTPHead):
        super().__init__()
        self.module = module

    def forward(
        self, inputs: list[Tensor], cos: Tensor, sin: Tensor, attn_mask: Tensor, slots: Tensor,
        keys: list[Tensor], values: list[Tensor],
    ) -> Tensor:  # fmt: skip
        ctx = ForwardContext(cos, sin, attn_mask, CacheView(keys, values), slots)
        if isinstance(self.module, Backbone):
            return Backbone.forward(self.module, *inputs, ctx)  # of tokens (1, n)
        return MTPHead.layers(self.module, *inputs, ctx)  # of hidden and embedded, (1, n, d) each


@dataclass
class CacheView:
    """The part of a cache that a graph uses."""

    keys: list[Tensor]
    values: list[Tensor]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Like KVCache.write, for one sequence."""
        self.keys[layer][:, slots[0]] = k
        self.values[layer][:, slots[0]] = v
        return self.keys[layer], self.values[layer]


class CompiledPass:
    """The `name`d method of a module, replaced: passes over 1 to 64 rows of one sequence `run` as
    compiled graphs. All other passes, and those near the end of a cache, run as before."""

    def __init__(self, module: Backbone | MTPHead, name: str, run: Callable[..., Tensor]):
        self.module, self.name, self.run = module, name, run
        self.uncompiled = getattr(module, name)

    def __call__(self, *inputs: Tensor | ForwardContext) -> Tensor:
        *tensors, ctx = inputs
        n, cache = tensors[0].shape[1], ctx.cache
        if cache is None or len(cache.lengths) > 1 or n > GRAPH_ROWS[-1] or 2 * n > cache.free_rows:
            return self.uncompiled(*inputs)
        return self.run(tensors, ctx)

    def __reduce__(self) -> tuple:
        """Copies and pickles of the module are not compiled: a graph holds its module's weights."""
        return getattr, (self.module, self.name)


def is_compiled(network: Transformer | MTPHead) -> bool:
    """Whether `compile_passes` has compiled the network."""
    return isinstance(getattr(*compiled_method(network)), CompiledPass)


def compiled_method(network: Transformer | MTPHead) -> tuple[Backbone | MTPHead, str]:
    """The module and the name of its method that a compiled pass replaces."""
    return (network, "layers") if isinstance(network, MTPHead) else (network.model, "forward")


def compile_passes(network: Transformer | MTPHead) -> None:
    """Let a CompiledPass run the network's passes from now on."""
    if is_compiled(network):
        return
    module, name = compiled_method(network)
    device = next(module.parameters()).device.type
    if device == "cuda":
        check_compiler("cuda")
        # one graph per model, row count and cache capacity
        torch.compiler.config.recompile_limit = 64
        graph = torch.compile(FunctionalPass(module), mode="reduce-overhead", dynamic=False)
        run = partial(run_on_whole_cache, graph)
    elif device == "cpu":
        run = partial(run_on_committed_rows, cached_graph(network, module))
    else:
        raise UserError(f"--compile works on cpu and cuda, not on {device}")
    setattr(module, name, CompiledPass(module, name, run))


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


def run_on_committed_rows(graph: Callable, inputs: list[Tensor], ctx: ForwardContext) -> Tensor:
    """Run a graph that takes any number of rows, over those cache rows that the pass needs."""
    span = ctx.attn_mask.shape[-1]
    keys, values = ([layer[:, :span] for layer in kv] for kv in (ctx.cache.k, ctx.cache.v))
    return graph(inputs, ctx.cos, ctx.sin, ctx.attn_mask, ctx.slots, keys, values)


def run_on_whole_cache(graph: Callable, inputs: list[Tensor], ctx: ForwardContext) -> Tensor:
    """Run a graph that is compiled for each of GRAPH_ROWS and reads the whole cache. The pass is
    padded by repeating its last row; the padding is scratch that is never committed."""
    n, cache, span = inputs[0].shape[1], ctx.cache, ctx.attn_mask.shape[-1]
    count = next(count for count in GRAPH_ROWS if count >= n)
    rows = torch.arange(count, device=inputs[0].device).clamp(max=n - 1)
    slots = cache.row_ids[None, cache.length : cache.length + count]
    attn_mask = F.pad(ctx.attn_mask, (0, cache.capacity - span), value=-torch.inf)[:, :, rows]
    for layer in (*cache.k, *cache.v):  # written in place: their addresses are part of the graph
        torch._dynamo.mark_static_address(layer)
    padded = [tensor[:, rows] for tensor in inputs]
    cos, sin = ctx.cos[:, rows], ctx.sin[:, rows]
    return graph(padded, cos, sin, attn_mask, slots, cache.k, cache.v)[:, :n].clone()


def cached_graph(network: Transformer | MTPHead, module: Backbone | MTPHead) -> Callable:
    """The graph of a network's passes on this CPU, compiled once and kept in the cache folder."""
    path = paths.CACHE / f"{graph_key(network, module)}.pt2"
    if not path.exists():
        check_writable(path, "--compile", paths.CACHE_ADVICE)
        check_compiler("cpu")
        note(f"compiling {type(module).__name__}, only once; this takes a minute or more")
        compile_graph(network, module, path)
    try:
        return torch._inductor.aoti_load_package(str(path))
    except RuntimeError as error:
        raise UserError(f"{path} cannot be opened ({error}): delete it and try again") from None


def graph_key(network: Transformer | MTPHead, module: Backbone | MTPHead) -> str:
    """A digest of what a graph is compiled from and for: weights, code, torch and the processor."""
    system = torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    digest = blake2b(repr((*system, type(module), network.config)).encode(), digest_size=12)
    for name, tensor in module.state_dict().items():  # includes buffers, such as int8 weights
        digest.update(f"{name} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    for name in sorted({type(layer).__module__ for layer in FunctionalPass(module).modules()}):
        if name.startswith("minispec."):
            spec = sys.modules[name].__spec__
            digest.update(spec.loader.get_data(spec.origin))  # source, or byte code without it
    return digest.hexdigest()


def compile_graph(
    network: Transformer | MTPHead, module: Backbone | MTPHead, path: Path
) -> None:
    """Export the module's pass for 1 to 64 rows and any number of cache rows, and compile it ahead
    of time (AOTInductor), with the weights in the layout that suits the compiled code."""
    n, span = torch.export.Dim("n", min=1, max=GRAPH_ROWS[-1]), torch.export.Dim("span")
    cache, slots = network.new_cache(128), torch.arange(60, 65)[None]
    cos, sin = network.rope(slots, cache.k[0].dtype)
    hidden = cos.new_zeros(1, 5, network.config.hidden_size)
    inputs = [torch.zeros_like(slots)] if module is not network else [hidden, hidden.clone()]
    layers = [{1: span}] * len(cache.k)
    shapes = [{1: n}] * len(inputs), {1: n}, {1: n}, {2: n, 3: span}, {1: n}, layers, layers
    arguments = inputs, cos, sin, cos.new_zeros(1, 1, 5, 128), slots, cache.k, cache.v
    partial_file = path.with_suffix(f".{os.getpid()}.pt2")
    try:
        with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
            program = torch.export.export(FunctionalPass(module), arguments, dynamic_shapes=shapes)
            options = {"freezing": True, "max_autotune_gemm": True}
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(partial_file), inductor_configs=options
            )
        partial_file.replace(path)
    except Exception as error:  # a compiler can raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        if "No space left" in reason:  # the error does not name the file
            reason += f" in {path.parent} or {tempfile.gettempdir()}"
        raise UserError(f"--compile failed ({reason}): run without --compile") from None
    finally:
        partial_file.unlink(missing_ok=True)
