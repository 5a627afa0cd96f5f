"""Lesson 03: the residual, the acceptance of a chain of sampled drafts, and a loop with drafts."""

import math
import random
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from form import Oracle, Question, Task, Wrong
from own_engine import find_draft
from torch import Tensor

from minispec import verify
from minispec.certify.toys import total_variation
from minispec.methods import speculative
from minispec.sampling import Sampling, probs
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
    probabilities_of_texts,
    random_probs,
    rows,
    tensor,
)
from solutions.engine import package_rounds
from solutions.lesson_01 import package_commit as commit
from solutions.lesson_02 import package_warp as warp

# ---- solutions -----------------------------------------------------------------------------------


def residual(p, q):
    rest = (p - q).clamp(min=0)
    total = rest.sum()
    return rest / total if total > 0 else None


def accept(p, q, drafts, randomness):
    for i, x in enumerate(drafts):
        if randomness.bernoulli(min(1.0, float(p[i][x] / q[i][x]))):
            continue
        rest = residual(p[i], q[i])
        if rest is not None:
            return i, randomness.categorical(rest)
    return len(drafts), randomness.categorical(p[len(drafts)])


def greedy_acceptance(p_rows, q_rows):
    x = q_rows.argmax(-1, keepdim=True)  # (n, 1)
    p_of_x = p_rows.gather(-1, x)
    return p_of_x.squeeze(-1)


def draft_one(model, text, probs, randomness):
    drafter = find_draft(model, text)

    def propose(text, hidden, path):
        if not path:
            return Tree.chain(text[-1], [])
        output = drafter.run(hidden[path], text[-len(path) :])[-1:]
        drafter.cache.commit(list(range(len(path))))
        q = probs(drafter.model.logits(output))
        return Tree.chain(text[-1], [randomness.categorical(q[0])], q)

    return propose


def rounds(model, text, drafter, randomness, temperature, top_k, top_p):
    def probs(logits):
        return [warp(row, temperature, top_k, top_p) for row in logits.cpu().double()]

    cache, propose = model.new_cache(), drafter(model, text, probs, randomness)
    hidden, path = model(text, cache)[0], list(range(len(text) - 1))
    cache.length = commit(cache.kv[:, :, 0], 0, path)
    while cache.length < cache.capacity:
        tree = propose(text, hidden, path).first(cache.capacity - cache.length)
        hidden = model(tree.tokens, cache)[0]
        p, drafts = probs(model.logits(hidden)), tree.tokens[1:]
        q = [tree.drawn_from(node) for node in range(1, len(tree))]
        n, fresh = accept(p, q, drafts, randomness)
        path = list(range(n + 1))
        cache.length = commit(cache.kv[:, :, 0], cache.length, path)
        text += [*drafts[:n], fresh]
        yield text[-len(path) :]


# ---- the package's functions, with the lesson's arguments ----------------------------------------


def package_residual(p, q):
    return verify.residual(p, q, 0)


def package_accept(p, q, drafts, randomness):
    path, fresh, *_ = verify.accept(p, Tree.chain(0, list(drafts), list(q)), randomness)
    return len(path) - 1, fresh


def package_greedy_acceptance(p_rows, q_rows):
    """Σ min(p, q) for the q that is one-hot at the draft."""
    x = q_rows.argmax(-1, keepdim=True)
    one_hot = torch.zeros_like(p_rows).scatter(-1, x, 1.0)
    return torch.minimum(p_rows, one_hot).sum(-1)


def package_draft_one(model, text, probs, randomness):
    draft = find_draft(model, text)

    def propose(text, hidden, path):
        new = text[len(text) - len(path) :]
        if not new:
            return Tree([text[-1]], [-1])
        outputs = draft.run(hidden[path], new)
        draft.cache.commit(path and list(range(len(new))))
        (q,) = probs(draft.model.logits(outputs[-1:]))
        return Tree([text[-1], randomness.categorical(q)], [-1, 0], [None, q])

    return propose


# ---- cases ---------------------------------------------------------------------------------------


def tv(p: Tensor, q: Tensor) -> float:
    return float((p - q).abs().sum() / 2)


# ---- residual ------------------------------------------------------------------------------------

PAIRS = [
    (tensor(0.5, 0.3, 0.2), tensor(0.2, 0.6, 0.2)),
    (tensor(0.1, 0.2, 0.7), tensor(0.6, 0.3, 0.1)),
    *((random_probs(rng, 5), random_probs(rng, 5)) for rng in map(random.Random, range(20))),
    (tensor(0.5, 0.5), tensor(0.505, 0.495)),  # almost equal, but something is left
    (tensor(0.5, 0.5), tensor(0.5 + 2**-40, 0.5 - 2**-40)),  # without rounding
    (tensor(0.5, 0.5), tensor(0.5, 0.5)),
    (tensor(0.5, 0.5), tensor(0.5, 0.5) + 2e-16),
]


ONE_NUMBER = "Python's `max` and `if` need one number, but p and q have one per token; see hint 1"
NOT_ELEMENTWISE = "`max` does not compare each element with 0; hint 1 names a method that does"


def run_residual(function, pair: tuple[Tensor, Tensor]) -> Tensor | None:
    try:
        rest = call(function, **dict(zip("pq", pair)))
    except (AttributeError, RuntimeError, TypeError) as error:
        if "Boolean value of Tensor" in str(error):
            raise Wrong(ONE_NUMBER) from error
        if "max" in str(error):
            raise Wrong(NOT_ELEMENTWISE) from error
        raise
    if rest is None:
        return None
    if isinstance(rest, Tensor) and rest.dim() == 0:
        raise Wrong("it returns one number; " + NOT_ELEMENTWISE)
    if not isinstance(rest, Tensor) or rest.shape != pair[0].shape:
        raise Wrong("it must return a tensor of the shape of p, or None")
    if not rest.isfinite().all() and (pair[0] > pair[1]).any():
        raise Wrong("it divides by the sum of p - q, which is 0; first replace differences below 0")
    if rest.isnan().any():
        raise Wrong("it returns NaN: if p and q are equal, 0 is divided by 0; return None")
    if rest.dtype != pair[0].dtype:
        names = [str(x.dtype).removeprefix("torch.") for x in (rest, pair[0])]
        raise Wrong("it returns {}; keep the dtype of p ({})".format(*names))
    if not rest.any():
        raise Wrong("it returns only zeros if nothing is left; return None")
    total, left = float(rest.sum()), float((pair[0] - pair[1]).clamp(min=0).sum())
    if total < 1 - 1e-13 and 0 < left < 1e-11:
        raise Wrong(
            f"it sums to {total:.2f} where only {left:.1e} of p is left; divide by the sum itself "
            "(torch's `normalize` divides by 1e-12 if that is larger)"
        )
    if 0.99 < total < 1 - 1e-13:
        raise Wrong(f"it sums to {total:.12f}; do not add a small number to the sum, test for 0")
    if abs(total - 1) > 1e-13:
        raise Wrong(f"it does not sum to 1 ({total:.2f}): divide by the sum")
    return rest


def exact_residual(pair: tuple[Tensor, Tensor]) -> Tensor | None:
    """In plain Python, from the definition."""
    left = [max(0.0, a - b) for a, b in zip(*(x.tolist() for x in pair))]
    return tensor(*(a / sum(left) for a in left)) if sum(left) > 0 else None


def residual_distance(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return tv(a, b)


def show_pair(pair: tuple[Tensor, Tensor]) -> str:
    p, q = pair
    return f"p = {rows(p)}, q = {rows(q)}"


def show_residual(pair, got: Tensor | None, expected: Tensor | None) -> str:
    p, q = pair
    text = f"{show_pair(pair)}: it returns {'None' if got is None else rows(got)}"
    if got is None or expected is None:
        left = float((p - q).clamp(min=0).sum())
        return f"{text}, but p - q = {rows(p - q)}, so {left:.1e} of p is left"
    kept = torch.minimum(p, q)
    tokens = kept + (1 - kept.sum()) * got
    return f"{text}; accepted and fresh tokens together then have {rows(tokens)} instead of p, " \
           f"a distance of {tv(tokens, p):.1e}"  # fmt: skip


def diagnose_residual(results: list[tuple]) -> str | None:
    wrong = [got for _, got, expected in results if not residual_distance(got, expected) <= 1e-12]
    if all(got is None for got in wrong):
        return "it returns None too early; return it only if the sum of what is left is exactly 0"
    return None


def in_place(p, q):
    p -= q
    return p.clamp_(min=0).div_(p.sum()) if p.sum() > 0 else None


def normed(rest):
    """A mistake that divides rest(p, q) by its sum. One form does not ask whether anything is left;
    two ask in different ways."""

    def always(p, q):
        return rest(p, q) / rest(p, q).sum()

    def if_its_sum_is_above_0(p, q):
        return always(p, q) if rest(p, q).sum() > 0 else None

    def if_p_is_above_q(p, q):
        return always(p, q) if (p > q).any() else None

    return always, if_its_sum_is_above_0, if_p_is_above_q


RESIDUAL_MISTAKES = {
    "it returns p; subtract what the accepted drafts have already paid": lambda p, q: p,
    "it divides by the sum without checking that the sum is above 0; if it is 0, return None": (
        lambda p, q: (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
    ),
    "it returns norm(|p - q|); tokens that q proposes too often must get 0, not the difference": (
        normed(lambda p, q: (p - q).abs())
    ),
    "it keeps all of p where p > q; only p - q is left there": normed(
        lambda p, q: torch.where(p > q, p, 0)
    ),
    "a softmax does not divide by the sum": (
        lambda p, q: torch.softmax((p - q).clamp(min=0), 0),
        lambda p, q: torch.softmax((p - q).clamp(min=0), 0) if (p > q).any() else None,
    ),
    "a softmax of p - q is above 0 for every token; replace differences below 0 by 0, and divide "
    "by the sum": (
        lambda p, q: torch.softmax(p - q, 0),
        lambda p, q: None if torch.equal(p, q) else torch.softmax(p - q, 0),
        lambda p, q: torch.softmax(p - q, 0) if (p > q).any() else None,
        lambda p, q: torch.softmax(p - q, 0) if (p - q).clamp(min=0).sum() > 0 else None,
    ),
    "p and q are swapped: max(0, q - p) is what was proposed too often": normed(
        lambda p, q: (q - p).clamp(min=0)
    ),
    "the differences below 0 are still there; replace them by 0": lambda p, q: (
        (p - q) / (p - q).clamp(min=0).sum() if (p > q).any() else None
    ),
    CHANGED.format("p"): in_place,
}

# ---- accept --------------------------------------------------------------------------------------

V = 3
ENDLESS = "γ drafts need at most γ coins and one draw"
GOES_ON_AFTER_A_REJECTION = (
    "it goes on after a rejection; later drafts were drawn after a token that is gone"
)


@dataclass(frozen=True)
class Round:
    """A round of `gamma` drafts. `p` and `q` map what was drafted so far to the distribution of the
    next token."""

    gamma: int
    p: dict[tuple[int, ...], Tensor]
    q: dict[tuple[int, ...], Tensor]


def random_round(seed: int) -> Round:
    rng, gamma = random.Random(seed), (1, 0, 2)[seed % 3]
    contexts = [c for n in range(gamma + 1) for c in product(range(V), repeat=n)]
    p = {context: random_probs(rng, V) for context in contexts}
    q = {context: random_probs(rng, V) for context in contexts}
    if seed % 4 == 3:  # a greedy draft: one-hot
        q = {c: torch.eye(V, dtype=torch.float64)[probs.argmax()] for c, probs in q.items()}
    return Round(gamma, p, q)


FIRST = Round(
    1, {(): tensor(0.5, 0.3, 0.2), **{(x,): tensor(0.2, 0.2, 0.6) for x in range(V)}},
    {(): tensor(0.2, 0.6, 0.2)},
)  # fmt: skip
# p equals q up to rounding, and the coin rejects: nothing is left to draw from
HALVES = {text: tensor(0.5, 0.5) for n in range(3) for text in product(range(2), repeat=n)}
ROUNDING = Round(2, HALVES, {text: p + 2e-16 for text, p in HALVES.items()})
ROUNDS = [FIRST, *map(random_round, range(12)), ROUNDING]


def emitted(function, case: Round, randomness) -> tuple[int, list[int]]:
    """Run a round. Returns how many drafts it accepts, and the tokens that it emits."""
    drafts: list[int] = []
    for _ in range(case.gamma):
        drafts.append(randomness.categorical(case.q[tuple(drafts)]))
    p = [case.p[tuple(drafts[:i])] for i in range(case.gamma + 1)]
    q = [case.q[tuple(drafts[:i])] for i in range(case.gamma)]
    answer = call(function, Strict(randomness, ENDLESS), p=p, q=q, drafts=drafts)
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Wrong("it must return two numbers: how many drafts are accepted, and a fresh token")
    n, fresh = answer
    if type(n) is not int or not 0 <= n <= case.gamma:
        raise Wrong(f"the number of accepted drafts is {n!r}; it must be an int from 0 to γ")
    if type(fresh) is not int:
        raise Wrong(f"the fresh token is a {type(fresh).__name__}; it must be an int")
    return n, [*drafts[:n], fresh]


def run_accept(function, case: Round) -> Outcome:
    """The outcome of the first γ + 1 tokens. After a rejection, plain decoding draws the tokens
    that are missing."""
    if case is ROUNDING:
        n, _ = emitted(function, case, NeverAccepts())
        return Outcome({}, {n: 1.0})

    def whole_round(randomness) -> tuple[int, tuple[int, ...]]:
        n, tokens = emitted(function, case, randomness)
        while len(tokens) <= case.gamma:
            tokens.append(randomness.categorical(case.p[tuple(tokens)]))
        return n, tuple(tokens)

    return outcome_of(whole_round)


def exact_outcome(case: Round) -> Outcome:
    """Without a run: the target's probabilities, and products of Σ min(p, q)."""
    if case is ROUNDING:
        return Outcome({}, {2: 1.0})
    survives = [1.0]  # the probability that at least n drafts are accepted
    for n in range(1, case.gamma + 1):
        overlap = {c: torch.minimum(case.p[c], case.q[c]) for c in case.q if len(c) < n}
        drafts = product(range(V), repeat=n)
        survives.append(sum(
            math.prod(float(overlap[c[:i]][x]) for i, x in enumerate(c)) for c in drafts
        ))  # fmt: skip
    accepted = {n: a - b for n, (a, b) in enumerate(pairwise([*survives, 0.0]))}
    return Outcome(probabilities_of_texts(case.p, case.gamma + 1), accepted)


def first_token(texts: dict[tuple[int, ...], float]) -> Tensor:
    """The distribution of the first token."""
    return tensor(*(sum(d for text, d in texts.items() if text[0] == x) for x in range(V)))


def diagnose(results: list[tuple[Round, Outcome, Outcome]]) -> str | None:
    """Name the kind of rule: it keeps rejected drafts, accepts too often, or accepts too rarely."""
    results = [result for result in results if result[0] is not ROUNDING]
    if all(outcome_distance(got, exact) < 1e-9 for _, got, exact in results):
        return "it is right up to rounding: if `residual` returns None, accept the draft and go on"
    more = [got.drafts - exact.drafts for _, got, exact in results]
    drafted = [(case, got) for case, got, _ in results if case.gamma]
    if drafted and all(tv(first_token(got.tokens), case.q[()]) < 1e-9 for case, got in drafted):
        return (
            "the tokens have q: the rejected draft stays in the text, or the residual is of q - p"
        )
    if min(more, default=0) > -1e-9 and max(more, default=0) > 1e-9:
        single = [got.drafts - exact.drafts for case, got, exact in results if case.gamma == 1]
        if all(abs(difference) < 1e-9 for difference in single):
            return GOES_ON_AFTER_A_REJECTION
        return "it accepts more often than min(1, p/q)"
    lossless = all(total_variation(got.tokens, exact.tokens) < 1e-9 for _, got, exact in results)
    if lossless and min(more, default=0) < -1e-9:
        return "lossless, but it accepts too rarely (section 4)"
    return None


def first_distributions(case: Round) -> str:
    if case.gamma == 0:
        return "γ = 0"
    return f"γ = {case.gamma}, first p = {rows(case.p[()])}, first q = {rows(case.q[()])}"


def show_accept(case: Round, outcome: Outcome, exact: Outcome) -> str:
    if case is ROUNDING:
        return "if p = q up to rounding and every coin rejects, it accepts " \
               f"{outcome.drafts:.0f} of 2 drafts; it should be 2"  # fmt: skip
    got, expected = outcome.tokens, exact.tokens
    if total_variation(got, expected) < 1e-9:
        return f"with γ = {case.gamma} the tokens are right, but a round accepts " \
               f"{outcome.drafts:.2f} drafts on average instead of {exact.drafts:.2f}"  # fmt: skip
    first = first_token(got), first_token(expected)
    far, tokens = f"distance {total_variation(got, expected):.1e}", first_distributions(case)
    if case.gamma == 0 or tv(*first) > 1e-9:
        a, b = map(rows, first)
        return f"{tokens}: the first token has {a} instead of {b} ({far})"
    text = max(expected, key=lambda text: abs(got.get(text, 0.0) - expected[text]))
    a, b = got.get(text, 0.0), expected[text]
    return f"{tokens}: tokens {text} have probability {a:.3f} instead of {b:.3f} ({far})"


# ---- its mistakes --------------------------------------------------------------------------------


def rule(probability, correct, bonus=None):
    """An acceptance rule: `probability(p, q, i, x)` of accepting draft i, and the distributions of
    the fresh token, `correct(p, q, i)` after a rejection and `bonus(p, q)` if there is none."""

    def accept(p, q, drafts, randomness):
        for i, x in enumerate(drafts):
            if not randomness.bernoulli(min(1.0, float(probability(p, q, i, x)))):
                rest = correct(p, q, i)
                if rest is not None:
                    return i, randomness.categorical(rest)
        return len(drafts), randomness.categorical(bonus(p, q) if bonus else p[len(drafts)])

    return accept


def ratio(p, q, i, x):
    return p[i][x] / q[i][x]


def after_rejection(p, q, i):
    return residual(p[i], q[i])


def best(probs):
    return torch.eye(len(probs), dtype=probs.dtype)[probs.argmax()]


def only_removes_the_draft(p, q, drafts, randomness):
    for i, x in enumerate(drafts):
        if not randomness.bernoulli(min(1.0, float(ratio(p, q, i, x)))):
            rest = p[i].clone()
            rest[x] = 0
            if rest.any():
                return i, randomness.categorical(rest / rest.sum())
    return len(drafts), randomness.categorical(p[len(drafts)])


def never_stops(p, q, drafts, randomness):
    coins = [randomness.bernoulli(min(1.0, float(ratio(p, q, i, x)))) for i, x in enumerate(drafts)]
    n = sum(coins)
    rest = residual(p[n], q[n]) if n < len(drafts) else p[n]
    return n, randomness.categorical(p[n] if rest is None else rest)


def counts_on(p, q, drafts, randomness):
    """Later coins raise the count, but the correction is the first rejected draft's."""
    n, rest = 0, None
    for i, x in enumerate(drafts):
        if randomness.bernoulli(min(1.0, float(ratio(p, q, i, x)))):
            n += 1
        elif rest is None:
            rest = residual(p[i], q[i])
    return n, randomness.categorical(p[len(drafts)] if rest is None else rest)


def counts_on_to_the_last(p, q, drafts, randomness):
    """As counts_on, but with the last rejected draft's correction."""
    n, rest = 0, p[len(drafts)]
    for i, x in enumerate(drafts):
        if randomness.bernoulli(min(1.0, float(ratio(p, q, i, x)))):
            n += 1
        elif (left := residual(p[i], q[i])) is not None:
            rest = left
    return n, randomness.categorical(rest)


def counts_and_draws_at_once(p, q, drafts, randomness):
    """Later coins raise the count, and each rejection draws a token."""
    n, fresh = 0, None
    for i, x in enumerate(drafts):
        rest = None
        if not randomness.bernoulli(min(1.0, float(ratio(p, q, i, x)))):
            rest = residual(p[i], q[i])
        if rest is None:
            n += 1
        else:
            fresh = randomness.categorical(rest)
    return n, randomness.categorical(p[len(drafts)]) if fresh is None else fresh


def inverted_coin(p, q, drafts, randomness):
    for i, x in enumerate(drafts):
        if randomness.bernoulli(min(1.0, float(ratio(p, q, i, x)))):
            rest = residual(p[i], q[i])
            if rest is not None:
                return i, randomness.categorical(rest)
    return len(drafts), randomness.categorical(p[len(drafts)])


def bonus_from_what_is_left(p, q):
    rest = residual(p[-1], q[-1]) if q else None
    return p[-1] if rest is None else rest


def tensor_token(p, q, drafts, randomness):
    n, fresh = accept(p, q, drafts, randomness)
    return n, torch.tensor(fresh)


def no_bonus(p, q, drafts, randomness):
    n, fresh = accept(p, q, drafts, randomness)
    return (n, fresh) if n < len(drafts) or not drafts else (n - 1, drafts[-1])


def counts_the_rejected(p, q, drafts, randomness):
    n, fresh = accept(p, q, drafts, randomness)
    return min(n + 1, len(drafts)), fresh


def rejected_draft(p, q, drafts, randomness):
    n, fresh = accept(p, q, drafts, randomness)
    return n, drafts[n] if n < len(drafts) else fresh


def argmax_correction(p, q, i):
    rest = residual(p[i], q[i])
    return None if rest is None else best(rest)


ACCEPT_MISTAKES = {
    "after a rejection it draws from p, and tokens that were accepted often enough come too often; "
    "draw from the residual": rule(ratio, lambda p, q, i: p[i]),
    "the bonus token is the argmax; draw it from the last row of p": rule(
        ratio, after_rejection, lambda p, q: best(p[-1])
    ),
    "the bonus must come from p[γ], the last entry": (
        rule(ratio, after_rejection, lambda p, q: p[max(0, len(p) - 2)]),
        rule(ratio, after_rejection, lambda p, q: p[0]),
    ),
    "the bonus is drawn from q[-1], which belongs to the last draft; it must come from p[γ]": (
        rule(ratio, after_rejection, lambda p, q: q[-1]),
        rule(ratio, after_rejection, lambda p, q: (q or p)[-1]),
    ),
    "the bonus is drawn from a residual; if no draft is rejected, it must come from p[γ] itself": (
        rule(ratio, after_rejection, lambda p, q: residual(p[-1], q[-1])),
        rule(ratio, after_rejection, lambda p, q: residual(p[-1], q[-1]) if q else p[-1]),
        rule(ratio, after_rejection, bonus_from_what_is_left),
    ),
    "the coin is inverted: `bernoulli` is True with the probability p(x)/q(x), and then the draft "
    "is accepted": inverted_coin,
    "the correction comes from max(0, q - p), what was proposed too often; it must be p - q": rule(
        ratio, lambda p, q, i: residual(q[i], p[i])
    ),
    "the correction comes from max(0, p[n] - q[γ - 1]); both must be of the rejected draft, n": (
        rule(ratio, lambda p, q, i: residual(p[i], q[-1]))
    ),
    "the correction is the argmax of the residual; draw it": rule(ratio, argmax_correction),
    "it judges draft i by p[i + 1], the distribution after the draft; use p[i]": rule(
        lambda p, q, i, x: p[i + 1][x] / q[i][x], lambda p, q, i: residual(p[i + 1], q[i])
    ),
    "the correction comes from p[n + 1]; the position of the rejected draft is n": rule(
        ratio, lambda p, q, i: residual(p[i + 1], q[i])
    ),
    "the ratio is upside down: it must be p(x) / q(x)": rule(
        lambda p, q, i, x: 1 / ratio(p, q, i, x) if p[i][x] > 0 else 1.0, after_rejection
    ),
    "it accepts if p(x) >= q(x), without a coin": rule(
        lambda p, q, i, x: p[i][x] >= q[i][x], after_rejection
    ),
    "it accepts with p(x), as if x were not drawn from q, but corrects with q": rule(
        lambda p, q, i, x: p[i][x], after_rejection
    ),
    "it accepts a draft only if it is the argmax of p, as in greedy decoding": rule(
        lambda p, q, i, x: x == int(p[i].argmax()), after_rejection
    ),
    "it never accepts a draft": lambda p, q, drafts, randomness: (0, randomness.categorical(p[0])),
    "it accepts every draft": rule(lambda p, q, i, x: 1.0, after_rejection),
    "after a rejection it only removes x from p; draw from the residual": only_removes_the_draft,
    GOES_ON_AFTER_A_REJECTION: (
        never_stops,
        counts_on,
        counts_on_to_the_last,
        counts_and_draws_at_once,
    ),
    "if all drafts are accepted, it returns the last draft instead of a bonus token": no_bonus,
    "n counts the rejected draft, too, so the rejected draft stays in the text": (
        counts_the_rejected
    ),
    "the fresh token is the rejected draft, so it stays in the text; draw from the residual": (
        rejected_draft
    ),
    "the fresh token is a Tensor; it must be an int": tensor_token,
}

# ---- greedy_acceptance ---------------------------------------------------------------------------


def random_rows(seed: int) -> tuple[Tensor, Tensor]:
    """Rows of p and q over a draft's vocabulary; a fifth of p is outside of it."""
    rng, n = random.Random(seed), seed % 4 + 1
    p = torch.stack([0.8 * random_probs(rng, 5) for _ in range(n)])
    q = torch.stack([tensor(*rng.sample(range(10), 5)) for _ in range(n)])  # without ties
    return p, q / q.sum(-1, keepdim=True)


def run_greedy(function, pair: tuple[Tensor, Tensor]) -> Tensor:
    chances = call(function, p_rows=pair[0], q_rows=pair[1])
    n = len(pair[0])
    if not isinstance(chances, Tensor) or chances.shape != (n,):
        shape = tuple(chances.shape) if isinstance(chances, Tensor) else type(chances).__name__
        raise Wrong(f"it must return a tensor of shape (n,), here ({n},), not {shape}")
    return chances


def exact_greedy(pair: tuple[Tensor, Tensor]) -> Tensor:
    """In plain Python."""
    return tensor(*(p[q.index(max(q))] for p, q in zip(*(x.tolist() for x in pair))))


def show_rows(pair: tuple[Tensor, Tensor]) -> str:
    p, q = pair
    return f"p_rows = [{rows(*p)}], q_rows = [{rows(*q)}]"


GREEDY_MISTAKES = {
    "x must be the most likely token of q, which the head proposes, not that of p": (
        lambda p, q: p.max(-1).values
    ),
    "it returns q(x), but the target accepts x with probability p(x)": lambda p, q: (
        q.max(-1).values
    ),
    "it returns min(1, p(x) / q(x)). x was not drawn from q: the head always proposes it": (
        lambda p, q: (greedy_acceptance(p, q) / q.max(-1).values).clamp(max=1)
    ),
    "it divides p by its sum; what is missing belongs to tokens that the head cannot draft": (
        lambda p, q: greedy_acceptance(p / p.sum(-1, keepdim=True), q)
    ),
    "this is Σ min(p, q), for a draft that is drawn from q; here the draft is always x": (
        lambda p, q: torch.minimum(p, q).sum(-1)
    ),
    "it returns min(p(x), q(x)); x is always proposed, so q(x) does not matter": (
        lambda p, q: torch.minimum(greedy_acceptance(p, q), q.max(-1).values)
    ),
    "every row has its own x, but it uses the first row's": lambda p, q: p[:, q[0].argmax()],
    "every row has its own x, but it uses one for all rows: argmax needs the last dimension": (
        lambda p, q: p[:, q.argmax()],
        lambda p, q: p[:, q.sum(0).argmax()],
    ),
    "every p(x) is from the first row of p": lambda p, q: p[0, q.argmax(-1)],
    "it returns q at the most likely token of p; it must be p at that of q": lambda p, q: (
        package_greedy_acceptance(q, p)
    ),
    "it compares the most likely tokens of p and q; they need not be equal": (
        lambda p, q: (p.argmax(-1) == q.argmax(-1)).to(p)
    ),
}

# ---- draft_one -----------------------------------------------------------------------------------

DRAFTINGS = [
    engine.Drafting(head, text, ends, settings)
    for head in (False, True)
    for text, ends in (((1, 2, 0, 2), (3, 4)), ((2, 0, 0, 1, 2, 1), (2, 5, 6)), ((1, 2), (1, 2)))
    for settings in (Sampling(), Sampling(1.0), Sampling(0.8, top_k=2))
]


def right_draft(case, text: list[int], randomness) -> Tree:
    if len(text) == 1:
        return Tree.chain(text[-1], [])
    q = probs(engine.fresh_logits(case, text), case.sampling)[0].double()
    return Tree.chain(text[-1], [randomness.categorical(q)], [q])


DRAFT_MISTAKES = {
    "it commits nothing, so in the next round the drafter has forgotten the text": engine.altered(
        draft_one, ("drafter.cache.commit(list(range(len(path))))", "pass")
    ),
    "the draft is the most likely token; draw it from q, by which it will be judged": (
        engine.altered(draft_one, ("randomness.categorical(q[0])", "int(q[0].argmax())"))
    ),
    "the tree has no q, so nobody could judge the draft: Tree.chain(text[-1], [draft], [q])": (
        engine.altered(draft_one, (", q)\n", ")\n"))
    ),
    "it drafts after the first new pair; the newest one is the last": engine.altered(
        draft_one, ("[-1:]\n", "[:1]\n")
    ),
}

# ---- rounds --------------------------------------------------------------------------------------

LOOPS = [
    engine.Loop(0, (1, 0), 4, 2, shape="one"), engine.Loop(1, (1,), 4, 3, shape="one"),
    engine.Loop(7, (0, 1), 4, 2, shape="one"),
    engine.Loop(2, (0, 1, 1), 2, 3, Sampling(1.0), "one"),
    engine.Loop(3, (1, 0), 3, 2, Sampling(0.7), "one"),
    engine.Loop(4, (1, 0, 1), 2, 2, Sampling(1.3), "chain"),
    engine.Loop(5, (2, 0), 1, 3, Sampling(1.0, top_k=2), "chain"),
    engine.Loop(6, (1, 0, 1), 3, 2, Sampling(), "one", context=6),
]  # fmt: skip
LOOP_MISTAKES = {
    "it keeps the rows of rejected drafts; commit the root and the n accepted ones": (
        engine.altered(rounds, (
            "cache.length = commit(cache.kv[:, :, 0], cache.length, path)",
            "cache.length = commit(cache.kv[:, :, 0], cache.length, list(range(len(tree))))",
        ))
    ),
    "it commits the accepted drafts but not the root, which this pass has read, too": (
        engine.altered(rounds, (
            "cache.length = commit(cache.kv[:, :, 0], cache.length, path)",
            "cache.length = commit(cache.kv[:, :, 0], cache.length, path[:-1])",
        ))
    ),
    "every draft stays in the text, accepted or not": engine.altered(
        rounds, ("[*drafts[:n], fresh]\n        yield text[-len(path) :]",
                 "[*drafts, fresh]\n        yield text[-len(tree) :]"),
    ),
    "p is that of temperature 1 without top-k and top-p: warp the logits of the target, too": (
        engine.altered(rounds, ("p, drafts = probs(model.logits(hidden))",
                                "p, drafts = [*model.logits(hidden).softmax(-1)]"))
    ),
}  # fmt: skip

# ---- tasks ---------------------------------------------------------------------------------------

RANGES = dict.fromkeys(
    ["share_accepted", "distance_if_redrawn", "alpha_chat", "alpha_arithmetic"], (0, 1)
)
TASKS = [
    Task(
        name="residual",
        package=package_residual,
        solution=residual,
        judge=Oracle(
            PAIRS, run_residual, exact_residual, residual_distance, show_residual,
            f"{len(PAIRS)} pairs of p and q", arguments=show_pair, diagnose=diagnose_residual,
        ),
        hints=(
            "torch has a method that replaces everything below a bound by the bound: clamp.",
            "Compute the sum before dividing. If it is 0, return None.",
        ),
        mistakes=RESIDUAL_MISTAKES,
        shows=(verify.residual,),
    ),
    Task(
        name="accept",
        package=package_accept,
        solution=accept,
        judge=Oracle(
            ROUNDS, run_accept, exact_outcome, outcome_distance, show_accept,
            f"every random outcome of {len(ROUNDS)} rounds with γ = 0, 1, 2",
            arguments=first_distributions, diagnose=diagnose,
        ),
        hints=(
            "One loop over the drafts. Each either passes the coin, or ends the round with a draw.",
            "Where the loop ends without a rejection, there is one more distribution in p than "
            "drafts. The bonus token is drawn from it.",
        ),
        mistakes=ACCEPT_MISTAKES,
        shows=(verify.accept,),
    ),
    Task(
        name="greedy_acceptance",
        package=package_greedy_acceptance,
        solution=greedy_acceptance,
        judge=Oracle(
            [random_rows(seed) for seed in range(12)], run_greedy, exact_greedy,
            lambda a, b: float((a - b).abs().max()),
            lambda case, got, expected: (
                f"{show_rows(case)}: it returns {rows(got)}; {rows(expected)} is right"
            ),
            "12 pairs of p and q", arguments=show_rows,
        ),
        hints=(
            "x = q_rows.argmax(-1) has one token per row.",
            "p_rows.gather(-1, index) picks one entry per row. `index` needs two dimensions: "
            "argmax(-1, keepdim=True).",
        ),
        mistakes=GREEDY_MISTAKES,
        shows=(package_greedy_acceptance,),
    ),
    Task(
        name="draft_one",
        package=package_draft_one,
        solution=draft_one,
        judge=engine.drafters(
            DRAFTINGS, engine.exact_drafts(right_draft), f"{len(DRAFTINGS)} texts, exactly"
        ),
        hints=(
            "The pairs are hidden[path] and text[-len(path):]. Run them, and commit all rows.",
            "probs(drafter.model.logits(output[-1:])) is [q]. Draw the draft from q, and hand q "
            "over in the tree: Tree.chain(text[-1], [draft], [q]).",
        ),
        mistakes=DRAFT_MISTAKES,
        shows=(speculative.propose,),
    ),
    Task(
        name="rounds",
        package=package_rounds,
        solution=rounds,
        judge=engine.loops(LOOPS, f"the exact distribution of {len(LOOPS)} texts of toys"),
        hints=(
            "Before the loop, one pass reads the prompt, and all of its rows but the last are "
            "committed: the newest token is the root of the first round's pass.",
            "n accepted drafts: the path is [0, …, n], the new tokens are the n drafts and the "
            "fresh one. `propose` wants the hidden states of this pass, and the path.",
        ),
        mistakes=LOOP_MISTAKES,
        shows=(engine.package_rounds,),
    ),
]  # fmt: skip

# ---- proofs --------------------------------------------------------------------------------------

PROOFS = {
    "lossless_chain": """
**A chain of drafts is lossless.** Let pᵢ be the target's distribution after t₁ … tᵢ₋₁, and qᵢ the
draft's. Plain decoding writes t₁ … tₙ with probability p₁(t₁) · p₂(t₂) · … · pₙ(tₙ).

*Claim.* After any text, a round with γ drafts does so as well, for n = γ + 1, if plain decoding
continues it when it yields fewer than n tokens.

*γ = 0.* There is no draft, and the bonus token is drawn from p₁.

*From γ − 1 to γ.* Let m(t) = min(p₁(t), q₁(t)) and β = Σ m. There are two ways to begin with t₁:

- x₁ = t₁ is drawn and accepted, with probability q₁(t₁) · min(1, p₁(t₁) / q₁(t₁)) = m(t₁). What
  follows is a round with γ − 1 drafts after t₁. By the claim it writes the rest with probability
  p₂(t₂) · … · pₙ(tₙ).
- x₁ is rejected, with probability 1 − β, and t₁ is drawn from (p₁ − m) / (1 − β). Together this has
  probability p₁(t₁) − m(t₁). The round ends, and plain decoding writes the rest, with the same
  probability as above. (If β = 1, this never happens.)

The sum is (m(t₁) + p₁(t₁) − m(t₁)) · p₂(t₂) · … · pₙ(tₙ) = p₁(t₁) · p₂(t₂) · … · pₙ(tₙ). ∎

*Many rounds.* Follow r rounds by plain decoding. By the claim, the last of these rounds can be
replaced by plain decoding, whatever was written before it, and the distribution stays the same. So
can the one before, and so on: the text is distributed as the target's. As n rounds yield at least n
tokens, this holds for the first n tokens of a decoder that never stops drafting.

The draft model may use all that is known when it draws xᵢ: the text, earlier rounds, x₁ … xᵢ₋₁. The
proof only needs that xᵢ is drawn from the qᵢ by which it is judged, and that the coin is fair.
""",
    "expected_tokens": """
**Expected tokens per pass.** Let N be the number of accepted drafts, and aᵢ = P(N ≥ i) the
probability that the first i are accepted. N counts the i from 1 to γ with N ≥ i, so

$$E[N] = a_1 + a_2 + \\dots + a_γ.$$

A correction or bonus token follows, so a pass yields one more on average. Nothing has been assumed
so far. The aᵢ are the *unconditional* rates of lesson 06.

Draft i, if it is reached, is accepted with probability βᵢ, the β of its place. So
aᵢ = E[β₁ · β₂ · … · βᵢ], over the texts that accepted drafts form. *If* the βᵢ are independent,
with the same mean α, then aᵢ = αⁱ. Let S = 1 + α + … + α^γ. Then S − αS = 1 − α^(γ+1), so

$$S = \\frac{1 - α^{γ+1}}{1 - α} \\quad (α < 1).$$

- As γ grows, S approaches 1 / (1 − α): with α = 0.8, no number of drafts yields more than 5 tokens.
- Draft γ + 1 adds α^(γ+1), less than the draft before it.
- With β₁ and β₂ of mean α, E[β₁β₂] = α² + Cov(β₁, β₂). If easy places come in runs, the covariance
  is positive, and two drafts yield more than the formula says.
""",
}

# ---- the quiz ------------------------------------------------------------------------------------

QUIZ = [
    Question(
        "The draft model is replaced by a much worse one. Does the distribution of sampled text "
        "change?",
        False,
        "acceptance and residual make up for any q, so a worse one only lowers α.",
    ),
    Question(
        "With what probability is a draft x accepted, if p(x) = 0.6 and q(x) = 0.2?",
        1,
        "a token that the draft proposes too seldom is always accepted: min(1, 0.6 / 0.2) = 1.",
    ),
    Question(
        "What share of the drafts is accepted, if p = (0.5, 0.5) and q = (0.9, 0.1)?",
        0.6,
        "it is Σ min(p, q) = 0.5 + 0.1.",
    ),
    Question(
        "After a rejection, somebody draws the token from p instead of the residual. Which tokens "
        "appear too often?",
        "b",
        "accepted drafts alone give such a token its full p(t), and the draws from p add to that.",
        (
            "none, because p is the right distribution",
            "those with q(t) above p(t)",
            "those with p(t) above q(t)",
        ),
    ),
    Question(
        "A head always proposes its most likely token x, to which its softmax gives 0.8. The draft "
        "is accepted with probability min(1, p(x) / 0.8). Is this lossless?",
        False,
        "nothing was drawn from that softmax, so the q of this draft is one-hot and the right "
        "probability is p(x).",
    ),
]
