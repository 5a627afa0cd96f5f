"""Lesson 06, what needs no torch: the choice of K, and the choice of a tree's nodes."""

import random
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, combinations
from math import prod
from operator import mul

from form import Oracle, Task, Wrong

from solutions.pure import call, differ, fastest, random_costs, speed, speed_distance

# ---- solutions -----------------------------------------------------------------------------------


def best_k(rates, cost, draft_cost):
    best, speed = 0, 1 / cost[1]
    tokens = reached = 1.0
    for k in range(1, len(rates) + 1):
        reached *= rates[k - 1]
        tokens += reached
        if tokens / (cost[k + 1] + k * draft_cost) > speed:
            best, speed = k, tokens / (cost[k + 1] + k * draft_cost)
    return best


def best_nodes(probs, parents, n):
    values = []
    for p, parent in zip(probs, parents):
        values.append(p if parent < 0 else values[parent] * p)
    best_first = sorted(range(len(values)), key=lambda i: -values[i])  # keeps the order of equals
    return sorted(best_first[:n])


# ---- best_k: cases -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """Arguments of best_k."""

    rates: list[float]
    cost: list[float]
    draft_cost: float

    @property
    def gains(self) -> list[float]:
        """The probability that draft 1, 2, … is accepted."""
        return list(accumulate(self.rates, mul))

    @property
    def costs(self) -> list[float]:
        """The costs of rounds with K = 0, 1, …"""
        return [cost + k * self.draft_cost for k, cost in enumerate(self.cost[1:])]

    def speed(self, k: int) -> float:
        """Expected tokens per cost, relative to plain decoding."""
        return speed(self.gains, self.costs, k)


def random_rates(seed: int) -> Rates:
    rng, n = random.Random(seed), seed % 6 + 1
    rates = [round(rng.uniform(0.2, 1), 2) for _ in range(n)]
    return Rates(rates, [0.0, *random_costs(rng, n)], round(rng.uniform(0, 0.4), 2))


RATES = [
    Rates([0.5], [0.0, 1.0, 1.1], 0.1),
    Rates([0.3], [0.0, 1.0, 1.3], 0.2),  # no draft pays
    Rates([0.9, 0.9, 0.9, 0.9], [0.0, 1.0, 1.05, 1.95, 2.0, 2.05], 0.05),  # K = 1 beats 2, not 4
    *map(random_rates, range(200)),
]


def run_best_k(function, case: Rates) -> tuple[int, float]:
    k = call(function, case.draft_cost, rates=case.rates, cost=case.cost)
    if type(k) is not int:
        raise Wrong(f"it returns {k!r}; K must be of type int")
    if not 0 <= k <= len(case.rates):
        raise Wrong(f"it returns {k}; K must be from 0 to the number of rates")
    return k, case.speed(k)


def show_rates(case: Rates) -> str:
    return f"rates = {case.rates}, cost = {case.cost}, draft_cost = {case.draft_cost}"


def show_best_k(case: Rates, got: tuple[int, float], expected: tuple[int, float]) -> str:
    return f"{show_rates(case)}: it returns K = {got[0]}, which is {got[1]:.3f} times as fast as " \
           f"plain decoding; K = {expected[0]} is {expected[1]:.3f}"  # fmt: skip


# ---- best_k: mistakes ----------------------------------------------------------------------------


def chooser(tokens, seconds, start=0):
    """A choice of K by wrong `tokens(rates, k)` or a wrong cost of a round,
    `seconds(cost, draft_cost, k)`."""

    def best_k(rates, cost, draft_cost):
        values = [tokens(rates, k) / seconds(cost, draft_cost, k) for k in range(len(rates) + 1)]
        return max(range(start, len(values)), key=values.__getitem__)

    return best_k


def expected(rates, k):
    return 1 + sum(prod(rates[:i]) for i in range(1, k + 1))


def round_cost(cost, draft_cost, k):
    return cost[k + 1] + k * draft_cost


def stops_at_the_first_decline(rates, cost, draft_cost):
    case, k = Rates(rates, cost, draft_cost), 0
    while k < len(rates) and case.speed(k + 1) > case.speed(k):
        k += 1
    return k


BEST_K_MISTAKES = {
    "it adds the rates, but they are conditional: draft 2 counts only if draft 1 was accepted, so "
    "multiply them": chooser(lambda rates, k: 1 + sum(rates[:k]), round_cost),
    "it never returns 0, but without drafts a round costs only 1; sometimes no draft pays": chooser(
        expected, round_cost, start=1
    ),
    "it forgets what the drafts cost: add k * draft_cost": chooser(
        expected, lambda cost, draft_cost, k: cost[k + 1]
    ),
    "it counts draft_cost once per round; each of the k drafts costs that much": chooser(
        expected, lambda cost, draft_cost, k: cost[k + 1] + (draft_cost if k else 0)
    ),
    "the target's pass has k + 1 rows: the newest token of the text and k drafts": (
        chooser(expected, lambda cost, draft_cost, k: cost[max(1, k)] + k * draft_cost),
        chooser(expected, lambda cost, draft_cost, k: cost[k] + k * draft_cost),  # cost[0] is 0
    ),
    "it forgets the token that each round yields without a draft: start at 1": chooser(
        lambda rates, k: sum(prod(rates[:i]) for i in range(1, k + 1)), round_cost
    ),
    "it counts only rounds in which all k drafts are accepted; the others yield tokens too": (
        chooser(lambda rates, k: 1 + k * prod(rates[:k]), round_cost)
    ),
    "it uses the first rate for all drafts": chooser(
        lambda rates, k: sum(rates[0] ** i for i in range(k + 1)), round_cost
    ),
    "it maximises tokens per pass, whatever the round costs": (
        lambda rates, cost, draft_cost: len(rates)
    ),
    "it counts draft_cost k + 1 times; k drafts cost k times as much": chooser(
        expected, lambda cost, draft_cost, k: cost[k + 1] + (k + 1) * draft_cost
    ),
    "its products are one too short: draft k is accepted with r₁ · … · rₖ": chooser(
        lambda rates, k: 1 + sum(prod(rates[: i - 1]) for i in range(1, k + 1)), round_cost
    ),
    "it subtracts the cost of the round; the speed is tokens divided by cost": (
        lambda rates, cost, draft_cost: max(
            range(len(rates) + 1),
            key=lambda k: expected(rates, k) - round_cost(cost, draft_cost, k),
        )
    ),
    "it always returns 0. That is right only if no draft pays. (If it adds up the costs of all "
    "passes: the round has one, over k + 1 tokens)": (
        lambda rates, cost, draft_cost: 0,
        chooser(expected, lambda cost, draft_cost, k: sum(cost[: k + 2]) + k * draft_cost),
    ),
    "it never considers the largest K, len(rates)": lambda rates, cost, draft_cost: best_k(
        rates[:-1], cost, draft_cost
    ),
    "it returns an index that is one less than K": lambda rates, cost, draft_cost: max(
        0, best_k(rates, cost, draft_cost) - 1
    ),
    "it stops at the first K that is slower than the one before. Costs can jump, so try every K": (
        stops_at_the_first_decline
    ),
}

# ---- best_nodes: cases ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidates:
    """Arguments of best_nodes."""

    probs: list[float]
    parents: list[int]
    n: int


def accumulate_values(probs, parents, combine=mul):
    """The value of each candidate: combine(its parent's value, its probability)."""
    values = []
    for p, parent in zip(probs, parents):
        values.append(p if parent < 0 else combine(values[parent], p))
    return values


def random_candidates(seed: int) -> Candidates:
    """Candidates whose values differ by more than rounding errors."""
    rng, values = random.Random(seed), [0, 0]
    while any(b - a < 1e-5 for a, b in zip(sorted(values), sorted(values)[1:])):
        parents = [rng.randrange(-1, i) for i in range(rng.randint(4, 10))]
        rest, probs = dict.fromkeys(range(-1, len(parents)), 1.0), []
        for parent in parents:
            probs.append(round(rng.uniform(0.2, 0.8) * rest[parent], 3))
            rest[parent] -= probs[-1]
        values = exact_values(probs, parents)
    return Candidates(probs, parents, rng.randint(2, len(parents) - 1))


def exact_values(probs: list[float], parents: list[int]) -> list[Fraction]:
    """The product along each candidate's path, from the candidate up to the root."""
    values = []
    for i in range(len(probs)):
        value = Fraction(1)
        while i >= 0:
            value, i = value * Fraction(str(probs[i])), parents[i]
        values.append(value)
    return values


CANDIDATES = [
    Candidates([0.6, 0.3, 0.4, 0.9], [-1, -1, 0, 1], 3),
    Candidates([0.5, 1.0, 1.0, 0.4], [-1, 0, 1, -1], 2),  # equal values on a path
    Candidates([0.3, 0.3, 0.3, 0.5], [-1, -1, -1, 2], 2),  # equal siblings
    Candidates([0.6, 0.3], [-1, 0], 4),  # fewer than n
    *map(random_candidates, range(60)),
]


def run_best_nodes(function, case: Candidates) -> list[int]:
    nodes = call(function, case.n, probs=case.probs, parents=case.parents)
    if not isinstance(nodes, list) or any(type(i) is not int for i in nodes):
        raise Wrong("it must return a list of indices, each of type int")
    if not all(0 <= i < len(case.probs) for i in nodes):
        raise Wrong("it returns an index that no candidate has; the root is not a candidate")
    if len(set(nodes)) < len(nodes):
        raise Wrong("an index occurs twice")
    if nodes != sorted(nodes):
        raise Wrong("the indices are not in ascending order; sort them at the end")
    return nodes


def best_of_all_trees(case: Candidates) -> list[int]:
    """Of all trees of n candidates, the one whose values have the largest sum, the expected number
    of accepted drafts; of equal ones, the first."""
    values, n = exact_values(case.probs, case.parents), min(case.n, len(case.probs))
    trees = [
        nodes for nodes in combinations(range(len(values)), n)
        if all(case.parents[i] in (-1, *nodes) for i in nodes)
    ]  # fmt: skip
    return list(max(trees, key=lambda nodes: sum(values[i] for i in nodes)))


def show_candidates(case: Candidates) -> str:
    return f"probs = {case.probs}, parents = {case.parents}, n = {case.n}"


def show_best_nodes(case: Candidates, got: list[int], expected: list[int]) -> str:
    return f"{show_candidates(case)}: it returns {got} instead of {expected}"


def diagnose_best_nodes(results: list[tuple[Candidates, list[int], list[int]]]) -> str | None:
    if any(len(got) != len(best) for _, got, best in results):
        return "it must return n indices, or all if there are fewer candidates"
    if any(case.parents[i] not in (-1, *got) for case, got, _ in results for i in got):
        return "it keeps a candidate without its parent, so the nodes do not form a tree"
    return None


# ---- best_nodes: mistakes ------------------------------------------------------------------------


def top(values, n):
    """The indices of the n largest values, ascending; of equal ones, the first."""
    return sorted(sorted(range(len(values)), key=lambda i: -values[i])[:n])


def by_values(values):
    """A choice by other values(probs, parents)."""
    return lambda probs, parents, n: top(values(probs, parents), n)


def depths(parents):
    return accumulate_values([1] * len(parents), parents, lambda above, one: above + 1)


def takes_the_last_for_the_root(probs, parents):
    values = []
    for p, parent in zip(probs, parents):
        values.append(p * values[parent] if values else p)
    return values


def last_of_equals(probs, parents, n):
    values = accumulate_values(probs, parents)
    return sorted(sorted(range(len(values)), key=lambda i: (values[i], i))[-n:])


def only_leaves(probs, parents, n):
    """The best nodes that have no children, each in the place of its path."""
    values = accumulate_values(probs, parents)
    leaves = [i for i in range(len(values)) if i not in parents]
    return sorted(sorted(leaves, key=lambda i: -values[i])[:n])


BEST_NODES_MISTAKES = {
    "it adds the probabilities along the path, so a child seems better than its parent; multiply "
    "them": by_values(lambda probs, parents: accumulate_values(probs, parents, lambda a, b: a + b)),
    "it compares the candidates' own probabilities; a child is accepted only if its whole path is, "
    "so multiply by its parent's value": by_values(lambda probs, parents: probs),
    "it multiplies by the parent's probability only; the value of the parent is a product, too": (
        by_values(lambda probs, parents: [
            p * (1 if parent < 0 else probs[parent]) for p, parent in zip(probs, parents)
        ])
    ),
    "it takes the mean of the probabilities along the path; a long path is less likely than its "
    "beginning": by_values(lambda probs, parents: [
        total / depth for total, depth in zip(
            accumulate_values(probs, parents, lambda a, b: a + b), depths(parents))
    ]),
    "for the root's children, parents[i] is -1, which is the index of the last candidate in "
    "Python; their value is their own probability": by_values(takes_the_last_for_the_root),
    "if two values are equal it keeps the later one, which may be the child of the other": (
        last_of_equals
    ),
    "it takes the first n candidates, whatever their values": lambda probs, parents, n: (
        list(range(min(n, len(probs))))
    ),
    "it takes a whole level before the next; a child may be worth more than its parent's sibling": (
        by_values(lambda probs, parents: [
            value - depth for value, depth in zip(
                accumulate_values(probs, parents), depths(parents))
        ])
    ),
    "it keeps the n worst candidates; sort by falling values": by_values(
        lambda probs, parents: [-value for value in accumulate_values(probs, parents)]
    ),
    "it keeps the best leaves only; the candidates on the way to them are nodes, too": only_leaves,
    "it returns the indices best first; sort them at the end, so that parents come first": (
        lambda probs, parents, n: sorted(
            range(len(probs)), key=lambda i: -accumulate_values(probs, parents)[i])[:n]
    ),
    "it returns one node too few; the root is not one of the n": lambda probs, parents, n: (
        best_nodes(probs, parents, n - 1)
    ),
    "it returns the values; return the candidates' indices": lambda probs, parents, n: sorted(
        accumulate_values(probs, parents)
    )[-n:],
}  # fmt: skip

# ---- tasks ---------------------------------------------------------------------------------------

BEST_K = Task(
    name="best_k",
    solution=best_k,
    judge=Oracle(
        RATES, run_best_k, lambda case: fastest(case.gains, case.costs), speed_distance,
        show_best_k, f"{len(RATES)} random rates and costs", arguments=show_rates,
    ),
    hints=(
        "Go through K = 0, 1, 2, … with a running product: the probability that all drafts so "
        "far are accepted. The tokens of a round are 1 plus the sum of these products.",
        "A round with K drafts costs cost[K + 1] + K * draft_cost. With K = 0 it yields 1 "
        "token for cost[1].",
    ),
    mistakes=BEST_K_MISTAKES,
)  # fmt: skip
BEST_NODES = Task(
    name="best_nodes",
    solution=best_nodes,
    judge=Oracle(
        CANDIDATES, run_best_nodes, best_of_all_trees, differ, show_best_nodes,
        f"{len(CANDIDATES)} lists of candidates: no other tree of n nodes is expected to yield "
        "more", arguments=show_candidates, diagnose=diagnose_best_nodes,
    ),
    hints=(
        "Go through the candidates in order. A parent comes before its children, so its value "
        "is already known.",
        "sorted(range(len(values)), key=lambda i: -values[i]) lists the indices best first, "
        "and equal ones in their order. Keep n of them.",
    ),
    mistakes=BEST_NODES_MISTAKES,
)  # fmt: skip
TASKS = [BEST_K, BEST_NODES]
