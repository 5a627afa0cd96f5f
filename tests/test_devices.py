"""On a device other than the host: the same tokens and losses, and how often a round waits."""

import pytest
import torch
from conftest import companions, random_model, random_tokens
from simulated import DEVICE, Running, Simulated

from minispec import Sampling
from minispec.generate import METHODS, decode
from minispec.methods.adaptive import AdaptiveK, AdaptiveTree
from minispec.methods.vocabulary import Subset
from minispec.model import Transformer
from minispec.sampling import Seeded
from minispec.toys import random_head, random_heads, switching
from minispec.training import distill
from minispec.training.distill.draft import SoftLabels

CURVE = [0.0, *(1 + 0.02 * n for n in range(64))]

# method, its options beside a draft or heads (functions: of the model), how often a greedy round
# waits for the device, and a sampled one: None for once a draft and once for the target
CASES = {
    "plain": ("autoregressive", {}, 1, 1),
    "prompt lookup": ("prompt-lookup", {}, 1, 1),
    "jacobi": ("jacobi", {"block": 4}, 1, 1),
    "lookahead": ("lookahead", {"window": 3, "ngram": 3}, 1, 1),
    "draft": ("speculative", {}, 2, None),
    "draft, k by policy": ("speculative", {"k": lambda _: AdaptiveK(CURVE, 0.1)}, 2, None),
    "medusa": ("medusa", {}, 2, 2),
    "medusa, a tree for each round": ("medusa", {"tree": AdaptiveTree(CURVE, 0.1)}, 2, 2),
    "medusa, typical": ("medusa-typical", {}, 2, 2),
    "fastmtp": ("fastmtp", {}, 2, None),
    "fastmtp, small vocabulary": ("fastmtp", {"vocabulary": switching}, 2, None),
}


def prepared(case: str, place) -> tuple[Transformer, str, dict]:
    """A model there, the method and all its options."""
    method, given, *_ = CASES[case]
    model = random_model(5, layers=1).to(place)
    given = {name: x(model) if callable(x) else x for name, x in given.items()}
    return model, method, companions(model).get(method, {}) | given


@pytest.fixture(autouse=True)
def running():
    with Running():
        yield


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("case", CASES)
def test_how_often_a_round_waits_for_the_device(case, temperature):
    waits = CASES[case][2 + (temperature > 0)]
    model, method, options = prepared(case, DEVICE)
    sampling = Sampling(temperature, top_p=0.95)
    rounds = METHODS[method](model, random_tokens(9), sampling, Seeded(1), **options)
    next(rounds)
    for _ in range(4):
        before = Simulated.crossings
        step = next(rounds)
        assert Simulated.crossings - before == (waits or len(step.tree))


@pytest.mark.parametrize("case", CASES)
def test_a_conversation_says_on_the_device_what_it_says_on_the_host(case):
    turns = []
    for place in "cpu", DEVICE:
        model, method, options = prepared(case, place)
        options |= {"temperature": 0.9, "max_new_tokens": 4, "cache": model.new_cache()}
        first = decode(model, None, random_tokens(9), method, **options)
        prompt = random_tokens(9) + first.tokens + random_tokens(4, seed=1)
        second = decode(model, None, prompt, method, **options)
        turns.append((first.tokens, second.tokens, second.cached_tokens))
    assert turns[0] == turns[1] and turns[0][2] == 12


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_target_s_own_text_is_on_the_device_what_it_is_on_the_host(temperature):
    def texts(place) -> list[list[int]]:
        model, prompts = random_model(5, layers=1).to(place), [random_tokens(n) for n in (3, 6, 4)]
        sampling, generator = Sampling(temperature, 9, 0.9), torch.Generator().manual_seed(0)
        return distill.sample_batch(model, prompts, 9, sampling, generator)

    assert texts("cpu") == texts(DEVICE)


@pytest.mark.parametrize("trained", ["draft", "medusa", "mtp", "mtp, small vocabulary"])
def test_a_training_s_loss_is_on_the_device_what_it_is_on_the_host(trained):
    def loss(place) -> float:
        model = random_model(5, torch.float32, layers=1).to(place)
        head, heads = random_head(model, 0).to(place), random_heads(model, 0).to(place)
        small = random_model(2, torch.float32).to(place)
        rows = [random_tokens(n, n) for n in (9, 6, 12)]
        states = [model(row)[0].cpu() for row in rows]
        documents = distill.Documents(rows, [3, 3, 3], states)
        words = Subset(model.lm_head.weight, list(range(3, 32, 2)))
        losses = {
            "draft": lambda: SoftLabels(small, model, documents),
            "medusa": lambda: distill.HeadsLoss(heads, model, documents),
            "mtp": lambda: distill.MTPLoss(head, model, documents, 3, 0.6, True, soft=True),
            "mtp, small vocabulary": lambda: distill.MTPLoss(
                head, model, documents, 3, 0.6, True, vocabulary=words
            ),
        }
        return losses[trained]()(torch.tensor([0, 2])).item()

    assert loss("cpu") == pytest.approx(loss(DEVICE))


def test_what_mixes_host_and_device_is_refused_and_what_crosses_is_counted():
    ours = torch.arange(6.0, device=DEVICE)
    with pytest.raises(RuntimeError, match="mixes tensors"):
        ours + torch.ones(6)
    before = Simulated.crossings
    assert ((ours + 1)[2:4] * 2).tolist() == [6.0, 8.0] and ours.argmax().item() == 5
    assert ours[ours > 3].shape == (2,) and float(ours.sum()) == 15
    assert Simulated.crossings - before == 4
