"""What is certified: every method, with options that reach into its corners."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from minispec.cache import KVCache
from minispec.checkpoints.heads import PUBLISHED
from minispec.generate import METHODS
from minispec.methods.adaptive import AdaptiveK, AdaptiveTree
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling, probs
from minispec.toys import (
    Method,
    Negated,
    Toy,
    ToyHeads,
    random_head,
    random_heads,
    small_model,
    switching,
)
from minispec.tree import RankPath, Step, Tree
from minispec.verify import accept

GREEDY = Sampling()
SAMPLINGS = {
    "T=1": Sampling(1.0),
    "T=0.7 top-k 2": Sampling(0.7, top_k=2),
    "T=1.5 top-p 0.8": Sampling(1.5, top_p=0.8),
    "greedy": GREEDY,
}


def bound(name: str, **options) -> Method:
    """A method with its own arguments given; looked up when called, so that mutants reach it."""
    return lambda *arguments, **more: METHODS[name](*arguments, **more, **afresh(options))


def afresh(options: dict) -> dict:
    """The options, with a policy as it was before it learnt anything: runs must not depend on
    those before them."""
    return {
        name: copy.deepcopy(value) if isinstance(value, AdaptiveK) else value
        for name, value in options.items()
    }


# Policies under invented costs, which soon change their minds: K begins at 2, falls to 1 when a
# draft is refused and rises to 3 when both are accepted; a tree has few nodes or many.
LENGTH = AdaptiveK([0.0, 1.0, 1.0, 1.205, 1.331, 1.42], draft=0.1, most=4)
BEST_TREE = AdaptiveTree([0.0, *(1 + n / 20 for n in range(17))], draft=0.2)

# ---- drafted trees of every kind -----------------------------------------------------------------

KINDS = ("one-hot", "with replacement", "without replacement")
SHAPES = {  # parents
    "root": [-1], "chain": [-1, 0, 1], "wide": [-1, 0, 0, 0], "deep": [-1, 0, 0, 1, 3],
    "bushy": [-1, 0, 0, 1, 1, 2],
}  # fmt: skip


def forest(
    model, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, draft, shape: list[int], kind: str,
) -> Iterator[Step]:  # fmt: skip
    """Decoding by drafted trees of any shape and proposal kind: a method for proofs, not speed."""
    cache = cache or model.new_cache()
    tokens = list(prompt)
    model.prefill(tokens[cache.length : -1], cache)
    yield Step()
    while True:
        tree = grow(draft, tokens, shape[: cache.free_rows], kind, sampling, randomness)
        hidden = model(tree.tokens, cache, tree.depth, tree.mask)
        path, fresh = accept(probs(model.logits(hidden[0]), sampling), tree, randomness)
        cache.commit(path)
        new = tree.tokens_at(path[1:]) + [fresh]
        tokens += new
        yield Step(new, tree, path)


def grow(
    draft, tokens: list[int], shape: list[int], kind: str, sampling: Sampling,
    randomness: Randomness,
) -> Tree:  # fmt: skip
    """A tree of this shape, each child drawn from what the draft says after its parent's path."""
    nodes, parents, draft_probs, paths = [tokens[-1]], [-1], [None], {0: []}
    left: dict[int, Tensor] = {}  # what the next child of a node is drawn from
    names = {0: 0}  # node of the shape -> node of the tree
    warm = Sampling(sampling.temperature or 1.0, sampling.top_k, sampling.top_p)
    for node, parent in enumerate(shape[1:], start=1):
        if parent not in names:
            continue
        at = names[parent]
        if at not in left:
            left[at] = probs(draft.logits(draft(tokens + paths[at])[0, -1:]), warm)[0]
        q = left[at]
        if q.sum() == 0:  # drawn without replacement, and nothing is left
            continue
        x = int(q.argmax()) if kind == "one-hot" else randomness.categorical(q)
        if kind != "with replacement":
            rest = q.clone()
            rest[x] = 0.0
            left[at] = rest / rest.sum() if rest.sum() > 0 else rest
        names[node] = len(nodes)
        paths[len(nodes)] = paths[at] + [x]
        nodes.append(x)
        parents.append(at)
        draft_probs.append(None if kind == "one-hot" else q)
    return Tree(nodes, parents, draft_probs)


def tree_method(draft, shape: str, kind: str) -> Method:
    return lambda *arguments, **more: forest(
        *arguments, **more, draft=draft, shape=SHAPES[shape], kind=kind
    )


# ---- options of the methods ----------------------------------------------------------------------

RANK_TREES = {
    "single node": [],
    "chain": [(0, 0, 0)],
    "wide": [(0,), (1,), (2,)],
    "deep": [(0, 0, 0, 0), (1, 1), (0, 1)],
    "64 nodes": PUBLISHED["mc_sim_7b_63"],
}
# lookahead's window, n-gram and guesses: the least of each, and more
WNG = (1, 2, 0), (1, 2, 1), (3, 2, 2), (1, 3, 2), (3, 3, 3), (2, 4, 1), (5, 4, 5), (10, 5, 10)


def every_path(ranks: int, nodes: int) -> list[RankPath]:
    """The first `nodes` paths over so many ranks, breadth first."""
    paths: list[RankPath] = [()]
    for at in range(nodes):
        paths += [paths[at] + (rank,) for rank in range(ranks)]
    return paths[1 : nodes + 1]


def mtp_options(model: Transformer, seed: int) -> Iterator[tuple[str, dict]]:
    """Every way to draft with a FastMTP head."""
    head, words, hot = random_head(model, seed), switching(model), Sampling(2.0)
    for k in (1, 2):
        yield f"k={k}, sampled drafts", {"head": head, "k": k}
    for k in range(1, 7):
        yield f"k={k}, argmax drafts", {"head": head, "k": k, "draft_sampling": GREEDY}
    compressed = {"head": head, "k": 2, "vocabulary": words}
    yield "k=2, compressed", compressed
    yield "k=2, hot drafts, compressed", compressed | {"draft_sampling": hot}
    yield "k=auto", {"head": head, "k": LENGTH}


def medusa_compressed(model: Transformer, seed: int, tree: list[RankPath]) -> Method:
    """Medusa heads over a vocabulary that switches; it may have fewer words than the tree ranks."""
    heads = random_heads(model, seed, shared=True)
    return bound("medusa", heads=heads, tree=tree, vocabulary=switching(model))


# ---- for proofs by enumeration -------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """One method on one toy, under some samplings, for the first `n` tokens: more than it drafts
    in a round, where that can be enumerated, or its bonus token is never seen."""

    name: str
    method: Method
    samplings: tuple[str, ...] = ("T=1",)
    n: int = 3
    model: Toy | Transformer = Toy(5)


def proofs() -> Iterator[Proof]:
    """Small enough to enumerate: over two tokens where trees are deep or chains long, else over
    three."""
    every, other, two, other_two = tuple(SAMPLINGS), Toy(77), Toy(5, vocab=2), Toy(77, vocab=2)
    yield Proof("autoregressive", bound("autoregressive"), every)
    yield from chain_proofs(every, other, two, other_two)
    for kind in KINDS:
        for shape in "root", "chain", "wide":
            yield Proof(f"tree, {shape}, {kind}", tree_method(other, shape, kind), every, n=2)
        for shape in "deep", "bushy":
            method = tree_method(other_two, shape, kind)
            yield Proof(f"tree, {shape}, {kind}", method, n=2, model=two)
    for shape in "single node", "chain", "wide", "deep":
        method = bound("medusa", heads=ToyHeads(4), tree=RANK_TREES[shape])
        yield Proof(f"medusa, {shape}", method, every)
    full = bound("medusa", heads=ToyHeads(4), tree=every_path(3, 63))
    yield Proof("medusa, 64 nodes", full, n=2)
    yield Proof("medusa, auto", bound("medusa", heads=ToyHeads(4), tree=BEST_TREE))
    yield Proof("jacobi, block 3", bound("jacobi", block=3), every)
    roomy = Toy(5, context=64)  # for the widest window
    for w, n, g in WNG:
        for pool in (False, True):
            method = bound("lookahead", window=w, ngram=n, guesses=g, pool_from_prompt=pool)
            name = f"lookahead W={w} N={n} G={g}{', pool from prompt' if pool else ''}"
            samplings = every if (w, n) == (3, 3) else every[:1]
            yield Proof(name, method, samplings, n=3 if n < 4 else 2, model=roomy)
    model = small_model(4, vocab=3, layers=1)
    for name, options in mtp_options(model, 4):
        yield Proof(f"fastmtp, {name}", bound("fastmtp", **options), n=2, model=model)
    method = medusa_compressed(model, 4, every_path(3, 16))
    yield Proof("medusa, compressed", method, n=2, model=model)


def chain_proofs(every: tuple[str, ...], other: Toy, two: Toy, other_two: Toy) -> Iterator[Proof]:
    """Drafts of a model, and of the text."""

    def speculative(draft: Toy = other, **options) -> Method:
        return bound("speculative", draft=draft, **options)

    yield Proof("speculative k=1", speculative(k=1), every)
    yield Proof("speculative k=2", speculative(k=2), every[1:])
    yield Proof("speculative k=2, two tokens", speculative(other_two, k=2), model=two)
    certain = speculative(other_two, k=3, draft_sampling=GREEDY)
    yield Proof("speculative k=3, two tokens, greedy draft", certain, n=5, model=two)
    yield Proof("speculative k=2, self", speculative(Toy(5), k=2), every)
    yield Proof("speculative k=auto", speculative(k=LENGTH), every[1:])
    yield Proof("speculative k=auto, two tokens", speculative(other_two, k=LENGTH), model=two)
    for label, sampling in ("greedy", GREEDY), ("hot", Sampling(2.0)):
        method = speculative(k=2, draft_sampling=sampling)
        yield Proof(f"speculative k=2, {label} draft", method, every, n=2)
    yield Proof("prompt-lookup", bound("prompt-lookup", k=2), every)


# ---- for greedy decoding -------------------------------------------------------------------------


def greedy_cases(model: Transformer, seed: int) -> Iterator[tuple[str, Method]]:
    """(name, method) of every method with every option, all for seed 0, else a part of them."""
    other = small_model(seed + 1000)
    yield "prompt-lookup", bound("prompt-lookup")
    drafts = (("random", other), ("self", model), ("always wrong", Negated(model)))
    for name, draft in drafts:
        for k in (1, 4, LENGTH) if seed else (1, 2, 3, 5, 8, LENGTH):
            label = "auto" if k is LENGTH else k
            yield f"speculative, {name} draft, k={label}", bound("speculative", draft=draft, k=k)
    for shape in SHAPES:
        yield f"tree, {shape}", tree_method(model, shape, "one-hot")
    for block in (1, 4, 9):
        yield f"jacobi, block {block}", bound("jacobi", block=block)
    for i, (w, n, g) in enumerate(WNG):
        method = bound("lookahead", window=w, ngram=n, guesses=g, pool_from_prompt=bool(seed % 2))
        if seed in (0, i % 3 + 1):
            yield f"lookahead, W={w} N={n} G={g}", method
    for i, (name, options) in enumerate(mtp_options(model, seed)):
        if seed in (0, i % 3 + 1):
            yield f"fastmtp, {name}", bound("fastmtp", **options)
    heads = random_heads(model, seed)
    for name, paths in RANK_TREES.items():
        yield f"medusa, {name}", bound("medusa", heads=heads, tree=paths)
    yield "medusa, auto", bound("medusa", heads=heads, tree=BEST_TREE)
    yield "medusa, compressed", medusa_compressed(model, seed, RANK_TREES["64 nodes"])
