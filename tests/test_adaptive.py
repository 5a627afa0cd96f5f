"""K and trees chosen as decoding goes: against brute force, and harmless to what comes out."""

import itertools
import random

import pytest
import torch
from conftest import count_up, random_model, random_tokens

from minispec.generate import decode
from minispec.methods.adaptive import (
    RARE,
    BestTree,
    Length,
    best_first,
    expected,
    grow_tree,
    most_worth,
)
from minispec.methods.medusa import complete
from minispec.toys import random_head, random_heads, switching

FLAT = [0.0] + [1.0] * 64  # a pass costs the same over any number of rows
STEEP = [0.0] + [float(n) for n in range(1, 65)]  # and as much as its rows one by one


def falling(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Chances of the candidates of each head, best first."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) / 2).sort(descending=True).values


def every_tree(heads: int, ranks: int) -> list[list[tuple[int, ...]]]:
    """All sets of paths that hold the beginnings of their paths."""
    paths = [p for n in range(1, heads + 1) for p in itertools.product(range(ranks), repeat=n)]
    sets = itertools.chain.from_iterable(
        itertools.combinations(paths, n) for n in range(len(paths) + 1)
    )
    return [list(each) for each in sets if all(p[:-1] in each for p in each if len(p) > 1)]


@pytest.mark.parametrize("seed", range(20))
def test_most_worth_is_the_best_quotient_of_tokens_and_cost(seed):
    rng = random.Random(seed)
    chances = [rng.random() for _ in range(rng.randint(0, 12))]
    costs = list(itertools.accumulate(rng.random() for _ in range(rng.randint(1, 12))))
    worth = [
        (1 + sum(chances[:n])) / costs[n] for n in range(min(len(chances), len(costs) - 1) + 1)
    ]
    assert worth[most_worth(iter(chances), costs)] == pytest.approx(max(worth))


# ---- K of a chain --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_k_promises_most_tokens_for_its_cost(seed):
    """Against the formula: 1 + a1 + a1 a2 + … tokens for a pass over K + 1 rows and K drafts."""
    rng = random.Random(seed)
    curve = [0.0, 1.0, *itertools.accumulate((rng.random() / 9 for _ in range(20)), initial=1.1)]
    length = Length(curve, draft=rng.random() / 4, most=8)
    length.rate = [rng.random() for _ in range(8)]

    def promise(k: int) -> float:
        chances = itertools.accumulate(length.rate[:k], lambda a, b: a * b)
        return (1 + sum(chances)) / length.costs[k]

    assert promise(length.choose()) == pytest.approx(max(promise(k) for k in range(1, 9)))
    assert length.costs[3] == pytest.approx(curve[4] + (length.costs[1] - curve[2]) * 3)


def test_it_drafts_much_where_drafts_are_good_and_little_where_they_are_not():
    length = Length([0.0] + [1 + 0.005 * (n - 1) for n in range(1, 65)], draft=0.1)
    for _ in range(100):
        k = length.choose()
        length.observe(drafted=k, accepted=k)
    assert length.choose() == 16
    for _ in range(100):
        length.observe(drafted=length.choose(), accepted=0)
    assert length.choose() == 1  # it goes on trying, or it would never learn better
    for _ in range(100):
        length.observe(drafted=1, accepted=1)
    assert length.choose() > 8


def test_a_cost_that_no_draft_earns_back_keeps_k_at_one():
    assert Length(STEEP, draft=1.0).choose() == 1
    assert Length(FLAT, draft=0.0).choose() == 16 and Length(FLAT, 0.0, most=5).choose() == 5
    assert Length([0.0, 1.0, 1.0], draft=0.0).choose() == 16  # what lies beyond costs as the last


def test_rates_are_learnt_of_what_was_tried_alone():
    length = Length(FLAT, draft=0.1, most=8)
    for i in range(200):  # half of the first drafts are right, and then all of a round of four
        length.observe(drafted=4, accepted=4 * (i % 2))
    assert abs(length.rate[0] - 0.5) < 0.1 and min(length.rate[1:4]) > 0.95
    assert length.rate[4] > 0.9  # never tried: it leans to the rate before


def test_a_draft_that_seemed_bad_is_tried_again():
    length = Length([0.0] + [1 + 0.02 * (n - 1) for n in range(1, 65)], draft=0.1, most=4)
    length.rate = [0.8, 0.1, 0.1, 0.1]
    for _ in range(200):
        k = length.choose()
        length.observe(drafted=k, accepted=k)
    assert length.choose() == 4


# ---- trees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_tree_promises_most_of_all_for_its_cost(seed):
    """Against every tree over two heads and three ranks."""
    rng, chances = random.Random(seed), falling((2, 3), seed)
    steps = (rng.random() / (1 + 2 * seed) for _ in range(12))
    curve, draft = [0.0, *itertools.accumulate(steps, initial=1.0)], 0.25
    likely = {path for path, gain in best_first(chances.tolist()) if gain >= RARE}
    for room in (0, 2, 99):
        most = max(
            expected(chances, tree) / (curve[len(tree) + 1] + draft)
            for tree in every_tree(2, 3)
            if len(tree) <= room and likely.issuperset(tree)
        )
        tree = BestTree(curve, draft).choose(chances.tolist(), room)
        assert tree == complete(tree, 2, 3) and len(tree) <= room
        assert expected(chances, tree) / (curve[len(tree) + 1] + draft) == pytest.approx(most)


def test_what_is_sure_is_drafted_and_what_is_rare_is_not():
    sure = torch.eye(4, 12)[[0, 0, 0, 0]].tolist()
    rare = torch.full((4, 12), 1e-3).tolist()
    assert BestTree(FLAT, 0.0).choose(rare, room=99) == []
    assert BestTree(FLAT, 0.0).choose(sure, room=99) == [(0,) * n for n in range(1, 5)]
    assert BestTree(FLAT, 0.0).choose(sure, room=2) == [(0,), (0, 0)]
    assert BestTree([0.0, 1.0, 1.0], 0.0).choose(sure, room=99) == [(0,)]  # as far as costs go
    assert BestTree(STEEP, 0.0).choose(falling((4, 12), 0).tolist(), room=99) == []


@pytest.mark.parametrize("seed", range(8))
def test_the_grown_tree_is_the_best_of_all(seed):
    """Of its size, and each of its beginnings is the best of that size."""
    accuracy, trees = falling((2, 3), seed), every_tree(2, 3)
    grown = grow_tree(accuracy, 12)
    assert len(grown) == 12 and grow_tree(accuracy, 1000) == grown
    for n in range(13):
        assert set(complete(grown[:n], 2, 3)) == set(grown[:n])
        best = max(expected(accuracy, tree) for tree in trees if len(tree) == n)
        assert expected(accuracy, grow_tree(accuracy, n)) == pytest.approx(best)


def test_a_head_that_is_never_right_ends_its_branches():
    assert grow_tree(torch.tensor([[0.5, 0.0, 0.0], [0.5, 0.0, 0.0]]), 9) == [(0,), (0, 0)]


def test_expected_is_the_mean_of_heads_that_are_right_at_random():
    accuracy = torch.tensor([[0.5, 0.2, 0.1], [0.3, 0.2, 0.1], [0.2, 0.1, 0.1]])
    paths = complete([(0, 0, 0), (0, 1), (1, 0), (2,), (1, 2)], 3, 3)
    draws = torch.rand(40_000, 3, generator=torch.Generator().manual_seed(0))
    right = (draws[..., None] > accuracy.cumsum(1)).sum(-1)  # (n, 3): the rank; 3 is none of them
    nodes = sum((right[:, : len(path)] == torch.tensor(path)).all(1) for path in paths)
    assert abs(float((1 + nodes).double().mean()) - expected(accuracy, paths)) < 0.02


# ---- in decoding ---------------------------------------------------------------------------------


class Scripted:
    """A policy that says 1, 5, 2, 1, 5, 2, … and remembers what came of it."""

    def __init__(self):
        self.said, self.seen = itertools.cycle([1, 5, 2]), []

    def choose(self) -> int:
        return next(self.said)

    def observe(self, drafted: int, accepted: int) -> None:
        self.seen.append((drafted, accepted))


@pytest.mark.parametrize("method", ["speculative", "fastmtp"])
def test_a_policy_is_asked_before_each_round_and_told_after_it(method):
    model, policy = random_model(context=40), Scripted()
    companion = {"draft": model} if method == "speculative" else {"head": random_head(model, 0)}
    run = decode(model, None, [1, 2], method, k=policy, max_new_tokens=1000, **companion)
    assert run.tokens == decode(model, None, [1, 2], max_new_tokens=1000).tokens
    came = [(len(step.tree) - 1, len(step.path) - 1) for step in run.rounds]
    assert policy.seen[: len(came)] == came
    asked = itertools.cycle([1, 5, 2])
    assert all(drafted <= k for (drafted, _), k in zip(came, asked))  # less where no room is left
    assert [drafted for drafted, _ in came[:3]] == [1, 5, 2]


@pytest.mark.parametrize("curve, seed", [(FLAT, 0), (STEEP, 1)])
def test_any_choice_of_k_is_plain_decoding(seed, curve):
    model, prompt = random_model(seed, context=60), random_tokens(1 + 5 * seed, seed)
    plain = decode(model, None, prompt, max_new_tokens=1000)
    for method, companions in (
        ("speculative", {"draft": random_model(seed + 9)}),
        ("fastmtp", {"head": random_head(model, seed)}),
        ("fastmtp", {"head": random_head(model, seed), "vocabulary": switching(model)}),
    ):
        k = Length(curve, draft=0.1, most=8)
        run = decode(model, None, prompt, method, k=k, max_new_tokens=1000, **companions)
        assert run.tokens == plain.tokens and run.finish_reason == "context"


@pytest.mark.parametrize("method, seed", [("medusa", 0), ("medusa-typical", 1)])
def test_any_choice_of_trees_is_plain_decoding(method, seed):
    model = random_model(seed, context=40)
    # of heads with these seeds some guess right now and then
    heads, prompt = random_heads(model, seed + 5), random_tokens(1 + 5 * seed, seed)
    plain = decode(model, None, prompt, max_new_tokens=1000)
    run = decode(model, None, prompt, method, heads=heads, tree=BestTree(FLAT, 0.0),
                 max_new_tokens=1000)  # fmt: skip
    assert run.tokens == plain.tokens and run.finish_reason == "context"
    sizes = [len(step.tree) for step in run.rounds]
    assert max(sizes) > 8 and len(run.rounds[-1].tree) < 8  # cut to the room that was left
    assert any(len(step.path) > 1 for step in run.rounds)


def test_heads_that_know_are_followed_to_their_full_depth():
    model, heads = count_up(12, 3)
    run = decode(model, None, [3, 4], "medusa", heads=heads, tree=BestTree(FLAT, 0.0),
                 max_new_tokens=40)  # fmt: skip
    assert run.tokens == [(5 + i) % 12 for i in range(40)]
    assert {len(step.tokens) for step in run.rounds} == {4}


def test_good_drafts_make_chains_long_and_bad_ones_short():
    model, curve = random_model(), [0.0] + [1 + 0.01 * (n - 1) for n in range(1, 65)]
    drafted = []
    for draft in (model, random_model(9)):
        k = Length(curve, draft=0.2)
        run = decode(model, None, [1, 2], "speculative", draft=draft, k=k, max_new_tokens=80)
        drafted.append(run.stats["drafted"] / run.stats["target_passes"])
    assert drafted[0] > 5 and drafted[1] < 2
