"""What the grader knows: points, the implementation being graded, and how tasks are usually got
wrong. conftest.py connects it to pytest."""

import contextlib
import importlib.util
import inspect
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

PATIENCE = 20  # seconds spent on finding out which known mistake a failure is


def load(path: Path) -> ModuleType:
    """Import a file under a unique module name; every assignment has a starter.py."""
    name = f"{path.resolve().parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Implementation:
    """The module being graded. Using a name it does not define fails the test with one line."""

    def __init__(self, module: ModuleType, source: str):
        self._module, self._source = module, source

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
    """Return what to tell a student whose test failed exactly as it does for a known mistake."""
    given, start = described(failure), time.monotonic()
    for mistake in mistakes_of(item.path.parent, task_of(item)[1]):
        if failure_of(item, mistake) == given:
            return mistake.message
        if time.monotonic() - start > PATIENCE:
            break
    return ""
