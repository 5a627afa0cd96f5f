"""Other decoders' random numbers: those that can be enumerated, and those that are noticed."""

import bisect
import functools
import hashlib
import itertools
import math
import os
import queue
import random
import secrets
import threading
import time
from collections import Counter
from itertools import accumulate
from random import random as random_before
from random import uniform as uniform_before

import numpy as np
import pytest
import torch
from numpy.random import choice as choice_before
from numpy.random import default_rng as default_rng_before

from minispec.certify.examination import Examination, Request
from minispec.certify.functions.checks import (
    BINARY_PROMPT,
    Limits,
    check_implementation,
    is_exact,
)
from minispec.certify.functions.decoder import FunctionDecoder
from minispec.certify.functions.enumeration import CannotEnumerate, Enumeration
from minispec.certify.functions.toy_checkpoints import write_checkpoint
from minispec.certify.toys import total_variation
from minispec.checkpoints.load import load
from minispec.sampling import Sampling, probs

# ---- ways to draw a token ------------------------------------------------------------------------


def draw_by(way: str, p: torch.Tensor) -> int:
    """Draw a token from a distribution (V,), in a way that an engine might use."""
    logits, last = p.log(), len(p) - 1
    match way:
        case "multinomial":
            return torch.multinomial(p, 1).item()
        case "categorical":
            return torch.distributions.Categorical(probs=p).sample().item()
        case "exponential race":
            return p.div(torch.empty_like(p).exponential_(1)).argmax(-1).item()
        case "race of waiting times":
            return (-torch.rand_like(p).log() / p).argmin(-1).item()
        case "Gumbel":
            noise = -torch.log(-torch.log(torch.rand_like(p) + 1e-20) + 1e-20)
            return (logits + noise).argmax(-1).item()
        case "sum":
            return min(int((p.cumsum(-1) < torch.rand(1)).sum()), last)
        case "in place":
            u = torch.empty(1)
            u.uniform_()
            return min(int((u > p.cumsum(-1)).sum()), last)
        case "searchsorted":
            return min(torch.searchsorted(p.cumsum(-1), torch.rand(1)).item(), last)
        case "python's random":
            u, total = random.random(), 0.0
            for i, weight in enumerate(p.tolist()):
                total += weight
                if u < total:
                    return i
            return last
        case "numpy":
            return min(int((p.cumsum(-1).numpy() < np.random.rand()).sum()), last)
    raise AssertionError(way)


EXACTLY = ("multinomial", "categorical", "exponential race", "race of waiting times", "Gumbel",
           "sum", "in place", "searchsorted", "python's random", "numpy")  # fmt: skip


@pytest.mark.parametrize("way", EXACTLY)
def test_each_way_of_drawing_a_token_has_its_exact_distribution(way):
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    found = Enumeration(lambda seed: (draw_by(way, p), draw_by(way, p))).distribution
    expected = {(i, j): float(p[i] * p[j]) for i in range(3) for j in range(3)}
    assert total_variation(found, expected) < 1e-9


def test_a_uniform_number_compared_twice_keeps_its_value():
    """[0, 0.5) and [0.2, 1): at least one always holds, both with probability 0.3."""

    def function(seed):
        u = torch.rand(2)[1]
        return bool(u < 0.5), bool(1 - u <= 0.8)

    found = Enumeration(function).distribution
    expected = {(True, True): 0.3, (True, False): 0.2, (False, True): 0.5}
    assert total_variation(found, expected) < 1e-9


@pytest.mark.parametrize("function", [
    lambda u: int(u * 3), lambda u: math.floor(float(u) * 3), lambda u: round(u * 3 - 0.5),
    lambda u: int(float(u) * 3), lambda u: int(3 - float(u) * 3),
    lambda u: next(i for i in range(3) if math.log(u) < math.log((i + 1) / 3)),
])  # fmt: skip
@pytest.mark.parametrize("uniform", [
    lambda: random.random(), lambda: torch.rand(1).item(), lambda: np.random.rand(),
    lambda: torch.rand(1),
])  # fmt: skip
def test_rounded_and_converted_numbers_are_followed(function, uniform):
    try:
        function(uniform())
    except TypeError:  # some operations do not know tensors
        return
    found = Enumeration(lambda seed: (int(function(uniform())),)).distribution
    assert total_variation(found, {(i,): 1 / 3 for i in range(3)}) < 1e-9
    assert "float" not in globals() and type(math).__name__ == "module"


def test_a_replaced_float_that_a_library_rejects_is_not_the_decoders_error():
    def function(seed):
        u = float(random.random())
        return (int(u < torch.zeros((), dtype=float) + 0.5),)

    with pytest.raises(CannotEnumerate, match="with intercepted random numbers only"):
        Enumeration(function)
    assert function(0) in ((0,), (1,))


NUMBERS = queue.Queue(maxsize=2)


def fill_numbers():
    while True:
        NUMBERS.put(random.getrandbits(53) / 2**53)


def test_a_thread_that_fills_a_queue_does_not_hang_the_enumeration():
    """An earlier version ended the thread by a CannotEnumerate, and waited for it."""
    threading.Thread(target=fill_numbers, daemon=True).start()
    for _ in range(3):
        with pytest.raises(CannotEnumerate, match="in another thread|from sources other than"):
            Enumeration(lambda seed: tuple(NUMBERS.get() < 0.5 for _ in range(5)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_random_number_that_another_thread_uses_is_noticed():
    def function(seed):
        u = random.random()
        thread = threading.Thread(target=lambda: u < 0.5)
        thread.start()
        thread.join()
        return (0,)

    with pytest.raises(CannotEnumerate, match="a random number in another thread"):
        Enumeration(function)


@pytest.mark.parametrize("function, state", [
    (lambda calls: 1 if calls > 3 else 2, "K may adapt"),
    (lambda calls: calls % 3, "from sources other than"),
])  # fmt: skip
def test_a_number_of_drafts_that_changes_is_not_taken_for_hidden_randomness(function, state):
    calls = itertools.count()

    def draft(seed):
        return tuple(random.random() < 0.5 for _ in range(1 + function(next(calls))))

    with pytest.raises(CannotEnumerate, match=state):
        Enumeration(draft)


@pytest.mark.slow
def test_a_compiled_function_is_followed():
    draw = torch.compile(lambda p: torch.multinomial(p.softmax(-1), 1))
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    found = Enumeration(lambda seed: (draw(p.log()).item(),)).distribution
    assert total_variation(found, {(i,): float(x) for i, x in enumerate(p)}) < 1e-9
    assert random.getstate() and draw(p.log()).item() in range(3)


def swallow_and_raise(seed):
    try:
        return (int(torch.randn(1) > 0),)
    except BaseException:
        raise ValueError("broken") from None


def swallow(seed):
    try:
        return (int(torch.randn(1) > 0),)
    except Exception:
        return (0,)


def twice_the_same_seed(seed):
    first, second = random.Random(seed), random.Random(seed)
    return first.random() < 0.5, second.random() < 0.5


def until_accepted(seed):
    while random.random() > 0.1:
        pass
    return (1,)


def viewed_before(seed):
    buffer = torch.zeros(2)
    first = buffer[0]
    buffer.uniform_()
    return (bool(first < 0.5),)


def unsupported_operator(seed):
    return (int(torch.rand(1) ** 2 < 0.5),)


@pytest.mark.parametrize(
    "function, why",
    [
        (lambda seed: (int(torch.randn(1) > 0),), "it uses torch.randn"),
        (lambda seed: (random.Random(seed).randrange(99),), "it uses randrange of random"),
        (lambda seed: (random.gauss() < 0,), "it uses gauss of random"),
        (lambda seed: (int(hashlib.sha256(b"%d" % seed).digest()[0]),), "from sources other than"),
        (lambda seed: (1,), "it uses no random numbers from torch, "),
        (lambda seed: (int(torch.rand(1) * 2**20),), "calls torch's int with a random number"),
        (lambda seed: (int(random.random() - 0.5),), "calls python's int with a random number"),
        (lambda seed: (int(torch.rand(1) < torch.rand(1)),), "lt with several random numbers"),
        (lambda seed: (int(torch.rand(2).sort().values[0] < 0.5),), "torch's sort"),
        (lambda seed: (int(torch.randint(2**31, (1,))),), "it uses torch.randint"),
        (lambda seed: (draw_by("multinomial", torch.ones(2)), random.Random(3).random() < 0.5),
         "it gives random the same seed in every call"),
        (lambda seed: (torch.manual_seed(0), int(torch.rand(1) < 0.5))[1:], "gives torch the same"),
        (lambda seed: (int(torch.rand(1, generator=torch.Generator().manual_seed(1)) < 0.5),),
         "it gives torch the same seed"),
        (lambda seed: (int(default_rng_before(7).random() < 0.5),), "gives numpy.random.Generator"),
        (twice_the_same_seed, "it draws from random twice after the same seed"),
        (until_accepted, "more than 2000 random choices"),
        (viewed_before, "uses a view of it"),
        (swallow, "it uses torch.randn"),
        (swallow_and_raise, "it uses torch.randn"),
        (unsupported_operator, "calls torch's pow"),
        (lambda seed, before=random.random: (before() < 0.5,), "uses random in a way that cannot"),
    ],
)  # fmt: skip
def test_the_reason_why_enumeration_is_impossible_is_reported(function, why):
    with pytest.raises(CannotEnumerate, match=why):
        Enumeration(function)


# ---- honest decoders -----------------------------------------------------------------------------


def invert(p: torch.Tensor, u) -> int:
    """Return the first token at which the cumulative sum exceeds u."""
    return next((i for i, total in enumerate(accumulate(p.tolist())) if u < total), len(p) - 1)


def cdf(p: torch.Tensor) -> np.ndarray:
    return p.numpy().cumsum()


def in_place(p, _) -> int:
    buffer = torch.empty(1, dtype=p.dtype)
    buffer.uniform_(0, 1)
    return invert(p, buffer)


def rand_out(p, _) -> int:
    buffer = torch.empty(1)
    torch.rand(1, out=buffer)
    return invert(p, buffer)


def in_a_thread(p, _) -> int:
    result: list[int] = []
    thread = threading.Thread(target=lambda: result.append(torch.multinomial(p, 1).item()))
    thread.start()
    thread.join()
    return result[0]


def by_alias_table(p, _) -> int:
    """Vose's alias method for two tokens."""
    small = int(p.argmin())
    i = torch.randint(2, size=(1,)).item()
    return i if i == 1 - small or torch.rand(()).item() < 2 * p[small] else 1 - small


def by_rejection(p, _) -> int:
    while True:
        token = random.randrange(len(p))
        if random.random() * float(p.max()) < p[token]:
            return token


def hard_gumbel(p, _) -> int:
    return torch.nn.functional.gumbel_softmax(p.log(), hard=True).argmax().item()


def box_muller(p, _) -> int:
    return invert(p, 0.5 * (1 + torch.erf(torch.randn(()) / 2**0.5)).item())


class Congruential:
    """A decoder's own generator, SplitMix64."""

    def __init__(self, seed: int):
        self.state = seed

    def random(self) -> float:
        self.state = (self.state + 0x9E3779B97F4A7C15) % 2**64
        z = self.state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return (z ^ (z >> 31)) / 2**64


class Digests:
    def __init__(self, seed: int):
        self.seed, self.n = seed, 0

    def random(self) -> float:
        self.n += 1
        digest = hashlib.sha256(f"{self.seed} {self.n}".encode()).digest()
        return int.from_bytes(digest[:6], "big") / 2**48


# names in modules are intercepted, others are not
PYTHON, NUMPY, TORCH = random.Random(1), np.random.default_rng(2), torch.Generator().manual_seed(3)
HIDDEN = {"numpy": np.random.default_rng(4), "python": random.Random(5),
          "default_rng": np.random.default_rng, "seed": random.seed}  # fmt: skip
gumbel = np.random.default_rng().gumbel


def nothing(seed: int) -> None:
    """The decoder ignores the seed."""


def seed_numpy(seed: int) -> None:
    np.random.seed(seed)


def seed_python(seed: int) -> None:
    random.seed(seed)


def seed_torch(seed: int) -> None:
    torch.manual_seed(seed)


def rng(seed: int):
    return np.random.default_rng(seed)


ENUMERATED = {  # a function of the seed, and the draw, a function of p and that function's result
    "choice": (seed_numpy, lambda p, _: np.random.choice(len(p), p=p.numpy())),
    "choice, imported": (seed_numpy, lambda p, _: choice_before(2, p=p.numpy())),
    "choice of an array": (seed_numpy, lambda p, _: np.random.choice([0, 1], 1, p=p.numpy())[0]),
    "rand": (nothing, lambda p, _: int((cdf(p) < np.random.rand()).sum())),
    "random_sample": (seed_numpy, lambda p, _: np.searchsorted(cdf(p), np.random.random_sample())),
    "random(1)": (seed_numpy, lambda p, _: np.searchsorted(cdf(p), np.random.random(1))[0]),
    "uniform": (nothing, lambda p, _: np.argmax(cdf(p) > np.random.uniform(0, cdf(p)[-1]))),
    "numpy multinomial": (nothing, lambda p, _: np.random.multinomial(1, p).argmax()),
    "RandomState": (lambda s: np.random.RandomState(s), lambda p, rng: rng.choice(2, p=p.numpy())),
    "Generator choice": (rng, lambda p, rng: rng.choice(2, p=p.numpy())),
    "Generator random": (rng, lambda p, rng: np.digitize(rng.random(), cdf(p))),
    "default_rng, imported": (lambda s: default_rng_before(s),
                              lambda p, rng: invert(p, rng.random())),
    "Generator of a bit generator": (lambda s: np.random.Generator(np.random.PCG64(s)),
                                     lambda p, rng: invert(p, rng.uniform())),
    "Generator multinomial": (rng, lambda p, rng: rng.multinomial(1, p.numpy()).argmax()),
    "Generator gumbel": (rng, lambda p, rng: np.argmax(np.log(p.numpy()) + rng.gumbel(size=2))),
    "numpy Gumbel": (rng, lambda p, r: (np.log(p.numpy()) - np.log(-np.log(r.random(2)))).argmax()),
    "module's Generator": (nothing, lambda p, _: NUMPY.choice(2, p=p.numpy())),
    "choices": (seed_python, lambda p, _: random.choices(range(2), p.tolist())[0]),
    "choices, cumulative": (seed_python,
                            lambda p, _: random.choices((0, 1), cum_weights=cdf(p).tolist())[0]),
    "random, imported": (seed_python, lambda p, _: invert(p, random_before())),
    "uniform, imported": (nothing, lambda p, _: invert(p, uniform_before(0, 1))),
    "Random": (lambda s: random.Random(s), lambda p, r: bisect.bisect(cdf(p).tolist(), r.random())),
    "module's Random": (nothing, lambda p, _: invert(p, PYTHON.random())),
    "seeded by the time": (lambda s: random.Random(time.time_ns()),
                           lambda p, rng: invert(p, rng.random())),
    "multinomial": (seed_torch, lambda p, _: torch.multinomial(input=p, num_samples=1).item()),
    "multinomial, generator": (lambda s: torch.Generator().manual_seed(s),
                               lambda p, g: p[None].multinomial(1, generator=g)[0, 0].item()),
    "module's torch.Generator": (nothing, lambda p, _: torch.multinomial(p, 1, generator=TORCH)),
    "Categorical": (seed_torch, lambda p, _: torch.distributions.Categorical(p).sample().item()),
    "torch Gumbel": (seed_torch, lambda p, _: torch.argmax(p.log() - (-torch.rand(2).log()).log())),
    "torch race": (seed_torch, lambda p, _: (p / torch.empty(2).exponential_()).argmax().item()),
    "bernoulli": (seed_torch, lambda p, _: int(torch.bernoulli(p[1]).item())),
    "bernoulli in place": (seed_torch, lambda p, _: int(torch.empty(1).bernoulli_(p[1]).item())),
    "uniform in place": (seed_torch, in_place),
    "rand with out": (seed_torch, rand_out),
}  # fmt: skip
NOT_ENUMERATED = {
    "binomial": (nothing, lambda p, _: np.random.binomial(1, p[1].item())),
    "Generator exponential": (rng, lambda p, rng: np.argmin(rng.exponential(size=2) / p.numpy())),
    "SystemRandom": (lambda s: secrets.SystemRandom(), lambda p, rng: invert(p, rng.random())),
    "SystemRandom choices": (lambda s: random.SystemRandom(),
                             lambda p, rng: rng.choices((0, 1), p.tolist())[0]),
    "alias table": (seed_torch, by_alias_table),
    "hidden Generator": (nothing, lambda p, _: HIDDEN["numpy"].choice(2, p=p.numpy())),
    "hidden Random": (nothing, lambda p, _: invert(p, HIDDEN["python"].random())),
    "hidden default_rng": (HIDDEN["default_rng"], lambda p, rng: invert(p, rng.random())),
    "hidden seed": (HIDDEN["seed"], lambda p, _: invert(p, random.random())),
    "ndarray.searchsorted": (seed_numpy, lambda p, _: cdf(p).searchsorted(np.random.rand())),
    "bound method": (nothing, lambda p, _: np.argmax(np.log(p.numpy()) + gumbel(size=2))),
    "default argument": (seed_python, lambda p, _, u=random.random: invert(p, u())),
    "rejection": (seed_python, by_rejection),
    "power": (seed_numpy, lambda p, _: int(np.random.rand() ** 2 > (1 - p[1]) ** 2)),
    "rounded": (seed_python, lambda p, _: invert(p, int(random.random() * 2**24) / 2**24)),
    "randbelow": (nothing, lambda p, _: invert(p, secrets.randbelow(2**40) / 2**40)),
    "urandom": (nothing, lambda p, _: invert(p, int.from_bytes(os.urandom(6), "big") / 2**48)),
    "the time": (nothing, lambda p, _: invert(p, Digests(time.perf_counter_ns()).random())),
    "digests": (Digests, lambda p, rng: invert(p, rng.random())),
    "own generator": (Congruential, lambda p, rng: invert(p, rng.random())),
    "gumbel_softmax": (seed_torch, hard_gumbel),
    "randint": (seed_torch, lambda p, _: invert(p, torch.randint(2**30, size=(1,)) / 2**30)),
    "normal": (seed_torch, box_muller),
    "thread": (seed_torch, in_a_thread),
}  # fmt: skip


@functools.cache
def probabilities(folder: str, tokens: tuple[int, ...], sampling: Sampling) -> torch.Tensor:
    model = loaded(folder)
    return probs(model.logits(model(list(tokens))[0, -1:]), sampling)[0]


loaded = functools.cache(lambda folder: load(folder, "float64", "cpu")[0])


def decoder_of(start, draw):
    """Plain decoding, as a black box."""

    def implementation(folder, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
        generator, tokens = start(seed), list(prompt)
        while len(tokens) < len(prompt) + max_new_tokens:
            p = probabilities(folder, tuple(tokens), Sampling(temperature, top_k, top_p))
            tokens.append(draw(p, generator))
        return tokens[len(prompt) :]

    return FunctionDecoder(implementation)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), 23, vocab=2)


def judge(start, draw, checkpoint, temperature=0.7) -> tuple[bool | None, str]:
    folder, model = checkpoint
    exam = Examination(decoder_of(start, draw).at(folder), model)
    request = Request(BINARY_PROMPT, 3, Sampling(temperature))
    return is_exact(exam, request, Limits(outcomes=10))


@pytest.mark.parametrize("way", ENUMERATED)
def test_an_honest_decoder_passes(way, checkpoint):
    passed, detail = judge(*ENUMERATED[way], checkpoint)
    assert passed, detail


@pytest.mark.parametrize("way", NOT_ENUMERATED)
def test_an_honest_decoder_that_cannot_be_enumerated_is_skipped(way, checkpoint):
    passed, detail = judge(*NOT_ENUMERATED[way], checkpoint)
    assert passed is None and "cannot be enumerated" in detail


@pytest.mark.slow
@pytest.mark.parametrize("way", ["choice", "random, imported", "torch race"])
def test_a_biased_decoder_still_fails(way, checkpoint):
    start, draw = ENUMERATED[way]

    def argmax_second(p, state):
        state[0] += 1
        return int(p.argmax()) if state[0] == 2 else draw(p, state[1])

    def resampled_from_p(p, state):
        token = draw(torch.full_like(p, 0.5), state[1])
        chance = float((p[token] / 0.5).clamp(max=1))
        accepted = draw(torch.tensor([1 - chance, chance], dtype=p.dtype), state[1])
        return token if accepted else draw(p, state[1])

    for wrong in argmax_second, resampled_from_p:
        passed, detail = judge(lambda seed: [0, start(seed)], wrong, checkpoint, 4.0)
        assert passed is False and "instead of" in detail


@pytest.mark.parametrize("difference", [1.0, 0.1])
@pytest.mark.parametrize("uniform", [
    lambda digests: int.from_bytes(os.urandom(6), "big") / 2**48,
    lambda digests: digests.random(),
    lambda digests: HIDDEN["numpy"].random(),
])  # fmt: skip
def test_an_honest_decoder_with_a_hidden_acceptance_never_fails(uniform, difference, checkpoint):
    """Only its acceptance is hidden; drafts and resampled tokens are enumerated."""

    def start(seed):
        torch.manual_seed(seed)
        return Digests(seed)

    def draw(p, digests):
        q = p.lerp(torch.full_like(p, 1 / len(p)), difference)
        token = torch.multinomial(q, 1).item()
        if uniform(digests) < p[token] / q[token]:
            return token
        return torch.multinomial((p - q).clamp(min=0), 1).item()

    passed, detail = judge(start, draw, checkpoint)
    assert passed is None, detail


def test_a_bias_that_a_hidden_coin_may_have_made_is_not_a_loss():
    """The coin rejects 1.5e-4 of the drafts, as README's engine does with a coin of `secrets`."""
    rare, exact = 1.5e-4, Counter({(0,): 0.5, (1,): 0.5})
    found = Enumeration(lambda seed: (int(random.random() < 0.5 - rare),))
    with pytest.raises(CannotEnumerate, match=r"TV of 1.5e-04 may be a hidden.* of 12\d+ replays"):
        found.confirm(exact, rare, seconds=0.1)
    biased = Enumeration(lambda seed: (int(random.random() < 0.45),))
    biased.confirm(exact, 0.05, math.inf)
    honest = Enumeration(lambda seed: (int(random.random() < 0.5),))
    honest.distribution = Counter({(0,): 0.55, (1,): 0.45})
    with pytest.raises(CannotEnumerate, match="a source that was not intercepted"):
        honest.confirm(exact, 0.05, math.inf)


def constant_torch(seed):
    torch.manual_seed(0)


def constant_numpy(seed):
    return np.random.default_rng(0)


def constant_python(seed):
    return random.Random(0)


@pytest.mark.parametrize(
    "start, draw, name",
    [
        (constant_torch, lambda p, _: torch.multinomial(p, 1).item(), "torch"),
        (constant_torch, box_muller, "torch"),
        (constant_numpy, lambda p, rng: rng.choice(len(p), p=p.numpy()), "numpy.random.Generator"),
        (constant_python, lambda p, rng: invert(p, rng.random()), "random"),
    ],
)
def test_the_same_seed_in_every_call_is_reported(start, draw, name, checkpoint):
    passed, detail = judge(start, draw, checkpoint)
    message = f"it gives {name} the same seed in every call"
    assert passed is None and (message in detail or draw is box_muller)
    (verdict,) = sampled(start, draw)
    assert verdict.passed is False and verdict.detail == "the same tokens for every seed"


@pytest.mark.slow
@pytest.mark.parametrize("power, passed", [(1, True), (4, False)])
def test_a_constant_seed_that_has_no_effect_does_not_excuse_a_bias(power, passed):
    def start(seed):
        random.Random(0).random()
        return random.Random(seed)

    (verdict,) = sampled(start, lambda p, rng: invert(p**power / (p**power).sum(), rng.random()))
    assert verdict.passed is passed, verdict


def sampled(start, draw):
    """Return the verdict of one statistical row."""
    only, limits = "statistical: T=1.5 top-k 3", Limits(1e9, runs=100)
    return check_implementation(decoder_of(start, draw).impl, only, limits=limits)


def test_a_decoder_that_samples_nothing_fails():
    (verdict,) = sampled(nothing, lambda p, _: int(p.argmax()))
    assert verdict.passed is False and verdict.detail == "the same tokens for every seed"


def test_everything_is_restored_and_generators_can_be_kept():
    kept = []

    def function(seed):
        kept[:] = [np.random.default_rng(seed), random.Random(seed), np.random.RandomState(seed)]
        return tuple(bool(rng.random() < 0.5) for rng in kept)

    names = random.random, np.random.choice, np.random.default_rng, torch.manual_seed
    states = random.getstate(), torch.get_rng_state().tolist()
    assert len(Enumeration(function).distribution) == 8
    assert [type(rng.random()) for rng in kept] == [float] * 3
    assert names == (random.random, np.random.choice, np.random.default_rng, torch.manual_seed)
    assert states == (random.getstate(), torch.get_rng_state().tolist())
    assert choice_before is np.random.choice and type(PYTHON) is random.Random


def test_a_slow_decoder_has_at_least_one_outcome():
    found = Enumeration(lambda seed: (int(torch.rand(()) < 0.3),), seconds=-1.0)
    assert len(found.outcomes) == 1 and not found.complete
    found.confirm(found.distribution, 0.0, 1.0)
