"""Lesson 05: see pure_05.py for its tasks."""

from dataclasses import replace

from form import Question

from minispec.methods import lookahead as methods
from solutions.pure_05 import ADD, JACOBI, LOOKUP

# ---- the package's functions, with the lesson's arguments ----------------------------------------


def package_jacobi(choices, guess):
    """The package decodes on and on, and lets accepted tokens leave the block. This is the bare
    iteration."""
    rows, new = [], list(guess)
    while not rows or new != rows[-1]:
        rows.append(new)
        new = choices(list(new))[:-1]
    return rows


def pool_of(pool: dict, limit: int) -> methods.Pool:
    """The package's pool with the content of the lesson's."""
    ours = methods.Pool(limit)
    for token, known in pool.items():
        ours.continuations[token] = dict.fromkeys(known)
    return ours


def package_add(pool, gram, limit):
    ours = pool_of(pool, limit)
    ours.add(gram)
    pool[gram[0]] = list(ours.continuations[gram[0]])


def package_lookup(pool, token):
    return pool_of(pool, 1).after(token)


# ---- tasks ---------------------------------------------------------------------------------------

RANGES = {
    "passes_for_12": (1, 12), "tokens_at_16": (1, 4), "free_rows_here": (1, 10_000),
    "free_rows_h100": (1, 10_000),
}  # fmt: skip
TASKS = [
    replace(JACOBI, package=package_jacobi, shows=(methods.jacobi,)),
    replace(ADD, package=package_add, shows=(methods.Pool,)),
    replace(LOOKUP, package=package_lookup, shows=(methods.Pool,)),
]  # fmt: skip

# ---- the quiz ------------------------------------------------------------------------------------

QUIZ = [
    Question(
        "Twelve places are filled with arbitrary tokens. After how many passes of Jacobi decoding, "
        "at most, are all of them those of greedy decoding?",
        12,
        "each pass settles at least one more place, since its choice depends on settled tokens "
        "only.",
    ),
    Question(
        "Does Jacobi decoding end with the same text, whatever the first guess is?",
        True,
        "a row that a pass leaves as it is solves all equations, and the greedy text is their only "
        "solution.",
    ),
    Question(
        "What would change in lookahead decoding if the window could attend to the guesses?",
        "b",
        "guesses are judged by their own rows, which do not see the window, so only the n-grams of "
        "later passes would change.",
        (
            "the text that comes out",
            "perhaps the speed, but not the text",
            "nothing at all",
        ),
    ),
    Question(
        "A setting needs 50 rows per pass and yields 1.25 tokens per pass. With more than how many "
        "free rows does it pay?",
        40,
        "with R / T = 50 / 1.25 free rows, a pass costs as many plain passes as it yields tokens.",
    ),
    Question(
        "A machine has 300 free rows with a model of one billion weights. How many does it have "
        "with one of eight billion, stored in the same type?",
        300,
        "the bytes to read and the operations per row both grow with the weights, which cancel.",
    ),
]
