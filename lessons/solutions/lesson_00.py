"""Lesson 00: the acceptance of a chain of guesses in greedy decoding, and a decoder."""

import atexit
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from form import Oracle, Question, Task, Wrong

from minispec import load, verify
from minispec.certify.functions.toy_checkpoints import write_checkpoint
from minispec.certify.toys import Toy
from minispec.generate import decode
from minispec.sampling import OneHot, Seeded
from minispec.tree import Tree
from solutions.common import call, differ

# ---- solutions -----------------------------------------------------------------------------------


def accept(guess, choices):
    n = 0
    while n < len(guess) and guess[n] == choices[n]:
        n += 1
    return n, choices[n]


def greedy(checkpoint, prompt, max_new_tokens, **settings):
    model, _ = load(checkpoint)
    cache = model.new_cache(len(prompt) + max_new_tokens)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        hidden = model(tokens[cache.length :], cache)[0]
        cache.commit(list(range(len(hidden))))
        tokens.append(int(model.logits(hidden)[-1].argmax()))
        if tokens[-1] in model.config.eos_ids:
            break
    return tokens[len(prompt) :]


# ---- the package's functions, with the lesson's arguments ----------------------------------------


def package_accept(guess, choices):
    target = OneHot(list(choices), 1 + max([*guess, *choices]))
    path, fresh, *_ = verify.accept(target, Tree.chain(0, list(guess)), Seeded())
    return len(path) - 1, fresh


def package_greedy(checkpoint, prompt, max_new_tokens, **settings):
    model, tokenizer = load(checkpoint)
    run = decode(model, tokenizer, list(prompt), max_new_tokens=max_new_tokens)
    return run.tokens


# ---- cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """A round on a toy model: the text so far, and a guess at the tokens after it."""

    model: Toy
    text: tuple[int, ...]
    guess: tuple[int, ...]


def fresh_choice(model: Toy, text: tuple[int, ...]) -> int:
    """The model's choice after a text, from a pass of its own."""
    return int(model.logits(model(list(text)))[0, -1].argmax())


def plain_decoding(model: Toy, text: tuple[int, ...], n: int) -> list[int]:
    tokens = list(text)
    for _ in range(n):
        tokens.append(fresh_choice(model, tuple(tokens)))
    return tokens[len(text) :]


@cache
def choices_of(case: Round) -> tuple[int, ...]:
    """The model's choices after the text and after each guess, from one pass over all of them."""
    rows = case.model.logits(case.model([*case.text, *case.guess]))[0].argmax(-1).tolist()
    return tuple(rows[len(case.text) - 1 :])


def random_round(seed: int) -> Round:
    """A round with up to five guesses, most of which are right."""
    rng, model = random.Random(seed), Toy(seed % 7, vocab=9)
    text = tuple(rng.choices(range(9), k=3))
    guess: list[int] = []
    for _ in range((2, 0, 1, 3, 4, 5)[seed % 6]):
        right = fresh_choice(model, (*text, *guess))
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
    """How far the guess agrees with plain decoding, and the token that plain decoding writes next.
    Each token comes from a fresh pass."""
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
    """Say so if only rounds are wrong in which all guesses are right."""
    wrong = [case for case, got, expected in results if got != expected]
    if all(case.guess == choices_of(case)[:-1] for case in wrong):
        return "it errs only if all guesses are right: accept all of them, and add the last choice"
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

# ---- greedy --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """Arguments of `greedy`; the checkpoint is one of two, with and without end tokens."""

    ends: bool
    prompt: tuple[int, ...]
    n: int


@cache
def checkpoints() -> dict[bool, str]:
    """The folders of two small random models."""
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    eos = {False: None, True: ("config.json", [3, 5, 8])}
    return {ends: write_checkpoint(Path(folder.name) / str(ends), 4, 12, eos=found)[0]
            for ends, found in eos.items()}  # fmt: skip


def random_request(seed: int) -> Request:
    rng = random.Random(seed)
    return Request(seed % 2 == 1, tuple(rng.choices(range(12), k=rng.randint(1, 9))), 6 + seed)


REQUESTS = [Request(False, (7, 2, 9), 4), *map(random_request, range(6)), Request(False, (4,), 0)]


def run_greedy(function, case: Request) -> list[int]:
    tokens = call(
        lambda prompt: function(checkpoints()[case.ends], prompt, case.n, temperature=0),
        prompt=list(case.prompt),
    )
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise Wrong("it must return a list of tokens, each of type int: int(….argmax())")
    return tokens


def without_a_cache(case: Request) -> list[int]:
    """Each token from a fresh pass over the text."""
    model, tokens = load(checkpoints()[case.ends])[0], []
    while len(tokens) < case.n and not {*tokens} & {*model.config.eos_ids}:
        tokens.append(fresh_choice(model, (*case.prompt, *tokens)))
    return tokens


def show_request(case: Request) -> str:
    ends = "a model with end tokens 3, 5 and 8" if case.ends else "a model without end tokens"
    return f"{ends}, prompt {list(case.prompt)}, max_new_tokens = {case.n}"


def show_greedy(case: Request, got: list[int], expected: list[int]) -> str:
    return f"{show_request(case)}: it returns {got}; plain decoding writes {expected}"


def diagnose_greedy(results: list[tuple[Request, list[int], list[int]]]) -> str | None:
    wrong = [(got, right) for _, got, right in results if got != right]
    if all(got[: len(right)] == right for got, right in wrong):
        return "it writes too many tokens"
    if all(got == right[: len(got)] for got, right in wrong):
        return "it writes too few tokens"
    return None


def writer(wrong: str):
    """`greedy` without a cache, with one mistake."""

    def greedy(checkpoint, prompt, max_new_tokens, **settings):
        model, new = load(checkpoint)[0], []
        while len(new) < max_new_tokens:
            seen = [*prompt[-1:], *new] if wrong == "the last of the prompt" else [*prompt, *new]
            seen = seen[-1:] if wrong == "the last token" else seen
            rows = model.logits(model(seen)[0])
            new.append(int(rows[0 if wrong == "the first row" else -1].argmax()))
            if new[-1] in model.config.eos_ids and wrong != "does not end":
                return new[:-1] if wrong == "drops the end token" else new
        return [*prompt, *new] if wrong == "with the prompt" else new

    return greedy


def reads_a_token_twice(checkpoint, prompt, max_new_tokens, **settings):
    model, _ = load(checkpoint)
    cache, new = model.new_cache(len(prompt) + max_new_tokens + 1), []
    model.prefill(prompt, cache)
    while len(new) < max_new_tokens and not {*new} & {*model.config.eos_ids}:
        rows = model.logits(model([*prompt, *new][-1:], cache)[0])
        cache.commit([0])
        new.append(int(rows[-1].argmax()))
    return new


GREEDY_MISTAKES = {
    "the last token of the prompt is read twice; fill the cache with the tokens before it": (
        reads_a_token_twice
    ),
    "it returns the prompt, too; return only the new tokens": (
        writer("with the prompt"),
        lambda checkpoint, prompt, n, **settings: prompt + greedy(checkpoint, prompt, n),
    ),
    "it goes on after an end token; stop if the new token is in model.config.eos_ids": writer(
        "does not end"
    ),
    "the end token is missing: it is the last of the new tokens": writer("drops the end token"),
    "it takes the first row's choice; what follows the newest token is in the last row": writer(
        "the first row"
    ),
    "the model reads only one token; without a cache it must read the whole text, and with one all "
    "that the cache does not have: tokens[cache.length:]": (
        writer("the last token"), writer("the last of the prompt"),
    ),
    "it writes one token too many": lambda checkpoint, prompt, n, **settings: (
        greedy(checkpoint, prompt, n + 1)
    ),
    "it writes a token even if max_new_tokens is 0": lambda checkpoint, prompt, n, **settings: (
        greedy(checkpoint, prompt, max(1, n))
    ),
}  # fmt: skip

# ---- tasks ---------------------------------------------------------------------------------------

RANGES = {
    "cost_of_8": (1, 8), "cost_of_64": (1, 64), "my_tokens_accepted": (0, 30),
    "tokens_per_pass": (1, 8),
}  # fmt: skip
TASKS = [
    Task(
        name="accept",
        package=package_accept,
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
        shows=(package_accept,),
    ),
    Task(
        name="greedy",
        package=package_greedy,
        solution=greedy,
        judge=Oracle(
            REQUESTS, run_greedy, without_a_cache, differ, show_greedy,
            f"{len(REQUESTS)} texts of two small models", arguments=show_request,
            diagnose=diagnose_greedy,
        ),
        hints=(
            "Repeat: a pass, then the choice of its last row. model(tokens)[0] reads a text, and "
            "model.logits of that has a row of logits for each token.",
            "With a cache, a pass reads tokens[cache.length:] and then all of its rows are "
            "committed: the first pass reads the prompt, each later one a single token.",
        ),
        mistakes=GREEDY_MISTAKES,
        shows=(package_greedy,),
    ),
]  # fmt: skip

# ---- the quiz ------------------------------------------------------------------------------------

QUIZ = [
    Question(
        "In every round a program guesses seven tokens, and all of them are wrong. Is the text "
        "still that of plain decoding?",
        True,
        "only tokens that equal the model's own choices are accepted, so bad guesses cost time and "
        "nothing else.",
    ),
    Question(
        "How many new tokens does each of these rounds yield?",
        1,
        "the model's choice in the place of the first guess is what plain decoding would have "
        "written, so no round is in vain.",
    ),
    Question(
        "guess = [4, 8, 7, 3] and choices = [4, 8, 5, 3, 9]. How many of the guesses are accepted?",
        2,
        "the third guess is wrong, and the choice of 3 was made in a text that contains it, so "
        "that they agree there means nothing.",
    ),
    Question(
        "A pass over the last token and five guesses: how many new tokens does it yield at most?",
        6,
        "all five guesses can be accepted, and the row of the last one adds a token of the model.",
    ),
    Question(
        "Every round is a pass over 8 tokens and yields 3 on average. When is this faster than "
        "plain decoding, if guessing takes no time?",
        "c",
        "three tokens of plain decoding cost three passes over one token, and a round costs one "
        "pass over eight.",
        (
            "always: three tokens per pass are more than one",
            "if a pass over 8 tokens takes less than 8 times as long as a pass over one",
            "if a pass over 8 tokens takes less than 3 times as long as a pass over one",
        ),
    ),
]
