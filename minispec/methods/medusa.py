"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on the target's hidden state predict several
tokens ahead, and one pass verifies a tree of their best candidates.

Head k = 0 … K - 1 is the paper's head k + 1: at position t it predicts token t + k + 2. The
model's lm_head predicts token t + 1; the token drawn there is the root of the next tree.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.cache import KVCache
from minispec.cli import UserError
from minispec.methods.adaptive import Policy, likely_paths
from minispec.methods.declaration import Option, Paths, Words, head_weights, method
from minispec.methods.vocabulary import DraftHead, FullVocabulary, Subset, Vocabulary
from minispec.model import Transformer
from minispec.sampling import OneHot, Randomness, Sampling
from minispec.tree import RankPath, Step, Tree
from minispec.verify import Rule, accept

RANKS = 10  # candidates per head that a tree may choose from, as in the published trees
MAX_PATHS = 4096  # per tree; a larger tree never pays off
UNSHARED = ("a vocabulary works only with heads that share the target's lm_head; these have their "
            "own projections")  # fmt: skip
TREES = [  # to try
    {"tree": []}, {"tree": [(0, 0, 0)]}, {"tree": [(0,), (1,), (2,)]}, {"tree": "auto"},
    {"tree": [(0, 0, 0, 0), (1, 1), (0, 1)]}, {"tree": [(0, 0), (1,), (2, 1)], "vocabulary": "two"},
]  # fmt: skip
Epsilon = Annotated[float, Option("ε of typical acceptance", least=0)]
Delta = Annotated[float, Option("δ of typical acceptance", least=0)]

# ---- heads ---------------------------------------------------------------------------------------


class ResBlock(nn.Module):
    """x + SiLU(Wx + b), initialised to the identity."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """K heads, each of `layers` residual blocks and a projection. Tensors have the published names.

    If `vocab_size` is None, the heads have no projections and share the target's lm_head. `tree`
    holds the paths that `medusa` proposes by default. `accuracy` (K, RANKS) is how often each
    head's candidate of each rank was right (None: not measured).
    """

    def __init__(self, heads: int, layers: int, hidden_size: int, vocab_size: int | None):
        super().__init__()
        for _ in range(heads):
            head = nn.Sequential(*(ResBlock(hidden_size) for _ in range(layers)))
            if vocab_size is not None:
                head.append(nn.Linear(hidden_size, vocab_size, bias=False))
            self.append(head)
        self.layers, self.shared = layers, vocab_size is None
        self.tree: list[RankPath] = [(0,) * heads]
        self.accuracy: Tensor | None = None
        self.graphs = None  # see Transformer: a captured.HeadGraphs

    def forward(self, hidden: Tensor, draft_head: Transformer | DraftHead) -> Tensor:
        """The target's hidden states (..., d), after its final norm -> logits (K, ..., V). Heads
        without projections use `draft_head`: the target's lm_head, or some of its rows."""
        if self.graphs is None:
            return self.plain_pass(hidden, draft_head)
        return self.graphs.run(self.plain_pass, hidden, draft_head=draft_head)

    def plain_pass(self, hidden: Tensor, draft_head: Transformer | DraftHead) -> Tensor:
        """`forward` without CUDA graphs."""
        outputs = torch.stack([head(hidden) for head in self])
        return draft_head.logits(outputs) if self.shared else outputs

    def tree_tokens(
        self, hidden: Tensor, nodes: Tensor, draft_head: DraftHead, ranks: int
    ) -> Tensor:
        """The tokens (n,) of a tree for a hidden state (d,), on its device: `nodes` (2, n) holds
        the root's token, then each other node's head; and below them, each node's rank, which is
        less than `ranks`."""
        nodes = nodes.to(hidden.device)
        _, tokens = top_candidates(self.plain_pass(hidden, draft_head), draft_head, ranks)
        return torch.cat([nodes[0, :1], tokens[nodes[0, 1:], nodes[1, 1:]]])

    def vocabulary(self, model: Transformer, chosen: Vocabulary | None = None) -> Vocabulary:
        """Return the `chosen` vocabulary, by default all of the target's tokens. Raises UserError
        if the heads cannot draft from it."""
        if chosen and not self.shared:
            raise UserError(UNSHARED)
        return chosen or FullVocabulary(model)


Heads = Annotated[MedusaHeads, head_weights("medusa")]


def new_heads(heads: int, layers: int, model: Transformer, shared: bool) -> MedusaHeads:
    """New heads, each initialised to predict exactly what lm_head predicts."""
    config = model.config
    new = MedusaHeads(heads, layers, config.hidden_size, None if shared else config.vocab_size)
    new = new.to(model.device, model.dtype)
    if not shared:
        for head in new:
            head[-1].weight.data.copy_(model.lm_head.weight)
    return new


# ---- decoding ------------------------------------------------------------------------------------


def check_tree(model: Transformer, cache: KVCache, options: dict) -> None:
    checked_paths(model, options["heads"], options["tree"])


@method(
    "medusa", cases=TREES, bench=[{}, {"tree": "auto"}],
    waits={"tree=auto": (2, 2), "": (1, 1)}, checks=(check_tree,),
)  # fmt: skip
def medusa(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, heads: Heads, tree: Paths = None, vocabulary: Words = None,
    rule: Rule = accept,
) -> Iterator[Step]:  # fmt: skip
    """Lossless Medusa: greedy or sampled, the output is distributed as the target's.

    `tree` is a list of rank paths, none longer than the number of heads, or a policy that chooses a
    tree for each round (see adaptive); default: `heads.tree`. Heads that share the target's lm_head
    can draft from the `vocabulary` of the text's language, as in FastMTP.
    """
    paths, vocabulary = checked_paths(model, heads, tree), heads.vocabulary(model, vocabulary)
    policy = None if isinstance(paths, list) else paths
    cache = cache or model.new_cache()
    tokens = list(prompt)
    # the cache holds every token but the newest, which is the root of the next tree
    hidden = model.prefill(tokens[cache.length : -1], cache)[0]  # (1, d); (0, d) if nothing was fed
    yield Step()  # the prefill, so that it can be timed separately
    while True:
        draft_head, can_draft = vocabulary.select(tokens), len(hidden) > 0
        chosen = paths if policy is None or policy.drafting() else []  # []: the heads do not run
        proposed = propose(heads, draft_head, hidden, tokens[-1], chosen, cache.free_rows - 1)
        rows = proposed.tokens, cache, sampling, proposed.depth, proposed.mask
        drafts, hidden, p = model.score(*rows)  # hidden (nodes, d)
        proposed = replace(proposed, tokens=drafts)
        path, next_token, *asked = rule(p, proposed, randomness)
        cache.commit(path)
        hidden = hidden[path[-1] : path[-1] + 1]  # of the last accepted node: no second target pass
        if policy is not None and can_draft:  # without a hidden state the heads did not run
            policy.observe(drafted=len(proposed) - 1, accepted=len(path) - 1)
        new = proposed.tokens_at(path[1:]) + [next_token]
        tokens += new
        yield Step(new, proposed, path, *asked)


@method(
    "medusa-typical", lossless=False, bench=[], cases=TREES,
    waits={"tree=auto": (2, 2), "": (1, 1)}, checks=(check_tree,),
)  # fmt: skip
def medusa_typical(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, heads: Heads, tree: Paths = None, vocabulary: Words = None,
    epsilon: Epsilon = 0.09, delta: Delta = 0.3,
) -> Iterator[Step]:  # fmt: skip
    """Medusa with typical acceptance. LOSSY: sampled output is not distributed as the target's.

    The token after the path is drawn from the target's distribution; the paper takes the most
    likely token. (A greedy distribution has zero entropy, so at temperature 0 the rule accepts what
    `accept` accepts.)
    """

    def typical(target: Tensor | OneHot, tree: Tree, randomness: Randomness) -> tuple:
        path = typical_path(target, tree, epsilon, delta)
        return path, randomness.categorical(target[path[-1]])

    return medusa(
        model, prompt, sampling, randomness, cache=cache, heads=heads, tree=tree,
        vocabulary=vocabulary, rule=typical,
    )  # fmt: skip


def checked_paths(
    model: Transformer, heads: MedusaHeads, paths: list[RankPath] | Policy | None
) -> list[RankPath] | Policy:
    """Return the policy, or the paths (None: the heads' own) with all their prefixes. Raises
    UserError if they do not fit the heads."""
    if hasattr(paths, "choose"):
        return paths
    paths = heads.tree if paths is None else paths
    return with_prefixes(paths, len(heads), model.config.vocab_size)


def propose(
    heads: MedusaHeads, draft_head: DraftHead, hidden: Tensor, root: int,
    paths: list[RankPath] | Policy, free_rows: int,
) -> Tree:  # fmt: skip
    """The tree of the heads' candidates, at most `free_rows` nodes below the newest token. Only the
    root if there is no hidden state yet: in the first round, if the prefill had nothing to feed."""
    if not len(hidden) or not paths:
        return Tree.chain(root, [])
    fixed = isinstance(paths, list)
    if fixed and hidden.device.type != "cpu":
        return propose_on_device(heads, draft_head, hidden[0], root, paths, free_rows)
    ranks = 1 + max(rank for path in paths for rank in path) if fixed else RANKS
    candidate_probs, candidates = best_candidates(heads, draft_head, hidden[0], ranks)
    paths = paths if fixed else likely_paths(candidate_probs, paths, free_rows)
    paths = [path for path in paths if max(path) < len(candidates[0])]  # if the vocabulary is small
    return Tree.from_paths(root, paths[:free_rows], candidates)


def propose_on_device(
    heads: MedusaHeads, draft_head: DraftHead, hidden: Tensor, root: int, paths: list[RankPath],
    free_rows: int,
) -> Tree:  # fmt: skip
    """`propose` for a fixed tree and a hidden state (d,) on a device, without waiting for it: the
    tree's tokens are a tensor there."""
    most = len(draft_head) if isinstance(draft_head, Subset) else math.inf
    shape = Tree.merged(0, [path for path in paths if max(path) < most][:free_rows])  # of ranks
    nodes = torch.tensor([[root, *(depth - 1 for depth in shape.depths[1:])], shape.tokens])
    run, ranks = heads.tree_tokens, 1 + max(shape.tokens)
    if heads.graphs is not None:
        run = partial(heads.graphs.run, run)
    return Tree(run(hidden, nodes, draft_head=draft_head, ranks=ranks), shape.parents)


def best_candidates(
    heads: MedusaHeads, draft_head: DraftHead, hidden: Tensor, ranks: int
) -> tuple[list[list[float]], list[list[int]]]:
    """Probabilities and tokens of each head's best candidates for a hidden state (d,), both
    (K, ranks), or fewer columns if the vocabulary is smaller."""
    best = top_candidates(heads(hidden, draft_head), draft_head, ranks)
    # one synchronisation for both; float32 represents every token id exactly
    candidate_probs, tokens = torch.stack([x.float() for x in best]).tolist()
    return candidate_probs, [[int(token) for token in row] for row in tokens]


def top_candidates(logits: Tensor, draft_head: DraftHead, ranks: int) -> tuple[Tensor, Tensor]:
    """`best_candidates` on the device, from the logits (K, V) of the heads."""
    distributions = logits.softmax(-1)
    best = distributions.topk(min(ranks, distributions.shape[-1]))
    return best.values, draft_head.to_full_ids(best.indices)


def with_prefixes(paths: list[RankPath], depth: int, ranks: int) -> list[RankPath]:
    """The paths and all their prefixes, without duplicates, checked against the number of heads
    (`depth`) and of candidates (`ranks`). In depth-first order the path of best ranks, (0, 0, …),
    comes first: if it is accepted, its cache rows need not move."""
    try:
        deepest = max(map(len, paths), default=0)
    except TypeError:
        raise UserError(f"the tree {paths!r}: must be rank paths, such as [(0,), (0, 1)]") from None
    if len(paths) > MAX_PATHS:
        raise UserError(f"the tree has {len(paths)} paths: at most {MAX_PATHS} are supported")
    if deepest > depth:
        raise UserError(
            f"the tree is {deepest} deep, but there are only {depth} heads; shorten its paths"
        )
    for rank in (rank for path in paths for rank in path):
        if not isinstance(rank, Integral) or not 0 <= rank < ranks:
            raise UserError(f"the tree's rank {rank!r}: must be an integer from 0 to {ranks - 1}")
    return sorted({tuple(map(int, path[:n])) for path in paths for n in range(1, len(path) + 1)})


def typical_path(target: Tensor | OneHot, tree: Tree, epsilon: float, delta: float) -> list[int]:
    """The longest path on which every token has p(x) > min(ε, δ · exp(-H(p))); the most likely one
    if there are several. Section 2.3.1 of the paper."""
    paths, likelihood = {0: [0]}, {0: 1.0}
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if parent not in paths:
            continue
        p = target[parent]
        prob, entropy = float(p[tree.tokens[node]]), float(torch.special.entr(p).sum())
        if prob > min(epsilon, delta * math.exp(-entropy)):
            paths[node] = paths[parent] + [node]
            likelihood[node] = likelihood[parent] * prob
    return max(paths.values(), key=lambda path: (len(path), likelihood[path[-1]]))
