"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on the target's own hidden state guess several
tokens ahead, and one pass verifies a tree of their best candidates.

Head k = 0 … K - 1 is the paper's head k + 1: from the hidden state at t it guesses token t + k + 2.
The model's own lm_head says t + 1; the token drawn from that is the root of the next tree.
"""

import math
from collections.abc import Callable, Iterator
from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.cache import KVCache
from minispec.errors import UserError
from minispec.methods.vocabulary import DraftHead, FullVocabulary, Vocabulary
from minispec.model import Transformer
from minispec.sampling import OneHot, Randomness, Sampling, probs
from minispec.tree import RankPath, Step, Tree, TreePolicy
from minispec.verify import accept

RANKS = 10  # candidates of a head that a tree may choose from, as many as the published trees use
MOST_PATHS = 4096  # of a tree; a larger one never pays
UNSHARED = ("a vocabulary is for heads that end in the target's lm_head; these have projections of "
            "their own")  # fmt: skip
Rule = Callable[[Tensor | OneHot, Tree, Randomness], tuple[list[int], int]]

# ---- heads ---------------------------------------------------------------------------------------


class ResBlock(nn.Module):
    """x + SiLU(Wx + b); it begins as the identity."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """K heads of `layers` residual blocks and a projection each, under the published names.

    With `vocab_size` None the heads have no projections, and end in the target's lm_head. `tree`
    are the paths that `medusa` proposes by default, `accuracy` (K, RANKS) says how often a
    candidate of this rank was right (None: not measured).
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

    def forward(self, hidden: Tensor, words: Transformer | DraftHead) -> Tensor:
        """Logits (K, ..., V) of hidden states (..., d), which are the target's after its norm.
        `words` has the lm_head in which heads without projections end, or some of its rows."""
        outputs = torch.stack([head(hidden) for head in self])
        return words.logits(outputs) if self.shared else outputs


def untrained(heads: int, layers: int, model: Transformer, shared: bool) -> MedusaHeads:
    """Heads that all say what the model's lm_head says."""
    config = model.config
    new = MedusaHeads(heads, layers, config.hidden_size, None if shared else config.vocab_size)
    new = new.to(model.device, model.dtype)
    if not shared:
        for head in new:
            head[-1].weight.data.copy_(model.lm_head.weight)
    return new


# ---- decoding ------------------------------------------------------------------------------------


def medusa(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, heads: MedusaHeads, tree: list[RankPath] | TreePolicy | None = None,
    vocabulary: Vocabulary | None = None,
) -> Iterator[Step]:  # fmt: skip
    """Medusa with the lossless rule: greedy or sampled, the output is distributed as the target's.

    `tree` is a list of rank paths, none longer than there are heads, or a policy that chooses one
    for each round (see adaptive); by default the heads' own. Heads that end in the target's lm_head
    can take the `vocabulary` of the text's language in its place, as FastMTP does.
    """
    return rounds(model, prompt, sampling, randomness, cache, heads, tree, vocabulary, accept)


def medusa_typical(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, heads: MedusaHeads, tree: list[RankPath] | TreePolicy | None = None,
    vocabulary: Vocabulary | None = None, epsilon: float = 0.09, delta: float = 0.3,
) -> Iterator[Step]:  # fmt: skip
    """Medusa with typical acceptance: LOSSY, sampled output is not distributed as the target's.

    The token after the path is drawn from the target's distribution, where the paper takes the
    likeliest. (A greedy distribution has no entropy, so at temperature 0 the rule accepts what
    `accept` does.)
    """

    def rule(target: Tensor | OneHot, tree: Tree, randomness: Randomness) -> tuple[list[int], int]:
        path = typical_path(target, tree, epsilon, delta)
        return path, randomness.categorical(target[path[-1]])

    return rounds(model, prompt, sampling, randomness, cache, heads, tree, vocabulary, rule)


def rounds(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness,
    cache: KVCache | None, heads: MedusaHeads, tree: list[RankPath] | TreePolicy | None,
    vocabulary: Vocabulary | None, rule: Rule,
) -> Iterator[Step]:  # fmt: skip
    """The decoding loop of both, which differ in their `rule` of acceptance."""
    chosen = checked_tree(model, heads, tree, vocabulary)
    vocabulary = vocabulary or FullVocabulary(model)
    cache = cache or model.new_cache()
    tokens = list(prompt)
    # the cache holds every token but the newest, which is the root of the next tree
    hidden = model.prefill(tokens[cache.length : -1], cache)[0]  # (1, d), or (0, d)
    yield Step()  # the prefill, so that it can be timed apart
    while True:
        words = vocabulary.select(tokens)
        proposed = propose(heads, words, hidden, tokens[-1], chosen, cache.free_rows - 1)
        hidden = model(proposed.tokens, cache, proposed.depth, proposed.mask)[0]  # (nodes, d)
        path, fresh = rule(probs(model.logits(hidden), sampling), proposed, randomness)
        cache.commit(path)
        hidden = hidden[path[-1:]]  # the heads read the accepted node: no second target pass
        new = proposed.tokens_at(path[1:]) + [fresh]
        tokens += new
        yield Step(new, proposed, path)


def checked_tree(
    model: Transformer, heads: MedusaHeads, tree: list[RankPath] | TreePolicy | None,
    vocabulary: Vocabulary | None,
) -> list[RankPath] | TreePolicy:  # fmt: skip
    """The policy, or all paths of the tree (None: the heads' own). Raises UserError for a tree or a
    vocabulary that does not go with the heads."""
    if vocabulary and not heads.shared:
        raise UserError(UNSHARED)
    chosen = heads.tree if tree is None else tree
    if hasattr(chosen, "choose"):
        return chosen
    return complete(chosen, len(heads), model.config.vocab_size)


def propose(
    heads: MedusaHeads, words: DraftHead, hidden: Tensor, root: int,
    chosen: list[RankPath] | TreePolicy, free_rows: int,
) -> Tree:  # fmt: skip
    """The tree of the heads' candidates below the newest token, of at most `free_rows` nodes; the lone
    root where no hidden state is at hand, as before the first pass of a prompt of one token."""
    if not len(hidden) or not chosen:
        return Tree.chain(root, [])
    fixed = isinstance(chosen, list)
    ranks = 1 + max(rank for path in chosen for rank in path) if fixed else RANKS
    chances, candidates = best_candidates(heads, words, hidden[0], ranks)
    paths = chosen if fixed else chosen.choose(chances, free_rows)
    paths = [path for path in paths if max(path) < len(candidates[0])]  # there may be few words
    return Tree.from_paths(root, paths[:free_rows], candidates)


def best_candidates(
    heads: MedusaHeads, words: DraftHead, hidden: Tensor, ranks: int
) -> tuple[list[list[float]], list[list[int]]]:
    """Probabilities and tokens of each head's best candidates, both (K, ranks), after a hidden
    state (d,); of less than `ranks` if there are not as many words."""
    chances = heads(hidden, words).softmax(-1)
    best = chances.topk(min(ranks, chances.shape[-1]))
    # one synchronisation for both: float32 holds every token id exactly
    tokens = words.to_full_ids(best.indices)
    chances, tokens = torch.stack([best.values.float(), tokens.float()]).tolist()
    return chances, [[int(token) for token in row] for row in tokens]


def complete(paths: list[RankPath], depth: int, ranks: int) -> list[RankPath]:
    """The paths and all their prefixes, each once; checked against the number of heads (`depth`)
    and of candidates (`ranks`). In depth-first order the path of best ranks, (0, 0, …), comes
    first: when it is accepted, its rows of the cache need no move."""
    try:
        deepest = max(map(len, paths), default=0)
    except TypeError:
        raise UserError(f"the tree {paths!r}: must be paths of ranks, as [(0,), (0, 1)]") from None
    if len(paths) > MOST_PATHS:
        raise UserError(f"the tree has {len(paths)} paths: at most {MOST_PATHS} are supported")
    if deepest > depth:
        raise UserError(
            f"the tree is {deepest} deep, but there are only {depth} heads: cut its paths"
        )
    for rank in (rank for path in paths for rank in path):
        if not isinstance(rank, Integral) or not 0 <= rank < ranks:
            raise UserError(f"the tree's rank {rank!r}: must be an integer from 0 to {ranks - 1}")
    return sorted({tuple(map(int, path[:n])) for path in paths for n in range(1, len(path) + 1)})


def typical_path(target: Tensor | OneHot, tree: Tree, epsilon: float, delta: float) -> list[int]:
    """The longest path all of whose tokens have p(x) > min(ε, δ · exp(-H(p))); of several, the
    likeliest. Section 2.3.1 of the paper."""
    paths, likelihood = {0: [0]}, {0: 1.0}
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if parent not in paths:
            continue
        p = target[parent]
        chance, entropy = float(p[tree.tokens[node]]), float(torch.special.entr(p).sum())
        if chance > min(epsilon, delta * math.exp(-entropy)):
            paths[node] = paths[parent] + [node]
            likelihood[node] = likelihood[parent] * chance
    return max(paths.values(), key=lambda path: (len(path), likelihood[path[-1]]))
