"""χ² tests of counts of sampled sequences, and the smallest bias they can detect."""

import math
from collections import Counter
from collections.abc import Callable
from itertools import count

import torch

ALARM = 1e-3  # probability that a right decoder looks biased to one check, and that fresh samples
FALSE_ALARM = ALARM**2  # then confirm it; of both
Distribution = dict[tuple[int, ...], float]  # tokens -> probability
Cell = tuple[float, float]  # of a χ² test: two counts, observed and expected or of two samples


def chi_square_p(counts: Counter, exact: Distribution) -> float:
    """Return the p-value of the likelihood-ratio χ² test (G-test) that the counts were drawn from
    `exact`. Rare cells are pooled.

    Pearson's Σ (observed - expected)² / expected would fail correct decoders: at an expected count
    of 5 its p-value is below 1e-6 in one of 17,000 tests, at 0.02 after a single draw. This test
    stays near 1e-6, so the pool may be small."""
    if any(exact.get(tokens, 0.0) == 0 for tokens in counts):
        return 0.0
    n = sum(counts.values())
    pairs = [(counts[key], n * p) for key, p in exact.items()]
    cells = pool_rare(pairs, lambda observed, expected: expected >= 5)
    return chi_square_tail(2 * sum(g_term(*cell) for cell in cells), len(cells) - 1)


def g_term(observed: float, expected: float) -> float:
    """Return one cell's term of the log-likelihood ratio."""
    return observed * math.log(observed / expected) if observed else 0.0


def pool_rare(cells: list[Cell], large: Callable[[float, float], bool]) -> list[Cell]:
    """Merge all cells of a χ² test that are not large into one."""
    kept = [cell for cell in cells if large(*cell)]
    rare = tuple(map(sum, zip(*(cell for cell in cells if not large(*cell)))))
    return kept + [rare] if sum(rare) > 0 else kept


def two_sample_p(a: Counter, b: Counter) -> float:
    """Return the p-value of the G-test that both counts were drawn from the same distribution."""
    n, m = sum(a.values()), sum(b.values())
    pairs = [(a[key], b[key]) for key in a.keys() | b.keys()]
    cells = pool_rare(pairs, lambda x, y: x + y >= 10)
    share = n / (n + m)  # of the first
    terms = (g_term(x, (x + y) * share) + g_term(y, (x + y) * (1 - share)) for x, y in cells)
    return chi_square_tail(2 * sum(terms), len(cells) - 1)


def chi_square_tail(chi2: float, freedom: int) -> float:
    """Return the probability that χ² with this many degrees of freedom exceeds `chi2`."""
    if freedom < 1:
        return 1.0
    half = (torch.tensor(max(x, 0.0) / 2, dtype=torch.float64) for x in (freedom, chi2))
    return float(torch.special.gammaincc(*half))


def bennett_p(excess: float, variance: float) -> float:
    """Return a bound of the p-value of a sum of martingale differences, none of which exceeds 1,
    with this variance in total (Bennett's inequality)."""
    if variance <= 0:
        return 1.0
    x = abs(excess) / variance
    return min(1.0, 2 * math.exp(-variance * ((1 + x) * math.log1p(x) - x)))


def detectable_bias(freedom: int, runs: float, false_alarm: float = FALSE_ALARM) -> float:
    """Return the total variation that a χ² test detects with probability 0.9, whatever its shape.

    A bias of total variation t shifts χ² by at least 4 · runs · t² (Cauchy–Schwarz). The power is
    that of a normal approximation to the noncentral χ²."""
    critical = next(x for x in count(0.0, 0.1) if chi_square_tail(x, freedom) <= false_alarm)
    shift = next(
        x for x in count(0.0, 0.5)
        if freedom + x - 1.2816 * math.sqrt(2 * (freedom + 2 * x)) >= critical
    )  # fmt: skip
    return math.sqrt(shift / (4 * runs))
