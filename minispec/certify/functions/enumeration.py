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
from minispec.certify.functions.symbolic import CannotEnumerate, NeedsFloat
from minispec.certify.scoring import Tokens
from minispec.certify.statistics import Distribution, chi_square_p
from minispec.certify.toys import ScriptedRandomness

RANDOM_SOURCES = "torch, random and numpy.random"
EQUAL_CALLS = 6  # with the same choices, before anything is enumerated
SETTLED_CALLS = 40  # equal ones, after which a decoder is taken for one that adapts
PASSED_REPLAYS = 12  # of an enumeration that equals the expected distribution
FREE_RUNS, MAX_FREE_RUNS, FREE_BATCH = 1000, 20_000, 100
P_MISLEADING = 1e-4  # probability that replays or free runs are misleading
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

    @property
    def result(self) -> tuple:
        return self.tokens, tuple(self.randomness.choices)


class Enumeration:
    """The distribution of function(seed) over the outcomes of its random choices, the likeliest
    first, until all are known, there are `limit` of them or `seconds` are over. `covered` is their
    total probability. Raise CannotEnumerate if the function has other random sources."""

    def __init__(
        self, function: Callable[[int], Tokens], limit: float = math.inf, seconds: float = math.inf
    ):
        self.function, self.seeds, self.used = function, count(SEED_STEP, SEED_STEP), False
        self.converting, end = [], time.monotonic() + seconds  # see generators_replaced
        while True:
            try:
                self.complete = self.enumerate(limit, end)
                break
            except NeedsFloat as error:
                if any(error.namespace is known for known in self.converting):
                    raise
                self.converting.append(error.namespace)
        self.covered = sum(self.distribution.values())

    def run(self, script: list[int]) -> Outcome:
        """Return the outcome of these choices and then the likeliest ones. Each run has another
        seed and other states of the global generators."""
        randomness, seed = LikeliestFirst(script), next(self.seeds)
        for seed_global in torch.default_generator.manual_seed, random.seed, np.random.seed:
            seed_global(seed + SEED_STEP // 2)
        states, CannotEnumerate.last = global_states(), None
        try:
            with InterceptedRandomness(randomness) as source:
                tokens = self.function(seed)
        except Exception as error:
            if not CannotEnumerate.last:
                for _ in range(0 if self.converting else 8):
                    self.function(next(self.seeds))  # raises if it is the decoder's own error
                raise CannotEnumerate(f"with intercepted random numbers only: {error}") from error
        if CannotEnumerate.last:  # the decoder has suppressed it, or it came from another thread
            raise CannotEnumerate.last
        source.require_torch_state()
        for name, state in global_states().items():  # whose functions should all be intercepted
            if state != states[name]:
                raise CannotEnumerate(f"it uses {name} in a way that cannot be intercepted, or in "
                                      "another thread")  # fmt: skip
        self.used = self.used or source.used
        return Outcome(tokens, randomness, source.drawn)

    def enumerate(self, limit: float, end: float) -> bool:
        """Find outcomes; return whether these are all."""
        self.outcomes: list[Outcome] = []
        self.distribution: Distribution = Counter()
        scripts: list[tuple[float, list[int]]] = [(-1.0, [])]  # a heap
        with self.replaced(), tqdm(desc="outcomes", leave=False, disable=None) as bar:
            first = self.run([])
            for _ in range(EQUAL_CALLS - 1):
                self.require_equal([], first)
            while scripts and len(self.outcomes) < limit:
                bar.update()
                outcome = self.run(heapq.heappop(scripts)[1])
                for probability, script in outcome.randomness.others:
                    heapq.heappush(scripts, (-probability, script))
                self.outcomes.append(outcome)
                self.distribution[outcome.tokens] += outcome.randomness.probability
                if time.monotonic() > end:
                    break
        if not self.used:
            raise DrawsNothing(f"it uses no random numbers from {RANDOM_SOURCES}")
        total = sum(self.distribution.values())
        if total > 1 + ROUNDING or (not scripts and total < 1 - ROUNDING):
            raise CannotEnumerate("not only random numbers matter: probabilities do not sum to 1")
        return not scripts

    def replaced(self):
        return generators_replaced(self.converting)

    def confirm(self, exact: Distribution, bias: float, seconds: float) -> None:
        """Raise CannotEnumerate if the outcomes are not those of the real decoder. `bias` is the
        total variation from the expected distribution, or 0 if this is within the tolerance.

        A hidden draw that causes the bias changes the tokens with at least this probability, in
        calls whose other choices are drawn with their probabilities. Half of the replays are such
        calls; enough to miss it with probability P_MISLEADING. The other half find hidden draws
        after rare choices sooner. If `seconds` are not enough for them, nothing is proven."""
        replays = PASSED_REPLAYS if not bias else math.ceil(-2 * math.log(P_MISLEADING) / bias)
        weights = [1 / len(self.outcomes) + x.randomness.probability for x in self.outcomes]
        end, unproven = time.monotonic() + seconds, f"a TV of {bias:.1e} may be a hidden draw's"
        sample = random.Random(0).choices(self.outcomes, weights, k=replays)
        with self.replaced():
            for made, outcome in enumerate(sample):
                if bias and time.monotonic() > end:
                    raise CannotEnumerate(f"{unproven}: not enough time for more than {made} of "
                                          f"{replays} replays (--thorough has more)")  # fmt: skip
                self.require_equal(outcome.randomness.script, outcome)
        if bias and not self.favoured_by_free_runs(exact, end):
            raise CannotEnumerate(f"{unproven}: free runs did not favour it, or not enough time")

    def require_equal(self, script: list[int], first: Outcome) -> None:
        """Raise CannotEnumerate if another run of this script differs, or has the same seed."""
        run = self.run(script)
        if run.result != first.result:
            later = {self.run(script).result for _ in range(SETTLED_CALLS)}
            if len(later) == 1 and first.result not in later:
                raise CannotEnumerate("calls with the same choices differ from earlier ones: K may "
                                      "adapt, or it remembers answers")  # fmt: skip
            raise CannotEnumerate(f"it uses random numbers from sources other than "
                                  f"{RANDOM_SOURCES}, or changes all the time: calls with the same "
                                  "choices differ")  # fmt: skip
        if same := run.drawn.keys() & first.drawn.keys():
            kinds = ", ".join(sorted({run.drawn[number] for number in same}))
            raise CannotEnumerate(f"it gives {kinds} the same seed in every call, so that its "
                                  "samples are not independent")  # fmt: skip

    def favoured_by_free_runs(self, exact: Distribution, end: float) -> bool:
        """Return whether runs without interception have the enumerated probability of a sequence
        that exceeds its expected probability, rather than the latter. True, too, if the two are so
        close that MAX_FREE_RUNS cannot tell. Raise CannotEnumerate if they contradict it."""
        excess = {x for x, p in self.distribution.items() if p > exact.get(x, 0.0)}
        found, expected = (
            {True: (p := sum(d.get(x, 0.0) for x in excess)), False: max(1 - p, 0.0)}
            for d in (self.distribution, exact)
        )
        logs = {x: math.log((found[x] + NEGLIGIBLE) / (expected[x] + NEGLIGIBLE)) for x in found}
        counts, total, sure = Counter(), 0.0, -math.log(P_MISLEADING)
        needed = 3 * sure / sum(found[x] * logs[x] for x in found)
        limit = needed if needed < MAX_FREE_RUNS else FREE_RUNS
        while abs(total) < sure and counts.total() < limit and time.monotonic() < end:
            counts.update(self.function(next(self.seeds)) in excess for _ in range(FREE_BATCH))
            total = sum(n * logs[x] for x, n in counts.items())  # for what was found
        rarer = counts[True] < found[True] * counts.total()
        disagree = (rarer or self.complete) and chi_square_p(counts, found) < P_MISLEADING
        if disagree or total < -sure:
            raise CannotEnumerate("it also draws from a source that was not intercepted: its free "
                                  "runs do not follow the enumerated distribution")  # fmt: skip
        return total >= sure or limit < needed and counts.total() >= limit


def global_states() -> dict[str, object]:
    """Return the states of the global generators of `random` and numpy."""
    _, keys, *rest = np.random.get_state()
    return {"random": random.getstate(), "numpy.random": (keys.tobytes(), *rest)}
