"""The cases to certify: every method, with options that cover its edge cases."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from inspect import Parameter

import torch
from torch import Tensor

from minispec import verify
from minispec.cache import KVCache
from minispec.certify import toys
from minispec.certify.common import GREEDY
from minispec.certify.toys import Method, Toy, ToyHeads, small_model
from minispec.checkpoints.heads import PUBLISHED_TREES
from minispec.methods import METHODS, find_method
from minispec.methods.adaptive import Adaptive, AdaptiveK, AdaptiveNodes, AdaptiveTree
from minispec.methods.declaration import Draft, Option, method
from minispec.methods.declaration import Method as Declared
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling, Seeded, probs
from minispec.tree import RankPath, Step, Tree
from minispec.verify import Rule, accept

SAMPLINGS = {
    "T=1": Sampling(1.0),
    "T=0.7 top-k 2": Sampling(0.7, top_k=2),
    "T=1.5 top-p 0.8": Sampling(1.5, top_p=0.8),
    "greedy": GREEDY,
}


def bound(name: str | Callable, **options) -> Method:
    """Bind a method's own arguments. The method and `accept` are looked up at call time, so mutants
    apply."""

    def call(*arguments, **more) -> Iterator[Step]:
        method, rule = METHODS.get(name, name), {}
        if accept is not verify.accept and "rule" in inspect.signature(method).parameters:
            rule = {"rule": accept}
        return method(*arguments, **more, **rule | fresh_options(options))

    return call


def fresh_options(options: dict) -> dict:
    """Copy the options and reset adaptive policies, so that no run depends on earlier ones."""
    return {k: copy.deepcopy(x) if isinstance(x, Adaptive) else x for k, x in options.items()}


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


@method("tree", cases=[{"shape": s, "kind": k} for k in PROPOSAL_KINDS for s in TREE_SHAPES])
def forest(
    model, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, draft: Draft, shape: str, kind: str, rule: Rule = accept,
) -> Iterator[Step]:  # fmt: skip
    """Decode with draft trees of any shape and proposal kind; a method for proofs, not speed."""
    cache = cache or model.new_cache()
    tokens = list(prompt)
    model.prefill(tokens[cache.length : -1], cache)
    yield Step()
    while True:
        parents = TREE_SHAPES[shape][: cache.free_rows]
        tree = grow(draft, tokens, parents, kind, sampling, randomness)
        hidden = model(tree.tokens, cache, tree.depth, tree.mask)
        p = probs(model.logits(hidden[0]), sampling)
        path, next_token, *asked = rule(p, tree, randomness)
        cache.commit(path)
        new = tree.tokens_at(path[1:]) + [next_token]
        tokens += new
        yield Step(new, tree, path, *asked)


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
    return bound(forest, draft=draft, shape=shape, kind=kind)


# ---- the cases of a method -----------------------------------------------------------------------

RANK_TREES = {  # for lessons and tests
    "single node": [],
    "chain": [(0, 0, 0)],
    "wide": [(0,), (1,), (2,)],
    "deep": [(0, 0, 0, 0), (1, 1), (0, 1)],
    "64 nodes": PUBLISHED_TREES["mc_sim_7b_63"],
}
POLICIES = {  # what "auto" stands for in a case, by what the policy chooses
    "auto": {"drafts": ADAPTIVE_K, "copies": ADAPTIVE_K, "nodes": ADAPTIVE_NODES,
             "paths": ADAPTIVE_TREE},
    "auto, probing": {"drafts": PROBING_K, "copies": PROBING_K, "nodes": PROBING_NODES,
                      "paths": PROBING_TREE},
}  # fmt: skip
Target = Toy | Transformer


def every_path(ranks: int, nodes: int) -> list[RankPath]:
    """List the first `nodes` paths over `ranks` ranks, breadth first."""
    paths: list[RankPath] = [()]
    for at in range(nodes):
        paths += [paths[at] + (rank,) for rank in range(ranks)]
    return paths[1 : nodes + 1]


def runs_on_toys(method: Declared, case: dict) -> bool:
    """Whether a case needs no hidden states or weights of the target, as only a Transformer has."""
    folders = {option.folder for option in method.of_kind("weights").values()}
    return "vocabulary" not in case and folders <= {"draft", "medusa"}


def drafter_for(folder: str, model: Target, seed: int) -> object:
    """A random draft or heads. Drafts are another model, the target itself, or always wrong."""
    toy, vocab = isinstance(model, Toy), model.config.vocab_size
    if folder == "draft":
        if toy:
            return Toy(77, vocab=vocab)
        makers = lambda: small_model(seed + 1000, vocab, layers=1), lambda: model, lambda: (
            toys.negated(model))  # fmt: skip
        return makers[seed % 3]() if seed < 3 else makers[0]()
    if folder == "medusa":
        return ToyHeads(4) if toy else toys.random_medusa_heads(model, seed, shared=True)
    return {"mtp": toys.random_mtp_head, "eagle3": toys.random_eagle3_head}[folder](model, seed)


def cases_of(method: Declared, model: Target, seed: int) -> Iterator[tuple[str, dict]]:
    """Yield the name and the options of each of a method's cases that this target can run, with
    what the method drafts with. Each "auto" is tried with two kinds of policies."""
    for case in method.cases:
        if isinstance(model, Toy) and not runs_on_toys(method, case):
            continue
        kinds = POLICIES if "auto" in [x for x in case.values() if isinstance(x, str)] else [""]
        for kind in kinds:
            options = {name: option_for(method, name, value, kind, model, seed)
                       for name, value in case.items()}  # fmt: skip
            weights = {n: o.folder for n, o in method.of_kind("weights").items()}
            if not any(name in case for name in weights):
                needed = [n for n in weights if method.options[n][1] is Parameter.empty]
                for name in needed or list(weights)[:1]:
                    options[name] = drafter_for(weights[name], model, seed)
            yield f"{method.name} {case_name(case, kind)}".strip(), options


def option_for(
    method: Declared, name: str, value: object, kind: str, model: Target, seed: int
) -> object:
    """The value of an option in a case: what "auto", "two" languages, an "other" draft or an
    "eagle3" head stand for, or the value itself."""
    option = method.options.get(name, (Option(), None))[0]
    if isinstance(value, str) and value == "auto":
        return POLICIES[kind][option.auto]
    if option.kind == "vocabulary":
        return toys.two_languages(model)
    if option.kind == "weights":
        return drafter_for({"other": "draft"}.get(value, value), model, seed)
    return value


def case_name(case: dict, kind: str) -> str:
    def text(name: str, value: object) -> str:
        if isinstance(value, Sampling):
            return f"draft T={value.temperature:g}"
        if callable(value):
            return value.__name__.removeprefix("accept_")
        if name in ("shape", "kind", "draft", "head"):
            return f"{name} {value}" if name in ("draft", "head") else value
        if isinstance(value, list):
            return f"{name} {'/'.join(''.join(map(str, path)) for path in value) or 'empty'}"
        return f"{name}={kind if value == 'auto' else value}"

    return ", ".join(text(name, value) for name, value in case.items())


def lossless_methods() -> list[Declared]:
    """The methods of the package that promise to be lossless, and the trees of this module."""
    methods = [find_method(name) for name in METHODS]
    return [*(m for m in methods if m.lossless and m.name != "autoregressive"), find_method(forest)]


# ---- cases for proofs by enumeration -------------------------------------------------------------


@dataclass(frozen=True)
class ExactCase:
    """One method on one toy model, under some samplings, for the first `n` tokens."""

    name: str
    method: Method
    samplings: tuple[str, ...] = ("T=1",)
    n: int = 3
    model: Target = Toy(5)
    prompt: tuple[int, ...] = (1, 0, 1, 1, 0)


REPEATED = 1, 0, 1, 0, 1, 0  # a text in which the latest three tokens have occurred before


def exact_cases(methods: list[Declared] | None = None) -> Iterator[ExactCase]:
    """Yield cases small enough to enumerate: over three tokens or, if several drafts are sampled at
    once, over two. If possible, as many tokens are enumerated as a round can bring, so that the
    bonus token is covered."""
    yield ExactCase("autoregressive", bound("autoregressive"), tuple(SAMPLINGS))
    for each in lossless_methods() if methods is None else methods:
        for toy in True, False:
            targets = target(toy, 3), target(toy, 2)
            for over_three, over_two in zip(*(cases_of(each, model, 4) for model in targets)):
                if not toy and runs_on_toys(each, over_three[1]):
                    continue
                pairs = zip((over_three, over_two), targets)
                pair = [ExactCase(name, bound(each.function, **options), model=model)
                        for (name, options), model in pairs]  # fmt: skip
                yield smaller(*pair)
                if any(option.auto == "copies" for option, _ in each.options.values()):
                    name = f"{over_three[0]}, repeated text"
                    yield smaller(*(replace(c, name=name, prompt=REPEATED) for c in pair))


def smaller(over_three: ExactCase, over_two: ExactCase) -> ExactCase:
    """The case over three tokens or, if it samples three drafts at once, over two; with a number of
    tokens that a run of 15 rounds suggests, but only two if it samples trees."""
    run = over_three.method(over_three.model, [*over_three.prompt], Sampling(1.0), Seeded(3))
    trees = [step.tree for step, _ in zip(run, range(16)) if step.tree]
    depth, nodes = max([1, *(max(t.depths) for t in trees)]), max(map(len, trees))
    sampled = any(q is not None for tree in trees for q in tree.draft_probs)
    toy = isinstance(over_three.model, Toy)
    samplings = tuple(SAMPLINGS) if toy and depth < 3 else ("T=1",)
    case = over_two if sampled and nodes > 3 else over_three
    most = 3 if sampled or not toy else 4
    if sampled and not toy and not all(tree.is_chain for tree in trees):
        most = 2
    return replace(case, n=min(depth + 1, most), samplings=samplings)


@functools.cache
def target(toy: bool, vocab: int) -> Target:
    return Toy(5, vocab, context=64) if toy else small_model(4, vocab, layers=1)


# ---- cases for greedy decoding -------------------------------------------------------------------


def greedy_cases(
    model: Transformer, seed: int, methods: list[Declared] | None = None
) -> Iterator[tuple[str, Method]]:
    """Yield (name, method) for every case of every method."""
    for each in lossless_methods() if methods is None else methods:
        for name, options in cases_of(each, model, seed):
            yield name, bound(each.function, **options)
