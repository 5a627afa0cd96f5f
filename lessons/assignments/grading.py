"""What the grader knows: points, the implementation being graded, and how tasks are usually got
wrong. conftest.py connects it to pytest."""

import contextlib
import importlib.util
import inspect
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from lessons.assignments.link import Remote
from minispec.certify.toys import every_outcome
from minispec.sampling import Randomness, Sampling


def load(path: Path) -> ModuleType:
    """Import a file under a unique module name; every assignment has a starter.py."""
    name = f"{path.resolve().parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Implementation:
    """The module being graded. Using a name it does not define fails the test with one line."""

    def __init__(self, module: ModuleType | Remote, source: str):
        self._module, self._source = module, source

    def imported(self, name: str):
        """A module of the process in which the implementation runs."""
        remote = isinstance(self._module, Remote)
        return self._module._link.load(name) if remote else importlib.import_module(name)

    def copy(self, x: object):
        """A copy of `x` in the process in which the implementation runs."""
        return self._module._link.ask("copy", x) if isinstance(self._module, Remote) else x

    def __getattr__(self, name: str):
        try:
            return getattr(self._module, name)
        except AttributeError:
            pytest.fail(f"{self._source} has no {name}", pytrace=False)


# ---- points --------------------------------------------------------------------------------------


@dataclass
class Graded:
    """One test: its points, how many of its runs (one per parameter) have not passed yet, and the
    message of the first failure."""

    points: int
    pending: int = 0
    hint: str = ""

    @property
    def passed(self) -> bool:
        return self.pending == 0 and not self.hint

    def record(self, report: pytest.TestReport) -> None:
        if report.passed:
            self.pending -= report.when == "call"
        else:
            self.hint = self.hint or report.hint


@dataclass
class Grades:
    """(assignment, task) -> its tests by name."""

    tasks: dict[tuple[str, str], dict[str, Graded]] = field(default_factory=dict)
    stopped: Counter = field(default_factory=Counter)  # assignment -> tests that ran too long

    def of(self, task: tuple[str, str]) -> tuple[int, int]:
        """Return the points earned and the points possible."""
        tests = self.tasks[task].values()
        return sum(t.points for t in tests if t.passed), sum(t.points for t in tests)

    def hint(self, task: tuple[str, str]) -> str:
        """Return the message of the task's first test that failed, if one did."""
        return next((t.hint for t in self.tasks[task].values() if not t.passed), "")

    @property
    def total(self) -> tuple[int, int]:
        earned, possible = zip(*map(self.of, self.tasks)) if self.tasks else ((), ())
        return sum(earned), sum(possible)


def points_of(item: pytest.Item) -> pytest.Mark | None:
    return item.get_closest_marker("points")


def task_of(item: pytest.Item) -> tuple[str, str]:
    return item.path.parent.name, points_of(item).kwargs["task"]


# ---- known wrong answers -------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """A wrong answer: the tasks that name it, what they tell the student, and the code.

    `code` replaces functions ("residual") and methods ("Pool.after") of the reference, or, by their
    full names, what the package's own functions call ("minispec.methods.speculative.draw").
    """

    tasks: str
    message: str
    code: dict[str, object]

    @contextlib.contextmanager
    def applied(self, assignment: Path) -> Iterator[ModuleType]:
        """The reference of an assignment, with this mistake."""
        with contextlib.ExitStack() as stack:
            for name, wrong in self.code.items():
                if name.startswith("minispec."):
                    stack.enter_context(mock.patch(name, wrong))
            reference = load(assignment / "reference.py")
            for name, wrong in self.code.items():
                owner, _, method = name.partition(".")
                if owner != "minispec":
                    original = getattr(reference, owner)
                    wrong = type(owner, (original,), {method: wrong}) if method else wrong
                    setattr(reference, owner, wrong)
            yield reference


def mistakes_of(assignment: Path, task: str) -> list[Mistake]:
    """The known mistakes that a task names, in the order in which they are tried."""
    known = load(assignment / "mistakes.py").MISTAKES
    return [mistake for mistake in known if task in mistake.tasks.split(", ")]


def failure_of(item: pytest.Function, mistake: Mistake) -> str | None:
    """Run a test on a known mistake; return how it fails, or None if it passes."""
    arguments = {name: item.funcargs[name] for name in inspect.signature(item.obj).parameters}
    with mistake.applied(item.path.parent) as wrong:
        try:
            item.obj(**arguments | {"impl": Implementation(wrong, "")})
        except (Exception, pytest.fail.Exception) as failure:
            return described(failure)
    return None


def described(failure: BaseException) -> str:
    """The type and text of a failure, all lines, without the addresses and names of objects. The
    lines that pytest adds to an assertion hold the compared values to the last digit."""
    return f"{type(failure).__name__}: {re.sub(r'<[^<>]*>', '<>', str(failure))}"


def known_mistake(item: pytest.Function, failure: BaseException) -> str:
    """Return what to tell a student whose test failed exactly as it does for one known mistake, and
    only for that one, if half of the time that a test may run is enough to try all of them."""
    patience = float(item.config.getini("seconds")) / 2
    given, start, found = described(failure), time.monotonic(), []
    for mistake in mistakes_of(item.path.parent, task_of(item)[1]):
        if failure_of(item, mistake) == given:
            found.append(mistake.message)
        if time.monotonic() - start > patience:
            return ""
    return found[0] if len(found) == 1 else ""


# ---- what decoding costs -------------------------------------------------------------------------


@contextlib.contextmanager
def counted_passes(model) -> Iterator[list[int]]:
    """Collect how many rows each pass of the model has meanwhile. A method that proposes nothing is
    lossless, too. It shows here, where the model runs, whatever its steps say."""
    kind, passes = type(model), []
    name = "forward" if hasattr(kind, "forward") else "__call__"  # a Toy is no nn.Module

    def counted(self, rows, *arguments, **more):
        passes.append(torch.as_tensor(rows).shape[-1])
        return getattr(kind, name)(self, rows, *arguments, **more)

    model.__class__ = type(kind.__name__, (kind,), {name: counted})
    try:
        yield passes
    finally:
        model.__class__ = kind


def counted_run(
    method: Callable, model, prompt: list[int], sampling: Sampling, randomness: Randomness, n: int,
    **options,
) -> tuple[tuple[int, ...], tuple[int, ...]]:  # fmt: skip
    """The first `n` tokens of a method, and the rows of each pass of the target that was run for
    them after the prefill."""
    tokens: list[int] = []
    with counted_passes(model) as passes:
        for step in method(model, prompt, sampling, randomness, **options):
            if step.tree is None:  # the prefill
                passes.clear()
            tokens += step.tokens
            if len(tokens) >= n:
                return tuple(tokens[:n]), tuple(passes)
    raise AssertionError("a method must never end")


@dataclass
class Expected:
    """Of the first tokens, over all random outcomes: their distribution, and the expected number of
    passes of the target and of rows in them."""

    tokens: dict[tuple[int, ...], float] = field(default_factory=Counter)
    passes: float = 0.0
    rows: float = 0.0


def expected(
    method: Callable, model, prompt: list[int], sampling: Sampling, n: int, **options
) -> Expected:
    """Sum `counted_run` over all random outcomes."""
    total = Expected()
    for (tokens, passes), probability in every_outcome(
        lambda randomness: counted_run(method, model, prompt, sampling, randomness, n, **options)
    ):
        total.tokens[tokens] += probability
        total.passes += probability * len(passes)
        total.rows += probability * sum(passes)
    return total
