"""The form of a lesson: predict, write the central functions, check them, answer a quiz, compare.

A notebook starts with `lesson("03")`. Hints, solutions, known wrong answers and the quiz come from
solutions/lesson_03.py, so that the notebook shows no answers unless the reader asks.
"""

import ctypes
import dis
import importlib
import inspect
import io
import math
import re
import reprlib
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType

LESSONS = Path(__file__).resolve().parent
GOES_ON = "the lesson goes on with minispec's"
EMPTY = "not written yet"
NUMBER_OF_HINTS = 2
REPETITIONS = 10  # of a failed case; a coin of the answer's own may fall alike in a few of them
PATIENCE = 20.0  # seconds that an answer may take for all cases
MOST_LINES = 5  # of what an answer prints while it is checked
ROUNDING = 0.0051  # of a number in a quiz: two decimals are enough
YES_NO = {"yes": True, "y": True, "true": True, "no": False, "n": False, "false": False}

# ---- what a lesson consists of -------------------------------------------------------------------


class Wrong(Exception):
    """Raised by an oracle if an answer breaks the contract, for example by returning None."""


@dataclass(frozen=True)
class Oracle:
    """Decides whether a function is right, on cases for which the right outcome is known.

    `run(function, case)` returns an outcome, such as the exact distribution of the tokens that the
    function lets through. It must pass copies, so that no function can change a case. `expected`
    computes the outcome without the package's function: by enumeration or by fresh passes.
    """

    cases: Sequence  # small ones first, because the first that fails is shown
    run: Callable
    expected: Callable
    distance: Callable[[object, object], float]  # between two outcomes
    show: Callable[[object, object, object], str]  # a readable (case, outcome, expected outcome)
    examined: str  # a description of the cases
    tolerance: float = 1e-12  # rounding in float64
    arguments: Callable[[object], str] | None = None  # a case as readable arguments
    # what is wrong if no mistake has these outcomes, or None; it gets (case, outcome, expected
    # outcome) of each case that has not failed
    diagnose: Callable[[list[tuple]], str | None] = lambda results: None


@dataclass(frozen=True)
class Task:
    """A function for the reader to write.

    `mistakes` maps messages to functions that make the mistake, one or several: an answer with the
    outcomes of one of them gets the message. `package` is what the lesson uses until the answer is
    right. It needs torch; if nothing else does, solutions/pure_<lesson>.py has the task without it,
    and the page of the site judges answers, too.
    """

    name: str
    solution: Callable
    judge: Oracle
    hints: tuple[str, str]
    mistakes: dict[str, Callable | tuple[Callable, ...]]
    package: Callable | None = None
    shows: tuple[Callable, ...] = ()  # the functions of the package that `source` prints


@dataclass(frozen=True)
class Question:
    """A question of a lesson's quiz.

    The answer is True or False for yes or no, the letter of one of the `options`, which are called
    a, b, c, …, or else a number. `because` is a sentence that follows "right: " or "wrong: ".
    """

    text: str
    answer: bool | str | float
    because: str
    options: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The end of the printed question: what it asks for, if it has no options."""
        kind = "(yes or no)" if isinstance(self.answer, bool) else "(a number)"
        return "" if self.options else " " + kind.replace(" ", "\N{NO-BREAK SPACE}")


@dataclass
class Progress:
    """What has happened in a lesson so far."""

    tasks: dict[str, Task] = field(default_factory=dict)
    quiz: Sequence[Question] = ()
    proofs: dict[str, str] = field(default_factory=dict)  # name -> proof, in Markdown
    predicted: dict[str, float | None] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)  # task -> number of hints given
    shown: set[str] = field(default_factory=set)  # tasks that are solved or revealed
    # of predictions: the lowest and highest sensible ones, or a range if it is a choice, as of K
    ranges: dict[str, tuple[float, float] | range] = field(default_factory=dict)


progress = Progress()  # a kernel runs one notebook


def lesson(number: str) -> None:
    """Start lesson `number`: make this checkout's minispec importable, load the lesson's tasks and
    forget earlier predictions. Gradients are switched off; lesson 07 trains within enable_grad."""
    global progress
    for folder in LESSONS, LESSONS.parent:  # the checkout's package, even if another is installed
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    import torch

    torch.set_grad_enabled(False)
    solutions = load_solutions(number)
    tasks = {task.name: task for task in solutions.TASKS}
    progress = Progress(
        tasks, solutions.QUIZ, getattr(solutions, "PROOFS", {}), ranges=solutions.RANGES
    )


def load_solutions(number: str) -> ModuleType:
    """Load solutions/lesson_<number>.py. It has TASKS, RANGES (of its predictions, see
    Progress) and a QUIZ, and may have PROOFS."""
    return importlib.import_module(f"solutions.lesson_{number}")


def name_of(thing: object) -> str:
    """Return a function's name, or that of the task which the package's function belongs to. A
    lambda belongs to the task with its parameters, or else to the first."""
    name = getattr(thing, "__name__", repr(thing))
    tasks = progress.tasks.values()
    names = [task.name for task in tasks if task.package is thing]
    if not names and name == "<lambda>":
        given = [*inspect.signature(thing).parameters]
        matching = (t for t in tasks if [*inspect.signature(t.solution).parameters] == given)
        names = [task.name for task in (*matching, *tasks)]
    return names[0] if names else name


def find_task(name: str) -> Task | None:
    """Return a task of this lesson, or None with a message."""
    if not progress.tasks:
        print("run the first cell first")
    elif name not in progress.tasks:
        print(f"{name}: not a task of this lesson, which has {' and '.join(progress.tasks)}")
    return progress.tasks.get(name)


# ---- predictions ---------------------------------------------------------------------------------


def predict(**numbers: float | None) -> None:
    """Remember the reader's predictions until `compare`; `...` is a prediction not made. A number
    out of range is not kept, and neither is one under a mistyped name; an earlier one stays."""
    asked = progress.ranges.keys() or numbers.keys()
    for name in sorted(numbers.keys() - asked):
        print(f"{name}: the lesson asks for {', '.join(asked)}")
    given = {name: as_number(number) for name, number in numbers.items() if name in asked}
    for name, number in given.items():
        if number is None and numbers[name] is not None and numbers[name] is not ...:
            print(f"{spaced(name)}: {numbers[name]!r} is not a number; write it as 0.5, \"50%\", "
                  '10 or "10x"')  # fmt: skip
        elif number is not None and (fault := out_of_range(name, number)):
            print(f"{spaced(name)}: {number:g} {fault}")
            given[name] = progress.predicted.get(name)
    progress.predicted.update(given)
    missing = [spaced(name) for name, number in given.items() if number is None]
    made = [f"{spaced(name)} {number:.3g}" for name, number in given.items() if number is not None]
    if made:
        print("you predict:", ", ".join(made))
    if missing:
        print("no prediction yet:", ", ".join(missing))


def out_of_range(name: str, number: float) -> str | None:
    """Say what is wrong with a predicted number, or return None."""
    allowed = progress.ranges.get(name, (-math.inf, math.inf))
    if not allowed[0] <= number <= allowed[-1]:
        return f"is not between {allowed[0]} and {allowed[-1]}"
    return "is not a whole number" if isinstance(allowed, range) and number % 1 else None


def as_number(given: object) -> float | None:
    """Return a number, a text such as "50%" or "10x", or a tensor of one element as a float, else
    None."""
    try:
        if isinstance(given, str):
            text = given.strip()
            number = float(re.sub("[%x×]$", "", text)) / (100 if text.endswith("%") else 1)
        else:
            number = float(given)
    except (TypeError, ValueError, RuntimeError):  # the last is what a larger tensor raises
        return None
    return number if math.isfinite(number) else None


def measured(**numbers: float) -> None:
    """Remember what a cell measured until `compare`."""
    progress.measured.update({name: float(number) for name, number in numbers.items()})


def compare() -> None:
    """Print each prediction next to its measurement, and their ratio unless it is a choice, of a K
    or of a tree."""
    names = [*dict.fromkeys([*progress.predicted, *progress.measured])]
    width = max(map(len, names), default=0)
    for name in names:
        guess, value = progress.predicted.get(name), progress.measured.get(name)
        found = "not measured here" if value is None else f"measured {value:.3g}"
        if guess is None:
            line = f"{found}; you made no prediction"
        else:
            is_choice = isinstance(progress.ranges.get(name), range)
            ratio = f", ratio {guess / value:.2f}" if value and not is_choice else ""
            line = f"you said {guess:.3g}, {found}{ratio}"
        print(f"{spaced(name):{width}}  {line}")


def spaced(name: str) -> str:
    return name.replace("_", " ")


# ---- the quiz ------------------------------------------------------------------------------------


def quiz(*answers: object) -> None:
    """Print the lesson's questions and judge the answers; `...` is an answer not given."""
    questions = progress.quiz
    if not questions:
        print("run the first cell first")
        return
    if len(answers) != len(questions):
        print(f"the quiz has {len(questions)} questions, not {len(answers)}; leave `...` where you "
              "have no answer")  # fmt: skip
    answers = (*answers, *[...] * len(questions))[: len(questions)]
    for i, (question, given) in enumerate(zip(questions, answers), start=1):
        lines = [f"{i}. {question.text}{question.kind}"]
        lines += [f"   {letter}) {option}" for letter, option in zip("abcdef", question.options)]
        lines += [f"   {judge(question, given)}"] * (given is not ...)
        for line in lines:
            print(textwrap.fill(line, 84, subsequent_indent="   ", break_on_hyphens=False))
    missing = [str(i) for i, given in enumerate(answers, start=1) if given is ...]
    if missing:
        print(f"\nnot answered yet: {', '.join(missing)}")


def judge(question: Question, given: object) -> str:
    """Return "right: " or "wrong: " and the reason, or how the answer must be written."""
    word, answer, right = str(given).strip(" .()").lower(), question.answer, None
    if question.options:
        letters, written = [*"abcdef"[: len(question.options)]], '"a", "b" or another letter'
        right = word == answer if word in letters else None
    elif isinstance(answer, bool):
        written = '"yes" or "no"'
        right = YES_NO[word] == answer if word in YES_NO else None
    else:
        number, written = as_number(given), "a number, such as 0.5"
        right = abs(number - answer) < ROUNDING if number is not None else None
    if right is None:
        shown = " ".join(reprlib.repr(given).split())
        return f"{shown} is not an answer here; write {written}"
    return f"{'right' if right else 'wrong'}: {question.because}"


# ---- checking ------------------------------------------------------------------------------------


def check(function: Callable, replace: bool = False) -> Callable:
    """Judge the reader's function. Returns it if it is right, and the package's function if not, so
    that the lesson goes on either way: accept = check(accept). A right one is saved in
    my_minispec.py, if that has no other function of this name or `replace` is true."""
    name = name_of(function)
    if progress.tasks and not callable(function):
        name = next(iter(progress.tasks))
        print(f"check takes a function: {name} = check({name})")
        return function
    task = find_task(name)
    if task is None:
        return function
    from own_engine import is_saved, save  # needs minispec, which lesson() makes importable

    number = task.solution.__module__[-2:]
    if function is task.package:
        print(f"{name}: this is minispec's; run the cell that defines yours again")
    elif fault := find_gap(task, function):
        if fault == EMPTY and is_saved(number, name):
            fault = "empty here, kept in my_minispec.py"
        print(f"{name}: {fault}; {GOES_ON}")
    else:
        fault, right = examine(task, function)
        if fault is None:
            progress.shown.add(name)
            with redirect_stdout(Printed()):  # it is judged again
                saved = save(function, number, name, lambda f: find_fault(task, f)[0], replace)
            print(f"{name}: {right}{saved}")
            return function
        print(f"{name}: {fault}\n{GOES_ON}; hint({name!r}) helps".replace("\n", "\n    "))
    return task.package


def find_gap(task: Task, function: object) -> str | None:
    """Return why there is nothing to examine yet, or None."""
    if not isinstance(function, FunctionType):
        return f"must be a function, not {type(function).__name__}"
    if is_empty(function):
        return EMPTY
    if returns_a_value(task.solution) and not returns_a_value(function):
        return "it always returns None; a `return` with a value is missing"
    return None


def examine(task: Task, function: FunctionType) -> tuple[str | None, str]:
    """Print what the function prints. Returns what is wrong with it, or None, and what to say if
    nothing is."""
    with redirect_stdout(Printed()) as printed:
        fault, largest = find_fault(task, function)
    printed.show(task.name)
    exactly = f", largest distance {largest:.1e}" if largest else ""
    return fault, f"right ({task.judge.examined}{exactly})"


# the instructions of a body that does nothing, in any version of Python
IDLE = {"RESUME", "NOP", "POP_TOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"}
RAISING = {"LOAD_GLOBAL", "LOAD_COMMON_CONSTANT", "PUSH_NULL", "PRECALL", "CALL", "RAISE_VARARGS"}


def is_empty(function: FunctionType) -> bool:
    """Return whether the body does nothing: `...`, `pass`, `return`, `raise NotImplementedError`,
    with or without a docstring."""
    instructions = list(dis.get_instructions(function.__code__))
    constants = [i.argval for i in instructions if i.opname in ("LOAD_CONST", "RETURN_CONST")]
    if any(constant not in (None, ...) for constant in constants):
        return False
    operations = {i.opname for i in instructions}
    raising = function.__code__.co_names in ((), ("NotImplementedError",)) and operations & RAISING
    return operations <= (IDLE | RAISING if raising else IDLE)


def returns_a_value(function: FunctionType) -> bool:
    """Return whether the function has a `return` of anything but None, or a `yield`."""
    instructions = list(dis.get_instructions(function.__code__))
    for before, last in zip([None, *instructions], instructions):
        if last.opname == "YIELD_VALUE":
            return True
        if last.opname == "RETURN_CONST" and last.argval is not None:
            return True
        none = before and (before.opname, before.argval) == ("LOAD_CONST", None)
        if last.opname == "RETURN_VALUE" and (last.is_jump_target or not none):
            return True  # at the target of a jump, several values meet
    return False


class Printed(io.TextIOBase):
    """Takes what an answer prints while it is checked: it runs on many cases."""

    def __init__(self):
        self.start, self.lines = "", 0

    def write(self, text: str) -> int:
        self.lines += text.count("\n")
        if self.start.count("\n") < MOST_LINES:
            self.start += text
        return len(text)

    def show(self, name: str) -> None:
        """Print the first lines."""
        for line in self.start.splitlines()[:MOST_LINES]:
            print(f"{name} prints: {line[:100]}")
        if self.lines > MOST_LINES:
            print(f"{name} prints {self.lines - MOST_LINES} more lines, not shown here")


@dataclass(frozen=True)
class Failure:
    """An outcome that is an error. Two are alike if their `kind` is."""

    kind: str
    message: str


def attempt(oracle: Oracle, function: Callable, case) -> object:
    """Return the function's outcome, or a Failure if it raises or breaks the contract."""
    try:
        return oracle.run(function, case)
    except Wrong as error:
        return Failure(str(error), str(error))
    except Exception as error:
        kind, message = type(error).__name__, str(error).partition("\n")[0]
        frames = traceback.extract_tb(error.__traceback__)
        own = [f.lineno for f in frames if f.filename == function.__code__.co_filename]
        where = f" in line {own[-1]} of its cell" if own else ""
        return Failure(kind, f"{kind}{where}: {message}")


def distance(oracle: Oracle, a: object, b: object) -> float:
    """The distance between two outcomes; a Failure is infinitely far from anything else."""
    if isinstance(a, Failure) or isinstance(b, Failure):
        alike = isinstance(a, Failure) and isinstance(b, Failure) and a.kind == b.kind
        return 0.0 if alike else math.inf
    return oracle.distance(a, b)


class StillRunning(BaseException):
    """Raised in an answer that does not return. `except Exception` in the answer misses it."""


@contextmanager
def watched(seconds: float) -> Iterator[None]:
    """Look at the clock before each line of a function that the block calls, and raise
    StillRunning after `seconds`. Slow, but it needs no thread: a browser's Python has none."""
    end = time.monotonic() + seconds

    def trace(*_) -> Callable:
        if time.monotonic() > end:
            raise StillRunning
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """Raise StillRunning in the block after `seconds` of processor time, or ten times as long if
    the machine is busy or the block waits. Unlike a signal, this works on any system and in any
    thread, but only between two instructions of Python."""
    thread, done = ctypes.c_ulong(threading.get_ident()), threading.Event()
    computed, end = time.process_time() + seconds, time.monotonic() + 10 * seconds

    def watch() -> None:
        while not done.wait(min(0.1, seconds / 4)):
            if time.process_time() > computed or time.monotonic() > end:
                stop = ctypes.py_object(StillRunning)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, stop)
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


time_limit = watched if sys.platform == "emscripten" else interrupted


def find_fault(task: Task, function: Callable) -> tuple[str | None, float]:
    """Return what is wrong with the function, or None, and the largest distance from the expected
    outcomes."""
    oracle, outcomes = task.judge, []
    try:
        with time_limit(PATIENCE):
            for case in oracle.cases:
                outcomes.append(attempt(oracle, function, case))
    except StillRunning:
        call = with_arguments(oracle, oracle.cases[len(outcomes)])
        return f"it is still running after {PATIENCE:g} seconds; does its loop end?{call}", math.inf
    expected = [oracle.expected(case) for case in oracle.cases]
    distances = [distance(oracle, a, b) for a, b in zip(outcomes, expected)]
    # `not <=`, so that NaN is wrong
    i = next((i for i, d in enumerate(distances) if not d <= oracle.tolerance), None)
    if i is None:
        return None, max(distances)
    case, got = oracle.cases[i], outcomes[i]
    failed = isinstance(got, Failure)
    if failed:
        example = with_arguments(oracle, case)
    else:
        example = f"\nfor example, {oracle.show(case, got, expected[i])}"
    for message in task.mistakes:
        if any(makes_mistake(oracle, outcomes, mistake) for mistake in mistakes_of(task, message)):
            return message + example, distances[i]
    again = (attempt(oracle, function, case) for _ in range(REPETITIONS))
    if not all(distance(oracle, got, outcome) <= oracle.tolerance for outcome in again):
        return "two calls with the same arguments and the same `randomness` differ, so it draws " \
               "random numbers elsewhere or remembers earlier calls", distances[i]  # fmt: skip
    if failed:
        return got.message + example, distances[i]
    results = zip(oracle.cases, outcomes, expected)
    judged = [result for result in results if not isinstance(result[1], Failure)]
    return (oracle.diagnose(judged) or "not right yet") + example, distances[i]


def with_arguments(oracle: Oracle, case) -> str:
    """A line with the arguments of a call that failed, or nothing if the oracle shows none."""
    return f"\nwith {oracle.arguments(case)}" if oracle.arguments else ""


def mistakes_of(task: Task, message: str) -> tuple[Callable, ...]:
    """Return the functions whose mistake a message describes."""
    mistakes = task.mistakes[message]
    return mistakes if isinstance(mistakes, tuple) else (mistakes,)


def makes_mistake(oracle: Oracle, outcomes: list, mistake: Callable) -> bool:
    """Return whether the mistake has these outcomes."""
    wrong = (attempt(oracle, mistake, case) for case in oracle.cases)
    return all(distance(oracle, a, b) <= 1e-9 for a, b in zip(outcomes, wrong))


# ---- help ----------------------------------------------------------------------------------------


def hint(name: str) -> None:
    """Print the next hint for a task; there are two."""
    if task := find_task(name):
        n = progress.hints[name] = progress.hints.get(name, 0) + 1
        if n > NUMBER_OF_HINTS:
            print(f"no more hints; reveal({name!r}) prints a solution")
        else:
            print(f"hint {n} of {NUMBER_OF_HINTS}: {task.hints[n - 1]}")


def reveal(name: str) -> None:
    """Print a solution of a task, or show a proof."""
    if name in progress.proofs:
        from IPython.display import Markdown, display

        display(Markdown(progress.proofs[name]))
    elif task := find_task(name):
        progress.shown.add(name)
        print(inspect.getsource(task.solution).rstrip())


def source(thing: Callable) -> None:
    """Show the package's source. For a task, it is shown once the reader's function is right or the
    solution has been revealed."""
    from drawing import code
    from IPython.display import display

    name = name_of(thing)
    if name in progress.tasks and name not in progress.shown:
        print(f"{name}: minispec's source is shown here once yours is right; reveal({name!r}) "
              "skips the work")  # fmt: skip
    else:
        display(code(*(progress.tasks[name].shows if name in progress.tasks else [thing])))


# ---- the real model ------------------------------------------------------------------------------


def smollm2() -> tuple:
    """Load SmolLM2 with its tokenizer. If it has not been downloaded, print one line and return
    (None, None)."""
    from minispec import UserError, load
    from minispec.checkpoints.load import find_smollm2

    try:
        return load(find_smollm2())
    except UserError:
        print("SmolLM2 has not been downloaded, so its cells are skipped; run "
              "`!python -m minispec fetch` (93 MB)")  # fmt: skip
        return None, None
