"""Wrong answers to assignment 2. Most are the loop of `accept` with one step done wrong."""

from functools import partial

import torch

from lessons.assignments import mutants
from lessons.assignments.grading import Mistake
from minispec import verify
from minispec.tree import Tree


def ratio(p, q, x):
    return float(p[x]) / (1.0 if q is None else float(q[x]))


def draw(p, randomness):
    return randomness.categorical(p)


def walk(
    target, tree, randomness, *, ratio=ratio, rest=verify.residual, children=Tree.children,
    draw=draw,
):  # fmt: skip
    """`accept`, with each of its steps open to a mistake."""
    path = [0]
    while True:
        p = target[path[-1]]
        for child in children(tree, path[-1]):
            x, q = tree.tokens[child], tree.drawn_from(child)
            if randomness.bernoulli(min(1.0, ratio(p, q, x))):
                break
            left = rest(p, q, x)
            if left is None:
                break
            p = left
        else:
            return path, draw(p, randomness)
        path.append(child)


# ---- residual ------------------------------------------------------------------------------------


def one_hot(p, q, x):
    return torch.nn.functional.one_hot(torch.tensor(x), len(p)).to(p.dtype) if q is None else q


def absolute(p, q, x):
    rest = (p - one_hot(p, q, x)).abs()
    return rest / rest.sum() if rest.sum() > 0 else None


def reversed_difference(p, q, x):
    rest = (one_hot(p, q, x) - p).clamp(min=0.0)
    return rest / rest.sum() if rest.sum() > 0 else None


def not_normalised(p, q, x):
    rest = (p - one_hot(p, q, x)).clamp(min=0.0)
    return rest if rest.sum() > 0 else None


def in_place(p, q, x):
    rest = verify.residual(p, q, x)
    if rest is not None:
        p.copy_(rest)
    return rest


def zero_over_zero(p, q, x):
    rest = (p - one_hot(p, q, x)).clamp(min=0.0)
    return rest / rest.sum()


def rest_or_p(p, q, x):
    rest = verify.residual(p, q, x)
    return p if rest is None else rest


def zeros_instead_of_none(p, q, x):
    rest = verify.residual(p, q, x)
    return torch.zeros_like(p) if rest is None else rest


# ---- accept --------------------------------------------------------------------------------------


def stops_at_the_first_child(target, tree, randomness):
    """Accept one token at most."""
    path, fresh, *_ = verify.accept(target, tree, randomness)
    return (path, fresh) if len(path) < 3 else (path[:2], tree.tokens[path[2]])


def plain(target, tree, randomness):
    return [0], randomness.categorical(target[0])


def matches_a_draw_from_p(target, tree, randomness):
    path = [0]
    while True:
        token = randomness.categorical(target[path[-1]])
        fits = [child for child in tree.children(path[-1]) if tree.tokens[child] == token]
        if not fits:
            return path, token
        path.append(fits[0])


def siblings_by_p(target, tree, randomness):
    """Judge every child by p, and draw the fresh token from the last residual."""
    path = [0]
    while True:
        p = left = target[path[-1]]
        for child in tree.children(path[-1]):
            x, q = tree.tokens[child], tree.drawn_from(child)
            left = verify.residual(left, q, x)
            if randomness.bernoulli(min(1.0, ratio(p, q, x))) or left is None:
                break
        else:
            return path, randomness.categorical(left)
        path.append(child)


def own_randomness(target, tree, randomness):
    path, _, *_ = verify.accept(target, tree, randomness)
    return path, int(torch.multinomial(target[path[-1]], 1))


def fresh_tensor(target, tree, randomness):
    path, fresh, *_ = verify.accept(target, tree, randomness)
    return path, torch.tensor(fresh)


def without_the_root(target, tree, randomness):
    path, fresh, *_ = verify.accept(target, tree, randomness)
    return path[1:], fresh


MISTAKES = [
    Mistake("residual", "p is returned as it is: subtract q first",
            {"residual": mutants.resample_from_p}),
    Mistake("residual", "this is |p - q|: where q is larger nothing is left",
            {"residual": absolute}),
    Mistake("residual", "this is q - p: what is missing is where p is larger",
            {"residual": reversed_difference}),
    Mistake("residual", "max(0, p - q) is not divided by its sum", {"residual": not_normalised}),
    Mistake("residual", "the subtraction changes p itself: copy it", {"residual": in_place}),
    Mistake("residual", "0 / 0 where q covers p: return None", {"residual": zero_over_zero}),
    Mistake("chain, tree", "after a rejection it draws from p again, not from the residual",
            {"accept": partial(walk, rest=mutants.resample_from_p)}),
    Mistake("chain, tree", "it accepts too often, as with p / (0.8 q): one factor makes it lossy",
            {"accept": mutants.lenient}),
    Mistake("chain, tree", "the bonus token is the argmax: draw it from p",
            {"accept": mutants.argmax_bonus}),
    Mistake("chain", "the fresh token is always the target's argmax: draw it from what p has "
            "become", {"accept": mutants.argmax_root}),
    Mistake("greedy, tree", "only the first child of a node is tried: go on with its siblings",
            {"accept": partial(walk, children=lambda tree, i: tree.children(i)[:1])}),
    Mistake("greedy, tree", "only the last child of a node is tried: begin with the first",
            {"accept": partial(walk, children=lambda tree, i: tree.children(i)[-1:])}),
    Mistake("chain, tree", "it accepts if p(x) >= q(x) and never otherwise: below that it takes a "
            "coin of p(x) / q(x)",
            {"accept": partial(walk, ratio=lambda p, q, x: float(ratio(p, q, x) >= 1))}),
    Mistake("chain, tree", "it accepts a drawn token with p(x): divide by q(x)",
            {"accept": partial(walk, ratio=lambda p, q, x: float(p[x]))}),
    Mistake("greedy, chain, tree", "a draft is judged by the distribution after it: use the one "
            "after its parent", {"accept": mutants.probs_after_the_draft}),
    Mistake("greedy, tree", "each path of the tree is drawn for by itself, and the longest "
            "kept: that prefers some tokens", {"accept": mutants.best_of_independent_paths}),
    Mistake("greedy, chain, tree", "it accepts no draft, which is plain decoding",
            {"accept": plain}),
    Mistake("chain, tree", "it draws from p and accepts the child that holds what was drawn: "
            "lossless, but q is not used", {"accept": matches_a_draw_from_p}),
    Mistake("tree", "the second sibling is judged by p itself: after a rejection p has become the "
            "residual", {"accept": siblings_by_p}),
    Mistake("greedy, chain, tree, rounding", "the path does not begin with node 0",
            {"accept": without_the_root}),
    Mistake("greedy, chain", "it goes no deeper than one accepted token: walk on from there",
            {"accept": stops_at_the_first_child}),
    Mistake("greedy, chain, tree", "it draws from a generator of its own: every decision must come "
            "from `randomness`", {"accept": own_randomness}),
    Mistake("greedy, chain, tree", "the fresh token is a tensor, not an int",
            {"accept": fresh_tensor}),
    Mistake("rounding", "with nothing left it draws from p: the child counts as accepted",
            {"accept": partial(walk, rest=rest_or_p)}),
    Mistake("rounding", "it draws from a residual of zeros: accept where nothing is left",
            {"accept": partial(walk, rest=zeros_instead_of_none)}),
    Mistake("rounding", "it draws from 0 / 0: accept where nothing is left",
            {"accept": partial(walk, rest=zero_over_zero)}),
]  # fmt: skip
