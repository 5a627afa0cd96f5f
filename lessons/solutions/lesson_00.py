"""Lesson 00: a decoder; for its other task, see pure_00.py."""

import atexit
import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from form import Oracle, Question, Task, Wrong

from minispec import load, verify
from minispec.certify.functions.toy_checkpoints import write_checkpoint
from minispec.generate import decode
from minispec.sampling import OneHot, Seeded
from minispec.tree import Tree
from solutions.common import call, differ
from solutions.pure_00 import ACCEPT

# ---- solutions -----------------------------------------------------------------------------------


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


# ---- greedy --------------------------------------------------------------------------------------


def fresh_choice(model, text: tuple[int, ...]) -> int:
    """The model's choice after a text, from a pass of its own."""
    return int(model.logits(model(list(text)))[0, -1].argmax())


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
    try:
        tokens = call(
            lambda prompt: function(checkpoints()[case.ends], prompt, case.n, temperature=0),
            prompt=list(case.prompt),
        )
    except (ValueError, RuntimeError) as error:
        if "element" in str(error):  # int() of a tensor with several numbers
            raise Wrong("a token is made of several numbers: model(tokens) is a batch of one text, "
                        "which is model(tokens)[0]") from None  # fmt: skip
        raise
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


def forgets(checkpoint, prompt, max_new_tokens, **settings):
    model, _ = load(checkpoint)
    cache, new = model.new_cache(len(prompt) + max_new_tokens + 1), []
    while len(new) < max_new_tokens and not {*new} & {*model.config.eos_ids}:
        hidden = model(new[-1:] or prompt, cache)[0]
        new.append(int(model.logits(hidden)[-1].argmax()))
    return new


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
    "the cache forgets each pass, as nothing is committed: cache.commit(list(range(n))) keeps n "
    "rows": forgets,
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
    replace(ACCEPT, package=package_accept, shows=(package_accept,)),
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
