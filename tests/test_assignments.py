"""The assignments grade: the reference earns everything, the starters nothing, and each wrong
answer loses the points of its task and of those that build on it, but no others.
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


class Watch:
    """A plugin that keeps what the failed tests of a graded run raised, and the grades."""

    def __init__(self):
        self.raised: list[BaseException] = []
        self.grades = None

    def pytest_exception_interact(self, call):
        self.raised.append(call.excinfo.value)

    def pytest_sessionfinish(self, session):
        self.grades = session.config.grades


def grade(assignment: str, impl: str, *more: str) -> tuple[int, Watch]:
    """The exit code of a graded run in this process, and what a Watch saw of it."""
    watch = Watch()
    options = ["-q", "--tb=no", "--no-summary", "--capture=no", "-p", "no:cacheprovider"]
    options += ["-p", "no:unraisableexception"]  # which collects garbage five times at the end
    path = str(FOLDER / assignment)
    # importlib: a second conftest.py must not take the place of the first
    code = pytest.main(
        [path, f"--impl={impl}", "--import-mode=importlib", *options, *more], [watch]
    )
    return int(code), watch


def lost(watch: Watch) -> set[str]:
    """Tasks that are short of points."""
    points = {task: watch.grades.of(task) for task in watch.grades.tasks}
    return {task for (_, task), (earned, possible) in points.items() if earned < possible}


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- reference and starter -----------------------------------------------------------------------


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_the_reference_earns_all_points_and_the_readmes_name_them(assignment):
    code, watch = grade(assignment, "minispec")
    earned, possible = watch.grades.total
    assert code == 0 and earned == possible > 0 and not lost(watch)
    readme = (FOLDER / assignment / "README.md").read_text(encoding="utf-8")
    for _, task in watch.grades.tasks:
        points = watch.grades.of((assignment, task))[1]
        assert re.search(rf"^\| {task} \|.*\| {points} \|$", readme, re.MULTILINE), (task, points)
    overview = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| \[{assignment}\].*\| {possible} \|$", overview, re.MULTILINE), possible


def test_the_starters_raise_not_implemented_and_nothing_else():
    code, watch = grade("", "starter")
    count = sum(len(tests) for tests in watch.grades.tasks.values())
    assert code == 1 and watch.grades.total[0] == 0 and len(watch.raised) >= count
    assert {type(error) for error in watch.raised} == {NotImplementedError}


def test_points_are_for_tests_that_ran_and_passed():
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
def test_an_implementation_that_is_not_there_is_one_line(impl, message, tmp_path, capsys):
    (tmp_path / "odd.py").write_text("def accept(:")
    options = [f"--impl={impl.format(tmp=tmp_path)}", "--import-mode=importlib"]
    code = pytest.main([str(FOLDER / "a2_accept"), *options])
    err = capsys.readouterr().err.strip()
    assert code == pytest.ExitCode.USAGE_ERROR and message in err and "\n" not in err


def test_a_folder_holds_a_file_per_assignment_and_a_missing_name_is_one_line(tmp_path):
    (tmp_path / "a2_accept.py").write_text("from minispec.verify import residual")
    _, watch = grade("a2_accept", str(tmp_path))
    tests = watch.grades.tasks
    assert all(t.passed for t in tests["a2_accept", "residual"].values())
    for graded in tests["a2_accept", "greedy"].values():
        assert graded.hint == f"{tmp_path / 'a2_accept.py'} has no accept"
    _, watch = grade("a1_cache_and_mask", str(tmp_path))
    assert {t.hint for tests in watch.grades.tasks.values() for t in tests.values()} == {
        f"{tmp_path} has no a1_cache_and_mask.py"
    }


def signatures(module: ModuleType, names: list[str]) -> dict[str, str]:
    """Of functions and of classes' methods; of dotted annotations the last name."""
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


def without_forced(texts, forced, size):
    return vocabulary.count(texts, [], size)


def breadth_first(accuracy, nodes):
    return sorted(adaptive.grow_tree(accuracy, 1000), key=lambda path: (len(path), path))[:nodes]


def labels_off_by_one(tokens, prompt, heads):
    return distill.labels_of(tokens, prompt, heads + 1)[:, 1:]


def half_of_it(self, probs):
    return 0.5 * vocabulary.Subset.scatter(self, probs)


solution = load(FOLDER / "a8_engine" / "reference.py", "the_engine")


def runs_past_the_end(checkpoint, prompt, *, max_new_tokens, **options):
    tokens = solution.black_box(checkpoint, prompt, max_new_tokens=max_new_tokens, **options)
    return (tokens + [0] * max_new_tokens)[:max_new_tokens]


# The reference of each assignment with a mistake: some of its names replaced, or methods of its
# classes; where none are given, the certifier's mutant of this name is at work in the package. It
# loses points in the tasks named, and only there.
TABLE = {
    "a1_cache_and_mask": [
        ("rows not moved", "commit, together", {"KVCache.commit": mutants.commit_in_place}),
        ("a row too many", "commit, together", {"KVCache.commit": mutants.commit_one_too_many}),
        ("a stale row kept", "truncate, together",
         {"KVCache.truncate": mutants.truncate_one_short}),
    ],
    "a2_accept": [
        ("resamples from p", "residual", {"residual": mutants.resample_from_p}),
        ("a rejection resamples from p", "residual, chain, tree, rounding", {}),
        ("lenient", "chain, tree", {"accept": mutants.lenient}),
        ("argmax bonus", "chain, tree", {"accept": mutants.argmax_bonus}),
        ("argmax root", "chain, tree", {"accept": mutants.argmax_root}),
        ("the distribution after it", "greedy, chain, tree",
         {"accept": mutants.probs_after_the_draft}),
        ("independent paths", "greedy, chain, tree, rounding",
         {"accept": mutants.best_of_independent_paths}),
        ("siblings untried", "greedy, chain, tree, rounding",
         {"accept": mutants.child_of_the_root_only}),
    ],
    "a3_draft_target": [
        ("a greedy draft with its softmax", "propose, lossless", {}),
        ("an unlikely draft dropped after its draw", "propose, lossless, caches", {}),
        ("a reduced vocabulary not renormalised", "propose, lossless", {}),
        ("acceptance lenient by 0.8", "lossless", {}),
        ("a stale draft row kept", "lossless, caches", {}),
        ("no bonus token", "formula",
         {"tokens_per_pass": lambda alpha, gamma: sum(alpha**i for i in range(gamma))}),
    ],
    "a4_medusa": [
        ("labels off by one", "labels", {"labels_of": labels_off_by_one}),
        ("breadth first", "grow", {"grow_tree": breadth_first}),
        ("ranks of heads with p / q", "propose", {}),
    ],
    "a5_lookahead": [
        ("positions off by one", "window_layout, together",
         {"window_layout": mistakes.window_off_by_one}),
        ("guesses see the window", "beside", {"beside": mutants.guesses_see_the_window}),
        ("an aliased pool", "pool", {"Pool.after": mistakes.aliased_pool}),
    ],
    "a6_mtp": [
        ("token before hidden", "head", {"MTPHead.layers": mistakes.token_first}),
        ("hidden before the norm", "extend, rounds",
         {"Drafter.extend": mistakes.hidden_before_the_norm}),
        ("stale rows", "rounds",
         {"Drafter.extend": mistakes.stale_rows, "Drafter.chain": mistakes.chain_remembered}),
        ("positions off by one", "chain", {"Drafter.chain": mistakes.position_off_by_one}),
        ("q over all", "chain", {"Drafter.chain": mutants.probs_over_all}),
        ("weights not normalised", "weights",
         {"step_weights": lambda steps, beta: [beta**k for k in range(steps)]}),
    ],
    "a7_vocabulary": [
        ("forced tokens left out", "count", {"count": without_forced}),
        ("j taken for the token", "subset, lossless", {"Subset.full": lambda self, j: j}),
        ("sums to a half", "scatter, lossless", {"Subset.scatter": half_of_it}),
    ],
    "a8_engine": [
        ("lenient", "exact, rounds", {"accept": mutants.lenient}),
        ("the distribution after it", "exact, greedy, rounds, limits, black box",
         {"accept": mutants.probs_after_the_draft}),
        ("the bonus has no warpers", "exact, black box", {"probs": mutants.bonus_without_warpers}),
        ("runs past the end", "black box", {"black_box": runs_past_the_end}),
    ],
}  # fmt: skip


WRONG = [  # the short tests have the first of each assignment but the last, which takes seconds
    pytest.param(assignment, *row, id=f"{assignment}, {row[0]}",
                 marks=[pytest.mark.slow] if i or assignment == "a8_engine" else [])
    for assignment, rows in TABLE.items() for i, row in enumerate(rows)
]  # fmt: skip


@pytest.mark.parametrize("assignment, name, tasks, names", WRONG)
def test_a_wrong_answer_loses_the_points_of_its_task(assignment, name, tasks, names):
    if names:
        module = load(FOLDER / assignment / "reference.py", "a_wrong_answer")
        for name, mistake in names.items():
            owner, _, method = name.partition(".")
            right = getattr(module, owner)
            changed = type(owner, (right,), {method: mistake}) if method else mistake
            setattr(module, owner, changed)
        code, watch = grade(assignment, "a_wrong_answer")
    else:
        (mutant,) = (m for m in mutants.MUTANTS if m.name == name)
        with mutant.apply():
            code, watch = grade(assignment, "minispec")
    assert code == 1 and lost(watch) == set(tasks.split(", "))
