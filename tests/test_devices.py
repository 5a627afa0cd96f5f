"""Every method on a device other than the host: the same tokens, and how often a round waits."""

import pytest
import torch
from conftest import random_model, random_tokens
from simulated import DEVICE, Running, Simulated

from minispec import Sampling
from minispec.generate import METHODS, decode
from minispec.methods.adaptive import BestTree, Length
from minispec.model import Transformer
from minispec.sampling import Seeded
from minispec.toys import random_head, random_heads, switching

K = 3
CURVE = [0.0, *(1 + 0.02 * n for n in range(64))]


def draft_options(model: Transformer, place) -> dict:
    return {"draft": random_model(1, layers=1).to(place), "k": K}


def head_options(model: Transformer, place) -> dict:
    return {"head": random_head(model, 2).to(place), "k": K}


def small_vocabulary(model: Transformer, place) -> dict:
    return head_options(model, place) | {"vocabulary": switching(model)}


def heads_options(model: Transformer, place) -> dict:
    return {"heads": random_heads(model, 3).to(place), "tree": [(0, 0, 0), (1,), (0, 1)]}


# method, options, and how often a greedy and a sampled round wait for the device
CASES = {
    "plain": ("autoregressive", lambda model, place: {}, 1, 1),
    "prompt lookup": ("prompt-lookup", lambda model, place: {}, 1, 1),
    "jacobi": ("jacobi", lambda model, place: {"block": 4}, 1, 1),
    "lookahead": ("lookahead", lambda model, place: {"window": 3, "ngram": 3}, 1, 1),
    "draft": ("speculative", draft_options, 2, K + 1),
    "medusa": ("medusa", heads_options, 2, 2),
    "medusa, a tree for each round": (
        "medusa", lambda model, place: heads_options(model, place) | {"tree": BestTree(CURVE, 0.1)},
        2, 2,
    ),
    "medusa, typical": ("medusa-typical", heads_options, 2, 2),
    "fastmtp": ("fastmtp", head_options, 2, K + 1),
    "fastmtp, small vocabulary": ("fastmtp", small_vocabulary, 2, K + 1),
}  # fmt: skip


@pytest.fixture(autouse=True)
def running():
    with Running():
        yield


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("case", CASES)
def test_how_often_a_round_waits_for_the_device(case, temperature):
    method, options, *waits = CASES[case]
    model = random_model(5, layers=1).to(DEVICE)
    more, sampling = options(model, DEVICE), Sampling(temperature, top_p=0.95)
    rounds = METHODS[method](model, random_tokens(9), sampling, Seeded(1), **more)
    next(rounds)
    for _ in range(4):
        before = Simulated.crossings
        next(rounds)
        assert Simulated.crossings - before == waits[temperature > 0]


def test_as_many_drafts_as_a_policy_says_wait_no_more_often():
    model = random_model(5, layers=1).to(DEVICE)
    more = draft_options(model, DEVICE) | {"k": Length(CURVE, 0.1)}
    rounds = METHODS["speculative"](model, random_tokens(9), Sampling(), Seeded(1), **more)
    next(rounds)
    for _ in range(4):
        before = Simulated.crossings
        next(rounds)
        assert Simulated.crossings - before == 2


@pytest.mark.parametrize("case", CASES)
def test_a_conversation_says_on_the_device_what_it_says_on_the_host(case):
    method, options, *_ = CASES[case]
    turns = []
    for place in ("cpu", DEVICE):
        model = random_model(5, layers=1).to(place)
        more = options(model, place) | {"temperature": 0.9, "max_new_tokens": 4}
        cache = model.new_cache()
        first = decode(model, None, random_tokens(9), method, cache=cache, **more)
        prompt = random_tokens(9) + first.tokens + random_tokens(4, seed=1)
        second = decode(model, None, prompt, method, cache=cache, **more)
        turns.append((first.tokens, second.tokens, second.cached_tokens))
    assert turns[0] == turns[1] and turns[0][2] == 12


def test_what_mixes_host_and_device_is_refused_and_what_crosses_is_counted():
    ours = torch.arange(6.0, device=DEVICE)
    with pytest.raises(RuntimeError, match="mixes tensors"):
        ours + torch.ones(6)
    before = Simulated.crossings
    assert ((ours + 1)[2:4] * 2).tolist() == [6.0, 8.0] and ours.argmax().item() == 5
    assert ours[ours > 3].shape == (2,) and float(ours.sum()) == 15
    assert Simulated.crossings - before == 4
