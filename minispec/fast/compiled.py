"""Forward passes as compiled graphs. AOTInductor's calls are in torch's documentation, although the
name of their module, torch._inductor, begins with an underscore: there is no other way to keep a
compiled pass in a file."""

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec import paths
from minispec.cache import KVCache
from minispec.checkpoints.weights import write_bytes
from minispec.cli import UserError, check_package, check_writable, note
from minispec.fast.products import Int8Linear
from minispec.methods.fastmtp import RecurrentHead
from minispec.model import Backbone, ForwardContext, Transformer

MAX_ROWS = 64  # of a pass that runs as a graph


class FunctionalPass(nn.Module):
    """The pass of a backbone or a head as a function of nothing but tensors, so that torch can
    compile it. It writes to `keys` and `values`, one (1, span, heads, head_dim) per layer.
    `feature_layers` are the backbone's, as in Transformer.forward."""

    def __init__(self, module: Backbone | RecurrentHead, feature_layers: tuple[int, ...] = ()):
        super().__init__()
        self.module, self.feature_layers = module, feature_layers

    def forward(
        self, inputs: list[Tensor], cos: Tensor, sin: Tensor, attn_mask: Tensor, slots: Tensor,
        keys: list[Tensor], values: list[Tensor],
    ) -> Tensor:  # fmt: skip
        ctx = ForwardContext(cos, sin, attn_mask, LayersOfCache(keys, values, slots), slots)
        if isinstance(self.module, Backbone):
            return self.module(*inputs, ctx, self.feature_layers)  # of tokens (1, n)
        return self.module.run_block(*inputs, ctx)  # of hidden and embedded, (1, n, d) each


class LayersOfCache(KVCache):
    """A view of a cache, of which a pass has nothing but the tensors."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], slots: Tensor):
        self.k, self.v, self.length = keys, values, slots[:, :1]


class CompiledPass:
    """Runs in place of a backbone or of a head's block. Passes over 1 to MAX_ROWS rows of one
    sequence run as the compiled graph of their feature layers, if there is one. On a GPU, these are
    only passes that a CUDA graph records. Copies and pickles of the module have None instead: a
    graph holds its module's weights."""

    def __init__(self, module: Backbone | RecurrentHead):
        self.plain = module.run_block if isinstance(module, RecurrentHead) else module
        self.on_gpu = is_on_gpu(module)
        self.graphs: dict[tuple[int, ...], Callable[..., Tensor]] = {}

    def __reduce__(self) -> tuple:
        return type(None), ()

    def __call__(self, *inputs: Tensor | ForwardContext, **options) -> Tensor:
        *tensors, ctx = inputs
        graph, cache = self.graphs.get(options.get("feature_layers", ())), ctx.cache
        fits = cache is not None and len(cache.k[0]) == 1 and ctx.slots.numel() <= MAX_ROWS
        if graph is None or not fits or isinstance(cache.length, Tensor) != self.on_gpu:
            return self.plain(*inputs, **options)
        span = ctx.attn_mask.shape[-1]
        keys, values = ([layer[:, :span] for layer in kv] for kv in (cache.k, cache.v))
        return graph(tensors, ctx.cos, ctx.sin, ctx.attn_mask, ctx.slots, keys, values)


def is_on_gpu(module: nn.Module) -> bool:
    return next(module.parameters()).device.type == "cuda"


def compile_passes(network: Transformer | RecurrentHead, layers: tuple[int, ...] = ()) -> None:
    """Let a CompiledPass run the network's passes with these feature `layers` from now on."""
    if network.compiled is not None and layers in network.compiled.graphs:
        return
    module = network if isinstance(network, RecurrentHead) else network.model
    functional = FunctionalPass(module, layers)
    device = next(module.parameters()).device.type
    if device == "cuda":  # the kernels of a CUDA graph, compiled for each shape that has one
        check_compiler("cuda")
        torch.compiler.config.recompile_limit = 64
        graph = torch.compile(functional, dynamic=False)
    elif device == "cpu":
        config = functional.feature_layers, network.config
        name = type(module).__name__
        graph = cached_graph(name, functional, partial(export, network, functional), *config)
    else:
        raise UserError(f"--compile works on cpu and cuda, not on {device}")
    network.compiled = network.compiled or CompiledPass(module)
    network.compiled.graphs[layers] = graph


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


def cached_graph(
    name: str, module: nn.Module, export: Callable[[], torch.export.ExportedProgram], *config
) -> Callable[..., Tensor]:
    """The graph of a module on this CPU, compiled once from what `export` returns and kept in the
    cache folder. `config` is what it depends on besides the module."""
    options = {"freezing": True, "cpp.enable_concat_linear": True}  # weights in the best layout
    if any(isinstance(layer, Int8Linear) for layer in module.modules()):
        options["max_autotune_gemm"] = True  # torch has no other code for these
    path = paths.CACHE / f"{graph_key(module, options, *config)}.pt2"
    if not path.exists():
        check_writable(path, "--compile", paths.CACHE_ADVICE)
        check_compiler("cpu")
        note(f"compiling {name}, only once; this takes a minute or more")
        compile_graph(export, options, path)
    try:
        return torch._inductor.aoti_load_package(str(path))
    except RuntimeError as error:
        raise UserError(f"{path} cannot be opened ({error}): delete it and try again") from None


def graph_key(module: nn.Module, *config) -> str:
    """A digest of what a graph is compiled from and for: weights, code, torch and the processor."""
    system = torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    digest = blake2b(repr((*system, str(module), *config)).encode(), digest_size=12)
    for name, tensor in module.state_dict().items():  # includes buffers, such as int8 weights
        digest.update(f"{name} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    for name in sorted({type(x).__module__ for x in module.modules()} | {KVCache.__module__}):
        if name.startswith("minispec."):
            spec = sys.modules[name].__spec__
            digest.update(spec.loader.get_data(spec.origin))  # source, or byte code without it
    return digest.hexdigest()


def compile_graph(
    export: Callable[[], torch.export.ExportedProgram], options: dict, path: Path
) -> None:
    """Compile what `export` returns ahead of time (AOTInductor)."""
    package = io.BytesIO()  # if torch could not write its file, its C++ code would abort
    try:
        with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
            torch._inductor.aoti_compile_and_package(
                export(), package_path=package, inductor_configs=options
            )
    except Exception as error:  # a compiler can raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        full = "No space left on device|File too large|File size limit exceeded"
        if found := re.search(full, str(error)):  # the error may not name the file
            reason = f"{found[0]} in {path.parent} or {tempfile.gettempdir()}"
        raise UserError(f"--compile failed ({reason}): run without --compile") from None
    write_bytes(path, package.getbuffer())


def export(
    network: Transformer | RecurrentHead, functional: FunctionalPass
) -> torch.export.ExportedProgram:
    """Export the pass for 1 to 64 rows and any number of cache rows."""
    n, span = torch.export.Dim("n", min=1, max=MAX_ROWS), torch.export.Dim("span")
    cache, slots = network.new_cache(128), torch.arange(60, 65)[None]
    cos, sin = network.rope(slots, cache.k[0].dtype)
    hidden = cos.new_zeros(1, 5, network.config.hidden_size)
    is_head = functional.module is network
    inputs = [hidden, hidden.clone()] if is_head else [torch.zeros_like(slots)]
    layers = [{1: span}] * len(cache.k)
    shapes = [{1: n}] * len(inputs), {1: n}, {1: n}, {2: n, 3: span}, {1: n}, layers, layers
    arguments = inputs, cos, sin, cos.new_zeros(1, 1, 5, 128), slots, cache.k, cache.v
    return torch.export.export(functional, arguments, dynamic_shapes=shapes)


class CompiledLinear(nn.Module):
    """A linear layer on a CPU, such as lm_head, whose products of up to MAX_ROWS rows run as a
    compiled graph. Copies and pickles are plain."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        rows = layer.weight.new_zeros(5, layer.in_features)
        shapes = ({0: torch.export.Dim("n", min=1, max=MAX_ROWS)},)
        self.graph: Callable[..., Tensor] | None = cached_graph(
            "lm_head", layer, lambda: torch.export.export(layer, (rows,), dynamic_shapes=shapes)
        )

    def __getstate__(self) -> dict:
        return self.__dict__ | {"graph": None}

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.graph is None or not 0 < len(rows) <= MAX_ROWS or torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        return self.graph(rows.contiguous()).reshape(*x.shape[:-1], -1)
