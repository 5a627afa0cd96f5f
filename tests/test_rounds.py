"""How many tokens a round brings, for each of a method's cases: golden numbers, as a mistake that
costs only speed changes no output. `python tests/make_golden.py rounds` writes them again."""

import functools
import json
from pathlib import Path

import pytest
import torch
from half_right import half_right_cases, repeating_model

from minispec.certify.common import GREEDY
from minispec.certify.methods import cases
from minispec.certify.methods.cases import bound
from minispec.generate import METHODS, decode
from minispec.methods import find_method
from minispec.sampling import Sampling, Seeded

PROMPT = [0, 1, 2, 3, 0, 1, 2, 3]  # a circle of the model
ROUNDS = 16
GOLDEN = Path(__file__).parent / "golden_rounds.json"
pytestmark = pytest.mark.usefixtures("half_right_drafters")


def all_cases(method: str, model) -> dict[str, dict]:
    """The method's cases, and one with another number for each option that is in none of them."""
    declared = find_method(method)
    found = dict(cases.cases_of(declared, model, 1))
    fixed = [options for case, options in found.items() if "=auto" not in case][-1]
    for name, (option, default) in declared.options.items():
        if option.help and option.kind == "number" and not any(name in x for x in found.values()):
            value = option.least if isinstance(default, int) else default / 20
            found[f"{method} {name}={value}"] = fixed | {name: value}
    return found


def means(method: str, options: dict) -> list[float]:
    """The mean number of tokens per round, of a greedy run and of two sampled ones."""
    found = []
    for sampling, seed in (GREEDY, 0), (Sampling(1.0), 1), (Sampling(1.0), 2):
        rounds = bound(method, **options)(repeating_model(4), PROMPT, sampling, Seeded(seed))
        tokens = [len(step.tokens) for step, _ in zip(rounds, range(1 + ROUNDS))]
        found.append(round(sum(tokens) / ROUNDS, 3))
    return found


def all_means(method: str) -> dict[str, list[float]]:
    with half_right_cases(), torch.no_grad():
        found = all_cases(method, repeating_model(4))
        return {name: means(method, options) for name, options in found.items()}


@functools.cache
def golden() -> dict[str, dict[str, list[float]]]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_every_method_has_golden_numbers():
    assert golden().keys() == METHODS.keys()


@pytest.mark.parametrize("method", METHODS)
def test_a_round_brings_as_many_tokens_as_before(method):
    assert all_means(method) == golden()[method]


@pytest.mark.parametrize("method", METHODS)
def test_golden_numbers_show_if_an_option_is_ignored(method):
    """In at least one case, the numbers differ if the option is left out."""
    found, declared = all_cases(method, repeating_model(4)), find_method(method)
    for name in {name for options in found.values() for name in options}:
        if name not in declared.of_kind("weights"):
            assert any(
                means(method, {n: x for n, x in options.items() if n != name})
                != golden()[method][case]
                for case, options in found.items() if name in options
            ), name  # fmt: skip


@pytest.mark.parametrize("method", [m for m in METHODS if "rule" in find_method(m).options])
def test_a_method_does_what_its_rule_says(method):
    """A rule that accepts nothing: one token per round, and still plain decoding's."""

    def never(target, tree, randomness):
        return [0], int(target[0].argmax())

    model = repeating_model(4)
    expected = decode(model, None, PROMPT, max_new_tokens=9).tokens
    for options in dict(cases.cases_of(find_method(method), model, 1)).values():
        options = cases.fresh_options(options) | {"rule": never}
        run = decode(model, None, PROMPT, method, max_new_tokens=9, **options)
        assert run.tokens == expected and run.stats["target_passes"] == 9
