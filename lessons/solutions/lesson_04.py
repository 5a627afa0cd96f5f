"""Lesson 04: several drafts for one position, the growth of a tree, its size, and its growth from
joint acceptance."""

import heapq
import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass

import torch
from form import Oracle, Question, Task, Wrong
from own_engine import find_draft
from torch import Tensor

from minispec import verify
from minispec.certify.toys import total_variation
from minispec.distill.medusa import accuracy_of, path_frequencies
from minispec.methods import adaptive
from minispec.methods.medusa import RANKS
from minispec.sampling import OneHot, Sampling, probs
from minispec.tree import Tree
from solutions import engine
from solutions.common import (
    CHANGED,
    NeverAccepts,
    Outcome,
    Strict,
    call,
    fastest,
    outcome_distance,
    outcome_of,
    random_costs,
    random_probs,
    rows,
    speed,
    speed_distance,
    tensor,
)
from solutions.engine import package_rounds
from solutions.lesson_01 import package_commit as commit
from solutions.lesson_01 import package_mask as mask
from solutions.lesson_02 import package_warp as warp
from solutions.lesson_03 import package_residual as residual

# ---- solutions -----------------------------------------------------------------------------------


def accept_sibling(p, q, drafts, randomness):
    for i, x in enumerate(drafts):
        rest = residual(p, q)
        if randomness.bernoulli(min(1.0, float(p[x] / q[x]))) or rest is None:
            return i, x
        p, q = rest, q.clone()
        q[x] = 0
        q /= q.sum()
    return None, randomness.categorical(p)


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


def draft_siblings(model, text, probs, randomness):
    drafter = find_draft(model, text)

    def propose(text, hidden, path):
        if not path:
            return Tree.chain(text[-1], [])
        output = drafter.run(hidden[path], text[-len(path) :])[-1:]
        drafter.cache.commit(list(range(len(path))))
        logits = drafter.model.logits(output)[0]
        (rest,) = probs(logits[None])
        n = min(3, int(rest.count_nonzero()))
        drafts, qs = [], [None]
        if n == 1:  # greedy
            drafts, qs = logits.topk(min(3, len(logits))).indices.tolist(), []
        while len(drafts) < n:
            qs.append(rest / rest.sum())
            drafts.append(randomness.categorical(rest))
            rest = rest.clone()
            rest[drafts[-1]] = 0
        return Tree([text[-1], *drafts], [-1] + [0] * len(drafts), qs)

    return propose


def rounds(model, text, drafter, randomness, temperature, top_k, top_p):
    def probs(logits):
        return [warp(row, temperature, top_k, top_p) for row in logits.cpu().double()]

    cache, propose = model.new_cache(), drafter(model, text, probs, randomness)
    hidden, path = model(text, cache)[0], list(range(len(text) - 1))
    cache.length = commit(cache.kv[:, :, 0], 0, path)
    while cache.length < cache.capacity:
        tree = propose(text, hidden, path).first(cache.capacity - cache.length)
        seen = mask(tree.parents, cache.length)
        depth = seen.sum(-1) - 1 - cache.length
        hidden = model(tree.tokens, cache, depth, seen)[0]
        p, path, i = probs(model.logits(hidden)), [0], 0
        while i is not None:
            node, children = path[-1], tree.children(path[-1])
            drafts = tree.tokens_at(children)
            q = tree.drawn_from(children[0]) if children else None
            if q is not None:
                i, fresh = accept_sibling(p[node], q, drafts, randomness)
            else:  # nobody drew them, or there are none
                fresh = randomness.categorical(p[node])
                i = drafts.index(fresh) if fresh in drafts else None
            path += [] if i is None else [children[i]]
        cache.length = commit(cache.kv[:, :, 0], cache.length, path)
        text += [*tree.tokens_at(path[1:]), fresh]
        yield text[-len(path) :]


# ---- the package's functions, with the lesson's arguments ----------------------------------------


def without(q: Tensor, x: int) -> Tensor:
    """q without the token x, divided by its sum (0 if nothing is left)."""
    rest = q.clone()
    rest[x] = 0.0
    return rest / rest.sum() if rest.any() else rest


def package_accept_sibling(p, q, drafts, randomness):
    drawn_from = [None, *itertools.accumulate(drafts[:-1], without, initial=q)]
    n = len(drafts)
    tree = Tree([0, *drafts], [-1] + [0] * n, drawn_from[: n + 1])
    after = OneHot([0] * n, len(p))  # whose draws, after an accepted sibling, are none
    path, fresh, *_ = verify.accept([p, *after], tree, randomness)
    return (None, fresh) if len(path) == 1 else (path[1] - 1, drafts[path[1] - 1])


def package_grow_tree(accuracy, nodes):
    return adaptive.grow_tree(torch.tensor(accuracy, dtype=torch.float64), nodes)


def package_best_size(gains, costs):
    return adaptive.best_draft_size(gains, costs)


def package_grow_jointly(positions, nodes):
    return list(path_frequencies(torch.tensor(positions).T))[:nodes]


def package_draft_siblings(model, text, probs, randomness):
    draft = find_draft(model, text)

    def propose(text, hidden, path):
        new = text[len(text) - len(path) :]
        if not new:
            return Tree([text[-1]], [-1])
        outputs = draft.run(hidden[path], new)
        draft.cache.commit(list(range(len(new))))
        last = draft.model.logits(outputs[-1:])
        (q,) = probs(last)
        best = last[0].topk(min(3, q.numel())).indices.tolist()
        if (q > 0).sum() == 1:
            return Tree.merged(text[-1], [[token] for token in best])
        found, qs = [], []
        while len(found) < 3 and q.any():
            qs.append(q / q.sum())
            found.append(randomness.categorical(q))
            q = without(q, found[-1])
        return Tree([text[-1], *found], [-1, *[0] * len(found)], [None, *qs])

    return propose


# ---- accept_sibling ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Position:
    """`n` drafts for one position, drawn from q without replacement."""

    n: int
    p: Tensor
    q: Tensor


def random_position(seed: int) -> Position:
    """Over four tokens, with as many drafts as q has tokens in some cases."""
    rng = random.Random(seed)
    p, q = random_probs(rng, 4), random_probs(rng, 4)
    return Position(min((2, 3, 1, 4, 0, 2)[seed % 6], int((q > 0).sum())), p, q)


# p equals q up to rounding, and the coin rejects: nothing is left to draw from
ROUNDING = Position(1, tensor(0.5, 0.5), tensor(0.5, 0.5) + 2e-16)
POSITIONS = [
    Position(2, tensor(0.5, 0.3, 0.2), tensor(0.2, 0.6, 0.2)),
    Position(1, tensor(0.5, 0.3, 0.2), tensor(0.2, 0.6, 0.2)),
    *map(random_position, range(18)),
    ROUNDING,
]


ENDLESS = "n drafts need at most n coins and one draw"


def place(function, case: Position, randomness) -> tuple[int | None, int]:
    """Draw the drafts and run the function. Returns the accepted draft and the token."""
    drafts: list[int] = []
    rest = case.q
    for _ in range(case.n):
        drafts.append(randomness.categorical(rest))
        rest = without(rest, drafts[-1])
    answer = call(function, Strict(randomness, ENDLESS), p=case.p, q=case.q, drafts=drafts)
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Wrong("it must return two things: the index of the accepted draft or None, and the "
                    "token")  # fmt: skip
    i, token = answer
    if i is not None and type(i) is not int:
        raise Wrong(f"the index is a {type(i).__name__}; it must be an int or None")
    if type(token) is not int:
        raise Wrong(f"the token is a {type(token).__name__}; it must be an int")
    if i is not None and not 0 <= i < case.n:
        raise Wrong("the index of the accepted draft must be from 0 to len(drafts) - 1, or None")
    if i is not None and token != drafts[i]:
        raise Wrong("it accepts draft i but returns another token than drafts[i]")
    return i, token


def run_accept(function, case: Position) -> Outcome:
    if case is ROUNDING:
        i, _ = place(function, case, NeverAccepts())
        return Outcome({}, {i: 1.0})
    return outcome_of(lambda randomness: place(function, case, randomness))


def exact_outcome(case: Position) -> Outcome:
    """In plain Python: the token has p; draft i is accepted if it survives and those before it do
    not. (`weight` is the probability of what has happened so far.)"""
    if case is ROUNDING:
        return Outcome({}, {0: 1.0})
    accepted: dict[int | None, float] = Counter()

    def judge(i: int, weight: float, p: list[float], q: list[float]) -> None:
        if i == case.n:
            accepted[None] += weight
            return
        for x, share in enumerate(q):
            left = [max(0.0, a - b) for a, b in zip(p, q)]
            coin = min(1.0, p[x] / share) if share > 0 and any(left) else 1.0
            accepted[i] += weight * share * coin
            if share > 0 and coin < 1:
                others = [0.0 if y == x else b for y, b in enumerate(q)]
                judge(i + 1, weight * share * (1 - coin), [a / sum(left) for a in left],
                      [b / (sum(others) or 1.0) for b in others])  # fmt: skip

    judge(0, 1.0, case.p.tolist(), case.q.tolist())
    return Outcome(dict(enumerate(case.p.tolist())), accepted)


def show_case(case: Position) -> str:
    drafts = "1 draft" if case.n == 1 else f"{case.n} drafts"
    return f"{drafts}, p = {rows(case.p)}, q = {rows(case.q)}"


def dense(shares: dict[int, float], size: int) -> str:
    return rows(tensor(*(shares.get(x, 0.0) for x in range(size))))


def show_accept(case: Position, got: Outcome, exact: Outcome) -> str:
    if case is ROUNDING:
        return "if p = q up to rounding and the coin rejects, the draft must be accepted after all"
    far = total_variation(got.tokens, exact.tokens)
    if far > 1e-9:
        size = len(case.p)
        return f"{show_case(case)}: the token has {dense(got.tokens, size)} instead of " \
               f"{dense(exact.tokens, size)} (distance {far:.1e})"  # fmt: skip
    order = [*range(case.n), None]
    a, b = (rows(tensor(*(o.accepted.get(i, 0.0) for i in order))) for o in (got, exact))
    return f"{show_case(case)}: the token is right, but draft 0, 1, … and None have the shares " \
           f"{a} instead of {b}"  # fmt: skip


def share(outcome: Outcome) -> float:
    """How often any draft is accepted."""
    return sum(share for i, share in outcome.accepted.items() if i is not None)


def diagnose_accept(results: list[tuple[Position, Outcome, Outcome]]) -> str | None:
    """Say whether the drafts, or a later one, or only the fresh token is at fault, and whether the
    rule accepts too rarely or too often."""
    results = [result for result in results if result[0] is not ROUNDING]
    if all(outcome_distance(got, exact) < 1e-9 for _, got, exact in results):
        return "it is right up to rounding: if `residual` returns None, accept the draft"
    more = [share(got) - share(exact) for _, got, exact in results]
    lossless = all(total_variation(got.tokens, exact.tokens) < 1e-9 for _, got, exact in results)
    if lossless and max(more, default=0) < 1e-9 and min(more, default=0) < -1e-9:
        return "the token is right, but drafts are accepted too rarely"
    if all(total_variation(got.accepted, exact.accepted) < 1e-9 for _, got, exact in results):
        return "the drafts are judged as they should be, but not the fresh token: draw it from " \
               "what p has become"  # fmt: skip
    if all(abs(got.accepted.get(0, 0.0) - exact.accepted.get(0, 0.0)) < 1e-9
           for _, got, exact in results):  # fmt: skip
        return "the first draft is judged as it should be, but a later one is not: judge it by " \
               "what p and q have become"  # fmt: skip
    if min(more, default=0) > -1e-9 and max(more, default=0) > 1e-9:
        return "it accepts drafts more often than the rule allows"
    return None


# ---- its mistakes --------------------------------------------------------------------------------


def unchanged(q, x):
    return q


def not_divided(q, x):
    rest = q.clone()
    rest[x] = 0
    return rest


def residual_not_divided(p, q, x):
    rest = (p - q).clamp(min=0)
    return rest if rest.any() else None


def ratio(p, q, x):
    return min(1.0, float(p[x] / q[x])) if q[x] > 0 else 1.0


def rule(next_q=without, probability=ratio, rest_of=verify.residual, keep_p=False, fresh_from=None):
    """The acceptance of siblings, with one of its steps replaced. `fresh_from` chooses from the
    caller's p and q."""

    def accept_sibling(p, q, drafts, randomness):
        given = p, q
        for i, x in enumerate(drafts):
            rest = rest_of(p, q, x)
            if randomness.bernoulli(probability(p, q, x)) or rest is None:
                return i, x
            p, q = (p if keep_p and i < len(drafts) - 1 else rest), next_q(q, x)
        return None, randomness.categorical(fresh_from(*given) if fresh_from and drafts else p)

    return accept_sibling


def always_from(first_p=False, first_q=False):
    """The residual is taken from the caller's p or q, whatever was rejected."""

    def accept_sibling(p, q, drafts, randomness):
        given, now = (p, q), p
        for i, x in enumerate(drafts):
            rest = verify.residual(given[0] if first_p else now, given[1] if first_q else q, x)
            if randomness.bernoulli(ratio(now, q, x)) or rest is None:
                return i, x
            now, q = rest, without(q, x)
        return None, randomness.categorical(now)

    return accept_sibling


def never_changes(next_q, asks_for_none=True):
    """p never changes; q may."""

    def accept_sibling(p, q, drafts, randomness):
        for i, x in enumerate(drafts):
            if randomness.bernoulli(ratio(p, q, x)):
                return i, x
            if asks_for_none and verify.residual(p, q, x) is None:
                return i, x
            q = next_q(q, x)
        return None, randomness.categorical(p)

    return accept_sibling


def unbound(p, q, drafts, randomness):
    """p never changes, and without a draft `rest` does not exist."""
    for i, x in enumerate(drafts):
        if randomness.bernoulli(ratio(p, q, x)):
            return i, x
        rest = verify.residual(p, q, x)
        if rest is None:
            return i, x
        q = without(q, x)
    return None, randomness.categorical(rest)


def coins_of_the_first(next_q):
    """Every coin is that of the caller's p and q, though both change."""

    def accept_sibling(p, q, drafts, randomness):
        first = p, q
        for i, x in enumerate(drafts):
            rest = verify.residual(p, q, x)
            if randomness.bernoulli(ratio(*first, x)) or rest is None:
                return i, x
            p, q = rest, next_q(q, x)
        return None, randomness.categorical(p)

    return accept_sibling


def likeliest_first(p, q, drafts, randomness):
    order = sorted(drafts, key=p.tolist().__getitem__, reverse=True)
    i, token = rule()(p, q, order, randomness)
    return (None if i is None else drafts.index(token)), token


def coin_of_the_first(p, q, drafts, randomness):
    coin = ratio(p, q, drafts[0]) if drafts else 0.0
    return rule(probability=lambda p, q, x: coin)(p, q, drafts, randomness)


def q_first(p, q, drafts, randomness):
    for i, x in enumerate(drafts):
        if randomness.bernoulli(ratio(p, q, x)) or verify.residual(p, q, x) is None:
            return i, x
        q = without(q, x)
        rest = verify.residual(p, q, x)
        p = p if rest is None else rest
    return None, randomness.categorical(p)


def q_first_and_none(next_q):
    """None is asked of the q that has lost x already."""

    def accept_sibling(p, q, drafts, randomness):
        for i, x in enumerate(drafts):
            if randomness.bernoulli(ratio(p, q, x)):
                return i, x
            q = next_q(q, x)
            rest = verify.residual(p, q, x)
            if rest is None:
                return i, x
            p = rest
        return None, randomness.categorical(p)

    return accept_sibling


def divided_by_nothing(q, x):
    """q without x; NaN if nothing is left."""
    rest = not_divided(q, x)
    return rest / rest.sum()


def coins_by_p(p, q, drafts, randomness):
    left = p
    for i, x in enumerate(drafts):
        rest = verify.residual(left, q, x)
        if randomness.bernoulli(ratio(p, q, x)) or rest is None:
            return i, x
        left, q = rest, without(q, x)
    return None, randomness.categorical(left)


def only_the_first(p, q, drafts, randomness):
    return accept_sibling(p, q, drafts[:1], randomness)


def keeps_the_last(p, q, drafts, randomness):
    i, token = accept_sibling(p, q, drafts, randomness)
    return (i, token) if i is not None or not drafts else (len(drafts) - 1, drafts[-1])


def one_too_many(p, q, drafts, randomness):
    i, token = accept_sibling(p, q, drafts, randomness)
    return (None if i is None else i + 1), token


def in_place(p, q, drafts, randomness):
    for i, x in enumerate(drafts):
        rest = verify.residual(p, q, x)
        if randomness.bernoulli(ratio(p, q, x)) or rest is None:
            return i, x
        p = rest
        q[x] = 0
        q /= q.sum()
    return None, randomness.categorical(p)


def p_of_x(p, q, x):
    return float(p[x])


def without_x(p, q, x):
    return verify.residual(p, None, x)


ACCEPT_MISTAKES = {
    "a later draft was drawn from q without the earlier ones, divided by the sum; judge it by "
    "that": (rule(unchanged), rule(not_divided)),
    "it does not divide the residual by its sum, but the next draft is judged by it": (
        rule(rest_of=residual_not_divided),
        rule(not_divided, rest_of=residual_not_divided),
    ),
    "it judges every draft by p itself; after a rejection p must become the residual": (
        rule(keep_p=True),
        unbound,
    ),
    "it judges every draft by the same p and q; after a rejection both must change": (
        rule(unchanged, keep_p=True),
        *(never_changes(unchanged, none) for none in (True, False)),
    ),
    "p never changes; after a rejection it must become the residual, and if no draft is accepted, "
    "the token is drawn from that": (*(never_changes(without, none) for none in (True, False)),),
    "each coin is that of the first p and q; it must be that of what p and q have become": (
        coins_of_the_first(unchanged),
        coins_of_the_first(without),
    ),
    "every draft gets the coin of the first one; it must be that of its own p(x) / q(x)": (
        coin_of_the_first
    ),
    "it judges every draft by p itself, and uses the residual only for the fresh token": (
        coins_by_p
    ),
    "each residual is of the first p; it must be of the p that the rejected draft was judged by": (
        always_from(first_p=True)
    ),
    "each residual is of the first q; it must be of the q that the rejected draft was drawn from": (
        always_from(first_q=True)
    ),
    "if no draft is accepted, it draws from p itself; draw from what p has become": rule(
        fresh_from=lambda p, q: p
    ),
    "if no draft is accepted, it draws from q; draw from what p has become": rule(
        fresh_from=lambda p, q: q
    ),
    "it removes x from q too early: the residual is of the q that x was drawn from": (
        q_first,
        q_first_and_none(without),
        q_first_and_none(divided_by_nothing),
    ),
    "after a rejection it only removes x from p; p must become norm(max(0, p - q))": rule(
        rest_of=without_x
    ),
    "the ratio is upside down: it must be p(x) / q(x)": rule(
        probability=lambda p, q, x: ratio(q, p, x)
    ),
    "it accepts with p(x), as if x were not drawn from q, but corrects with q": rule(
        probability=p_of_x
    ),
    "lossless, but it ignores q and accepts too rarely: these drafts were drawn": rule(
        probability=p_of_x, rest_of=without_x
    ),
    "it accepts if p(x) >= q(x), without a coin": rule(
        probability=lambda p, q, x: float(p[x] >= q[x])
    ),
    "it accepts the first draft without a coin": rule(probability=lambda p, q, x: 1.0),
    "it tries the drafts in an order of its own, but each was drawn after the ones before": (
        likeliest_first
    ),
    "it tries only the first draft": only_the_first,
    "if no draft is accepted, it keeps the last one; draw a fresh token": keeps_the_last,
    "the index counts from 0: the accepted draft is drafts[i]": one_too_many,
    CHANGED.format("q"): in_place,
}

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


def as_if_independent(positions, nodes):
    accuracy = accuracy_of(torch.tensor(positions).T).tolist()
    right = grow_jointly(positions, 10**6)
    return sorted(right, key=lambda path: (-gain_of(accuracy, path), len(path)))[:nodes]


def grown_by_its_rates(positions, nodes):
    return grow_tree(accuracy_of(torch.tensor(positions).T).tolist(), nodes)


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

# ---- draft_siblings ------------------------------------------------------------------------------

DRAFTINGS = [
    engine.Drafting(head, text, ends, settings)
    for head in (False, True)
    for text, ends in (((1, 2, 0, 2), (3,)), ((2, 0, 0, 1), (2, 4)), ((1, 2), (1, 2)))
    for settings in (Sampling(), Sampling(0.8, top_k=2))
] + [engine.Drafting(True, (1, 0, 2), (3,), Sampling(1.0))]


def right_siblings(case, text: list[int], randomness) -> Tree:
    if len(text) == 1:
        return Tree.chain(text[-1], [])
    logits = engine.fresh_logits(case, text)
    if case.sampling.temperature == 0:
        best = sorted(range(engine.V), key=lambda token: -logits[0, token])
        return Tree([text[-1], *best], [-1, 0, 0, 0])
    q, drafts, qs = probs(logits, case.sampling)[0].double(), [], []
    for _ in range(case.sampling.top_k or 3):
        qs.append(q / q.sum())
        drafts.append(randomness.categorical(q))
        q = without(q, drafts[-1])
    return Tree([text[-1], *drafts], [-1] + [0] * len(drafts), [None, *qs])


DRAFT_MISTAKES = {
    "it draws siblings with replacement: take a draft out of q before you draw the next": (
        engine.altered(draft_siblings, ("rest[drafts[-1]] = 0", "pass"))
    ),
    "every sibling has the q of the first; judge each by what it was drawn from, q without the "
    "earlier ones, divided by the sum": engine.altered(
        draft_siblings, ("qs.append(rest / rest.sum())", "qs.append(probs(logits[None])[0])")
    ),
    "if greedy, the drafts are drawn, too, so there is only one: take the three best": (
        engine.altered(draft_siblings, ("if n == 1:", "if n == 0:"))
    ),
    "it commits nothing, so in the next round the drafter has forgotten the text": engine.altered(
        draft_siblings, ("drafter.cache.commit(list(range(len(path))))", "pass")
    ),
}  # fmt: skip

# ---- rounds --------------------------------------------------------------------------------------

LOOPS = [
    engine.Loop(0, (1, 0), 6, 4, Sampling(), "bushy", "one-hot"),
    engine.Loop(1, (1,), 6, 4, Sampling(), "deep", "one-hot"),
    engine.Loop(7, (1, 0), 6, 3, shape="one"),
    engine.Loop(2, (0, 1, 1), 1, 3, Sampling(1.0), "bushy", "one-hot"),
    engine.Loop(3, (1, 0), 2, 2, Sampling(0.7), "wide"),
    engine.Loop(4, (2, 0), 1, 3, Sampling(1.0, top_k=2), "wide"),
    engine.Loop(5, (1, 0, 1), 1, 3, Sampling(1.2), "deep"),
    engine.Loop(6, (1, 0, 1), 3, 4, Sampling(), "wide", "one-hot", context=6),
]  # fmt: skip
LOOP_MISTAKES = {
    "its mask is that of a chain; a node sees its ancestors only: your `mask`": engine.altered(
        rounds, ("hidden = model(tree.tokens, cache, depth, seen)",
                 "hidden = model(tree.tokens, cache, depth)"),
    ),
    "a node's position is its number in the tree; it must be its depth: with your mask, the number "
    "of nodes that it sees, less 1": engine.altered(
        rounds, ("depth = seen.sum(-1) - 1 - cache.length", "depth = None")
    ),
    "it keeps the first rows of the pass; keep those of the path": engine.altered(
        rounds, ("cache.length = commit(cache.kv[:, :, 0], cache.length, path)",
                 "cache.length = commit(cache.kv[:, :, 0], cache.length, [*range(len(path))])"),
    ),
    "it accepts one draft at most; go on below an accepted one": engine.altered(
        rounds, ("path += [] if i is None else [children[i]]",
                 "path += [] if i is None else [children[i]]\n"
                 "            if i is not None:\n"
                 "                fresh, i = randomness.categorical(p[path[-1]]), None"),
    ),
}  # fmt: skip

# ---- tasks ---------------------------------------------------------------------------------------

RANGES = {
    "share_of_two": (0, 1), "second_after_first": (0, 1), "tokens_of_12": (1, 3),
    "speed_of_12": (0, 5),
}  # fmt: skip
TASKS = [
    Task(
        name="accept_sibling",
        package=package_accept_sibling,
        solution=accept_sibling,
        judge=Oracle(
            POSITIONS, run_accept, exact_outcome, outcome_distance, show_accept,
            f"every random outcome of {len(POSITIONS)} positions with 0 to 4 drafts",
            arguments=show_case, diagnose=diagnose_accept,
        ),
        hints=(
            "One loop over the drafts. A draft either passes the coin, or both p and q change "
            "before the next draft is judged.",
            "After a rejection: first p = residual(p, q). Then copy q, set q[x] to 0 and divide "
            "by the sum. If the loop ends, draw from p.",
        ),
        mistakes=ACCEPT_MISTAKES,
        shows=(verify.accept,),
    ),
    Task(
        name="grow_tree",
        package=package_grow_tree,
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
        shows=(adaptive.best_first,),
    ),
    Task(
        name="best_size",
        package=package_best_size,
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
        shows=(adaptive.best_draft_size,),
    ),
    Task(
        name="grow_jointly",
        package=package_grow_jointly,
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
        shows=(path_frequencies,),
    ),
    Task(
        name="draft_siblings",
        package=package_draft_siblings,
        solution=draft_siblings,
        judge=engine.drafters(
            DRAFTINGS, engine.exact_drafts(right_siblings), f"{len(DRAFTINGS)} texts, exactly"
        ),
        hints=(
            "It begins as `draft_one` did. Then draw from q, set q[draft] = 0 in a copy, and draw "
            "again, as `position` does in section 2.",
            "Tree([text[-1], *drafts], [-1, 0, 0, 0], [None, q1, q2, q3]), where q2 is q1 without "
            "the first draft, divided by its sum. Without q's, nobody drew the drafts.",
        ),
        mistakes=DRAFT_MISTAKES,
        shows=(Tree,),
    ),
    Task(
        name="rounds",
        package=package_rounds,
        solution=rounds,
        judge=engine.loops(LOOPS, f"the exact distribution of {len(LOOPS)} texts of toys"),
        hints=(
            "Two things change. The pass gets a depth and a mask: your mask has a row for each "
            "node, and the node's depth is how many nodes it sees, less 1. And accepting walks.",
            "path = [0]; while the children of path[-1] have an accepted one, append it. Without "
            "children, the fresh token is drawn from p[path[-1]].",
        ),
        mistakes=LOOP_MISTAKES,
        shows=(verify.accept,),
    ),
]  # fmt: skip

# ---- proofs --------------------------------------------------------------------------------------

PROOFS = {
    "lossless_siblings": """
**Siblings, and trees of them, are lossless.**

*Claim.* For any p, any q and any n, the token of a position with n siblings has the distribution p.

*n = 0.* The token is drawn from p.

*From n − 1 to n.* Let m(t) = min(p(t), q(t)) and β = Σ m. The first sibling is x ~ q.

- It is accepted and is the token t with probability m(t).
- It is x and rejected with probability q(x) − m(x). Then p becomes p′ = (p − m) / (1 − β), the
  same for every x. The next sibling is drawn from a q′ that depends on x. But the claim holds for
  any q, so the token now has the distribution p′, whatever x was.

The sum is m(t) + Σₓ (q(x) − m(x)) · p′(t) = m(t) + (1 − β) · p′(t) = p(t). ∎

What did we need? Each sibling must be judged by the distribution that it was drawn from, given the
siblings before it. Without replacement that is q without them, and with replacement it is q. Both
are lossless. To draw in one way and judge in the other is not. For a draft that nobody drew, q is
one-hot at x: m is p(x) at x and 0 elsewhere, so p′ is p without x.

*The tree.* Walk down from the root. At a node on the path, its children were drawn for the text up
to this node, so the claim applies, with the target's distribution there as p. If a child is
accepted, the same holds for its own children. If not, the round ends with a token of the right
distribution. So the induction is that of lesson 03's chain: there a draft and its correction yield
a token with distribution p₁, here the siblings do. Branches off the path are never looked at.
""",
}

# ---- the quiz ------------------------------------------------------------------------------------

QUIZ = [
    Question(
        "The first of two siblings, drawn without replacement, is rejected. By which target "
        "distribution and which q is the second judged?",
        "d",
        "p has become the residual, and the second draft was drawn from q without the first.",
        (
            "p and q",
            "the residual and q",
            "p, and q without the first sibling",
            "the residual, and q without the first sibling",
        ),
    ),
    Question(
        "Three siblings that nobody drew, a head's best three tokens, have p = 0.4, 0.2 and 0.1. "
        "With what probability is one of them accepted?",
        0.7,
        "it is as if one token were drawn from p and looked for among them.",
    ),
    Question(
        "A tree of 20 drafts is four deep. How many tokens does a round yield at most?",
        5,
        "a path has at most one node per depth, and one more token follows it.",
    ),
    Question(
        "Head 0's candidates are right at 50 % and 15 % of the positions, and head 1's best at "
        "40 %. Section 5's tree has the node (0,). Which node does it get next?",
        "b",
        "the gains are 0.15 for the sibling and 0.5 · 0.4 = 0.2 for the child.",
        ("(1,), a second candidate for the first token", "(0, 0), a token after the first"),
    ),
    Question(
        "Head 1 is right more often where head 0 is right. Compared with section 5's products, how "
        "many tokens per pass does a chain yield?",
        "a",
        "a chain needs head 1 only where head 0 is right, and there head 1 is better than its "
        "average.",
        ("more", "fewer", "just as many, because the average rates are the same"),
    ),
]
