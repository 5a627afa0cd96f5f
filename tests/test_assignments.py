"""The assignments' grading: the reference earns all points, starters and cheats earn none, and each
known wrong answer gets its own message.
"""

import contextlib
import doctest
import fcntl
import importlib.util
import inspect
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import ROOT

from lessons.assignments import grading, isolation
from lessons.assignments.grading import Mistake, failure_of, task_of
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
    quiet += ["-o", "seconds=600"]  # other tests may keep the processor busy
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
    """A signature whose annotations have lost their modules and declarations, without optional
    parameters beyond a number."""
    full = inspect.signature(function)
    plain = [p.replace(annotation=getattr(p.annotation, "__origin__", p.annotation))
             if hasattr(p.annotation, "__metadata__") else p for p in full.parameters.values()]
    kept, rest = plain[:parameters], plain[parameters:] if parameters else []
    assert all(p.default is not p.empty for p in rest), function
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
        first = next((found for found in self.failures[task] if found[i]), [])
        fits = [known.message for known, how in zip(self.mistakes, first) if how == first[i]]
        return fits[0] if len(fits) == 1 else None


@pytest.mark.slow
@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_each_wrong_answer_gets_its_own_message(assignment, monkeypatch):
    monkeypatch.setattr(isolation, "TRUSTED", (*isolation.TRUSTED, __file__))  # it is no submission
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


def test_a_mistake_is_named_only_if_it_is_the_only_one_that_fits(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(SAMPLES_P_AGAIN)
    twins = [
        Mistake("chain", name, {"accept": load(file, "mine").accept}) for name in ("one", "other")
    ]
    for known, named in (twins[:1], "one: "), (twins, ""):
        monkeypatch.setattr(grading, "mistakes_of", lambda assignment, task, known=known: known)
        _, recorder = grade("a2_accept", str(file), "-k", "chain")
        assert hints(recorder)["chain"].startswith(f"{named}the output is ")


# ---- free rides ----------------------------------------------------------------------------------

PLAIN_LOOP = """
from minispec.methods.autoregressive import autoregressive

def plain(model, prompt, sampling, randomness, *, cache=None, **options):
    return autoregressive(model, prompt, sampling, randomness, cache=cache)
"""
PLAIN = {  # plain decoding as an answer to the assignments that decode
    "a2_accept": """
def accept(target, tree, randomness):
    return [0], randomness.categorical(target[0])
""",
    "a3_draft_target": PLAIN_LOOP + "speculative = plain",
    "a5_lookahead": PLAIN_LOOP + "jacobi = lookahead = plain",
    "a8_engine": PLAIN_LOOP + """
from lessons.assignments.a8_engine.reference import loaded
from minispec.sampling import Sampling, Seeded

def engine(model, proposer, prompt, sampling, randomness, *, cache=None):
    yield from plain(model, prompt, sampling, randomness, cache=cache)

def black_box(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    model, tokens = loaded(checkpoint), []
    steps = plain(model, prompt, Sampling(temperature, top_k, top_p), Seeded(seed))
    while len(tokens) < max_new_tokens and not set(tokens) & set(model.config.eos_ids):
        tokens += next(steps).tokens
    return tokens
""",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("assignment", PLAIN)
def test_plain_decoding_earns_at_most_a_third_of_any_task(assignment, tmp_path):
    file = tmp_path / "plain.py"
    file.write_text(PLAIN[assignment])
    _, recorder = grade(assignment, str(file))
    for task in recorder.grades.tasks:
        earned, possible = recorder.grades.of(task)
        assert 3 * earned <= possible, task
    said = [hint for hint in hints(recorder).values() if "plain decoding" in hint]
    assert len(said) >= 2


def test_a_lossless_rule_that_accepts_too_little_is_told_its_share(tmp_path):
    file = tmp_path / "mine.py"
    mistakes = load(FOLDER / "a2_accept" / "mistakes.py", "a2_accept_mistakes")
    source = inspect.getsource(mistakes.matches_a_draw_from_p)  # it never computes p / q
    file.write_text(source.replace("matches_a_draw_from_p", "accept"))
    _, recorder = grade("a2_accept", str(file), "-k", "chain or tree or siblings")
    share = r"q is not used: the output is the target's, but \d\.\d{3} drafts are accepted instead"
    for task in "chain", "tree":
        assert re.search(share, hints(recorder)[task])


# ---- cheats --------------------------------------------------------------------------------------

REFUSED = ", which no solution needs"
CHEATS = {  # an attempt -> the beginning of what every task of a2 says to it
    "os._exit(0)": "the process ended with status 0 before it was done",
    "time.sleep(60)": "it ran for more than 1 seconds and was stopped",
    "import pytest; pytest.exit('done', 0)": "",
    "raise SystemExit(0)": "SystemExit: 0",
    "torch.empty(6 * 2**30, dtype=torch.int8); return copy(*arguments)": "RuntimeError: ",
    "return verify.accept(*arguments)": "uses minispec's own accept",
    "return getattr(METHODS_OF['verify'], 'acc' + 'ept')(*arguments)": "uses minispec's own accept",
    "sys.settrace(None); return verify.accept(*arguments)":
        f"it switches the grader's trace{REFUSED}",
    "threading.Thread(target=verify.accept, args=arguments).start()":
        f"it starts a thread{REFUSED}",
    "os.fork() or time.sleep(60)": f"it starts a process{REFUSED}",
    "subprocess.run('true')": f"it starts a process{REFUSED}",
    "exec(inspect.getsource(verify), globals()); return accept(*arguments)":
        f"it makes code from text{REFUSED}",
    "exec(verify.accept.__code__)": f"it runs code that it has as data{REFUSED}",
    "compile('', '<frozen x>', 'exec')": f"it makes code from text{REFUSED}",
    "accept.__code__ = verify.accept.__code__": f"it gives a function other code{REFUSED}",
    "verify.accept.__code__.replace(co_filename='x')": f"it makes code from other code{REFUSED}",
    "gc.get_objects()": f"it searches the objects of the grader{REFUSED}",
}  # fmt: skip
WITH_IMPORTS = """
import gc, inspect, os, subprocess, sys, threading, time
import torch
from minispec import verify
METHODS_OF = {'verify': verify}

"""
COPY = (ROOT / "minispec" / "verify.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("attempt", CHEATS)
def test_a_cheat_earns_nothing(attempt, tmp_path):
    file = tmp_path / "cheat.py"
    copy = COPY.replace("accept", "copy")
    file.write_text(f"{copy}{WITH_IMPORTS}def accept(*arguments):\n    {attempt}\n")
    seconds = 1 if "sleep(60)" in attempt else 600
    code, recorder = grade("a2_accept", str(file), "-o", f"seconds={seconds}", "-k", "greedy")
    assert code == 1 and recorder.grades.total == (0, 3)
    assert hints(recorder)["greedy"].startswith(CHEATS[attempt])


def test_a_file_beside_the_package_is_not_the_package_s():
    for name in "minispec.py", "minispec_mine/x.py", "lessons/assignments/a2_accept/starter.py":
        assert not str(ROOT / name).startswith(isolation.TRUSTED)


ORPHAN = """
import ctypes, fcntl, time

def accept(*arguments):
    lock = open(__file__ + ".lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    if ctypes.pythonapi.fork() == 0:  # Python's audit hooks do not see it
        time.sleep(600)
"""


def test_what_a_submission_started_ends_with_the_test(tmp_path):
    file = tmp_path / "orphan.py"
    file.write_text(ORPHAN)
    grade("a2_accept", str(file), "-k", "greedy")
    with open(f"{file}.lock") as lock:  # locked for as long as the orphan lives
        for _ in range(100):
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(0.1)
    raise AssertionError("the orphan is alive")


def test_a_busy_machine_costs_no_points():
    """Two seconds in which the child does not compute, with a limit of one."""
    wait = partial(time.sleep, 2)
    assert isolation.run_apart(wait, isolation.contents(), 1, 4) == (None, "", False)


def test_an_endless_loop_is_waited_for_twice(tmp_path):
    file = tmp_path / "endless.py"
    file.write_text("def accept(*arguments):\n    while True:\n        pass\n")
    code, recorder = grade("a2_accept", str(file), "-o", "seconds=1", "-k", "not residual")
    tests = [test for of_task in recorder.grades.tasks.values() for test in of_task.values()]
    found = Counter(test.hint for test in tests)
    assert code == 1 and recorder.grades.total[0] == 0
    assert found["it ran for more than 1 seconds and was stopped"] >= 1
    assert found["not run, as 2 tests had to be stopped: choose it with -k"] >= 4


WRITES_A_CONFTEST = """
from pathlib import Path
import minispec

folder = Path(minispec.__file__).parent.parent / "lessons" / "assignments" / "a2_accept"
(folder / "conftest.py").write_text("def pytest_pyfunc_call(pyfuncitem):\\n    return True\\n")
"""


@pytest.mark.slow
def test_a_file_that_a_submission_leaves_with_the_grader_is_noticed_and_refused(tmp_path):
    """On a copy: other tests use the real folder."""
    folder = tmp_path / "lessons" / "assignments"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "minispec", tmp_path / "minispec")
    (tmp_path / "cheat.py").write_text(WRITES_A_CONFTEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "greedy"]
    command += [str(folder / "a2_accept"), "--impl=cheat.py"]
    first, second = (
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True) for _ in range(2)
    )
    path = folder / "a2_accept" / "conftest.py"
    assert f" 0 of 3   it has written to {path}: put that back or remove it" in first.stdout
    assert second.returncode == 2 and second.stdout == ""
    assert second.stderr == f"{path}: not a file of the grader; move or remove it\n"


def test_the_grader_knows_its_own_files():
    assert not isolation.strange_files() and all(path.is_file() for path in isolation.FILES)


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
        self.length = length
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
