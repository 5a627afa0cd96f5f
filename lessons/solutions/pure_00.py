"""Lesson 00, what needs no torch: the acceptance of a chain of guesses in greedy decoding."""

import random
from dataclasses import dataclass

from form import Oracle, Task, Wrong

from solutions.pure import call, differ

# ---- solution ------------------------------------------------------------------------------------


def accept(guess, choices):
    n = 0
    while n < len(guess) and guess[n] == choices[n]:
        n += 1
    return n, choices[n]


# ---- cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """A round: the number of a model, the text so far, and a guess at the tokens after it."""

    model: int
    text: tuple[int, ...]
    guess: tuple[int, ...]


def choice(model: int, text: tuple[int, ...]) -> int:
    """A model's choice after a text, a random function of all its tokens."""
    return random.Random(repr((model, text))).randrange(9)


def plain_decoding(model: int, text: tuple[int, ...], n: int) -> list[int]:
    tokens = list(text)
    for _ in range(n):
        tokens.append(choice(model, tuple(tokens)))
    return tokens[len(text) :]


def choices_of(case: Round) -> tuple[int, ...]:
    """The model's choices after the text and after each guess, as a pass returns them."""
    ends = range(len(case.guess) + 1)
    return tuple(choice(case.model, (*case.text, *case.guess[:end])) for end in ends)


def random_round(seed: int) -> Round:
    """A round with up to five guesses, most of which are right."""
    rng, model = random.Random(seed), seed % 7
    text = tuple(rng.choices(range(9), k=3))
    guess: list[int] = []
    for _ in range((2, 0, 1, 3, 4, 5)[seed % 6]):
        right = choice(model, (*text, *guess))
        guess.append(right if rng.random() < 0.7 else rng.randrange(9))
    return Round(model, text, tuple(guess))


ROUNDS = [random_round(seed) for seed in range(60)]


def run_accept(function, case: Round) -> tuple[int, int]:
    try:
        answer = call(function, guess=list(case.guess), choices=list(choices_of(case)))
    except IndexError:
        if case.guess != choices_of(case)[:-1]:
            raise
        raise Wrong("IndexError where all guesses are right: there is no guess[len(guess)], and "
                    "the last choice is choices[len(guess)]") from None  # fmt: skip
    if answer is None and case.guess and case.guess == choices_of(case)[:-1]:
        raise Wrong("it returns None where all guesses are right: then the loop ends without a "
                    "return; accept all of them, and add the last choice")  # fmt: skip
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Wrong("it must return two numbers: how many guesses are accepted, and a fresh token")
    if not all(type(number) is int for number in answer):
        raise Wrong(f"it returns {answer}; both must be of type int")
    return tuple(answer)


def exact_outcome(case: Round) -> tuple[int, int]:
    """How far the guess agrees with plain decoding, and the token that this writes next."""
    plain = plain_decoding(case.model, case.text, len(case.guess) + 1)
    pairs = enumerate(zip(case.guess, plain))
    n = next((i for i, (a, b) in pairs if a != b), len(case.guess))
    return n, plain[n]


def show_arguments(case: Round) -> str:
    return f"guess {list(case.guess)}, choices {list(choices_of(case))}"


def show_accept(case: Round, got: tuple[int, int], expected: tuple[int, int]) -> str:
    plain = plain_decoding(case.model, case.text, len(case.guess) + 1)
    return f"{show_arguments(case)}: it returns {got}; plain decoding writes " \
           f"{plain[: expected[0] + 1]} here, so {expected} is right"  # fmt: skip


def diagnose_accept(results: list[tuple]) -> str | None:
    """Say so if only rounds are wrong in which all guesses are right, or only fresh tokens."""
    wrong = [case for case, got, expected in results if got != expected]
    if all(case.guess == choices_of(case)[:-1] for case in wrong):
        return "it errs only if all guesses are right: accept all of them, and add the last choice"
    if all(got[0] == expected[0] for _, got, expected in results):
        return "n is right, but not the fresh token: after n accepted guesses it is choices[n]"
    return None


# ---- its mistakes --------------------------------------------------------------------------------


def leading(guess, choices):
    """The number of leading equal pairs."""
    return accept(guess, [*choices, -1])[0] if guess else 0


def one_late(guess, choices):
    n = leading(guess, choices[1:])
    return n, choices[n]


def keeps_counting(guess, choices):
    n = sum(a == b for a, b in zip(guess, choices))
    return n, choices[n]


def rejected_guess(guess, choices):
    n, fresh = accept(guess, choices)
    return n, guess[n] if n < len(guess) else fresh


def no_bonus(guess, choices):
    n = min(accept(guess, choices)[0], max(0, len(guess) - 1))
    return n, choices[n]


def keeps_the_index(guess, choices):
    for i in range(len(guess)):
        if guess[i] != choices[i]:
            break
    return i, choices[i]


def counts_and_keeps_the_index(guess, choices):
    n = 0
    for i in range(len(guess)):
        if guess[i] != choices[i]:
            break
        n += 1
    return n, choices[i]


def returns_only_in_the_loop(guess, choices):
    for i in range(len(guess)):
        if guess[i] != choices[i]:
            return i, choices[i]


def all_or_nothing(guess, choices):
    n = len(guess) if list(guess) == list(choices[: len(guess)]) else 0
    return n, choices[n]


def counts_the_fresh_token(guess, choices):
    n, fresh = accept(guess, choices)
    return n + 1, fresh


def counts_the_rejected(fresh_of):
    """A mistake in n, with fresh_of(choices, right n, wrong n)."""

    def wrong(guess, choices):
        right = leading(guess, choices)
        n = min(right + 1, len(guess))
        return n, fresh_of(choices, right, n)

    return wrong


MISTAKES = {
    "it compares guess[i] with choices[i + 1], the model's choice after the guess; the one in the "
    "guess's place is choices[i]": one_late,
    "it counts guesses after the first wrong one. They follow a token that is not in the text, so "
    "stop there": keeps_counting,
    "the fresh token is the guess that was rejected; it must be the model's own choice": (
        rejected_guess
    ),
    "if all guesses are right, the last one is not accepted. Accept it, and add the choice after "
    "it": no_bonus,
    "if all guesses are right, the loop ends with the index of the last one, but n is one more; "
    "without guesses there is no index": keeps_the_index,
    "if all guesses are right, the fresh token is choices[n - 1], which repeats the last guess; it "
    "must be choices[n], even without guesses": counts_and_keeps_the_index,
    "it returns None if all guesses are right, or if there are none: then the loop ends without a "
    "return": returns_only_in_the_loop,
    "the fresh token is one too early: after n accepted guesses it is choices[n]": (
        lambda guess, choices: (n := accept(guess, choices)[0], choices[n - 1])
    ),
    "the fresh token is always the model's last choice; it must be the choice after the last "
    "accepted guess": lambda guess, choices: (accept(guess, choices)[0], choices[-1]),
    "the fresh token is one too far: after n accepted guesses it is choices[n]": (
        lambda guess, choices: (n := accept(guess, choices)[0], choices[n + 1])
    ),
    "it accepts all guesses or none; accept the right ones before the first wrong one": (
        all_or_nothing
    ),
    "it accepts every guess, right or wrong": lambda guess, choices: (len(guess), choices[-1]),
    "the number counts the fresh token; count accepted guesses only": counts_the_fresh_token,
    "n counts the first wrong guess, too; compare a guess before you count it": (
        counts_the_rejected(lambda choices, right, n: choices[right]),
        counts_the_rejected(lambda choices, right, n: choices[n]),
        counts_the_rejected(lambda choices, right, n: choices[n - 1]),
    ),
}  # fmt: skip

# ---- tasks ---------------------------------------------------------------------------------------

ACCEPT = Task(
    name="accept",
    solution=accept,
    judge=Oracle(
        ROUNDS, run_accept, exact_outcome, differ, show_accept,
        f"{len(ROUNDS)} rounds give the tokens of plain decoding",
        arguments=show_arguments, diagnose=diagnose_accept,
    ),
    hints=(
        "Compare guess[0] with choices[0], then guess[1] with choices[1], until two differ or "
        "the guess ends.",
        "If n guesses are accepted, the fresh token is choices[n]. This holds for n = 0 and "
        "for n = len(guess), too.",
    ),
    mistakes=MISTAKES,
)  # fmt: skip
TASKS = [ACCEPT]
