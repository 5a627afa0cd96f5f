"""The acceptance rule: exact distributions over every random outcome, and edge cases."""

import itertools
import math
import random

import pytest
import torch

from minispec.certify.toys import every_outcome
from minispec.sampling import OneHot, Seeded
from minispec.tree import Tree
from minispec.verify import accept, accept_block


def random_distribution(rng: random.Random, size: int = 4) -> torch.Tensor:
    weights = torch.tensor(
        [rng.choice([0.0, rng.random(), rng.random() ** 4]) for _ in range(size)]
    )
    weights[rng.randrange(size)] += 0.1
    return weights.double() / weights.double().sum()


def propose(rng: random.Random, kind: str, randomness) -> tuple[Tree, dict]:
    """A tree of two levels below the root. `rng` determines its distributions, and its tokens are
    drawn from `randomness`."""
    tokens, parents, draft_probs = [0], [-1], [None]
    for parent in (0, 1):
        q = random_distribution(rng)
        for _ in range(2 if kind != "chain" else 1):
            if kind == "one-hot":
                tokens.append(rng.randrange(4))
                draft_probs.append(None)
            else:
                tokens.append(randomness.categorical(q))
                draft_probs.append(q)
                if kind == "without replacement":
                    q = q.clone()
                    q[tokens[-1]] = 0.0
                    if q.sum() == 0:
                        parents.append(parent)
                        break
                    q = q / q.sum()
            parents.append(parent)
    return Tree(tokens, parents, draft_probs)


@pytest.mark.parametrize("kind", ["chain", "one-hot", "with replacement", "without replacement"])
@pytest.mark.parametrize("seed", range(25))
def test_the_first_two_tokens_are_distributed_as_the_targets(kind, seed):
    """The target has one distribution per context, like a model: the token after the root is drawn
    from p(. | root), the next one from p(. | that token)."""
    target = {(): random_distribution(random.Random(seed))}
    for x in range(4):
        target[x,] = random_distribution(random.Random(100 * seed + x))
        for y in range(4):
            target[x, y] = random_distribution(random.Random(9 * seed + x + 4 * y))
    joint: dict[tuple, float] = {}

    def round_of(randomness):
        tree = propose(random.Random(seed), kind, randomness)
        context = [()]
        for node in range(1, len(tree)):
            context.append(context[tree.parents[node]] + (tree.tokens[node],))
        path, fresh, *_ = accept([target[c] for c in context], tree, randomness)
        emitted = tree.tokens_at(path[1:]) + [fresh]
        if len(emitted) == 1:  # continue with plain decoding
            emitted.append(randomness.categorical(target[tuple(emitted)]))
        return tuple(emitted[:2])

    for outcome, weight in every_outcome(round_of):
        joint[outcome] = joint.get(outcome, 0.0) + weight
    expected = {(x, y): float(target[()][x] * target[x,][y]) for x in range(4) for y in range(4)}
    distance = sum(abs(joint.get(k, 0.0) - expected[k]) for k in expected) / 2
    assert abs(sum(joint.values()) - 1) < 1e-12 and distance < 1e-12


def test_greedy_follows_the_argmax_whatever_is_proposed():
    tree = Tree([9, 5, 3, 7, 8], [-1, 0, 0, 2, 2])
    #  root -> 3 (node 2) -> 8 (node 4) -> 6
    greedy = accept(OneHot([3, 0, 8, 0, 6], 10), tree, Seeded())
    assert greedy == ([0, 2, 4], 6, {1: 0.0, 2: 1.0, 3: 0.0, 4: 1.0})  # with all chances
    assert accept(OneHot([4, 0, 8, 0, 6], 10), tree, Seeded()) == ([0], 4, {1: 0.0, 2: 0.0})


def test_a_draft_from_the_target_itself_is_always_accepted():
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    for seed in range(200):
        tree = Tree.chain(0, [seed % 4, (seed // 4) % 4], [p, p])
        assert accept([p, p, p], tree, Seeded(seed))[0] == [0, 1, 2]


def test_a_draft_is_accepted_if_rounding_leaves_no_residual():
    p = torch.tensor([0.5, 0.5], dtype=torch.float64)
    q = torch.tensor([0.5 + 1e-17, 0.5 + 1e-16], dtype=torch.float64) + 1e-16

    class Never:
        def bernoulli(self, p):
            return False

        def categorical(self, probs):
            assert probs.sum() > 0
            return 0

    assert accept([p, p], Tree.chain(0, [1], [q]), Never())[0] == [0, 1]


@pytest.mark.parametrize("noise", [0.0, 1e-17, 1e-16, 3e-16])
def test_a_block_of_drafts_from_the_target_itself_is_accepted(noise):
    """Also if rounding leaves almost nothing of p - q."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    q = torch.stack([p[:2] + noise, p[2:] - noise]).flatten()
    for seed in range(200):
        tree = Tree.chain(0, [seed % 4, (seed // 4) % 4, seed % 3], [q, q, q])
        path, fresh, chances = accept_block([p] * 4, tree, Seeded(seed))
        assert path == [0, 1, 2, 3] and 0 <= fresh < 4
        assert all(0 <= chance <= 1 for chance in chances.values())


@pytest.mark.parametrize("k", [1, 2, 3])
def test_block_verification_is_exact_and_accepts_at_least_as_much(k):
    """Over all outcomes, for random distributions after every context."""
    gains, vocab = [], 4 if k < 3 else 2
    for seed in range(4):
        generator, lengths = torch.Generator().manual_seed(seed), {}
        contexts = [c for n in range(k + 1) for c in itertools.product(range(vocab), repeat=n)]
        target, draft = (
            dict(zip(contexts, torch.randn(len(contexts), vocab, generator=generator).double()
                     .mul(2).softmax(-1)))
            for _ in range(2)
        )  # fmt: skip
        for rule in accept, accept_block:
            joint: dict[tuple, float] = {}
            lengths[rule] = 0.0

            def round_of(randomness):
                drafts, probs = [], []
                for _ in range(k):
                    probs.append(draft[tuple(drafts)])
                    drafts.append(randomness.categorical(probs[-1]))
                rows = [target[tuple(drafts[:i])] for i in range(k + 1)]
                path, fresh, _ = rule(rows, Tree.chain(0, drafts, probs), randomness)
                emitted = [*drafts[: len(path) - 1], fresh]
                while len(emitted) <= k:  # continue with plain decoding
                    emitted.append(randomness.categorical(target[tuple(emitted)]))
                return tuple(emitted), len(path)

            for (outcome, length), weight in every_outcome(round_of):
                joint[outcome] = joint.get(outcome, 0.0) + weight
                lengths[rule] += weight * length
            for outcome, weight in joint.items():
                parts = (target[outcome[:i]][outcome[i]] for i in range(k + 1))
                assert abs(weight - float(math.prod(parts))) < 1e-12
        gains.append(lengths[accept_block] - lengths[accept])
    assert min(gains) > -1e-12 and (max(gains) > 1e-3) == (k > 1)
