"""The assignments' grading: the reference earns all points, the starters none, and each wrong
answer loses only the points of its task and of the tasks that build on it.
"""

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import mistakes
import pytest
from conftest import ROOT

from minispec.certify.ours import mutants
from minispec.methods import adaptive, vocabulary
from minispec.training import distill

FOLDER = ROOT / "lessons" / "assignments"
ASSIGNMENTS = sorted(path.name for path in FOLDER.iterdir() if (path / "starter.py").exists())


class Recorder:
    """A pytest plugin that records the grades of a run and the exceptions of its failed tests."""

    def __init__(self):
        self.raised: list[BaseException] = []
        self.grades = None

    def pytest_exception_interact(self, call):
        self.raised.append(call.excinfo.value)

    def pytest_sessionfinish(self, session):
        self.grades = session.config.grades


def grade(assignment: str, impl: str, *more: str) -> tuple[int, Recorder]:
    """Grade an implementation in this process; return the exit code and what was recorded."""
    recorder = Recorder()
    options = ["-q", "--tb=no", "--no-summary", "--capture=no", "-p", "no:cacheprovider"]
    options += ["-p", "no:unraisableexception"]  # it runs the garbage collector five times
    path = str(FOLDER / assignment)
    # importlib mode, because a second conftest.py must not replace the first
    code = pytest.main(
        [path, f"--impl={impl}", "--import-mode=importlib", *options, *more], [recorder]
    )
    return int(code), recorder


def failed_tasks(recorder: Recorder) -> set[str]:
    """List the tasks that did not earn all of their points."""
    points = {task: recorder.grades.of(task) for task in recorder.grades.tasks}
    return {task for (_, task), (earned, possible) in points.items() if earned < possible}


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- reference and starter -----------------------------------------------------------------------


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_the_reference_earns_all_points_and_the_readmes_list_them(assignment):
    code, recorder = grade(assignment, "minispec")
    earned, possible = recorder.grades.total
    assert code == 0 and earned == possible > 0 and not failed_tasks(recorder)
    readme = (FOLDER / assignment / "README.md").read_text(encoding="utf-8")
    for _, task in recorder.grades.tasks:
        points = recorder.grades.of((assignment, task))[1]
        assert re.search(rf"^\| {task} \|.*\| {points} \|$", readme, re.MULTILINE), (task, points)
    overview = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| \[{assignment}\].*\| {possible} \|$", overview, re.MULTILINE), possible


def test_the_starters_only_raise_not_implemented():
    code, recorder = grade("", "starter")
    count = sum(len(tests) for tests in recorder.grades.tasks.values())
    assert code == 1 and recorder.grades.total[0] == 0 and len(recorder.raised) >= count
    assert {type(error) for error in recorder.raised} == {NotImplementedError}


def test_only_tests_that_ran_and_passed_earn_points():
    assert grade("a2_accept", "minispec", "-k", "greedy")[1].grades.total == (3, 3)
    assert grade("a2_accept", "starter", "-x")[1].grades.total[0] == 0


@pytest.mark.parametrize(
    "impl, message",
    [
        ("nowhere.py", "--impl nowhere.py: no such file"),
        ("no.such.module", "--impl no.such.module: cannot be imported (ModuleNotFoundError"),
        ("{tmp}/odd.py", "cannot be imported (SyntaxError"),
    ],
)
def test_a_missing_implementation_is_reported_in_one_line(impl, message, tmp_path, capsys):
    (tmp_path / "odd.py").write_text("def accept(:")
    options = [f"--impl={impl.format(tmp=tmp_path)}", "--import-mode=importlib"]
    code = pytest.main([str(FOLDER / "a2_accept"), *options])
    err = capsys.readouterr().err.strip()
    assert code == pytest.ExitCode.USAGE_ERROR and message in err and "\n" not in err


def test_a_folder_has_one_file_per_assignment_and_missing_names_are_reported(tmp_path):
    (tmp_path / "a2_accept.py").write_text("from minispec.verify import residual")
    _, recorder = grade("a2_accept", str(tmp_path))
    tests = recorder.grades.tasks
    assert all(t.passed for t in tests["a2_accept", "residual"].values())
    for graded in tests["a2_accept", "greedy"].values():
        assert graded.hint == f"{tmp_path / 'a2_accept.py'} has no accept"
    _, recorder = grade("a1_cache_and_mask", str(tmp_path))
    assert {t.hint for tests in recorder.grades.tasks.values() for t in tests.values()} == {
        f"{tmp_path} has no a1_cache_and_mask.py"
    }


def signatures(module: ModuleType, names: list[str]) -> dict[str, str]:
    """Get the signatures of functions and of classes' methods. Annotations lose their modules."""
    found = {}
    for name in names:
        x = getattr(module, name)
        methods = inspect.getmembers(x, inspect.isfunction) if inspect.isclass(x) else [("", x)]
        for method, function in methods:
            text = str(inspect.signature(function)).replace("'", "")
            found[f"{name}.{method}"] = re.sub(r"[\w.]+\.(\w+)", r"\1", text)
    return found


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_signatures_of_starter_and_reference_agree(assignment):
    stubs = load(FOLDER / assignment / "starter.py", f"{assignment}_stubs")
    names = [n for n, x in vars(stubs).items() if getattr(x, "__module__", 0) == stubs.__name__]
    starter = signatures(stubs, names)
    reference = signatures(load(FOLDER / assignment / "reference.py", f"{assignment}_ref"), names)
    assert starter and {name: reference.get(name) for name in starter} == starter


# ---- wrong answers -------------------------------------------------------------------------------


class Replays:
    """A pytest plugin that runs each test on the known mistakes instead of on a submission."""

    def __init__(self, assignment: str):
        self.folder = FOLDER / assignment
        self.mistakes = load(self.folder / "mistakes.py", f"{assignment}_mistakes").MISTAKES
        # for each task, for each of its tests, how it fails for each mistake (None: it passes)
        self.failures: dict[str, list[list[str | None]]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        task = task_of(pyfuncitem)[1]
        found = [
            failure_of(pyfuncitem, mistake) if task in mistake.tasks.split(", ") else None
            for mistake in self.mistakes
        ]
        pyfuncitem.user_properties += [("task", task), ("failures", found)]
        return True

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            found = dict(report.user_properties)
            self.failures.setdefault(found["task"], []).append(found["failures"])

    def named_for(self, i: int, task: str) -> str | None:
        """The message that the grader adds in the table for mistake `i`; None if it is not found
        out."""
        first = next((found for found in self.failures[task] if found[i]), None)
        return first and self.mistakes[first.index(first[i])].message
