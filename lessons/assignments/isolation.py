"""What a submission cannot get around by accident: tests run in child processes, and a task is not
earned by calling the package's own solution. This is not a sandbox: whoever wants to forge points
can, so read the code of those who might."""

import contextlib
import functools
import inspect
import multiprocessing
import pkgutil
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType, ModuleType

import pytest
from _pytest.runner import runtestprotocol

PACKAGE = Path(__file__).parents[2] / "minispec"
PROPOSERS = Path(__file__).parent / "a8_engine" / "proposers.py"
TRUSTED = (str(PACKAGE), str(PROPOSERS), "<frozen ",
           *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))  # fmt: skip

# ---- one child process per test ------------------------------------------------------------------


def run_in_child(item: pytest.Item, seconds: float) -> list[pytest.TestReport]:
    """Run a test in a fork of this process, and return its reports. If the child ends before it has
    sent them, or needs more than `seconds`, the test has failed."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=send_reports, args=(item, sender))
    with warnings.catch_warnings():
        # newer Pythons warn if there are other threads; here they only wait
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sender.close()  # the child's end: now its death ends the pipe
    reports = None
    if receiver.poll(seconds):
        with contextlib.suppress(EOFError):
            reports = receiver.recv()
        child.join(1)
        problem = f"the process ended with status {child.exitcode} before the test did"
    else:
        problem = f"it ran for more than {seconds:g} seconds and was stopped"
    child.kill()  # threads of the submission may still run
    child.join()
    if reports is None:
        return [pytest.TestReport(item.nodeid, item.location, {}, "failed", problem, "call",
                                  hint=problem)]  # fmt: skip
    return [item.config.hook.pytest_report_from_serializable(config=item.config, data=report)
            for report in reports]  # fmt: skip


def send_reports(item: pytest.Item, sender: Connection) -> None:
    """Run the test, in the child. Later tests share nothing with it: all fixtures are torn down."""
    hook = item.config.hook
    sender.send([hook.pytest_report_to_serializable(config=item.config, report=report)
                 for report in runtestprotocol(item, log=False)])  # fmt: skip


# ---- use of the package's own solution -----------------------------------------------------------


def attribute(owner: object, name: str) -> object:
    """A function or method by its dotted name; None if there is none."""
    return functools.reduce(lambda x, part: getattr(x, part, None), name.split("."), owner)


def code_of(function: object) -> CodeType | None:
    """The code of a function or method, below its decorators; None if it is not in Python."""
    return getattr(inspect.unwrap(function), "__code__", None)


def place_of(code: CodeType) -> tuple[str, str]:
    """What tells a function from a copy of it: two such codes are equal to Python."""
    return code.co_filename, code.co_qualname


def is_packages_own(function: object) -> bool:
    """Whether a function is from the package, or from the reference of an assignment."""
    file = code_of(function).co_filename if code_of(function) else ""
    return file.startswith(str(PACKAGE)) or Path(file).name == "reference.py"


def taken_over(submission: ModuleType, names: Iterable[str]) -> set[str]:
    """Those of the graded functions that the submission imports or inherits from the package."""
    return {name for name in names if is_packages_own(attribute(submission, name))}


@contextlib.contextmanager
def calls_of(reference: ModuleType, names: Iterable[str], test: Path) -> Iterator[set[str]]:
    """Collect which of the package's graded functions the submission calls meanwhile, under
    whatever name (`super()` too) and through whatever other function of the package."""
    found = {name: pkgutil.resolve_name(name) if name.startswith("minispec.")
             else attribute(reference, name) for name in names}  # fmt: skip
    graded = {place_of(code_of(function)): name for name, function in found.items()}
    called: set[str] = set()
    if not graded:
        yield called
        return

    def note(frame: FrameType, event: str, argument: object) -> None:
        name = graded.get(place_of(frame.f_code))
        if name is not None and called_by_submission(frame, str(test)):
            called.add(name)

    before = sys.gettrace()
    sys.settrace(note)
    try:
        yield called
    finally:
        sys.settrace(before)


def called_by_submission(frame: FrameType, test: str) -> bool:
    """Whether there is code of the submission between a call and the test that led to it."""
    while (frame := frame.f_back) is not None and frame.f_code.co_filename != test:
        if not frame.f_code.co_filename.startswith(TRUSTED):
            return True
    return False
