"""Lesson 09, what needs no torch: the order in which all outcomes of a decoder are enumerated."""

import random
from itertools import product

from form import Oracle, Task, Wrong

from solutions.pure import call, differ

# ---- solution ------------------------------------------------------------------------------------


def next_script(choices):
    for step in reversed(range(len(choices))):
        choice, options = choices[step]
        if choice + 1 < options:
            return [earlier for earlier, _ in choices[:step]] + [choice + 1]
    return None


# ---- next_script ---------------------------------------------------------------------------------

Choices = tuple[tuple[int, int], ...]


def random_choices(seed: int) -> Choices:
    """The choices of a run with up to five decisions; every third run has no option left."""
    rng = random.Random(seed)
    options = [rng.randint(2, 4) for _ in range(rng.randint(1, 5))]
    return tuple((n - 1 if seed % 3 == 0 else rng.randrange(n), n) for n in options)


RUNS: list[Choices] = [
    ((0, 2),), ((1, 2),), ((0, 3), (1, 2)), ((0, 2), (0, 3)), ((0, 2), (2, 3)), ((1, 2), (2, 3)),
    (), *map(random_choices, range(30)),
]  # fmt: skip


def run_next_script(function, case: Choices) -> tuple[int, ...] | None:
    script = call(function, choices=list(case))
    if script is None:
        return None
    if not isinstance(script, list | tuple):
        raise Wrong(f"it must return a list or None, not {type(script).__name__}")
    if any(isinstance(entry, tuple | list) for entry in script):
        raise Wrong("it returns pairs; a script is a list of choices, without numbers of options")
    if any(type(choice) is not int for choice in script):
        raise Wrong(f"it returns {script}; a script is a list of int")
    while script and script[-1] == 0:  # a run takes option 0 after the end of its script
        script = script[:-1]
    return tuple(script)


def next_in_order(case: Choices) -> tuple[int, ...] | None:
    """From the list of all sequences of choices in order, without any arithmetic."""
    every = list(product(*(range(options) for _, options in case)))
    i = every.index(tuple(choice for choice, _ in case)) + 1
    if i == len(every):
        return None
    following = list(every[i])
    while following[-1] == 0:
        following.pop()
    return tuple(following)


def as_list(script: tuple[int, ...] | None) -> list[int] | None:
    return None if script is None else list(script)


def show_next_script(case: Choices, got, expected) -> str:
    return f"next_script({list(case)}) returns {as_list(got)}; {as_list(expected)} is right"


def skips_forward(choices):
    for step, (choice, options) in enumerate(choices):
        if choice + 1 < options:
            return [earlier for earlier, _ in choices[:step]] + [choice + 1]
    return None


def keeps_the_rest(choices):
    script = next_script(choices)
    return script and script + [choice for choice, _ in choices[len(script) :]]


def carries_once(choices):
    if not choices or choices[-1][0] + 1 < choices[-1][1]:
        return next_script(choices)
    earlier = [choice for choice, _ in choices[:-1]]
    return [*earlier[:-1], earlier[-1] + 1] if earlier else None


def stops_one_early(choices):
    for step in reversed(range(len(choices))):
        choice, options = choices[step]
        if choice + 2 < options:
            return [earlier for earlier, _ in choices[:step]] + [choice + 1]
    return None


NEXT_MISTAKES = {
    "it advances the last choice even if that has no option left; first drop the choices at the "
    "end that have none": lambda choices: (
        [choice for choice, _ in choices[:-1]] + [choices[-1][0] + 1] if choices else None
    ),
    "it gives up if the last choice has no option left; an earlier choice may have one": (
        lambda choices: (
            next_script(choices) if choices and choices[-1][0] + 1 < choices[-1][1] else None
        )
    ),
    "it advances the first choice that has an option left, which skips outcomes; advance the last "
    "one": skips_forward,
    "after the last outcome it returns [], and [] is the first script: the loop would never end. "
    "Return None": lambda choices: next_script(choices) or [],
    "it keeps the choices after the one it advances; they start again with option 0: drop them": (
        keeps_the_rest
    ),
    "it carries only once, but the choice before may have no option left either": carries_once,
    "it repeats the run: the advanced choice must be choice + 1": lambda choices: (
        script and [*script[:-1], script[-1] - 1] if (script := next_script(choices)) else script
    ),
    "the choices before the advanced one are missing": lambda choices: (
        script[-1:] if (script := next_script(choices)) else script
    ),
    "the last option is never taken; options are numbered from 0 to options - 1": stops_one_early,
}  # fmt: skip

# ---- tasks ---------------------------------------------------------------------------------------

NEXT_SCRIPT = Task(
    name="next_script",
    solution=next_script,
    judge=Oracle(
        RUNS, run_next_script, next_in_order, differ, show_next_script,
        f"the choices of {len(RUNS)} runs", arguments=lambda case: f"choices = {list(case)}",
    ),
    hints=(
        "Count upwards like an odometer: the last digit moves first. If it cannot, it falls "
        "back to 0, and the digit before it moves.",
        "Find the last step with choice + 1 < options. The script is the choices before it, "
        "then choice + 1. If there is no such step, return None.",
    ),
    mistakes=NEXT_MISTAKES,
)  # fmt: skip
TASKS = [NEXT_SCRIPT]
