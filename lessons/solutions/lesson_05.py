"""Lesson 05: a drafter of n-grams and Jacobi's choices; for its other tasks, see pure_05.py."""

from collections import Counter
from dataclasses import replace

from form import Question, Task

from minispec.methods import lookahead as methods
from minispec.tree import Tree
from solutions import engine
from solutions.pure_05 import ADD, JACOBI, LOOKUP, add, lookup

# ---- solution ------------------------------------------------------------------------------------


def draft_itself(model, text, probs, randomness):
    pool, guess = {}, text[:4]

    def propose(text, hidden, path):
        nonlocal guess
        choices = model.logits(hidden[len(path) :]).argmax(-1).tolist()
        guess = (choices + guess[len(choices) :])[:4]
        for end in range(max(4, len(text) - len(path) + 1), len(text) + 1):
            add(pool, tuple(text[end - 4 : end]), 3)
        return Tree.merged(text[-1], lookup(pool, text[-1]) or [guess])

    return propose


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


def package_draft_itself(model, text, probs, randomness):
    pool, block = methods.Pool(3), [list(text[:4])]

    def propose(text, hidden, path):
        (old,) = block
        found = model.logits(hidden)[len(path) :].argmax(-1).tolist()
        block[0] = [*found, *old[len(found) :]][:4]
        pool.add_all(text, 4, max(1, len(path)))
        return Tree.merged(text[-1], pool.after(text[-1]) or block)

    return propose


# ---- draft_itself --------------------------------------------------------------------------------

DRAFTINGS = [
    engine.Drafting(False, text, ends)
    for text, ends in (
        ((1, 2, 0, 2), (3, 4)), ((2, 0, 0, 1, 2, 1), (2, 5, 6)), ((1, 2, 0, 0, 1), (1, 2, 5)),
        ((0, 1, 2, 2, 0, 1, 1, 0, 2, 1, 0, 1, 2), (6, 7, 9, 12, 13)),
        ((2, 2, 1, 0, 0, 2, 1, 1, 2, 0, 2), (5, 6, 7, 8, 9, 10, 11)),
    )
]  # fmt: skip


def right_guesses(case) -> Counter:
    """Each choice from a pass of its own, and the pool anew from the whole text."""
    model, guess, found = engine.checkpoint(case.head), list(case.text[: case.ends[0]])[:4], []
    for end in case.ends:
        text, choices = list(case.text[:end]), []
        for i in range(len(engine.REJECTED) + 1):
            row = model.logits(model(text + engine.REJECTED[:i]))[0, -1]
            choices.append(int(row.argmax()))
        guess = (choices + guess[len(choices) :])[:4]
        grams = [text[i : i + 4] for i in range(end - 3)]
        known = [gram[1:] for gram in grams[::-1] if gram[0] == text[-1]]
        latest = [gram for i, gram in enumerate(known) if gram not in known[:i]][:3]
        found.append(engine.comparable(Tree.merged(text[-1], latest or [guess])))
    return Counter({tuple(found): 1.0})


DRAFT_MISTAKES = {
    "n-grams of earlier rounds are missing: make the pool once, outside of `propose`": (
        engine.altered(draft_itself, (
            "        nonlocal guess\n", "        nonlocal guess\n        pool = {}\n"
        ))
    ),
    "it guesses even if the pool knows the token; the n-grams come first": engine.altered(
        draft_itself, ("lookup(pool, text[-1]) or [guess]", "[*lookup(pool, text[-1]), guess]")
    ),
    "its guess begins with the choices after the kept rows; those are in the text already": (
        engine.altered(draft_itself, ("hidden[len(path) :]", "hidden"))
    ),
    "the guess has lost its old tokens where no choice is new; keep those at the end": (
        engine.altered(draft_itself, ("(choices + guess[len(choices) :])[:4]", "choices[:4]"))
    ),
    "it takes 3-grams into the pool; 4 tokens are one to look up and three to guess": (
        engine.altered(draft_itself, ("text[end - 4 : end]", "text[end - 3 : end]"))
    ),
}  # fmt: skip

# ---- tasks ---------------------------------------------------------------------------------------

RANGES = {
    "passes_for_12": (1, 12), "tokens_at_16": (1, 4), "free_rows_here": (1, 10_000),
    "free_rows_h100": (1, 10_000),
}  # fmt: skip
TASKS = [
    replace(JACOBI, package=package_jacobi, shows=(methods.jacobi,)),
    replace(ADD, package=package_add, shows=(methods.Pool,)),
    replace(LOOKUP, package=package_lookup, shows=(methods.Pool,)),
    Task(
        name="draft_itself",
        package=package_draft_itself,
        solution=draft_itself,
        judge=engine.drafters(DRAFTINGS, right_guesses, f"{len(DRAFTINGS)} texts"),
        hints=(
            "The new tokens are text[-len(path):]. Add the 4-grams that end with one of them: end "
            "runs from max(4, len(text) - len(path) + 1) to len(text).",
            "choices = model.logits(hidden[len(path):]).argmax(-1).tolist(); the guess is the "
            "choices and then what the old guess has beyond them. `nonlocal guess` lets `propose` "
            "replace it.",
        ),
        mistakes=DRAFT_MISTAKES,
        shows=(methods.jacobi,),
    ),
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
