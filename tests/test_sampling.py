"""Warpers give transformers' distributions; randomness is fresh, seeded and unbiased."""

import json
import math

import pytest
import torch
from conftest import GOLDEN

from minispec import Sampling, UserError
from minispec.sampling import OneHot, Seeded, draw, likeliest, probs


def plainly(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The same distribution in pure Python, token by token."""
    x = [value / temperature for value in logits]
    if top_k:
        least = sorted(x, reverse=True)[min(top_k, len(x)) - 1]
        x = [v if v >= least else -math.inf for v in x]
    weights = [math.exp(v - max(x)) for v in x]
    p = [w / sum(weights) for w in weights]
    kept, total = set(), 0.0
    for i in sorted(range(len(p)), key=lambda i: -p[i]):
        if total < top_p - 1e-12:  # the smallest set that reaches top_p
            kept.add(i)
        total += p[i]
    mass = sum(p[i] for i in kept)
    return [p[i] / mass if i in kept else 0.0 for i in range(len(p))]


@pytest.mark.parametrize("seed", range(40))
def test_the_distribution_equals_the_plain_definition(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(5, 17, generator=generator, dtype=torch.float64)
    temperature, top_k, top_p = (
        (0.3, 1.0, 2.5)[seed % 3],
        (0, 1, 5, 40)[seed % 4],
        (1.0, 0.9, 0.3)[seed % 3],
    )
    warped = probs(logits, Sampling(temperature, top_k, top_p))
    for row, p in zip(logits.tolist(), warped):
        expected = torch.tensor(plainly(row, temperature, top_k, top_p), dtype=torch.float64)
        torch.testing.assert_close(p, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tiny", [1e-39, 1e-46, 5e-324])
def test_a_tiny_temperature_is_nearly_greedy(tiny):
    p = probs(torch.tensor([[30.0, 70.0, -5.0]]), Sampling(tiny))[0]
    assert p.tolist() == [0.0, 1.0, 0.0]


def test_ties_at_the_top_k_boundary_all_stay():
    p = probs(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), Sampling(1.0, top_k=1))[0]
    assert p.tolist() == [0.0, 0.5, 0.5, 0.0]


def test_temperature_zero_is_one_hot_at_the_argmax():
    greedy = probs(torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]]), Sampling())
    assert isinstance(greedy, OneHot) and greedy.tokens == [1, 0]
    assert greedy[0].tolist() == [0.0, 1.0, 0.0] and len(greedy) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_likeliest_token_is_the_largest_logit(dtype, temperature):
    logits = torch.stack([torch.randperm(33) for _ in range(50)]).to(dtype)
    assert likeliest(probs(logits, Sampling(temperature))) == logits.argmax(-1).tolist()
    assert likeliest(probs(logits[:0], Sampling(temperature))) == []


def test_a_draft_comes_with_the_distribution_it_was_drawn_from():
    logits = torch.randn(1, 33)
    token, q = draw(logits, Sampling(), Seeded(0))
    assert token.tolist() == logits.argmax(-1).tolist() and q is None
    sampling = Sampling(1.5, top_k=20)
    token, q = draw(logits, sampling, Seeded(4))
    assert torch.equal(q, probs(logits, sampling)[0])
    assert token.tolist() == [Seeded(4).categorical(q)]


def test_half_precision_logits_give_float32_distributions():
    p = probs(torch.randn(1, 9).bfloat16(), Sampling(1.0))[0]
    assert p.dtype == torch.float32 and abs(p.sum() - 1) < 1e-6


WRONG = [
    {"temperature": -1},
    {"temperature": math.nan},
    {"top_k": -1},
    {"top_p": 0},
    {"top_p": 1.5},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(UserError, match="must be"):
        Sampling(**wrong)


def test_a_seed_reproduces_and_every_draw_is_fresh():
    p = torch.full((50,), 0.02)
    a, b, c = ([r.categorical(p) for _ in range(20)] for r in (Seeded(3), Seeded(3), Seeded(4)))
    assert a == b != c and len(set(a)) > 10


def test_draws_follow_the_distribution_and_never_leave_its_support():
    p, r, n = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0]), Seeded(1), 20_000
    counts = torch.zeros(6)
    for _ in range(n):
        counts[r.categorical(p)] += 1
    assert counts[[0, 2, 5]].sum() == 0
    assert (counts / n - p).abs().max() < 4 * math.sqrt(0.25 / n)
    assert abs(sum(r.bernoulli(0.3) for _ in range(n)) / n - 0.3) < 4 * math.sqrt(0.21 / n)
    assert not any(r.bernoulli(0.0) for _ in range(100)) and all(
        r.bernoulli(1.0) for _ in range(100)
    )


def test_the_distribution_equals_that_of_transformers_warpers():
    """Those that tests/make_golden.py had transformers' own warpers compute."""
    for case in json.loads((GOLDEN.parent / "golden_probs.json").read_text()):
        logits = torch.tensor([case["logits"]], dtype=torch.float64)
        expected = torch.tensor(case["probs"], dtype=torch.float64)
        p = probs(logits, Sampling(**case["sampling"]))[0]
        torch.testing.assert_close(p, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("top_k", [0, 50])
def test_a_distribution_does_not_depend_on_the_other_rows_of_its_pass(top_k):
    """Ties are common in bfloat16, and top-p must cut them the same way in every pass."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(60, 500, generator=generator)).bfloat16().float().round(decimals=1)
    sampling = Sampling(1.0, top_k=top_k, top_p=0.9)
    together = probs(logits, sampling)
    for i in range(60):
        assert torch.equal(probs(logits[i : i + 1], sampling)[0], together[i])
