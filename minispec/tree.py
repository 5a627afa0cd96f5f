"""The tree of tokens a round proposes. A chain is an unbranched tree; a lone root proposes
nothing.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from minispec.errors import UserError


@dataclass(frozen=True)
class Tree:
    """Node 0 is the root, the last token already emitted; parents come before their children.

    `draft_probs[i]` is the distribution (V,) that node i was drawn from, None for a deterministic
    (one-hot) proposal; an empty list: all are one-hot. Siblings are tried in the order of their
    numbers; one drawn without replacement carries the distribution renormalised without its earlier
    siblings.
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
        """The root followed by `guess`, each drawn from its entry of `draft_probs`."""
        probs = [None, *draft_probs] if draft_probs else []
        return cls([root, *guess], list(range(-1, len(guess))), probs)

    @classmethod
    def merged(cls, root: int, chains: list[list[int]]) -> "Tree":
        """The trie of all chains below the root: shared prefixes are stored once."""
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
        """The tree of rank paths: (0, 2) is the best candidate of depth 1, then the third best of
        depth 2. `candidates[k]` holds the tokens of depth k + 1, best first."""
        return cls.merged(
            root, [[candidates[depth][rank] for depth, rank in enumerate(path)] for path in paths]
        )

    def first(self, n: int) -> "Tree":
        """Its first `n` nodes: parents come first, so this is a tree."""
        if n >= len(self):
            return self
        return Tree(self.tokens[:n], self.parents[:n], self.draft_probs[:n])

    def __len__(self) -> int:
        return len(self.tokens)

    def drawn_from(self, node: int) -> Tensor | None:
        """The distribution (V,) that `node` was drawn from; None: one-hot."""
        return self.draft_probs[node] if self.draft_probs else None

    def children(self, node: int) -> list[int]:
        """In the order they are tried."""
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
        """Which nodes (columns) each node (row) sees: its ancestors and itself, (n, n)."""
        return layout(tuple(self.parents))[2]


@lru_cache(maxsize=256)  # asked for three times a round, and a fixed tree is the same in each
@torch.inference_mode(False)  # kept beyond a run
def layout(parents: tuple[int, ...]) -> tuple[list[int], Tensor, Tensor]:
    """Depths, as a list and a tensor, and the mask, of a tree; shared, so not to be changed."""
    depths: list[int] = []
    mask: list[list[bool]] = []
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        mask.append([False] * len(parents) if parent < 0 else mask[parent].copy())
        mask[node][node] = True
    return depths, torch.tensor(depths), torch.tensor(mask)


@dataclass(frozen=True)
class Step:
    """One round: the tokens it emitted, the tree it scored, the path it accepted.

    The first step of a method is its prefill: no tokens, no tree. `window` holds rows of guesses
    that the pass carried beside the tree (lookahead); nothing but a view reads it.
    """

    tokens: list[int] = field(default_factory=list)
    tree: Tree | None = None
    path: list[int] = field(default_factory=list)
    window: list[list[int]] = field(default_factory=list)


# ---- how much to draft ---------------------------------------------------------------------------

RankPath = tuple[int, ...]  # a path: (0, 2) is head 0's best token, then head 1's third best


class Policy(Protocol):
    """Chooses how many tokens to draft, from earlier rounds alone: choosing by what a round itself
    draws would bias the output."""

    def choose(self) -> int:
        """How many the next round should draft."""

    def observe(self, drafted: int, accepted: int) -> None:
        """What came of a round."""


@dataclass(frozen=True)
class Fixed:
    """The same number of drafts every round."""

    k: int

    def __post_init__(self):
        if self.k < 1:
            raise UserError(f"k {self.k}: must be auto or at least 1")

    def choose(self) -> int:
        return self.k

    def observe(self, drafted: int, accepted: int) -> None:
        pass


class TreePolicy(Protocol):
    """Chooses a tree by what Medusa's heads say before a round."""

    def choose(self, chances: list[list[float]], free_rows: int) -> list[RankPath]:
        """At most `free_rows` paths, each after all of its prefixes, for the probabilities (K, ranks) of
        each head's best candidates."""
