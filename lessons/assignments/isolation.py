"""What a submission cannot get around by accident: tests run in child processes, a task is not
earned by calling the package's own solution, and what no solution needs is refused. This is not a
sandbox: whoever wants to forge points can. README.md says how to grade in a container."""

import contextlib
import functools
import inspect
import math
import multiprocessing
import os
import pkgutil
import signal
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType, ModuleType

import pytest
from _pytest.runner import runtestprotocol

try:
    import resource
except ImportError:  # Windows
    resource = None

GRADER = Path(__file__).parent
PACKAGE = GRADER.parent.parent / "minispec"

# ---- the grader's files --------------------------------------------------------------------------

SHARED = (
    "conftest.py", "grading.py", "isolation.py", "leaderboard.html", "leaderboard.py", "mutants.py",
    "pytest.ini", "score.py", "texts.json",
)  # fmt: skip
ASSIGNMENTS = sorted(path.parent for path in GRADER.glob("a?_*/starter.py"))
FILES = {
    *(GRADER / name for name in SHARED), GRADER / "a8_engine" / "proposers.py",
    *(folder / name for folder in ASSIGNMENTS for name in (
        "starter.py", "reference.py", "mistakes.py", f"test_{folder.name}.py")),
}  # fmt: skip
LIMITS = "seconds", "gigabytes"  # of a test, in pytest.ini
PATIENCE = 5  # other programs may keep the processor busy for this many times a test's seconds
IGNORED = {"README.md", "__pycache__", ".pytest_cache", ".DS_Store"}


def contents() -> dict[Path, bytes]:
    """The files of the grader, strange ones included, and those of the package; without READMEs."""
    files = [*GRADER.rglob("*"), *PACKAGE.rglob("*.py")]
    return {path: path.read_bytes() for path in files
            if path.is_file() and not IGNORED & set(path.parts)}  # fmt: skip


def strange_files() -> list[Path]:
    """Files among the grader's that are not its own. pytest would run a conftest.py that a
    submission has left there, for everybody who is graded later."""
    return sorted(path for path in contents() if path.is_relative_to(GRADER) and path not in FILES)


LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
TRUSTED = (  # where code that is not the submission's lies
    "<frozen ", *(f"{folder}{os.sep}" for folder in (PACKAGE, *LIBRARIES)),
    *(str(path) for path in FILES if path.suffix == ".py" and path.name != "starter.py"),
)  # fmt: skip


def called_by_submission(frame: FrameType | None) -> bool:
    """Whether code of the submission is among those that led to this frame, in a test's child."""
    while frame is not None:
        if frame.f_code is send_result.__code__:
            return False
        if not frame.f_code.co_filename.startswith(TRUSTED):
            return True
        frame = frame.f_back
    return False  # a thread, which only the package can have started


# ---- work in a child process ---------------------------------------------------------------------


def run_apart(
    work: Callable[[], object], before: dict[Path, bytes], seconds: float, gigabytes: float
) -> tuple[object, str, bool]:
    """Run `work` in a fork of this process. Returns its result and "", or raises its exception. If
    the child ends before it has sent one of them, needs more than `seconds` of processor time or
    PATIENCE times as long, does what is refused or leaves the grader's files other than `before`:
    returns None, this problem, and whether it had to be stopped."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=send_result, args=(work, sender, seconds, gigabytes))
    with warnings.catch_warnings():
        # newer Pythons warn if there are other threads; here they only wait
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sender.close()  # the child's end: now its death ends the pipe
    result, problem = None, None
    try:
        in_time = receiver.poll(PATIENCE * seconds)
        if in_time:
            with contextlib.suppress(EOFError):
                result, problem = receiver.recv()
            child.join(1)
        stopped = not in_time or -(child.exitcode or 0) == getattr(signal, "SIGXCPU", None)
        if stopped:
            problem = f"it ran for more than {seconds:g} seconds and was stopped"
        elif problem is None:
            problem = f"the process ended with status {child.exitcode} before it was done"
    finally:  # also if grading is interrupted
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)  # what the submission has started ends with it
        child.kill()
        child.join()
    after = contents()
    if changed := sorted(p for p in before.keys() | after.keys() if before.get(p) != after.get(p)):
        problem = f"it has written to {changed[0]}: put that back or remove it"
    if isinstance(result, Exception) and not problem:
        raise result
    return None if problem else result, problem, stopped


def send_result(
    work: Callable[[], object], sender: Connection, seconds: float, gigabytes: float
) -> None:
    """Do the work in the child. Send the result, or the exception that was raised, and no problem.
    """
    os.setpgrp()
    if resource is not None:
        limits = {resource.RLIMIT_DATA: gigabytes * 2**30, resource.RLIMIT_CPU: seconds}
        for which, limit in limits.items():
            # hard ones are higher: at the soft one SIGXCPU ends a process, at the hard one SIGKILL
            with contextlib.suppress(ValueError, OSError):  # a lower limit holds already
                resource.setrlimit(which, (math.ceil(limit), math.ceil(limit) + 1))
    refuse_events(sender)
    try:
        result = work()
    except Exception as error:
        result = error
    sender.send((result, ""))


def run_in_child(item: pytest.Item, before: dict[Path, bytes]) -> list[pytest.TestReport]:
    """Run a test in a child process (see `run_apart`), and return its reports. Later tests share
    nothing with it: all fixtures are torn down."""
    hook, limits = item.config.hook, [float(item.config.getini(x)) for x in LIMITS]
    reports, problem, stopped = run_apart(
        lambda: [hook.pytest_report_to_serializable(config=item.config, report=report)
                 for report in runtestprotocol(item, log=False)], before, *limits
    )  # fmt: skip
    if problem:
        return [failed(item, problem, stopped)]
    return [hook.pytest_report_from_serializable(config=item.config, data=report)
            for report in reports]  # fmt: skip


def failed(item: pytest.Item, problem: str, stopped: bool = False) -> pytest.TestReport:
    """The report of a test that has no result of its own."""
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", problem, "call",
                             hint=problem, stopped=stopped)  # fmt: skip


# ---- what no solution needs ----------------------------------------------------------------------

REFUSED = {  # events of Python's audit hooks, caused by the submission or by what it calls
    "sys.settrace": "switches the grader's trace",
    "_thread.start_new_thread": "starts a thread",
    "os.fork": "starts a process",
    "os.forkpty": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.system": "starts a process",
    "os.exec": "becomes another process",
    "subprocess.Popen": "starts a process",
    "gc.get_objects": "searches the objects of the grader",
    "gc.get_referrers": "searches the objects of the grader",
    "ctypes.dlopen": "loads a library of C",
}
REFUSED_IN_ITS_LINES = {  # elsewhere these are common: an import runs code, too
    "exec": "runs code that it has as data",
    "compile": "makes code from text",
    "code.__new__": "makes code from other code",
    "object.__setattr__": "gives a function other code",
}


def refuse_events(sender: Connection) -> None:
    """From now on, end this process if the submission does what no solution needs."""

    def audit(event: str, arguments: tuple) -> None:
        if event in REFUSED and called_by_submission(sys._getframe(1)):
            problem = REFUSED[event]
        elif event in REFUSED_IN_ITS_LINES and (
            event != "object.__setattr__" or arguments[1] == "__code__"
        ) and not sys._getframe(1).f_code.co_filename.startswith(TRUSTED):  # fmt: skip
            problem = REFUSED_IN_ITS_LINES[event]
        else:
            return
        sender.send((None, f"it {problem}, which no solution needs"))
        os._exit(1)

    start = threading.Thread.start

    def audited_start(thread: threading.Thread) -> None:
        sys.audit("_thread.start_new_thread")  # Python 3.11 does not
        start(thread)

    threading.Thread.start = audited_start
    sys.addaudithook(audit)


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
    return file.startswith(f"{PACKAGE}{os.sep}") or Path(file).name == "reference.py"


def taken_over(submission: ModuleType, names: Iterable[str]) -> set[str]:
    """Those of the graded functions that the submission imports or inherits from the package."""
    return {name for name in names if is_packages_own(attribute(submission, name))}


@contextlib.contextmanager
def calls_of(reference: ModuleType, names: Iterable[str]) -> Iterator[set[str]]:
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
        if name is not None and called_by_submission(frame.f_back):
            called.add(name)

    before = sys.gettrace()
    sys.settrace(note)
    try:
        yield called
    finally:
        sys.settrace(before)

