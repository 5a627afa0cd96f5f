"""Assignment 2: the one rule of acceptance. Fill in the functions; see README.md."""

from collections.abc import Sequence

from torch import Tensor

from minispec.sampling import Randomness
from minispec.tree import Tree


def residual(p: Tensor, q: Tensor | None, x: int) -> Tensor | None:
    """norm(max(0, p - q)): what p becomes after the draft `x`, drawn from q, was rejected.

    p and q are distributions (V,); q None stands for the one that is one-hot at x. None if nothing
    is left to draw from. Neither p nor q may be changed.

    >>> p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.75, 0.0])
    >>> residual(p, q, 1).tolist()  # p - q is positive at token 0 only
    [1.0, 0.0, 0.0]
    >>> residual(p, None, 1).tolist()
    [1.0, 0.0, 0.0]
    """
    raise NotImplementedError


def accept(
    target: Sequence[Tensor], tree: Tree, randomness: Randomness
) -> tuple[list[int], int, dict[int, float]]:
    """Walk down the tree as far as the target agrees: the path from node 0, one fresh token and,
    for statistics, the chance of acceptance of each child that was tried. The chances are not
    graded: you may return the first two values only.

    target[i] is the target's distribution (V,) after node i. Children are tried in the order of
    `tree.children(i)`; child c holds token `tree.tokens[c]`, drawn from `tree.drawn_from(c)` (None:
    one-hot). The only random decisions are `randomness.bernoulli(probability) -> bool` and
    `randomness.categorical(probs) -> int`. Where no residual is left, the child counts as accepted.

    >>> says = OneHot([5, 2, 7], 10)  # after node 0, 1, 2
    >>> accept(says, Tree.chain(3, [5, 9]), Seeded())[:2]  # 5 is right, 9 is not
    ([0, 1], 2)
    """
    raise NotImplementedError
