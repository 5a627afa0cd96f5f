"""CUDA graphs. A pass launches about a thousand small operations, each of which takes the host
longer than the GPU. A graph records them once and repeats them with a single launch.

A graph repeats its operations at the same addresses. So what differs between two passes is copied
to static tensors first: the tokens, the number of committed rows, depths and mask. The memory of a
cache is static, too: when the cache is no longer used, the next one gets its memory and graphs.
"""

import copy
import weakref
from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.cache import KVCache, placement
from minispec.cli import note
from minispec.fast.graphs import MAX_ROWS, CacheView, Replaced
from minispec.methods.fastmtp import HeadDrafter, RecurrentHead
from minispec.methods.medusa import MedusaHeads
from minispec.methods.vocabulary import DraftHead
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling
from minispec.tree import FixedShape, NodePolicy

CPU = torch.device("cpu")
SPAN = 256  # cache rows that a graph reads: this many, or a larger power of two (batch: multiple)
MAX_NEW_ROWS = 17  # of a head's pass that has a graph: what a round of 16 drafts can bring
MAX_GRAPHS = 256  # of a cache; a caller may pass a new vocabulary each time

# ---- one graph -----------------------------------------------------------------------------------


@lru_cache
def side_stream(device: int) -> torch.cuda.Stream:
    """The stream for captures, and for what must run once before them."""
    return torch.cuda.Stream(device)


@lru_cache
def first_graph(device: int) -> torch.cuda.CUDAGraph:
    """A graph that is kept. All others take their memory from its pool: only one runs at a time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side_stream(device)):
        torch.zeros(1, device="cuda")
    return graph


def warm_up(run: Callable[[], Tensor]) -> None:
    """Call `run`: libraries allocate memory in their first calls."""
    stream, current = side_stream(torch.cuda.current_device()), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run()
    current.wait_stream(stream)


def capture(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Record what `run` does on the GPU. Returns its result and a function that repeats it."""
    graph, device = torch.cuda.CUDAGraph(), torch.cuda.current_device()
    with torch.cuda.stream(torch.cuda.current_stream()):  # restored even after a failed capture
        pool = first_graph(device).pool()
        with torch.cuda.graph(graph, pool=pool, stream=side_stream(device)):
            result = run()
    return result, graph.replay


class Graph:
    """A captured `function` of tensors with the sizes of `inputs`."""

    @torch.inference_mode()
    def __init__(self, function: Callable[..., Tensor], inputs: list[Tensor], device: torch.device):
        self.inputs = [x.to(device, copy=True) for x in inputs]
        self.run = partial(function, *self.inputs)
        with torch.cuda.device_of(self.inputs[0]):
            warm_up(self.run)

    @torch.inference_mode()
    def capture(self) -> None:
        with torch.cuda.device_of(self.inputs[0]):
            self.result, self.replay = capture(self.run)

    @torch.inference_mode()
    def __call__(self, *inputs: Tensor) -> Tensor:
        """The function's result. See Graphs.replay."""
        for static, x in zip(self.inputs, inputs):
            x = x.pin_memory() if static.is_cuda and not x.is_cuda else x
            static.copy_(x, non_blocking=True)
        self.replay()
        return self.result


class StaticCache(CacheView):
    """The first `span` rows of a cache's memory, for one sequence. `length` (1,) is the number of
    committed rows, a tensor on the device."""

    def __init__(self, cache: KVCache, span: int):
        memory = cache.lease.memory
        super().__init__(*([layer[:, :span] for layer in kv] for kv in (memory.k, memory.v)))
        self.row_ids = memory.row_ids[:span]
        self.length = self.row_ids[:1]

    def place(self, n: int, depth: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See KVCache."""
        first = self.row_ids[:1, None]  # of one sequence
        return placement(self.length[:, None], first, self.row_ids, depth, mask)

    def commit(self, path: list[int]) -> None:
        """See KVCache. The path must be a chain."""
        self.length = self.length + len(path)

    def truncate(self, length: Tensor) -> None:
        """See KVCache."""
        self.length = length


# ---- caches --------------------------------------------------------------------------------------


class Graphs(dict):
    """The graphs that use the memory of one cache. A copy of the cache has none."""

    failed = False  # if a capture has failed, these caches decode without graphs

    def __reduce__(self) -> tuple:
        return Graphs, ()

    def replay(
        self, key: tuple, make: Callable[[], Callable], inputs: list[Tensor], device: torch.device
    ) -> Tensor | None:
        """The result of the key's graph, until the next graph overwrites it. If there is no graph
        yet, capture the function that `make` returns. None if that is impossible."""
        if key not in self:
            if len(self) == MAX_GRAPHS:
                self.clear()
            graph = Graph(make(), inputs, device)  # may raise an error of the caller's
            try:
                graph.capture()
            except RuntimeError as error:
                self.failed = True
                note(f"CUDA graphs do not work here, so passes run without them ({error})")
                return None
            self[key] = graph
        return self[key](*inputs)


class Lease:
    """The `memory` whose first rows `kv` a cache and its shallow copies use, until the lease dies
    with the last of them. A deep copy of the cache has none."""

    def __init__(self, memory: KVCache, kv: Tensor):
        self.memory, self.kv = memory, kv
        self.run: tuple = ()  # the cache's user and the model of the latest pass
        self.state: tuple = ()  # of that model when the run began

    def state_of(self, model: Transformer, user: object) -> tuple:
        """`state_of` the model when the run of this `user` began; without a user, its state now."""
        if user is None or self.run != (user, model):
            self.run, self.state = (user, model), state_of(model)
        return self.state

    def __reduce__(self) -> tuple:
        return type(None), ()


class CachePool(Replaced):
    """`new_cache` of a model or head. A new cache gets the memory and the graphs of one that is no
    longer used, if it fits. Otherwise unused memory is freed first."""

    def __init__(self, network: Transformer | RecurrentHead):
        super().__init__(network, "new_cache")
        self.unused: list[KVCache] = []

    @torch.inference_mode(False)  # the memory outlives a run
    def __call__(self, capacity: int | None = None) -> KVCache:
        capacity = capacity or self.module.config.context
        weight = next(self.module.parameters())  # the module may have been moved
        fitting = [
            memory for memory in self.unused if memory.capacity >= capacity
            and (memory.kv.device, memory.kv.dtype) == (weight.device, weight.dtype)
        ]  # fmt: skip
        if fitting:
            memory = min(fitting, key=lambda memory: memory.capacity)
            self.unused.remove(memory)
            memory.kv.zero_()
        else:
            self.unused.clear()
            memory = self.plain(-(-capacity // SPAN) * SPAN)
            memory.graphs = Graphs()
        cache = copy.copy(memory)
        cache.capacity = capacity
        cache.set_storage(memory.kv[:, :, :, :capacity], 0)
        cache.lease = Lease(memory, cache.kv)
        weakref.finalize(cache.lease, self.unused.append, memory).atexit = False
        return cache


def span_of(cache: KVCache | None, n: int) -> int | None:
    """The rows that a graph of `n` more rows reads. None if there can be no graph: the cache does
    not use the memory of a CachePool, they do not fit it, or gradients are recorded."""
    lease = getattr(cache, "lease", None)
    if lease is None or lease.kv is not cache.kv or torch.is_grad_enabled():
        return None
    if lease.memory.graphs.failed:
        return None
    rows, needed = lease.memory.capacity, cache.length + n
    if needed > rows:
        return None
    return min(rows, max(SPAN, 1 << (needed - 1).bit_length()))


def addresses(module: nn.Module) -> tuple[int, ...]:
    """Where a module's parameters and buffers are: a graph reads them there, even after the module
    has been given others."""
    return tuple(x.data_ptr() for x in (*module.parameters(), *module.buffers()))


def state_of(model: Transformer) -> tuple:
    """What the graphs of a model hold on to: those of another model are wrong, and so are all of
    them after it has been moved, quantised, compiled or given other weights. Takes longer than a
    launch, so it is computed once per run."""
    return model, model.device, addresses(model), type(model.lm_head), model.model.forward


# ---- passes of a model ---------------------------------------------------------------------------


class CapturedPass(Replaced):
    """`forward` of a model. A pass over 1 to 64 rows after the rows of a cache replays a graph."""

    def __init__(self, model: Transformer):
        super().__init__(model, "forward")

    def __call__(
        self, tokens: list[int] | Tensor, cache: KVCache | None = None,
        depth: Tensor | None = None, mask: Tensor | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> Tensor:  # fmt: skip
        plain = partial(self.plain, feature_layers=feature_layers)
        feed = torch.as_tensor(tokens)
        n = feed.numel()
        count = 1 << max(n - 1, 0).bit_length()  # rows of the graph; the pass is padded
        span = span_of(cache, count) if 0 < n <= MAX_ROWS and feed.shape[-1] == n else None
        wide = mask is not None and mask.shape[-1] != n
        if span is None or n > cache.free_rows or wide:
            return plain(tokens, cache, depth, mask)
        feed = F.pad(feed, (0, count - n)) if count > n else feed
        inputs = [feed.view(-1), layout(cache.length, count, depth, mask)]
        make = partial(static_pass, plain, cache, span, count)
        key = count, span, feature_layers, *cache.lease.state_of(self.module, cache.user)
        hidden = cache.graphs.replay(key, make, inputs, cache.device)
        return plain(tokens, cache, depth, mask) if hidden is None else hidden[:, :n].clone()


def static_pass(
    forward: Callable[..., Tensor], cache: KVCache, span: int, n: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """The plain pass over `n` tokens as a function of tensors only."""
    static = StaticCache(cache, span)

    def run(tokens: Tensor, integers: Tensor) -> Tensor:
        static.length, depth, mask = integers.split([1, n, n * n])
        return forward(tokens, static, depth, mask.view(n, n) > 0)

    return run


def layout(length: int, n: int, depth: Tensor | None, mask: Tensor | None) -> Tensor:
    """Everything but the tokens that a pass over `n` rows depends on, in one tensor of integers:
    the number of committed rows, depths (n,) and the flattened mask. Padding attends to itself."""
    depths, visible = torch.arange(n), torch.ones(n, n, dtype=torch.int64).tril()
    if depth is not None:
        depths[: len(depth)] = depth
    if mask is not None:
        visible = torch.eye(n, dtype=torch.int64)
        visible[: len(mask), : len(mask)] = mask
    return torch.cat([torch.tensor([length]), depths, visible.flatten()])


# ---- drafts of a FastMTP or EAGLE-3 head ---------------------------------------------------------


class CapturedDrafter(HeadDrafter):
    """Draws all greedy drafts of a round, or the candidates of its tree, in one graph. Otherwise,
    each pass of the head is one."""

    def __init__(self, head: RecurrentHead, model: Transformer, cache: KVCache, offset: int):
        super().__init__(head, model, cache, offset)
        self.state = head.run_block, addresses(head), *state_of(model)

    def run(
        self, hidden: Tensor, tokens: list[int] | Tensor, depth: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        n = len(tokens)
        span = span_of(self.cache, n)
        on_device = depth is not None or getattr(tokens, "device", CPU) != CPU  # a tree, or greedy
        if n > MAX_NEW_ROWS or span is None or on_device:
            return super().run(hidden, tokens, depth, mask)
        inputs = [hidden, torch.tensor([self.cache.length, self.offset, *tokens])]
        make = partial(self.static, span, HeadDrafter.run)
        key = n, span, *self.state
        outputs = self.cache.graphs.replay(key, make, inputs, self.cache.device)
        return super().run(hidden, tokens) if outputs is None else outputs.clone()

    def draft(
        self, tokens: list[int], k: int, sampling: Sampling, randomness: Randomness,
        draft_head: DraftHead,
    ) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
        def chain(drafter: HeadDrafter, newest: Tensor) -> Tensor:
            return torch.cat([newest, drafter.chain(k, Sampling(0), None, draft_head)[0]])

        greedy = sampling.temperature == 0 and k > 0
        rows = self.replay((k, draft_head.logits), k, chain) if greedy else None
        if rows is None:
            return super().draft(tokens, k, sampling, randomness, draft_head)
        return rows, []

    def flush_and_expand(self, policy: NodePolicy, draft_head: DraftHead) -> Tensor:
        width, depth = policy.static_shape()
        depth = min(depth, 1 + (self.cache.free_rows - self.num_pending) // width)

        def expand(drafter: HeadDrafter, _: Tensor) -> Tensor:
            return drafter.expand(FixedShape(width, depth).width, draft_head)

        found = self.replay((width, depth, draft_head.logits), width * (depth - 1), expand)
        return super().flush_and_expand(policy, draft_head) if found is None else found

    def replay(
        self, key: tuple, scratch: int, draft: Callable[[HeadDrafter, Tensor], Tensor]
    ) -> Tensor | None:
        """Run the head on everything that is pending. Then `draft`, a function of a plain drafter
        and the newest token, which writes `scratch` rows. All in one graph; None if there is none.
        """
        n, span = self.num_pending, span_of(self.cache, self.num_pending + scratch)
        if not 0 < n <= MAX_NEW_ROWS or span is None:
            return None
        hidden, new = self.joined_pending()
        inputs = [hidden, torch.tensor([self.cache.length, self.offset, *new])]

        def round_of(drafter: HeadDrafter, hidden: Tensor, tokens: Tensor) -> Tensor:
            drafter.extend(hidden, tokens)
            return draft(drafter, tokens[-1:])

        make = partial(self.static, span, round_of)
        key = n, span, *key, *self.state
        found = self.cache.graphs.replay(key, make, inputs, self.cache.device)
        if found is not None:
            self.pending.clear()  # `last` stays as it is: something is always pending next time
            self.cache.commit(list(range(n)))
        return found

    def static(
        self, span: int, function: Callable[[HeadDrafter, Tensor, Tensor], Tensor]
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """A function of a plain drafter, hidden states and tokens, as one of tensors only."""
        static = StaticCache(self.cache, span)
        drafter = HeadDrafter(self.head, self.model, static, self.offset)

        def run(hidden: Tensor, integers: Tensor) -> Tensor:
            static.length, drafter.offset, tokens = integers.tensor_split([1, 2])
            return function(drafter, hidden, tokens)

        return run


class CapturedDrafters(Replaced):
    """`drafter` of a head."""

    def __init__(self, head: RecurrentHead):
        super().__init__(head, "drafter")

    def __call__(self, model: Transformer, cache: KVCache, offset: int) -> CapturedDrafter:
        return CapturedDrafter(self.module, model, cache, offset)


# ---- Medusa heads --------------------------------------------------------------------------------


class CapturedHeads(Replaced):
    """`forward` of Medusa heads: the logits for a single hidden state replay a graph."""

    def __init__(self, heads: MedusaHeads):
        super().__init__(heads, "forward")
        self.graphs = Graphs()

    def __call__(self, hidden: Tensor, draft_head: Transformer | DraftHead) -> Tensor:
        run, logits = partial(self.plain, draft_head=draft_head), draft_head.logits
        if hidden.dim() > 1 or self.graphs.failed or torch.is_grad_enabled():
            return run(hidden)
        owner = logits.__self__  # the model, whose lm_head may have been given other weights
        shared = addresses(owner.lm_head) if isinstance(owner, Transformer) else ()
        key = logits, addresses(self.module), shared
        logits = self.graphs.replay(key, lambda: run, [hidden], hidden.device)
        return run(hidden) if logits is None else logits


# ---- everything ----------------------------------------------------------------------------------


CAPTURED = CachePool, CapturedPass, CapturedDrafters, CapturedHeads


def capture_passes(network: Transformer | RecurrentHead | MedusaHeads) -> None:
    """From now on, decode with CUDA graphs."""
    if is_captured(network):
        return
    if isinstance(network, MedusaHeads):
        CapturedHeads(network)
    else:
        CachePool(network)
        is_head = isinstance(network, RecurrentHead)
        CapturedDrafters(network) if is_head else CapturedPass(network)


def is_captured(network: nn.Module) -> bool:
    """Whether `capture_passes` has been called for the network."""
    return any(isinstance(value, CAPTURED) for value in vars(network).values())
