"""The reader's my_minispec.py: what is saved there and what is not, and that it can always be
imported."""

import inspect
import itertools
import json
import linecache
import random
import sys
from collections.abc import Callable

import pytest
import torch
from conftest import ROOT, file_limit

from minispec import Sampling, load
from minispec.generate import decode
from minispec.paths import SHIPPED

sys.path.append(str(ROOT / "lessons"))
import form  # noqa: E402
import own_engine  # noqa: E402

RESIDUAL = """def residual(p, q):
    rest = (p - q).clamp(min=0)
    return rest / rest.sum() if rest.any() else None
"""
OTHER_RESIDUAL = RESIDUAL.replace("clamp", "clip")
WRONG_RESIDUAL = RESIDUAL.replace(" / rest.sum()", "")
TASKS = [
    (f"{number:02}", task)
    for number in range(11)
    for task in form.load_solutions(f"{number:02}").TASKS
]


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """run(lesson, cell) executes a cell as a kernel does, after `known` have been defined, and
    returns the lines that it prints."""
    monkeypatch.setattr(own_engine, "FILE", tmp_path / "my_minispec.py")
    monkeypatch.setattr(form, "progress", form.Progress())
    namespace = {"__name__": "__main__", "check": form.check, "torch": torch}
    numbers = itertools.count()

    def run(lesson: str, cell: str, **known) -> list[str]:
        namespace.update(known)
        form.progress.tasks = {task.name: task for number, task in TASKS if number == lesson}
        name = f"<cell {next(numbers)}>"
        linecache.cache[name] = len(cell), None, cell.splitlines(True), name
        exec(compile(cell, name, "exec"), namespace)
        return capsys.readouterr().out.splitlines()

    return run


def text() -> str:
    return own_engine.FILE.read_text(encoding="utf-8")


def solve(run, lesson: str, task: form.Task) -> list[str]:
    """Check a solution in a notebook that has imported what it needs, and where the other tasks are
    not solved yet."""
    names = {*own_engine.global_names(task.solution.__code__)}
    known = {name: value for name, value in task.solution.__globals__.items() if name in names}
    packages = {t.name: t.package for number, t in TASKS if number == lesson and t.name in known}
    cell = f"{inspect.getsource(task.solution)}\n\ncheck({task.name})"
    return run(lesson, cell, **(known | packages))


def test_a_wrong_answer_is_not_saved(run):
    for cell in WRONG_RESIDUAL, "def residual(p, q):\n    ...\n":
        assert "saved" not in "".join(run("03", cell + "check(residual)"))
        assert not own_engine.FILE.exists()


def test_a_right_answer_is_saved_once(run):
    (line,) = run("03", RESIDUAL + "check(residual)")
    assert line.endswith(", saved in my_minispec.py")
    before = text()
    assert before == f"{own_engine.HEADER}\n\n# lesson 03, minispec/verify\n{RESIDUAL}"
    (line,) = run("03", RESIDUAL + "check(residual)")
    assert line.endswith(", as in my_minispec.py") and text() == before


def test_an_empty_cell_says_where_the_answer_is(run):
    empty = 'def {0}(p, q):\n    """?"""\n\n{0} = check({0})'
    goes_on = "the lesson goes on with minispec's"
    assert run("03", empty.format("residual")) == [f"residual: not written yet; {goes_on}"]
    run("03", RESIDUAL + "residual = check(residual)")
    kept = "empty here, kept in my_minispec.py"
    assert run("03", empty.format("residual")) == [f"residual: {kept}; {goes_on}"]
    assert run("00", empty.format("accept")) == [f"accept: not written yet; {goes_on}"]


def test_what_an_answer_prints_is_shown_once(run):
    cell = RESIDUAL.replace("    rest =", "    print('called')\n    rest =", 1)
    lines = run("03", cell + "check(residual)")
    assert lines.count("residual prints: called") == form.MOST_LINES == len(lines) - 2
    assert lines[-1].endswith("saved in my_minispec.py")


def test_another_answer_replaces_it_only_if_asked(run):
    run("03", RESIDUAL + "check(residual)")
    before = text()
    _, line = run("03", OTHER_RESIDUAL + "check(residual)")
    assert line == ("    my_minispec.py has another residual, which stays; "
                    "check(residual, replace=True) replaces it")  # fmt: skip
    assert text() == before
    run("03", WRONG_RESIDUAL + "check(residual, replace=True)")
    assert text() == before
    run("03", OTHER_RESIDUAL + "check(residual, replace=True)")
    assert text() == before.replace("clamp", "clip")


@pytest.mark.slow
def test_all_answers_are_in_the_order_of_the_package_whatever_order_they_came_in(run):
    for lesson, task in random.Random(0).sample(TASKS, len(TASKS)):
        assert "saved" in solve(run, lesson, task)[0] or task.name == "tempting_accept"
        own_engine.load(text())
    names = list(own_engine.functions_in(text()))
    assert names == [name for name in own_engine.PLACES if name != "rounds"]
    for name in names:
        module, lesson = own_engine.PLACES[name]
        assert f"# lesson {lesson}, minispec/{module}\ndef {name}(" in text()
        assert (ROOT / "minispec" / module).is_dir() or (ROOT / f"minispec/{module}.py").exists()
    assert "package_" not in text(), "minispec's function is imported though there is the reader's"
    assert "\n\n\n\n" not in text() and text().endswith("\n")


def test_lessons_00_and_03_both_have_an_accept(run):
    tasks = {(lesson, task.name): task for lesson, task in TASKS}
    (line,) = solve(run, "00", tasks["00", "accept"])
    assert line.endswith("saved in my_minispec.py as accept_greedy")
    solve(run, "03", tasks["03", "accept"])
    module = own_engine.load(text())
    assert module.accept_greedy([5, 6, 7], [5, 6, 8, 9]) == (2, 8)
    assert [*inspect.signature(module.accept).parameters] == ["p", "q", "drafts", "randomness"]


def test_minispecs_residual_is_imported_until_the_readers_is_saved(run):
    tasks = {(lesson, task.name): task for lesson, task in TASKS}
    run("03", "def residual(p, q):\n    ...\n\n\nresidual = check(residual)")
    solve(run, "03", tasks["03", "accept"])
    line = "from solutions.lesson_03 import package_residual as residual\n"
    assert line in text()
    run("03", RESIDUAL + "check(residual)")
    assert line not in text() and own_engine.load(text()).accept.__globals__["residual"]


def test_what_the_reader_has_imported_is_imported_in_the_file_too(run):
    imports = "import math\nimport torch.nn.functional as F\nfrom fractions import Fraction as Q\n"
    cell = RESIDUAL.replace("rest / ", "F.relu(rest) * math.ceil(Q(1, 2)) / ")
    assert "saved in" in run("03", f"{imports}\n{cell}check(residual)")[0]
    header, _, _ = text().partition("# lesson")
    for line in imports.splitlines():
        assert line in header


def test_an_answer_that_needs_the_notebook_is_not_saved(run):
    helper = "def part(p, q):\n    return (p - q).clamp(min=0)\n\n\n"
    cell = RESIDUAL.replace("(p - q).clamp(min=0)", "part(p, q)")
    right, line = run("03", helper + cell + "check(residual)")
    assert right.startswith("residual: right (") and not own_engine.FILE.exists()
    assert line.startswith("    not saved: in my_minispec.py, without this notebook, NameError")
    assert line.endswith("name 'part' is not defined")


def test_an_answer_that_needs_a_variable_of_the_notebook_as_default_is_not_saved(run):
    run("03", RESIDUAL + "check(residual)")
    before = text()
    cell = "def greedy_acceptance(p_rows, q_rows, axis=AXIS):\n"
    cell += "    return p_rows.gather(axis, q_rows.argmax(axis, True)).squeeze(axis)\n"
    _, line = run("03", f"AXIS = -1\n{cell}check(greedy_acceptance)")
    assert line.startswith("    not saved: my_minispec.py cannot be imported (NameError: name 'AX")
    assert text() == before


def test_a_lambda_is_not_saved(run):
    cell = "residual = lambda p, q: (lambda r: r / r.sum() if r.any() else None)((p - q).clamp(0))"
    _, line = run("03", f"{cell}\ncheck(residual)")
    assert line == "    not saved: write it as `def residual(…)`"


@pytest.mark.parametrize("broken", ["def residual(p, q)\n", "import nothing_of_this_name\n",
                                    "raise SystemExit('bye')\n"])  # fmt: skip
def test_a_file_that_cannot_be_imported_is_reported_in_one_line_and_stays(broken, run):
    own_engine.FILE.write_text(broken)
    _, line = run("03", RESIDUAL + "check(residual)")
    assert line.startswith("    not saved: my_minispec.py cannot be imported (")
    assert line.endswith("); correct it, or move it away") and text() == broken
    (line,) = run("04", "from own_engine import yours\nresidual = yours('residual')")
    assert line.startswith("residual: minispec's; my_minispec.py cannot be imported (")


def test_a_file_that_cannot_be_written_is_reported_in_one_line(run, monkeypatch, tmp_path):
    with file_limit(30):
        _, line = run("03", RESIDUAL + "check(residual)")
    file = own_engine.FILE
    assert line == f"    not saved: {file} cannot be written: [Errno 27] File too large"
    assert not file.exists() and not list(tmp_path.glob("my_minispec*"))


def test_a_file_that_cannot_be_read_is_reported_in_one_line(run):
    own_engine.FILE.write_bytes(b"# \xff")
    _, line = run("03", RESIDUAL + "check(residual)")
    assert line == "    not saved: my_minispec.py cannot be read (it is not UTF-8)"


def test_what_the_reader_adds_to_the_file_stays(run):
    run("03", RESIDUAL + "check(residual)")
    mine = "import math  # mine\n\n\n# my helper\ndef helper():\n    return math.pi"
    own_engine.FILE.write_text(f"{text()}\n\n{mine}\n")
    for lesson, task in TASKS[:8]:
        if task.name != "residual":
            assert "saved in" in solve(run, lesson, task)[0]
    assert all(part in text() for part in mine.split("\n\n\n"))
    assert own_engine.load(text()).helper()


def test_later_lessons_use_the_readers_function(run):
    cell = "from own_engine import yours\nresidual = yours('residual')"
    assert run("04", cell) == ["residual: minispec's; there is no my_minispec.py"]
    run("02", "def warp(): pass")
    run("03", RESIDUAL + "check(residual)")
    assert run("04", cell) == ["residual: yours, from my_minispec.py"]
    tasks = {(lesson, task.name): task for lesson, task in TASKS}
    assert "saved in" in solve(run, "04", tasks["04", "accept_sibling"])[0]
    assert run("10", "warp = yours('warp')") == ["warp: minispec's; my_minispec.py has none"]
    assert "package_residual" not in text()


# ---- lesson 10 -----------------------------------------------------------------------------------


@pytest.fixture
def decoder_of_lesson_10(run):
    """Runs the cells that make a decoder of the file's functions. Returns [it], and what they
    print."""

    def make() -> tuple[list[Callable], list[str]]:
        notebook = (ROOT / "lessons" / "10_which_method_when.ipynb").read_text(encoding="utf-8")
        cells = [cell for cell in json.loads(notebook)["cells"] if cell["cell_type"] == "code"]
        code = ["".join(cell["source"]) for cell in cells]
        first = next(i for i, cell in enumerate(code) if "yours(" in cell)
        printed = [line for cell in code[first : first + 2] for line in run("10", cell)]
        made = []
        return made, printed + run("10", "made.append(keep(rounds))", made=made)

    return make


def solve_all(run) -> None:
    for lesson, task in TASKS:
        solve(run, lesson, task)


@pytest.mark.slow
@pytest.mark.parametrize("solved", [True, False], ids=["solutions", "nothing written"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, 40, 0.9)], ids=str)
def test_lesson_10s_decoder_draws_what_minispec_draws(solved, sampling, run, decoder_of_lesson_10):
    if solved:
        solve_all(run)
    (mine,), printed = decoder_of_lesson_10()
    whose = {line.split(": ")[1].split(",")[0] for line in printed if ": yours" in line}
    assert whose == ({"yours"} if solved else set()) and len(printed) == 9
    assert ("package_" in text()) != solved
    pair = load(SHIPPED / "target")
    prompt = pair[1].encode("One day, a cat saw a cat. One day, a cat")
    options = vars(sampling) | {"max_new_tokens": 40, "seed": 0}
    tokens = mine(pair, prompt, **options)
    if sampling.temperature == 0:
        assert tokens == decode(*pair, prompt, max_new_tokens=40).tokens
    else:
        assert len(tokens) <= 40 and tokens == mine(pair, prompt, **options)


@pytest.mark.parametrize("broken", ["def ", "import nothing_of_this_name"])
def test_with_a_broken_file_lesson_10_goes_on_with_minispecs(broken, run, decoder_of_lesson_10):
    own_engine.FILE.write_text(broken)
    (mine,), printed = decoder_of_lesson_10()
    assert printed[-1].startswith("    not saved: my_minispec.py cannot be imported (")
    pair = load(SHIPPED / "target")
    options = vars(Sampling()) | {"max_new_tokens": 8, "seed": 0}
    prompt = pair[1].encode("Once upon a time")
    assert mine(pair, prompt, **options) == decode(*pair, prompt, max_new_tokens=8).tokens


@pytest.mark.slow
@pytest.mark.parametrize("task, right, wrong", [
    ("accept", "min(1.0, float(", "min(1.0, 1.5 * float("),
    ("mask", "seen[node] = seen[parent]", "seen[node, length:] = True"),
])  # fmt: skip
def test_the_certifier_judges_the_readers_functions(
    task, right, wrong, run, decoder_of_lesson_10, capsys
):
    solve_all(run)
    decoder_of_lesson_10()
    flags = {"accept": ("exact", "vocab 2, T=1 top-k 0 top-p 1"), "mask": ("greedy", "all")}
    checks, only = flags[task]
    command = "--checks", checks, "--only", only, "--outcomes", "20", "--length", "2"
    command += "--requests", "100"
    own_engine.certify(*command)
    assert "no loss found" in capsys.readouterr().out
    source = own_engine.source_in(text(), task)
    assert right in source
    own_engine.FILE.write_text(text().replace(source, source.replace(right, wrong)))
    own_engine.certify(*command)
    assert "LOSS in" in capsys.readouterr().out


def test_a_page_shows_what_the_readers_accept_decides(run, capsys):
    """An `accept` that rejects everything still writes a story, one token per pass."""
    own_engine.FILE.write_text("def accept(p, q, drafts, randomness):\n"
                               "    return 0, randomness.categorical(p[0])\n")  # fmt: skip
    own_engine.replay(tokens=5)
    whose, where = capsys.readouterr().out.splitlines()
    assert whose == "accept: yours, from my_minispec.py"
    assert where == "open my_run.html: 5 tokens from 5 passes"
    page = own_engine.FILE.with_name("my_run.html").read_text(encoding="utf-8")
    data = page.split('<script id="trace" type="application/json">')[1].split("</script>")[0]
    trees = [each["tree"] for each in json.loads(data)["passes"]]
    assert [tree["path"] for tree in trees] == [[0]] * 5
    assert {len(tree["tokens"]) for tree in trees} == {4}
    assert {chance for each in json.loads(data)["passes"] for chance in each["chance"]} == {None}
    own_engine.FILE.unlink()
    own_engine.replay(tokens=20)
    whose, where = capsys.readouterr().out.splitlines()
    assert whose.startswith("accept: minispec's") and not where.endswith(" 20 passes")
    page = own_engine.FILE.with_name("my_run.html").read_text(encoding="utf-8")
    assert '"chance": [null, 0.' in page  # what it asked of the first draft
