"""The acceptance rules. Every method uses one, and losslessness depends on nothing else."""

from collections.abc import Callable, Sequence

from torch import Tensor

from minispec.sampling import Randomness
from minispec.tree import Tree

# rule(target, tree, randomness): target[i] is the target's distribution (V,) after node i. Returns
# the accepted path, which starts at node 0, the next token and, for statistics and the page, the
# chance of acceptance that each draft had which was tried (a rule may leave this out)
Rule = Callable[[Sequence[Tensor], Tree, Randomness], tuple[list[int], int, dict[int, float]]]


def accept(
    target: Sequence[Tensor], tree: Tree, randomness: Randomness
) -> tuple[list[int], int, dict[int, float]]:
    """Accept a path down the tree: the default rule.

    The accepted tokens and the next one are distributed as the target's own tokens, whatever was
    proposed: a child x drawn from q is accepted with probability min(1, p(x) / q(x)), and after a
    rejection p becomes norm(max(0, p - q)) (Leviathan et al. 2023, algorithm 1). The next token is
    the paper's t: the correction after a rejection, or the bonus token if all drafts were accepted.
    Either way it is drawn from what p has become.

    At temperature 0 p is one-hot, so a child is accepted if and only if it is the argmax. If q is
    one-hot (Medusa's candidates, n-grams), x is accepted with probability p(x). Siblings are tried
    in index order. SpecInfer's algorithm 2 shuffles them, but any order that is fixed before the
    draws is lossless.
    """
    path, chances = [0], {}
    while True:
        p = target[path[-1]]
        for child in tree.children(path[-1]):
            x, q = tree.tokens[child], tree.drawn_from(child)
            ratio = float(p[x]) / (1.0 if q is None else float(q[x]))  # None: one-hot at x
            chances[child] = min(1.0, ratio)
            if randomness.bernoulli(chances[child]):
                break
            rest = residual(p, q, x)
            if rest is None:  # p equals q up to rounding: nothing is left, so accept x
                break
            p = rest
        else:  # every child was rejected, or there is none
            return path, randomness.categorical(p), chances
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


def accept_block(
    target: Sequence[Tensor], tree: Tree, randomness: Randomness
) -> tuple[list[int], int, dict[int, float]]:
    """Block verification of a chain of sampled drafts (Sun et al. 2024, arXiv 2403.10444, algorithm
    2). It judges all drafts together, is as lossless as `accept` and keeps more drafts on average.

    The first i drafts weigh w_i = min(1, w_{i-1} p(x_i) / q(x_i)). They are accepted with
    probability r / (r + 1 - w_i), where r is the sum of max(0, w_i p - q), with p and q after draft
    i; all of them with w_n. Then the next token is drawn from norm(max(0, w_i p - q)), or from p if
    all were accepted. The longest block is tried first, as it would win over shorter ones. Chains
    of one-hot drafts, for which both rules accept alike, and trees are left to `accept`.
    """
    n, qs = len(tree) - 1, [tree.drawn_from(i) for i in range(1, len(tree))]
    if any(q is None for q in qs) or tree.depths[-1] < n:
        return accept(target, tree, randomness)
    weights = [1.0]
    for p, q, x in zip(target, qs, tree.tokens[1:]):
        weights.append(min(1.0, weights[-1] * float(p[x]) / float(q[x])))
    chances = {n: weights[n]} if n else {}
    rests = [target[n]]  # after n drafts, after n - 1, …
    for i in reversed(range(n)):
        rests.append((weights[i] * target[i] - qs[i]).clamp(min=0.0))
        total = float(rests[-1].sum())
        if i:
            chances[i] = total / (total + (1 - weights[i])) if total else 0.0
    for i, rest in zip(reversed(range(n + 1)), rests):
        if i == 0 or randomness.bernoulli(chances[i]):
            rest = rest if rest.sum() > 0 else target[i]  # p equals q up to rounding
            return list(range(i + 1)), randomness.categorical(rest / rest.sum()), chances
    raise AssertionError("the empty block is always accepted")


RULES: dict[str, Rule] = {"tokens": accept, "block": accept_block}  # the lossless ones, by --verify
