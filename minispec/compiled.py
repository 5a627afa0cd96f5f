"""Passes as compiled graphs (`--compile`): the same model, every method, fewer operators.

On a CPU a pass is compiled ahead of time (torch.export, AOTInductor) into a file, for 1 to MOST
rows and any number of cache rows; it is kept, and the next run only opens it. On a GPU there is one
graph per number of rows, replayed as a CUDA graph over a cache of fixed length. What no graph takes
(batches, prefills of more than MOST rows) runs as it does without them.
"""

import contextlib
import hashlib
import inspect
import os
import platform
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from minispec import int8, linear
from minispec import model as model_module
from minispec.cache import KVCache
from minispec.errors import UserError, check_compiler, make_folder
from minispec.int8 import Int8
from minispec.linear import joined_in
from minispec.model import Pass, Transformer

MOST = 64  # rows of a compiled pass
OPTIONS = {
    "freezing": True,  # pack the weights that are plain
    "max_autotune_gemm": True,  # time two kinds of product and keep the faster
}


class Rows:
    """The part of a cache that a pass sees, as a function of tensors wants it."""

    def __init__(self, keys: list[Tensor], values: list[Tensor]):
        self.keys, self.values = keys, values

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor, span: int):
        """As KVCache's; `slots` (n,)."""
        self.keys[layer][:, slots] = k
        self.values[layer][:, slots] = v
        return self.keys[layer], self.values[layer]


class Function(nn.Module):
    """`module.layers` as a function of tensors alone: its inputs, a Pass's, and the layers' keys
    and values (1, span, heads, head_dim), which it writes."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(
        self, inputs: list[Tensor], cos: Tensor, sin: Tensor, visible: Tensor,
        slots: Tensor, keys: list[Tensor], values: list[Tensor],
    ) -> Tensor:  # fmt: skip
        now = Pass(cos, sin, visible, Rows(keys, values), slots, keys[0].shape[1])
        return self.module.layers(*inputs, now)


class Compiled:
    """Stands in for `module.layers(*inputs, now)`; `graph` takes Function's arguments."""

    def __init__(self, module: nn.Module, graph: Callable, whole: bool = False):
        self.module, self.graph = module, graph
        self.whole = whole  # see all of the cache, so that shapes depend on the rows alone

    def __call__(self, *inputs_and_pass) -> Tensor:
        *inputs, now = inputs_and_pass
        cache, n = now.cache, inputs[0].shape[1]
        if cache is None or now.slots is not None or n > MOST:
            return self.module.layers(*inputs, now)
        keys, values, visible = cache.k, cache.v, now.visible
        if self.whole:
            visible = widened(now, cache, n)
        else:
            keys, values = ([each[:, : now.span] for each in kept] for kept in (keys, values))
            if visible is None:  # one row, which sees all
                visible = now.cos.new_zeros(1, 1, n, now.span)
        slots = cache.row[cache.length : cache.length + n]
        return self.graph(inputs, now.cos, now.sin, visible, slots, keys, values)


def widened(now: Pass, cache: KVCache, n: int) -> Tensor:
    """The pass's visibility over all rows of the cache, (1, 1, n, capacity)."""
    wide = now.cos.new_full((1, 1, n, cache.capacity), -torch.inf)
    wide[..., : now.span] = 0.0 if now.visible is None else now.visible
    return wide


def compile_model(model: Transformer) -> None:
    """Run the cached passes of a prepared model as graphs from now on, until it is converted.

    Raises UserError where there is no C++ compiler.
    """
    compile_module(model, model, lambda n: [torch.arange(n)[None]])


def compile_head(head: nn.Module, model: Transformer) -> None:
    """The same for a FastMTP head of `model`."""
    size = model.config.hidden_size
    compile_module(
        head,
        model,
        lambda n: list(torch.linspace(-1, 1, 2 * n * size, dtype=model.dtype).view(2, 1, n, size)),
    )


def compile_module(
    module: nn.Module, model: Transformer, inputs: Callable[[int], list[Tensor]]
) -> None:
    """`inputs(n)` are arguments of `module.layers` for `n` rows."""
    if model.device.type not in ("cpu", "cuda"):
        raise UserError(f"--compile is there for cpu and cuda, not for {model.device.type}")
    if model.device.type == "cuda":
        module.compiled = Compiled(module, graph_on_gpu(module), whole=True)
        return
    path = cache_folder() / f"{digest(module)}.pt2"
    if not path.exists():
        check_compiler()
        several, one = (example(model, inputs, n, len(layers_of(module))) for n in (5, 1))
        with tqdm(total=1, desc="compiling, once", unit="graph") as bar:
            with linear.for_graphs(joined_in(module).values()):
                ahead_of_time(Function(module).eval(), several, path)
            check(module, (several, one), path)
            bar.update()
    module.compiled = Compiled(module, opened(path))


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The blocks that have a place in the cache: a head is one itself."""
    return list(module.model.layers) if isinstance(module, Transformer) else [module]


# ---- on a CPU: files made once -------------------------------------------------------------------


def example(
    model: Transformer, inputs: Callable[[int], list[Tensor]], n: int, layers: int
) -> tuple:
    """Arguments of Function for a pass over `n` rows; 128 rows of a cache."""
    c, position = model.config, torch.arange(n)
    cos, sin = model.rope(position[None], model.dtype)
    visible = torch.zeros(1, 1, n, 128, dtype=model.dtype)
    shape = 1, 128, c.kv_heads, c.head_dim
    keys, values = (
        [torch.zeros(shape, dtype=model.dtype) for _ in range(layers)] for _ in ("k", "v")
    )
    return inputs(n), cos, sin, visible, position, keys, values


@torch.no_grad()
def ahead_of_time(function: nn.Module, arguments: tuple, path: Path) -> None:
    """Compile for 1 to MOST rows into `path`; it appears whole or not."""
    inputs, _, _, _, _, keys, values = arguments
    span = torch.export.Dim("span", min=2, max=2**20)
    n = torch.export.Dim("n", min=1, max=MOST)
    shapes = [{1: n}] * len(inputs), {1: n}, {1: n}, {2: n, 3: span}, {0: n}
    shapes += [{1: span}] * len(keys), [{1: span}] * len(values)
    part, log = path.with_suffix(f".{os.getpid()}.part.pt2"), path.with_suffix(".log")
    with (
        open(log, "w", encoding="utf-8") as out,
        contextlib.redirect_stderr(out),
        contextlib.redirect_stdout(out),
    ):
        try:
            exported = torch.export.export(function, arguments, dynamic_shapes=shapes, strict=False)
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(part), inductor_configs=dict(OPTIONS)
            )
        except Exception as error:
            traceback.print_exc(file=out)
            raise UserError(
                f"--compile failed ({type(error).__name__}; more in {log}): go on without it, or "
                "try another version of torch"
            ) from None
    part.replace(path)


@torch.no_grad()
def check(module: nn.Module, examples: Iterable[tuple], path: Path) -> None:
    """Raises UserError where a new graph computes something else than the module does."""
    graph = opened(path)
    for arguments in examples:
        expected = Function(module)(*arguments)
        off = (graph(*arguments) - expected).abs().max() / expected.abs().max()
        if not off <= torch.finfo(expected.dtype).eps ** 0.5:
            path.unlink()
            raise UserError(
                f"--compile: the compiler's graph is off by {off:.1g} of the largest number: go "
                "on without --compile, or try another version of torch"
            )


def opened(path: Path) -> Callable:
    """A file's graph. Its tensors go to the loader in the order of Function's arguments, and not
    through the wrapper that would take nested lists apart at each call."""
    run = torch._inductor.aoti_load_package(str(path)).loader.run

    def graph(inputs, cos, sin, visible, slots, keys, values):
        return run([*inputs, cos, sin, visible, slots, *keys, *values])[0]

    return graph


def cache_folder() -> Path:
    """Where graphs are kept between runs."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "minispec" / "graphs"
    make_folder(folder, "--compile:", ": set XDG_CACHE_HOME to a folder for the graphs")
    return folder


def digest(module: nn.Module) -> str:
    """What a compiled pass depends on: the weights, the code, torch and the processor."""
    sources = model_module, linear, int8, type(module), Function, Rows
    code = "".join(map(inspect.getsource, sources))
    place = torch.__version__, processor(), torch.get_num_threads(), OPTIONS, module.config
    found = hashlib.blake2b((code + repr(place)).encode(), digest_size=12)
    tensors = dict(module.named_parameters())
    for name, joined in joined_in(module).items():
        packed = joined.packed  # what the parameters gave up
        if isinstance(packed, Int8):
            tensors |= {name: packed.numbers(), f"{name} scale": packed.scale}
        elif packed is not None:
            tensors[f"{name} {type(packed).__name__}"] = packed.dense()
    for name, weight in tensors.items():
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        if weight.device.type == "cpu":
            found.update(weight.detach().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def processor() -> str:
    """The machine's kind: code is compiled for it alone."""
    name = f"{platform.machine()} {platform.processor()} {torch.backends.cpu.get_cpu_capability()}"
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name += " ".join(sorted({x for x in lines if x.startswith(("model name", "flags"))}))
    return name


# ---- on a GPU: CUDA graphs -----------------------------------------------------------------------


def graph_on_gpu(module: nn.Module, **options) -> Callable:
    """One graph per number of rows, captured when first met; `options` are torch.compile's."""
    torch._dynamo.config.recompile_limit = 256  # as many numbers of rows and capacities as come
    run = torch.compile(Function(module), dynamic=False, **(options or {"mode": "reduce-overhead"}))

    def graph(inputs, cos, sin, visible, slots, keys, values):
        for each in (*keys, *values):  # written in place: their addresses are part of the graph
            torch._dynamo.mark_static_address(each)
        return run(inputs, cos, sin, visible, slots, keys, values).clone()

    return graph
