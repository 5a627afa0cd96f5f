"""Grade an implementation: pytest lessons/assignments/a2_accept --impl=my_solution.py

`@pytest.mark.points(5, task="commit")` sets how many points a test is worth. They are earned if it
passes for all of its parameters. `GRADED` in a test file names the functions that a task is about.
A table of tasks is printed at the end.
"""

import ast
import importlib.util
import sys
from collections.abc import Callable
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
from lessons.assignments.isolation import (  # noqa: E402
    calls_of,
    contents,
    failed,
    run_in_child,
    strange_files,
    taken_over,
)

CASES_PER_SEED = 1000  # more than any test draws
STOPPED = 2  # tests of an assignment that may run too long; after them no other is run

if strange := strange_files():  # now, before pytest runs a conftest.py among them
    print(f"{strange[0]}: not a file of the grader; move or remove it", file=sys.stderr)
    raise SystemExit(2)


def pytest_addoption(parser):
    parser.addoption(
        "--impl",
        default="starter",
        help="what to grade: a module, a .py file, a folder of files named after the assignments, "
        "or `minispec` for the reference (default: the starters)",
    )
    parser.addoption("--seed", type=int, default=0, help="draw other random cases (default: 0)")
    parser.addoption(
        "--allow-package",
        action="store_true",
        help="give points for the package's own functions as well",
    )
    parser.addini("seconds", "how much processor time a test may use")
    parser.addini("gigabytes", "how much memory a test may allocate")


def pytest_configure(config):
    config.addinivalue_line("markers", "points(n, task): what a test is worth, and for which task")
    config.grades, config.contents = Grades(), contents()
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
        found = any((path / f"{folder.name}.py").is_file() for folder in HERE.glob("a?_*"))
        return "" if found else "has no file named after an assignment, such as a2_accept.py"
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
def impl(request) -> Implementation:
    """The implementation chosen by `--impl`, for this test's assignment."""
    name, folder = request.config.getoption("--impl"), request.path.parent
    if name == "minispec":
        return Implementation(load(folder / "reference.py"), name)
    if name == "starter":
        return Implementation(load(folder / "starter.py"), name)
    file = Path(name) / f"{folder.name}.py" if Path(name).is_dir() else Path(name)
    if Path(name).is_dir() and not file.is_file():
        pytest.fail(f"{name} has no {file.name}", pytrace=False)
    try:
        module = load(file) if file.suffix == ".py" else importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a student's file may raise anything
        pytest.fail(f"{file} cannot be imported ({type(error).__name__}: {error})", pytrace=False)
    return Implementation(module, str(file))


@pytest.fixture
def seeds(request) -> Callable[[int], range]:
    """seeds(n): the seeds of `n` random cases, which `--seed` changes."""
    first = CASES_PER_SEED * request.config.getoption("--seed")
    return lambda n: range(first, first + n)


# ---- running a test ------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem) -> bool | None:
    """Run a graded test in a child process, and record its points in this one."""
    if points_of(item) is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    grades, task = item.config.grades, task_of(item)
    if grades.stopped[task[0]] < STOPPED:
        reports = run_in_child(item, item.config.contents)
    else:
        problem = f"not run, as {STOPPED} tests had to be stopped: choose it with -k"
        reports = [failed(item, problem)]
    for report in reports:
        grades.tasks[task][item.originalname].record(report)
        grades.stopped[task[0]] += getattr(report, "stopped", False)
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Fail a test that is passed with the package's own solution; name known mistakes."""
    if points_of(pyfuncitem) is None:
        return (yield)
    names, result, failure = names_to_write(pyfuncitem), None, None
    reference = load(pyfuncitem.path.parent / "reference.py")
    submission = pyfuncitem.funcargs["impl"]._module
    used = taken_over(submission, names)
    with calls_of(reference, names) as called:
        try:
            result = yield
        except (Exception, pytest.fail.Exception) as error:
            failure = error
    used |= taken_over(submission, names)  # it may have changed
    if used | called:
        own = ", ".join(sorted(used | called))
        pytest.fail(f"uses minispec's own {own}, which earns nothing: write it", pytrace=False)
    if failure is None:
        return result
    written = not isinstance(failure, NotImplementedError) and getattr(failure, "pytrace", True)
    if written:  # and it is not missing
        failure.known = known_mistake(pyfuncitem, failure)
    raise failure


def names_to_write(item: pytest.Item) -> list[str]:
    """The functions of the test's task, unless those of the package will do."""
    options = item.config.option
    if options.allow_package or options.impl in ("minispec", "starter"):
        return []
    return item.module.GRADED[task_of(item)[1]].split(", ")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.hint = first_line(call) if report.failed else ""
    return report


def first_line(call: pytest.CallInfo) -> str:
    """Summarise a failure in one line: the known mistake, if it is one, then the assertion's
    message, or the exception's type and message."""
    message = str(call.excinfo.value).split("\n")[0]
    is_assertion = call.excinfo.errisinstance((AssertionError, pytest.fail.Exception))
    if not (is_assertion and message):
        message = f"{call.excinfo.typename}: {message}".rstrip(": ")
    known = getattr(call.excinfo.value, "known", "")
    return f"{known}: {message}" if known else message


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
    terminalreporter.write_line(f"{'total':<18}{earned:>3} of {possible}")
