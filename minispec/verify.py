"""The acceptance rule. Every method uses it, and losslessness depends on nothing else."""

from collections.abc import Sequence

from torch import Tensor

from minispec.sampling import Randomness
from minispec.tree import Tree


def accept(target: Sequence[Tensor], tree: Tree, randomness: Randomness) -> tuple[list[int], int]:
    """Accept a path down the tree. Returns the path, which starts at node 0, and the next token.

    target[i] is the target's distribution (V,) after node i. The accepted tokens and the next one
    are distributed as the target's own tokens, whatever was proposed: a child x drawn from q is
    accepted with probability min(1, p(x) / q(x)), and after a rejection p becomes
    norm(max(0, p - q)) (Leviathan et al. 2023, algorithm 1). The next token is the paper's t: the
    correction after a rejection, or the bonus token if all drafts were accepted. Either way it is
    drawn from what p has become.

    At temperature 0 p is one-hot, so a child is accepted if and only if it is the argmax. If q is
    one-hot (Medusa's candidates, n-grams), x is accepted with probability p(x). Siblings are tried
    in index order. SpecInfer's algorithm 2 shuffles them, but any order that is fixed before the
    draws is lossless.
    """
    path = [0]
    while True:
        p = target[path[-1]]
        for child in tree.children(path[-1]):
            x, q = tree.tokens[child], tree.drawn_from(child)
            ratio = float(p[x]) / (1.0 if q is None else float(q[x]))  # None: one-hot at x
            if randomness.bernoulli(min(1.0, ratio)):
                break
            rest = residual(p, q, x)
            if rest is None:  # p equals q up to rounding: nothing is left, so accept x
                break
            p = rest
        else:  # every child was rejected, or there is none
            return path, randomness.categorical(p)
        path.append(child)


def residual(p: Tensor, q: Tensor | None, x: int) -> Tensor | None:
    """norm(max(0, p - q)), where q = None means one-hot at x. Returns None if nothing is left."""
    if q is None and p[x] == 0:
        return p  # removing x changes nothing; every rejection in greedy decoding ends here
    rest = p.clone()
    if q is None:
        rest[x] = 0.0  # max(0, p(x) - 1)
    else:
        rest = (rest - q).clamp(min=0.0)
    total = rest.sum()
    return rest / total if total > 0 else None
