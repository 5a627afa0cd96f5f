"""What is said of drawn sequences, on models whose distribution is known."""

import random
from collections import Counter

import pytest
import torch
from conftest import random_model

from minispec.certify.others.scoring import gaps, least_p, one_end, scored
from minispec.generate import decode
from minispec.sampling import Sampling
from minispec.toys import small_model

PROMPT, HOT = [1, 2, 3], Sampling(1.0)


def drawn_by(model, n: int, sampling: Sampling = HOT, length: int = 6) -> list[tuple[int, ...]]:
    ends = model.config.eos_ids
    runs = (decode(model, None, PROMPT, "autoregressive", max_new_tokens=length, seed=seed,
                   temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
            for seed in range(n))  # fmt: skip
    return [one_end(run.tokens, ends) for run in runs]


@pytest.mark.parametrize("ends", [(), (2,), (2, 5, 7)])
@pytest.mark.parametrize("sampling", [HOT, Sampling(0.8, top_k=4, top_p=0.9)])
def test_what_the_model_draws_is_uniform_in_its_cells_and_places(ends, sampling):
    model = small_model(3, 8, eos_ids=ends, layers=1)
    drawn = drawn_by(model, 80, sampling)
    found = scored(model, PROMPT, drawn, sampling)
    assert abs(sum(found.cells.values()) - 1) < 1e-9 and min(found.cells.values()) > -1e-12
    assert found.never is None and set(map(found.cell, drawn)) <= found.cells.keys()
    assert least_p(found, drawn)[0] > 1e-4
    assert any(len(cell) > 2 for cell in found.cells)


def test_a_place_is_what_was_more_probable_and_the_token_s_own_probability():
    model = small_model(3, 8, layers=1)
    p = model.logits(model(PROMPT)[0, -1]).softmax(-1)
    order = p.argsort(descending=True).tolist()
    found = scored(model, PROMPT, [(token,) for token in order], HOT)
    for rank, token in enumerate(order):
        ((above, own),) = found.places[token,]
        assert own == pytest.approx(float(p[token]))
        assert above == pytest.approx(float(p[order[:rank]].sum()))


@pytest.mark.parametrize("place", [0, 2, 5])
def test_a_bias_at_any_place_is_seen_there(place):
    model, rng = small_model(3, 8, layers=1), random.Random(0)
    drawn = [(*s[:place], rng.randrange(8), *s[place + 1 :]) for s in drawn_by(model, 120)]
    p, detail = least_p(scored(model, PROMPT, drawn, HOT), drawn)
    where = detail.split(" at ")[1]
    assert p < 1e-6 and (f"{place + 1}" in where or where.startswith("the first tokens"))


def test_what_two_drew_is_compared_and_impossible_tokens_are_named():
    model = small_model(3, 8, layers=1)
    one, other = (both := drawn_by(model, 160))[:80], both[80:]
    found = scored(model, PROMPT, one + other, HOT)
    assert least_p(found, one, other)[0] > 1e-4
    cold = drawn_by(model, 80, Sampling(0.3))
    assert least_p(scored(model, PROMPT, one + cold, HOT), one, cold)[0] < 1e-6
    narrow = Sampling(1.0, top_k=2)
    found = scored(model, PROMPT, one, narrow)
    assert found.never and least_p(found, one)[0] == 0


def test_a_token_at_the_edge_of_a_warper_is_no_mistake():
    """Two equal logits, of which top-k keeps one by rounding only."""
    model = random_model(3, tied=False)
    with torch.no_grad():
        model.lm_head.weight[5] = model.lm_head.weight[4] * (1 - 1e-12)
    logits = model.logits(model(PROMPT)[0, -1])
    rank = int((logits > logits[[4, 5]].min()).sum())
    drawn = [(4,)] * 5 + [(5,)] * 5
    found = scored(model, PROMPT, drawn, Sampling(1.0, top_k=rank))
    assert found.never is None and found.unsure > 0
    assert scored(model, PROMPT, drawn, Sampling(1.0, top_k=rank + 1)).unsure == 0
    assert scored(model, PROMPT, drawn, Sampling(1.0)).unsure == 0


def test_greedy_tokens_have_no_gap_and_others_theirs():
    model = small_model(3, 8, layers=1)
    best = decode(model, None, PROMPT, "autoregressive", max_new_tokens=6).tokens
    assert gaps(model, PROMPT, best) == [0.0] * 6
    other = [*best[:3], (best[3] + 1) % 8]
    found = gaps(model, PROMPT, other)
    logits = model.logits(model(PROMPT + best[:3])[0, -1])
    assert found[:3] == [0.0] * 3 and found[3] == pytest.approx(
        float(logits.max() - logits[other[3]])
    )


def test_the_end_tokens_are_one():
    assert one_end([3, 7, 5, 2], (5, 7)) == (3, 5) and one_end([3, 2], (5,)) == (3, 2)
    assert Counter([one_end([], ())]) == {(): 1}
