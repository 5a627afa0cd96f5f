"""The tree of tokens that a round proposes. A chain is an unbranched tree; a root without children
proposes nothing.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

RankPath = tuple[int, ...]  # (0, 2) is head 0's best token, then head 1's third best


@dataclass(frozen=True)
class Tree:
    """Node 0 is the root, the last token already emitted; parents come before their children.

    `draft_probs[i]` is the distribution (V,) that node i was drawn from, or None for a
    deterministic (one-hot) proposal; an empty list means that all are one-hot. In the rounds that a
    run has kept it is {x: q(x)}, with the node's own token x only. Siblings are tried in index
    order. If they were drawn without replacement, each has the distribution renormalised without
    its earlier siblings.
    """

    tokens: list[int]  # until they are scored, they may be a tensor (n,) on a device
    parents: list[int]  # -1 for the root
    draft_probs: list[Tensor | None] = field(default_factory=list)

    def __post_init__(self):
        assert self.parents[0] == -1 and all(0 <= p < i for i, p in enumerate(self.parents) if i)
        assert len(self.tokens) == len(self.parents)
        assert len(self.draft_probs) in (0, len(self.tokens))

    @classmethod
    def chain(
        cls, root: int, guess: list[int], draft_probs: list[Tensor | None] | None = None
    ) -> "Tree":
        """The root followed by `guess`, each token drawn from its entry in `draft_probs`."""
        probs = [None, *draft_probs] if draft_probs else []
        return cls([root, *guess], list(range(-1, len(guess))), probs)

    @classmethod
    def merged(cls, root: int, chains: list[list[int]]) -> "Tree":
        """The trie of all chains below the root; shared prefixes are stored once."""
        tokens, parents = [root], [-1]
        child: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        for chain in chains:
            node = 0
            for token in chain:
                if (node, token) not in child:
                    child[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = child[node, token]
        return cls(tokens, parents)

    @classmethod
    def from_paths(cls, root: int, paths: list[list[int]], candidates: list[list[int]]) -> "Tree":
        """The tree of these rank paths: (0, 2) is the best candidate at depth 1, then the third
        best at depth 2. `candidates[k]` holds the tokens for depth k + 1, best first."""
        return cls.merged(
            root, [[candidates[depth][rank] for depth, rank in enumerate(path)] for path in paths]
        )

    def first(self, n: int) -> "Tree":
        """The first `n` nodes. Parents come before children, so these form a tree."""
        if n >= len(self):
            return self
        return Tree(self.tokens[:n], self.parents[:n], self.draft_probs[:n])

    def __len__(self) -> int:
        return len(self.tokens)

    def drawn_from(self, node: int) -> Tensor | None:
        """The distribution (V,) that `node` was drawn from; None means one-hot."""
        return self.draft_probs[node] if self.draft_probs else None

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self) - 1))

    def children(self, node: int) -> list[int]:
        """The children of `node`, in the order in which they are tried."""
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def nodes_along(self, tokens: list[int]) -> list[int]:
        """The nodes below the root that hold these tokens, one below the other, as far as there are
        any."""
        nodes = [0]
        for token in tokens:
            found = [i for i in self.children(nodes[-1]) if self.tokens[i] == token]
            if not found:
                break
            nodes += found[:1]
        return nodes[1:]

    def tokens_at(self, path: list[int]) -> list[int]:
        return [self.tokens[i] for i in path]

    @property
    def depths(self) -> list[int]:
        return layout(tuple(self.parents))[0]

    @property
    def depth(self) -> Tensor:
        """Distance of each node from the root, (n,)."""
        return layout(tuple(self.parents))[1]

    @property
    def mask(self) -> Tensor:
        """Attention mask (n, n): each node (row) attends to its ancestors and itself (columns)."""
        return layout(tuple(self.parents))[2]


@lru_cache(maxsize=32)  # called three times per round, often with the same tree in every round
@torch.inference_mode(False)  # the cached tensors outlive a run
def layout(parents: tuple[int, ...]) -> tuple[list[int], Tensor, Tensor]:
    """A tree's depths, as a list and as a tensor, and its mask. Shared, so do not modify them."""
    depths: list[int] = []
    mask: list[list[bool]] = []
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        mask.append([False] * len(parents) if parent < 0 else mask[parent].copy())
        mask[node][node] = True
    return depths, torch.tensor(depths), torch.tensor(mask)


@dataclass(frozen=True)
class Step:
    """One round: the tokens it emitted, the tree it scored, the path it accepted, and the `chances`
    of acceptance that the rule gave to the nodes it tried.

    The first step of a method is its prefill, with no tokens and no tree. `window` holds the rows
    of guesses that lookahead scored in the same pass as the tree; only the view reads it.
    """

    tokens: list[int] = field(default_factory=list)
    tree: Tree | None = None
    path: list[int] = field(default_factory=list)
    chances: dict[int, float] = field(default_factory=dict)
    window: list[list[int]] = field(default_factory=list)
