"""The assignments' grading: the reference earns all points, starters and cheats earn none, and each
known wrong answer gets its own message.
"""

import doctest
import importlib.util
import inspect
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import ROOT

from lessons.assignments.grading import failure_of, task_of
from minispec.sampling import OneHot, Seeded
from minispec.tree import Tree

FOLDER = ROOT / "lessons" / "assignments"
ASSIGNMENTS = sorted(path.name for path in FOLDER.iterdir() if (path / "starter.py").exists())


class Recorder:
    """A pytest plugin that records the grades of a run."""

    def pytest_sessionfinish(self, session):
        self.grades = session.config.grades


def grade(assignment: str, impl: str, *more: str) -> tuple[int, Recorder]:
    """Grade an implementation; return the exit code and what was recorded."""
    recorder = Recorder()
    return run(assignment, f"--impl={impl}", *more, plugin=recorder), recorder


def run(assignment: str, *options: str, plugin: object) -> int:
    """Run the tests of an assignment from this process, and return the exit code."""
    quiet = ["-q", "--tb=no", "--no-summary", "--capture=no", "-p", "no:cacheprovider"]
    quiet += ["-p", "no:unraisableexception"]  # it runs the garbage collector five times
    # importlib mode, because a second conftest.py must not replace the first
    options = [str(FOLDER / assignment), "--import-mode=importlib", *quiet, *options]
    return int(pytest.main(options, [plugin]))


def hints(recorder: Recorder) -> dict[str, str]:
    """The messages of the tasks that did not earn all of their points."""
    grades = recorder.grades
    points = {task: grades.of(task) for task in grades.tasks}
    return {task[1]: grades.hint(task) for task, (earned, all_) in points.items() if earned < all_}


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- reference and starter -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "assignment",
    [pytest.param(a, marks=pytest.mark.slow if a[:2] == "a8" else []) for a in ASSIGNMENTS],
)
def test_the_reference_earns_all_points_and_the_readmes_list_them(assignment):
    code, recorder = grade(assignment, "minispec")
    earned, possible = recorder.grades.total
    assert code == 0 and earned == possible > 0 and not hints(recorder)
    readme = (FOLDER / assignment / "README.md").read_text(encoding="utf-8")
    for _, task in recorder.grades.tasks:
        points = recorder.grades.of((assignment, task))[1]
        assert re.search(rf"^\| {task} \|.*\| {points} \|$", readme, re.MULTILINE), (task, points)
    overview = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| \[{assignment}\].*\| {possible} \|$", overview, re.MULTILINE), possible


@pytest.mark.parametrize("assignment", ["a2_accept", pytest.param("", marks=pytest.mark.slow)])
def test_the_starters_only_raise_not_implemented(assignment):
    code, recorder = grade(assignment, "starter")
    assert code == 1 and recorder.grades.total[0] == 0
    found = {test.hint for tests in recorder.grades.tasks.values() for test in tests.values()}
    assert found == {"NotImplementedError"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 20))
def test_the_reference_passes_with_other_random_cases(seed):
    code, recorder = grade("", "minispec", f"--seed={seed}")
    assert code == 0, hints(recorder)


def test_only_tests_that_ran_and_passed_earn_points():
    assert grade("a2_accept", "minispec", "-k", "greedy")[1].grades.total == (3, 3)
    assert grade("a2_accept", "starter", "-x")[1].grades.total[0] == 0


@pytest.mark.parametrize(
    "impl, problem",
    [
        ("nowhere.py", "no such file"), ("nowhere/x", "no such file"), ("no.such.module", "module"),
        ("my solution.ipynb", "is a notebook; save it as a .py file"),
        ("empty", "has no file named after an assignment"), ("notes.txt", "must be a .py file"),
        ("odd.py", "cannot be read (SyntaxError: "), ("nul.py", "cannot be read ("),
    ],
)  # fmt: skip
def test_what_is_no_implementation_is_reported_in_one_line(
    impl, problem, tmp_path, monkeypatch, capsys
):
    for file, text in ("odd.py", "def accept(:"), ("nul.py", "\0"), ("notes.txt", "accept"):
        (tmp_path / file).write_text(text)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    code = pytest.main([str(FOLDER / "a2_accept"), f"--impl={impl}", "--import-mode=importlib"])
    err = capsys.readouterr().err.strip()
    assert code == pytest.ExitCode.USAGE_ERROR and "\n" not in err
    assert f"--impl {impl}: " in err and problem in err


@pytest.mark.parametrize("code", ["import nothing", "raise SystemExit(0)"])
def test_a_file_whose_import_fails_is_reported_in_the_table(code, tmp_path):
    file = tmp_path / "my solution.py"
    file.write_text(code)
    exit_code, recorder = grade("a2_accept", str(file), "-k", "greedy")
    assert exit_code == 1
    error = "ModuleNotFoundError: No module named 'nothing'" if code[0] == "i" else "SystemExit: 0"
    assert hints(recorder)["greedy"] == f"{file} cannot be imported ({error})"


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
@pytest.mark.parametrize("impl", ["my solution.py", 'Anna\'s "$HOME" `x`.py'])
def test_make_grades_a_file_of_any_name(impl):
    command = ["make", "--no-print-directory", "-n", "grade", "A=a2_accept", "SEED=1"]
    command.append(f"IMPL={impl.replace('$', '$$')}")
    printed = subprocess.check_output(command, cwd=ROOT, text=True)
    assert shlex.split(printed.split("pytest")[1])[-2:] == [f"--impl={impl}", "--seed=1"]


def test_a_folder_has_one_file_per_assignment_and_missing_names_are_reported(tmp_path):
    file = tmp_path / "a2_accept.py"
    file.write_text("from minispec.verify import residual")
    _, recorder = grade("a2_accept", str(tmp_path), "--allow-package")
    found = hints(recorder)
    assert "residual" not in found and set(found.values()) == {f"{file} has no accept"}
    _, recorder = grade("a1_cache_and_mask", str(tmp_path))
    assert set(hints(recorder).values()) == {f"{tmp_path} has no a1_cache_and_mask.py"}


def functions(module: ModuleType, names: list[str]) -> dict[str, Callable]:
    """Functions and classes' methods, by their dotted names."""
    found = {}
    for name in names:
        x = getattr(module, name)
        methods = inspect.getmembers(x, inspect.isfunction) if inspect.isclass(x) else [("", x)]
        found |= {f"{name}.{method}": function for method, function in methods}
    return found


def own_functions(stubs: ModuleType) -> dict[str, Callable]:
    """The stubs of a starter, without what its classes inherit."""
    names = [n for n, x in vars(stubs).items() if getattr(x, "__module__", 0) == stubs.__name__]
    found = functions(stubs, names)
    return {name: stub for name, stub in found.items() if stub.__module__ == stubs.__name__}


def signature(function: Callable, parameters: int | None = None) -> str:
    """A signature whose annotations have lost their modules, without optional parameters beyond a
    number."""
    full = inspect.signature(function)
    kept, rest = list(full.parameters.values())[:parameters], list(full.parameters.values())
    assert all(p.default is not p.empty for p in rest[len(kept) :]), function
    text = str(full.replace(parameters=kept)).replace("'", "")
    return re.sub(r"[\w.]+\.(\w+)", r"\1", text)


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_signatures_of_starter_and_reference_agree(assignment):
    stubs = load(FOLDER / assignment / "starter.py", f"{assignment}_stubs")
    names = [n for n, x in vars(stubs).items() if getattr(x, "__module__", 0) == stubs.__name__]
    reference = functions(load(FOLDER / assignment / "reference.py", f"{assignment}_ref"), names)
    starter = functions(stubs, names)
    assert starter
    for name, stub in starter.items():
        n = len(inspect.signature(stub).parameters)
        assert signature(reference[name], n) == signature(stub), name


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_each_stub_shows_an_example_that_holds(assignment):
    stubs = load(FOLDER / assignment / "starter.py", f"{assignment}_stubs")
    for name, stub in own_functions(stubs).items():
        assert "Example" in stub.__doc__ or ">>>" in stub.__doc__, name
    reference = load(FOLDER / assignment / "reference.py", f"{assignment}_ref")
    given = {"torch": torch, "OneHot": OneHot, "Seeded": Seeded, "Tree": Tree}
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(stubs, extraglobs=given | vars(reference)):
        runner.run(test)
    assert runner.summarize().failed == 0


READING = re.compile(r"\*\*Reading\.\*\*.*?\n\n", re.DOTALL)


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_the_reading_list_does_not_name_the_files_with_the_answer(assignment):
    readme = (FOLDER / assignment / "README.md").read_text(encoding="utf-8")
    reading = READING.search(readme).group()
    for path in re.findall(r"minispec/[\w/]+\.py", reading):
        assert (ROOT / path).is_file(), path
    reference = load(FOLDER / assignment / "reference.py", f"{assignment}_ref")
    stubs = load(FOLDER / assignment / "starter.py", f"{assignment}_stubs")
    for name, stub in own_functions(stubs).items():
        function = functions(reference, [name.partition(".")[0]])[name]
        file = Path(inspect.getsourcefile(inspect.unwrap(function)))
        assert file.relative_to(ROOT).as_posix() not in reading, file


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


@pytest.mark.slow
@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_each_wrong_answer_gets_its_own_message(assignment):
    replays = Replays(assignment)
    run(assignment, "--impl=minispec", plugin=replays)
    mistakes = replays.mistakes
    assert len({mistake.message for mistake in mistakes}) == len(mistakes)
    for i, mistake in enumerate(mistakes):
        for task in mistake.tasks.split(", "):
            assert replays.named_for(i, task) == mistake.message, task
    for task in replays.failures:
        known = [mistake for mistake in mistakes if task in mistake.tasks.split(", ")]
        assert len(known) >= 3, f"{task}: three wrong answers or more"


SAMPLES_P_AGAIN = """
def accept(target, tree, randomness):
    path = [0]
    while True:
        p = target[path[-1]]
        for child in tree.children(path[-1]):
            x, q = tree.tokens[child], tree.drawn_from(child)
            if randomness.bernoulli(min(1.0, float(p[x]) / (1.0 if q is None else float(q[x])))):
                break
        else:
            return path, randomness.categorical(p)
        path.append(child)
"""


def test_the_table_names_a_students_mistake(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SAMPLES_P_AGAIN)
    _, recorder = grade("a2_accept", str(file), "-k", "chain or tree or siblings")
    for task in "chain", "tree":
        message = hints(recorder)[task]
        assert message.startswith("after a rejection it draws from p again, not from the residual")
        assert re.search(r"the output is \d\.\de-\d\d \(total variation\) away", message)


# ---- cheats --------------------------------------------------------------------------------------

CHEATS = {  # an attempt -> the beginning of what every task of a2 says to it
    "import os; os._exit(0)": "the process ended with status 0 before the test did",
    "import time; time.sleep(60)": "it ran for more than 1 seconds and was stopped",
    "import pytest; pytest.exit('done', 0)": "",
    "raise SystemExit(0)": "SystemExit: 0",
    "return verify.accept(*arguments)": "uses minispec's own accept",
    "return getattr(METHODS_OF['verify'], 'acc' + 'ept')(*arguments)": "uses minispec's own accept",
}


@pytest.mark.parametrize("attempt", CHEATS)
def test_a_cheat_earns_nothing(attempt, tmp_path):
    file = tmp_path / "cheat.py"
    file.write_text(
        "from minispec import verify\n"
        "METHODS_OF = {'verify': verify}\n"
        f"def accept(*arguments):\n    {attempt}\n"
    )
    code, recorder = grade("a2_accept", str(file), "-o", "seconds=1", "-k", "greedy")
    assert code == 1 and recorder.grades.total == (0, 3)
    assert hints(recorder)["greedy"].startswith(CHEATS[attempt])


def test_an_exit_while_importing_earns_nothing(tmp_path):
    file = tmp_path / "cheat.py"
    file.write_text("import os\nos._exit(0)")
    code, recorder = grade("a2_accept", str(file))
    assert code == 1 and recorder.grades.total[0] == 0


OWN = """
from minispec import cache, tree
from minispec.tree import layout

class KVCache(cache.KVCache):
    def place(self, n, depth, mask):
        return super().place(n, depth, mask)

    def truncate(self, length):
        self.lengths = [length]
"""


def test_the_packages_own_functions_earn_nothing_unless_allowed(tmp_path):
    """Imported, called by `super()`, inherited; what was written earns its points."""
    file = tmp_path / "own.py"
    file.write_text(OWN)
    code, recorder = grade("a1_cache_and_mask", str(file))
    end = ", which earns nothing: write it"
    assert code == 1 and hints(recorder) == {
        "depth": f"uses minispec's own layout{end}",
        "mask": f"uses minispec's own layout{end}",
        "place": f"uses minispec's own KVCache.place{end}",
        "commit": f"uses minispec's own KVCache.commit{end}",
        "together": f"uses minispec's own KVCache.commit, KVCache.place, layout{end}",
    }
    assert grade("a1_cache_and_mask", str(file), "--allow-package")[0] == 0


def test_a_copy_is_not_the_packages_own(tmp_path):
    """The grader cannot tell who wrote the code, only whose it runs."""
    file = tmp_path / "copy.py"
    file.write_text((ROOT / "minispec" / "verify.py").read_text(encoding="utf-8"))
    assert grade("a2_accept", str(file))[0] == 0


def test_seed_changes_the_random_cases(tmp_path):
    """An answer that knows the cases of one seed fails those of another."""
    file = tmp_path / "memory.py"
    file.write_text(
        "from minispec.tree import layout as right\n"
        "def layout(parents):\n"
        "    with open(__file__ + '.log', 'a') as log:\n"
        "        log.write(repr(parents))\n"
        "    return right(parents)\n"
    )
    log, cases = Path(f"{file}.log"), []
    for seed in 0, 1, 1:
        options = "--allow-package", f"--seed={seed}", "-k", "mask or depth"
        grade("a1_cache_and_mask", str(file), *options)
        cases.append(log.read_text())
        log.unlink()
    assert cases[0] != cases[1] == cases[2]
