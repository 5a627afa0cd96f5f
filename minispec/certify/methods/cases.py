"""The cases to certify: every method, with options that cover its edge cases."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from minispec.cache import KVCache
from minispec.certify import toys
from minispec.certify.common import GREEDY
from minispec.certify.toys import Method, Toy, ToyHeads, small_model
from minispec.checkpoints.heads import PUBLISHED_TREES
from minispec.generate import METHODS
from minispec.methods.adaptive import AdaptiveK, AdaptiveNodes, AdaptiveTree
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling, probs
from minispec.tree import RankPath, Step, Tree
from minispec.verify import accept

SAMPLINGS = {
    "T=1": Sampling(1.0),
    "T=0.7 top-k 2": Sampling(0.7, top_k=2),
    "T=1.5 top-p 0.8": Sampling(1.5, top_p=0.8),
    "greedy": GREEDY,
}


def bound(name: str, **options) -> Method:
    """Bind a method's own arguments. The method is looked up at call time, so mutants apply."""
    return lambda *arguments, **more: METHODS[name](*arguments, **more, **fresh_options(options))


def fresh_options(options: dict) -> dict:
    """Copy the options and reset adaptive policies, so that no run depends on earlier ones."""
    kinds = AdaptiveK | AdaptiveNodes | AdaptiveTree
    return {k: copy.deepcopy(x) if isinstance(x, kinds) else x for k, x in options.items()}


# Adaptive policies with made-up costs, chosen so that they adapt quickly: K starts at 2, falls to 1
# after a rejection and rises to 3 if both drafts are accepted; trees vary from few to many nodes.
ADAPTIVE_K = AdaptiveK([0.0, 1.0, 1.0, 1.205, 1.331, 1.42], draft_cost=0.1, max_k=4)
ADAPTIVE_TREE = AdaptiveTree([0.0, *(1 + n / 20 for n in range(17))], heads_cost=0.2)
ADAPTIVE_NODES = AdaptiveNodes([0.0, *(1 + n / 20 for n in range(17))], {1: 0.05, 2: 0.06})
# These stop drafting after their first rejection, and try again after one plain step.
CHEAP_ROWS = [0.0, *(1 + n / 100 for n in range(17))]
PROBING_K = AdaptiveK(CHEAP_ROWS, draft_cost=0.0, max_k=2, acceptance=[0.0105])
PROBING_NODES = AdaptiveNodes(CHEAP_ROWS, {1: 0.0}, acceptance=[0.0105])
PROBING_TREE = AdaptiveTree(CHEAP_ROWS, heads_cost=0.005, accuracy=torch.tensor([[0.016]]))

# ---- draft trees of every shape ------------------------------------------------------------------

PROPOSAL_KINDS = ("one-hot", "with replacement", "without replacement")
TREE_SHAPES = {  # the parent of each node
    "root": [-1], "chain": [-1, 0, 1], "wide": [-1, 0, 0, 0], "deep": [-1, 0, 0, 1, 3],
    "bushy": [-1, 0, 0, 1, 1, 2],
}  # fmt: skip


def forest(
    model, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, draft, shape: list[int], kind: str,
) -> Iterator[Step]:  # fmt: skip
    """Decode with draft trees of any shape and proposal kind; a method for proofs, not speed."""
    cache = cache or model.new_cache()
    tokens = list(prompt)
    model.prefill(tokens[cache.length : -1], cache)
    yield Step()
    while True:
        tree = grow(draft, tokens, shape[: cache.free_rows], kind, sampling, randomness)
        hidden = model(tree.tokens, cache, tree.depth, tree.mask)
        path, next_token = accept(probs(model.logits(hidden[0]), sampling), tree, randomness)
        cache.commit(path)
        new = tree.tokens_at(path[1:]) + [next_token]
        tokens += new
        yield Step(new, tree, path)


def grow(
    draft, tokens: list[int], shape: list[int], kind: str, sampling: Sampling,
    randomness: Randomness,
) -> Tree:  # fmt: skip
    """Grow a tree of this shape; each child is drawn from the draft's prediction at its parent."""
    nodes, parents, draft_probs, paths = [tokens[-1]], [-1], [None], {0: []}
    remaining: dict[int, Tensor] = {}  # the distribution of a node's next child
    node_of = {0: 0}  # node of the shape -> node of the tree
    warm = Sampling(sampling.temperature or 1.0, sampling.top_k, sampling.top_p)
    for node, parent in enumerate(shape[1:], start=1):
        if parent not in node_of:
            continue
        at = node_of[parent]
        if at not in remaining:
            remaining[at] = probs(draft.logits(draft(tokens + paths[at])[0, -1:]), warm)[0]
        q = remaining[at]
        if q.sum() == 0:  # every token has been drawn, without replacement
            continue
        x = int(q.argmax()) if kind == "one-hot" else randomness.categorical(q)
        if kind != "with replacement":
            rest = q.clone()
            rest[x] = 0.0
            remaining[at] = rest / rest.sum() if rest.sum() > 0 else rest
        node_of[node] = len(nodes)
        paths[len(nodes)] = paths[at] + [x]
        nodes.append(x)
        parents.append(at)
        draft_probs.append(None if kind == "one-hot" else q)
    return Tree(nodes, parents, draft_probs)


def tree_method(draft, shape: str, kind: str) -> Method:
    return partial(forest, draft=draft, shape=TREE_SHAPES[shape], kind=kind)


# ---- options of the methods ----------------------------------------------------------------------

RANK_TREES = {
    "single node": [],
    "chain": [(0, 0, 0)],
    "wide": [(0,), (1,), (2,)],
    "deep": [(0, 0, 0, 0), (1, 1), (0, 1)],
    "64 nodes": PUBLISHED_TREES["mc_sim_7b_63"],
}
# lookahead's window, n-gram and guesses, from the smallest values up
LOOKAHEAD_SETTINGS = (
    (1, 2, 0), (1, 2, 1), (3, 2, 2), (1, 3, 2), (3, 3, 3), (2, 4, 1), (5, 4, 5), (10, 5, 10),
)  # fmt: skip


def every_path(ranks: int, nodes: int) -> list[RankPath]:
    """List the first `nodes` paths over `ranks` ranks, breadth first."""
    paths: list[RankPath] = [()]
    for at in range(nodes):
        paths += [paths[at] + (rank,) for rank in range(ranks)]
    return paths[1 : nodes + 1]


def mtp_options(model: Transformer, seed: int) -> Iterator[tuple[str, dict]]:
    """Yield (name, options) for every way to draft with a FastMTP head."""
    head, vocabulary = toys.random_mtp_head(model, seed), toys.two_languages(model)
    for k in (1, 2):
        yield f"k={k}, sampled drafts", {"head": head, "k": k}
    for k in range(1, 7):
        yield f"k={k}, argmax drafts", {"head": head, "k": k, "draft_sampling": GREEDY}
    compressed = {"head": head, "k": 2, "vocabulary": vocabulary}
    yield "k=2, compressed", compressed
    yield "k=2, hot drafts, compressed", compressed | {"draft_sampling": Sampling(2.0)}
    yield "k=auto", {"head": head, "k": ADAPTIVE_K}
    yield "k=auto, probing", {"head": head, "k": PROBING_K}
    yield "tree=1", {"head": head, "tree": 1}
    yield "tree=4, compressed", {"head": head, "tree": 4, "vocabulary": vocabulary}
    yield "tree=20", {"head": head, "tree": 20}
    yield "tree=auto", {"head": head, "tree": ADAPTIVE_NODES}
    yield "tree=auto, probing", {"head": head, "tree": PROBING_NODES}


def head_options(model: Transformer, seed: int) -> Iterator[tuple[str, str, dict]]:
    """Yield (method, name, options) for both heads. EAGLE-3's has its own vocabulary."""
    eagle3 = {"head": toys.random_eagle3_head(model, seed)}
    for name, options in mtp_options(model, seed):
        yield "fastmtp", name, options
        if "vocabulary" not in options:
            yield "eagle3", name, options | eagle3


def hybrid_options(model: Transformer, seed: int) -> Iterator[tuple[str, dict]]:
    """Yield (name, options) for both drafters that hybrid can have, and for its policies."""
    head = {"head": toys.random_mtp_head(model, seed)}
    draft = {"draft": small_model(seed + 1000, model.config.vocab_size, layers=1)}
    yield "k=1", head | {"k": 1, "lookup_k": 2}
    yield "k=2, compressed", head | {"k": 2, "vocabulary": toys.two_languages(model)}
    yield "k=2, draft model", draft | {"k": 2}
    yield "argmax drafts", head | {"draft_sampling": GREEDY}
    yield "auto", head | {"k": ADAPTIVE_K, "lookup_k": ADAPTIVE_K}
    yield "auto, probing", head | {"k": PROBING_K, "lookup_k": PROBING_K}
    yield "auto, draft model", draft | {"k": ADAPTIVE_K, "lookup_k": PROBING_K}
    yield "tree=6", head | {"tree": 6}
    yield "k=2, EAGLE-3", {"head": toys.random_eagle3_head(model, seed), "k": 2}
    yield "tree=auto", head | {"tree": ADAPTIVE_NODES, "lookup_k": ADAPTIVE_K}


def medusa_compressed(model: Transformer, seed: int, tree: list[RankPath]) -> Method:
    """Medusa with a vocabulary that switches and may have fewer tokens than the tree has ranks."""
    heads = toys.random_medusa_heads(model, seed, shared=True)
    return bound("medusa", heads=heads, tree=tree, vocabulary=toys.two_languages(model))


# ---- cases for proofs by enumeration -------------------------------------------------------------


OTHER, BINARY, OTHER_BINARY = Toy(77), Toy(5, vocab=2), Toy(77, vocab=2)


@dataclass(frozen=True)
class ExactCase:
    """One method on one toy model, under some samplings, for the first `n` tokens. If enumeration
    allows it, `n` exceeds the number of drafts per round, so that the bonus token is covered."""

    name: str
    method: Method
    samplings: tuple[str, ...] = ("T=1",)
    n: int = 3
    model: Toy | Transformer = Toy(5)
    prompt: tuple[int, ...] = (1, 0, 1, 1, 0)


def exact_cases() -> Iterator[ExactCase]:
    """Yield cases small enough to enumerate. Deep trees and long chains use a vocabulary of two
    tokens, all others one of three."""
    samplings = tuple(SAMPLINGS)
    yield ExactCase("autoregressive", bound("autoregressive"), samplings)
    yield from chain_cases()
    for kind in PROPOSAL_KINDS:
        for shape in "root", "chain", "wide":
            method = tree_method(OTHER, shape, kind)
            yield ExactCase(f"tree, {shape}, {kind}", method, samplings, n=2)
        for shape in "deep", "bushy":
            method = tree_method(OTHER_BINARY, shape, kind)
            yield ExactCase(f"tree, {shape}, {kind}", method, n=2, model=BINARY)
    for shape in "single node", "chain", "wide", "deep":
        method = bound("medusa", heads=ToyHeads(4), tree=RANK_TREES[shape])
        yield ExactCase(f"medusa, {shape}", method, samplings)
    full = bound("medusa", heads=ToyHeads(4), tree=every_path(3, 63))
    yield ExactCase("medusa, 64 nodes", full, n=2)
    for name, tree in ("auto", ADAPTIVE_TREE), ("auto, probing", PROBING_TREE):
        yield ExactCase(f"medusa, {name}", bound("medusa", heads=ToyHeads(4), tree=tree))
    yield ExactCase("jacobi, block 3", bound("jacobi", block=3), samplings)
    long_toy = Toy(5, context=64)  # long enough for the widest window
    for w, n, g in LOOKAHEAD_SETTINGS:
        for pool in (False, True):
            method = bound("lookahead", window=w, ngram=n, guesses=g, pool_from_prompt=pool)
            name = f"lookahead W={w} N={n} G={g}{', pool from prompt' if pool else ''}"
            some = samplings if (w, n) == (3, 3) else samplings[:1]
            yield ExactCase(name, method, some, n=3 if n < 4 else 2, model=long_toy)
    model = small_model(4, vocab=3, layers=1)
    for method, name, options in head_options(model, 4):
        yield ExactCase(f"{method}, {name}", bound(method, **options), n=2, model=model)
    for name, options in hybrid_options(model, 4):
        for text, prompt in ("repeated", (1, 0, 1, 2, 1, 0, 1)), ("new", (1, 0, 2, 1, 0)):
            method = bound("hybrid", **options)
            yield ExactCase(f"hybrid, {name}, {text} text", method, n=2, model=model, prompt=prompt)
    method = medusa_compressed(model, 4, every_path(3, 16))
    yield ExactCase("medusa, compressed", method, n=2, model=model)


def chain_cases() -> Iterator[ExactCase]:
    """Yield cases for drafts by a model and by prompt lookup."""
    samplings = tuple(SAMPLINGS)
    for name, options, some, n in (
        ("k=1", {"k": 1}, samplings, 3),
        ("k=2", {"k": 2}, samplings[1:], 3),
        ("k=2, self", {"k": 2, "draft": Toy(5)}, samplings, 3),
        ("k=auto", {"k": ADAPTIVE_K}, samplings[1:], 3),
        ("k=auto, probing", {"k": PROBING_K}, samplings[1:], 3),
        ("k=2, greedy draft", {"k": 2, "draft_sampling": GREEDY}, samplings, 2),
        ("k=2, hot draft", {"k": 2, "draft_sampling": Sampling(2.0)}, samplings, 2),
    ):
        method = bound("speculative", **({"draft": OTHER} | options))
        yield ExactCase(f"speculative {name}", method, some, n)
    for name, options, n in (
        ("k=2, two tokens", {"k": 2}, 3),
        ("k=3, two tokens, greedy draft", {"k": 3, "draft_sampling": GREEDY}, 5),
        ("k=auto, two tokens", {"k": ADAPTIVE_K}, 3),
        ("k=auto, probing, two tokens", {"k": PROBING_K}, 4),
    ):
        method = bound("speculative", draft=OTHER_BINARY, **options)
        yield ExactCase(f"speculative {name}", method, n=n, model=BINARY)
    yield ExactCase("prompt-lookup", bound("prompt-lookup", k=2), samplings)
    yield ExactCase("prompt-lookup, probing", bound("prompt-lookup", k=PROBING_K), samplings)


# ---- cases for greedy decoding -------------------------------------------------------------------


def greedy_cases(model: Transformer, seed: int) -> Iterator[tuple[str, Method]]:
    """Yield (name, method) for every method: all options for seed 0, a subset for other seeds."""
    other = small_model(seed + 1000)
    yield "prompt-lookup", bound("prompt-lookup")
    yield "prompt-lookup, probing", bound("prompt-lookup", k=PROBING_K)
    for name, draft in ("random", other), ("self", model), ("always wrong", toys.negated(model)):
        for k in (1, 4, ADAPTIVE_K) if seed else (1, 2, 3, 5, 8, ADAPTIVE_K, PROBING_K):
            label = {ADAPTIVE_K: "auto", PROBING_K: "auto, probing"}.get(k, k)
            yield f"speculative, {name} draft, k={label}", bound("speculative", draft=draft, k=k)
    for shape in TREE_SHAPES:
        yield f"tree, {shape}", tree_method(model, shape, "one-hot")
    for block in (1, 4, 9):
        yield f"jacobi, block {block}", bound("jacobi", block=block)
    for i, (w, n, g) in enumerate(LOOKAHEAD_SETTINGS):
        method = bound("lookahead", window=w, ngram=n, guesses=g, pool_from_prompt=bool(seed % 2))
        if seed in (0, i % 3 + 1):
            yield f"lookahead, W={w} N={n} G={g}", method
    for i, (method, name, options) in enumerate(head_options(model, seed)):
        if seed in (0, i % 3 + 1):
            yield f"{method}, {name}", bound(method, **options)
    for name, options in hybrid_options(model, seed):
        yield f"hybrid, {name}", bound("hybrid", **options)
    heads = toys.random_medusa_heads(model, seed)
    for name, paths in RANK_TREES.items():
        yield f"medusa, {name}", bound("medusa", heads=heads, tree=paths)
    for name, tree in ("auto", ADAPTIVE_TREE), ("auto, probing", PROBING_TREE):
        yield f"medusa, {name}", bound("medusa", heads=heads, tree=tree)
    yield "medusa, compressed", medusa_compressed(model, seed, RANK_TREES["64 nodes"])
