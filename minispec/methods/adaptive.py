"""How much to draft: K for a chain, the nodes of a tree, chosen by what passes cost.

One idea: a round is worth its expected tokens over its cost. The cost curve is measured by whoever
makes a policy (`minispec.cost`): curve[n] is what a pass over n tokens costs, in passes over one. A
policy chooses from what was seen before a round, never from what the round draws, so it is as
lossless as any fixed choice; but a seed reproduces a sampled run only if the measured costs are the
same.
"""

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice

from torch import Tensor

from minispec.tree import RankPath

LEARN, LEAN = 0.1, 0.005  # how fast a rate follows its rounds, and an untried one its neighbour
RARE = 0.02  # less likely paths are never considered: listing them all would take too long


def most_worth(chances: Iterable[float], costs: list[float]) -> int:
    """The n with most expected tokens over cost: 1 + the first n chances, over costs[n]."""
    tokens, best, most = 1.0, 0, 1 / costs[0]
    for n, chance in enumerate(islice(chances, len(costs) - 1), start=1):
        tokens += chance
        if tokens / costs[n] > most:
            best, most = n, tokens / costs[n]
    return best


def curve_at(curve: list[float], n: int) -> float:
    """The cost of `n` rows; of more than the curve knows, the last it knows."""
    return curve[min(n, len(curve) - 1)]


class AdaptiveK:
    """K for the next round of a chain: section 3.5 of Leviathan et al. 2023, but with the measured
    cost of the target's pass, which the paper takes to be 1 over any number of tokens.

    rate[i] is the chance that draft i + 1 is accepted if those before it were, a running mean over
    the rounds that tried it; the rate of an untried position drifts towards the one before it, or
    longer chains would never be tried. `draft` is the cost of one draft, in target passes over one
    token.
    """

    def __init__(self, curve: list[float], draft: float, most: int = 16):
        self.costs = [curve_at(curve, k + 1) + k * draft for k in range(most + 1)]
        self.rate = [0.7] * most  # prior

    def choose(self) -> int:
        """As tree.Policy; at least one, or nothing would be learnt."""
        return max(1, most_worth(self.chances(), self.costs))

    def chances(self) -> Iterator[float]:
        """That draft 1, 2, … is accepted."""
        chance = 1.0
        for rate in self.rate:
            chance *= rate
            yield chance

    def observe(self, drafted: int, accepted: int) -> None:
        """As tree.Policy."""
        for i, rate in enumerate(self.rate):
            if i < min(accepted + 1, drafted):  # tried
                self.rate[i] += LEARN * ((accepted > i) - rate)
            elif i >= max(1, drafted):
                self.rate[i] += LEAN * (self.rate[i - 1] - rate)


class AdaptiveTree:
    """A tree for each position: its likeliest paths by the heads' own probabilities there (as
    EAGLE-2, Li et al. 2024, grows its), as many as pay. `draft` is the cost of the heads, in passes
    over one token.
    """

    def __init__(self, curve: list[float], draft: float):
        self.costs = [cost + draft for cost in curve[1:]]

    def choose(self, chances: list[list[float]], free_rows: int) -> list[RankPath]:
        """As tree.TreePolicy."""
        likely, gains = [], []
        for path, gain in islice(best_first(chances), min(free_rows, len(self.costs) - 1)):
            if gain < RARE:
                break
            likely.append(path)
            gains.append(gain)
        return sorted(likely[: most_worth(gains, self.costs)])


def best_first(chances: list[list[float]]) -> Iterator[tuple[RankPath, float]]:
    """Paths and their gains, while there is any: the product of chances[k][r] along the path.

    It falls from parent to child and from rank to rank, so taking the best node next, then its
    first child and its next sibling into the queue, is optimal.
    """
    queue = [(-chances[0][0], (0,))]
    while queue and queue[0][0] < 0:
        gain, path = heapq.heappop(queue)
        yield path, -gain
        depth, rank = len(path) - 1, path[-1]
        if depth + 1 < len(chances):
            heapq.heappush(queue, (gain * chances[depth + 1][0], path + (0,)))
        if rank + 1 < len(chances[depth]):
            sibling = gain / chances[depth][rank] * chances[depth][rank + 1]
            heapq.heappush(queue, (sibling, path[:-1] + (rank + 1,)))


def grow_tree(accuracy: Tensor, nodes: int) -> list[RankPath]:
    """The tree of `nodes` nodes below the root that gains most by `expected`, best node first;
    fewer where no more gain anything. `accuracy` (K, RANKS) as MedusaHeads has it."""
    return [path for path, _ in islice(best_first(accuracy.tolist()), nodes)]


def expected(accuracy: Tensor, paths: list[RankPath]) -> float:
    """Tokens per pass if heads were right independently: 1 + Σ over nodes of Π a[k][r]."""
    a = accuracy.tolist()
    total = 1.0
    for path in paths:
        gain = 1.0
        for depth, rank in enumerate(path):
            gain *= a[depth][rank]
        total += gain
    return total
