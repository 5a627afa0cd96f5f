"""Lesson 05: Jacobi iteration, and the pool of lookahead decoding."""

import random
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial

from form import Oracle, Task, Wrong

from solutions.pure import call, differ

# ---- solutions -----------------------------------------------------------------------------------


def jacobi(choices, guess):
    rows = [list(guess)]
    while True:
        new = choices(rows[-1])[: len(guess)]
        if new == rows[-1]:
            return rows
        rows.append(new)


def add(pool, gram, limit):
    rest = gram[1:]
    known = pool.setdefault(gram[0], [])
    if rest in known:
        known.remove(rest)
    known.append(rest)
    if len(known) > limit:
        known.pop(0)


def lookup(pool, token):
    known = pool.get(token, [])
    latest_first = known[::-1]
    return [list(rest) for rest in latest_first]


# ---- jacobi --------------------------------------------------------------------------------------

V = 6  # tokens


@dataclass(frozen=True)
class Block:
    """A text and a guess at the tokens after it. The model's choice is a random function of the
    last `memory` tokens."""

    seed: int
    memory: int
    text: tuple[int, ...]
    guess: tuple[int, ...]

    def choice(self, text: tuple[int, ...]) -> int:
        """The model's choice after a text."""
        last = text[len(text) - self.memory :] if self.memory else ()
        return random.Random(repr((self.seed, last))).randrange(V)

    def choices(self, guess: list[int]) -> list[int]:
        """One pass: the model's choice in the place of each guess, and the one after the last."""
        return [self.choice((*self.text, *guess[:i])) for i in range(len(guess) + 1)]


def random_block(seed: int) -> Block:
    rng, m = random.Random(seed), (3, 1, 5, 8, 2, 7)[seed % 6]
    text = tuple(rng.choices(range(V), k=3))
    block = Block(seed, (2, 1, 0, 3, 9)[seed % 5], text, tuple(rng.choices(range(V), k=m)))
    if seed % 7 != 6:
        return block
    return Block(seed, block.memory, text, tuple(plain_decoding(block)))  # right from the start


def plain_decoding(case: Block) -> list[int]:
    """One pass for each token."""
    tokens = list(case.text)
    for _ in case.guess:
        tokens.append(case.choice(tuple(tokens)))
    return tokens[len(case.text) :]


BLOCKS = [random_block(seed) for seed in range(40)]


@dataclass(frozen=True)
class Iteration:
    """The rows that an answer returns, and its passes."""

    rows: tuple[tuple[int, ...], ...]
    passes: int


def run_jacobi(function, case: Block) -> Iteration:
    m, passes = len(case.guess), 0

    def choices(given):
        nonlocal passes
        passes += 1
        if len(given) != m:
            raise Wrong(f"`choices` gets {len(given)} guesses instead of {m}; it returns one "
                        "choice more than guesses; drop the last one")  # fmt: skip
        if passes > m * (m + 1):
            raise Wrong(f"it runs more than {m * (m + 1)} passes for {m} places; m passes settle m "
                        "places, and one more changes nothing")  # fmt: skip
        return case.choices(list(given))

    rows = call(partial(function, choices), guess=list(case.guess))
    if not isinstance(rows, list) or not all(isinstance(row, list | tuple) for row in rows):
        raise Wrong("it must return a list of rows, each a list of tokens")
    if len(rows) > 1 and any(a is b for i, a in enumerate(rows) for b in rows[:i]):
        raise Wrong("its rows are one and the same list, changed in place; append a new one")
    return Iteration(tuple(map(tuple, rows)), passes)


@cache
def exact_iteration(case: Block) -> Iteration:
    """Each token of each row from a pass of its own. The last row must be plain decoding's."""
    rows = [case.guess]
    while rows[-1] != tuple(plain_decoding(case)):
        now = range(len(case.guess))
        rows.append(tuple(case.choice(case.text + rows[-1][:i]) for i in now))
    return Iteration(tuple(rows), len(rows))


def iteration_distance(a: Iteration, b: Iteration) -> float:
    """Fewer passes for the same rows are not a fault."""
    return float(a.rows != b.rows or a.passes > b.passes)


def diagnose_jacobi(results: list[tuple[Block, Iteration, Iteration]]) -> str | None:
    if all(got.rows == expected.rows for _, got, expected in results):
        return "the rows are right, but it runs more passes than necessary"
    return None


def show_block(case: Block) -> str:
    first = case.choices(list(case.guess))
    return f"guess = {list(case.guess)}, for which choices returns {first}"


def show_iteration(case: Block, got: Iteration, expected: Iteration) -> str:
    if got.rows != expected.rows:
        a, b = ([list(row) for row in rows] for rows in (got.rows, expected.rows))
        return f"{show_block(case)}: it returns {a}; {b} is right"
    return f"{show_block(case)}: the rows are right, but it runs {got.passes} passes instead of " \
           f"{expected.passes}"  # fmt: skip


def one_at_a_time(choices, guess):
    """Gauss-Seidel: each place already uses the new tokens before it."""
    rows = [list(guess)]
    for i in range(len(guess)):
        row = list(rows[-1])
        row[i] = choices(row)[i]
        rows.append(row)
    return rows


def first_wrong_only(choices, guess):
    rows = [list(guess)]
    while True:
        row, new = rows[-1], choices(rows[-1])
        wrong = [i for i in range(len(guess)) if row[i] != new[i]]
        if not wrong:
            return rows
        rows.append([*row[: wrong[0]], new[wrong[0]], *row[wrong[0] + 1 :]])


def one_late(choices, guess):
    rows = [list(guess)]
    while True:
        new = choices(rows[-1])[1:]
        if new == rows[-1]:
            return rows
        rows.append(new)


def until(stop):
    """The iteration, ended by stop(old, new), after which the new row is not added."""

    def wrong(choices, guess):
        rows = [list(guess)]
        while True:
            new = choices(rows[-1])[:-1]
            if stop(rows[-1], new):
                return rows
            rows.append(new)

    return wrong


def always_from_the_guess(choices, guess):
    rows = [list(guess)]
    while True:
        new = choices(list(guess))[:-1]
        if new == rows[-1]:
            return rows
        rows.append(new)


def keeps_the_repeated_row(choices, guess):
    rows = jacobi(choices, guess)
    return [*rows, list(rows[-1])]


def always_m_passes(choices, guess):
    rows = [list(guess)]
    for _ in guess:
        rows.append(choices(rows[-1])[:-1])
    return rows


def in_place(choices, guess):
    rows, row = [], list(guess)
    while True:
        rows.append(row)
        new = choices(row)[:-1]
        if new == row:
            return rows
        row[:] = new


def with_the_last_choice(choices, guess):
    rows = [list(guess)]
    while True:
        new = choices(rows[-1])
        if new == rows[-1]:
            return rows
        rows.append(new)


JACOBI_MISTAKES = {
    "it replaces one place per pass, so each already uses the new tokens before it. That is plain "
    "decoding, one pass per token; take all places from the same pass": one_at_a_time,
    "it replaces only the first wrong guess of a pass; replace all of them": first_wrong_only,
    "it takes choices[i + 1], the choice after guess i; the one in its place is choices[i]": (
        one_late
    ),
    "`choices` returns one choice more than guesses; drop the last one, it is in nobody's place": (
        with_the_last_choice
    ),
    "it stops after one pass; go on until a pass changes nothing": lambda choices, guess: [
        list(guess),
        choices(list(guess))[:-1],
    ],
    "every pass starts from the guess; it must start from the last row": always_from_the_guess,
    "it stops when the first place stays as it is, but later places may still change": until(
        lambda old, new: old[0] == new[0]
    ),
    "it stops when the last place stays as it is, but earlier places may still change": until(
        lambda old, new: old[-1] == new[-1]
    ),
    "its last two rows are equal; a pass that changes nothing adds no row": keeps_the_repeated_row,
    "it always runs as many passes as there are places, and does not notice that nothing changes": (
        always_m_passes
    ),
    "it returns only the passes' rows; the first row is the guess": lambda choices, guess: jacobi(
        choices, guess
    )[1:],
    "its rows are one and the same list, changed in place; append a new one": in_place,
}

# ---- add -----------------------------------------------------------------------------------------

Pool = dict[int, list[tuple[int, ...]]]


@dataclass(frozen=True)
class Additions:
    """N-grams that are added one after the other."""

    limit: int
    grams: tuple[tuple[int, ...], ...]


def random_additions(seed: int) -> Additions:
    rng = random.Random(seed)
    n, size = rng.randint(2, 4), rng.randint(1, 14)
    grams = tuple(tuple(rng.choices(range(3), k=n)) for _ in range(size))
    return Additions((2, 1, 3, 4)[seed % 4], grams)


ADDITIONS = [
    Additions(2, ((1, 2), (1, 3), (1, 2), (1, 4))),
    Additions(2, ((1, 2, 5), (1, 3, 5), (4, 2, 5), (1, 6, 5))),
    *map(random_additions, range(40)),
]


def state(pool: Pool) -> dict[int, tuple]:
    return {token: tuple(known) for token, known in pool.items() if len(known)}


def run_add(function, case: Additions) -> list[dict[int, tuple]]:
    """The pool after each addition."""
    pool, states = {}, []
    for gram in case.grams:
        function(pool, gram, case.limit)
        if any(type(token) is not int for token in pool):
            raise Wrong("a key of the pool is not a token; it must be gram[0]")
        if not all(isinstance(known, list) for known in pool.values()):
            kinds = {type(known).__name__ for known in pool.values()} - {"list"}
            raise Wrong(f"pool[token] is a {min(kinds)}; it must be a list of tuples")
        if not all(isinstance(rest, tuple) for known in pool.values() for rest in known):
            raise Wrong("what it adds to a list is not a tuple; add gram[1:]")
        states.append(state(pool))
    return states


def exact_states(case: Additions) -> list[dict[int, tuple]]:
    """From the definition: the continuations of each token, by their last occurrence."""
    states = []
    for end in range(1, len(case.grams) + 1):
        added, pool = case.grams[:end], {}
        for token in {gram[0] for gram in added}:
            last = {gram[1:]: i for i, gram in enumerate(added) if gram[0] == token}
            pool[token] = tuple(sorted(last, key=last.get)[-case.limit :])
        states.append(pool)
    return states


def show_additions(case: Additions) -> str:
    return f"limit = {case.limit}, after adding {', '.join(map(str, case.grams))}"


def show_states(case: Additions, got: list, expected: list) -> str:
    pairs = enumerate(zip(got, expected), 1)
    end = next((i for i, (a, b) in pairs if a != b), len(expected))
    token = case.grams[end - 1][0]
    wrong = [t for t in sorted({*got[end - 1], *expected[end - 1]})
             if got[end - 1].get(t) != expected[end - 1].get(t)]  # fmt: skip
    token = wrong[0] if wrong else token
    a, b = (list(states[end - 1].get(token, ())) for states in (got, expected))
    return f"{show_additions(Additions(case.limit, case.grams[:end]))}: pool[{token}] is {a}; " \
           f"{b} is right"  # fmt: skip


def never_refreshed(pool, gram, limit):
    known = pool.setdefault(gram[0], [])
    if gram[1:] not in known:
        known.append(gram[1:])
        del known[:-limit]


def duplicates(pool, gram, limit):
    known = pool.setdefault(gram[0], [])
    known.append(gram[1:])
    del known[:-limit]


def keeps_the_oldest(pool, gram, limit):
    known = pool.setdefault(gram[0], [])
    if gram[1:] in known:
        known.remove(gram[1:])
    if len(known) < limit:
        known.append(gram[1:])


def drops_the_latest(pool, gram, limit):
    known = pool.setdefault(gram[0], [])
    if gram[1:] in known:
        known.remove(gram[1:])
    elif len(known) == limit:
        known.pop()
    known.append(gram[1:])


def newest_at_the_front(pool, gram, limit):
    known = pool.setdefault(gram[0], [])
    if gram[1:] in known:
        known.remove(gram[1:])
    known.insert(0, gram[1:])
    del known[limit:]


def makes_room_first(pool, gram, limit):
    """A repeated continuation costs another one its place."""
    known = pool.setdefault(gram[0], [])
    if len(known) == limit:
        known.pop(0)
    if gram[1:] in known:
        known.remove(gram[1:])
    known.append(gram[1:])


def one_limit_for_all(pool, gram, limit):
    add(pool, gram, limit)
    while sum(map(len, pool.values())) > limit:
        token = next(token for token, known in pool.items() if known)
        pool[token].pop(0)


def leaves_the_pool(pool, gram, limit):
    pool = {**pool}
    add(pool, gram, limit)


def loses_the_first(pool, gram, limit):
    if gram[0] in pool:
        add(pool, gram, limit)
    else:
        pool[gram[0]] = []


def with_the_first_token(pool, gram, limit):
    known = pool.setdefault(gram[0], [])
    if gram in known:
        known.remove(gram)
    known.append(gram)
    del known[:-limit]


ADD_MISTAKES = {
    "a continuation that is seen again keeps its old place; move it to the end": never_refreshed,
    "a continuation that is seen again is stored twice; remove the earlier one": duplicates,
    "it never drops anything; more than `limit` continuations of a token remain": (
        lambda pool, gram, limit: add(pool, gram, 10**6)
    ),
    "if a list is full, it does not add the new one; drop the oldest instead": keeps_the_oldest,
    "if a list is full, it drops the latest; drop the first of the list": drops_the_latest,
    "it keeps one too many: drop if there are more than `limit`": (
        lambda pool, gram, limit: add(pool, gram, limit + 1)
    ),
    "it keeps one too few: drop only if there are more than `limit`": (
        lambda pool, gram, limit: add(pool, gram, limit - 1)
    ),
    "it puts new ones in front; the latest comes last": newest_at_the_front,
    "it drops the oldest before it removes the earlier copy, so a repeated continuation costs "
    "another its place": makes_room_first,
    "`limit` holds for each first token, not for the whole pool": one_limit_for_all,
    "the pool has not changed: use its methods or assign to pool[…]; `pool = …` names another": (
        leaves_the_pool
    ),
    "it files the n-gram under its last token; the key is gram[0]": (
        lambda pool, gram, limit: add(pool, (gram[-1], *gram[:-1]), limit)
    ),
    "the first continuation of a token is lost": loses_the_first,
    "it stores only the next token; store all of gram[1:]": (
        lambda pool, gram, limit: add(pool, gram[:2], limit)
    ),
    "it stores the whole n-gram; the first token is the key, so store gram[1:]": (
        with_the_first_token
    ),
}

# ---- lookup --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lookup:
    """A pool, and the token that is looked up in it."""

    items: tuple[tuple[int, tuple], ...]
    token: int

    @property
    def pool(self) -> Pool:
        return {token: list(known) for token, known in self.items}


def random_lookup(seed: int) -> Lookup:
    rng = random.Random(seed)
    n, pool = rng.randint(1, 3), {}
    for token in rng.sample(range(6), rng.randint(0, 4)):
        tuples = {tuple(rng.choices(range(4), k=n)): None for _ in range(rng.randint(1, 4))}
        pool[token] = tuple(tuples)
    return Lookup(tuple(pool.items()), rng.randrange(6))


LOOKUPS = [Lookup(((7, ((4, 5), (4, 6), (2, 3))), (4, ((1, 1),))), 7),
           *map(random_lookup, range(40))]  # fmt: skip


def run_lookup(function, case: Lookup) -> list[list[int]]:
    pool = case.pool
    guesses = function(pool, case.token)
    if not isinstance(guesses, list):
        raise Wrong(f"it returns a {type(guesses).__name__}; it must be a list of guesses")
    if pool != case.pool:
        raise Wrong("it changes the pool")
    answer = deepcopy(guesses)
    if any(guesses is known for known in pool.values()):
        raise Wrong("it returns the pool's own list; if the caller changes it, the pool changes")
    if not all(isinstance(guess, list) for guess in guesses):
        raise Wrong("a guess must be a list, which the caller may change; use list(rest)")
    return answer


def exact_guesses(case: Lookup) -> list[list[int]]:
    """From the definition."""
    known = dict(case.items).get(case.token, ())
    return [[*known[len(known) - 1 - i]] for i in range(len(known))]


def show_lookup(case: Lookup) -> str:
    return f"pool = {case.pool}, token = {case.token}"


def adds_an_entry(pool, token):
    return [list(rest) for rest in pool.setdefault(token, [])[::-1]]


LOOKUP_MISTAKES = {
    "the oldest comes first; return the latest first": lambda pool, token: [
        list(rest) for rest in pool.get(token, [])
    ],
    "it returns the pool's own list; if the caller changes it, the pool changes": (
        lambda pool, token: pool.get(token, [])
    ),
    "a guess must be a list, which the caller may change; use list(rest)": lambda pool, token: (
        pool.get(token, [])[::-1]
    ),
    "the pool need not know the token: return [] then, not a KeyError": lambda pool, token: [
        list(rest) for rest in pool[token][::-1]
    ],
    "it changes the pool": adds_an_entry,
    "it returns only the latest continuation; return all of them": lambda pool, token: [
        list(rest) for rest in pool.get(token, [])[-1:]
    ],
    "the tokens of each guess are reversed; reverse only the list of guesses": lambda pool, token: [
        list(rest[::-1]) for rest in pool.get(token, [])[::-1]
    ],
    "its guesses start with the token itself, which is in the text already": lambda pool, token: [
        [token, *rest] for rest in pool.get(token, [])[::-1]
    ],
}

# ---- tasks ---------------------------------------------------------------------------------------

JACOBI = Task(
    name="jacobi",
    solution=jacobi,
    judge=Oracle(
        BLOCKS, run_jacobi, exact_iteration, iteration_distance, show_iteration,
        f"{len(BLOCKS)} blocks, each row from fresh passes",
        arguments=show_block, diagnose=diagnose_jacobi,
    ),
    hints=(
        "In the loop, `new` is choices(the last row) without its last element. It replaces the "
        "whole row at once.",
        "If `new` equals the last row, return the rows. Otherwise append it and go on.",
    ),
    mistakes=JACOBI_MISTAKES,
)  # fmt: skip
ADD = Task(
    name="add",
    solution=add,
    judge=Oracle(
        ADDITIONS, run_add, exact_states, differ, show_states,
        f"{len(ADDITIONS)} pools, after every addition", arguments=show_additions,
    ),
    hints=(
        "pool.setdefault(gram[0], []) returns the token's list, and adds one if needed.",
        "Remove gram[1:] from the list if it is there, then append it. Only then look at the "
        "length.",
    ),
    mistakes=ADD_MISTAKES,
)  # fmt: skip
LOOKUP = Task(
    name="lookup",
    solution=lookup,
    judge=Oracle(
        LOOKUPS, run_lookup, exact_guesses, differ,
        lambda case, got, expected: (
            f"{show_lookup(case)}: it returns {got}; {expected} is right"
        ),
        f"{len(LOOKUPS)} pools", arguments=show_lookup,
    ),
    hints=(
        "pool.get(token, []) is an empty list if the pool does not know the token.",
        "known[::-1] is a reversed copy of a list; list(rest) makes a list of a tuple.",
    ),
    mistakes=LOOKUP_MISTAKES,
)  # fmt: skip
TASKS = [JACOBI, ADD, LOOKUP]
