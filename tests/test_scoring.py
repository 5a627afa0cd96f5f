"""Scores of sampled sequences, on models whose distribution is known."""

import math
import random
import re
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import random_model

from minispec.certify import evidence
from minispec.certify.conventions import warper
from minispec.certify.examination import Examination, Request
from minispec.certify.requests import Asked, Place
from minispec.certify.scoring import FIRST, Scores, deviation, normalise_end, smallest_p
from minispec.certify.statistics import bennett_p
from minispec.certify.toys import small_model
from minispec.generate import decode
from minispec.remote.identity import largest_gap
from minispec.sampling import Sampling

PROMPT, UNWARPED = [1, 2, 3], Sampling(1.0)


def score(model, samples, sampling: Sampling = UNWARPED) -> Scores:
    return Scores(model, PROMPT, warper(sampling)).add(samples)


def sample(model, n: int, sampling: Sampling = UNWARPED, length: int = 6) -> list[tuple[int, ...]]:
    eos_ids = model.config.eos_ids
    runs = (decode(model, None, PROMPT, "autoregressive", max_new_tokens=length, seed=seed,
                   temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
            for seed in range(n))  # fmt: skip
    return [normalise_end(run.tokens, eos_ids) for run in runs]


@pytest.mark.parametrize("eos_ids", [(), (2,), (2, 5, 7)])
@pytest.mark.parametrize("sampling", [UNWARPED, Sampling(0.8, top_k=4, top_p=0.9)])
def test_samples_of_the_model_fit_its_cells_and_intervals(eos_ids, sampling):
    model = small_model(3, 8, eos_ids=eos_ids, layers=1)
    samples = sample(model, 80, sampling)
    scores = Scores(model, PROMPT, warper(sampling)).add(samples[:40])
    scores.add(samples)  # the rest of them
    cells = scores.cells(5 / len(samples))
    assert abs(sum(cells.values()) - 1) < 1e-9 and min(cells.values()) > -1e-12
    assert scores.impossible is None and scores.intervals.keys() == set(samples)
    assert smallest_p(scores, samples)[0] > 1e-4
    assert any(len(cell) > 2 for cell in cells)


def test_samples_that_soon_end_fit_as_well():
    """An earlier version left out the pairs whose first token is an end token, so that the first
    tokens of the others were not uniform."""
    model = small_model(3, 8, layers=1)
    likely = int(model.logits(model(PROMPT)[0, -1]).argmax())
    model = small_model(3, 8, eos_ids=(likely,), layers=1)
    samples = sample(model, 300)
    assert min(map(len, samples)) == 1
    assert smallest_p(score(model, samples), samples)[0] > 1e-3


def test_an_interval_is_the_mass_of_more_probable_tokens_and_the_token_s_own():
    model = small_model(3, 8, layers=1)
    p = model.logits(model(PROMPT)[0, -1]).softmax(-1)
    order = p.argsort(descending=True).tolist()
    scores = score(model, [(token,) for token in order])
    for rank, token in enumerate(order):
        ((above, token_p),) = scores.intervals[token,]
        assert token_p == pytest.approx(float(p[token]))
        assert above == pytest.approx(float(p[order[:rank]].sum()))


@pytest.mark.parametrize("position", [0, 2, 5])
def test_a_bias_at_any_position_is_detected(position):
    model, rng = small_model(3, 8, layers=1), random.Random(0)
    samples = [(*s[:position], rng.randrange(8), *s[position + 1 :]) for s in sample(model, 120)]
    p, where, _ = smallest_p(score(model, samples), samples)
    assert p < 1e-6 and (f"{position + 1}" in where or where.startswith((FIRST, "all")))


def test_the_cell_that_deviates_most_is_named_with_a_sample_in_it():
    """Token 5 comes first more often than it should, which the first tokens and bins show."""
    model = small_model(3, 8, layers=1)
    samples = sample(model, 200)
    samples[:80] = [(5, *s[1:]) for s in samples[:80]]
    scores, fair = score(model, samples), sample(model, 200)
    text, index = deviation(scores, samples, None, FIRST)
    found, expected = map(int, re.fullmatch(r"tokens \(5.*\) (\d+) times .* (\d+)", text).groups())
    assert found > 2 * expected and samples[index][0] == 5
    text, index = deviation(scores, samples, None, "token 1")
    assert re.fullmatch(r"bin \(\d,\) of 10, likeliest first, \d+ times instead of 20", text)
    assert samples[index][0] == 5
    text, index = deviation(scores.add(fair), samples, fair, "token 1")
    assert samples[index][0] == 5, text


@pytest.mark.slow
def test_a_small_bias_of_every_token_is_detected_in_all_of_them_together():
    """Each token is drawn at a lower temperature: no single position shows it."""
    model = small_model(3, 8, layers=1)
    samples = sample(model, 150, Sampling(0.75), length=24)
    p, where, _ = smallest_p(score(model, samples), samples)
    assert p < 1e-6 and where.startswith("all "), (p, where)


def test_two_samples_are_compared_and_impossible_tokens_are_named():
    model = small_model(3, 8, layers=1)
    one, other = (both := sample(model, 160))[:80], both[80:]
    scores = score(model, one + other)
    assert smallest_p(scores, one, other)[0] > 1e-4
    cold = sample(model, 80, Sampling(0.3))
    assert smallest_p(score(model, one + cold), one, cold)[0] < 1e-6
    narrow = Sampling(1.0, top_k=2)
    scores = score(model, one, narrow)
    assert scores.impossible and smallest_p(scores, one)[0] == 0


def test_a_token_at_the_threshold_of_a_warper_is_not_a_mistake():
    """Of two equal logits, top-k keeps one only because of rounding."""
    model = random_model(3, tied=False)
    with torch.no_grad():
        model.lm_head.weight[5] = model.lm_head.weight[4] * (1 - 1e-12)
    logits = model.logits(model(PROMPT)[0, -1])
    rank = int((logits > logits[[4, 5]].min()).sum())
    samples = [(4,)] * 5 + [(5,)] * 5
    scores = score(model, samples, Sampling(1.0, top_k=rank))
    assert scores.impossible is None and scores.uncertain(0.5) > 0
    assert score(model, samples, Sampling(1.0, top_k=rank + 1)).uncertain(0.5) == 0
    assert score(model, samples).uncertain(0.5) == 0


def test_only_greedy_tokens_have_a_gap_of_zero():
    model = small_model(3, 8, layers=1)
    best = decode(model, None, PROMPT, "autoregressive", max_new_tokens=6).tokens
    assert largest_gap(model, PROMPT, best) == (0.0, 0, 0)
    other = [*best[:3], (best[3] + 1) % 8]
    logits = model.logits(model(PROMPT + best[:3])[0, -1])
    expected = float(logits.max() - logits[other[3]])
    assert largest_gap(model, PROMPT, other) == (pytest.approx(expected), 3, 1)


def test_a_server_does_not_say_which_end_token_it_drew():
    """All of them count as the first one, and such tokens are evidence like others."""
    place = Place(Examination(None, small_model(3, 8, eos_ids=(5, 7), layers=1)), given=PROMPT)
    for sampling in UNWARPED, Sampling(0.8, top_k=6):
        asked = Asked(place, Request(PROMPT, 2, sampling))
        found = [evidence.score(asked, [2, end], np.random.default_rng(0)) for end in (5, 7)]
        assert (found[0].u == found[1].u).all() and found[0].counts.all()
        assert found[0].impossible == [None] * len(found[0].impossible)


def test_end_tokens_are_normalised():
    assert normalise_end([3, 7, 5, 2], (5, 7)) == (3, 5) and normalise_end([3, 2], (5,)) == (3, 2)
    assert Counter([normalise_end([], ())]) == {(): 1}


def test_bennetts_bound_is_above_the_probability_of_a_binomial_tail():
    n, p = 400, 0.2
    for excess in 20, 40, 60:
        tail = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(80 + excess, n + 1))
        assert tail < bennett_p(excess, n * p * (1 - p)) < 300 * tail
    assert bennett_p(0.0, 0.0) == 1.0


def test_repeated_noise_repeats_tokens_more_often_than_expected():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(6), 200)
    noise = rng.random(200)
    for period, least, most in (20, 20.0, 1e9), (200, -15.0, 15.0):
        tokens = [int((row.cumsum() < noise[i % period]).sum()) for i, row in enumerate(p)]
        assert least < evidence.count_repeats(p, tokens)[19, 0] < most
