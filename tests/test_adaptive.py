"""K and trees chosen during decoding agree with brute force. test_lossless.py checks that they
never change the output, and assignment 4 how single trees are grown and evaluated."""

import itertools
import random

import pytest
import torch
from conftest import DECLARED, NEEDS, method_options, random_model

from minispec.certify.toys import random_medusa_heads, random_mtp_head
from minispec.fast.cost import cost_curve
from minispec.generate import decode, stream
from minispec.generate.drafters import with_policies
from minispec.methods.adaptive import (
    MIN_PATH_PROB,
    PRIOR_GAIN,
    PRIOR_ROUNDS,
    AdaptiveK,
    AdaptiveNodes,
    AdaptiveTree,
    likely_paths,
)

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
    policy.rates.rate = [rng.random() for _ in range(8)]

    def value(k: int) -> float:
        accept_probs = itertools.accumulate(policy.rates.rate[:k], lambda a, b: a * b)
        return (1 + sum(accept_probs)) / policy.costs[k]

    assert value(policy.choose()) == pytest.approx(max(value(k) for k in range(9)))
    assert policy.costs[3] == pytest.approx(curve[4] + (policy.costs[1] - curve[2]) * 3)


def test_k_grows_while_drafts_are_accepted_and_shrinks_while_they_are_rejected():
    policy = AdaptiveK([0.0] + [1 + 0.005 * (n - 1) for n in range(1, 65)], draft_cost=0.1)
    for _ in range(100):
        k = policy.choose()
        policy.observe(drafted=k, accepted=k)
    assert policy.choose() == 16
    for _ in range(100):
        policy.observe(drafted=policy.choose(), accepted=0)
    assert policy.choose() == 0
    for _ in range(200):  # a probe shows that drafts have become good
        policy.observe(k := policy.choose(), k)
    assert policy.choose() > 8


def test_k_is_zero_if_drafts_never_pay_and_maximal_if_they_are_free():
    assert AdaptiveK(STEEP, draft_cost=1.0).choose() == 0
    assert AdaptiveK(FLAT, draft_cost=0.0).choose() == 16
    assert AdaptiveK(FLAT, draft_cost=0.0, max_k=5).choose() == 5
    short_curve = [0.0, 1.0, 1.0]  # beyond its end, its last value holds
    assert AdaptiveK(short_curve, draft_cost=0.0).choose() == 16


def test_rates_are_learnt_only_from_drafts_that_were_tried():
    policy = AdaptiveK(FLAT, draft_cost=0.1, max_k=8)
    for i in range(200):  # every other round all four drafts are right, otherwise none
        policy.observe(drafted=4, accepted=4 * (i % 2))
    assert abs(policy.rates.rate[0] - 0.5) < 0.1 and min(policy.rates.rate[1:4]) > 0.95
    assert policy.rates.rate[4] > 0.85  # never tried, so it drifts towards the previous rate


def test_rates_start_at_the_measured_acceptance():
    assert AdaptiveK(FLAT, 0.1, max_k=4, acceptance=[0.6, 0.5]).rates.rate == [0.6, 0.5, 0.5, 0.5]
    assert AdaptiveK(FLAT, 0.1, max_k=1, acceptance=[0.6, 0.5]).rates.rate == [0.6]
    assert AdaptiveK(FLAT, 0.1, max_k=2).rates.rate == [0.7, 0.7]
    policy = AdaptiveK(FLAT, 0.1, max_k=4, acceptance=[0.6])  # counts for two rounds at first
    for n in range(1, 7):
        policy.observe(drafted=1, accepted=0)
        assert policy.rates.rate[0] == pytest.approx(2 * 0.6 / (2 + n))


# ---- plain steps and probes ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_probes_cost_little_and_become_rare(seed):
    """Drafts are never right. After the policy has stopped, its probes cost at most 2 % of the time
    of the plain steps, over any number of rounds, and their gaps double."""
    rng = random.Random(seed)
    curve = [0.0, *itertools.accumulate((rng.random() / 2 for _ in range(9)), initial=1.0)]
    policy, drafted = AdaptiveK(curve, draft_cost=rng.random() / 3, max_k=8), []
    while policy.best():
        policy.observe(policy.choose(), 0)
    for plain in range(3000):
        drafted.append(policy.choose())
        policy.observe(drafted[-1], 0)
        extra = (policy.costs[1] - 1) * sum(drafted)
        assert max(drafted) <= 1 and extra <= 0.02 * (len(drafted) - sum(drafted)) + 1e-9
    probes = [i for i, k in enumerate(drafted) if k]
    gaps = [b - a - 1 for a, b in itertools.pairwise([-1, *probes])]
    assert gaps[1:] == [2 * gap for gap in gaps[:-1]] and len(gaps) > 1


def test_a_probe_that_pays_is_followed_by_another_at_once():
    policy = AdaptiveK([0.0, 1.0, 1.4, 9.0], draft_cost=0.1, max_k=2, acceptance=[0.1])
    while not policy.choose():
        policy.observe(0, 0)
    policy.observe(1, 1)
    assert policy.best() == 0 and policy.choose() == 1
    expensive = AdaptiveK([0.0, 1.0, 2.5], draft_cost=0.1, max_k=1)  # even if it is accepted
    while not expensive.choose():
        expensive.observe(0, 0)
    expensive.observe(1, 1)
    assert expensive.choose() == 0


@pytest.mark.parametrize("p", [0.0, 0.2, 0.4, 0.6, 0.8])
def test_an_adaptive_k_hardly_loses_and_gains_like_the_best_fixed_one(p):
    """Each draft is accepted with probability p. The mean speed over 40 texts of 100 tokens."""
    curve, speeds = [0.0, *(1 + 0.1 * n for n in range(9))], []
    for seed in range(40):
        rng, policy, tokens, cost = random.Random(seed), AdaptiveK(curve, 0.1, 8, [0.5]), 0, 0.0
        while tokens < 100:
            k = policy.choose()
            accepted = next((i for i in range(k) if rng.random() >= p), k)
            policy.observe(k, accepted)
            tokens, cost = tokens + 1 + accepted, cost + policy.costs[k]
        speeds.append(tokens / cost)
    best = max(sum(p**i for i in range(k + 1)) / policy.costs[k] for k in range(9))
    assert sum(speeds) / len(speeds) > 0.93 * best and min(speeds) > 0.9


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
        policy = AdaptiveTree(curve, heads_cost)
        assert likely_paths(probs, policy, free_rows) == sorted(best)


def test_certain_paths_are_drafted_and_rare_ones_are_not():
    certain = torch.eye(4, 12)[[0, 0, 0, 0]].tolist()
    rare = torch.full((4, 12), 1e-3).tolist()
    flat, steep = AdaptiveTree(FLAT, 0.0), AdaptiveTree(STEEP, 0.0)
    assert likely_paths(rare, flat, free_rows=99) == []
    assert likely_paths(certain, flat, free_rows=99) == [(0,) * n for n in range(1, 5)]
    assert likely_paths(certain, flat, free_rows=2) == [(0,), (0, 0)]
    short = AdaptiveTree([0.0, 1.0, 1.0], 0.0)  # a tree never exceeds the curve
    assert likely_paths(certain, short, free_rows=99) == [(0,)]
    assert likely_paths(random_probs((4, 12), 0).tolist(), steep, free_rows=99) == []


def test_trees_start_at_the_measured_accuracy_and_stop_when_they_do_not_pay():
    curve = [0.0, *(1 + 0.1 * n for n in range(9))]
    accuracy = torch.tensor([[0.5, 0.1], [0.4, 0.1]], dtype=torch.float64)
    policy = AdaptiveTree(curve, 0.1, accuracy)  # the best tree is (0,), (0, 0)
    assert policy.gain == pytest.approx(0.5 + 0.2 - 0.3)
    assert not AdaptiveTree(curve, 0.7, accuracy).drafting()
    assert not AdaptiveTree(STEEP, 0.0, torch.zeros(1, 10)).drafting()
    rounds = []
    for _ in range(1000):
        rounds.append(policy.drafting())
        policy.observe(drafted=2 * rounds[-1], accepted=0)
    probes = [i for i in range(30, 1000) if rounds[i]]
    assert len(probes) <= 6 and not all(rounds[:30])
    while not policy.drafting():
        policy.observe(drafted=0, accepted=0)
    for _ in range(30):
        assert policy.drafting()
        policy.observe(drafted=2, accepted=2)
    assert policy.gain > 0


# ---- in decoding ---------------------------------------------------------------------------------


class Scripted:
    """A policy that chooses 1, 5, 0, 2, 1, 5, 0, 2, … and records the outcomes."""

    def __init__(self):
        self.choices, self.observed = itertools.cycle([1, 5, 0, 2]), []

    def choose(self) -> int:
        return next(self.choices)

    def observe(self, drafted: int, accepted: int) -> None:
        self.observed.append((drafted, accepted))


@pytest.mark.parametrize("method", [
    name for name in NEEDS if "k" in DECLARED[name].options
])  # fmt: skip
def test_a_policy_chooses_before_each_round_and_observes_after_it(method):
    model, policy = random_model(context=40), Scripted()
    drafter = method_options(model)[method]
    run = decode(model, None, [1, 2], method, k=policy, max_new_tokens=1000, **drafter)
    assert run.tokens == decode(model, None, [1, 2], max_new_tokens=1000).tokens
    outcomes = [(len(step.tree) - 1, len(step.path) - 1) for step in run.rounds]
    assert policy.observed[: len(outcomes)] == outcomes
    chosen = itertools.cycle([1, 5, 0, 2])
    assert all(drafted <= k for (drafted, _), k in zip(outcomes, chosen))  # fewer near the end
    assert [drafted for drafted, _ in outcomes[:4]] == [1, 5, 0, 2]


@pytest.mark.parametrize("method", NEEDS)
def test_a_plain_step_runs_neither_draft_nor_heads(method, monkeypatch):
    """After the prefill, they run only in the rounds that draft."""
    model, calls = random_model(context=64), []
    options = method_options(model)[method]
    (drafter,) = (x for x in options.values() if isinstance(x, torch.nn.Module))
    drafter.register_forward_hook(lambda *_: calls.append(True))
    chains = "k" in DECLARED[method].options
    name, never = ("k", AdaptiveK(STEEP, 1.0)) if chains else (
        "tree", AdaptiveTree(STEEP, 1.0, torch.zeros(4, 10)))  # fmt: skip
    run = stream(model, None, [1, 2, 3], method, max_new_tokens=30, **options | {name: never})
    before = [len(calls) for _ in run]
    assert len(before) == 30 and len(calls) == chains  # the prefill
    run = decode(model, None, [1, 2, 3], method, max_new_tokens=30, **options)
    plain = decode(model, None, [1, 2, 3], max_new_tokens=30)
    assert len(calls) > 10 and run.tokens == plain.tokens


@pytest.mark.parametrize("prompt", [[1], [1, 2]])
def test_a_tree_policy_learns_only_from_rounds_in_which_the_heads_ran(prompt):
    """Not from the first round of a prompt of one token or of one that is in the cache."""
    model, policy, calls = random_model(context=24), AdaptiveTree(FLAT, 0.0), []
    heads, cache = random_medusa_heads(model, 0), model.new_cache()
    model.prefill(prompt[:-1], cache)
    heads.register_forward_hook(lambda *_: calls.append(True))
    options = {"heads": heads, "tree": policy, "cache": cache, "max_new_tokens": 1000}
    run = decode(model, None, prompt, "medusa", **options)
    assert policy.rounds - PRIOR_ROUNDS == len(calls) == len(run.rounds) - 1


def best_value(values: list[float], costs: list[float]) -> float:
    most = min(len(values), len(costs) - 1)
    return max((1 + sum(values[:n])) / costs[n] for n in range(most + 1))


def grow(policy: AdaptiveNodes, children: list[float]) -> tuple[list[int], list[float]]:
    """The widths that a policy chooses for the levels below the first one, if every node has
    children of these probabilities, and the values of all candidates."""
    level, widths, found = torch.tensor(children), [], children
    while n := policy.width(len(widths) + 1, level):
        widths.append(n)
        level = (level.topk(n).values[:, None] * torch.tensor(children)).flatten()
        found = found + level.tolist()
    return widths, [policy.calibration * value for value in found]


@pytest.mark.parametrize("seed", range(10))
def test_a_head_s_tree_keeps_what_is_worth_its_time(seed):
    rng = random.Random(seed)
    curve = [0.0, *itertools.accumulate((rng.random() / 5 for _ in range(20)), initial=1.0)]
    level_costs = {n: n * rng.random() / 20 for n in (1, 2, 4)}
    policy = AdaptiveNodes(curve, level_costs, acceptance=[0.9, 0.9])
    for _ in range(5):
        free_rows, cost, values = rng.randint(1, 40), 0.0, []
        if policy.drafting([]):
            widths, values = grow(policy, [rng.random() / 2 for _ in range(4)])
            cost = sum(level_costs[n] for n in [1, *widths])
        n, rate = policy.choose(values, free_rows), policy.rate
        kept = sorted(values, reverse=True)[: min(free_rows, len(curve) - 2)]
        profits = [
            sum(kept[:m]) - rate * (curve[m + 1] + cost) for m in range(len(kept) + 1)
        ]  # fmt: skip
        assert profits[n] == pytest.approx(max(profits))
        assert policy.costs[n] == pytest.approx(curve[n + 1] + cost)
        policy.observe(n, accepted=rng.randint(0, n))


def test_a_head_expands_further_while_that_pays():
    cheap, one_row, dear = {1: 0.01, 2: 0.01, 4: 0.01}, {1: 0.01, 2: 2.0}, {1: 0.9}
    sure, unsure = [0.9, 0.05], [0.4, 0.3]

    def widths(level_costs: dict, children: list[float]) -> list[int]:
        policy = AdaptiveNodes(FLAT, level_costs, acceptance=children[:1])
        policy.drafting([])
        return grow(policy, children)[0]

    assert widths(cheap, unsure)[:2] == [2, 4] and len(widths(cheap, sure)) == 7
    assert widths(one_row, sure) == [1] * 7 and 0 < len(widths(one_row, unsure)) < 7
    assert widths(dear, unsure) == []


def test_a_promising_chain_needs_no_expansion():
    policy = AdaptiveNodes([0.0, *(1 + n / 10 for n in range(64))], {1: 0.1, 2: 0.1})
    assert not policy.drafting([0.9, 0.9, 0.9, 0.9]) and policy.drafting([0.1])


def test_a_head_that_becomes_right_is_used_again():
    curve = [0.0, *(1 + 0.3 * n for n in range(64))]
    policy = AdaptiveNodes(curve, {1: 0.1, 2: 0.12, 4: 0.15})
    used = []
    for rounds, right in (300, False), (3000, True):
        used.append(0)
        for _ in range(rounds):
            values = grow(policy, [0.9, 0.05])[1] if policy.drafting([]) else []
            drafted = policy.choose(values, 64)
            used[-1] += drafted > 0
            policy.observe(drafted, accepted=min(drafted, 2) if right else 0)
    assert used[0] < 30 and used[1] > 1500, used


def test_values_are_corrected_by_what_was_accepted_and_plain_steps_follow_bad_rounds():
    policy = AdaptiveNodes([0.0, *(1 + n / 5 for n in range(64))], {1: 0.1})
    for _ in range(20):
        values = [policy.calibration * 0.9] * 4 if policy.drafting([]) else []
        policy.observe(policy.choose(values, 64), accepted=0)
    assert policy.calibration < 0.5 and not policy.drafting([])
    assert policy.choose([], 64) == 0  # a plain step


def test_auto_reads_the_heads_acceptance_and_drafts_from_text_for_free():
    model = random_model()
    head, heads = random_mtp_head(model, 0), random_medusa_heads(model, 0)
    head.acceptance, heads.accuracy = [0.3, 0.2], torch.full((4, 10), 0.01)
    (k,) = with_policies("fastmtp", model, {"k": "auto", "head": head})["k"].rates.rate[:1]
    assert k == 0.3
    lookup = with_policies("prompt-lookup", model, {"k": "auto"})["k"]
    assert lookup.costs == [cost_curve(model)[k + 1] for k in range(17)]
    tree = with_policies("medusa", model, {"tree": "auto", "heads": heads})["tree"]
    assert tree.gain < PRIOR_GAIN
