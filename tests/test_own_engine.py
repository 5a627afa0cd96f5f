"""The reader's my_minispec.py: what is saved there and what is not, and that it can always be
imported."""

import inspect
import itertools
import json
import linecache
import os
import random
import re
import subprocess
import sys

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
    (path.name[:2], task)
    for path in sorted((ROOT / "lessons").glob("*.ipynb"))
    for task in form.load_solutions(path.name[:2]).TASKS
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
        first, *more = solve(run, lesson, task)
        stays = "has another rounds, which stays" in "".join(more)
        assert "saved" in first or stays or task.name == "tempting_accept"
        own_engine.load(text())
    names = list(own_engine.functions_in(text()))
    assert names == list(own_engine.PLACES)
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


# ---- growing -------------------------------------------------------------------------------------


def save_all(last: str = "99") -> None:
    """Save the solutions of all lessons up to the last, in their order, unjudged."""
    for lesson, task in TASKS:
        if lesson <= last:
            own_engine.save(task.solution, lesson, task.name, lambda function: None)


def tokens_of(code: str, sampling: Sampling = Sampling(), n: int = 16) -> list[int]:
    """What the `decode` of a file writes about the story model's cat."""
    folder = SHIPPED / "target"
    prompt = load(folder)[1].encode("One day, a cat saw a cat. One day, a cat")
    decoder = own_engine.load(code).decode
    return decoder(str(folder), prompt, max_new_tokens=n, **vars(sampling), seed=0)


def plain_tokens(n: int = 16) -> list[int]:
    pair = load(SHIPPED / "target")
    prompt = pair[1].encode("One day, a cat saw a cat. One day, a cat")
    return decode(*pair, prompt, max_new_tokens=n).tokens


def test_the_file_decodes_after_every_lesson(run):
    plain = plain_tokens()
    for lesson in own_engine.STAGES:
        save_all(lesson)
        code, missing = own_engine.text_after(lesson)
        assert missing == [] and "package_" not in code
        assert tokens_of(code) == plain, lesson
        if lesson >= "02":
            sampled = tokens_of(code, Sampling(1.5))
            assert sampled == tokens_of(code, Sampling(1.5)) != plain, lesson
        assert f"  # lesson {lesson}: minispec certify --impl my_minispec.py:decode" in code
        own_engine.write(code)
        own_engine.load(text())
    assert len([line for line in text().splitlines() if line.startswith("decode = ")]) == 1


@pytest.mark.slow
def test_the_file_is_certified_after_every_lesson(run, capsys, monkeypatch):
    """On the story model, which is quicker to ask."""
    monkeypatch.setattr(own_engine, "find_smollm2", lambda: SHIPPED / "target")
    for lesson in own_engine.STAGES:
        save_all(lesson)
        own_engine.grow(lesson)
        printed = capsys.readouterr().out
        assert printed.count("no loss found") == (1 if lesson < "02" else 2), printed
        assert "minispec's, not in" not in printed
    table = own_engine.FILE.with_suffix(".md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    assert [row[0] for row in rows] == list(own_engine.STAGES)
    per_pass = {row[0]: float(row[3]) for row in rows}
    assert {per_pass[lesson] for lesson in ("00", "01", "02")} == {1.0}
    assert all(per_pass[lesson] > 1 for lesson in own_engine.STAGES if lesson > "02")
    assert {row[-1] for row in rows} == {"greedy", "greedy, exact"}


def test_the_finished_file_needs_nothing_of_the_course(run, tmp_path):
    save_all()
    own_engine.write(own_engine.text_after("10")[0])
    assert not re.search("own_engine|solutions|import form", text())
    code = f"import my_minispec as m; print(m.decode({str(SHIPPED / 'target')!r}, [1, 5, 9], " \
           "max_new_tokens=9, temperature=0.8, top_k=0, top_p=1.0, seed=3))"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)},
                          cwd=tmp_path, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 1 <= len(json.loads(done.stdout)) <= 9


@pytest.fixture
def quick(monkeypatch):
    """`grow` without an examination and an answer."""
    monkeypatch.setattr(own_engine, "certify_stage", lambda lesson, folder: "greedy")
    numbers = itertools.count(1)
    monkeypatch.setattr(own_engine, "answer_of", lambda text: ("it", f"{next(numbers)}.00", "", ""))


def test_what_the_reader_has_not_written_is_minispecs_and_not_kept(run, quick, capsys):
    own_engine.grow("04")
    first, *table = capsys.readouterr().out.splitlines()
    assert first.startswith("minispec's, not in my_minispec.py yet: decoder, rounds, ")
    assert table[-1].startswith("| 04 ") and not own_engine.FILE.exists()
    code, missing = own_engine.text_after("04")
    assert {"mask", "commit", "warp", "accept_sibling", "residual"} <= {*missing}
    assert tokens_of(code) == plain_tokens()
    save_all("03")
    code, missing = own_engine.text_after("04")
    assert {*missing} == {"draft_siblings", "rounds", "accept_sibling"}


def test_the_table_has_a_line_for_each_lesson_and_a_new_one_in_its_place(run, quick, capsys):
    save_all()
    own_engine.grow("00"), own_engine.grow("10"), own_engine.grow("00")
    table = own_engine.FILE.with_suffix(".md").read_text(encoding="utf-8")
    rows = [re.findall(r"[^|\s]+", line) for line in table.splitlines()]
    assert [row[0] for row in rows[2:]] == ["00", "10"] and rows[2][-2:] == ["3.00", "greedy"]
    assert capsys.readouterr().out.endswith(table) and len({*map(len, table.splitlines())}) == 1


def test_a_later_lessons_loop_takes_the_place_of_an_earlier_one(run, quick, capsys):
    save_all("02")
    assert own_engine.lesson_of(text(), "rounds") == "02"
    tasks = {(lesson, task.name): task for lesson, task in TASKS}
    assert solve(run, "03", tasks["03", "rounds"])[0].endswith(", saved in my_minispec.py")
    assert own_engine.lesson_of(text(), "rounds") == "03" and text().count("def rounds(") == 1
    _, line = solve(run, "02", tasks["02", "rounds"])
    assert line.strip().startswith("my_minispec.py has another rounds, which stays; check(rounds")
    own_engine.grow("02")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("not grown: my_minispec.py has rounds of lesson 03;")


def test_what_is_given_is_copied_once_with_its_imports(run):
    save_all("04")
    assert text().count("def find_draft(") == 1 and text().count("with_drafter\n") == 1
    assert "def ngrams(" not in text()


@pytest.mark.parametrize("broken", ["def ", "import nothing_of_this_name"])
def test_a_broken_file_does_not_grow(broken, run, quick, capsys):
    own_engine.FILE.write_text(broken)
    own_engine.grow("01")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("not grown: my_minispec.py cannot be imported (")
    assert own_engine.FILE.read_text() == broken


@pytest.mark.slow
@pytest.mark.parametrize("lesson, task, right, wrong, check", [
    ("03", "accept", "min(1.0, float(", "min(1.0, 1.5 * float(", own_engine.EXACT),
    ("04", "mask", "seen[node] = seen[parent]", "seen[node, length:] = True", own_engine.GREEDY),
])  # fmt: skip
def test_the_certifier_judges_the_readers_functions(lesson, task, right, wrong, check, run, capsys):
    save_all(lesson)
    own_engine.write(own_engine.text_after(lesson)[0])
    assert own_engine.certify(*check) and "no loss found" in capsys.readouterr().out
    source = own_engine.source_in(text(), task)
    assert right in source
    own_engine.FILE.write_text(text().replace(source, source.replace(right, wrong)))
    assert not own_engine.certify(*check) and "LOSS in" in capsys.readouterr().out


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
