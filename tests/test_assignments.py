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


def without_forced(texts, forced, size):
    return vocabulary.count(texts, [], size)


def breadth_first(accuracy, nodes):
    return sorted(adaptive.grow_tree(accuracy, 1000), key=lambda path: (len(path), path))[:nodes]


def labels_off_by_one(tokens, prompt, heads):
    return distill.labels_of(tokens, prompt, heads + 1)[:, 1:]


def half_the_probability(self, probs):
    return 0.5 * vocabulary.Subset.scatter(self, probs)


reference_engine = load(FOLDER / "a8_engine" / "reference.py", "reference_engine")


def runs_past_the_end(checkpoint, prompt, *, max_new_tokens, **options):
    options |= {"max_new_tokens": max_new_tokens}
    tokens = reference_engine.black_box(checkpoint, prompt, **options)
    return (tokens + [0] * max_new_tokens)[:max_new_tokens]


# Mistakes for each assignment: a name, the tasks that must lose points (only these), and the
# functions or methods of the reference to replace. If none are listed, the certifier's mutant of
# that name is applied to the package instead.
WRONG_ANSWERS = {
    "a1_cache_and_mask": [
        ("rows not moved", "commit, together", {"KVCache.commit": mutants.commit_in_place}),
        ("one row too many", "commit, together", {"KVCache.commit": mutants.commit_one_too_many}),
        ("a stale row kept", "truncate, together",
         {"KVCache.truncate": mutants.truncate_one_short}),
    ],
    "a2_accept": [
        ("resamples from p", "residual", {"residual": mutants.resample_from_p}),
        ("a rejection resamples from p", "residual, chain, tree, rounding", {}),
        ("lenient", "chain, tree", {"accept": mutants.lenient}),
        ("argmax bonus", "chain, tree", {"accept": mutants.argmax_bonus}),
        ("argmax root", "chain, tree", {"accept": mutants.argmax_root}),
        ("draft verified against the next position", "greedy, chain, tree",
         {"accept": mutants.probs_after_the_draft}),
        ("independent paths", "greedy, chain, tree, rounding",
         {"accept": mutants.best_of_independent_paths}),
        ("siblings untried", "greedy, chain, tree, rounding",
         {"accept": mutants.child_of_the_root_only}),
    ],
    "a3_draft_target": [
        ("argmax draft scored with its softmax", "propose, lossless", {}),
        ("low-confidence draft dropped after sampling", "propose, lossless, caches", {}),
        ("reduced vocabulary not renormalised", "propose, lossless", {}),
        ("acceptance probability divided by 0.8", "lossless", {}),
        ("a stale draft row kept", "lossless, caches", {}),
        ("no bonus token", "formula",
         {"tokens_per_pass": lambda alpha, gamma: sum(alpha**i for i in range(gamma))}),
    ],
    "a4_medusa": [
        ("labels off by one", "labels", {"labels_of": labels_off_by_one}),
        ("breadth first", "grow", {"grow_tree": breadth_first}),
        ("p / q test for the heads' top tokens", "propose", {}),
    ],
    "a5_lookahead": [
        ("positions off by one", "window_layout, together",
         {"window_layout": mistakes.window_off_by_one}),
        ("guesses see the window", "combined_mask",
         {"combined_mask": mutants.guesses_see_the_window}),
        ("an aliased pool", "pool", {"Pool.after": mistakes.aliased_pool}),
    ],
    "a6_mtp": [
        ("token before hidden", "head", {"MTPHead.layers": mistakes.token_first}),
        ("hidden before the norm", "extend, rounds",
         {"Drafter.extend": mistakes.hidden_before_the_norm}),
        ("stale rows", "rounds",
         {"Drafter.extend": mistakes.stale_rows, "Drafter.chain": mistakes.chain_remembered}),
        ("positions off by one", "chain", {"Drafter.chain": mistakes.position_off_by_one}),
        ("q over the full vocabulary", "chain", {"Drafter.chain": mutants.probs_over_all}),
        ("weights not normalised", "weights",
         {"step_weights": lambda steps, beta: [beta**k for k in range(steps)]}),
    ],
    "a7_vocabulary": [
        ("forced tokens left out", "count", {"count": without_forced}),
        ("subset ids used as token ids", "subset, lossless",
         {"Subset.to_full_ids": lambda self, ids: ids}),
        ("sums to one half", "scatter, lossless", {"Subset.scatter": half_the_probability}),
    ],
    "a8_engine": [
        ("lenient", "exact, rounds", {"accept": mutants.lenient}),
        ("draft verified against the next position", "exact, greedy, rounds, limits, black box",
         {"accept": mutants.probs_after_the_draft}),
        ("bonus token without warpers", "exact, black box",
         {"probs": mutants.bonus_without_warpers}),
        ("runs past the end", "black box", {"black_box": runs_past_the_end}),
    ],
}  # fmt: skip


CASES = [  # the short tests run only the first of each assignment, and none of a8, which is slow
    pytest.param(assignment, *row, id=f"{assignment}, {row[0]}",
                 marks=[pytest.mark.slow] if i or assignment == "a8_engine" else [])
    for assignment, rows in WRONG_ANSWERS.items() for i, row in enumerate(rows)
]  # fmt: skip


@pytest.mark.parametrize("assignment, name, tasks, replacements", CASES)
def test_a_wrong_answer_loses_the_points_of_its_task(assignment, name, tasks, replacements):
    if replacements:
        module = load(FOLDER / assignment / "reference.py", "a_wrong_answer")
        for name, mistake in replacements.items():
            owner, _, method = name.partition(".")
            original = getattr(module, owner)
            wrong = type(owner, (original,), {method: mistake}) if method else mistake
            setattr(module, owner, wrong)
        code, recorder = grade(assignment, "a_wrong_answer")
    else:
        (mutant,) = (m for m in mutants.MUTANTS if m.name == name)
        with mutant.apply():
            code, recorder = grade(assignment, "minispec")
    assert code == 1 and failed_tasks(recorder) == set(tasks.split(", "))
