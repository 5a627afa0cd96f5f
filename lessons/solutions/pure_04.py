"""Lesson 04, what needs no torch: the growth of a tree, its size, and its growth from joint
acceptance."""

import heapq
import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass

from form import Oracle, Task, Wrong

from solutions.pure import call, fastest, random_costs, speed, speed_distance

RANKS = 10  # candidates of a head

# ---- solutions -----------------------------------------------------------------------------------


def grow_tree(accuracy, nodes):
    tree, candidates = [], {(r,): a for r, a in enumerate(accuracy[0])}
    while candidates and len(tree) < nodes:
        path = max(candidates, key=candidates.get)
        gain = candidates.pop(path)
        tree.append(path)
        if len(path) < len(accuracy):
            for r, a in enumerate(accuracy[len(path)]):
                candidates[*path, r] = gain * a
    return tree


def best_size(gains, costs):
    tokens, best, fastest = 1.0, 0, 1 / costs[0]
    for n, gain in enumerate(gains, start=1):
        tokens += gain
        if tokens / costs[n] > fastest:
            best, fastest = n, tokens / costs[n]
    return best


def grow_jointly(positions, nodes):
    right = {}
    for ranks in positions:
        for n in range(1, len(ranks) + 1):
            if ranks[n - 1] == 10:
                break
            path = tuple(ranks[:n])
            right[path] = right.get(path, 0) + 1
    return sorted(right, key=lambda path: (-right[path], len(path)))[:nodes]


# ---- grow_tree -----------------------------------------------------------------------------------

Path = tuple[int, ...]


@dataclass(frozen=True)
class Heads:
    """accuracy[k][r], and the number of nodes to place."""

    accuracy: list[list[float]]
    nodes: int


def random_heads(seed: int) -> Heads:
    """Heads whose accuracies fall from rank to rank, but not always from head to head."""
    rng = random.Random(seed)
    heads, ranks = seed % 3 + 2, seed % 4 + 1
    rate = [sorted((rng.randint(1, 99) for _ in range(ranks)), reverse=True) for _ in range(heads)]
    accuracy = [[round(a / max(100, 1.1 * sum(row)), 3) for a in row] for row in rate]
    return Heads(accuracy, (6, 3, 10, 1, 20, 4, 8)[seed % 7])


CERTAIN = [[1.0, 0.5], [1.0, 0.3]]  # a child gains as much as its parent
GROWN = [
    Heads([[0.5, 0.3], [0.5, 0.2]], 3), Heads([[0.4, 0.3, 0.2], [0.9, 0.05, 0.02]], 5),
    Heads(CERTAIN, 1), Heads(CERTAIN, 2),
    *map(random_heads, range(24)),
]  # fmt: skip


def gain_of(accuracy: list[list[float]], path: Path) -> float:
    return math.prod(accuracy[k][r] for k, r in enumerate(path))


PAIRS = "its list holds pairs, such as (path, gain); return only the paths"


def run_grow(function, case: Heads) -> list[Path]:
    accuracy = case.accuracy
    return checked(
        call(function, case.nodes, accuracy=accuracy), len(accuracy), len(accuracy[0]), "`accuracy`"
    )


def checked(tree: object, heads: int, ranks: int, given: str) -> list[Path]:
    """A list of paths, if they form a tree over the heads' ranks; `given` has these."""
    if not isinstance(tree, list) or not all(isinstance(path, tuple) for path in tree):
        raise Wrong("it must return a list of paths, each a tuple of ranks")
    if any(isinstance(part, tuple) for path in tree for part in path):
        raise Wrong(PAIRS)
    if () in tree:
        raise Wrong("the root, (), is not a path; it is the last token of the text")
    if any(len(path) > heads for path in tree):
        raise Wrong("a path is longer than there are heads")
    if any(type(r) is not int or not 0 <= r < ranks for path in tree for r in path):
        raise Wrong(f"a path has a rank that is not in {given}")
    if len(set(tree)) < len(tree):
        raise Wrong("a path occurs twice")
    if any(path[:-1] not in [(), *tree[:i]] for i, path in enumerate(tree)):
        raise Wrong("a path comes before its parent, or without it")
    return tree


def every_path(accuracy: list[list[float]]) -> list[Path]:
    ranks = range(len(accuracy[0]))
    lengths = range(1, len(accuracy) + 1)
    return [path for n in lengths for path in itertools.product(ranks, repeat=n)]


def exact_tree(case: Heads) -> list[Path]:
    """All paths, sorted: a path never gains more than its parent, so the first ones are a tree."""
    gain = {path: gain_of(case.accuracy, path) for path in every_path(case.accuracy)}
    return sorted(gain, key=lambda path: (-gain[path], len(path)))[: case.nodes]


@dataclass
class Grown:
    """A tree, with the gain of each path. Trees with the same gains are equally good."""

    paths: list[Path]
    gains: list[float]


def with_gains(tree: list[Path], case: Heads) -> Grown:
    return Grown(tree, [gain_of(case.accuracy, path) for path in tree])


def grown_distance(a: Grown, b: Grown) -> float:
    if len(a.gains) != len(b.gains):
        return math.inf
    return max((abs(x - y) for x, y in zip(a.gains, b.gains)), default=0.0)


def show_heads(case: Heads) -> str:
    return f"accuracy = {case.accuracy}, nodes = {case.nodes}"


def show_grown(case: Heads, got: Grown, expected: Grown) -> str:
    text = f"{show_heads(case)}: it returns {got.paths}"
    if len(got.paths) != len(expected.paths):
        return f"{text}, which has {len(got.paths)} paths; {expected.paths} is right"
    promise, best = (1 + sum(tree.gains) for tree in (got, expected))
    if best - promise < 1e-9:
        return f"{text}; best first is {expected.paths}"
    return f"{text}, which promises {promise:.3f} tokens; {expected.paths} promises {best:.3f}"


NOT_BEST_FIRST = "these are the right paths, but not best first"
BREADTH_FIRST = "all siblings come before any child, even if a child gains more"


def diagnose_grown(results: list[tuple[Heads, Grown, Grown]]) -> str | None:
    """Name a tree by its gains, or by the order of its depths."""
    trees = [(got, best) for _, got, best in results]
    if all(grown_distance(sorted_gains(got), sorted_gains(best)) < 1e-9 for got, best in trees):
        return NOT_BEST_FIRST
    depths = [[len(path) for path in got.paths] for got, _ in trees]
    if all(len(a.paths) == len(b.paths) for a, b in trees) and depths == [*map(sorted, depths)]:
        return BREADTH_FIRST
    return None


def sorted_gains(tree: Grown) -> Grown:
    return Grown(tree.paths, sorted(tree.gains))


# ---- its mistakes --------------------------------------------------------------------------------


def grown_by(score):
    """A tree that is grown by another score of a path than its gain."""

    def grow_tree(accuracy, nodes):
        tree, frontier = [], [(r,) for r in range(len(accuracy[0]))]
        while frontier and len(tree) < nodes:
            path = max(frontier, key=lambda path: score(accuracy, path))
            frontier.remove(path)
            tree.append(path)
            if len(path) < len(accuracy):
                frontier += [(*path, r) for r in range(len(accuracy[0]))]
        return tree

    return grow_tree


def heap_of_smallest(accuracy, nodes):
    """minispec's growth without the minus sign of the gains."""
    tree, queue = [], [(accuracy[0][0], (0,))]
    while queue and len(tree) < nodes:
        gain, path = heapq.heappop(queue)
        tree.append(path)
        depth, rank = len(path) - 1, path[-1]
        if depth + 1 < len(accuracy):
            heapq.heappush(queue, (gain * accuracy[depth + 1][0], (*path, 0)))
        if rank + 1 < len(accuracy[depth]):
            sibling = (*path[:-1], rank + 1)
            heapq.heappush(queue, (gain_of(accuracy, sibling), sibling))
    return tree


def with_its_gain(accuracy, path):
    return path, gain_of(accuracy, path)


def all_of(accuracy):
    return grow_tree(accuracy, 10**6)


def only_best_ranks(accuracy, nodes):
    return [(0,) * n for n in range(1, len(accuracy) + 1)][:nodes]


def never_a_sibling_below(accuracy, nodes):
    return [path for path in all_of(accuracy) if not any(path[1:])][:nodes]


def root_counts(accuracy, nodes):
    return grow_tree(accuracy, nodes - 1)


GROW_MISTAKES = {
    "a path's gain is the product of the accuracies along it, not its last accuracy": grown_by(
        lambda accuracy, path: accuracy[len(path) - 1][path[-1]]
    ),
    "the children of a path of length k are candidates of head k, so their accuracies are "
    "accuracy[len(path)]": grown_by(lambda accuracy, path: gain_of([accuracy[0], *accuracy], path)),
    BREADTH_FIRST: (
        lambda accuracy, nodes: sorted(all_of(accuracy), key=len)[:nodes],
        lambda accuracy, nodes: every_path(accuracy)[:nodes],
        lambda accuracy, nodes: sorted(all_of(accuracy), key=lambda path: len(path) > 1)[:nodes],
    ),
    "it takes the worst candidate first; a heap returns its smallest entry": (
        grown_by(lambda accuracy, path: -gain_of(accuracy, path)),
        heap_of_smallest,
    ),
    PAIRS: (
        lambda accuracy, nodes: [with_its_gain(accuracy, p) for p in grow_tree(accuracy, nodes)],
        lambda accuracy, nodes: [
            with_its_gain(accuracy, p)[::-1] for p in grow_tree(accuracy, nodes)
        ],
    ),
    "all paths have length 1; the children of a path that is in the tree are candidates, too": (
        lambda accuracy, nodes: every_path(accuracy[:1])[:nodes]
    ),
    "all children come before the next sibling, even if the sibling gains more; a path's gain is "
    "the product of the accuracies along it, not their sum": (
        lambda accuracy, nodes: sorted(all_of(accuracy))[:nodes]
    ),
    NOT_BEST_FIRST: (
        lambda accuracy, nodes: sorted(grow_tree(accuracy, nodes)),
        lambda accuracy, nodes: sorted(grow_tree(accuracy, nodes), key=lambda p: (len(p), p)),
    ),
    "it follows only the best candidate of each head, a chain": only_best_ranks,
    "it branches only at the root: below it only the best candidate gets a node": (
        never_a_sibling_below
    ),
    "it returns one path too few: the root does not count as one of the nodes": root_counts,
    "it returns one path too many": lambda accuracy, nodes: grow_tree(accuracy, nodes + 1),
    "the first token of a path is that of accuracy[0], the second that of accuracy[1], …": grown_by(
        lambda accuracy, path: gain_of([*accuracy[1:], accuracy[0]], path)
    ),
    "the root, (), is not a path; it is the last token of the text": (
        lambda accuracy, nodes: [(), *grow_tree(accuracy, nodes - 1)]
    ),
}

# ---- best_size -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    gains: list[float]
    costs: list[float]


def random_sizes(seed: int) -> Costs:
    """Falling gains, and costs that rise in steps."""
    rng = random.Random(seed)
    nodes = (5, 3, 8, 1, 6)[seed % 5]
    gains = sorted((round(rng.random() * rng.random(), 2) for _ in range(nodes)), reverse=True)
    return Costs(gains, random_costs(rng, nodes))


SIZED = [
    Costs([0.4, 0.3, 0.2], [1.0, 1.3, 1.35, 1.9]), Costs([0.2, 0.1], [1.0, 1.5, 1.6]),
    Costs([0.5, 0.4, 0.3], [1.0, 1.6, 1.62, 1.65]), *map(random_sizes, range(30)),
]  # fmt: skip


def run_size(function, case: Costs) -> tuple[int, float]:
    n = call(function, gains=case.gains, costs=case.costs)
    if type(n) is not int or not 0 <= n <= len(case.gains):
        raise Wrong("it must return a number of nodes, an int from 0 to len(gains)")
    return n, speed(case.gains, case.costs, n)


def show_costs(case: Costs) -> str:
    return f"gains = {case.gains}, costs = {case.costs}"


def show_size(case: Costs, got: tuple[int, float], expected: tuple[int, float]) -> str:
    return f"{show_costs(case)}: {got[0]} nodes are {got[1]:.3f} times as fast as a plain pass; " \
           f"{expected[0]} are {expected[1]:.3f} times as fast"  # fmt: skip


def best_by(value, first=0, drop=0):
    """The n with the highest value(gains, costs, n), from `first` to len(gains) - `drop`."""
    return lambda gains, costs: max(
        range(first, max(first, len(gains) - drop) + 1), key=lambda n: value(gains, costs, n)
    )


def with_cost(index, drop=0):
    """A choice by the cost of another size, costs[index(n)]."""
    return best_by(lambda g, c, n: (1 + sum(g[:n])) / c[min(index(n), len(g))], drop=drop)


def stops_at_the_first_loss(gains, costs):
    n = 0
    while n < len(gains) and speed(gains, costs, n + 1) > speed(gains, costs, n):
        n += 1
    return n


SIZE_MISTAKES = {
    "it returns the most tokens per pass, whatever they cost": best_by(lambda g, c, n: sum(g[:n])),
    "it forgets the fresh token, which every pass yields": best_by(
        lambda g, c, n: sum(g[:n]) / c[n]
    ),
    "it forgets that n = 0, a plain pass, may be the fastest": best_by(
        lambda g, c, n: (1 + sum(g[:n])) / c[n], first=1
    ),
    "it divides by the cost of another size: n nodes cost costs[n]": (
        with_cost(lambda n: n - 1), with_cost(lambda n: max(0, n - 1)),
        with_cost(lambda n: n + 1), with_cost(lambda n: n + 1, drop=1),
        with_cost(lambda n: n and n + 1), with_cost(lambda n: n and n + 1, drop=1),
    ),
    "it counts the gains of another size: n nodes gain sum(gains[:n])": (
        best_by(lambda g, c, n: (1 + sum(g[: n + 1])) / c[n]),
        best_by(lambda g, c, n: (1 + sum(g[: max(0, n - 1)])) / c[n]),
    ),
    "it counts only the gain of the last node; those before it count, too": (
        best_by(lambda g, c, n: (1 + sum(g[n - 1 : n])) / c[n]),
        best_by(lambda g, c, n: (1 + g[n - 1]) / c[n]),
        best_by(lambda g, c, n: (1 + g[n - 1]) / c[n], first=1),
    ),
    "it multiplies the gains; gains[i] is already the gain of a whole path, so add": best_by(
        lambda g, c, n: (1 + sum(math.prod(g[:i]) for i in range(1, n + 1))) / c[n]
    ),
    "it always returns 0, whatever the gains and costs": lambda gains, costs: 0,
    "it subtracts the cost; tokens per unit of cost are a quotient": (
        best_by(lambda g, c, n: sum(g[:n]) - c[n]),
        best_by(lambda g, c, n: sum(g[:n]) - c[n], first=1),
    ),
    "it returns the index of the last node; the number of nodes is one more": (
        lambda gains, costs: max(0, best_size(gains, costs) - 1),
        lambda gains, costs: best_by(lambda g, c, n: (1 + sum(g[:n])) / c[n], 1)(gains, costs) - 1,
    ),
    "it stops where the next node is a loss; a later one can make up for it": (
        stops_at_the_first_loss
    ),
    "it never considers the largest tree: n may be len(gains)": (
        best_by(lambda g, c, n: (1 + sum(g[:n])) / c[n], drop=1)
    ),
}  # fmt: skip

# ---- grow_jointly --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """The rank that each head gave to the right token, at each position, and the tree's size."""

    positions: list[list[int]]
    nodes: int


def random_ranks(seed: int) -> Ranks:
    """Heads that are often right at the same positions."""
    rng, heads = random.Random(seed), seed % 3 + 2
    positions = []
    for _ in range(rng.randint(4, 12)):
        likely = rng.choice([[0, 0, 0, 1], [0, 1, 2, RANKS], [2, 3, RANKS]])
        positions.append(rng.choices(likely, k=heads))
    return Ranks(positions, (4, 2, 7, 1, 30)[seed % 5])


JOINT = [
    Ranks([[0, 0], [0, 0], [1, RANKS], [RANKS, 0]], 2), Ranks([[0, 1], [RANKS, 0], [0, 1]], 3),
    *map(random_ranks, range(40)),
]  # fmt: skip


def times_right(case: Ranks, path: Path) -> int:
    return sum(tuple(ranks[: len(path)]) == path for ranks in case.positions)


def with_counts(tree: list[Path], case: Ranks) -> Grown:
    return Grown(tree, [float(times_right(case, path)) for path in tree])


def run_jointly(function, case: Ranks) -> list[Path]:
    tree = call(function, case.nodes, positions=case.positions)
    return checked(tree, len(case.positions[0]), RANKS, "the heads' lists of ten")


def exact_joint_tree(case: Ranks) -> list[Path]:
    """All paths of the ranks that occur, most often right first."""
    ranks = sorted({rank for position in case.positions for rank in position} - {RANKS})
    lengths = range(1, len(case.positions[0]) + 1)
    paths = [path for n in lengths for path in itertools.product(ranks, repeat=n)]
    right = [path for path in paths if times_right(case, path)]
    return sorted(right, key=lambda path: -times_right(case, path))[: case.nodes]


def show_ranks(case: Ranks) -> str:
    return f"positions = {case.positions}, nodes = {case.nodes}"


def show_joint(case: Ranks, got: Grown, expected: Grown) -> str:
    a, b = (int(sum(tree.gains)) for tree in (got, expected))
    return f"{show_ranks(case)}: it returns {got.paths}, of which {a} are right in all; " \
           f"{expected.paths} have {b}"  # fmt: skip


def counted(paths_at):
    """A tree of the paths that `paths_at(ranks)` returns most often."""

    def grow_jointly(positions, nodes):
        right = Counter(path for ranks in positions for path in paths_at(ranks))
        return sorted(right, key=lambda path: (-right[path], len(path)))[:nodes]

    return grow_jointly


def beginnings(ranks, stop=RANKS):
    n = ranks.index(stop) if stop in ranks else len(ranks)
    return [tuple(ranks[:i]) for i in range(1, n + 1)]


def own_rates(positions: list[list[int]]) -> list[list[float]]:
    """How often each head's candidates are right, as `accuracy`."""
    heads = [*zip(*positions)]
    return [[ranks.count(r) / len(ranks) for r in range(RANKS)] for ranks in heads]


def as_if_independent(positions, nodes):
    accuracy = own_rates(positions)
    right = grow_jointly(positions, 10**6)
    return sorted(right, key=lambda path: (-gain_of(accuracy, path), len(path)))[:nodes]


def grown_by_its_rates(positions, nodes):
    return grow_tree(own_rates(positions), nodes)


JOINT_MISTAKES = {
    "it multiplies the heads' own rates, as `grow_tree` does; count the positions at which all "
    "heads of a path are right": (as_if_independent, grown_by_its_rates),
    "rank 10 stands for none of the ten candidates, so a path ends before it": (
        counted(lambda ranks: beginnings(ranks, None))
    ),
    "it counts only the longest path of a position; its beginnings are right there, too": counted(
        lambda ranks: beginnings(ranks)[-1:]
    ),
    "it counts only positions at which all heads have the right token; the beginning of a path "
    "may be right without the rest": counted(
        lambda ranks: [] if RANKS in ranks else beginnings(ranks)
    ),
    "all paths have length 1; longer ones are nodes, too": counted(
        lambda ranks: beginnings(ranks)[:1]
    ),
    "the worst paths come first; sort by falling counts": lambda positions, nodes: (
        grow_jointly(positions, 10**6)[::-1][:nodes]
    ),
    PAIRS: lambda positions, nodes: Counter(
        path for ranks in positions for path in beginnings(ranks)
    ).most_common(nodes),
    "it returns one path too few: the root does not count as one of the nodes": (
        lambda positions, nodes: grow_jointly(positions, nodes - 1)
    ),
}  # fmt: skip

# ---- tasks ---------------------------------------------------------------------------------------

GROW_TREE = Task(
    name="grow_tree",
    solution=grow_tree,
    judge=Oracle(
        GROWN, lambda f, case: with_gains(run_grow(f, case), case),
        lambda case: with_gains(exact_tree(case), case), grown_distance, show_grown,
        f"{len(GROWN)} trees promise as much as the best of all trees", arguments=show_heads,
        diagnose=diagnose_grown,
    ),
    hints=(
        "Keep the candidates with their gains in a dictionary, at first all paths of length 1. "
        "Which candidate should be the next node, and which paths become candidates then?",
        "max(candidates, key=candidates.get) is the best one. Its children, (*path, r), gain "
        "its own gain times accuracy[len(path)][r].",
    ),
    mistakes=GROW_MISTAKES,
)  # fmt: skip
BEST_SIZE = Task(
    name="best_size",
    solution=best_size,
    judge=Oracle(
        SIZED, run_size, lambda case: fastest(case.gains, case.costs), speed_distance,
        show_size, f"{len(SIZED)} lists of gains and costs", arguments=show_costs,
    ),
    hints=(
        "A round with n nodes is expected to yield 1 + sum(gains[:n]) tokens.",
        "Compare the quotients of tokens and costs[n] for all n from 0 to len(gains).",
    ),
    mistakes=SIZE_MISTAKES,
)  # fmt: skip
GROW_JOINTLY = Task(
    name="grow_jointly",
    solution=grow_jointly,
    judge=Oracle(
        JOINT, lambda f, case: with_counts(run_jointly(f, case), case),
        lambda case: with_counts(exact_joint_tree(case), case), grown_distance, show_joint,
        f"{len(JOINT)} trees are right as often as the best of all trees",
        arguments=show_ranks,
    ),
    hints=(
        "At a position with ranks [0, 2, 10, 1] two paths are right: (0,) and (0, 2). Count "
        "such paths over all positions.",
        "A dictionary counts tuples. Sort its paths by falling counts, and at equal counts by "
        "length, so that a parent comes first.",
    ),
    mistakes=JOINT_MISTAKES,
)  # fmt: skip
TASKS = [GROW_TREE, BEST_SIZE, GROW_JOINTLY]
