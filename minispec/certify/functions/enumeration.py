"""Enumerate every outcome of another decoder's own loop, and prove that none is missing.

Within `InterceptedRandomness`, the enumerator chooses the results of multinomial, choice, bernoulli
and randint. A uniform number is not drawn at all: when it is compared with a threshold, the
enumerator chooses the side on which it lies, and the remaining interval is recorded. A decoder that
uses torch.rand and similar functions therefore has an exact distribution, as our methods have.

The most probable outcomes come first, and the enumeration may stop before all are known: a decoder
that exceeds the expected probability of any sequence is biased, even if most are unknown.

A decoder may also draw from sources that nobody can intercept, such as the time. So an enumeration
is believed only if calls with the same choices give the same tokens, whatever the seed and the
global generators, and a decoder fails only if its free runs follow the enumerated distribution."""

import heapq
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from minispec.certify.functions.generators import generators_replaced
from minispec.certify.functions.interception import InterceptedRandomness
from minispec.certify.functions.symbolic import CannotEnumerate
from minispec.certify.scoring import Tokens
from minispec.certify.statistics import Distribution, chi_square_p
from minispec.certify.toys import ScriptedRandomness

RANDOM_SOURCES = "torch, random and numpy.random"
EQUAL_CALLS = 6  # with the same choices, before anything is enumerated
PASSED_REPLAYS = 12  # of an enumeration that equals the expected distribution
MAX_REPLAYS = 20_000  # of other enumerations
FREE_RUNS, FREE_BATCH = 1000, 100  # at most; at least one batch
CONFIRM_SECONDS = 8  # of the replays and of the free runs that confirm a failure
P_MISLEADING = 1e-4  # probability that they are misleading
NEGLIGIBLE = 1e-12  # probability of a choice that only exists due to rounding
ROUNDING = 1e-6  # of a total probability
SEED_STEP = 1000  # between two calls, so that seeds which a decoder derives from them differ
Drawn = dict[float, str]  # see InterceptedRandomness


class DrawsNothing(CannotEnumerate):
    """No random numbers are drawn, or none that can be intercepted."""


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


class Outcome(NamedTuple):
    """The tokens of a call, the choices that led to them, and what the real generators drew."""

    tokens: Tokens
    randomness: LikeliestFirst
    drawn: Drawn


class Enumeration:
    """The distribution of function(seed) over the outcomes of its random choices, the likeliest
    first, until all are known, there are `limit` of them or `seconds` are over. `covered` is their
    total probability. Raise CannotEnumerate if the function has other random sources."""

    def __init__(
        self, function: Callable[[int], Tokens], limit: float = math.inf, seconds: float = math.inf
    ):
        self.function, self.seeds, self.used = function, count(step=SEED_STEP), False
        self.outcomes: list[Outcome] = []
        self.distribution: Distribution = Counter()
        with generators_replaced():
            first = self.run([])
            for _ in range(EQUAL_CALLS - 1):
                require_equal(self.run([]), first)
            self.complete = self.enumerate(limit, time.monotonic() + seconds)
        self.covered = sum(self.distribution.values())

    def run(self, script: list[int]) -> Outcome:
        """Return the outcome of these choices and then the likeliest ones. Each run has another
        seed and other states of the global generators."""
        randomness, seed = LikeliestFirst(script), next(self.seeds)
        for seed_global_generator in torch.manual_seed, random.seed, np.random.seed:
            seed_global_generator(seed + SEED_STEP // 2)
        states, CannotEnumerate.last = global_states(), None
        try:
            with InterceptedRandomness(randomness) as source:
                tokens = self.function(seed)
        except Exception as error:
            for _ in range(8):
                self.function(next(self.seeds))  # raises if it is the decoder's own error
            raise CannotEnumerate(f"with intercepted random numbers only: {error}") from error
        if CannotEnumerate.last:  # the decoder has suppressed it
            raise CannotEnumerate.last
        source.require_torch_state()
        for name, state in global_states().items():  # whose functions should all be intercepted
            if state != states[name]:
                raise CannotEnumerate(f"it uses {name} in a way that cannot be intercepted")
        self.used = self.used or source.used
        return Outcome(tokens, randomness, source.drawn)

    def enumerate(self, limit: float, end: float) -> bool:
        """Find outcomes; return whether these are all."""
        scripts: list[tuple[float, list[int]]] = [(-1.0, [])]  # a heap
        with tqdm(desc="outcomes", leave=False, disable=None) as bar:
            while scripts and len(self.outcomes) < limit and time.monotonic() < end:
                bar.update()
                outcome = self.run(heapq.heappop(scripts)[1])
                for probability, script in outcome.randomness.others:
                    heapq.heappush(scripts, (-probability, script))
                self.outcomes.append(outcome)
                self.distribution[outcome.tokens] += outcome.randomness.probability
        if not self.used:
            raise DrawsNothing(f"it uses no random numbers from {RANDOM_SOURCES}")
        total = sum(self.distribution.values())
        if total > 1 + ROUNDING or (not scripts and total < 1 - ROUNDING):
            raise CannotEnumerate("not only random numbers matter: probabilities do not sum to 1")
        return not scripts

    def confirm(self, exact: Distribution, bias: float) -> None:
        """Raise CannotEnumerate if the outcomes are not those of the real decoder. `bias` is the
        total variation from the expected distribution, or 0 if this is within the tolerance.

        A hidden draw that causes the bias changes the tokens with at least this probability, in
        calls whose other choices are drawn with their probabilities. Half of the replays are such
        calls; enough to miss it with probability P_MISLEADING, if time allows. The other half find
        hidden draws after rare choices sooner."""
        replays = PASSED_REPLAYS if not bias else math.ceil(-2 * math.log(P_MISLEADING) / bias)
        weights = [1 / len(self.outcomes) + x.randomness.probability for x in self.outcomes]
        sample = random.Random(0).choices(self.outcomes, weights, k=min(replays, MAX_REPLAYS))
        end = time.monotonic() + CONFIRM_SECONDS
        with generators_replaced():
            for outcome in sample:
                require_equal(self.run(outcome.randomness.script), outcome)
                if time.monotonic() > end:
                    break
        if bias:
            self.compare_free_runs(exact)

    def compare_free_runs(self, exact: Distribution) -> None:
        """Raise CannotEnumerate if runs without interception do not have the enumerated probability
        of a sequence that exceeds its expected probability, or fit the latter better."""
        excess = {x for x, p in self.distribution.items() if p > exact.get(x, 0.0)}
        found, expected = (
            {True: (p := sum(d.get(x, 0.0) for x in excess)), False: max(1 - p, 0.0)}
            for d in (self.distribution, exact)
        )
        ratios = {x: (expected[x] + NEGLIGIBLE) / (found[x] + NEGLIGIBLE) for x in found}
        counts, total, limit = Counter(), 0.0, -math.log(P_MISLEADING)
        end = time.monotonic() + CONFIRM_SECONDS
        for _ in range(FREE_RUNS // FREE_BATCH):
            counts.update(self.function(next(self.seeds)) in excess for _ in range(FREE_BATCH))
            total = sum(n * math.log(ratios[x]) for x, n in counts.items())  # for `expected`
            if abs(total) > limit or time.monotonic() > end:
                break
        rarer = counts[True] < found[True] * counts.total()
        disagree = (rarer or self.complete) and chi_square_p(counts, found) < P_MISLEADING
        if disagree or total > limit:
            raise CannotEnumerate("it also draws from a source that was not intercepted: its free "
                                  "runs do not follow the enumerated distribution")  # fmt: skip


def require_equal(run: Outcome, first: Outcome) -> None:
    """Raise CannotEnumerate if two runs with the same choices differ, or use the same seed."""
    if (run.tokens, run.randomness.choices) != (first.tokens, first.randomness.choices):
        raise CannotEnumerate(f"it uses random numbers from sources other than {RANDOM_SOURCES}: "
                              "calls with the same choices differ")  # fmt: skip
    if same := run.drawn.keys() & first.drawn.keys():
        kinds = ", ".join(sorted({run.drawn[number] for number in same}))
        raise CannotEnumerate(f"it gives {kinds} the same seed in every call, so that its samples "
                              "are not independent")  # fmt: skip


def global_states() -> dict[str, object]:
    """Return the states of the global generators of `random` and numpy."""
    _, keys, *rest = np.random.get_state()
    return {"random": random.getstate(), "numpy.random": (keys.tobytes(), *rest)}
