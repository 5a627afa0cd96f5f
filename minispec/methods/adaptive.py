"""Adaptive policies: choose K for a chain, or the nodes of a tree, by what a pass costs.

All maximise the expected tokens per unit of cost. The caller passes in a measured cost curve
(see `fast.cost`): curve[n] is the cost of a pass over n tokens, relative to a pass over one.
If no drafts pay, a round is a plain step, and drafts are tried again now and then (see `Probes`).
A policy decides from what is known before a round, never from what the round draws, so it is as
lossless as a fixed choice. But a seed reproduces a sampled run only if the measured costs are the
same.
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from itertools import accumulate, islice

from torch import Tensor

from minispec.tree import RankPath

# step sizes: towards the observed outcome and, for untried positions, towards the previous
# position's rate
TRIED_STEP, UNTRIED_STEP = 0.1, 0.005
MIN_PATH_PROB = 0.02  # less likely paths are ignored: listing them all would take too long
PRIOR_RATE, PRIOR_GAIN = 0.7, 0.2  # assumed at first, if nothing was measured with the drafter
PRIOR_ROUNDS = 2  # what is assumed at first weighs as much as this many observed rounds
PROBE_SHARE = 0.02  # at most this share of the time of plain steps is spent on probes


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


class Probes:
    """When to try drafts again after they stopped paying. `cost` is what a probe costs in addition
    to a plain step, in passes over one token.

    The first probe is delayed until its cost is PROBE_SHARE of the plain steps. Each probe
    that fails doubles the gap. One that pays for itself is followed by another at once.
    """

    def __init__(self, cost: float):
        self.first_gap = math.ceil(cost / PROBE_SHARE)
        self.gap, self.waited = self.first_gap, 0

    @property
    def due(self) -> bool:
        return self.waited >= self.gap

    def observe(self, drafted: bool, probing: bool, profitable: bool) -> None:
        """Record a round. `probing`: drafts were not expected to pay; `profitable`: they did."""
        if not drafted:
            self.waited += 1
            return
        self.gap = 2 * self.gap if probing and not profitable else self.first_gap
        self.waited = self.gap if profitable else 0


class AdaptiveK:
    """K for the next round of a chain: section 3.5 of Leviathan et al. 2023, but with the measured
    cost of a target pass, which the paper takes to be 1 for any number of tokens. K may be 0.

    rate[i] is the probability that draft i + 1 is accepted if all before it were: a running mean
    over the rounds that tried it. It starts at `acceptance`, measured with the drafter, which
    counts for PRIOR_ROUNDS rounds; further drafts start at its last value. The rate of an untried
    position drifts towards the previous position's rate, or longer chains would never be tried.
    `draft_cost` is the cost of one draft, in target passes over one token.
    """

    def __init__(
        self, curve: list[float], draft_cost: float, max_k: int = 16,
        acceptance: list[float] | None = None,
    ):  # fmt: skip
        self.costs = [curve_at(curve, k + 1) + k * draft_cost for k in range(max_k + 1)]
        known = (acceptance or [PRIOR_RATE])[:max_k]
        self.rate = known + known[-1:] * (max_k - len(known))
        self.rounds = [PRIOR_ROUNDS] * max_k  # those that tried each position
        self.probes = Probes(self.costs[1] - self.costs[0])

    def choose(self) -> int:
        """See tree.Policy. If no drafts pay, 0, or a probe of 1 when it is due."""
        return self.best() or int(self.probes.due)

    def best(self) -> int:
        """The K that is expected to be fastest."""
        return best_draft_size(self.accept_probs(), self.costs)

    def accept_probs(self) -> Iterator[float]:
        """Yield the probability that draft 1, 2, … is accepted."""
        prob = 1.0
        for rate in self.rate:
            prob *= rate
            yield prob

    def observe(self, drafted: int, accepted: int) -> None:
        """See tree.Policy."""
        profitable = 1 + accepted > self.costs[drafted]
        self.probes.observe(drafted > 0, probing=self.best() == 0, profitable=profitable)
        if drafted == 0:
            return
        for i, rate in enumerate(self.rate):
            if i < min(accepted + 1, drafted):  # tried
                self.rounds[i] += 1
                self.rate[i] += max(TRIED_STEP, 1 / self.rounds[i]) * ((accepted > i) - rate)
            elif i >= drafted:
                self.rate[i] += UNTRIED_STEP * (self.rate[i - 1] - rate)


class Gain:
    """Whether drafting pays. `mean` is how many more tokens a round yields than plain steps of the
    same cost would: a running mean over the rounds that drafted. It starts at `expected_gain`,
    which counts for PRIOR_ROUNDS rounds. `probe_cost` is as in Probes.
    """

    def __init__(self, expected_gain: float, probe_cost: float):
        self.mean, self.rounds, self.probes = expected_gain, PRIOR_ROUNDS, Probes(probe_cost)

    @property
    def drafting(self) -> bool:
        """Whether to draft in the next round. While the mean is negative, only as a probe."""
        return self.mean >= 0 or self.probes.due

    def observe(self, tokens: int, cost: float) -> None:
        """Record a round's tokens and cost. It drafted if `drafting` said so."""
        drafted, gain = self.drafting, tokens - cost
        self.probes.observe(drafted, probing=self.mean < 0, profitable=gain > 0)
        if drafted:
            self.rounds += 1
            self.mean += max(TRIED_STEP, 1 / self.rounds) * (gain - self.mean)


class AdaptiveTree:
    """A new tree every round: the most likely paths by the heads' own probabilities, as in EAGLE-2
    (Li et al. 2024), and only as many as pay off. `heads_cost` is the cost of running the heads,
    in passes over one token. `accuracy`, as in MedusaHeads, says what the heads promise at first.
    """

    def __init__(self, curve: list[float], heads_cost: float, accuracy: Tensor | None = None):
        self.costs = [cost + heads_cost for cost in curve[1:]]
        expected_gain, nodes = PRIOR_GAIN, 1
        if accuracy is not None:
            path_probs = [prob for _, prob in islice(best_first(accuracy.tolist()), len(curve))]
            nodes = max(1, best_draft_size(path_probs, self.costs))
            expected_gain = 1 + sum(path_probs[:nodes]) - curve_at(self.costs, nodes)
        self.gain = Gain(expected_gain, curve_at(self.costs, nodes) - 1)

    def drafting(self) -> bool:
        """See tree.TreePolicy."""
        return self.gain.drafting

    def choose(self, probs: list[list[float]], free_rows: int) -> list[RankPath]:
        """See tree.TreePolicy."""
        paths, path_probs = [], []
        for path, prob in islice(best_first(probs), min(free_rows, len(self.costs) - 1)):
            if prob < MIN_PATH_PROB:
                break
            paths.append(path)
            path_probs.append(prob)
        return sorted(paths[: best_draft_size(path_probs, self.costs)])

    def observe(self, drafted: int, accepted: int) -> None:
        """See tree.TreePolicy."""
        self.gain.observe(1 + accepted, self.costs[drafted])


class AdaptiveNodes:
    """The size of a FastMTP head's tree, and how it is found. `level_costs[width]` is the cost of a
    pass of the head over that many rows, in passes of the target over one token, for each width to
    choose from. `acceptance` is that of MTPHead.

    Time is worth what it has brought so far: `rate` tokens per pass over one token. Another level
    is expanded, and a candidate is kept, if it promises more tokens than its time is worth.
    """

    def __init__(
        self, curve: list[float], level_costs: dict[int, float],
        acceptance: list[float] | None = None, max_depth: int = 8,
    ):  # fmt: skip
        self.curve, self.level_costs, self.max_depth = curve, level_costs, max_depth
        self.row_cost = (curve[-1] - 1) / len(curve)  # of a candidate, in the target's pass
        chain = AdaptiveK(curve, level_costs[1], max_depth, acceptance)
        depth = max(1, chain.best())
        tokens, cost = 1 + sum(islice(chain.accept_probs(), depth)), chain.costs[depth]
        self.gain = Gain(tokens - cost, curve_at(curve, 2) + level_costs[1] - 1)
        # running sums: of all rounds, and of what the head's candidates promised and brought
        self.tokens, self.cost = PRIOR_ROUNDS * tokens, PRIOR_ROUNDS * cost
        self.expected = self.accepted = float(PRIOR_ROUNDS)
        self.next_prob = chain.rate[0]  # running mean of the best child's probability
        self.static = max(level_costs), depth
        # of a round: whether the head drafts, and what it costs
        self.expanding, self.expansion_cost = False, 0.0

    @property
    def rate(self) -> float:
        """How many tokens a pass over one token was worth in the latest rounds."""
        return self.tokens / self.cost

    @property
    def calibration(self) -> float:
        """See tree.NodePolicy."""
        return self.accepted / self.expected

    def expand(self, chain: list[float]) -> bool:
        """See tree.NodePolicy. The head is not needed if the chain alone is worth its time."""
        n = best_draft_size(chain, self.curve[1:])
        enough = n > 0 and 1 + sum(chain[:n]) >= self.rate * self.curve[n + 1]
        self.expanding = self.gain.drafting and not enough
        self.expansion_cost, self.best_value = 0.0, 1.0
        return self.expanding

    def width(self, level: int, values: Tensor) -> int:
        """See tree.NodePolicy."""
        if level == self.max_depth:
            return 0
        best = values.topk(min(len(values), max(self.level_costs))).values.tolist()
        if level == 1:  # the head has read the newest token
            self.expansion_cost = self.level_costs[1]
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
        """See tree.NodePolicy."""
        width, depth = self.static
        self.expansion_cost = self.level_costs[1] + (depth - 1) * self.level_costs[width]
        return self.static

    def choose(self, values: list[float], free_rows: int) -> int:
        """See tree.NodePolicy."""
        self.costs = [cost + self.expansion_cost for cost in self.curve[1:]]
        tokens = list(accumulate(sorted(values, reverse=True)[:free_rows], initial=0.0))
        most = min(len(tokens), len(self.costs)) - 1
        probing = self.expanding and self.gain.mean < 0  # then try one at least
        n = max(
            range(min(probing, most), most + 1),
            key=lambda n: tokens[n] - self.rate * self.costs[n],
        )
        self.kept = tokens[n]  # what the kept candidates promise
        return n

    def observe(self, drafted: int, accepted: int) -> None:
        """See tree.NodePolicy."""
        keep = 1 - TRIED_STEP / 2
        self.tokens = keep * self.tokens + 1 + accepted
        self.cost = keep * self.cost + self.costs[drafted]
        if drafted and self.expanding:
            self.expected = keep * self.expected + self.kept / self.calibration
            self.accepted = keep * self.accepted + accepted
        elif self.expanding:  # nothing was worth keeping; the head may have become better
            self.accepted += UNTRIED_STEP * (self.expected - self.accepted)
        if self.expanding or not self.gain.drafting:  # otherwise it says nothing about the head
            self.gain.observe(1 + accepted, self.costs[drafted])


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


def grow_tree(accuracy: Tensor, nodes: int) -> list[RankPath]:
    """The tree of `nodes` nodes below the root with the most `expected_tokens`, best node first.
    It has fewer nodes if no others gain anything. `accuracy` (K, RANKS) is that of MedusaHeads."""
    return [path for path, _ in islice(best_first(accuracy.tolist()), nodes)]


def expected_tokens(accuracy: Tensor, paths: list[RankPath]) -> float:
    """Tokens per pass if the heads were right independently: 1 + Σ over nodes of Π a[k][r]."""
    a = accuracy.tolist()
    return 1.0 + sum(math.prod(a[k][r] for k, r in enumerate(path)) for path in paths)
