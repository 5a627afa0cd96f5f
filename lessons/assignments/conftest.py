"""Grade an implementation: pytest lessons/assignments/a2_accept --impl=my_solution.py

`@pytest.mark.points(5, task="commit")` sets how many points a test is worth. They are earned if it
passes for all of its parameters. `GRADED` in a test file names the functions that a task is about.
A table of tasks is printed at the end.
"""

import ast
import importlib.util
import pkgutil
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))  # for minispec and the grader's own modules

from lessons.assignments.grading import (  # noqa: E402
    Graded,
    Grades,
    Implementation,
    known_mistake,
    load,
    points_of,
    task_of,
)
from lessons.assignments.isolation import Submission, copy_without, scratch  # noqa: E402
from lessons.assignments.link import Ended  # noqa: E402
from minispec.checkpoints.weights import write_json  # noqa: E402

CASES_PER_SEED = 1000  # more than any test draws
SEEDS = 1000  # one of so many is drawn
STOPPED = 2  # tests of an assignment that may run too long; after them no other is run
LONGEST = 1000  # characters of a hint


def pytest_addoption(parser):
    parser.addoption(
        "--impl",
        default="starter",
        help="what to grade: a module, a .py file, a folder of files named after the assignments, "
        "or `minispec` for the reference (default: the starters)",
    )
    parser.addoption("--seed", type=int, help="draw these random cases (default: any)")
    parser.addoption(
        "--allow-package",
        action="store_true",
        help="give points for the package's own functions as well",
    )
    parser.addoption("--results", type=Path, help="also write them here, as Gradescope wants them")
    parser.addini("seconds", "how much processor time a test may use")
    parser.addini("gigabytes", "how much memory a test may allocate")


def pytest_configure(config):
    config.addinivalue_line("markers", "points(n, task): what a test is worth, and for which task")
    config.grades = Grades()
    if config.option.seed is None:  # nobody knows it before
        config.option.seed = secrets.randbelow(SEEDS)
    torch.set_num_threads(1)  # the tensors are tiny
    name = config.getoption("--impl")
    if config.inipath != HERE / "pytest.ini":  # pytest took the file for one to test
        raise pytest.UsageError(f"write --impl={name}, with =, and name tests of one folder only")
    if problem := problem_with(name):
        raise pytest.UsageError(f"--impl {name}: {problem}")


# ---- the implementation --------------------------------------------------------------------------


def problem_with(name: str) -> str:
    """Why `--impl` cannot be graded, as far as is known before its code runs; otherwise ""."""
    path = Path(name)
    if name in ("minispec", "starter"):
        return ""
    if path.suffix == ".ipynb":
        return "is a notebook; save it as a .py file (jupyter nbconvert --to script FILE)"
    if path.is_dir():
        found = [*path.glob("*.py")]
        named = any((path / f"{folder.name}.py").is_file() for folder in HERE.glob("a?_*"))
        problem = "has no file named after an assignment, such as a2_accept.py"
        return "" if named or len(found) == 1 else problem
    if not path.exists():
        return "" if path.suffix != ".py" and is_module(name) else "no such file, folder or module"
    if path.suffix != ".py":
        return "must be a .py file, a folder or a module"
    try:
        ast.parse(path.read_bytes(), name)
    except (OSError, SyntaxError, ValueError) as error:
        return f"cannot be read ({type(error).__name__}: {error})"
    return ""


def is_module(name: str) -> bool:
    """Whether the package or module that a dotted name starts with can be found."""
    sys.path.insert(0, "")
    top = name.partition(".")[0]
    return top.isidentifier() and importlib.util.find_spec(top) is not None


@pytest.fixture
def impl(request, monkeypatch) -> Iterator[Implementation]:
    """The implementation chosen by `--impl`, for this test's assignment, in its own process."""
    name, folder = request.config.getoption("--impl"), request.path.parent
    own = {"minispec": folder / "reference.py", "starter": folder / "starter.py"}
    file = own.get(name, Path(name))
    if file.is_dir():
        files, file = [*file.glob("*.py")], file / f"{folder.name}.py"
        if len(files) == 1 and not (HERE / files[0].stem).is_dir():
            file = files[0]
        if not file.is_file():
            pytest.fail(f"{name} has no {file.name}", pytrace=False)
    inbox = Path(tempfile.mkdtemp(dir=scratch()))
    monkeypatch.setattr(tempfile, "tempdir", str(inbox))  # where the certifier writes checkpoints
    limits = [float(request.config.getini(x)) for x in ("seconds", "gigabytes")]
    path = [copy_without(functions_to_write(request.node)), copied(file, name)]
    link = Submission(path, inbox, *limits, getattr(request.module, "STAYS", ()))
    try:
        module = link.load("submission" if file.suffix == ".py" else name)
        yield Implementation(module, name if name in own else str(file))
    except Ended as error:
        pytest.fail(str(error), pytrace=False)
    except Exception as error:  # a student's file may raise anything
        kind = type(error).__name__
        pytest.fail(f"{file} cannot be imported ({kind}: {error})", pytrace=False)
    finally:
        link.close()


def copied(file: Path, name: str) -> Path:
    """A folder with a copy of a submission: submission.py and its neighbours, or a module."""
    folder = Path(tempfile.mkdtemp(dir=scratch()))
    if file.suffix == ".py":
        shutil.copyfile(file, folder / "submission.py")
    else:
        origin = Path(importlib.util.find_spec(name.partition(".")[0]).origin)
        if origin.name == "__init__.py":
            shutil.copytree(origin.parent, folder / origin.parent.name)
        else:
            shutil.copyfile(origin, folder / origin.name)
    return folder


def functions_to_write(item: pytest.Item) -> tuple[Callable, ...]:
    """The package's functions of the test's task, unless they will do."""
    options = item.config.option
    if options.allow_package or options.impl in ("minispec", "starter"):
        return ()
    reference, names = load(item.path.parent / "reference.py"), item.module.GRADED
    return tuple(
        pkgutil.resolve_name(name) if name.startswith("minispec.") else attrgetter(name)(reference)
        for name in names[task_of(item)[1]].split(", ")
    )


@pytest.fixture
def seeds(request) -> Callable[[int], range]:
    """seeds(n): the seeds of `n` random cases, which `--seed` changes."""
    first = CASES_PER_SEED * request.config.getoption("--seed")
    return lambda n: range(first, first + n)


# ---- running a test ------------------------------------------------------------------------------


def pytest_runtest_setup(item):
    if points_of(item) and item.config.grades.stopped[task_of(item)[0]] >= STOPPED:
        problem = f"not run, as {STOPPED} tests had to be stopped: choose it with -k"
        pytest.fail(problem, pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Name known mistakes."""
    if points_of(pyfuncitem) is None:
        return (yield)
    try:
        return (yield)
    except (Exception, pytest.fail.Exception) as failure:
        missing = isinstance(failure, NotImplementedError) or type(failure).__name__ == "Borrowed"
        if not missing and getattr(failure, "pytrace", True):
            failure.known = known_mistake(pyfuncitem, failure)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if points_of(item) is not None:
        report.hint = first_line(call) if call.excinfo else ""
        item.config.grades.stopped[task_of(item)[0]] += report.hint.endswith("was stopped")
        item.config.grades.tasks[task_of(item)][item.originalname].record(report)
    return report


def first_line(call: pytest.CallInfo) -> str:
    """Summarise a failure in one line: the known mistake, if it is one, then the assertion's
    message, or the exception's type and message."""
    message = str(call.excinfo.value).split("\n")[0]
    says_all = call.excinfo.errisinstance((AssertionError, pytest.fail.Exception, Ended))
    if not (says_all or call.excinfo.typename == "Borrowed") or not message:
        message = f"{call.excinfo.typename}: {message}".rstrip(": ")
    known = getattr(call.excinfo.value, "known", "")
    line = f"{known}: {message}" if known else message
    return "".join(c if c.isprintable() else "?" for c in line[:LONGEST])


# ---- the table of points -------------------------------------------------------------------------


def pytest_collection_finish(session):
    for item in session.items:
        mark = points_of(item)
        if mark is not None:
            tests = session.config.grades.tasks.setdefault(task_of(item), {})
            tests.setdefault(item.originalname, Graded(*mark.args)).pending += 1


def pytest_sessionfinish(session, exitstatus):
    earned, possible = session.config.grades.total
    if exitstatus == pytest.ExitCode.OK and earned < possible:  # e.g. tests were skipped
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config):
    if config.option.results is not None and config.grades.tasks:
        write_json(config.option.results, results(config.grades, config.option.seed), indent=1)


def results(grades: Grades, seed: int) -> dict:
    """As Gradescope wants them: a test for each task."""
    tests = []
    for task in grades.tasks:
        earned, possible = grades.of(task)
        tests.append({"name": task[1], "score": earned, "max_score": possible,
                      "output": grades.hint(task)})  # fmt: skip
    return {"tests": tests, "output": f"seed {seed}"}


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
        earned, possible = grades.of(task)
        line = f"  {name:<16}{earned:>3} of {possible:<3} {grades.hint(task)}"
        terminalreporter.write_line(line.rstrip())
    earned, possible = grades.total
    seed = config.option.seed
    terminalreporter.write_line(f"{'total':<18}{earned:>3} of {possible}   seed {seed}")
