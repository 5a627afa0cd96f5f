"""Enumerate every outcome of another decoder's own loop, and prove that none is missing.

Within `InterceptedRandomness`, the enumerator chooses the results of multinomial, choice, bernoulli
and randint. A uniform number is not drawn at all: when it is compared with a threshold, the
enumerator chooses the side on which it lies, and the remaining interval is recorded. A decoder that
uses torch.rand and similar functions therefore has an exact distribution, as our methods have.

The most probable outcomes come first, and the enumeration may stop before all are known. Then each
sequence has at least the probability found so far: a decoder that exceeds the expected probability
of any is biased, even if most outcomes are unknown.

A decoder may also draw from sources that nobody can intercept, such as the time. So an enumeration
is believed only if calls with the same choices give the same tokens, whatever the seed and the
global generators, and a decoder fails only if its free runs follow the enumerated distribution.
"""

import heapq
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np
import torch
from tqdm import tqdm

from minispec.certify.functions.generators import generators_replaced
from minispec.certify.functions.interception import InterceptedRandomness
from minispec.certify.functions.symbolic import CannotEnumerate
from minispec.certify.statistics import Distribution, chi_square_p
from minispec.certify.toys import ScriptedRandomness
from minispec.sampling import Randomness

RANDOM_SOURCES = "torch, random and numpy.random"
EQUAL_CALLS = 6  # with the same choices, before anything is enumerated
PASSED_REPLAYS = 12  # of an enumeration that equals the expected distribution
MAX_REPLAYS = 20_000  # of other enumerations
FREE_RUNS, FREE_BATCH = 1000, 100  # at most; at least one batch
CONFIRM_SECONDS = 8  # of the replays and of the free runs that confirm a failure
FALSE_SKIP = 1e-4  # probability that they are misleading
NEGLIGIBLE = 1e-12  # probability of a choice that only exists due to rounding
ROUNDING = 1e-6  # of a total probability
SEED_STEP = 1000  # between two calls, so that seeds which a decoder derives from them differ
Tokens = tuple[int, ...]
Seeds = set[tuple[str, str]]


class LikeliestFirst(ScriptedRandomness):
    """Follows a script of choices and then takes the most probable options. `others` are the
    scripts of the options not taken, with their probabilities."""

    def __init__(self, script: list[int]):
        super().__init__(script)
        self.others: list[tuple[float, list[int]]] = []

    def choose(self, probs: list[float]) -> int:
        probs = [p if p > NEGLIGIBLE else 0.0 for p in probs]
        possible = [p for p in probs if p > 0]
        made = [choice for choice, _ in self.choices]
        if len(made) >= len(self.script) and len(possible) > 1:
            best = possible.index(max(possible))
            others = [(i, p) for i, p in enumerate(possible) if i != best]
            self.others += [(self.probability * p, [*made, i]) for i, p in others]
            self.script = [*made, best]
        return super().choose(probs)


class Enumeration:
    """The distribution of function(seed) over the outcomes of its random choices, the likeliest
    first, until all are known, there are `limit` of them or `seconds` are over. `covered` is their
    total probability. Raise CannotEnumerate if the function has other random sources."""

    def __init__(
        self, function: Callable[[int], Tokens], limit: float = math.inf, seconds: float = math.inf
    ):
        self.function, self.seeds, self.used = function, count(step=SEED_STEP), False
        self.outcomes: list[tuple[Tokens, list, Seeds]] = []  # with the choices that lead to each
        self.weights: list[float] = []
        self.distribution: Distribution = Counter()
        with global_states_kept(), generators_replaced():
            first = self.run([])
            for _ in range(EQUAL_CALLS - 1):
                self.require_equal(self.run([]), first)
            self.complete = self.enumerate(limit, time.monotonic() + seconds)
        self.covered = sum(self.weights)

    def run(self, script: list[int]) -> tuple[Tokens, list, Seeds]:
        """Return the tokens after these choices, all choices, and the seeds that were used. Each
        run has another seed and other states of the global generators."""
        return self.run_with(LikeliestFirst(script))

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

    def enumerate(self, limit: float, end: float) -> bool:
        """Find outcomes; return whether these are all."""
        scripts: list[tuple[float, list[int]]] = [(-1.0, [])]  # a heap
        bar = tqdm(desc="outcomes", leave=False, disable=None)
        while scripts and len(self.outcomes) < limit and time.monotonic() < end:
            bar.update()
            randomness = LikeliestFirst(heapq.heappop(scripts)[1])
            outcome = self.run_with(randomness)
            for probability, script in randomness.others:
                heapq.heappush(scripts, (-probability, script))
            self.outcomes.append(outcome)
            self.weights.append(randomness.probability)
            self.distribution[outcome[0]] += randomness.probability
        bar.close()
        if not self.used:
            raise CannotEnumerate(f"it uses no random numbers from {RANDOM_SOURCES}")
        total = sum(self.weights)
        if total > 1 + ROUNDING or (not scripts and total < 1 - ROUNDING):
            raise CannotEnumerate("not only random numbers matter: probabilities do not sum to 1")
        return not scripts

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
        """Raise CannotEnumerate if runs without interception do not have the enumerated probability
        of a sequence that exceeds its expected probability, or fit the latter better."""
        excess = {x for x, p in self.distribution.items() if p > exact.get(x, 0.0)}
        found, expected = (
            {(True,): (p := sum(d.get(x, 0.0) for x in excess)), (False,): max(1 - p, 0.0)}
            for d in (self.distribution, exact)
        )
        counts: Counter = Counter()
        evidence, limit = 0.0, -math.log(FALSE_SKIP)  # log-likelihood ratio, for `expected`
        end = time.monotonic() + CONFIRM_SECONDS
        while counts.total() < FREE_RUNS and abs(evidence) < limit:
            if counts and time.monotonic() > end:
                break
            results = (self.function(next(self.seeds)) for _ in range(FREE_BATCH))
            drawn = Counter((x in excess,) for x in results)
            counts += drawn
            evidence += sum(n * log_ratio(expected, found, x) for x, n in drawn.items())
        rarer = counts[(True,)] < found[(True,)] * counts.total()
        disagree = (rarer or self.complete) and chi_square_p(counts, found) < FALSE_SKIP
        if disagree or evidence > limit:
            raise CannotEnumerate("it also draws from a source that was not intercepted: its free "
                                  "runs do not follow the enumerated distribution")  # fmt: skip


def log_ratio(a: Distribution, b: Distribution, key: tuple) -> float:
    """Return the logarithm of a key's probability under `a` over that under `b`."""
    p, q = a[key], b[key]
    if min(p, q) > 0:
        return math.log(p / q)
    return -math.inf if q > 0 else math.inf


def find_constant_seed(function: Callable[[int], Tokens]) -> str | None:
    """Say which source of random numbers gets the same seed in every call, if there is one."""
    used: list[Seeds] = []
    with global_states_kept(), generators_replaced():
        for seed in range(0, 3 * SEED_STEP, SEED_STEP):
            source = InterceptedRandomness(LikeliestFirst([]))
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
