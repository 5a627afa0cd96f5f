"""What the checks of several lessons share and needs no torch: calls that must not change their
arguments, and random costs."""

import itertools
import random
from collections.abc import Callable
from copy import deepcopy

from form import Wrong

# ---- calls ---------------------------------------------------------------------------------------

CHANGED = "it changes `{}`, which belongs to the caller"


def call(function: Callable, *more, **arguments) -> object:
    """Call a function with copies of `arguments`, which it must not change, and then `more`."""
    copies = deepcopy(arguments)
    answer = function(*copies.values(), *more)
    for name, before in arguments.items():
        if not same(copies[name], before):
            raise Wrong(CHANGED.format(name))
    return answer


def same(a: object, b: object) -> bool:
    if isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(b, "equal"):  # a tensor, whose == compares elements
        return isinstance(a, type(b)) and b.equal(a)
    return a == b


def differ(a: object, b: object) -> float:
    """The distance of outcomes that are either right or wrong."""
    return float(a != b)


# ---- costs ---------------------------------------------------------------------------------------


def random_costs(rng: random.Random, drafts: int) -> list[float]:
    """The costs of rounds with 0 to `drafts` drafts. They rise in steps, so that more drafts may
    pay though fewer do not."""
    steps = [rng.choice([0.0, 0.02, rng.choice([0.5, 0.9])]) for _ in range(drafts)]
    return [round(cost, 2) for cost in itertools.accumulate(steps, initial=1.0)]


def speed(gains: list[float], costs: list[float], n: int) -> float:
    """The expected tokens of a round with n drafts, per cost. gains[i] is the probability that the
    draft with index i is accepted."""
    return (1 + sum(gains[:n])) / costs[n]


def fastest(gains: list[float], costs: list[float]) -> tuple[int, float]:
    """The best number of drafts, and its speed."""
    n = max(range(len(costs)), key=lambda n: speed(gains, costs, n))
    return n, speed(gains, costs, n)


def speed_distance(a: tuple[int, float], b: tuple[int, float]) -> float:
    """Numbers of drafts that are equally fast are equally good."""
    return abs(a[1] - b[1])
