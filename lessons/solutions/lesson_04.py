"""Lesson 04: several drafts for one position, and a loop for trees; for its other tasks, see
pure_04.py."""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, replace

import torch
from form import Oracle, Question, Task, Wrong
from own_engine import find_draft
from torch import Tensor

from minispec import verify
from minispec.certify.toys import total_variation
from minispec.distill.medusa import path_frequencies
from minispec.methods import adaptive
from minispec.sampling import OneHot, Sampling, probs
from minispec.tree import Tree
from solutions import engine
from solutions.common import (
    CHANGED,
    NeverAccepts,
    Outcome,
    Strict,
    call,
    outcome_distance,
    outcome_of,
    random_probs,
    rows,
    tensor,
)
from solutions.engine import package_rounds
from solutions.lesson_01 import package_commit as commit
from solutions.lesson_01 import package_mask as mask
from solutions.lesson_02 import package_warp as warp
from solutions.lesson_03 import package_residual as residual
from solutions.pure_04 import BEST_SIZE, GROW_JOINTLY, GROW_TREE

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
    replace(GROW_TREE, package=package_grow_tree, shows=(adaptive.best_first,)),
    replace(BEST_SIZE, package=package_best_size, shows=(adaptive.best_draft_size,)),
    replace(GROW_JOINTLY, package=package_grow_jointly, shows=(path_frequencies,)),
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
"""
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
