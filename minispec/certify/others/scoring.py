"""What our model, in float64, says of tokens that another decoder chose."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minispec.certify.others.statistics import (
    FALSE_ALARM,
    Sequences,
    chi_square_p,
    smallest_seen,
    two_sample_p,
)
from minispec.model import Transformer
from minispec.sampling import Sampling, probs
from minispec.tree import Tree

Sequence = tuple[int, ...]
TOGETHER = 64  # sequences scored in one pass, as a tree
LAST = 1 - 1e-9  # just below 1


def gaps(model: Transformer, prompt: list[int], tokens: list[int]) -> list[float]:
    """How far below the best of its place each token's logit is, after the tokens before it."""
    logits = answer_logits(model, prompt, tokens)  # (n, V)
    chosen = logits.gather(-1, torch.tensor(tokens, dtype=torch.long)[:, None])[:, 0]
    return (logits.max(-1).values - chosen).tolist()


def answer_logits(model: Transformer, prompt: list[int], tokens: list[int]) -> Tensor:
    """The logits (n, V) that each of `tokens` was chosen by."""
    return model.logits(model([*prompt, *tokens][:-1])[0, len(prompt) - 1 :])


@dataclass
class Scored:
    """Sequences drawn after a prompt, under the distribution that they should come from.

    `cells` parts all sequences by how they begin: a prefix stands for what goes on with none of the
    longer ones. `places` tells of each drawn sequence how probable each of its tokens was, and how
    much was more probable: (above, p). So above + v p, with v uniform, is uniform for every token
    of a correct decoder, whatever the tokens before it."""

    cells: Sequences = field(default_factory=lambda: {(): 1.0})
    places: dict[Sequence, list[tuple[float, float]]] = field(default_factory=dict)
    never: Sequence | None = None  # drawn, and of probability 0
    unsure: float = 0.0  # probability of what rounding may keep or leave out by a warper

    def cell(self, sequence: Sequence) -> Sequence:
        """The longest of its beginnings that is a cell."""
        return next(c for n in range(len(sequence), -1, -1) if (c := sequence[:n]) in self.cells)


def one_end(tokens: list[int], ends: tuple[int, ...]) -> Sequence:
    """The tokens up to the first end token, all of which are written as the first of them."""
    for i, token in enumerate(tokens):
        if token in ends:
            return (*tokens[:i], ends[0])
    return tuple(tokens)


@torch.no_grad()
def scored(
    model: Transformer, prompt: list[int], drawn: list[Sequence], sampling: Sampling,
    edge: float = 1e-3,
) -> Scored:  # fmt: skip
    """Score sequences drawn after the prompt, their end tokens as `one_end` writes them. The cells
    are what is due five times or more in so many draws. A token that top-k or top-p leave out, but
    would not if its logit were larger by `edge`, is the last of those kept."""
    found, least = Scored(), 5 / len(drawn)
    distinct = sorted(set(drawn))
    cache = model.new_cache(len(prompt) + TOGETHER * max(map(len, distinct)))
    model.prefill(prompt[:-1], cache)
    weights: Sequences = {(): 1.0}  # the probability of every prefix of what was drawn
    seen: set[Sequence] = set()  # cells that are split
    for start in range(0, len(distinct), TOGETHER):
        part = distinct[start : start + TOGETHER]
        tree = Tree.merged(prompt[-1], [list(sequence) for sequence in part])
        logits = model.logits(model(tree.tokens, cache, tree.depth, tree.mask)[0])  # (n, V)
        rows = with_one_end(probs(logits, sampling), model.config.eos_ids)
        node_of = {(p, t): i for i, (p, t) in enumerate(zip(tree.parents, tree.tokens))}
        for sequence in part:
            node, found.places[sequence] = 0, []
            for n, token in enumerate(sequence):
                prefix, row = sequence[:n], rows[node]
                if prefix in found.cells and prefix not in seen:
                    seen.add(prefix)
                    split(found.cells, prefix, weights[prefix], row, least)
                    found.unsure += weights[prefix] * at_stake(logits[node], row, sampling, edge)
                above, p = place(row, token)
                if p == 0 and at_the_edge(logits[node], token, sampling, edge):
                    above = LAST
                elif p == 0:
                    found.never = found.never or sequence[: n + 1]
                found.places[sequence].append((above, p))
                weights[sequence[: n + 1]] = weights[prefix] * p
                node = node_of[node, token]
    return found


def with_one_end(rows: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Distributions (n, V) in which the first end token stands for all."""
    if len(ends) > 1:
        rows[:, ends[0]] = rows[:, list(ends)].sum(-1)
        rows[:, list(ends[1:])] = 0.0
    return rows


def split(cells: Sequences, prefix: Sequence, weight: float, row: Tensor, least: float) -> None:
    """Make cells of those continuations of a cell that are probable enough."""
    for token in (weight * row >= least).nonzero()[:, 0].tolist():
        cells[*prefix, token] = weight * float(row[token])
        cells[prefix] -= cells[*prefix, token]


def place(row: Tensor, token: int) -> tuple[float, float]:
    """The probability of all tokens before this one, the likeliest first, and its own."""
    p = row[token]
    before = (row > p) | ((row == p) & (torch.arange(len(row)) < token))
    return (float(row[before].sum()), float(p)) if p > 0 else (1.0, 0.0)


def at_the_edge(logits: Tensor, token: int, sampling: Sampling, edge: float) -> bool:
    """Whether the warpers keep this token if its logit is larger by `edge`."""
    lifted = logits.clone()
    lifted[token] += edge
    return bool(probs(lifted[None], sampling)[0][token] > 0)


def at_stake(logits: Tensor, row: Tensor, sampling: Sampling, edge: float) -> float:
    """The probability of the last token that the warpers keep, where rounding may decide between it
    and the first that they leave out, or nothing."""
    kept = row > 0
    if bool(kept.all()):
        return 0.0
    last = int(logits.masked_fill(~kept, torch.inf).argmin())
    first = int(logits.masked_fill(kept, -torch.inf).argmax())
    unsure = at_the_edge(logits, first, sampling, edge)
    unsure = unsure or not at_the_edge(logits, last, sampling, -edge)
    return float(row[last]) if unsure else 0.0


# ---- tests ---------------------------------------------------------------------------------------

BINS, PAIRED = 10, 4  # of one place, of each of two


def least_p(
    found: Scored, drawn: list[Sequence], other: list[Sequence] | None = None
) -> tuple[float, str]:
    """The smallest p of several χ² tests of what was drawn, or of it and what another decoder drew,
    times their number (Bonferroni); and where that is, and which bias would have been seen there.

    Tested are the first tokens jointly, each place, and each pair of neighbours."""
    longest = min(max(map(len, each)) for each in (drawn, other or drawn))
    expected = dict(expectations(found, longest))
    seen, others = counted(found, drawn), counted(found, other or [])
    results = []
    for where, exact in expected.items():
        if other is None:
            p = chi_square_p(seen[where], exact)
        else:
            p = two_sample_p(seen[where], others[where])
        results.append((min(1.0, len(expected) * p), where))
    p, where = min(results)
    n = len(drawn) * len(other) / (len(drawn) + len(other)) if other else len(drawn)
    bias = smallest_seen(max(1, len(expected[where]) - 1), n, FALSE_ALARM / len(expected))
    return p, f"p = {p:.2g} at {where}, {len(drawn)} runs; would have seen a TV of {bias:.2f}"


def expectations(found: Scored, longest: int) -> Iterator[tuple[str, dict]]:
    """The name of each test, and the distribution of what it counts."""
    yield "the first tokens", {cell: max(p, 1e-12) for cell, p in found.cells.items()}
    for i in range(longest):
        yield f"token {i + 1}", {(b,): 1 / BINS for b in range(BINS)}
    for i in range(longest - 1):
        pairs = [(a, b) for a in range(PAIRED) for b in range(PAIRED)]
        yield f"tokens {i + 1}, {i + 2}", {pair: 1 / len(pairs) for pair in pairs}


def counted(found: Scored, drawn: list[Sequence]) -> dict[str, Counter]:
    """The counts of each test."""
    counts: dict[str, Counter] = {}
    rng = random.Random(0)
    for sequence in drawn:
        counts.setdefault("the first tokens", Counter())[found.cell(sequence)] += 1
        uniform = [
            min(above + rng.random() * p, LAST if p else 1.0) for above, p in found.places[sequence]
        ]
        for i, u in enumerate(uniform):
            counts.setdefault(f"token {i + 1}", Counter())[(int(BINS * u),)] += 1
            if i:
                pair = int(PAIRED * uniform[i - 1]), int(PAIRED * u)
                counts.setdefault(f"tokens {i}, {i + 1}", Counter())[pair] += 1
    return counts
