"""What the checks of several lessons share and needs torch: random distributions, a randomness that
reports misuse, and the exact outcome of a round. For the rest, see pure.py."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from form import Wrong
from torch import Tensor

from minispec.certify.toys import every_outcome, total_variation
from minispec.sampling import Randomness
from solutions.pure import (  # noqa: F401 (a lesson with torch imports all from here)
    CHANGED,
    call,
    differ,
    fastest,
    random_costs,
    speed,
    speed_distance,
)

# ---- distributions -------------------------------------------------------------------------------


def tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def random_probs(rng: random.Random, size: int) -> Tensor:
    """A random distribution, sometimes with zeros, as top-k and top-p leave them."""
    weights = tensor(*(rng.choice([0, 1, 1]) * rng.randint(1, 9) for _ in range(size)))
    weights[rng.randrange(size)] += 1
    return weights / weights.sum()


def rows(*probs: Tensor) -> str:
    return ", ".join("[" + " ".join(f"{x:.3g}" for x in row.tolist()) + "]" for row in probs)


# ---- random decisions ----------------------------------------------------------------------------

MOST_DECISIONS = 100


class Strict:
    """Randomness that reports what cannot be drawn from, and with `endless` decisions that never
    end."""

    def __init__(self, randomness: Randomness, endless: str):
        self.randomness, self.endless, self.decisions = randomness, endless, 0

    def bernoulli(self, p: float) -> bool:
        self.count()
        p = float(p)
        if math.isnan(p):
            raise Wrong("`bernoulli` gets NaN")
        if p > 1 + 1e-9:
            raise Wrong(f"`bernoulli` gets {p:.2f}; a probability is at most 1: min(1, p(x)/q(x))")
        return self.randomness.bernoulli(min(1.0, max(0.0, p)))

    def categorical(self, probs: Tensor) -> int:
        self.count()
        if probs is None:
            raise Wrong("`categorical` gets None; if `residual` returns None, accept the draft")
        probs = torch.as_tensor(probs)
        if probs.dim() != 1:
            raise Wrong("`categorical` must get one distribution of shape (V,)")
        if not (probs >= 0).all() or not probs.sum() > 0:
            raise Wrong("`categorical` gets numbers that are negative, NaN or all 0")
        return self.randomness.categorical(probs)

    def count(self) -> None:
        self.decisions += 1
        if self.decisions > MOST_DECISIONS:
            raise Wrong(f"it keeps asking for random decisions; {self.endless}")


class NeverAccepts:
    """A coin that always rejects; draws are of the first possible token."""

    def bernoulli(self, p: float) -> bool:
        return False

    def categorical(self, probs: Tensor) -> int:
        return int(probs.nonzero()[0])


@dataclass
class Outcome:
    """The exact distributions of a round's tokens and of what it accepts: the number of drafts, or
    the index of the accepted sibling (None: no sibling)."""

    tokens: dict[object, float]
    accepted: dict[int | None, float]

    @property
    def drafts(self) -> float:
        """The mean number of accepted drafts."""
        return sum(n * probability for n, probability in self.accepted.items())


def outcome_of(run: Callable[[Randomness], tuple[int | None, object]]) -> Outcome:
    """Enumerate a round; run(randomness) returns what it accepts and its tokens."""
    outcome = Outcome(Counter(), Counter())
    for (accepted, tokens), probability in every_outcome(run):
        outcome.tokens[tokens] += float(probability)
        outcome.accepted[accepted] += float(probability)
    return outcome


def outcome_distance(a: Outcome, b: Outcome) -> float:
    return max(total_variation(a.tokens, b.tokens), total_variation(a.accepted, b.accepted))


def probabilities_of_texts(p: dict[tuple[int, ...], Tensor], n: int) -> dict[tuple, float]:
    """The probability of each text of n tokens. p maps a text to the next token's distribution."""
    return {
        text: math.prod(float(p[text[:i]][x]) for i, x in enumerate(text))
        for text in itertools.product(range(len(p[()])), repeat=n)
    }
