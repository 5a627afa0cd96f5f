"""What counts of drawn sequences say, and how much they could have said."""

import math
from collections import Counter
from collections.abc import Callable, Iterable

import torch

FALSE_ALARM = 1e-6  # chance that one statistical check fails a correct decoder
Sequences = dict[tuple[int, ...], float]  # tokens -> probability


def chi_square_p(counts: Counter, exact: Sequences) -> float:
    """Chance of so large a χ² if the counts were drawn from `exact`; rare cells are pooled."""
    if impossible(counts, exact) is not None:
        return 0.0
    n = sum(counts.values())
    cells = pooled(((counts[key], n * p) for key, p in exact.items()), lambda seen, due: due >= 5)
    chi2 = sum((seen - due) ** 2 / due for seen, due in cells)
    return above(chi2, len(cells) - 1)


def impossible(counts: Counter, exact: Sequences) -> tuple[int, ...] | None:
    """A sequence that was drawn, but has probability 0."""
    return next((tokens for tokens in counts if exact.get(tokens, 0.0) == 0), None)


def pooled(
    cells: Iterable[tuple[float, float]], large: Callable[[float, float], bool]
) -> list[tuple[float, float]]:
    """The cells of a χ² test, those that are not large in one."""
    kept, rare = [], (0.0, 0.0)
    for a, b in cells:
        if large(a, b):
            kept.append((a, b))
        else:
            rare = rare[0] + a, rare[1] + b
    return kept + [rare] if sum(rare) > 0 else kept


def two_sample_p(a: Counter, b: Counter) -> float:
    """The same of two counts that were drawn from one distribution, if from any."""
    n, m = sum(a.values()), sum(b.values())
    pairs = ((a[key], b[key]) for key in a.keys() | b.keys())
    cells = pooled(pairs, lambda x, y: x + y >= 10)
    chi2 = sum((x * (m / n) ** 0.5 - y * (n / m) ** 0.5) ** 2 / (x + y) for x, y in cells)
    return above(chi2, len(cells) - 1)


def above(chi2: float, freedom: int) -> float:
    """The chance that a χ² of so many degrees of freedom is larger."""
    if freedom < 1:
        return 1.0
    half = (torch.tensor(x / 2, dtype=torch.float64) for x in (freedom, chi2))
    return float(torch.special.gammaincc(*half))


def smallest_seen(freedom: int, runs: float, false_alarm: float = FALSE_ALARM) -> float:
    """The total variation that a χ² test sees in nine of ten cases, whatever its shape.

    A bias of total variation t moves χ² by at least 4 · runs · t² (Cauchy and Schwarz); its power
    is taken from a normal approximation of the noncentral χ²."""
    low, high = 0.0, 1e4
    while high - low > 1e-3:  # the critical value, by bisection
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle, freedom) > false_alarm else (low, middle)
    critical, moved = high, 0.0
    while freedom + moved - 1.2816 * math.sqrt(2 * (freedom + 2 * moved)) < critical:
        moved += 0.5
    return math.sqrt(moved / (4 * runs))
