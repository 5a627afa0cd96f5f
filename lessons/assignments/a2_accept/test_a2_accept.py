"""Exact distributions: `every_outcome` sums over all random outcomes of `accept`.

A rule that accepts less than it may is lossless, too, and pays for nothing: so the share of drafts
that it accepts is summed as well.
"""

import contextlib
import random
from collections.abc import Iterator

import pytest
import torch

from minispec.certify.toys import every_outcome
from minispec.sampling import OneHot, Seeded
from minispec.tree import Tree
from minispec.verify import accept as rule

V = 4  # tokens
GRADED = {
    "residual": "residual", "greedy": "accept", "chain": "accept", "tree": "accept",
    "rounding": "accept",
}  # fmt: skip


def random_probs(rng: random.Random, size: int = V) -> torch.Tensor:
    """With zeros now and then, as top-k and top-p leave them."""
    weights = [rng.choice([0.0, rng.random(), rng.random() ** 4]) for _ in range(size)]
    weights[rng.randrange(size)] += 0.1
    probs = torch.tensor(weights, dtype=torch.float64)
    return probs / probs.sum()


def drafted(rng: random.Random, kind: str, children: int, levels: int, randomness) -> Tree:
    """`children` drafts below the root and, with two levels, as many below the first of them."""
    tokens, parents, draft_probs = [0], [-1], [None]
    for parent in range(levels):
        q = random_probs(rng)
        for _ in range(children):
            if q.sum() == 0:  # all of it was drawn
                break
            one_hot = kind == "one-hot"
            x = rng.randrange(V) if one_hot else randomness.categorical(q)
            tokens.append(x)
            parents.append(parent)
            draft_probs.append(None if one_hot else q)
            if kind == "without replacement":
                q = q.clone()
                q[x] = 0.0
                q = q / q.sum() if q.sum() > 0 else q
    return Tree(tokens, parents, draft_probs)


def generators() -> tuple:
    """The states of the generators that a submission might draw from by itself."""
    return random.getstate(), torch.get_rng_state().numpy().tobytes()


@contextlib.contextmanager
def without_own_randomness() -> Iterator[None]:
    """Fail, whatever else goes wrong, if a submission draws from anything but `randomness`."""
    before = generators()
    try:
        yield
    finally:
        assert generators() == before, (
            "it draws from a generator of its own: every decision must come from `randomness`"
        )


def judged(accept, target, tree: Tree, randomness) -> tuple[list[int], int]:
    """What `accept` returns, after a look at its types."""
    path, fresh, *_ = accept(target, tree, randomness)
    kinds = {type(node) for node in path} | {type(fresh)}
    assert kinds == {int}, (
        f"the fresh token is a {type(fresh).__name__}, the path {path}: both are made of ints"
    )
    assert path[0] == 0, f"path {path}: it begins with node 0, which was emitted already"
    return path, fresh


def judge(accept, seed: int, kind: str, children: int) -> tuple[float, float]:
    """Total variation of the first two tokens' distribution from the target's own, and the expected
    number of drafts that are accepted."""
    rng = random.Random(seed)
    contexts = [()] + [(x,) for x in range(V)] + [(x, y) for x in range(V) for y in range(V)]
    after = {context: random_probs(rng) for context in contexts}

    levels = 1 + (seed + children) % 2

    def first_two(randomness) -> tuple[tuple[int, ...], int]:
        tree = drafted(random.Random(seed), kind, children, levels, randomness)
        context = [()]
        for node in range(1, len(tree)):
            context.append(context[tree.parents[node]] + (tree.tokens[node],))
        path, fresh = judged(accept, [after[c] for c in context], tree, randomness)
        tokens = tree.tokens_at(path[1:]) + [fresh]
        if len(tokens) == 1:  # the next pass is a plain one
            tokens.append(randomness.categorical(after[tuple(tokens)]))
        return tuple(tokens[:2]), len(path) - 1

    excess = {(x, y): -float(after[()][x] * after[(x,)][y]) for x in range(V) for y in range(V)}
    accepted = 0.0
    with without_own_randomness():
        for (tokens, drafts), weight in every_outcome(first_two):
            excess[tokens] += weight
            accepted += weight * drafts
    return sum(map(abs, excess.values())) / 2, accepted


def check(accept, seed: int, kind: str, children: int, hint: str) -> None:
    """The output must be the target's, and as many drafts accepted as by the rule."""
    off, accepted = judge(accept, seed, kind, children)
    assert off < 1e-12, (
        f"the output is {off:.1e} (total variation) away from the target, for {hint}"
    )
    _, right = judge(rule, seed, kind, children)
    assert abs(accepted - right) < 1e-12, (
        f"the output is the target's, but {accepted:.3f} drafts are accepted instead of "
        f"{right:.3f}, for {hint}"
    )


@pytest.mark.points(4, task="residual")
def test_residual_is_what_q_leaves_of_p(impl, seeds):
    for seed in seeds(20):
        rng = random.Random(seed)
        p, q, x = random_probs(rng, 7), random_probs(rng, 7), rng.randrange(7)
        before = p.clone(), q.clone()
        for given, name in ((q, "a drawn draft"), (None, "a one-hot draft")):
            rest = impl.residual(p, given, x)
            cut = q if given is not None else torch.eye(7, dtype=torch.float64)[x]
            left = [max(0.0, float(a) - float(b)) for a, b in zip(p, cut)]
            if sum(left) == 0:
                assert rest is None, f"{name}: q covers all of p, so the answer is None"
                continue
            assert rest is not None, f"{name}: p - q is positive somewhere, so something is left"
            assert abs(float(rest.sum()) - 1) < 1e-12, f"{name}: the residual must sum to 1"
            wrong = max(abs(float(a) - b / sum(left)) for a, b in zip(rest, left))
            assert wrong < 1e-12, f"{name}: the residual is norm(max(0, p - q)), not p nor |p - q|"
        unchanged = torch.equal(p, before[0]) and torch.equal(q, before[1])
        assert unchanged, "p or q was changed in place, but they belong to the caller"


@pytest.mark.points(1, task="residual")
def test_a_certain_target_that_agrees_leaves_no_residual(impl):
    for x in range(V):
        p = torch.eye(V, dtype=torch.float64)[x]
        for q in (None, p.clone()):
            assert impl.residual(p, q, x) is None, "p = q leaves nothing: return None, not 0 / 0"


@pytest.mark.points(3, task="greedy")
def test_a_greedy_target_is_followed_token_by_token(impl, seeds):
    """Each step of the path goes to the first child that holds the target's one token."""
    for seed in seeds(30):
        rng = random.Random(seed)
        parents = [-1] + [rng.randrange(i) for i in range(1, 15)]
        tree, said = Tree([rng.randrange(3) for _ in parents], parents), rng.choices(range(3), k=15)
        with without_own_randomness():
            path, fresh = judged(impl.accept, OneHot(said, 3), tree, Seeded(seed))
        at, expected = 0, []
        while at is not None:
            expected.append(at)
            at = next((c for c in tree.children(at) if tree.tokens[c] == said[at]), None)
        assert path == expected, (
            f"path {path} instead of {expected}: a child is accepted if it holds what the target "
            "says after its parent"
        )
        assert fresh == said[path[-1]], "the fresh token is what the target says after the path"


@pytest.mark.points(6, task="chain")
@pytest.mark.parametrize("kind", ["drawn", "one-hot"])
def test_a_chain_has_the_target_s_distribution(impl, seeds, kind):
    for seed in seeds(12):
        check(
            impl.accept, seed, kind, 1, f"{kind} drafts: accept x with probability min(1, p(x) / "
            "q(x)), else draw from the residual; bonus and correction are both drawn from what p "
            "has become",
        )  # fmt: skip


@pytest.mark.points(4, task="tree")
@pytest.mark.parametrize("kind", ["with replacement", "without replacement", "one-hot"])
def test_siblings_have_the_target_s_distribution(impl, seeds, kind):
    for seed in seeds(6):
        check(
            impl.accept, seed, kind, 2, f"two siblings ({kind}): after a rejection the next "
            "sibling is judged by the residual",
        )  # fmt: skip


@pytest.mark.points(2, task="tree")
def test_every_sibling_is_tried(impl, seeds):
    """One-hot siblings are accepted as often as the target draws their tokens."""
    for seed in seeds(6):
        rng = random.Random(seed)
        tokens = rng.sample(range(V), 3)
        tree = Tree([0, *tokens], [-1, 0, 0, 0])
        p = torch.tensor([0.1 + rng.random() for _ in range(V)], dtype=torch.float64)
        p = p / p.sum()
        accepted = dict.fromkeys(range(1, 4), 0.0)
        for (path, _), weight in every_outcome(
            lambda randomness: judged(impl.accept, [p] * 4, tree, randomness)
        ):
            for node in path[1:]:
                accepted[node] += weight
        for node, x in enumerate(tokens, start=1):
            off = accepted[node] - float(p[x])
            assert abs(off) < 1e-12, (
                f"three siblings, one-hot at {tokens}: child {node} is accepted with probability "
                f"{accepted[node]:.3f} instead of p({x}) = {float(p[x]):.3f}: try each in turn"
            )


@pytest.mark.points(1, task="tree")
def test_the_path_is_a_path(impl, seeds):
    (seed,) = seeds(1)
    rng, randomness, longest = random.Random(seed), Seeded(seed), 1
    for _ in range(60):
        tree = drafted(rng, "with replacement", 3, 2, randomness)
        target = [random_probs(rng) for _ in tree.tokens]
        path, fresh = judged(impl.accept, target, tree, randomness)
        steps = all(tree.parents[b] == a for a, b in zip(path, path[1:]))
        assert steps, f"path {path} of {tree}: each node must be a child of the one before it"
        assert 0 <= fresh < V, f"the fresh token {fresh} is none of the {V} tokens"
        longest = max(longest, len(path))
    assert longest == 3, f"in 60 trees of two levels no path is longer than {longest} nodes"


@pytest.mark.points(1, task="rounding")
def test_a_draft_that_rounding_leaves_no_residual_for_is_accepted(impl):
    """q exceeds p by a rounding error everywhere, and the coin says no."""

    class Never:
        def bernoulli(self, p: float) -> bool:
            return p >= 1

        def categorical(self, probs) -> int:
            assert float(probs.sum()) > 0, "a draw from nothing: accept where no residual is left"
            return 0

    p = torch.tensor([0.5, 0.5], dtype=torch.float64)
    path, _, *_ = impl.accept([p, p], Tree.chain(0, [1], [p + 2e-16]), Never())
    assert path == [0, 1], "where p - q leaves nothing, the draft is as good as accepted"


@pytest.mark.points(2, task="chain")
def test_a_draft_that_is_the_target_is_always_accepted(impl, seeds):
    (seed,) = seeds(1)
    rng, randomness = random.Random(seed), Seeded(seed)
    for _ in range(30):
        target = [random_probs(rng) for _ in range(4)]
        tree = Tree.chain(0, [randomness.categorical(p) for p in target[:3]], target[:3])
        path, _ = judged(impl.accept, target, tree, randomness)
        assert path == [0, 1, 2, 3], (
            "a draft with q = p must always be accepted: judge a node by the target's "
            "distribution after its parent"
        )
