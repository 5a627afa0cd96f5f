"""The tree of tokens that a round proposes. A chain is an unbranched tree; a root without children
proposes nothing.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from minispec.cli import UserError


@dataclass(frozen=True)
class Tree:
    """Node 0 is the root, the last token already emitted; parents come before their children.

    `draft_probs[i]` is the distribution (V,) that node i was drawn from, or None for a
    deterministic (one-hot) proposal; an empty list means that all are one-hot. In the rounds that a
    run has kept it is {x: q(x)}, with the node's own token x only. Siblings are tried in index
    order. If they were drawn without replacement, each has the distribution renormalised without
    its earlier siblings.
    """

    tokens: list[int]
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

    def children(self, node: int) -> list[int]:
        """The children of `node`, in the order in which they are tried."""
        return [i for i, parent in enumerate(self.parents) if parent == node]

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


# ---- how much to draft ---------------------------------------------------------------------------

RankPath = tuple[int, ...]  # (0, 2) is head 0's best token, then head 1's third best


class Policy(Protocol):
    """Chooses how many tokens to draft, based only on earlier rounds. A choice that depended on the
    round's own draws would bias the output."""

    def choose(self) -> int:
        """Return the number of tokens to draft in the next round; 0 is a plain step."""

    def observe(self, drafted: int, accepted: int) -> None:
        """Record the outcome of a round."""


@dataclass(frozen=True)
class FixedK:
    """Drafts the same number of tokens in every round."""

    k: int

    def __post_init__(self):
        if self.k < 1:
            raise UserError(f"k {self.k}: must be auto or at least 1")

    def choose(self) -> int:
        return self.k

    def observe(self, drafted: int, accepted: int) -> None:
        pass


class NodePolicy(Protocol):
    """Chooses the tree that a FastMTP head drafts in a round. It may use the head's probabilities,
    which follow from the text, but nothing that is drawn. The head's probabilities times
    `calibration` are those of acceptance.

    A round calls `expand`, if the head has anything to read; if it drafts, `width` for one level
    after the other, or `static_shape`; then `choose` and `observe`."""

    calibration: float

    def expand(self, chain: list[float]) -> bool:
        """Return whether the head drafts in this round. `chain` holds the values of other drafts,
        which will be among the candidates."""

    def width(self, level: int, values: Tensor) -> int:
        """Return how many candidates of this level, counted from 1, the head reads for the next:
        those of highest value. 0 ends the expansion."""

    def static_shape(self) -> tuple[int, int]:
        """Return the width and depth of an expansion that must be the same in every round."""

    def choose(self, values: list[float], free_rows: int) -> int:
        """Return how many candidates to keep, at most `free_rows`: those of highest value."""

    def observe(self, drafted: int, accepted: int) -> None:
        """Record the outcome of a round."""


@dataclass
class FixedShape:
    """Expands `depth` levels in every round, the first with one row, the others with `n`."""

    n: int
    depth: int
    calibration = 1.0

    def expand(self, chain: list[float]) -> bool:
        return True

    def width(self, level: int, values: Tensor) -> int:
        return self.n if level < self.depth else 0

    def static_shape(self) -> tuple[int, int]:
        return self.n, self.depth

    def choose(self, values: list[float], free_rows: int) -> int:
        return min(free_rows, len(values))

    def observe(self, drafted: int, accepted: int) -> None:
        pass


class FixedNodes(FixedShape):
    """Keeps `nodes` candidates in every round. Width and depth of the expansion grow with their
    number: from 4 × 4 for 4 nodes to 10 × 8 for 60."""

    def __init__(self, nodes: int):
        if nodes < 1:
            raise UserError(f"tree {nodes}: must be auto or at least 1 node")
        depth = min(nodes, round(math.log2(nodes)) + 2)
        super().__init__(max(4, round(1.3 * math.sqrt(nodes))), depth)
        self.nodes = nodes

    def choose(self, values: list[float], free_rows: int) -> int:
        return min(self.nodes, super().choose(values, free_rows))


def node_policy(tree: int | NodePolicy) -> NodePolicy | None:
    """The policy for a number of nodes, or a given one; None for 0, which stands for no tree."""
    return tree if hasattr(tree, "choose") else FixedNodes(tree) if tree else None


class TreePolicy(Protocol):
    """Chooses the tree of a round from the predictions of Medusa's heads. Like a Policy, it knows
    only what precedes the round."""

    def drafting(self) -> bool:
        """Return whether the next round drafts. If not, it is a plain step without the heads."""

    def choose(self, probs: list[list[float]], free_rows: int) -> list[RankPath]:
        """Return at most `free_rows` paths, each after all of its prefixes. `probs` (K, ranks)
        holds the probabilities of each head's best candidates."""

    def observe(self, drafted: int, accepted: int) -> None:
        """Record the outcome of a round: the nodes below the root, and how many were accepted. Not
        called after a round in which the heads had no hidden state to read."""
