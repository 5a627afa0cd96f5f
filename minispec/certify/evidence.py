"""Every sampled token is evidence: its place in the distribution it was drawn from is uniform.

Sort the target's distribution in any order that does not depend on the token drawn. The token's own
interval [above, above + p) holds a number u, drawn uniformly. For a correct decoder all u are
independent and uniform, whatever the prompts, the settings and the positions."""

import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from minispec.certify import statistics
from minispec.certify.conventions import OTHER_ORDERS, warper
from minispec.certify.requests import Asked
from minispec.certify.scoring import interval_starts, kept_if_raised, rounding_decides
from minispec.remote.identity import answer_logits

BINS = 10
ORDERS = "likeliest first", "the draft's favourites first", "as after the same two tokens", "by id"
WARPS = None, *OTHER_ORDERS.values()  # conventions, ours first
MOST_TESTS = 400  # that share it
LIMIT = statistics.ALARM / MOST_TESTS
NOISE = "neighbours, sum", "neighbours, difference", "answers, difference"
REPEATS = "all", "repeated tokens"
LAGS = 100  # tokens between two that are compared
Stratum = tuple[str, str]  # kind and name


@dataclass
class Scored:
    """The tokens of a sampled answer: u for each convention, order and token, and which count."""

    u: np.ndarray  # (conventions, orders, n), in [0, 1)
    counts: np.ndarray  # (conventions, n): False where rounding may decide what is kept
    impossible: list[int | None]  # by convention: the first token that has probability 0
    repeats: np.ndarray  # (LAGS, 2): see `count_repeats`


def score(asked: Asked, tokens: list[int], rng: np.random.Generator) -> Scored:
    """Place each token in the distributions that it may have been drawn from."""
    prompt, _, sampling, _ = asked.request
    logits = answer_logits(asked.place.model, prompt, tokens)  # (n, V)
    margin, answer = max(1e-3, asked.place.exam.tolerance), tokens
    warps = [warper(sampling, order) for order in (WARPS if sampling.top_p < 1 else WARPS[:1])]
    rows, ends = [warp(logits) for warp in warps], list(asked.place.model.config.eos_ids)
    sure = [~rounding_decides(logits, p, warp, margin) for p, warp in zip(rows, warps)]
    if asked.place.given and len(ends) > 1:  # a server does not say which one it was
        for row in rows:
            row[:, ends[0]], row[:, ends[1:]] = row[:, ends].sum(-1), 0.0
        tokens = [ends[0] if token in ends else token for token in tokens]
    drawn, keys = torch.tensor(tokens), order_keys(asked, tokens, rows[0])
    u, counts, impossible, v = [], [], [], torch.from_numpy(rng.random(len(tokens)))
    for warp, p, certain in zip(warps, rows, sure):
        own = p[range(len(tokens)), drawn]
        wrong = ((own == 0) & certain).nonzero()[:, 0].tolist()
        wrong = [i for i in wrong if not kept_if_raised(logits[i], answer[i], warp, margin)]
        impossible.append(wrong[0] if wrong else None)
        counts.append((certain & (own > 0)).numpy())
        u.append([(interval_starts(p, key, drawn) + v * own).numpy() for key in keys])
    spread = [0] * len(WARPS) if len(warps) == 1 else range(len(WARPS))
    u = np.clip(np.array(u), 0.0, 1 - 1e-9)[spread]
    repeats = count_repeats(rows[0].numpy() if len(warps) == 1 else np.ones((0, 1)), tokens)
    return Scored(u, np.array(counts)[spread], [impossible[i] for i in spread], repeats)


def count_repeats(p: np.ndarray, tokens: list[int]) -> np.ndarray:
    """For each lag, return by how much more often than expected a token equals the one that was so
    many tokens before, and the variance of this number. Noise that is used again repeats tokens,
    even in other contexts."""
    token = np.array(tokens[: len(p)], int)
    expected, equal = p[:, token], token[:, None] == token
    at, before = np.tril_indices(len(token), -1)
    lags, chance = np.minimum(at - before, LAGS) - 1, expected[at, before]
    parts = (equal[at, before] - chance), chance * (1 - chance)
    return np.stack([np.bincount(lags, part, LAGS) for part in parts], -1)


def order_keys(asked: Asked, tokens: list[int], p: Tensor) -> list[Tensor]:
    """Return keys (n, V) for each order; the lowest comes first."""
    prompt, _, sampling, _ = asked.request
    keys = [-p, *torch.zeros(3, *p.shape, dtype=p.dtype)]
    if asked.place.draft:
        q = warper(sampling)(answer_logits(asked.place.draft, prompt, tokens))
        keys[1] = -(q / p.clamp(min=1e-12))
    text = [*prompt, *tokens]
    last: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)  # two tokens -> next -> where
    for i in range(2, len(text)):
        followers = last[tuple(text[i - 2 : i])]
        if i >= len(prompt):
            row = keys[2][i - len(prompt)]
            row[list(followers)] = -torch.tensor(list(followers.values()), dtype=p.dtype)
        followers[text[i]] = i
    return keys


@dataclass
class Evidence:
    """How often u fell into each bin, by stratum, convention and order."""

    counts: dict[Stratum, np.ndarray] = field(
        default_factory=lambda: defaultdict(lambda: np.zeros((len(WARPS), len(ORDERS), BINS), int))
    )
    previous: Scored | None = None
    repeats: np.ndarray = field(default_factory=lambda: np.zeros((LAGS, 2)))

    def add(self, asked: Asked, scored: Scored) -> None:
        n = scored.u.shape[-1]
        table = tabulate(scored.u, scored.counts)
        self.repeats += scored.repeats
        for kind, name, first, end in asked.strata():
            self.counts[kind, name] += table[..., min(first, n) : end, :].sum(-2)
        both = scored.counts[:, 1:] & scored.counts[:, :-1]
        left, right = scored.u[..., :-1], scored.u[..., 1:]
        pairs = [(left + right, both), (left - right, both)]
        if self.previous:
            n = min(n, self.previous.u.shape[-1])
            both = scored.counts[:, :n] & self.previous.counts[:, :n]
            pairs.append((scored.u[..., :n] - self.previous.u[..., :n], both))
        self.previous = scored
        for name, (u, kept) in zip(NOISE, pairs):
            self.counts["all", name] += tabulate(u % 1.0, kept).sum(-2)

    def tokens(self, stratum: Stratum) -> int:
        counted = ("all", "all tokens") if stratum == REPEATS else stratum
        return int(self.counts[counted][0, 0].sum())

    def p_values(self, stratum: Stratum, convention: int = 0) -> list[float]:
        """Return the p-value of each order, or of each lag."""
        if stratum != REPEATS:
            return [uniform_p(row) for row in self.counts[stratum][convention]]
        return [statistics.bennett_p(*row) for row in self.repeats.tolist()]

    def p(self, stratum: Stratum, convention: int = 0) -> tuple[float, int]:
        """Return the smallest p-value of the orders or lags, and which it is."""
        found = self.p_values(stratum, convention)
        several = len(found) / len(ORDERS)  # lags count as more tests than orders
        return min(1.0, min(found) * several), int(np.argmin(found))


def tabulate(u: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """(conventions, orders, n) -> (conventions, orders, n, BINS), one-hot or all zero."""
    return ((u * BINS).astype(int)[..., None] == np.arange(BINS)) & kept[:, None, :, None]


def uniform_p(counts: np.ndarray) -> float:
    """The p-value of the G-test that these counts are equal in expectation."""
    n = counts.sum()
    if n < 5 * BINS:
        return 1.0
    terms = (statistics.g_term(x, n / BINS) for x in counts.tolist())
    return statistics.chi_square_tail(2 * sum(terms), BINS - 1)


def detectable(tokens: int) -> float:
    """The bias (a total variation, at most 1) that this many tokens would have shown."""
    return min(1.0, ONE_TOKEN / math.sqrt(max(tokens, 1)))


ONE_TOKEN = statistics.detectable_bias(BINS - 1, 1, LIMIT)
