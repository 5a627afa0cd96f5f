"""Assignment 2: the one rule of acceptance. Fill in the functions; see README.md."""

from collections.abc import Sequence

from torch import Tensor

from minispec.sampling import Randomness
from minispec.tree import Tree


def residual(p: Tensor, q: Tensor | None, x: int) -> Tensor | None:
    """norm(max(0, p - q)): what p becomes after the draft `x`, drawn from q, was rejected.

    p and q are laws (V,); q None stands for the law that is one-hot at x. None if nothing is left
    to draw from. Neither p nor q may be changed.
    """
    raise NotImplementedError


def accept(target: Sequence[Tensor], tree: Tree, randomness: Randomness) -> tuple[list[int], int]:
    """Walk down the tree as far as the target agrees: the path from node 0, and one fresh token.

    target[i] is the target's law (V,) after node i. `tree.children(i)` are tried in their order;
    child c holds token `tree.tokens[c]`, drawn from `tree.law(c)` (None: one-hot). The only random
    decisions are `randomness.bernoulli(probability) -> bool` and
    `randomness.categorical(law) -> int`. Where no residual is left, the child counts as accepted.
    """
    raise NotImplementedError
