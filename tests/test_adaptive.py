"""K and trees chosen as decoding goes, against brute force. That they change no output is
test_lossless's; that single trees are grown and judged aright, assignment 4's."""

import itertools
import random

import pytest
import torch
from conftest import random_model

from minispec.generate import decode
from minispec.methods.adaptive import RARE, AdaptiveK, AdaptiveTree
from minispec.toys import random_head

FLAT = [0.0] + [1.0] * 64  # a pass costs the same over any number of rows
STEEP = [0.0] + [float(n) for n in range(1, 65)]  # and as much as its rows one by one


def falling(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Chances of the candidates of each head, best first."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) / 2).sort(descending=True).values


# ---- K of a chain --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_k_promises_most_tokens_for_its_cost(seed):
    """Against the formula: 1 + a1 + a1 a2 + … tokens for a pass over K + 1 rows and K drafts."""
    rng = random.Random(seed)
    curve = [0.0, 1.0, *itertools.accumulate((rng.random() / 9 for _ in range(20)), initial=1.1)]
    length = AdaptiveK(curve, draft=rng.random() / 4, most=8)
    length.rate = [rng.random() for _ in range(8)]

    def promise(k: int) -> float:
        chances = itertools.accumulate(length.rate[:k], lambda a, b: a * b)
        return (1 + sum(chances)) / length.costs[k]

    assert promise(length.choose()) == pytest.approx(max(promise(k) for k in range(1, 9)))
    assert length.costs[3] == pytest.approx(curve[4] + (length.costs[1] - curve[2]) * 3)


def test_it_drafts_much_where_drafts_are_good_and_little_where_they_are_not():
    length = AdaptiveK([0.0] + [1 + 0.005 * (n - 1) for n in range(1, 65)], draft=0.1)
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
    assert AdaptiveK(STEEP, draft=1.0).choose() == 1
    assert AdaptiveK(FLAT, draft=0.0).choose() == 16 and AdaptiveK(FLAT, 0.0, most=5).choose() == 5
    assert AdaptiveK([0.0, 1.0, 1.0], draft=0.0).choose() == 16  # what lies beyond costs as the last


def test_rates_are_learnt_of_what_was_tried_alone():
    length = AdaptiveK(FLAT, draft=0.1, most=8)
    for i in range(200):  # half of the first drafts are right, and then all of a round of four
        length.observe(drafted=4, accepted=4 * (i % 2))
    assert abs(length.rate[0] - 0.5) < 0.1 and min(length.rate[1:4]) > 0.95
    assert length.rate[4] > 0.85  # never tried: it leans to the rate before


# ---- trees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_tree_promises_most_of_all_for_its_cost(seed):
    """Over two heads and three ranks. Of n nodes none gain more than the n likeliest paths, which
    are a tree: no path is likelier than its beginning."""
    rng, chances = random.Random(seed), falling((2, 3), seed).tolist()
    steps = (rng.random() / (1 + 2 * seed) for _ in range(12))
    curve, draft = [0.0, *itertools.accumulate(steps, initial=1.0)], 0.25
    gains = {(r,): a for r, a in enumerate(chances[0])}
    gains |= {(r, s): a * b for (r,), a in gains.items() for s, b in enumerate(chances[1])}
    likely = sorted((path for path in gains if gains[path] >= RARE), key=gains.get, reverse=True)
    for free_rows in (0, 2, 99):
        promises = [
            (1 + sum(gains[path] for path in likely[:n])) / (curve[n + 1] + draft)
            for n in range(min(free_rows, len(likely)) + 1)
        ]
        best = likely[: promises.index(max(promises))]
        assert AdaptiveTree(curve, draft).choose(chances, free_rows) == sorted(best)


def test_what_is_sure_is_drafted_and_what_is_rare_is_not():
    sure = torch.eye(4, 12)[[0, 0, 0, 0]].tolist()
    rare = torch.full((4, 12), 1e-3).tolist()
    assert AdaptiveTree(FLAT, 0.0).choose(rare, free_rows=99) == []
    assert AdaptiveTree(FLAT, 0.0).choose(sure, free_rows=99) == [(0,) * n for n in range(1, 5)]
    assert AdaptiveTree(FLAT, 0.0).choose(sure, free_rows=2) == [(0,), (0, 0)]
    assert AdaptiveTree([0.0, 1.0, 1.0], 0.0).choose(sure, free_rows=99) == [(0,)]  # as far as costs go
    assert AdaptiveTree(STEEP, 0.0).choose(falling((4, 12), 0).tolist(), free_rows=99) == []


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
