"""Score another decoder's tokens with our float64 model."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minispec.certify.statistics import (
    FALSE_ALARM,
    Distribution,
    chi_square_p,
    detectable_bias,
    two_sample_p,
)
from minispec.model import Transformer
from minispec.sampling import Sampling, probs
from minispec.tree import Tree

Tokens = tuple[int, ...]
BATCH = 64  # sequences scored in one pass, as a tree
BELOW_ONE = 1 - 1e-9


def gaps(model: Transformer, prompt: list[int], tokens: list[int]) -> list[float]:
    """Return, for each token, how far its logit is below the largest at its position."""
    logits = answer_logits(model, prompt, tokens)  # (n, V)
    chosen = logits.gather(-1, torch.tensor(tokens, dtype=torch.long)[:, None])[:, 0]
    return (logits.max(-1).values - chosen).tolist()


def answer_logits(model: Transformer, prompt: list[int], tokens: list[int]) -> Tensor:
    """Return the logits (n, V) from which each of `tokens` was chosen."""
    return model.logits(model([*prompt, *tokens][:-1])[0, len(prompt) - 1 :])


@dataclass
class Scores:
    """Sampled continuations of a prompt, scored by the distribution they should come from.

    `cells` partitions all sequences by prefix: a sequence belongs to its longest prefix that is a
    cell. `intervals` holds (above, p) for each sampled token: the total probability of all more
    probable tokens, and its own. For a correct decoder above + v p, with v uniform, is therefore
    uniform for every token, whatever precedes it."""

    cells: Distribution = field(default_factory=lambda: {(): 1.0})
    intervals: dict[Tokens, list[tuple[float, float]]] = field(default_factory=dict)
    impossible: Tokens | None = None  # sampled, although its probability is 0
    uncertain: float = 0.0  # probability of tokens that a warper may keep or drop due to rounding

    def cell(self, sequence: Tokens) -> Tokens:
        """Return the longest prefix of the sequence that is a cell."""
        return next(c for n in range(len(sequence), -1, -1) if (c := sequence[:n]) in self.cells)


def normalise_end(tokens: list[int], eos_ids: tuple[int, ...]) -> Tokens:
    """Truncate after the first end token, and replace it by the first of `eos_ids`."""
    for i, token in enumerate(tokens):
        if token in eos_ids:
            return (*tokens[:i], eos_ids[0])
    return tuple(tokens)


@torch.no_grad()
def score(
    model: Transformer, prompt: list[int], samples: list[Tokens], sampling: Sampling,
    margin: float = 1e-3,
) -> Scores:  # fmt: skip
    """Score sequences sampled after the prompt, with end tokens normalised by `normalise_end`.

    Cells have an expected count of five or more. A token that top-k or top-p removes, but would
    keep if its logit were larger by `margin`, counts as the least probable one kept."""
    scores, min_probability = Scores(), 5 / len(samples)
    distinct = sorted(set(samples))
    cache = model.new_cache(len(prompt) + BATCH * max(map(len, distinct)))
    model.prefill(prompt[:-1], cache)
    prefix_probs: Distribution = {(): 1.0}  # of every prefix of a sample
    done: set[Tokens] = set()  # cells that have been split
    for start in range(0, len(distinct), BATCH):
        chunk = distinct[start : start + BATCH]
        tree = Tree.merged(prompt[-1], [list(sequence) for sequence in chunk])
        logits = model.logits(model(tree.tokens, cache, tree.depth, tree.mask)[0])  # (n, V)
        rows = merge_end_tokens(probs(logits, sampling), model.config.eos_ids)
        node_of = {(p, t): i for i, (p, t) in enumerate(zip(tree.parents, tree.tokens))}
        for sequence in chunk:
            node, scores.intervals[sequence] = 0, []
            for n, token in enumerate(sequence):
                prefix, row = sequence[:n], rows[node]
                if prefix in scores.cells and prefix not in done:
                    done.add(prefix)
                    split_cell(scores.cells, prefix, prefix_probs[prefix], row, min_probability)
                    uncertain = uncertain_probability(logits[node], row, sampling, margin)
                    scores.uncertain += prefix_probs[prefix] * uncertain
                above, p = interval(row, token)
                if p == 0 and kept_if_raised(logits[node], token, sampling, margin):
                    above = BELOW_ONE
                elif p == 0:
                    scores.impossible = scores.impossible or sequence[: n + 1]
                scores.intervals[sequence].append((above, p))
                prefix_probs[sequence[: n + 1]] = prefix_probs[prefix] * p
                node = node_of[node, token]
    return scores


def merge_end_tokens(rows: Tensor, eos_ids: tuple[int, ...]) -> Tensor:
    """Move the probability of all end tokens to the first of them, in place; rows are (n, V)."""
    if len(eos_ids) > 1:
        rows[:, eos_ids[0]] = rows[:, list(eos_ids)].sum(-1)
        rows[:, list(eos_ids[1:])] = 0.0
    return rows


def split_cell(
    cells: Distribution, prefix: Tokens, prob: float, row: Tensor, min_probability: float
) -> None:
    """Split off a cell for each next token that is probable enough."""
    for token in (prob * row >= min_probability).nonzero()[:, 0].tolist():
        cells[*prefix, token] = prob * float(row[token])
        cells[prefix] -= cells[*prefix, token]


def interval(row: Tensor, token: int) -> tuple[float, float]:
    """Return the total probability of all more probable tokens, and the token's own."""
    p = row[token]
    before = (row > p) | ((row == p) & (torch.arange(len(row)) < token))
    return (float(row[before].sum()), float(p)) if p > 0 else (1.0, 0.0)


def kept_if_raised(logits: Tensor, token: int, sampling: Sampling, margin: float) -> bool:
    """Return whether the warpers would keep this token if its logit were larger by `margin`."""
    raised = logits.clone()
    raised[token] += margin
    return bool(probs(raised[None], sampling)[0][token] > 0)


def uncertain_probability(logits: Tensor, row: Tensor, sampling: Sampling, margin: float) -> float:
    """Return the probability of the last token that the warpers keep if rounding may decide between
    it and the first one they remove, otherwise 0."""
    kept = row > 0
    if bool(kept.all()):
        return 0.0
    last = int(logits.masked_fill(~kept, torch.inf).argmin())
    first = int(logits.masked_fill(kept, -torch.inf).argmax())
    uncertain = kept_if_raised(logits, first, sampling, margin)
    uncertain = uncertain or not kept_if_raised(logits, last, sampling, -margin)
    return float(row[last]) if uncertain else 0.0


# ---- tests ---------------------------------------------------------------------------------------

BINS, PAIR_BINS = 10, 4  # for one position, and for each of a pair


def smallest_p(
    scores: Scores, samples: list[Tokens], other: list[Tokens] | None = None
) -> tuple[float, str]:
    """Return the smallest p-value of several χ² tests, times their number (Bonferroni), and a line
    that names the test and the bias it could detect.

    The tests compare the samples with the exact distribution, or with `other`, the samples of
    another decoder: the first tokens jointly, each position, and each pair of neighbours."""
    length = min(max(map(len, sequences)) for sequences in (samples, other or samples))
    expected = dict(expected_bins(scores, length))
    observed, other_observed = count_bins(scores, samples), count_bins(scores, other or [])
    results = []
    for where, exact in expected.items():
        if other is None:
            p = chi_square_p(observed[where], exact)
        else:
            p = two_sample_p(observed[where], other_observed[where])
        results.append((min(1.0, len(expected) * p), where))
    p, where = min(results)
    n = len(samples) * len(other) / (len(samples) + len(other)) if other else len(samples)
    bias = detectable_bias(max(1, len(expected[where]) - 1), n, FALSE_ALARM / len(expected))
    return p, f"p = {p:.2g} at {where}, {len(samples)} runs; a TV of {bias:.2f} would be detected"


def expected_bins(scores: Scores, length: int) -> Iterator[tuple[str, dict]]:
    """Yield the name of each test and the distribution of its bins."""
    yield "the first tokens", {cell: max(p, 1e-12) for cell, p in scores.cells.items()}
    for i in range(length):
        yield f"token {i + 1}", {(b,): 1 / BINS for b in range(BINS)}
    for i in range(length - 1):
        pairs = [(a, b) for a in range(PAIR_BINS) for b in range(PAIR_BINS)]
        yield f"tokens {i + 1}, {i + 2}", {pair: 1 / len(pairs) for pair in pairs}


def count_bins(scores: Scores, samples: list[Tokens]) -> dict[str, Counter]:
    """Count the samples in the bins of each test."""
    counts: dict[str, Counter] = {}
    rng = random.Random(0)
    for sequence in samples:
        counts.setdefault("the first tokens", Counter())[scores.cell(sequence)] += 1
        uniform = [
            min(above + rng.random() * p, BELOW_ONE if p else 1.0)
            for above, p in scores.intervals[sequence]
        ]
        for i, u in enumerate(uniform):
            counts.setdefault(f"token {i + 1}", Counter())[(int(BINS * u),)] += 1
            if i:
                pair = int(PAIR_BINS * uniform[i - 1]), int(PAIR_BINS * u)
                counts.setdefault(f"tokens {i}, {i + 1}", Counter())[pair] += 1
    return counts
