"""The one rule of acceptance: every method is lossless through it, or not at all."""

from collections.abc import Sequence

from torch import Tensor

from minispec.sampling import Randomness
from minispec.tree import Tree


def accept(target: Sequence[Tensor], tree: Tree, randomness: Randomness) -> tuple[list[int], int]:
    """Walk down the tree as far as the target agrees; the path from node 0, and one fresh token.

    target[i] is the target's distribution (V,) after node i. Path and fresh token together are
    distributed as the target's own tokens, whatever was proposed: a child x drawn from q is
    accepted with probability min(1, p(x) / q(x)), and after a rejection p becomes norm(max(0, p -
    q)) (Leviathan et al. 2023, algorithm 1; for siblings SpecInfer, algorithm 2). The bonus token
    and the correction are one draw: from what p has become where the walk stops.
    """
    path = [0]
    while True:
        p = target[path[-1]]
        for child in tree.children(path[-1]):
            x, q = tree.tokens[child], tree.drawn_from(child)
            ratio = float(p[x]) / (1.0 if q is None else float(q[x]))
            accepted = randomness.bernoulli(min(1.0, ratio))
            # p = q up to rounding leaves nothing to draw from: as good as accepted
            rest = None if accepted else residual(p, q, x)
            if rest is None:
                path.append(child)
                break
            p = rest
        else:
            return path, randomness.categorical(p)


def residual(p: Tensor, q: Tensor | None, x: int) -> Tensor | None:
    """norm(max(0, p - q)), where q None is one-hot at x; None if nothing is left."""
    if q is None and p[x] == 0:
        return p  # there was nothing to take away: every rejection of greedy decoding
    rest = p.clone()
    if q is None:
        rest[x] = 0.0
    else:
        rest = (rest - q).clamp(min=0.0)
    total = rest.sum()
    return rest / total if total > 0 else None
