"""Enumerate every outcome of another decoder's own loop, and prove that none is missing.

Within `InterceptedRandomness`, the enumerator chooses the results of multinomial, choice, bernoulli
and randint. A uniform number is not drawn at all: when it is compared with a threshold, the
enumerator chooses the side on which it lies, and the remaining interval is recorded. A decoder that
uses torch.rand and similar functions therefore has an exact distribution, as our methods have.

A decoder may also draw from sources that nobody can intercept, such as the time. So an enumeration
is believed only if calls with the same choices give the same tokens, whatever the seed and the
global generators, and a decoder fails only if its free runs follow the enumerated distribution.
"""

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np
import torch

from minispec.certify.others.generators import generators_replaced
from minispec.certify.others.interception import InterceptedRandomness
from minispec.certify.others.symbolic import CannotEnumerate
from minispec.certify.statistics import Distribution, chi_square_p
from minispec.sampling import Randomness
from minispec.toys import ScriptedRandomness, every_outcome

RANDOM_SOURCES = "torch, random and numpy.random"
EQUAL_CALLS = 6  # with the same choices, before anything is enumerated
PASSED_REPLAYS = 12  # of an enumeration that equals the expected distribution
MAX_REPLAYS = 20_000  # of other enumerations
FREE_RUNS, FREE_BATCH = 1000, 100  # at most; at least one batch
CONFIRM_SECONDS = 8  # of the replays and of the free runs that confirm a failure
FALSE_SKIP = 1e-4  # probability that they are misleading
SEED_STEP = 1000  # between two calls, so that seeds which a decoder derives from them differ
Tokens = tuple[int, ...]
Seeds = set[tuple[str, str]]


class TooManyOutcomes(CannotEnumerate):
    """There are more outcomes than the limit."""


class Enumeration:
    """The distribution of function(seed) over all outcomes of its random choices. Raise
    CannotEnumerate if it has other random sources, TooManyOutcomes beyond `limit` outcomes."""

    def __init__(self, function: Callable[[int], Tokens], limit: float = math.inf):
        self.function, self.seeds, self.used = function, count(step=SEED_STEP), False
        self.outcomes: list[tuple[Tokens, list, Seeds]] = []  # with the choices that lead to each
        self.weights: list[float] = []
        self.distribution: Distribution = Counter()
        with global_states_kept(), generators_replaced():
            first = self.run([])
            for _ in range(EQUAL_CALLS - 1):
                self.require_equal(self.run([]), first)
            self.enumerate(limit)

    def run(self, script: list[int]) -> tuple[Tokens, list, Seeds]:
        """Return the tokens after these choices, all choices, and the seeds that were used. Each
        run has another seed and other states of the global generators."""
        return self.run_with(ScriptedRandomness(script))

    def run_with(self, randomness: Randomness) -> tuple[Tokens, list, Seeds]:
        seed = next(self.seeds)
        states = seed_global_generators(seed + SEED_STEP // 2)
        try:
            with InterceptedRandomness(randomness) as source:
                tokens = self.function(seed)
        except Exception as error:
            for _ in range(8):
                self.function(next(self.seeds))  # raises if it is the decoder's own error
            raise CannotEnumerate(f"with intercepted random numbers only: {error}") from error
        require_untouched(states, source)
        self.used = self.used or source.used
        return tokens, list(randomness.choices), set(source.drawn_from)

    def enumerate(self, limit: float) -> None:
        for n, (outcome, weight) in enumerate(every_outcome(self.run_with), start=1):
            if n > limit:
                raise TooManyOutcomes(f"there are more than {limit} outcomes")
            self.outcomes.append(outcome)
            self.weights.append(weight)
            self.distribution[outcome[0]] += weight
        if not self.used:
            raise CannotEnumerate(f"it uses no random numbers from {RANDOM_SOURCES}")
        if abs(sum(self.distribution.values()) - 1) > 1e-6:
            raise CannotEnumerate("not only random numbers matter: probabilities do not sum to 1")

    def require_equal(self, run: tuple, first: tuple) -> None:
        """Raise CannotEnumerate if two runs with the same choices differ, or use the same seed."""
        if run[:2] != first[:2]:
            raise CannotEnumerate(f"it uses random numbers from sources other than {RANDOM_SOURCES}"
                                  ": calls with the same choices differ")  # fmt: skip
        if repeated := run[2] & first[2]:
            raise CannotEnumerate(describe_repeated(repeated))

    def confirm(self, exact: Distribution, bias: float) -> None:
        """Raise CannotEnumerate if the outcomes are not those of the real decoder. `bias` is the
        total variation from the expected distribution, or 0 if this is within the tolerance.

        A hidden draw that causes the bias changes the tokens with at least this probability, in
        calls whose other choices are drawn with their probabilities. Half of the replays are such
        calls; enough to miss it with probability FALSE_SKIP, if time allows. The other half find
        hidden draws after rare choices sooner."""
        replays = PASSED_REPLAYS if not bias else math.ceil(-2 * math.log(FALSE_SKIP) / bias)
        uniform = 1 / len(self.outcomes)
        weights = [uniform + weight for weight in self.weights]
        sample = random.Random(0).choices(self.outcomes, weights, k=min(replays, MAX_REPLAYS))
        end = time.monotonic() + CONFIRM_SECONDS
        with global_states_kept(), generators_replaced():
            for outcome in sample:
                self.require_equal(self.run([choice for choice, _ in outcome[1]]), outcome)
                if time.monotonic() > end:
                    break
        if bias:
            self.compare_free_runs(exact)

    def compare_free_runs(self, exact: Distribution) -> None:
        """Raise CannotEnumerate if runs without interception do not follow the enumerated
        distribution, or follow the expected one better."""
        counts: Counter = Counter()
        evidence, limit = 0.0, -math.log(FALSE_SKIP)  # log-likelihood ratio, for `exact`
        end = time.monotonic() + CONFIRM_SECONDS
        while counts.total() < FREE_RUNS and abs(evidence) < limit:
            if counts and time.monotonic() > end:
                break
            drawn = Counter(self.function(next(self.seeds)) for _ in range(FREE_BATCH))
            counts += drawn
            evidence += sum(n * log_ratio(exact, self.distribution, x) for x, n in drawn.items())
        if chi_square_p(counts, self.distribution) < FALSE_SKIP or evidence > limit:
            raise CannotEnumerate("it also draws from a source that was not intercepted: its free "
                                  "runs do not follow the enumerated distribution")  # fmt: skip


def log_ratio(a: Distribution, b: Distribution, tokens: Tokens) -> float:
    """Return the logarithm of a sequence's probability under `a` over that under `b`."""
    p, q = a.get(tokens, 0.0), b.get(tokens, 0.0)
    if min(p, q) > 0:
        return math.log(p / q)
    return -math.inf if q > 0 else math.inf


def find_constant_seed(function: Callable[[int], Tokens]) -> str | None:
    """Say which source of random numbers gets the same seed in every call, if there is one."""
    used: list[Seeds] = []
    with global_states_kept(), generators_replaced():
        for seed in range(0, 3 * SEED_STEP, SEED_STEP):
            source = InterceptedRandomness(ScriptedRandomness([]))
            try:
                with source:
                    function(seed)
            except (Exception, CannotEnumerate):
                pass  # the seeds are known nevertheless
            used.append(set(source.drawn_from))
    repeated = set.intersection(*used)
    return describe_repeated(repeated) if repeated else None


def describe_repeated(seeds: Seeds) -> str:
    kinds = ", ".join(sorted({kind for kind, _ in seeds}))
    return f"it gives {kinds} the same seed in every call, so that its samples are not independent"


# ---- the global generators -----------------------------------------------------------------------


def seed_global_generators(seed: int) -> tuple:
    """Seed the global generators and return their states."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return global_states()


def global_states() -> tuple:
    name, keys, *rest = np.random.get_state()
    return torch.get_rng_state(), random.getstate(), (name, keys.tobytes(), *rest)


def require_untouched(states: tuple, source: InterceptedRandomness) -> None:
    """Raise CannotEnumerate if a call changed a global generator, all of whose functions should
    have been intercepted. Only torch's may have another seed."""
    names = "torch", "random", "numpy.random"
    expected = torch.Generator().manual_seed(torch.initial_seed()).get_state()
    reseeded = any(kind == "torch" for (kind, _), _ in source.seeds.values())
    states = (expected if reseeded else states[0], *states[1:])
    for name, before, after in zip(names, states, global_states()):
        same = torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after
        if not same:
            raise CannotEnumerate(f"it uses {name} in a way that cannot be intercepted")


@contextmanager
def global_states_kept() -> Iterator[None]:
    """Restore the states of the global generators at the end."""
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])
