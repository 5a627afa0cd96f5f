"""Adaptive policies: choose K for a chain, or the nodes of a tree, by what a pass costs.

Both maximise a round's expected tokens per unit of cost. The caller passes in a measured cost curve
(see `minispec.cost`): curve[n] is the cost of a pass over n tokens, relative to a pass over one.
A policy decides from what is known before a round, never from what the round draws, so it is as
lossless as a fixed choice. But a seed reproduces a sampled run only if the measured costs are the
same.
"""

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice

from torch import Tensor

from minispec.tree import RankPath

# step sizes: towards the observed outcome and, for untried positions, towards the previous
# position's rate
TRIED_STEP, UNTRIED_STEP = 0.1, 0.005
MIN_PATH_PROB = 0.02  # less likely paths are ignored: listing them all would take too long


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


class AdaptiveK:
    """K for the next round of a chain: section 3.5 of Leviathan et al. 2023, but with the measured
    cost of a target pass, which the paper takes to be 1 for any number of tokens.

    rate[i] is the probability that draft i + 1 is accepted if all before it were: a running mean
    over the rounds that tried it. The rate of an untried position drifts towards the previous
    position's rate, or longer chains would never be tried. `draft_cost` is the cost of one draft,
    in target passes over one token.
    """

    def __init__(self, curve: list[float], draft_cost: float, max_k: int = 16):
        self.costs = [curve_at(curve, k + 1) + k * draft_cost for k in range(max_k + 1)]
        self.rate = [0.7] * max_k  # prior

    def choose(self) -> int:
        """See tree.Policy. At least 1: a round without drafts teaches nothing."""
        return max(1, best_draft_size(self.accept_probs(), self.costs))

    def accept_probs(self) -> Iterator[float]:
        """Yield the probability that draft 1, 2, … is accepted."""
        prob = 1.0
        for rate in self.rate:
            prob *= rate
            yield prob

    def observe(self, drafted: int, accepted: int) -> None:
        """See tree.Policy."""
        for i, rate in enumerate(self.rate):
            if i < min(accepted + 1, drafted):  # tried
                self.rate[i] += TRIED_STEP * ((accepted > i) - rate)
            elif i >= max(1, drafted):
                self.rate[i] += UNTRIED_STEP * (self.rate[i - 1] - rate)


class AdaptiveTree:
    """A new tree every round: the most likely paths by the heads' own probabilities, as in EAGLE-2
    (Li et al. 2024), and only as many as pay off. `heads_cost` is the cost of running the heads,
    in passes over one token.
    """

    def __init__(self, curve: list[float], heads_cost: float):
        self.costs = [cost + heads_cost for cost in curve[1:]]

    def choose(self, probs: list[list[float]], free_rows: int) -> list[RankPath]:
        """See tree.TreePolicy."""
        paths, path_probs = [], []
        for path, prob in islice(best_first(probs), min(free_rows, len(self.costs) - 1)):
            if prob < MIN_PATH_PROB:
                break
            paths.append(path)
            path_probs.append(prob)
        return sorted(paths[: best_draft_size(path_probs, self.costs)])


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
    total = 1.0
    for path in paths:
        gain = 1.0
        for depth, rank in enumerate(path):
            gain *= a[depth][rank]
        total += gain
    return total
