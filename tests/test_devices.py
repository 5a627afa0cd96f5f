"""Tokens and losses are the same on a device as on the host, and decoding rarely synchronises."""

import pytest
import torch
from conftest import kinds_of_cases, random_model, random_tokens, waits_of
from half_right import repeating_model
from simulated import DEVICE, Simulated, SimulatedDevice

from minispec import Sampling, distill
from minispec.certify.methods import cases
from minispec.certify.toys import (
    random_eagle3_head,
    random_medusa_heads,
    random_mtp_head,
    two_languages,
)
from minispec.distill.draft import SoftLabels
from minispec.generate import METHODS, decode
from minispec.methods.adaptive import AdaptiveNodes
from minispec.methods.vocabulary import Subset
from minispec.model import Transformer
from minispec.sampling import Seeded
from minispec.tree import Step

CASES = {name: method for method in METHODS for name in kinds_of_cases(method, random_model())}
PROMPT = [0, 1, 2, 3, 0, 1, 2, 3]  # a circle of the model
pytestmark = pytest.mark.usefixtures("half_right_drafters")


def prepare(case: str) -> tuple[Transformer, dict]:
    """A model that repeats itself and the options of a case, on the host: building them there is
    faster outside of SimulatedDevice."""
    model = repeating_model(4)
    return model, cases.fresh_options(kinds_of_cases(CASES[case], model, 1)[case])


def to_device(model: Transformer, options: dict) -> dict:
    """Move a model and the options of a case to the device."""
    model.to(DEVICE)
    moved = {name: x.to(DEVICE) for name, x in options.items() if isinstance(x, torch.nn.Module)}
    words = {name: two_languages(model) for name in options.keys() & {"vocabulary"}}
    return options | moved | words


@pytest.fixture
def simulated_device():
    with SimulatedDevice():
        yield


def most_waits(method: str, options: dict, step: Step, sampled: bool) -> int:
    """By the method's declaration. A round that drafts nothing waits once, unless a policy has seen
    candidates and kept none; one that copies from the text does not wait for a drafter."""
    if len(step.tree) == 1 and not hasattr(options.get("tree"), "choose"):
        return 1
    drawn = sum(q is not None for q in step.tree.draft_probs)
    greedy, of_sampled = waits_of(method, options)
    if of_sampled is None:
        return 1 + drawn if drawn else greedy
    return of_sampled if sampled else greedy


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=pytest.mark.slow if "probing" in case else ()) for case in CASES
])  # fmt: skip
def test_how_often_a_round_synchronises(case, monkeypatch):
    """Each level of a tree that a policy may expand is one more: it sees the candidates' values."""

    def width(policy, level, values):
        levels.extend([level] * (level < policy.max_depth))
        return original(policy, level, values)

    levels, original = [], AdaptiveNodes.width
    monkeypatch.setattr(AdaptiveNodes, "width", width)
    model, options = prepare(case)
    with SimulatedDevice():
        options = to_device(model, options)
        run, exact = cases.bound(CASES[case], **options), []
        for temperature in 0.0, 0.9:
            rounds = run(model, PROMPT, Sampling(temperature, top_p=0.95), Seeded(1))
            next(rounds)
            for _ in range(6):
                before = Simulated.synchronisations
                levels.clear()
                step = next(rounds)
                waited = Simulated.synchronisations - before - len(levels)
                most = most_waits(CASES[case], options, step, temperature > 0)
                assert 1 <= waited <= most
                exact.append(waited == most and len(step.tree) > 1)
    assert any(exact) or case == "autoregressive"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_conversation_has_the_same_tokens_on_the_device_as_on_the_host(case):
    turns = []
    for on_device in False, True:
        model, options = prepare(case)
        with SimulatedDevice():
            options = to_device(model, options) if on_device else options
            options |= {"temperature": 0.9, "max_new_tokens": 4, "cache": model.new_cache()}
            first = decode(model, None, PROMPT, CASES[case], **options)
            prompt = PROMPT + first.tokens + [5, 6, 4]
            second = decode(model, None, prompt, CASES[case], **options)
        turns.append((first.tokens, second.tokens, second.cached_tokens))
    assert turns[0] == turns[1] and turns[0][2] == len(PROMPT) + 3


@pytest.mark.parametrize("drafter", ["draft", "medusa", "mtp", "mtp, small vocabulary", "eagle3"])
def test_training_losses_are_the_same_on_the_device_as_on_the_host(drafter, simulated_device):
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


def test_mixing_host_and_device_raises_and_synchronisations_are_counted(simulated_device):
    x = torch.arange(6.0, device=DEVICE)
    with pytest.raises(RuntimeError, match="mixes tensors"):
        x + torch.ones(6)
    before = Simulated.synchronisations
    assert ((x + 1)[2:4] * 2).tolist() == [6.0, 8.0] and x.argmax().item() == 5
    assert x[x > 3].shape == (2,) and float(x.sum()) == 15
    assert Simulated.synchronisations - before == 4
