"""Score another decoder's tokens with our float64 model, and test samples for a bias."""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from minispec.certify import statistics
from minispec.certify.statistics import Distribution
from minispec.model import Transformer
from minispec.tree import Tree

Tokens = tuple[int, ...]
Warp = Callable[[Tensor], Tensor]  # logits (n, V) -> the distributions (n, V) to sample from
BATCH_SIZE = 2**24  # elements of the logits of one pass
BELOW_ONE = 1 - 1e-9
SMALLEST_CELL = 1e-4


class Scores:
    """Continuations of a prompt, scored by the distribution from which they should be sampled.

    `intervals` holds (above, p) for each token of a sequence: the total probability of all more
    probable tokens, and its own. For a correct decoder above + v p, with v uniform, is therefore
    uniform for every token, whatever precedes it. End tokens are normalised by `normalise_end`.

    A token that a warper removes, but would keep if its logit were larger by `margin`, counts as
    the least probable one kept."""

    def __init__(self, model: Transformer, prompt: list[int], warp: Warp, margin: float = 1e-3):
        self.model, self.prompt, self.warp, self.margin = model, prompt, warp, margin
        self.intervals: dict[Tokens, list[tuple[float, float]]] = {}
        self.entropies: dict[Tokens, float] = {}  # bits, the mean over a sequence's tokens
        self.likely: dict[Tokens, Distribution] = {}  # prefix -> its likely continuations
        self.doubtful: dict[Tokens, float] = {}  # prefix -> probability that rounding may move
        self.impossible: Tokens | None = None  # sampled, although its probability is 0

    @torch.no_grad()
    def add(self, samples: Iterable[Tokens]) -> "Scores":
        """Score sequences, in batches that are merged into trees."""
        distinct = sorted(set(samples) - self.intervals.keys())
        longest = max(map(len, distinct), default=1) or 1
        batch = max(1, min(64, BATCH_SIZE // (longest * self.model.config.vocab_size)))
        if not distinct:
            return self
        cache = self.model.new_cache(len(self.prompt) + batch * longest)
        self.model.prefill(self.prompt[:-1], cache)
        for start in range(0, len(distinct), batch):
            self.score(distinct[start : start + batch], cache)
        return self

    def score(self, sequences: list[Tokens], cache) -> None:
        tree = Tree.merged(self.prompt[-1], [list(sequence) for sequence in sequences])
        logits = self.model.logits(self.model(tree.tokens, cache, tree.depth, tree.mask)[0])
        rows, ends = self.warp(logits), list(self.model.config.eos_ids)  # rows: (n, V)
        if len(ends) > 1:  # all count as the first, as in `normalise_end`
            rows[:, ends[0]] = rows[:, ends].sum(-1)
            rows[:, ends[1:]] = 0.0
        last = rows.masked_fill(rows == 0, torch.inf).min(-1).values  # kept token's probability
        unsure = (last * rounding_decides(logits, rows, self.warp, self.margin)).tolist()
        entropy = torch.special.entr(rows).sum(-1).div(math.log(2)).tolist()
        intervals = [(0.0, 1.0), *edge_intervals(rows, tree)]
        children = {(p, t): i for i, (p, t) in enumerate(zip(tree.parents, tree.tokens)) if i}
        for sequence in sequences:
            node, probability, found, bits = 0, 1.0, [], 0.0
            for n, token in enumerate(sequence):
                if probability >= SMALLEST_CELL:
                    self.remember(sequence[:n], probability, rows[node], unsure[node])
                bits += entropy[node] / len(sequence)
                above, p = intervals[children[node, token]]
                if p == 0:
                    above = self.explain(logits[node], sequence[: n + 1])
                found.append((above, p))
                probability, node = probability * p, children[node, token]
            self.intervals[sequence], self.entropies[sequence] = found, bits

    def remember(self, prefix: Tokens, probability: float, row: Tensor, unsure: float) -> None:
        """Keep the likely continuations of a likely prefix, from which cells are made."""
        if prefix not in self.likely:
            likely = (probability * row >= SMALLEST_CELL).nonzero()[:, 0].tolist()
            self.likely[prefix] = {(*prefix, t): probability * float(row[t]) for t in likely}
            self.doubtful[prefix] = probability * unsure

    def explain(self, logits: Tensor, sequence: Tokens) -> float:
        """Return `above` of a last token with probability 0: impossible, unless due to rounding."""
        if kept_if_raised(logits, sequence[-1], self.warp, self.margin):
            return BELOW_ONE
        self.impossible = self.impossible or sequence
        return 1.0

    def cells(self, smallest: float) -> Distribution:
        """Return cells of at least the `smallest` probability that partition all sequences by
        prefix: a sequence belongs to its longest prefix that is a cell."""
        cells: Distribution = {(): 1.0}
        for prefix in sorted(self.likely, key=len):
            for child, p in self.likely[prefix].items() if prefix in cells else ():
                if p >= smallest:
                    cells[child] = p
                    cells[prefix] -= p
        return cells

    def uncertain(self, smallest: float) -> float:
        """Return the probability of tokens that a warper may keep or remove due to rounding."""
        cells = self.cells(smallest)
        return sum(p for prefix, p in self.doubtful.items() if prefix in cells)

    def entropy(self, samples: list[Tokens]) -> float:
        """Return the mean entropy, in bits, of the distributions that the samples come from."""
        return sum(self.entropies[sequence] for sequence in samples) / len(samples)


def normalise_end(tokens: list[int], eos_ids: tuple[int, ...]) -> Tokens:
    """Truncate after the first end token, and replace it by the first of `eos_ids`."""
    for i, token in enumerate(tokens):
        if token in eos_ids:
            return (*tokens[:i], eos_ids[0])
    return tuple(tokens)


def edge_intervals(rows: Tensor, tree: Tree) -> Iterator[tuple[float, float]]:
    """Yield (above, p), see `Scores`, for each node but the root."""
    rows, tokens = rows[tree.parents[1:]], torch.tensor(tree.tokens[1:])  # (n - 1, V), (n - 1,)
    p = rows.gather(-1, tokens[:, None])
    return zip(interval_starts(rows, -rows, tokens).tolist(), p[:, 0].tolist())


def interval_starts(p: Tensor, keys: Tensor, tokens: Tensor) -> Tensor:
    """The probability, by p (n, V), of all tokens that come before each of `tokens` (n,): those
    with a lower key (n, V) or, if keys are equal, a lower id."""
    tokens = tokens[:, None]
    own = keys.gather(-1, tokens)
    before = (keys < own) | ((keys == own) & (torch.arange(p.shape[1]) < tokens))
    return (p * before).sum(-1)


def kept_if_raised(logits: Tensor, token: int, warp: Warp, margin: float) -> bool:
    """Return whether the warpers would keep this token if its logit were larger by `margin`."""
    raised = logits.clone()
    raised[token] += margin
    return bool(warp(raised[None])[0][token] > 0)


def rounding_decides(logits: Tensor, rows: Tensor, warp: Warp, margin: float) -> Tensor:
    """Return for each row (n,) whether rounding may decide between the last token that the warpers
    keep and the first one that they remove."""
    kept = rows > 0
    if bool(kept.all()):
        return ~kept.any(-1)
    first = logits.masked_fill(kept, -torch.inf).argmax(-1, keepdim=True)
    last = logits.masked_fill(~kept, torch.inf).argmin(-1, keepdim=True)
    step = torch.full_like(first, margin, dtype=logits.dtype)
    kept_first = warp(logits.scatter_add(-1, first, step)).gather(-1, first) > 0
    kept_last = warp(logits.scatter_add(-1, last, -step)).gather(-1, last) > 0
    return (kept_first | ~kept_last)[:, 0] & ~kept.all(-1)


# ---- tests ---------------------------------------------------------------------------------------

BINS, PAIR_BINS = 10, 4  # for one position, and for each of a pair
FIRST, EVERY, EVERY_PAIR = "the first tokens", "all tokens", "all pairs of tokens"
UNIFORM = {  # by the number of tokens
    1: {(b,): 1 / BINS for b in range(BINS)},
    2: {(a, b): 1 / PAIR_BINS**2 for a in range(PAIR_BINS) for b in range(PAIR_BINS)},
}


def smallest_p(
    scores: Scores, samples: list[Tokens], other: list[Tokens] | None = None,
    alarm: float = statistics.FALSE_ALARM,
) -> tuple[float, str, float]:  # fmt: skip
    """Return the smallest p-value of several χ² tests, times their number (Bonferroni); the name of
    its test; and the total variation at one token or pair of tokens that they would detect if a
    smaller p-value than `alarm` is an alarm.

    The tests compare the samples with the exact distribution, or with `other`, the samples of
    another decoder: the first tokens jointly, each position, and each pair of neighbours; and, with
    the exact distribution only, all positions together, because only then are they independent."""
    n, smallest = len(samples), 5 / (len(samples) + len(other or []))
    cells = {cell: max(p, 1e-12) for cell, p in scores.cells(smallest).items()}
    counts = count_bins(scores, cells, samples)
    if other is None:
        exact = {name: UNIFORM[len(next(iter(counts[name])))] for name in counts.keys() - {FIRST}}
        exact[FIRST] = cells
        results = [(statistics.chi_square_p(counts[name], exact[name]), name) for name in counts]
    else:
        others, n = count_bins(scores, cells, other), n * len(other) / (n + len(other))
        shared = (counts.keys() & others.keys()) - {EVERY, EVERY_PAIR}
        results = [(statistics.two_sample_p(counts[name], others[name]), name) for name in shared]
    p, where = min(results)
    bias = statistics.detectable_bias(PAIR_BINS**2 - 1, n, alarm / len(results))
    return min(1.0, len(results) * p), where, bias


def deviation(
    scores: Scores, samples: list[Tokens], other: list[Tokens] | None, name: str
) -> tuple[str, int]:
    """Describe the cell of a test whose count deviates most, and return the index of a sample that
    lies in the cell."""
    cells = scores.cells(5 / (len(samples) + len(other or [])))
    counts = count_bins(scores, cells, samples)[name]
    if other is None:
        exact = cells if name == FIRST else UNIFORM[len(next(iter(counts)))]
    else:
        others = count_bins(scores, cells, other)[name]
        exact = {key: n / others.total() for key, n in others.items()}
    expected = {key: counts.total() * exact.get(key, 0.0) for key in counts.keys() | exact.keys()}
    worst = max(expected, key=lambda x: abs(counts[x] - expected[x]) / (expected[x] + 1) ** 0.5)
    holding = (i for i, x in enumerate(samples) if count_bins(scores, cells, [x])[name][worst])
    bins = BINS if len(worst) == 1 else PAIR_BINS
    cell = f"tokens {worst}" if name == FIRST else f"bin {worst} of {bins}, likeliest first,"
    return f"{cell} {counts[worst]} times instead of {expected[worst]:.0f}", next(holding, 0)


def count_bins(scores: Scores, cells: Distribution, samples: list[Tokens]) -> dict[str, Counter]:
    """Count the samples in the bins of each test."""
    counts: dict[str, Counter] = defaultdict(Counter)
    rng, longest = random.Random(0), max(map(len, samples))
    for sequence in samples:
        n = next(n for n in range(len(sequence), -1, -1) if sequence[:n] in cells)
        counts[FIRST][sequence[:n]] += 1
        intervals = scores.intervals[sequence]
        uniform = [min(a + rng.random() * p, BELOW_ONE if p else 1.0) for a, p in intervals]
        for i, u in enumerate(uniform, start=1):
            for name in f"token {i}", EVERY:
                counts[name][(int(BINS * u),)] += 1
        uniform += [rng.random()] * (len(sequence) < longest)  # an end token's partner in a pair
        for i, (u, v) in enumerate(pairwise(uniform), start=1):
            for name in [f"tokens {i}, {i + 1}"] + [EVERY_PAIR] * (i % 2):  # disjoint: independent
                counts[name][int(PAIR_BINS * u), int(PAIR_BINS * v)] += 1
    return counts
