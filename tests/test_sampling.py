"""The warpers yield transformers' distributions; randomness is seeded and unbiased."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import GOLDEN

from minispec import Sampling, UserError
from minispec.sampling import Seeded, argmax, draw, probs


@pytest.mark.parametrize("tiny", [1e-39, 1e-46, 5e-324])
def test_a_tiny_temperature_is_nearly_greedy(tiny):
    p = probs(torch.tensor([[30.0, 70.0, -5.0]]), Sampling(tiny))[0]
    assert p.tolist() == [0.0, 1.0, 0.0]


def test_top_k_keeps_all_ties_at_its_boundary():
    p = probs(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), Sampling(1.0, top_k=1))[0]
    assert p.tolist() == [0.0, 0.5, 0.5, 0.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_most_likely_token_has_the_largest_logit(dtype, temperature):
    """Distributions of half-precision logits are computed in float32."""
    logits = torch.stack([torch.randperm(33) for _ in range(50)]).to(dtype)
    p = probs(logits, Sampling(temperature))
    assert argmax(p) == logits.argmax(-1).tolist()
    assert not temperature or p.dtype == torch.promote_types(dtype, torch.float32)
    assert argmax(probs(logits[:0], Sampling(temperature))) == []


@pytest.mark.parametrize(
    "name, value",
    [("temperature", -1), ("temperature", math.nan), ("top_k", -1), ("top_p", 0), ("top_p", 1.5)],
)
def test_invalid_settings_are_rejected(name, value):
    with pytest.raises(UserError, match="must be"):
        Sampling(**{name: value})


def test_draws_follow_the_distribution_and_never_leave_its_support():
    p, r, n = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0]), Seeded(1), 20_000
    counts = torch.zeros(6)
    for _ in range(n):
        counts[r.categorical(p)] += 1
    assert counts[[0, 2, 5]].sum() == 0
    assert (counts / n - p).abs().max() < 4 * math.sqrt(0.25 / n)
    assert abs(sum(r.bernoulli(0.3) for _ in range(n)) / n - 0.3) < 4 * math.sqrt(0.21 / n)
    assert not any(r.bernoulli(0.0) for _ in range(100))
    assert all(r.bernoulli(1.0) for _ in range(100))


def test_distributions_equal_those_of_transformers_warpers():
    """tests/make_golden.py computed the expected ones with transformers."""
    for case in json.loads((GOLDEN.parent / "golden_probs.json").read_text()):
        logits = torch.tensor([case["logits"]], dtype=torch.float64)
        expected = torch.tensor(case["probs"], dtype=torch.float64)
        p = probs(logits, Sampling(**case["sampling"]))[0]
        torch.testing.assert_close(p, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("top_k", [0, 50])
def test_a_distribution_does_not_depend_on_the_other_rows_of_its_pass(top_k):
    """Ties are common in bfloat16, and top-p must break them the same way in every pass."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(60, 500, generator=generator)).bfloat16().float().round(decimals=1)
    sampling = Sampling(1.0, top_k=top_k, top_p=0.9)
    together = probs(logits, sampling)
    for i in range(60):
        assert torch.equal(probs(logits[i : i + 1], sampling)[0], together[i])


# ---- invalid logits and seeds --------------------------------------------------------------------

NOT_FINITE = math.nan, math.inf


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(1.0), Sampling(0.7, 2), Sampling(1, 0, 0.5)], ids=str
)
@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("row", range(3))
def test_nan_and_infinity_raise_an_error_with_a_hint(value, row, sampling):
    logits = torch.randn(3, 9, dtype=torch.float16)
    logits[:, 4] = -math.inf  # a token that cannot be drawn is allowed
    probs(logits, sampling)
    logits[row, row + 5] = value
    with pytest.raises(UserError, match="infinity in float16: use --dtype bfloat16 or float32"):
        probs(logits, sampling)
    with pytest.raises(UserError, match="in float32: the checkpoint is corrupt"):
        probs(logits.float(), sampling)
    logits[row] = -math.inf
    with pytest.raises(UserError, match="NaN or infinity"):
        probs(logits, sampling)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_draft_from_broken_logits_is_still_a_valid_token(value, temperature):
    token, q = draw(torch.tensor([[1.0, value, 0.0]]), Sampling(temperature), Seeded(0))
    assert token.tolist() in ([0], [1], [2]) and q is None


@pytest.mark.parametrize("seed", [np.int64(7), np.uint8(7)])
def test_a_seed_may_be_a_numpy_integer(seed):
    assert Seeded(seed).uniform() == Seeded(7).uniform()
    Seeded(2**64 - 1), Seeded(-(2**63))


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.5, "7", None])
def test_invalid_seeds_are_rejected(seed):
    with pytest.raises(UserError, match=r"seed .*: must be a whole number from -2\*\*63 to 2"):
        Seeded(seed)
