"""K and trees chosen during decoding agree with brute force. test_lossless.py checks that they
never change the output, and assignment 4 how single trees are grown and evaluated."""

import itertools
import random

import pytest
import torch
from conftest import random_model

from minispec.generate import decode
from minispec.methods.adaptive import MIN_PATH_PROB, AdaptiveK, AdaptiveTree
from minispec.toys import random_mtp_head

FLAT = [0.0] + [1.0] * 64  # a pass costs the same for any number of rows
STEEP = [0.0] + [float(n) for n in range(1, 65)]  # a pass over n rows costs n passes over one


def random_probs(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random probabilities of each head's candidates, best first."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) / 2).sort(descending=True).values


# ---- K of a chain --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_k_maximises_expected_tokens_per_cost(seed):
    """Checked by the formula: 1 + a1 + a1 a2 + … tokens for a pass over K + 1 rows and K drafts."""
    rng = random.Random(seed)
    curve = [0.0, 1.0, *itertools.accumulate((rng.random() / 9 for _ in range(20)), initial=1.1)]
    policy = AdaptiveK(curve, draft_cost=rng.random() / 4, max_k=8)
    policy.rate = [rng.random() for _ in range(8)]

    def value(k: int) -> float:
        accept_probs = itertools.accumulate(policy.rate[:k], lambda a, b: a * b)
        return (1 + sum(accept_probs)) / policy.costs[k]

    assert value(policy.choose()) == pytest.approx(max(value(k) for k in range(1, 9)))
    assert policy.costs[3] == pytest.approx(curve[4] + (policy.costs[1] - curve[2]) * 3)


def test_k_grows_while_drafts_are_accepted_and_shrinks_while_they_are_rejected():
    policy = AdaptiveK([0.0] + [1 + 0.005 * (n - 1) for n in range(1, 65)], draft_cost=0.1)
    for _ in range(100):
        k = policy.choose()
        policy.observe(drafted=k, accepted=k)
    assert policy.choose() == 16
    for _ in range(100):
        policy.observe(drafted=policy.choose(), accepted=0)
    assert policy.choose() == 1  # never 0, or it could not learn that drafts have become good
    for _ in range(100):
        policy.observe(drafted=1, accepted=1)
    assert policy.choose() > 8


def test_k_is_one_if_drafts_never_pay_and_maximal_if_they_are_free():
    assert AdaptiveK(STEEP, draft_cost=1.0).choose() == 1
    assert AdaptiveK(FLAT, draft_cost=0.0).choose() == 16
    assert AdaptiveK(FLAT, draft_cost=0.0, max_k=5).choose() == 5
    short_curve = [0.0, 1.0, 1.0]  # beyond its end, its last value holds
    assert AdaptiveK(short_curve, draft_cost=0.0).choose() == 16


def test_rates_are_learnt_only_from_drafts_that_were_tried():
    policy = AdaptiveK(FLAT, draft_cost=0.1, max_k=8)
    for i in range(200):  # every other round all four drafts are right, otherwise none
        policy.observe(drafted=4, accepted=4 * (i % 2))
    assert abs(policy.rate[0] - 0.5) < 0.1 and min(policy.rate[1:4]) > 0.95
    assert policy.rate[4] > 0.85  # never tried, so it drifts towards the previous rate


# ---- trees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_tree_maximises_expected_tokens_per_cost(seed):
    """With two heads and three ranks. The best n nodes are the n most likely paths, which form a
    tree because no path is more likely than its prefixes."""
    rng, probs = random.Random(seed), random_probs((2, 3), seed).tolist()
    steps = (rng.random() / (1 + 2 * seed) for _ in range(12))
    curve, heads_cost = [0.0, *itertools.accumulate(steps, initial=1.0)], 0.25
    gains = {(r,): a for r, a in enumerate(probs[0])}
    gains |= {(r, s): a * b for (r,), a in gains.items() for s, b in enumerate(probs[1])}
    paths = sorted((p for p in gains if gains[p] >= MIN_PATH_PROB), key=gains.get, reverse=True)
    for free_rows in (0, 2, 99):
        values = [
            (1 + sum(gains[path] for path in paths[:n])) / (curve[n + 1] + heads_cost)
            for n in range(min(free_rows, len(paths)) + 1)
        ]
        best = paths[: values.index(max(values))]
        assert AdaptiveTree(curve, heads_cost).choose(probs, free_rows) == sorted(best)


def test_certain_paths_are_drafted_and_rare_ones_are_not():
    certain = torch.eye(4, 12)[[0, 0, 0, 0]].tolist()
    rare = torch.full((4, 12), 1e-3).tolist()
    assert AdaptiveTree(FLAT, 0.0).choose(rare, free_rows=99) == []
    assert AdaptiveTree(FLAT, 0.0).choose(certain, free_rows=99) == [(0,) * n for n in range(1, 5)]
    assert AdaptiveTree(FLAT, 0.0).choose(certain, free_rows=2) == [(0,), (0, 0)]
    short_curve = [0.0, 1.0, 1.0]  # a tree never exceeds the curve
    assert AdaptiveTree(short_curve, 0.0).choose(certain, free_rows=99) == [(0,)]
    assert AdaptiveTree(STEEP, 0.0).choose(random_probs((4, 12), 0).tolist(), free_rows=99) == []


# ---- in decoding ---------------------------------------------------------------------------------


class Scripted:
    """A policy that chooses 1, 5, 2, 1, 5, 2, … and records the outcomes."""

    def __init__(self):
        self.choices, self.observed = itertools.cycle([1, 5, 2]), []

    def choose(self) -> int:
        return next(self.choices)

    def observe(self, drafted: int, accepted: int) -> None:
        self.observed.append((drafted, accepted))


@pytest.mark.parametrize("method", ["speculative", "fastmtp"])
def test_a_policy_chooses_before_each_round_and_observes_after_it(method):
    model, policy = random_model(context=40), Scripted()
    drafter = {"draft": model} if method == "speculative" else {"head": random_mtp_head(model, 0)}
    run = decode(model, None, [1, 2], method, k=policy, max_new_tokens=1000, **drafter)
    assert run.tokens == decode(model, None, [1, 2], max_new_tokens=1000).tokens
    outcomes = [(len(step.tree) - 1, len(step.path) - 1) for step in run.rounds]
    assert policy.observed[: len(outcomes)] == outcomes
    chosen = itertools.cycle([1, 5, 2])
    assert all(drafted <= k for (drafted, _), k in zip(outcomes, chosen))  # fewer near the end
    assert [drafted for drafted, _ in outcomes[:3]] == [1, 5, 2]
