"""Lesson 09: the enumeration of all outcomes of a decoder (see pure_09.py, too), two acceptance
rules to judge by it (one for drafts that nobody drew, and one that is wrong on purpose), and sums
that have one order."""

import math
import random
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product

import torch
from form import Oracle, Question, Task, Wrong
from torch import Tensor

from lessons.assignments import mutants
from lessons.assignments.mutants import Mutant, in_accept
from minispec.certify import toys
from minispec.certify.common import GREEDY
from minispec.certify.methods.cases import bound
from minispec.certify.toys import ScriptedRandomness, Toy, every_outcome, total_variation
from minispec.fast import bitwise
from minispec.fast.bitwise import BLOCK
from minispec.sampling import Randomness, Sampling, Seeded, probs
from minispec.tree import Tree
from minispec.verify import accept, residual
from solutions.common import (
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
from solutions.pure_09 import NEXT_SCRIPT, next_script

# ---- solutions -----------------------------------------------------------------------------------


def exact_distribution(function):
    total, script = {}, []
    while script is not None:
        randomness = ScriptedRandomness(script)
        result = function(randomness)
        total[result] = total.get(result, 0.0) + randomness.probability
        script = next_script(randomness.choices)
    return total


def accept_certain(target, tree, randomness):
    path = [0]
    while True:
        y = randomness.categorical(target[path[-1]])
        child = next((c for c in tree.children(path[-1]) if tree.tokens[c] == y), None)
        if child is None:
            return path, y
        path.append(child)


def fill_up(product, rows, multiple):
    extra = -len(rows) % multiple
    zeros = rows.new_zeros(extra, rows.shape[1])
    return product(torch.cat([rows, zeros]))[: len(rows)]


def attend_in_blocks(queries, keys, values, product):
    (r, d), n = queries.shape, len(keys)
    zeros = keys.new_zeros(-n % 64, d)
    key_blocks = torch.cat([keys, zeros]).split(64)
    value_blocks = torch.cat([values, zeros]).split(64)
    scores = torch.cat([product(queries, block.T) for block in key_blocks], -1) / d**0.5
    last = torch.arange(n - r, n)[:, None]  # the slot of each query
    scores[torch.arange(scores.shape[1]) > last] = -torch.inf
    parts = scores.softmax(-1).split(64, -1)
    total = 0
    for p, block in zip(parts, value_blocks):
        total = total + product(p, block)
    return total


def tempting_accept(target, tree, randomness):
    class Generous:
        def categorical(self, probs):
            return randomness.categorical(probs)

        def bernoulli(self, p):
            return randomness.bernoulli(min(1.0, 1.5 * p))

    return accept(target, tree, Generous())


# ---- the package's functions, with the lesson's arguments ----------------------------------------


def package_next_script(choices):
    """The end of `every_outcome`'s loop."""
    choices = list(choices)
    while choices and choices[-1][0] == choices[-1][1] - 1:
        choices.pop()
    return [choice for choice, _ in choices[:-1]] + [choices[-1][0] + 1] if choices else None


class Drawn:
    """The target's rows, each replaced by a one-hot distribution at a token drawn from it."""

    def __init__(self, target, randomness):
        self.target, self.randomness = target, randomness

    def __getitem__(self, node: int) -> Tensor:
        p = self.target[node]
        return torch.eye(len(p), dtype=p.dtype)[self.randomness.categorical(p)]


def package_accept_certain(target, tree, randomness):
    return accept(Drawn(target, randomness), tree, randomness)[:2]  # without the chances


def package_fill_up(product, rows, multiple):
    return product(bitwise.filled(rows, multiple))[: len(rows)]


def package_attend_in_blocks(queries, keys, values, product):
    (r, d), n = queries.shape, len(keys)
    seen = torch.arange(n) <= torch.arange(n - r, n)[:, None]
    keys, values = (bitwise.blocks(bitwise.filled(x, BLOCK)) for x in (keys, values))
    scores = torch.cat([product(queries, block.mT) for block in keys], -1) / math.sqrt(d)
    p = (scores + bitwise.plan(seen, scores.dtype)[0]).softmax(-1).split(BLOCK, -1)
    return torch.stack([*map(product, p, values)]).cumsum(0)[-1]


def package_exact_distribution(function):
    total = Counter()
    for result, probability in every_outcome(function):
        total[result] += probability
    return dict(total)


# ---- exact_distribution --------------------------------------------------------------------------

HOT = Sampling(1.0)
PROMPT = [1, 0, 1, 1, 0]


@dataclass(frozen=True)
class Program:
    """A function that makes random decisions, and the distribution of its results."""

    name: str
    run: object  # called with a Randomness
    exact: dict


def fair_tokens(model, n: int) -> dict[tuple[int, ...], float]:
    """The probabilities of the first n tokens of plain decoding, each from a fresh pass."""
    exact = {}
    for text in product(range(model.config.vocab_size), repeat=n):
        rows = probs(model.logits(model([*PROMPT, *text])[0]), HOT)[len(PROMPT) - 1 :]
        exact[text] = math.prod(float(rows[i][x]) for i, x in enumerate(text))
    return exact


def die_after_heads(randomness):
    return randomness.categorical(tensor(0.5, 0.3, 0.2)) if randomness.bernoulli(0.25) else "tails"


def two_coins(randomness):
    return randomness.bernoulli(0.3) + randomness.bernoulli(0.6)


def coins_until_heads(randomness):
    return next((n for n in range(3) if randomness.bernoulli(0.5)), 3)


def one_draft(seed: int) -> Program:
    """The first token of a round with one draft."""
    rng = random.Random(seed)
    p, q = random_probs(rng, 3), random_probs(rng, 3)

    def run(randomness):
        x = randomness.categorical(q)
        path, fresh, *_ = accept([p, p], Tree.chain(0, [x], [q]), randomness)
        return x if len(path) == 2 else fresh

    exact = {x: float(p[x]) for x in range(3) if p[x] > 0}
    return Program(f"a round with p = {rows(p)}, q = {rows(q)}", run, exact)


def decoder(name: str, method, n: int) -> Program:
    toy = Toy(5)
    run = lambda randomness: toys.first_tokens(method, toy, PROMPT, HOT, randomness, n)  # noqa: E731
    return Program(f"{name}, {n} tokens", run, fair_tokens(toy, n))


PROGRAMS = [
    Program("a coin with probability 0.25", lambda r: r.bernoulli(0.25), {True: 0.25, False: 0.75}),
    Program("the number of heads of two coins (0.3 and 0.6)", two_coins,
            {0: 0.28, 1: 0.54, 2: 0.18}),
    Program("a die with a face of probability 0", lambda r: r.categorical(tensor(0.5, 0.0, 0.5)),
            {0: 0.5, 2: 0.5}),
    Program("a coin, and after heads a die", die_after_heads,
            {"tails": 0.75, 0: 0.125, 1: 0.075, 2: 0.05}),
    Program("coins until heads, at most three", coins_until_heads,
            {0: 0.5, 1: 0.25, 2: 0.125, 3: 0.125}),
    Program("no decision at all", lambda r: "done", {"done": 1.0}),
    *map(one_draft, range(4)),
    decoder("plain decoding", bound("autoregressive"), 2),
    decoder("speculative decoding", bound("speculative", draft=Toy(77), k=1), 2),
]  # fmt: skip


@cache
def outcomes_of(i: int) -> int:
    return sum(1 for _ in every_outcome(PROGRAMS[i].run))


def run_distribution(function, case: Program) -> dict:
    runs, most = 0, 3 * outcomes_of(PROGRAMS.index(case)) + 2

    def counted(randomness: Randomness):
        nonlocal runs
        runs += 1
        if runs > most:
            raise Wrong(
                "it runs the function far more often than there are outcomes; give every run a new "
                "ScriptedRandomness with the next script, and stop when that is None"
            )
        return case.run(randomness)

    found = function(counted)
    if not isinstance(found, dict):
        kind = "a generator" if hasattr(found, "send") else type(found).__name__
        raise Wrong(f"it must return a dict {{result: probability}}, not {kind}")
    try:
        return {result: float(probability) for result, probability in found.items()}
    except (TypeError, ValueError):
        raise Wrong("the values of the dict must be numbers") from None


def show_distribution(case: Program, got: dict, exact: dict) -> str:
    result = max(exact, key=lambda result: abs(got.get(result, 0.0) - exact[result]))
    return f"{case.name}: result {result!r} gets {got.get(result, 0.0):.3g} instead of " \
           f"{exact[result]:.3g} (distance {total_variation(got, exact):.1e})"  # fmt: skip


def diagnose_distribution(results: list[tuple[Program, dict, dict]]) -> str | None:
    sums = [sum(got.values()) for _, got, _ in results]
    if min(sums, default=1.0) < 1 - 1e-9:
        return f"the probabilities sum to {min(sums):.3g}; outcomes are missing, or their " \
               "probabilities are not added"  # fmt: skip
    if max(sums, default=1.0) > 1 + 1e-9:
        return f"the probabilities sum to {max(sums):.3g}; outcomes are counted more than once, " \
               "or `function` is called more than once per run"  # fmt: skip
    if results and max(total_variation(got, exact) for _, got, exact in results) < 0.2:
        return "close, but not exact; does it draw samples?"
    return None


def overwrites(function):
    return dict(every_outcome(function))


def counts_runs(function):
    return dict(Counter(result for result, _ in every_outcome(function)))


def equal_weights(function):
    counts = counts_runs(function)
    return {result: n / sum(counts.values()) for result, n in counts.items()}


def without(which: slice):
    def enumerate_some(function):
        total = Counter()
        for result, probability in list(every_outcome(function))[which]:
            total[result] += probability
        return dict(total)

    return enumerate_some


def one_randomness(function):
    """`script` is replaced, but `choices` and `probability` continue."""
    randomness, total = ScriptedRandomness([]), Counter()
    while randomness.script is not None:
        total[function(randomness)] += randomness.probability
        randomness.script = next_script(randomness.choices)
    return dict(total)


DISTRIBUTION_MISTAKES = {
    "a result that is reached in several ways keeps only the last probability; add them up": (
        overwrites
    ),
    "it adds 1 for every outcome; add randomness.probability, as it is after the run": counts_runs,
    "it gives every outcome the same weight; add randomness.probability": equal_weights,
    "it returns nothing: the first script is [], which is false in a condition. Test `script is "
    "not None`": lambda function: {},
    "it returns only the first outcome; repeat until next_script returns None": without(slice(1)),
    "the last outcome is missing; add a run before asking for the next script": without(
        slice(0, -1)
    ),
    "the first outcome is missing; begin with the script []": without(slice(1, None)),
    "all runs use the same ScriptedRandomness or the same script; make a new one with the next "
    "script for every run": one_randomness,
}

# ---- accept_certain ------------------------------------------------------------------------------

V, DEPTH = 3, 2


@dataclass(frozen=True)
class Round:
    """A round with drafts that nobody drew: a tree, and the target's distribution after any text of
    at most DEPTH tokens."""

    tree: Tree
    p: dict[tuple[int, ...], Tensor]

    def text(self, node: int) -> tuple[int, ...]:
        """The drafts on the way to a node."""
        found: list[int] = []
        while node:
            found.insert(0, self.tree.tokens[node])
            node = self.tree.parents[node]
        return tuple(found)


TREES = [  # parents and tokens
    ([-1, 0], [0, 1]), ([-1, 0, 1], [2, 0, 2]), ([-1, 0, 0], [1, 2, 0]), ([-1], [0]),
    ([-1, 0, 0, 1, 2, 2], [0, 1, 0, 1, 2, 0]), ([-1, 0, 0, 0, 3], [1, 2, 0, 1, 1]),
]  # fmt: skip


def random_round(seed: int) -> Round:
    rng = random.Random(seed)
    parents, tokens = TREES[seed % len(TREES)]
    texts = [text for n in range(DEPTH + 1) for text in product(range(V), repeat=n)]
    p = {text: random_probs(rng, V) for text in texts}
    if seed % 5 == 4:  # greedy decoding
        p = {text: torch.eye(V, dtype=torch.float64)[row.argmax()] for text, row in p.items()}
    return Round(Tree(tokens, parents), p)


ROUNDS = [random_round(seed) for seed in range(18)]


ENDLESS = "does it go down the tree?"
COIN = "it flips a coin, as the rule of lesson 03 does; a draw from the node's row decides all"


class NoCoins(Strict):
    """Randomness for a rule that only draws tokens."""

    def bernoulli(self, p: float) -> bool:
        if 0 < float(p) < 1:
            raise Wrong(COIN)
        return super().bernoulli(p)


def checked(answer: object, tree: Tree) -> tuple[list[int], int]:
    """The path and the fresh token that a rule of acceptance returns, if the path is one. Like
    `accept`, it may return the drafts' chances, too."""
    if not isinstance(answer, tuple | list) or len(answer) not in (2, 3):
        raise Wrong("it must return two things: the path and the fresh token")
    path, fresh, *_ = answer
    if type(fresh) is not int:
        raise Wrong(f"the fresh token is a {type(fresh).__name__}; it must be an int")
    if not isinstance(path, list) or path[:1] != [0]:
        raise Wrong(f"the path is {path!r}; it must be a list of nodes that starts with node 0")
    if any(child not in tree.children(parent) for parent, child in pairwise(path)):
        raise Wrong(f"the path is {path}; each node must be a child of the one before")
    return path, fresh


def run_certain(function, case: Round) -> Outcome:
    """The outcome of the first DEPTH + 1 tokens. After the round, plain decoding draws the tokens
    that are missing."""

    def whole(randomness) -> tuple[int, tuple[int, ...]]:
        target = [case.p[case.text(node)] for node in range(len(case.tree))]
        more = deepcopy(case.tree), NoCoins(randomness, ENDLESS)
        path, fresh = checked(call(function, *more, target=target), case.tree)
        tokens = [*case.tree.tokens_at(path[1:]), fresh]
        while len(tokens) <= DEPTH:
            tokens.append(randomness.categorical(case.p[tuple(tokens)]))
        return len(path) - 1, tuple(tokens)

    return outcome_of(whole)


def exact_certain(case: Round) -> Outcome:
    """Without a run: the target's probabilities. A node is accepted if the target's own tokens go
    through it."""
    nodes = {case.text(node) for node in range(len(case.tree))}
    texts, accepted = probabilities_of_texts(case.p, DEPTH + 1), Counter()
    for text, probability in texts.items():
        accepted[max(n for n in range(DEPTH + 1) if text[:n] in nodes)] += probability
    return Outcome(texts, accepted)


def describe(case: Round) -> str:
    tree = case.tree
    return f"tokens {tree.tokens}, parents {tree.parents}, first p = {rows(case.p[()])}"


def show_certain(case: Round, got: Outcome, exact: Outcome) -> str:
    if total_variation(got.tokens, exact.tokens) < 1e-9:
        return f"{describe(case)}: the tokens are right, but on average {got.drafts:.2f} drafts " \
               f"are accepted instead of {exact.drafts:.2f}"  # fmt: skip
    a, b = got.tokens, exact.tokens
    text = max(b, key=lambda text: abs(a.get(text, 0.0) - b[text]))
    return f"{describe(case)}: tokens {text} have probability {a.get(text, 0.0):.3f} instead of " \
           f"{b[text]:.3f} (distance {total_variation(a, b):.1e})"  # fmt: skip


def diagnose_certain(results: list[tuple[Round, Outcome, Outcome]]) -> str | None:
    if all(total_variation(got.tokens, exact.tokens) < 1e-9 for _, got, exact in results):
        return "lossless, but it accepts too few drafts"
    return None


def walk(match, end):
    """A rule that draws y at each node, goes on to `match(tree, children, y, p)`, and if that is
    None returns `end(y, p, randomness)`."""

    def rule(target, tree, randomness):
        path = [0]
        while True:
            p = target[path[-1]]
            y = randomness.categorical(p)
            child = match(tree, tree.children(path[-1]), y, p)
            if child is None:
                return path, end(y, p, randomness)
            path.append(child)

    return rule


def same_token(tree, children, y, p):
    return next((child for child in children if tree.tokens[child] == y), None)


def by_row(index):
    """A rule that draws y from the row target[index(path)]."""

    def rule(target, tree, randomness):
        path = [0]
        while True:
            y = randomness.categorical(target[index(path)])
            child = same_token(tree, tree.children(path[-1]), y, 0)
            if child is None:
                return path, y
            path.append(child)

    return rule


def one_draw_per_child(target, tree, randomness):
    path = [0]
    while True:
        p = target[path[-1]]
        matches = (
            c for c in tree.children(path[-1]) if randomness.categorical(p) == tree.tokens[c]
        )
        child = next(matches, None)
        if child is None:
            return path, randomness.categorical(p)
        path.append(child)


def stops_at_a_leaf(target, tree, randomness):
    path = [0]  # without drafts y is unknown
    while children := tree.children(path[-1]):
        y = randomness.categorical(target[path[-1]])
        child = same_token(tree, children, y, 0)
        if child is None:
            break
        path.append(child)
    return path, y


def keep(y, p, randomness):
    return y


def first_child_only(tree, children, y, p):
    return same_token(tree, children[:1], y, p)


def one_level(target, tree, randomness):
    path, fresh = accept_certain(target, tree, randomness)
    if len(path) < 3:
        return path, fresh
    return path[:2], tree.tokens[path[2]]


def repeats_the_draft(target, tree, randomness):
    path, fresh = accept_certain(target, tree, randomness)
    return path, tree.tokens[path[-1]] if len(path) > 1 else fresh


def follows_the_argmax(target, tree, randomness):
    path = [0]
    while child := same_token(tree, tree.children(path[-1]), int(target[path[-1]].argmax()), 0):
        path.append(child)
    return path, randomness.categorical(target[path[-1]])


CERTAIN_MISTAKES = {
    "after a mismatch it draws again, and the drafts come too often; return the y that matched no "
    "child": walk(same_token, lambda y, p, randomness: randomness.categorical(p)),
    "after a mismatch it returns the argmax; return the y that matched no child": walk(
        same_token, lambda y, p, randomness: int(p.argmax())
    ),
    "lossless, but it compares y with the first child only; any child may match": walk(
        first_child_only, keep
    ),
    "lossless, but it never accepts a draft": lambda target, tree, randomness: (
        [0], randomness.categorical(target[0])
    ),
    "lossless, but it stops after one draft; go on from the child that matched": one_level,
    "the fresh token repeats the last accepted draft; draw it from the last node's row": (
        repeats_the_draft
    ),
    "every y is drawn from target[0]; draw it from the row of the last node of the path": (
        by_row(lambda path: 0)
    ),
    "y is drawn from the row of the depth; target[i] is the distribution after node i": (
        by_row(lambda path: len(path) - 1)
    ),
    "every child gets a draw of its own; draw y once, and compare it with all children": (
        one_draw_per_child
    ),
    "at a leaf it returns the token of the leaf again; a leaf has a row, too: draw y from it": (
        stops_at_a_leaf
    ),
    "it follows the argmax without a draw; that is greedy decoding": follows_the_argmax,
    COIN: accept,
}  # fmt: skip

# ---- fill_up -------------------------------------------------------------------------------------


def in_own_order(rows: Tensor, matrix: Tensor, *key: int) -> Tensor:
    """The product of rows and a matrix, added up one by one in an order that belongs to `key`."""
    terms = [*range(len(matrix))]
    random.Random(str(key)).shuffle(terms)
    total = torch.zeros(len(rows), matrix.shape[1])
    for i in terms:
        total += rows[:, i : i + 1] * matrix[i]
    return total


@dataclass(frozen=True)
class Rows:
    """Arguments of fill_up: n rows of WIDTH numbers, and a multiple."""

    n: int
    multiple: int

    @property
    def rows(self) -> Tensor:
        return torch.randn(self.n, WIDTH, generator=torch.Generator().manual_seed(self.n))


WIDTH = 24
FILLED = [Rows(n, multiple) for multiple in (4, 8) for n in (1, 3, 4, 5, 8, 11)]
WEIGHT = torch.randn(WIDTH, 6, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Filled:
    """What fill_up returns, and the numbers of rows of the products that it computes."""

    result: Tensor
    passes: list[int]


def run_fill_up(function, case: Rows) -> Filled:
    passes: list[int] = []

    def product(rows: Tensor) -> Tensor:
        shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        if not isinstance(rows, Tensor) or rows.dim() != 2 or rows.shape[1] != WIDTH:
            raise Wrong(f"`product` gets {shape} instead of rows of {WIDTH} numbers; fill up the "
                        "number of rows")  # fmt: skip
        passes.append(len(rows))
        steady = len(rows) % case.multiple == 0
        return in_own_order(rows, WEIGHT, 0 if steady else len(rows))

    result = call(lambda rows: function(product, rows, case.multiple), rows=case.rows)
    if not isinstance(result, Tensor):
        raise Wrong(f"it must return a tensor, not {type(result).__name__}")
    if len(passes) == 0:
        raise Wrong("it does not call `product`")
    if result.shape != (case.n, WEIGHT.shape[1]):
        raise Wrong(f"it returns {tuple(result.shape)} for {case.n} rows; drop what `product` "
                    "returns for the rows that were filled up")  # fmt: skip
    return Filled(result, passes)


def right_rows(case: Rows) -> Filled:
    """Each row in the order that belongs to multiples, and one product of the fewest rows."""
    n = math.ceil(case.n / case.multiple) * case.multiple
    return Filled(in_own_order(case.rows, WEIGHT, 0), [n])


def filled_distance(a: Filled, b: Filled) -> float:
    return float((a.result != b.result).sum()) + (a.passes != b.passes)


def show_rows(case: Rows) -> str:
    return f"{case.n} rows, multiple = {case.multiple}"


def show_filled(case: Rows, got: Filled, right: Filled) -> str:
    differ = int((got.result != right.result).sum())
    return f"{show_rows(case)}: it computes products of {got.passes} rows instead of " \
           f"{right.passes}, and {differ} of {got.result.numel()} numbers differ from those of a " \
           "row alone"  # fmt: skip


SEVERAL_PRODUCTS = "the bits are right, but each product reads all weights: compute only one"


def diagnose_fill_up(results: list[tuple[Rows, Filled, Filled]]) -> str | None:
    if any(not torch.equal(got.result, right.result) for _, got, right in results):
        return None
    if any(len(got.passes) > 1 for _, got, _ in results):
        return SEVERAL_PRODUCTS
    return "the bits are right, but it fills up with more rows than necessary"


def adding(extra):
    """A mistake in how many rows of zeros are added after n rows."""

    def fill_up(product, rows, multiple):
        zeros = rows.new_zeros(extra(len(rows), multiple), rows.shape[1])
        return product(torch.cat([rows, zeros]))[: len(rows)]

    return fill_up


def fills_the_front(product, rows, multiple):
    zeros = rows.new_zeros(-len(rows) % multiple, rows.shape[1])
    return product(torch.cat([zeros, rows]))[: len(rows)]


def one_by_one(product, rows, multiple):
    return torch.cat([fill_up(product, row, multiple) for row in rows.split(1)])


FILL_MISTAKES = {
    "it does not fill up: a product of any other number of rows adds in another order": adding(
        lambda n, multiple: 0
    ),
    "it fills up to `multiple` rows, but there may be more: fill up to the next multiple of it": (
        adding(lambda n, multiple: max(0, multiple - n))
    ),
    "if n is a multiple already, it adds as many rows again; -n % multiple is 0 then": adding(
        lambda n, multiple: multiple - n % multiple
    ),
    "it adds `multiple` rows; fill up to a multiple, -n % multiple rows": adding(
        lambda n, multiple: multiple
    ),
    "it adds n % multiple rows; up to the next multiple, -n % multiple are missing": adding(
        lambda n, multiple: n % multiple
    ),
    "the zeros come first, so the first n rows of the product are not those of `rows`": (
        fills_the_front
    ),
    SEVERAL_PRODUCTS: one_by_one,
}  # fmt: skip

# ---- attend_in_blocks ----------------------------------------------------------------------------

SIZE = 8  # of a head
ATTENTION_ERROR = 1e-5  # in float32


@dataclass(frozen=True)
class Attended:
    """What attend_in_blocks does: its largest error, whether a row has other bits alone, how many
    products it computes, and the numbers of slots in them."""

    error: float
    differs: bool
    products: int
    slots: frozenset[int]


@dataclass(frozen=True)
class Chain:
    """Arguments of attend_in_blocks: the last r of n slots have queries."""

    r: int
    n: int

    @property
    def arguments(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.n)
        sizes = dict(queries=self.r, keys=self.n, values=self.n)
        return {name: torch.randn(size, SIZE, generator=generator) for name, size in sizes.items()}


CHAINS = [Chain(1, 3), Chain(3, 40), Chain(2, 64), Chain(5, 66), Chain(4, 130), Chain(1, 130)]


def run_attend(function, case: Chain) -> Attended:
    seen: list[int] = []

    def product(rows: Tensor, matrix: Tensor) -> Tensor:
        if not all(isinstance(x, Tensor) and x.dim() == 2 for x in (rows, matrix)):
            raise Wrong("`product` takes two tensors with two dimensions each")
        if rows.shape[1] != len(matrix):
            raise Wrong(f"`product` gets shapes {tuple(rows.shape)} and {tuple(matrix.shape)}; the "
                        "middle sizes must be equal")  # fmt: skip
        if SIZE not in matrix.shape:
            raise Wrong(f"`product` gets a matrix of shape {tuple(matrix.shape)}; a block of keys "
                        "or values has `d` numbers for each slot")  # fmt: skip
        slots, _ = sorted(matrix.shape, key=lambda size: size == SIZE)
        seen.append(slots)
        return in_own_order(rows, matrix, *matrix.shape)

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        y = call(lambda *tensors: function(*tensors, product),
                 queries=queries, keys=keys, values=values)  # fmt: skip
        if not isinstance(y, Tensor) or y.shape != queries.shape:
            kind = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise Wrong(f"it must return a tensor of the queries' shape, not {kind}")
        if y.isnan().any():
            raise Wrong("it returns NaN; a query sees at least its own slot")
        return y

    q, k, v = case.arguments.values()
    together = attend(q, k, v)
    products, ends = len(seen), range(case.n - case.r + 1, case.n + 1)
    if products == 0:
        raise Wrong("it does not call `product`; with `@`, a row's bits depend on the other rows")
    alone = [attend(q[i : i + 1], k[:end], v[:end]) for i, end in enumerate(ends)]
    error = float((together - exact_attention(case)).abs().max())
    return Attended(error, not torch.equal(together, torch.cat(alone)), products, frozenset(seen))


def exact_attention(case: Chain) -> Tensor:
    """Row by row, in float64."""
    q, k, v = (x.double() for x in case.arguments.values())
    rows = []
    for i, end in enumerate(range(case.n - case.r + 1, case.n + 1)):
        rows.append((k[:end] @ q[i] / math.sqrt(SIZE)).softmax(-1) @ v[:end])
    return torch.stack(rows)


def right_attention(case: Chain) -> Attended:
    return Attended(0.0, False, 2 * math.ceil(case.n / BLOCK), frozenset({BLOCK}))


def attended_distance(a: Attended, b: Attended) -> float:
    """Two answers with wrong bits are alike only if their products have the same slots."""
    error = abs(a.error - b.error)
    unlike = a.differs != b.differs or (a.differs and a.slots != b.slots)
    return (error > ATTENTION_ERROR) * error + unlike + abs(a.products - b.products)


def show_chain(case: Chain) -> str:
    return f"{case.r} queries, {case.n} slots"


def show_attended(case: Chain, got: Attended, right: Attended) -> str:
    same = "other bits than" if got.differs else "the bits of"
    return f"{show_chain(case)}: an error of {got.error:.1e}, {same} rows alone, {got.products} " \
           f"products instead of {right.products}"  # fmt: skip


def diagnose_attend(results: list[tuple[Chain, Attended, Attended]]) -> str | None:
    """Judge the attention first, then its bits, then its products."""
    if any(got.error > ATTENTION_ERROR for _, got, _ in results):
        return "this is not the attention of each query to the slots up to its own"
    slots = {n for _, got, _ in results for n in got.slots}
    if any(got.differs for _, got, _ in results):
        if max(slots) > BLOCK:
            return f"the attention is right, but a product has {max(slots)} slots. Its order " \
                   f"depends on that number; take blocks of {BLOCK}"  # fmt: skip
        if min(slots) < BLOCK:
            return f"the attention is right, but a product has {min(slots)} slots. Fill the last " \
                   f"block up to {BLOCK} with zeros"  # fmt: skip
        return "the attention is right, but a row alone gets other bits; do blocks begin at slot " \
               "0, whatever the pass?"  # fmt: skip
    return "all is right, but it computes more products than two for each block"


def attention(
    *, block: int | None = BLOCK, front: bool = False, fill: bool = True, scale: float = SIZE**-0.5,
    see: int = 0, hide_filled: bool = True, hide_later: bool = True, each_block: bool = False,
):  # fmt: skip
    """attend_in_blocks, with mistakes."""

    def attend(queries, keys, values, product):
        r, n = len(queries), len(keys)
        extra = -n % block if block and fill else 0
        zeros = keys.new_zeros(extra, SIZE)
        keys, values = (torch.cat([zeros, x] if front else [x, zeros]) for x in (keys, values))
        first = extra * front
        parts = [len(keys)] if block is None else block
        scores = [product(queries, part.T) * scale for part in keys.split(parts)]
        slots = torch.arange(len(keys)) - first
        last = torch.arange(n - r, n)[:, None] + see if hide_later else torch.tensor([[n - 1]])
        hidden = slots > last if hide_filled else (slots > last) & (slots < n)
        scores = torch.cat(scores, -1).masked_fill(hidden | (slots < 0), -math.inf)
        if each_block:
            p = [part.softmax(-1).nan_to_num(0) for part in scores.split(parts, -1)]
        else:
            p = scores.softmax(-1).split(parts, -1)
        return sum(map(product, p, values.split(parts)))

    return attend


def query_by_query(queries, keys, values, product):
    first = len(keys) - len(queries) + 1
    return torch.cat([
        attend_in_blocks(query, keys[: first + i], values[: first + i], product)
        for i, query in enumerate(queries.split(1))
    ])  # fmt: skip


ATTEND_MISTAKES = {
    "the attention is right, but one product sums over all slots. Its order depends on how many "
    f"there are; take blocks of {BLOCK}": attention(block=None),
    "the attention is right, but the last block is shorter, and a product over fewer slots adds in "
    f"another order; fill it up to {BLOCK} with zeros": attention(fill=False),
    "the attention is right, but blocks are counted from the newest slot, so each pass cuts them "
    "elsewhere; begin at slot 0": attention(front=True),
    "the slots that fill up the last block have a score of 0, which is a weight; their score must "
    "be -inf": attention(hide_filled=False),
    "each query sees all n slots; query i sees those up to its own, n - r + i": attention(
        hide_later=False
    ),
    "a query does not see its own slot": attention(see=-1),
    "a query sees the slot after its own, too": attention(see=1),
    "each block has a softmax of its own; its sum must run over all slots": attention(
        each_block=True
    ),
    "the scores are not divided by the square root of d": attention(scale=1.0),
    "the scores are divided by d; divide by its square root": attention(scale=1 / SIZE),
    "all is right, but each query gets products of its own; the rows of a block's product are all "
    "queries": query_by_query,
}  # fmt: skip

# ---- tempting_accept -----------------------------------------------------------------------------

AT_LEAST = 0.03  # the total variation that the exercise asks for
TOKENS = 2


@dataclass(frozen=True)
class Effect:
    """What a rule does to speculative decoding with one draft per round."""

    distance: float  # of the first TOKENS tokens from plain decoding
    greedy: bool  # whether greedy tokens are right, whatever the random decisions
    tokens: float  # of the first round, on average

    @property
    def lacks(self) -> str | None:
        if self.distance < 1e-9:
            return "this is lossless"
        if not self.greedy:
            return "it changes greedy tokens, and a test would notice"
        if self.tokens < fair().tokens + 1e-9:
            return "it does not accept more drafts than the right rule, so nobody is tempted"
        if self.distance < AT_LEAST:
            return f"the distance is {self.distance:.3f}; make it at least {AT_LEAST}"
        return None


def effect(rule) -> Effect:
    toy, method = Toy(5), bound("speculative", draft=Toy(77), k=1)

    def tokens(randomness):
        return toys.first_tokens(method, toy, PROMPT, HOT, randomness, TOKENS)

    def first_round(randomness):
        steps = method(toy, PROMPT, HOT, randomness)
        next(steps)  # the prefill
        return len(next(steps).tokens)

    plain = greedy_tokens(bound("autoregressive"), toy, Seeded())
    with Mutant("yours", "exact", "", in_accept(rule)).apply():
        distance = total_variation(package_exact_distribution(tokens), fair_tokens(toy, TOKENS))
        length = sum(n * p for n, p in every_outcome(first_round))
        runs = every_outcome(lambda randomness: greedy_tokens(method, toy, randomness))
        greedy = all(run == plain for run, _ in runs)
    return Effect(distance, greedy, length)


def greedy_tokens(method, toy: Toy, randomness: Randomness) -> tuple[int, ...]:
    return toys.first_tokens(method, toy, PROMPT, GREEDY, randomness, 8)


@cache
def fair() -> Effect:
    """The effect of the right rule: none, and 1 + Σ min(p, q) tokens."""
    p, q = (probs(m.logits(m(PROMPT)[0, -1:]), HOT)[0] for m in (Toy(5), Toy(77)))
    return Effect(0.0, True, 1 + float(torch.minimum(p, q).sum()))


def run_tempting(function, case: str) -> Effect:
    def rule(target, tree, randomness):
        return checked(function(target, tree, randomness), tree)

    return effect(rule)


class Wanted:
    """Stands for every outcome that the exercise asks for."""


def tempting_distance(a: Effect, b: Effect | Wanted) -> float:
    if isinstance(b, Wanted):
        return float(a.lacks is not None)
    same = a.greedy == b.greedy
    return max(abs(a.distance - b.distance), abs(a.tokens - b.tokens)) if same else math.inf


def show_tempting(case: str, got: Effect, wanted: Wanted) -> str:
    greedy = "right" if got.greedy else "wrong"
    tokens = f"{got.tokens:.3f} tokens in the first round (the right rule: {fair().tokens:.3f})"
    return f"{case}: distance {got.distance:.3f}, greedy tokens {greedy}, {tokens}"


def accepts_all(target, tree, randomness):
    path = [0]
    while children := tree.children(path[-1]):
        path.append(children[0])
    return path, randomness.categorical(target[path[-1]])


def resamples(target, tree, randomness):
    path, fresh, *_ = accept(target, tree, randomness)
    rejected = tree.children(path[-1])
    return path, randomness.categorical(target[path[-1]]) if rejected else fresh


def scaled(factor: float):
    """Acceptance probabilities that are raised by a factor."""

    def rule(target, tree, randomness):
        path = [0]
        while children := tree.children(path[-1]):
            x, p, q = tree.tokens[children[0]], target[path[-1]], tree.drawn_from(children[0])
            ratio = float(p[x]) / (1.0 if q is None else float(q[x]))
            rest = residual(p, q, x)
            if not randomness.bernoulli(min(1.0, factor * ratio)) and rest is not None:
                return path, randomness.categorical(rest)
            path.append(children[0])
        return path, randomness.categorical(target[path[-1]])

    return rule


def raised(amount: float):
    """Acceptance probabilities that are raised by an amount."""

    def rule(target, tree, randomness):
        class Generous:
            categorical = randomness.categorical

            def bernoulli(self, p):
                return randomness.bernoulli(min(1.0, p + amount))

        return accept(target, tree, Generous())

    return rule


TEMPTING_MISTAKES = {
    "this is the right rule; the exercise asks for a wrong one": accept,
    "it accepts every draft, and so the greedy tokens change, which a test would notice": (
        accepts_all
    ),
    "it accepts with a probability above 0 where p(x) is 0, so greedy tokens change now and then": (
        raised(0.1)
    ),
    "wrong, and the greedy tokens are right; but drawing from p after a rejection does not accept "
    "more drafts": resamples,
    "it accepts less often than the right rule; raise the probability instead": scaled(0.75),
}

# ---- tasks ---------------------------------------------------------------------------------------

RANGES = {
    "share_seen_greedily": (0, 1), "distance_if_lenient": (0, 1), "runs_needed": (1, 1e7),
    "answers_changed": (0, 4), "results_of_a_row": (1, 16),
}  # fmt: skip
TASKS = [
    replace(NEXT_SCRIPT, package=package_next_script, shows=(every_outcome,)),
    Task(
        name="exact_distribution",
        package=package_exact_distribution,
        solution=exact_distribution,
        judge=Oracle(
            PROGRAMS, run_distribution, lambda case: case.exact, total_variation,
            show_distribution, f"{len(PROGRAMS)} programs, two of which are decoders",
            arguments=lambda case: case.name, diagnose=diagnose_distribution,
        ),
        hints=(
            "A loop that begins with the script [] and ends when next_script returns None. Every "
            "turn makes a new ScriptedRandomness(script) and calls function with it.",
            "After the call, randomness.probability belongs to its result and is added to what the "
            "result has already; randomness.choices is what next_script needs.",
        ),
        mistakes=DISTRIBUTION_MISTAKES,
        shows=(every_outcome, toys.exact_distribution),
    ),
    Task(
        name="accept_certain",
        package=package_accept_certain,
        solution=accept_certain,
        judge=Oracle(
            ROUNDS, run_certain, exact_certain, outcome_distance, show_certain,
            f"every random outcome of {len(ROUNDS)} trees", arguments=describe,
            diagnose=diagnose_certain,
        ),
        hints=(
            "One loop: draw y from the row of the last node of the path, and look for a child of "
            "that node whose token is y.",
            "If there is such a child, append it to the path and draw again; otherwise the answer "
            "is (path, y).",
        ),
        mistakes=CERTAIN_MISTAKES,
        shows=(accept,),
    ),
    Task(
        name="fill_up",
        package=package_fill_up,
        solution=fill_up,
        judge=Oracle(
            FILLED, run_fill_up, right_rows, filled_distance, show_filled,
            f"{len(FILLED)} products of an imaginary machine: 0 bits differ between rows alone and "
            "together", arguments=show_rows, diagnose=diagnose_fill_up,
        ),
        hints=(
            "How many rows are missing? -n % multiple, in Python. rows.new_zeros(missing, d) makes "
            "them, and torch.cat joins.",
            "Give all of them to one call of `product`, and return the first n rows of the result.",
        ),
        mistakes=FILL_MISTAKES,
        shows=(bitwise.SteadyLinear.forward,),
    ),
    Task(
        name="attend_in_blocks",
        package=package_attend_in_blocks,
        solution=attend_in_blocks,
        judge=Oracle(
            CHAINS, run_attend, right_attention, attended_distance, show_attended,
            f"{len(CHAINS)} chains on an imaginary machine: 0 bits differ between rows alone and "
            "together", tolerance=ATTENTION_ERROR, arguments=show_chain, diagnose=diagnose_attend,
        ),
        hints=(
            f"First append zeros until there are whole blocks: keys.split({BLOCK}) lists them. "
            "product(queries, block.T) are the scores of a block; join them, and set those of "
            "slots that a query does not see to -inf.",
            f"softmax(-1) over all slots, and split({BLOCK}, -1): each part belongs to a block of "
            "values. Add product(part, block), one block after the other, from the first on.",
        ),
        mistakes=ATTEND_MISTAKES,
        shows=(bitwise.attend_in_order,),
    ),
    Task(
        name="tempting_accept",
        package=mutants.lenient,
        solution=tempting_accept,
        judge=Oracle(
            ["speculative decoding with one draft"], run_tempting, lambda case: Wanted(),
            tempting_distance, show_tempting,
            f"wrong by {AT_LEAST} or more, greedy tokens unchanged, more drafts accepted",
            arguments=lambda case: case,
            diagnose=lambda results: results[0][1].lacks if results else None,
        ),
        hints=(
            "In greedy decoding a ratio is 0 or 1. What can be done to a probability that changes "
            "neither?",
            "Call accept with a randomness of your own, a class with `bernoulli` and `categorical` "
            "that passes both to the given one, and raise p on the way.",
        ),
        mistakes=TEMPTING_MISTAKES,
        shows=(mutants.Lenient,),
    ),
]  # fmt: skip

# ---- the quiz ------------------------------------------------------------------------------------

QUIZ = [
    Question(
        "A rule accepts x with probability min(1, 1.25 · p(x) / q(x)). Is its greedy text right?",
        True,
        "if p is one-hot, the probability is 0 or 1 with and without the factor, so a greedy test "
        "cannot see it.",
    ),
    Question(
        "A decoder of a toy with three tokens writes texts of four tokens at temperature 1. How "
        "many runs does the enumeration of plain decoding have?",
        81,
        "each token is one draw with three options, and 3 · 3 · 3 · 3 = 81.",
    ),
    Question(
        "About 3 thousand sampled texts reveal a distance of 0.04. How many thousand does a "
        "distance of 0.004 take?",
        300,
        "the number grows with 1 / distance², so a tenth of the distance takes a hundred times as "
        "many.",
    ),
    Question(
        "Two greedy runs in bfloat16 differ from token 13 on. The gap there is 0.1, and rounding "
        "can reverse 0.6. What does this show?",
        "c",
        "rounding and a bug can both explain such a gap, so compare in float32 or float64.",
        (
            "a bug, because greedy decoding has one right text",
            "that both decoders are lossless",
            "neither a bug nor that there is none",
        ),
    ),
    Question(
        "Each draft is the head's most likely token and is accepted with p(x) / q(x), where q is "
        "the head's softmax. Which tokens appear too often?",
        "a",
        "x is accepted more often than with p(x), since q(x) is below 1.",
        ("the head's favourites", "those that the head thinks unlikely", "none"),
    ),
]
