"""Grade an implementation: pytest lessons/assignments/a2_accept --impl my_solution.py

`@pytest.mark.points(5, task="commit")` sets how many points a test is worth. They are earned if it
passes for all of its parameters. A table of tasks is printed at the end.
"""

import importlib
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))  # for minispec and the assignments' own modules


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


@dataclass
class Grades:
    """(assignment, task) -> its tests by name."""

    tasks: dict[tuple[str, str], dict[str, Graded]] = field(default_factory=dict)

    def of(self, task: tuple[str, str]) -> tuple[int, int]:
        """Return the points earned and the points possible."""
        tests = self.tasks[task].values()
        return sum(t.points for t in tests if t.passed), sum(t.points for t in tests)

    @property
    def total(self) -> tuple[int, int]:
        earned, possible = zip(*map(self.of, self.tasks)) if self.tasks else ((), ())
        return sum(earned), sum(possible)


def pytest_addoption(parser):
    parser.addoption(
        "--impl",
        default="starter",
        help="what to grade: a module, a .py file, a folder of files named after the assignments, "
        "or `minispec` for the reference (default: the starters)",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "points(n, task): what a test is worth, and for which task")
    config.grades = Grades()
    name = config.getoption("--impl")
    if name in ("starter", "minispec") or Path(name).is_dir():
        return
    if name.endswith(".py") and not Path(name).is_file():
        raise pytest.UsageError(f"--impl {name}: no such file")
    try:
        config.implementation = load(Path(name)) if name.endswith(".py") else import_named(name)
    except Exception as error:  # a student's file may raise anything
        raise pytest.UsageError(
            f"--impl {name}: cannot be imported ({type(error).__name__}: {error})"
        ) from None


def load(path: Path) -> ModuleType:
    """Import a file under a unique module name; every assignment has a starter.py."""
    name = f"{path.resolve().parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_named(name: str) -> ModuleType:
    sys.path.insert(0, "")
    return importlib.import_module(name)


class Implementation:
    """The module being graded. Using a name it does not define fails the test with one line."""

    def __init__(self, module: ModuleType, source: str):
        self._module, self._source = module, source

    def __getattr__(self, name: str):
        try:
            return getattr(self._module, name)
        except AttributeError:
            pytest.fail(f"{self._source} has no {name}", pytrace=False)


@pytest.fixture(scope="module")
def impl(request) -> Implementation:
    """The implementation chosen by `--impl`, for this test's assignment."""
    name, folder = request.config.getoption("--impl"), request.path.parent
    if name == "minispec":
        return Implementation(load(folder / "reference.py"), name)
    if name == "starter":
        return Implementation(load(folder / "starter.py"), name)
    if not Path(name).is_dir():
        return Implementation(request.config.implementation, name)
    file = Path(name) / f"{folder.name}.py"
    if not file.is_file():
        pytest.fail(f"{name} has no {file.name}", pytrace=False)
    return Implementation(load(file), str(file))


def pytest_collection_finish(session):
    for item in session.items:
        mark = item.get_closest_marker("points")
        if mark is not None:
            tests = session.config.grades.tasks.setdefault(task_of(item), {})
            tests.setdefault(item.originalname, Graded(*mark.args)).pending += 1


def task_of(item) -> tuple[str, str]:
    return item.path.parent.name, item.get_closest_marker("points").kwargs["task"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if item.get_closest_marker("points") is not None:
        graded = item.config.grades.tasks[task_of(item)][item.originalname]
        if report.passed:
            graded.pending -= report.when == "call"
        else:
            graded.hint = graded.hint or first_line(call)
    return report


def first_line(call: pytest.CallInfo) -> str:
    """Summarise a failure in one line: the assertion's message, or the exception's type and
    message."""
    message = str(call.excinfo.value).split("\n")[0]
    is_assertion = call.excinfo.errisinstance((AssertionError, pytest.fail.Exception))
    if is_assertion and message:
        return message
    return f"{call.excinfo.typename}: {message}".rstrip(": ")


def pytest_sessionfinish(session, exitstatus):
    earned, possible = session.config.grades.total
    if exitstatus == pytest.ExitCode.OK and earned < possible:  # e.g. tests were skipped
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    grades, previous = config.grades, None
    if not grades.tasks:
        return
    terminalreporter.section(f"points of {config.getoption('--impl')}")
    for task in grades.tasks:
        assignment, name = task
        if assignment != previous:
            terminalreporter.write_line(assignment)
            previous = assignment
        hint = next((t.hint for t in grades.tasks[task].values() if not t.passed), "")
        earned, possible = grades.of(task)
        terminalreporter.write_line(f"  {name:<16}{earned:>3} of {possible:<3} {hint}".rstrip())
    earned, possible = grades.total
    terminalreporter.write_line(f"{'total':<18}{earned:>3} of {possible}")
