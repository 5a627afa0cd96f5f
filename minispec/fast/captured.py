"""CUDA graphs. A pass launches about a thousand small operations, each of which takes the host
longer than the GPU. A graph records them once and repeats them with a single launch.

A graph repeats its operations at the same addresses. So what differs between two passes is copied
to static tensors first: the tokens, the number of committed rows, depths and mask. Everything else
that a graph reads has its address in the graph's key: weights, and the memory of a cache. When a
cache is no longer used, the next one gets its memory, and with it the graphs.
"""

import copy
import math
import weakref
from collections.abc import Callable, Iterable
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.cache import KVCache
from minispec.cli import note
from minispec.fast.compiled import MAX_ROWS
from minispec.methods.adaptive import FixedNodes, Policy
from minispec.methods.fastmtp import Draws, HeadDrafter, RecurrentHead
from minispec.methods.medusa import MedusaHeads
from minispec.methods.vocabulary import DraftHead
from minispec.model import Transformer
from minispec.sampling import OneHot, Sampling, not_finite

CPU = torch.device("cpu")
SPAN = 256  # cache rows that a graph reads: this many, or a larger power of two (batch: multiple)
MAX_NEW_ROWS = 17  # of a head's pass that has a graph: what a round of 16 drafts can bring
MAX_GRAPHS = 256  # of a network; a caller may pass a new vocabulary each time

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


def warm_up(run: Callable[[], object]) -> None:
    """Call `run`: libraries allocate memory in their first calls."""
    stream, current = side_stream(torch.cuda.current_device()), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run()
    current.wait_stream(stream)


def capture(run: Callable[[], object]) -> tuple[object, Callable[[], None]]:
    """Record what `run` does on the GPU. Returns its result and a function that repeats it."""
    graph, device = torch.cuda.CUDAGraph(), torch.cuda.current_device()
    with torch.cuda.stream(torch.cuda.current_stream()):  # restored even after a failed capture
        pool = first_graph(device).pool()
        with torch.cuda.graph(graph, pool=pool, stream=side_stream(device)):
            result = run()
    return result, graph.replay


def addresses(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Where a graph reads these tensors, even after others have taken their place."""
    return tuple(x.data_ptr() for x in tensors)


def weights_key(*modules: nn.Module) -> tuple:
    """The part of a graph's key for what it reads and runs of these modules: the addresses of
    weights and, as modules may have been quantised or compiled, what they are."""
    tensors = (x for m in modules for x in (*m.parameters(), *m.buffers()))
    kinds = ((type(getattr(m, "lm_head", m)), getattr(m, "compiled", None)) for m in modules)
    return *kinds, addresses(tensors)


def memory_key(cache: KVCache) -> tuple[int, ...]:
    """The same for the memory of a cache."""
    return *addresses([cache.kv]), *cache.kv.stride()


# ---- the graphs of a network ---------------------------------------------------------------------


class Graphs:
    """The graphs of a network, by their keys, and the memory of caches that are no longer used.
    Copies and pickles of the network have None instead, so they decode without graphs."""

    def __init__(self, network: nn.Module | None = None):
        self.network = network
        # the static inputs of each, its result, and the function that replays it
        self.captured: dict[tuple, tuple[list[Tensor], object, Callable[[], None]]] = {}
        self.failed = False  # if a capture has failed, the network decodes without graphs
        self.unused: list[KVCache] = []
        self.latest: tuple = None, ()  # the `user` of a run's cache, and `weights_key` in this run

    def __reduce__(self) -> tuple:
        return type(None), ()

    @torch.inference_mode()
    def replay(
        self, key: tuple, function: Callable[..., object], inputs: list[Tensor],
        device: torch.device,
    ) -> object:  # fmt: skip
        """`function(*inputs)` as a graph, which is captured if there is none with this key yet.
        The next graph overwrites the result."""
        if key not in self.captured:
            static = [x.to(device, copy=True) for x in inputs]
            run = partial(function, *static)
            if self.failed:
                return run()
            if len(self.captured) == MAX_GRAPHS:
                self.captured.clear()
            with torch.cuda.device_of(static[0]):
                warm_up(run)  # may raise an error of the caller's
                try:
                    self.captured[key] = static, *capture(run)
                except RuntimeError as error:
                    self.failed = True
                    note(f"CUDA graphs do not work here, so passes run without them ({error})")
                    return run()
        static, result, replay = self.captured[key]
        with torch.cuda.device_of(static[0]):
            for to, x in zip(static, inputs):
                x = x.pin_memory() if to.is_cuda and not x.is_cuda else x
                to.copy_(x, non_blocking=True)
            replay()
        return result

    @torch.inference_mode(False)  # the memory outlives a run
    def new_cache(
        self, layers: int, heads: int, head_dim: int, capacity: int, dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:  # fmt: skip
        """A KVCache for the network. It gets the memory of one that is no longer used, if it fits.
        Otherwise unused memory is freed first."""
        fitting = [
            memory for memory in self.unused if memory.capacity >= capacity
            and (memory.device, memory.kv.dtype) == (device, dtype)
        ]  # fmt: skip
        if fitting:
            memory = min(fitting, key=lambda memory: memory.capacity)
            self.unused.remove(memory)
            memory.kv.zero_()
        else:
            if self.unused:
                self.unused.clear()
                self.captured.clear()
            rows = -(-capacity // SPAN) * SPAN
            memory = KVCache(layers, heads, head_dim, rows, dtype, device)
        cache = copy.copy(memory)
        cache.set_storage(memory.kv[:, :, :, :capacity], 0)
        weakref.finalize(cache.kv, self.unused.append, memory).atexit = False
        return cache

    def span(self, cache: KVCache | None, n: int) -> int | None:
        """The rows that a graph of `n` more rows reads. None if there can be no graph: the rows do
        not fit, a graph is being captured, or gradients are recorded."""
        if cache is None or self.failed or torch.is_grad_enabled():
            return None
        if isinstance(cache.length, Tensor) or cache.free_rows < n:
            return None
        return min(cache.capacity, max(SPAN, 1 << (cache.length + n - 1).bit_length()))

    def key(self, cache: KVCache) -> tuple:
        """The part of a graph's key for a pass of the model over rows of a cache. The weights are
        looked up once per run, as that takes longer than a launch."""
        if cache.user is None or self.latest[0] is not cache.user:
            self.latest = cache.user, weights_key(self.network)
        return memory_key(cache), *self.latest[1]


# ---- passes of a model ---------------------------------------------------------------------------


class PassGraphs(Graphs):
    """Passes of a model: those over 1 to MAX_ROWS rows after the rows of a cache."""

    def run_pass(self, tokens: list[int] | Tensor, *others) -> Tensor:
        """See Transformer.forward."""
        hidden = self.replay_pass(None, tokens, *others)
        if hidden is None:
            return self.network.plain_pass(tokens, *others)
        return hidden[:, : torch.as_tensor(tokens).numel()].clone()

    def score(self, tokens: list[int] | Tensor, *others) -> tuple[list[int], Tensor, OneHot] | None:
        """See Transformer.score: lm_head and the greedy choice are part of the graph. None if there
        is no graph."""
        found, n, model = self.replay_pass(greedy, tokens, *others), len(tokens), self.network
        if found is None:
            return None
        hidden = found[0][0, :n].clone()
        fed, predicted, largest = (row[:n] for row in found[1].tolist())  # waits for the device
        if not all(map(math.isfinite, largest)):
            raise not_finite(model.dtype)
        return [*map(int, fed)], hidden, OneHot([*map(int, predicted)], model.config.vocab_size)

    def replay_pass(
        self, then: Callable[..., object] | None, tokens: list[int] | Tensor,
        cache: KVCache | None, depth: Tensor | None, mask: Tensor | None,
        feature_layers: tuple[int, ...],
    ) -> object:  # fmt: skip
        """The result of a pass (see Transformer.forward) or, if it is not None, of `then(model,
        tokens, result)`. None if there is no graph."""
        feed = torch.as_tensor(tokens)
        n = feed.numel()
        count = 1 << max(n - 1, 0).bit_length()  # rows of the graph; the pass is padded
        span = self.span(cache, count) if 0 < n <= MAX_ROWS and feed.shape[-1] == n else None
        if span is None or mask is not None and mask.shape[-1] != n:
            return None

        def run(*inputs: Tensor) -> object:
            tokens, length, depth, mask = torch.cat(inputs).split([count, 1, count, count**2])
            view, mask = cache.view(span, length[:, None]), mask.view(count, count) > 0
            hidden = self.network.plain_pass(tokens, view, depth, mask, feature_layers)
            return hidden if then is None else then(self.network, tokens, hidden)

        feed = F.pad(feed.view(-1), (0, count - n)) if count > n else feed.view(-1)
        inputs = [feed, layout(cache.length, count, depth, mask)]
        if feed.device == CPU:
            inputs = [torch.cat(inputs)]
        key = len(inputs), count, span, feature_layers, then, *self.key(cache)
        return self.replay(key, run, inputs, cache.device)


def greedy(model: Transformer, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden states, and everything that the host needs in one tensor (3, n): the tokens, those
    predicted after them, and their logits. float64 represents every token id exactly."""
    best = model.logits(hidden[0, :, : model.config.hidden_size]).max(-1)
    return hidden, torch.stack([x.double() for x in (tokens, best.indices, best.values)])


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

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.weights = self.model, *weights_key(self.head, self.model)

    def run(
        self, hidden: Tensor, tokens: list[int] | Tensor, depth: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        on_device = depth is not None or getattr(tokens, "device", CPU) != CPU  # a tree, or greedy
        found = None if on_device else self.replay("run", HeadDrafter.run, hidden, [*tokens])
        return super().run(hidden, tokens, depth, mask) if found is None else found.clone()

    def draft(
        self, tokens: list[int], k: int, draft_head: DraftHead
    ) -> tuple[Tensor, list[Tensor | None]]:
        def chain(drafter: HeadDrafter, newest: Tensor) -> Tensor:
            return torch.cat([newest, drafter.chain(k, Sampling(0), None, draft_head)[0]])

        greedy = self.sampling.temperature == 0 and k > 0
        rows = self.round((k, draft_head.logits), k, chain) if greedy else None
        if rows is None:
            return super().draft(tokens, k, draft_head)
        return rows, []

    def flush_and_expand(
        self, policy: Policy, draft_head: DraftHead, draws: list[Draws] | None = None
    ) -> Tensor:
        if draws is not None:  # each level waits for the host
            return super().flush_and_expand(policy, draft_head, draws)
        width, depth = policy.static_shape()
        depth = min(depth, 1 + (self.cache.free_rows - self.num_pending) // width)

        def expand(drafter: HeadDrafter, _: Tensor) -> Tensor:
            return drafter.expand(FixedNodes(1, (width, depth)).width, draft_head)

        found = self.round((width, depth, draft_head.logits), width * (depth - 1), expand)
        return super().flush_and_expand(policy, draft_head) if found is None else found

    def round(
        self, key: tuple, scratch: int, draft: Callable[[HeadDrafter, Tensor], Tensor]
    ) -> Tensor | None:
        """Run the head on everything that is pending. Then `draft`, a function of a plain drafter
        and the newest token, which writes `scratch` rows. All in one graph; None if there is none.
        """
        if not self.pending:
            return None

        def round_of(drafter: HeadDrafter, hidden: Tensor, tokens: Tensor) -> Tensor:
            drafter.extend(hidden, tokens)
            return draft(drafter, tokens[-1:])

        hidden, new = self.joined_pending()
        found = self.replay(key, round_of, hidden, new, scratch)
        if found is not None:
            self.pending.clear()  # `last` stays as it is: something is always pending next time
            self.cache.commit(list(range(len(new))))
        return found

    def replay(
        self, key: object, function: Callable[[HeadDrafter, Tensor, Tensor], Tensor],
        hidden: Tensor, tokens: list[int], scratch: int = 0,
    ) -> Tensor | None:  # fmt: skip
        """The graph of a function of a plain drafter, hidden states and tokens. It writes `scratch`
        rows after those of the tokens."""
        n, graphs = len(tokens), self.head.graphs
        span = graphs.span(self.cache, n + scratch) if 0 < n <= MAX_NEW_ROWS else None
        if span is None:
            return None

        def run(hidden: Tensor, integers: Tensor) -> Tensor:
            length, offset, tokens = integers.tensor_split([1, 2])
            view = self.cache.view(span, length[:, None])
            return function(HeadDrafter(self.head, self.model, view, offset), hidden, tokens)

        integers = torch.tensor([self.cache.length, self.offset, *tokens])
        key = n, span, key, memory_key(self.cache), *self.weights
        return graphs.replay(key, run, [hidden, integers], self.cache.device)


class DraftGraphs(Graphs):
    """Rounds and passes of a recurrent head."""

    drafter = CapturedDrafter


# ---- Medusa heads --------------------------------------------------------------------------------


class HeadGraphs(Graphs):
    """What Medusa heads compute from a single hidden state."""

    def run(self, function: Callable[..., Tensor], *inputs: Tensor, **options) -> Tensor:
        """`function(*inputs, **options)`, as a graph if possible."""
        run = partial(function, **options)
        if inputs[0].dim() > 1 or torch.is_grad_enabled():
            return run(*inputs)
        logits = options["draft_head"].logits
        owner = logits.__self__  # the model, whose lm_head may have been given other weights
        shared = [owner.lm_head] if isinstance(owner, Transformer) else []
        fixed = logits, options.get("ranks"), *(x.shape for x in inputs)
        key = function, *fixed, *weights_key(self.network, *shared)
        return self.replay(key, run, [*inputs], inputs[0].device)


# ---- everything ----------------------------------------------------------------------------------


def capture_passes(network: Transformer | RecurrentHead | MedusaHeads) -> None:
    """From now on, decode with CUDA graphs."""
    kinds = (MedusaHeads, HeadGraphs), (RecurrentHead, DraftGraphs), (Transformer, PassGraphs)
    kind = next(kind for base, kind in kinds if isinstance(network, base))
    network.graphs = network.graphs or kind(network)
