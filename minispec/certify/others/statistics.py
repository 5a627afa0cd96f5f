"""What counts of drawn sequences say, and how much they could have said."""

import math
from collections import Counter
from collections.abc import Callable, Iterable

import torch

FALSE_ALARM = 1e-6  # chance that one statistical check fails a correct decoder
Sequences = dict[tuple[int, ...], float]  # tokens -> probability


def chi_square_p(counts: Counter, exact: Sequences) -> float:
    """The p-value of the likelihood-ratio χ² test (G-test) that the counts were drawn from `exact`;
    rare cells are pooled.

    Pearson's Σ (seen - due)² / due would fail honest decoders: at a due count of 5 its p-value is
    below 1e-6 in one of 17,000 tests, at 0.02 after a single draw. This one stays near 1e-6, so a
    pool may be small.
    """
    if impossible(counts, exact) is not None:
        return 0.0
    n = sum(counts.values())
    cells = pooled(((counts[key], n * p) for key, p in exact.items()), lambda seen, due: due >= 5)
    return above(2 * sum(surplus(seen, due) for seen, due in cells), len(cells) - 1)


def surplus(seen: float, due: float) -> float:
    """A cell's part of the log-likelihood ratio."""
    return seen * math.log(seen / due) if seen else 0.0


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
    """The p-value of the same test that two counts were drawn from one distribution."""
    n, m = sum(a.values()), sum(b.values())
    pairs = ((a[key], b[key]) for key in a.keys() | b.keys())
    cells = pooled(pairs, lambda x, y: x + y >= 10)
    due = n / (n + m)  # the share of the first
    ratios = (surplus(x, (x + y) * due) + surplus(y, (x + y) * (1 - due)) for x, y in cells)
    return above(2 * sum(ratios), len(cells) - 1)


def above(chi2: float, freedom: int) -> float:
    """The chance that a χ² of so many degrees of freedom is larger."""
    if freedom < 1:
        return 1.0
    half = (torch.tensor(max(x, 0.0) / 2, dtype=torch.float64) for x in (freedom, chi2))
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
