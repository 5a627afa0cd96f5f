"""Lesson 02, what needs no torch: text is shown until a stop string."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from form import Oracle, Task, Wrong

# ---- solution ------------------------------------------------------------------------------------


def release(text, stop):
    if stop in text:
        return text[: text.index(stop)], "", True
    n = max(n for n in range(len(stop)) if text.endswith(stop[:n]))
    cut = len(text) - n
    return text[:cut], text[cut:], False


# ---- release -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """The arguments of `release`."""

    text: str
    stop: str


def random_piece(seed: int) -> Piece:
    rng = random.Random(seed)
    stop = rng.choice(["ab", "aab", "aba", "abab", "b"])
    return Piece("".join(rng.choices("abc", k=rng.randrange(8))), stop)


PIECES = [
    Piece("all is ", "END"),
    Piece("all is wel", "END"),
    Piece("all is E", "END"),
    Piece("all is EN", "END"),
    Piece("all is END", "END"),
    Piece("all is END, END", "END"),
    Piece("", "END"),
    *map(random_piece, range(80)),
]


def visible(text: str, stop: str) -> str:
    """What is shown of a complete text."""
    return text.partition(stop)[0]


def exact_release(case: Piece) -> tuple[str, str, bool]:
    """By brute force: what every continuation shows, up to the length of the stop string."""
    text, stop = case.text, case.stop
    if stop in text:
        return visible(text, stop), "", True
    letters = sorted({*stop, "?"})
    rest = ("".join(r) for n in range(len(stop) + 1) for r in product(letters, repeat=n))
    n = min(len(visible(text + r, stop)) for r in rest)
    return text[:n], text[n:], False


def run_release(function, case: Piece) -> tuple[str, str, bool]:
    answer = function(case.text, case.stop)
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        raise Wrong("it must return three things: the text to show, the text to hold, and a bool")
    shown, held, ended = answer
    if not isinstance(shown, str) or not isinstance(held, str):
        raise Wrong(f"it returns {answer}; the first two must be str")
    if not isinstance(ended, bool):
        raise Wrong(f"it returns {ended!r} for `ended`, which must be True or False")
    return shown, held, ended


def show_piece(case: Piece) -> str:
    return f"text = {case.text!r}, stop = {case.stop!r}"


def show_release(case: Piece, got: tuple, expected: tuple) -> str:
    return f"{show_piece(case)}: it returns {got}; {expected} is right"


ONLY_AT_THE_END = (
    "it looks for the stop string only at the end of the text; other characters may follow it"
)
HOLDS_AT_THE_END = "it holds the stop string; once that is complete, end and hold nothing"


def diagnose_release(results: list[tuple[Piece, tuple, tuple]]) -> str | None:
    """Say whether it misses the stop string, loses text, shows too much or holds too much."""
    if not any(got[2] for _, got, _ in results):
        return "it never ends; first look for `stop` in the text"
    ends = [(case, got) for case, got, expected in results if expected[2]]
    if all(got[2] == case.text.endswith(case.stop) for case, got in ends):
        return ONLY_AT_THE_END
    if any(got[1] and (got[2] or got[1] == case.stop) for case, got in ends):
        return HOLDS_AT_THE_END
    going = [(case, got, expected) for case, got, expected in results if not expected[2]]
    if any(got[0] + got[1] != case.text for case, got, _ in going):
        return "without a stop string, shown and held together must be the text"
    more = [len(got[0]) - len(expected[0]) for _, got, expected in going]
    if max(more, default=0) > 0:
        return "it shows text with which the stop string may begin"
    if min(more, default=0) < 0:
        return "it holds text back that cannot belong to the stop string"
    return None


def holding(length: Callable[[str, str], int]) -> Callable:
    """A mistake in how many characters are held."""

    def wrong(text, stop):
        if stop in text:
            return release(text, stop)
        cut = len(text) - length(text, stop)
        return text[:cut], text[cut:], False

    return wrong


def overlaps(text: str, stop: str) -> list[int]:
    return [n for n in range(1, len(stop)) if text.endswith(stop[:n])]


def since_first_letter(text: str, stop: str) -> int:
    return len(text) - text.rindex(stop[0]) if stop[0] in text else 0


def holding_longest(text: str, stop: str) -> int:
    return max(overlaps(text, stop), default=0)


def only_at_the_end(length: Callable[[str, str], int]) -> Callable:
    """A mistake in where `stop` is looked for, holding `length(text, stop)` characters."""

    def wrong(text, stop):
        if text.endswith(stop):
            return text[: -len(stop)], "", True
        cut = len(text) - length(text, stop)
        return text[:cut], text[cut:], False

    return wrong


def ending(shown: Callable[[str, str], str]) -> Callable:
    """A mistake in what is shown at the end."""

    def wrong(text, stop):
        return (shown(text, stop), "", True) if stop in text else release(text, stop)

    return wrong


RELEASE_MISTAKES = {
    "it never holds text back, so the beginning of a stop string is shown": holding(
        lambda text, stop: 0
    ),
    "it always holds len(stop) - 1 characters, but most cannot belong to a stop string": holding(
        lambda text, stop: min(len(text), len(stop) - 1)
    ),
    "it holds everything since the first letter of `stop`, even if other letters follow": holding(
        since_first_letter
    ),
    "it holds the shortest beginning of `stop` at the end of the text; a longer one may fit": (
        holding(lambda text, stop: min(overlaps(text, stop), default=0))
    ),
    "it holds back the whole text if the end could begin a stop string; show what comes before": (
        holding(lambda text, stop: len(text) if overlaps(text, stop) else 0)
    ),
    "it holds at most one character, but `stop` may be longer than two": holding(
        lambda text, stop: int(text.endswith(stop[0]) and len(stop) > 1)
    ),
    "it shows the stop string, too": ending(
        lambda text, stop: text[: text.index(stop) + len(stop)]
    ),
    "it cuts at the last stop string in the text; the first one ends it": ending(
        lambda text, stop: text[: text.rindex(stop)]
    ),
    "it loses the text before the stop string": ending(lambda text, stop: ""),
    "it does not end at the stop string": lambda text, stop: (*release(text, stop)[:2], False),
    HOLDS_AT_THE_END: (
        lambda text, stop: (text[: text.index(stop)], stop, True)
        if stop in text else release(text, stop),
        lambda text, stop: (text[: text.index(stop)], text[text.index(stop) :], True)
        if stop in text else release(text, stop),
    ),
    ONLY_AT_THE_END: (
        only_at_the_end(holding_longest), only_at_the_end(lambda text, stop: 0)
    ),
}  # fmt: skip

# ---- tasks ---------------------------------------------------------------------------------------

RELEASE = Task(
    name="release",
    solution=release,
    judge=Oracle(
        PIECES, run_release, exact_release, lambda a, b: 0.0 if a == b else 1.0, show_release,
        f"{len(PIECES)} texts, each with all continuations", arguments=show_piece,
        diagnose=diagnose_release,
    ),
    hints=(
        "Only the end of the text can be held, and only if it is a beginning of `stop`: "
        "text.endswith(stop[:n]) for some n.",
        "n goes up to len(stop) - 1, and the largest n that fits counts. text[:-0] is empty, "
        "so cut at len(text) - n.",
    ),
    mistakes=RELEASE_MISTAKES,
)  # fmt: skip
TASKS = [RELEASE]
