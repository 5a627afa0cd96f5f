"""Passes as compiled graphs (`--compile`): the same model, every method, fewer operators.

On a CPU a pass is compiled ahead of time (torch.export, AOTInductor) into a file, for 1 to MOST
rows and any number of cache rows; it is kept, and the next run only opens it. Where weights need
all 32 bits, a single row has a file of its own, which holds them once more. On a GPU there is a
graph for each power of two of rows, replayed as a CUDA graph over a cache of fixed length. What no
graph takes (batches, prefills of more than MOST rows, there also more than the cache has left) runs
as it does without them. Graphs have no gradients.
"""

import contextlib
import copy
import hashlib
import inspect
import os
import platform
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor, nn
from tqdm import tqdm

from minispec import int8, linear
from minispec import model as model_module
from minispec.cache import KVCache
from minispec.cost import COUNTS
from minispec.errors import UserError, check_compiler, make_folder
from minispec.int8 import Int8
from minispec.linear import Packed, joined_in
from minispec.model import Pass, Transformer

MOST = COUNTS[-1]  # rows of a compiled pass
KEPT = 30 * 24 * 3600  # seconds since a file was opened last, after which it is deleted
ROOM = 1024  # of so many rows, or a multiple, are the caches of graphs on a GPU
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
        self.free: dict[int, list[KVCache]] = {}  # of each capacity, that nobody has any more

    def new_cache(self, make: Callable[[int], KVCache], capacity: int, most: int) -> KVCache:
        """A cache of at least this capacity. Graphs on a GPU are captured for its length and where
        it lies: there, lengths are rounded up (to `most` at most), and memory is used again."""
        if not self.whole:
            return make(capacity)
        capacity = max(capacity, min(-(-capacity // ROOM) * ROOM, most))
        free = self.free.setdefault(capacity, [])
        with torch.inference_mode(False):  # to be written within and without
            kept = free.pop() if free else make(capacity)
            kept.kv.zero_()
        cache = copy.copy(kept)
        cache.truncate(0)
        weakref.finalize(cache, free.append, kept)
        return cache

    def __call__(self, *inputs_and_pass) -> Tensor:
        *inputs, now = inputs_and_pass
        cache, n = now.cache, inputs[0].shape[1]
        if cache is None or now.slots is not None or n > MOST:
            return self.module.layers(*inputs, now)
        visible = now.visible
        if visible is None:  # one row, which sees all
            visible = now.cos.new_zeros(1, 1, n, now.span)
        if self.whole:
            count = next(count for count in COUNTS if count >= n)
            if count > cache.room:  # each number of rows would be one more graph
                return self.module.layers(*inputs, now)
            return self.filled_up([*inputs, now.cos, now.sin], visible, cache, count)[:, :n]
        slots = cache.row[cache.length : cache.length + n]
        keys, values = ([each[:, : now.span] for each in kept] for kept in (cache.k, cache.v))
        return self.graph(inputs, now.cos, now.sin, visible, slots, keys, values)

    def filled_up(
        self, tensors: list[Tensor], visible: Tensor, cache: KVCache, count: int
    ) -> Tensor:
        """The graph over all of the cache and `count` scratch rows, behind the pass's own copies of
        the last one that nobody commits: so there are few graphs."""
        n, span = visible.shape[2:]
        if count > n:
            rows = torch.arange(count, device=visible.device).clamp_(max=n - 1)
            tensors, visible = [x[:, rows] for x in tensors], visible[:, :, rows]
        *inputs, cos, sin = tensors
        wide = visible.new_full((1, 1, count, cache.capacity), -torch.inf)
        wide[..., :span] = visible
        slots = cache.row[cache.length : cache.length + count]
        return self.graph(inputs, cos, sin, wide, slots, cache.k, cache.v)


def compile_model(model: Transformer) -> None:
    """Run the cached passes of a prepared model as graphs from now on, until it is converted.

    Raises UserError where there is no compiler, or none whose graph computes the same.
    """
    compile_module(model, model, lambda n: [torch.arange(n)[None] % model.config.vocab_size])


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
    """`inputs(n)` are arguments of `module.layers`, but for the Pass, for `n` rows."""
    if model.device.type not in ("cpu", "cuda"):
        raise UserError(f"--compile is there for cpu and cuda, not for {model.device.type}")
    if model.device.type == "cuda":
        check_compiler("cuda")
        module.compiled = Compiled(module, graph_on_gpu(module), whole=True)
        return
    path = cache_folder() / f"{digest(module)}.pt2"
    paths = {MOST: path}
    if reads_32_bits(module):  # of which products for any number of rows read one row's slower
        paths[1] = path.with_stem(f"{path.stem}-one")
    missing, layers = [n for n in paths if not is_there(paths[n])], len(layers_of(module))
    if missing:
        check_compiler("cpu")
        for most in tqdm(missing, desc="compiling, once", unit="graph"):
            make_file(module, most, paths[most], partial(example, model, inputs, layers))
        forget_old_files(path.parent)
    graphs = {most: opened(paths[most]) for most in paths}
    module.compiled = Compiled(module, by_rows(graphs[MOST], graphs.get(1)))


def by_rows(several: Callable, one: Callable | None) -> Callable:
    """A graph of any number of rows, and of a single one, where it has its own."""
    if one is None:
        return several
    return lambda inputs, *others: (one if inputs[0].shape[1] == 1 else several)(inputs, *others)


def reads_32_bits(module: nn.Module) -> bool:
    """Whether its layers have float32 weights that need all their bits, and are large enough to
    count."""
    products = [each for layer in layers_of(module) for each in joined_in(layer).values()]
    kept = [joined.packed for joined in products]
    return any(isinstance(each, Packed) and each.blocks.dtype == torch.float32 for each in kept)


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The blocks that have a place in the cache: a head is one itself."""
    return list(module.model.layers) if isinstance(module, Transformer) else [module]


# ---- on a CPU: files made once -------------------------------------------------------------------


def example(
    model: Transformer, inputs: Callable[[int], list[Tensor]], layers: int, n: int, before: int
) -> tuple:
    """Arguments of Function for a pass over `n` rows behind others of a cache; each row sees itself
    and others at random."""
    c, span, slots = model.config, before + 68 + 3 * n, torch.arange(before, before + n)
    noise = torch.Generator().manual_seed(n)
    cos, sin = model.rope(slots[None], model.dtype)
    visible = torch.zeros(1, 1, n, span, dtype=model.dtype)
    visible[torch.rand(visible.shape, generator=noise) < 0.5] = -torch.inf
    visible[..., torch.arange(n), slots] = 0.0
    shape = 1, span, c.kv_heads, c.head_dim
    keys, values = (
        [torch.randn(shape, generator=noise, dtype=model.dtype) for _ in range(layers)]
        for _ in ("k", "v")
    )
    return inputs(n), cos, sin, visible, slots, keys, values


def make_file(module: nn.Module, most: int, path: Path, rows: Callable[[int, int], tuple]) -> None:
    """Compile for one row, or up to MOST, and check that; the file appears whole or not. `rows` are
    arguments of Function for so many behind so many others."""
    first, *others = [(1, 60), (1, 7)] if most == 1 else [(5, 60), (1, 60), (MOST, 60)]
    part, arguments = path.with_suffix(f".{uuid4().hex}.part.pt2"), rows(*first)
    try:
        with linear.for_graphs(joined_in(module).values()):
            ahead_of_time(Function(module).eval(), arguments, part)
        check(module, [arguments, *(rows(*each) for each in others)], opened(part))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@torch.no_grad()
def ahead_of_time(function: nn.Module, arguments: tuple, path: Path) -> None:
    """Compile into `path`, for one row if the arguments have one, else for 1 to MOST. Raises
    UserError where that fails, and leaves what the compiler said in a file beside it."""
    inputs, _, _, _, slots, keys, values = arguments
    span = torch.export.Dim("span", min=2, max=2**20)
    n = None if len(slots) == 1 else torch.export.Dim("n", min=1, max=MOST)
    shapes = [{1: n}] * len(inputs), {1: n}, {1: n}, {2: n, 3: span}, {0: n}
    shapes += [{1: span}] * len(keys), [{1: span}] * len(values)
    log = path.with_suffix(".log")
    with (
        open(log, "w", encoding="utf-8") as out,
        contextlib.redirect_stderr(out),
        contextlib.redirect_stdout(out),
    ):
        try:
            exported = torch.export.export(function, arguments, dynamic_shapes=shapes, strict=False)
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(path), inductor_configs=dict(OPTIONS)
            )
        except Exception as error:
            traceback.print_exc(file=out)
            said = f"{type(error).__name__}: {error}".splitlines()[0][:100]
            raise UserError(
                f"--compile failed ({said}; more in {log}): go on without it, or try another "
                "version of torch"
            ) from None
    log.unlink()


@torch.no_grad()
def check(module: nn.Module, examples: Iterable[tuple], graph: Callable) -> None:
    """Raises UserError where a new graph computes something else than the module does, or writes
    something else into the cache."""
    for *arguments, keys, values in examples:
        ours, theirs = (
            [run(*arguments, k, v), *k, *v]
            for run in (graph, Function(module))
            for k, v in [([x.clone() for x in keys], [x.clone() for x in values])]
        )
        off = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in zip(ours, theirs)]).max()
        if not off <= torch.finfo(off.dtype).eps ** 0.5:
            raise UserError(
                f"--compile: the compiler's graph is off by {off:.1g} of the largest number: go "
                "on without --compile, or try another version of torch"
            )


def opened(path: Path) -> Callable:
    """A file's graph. Its tensors go to the loader in the order of Function's arguments, and not
    through the wrapper that would take nested lists apart at each call."""
    try:
        run = torch._inductor.aoti_load_package(str(path)).loader.run
    except RuntimeError as error:
        raise UserError(
            f"--compile: {path} cannot be opened ({str(error).splitlines()[0][:100]}): see whether "
            "there is room for temporary files; if there is, delete it"
        ) from None

    def graph(inputs, cos, sin, visible, slots, keys, values):
        return run([*inputs, cos, sin, visible, slots, *keys, *values])[0]

    return graph


def cache_folder() -> Path:
    """Where graphs are kept between runs."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "minispec" / "graphs"
    make_folder(folder, "--compile:", ": set XDG_CACHE_HOME to a folder for the graphs")
    return folder


def is_there(path: Path) -> bool:
    """Whether there is such a file, which counts as opened now."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except OSError:  # somebody else's
        pass
    return True


def forget_old_files(folder: Path) -> None:
    """Delete what no run has opened for long: weights and code change, files are large."""
    for file in folder.iterdir():
        with contextlib.suppress(OSError):  # deleted by another run, or somebody else's
            if time.time() - file.stat().st_mtime > KEPT:
                file.unlink()


def digest(module: nn.Module) -> str:
    """What a compiled pass depends on: the weights, the code, torch and the processor."""
    sources = model_module, linear, int8, type(module), sys.modules[__name__]
    code = "".join(map(inspect.getsource, sources))
    place = torch.__version__, torch.version.git_version, processor(), torch.get_num_threads()
    place += MOST, int8.multiplies_bytes(), module.config
    found = hashlib.blake2b((code + repr(place)).encode(), digest_size=12)
    for name, weight in weights_of(module):
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        if not weight.is_meta:  # packed: comes below its product's name
            found.update(weight.detach().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def weights_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a CPU's passes read, one after the other, as packed weights are unpacked for it."""
    yield from module.named_parameters()
    for name, joined in joined_in(module).items():
        packed = joined.packed
        if isinstance(packed, Int8):
            yield from ((name, packed.numbers()), (f"{name} scale", packed.scale))
        elif packed is not None:
            yield f"{name} {type(packed).__name__}", packed.dense()


def processor() -> str:
    """The machine's kind: code is compiled for it alone."""
    kind = platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability()
    name = repr((*kind, platform.libc_ver()))
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name += " ".join(sorted({x for x in lines if x.startswith(("model name", "flags"))}))
    return name


# ---- on a GPU: CUDA graphs -----------------------------------------------------------------------


def graph_on_gpu(module: nn.Module, **options) -> Callable:
    """A graph for each number of rows and capacity, captured when first met; `options` are
    torch.compile's."""
    for limit in "recompile_limit", "accumulated_recompile_limit":  # beyond: no graphs
        setattr(torch._dynamo.config, limit, 4096)
    run = torch.compile(Function(module), dynamic=False, **(options or {"mode": "reduce-overhead"}))

    def graph(inputs, cos, sin, visible, slots, keys, values):
        for each in (*keys, *values):  # written in place: their addresses are part of the graph
            torch._dynamo.mark_static_address(each)
        return run(inputs, cos, sin, visible, slots, keys, values).clone()

    return graph
