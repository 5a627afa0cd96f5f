"""Policies: how much a round drafts. Fixed numbers, and adaptive choices of K for a chain or of the
nodes of a tree.

A chain is a tree without branches. In both, the value of a draft is the probability that it is
accepted, a product along its path, and adaptive policies maximise the expected tokens per unit of
cost. The caller passes in a measured cost curve (see `fast.cost`): curve[n] is the cost of a pass
over n tokens, relative to a pass over one. A policy decides from what is known before a round,
never from what the round draws, so it is as lossless as a fixed choice. But a seed reproduces a
sampled run only if the measured costs are the same.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice, takewhile
from typing import Protocol

from torch import Tensor

from minispec.cli import UserError
from minispec.tree import RankPath

TRIED_STEP = 0.1  # towards the observed outcome
UNTRIED_STEP = 0.005  # of an untried position, towards the previous position's rate
MIN_PATH_PROB = 0.02  # less likely paths are ignored: listing them all would take too long
PRIOR_RATE, PRIOR_GAIN = 0.7, 0.2  # assumed at first, if nothing was measured with the drafter
PRIOR_ROUNDS = 2  # what is assumed at first weighs as much as this many observed rounds
PROBE_SHARE = 0.02  # at most this share of the time of plain steps is spent on probes


class Policy(Protocol):
    """Chooses how much a round drafts, based only on the text and on earlier rounds. A choice that
    depended on the round's own draws would bias the output.

    For a chain, a round calls `choose` and `observe`; Medusa calls `drafting` first. A recurrent
    head also asks for the `width` of one level of its tree after the other, or for a
    `static_shape`, and multiplies its probabilities by `calibration`.
    """

    calibration: float = 1.0

    def drafting(self, values: Sequence[float] = ()) -> bool:
        """Begin a round. Return whether the heads run in it. Other drafts, of these `values`, are
        among the candidates in any case."""
        return True

    def width(self, level: int, values: Tensor) -> int:
        """Return how many candidates of this level, counted from 1, the head reads for the next:
        those of highest value. 0 ends the expansion."""

    def static_shape(self) -> tuple[int, int]:
        """Return the width and depth of an expansion that must be the same in every round."""

    def choose(self, values: Sequence[float] | None = None, free_rows: int = 0) -> int:
        """Return how many of a tree's candidates to keep, at most `free_rows`: those of highest
        value. Without values, return the K of a chain. 0 is a plain step."""

    def observe(self, drafted: int, accepted: int) -> None:
        """Record how many drafts a round had, and how many were accepted. Not called if Medusa's
        heads had no hidden state to read."""


class FixedK(Policy):
    """Drafts the same number of tokens in every round."""

    def __init__(self, k: int, name: str = "k", unit: str = ""):
        if k < 1:
            raise UserError(f"{name} {k}: must be auto or at least 1{unit}")
        self.k = k

    def choose(self, values: Sequence[float] | None = None, free_rows: int = 0) -> int:
        return self.k


class FixedNodes(FixedK):
    """Keeps the same number of candidates in every round. `shape` is the expansion's width, after a
    first level of one row, and its depth. By default, both grow with the number of nodes: from
    1 × 1 for one and 4 × 4 for 4 nodes to 10 × 8 for 60."""

    def __init__(self, nodes: int, shape: tuple[int, int] | None = None):
        super().__init__(nodes, "tree", " node")
        depth = min(nodes, round(math.log2(nodes)) + 2)
        self.shape = shape or (min(nodes, max(4, round(1.3 * math.sqrt(nodes)))), depth)

    def width(self, level: int, values: Tensor | None = None) -> int:
        return self.shape[0] if level < self.shape[1] else 0

    def static_shape(self) -> tuple[int, int]:
        return self.shape

    def choose(self, values: Sequence[float] | None = None, free_rows: int = 0) -> int:
        return min(self.k, free_rows, len(values))


def as_policy(number: int | Policy, fixed: type[FixedK] = FixedK) -> Policy:
    """The given policy, or the `fixed` one of this number."""
    return number if hasattr(number, "choose") else fixed(number)


# ---- by what a pass costs ------------------------------------------------------------------------


def best_draft_size(accept_probs: Iterable[float], costs: list[float]) -> int:
    """The n that maximises expected tokens per cost: (1 + Σ accept_probs[:n]) / costs[n]."""
    tokens, best_n, best_value = 1.0, 0, 1 / costs[0]
    for n, prob in enumerate(islice(accept_probs, len(costs) - 1), start=1):
        tokens += prob
        if tokens / costs[n] > best_value:
            best_n, best_value = n, tokens / costs[n]
    return best_n


def curve_at(curve: list[float], n: int) -> float:
    """The cost of a pass over `n` rows; beyond the end of the curve, its last value."""
    return curve[min(n, len(curve) - 1)]


class Adaptive(Policy):
    """Drafts while that pays, and otherwise tries again now and then: a probe.

    `gain` is how many more tokens a round yields than plain steps of the same cost would: a running
    mean over the rounds that drafted. It starts at what is expected, which counts for PRIOR_ROUNDS
    rounds. `probe_cost` is what a probe costs in addition to a plain step, in passes over one
    token. The first probe is delayed until its cost is PROBE_SHARE of the plain steps. Each probe
    that fails doubles the gap. One that pays for itself is followed by another at once.
    """

    def __init__(self, probe_cost: float, expected_gain: float = PRIOR_GAIN):
        self.gain, self.rounds = expected_gain, PRIOR_ROUNDS
        self.gap = self.first_gap = math.ceil(probe_cost / PROBE_SHARE)
        self.waited = 0  # plain steps since the latest draft

    def pays(self) -> bool:
        """Return whether drafting is expected to pay."""
        return self.gain >= 0

    def drafting(self, values: Sequence[float] = ()) -> bool:
        return self.pays() or self.waited >= self.gap

    def record(self, drafted: bool, gain: float) -> None:
        """Record whether a round drafted, and its gain."""
        if not drafted:
            self.waited += 1
            return
        self.gap = self.first_gap if self.pays() or gain > 0 else 2 * self.gap
        self.waited = self.gap if gain > 0 else 0
        self.rounds += 1
        self.gain += max(TRIED_STEP, 1 / self.rounds) * (gain - self.gain)


class AcceptanceRates:
    """rate[i] is the probability that draft i + 1 of a chain is accepted if all before it were: a
    running mean over the rounds that tried it. It starts at `measured`, which counts for
    PRIOR_ROUNDS rounds; further drafts start at its last value. The rate of an untried position
    drifts towards the previous position's rate, or longer chains would never be tried.
    """

    def __init__(self, length: int, measured: list[float] | None = None):
        known = (measured or [PRIOR_RATE])[:length]
        self.rate = known + known[-1:] * (length - len(known))
        self.rounds = [PRIOR_ROUNDS] * length  # those that tried each position

    def accept_probs(self) -> Iterator[float]:
        """Yield the probability that draft 1, 2, … is accepted."""
        prob = 1.0
        for rate in self.rate:
            prob *= rate
            yield prob

    def observe(self, drafted: int, accepted: int) -> None:
        """Record the outcome of a round."""
        for i, rate in enumerate(self.rate if drafted else []):
            if i < min(accepted + 1, drafted):  # tried
                self.rounds[i] += 1
                self.rate[i] += max(TRIED_STEP, 1 / self.rounds[i]) * ((accepted > i) - rate)
            elif i >= drafted:
                self.rate[i] += UNTRIED_STEP * (self.rate[i - 1] - rate)


class AdaptiveK(Adaptive):
    """K for the next round of a chain: section 3.5 of Leviathan et al. 2023, but with the measured
    cost of a target pass, which the paper takes to be 1 for any number of tokens. K may be 0.
    `draft_cost` is the cost of one draft, in target passes over one token; `acceptance` was
    measured with the drafter.
    """

    def __init__(
        self, curve: list[float], draft_cost: float, max_k: int = 16,
        acceptance: list[float] | None = None,
    ):  # fmt: skip
        self.costs = [curve_at(curve, k + 1) + k * draft_cost for k in range(max_k + 1)]
        self.rates = AcceptanceRates(max_k, acceptance)
        super().__init__(self.costs[1] - self.costs[0])

    def best(self) -> int:
        """The K that is expected to be fastest."""
        return best_draft_size(self.rates.accept_probs(), self.costs)

    def pays(self) -> bool:
        return self.best() > 0

    def choose(self, values: Sequence[float] | None = None, free_rows: int = 0) -> int:
        """See Policy. If no drafts pay, 0, or a probe of 1 when it is due."""
        return self.best() or int(self.drafting())

    def observe(self, drafted: int, accepted: int) -> None:
        self.record(drafted > 0, 1 + accepted - self.costs[drafted])
        self.rates.observe(drafted, accepted)


class AdaptiveTree(Adaptive):
    """A new tree every round: the most likely paths by the heads' own probabilities, as in EAGLE-2
    (Li et al. 2024), and only as many as pay off. `heads_cost` is the cost of running the heads,
    in passes over one token. The expected gain follows from `accuracy`, that of MedusaHeads.
    """

    def __init__(self, curve: list[float], heads_cost: float, accuracy: Tensor | None = None):
        self.costs = [cost + heads_cost for cost in curve[1:]]
        expected_gain, nodes = PRIOR_GAIN, 1
        if accuracy is not None:
            path_probs = [prob for _, prob in islice(best_first(accuracy.tolist()), len(curve))]
            nodes = max(1, best_draft_size(path_probs, self.costs))
            expected_gain = 1 + sum(path_probs[:nodes]) - curve_at(self.costs, nodes)
        super().__init__(curve_at(self.costs, nodes) - 1, expected_gain)

    def choose(self, values: Sequence[float] | None = None, free_rows: int = 0) -> int:
        """See Policy. The values are in falling order."""
        return best_draft_size(values[:free_rows], self.costs)

    def observe(self, drafted: int, accepted: int) -> None:
        self.record(self.drafting(), 1 + accepted - self.costs[drafted])


class AdaptiveNodes(Adaptive):
    """The size of a recurrent head's tree, and how it is found. `level_costs[width]` is the cost of
    a pass of the head over that many rows, in passes of the target over one token, for each width
    to choose from. `acceptance` is that of RecurrentHead.

    `rate` is the tokens per unit of cost so far. Another level is expanded, and a candidate kept,
    if it is expected to bring more tokens for its cost.
    """

    def __init__(
        self, curve: list[float], level_costs: dict[int, float],
        acceptance: list[float] | None = None, max_depth: int = 8,
    ):  # fmt: skip
        self.curve, self.level_costs, self.max_depth = curve, level_costs, max_depth
        self.row_cost = (curve[-1] - 1) / len(curve)  # of a candidate, in the target's pass
        chain = AdaptiveK(curve, level_costs[1], max_depth, acceptance)
        depth = max(1, chain.best())
        tokens, cost = 1 + sum(islice(chain.rates.accept_probs(), depth)), chain.costs[depth]
        super().__init__(chain.costs[1] - 1, tokens - cost)
        # running sums: of all rounds, and of the head's candidates
        self.tokens, self.cost = PRIOR_ROUNDS * tokens, PRIOR_ROUNDS * cost
        self.expected = self.accepted = float(PRIOR_ROUNDS)
        self.rate = tokens / cost
        self.next_prob = chain.rates.rate[0]  # running mean of the best child's probability
        self.static = max(level_costs), depth
        # of a round: whether the head drafts, and what it costs
        self.expanding, self.expansion_cost = False, 0.0

    def drafting(self, values: Sequence[float] = ()) -> bool:
        """See Policy. The head is not needed if the other drafts alone are worth their time."""
        n = best_draft_size(values, self.curve[1:])
        enough = n > 0 and 1 + sum(values[:n]) >= self.rate * self.curve[n + 1]
        self.expanding = super().drafting() and not enough
        self.expansion_cost = self.level_costs[1] if self.expanding else 0.0  # of the first level
        self.best_value = 1.0
        return self.expanding

    def width(self, level: int, values: Tensor) -> int:
        if level == self.max_depth:
            return 0
        best = values.topk(min(len(values), max(self.level_costs))).values.tolist()
        if self.best_value > 0 and best[0] >= 0:  # not NaN
            self.next_prob += TRIED_STEP * (best[0] / self.best_value - self.next_prob)
        self.best_value = best[0]
        child_value = self.calibration * self.next_prob
        profit = {0: 0.0} | {
            n: child_value * sum(best[:n]) - self.rate * (cost + n * self.row_cost)
            for n, cost in self.level_costs.items() if n <= len(best)
        }  # fmt: skip
        width = max(profit, key=profit.get)
        self.expansion_cost += self.level_costs[width] if width else 0.0
        return width

    def static_shape(self) -> tuple[int, int]:
        width, depth = self.static
        self.expansion_cost += (depth - 1) * self.level_costs[width]
        return self.static

    def choose(self, values: Sequence[float] | None = None, free_rows: int = 0) -> int:
        self.costs = [cost + self.expansion_cost for cost in self.curve[1:]]
        tokens = list(accumulate(sorted(values, reverse=True)[:free_rows], initial=0.0))
        most = min(len(tokens), len(self.costs)) - 1
        least = min(self.expanding and not self.pays(), most)  # as a probe, try one
        n = max(range(least, most + 1), key=lambda n: tokens[n] - self.rate * self.costs[n])
        self.kept = tokens[n]  # the tokens to expect from the candidates that are kept
        return n

    def observe(self, drafted: int, accepted: int) -> None:
        keep = 1 - TRIED_STEP / 2
        self.tokens = keep * self.tokens + 1 + accepted
        self.cost = keep * self.cost + self.costs[drafted]
        if drafted and self.expanding:
            self.expected = keep * self.expected + self.kept / self.calibration
            self.accepted = keep * self.accepted + accepted
        elif self.expanding:  # nothing was worth keeping; the head may have become better
            self.accepted += UNTRIED_STEP * (self.expected - self.accepted)
        if self.expanding or not super().drafting():  # otherwise it says nothing about the head
            self.record(self.expanding, 1 + accepted - self.costs[drafted])
        self.rate, self.calibration = self.tokens / self.cost, self.accepted / self.expected


# ---- the best paths ------------------------------------------------------------------------------


def best_first(probs: list[list[float]]) -> Iterator[tuple[RankPath, float]]:
    """Yield paths and their gains, largest gain first, as long as the gain is positive. The gain of
    a path is the product of probs[k][r] along it.

    The gain falls from parent to child and from rank to rank. So it is optimal to take the best
    node in the queue, then to add its first child and its next sibling.
    """
    queue = [(-probs[0][0], (0,))]
    while queue and queue[0][0] < 0:
        gain, path = heapq.heappop(queue)
        yield path, -gain
        depth, rank = len(path) - 1, path[-1]
        if depth + 1 < len(probs):
            heapq.heappush(queue, (gain * probs[depth + 1][0], path + (0,)))
        if rank + 1 < len(probs[depth]):
            sibling = gain / probs[depth][rank] * probs[depth][rank + 1]
            heapq.heappush(queue, (sibling, path[:-1] + (rank + 1,)))


def likely_paths(probs: list[list[float]], policy: Policy, free_rows: int) -> list[RankPath]:
    """The most likely paths by the probabilities of each head's best candidates (K, ranks), as many
    as the policy chooses, each after all of its prefixes."""
    likely = takewhile(lambda pair: pair[1] >= MIN_PATH_PROB, best_first(probs))
    paths = dict(islice(likely, free_rows))  # with their gains
    return sorted([*paths][: policy.choose([*paths.values()], free_rows)])


def grow_tree(accuracy: Tensor, nodes: int) -> list[RankPath]:
    """The tree of `nodes` nodes below the root with the most `expected_tokens`, best node first.
    It has fewer nodes if no others gain anything. `accuracy` (K, RANKS) is that of MedusaHeads."""
    return [path for path, _ in islice(best_first(accuracy.tolist()), nodes)]


def expected_tokens(accuracy: Tensor, paths: list[RankPath]) -> float:
    """Tokens per pass if the heads were right independently: 1 + Σ over nodes of Π a[k][r]."""
    a = accuracy.tolist()
    return 1.0 + sum(math.prod(a[k][r] for k, r in enumerate(path)) for path in paths)
