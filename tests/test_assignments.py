"""The assignments' grading: the reference earns all points, starters and cheats earn none, and each
known wrong answer gets its own message.
"""

import doctest
import importlib.util
import inspect
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import ROOT

from lessons.assignments import gradescope, grading, isolation
from lessons.assignments.grading import Mistake, failure_of, task_of
from minispec.sampling import OneHot, Seeded
from minispec.tree import Tree, layout

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
    options = [str(FOLDER / assignment), "--import-mode=importlib", *quiet, "--seed=0", *options]
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
from functools import cache as once
from minispec import load
from minispec.sampling import Sampling, Seeded

loaded = once(lambda checkpoint: load(checkpoint, "float64", "cpu")[0])

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


# ---- submissions ---------------------------------------------------------------------------------

RESIDUAL = """
import torch
def residual(p, q, x):
    cut = torch.eye(len(p), dtype=p.dtype)[x] if q is None else q
    left = torch.clamp(p - cut, min=0)
    return left / left.sum() if left.sum() > 0 else None
"""
ACCEPT = """
def accept(target, tree, randomness):
    path, at = [0], 0
    while True:
        p = target[at]
        for child in tree.children(at):
            q, x = tree.drawn_from(child), tree.tokens[child]
            ratio = p[x].item() / (1.0 if q is None else q[x].item())
            rest = residual(p, q, x)
            if randomness.bernoulli(min(1.0, ratio)) or rest is None:
                break
            p = rest
        else:
            return path, randomness.categorical(p)
        at = child
        path.append(child)
"""
RIGHT_ACCEPT = {  # a2 in other styles; each earns all points
    "the loop": RESIDUAL + ACCEPT,
    "imports the package": "import minispec\nfrom minispec import verify\n" + RESIDUAL + ACCEPT,
    "prints": RESIDUAL + ACCEPT.replace("p = target", "print('at', at)\n        p = target"),
    "NumPy": """
import numpy as np, torch
def residual(p, q, x):
    left = np.maximum(np.array(p) - (np.arange(len(p)) == x if q is None else np.array(q)), 0)
    return torch.tensor(left / left.sum()) if left.any() else None
""" + ACCEPT,
    "recursion": RESIDUAL + """
def accept(target, tree, randomness, node=0):
    p = target[node]
    for child in tree.children(node):
        q, x = tree.drawn_from(child), tree.tokens[child]
        rest = residual(p, q, x)
        certain = rest is None or float(p[x]) >= (1 if q is None else float(q[x]))
        if certain or randomness.bernoulli(float(p[x] / (1 if q is None else q[x]))):
            path, fresh = accept(target, tree, randomness, child)
            return [node, *path], fresh
        p = rest
    return [node], randomness.categorical(p)
""",
    "objects": RESIDUAL + """
from dataclasses import dataclass
@dataclass
class Walk:
    target: object; tree: object; randomness: object
    def step(self, node):
        p = self.target[node]
        for child in self.tree.children(node):
            q, x = self.tree.drawn_from(child), self.tree.tokens[child]
            rest = residual(p, q, x)
            if rest is None or self.randomness.bernoulli(min(1, p[x] / (1 if q is None else q[x]))):
                return child, None
            p = rest
        return None, self.randomness.categorical(p)
class Rule:
    def __call__(self, *arguments):
        walk, path, node = Walk(*arguments), [], 0
        while node is not None:
            path.append(node)
            node, fresh = walk.step(node)
        return path, fresh, {}
accept = Rule()
""",
    "a list of its own": RESIDUAL + ACCEPT.replace("[0], 0", "Path([0]), 0")
        + "class Path(list): pass\n",
}  # fmt: skip
RIGHT_OTHERS = {
    ("a3_draft_target", "expectation or speedup"): """
import numpy as np
def tokens_per_pass(alpha, gamma): return np.sum(np.float64(alpha) ** np.arange(gamma + 1))
def speedup(alpha, gamma, c): return tokens_per_pass(alpha, gamma) / (gamma * c + 1)
""",
    ("a7_vocabulary", "votes"): """
from collections import Counter, defaultdict
from minispec.methods.vocabulary import VOTE_RATIO
def votes(languages):
    found, shares = defaultdict(str), {}
    for name, language in languages.items():
        total = sum(language.counts) + 1
        shares[name] = Counter({t: n / total for t, n in zip(language.ids, language.counts)})
    for name, share in shares.items() if len(shares) > 1 else ():
        for token, value in share.items():
            if value > VOTE_RATIO * max(o[token] for k, o in shares.items() if k != name):
                found[token] = name
    return found
""",
    ("a1_cache_and_mask", "distance or ancestors"): """
import torch
def layout(parents):
    def family(i):
        while i >= 0:
            yield i
            i = parents[i]
    families = [set(family(i)) for i in range(len(parents))]
    depths = [len(each) - 1 for each in families]
    mask = torch.tensor([[j in each for j in range(len(parents))] for each in families])
    return depths, torch.tensor(depths), mask
""",
    ("a5_lookahead", "pool"): """
from collections import OrderedDict, defaultdict
class Pool:
    def __init__(self, limit):
        self.limit, self.known = limit, defaultdict(OrderedDict)
    def add(self, gram):
        rest = self.known[gram[0]]
        rest[gram[1:]] = None
        rest.move_to_end(gram[1:])
        while len(rest) > self.limit:
            rest.popitem(last=False)
    def add_all(self, tokens, n, new):
        for end in range(max(n, len(tokens) - new + 1), len(tokens) + 1):
            self.add(tuple(tokens[end - n : end]))
    def after(self, token):
        return [list(rest) for rest in reversed(self.known[token])] if token in self.known else []
""",
    ("a5_lookahead", "merged or stands"): """
from minispec.tree import Tree, layout
def merged(root, chains):
    paths = dict.fromkeys(tuple(c[:n]) for c in chains for n in range(1, len(c) + 1))
    nodes = {(): 0} | {path: i for i, path in enumerate(paths, 1)}
    return Tree([root, *(p[-1] for p in paths)], [-1, *(nodes[p[:-1]] for p in paths)])
""",
    ("a9_eagle3", "layers or ids or tokens_of or marks"): """
from minispec.cli import UserError
def default_layers(n):
    low, middle, high = min(2, n - 1), n >> 1, max(0, n - 3)
    return tuple(i for i in range(n) if i in (low, middle, high))
def read_ids(where, tensors, count, vocab):
    marks = tensors.pop("t2d", None)
    d2t = tensors.pop("d2t", None)
    ids = list(range(vocab)) if d2t is None else [x + i for i, x in enumerate(d2t.tolist())]
    marked = ids if marks is None else [i for i, x in enumerate(marks.tolist()) if x]
    if len(set(ids)) != count or min(ids) < 0 or max(ids) >= vocab or sorted(ids) != sorted(marked):
        raise UserError(f"{where}: other tokens")
    return ids
""",
    ("a9_eagle3", "training_time or gradients"): """
import torch
from minispec import distill
from minispec.model import ForwardContext
class MTPLoss(distill.MTPLoss):
    def outputs(self, hidden, tokens):
        n, keys = hidden.shape[1], distill.AllSteps()
        found = [self.head.project_features(hidden)]
        for k in range(len(self.weights)):
            embedded = self.head.embed(tokens[:, k + 1 :][:, :n], self.target)
            found.append(self.head.run_block(found[-1], embedded, self.plan(n, k, keys)))
        return found[1:]
    def plan(self, n, k, keys):
        seen = torch.zeros(n, k + 1, n, dtype=torch.bool)
        for i in range(n):
            seen[i, 0, : i + 1] = seen[i, 1:, i] = True
        rope = self.head.rope(torch.arange(k, k + n)[None], self.target.dtype)
        return ForwardContext(*rope, seen.flatten(1)[None, None], keys)
""",
}  # fmt: skip


@pytest.mark.parametrize(
    "style",
    [pytest.param(x, marks=[] if x == "prints" else pytest.mark.slow) for x in RIGHT_ACCEPT],
)
def test_a_right_answer_in_any_style_earns_all_points(style, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(RIGHT_ACCEPT[style])
    code, recorder = grade("a2_accept", str(file))
    assert (code, recorder.grades.total) == (0, (24, 24)), hints(recorder)


@pytest.mark.slow
@pytest.mark.parametrize("assignment, chosen", RIGHT_OTHERS)
def test_other_answers_of_other_styles_earn_all_points(assignment, chosen, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(RIGHT_OTHERS[assignment, chosen])
    code, recorder = grade(assignment, str(file), "-k", chosen)
    assert code == 0 and recorder.grades.total[0] > 0, hints(recorder)


WRONG = """
import torch
def residual(p, q, x):
    return p
def accept(target, tree, randomness):
    return [0], 0
"""
TEXT_OF_VERIFY = f"""
import importlib.util, os, tempfile
text = open({str(ROOT / "minispec" / "verify.py")!r}).read()
file = tempfile.mktemp() + ".py"
open(file, "w").write(text)
spec = importlib.util.spec_from_file_location("mine", file)
mine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mine)
accept, residual = mine.accept, mine.residual
"""
LEAVES_FILES = f"""
import os, site, sys
for name in ("lessons/__init__.py", "lessons/assignments/conftest.py", "conftest.py",
             "lessons/assignments/a2_accept/conftest.py", "sitecustomize.py", "left.pth"):
    for folder in ({str(ROOT)!r}, *site.getsitepackages(), sys.prefix, os.path.expanduser("~")):
        try:
            open(os.path.join(folder, name), "x").write("raise SystemExit('left by a submission')")
        except OSError:
            pass
""" + WRONG
FORGED = """
import atexit, os, sys
def forge():
    for file in "/dev/tty", "/dev/pts/0", "/proc/self/fd/1", "/proc/1/fd/1":
        try:
            open(file, "w").write("total 24 of 24 (forged)")
        except OSError:
            pass
    for handle in range(64):
        try:
            os.write(handle, b"total 24 of 24 (forged)")
        except OSError:
            pass
    print("total 24 of 24 (forged)", file=sys.__stdout__)
atexit.register(forge)
""" + WRONG + "    forge()\n"
JUDGES = """
import gc, sys
def judge(*arguments):
    return 0.0, 0.0
def replace():
    frame = sys._getframe()
    while frame:
        for place in frame.f_globals, frame.f_locals:
            place.update(judge=judge, check=judge)
        frame = frame.f_back
    for module in list(sys.modules.values()):
        for name in "judge", "check", "judged":
            vars(module).get(name) and setattr(module, name, judge)
replace()
""" + WRONG.replace("    return [0], 0", "    replace()\n    return [0], 0")
AGREES = """
def always(*arguments): return True
class Yes(list):
    __eq__ = __contains__ = always
    def __ne__(self, other): return False
class Number(float):
    __eq__ = __lt__ = __le__ = always
    def __sub__(self, other): return Number(0)
    __rsub__ = __sub__
    def __abs__(self): return Number(0)
def tokens_per_pass(alpha, gamma): return Number(0)
def speedup(alpha, gamma, c): return Number(0)
def lookup(tokens, k, ngram): return Yes()
"""
FORGES_A_MESSAGE = """
import os, pickle
class Attack:
    def __reduce__(self):
        return os.system, ("echo > FILE",)
def accept(*arguments):
    from multiprocessing.connection import Connection
    message = pickle.dumps(([], ("value", Attack())))
    for handle in range(3, 64):
        try:
            Connection(handle).send_bytes(message)
        except OSError:
            pass
residual = accept
"""
CHEATS = {  # an attempt -> its code, and what the first task that asks for accept says to it
    "import": ("from minispec.verify import accept, residual", "uses minispec's own accept"),
    "call": ("from minispec import verify\ndef accept(*x): return verify.accept(*x)\n"
             "def residual(*x): return getattr(verify, 'resi' + 'dual')(*x)",
             "uses minispec's own accept"),
    "reference": ("from lessons.assignments.a2_accept.reference import *", "FILE cannot be imp"),
    "source": ("import inspect\nfrom minispec import verify\nexec(inspect.getsource(verify))",
               "uses minispec's own accept"),
    "verify.py from the checkout": (TEXT_OF_VERIFY, "FILE cannot be imported (PermissionError"),
    "leaves files": (LEAVES_FILES, ""),
    "forged table": (FORGED, ""),
    "replaces judge": (JUDGES, ""),
    "forged message": (FORGES_A_MESSAGE, ""),
    "pytest.skip": ("import pytest\ndef accept(*x): pytest.skip('later')\nresidual = accept",
                    "Skipped: later"),
    "pytest.exit": ("import pytest\ndef accept(*x): pytest.exit('ok', 0)\nresidual = accept",
                    "Exit: ok"),
    "_exit": ("import os\ndef accept(*x): os._exit(0)\nresidual = accept",
              "the process ended with status 0 before it was done"),
    "exit while importing": ("import os\nos._exit(0)", "the process ended with status 0"),
    "kills the grader": (WRONG + "    import os\n    os.kill(os.getppid(), 9)\n", ""),
    "starts a process": ("import os, ctypes\nif ctypes.CDLL(None).fork() < 0: os.fork()\n",
                         "FILE cannot be imported (BlockingIOError: "),
    "starts a thread": ("import threading\nthreading.Thread(target=print).start()",
                        "FILE cannot be imported (RuntimeError: can't start new thread"),
    "connects": ("import socket\nsocket.create_connection(('127.0.0.1', 9), 1)",
                 "FILE cannot be imported (PermissionError"),
    "memory": ("import torch\ndef accept(*x): torch.empty(6 * 2**30, dtype=torch.int8)\n"
               "residual = accept", "RuntimeError: "),
    "the grader's objects": (WRONG.replace("return [0], 0",
        "return randomness.bernoulli.__func__.__globals__['x']"), "AttributeError: __func__"),
    "frames of the grader": (WRONG.replace("return [0], 0",
        "return tree.children(0), randomness.generator.gi_frame"), ""),
}  # fmt: skip
QUICK = "import", "verify.py from the checkout", "leaves files", "forged message", "pytest.skip"


@pytest.mark.parametrize(
    "attempt", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in CHEATS]
)
def test_a_cheat_earns_nothing(attempt, tmp_path, capfd):
    file, left = tmp_path / "cheat.py", tmp_path / "left"
    code, said = CHEATS[attempt]
    file.write_text(code.replace("FILE", str(left)))
    before = {path: path.stat().st_mtime for path in ROOT.rglob("*.py")}
    code, recorder = grade("a2_accept", str(file))
    assert code == 1 and recorder.grades.total == (0, 24)
    hint = hints(recorder)["greedy"]
    assert hint and hint.startswith(said.replace("FILE", str(file))), hint
    assert not left.exists() and "(forged)" not in capfd.readouterr().out
    assert before == {path: path.stat().st_mtime for path in ROOT.rglob("*.py")}


def test_numbers_and_lists_whose_comparisons_always_agree_earn_nothing(tmp_path):
    file = tmp_path / "cheat.py"
    file.write_text(AGREES)
    _, recorder = grade("a3_draft_target", str(file), "-k", "lookup or expectation or speedup")
    assert recorder.grades.total == (0, 7)


def test_an_endless_loop_is_waited_for_twice_and_its_row_says_so(tmp_path):
    file = tmp_path / "endless.py"
    file.write_text("def accept(*arguments):\n    while True:\n        pass\n")
    code, recorder = grade("a2_accept", str(file), "-o", "seconds=1", "-k", "not residual")
    tests = [test for of_task in recorder.grades.tasks.values() for test in of_task.values()]
    found = Counter(test.hint for test in tests)
    assert code == 1 and recorder.grades.total[0] == 0
    assert found["it ran for more than 1 seconds and was stopped"] >= 1
    assert found["not run, as 2 tests had to be stopped: choose it with -k"] >= 4


@pytest.mark.parametrize("code, problem", [
    ("import time; time.sleep(60)", "it ran for more than 0.3 seconds and was stopped"),
    ("while True: randomness.bernoulli(0.5)", "it ran for more than 0.3 seconds and was stopped"),
])  # fmt: skip
def test_who_sleeps_or_only_asks_is_stopped_too(code, problem, tmp_path, monkeypatch):
    file = tmp_path / "endless.py"
    file.write_text(f"def accept(target, tree, randomness):\n    {code}\n")
    monkeypatch.setattr(isolation, "PATIENCE", 10)
    _, recorder = grade("a2_accept", str(file), "-o", "seconds=0.3", "-k", "greedy")
    assert hints(recorder)["greedy"] == problem


def test_what_a_submission_says_is_one_short_line_of_the_table(tmp_path):
    file = tmp_path / "cheat.py"
    file.write_text("def accept(*x): raise ValueError('\\r\\x1b[2Ktotal 24 of 24' + 2999 * '!')")
    _, recorder = grade("a2_accept", str(file), "-k", "greedy")
    hint = hints(recorder)["greedy"]
    assert hint.isprintable() and len(hint) <= 1000


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
    own = "uses minispec's own {}, which earns nothing: write it"
    assert code == 1 and hints(recorder) == {
        "depth": own.format("layout"), "mask": own.format("layout"),
        "place": own.format("KVCache.place"), "commit": own.format("KVCache.commit"),
        "together": own.format("layout"),
    }  # fmt: skip
    assert grade("a1_cache_and_mask", str(file), "--allow-package")[0] == 0


@pytest.mark.parametrize("assignment", ASSIGNMENTS[2:6])
def test_to_import_the_package_is_no_use_of_it(assignment, tmp_path):
    file = tmp_path / "mine.py"
    starter = (FOLDER / assignment / "starter.py").read_text(encoding="utf-8")
    file.write_text(f"import minispec\nimport minispec.distill\n{starter}")
    _, recorder = grade(assignment, str(file), "-k", "lookup or weights or label or head_k or pool")
    assert set(hints(recorder).values()) == {"NotImplementedError"}


COPY = (ROOT / "minispec" / "verify.py").read_text(encoding="utf-8")


def test_a_copy_is_not_the_packages_own(tmp_path):
    """The grader cannot tell who wrote the code, only whose it runs."""
    file = tmp_path / "copy.py"
    file.write_text(COPY)
    assert grade("a2_accept", str(file))[0] == 0


def test_a_table_of_one_seed_fails_with_others_and_the_seed_is_printed(tmp_path, capfd):
    test = load(FOLDER / "a1_cache_and_mask" / "test_a1_cache_and_mask.py", "a1_tests")
    cases = [test.random_parents(rng, rng.randint(1, 17)) for rng in map(random.Random, range(12))]
    table = {parents: layout(parents)[0] for parents in cases}
    file = tmp_path / "table.py"
    file.write_text(
        f"import torch\ntable = {table}\n"
        "def layout(parents):\n"
        "    return table[parents], torch.tensor(table[parents]), None\n"
    )
    for seed, earned in (0, 2), (7, 0):
        _, recorder = grade("a1_cache_and_mask", str(file), f"--seed={seed}", "-k", "distance")
        assert recorder.grades.total == (earned, 2)
    assert re.search(r"^total +0 of 2   seed 7$", capfd.readouterr().out, re.MULTILINE)


def test_the_seed_is_drawn_and_printed_at_the_end():
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"]
    command += [FOLDER / "a1_cache_and_mask", "-k", "truncate"]
    printed = [subprocess.run(command, capture_output=True, text=True).stdout for _ in range(2)]
    seeds = {re.search(r"^total .* seed (\d+)$", text, re.MULTILINE)[1] for text in printed}
    assert len(seeds) == 2  # once in a thousand times it fails


def test_a_busy_machine_costs_no_points():
    """Two seconds in which the submission does not compute, with a limit of one."""
    link = isolation.Submission([isolation.whole_copy()], isolation.scratch(), 1, 4)
    assert link.load("time").sleep(2) is None
    link.close()


# ---- Gradescope ----------------------------------------------------------------------------------


def unpacked(root: Path) -> Path:
    """Unpack what `make gradescope` writes in Gradescope's layout."""
    gradescope.main(["a2_accept", str(root / "a2.zip"), "--seed=5"])
    shutil.unpack_archive(root / "a2.zip", root / "source")
    shutil.copy(root / "source" / "run_autograder", root)  # Gradescope takes it out of the zip
    return root


@pytest.fixture(scope="module")
def autograder(tmp_path_factory):
    """run(files) grades a submission as Gradescope does, without its setup.sh."""
    root = unpacked(tmp_path_factory.mktemp("autograder"))
    (root / "source" / ".venv").symlink_to(sys.prefix)
    script = root / "run_autograder"

    def run(files: dict[str, str]) -> dict:
        for name in "submission", "results":
            shutil.rmtree(root / name, ignore_errors=True)
            (root / name).mkdir()
        for name, text in files.items():
            (root / "submission" / name).write_text(text)
        environment = {"AUTOGRADER": str(root), "PATH": os.environ["PATH"]}
        subprocess.run(["bash", script], env=environment, cwd="/", check=True)
        return json.loads((root / "results" / "results.json").read_text())

    return run


def test_gradescope_s_autograder_gives_each_task_its_points(autograder):
    found = autograder({"anna's.py": RIGHT_ACCEPT["the loop"].replace("min=0", "min=-1")})
    scores = {test["name"]: (test["score"], test["max_score"]) for test in found["tests"]}
    assert scores.keys() == {"residual", "greedy", "chain", "tree", "rounding"}
    assert scores["residual"] == (1, 5) and scores["greedy"] == (0, 3)
    assert "max(0, p - q)" in found["tests"][0]["output"] and found["output"] == "seed 5"


@pytest.mark.slow
def test_gradescope_s_autograder_says_what_is_wrong_with_a_submission(autograder):
    assert sum(t["score"] for t in autograder({"a2_accept.py": COPY, "b.py": ""})["tests"]) == 24
    assert autograder({})["score"] == 0
    assert "has no file named after an assignment" in autograder({"a.py": "", "b.py": ""})["output"]


@pytest.mark.slow
def test_gradescope_s_setup_makes_the_environment_that_its_autograder_needs(tmp_path):
    """Offline: apt-get does nothing, and the new environment finds pip and all packages in this
    one."""
    pytest.importorskip("pip")
    root, tools = unpacked(tmp_path), tmp_path / "tools"
    (root / "source" / "constraints.txt").write_text("")  # other versions may be installed here
    tools.mkdir()
    (tools / "here.pth").write_text(sysconfig.get_path("purelib"))
    add_packages = f"cp {tools / 'here.pth'} .venv/lib/python*/site-packages"
    for name, lines in {
        "apt-get": 'echo "$@"',
        "python3": f'{sys.executable} "$@" --without-pip\n{add_packages}',
    }.items():
        (tools / name).write_text(f"#!/bin/sh -e\n{lines}\n")
        (tools / name).chmod(0o755)
    environment = os.environ | {"AUTOGRADER": str(root), "PIP_NO_INDEX": "1",
                                "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}  # fmt: skip
    done = subprocess.run(["bash", root / "source" / "setup.sh"], env=environment, cwd="/",
                          text=True, capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("update\ninstall -y python3 python3-venv\n")
    command = ".venv/bin/python", "-c", "import pytest, lessons.assignments.grading"
    assert subprocess.run(command, cwd=root / "source").returncode == 0
