"""Tokens and losses are the same on a device as on the host, and decoding rarely synchronises."""

import pytest
import torch
from conftest import method_options, random_model, random_tokens
from simulated import DEVICE, Simulated, SimulatedDevice

from minispec import Sampling, distill
from minispec.certify.toys import (
    random_eagle3_head,
    random_medusa_heads,
    random_mtp_head,
    two_languages,
)
from minispec.distill.draft import SoftLabels
from minispec.generate import METHODS, decode
from minispec.methods.adaptive import AdaptiveK, AdaptiveTree
from minispec.methods.vocabulary import Subset
from minispec.model import Transformer
from minispec.sampling import Seeded

CURVE = [0.0, *(1 + 0.02 * n for n in range(64))]
STEEP = [float(n) for n in range(65)]  # drafts never pay

# method; its options besides a draft or heads (or functions that make them from the model); how
# often a greedy and a sampled round synchronise (None: once per draft token and for the target)
CASES = {
    "plain": ("autoregressive", {}, 1, 1),
    "prompt lookup": ("prompt-lookup", {}, 1, 1),
    "jacobi": ("jacobi", {"block": 4}, 1, 1),
    "lookahead": ("lookahead", {"window": 3, "ngram": 3}, 1, 1),
    "draft": ("speculative", {}, 2, None),
    "draft, k by policy": ("speculative", {"k": lambda _: AdaptiveK(CURVE, 0.1)}, 2, None),
    "medusa": ("medusa", {}, 2, 2),
    "draft, plain steps": ("speculative", {"k": lambda _: AdaptiveK(STEEP, 0.1)}, 1, 1),
    "medusa, a tree for each round": (
        "medusa", {"tree": lambda _: AdaptiveTree(CURVE, 0.1, torch.full((4, 10), 0.5))}, 2, 2
    ),
    "medusa, plain steps": (
        "medusa", {"tree": lambda _: AdaptiveTree(STEEP, 0.1, torch.zeros(4, 10))}, 1, 1
    ),
    "medusa, typical": ("medusa-typical", {}, 2, 2),
    "fastmtp": ("fastmtp", {}, 1, None),
    "fastmtp, small vocabulary": ("fastmtp", {"vocabulary": two_languages}, 1, None),
    "hybrid": ("hybrid", {}, 1, None),
    "fastmtp, a tree": ("fastmtp", {"tree": 5}, 2, 2),
    "hybrid, a tree": ("hybrid", {"tree": 5}, 2, 2),
    "eagle3": ("eagle3", {}, 1, None),
    "eagle3, a tree": ("eagle3", {"tree": 5}, 2, 2),
    "fastmtp, plain steps": ("fastmtp", {"k": lambda _: AdaptiveK(STEEP, 0.1)}, 1, 1),
}  # fmt: skip


def prepare(case: str, device) -> tuple[Transformer, str, dict]:
    """A model on the device, the method, and all its options."""
    method, options, *_ = CASES[case]
    model = random_model(5, layers=1).to(device)
    options = {name: x(model) if callable(x) else x for name, x in options.items()}
    return model, method, method_options(model).get(method, {}) | options


@pytest.fixture(autouse=True)
def simulated_device():
    with SimulatedDevice():
        yield


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("case", CASES)
def test_how_often_a_round_synchronises(case, temperature):
    expected = CASES[case][2 + (temperature > 0)]
    model, method, options = prepare(case, DEVICE)
    sampling = Sampling(temperature, top_p=0.95)
    rounds = METHODS[method](model, random_tokens(9), sampling, Seeded(1), **options)
    next(rounds)
    for _ in range(4):
        before = Simulated.synchronisations
        step = next(rounds)
        assert Simulated.synchronisations - before == (expected or len(step.tree))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_conversation_has_the_same_tokens_on_the_device_as_on_the_host(case):
    turns = []
    for device in "cpu", DEVICE:
        model, method, options = prepare(case, device)
        options |= {"temperature": 0.9, "max_new_tokens": 4, "cache": model.new_cache()}
        first = decode(model, None, random_tokens(9), method, **options)
        prompt = random_tokens(9) + first.tokens + random_tokens(4, seed=1)
        second = decode(model, None, prompt, method, **options)
        turns.append((first.tokens, second.tokens, second.cached_tokens))
    assert turns[0] == turns[1] and turns[0][2] == 12


@pytest.mark.parametrize("drafter", ["draft", "medusa", "mtp", "mtp, small vocabulary", "eagle3"])
def test_training_losses_are_the_same_on_the_device_as_on_the_host(drafter):
    def loss(device) -> float:
        model = random_model(5, torch.float32, layers=1).to(device)
        head, heads = random_mtp_head(model, 0).to(device), random_medusa_heads(model, 0).to(device)
        small = random_model(2, torch.float32).to(device)
        rows = [random_tokens(n, n) for n in (9, 6, 12)]
        eagle3 = random_eagle3_head(model, 0).to(device)
        layers = eagle3.feature_layers if drafter == "eagle3" else ()
        states = [model(row, feature_layers=layers)[0].cpu() for row in rows]
        documents = distill.Documents(rows, [3, 3, 3], states)
        subset = Subset(model.lm_head.weight, list(range(3, 32, 2)))
        losses = {
            "draft": lambda: SoftLabels(small, model, documents),
            "medusa": lambda: distill.HeadsLoss(heads, model, documents),
            "mtp": lambda: distill.MTPLoss(head, model, documents, 3, 0.6, True, soft=True),
            "mtp, small vocabulary": lambda: distill.MTPLoss(
                head, model, documents, 3, 0.6, True, vocabulary=subset
            ),
            "eagle3": lambda: distill.MTPLoss(eagle3, model, documents, 3, 0.8, True, soft=True),
        }
        return losses[drafter]()(torch.tensor([0, 2])).item()

    assert loss("cpu") == pytest.approx(loss(DEVICE))


def test_mixing_host_and_device_raises_and_synchronisations_are_counted():
    x = torch.arange(6.0, device=DEVICE)
    with pytest.raises(RuntimeError, match="mixes tensors"):
        x + torch.ones(6)
    before = Simulated.synchronisations
    assert ((x + 1)[2:4] * 2).tolist() == [6.0, 8.0] and x.argmax().item() == 5
    assert x[x > 3].shape == (2,) and float(x.sum()) == 15
    assert Simulated.synchronisations - before == 4
