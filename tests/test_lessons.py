"""The notebooks: complete and small as committed, within the limits of their form (see
lessons/form.py), and without the answers. Every known wrong answer gets its own message. With the
marker `lessons`, each runs twice in a fresh kernel: with the solutions in its stubs, and as it is.
"""

import ast
import base64
import contextlib
import importlib
import inspect
import io
import json
import math
import os
import random
import re
import shlex
import shutil
import struct
import subprocess
import sys
import textwrap
import time
from types import FunctionType

import pytest
import torch
from conftest import ROOT

from minispec import load
from minispec.generate import palette, view
from minispec.paths import SMOLLM2
from minispec.training.pretrain import distinct_4grams
from minispec.verify import residual

LESSONS = ROOT / "lessons"
sys.path.append(str(LESSONS))
import badges  # noqa: E402
import form  # noqa: E402
import machines  # noqa: E402
import own_engine  # noqa: E402

NOTEBOOKS = sorted(LESSONS.glob("*.ipynb"))
LESSON = {path.name[:2]: path for path in NOTEBOOKS}
TASKS = {
    (number, task.name): task for number in LESSON for task in form.load_solutions(number).TASKS
}
QUIZZES = {number: form.load_solutions(number).QUIZ for number in LESSON}
PROOFS = {number: getattr(form.load_solutions(number), "PROOFS", {}) for number in LESSON}
LOCAL_PATH = re.compile(
    r"/tmp/|/work/|/home/|/root/|/Users/|[A-Z]:\\\\|ipykernel_|" + re.escape(str(ROOT))
)

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
each_lesson = pytest.mark.parametrize("number", LESSON)
each_task = pytest.mark.parametrize("key", TASKS, ids="-".join)


def cells_of(path, kind: str) -> list[dict]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def source(cell: dict) -> str:
    return "".join(cell["source"])


# ---- as committed --------------------------------------------------------------------------------


@each_notebook
def test_it_is_a_small_notebook(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) >= (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert all(cell["id"] for cell in notebook["cells"])
    assert path.stat().st_size < 400_000


@each_notebook
def test_it_was_run_from_top_to_bottom_without_warnings(path):
    code = cells_of(path, "code")
    counts = [cell["execution_count"] for cell in code]
    assert counts == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs
    for output in outputs:
        assert output["output_type"] != "error"
        assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {})
        assert output.get("name") != "stderr", "the output contains a warning or a progress bar"
        found = LOCAL_PATH.search(json.dumps(output))
        assert not found, f"the output contains a local path: {found}"


@each_notebook
def test_the_code_it_shows_is_the_current_source(path):
    """A notebook that was run before a change would still show the old source."""
    files = (ROOT / "minispec").rglob("*.py")
    current = {line.strip() for file in files for line in file.read_text("utf-8").splitlines()}
    for cell in cells_of(path, "code"):
        for output in cell["outputs"]:
            shown = "".join(output.get("data", {}).get("text/markdown", ""))
            if shown.startswith("```python"):
                lines = {line.strip() for line in shown.splitlines()[1:-1]}
                assert lines <= current, f"run make lessons-refresh; outdated: {lines - current}"


@each_notebook
def test_it_begins_with_a_title(path):
    first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]
    assert first["cell_type"] == "markdown" and source(first).startswith("# ")


# ---- the form ------------------------------------------------------------------------------------


@each_lesson
def test_it_keeps_the_limits(number):
    code = [source(cell) for cell in cells_of(LESSON[number], "code")]
    assert len(code) <= 25  # with the quiz
    for cell in code:
        assert len(cell.splitlines()) <= 20, cell
    text = "\n".join(source(cell) for cell in cells_of(LESSON[number], "markdown"))
    required = re.sub(r"^\*\*★.*", "", badges.BADGE.sub("", text), flags=re.MULTILINE)
    assert len(required.split()) <= 1800
    assert re.search(r"\*\*\d\d minutes\.\*\*", text)
    assert not re.search(r"matplotlib|plt\.", "\n".join(code)), "plots belong in drawing.py"


@each_lesson
def test_it_asks_draws_predicts_and_finally_compares(number):
    """The order is: title as a question, lesson(), a drawn round, predict(). The end: compare()."""
    path = LESSON[number]
    first = source(cells_of(path, "markdown")[0])
    assert re.fullmatch(rf"# {number} · .*\?", first.splitlines()[0])
    code = cells_of(path, "code")
    assert source(code[0]).endswith(f'lesson("{number}")')
    assert any("image/png" in output.get("data", {}) for output in code[1]["outputs"])
    tree = ast.parse(source(code[2]))
    (predictions,) = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert predictions.func.id == "predict" and source(code[-1]) == "compare()"
    names = {keyword.arg for keyword in predictions.keywords}
    printed = "".join(line for output in code[-1]["outputs"] for line in output["text"])
    assert all(f"{form.spaced(name)} " in printed for name in names)
    assert "not measured here" not in printed, "run it on a machine that has SmolLM2"


@each_lesson
def test_each_task_has_a_stub_that_is_checked_in_its_cell(number):
    code = cells_of(LESSON[number], "code")
    tags = [set(cell["metadata"].get("tags", [])) for cell in code]
    assert all(len(of_cell) <= 1 and of_cell <= {"write", "measure"} for of_cell in tags)
    stubs = {}
    for cell, of_cell in zip(code, tags):
        if "write" in of_cell:
            function, assignment = ast.parse(source(cell)).body
            assert ast.get_docstring(function) and len(function.body) == 2
            assert ast.unparse(function.body[1]) == "..."
            name = function.name
            assert ast.unparse(assignment) == f"{name} = check({name})"
            arguments = *function.args.args, *filter(None, [function.args.kwarg])
            stubs[name] = [argument.arg for argument in arguments]
    tasks = {name: task for (lesson, name), task in TASKS.items() if lesson == number}
    assert stubs.keys() == tasks.keys()
    for name, task in tasks.items():
        for function in task.package, task.solution:
            assert [*inspect.signature(function).parameters] == stubs[name]


@each_task
def test_the_names_that_an_answer_needs_are_in_scope(key, start):
    """The solution is right after the imports and definitions of the cells above it, which skip
    those about SmolLM2. Answers may use torch in any lesson."""
    number, name = key
    start(number)
    scope, kept = {}, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign
    for cell in cells_of(LESSON[number], "code")[1:]:
        tags, nodes = cell["metadata"].get("tags", []), ast.parse(source(cell)).body
        if "write" in tags:
            above = nodes[0].name
            exec(inspect.getsource(TASKS[number, above].solution), scope)
            if above == name:
                break
        elif "measure" not in tags:
            for node in (node for node in nodes if isinstance(node, kept)):
                with contextlib.suppress(Exception):  # what needs a measurement, or a plot
                    exec(ast.unparse(node), scope)
    assert "torch" in scope
    assert form.check(scope[name]) is scope[name]


@each_lesson
def test_no_section_is_missing(number):
    text = "\n".join(source(cell) for cell in cells_of(LESSON[number], "markdown"))
    sections = [int(n) for n in re.findall(r"^## (\d+) · ", text, re.MULTILINE)]
    assert sections == [*range(1, len(sections) + 1)] and sections


def squeezed(text: str) -> list[str]:
    """The lines that are not blank, with single spaces."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def triples(lines: list[str]) -> set[tuple[str, ...]]:
    return set(zip(lines, lines[1:], lines[2:]))


def body(function) -> list[str]:
    """The lines of a function after its signature and docstring, which a stub may show."""
    text = textwrap.dedent(inspect.getsource(function))
    node = ast.parse(text).body[0]
    first = node.body[1 if ast.get_docstring(node) else 0]
    return squeezed("\n".join(text.splitlines()[first.lineno - 1 :]))


def pages() -> dict[str, list[str]]:
    """The lines of everything that a student may read before writing: the notebooks, with their
    outputs, and the assignments."""
    found = {}
    for path in LESSON.values():
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        parts = [source(cell) for cell in cells]
        for output in (output for cell in cells for output in cell.get("outputs", [])):
            for shown in output.get("text", ""), *output.get("data", {}).values():
                parts.append("".join(shown) if isinstance(shown, str | list) else "")
        found[path.name] = squeezed("\n".join(parts))
    for path in [*LESSONS.glob("assignments/**/*.md"), *LESSONS.glob("assignments/*/starter.py")]:
        found[str(path.relative_to(LESSONS))] = squeezed(path.read_text(encoding="utf-8"))
    return found


@each_task
def test_no_page_prints_the_answer(key):
    task = TASKS[key]
    answers = [triples(body(function)) for function in (task.solution, *task.shows)]
    assert all(answers), "an answer of fewer than three lines cannot be searched for"
    for page, lines in pages().items():
        for answer in answers:
            assert not answer & triples(lines), page


REPEATED = {  # task -> earlier lessons that ask for part of it and then show the same function
    "accept_sibling": {"03"}, "accept_certain": {"03", "04"}, "best_k": {"04"},
    "best_method": {"04", "06"}, "rounds": {"01", "02", "03"},
}  # fmt: skip


@each_task
def test_no_earlier_lesson_shows_the_answer_when_it_is_solved(key):
    """What `source` displays is not in the committed outputs, because the stubs are empty."""
    number, name = key
    answers = [triples(body(function)) for function in (TASKS[key].solution, *TASKS[key].shows)]
    for (lesson, other), task in TASKS.items():
        if lesson < number and lesson not in REPEATED.get(name, ()):
            shown = triples(squeezed("\n".join(map(inspect.getsource, task.shows))))
            assert not any(answer & shown for answer in answers), f"{lesson}: {other}"


@each_lesson
def test_its_links_lead_somewhere(number):
    for cell in cells_of(LESSON[number], "markdown"):
        for target in re.findall(r"\]\(([^)\s]+)\)", badges.BADGE.sub("", source(cell))):
            file, _, section = target.partition("#")
            assert file.startswith("https://arxiv.org/abs/") or (LESSONS / file).exists()
            if section:
                assert f"\n## {section.title()}\n" in (LESSONS / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("seconds, disturbed", [([3.0, 1.0], True), ([1.0, 1.0], False)])
def test_a_speedup_above_the_tokens_per_pass_is_called_disturbed(seconds, disturbed, capsys):
    (cell,) = [c for c in cells_of(LESSON["00"], "code") if "def against_plain" in source(c)]
    runs = iter([([1] * 4, [(0, 0)] * 2, s) for s in seconds * 3])  # two tokens per pass
    namespace = {"generate": lambda prompt, n, propose: next(runs)}
    exec(source(cell), namespace)
    namespace["against_plain"]([1], 4, None)
    assert ("something disturbed the timing" in capsys.readouterr().out) == disturbed


# ---- badges, first cells, gallery and pictures ---------------------------------------------------


@each_lesson
def test_its_badge_and_first_cell_are_those_of_the_address(number):
    path = LESSON[number]
    first = source(cells_of(path, "markdown")[0]).split("\n\n")
    assert first[0].startswith("# ") and first[1].startswith(badges.badge(path.name))
    assert len(badges.BADGE.findall("".join(first))) == bool(badges.address())
    cell = source(cells_of(path, "code")[0])
    assert cell == badges.first_cell(number)
    assert len([line for line in cell.splitlines() if line]) <= 8


def test_the_table_has_the_badges_of_the_address():
    table = (LESSONS / "README.md").read_text(encoding="utf-8")
    wanted = [badges.badge(path.name) for path in NOTEBOOKS] if badges.address() else []
    assert badges.BADGE.findall(table) == wanted


def test_no_address_of_this_project_is_invented():
    """Only the one in pyproject.toml may be written. No organisation has the project's name."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a git checkout")
    own = (badges.address() or "").removeprefix("https://")
    assert not re.match(r"github\.com/minispec/", own)
    wrong = r"(github(\.com)?|gitlab\.com|project)/([a-zA-Z0-9-]+/)?minispec"
    command = ["git", "grep", "-IhE", wrong]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    colab = own.replace(".com", "")
    assert [x for x in found.splitlines() if not (own and (own in x or colab in x))] == []


def test_the_table_has_the_minutes_and_what_comes_before():
    table, before = (LESSONS / "README.md").read_text(encoding="utf-8"), {}
    rows = re.findall(r"^\| \[(\d\d)\][^|]*\|[^|]*\| (\d+) \|([^|]*)\|", table, re.MULTILINE)
    for number, minutes, after in rows:
        named = re.findall(r"\d\d", after)
        before[number] = {*named, *(lesson for name in named for lesson in before[name])}
        first = source(cells_of(LESSON[number], "markdown")[0])
        (stated, needed), = re.findall(r"\*\*(\d\d) minutes\.\*\*([^.]*)", first)
        assert stated == minutes
        assert {*re.findall(r"(?<=\b)\d\d(?=\b)(?!_)", needed)} <= before[number], number
    assert before.keys() == LESSON.keys()


def test_the_first_lesson_lists_the_others():
    last = source(cells_of(LESSON["00"], "markdown")[-1])
    for number, path in LESSON.items():
        assert number == "00" or f"| [**{number}**]({path.name}) |" in last


def test_readmes_pictures_have_alternative_texts():
    assert "![](" not in (ROOT / "README.md").read_text(encoding="utf-8")


def test_badges_are_rewritten_for_a_new_address(tmp_path, monkeypatch):
    files = [tmp_path / LESSON["03"].name, tmp_path / "README.md"]
    before = [shutil.copy(LESSONS / file.name, file).read_bytes() for file in files]

    def texts(address: str | None) -> list[str]:
        monkeypatch.setattr(badges, "address", lambda: address)
        badges.write_notebook(files[0])
        badges.write_table(files[1])
        return [file.read_text(encoding="utf-8") for file in files]

    for name in "fork/of-it", "another/fork":
        for text in texts(f"https://github.com/{name}"):
            assert f"/{name}/blob/main/lessons/03_" in text
            assert name == "fork/of-it" or "fork/of-it" not in text
    for text in texts(None):
        assert "colab" not in text.lower() and "fork" not in text
    monkeypatch.undo()
    texts(badges.address())
    assert [file.read_bytes() for file in files] == before


@pytest.mark.slow
def test_the_first_cell_works_without_a_checkout(tmp_path, monkeypatch):
    """As on Colab: in an empty folder, once more after a restart, and in the checkout it made."""
    git = shutil.which("git") or pytest.skip("no git on this machine")
    repository, bare, stubs = (tmp_path / name for name in ("repository", "bare", "stubs"))
    for name in "minispec", "lessons":
        shutil.copytree(ROOT / name, repository / name)
    commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "all"]
    for arguments in ["init", "-q"], ["add", "."], commit:
        subprocess.run([git, *arguments], cwd=repository, check=True)
    bare.mkdir()
    (bare / "lessons").mkdir()  # somebody's own
    (stubs / "pip").mkdir(parents=True)
    (stubs / "pip" / "__init__.py").touch()
    installed = tmp_path / "installed"
    (stubs / "pip" / "__main__.py").write_text(
        f"import sys; print(*sys.argv[1:], file=open({str(installed)!r}, 'a'))"
    )
    environment = {**os.environ, "PYTHONPATH": str(stubs)}
    monkeypatch.setattr(badges, "address", repository.as_uri)
    cell = badges.first_cell("03")
    starts = cell + "\nimport minispec\nprint(minispec.__path__[0])"
    imports = cell.replace('lesson("03")', "import form\nprint(form.LESSONS)")
    made = bare / "checkout"
    for folder, code, printed in (
        (bare, starts, made / "minispec"),
        (bare, imports, made / "lessons"),
        (made, imports, made / "lessons"),
        (made / "lessons", imports, made / "lessons"),
    ):
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment,
                              capture_output=True, text=True)  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{printed}\n", "")
    assert installed.read_text() == "install -q -e checkout\n"


@pytest.mark.parametrize("folder", [ROOT, LESSONS])
def test_the_first_cell_works_in_a_checkout(folder, monkeypatch):
    monkeypatch.setattr(badges, "address", lambda: None)
    code = badges.first_cell("03").replace('lesson("03")', "import form\nprint(form.LESSONS)")
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{LESSONS}\n", "")


@pytest.mark.parametrize("address", [
    "https://github.com/me/fork/", "https://github.com/me/fork.git", "git@github.com:me/fork.git",
    "https://gitlab.com/me/fork", "",
])  # fmt: skip
def test_an_address_that_badges_cannot_use_is_named(address, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(badges, "LESSONS", tmp_path / "lessons")
    (tmp_path / "pyproject.toml").write_text(f'[project.urls]\nSource = "{address}"\n')
    with pytest.raises(SystemExit) as caught:
        badges.address()
    assert caught.value.code == 2 and repr(address) in capsys.readouterr().err
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    assert badges.address() is None and badges.badge("03.ipynb") == ""


def trace_in(page: str) -> dict:
    """The data of a page of the gallery."""
    data = re.search(r'<script id="trace" type="application/json">(.*?)</script>', page, re.S)
    return json.loads(data[1])


def test_the_gallery_is_what_the_makefile_writes():
    command = ["make", "--no-print-directory", "-n", "gallery"]
    written = set()
    for line in subprocess.check_output(command, cwd=ROOT, text=True).splitlines():
        if "minispec.generate" not in line:  # installs or downloads something
            continue
        words = shlex.split(line.partition("<")[0])
        flags, prompt = dict(zip(words, words[1:])), words[-1]
        written.add(file := ROOT / flags["--html"])
        run = trace_in(file.read_text(encoding="utf-8"))
        asked = f"user\n{prompt}\nassistant\n" if "--chat" in words else prompt
        assert run["prompt"].endswith(asked), f"{file.name} answers another prompt: make gallery"
        assert [run["method"], run["model"]] == [flags["--method"], flags["--model"]]
        assert run["sampling"]["temperature"] == float(flags.get("--temperature", 0))
    assert written == {*(LESSONS / "gallery").glob("*.html")}


GALLERY = {"speculative": "03", "medusa": "04", "lookahead": "05", "fastmtp": "06", "hybrid": "10"}


@pytest.mark.parametrize("method, number", GALLERY.items())
def test_a_page_of_the_gallery_is_small_and_linked(method, number):
    file = LESSONS / "gallery" / f"{method}.html"
    page = file.read_text(encoding="utf-8")
    assert file.stat().st_size < 500_000
    assert not LOCAL_PATH.search(page)
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", page) == ["data:,"]
    template = view.TEMPLATE.read_text("utf-8").replace(view.COLOURS_PLACEHOLDER, palette.css())
    before, after = template.split(view.PLACEHOLDER)
    assert page.startswith(before) and page.endswith(after), "run make gallery"
    run = trace_in(page)
    assert run["method"] == method and run["stats"]["lossless"] and len(run["passes"]) > 10
    assert distinct_4grams(run["tokens"]) > 0.8, "its text loops"
    link = f"(gallery/{method}.html)"
    assert link in source(cells_of(LESSON[number], "markdown")[-1])
    assert link in (LESSONS / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", LESSON)
def test_what_a_lesson_imports_exists(number):
    """Without running its cells, which takes minutes."""
    lines = [line for cell in cells_of(LESSON[number], "code") for line in source(cell).split("\n")]
    for line in lines:
        if line.startswith("from minispec") and not line.endswith("("):
            exec(line, {})


def test_the_gpus_curve_is_the_one_that_was_measured():
    file = ROOT / "tests" / "gpu" / "results" / "speed-2026-11-27-nvidia-h200.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["steps"]["1B, graphs"]
    seconds = {row["rows"]: row["seconds"] for row in rows if "rows" in row}
    assert seconds.keys() == {1, 8, 64} and len(machines.H200) == 65
    for n in seconds:
        assert abs(machines.H200[n] - seconds[n] / seconds[1]) < 0.01
    for number in "00", "04", "06", "10":
        assert any("H200[" in source(c) or "*H200" in source(c)
                   for c in cells_of(LESSON[number], "code")), number  # fmt: skip


def test_letters_have_at_least_9_points():
    code = "".join((LESSONS / name).read_text("utf-8") for name in ("drawing.py", "pictures.py"))
    sizes = re.findall(r"(?:fontsize|labelsize|\bsize)=([\d.]+)", code)
    assert len(sizes) > 20 and all(float(size) >= 9 for size in sizes)
    assert "rcParams.update" not in code
    font_manager, matplotlib = map(pytest.importorskip, ("matplotlib.font_manager", "matplotlib"))
    for part in "font.size", "axes.titlesize", "axes.labelsize", "xtick.labelsize":
        size = matplotlib.rcParamsDefault[part]
        assert font_manager.FontProperties(size=size).get_size_in_points() >= 9


def pictures() -> dict[str, bytes]:
    """The PNG files of the new notebooks and of README, except for the screenshot."""
    files = [path for path in LESSONS.glob("images/*.png") if path.stem != "trace"]
    found = {path.name: path.read_bytes() for path in files}
    for path in LESSON.values():
        for cell in cells_of(path, "code"):
            for output in cell["outputs"]:
                if picture := output.get("data", {}).get("image/png"):
                    found[f"{path.stem}: {cell['id']}"] = base64.b64decode("".join(picture))
    return found


def test_pictures_have_100_dots_per_inch():
    for name, picture in pictures().items():
        at = picture.index(b"pHYs") + 4
        assert struct.unpack(">II", picture[at : at + 8]) == (3937, 3937), name  # per metre


def test_pictures_have_no_ground():
    """They are read in light and dark themes. With it, Jupyter would not add one of its own."""
    image = pytest.importorskip("matplotlib.image")
    for name, picture in pictures().items():
        pixels = image.imread(io.BytesIO(picture), format="png")
        assert pixels.shape[2] == 4 and {*pixels[[0, -1], :][:, [0, -1], 3].flat} == {0}, name


def test_colours_are_defined_in_one_place():
    files = *LESSONS.glob("*.py"), *(ROOT / "minispec" / "generate").glob("*.py")
    found = [file.name for file in files if re.search("#[0-9A-Fa-f]{6}", file.read_text("utf-8"))]
    assert found == ["palette.py"]


# ---- checking ------------------------------------------------------------------------------------


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Start a lesson, without the settings that lesson() makes for the whole process, and with a
    my_minispec.py that is nobody's."""
    monkeypatch.setattr(own_engine, "FILE", tmp_path / "my_minispec.py")

    def start(number: str) -> None:
        tasks = {task.name: task for (lesson, _), task in TASKS.items() if lesson == number}
        progress = form.Progress(tasks, QUIZZES[number], PROOFS[number])
        monkeypatch.setattr(form, "progress", progress)
        monkeypatch.setattr(form, "PATIENCE", 300.0)  # on a busy machine, too

    return start


def renamed(function, name: str):
    """A copy of a function under the name that the reader uses."""
    return FunctionType(
        function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
    )


@each_task
def test_the_solution_and_the_package_are_right(key, start, capsys):
    number, name = key
    start(number)
    task = TASKS[key]
    assert form.check(task.solution) is task.solution
    package = renamed(task.package, name)
    assert form.check(package) is package
    out = capsys.readouterr().out.splitlines()
    right = [line for line in out if not line.startswith("    not saved: write it as `def ")]
    assert len(right) == 2 and all(line.startswith(f"{name}: right (") for line in right)
    assert (f"saved in {own_engine.FILE.name}" in right[0]) == (name != "tempting_accept")


WRONG = [
    (*key, message, i)
    for key, task in TASKS.items()
    for message in task.mistakes
    for i, _ in enumerate(form.mistakes_of(task, message))
]


@pytest.mark.slow
@pytest.mark.parametrize("number, name, message, i", WRONG)
def test_each_wrong_answer_gets_its_own_message(number, name, message, i, start, capsys):
    start(number)
    task = TASKS[number, name]
    assert len(task.mistakes) >= 3
    mistake = form.mistakes_of(task, message)[i]
    assert form.check(renamed(mistake, name)) is task.package
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == f"{name}: {message}"
    assert last.strip() == f"the lesson goes on with minispec's; hint({name!r}) helps"


def empty_bodies():
    def dots(p, q):
        """A contract."""
        ...

    def nothing(p, q):
        pass

    def none(p, q):
        return None

    def raises(p, q):
        raise NotImplementedError

    def raises_called(p, q):
        """A contract."""
        raise NotImplementedError()

    return dots, nothing, none, raises, raises_called


@pytest.mark.parametrize("function", empty_bodies(), ids=lambda f: f.__name__)
def test_an_empty_function_is_not_written_yet(function, start, capsys):
    start("03")
    residual = renamed(function, "residual")
    assert form.check(residual) is TASKS["03", "residual"].package
    line = "residual: not written yet; the lesson goes on with minispec's\n"
    assert capsys.readouterr().out == line


def raises_index_error(p, q):
    return p[99]


def draws_elsewhere(p, q, drafts, randomness):
    import random

    return 0, random.randrange(3)


def own_coin(p, q, drafts, randomness):
    import random

    for i, x in enumerate(drafts):
        if random.random() >= p[i][x] / q[i][x]:
            rest = (p[i] - q[i]).clamp(min=0)
            if rest.any():
                return i, randomness.categorical(rest / rest.sum())
    return len(drafts), randomness.categorical(p[len(drafts)])


def returns_one_number(p, q, drafts, randomness):
    return 0


def two_thirds(p, q, drafts, randomness):
    """A mistake that no list has foreseen."""
    return 0, randomness.categorical(p[0] ** 2)


def at_most_one(p, q, drafts, randomness, factor=1.0):
    """The rule of the lesson, with a factor."""
    for i, x in enumerate(drafts):
        if not randomness.bernoulli(min(1.0, factor * float(p[i][x] / q[i][x]))):
            rest = (p[i] - q[i]).clamp(min=0)
            if rest.any():
                return i, randomness.categorical(rest / rest.sum())
    return len(drafts), randomness.categorical(p[len(drafts)])


def not_clamped(p, q, drafts, randomness):
    return int(randomness.bernoulli(p[0][drafts[0]] / q[0][drafts[0]])), 0


def a_quarter_more(p, q, drafts, randomness):
    return at_most_one(p, q, drafts, randomness, 1.25)


def twice(p, q, drafts, randomness):
    return at_most_one(p, q, drafts, randomness, 2)


def forgets_q(p, q, drafts, randomness):
    """It ends every round by hand, and accepts if p and q are equal up to rounding."""
    for i, x in enumerate(drafts):
        if not randomness.bernoulli(float(p[i][x])) and (p[i] > q[i]).any():
            rest = p[i].clone()
            rest[x] = 0
            return i, randomness.categorical(rest)
    return len(drafts), randomness.categorical(p[len(drafts)])


def keeps_the_rejected(p, q, drafts, randomness):
    """The draft is kept, and the round ends with any token."""
    for i, x in enumerate(drafts):
        if not randomness.bernoulli(min(1.0, float(p[i][x] / q[i][x]))):
            return i + 1, randomness.categorical(q[i])
    return len(drafts), randomness.categorical(p[len(drafts)])


def ends_if_nothing_is_left(p, q, drafts, randomness):
    """The draft is accepted, but the round ends there."""
    for i, x in enumerate(drafts):
        if not randomness.bernoulli(min(1.0, float(p[i][x] / q[i][x]))):
            rest = (p[i] - q[i]).clamp(min=0)
            if not rest.any():
                return i + 1, randomness.categorical(p[i + 1])
            return i, randomness.categorical(rest / rest.sum())
    return len(drafts), randomness.categorical(p[len(drafts)])


def ends_at_the_second(p, q, drafts, randomness):
    """Right for γ = 1; if nothing is left, the round ends after the next draft."""
    for i, x in enumerate(drafts):
        if not randomness.bernoulli(min(1.0, float(p[i][x] / q[i][x]))):
            rest = (p[i] - q[i]).clamp(min=0)
            if not rest.any() and i > 0:
                return i, randomness.categorical(p[i])
            if rest.any():
                return i, randomness.categorical(rest / rest.sum())
    return len(drafts), randomness.categorical(p[len(drafts)])


def clears_the_drafts(p, q, drafts, randomness):
    n, fresh = at_most_one(p, q, drafts, randomness)
    drafts.clear()
    return n, fresh


def clears_p(p, q, drafts, randomness):
    n, fresh = at_most_one(p, q, drafts, randomness)
    p.clear()
    return n, fresh


def waits_for_a_coin(p, q, drafts, randomness):
    while not randomness.bernoulli(0.5):
        pass
    return 0, 0


def samples_by_rejection(p, q, drafts, randomness):
    while True:
        x = randomness.categorical(q[0] if q else p[0])
        if randomness.bernoulli(0.5):
            return 0, x


def goes_on_and_draws_from_p(p, q, drafts, randomness):
    """Two mistakes at once."""
    n, fresh = 0, p[len(drafts)]
    for i, x in enumerate(drafts):
        if randomness.bernoulli(min(1.0, float(p[i][x] / q[i][x]))):
            n += 1
        else:
            fresh = p[i]
    return n, randomness.categorical(fresh)


def normalizes(p, q):
    rest = torch.nn.functional.normalize((p - q).clamp(min=0), p=1, dim=0)
    return rest if rest.any() else None


def not_divided(p, q):
    return (p - q).clamp(min=0)


def pythons_max(p, q):
    rest = max(0, p - q)
    return rest / rest.sum()


def compares_tensors_in_if(p, q):
    if p == q:
        return None
    return TASKS["03", "residual"].solution(p, q)


def torch_max(p, q):
    rest = torch.max(0, p - q)
    return rest / rest.sum()


def torch_maximum(p, q):
    rest = torch.maximum(p - q, 0)
    return rest / rest.sum()


def max_along_a_dimension(p, q):
    rest = torch.max(p - q, 0)
    return rest / rest.sum()


def largest(p, q):
    rest = torch.max(p - q, 0).values
    return rest / rest.sum()


def sums_too_early(p, q):
    return (p - q).clamp(min=0) / (p - q).sum()


def in_single_precision(p, q):
    rest = (p - q).clamp(min=0).float()
    return rest / rest.sum() if rest.any() else None


def adds_an_epsilon(p, q, epsilon=1e-8):
    rest = (p - q).clamp(min=0)
    return rest / (rest.sum() + epsilon)


def adds_a_tiny_epsilon(p, q):
    return adds_an_epsilon(p, q, 1e-12)


def gives_up_early(p, q):
    rest = (p - q).clamp(min=0)
    return rest / rest.sum() if rest.sum() >= 1e-2 else None


def almost_equal(p, q):
    rest = (p - q).clamp(min=0)
    return None if torch.allclose(p, q) else rest / rest.sum()


def zeros_for_nothing(p, q):
    rest = (p - q).clamp(min=0)
    return rest / rest.sum().clamp(min=1e-30)


@pytest.mark.parametrize(
    "name, function, message",
    [
        (
            "residual",
            raises_index_error,
            r"IndexError in line \d+ of its cell: index 99.*\n +with p = ",
        ),
        ("residual", not_divided, r"it does not sum to 1 \(0.30\): divide by the sum"),
        ("residual", pythons_max, "Python's `max` and `if` need one number"),
        ("residual", compares_tensors_in_if, "Python's `max` and `if` need one number"),
        ("residual", torch_max, "`max` does not compare each element with 0; hint 1 names"),
        ("residual", torch_maximum, "`max` does not compare each element with 0; hint 1 names"),
        ("residual", max_along_a_dimension, "`max` does not compare each element with 0; hint 1"),
        ("residual", largest, "it returns one number; `max` does not compare each element"),
        ("residual", sums_too_early, "it divides by the sum of p - q, which is 0; first replace"),
        ("residual", in_single_precision, r"it returns float32; keep the dtype of p \(float64\)"),
        ("residual", adds_an_epsilon, r"it sums to 0\.99999\d+; do not add a small number"),
        ("residual", adds_a_tiny_epsilon, r"it sums to 0\.99999\d+; do not add a small number"),
        ("residual", gives_up_early, r"it returns None too early; .*0\.505.*5\.0e-03 of p is left"),
        (
            "residual",
            almost_equal,
            r"it returns None too early; .*p - q = \[-9\.09e-13 9\.09e-13\], so 9\.1e-13 of p",
        ),
        ("residual", normalizes, r"it sums to 0\.91 where only 9\.1e-13 of p is left; divide"),
        ("residual", zeros_for_nothing, "it returns only zeros if nothing is left; return None"),
        ("accept", not_clamped, r"`bernoulli` gets 2\.50; a probability is at most 1: min\(1, p"),
        ("accept", a_quarter_more, r"it accepts more often than min\(1, p/q\)\n"),
        ("accept", twice, r"it accepts more often than min\(1, p/q\)\n"),
        ("accept", goes_on_and_draws_from_p, "it goes on after a rejection; later drafts were"),
        ("accept", forgets_q, r"lossless, but it accepts too rarely \(section 4\)\n"),
        (
            "accept",
            keeps_the_rejected,
            "the tokens have q: the rejected draft stays in the text, or",
        ),
        ("accept", ends_if_nothing_is_left, r"it is right up to rounding: .*accepts 1 of 2 drafts"),
        ("accept", ends_at_the_second, r"it is right up to rounding: .*accepts 1 of 2 drafts"),
        ("accept", clears_the_drafts, "it changes `drafts`, which belongs to the caller"),
        ("accept", clears_p, "it changes `p`, which belongs to the caller"),
        ("accept", waits_for_a_coin, "it keeps asking for random decisions; γ drafts need at most"),
        ("accept", samples_by_rejection, "it keeps asking for random decisions; γ drafts need at"),
        ("accept", draws_elsewhere, "two calls with the same arguments .* draws random numbers"),
        ("accept", returns_one_number, "it must return two numbers"),
        ("accept", two_thirds, r"not right yet\n +for example, γ = 1.*distance \d\.\de-\d\d"),
    ],
)
def test_other_faults_are_described(name, function, message, start, capsys):
    start("03")
    assert form.check(renamed(function, name)) is TASKS["03", name].package
    assert re.match(f"{name}: {message}", capsys.readouterr().out, re.DOTALL)


def loses_the_least_likely(logits, temperature, top_k, top_p):
    p = TASKS["02", "warp"].package(logits, temperature, top_k, top_p)
    if top_p == 1 and temperature > 0:
        p[p.argmin()] = 0.0
    return p / p.sum()


def keeps_one_more(logits, temperature, top_k, top_p):
    warp = TASKS["02", "warp"].package
    everything, kept = (warp(logits, temperature, top_k, x) for x in (1.0, top_p))
    n = int((kept > 0).sum()) + 1
    p = torch.zeros_like(kept).scatter(-1, *reversed(everything.topk(min(n, len(kept)))))
    return p / p.sum()


def never_ends(text, stop):
    n = max(n for n in range(len(stop)) if text.endswith(stop[:n]))
    return text[: len(text) - n], text[len(text) - n :], False


def all_of_a_first(run, prompts):
    """Repeated three times, which does not help."""
    a, b = (sum(run(method, prompt) for prompt in prompts * 3) for method in "AB")
    return a / b


def only_a(run, prompts):
    return run("A", prompts[0])


def too_long_by_two(kv, length, path):
    for i, node in enumerate(path):
        kv[:, :, length + i] = kv[:, :, length + node]
    return min(length + len(path) + 2, kv.shape[2])


def ignores_none(p, q, drafts, randomness):
    """The sibling is rejected although nothing is left of p."""
    for i, x in enumerate(drafts):
        if randomness.bernoulli(min(1.0, float(p[x] / q[x]))):
            return i, x
        rest = (p - q).clamp(min=0)
        p, q = (rest / rest.sum() if rest.any() else p), q.clone()
        q[x] = 0
        q /= q.sum()
    return None, randomness.categorical(p)


def halves_later_coins(p, q, drafts, randomness, factor=0.5, power=1):
    """The rule of lesson 04, with a factor for the coins of later siblings, and a fresh token from
    a power of what p has become."""
    for i, x in enumerate(drafts):
        rest = residual(p, q, x)
        coin = min(1.0, float(p[x] / q[x])) * (factor if i else 1)
        if randomness.bernoulli(coin) or rest is None:
            return i, x
        p, q = rest, q.clone()
        q[x] = 0
        q /= q.sum()
    return None, randomness.categorical(p**power)


def squares_the_rest(p, q, drafts, randomness):
    return halves_later_coins(p, q, drafts, randomness, factor=1, power=2)


def runs_a_pass_twice(choices, guess):
    rows, new = [], list(guess)
    while new not in rows:
        rows.append(new)
        choices(new)
        new = choices(new)[:-1]
    return rows


def at_most_m_passes(choices, guess):
    """After as many passes as places no further one is needed."""
    rows = [list(guess)]
    for _ in guess:
        new = choices(rows[-1])[:-1]
        if new == rows[-1]:
            break
        rows.append(new)
    return rows


def files_under_a_tuple(pool, gram, limit):
    pool.setdefault(gram[:1], []).append(gram[1:])


def keeps_one_row(drafter, hidden, tokens, k):
    drafts = TASKS["06", "chain"].solution(drafter, hidden, tokens, k)
    drafter.cache.truncate(1)
    return drafts


def drafts_twice(drafter, hidden, tokens, k):
    """Right, but the head runs on all drafts a second time."""
    drafts = runs_on_the_last_draft(drafter, hidden, tokens, k)
    length, output = drafter.cache.length, hidden[-1:]
    for draft in drafts:
        output = drafter.run(output, [draft])
        drafter.cache.commit([0])
    drafter.cache.truncate(length)
    return drafts


def drafts_twice_and_moves_a_row(drafter, hidden, tokens, k):
    """The wasted runs must not hide the wrong row."""
    drafts = drafts_twice(drafter, hidden, tokens, k)
    drafter.cache.kv[..., 0, :, :] += 1
    return drafts


def runs_on_the_last_draft(drafter, hidden, tokens, k):
    output = drafter.run(hidden, tokens)[-1:]
    drafter.cache.commit(list(range(len(tokens))))
    length, drafts = drafter.cache.length, []
    for _ in range(k):
        drafts.append(int(drafter.model.logits(output).argmax()))
        output = drafter.run(output, drafts[-1:])
        drafter.cache.commit([0])
    drafter.cache.truncate(length)
    return drafts


def test_a_chain_may_run_the_head_on_the_last_draft(start):
    start("06")
    chain = renamed(runs_on_the_last_draft, "chain")
    assert form.check(chain) is chain


def best_first(accuracy, nodes):
    return TASKS["04", "grow_tree"].solution(accuracy, nodes)


def by_last_rank(accuracy, nodes):
    return sorted(best_first(accuracy, nodes), key=lambda path: (len(path), path[-1], path))


def worst_siblings_first(accuracy, nodes):
    paths = best_first(accuracy, 10**6)
    return sorted(paths, key=lambda path: (len(path), -paths.index(path)))[:nodes]


def longer_path_first(accuracy, nodes):
    """If a child gains as much as its parent, the child comes first."""
    from solutions.pure_04 import gain_of

    paths = best_first(accuracy, 10**6)
    return sorted(paths, key=lambda path: (-gain_of(accuracy, path), -len(path)))[:nodes]


def parent_and_minus_one(parents, length):
    seen = torch.zeros(len(parents), length + len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        seen[node, :length] = seen[node, length + node] = seen[node, length + parent] = True
    return seen


def one_too_far_after_a_wrong_guess(guess, choices):
    n = 0
    for g, c in zip(guess, choices):
        if g != c:
            return n, choices[n + 1]
        n += 1
    return n, choices[n]


def only_if_it_is_at_the_end(text, stop):
    n = max(n for n in range(len(stop) + 1) if text.endswith(stop[:n]))
    return text[: len(text) - n], text[len(text) - n :], n == len(stop)


def holds_it(text, stop):
    return *only_if_it_is_at_the_end(text, stop)[:2], stop in text


def softmax_over_one_row(logits, temperature, top_k, top_p):
    if temperature == 0:
        return TASKS["02", "warp"].package(logits, temperature, top_k, top_p)
    p, order = (logits / temperature)[None].softmax(0)[0].sort(descending=True)
    p[p.cumsum(-1) - p >= top_p] = 0
    p = torch.zeros_like(p).scatter(-1, order, p)
    return p / p.sum()


def in_parts(product, rows, multiple):
    fill_up = TASKS["09", "fill_up"].package
    return torch.cat([fill_up(product, part, multiple) for part in rows.split(multiple)])


def doubles_what_it_adds(product, rows, multiple):
    zeros = rows.new_zeros(-len(rows) % multiple + (multiple if len(rows) > 4 else 0), 24)
    return product(torch.cat([rows, zeros]))[: len(rows)]


def repeats_a_row(product, rows, multiple):
    """Right: what a row is filled up with does not matter."""
    return product(torch.cat([rows, *[rows[:1]] * (-len(rows) % multiple)]))[: len(rows)]


def rescales(queries, keys, values, product, block=64):
    """Right for blocks of 64: the sums are rescaled whenever a block has a larger score."""
    (r, d), n = queries.shape, len(keys)
    keys, values = (torch.cat([x, x.new_zeros(-n % 64, d)]) for x in (keys, values))
    seen = torch.arange(len(keys)) <= torch.arange(n - r, n)[:, None]
    highest, weights, total = torch.full((r, 1), -torch.inf), 0, 0
    for k, v, mask in zip(keys.split(block), values.split(block), seen.split(block, -1)):
        scores = (product(queries, k.T) / d**0.5).masked_fill(~mask, -torch.inf)
        before, highest = highest, torch.maximum(highest, scores.max(-1, keepdim=True).values)
        p, factor = (scores - highest).exp(), (before - highest).exp()
        weights, total = weights * factor + p.sum(-1, True), total * factor + product(p, v)
    return total / weights


def in_larger_blocks(queries, keys, values, product):
    return rescales(queries, keys, values, product, block=256)


def sees_as_many_slots_as_queries(queries, keys, values, product):
    n = len(queries)
    return rescales(queries, keys[:n], values[:n], product)


def uses_at(queries, keys, values, product):
    return rescales(queries, keys, values, torch.matmul)


def runs_it_again(x, layers, chosen, fc):
    last, _ = TASKS["11", "fuse"].solution(x, layers, chosen, fc)
    return last, TASKS["11", "fuse"].solution(x, layers, chosen, fc)[1]


def twice_the_features(x, layers, chosen, fc):
    last, fused = TASKS["11", "fuse"].solution(x, layers, chosen, fc)
    return last, 2 * fused


def in_rows(x, layers, chosen, fc):
    return TASKS["11", "fuse"].solution(x, layers, chosen, lambda wide: fc(wide.view(-1, 4)))


def other_calls(change):
    """`unroll` with change(k, hidden, position, mask) in each call of `run`."""

    def unroll(run, fused, tokens, steps):
        n, hidden, outputs = fused.shape[1], fused, []
        at = torch.arange(n)
        for k in range(steps):
            mask = torch.cat([at[:, None] >= at] + [at[:, None] == at] * k, 1)
            read, position, mask = change(k, hidden, at + k, mask)
            hidden = run(read, tokens[:, k + 1 : k + 1 + n], position, mask)
            outputs.append(hidden)
        return outputs

    return unroll


sees_its_own_step = other_calls(lambda k, hidden, at, mask: (hidden, at, mask[:, : len(mask)]))
sees_nothing = other_calls(lambda k, hidden, at, mask: (hidden, at, mask & (mask.cumsum(0) > 1)))
adds_numbers = other_calls(lambda k, hidden, at, mask: (hidden, at, mask.double().log()))
detaches = other_calls(lambda k, hidden, at, mask: (hidden.detach() if k else hidden, at, mask))
halves_positions = other_calls(lambda k, hidden, at, mask: (hidden, at + 0.5 * k, mask))
moves_step_1 = other_calls(lambda k, hidden, at, mask: (hidden, at * (2 - min(k, 1)), mask))


@pytest.mark.parametrize("function", [repeats_a_row, rescales])
def test_sums_in_one_order_may_be_written_in_other_ways(function, start):
    start("09")
    answer = renamed(function, "fill_up" if function is repeats_a_row else "attend_in_blocks")
    assert form.check(answer) is answer


@pytest.mark.parametrize(
    "number, name, function, message",
    [
        ("00", "accept", one_too_far_after_a_wrong_guess, "n is right, but not the fresh token"),
        ("02", "release", only_if_it_is_at_the_end, "it looks for the stop string only at the end"),
        ("02", "release", holds_it, "it holds the stop string; once that is complete, end"),
        ("02", "warp", softmax_over_one_row, "its softmax runs over the wrong dimension: over one"),
        ("09", "fill_up", in_parts, "the bits are right, but each product reads all weights"),
        ("09", "fill_up", doubles_what_it_adds, "the bits are right, but it fills up with more"),
        ("09", "attend_in_blocks", in_larger_blocks, "the attention is right, but a product has"),
        ("09", "attend_in_blocks", sees_as_many_slots_as_queries, "this is not the attention of"),
        ("09", "attend_in_blocks", uses_at, "it does not call `product`; with `@`, a row's bits"),
        ("02", "warp", loses_the_least_likely, "top_p 1.0 must keep all tokens, but a sum can"),
        ("02", "warp", keeps_one_more, "top_p keeps too many tokens"),
        ("02", "release", never_ends, "it never ends; first look for `stop`"),
        ("08", "measure_speedup", all_of_a_first, "its runs of A and of B are at different times"),
        ("08", "measure_speedup", only_a, "it never runs B"),
        ("01", "mask", parent_and_minus_one, "a node sees its parent, but not its parent's anc"),
        ("01", "commit", too_long_by_two, "the rows are right, but the new length is not: length"),
        ("04", "accept_sibling", ignores_none, "it is right up to rounding: if `residual` returns"),
        ("04", "accept_sibling", squares_the_rest, "the drafts are judged as they should be, but"),
        ("04", "accept_sibling", halves_later_coins, "the first draft is judged as it should be,"),
        ("04", "grow_tree", by_last_rank, "these are the right paths, but not best first"),
        ("04", "grow_tree", longer_path_first, "a path comes before its parent, or without it"),
        ("04", "grow_tree", worst_siblings_first, "all siblings come before any child, even if a"),
        ("05", "jacobi", runs_a_pass_twice, "the rows are right, but it runs more passes than"),
        ("05", "add", files_under_a_tuple, "a key of the pool is not a token; it must be gram[0]"),
        ("06", "chain", drafts_twice, "all is right, but the head runs on more rows than"),
        ("06", "chain", drafts_twice_and_moves_a_row, "the drafts are right, but a row of the"),
        ("06", "chain", keeps_one_row, "the drafts are right, but the cache has more or"),
        ("11", "fuse", runs_it_again, "all is right, but it runs layers more than once"),
        ("11", "fuse", twice_the_features, "the last state is right, but the fused one is not"),
        ("11", "fuse", in_rows, "`fc` gets shape (3, 4) where d is 4; it takes the chosen states"),
        ("11", "unroll", sees_its_own_step, "in step 2 the mask has shape (3, 3); it has a column"),
        ("11", "unroll", sees_nothing, "in step 1 a row sees nothing; each sees at least itself"),
        ("11", "unroll", adds_numbers, "the mask is of torch.float64; True and False say what"),
        ("11", "unroll", detaches, "no gradient flows into the step before: do not detach what"),
        ("11", "unroll", halves_positions, "step 1 is right, but a later step is not what"),
        ("11", "unroll", moves_step_1, "step 1 is wrong: row i reads token i + 1 at position i"),
    ],
)
def test_a_diagnosis_covers_what_no_list_has(number, name, function, message, start, capsys):
    start(number)
    assert form.check(renamed(function, name)) is TASKS[number, name].package
    assert capsys.readouterr().out.startswith(f"{name}: {message}")


def goes_on_in_a_full_cache(model, text, **settings):
    cache = model.new_cache()
    while True:
        new = text[cache.length :]
        hidden = model(new, cache)[0]
        cache.commit(list(range(len(new))))
        text.append(int(model.logits(hidden[-1]).argmax()))
        yield text[-1:]


def test_a_loop_ends_with_the_cache(start, capsys):
    start("01")
    form.check(renamed(goes_on_in_a_full_cache, "rounds"))
    assert capsys.readouterr().out.startswith("rounds: it goes on though the cache is full; end")


def reads_the_batch(checkpoint, prompt, max_new_tokens, **settings):
    model, _ = load(checkpoint)
    return [int(model.logits(model(prompt)).argmax(-1)[-1])]


def test_a_batch_is_not_a_text(start, capsys):
    start("00")
    form.check(renamed(reads_the_batch, "greedy"))
    assert capsys.readouterr().out.startswith("greedy: a token is made of several numbers: model(")


def test_jacobi_may_leave_out_the_pass_that_cannot_change_anything(start):
    start("05")
    jacobi = renamed(at_most_m_passes, "jacobi")
    assert form.check(jacobi) is jacobi


@pytest.mark.parametrize("seed", range(20))
def test_a_coin_of_its_own_is_noticed_however_it_falls(seed, start, capsys):
    start("03")
    random.seed(seed)
    form.check(renamed(own_coin, "accept"))
    assert capsys.readouterr().out.startswith("accept: two calls with the same arguments")


NONSENSE = [
    None, True, -1, math.nan, "x", [], [None], [[]], (0, "x"), (None, None), ([0], 0), {"x": 1.0},
    object(), torch.tensor(1.0), torch.full((3,), math.nan),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("key", TASKS, ids="-".join)
def test_nonsense_is_judged_without_an_exception(key, start, capsys):
    number, name = key
    start(number)
    for answer in NONSENSE:
        assert form.check(renamed(lambda *_: answer, name)) is TASKS[key].package
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(f"{name}: ") for line in lines) == len(NONSENSE)


def does_not_end(guess, choices):
    n = 0
    while guess[n] == choices[n]:
        n += 1
    return n, choices[n]


def does_not_end_unless_empty(guess, choices):
    return does_not_end(guess, choices) if guess else (0, choices[0])


def keeps_the_index_unless_empty(guess, choices):
    i = 0
    for i, (a, b) in enumerate(zip(guess, choices)):
        if a != b:
            break
    return i, choices[i]


def returns_the_length(guess, choices):
    for i, (a, b) in enumerate(zip(guess, choices)):
        if a != b:
            return i, b
    return len(guess), len(guess)


def returns_in_the_loop_unless_empty(guess, choices):
    for i in range(len(guess)):
        if guess[i] != choices[i]:
            return i, choices[i]
    if not guess:
        return 0, choices[0]


def looks_too_far(guess, choices):
    return len(guess), choices[99 if guess and guess != choices[:-1] else -1]


@pytest.mark.parametrize(
    "function, message",
    [
        (does_not_end, "IndexError where all guesses are right: there is no guess"),
        (does_not_end_unless_empty, "IndexError where all guesses are right: there is no guess"),
        (keeps_the_index_unless_empty, "if all guesses are right, the last one is not accepted"),
        (returns_the_length, "it errs only if all guesses are right: accept all of them, and add"),
        (returns_in_the_loop_unless_empty, "it returns None where all guesses are right: then the"),
        (looks_too_far, r"IndexError in line \d+ of its cell: list index out of range"),
    ],
)
def test_faults_where_all_guesses_are_right_are_described(function, message, start, capsys):
    start("00")
    assert form.check(renamed(function, "accept")) is TASKS["00", "accept"].package
    first, example, _ = capsys.readouterr().out.splitlines()
    assert re.match(f"accept: {message}", first) and "guess [" in example


@each_task
def test_a_missing_return_is_named(key, start, capsys):
    start(key[0])
    task = TASKS[key]

    def calls(*arguments):
        task.solution(*arguments)

    if key != ("05", "add"):  # which returns nothing
        assert form.check(renamed(calls, key[1])) is task.package
        line = f"{key[1]}: it always returns None; a `return` with a value is missing; "
        assert capsys.readouterr().out.startswith(line)


def test_a_lambda_belongs_to_the_task_with_its_parameters(start, capsys):
    start("03")
    right = lambda p_rows, q_rows: p_rows.gather(-1, q_rows.argmax(-1, True)).squeeze(-1)  # noqa: E731
    assert form.check(right) is right
    assert form.check(lambda p, q: p) is TASKS["03", "residual"].package
    assert form.check(lambda other: other) is TASKS["03", "residual"].package
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert [line.partition(":")[0] for line in lines] == ["greedy_acceptance", *["residual"] * 2]


def prints(guess, choices):
    print("guess", guess)
    return TASKS["00", "accept"].solution(guess, choices)


def test_prints_of_an_answer_do_not_fill_the_screen(start, capsys):
    start("00")
    form.check(renamed(prints, "accept"))
    *first, more, judged, _ = capsys.readouterr().out.splitlines()  # a copy cannot be saved
    assert len(first) == form.MOST_LINES
    assert all(line.startswith("accept prints: guess [") for line in first)
    assert more == "accept prints 55 more lines, not shown here" and "right (60 " in judged


def test_what_is_not_an_answer_is_named(start, capsys):
    start("03")
    package = TASKS["03", "accept"].package
    assert form.check(package) is package
    assert form.check(renamed(two_thirds, "acept"))
    assert form.check(3) == 3
    assert capsys.readouterr().out.splitlines() == [
        "accept: this is minispec's; run the cell that defines yours again",
        "acept: not a task of this lesson, which has residual and accept and greedy_acceptance "
        "and draft_one and rounds",
        "check takes a function: residual = check(residual)",
    ]


def test_before_the_first_cell_every_helper_asks_for_it(monkeypatch, capsys):
    monkeypatch.setattr(form, "progress", form.Progress())
    form.check(two_thirds)
    form.check(3)
    form.hint("accept")
    form.reveal("accept")
    form.quiz("no", ..., ..., ..., ...)
    assert capsys.readouterr().out.splitlines() == ["run the first cell first"] * 5


def never_counts(guess, choices):
    n = 0
    while n < len(guess) and guess[n] == choices[n]:
        pass
    return n, choices[n]


@pytest.mark.parametrize("time_limit", [form.interrupted, form.watched])
def test_a_loop_that_does_not_end_is_stopped(time_limit, start, monkeypatch, capsys):
    start("00")
    monkeypatch.setattr(form, "time_limit", time_limit)
    monkeypatch.setattr(form, "PATIENCE", 0.2)
    assert form.check(renamed(never_counts, "accept")) is TASKS["00", "accept"].package
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first == "accept: it is still running after 0.2 seconds; does its loop end?"
    assert re.fullmatch(r" +with guess \[\d.*\], choices \[\d.*\]", second)


def test_a_busy_machine_does_not_stop_an_answer():
    """The block does not compute for twice the time."""
    with form.interrupted(0.2):
        time.sleep(0.4)
    with pytest.raises(form.StillRunning), form.interrupted(0.02):
        for _ in range(1000):
            time.sleep(0.01)


PURE = sorted(path.stem for path in (LESSONS / "solutions").glob("pure_*.py"))
WITHOUT_TORCH = f"""
import importlib, sys
sys.modules.update(torch=None, minispec=None)  # importing them fails
from site_judge import judge
from inspect import getsource
for name in {PURE}:
    for task in importlib.import_module(f"solutions.{{name}}").TASKS:
        imports = "import torch\\nfrom statistics import median"
        print(judge(name[-2:], task.name, imports, getsource(task.solution)))
"""


def test_the_sites_exercises_need_no_torch(tmp_path):
    shutil.copy(LESSONS / "site" / "judge.py", tmp_path / "site_judge.py")
    environment = os.environ | {"PYTHONPATH": f"{LESSONS}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-c", WITHOUT_TORCH]
    out = subprocess.check_output(command, env=environment, text=True)
    tasks = [key for key, task in TASKS.items() if ".pure_" in task.solution.__module__]
    verdicts = [json.loads(line) for line in out.splitlines()]
    assert [verdict["text"].split(": right (")[0] for verdict in verdicts] == [n for _, n in tasks]
    assert all(verdict["right"] for verdict in verdicts)
    assert {"00", "04", "06", "10"} < {*dict(tasks)}


def subtracts_lists(guess, choices):
    return guess - choices, 0


def test_an_exception_is_reported_with_the_arguments(start, capsys):
    start("00")
    form.check(renamed(subtracts_lists, "accept"))
    first, second, _ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"accept: TypeError in line \d+ of its cell: unsupported operand.*", first)
    assert re.fullmatch(r" +with guess \[\d.*\], choices \[\d.*\]", second)


def test_two_hints_then_the_solution_then_the_source(start, capsys):
    pytest.importorskip("IPython")
    start("03")
    task = TASKS["03", "residual"]
    form.source(task.package)
    for _ in range(3):
        form.hint("residual")
    form.reveal("residual")
    form.source(task.package)
    lines = capsys.readouterr().out
    assert "shown here once yours is right" in lines
    assert f"hint 2 of 2: {task.hints[1]}" in lines and "reveal('residual') prints" in lines
    assert inspect.getsource(task.solution) in lines
    assert "Markdown" in lines  # what display() prints without a notebook


def test_predictions_are_compared_with_measurements(start, monkeypatch, capsys):
    start("00")
    ranges = form.load_solutions("00").RANGES | {"best_tree": range(61)}
    monkeypatch.setattr(form.progress, "ranges", ranges)
    form.predict(cost_of_8=4, cost_of_64="many", my_tokens_accepted=2, best_tree=8)
    form.measured(cost_of_8=1.6, cost_of_64=5.4, best_tree=16, passes=7)
    form.compare()
    assert capsys.readouterr().out.splitlines() == [
        'cost of 64: \'many\' is not a number; write it as 0.5, "50%", 10 or "10x"',
        "you predict: cost of 8 4, my tokens accepted 2, best tree 8",
        "no prediction yet: cost of 64",
        "cost of 8           you said 4, measured 1.6, ratio 2.50",
        "cost of 64          measured 5.4; you made no prediction",
        "my tokens accepted  you said 2, not measured here",
        "best tree           you said 8, measured 16",
        "passes              measured 7; you made no prediction",
    ]


def test_predictions_may_be_percentages_factors_and_tensors(start, capsys):
    start("03")
    form.predict(share_accepted="50%", distance_if_redrawn=torch.tensor([0.25]), speed="10x")
    form.predict(speed=" 1.5 × ")
    assert capsys.readouterr().out.splitlines() == [
        "you predict: share accepted 0.5, distance if redrawn 0.25, speed 10",
        "you predict: speed 1.5",
    ]


def test_what_cannot_be_a_prediction_is_not_kept(start, monkeypatch, capsys):
    start("03")
    monkeypatch.setattr(form.progress, "ranges", form.load_solutions("03").RANGES)
    form.predict(alpha_chat=65, share_accepted=torch.ones(2), alpha_arithmetic=float("nan"))
    form.measured(alpha_chat=0.7)
    form.compare()
    how = '; write it as 0.5, "50%", 10 or "10x"'
    assert capsys.readouterr().out.splitlines() == [
        "alpha chat: 65 is not between 0 and 1",
        f"share accepted: tensor([1., 1.]) is not a number{how}",
        f"alpha arithmetic: nan is not a number{how}",
        "no prediction yet: alpha chat, share accepted, alpha arithmetic",
        "alpha chat        measured 0.7; you made no prediction",
        "share accepted    not measured here; you made no prediction",
        "alpha arithmetic  not measured here; you made no prediction",
    ]


def test_a_prediction_under_a_mistyped_name_is_not_kept(start, monkeypatch, capsys):
    start("00")
    monkeypatch.setattr(form.progress, "ranges", form.load_solutions("00").RANGES)
    form.predict(cost_of_8=4, tokens_per_pas=2)
    assert capsys.readouterr().out.splitlines() == [
        "tokens_per_pas: the lesson asks for cost_of_8, cost_of_64, my_tokens_accepted, "
        "tokens_per_pass",
        "you predict: cost of 8 4",
    ]
    assert form.progress.predicted == {"cost_of_8": 4.0}


def test_half_a_draft_cannot_be_chosen(start, monkeypatch, capsys):
    start("06")
    monkeypatch.setattr(form.progress, "ranges", form.load_solutions("06").RANGES)
    form.predict(best_k_full=2.5, best_k_8192=3.0, best_tree=61, gain_of_60=2.5)
    assert capsys.readouterr().out.splitlines() == [
        "best k full: 2.5 is not a whole number",
        "best tree: 61 is not between 0 and 60",
        "you predict: best k 8192 3, gain of 60 2.5",
        "no prediction yet: best k full, best tree",
    ]


@each_lesson
def test_each_prediction_has_a_range(number):
    tree = ast.parse(source(cells_of(LESSON[number], "code")[2]))
    (names,) = [
        {k.arg for k in node.keywords} for node in ast.walk(tree) if isinstance(node, ast.Call)
    ]
    assert form.load_solutions(number).RANGES.keys() == names


# ---- quizzes, proofs, sliders and the timeline ---------------------------------------------------


@each_lesson
def test_a_quiz_has_five_questions_and_its_cell_shows_no_answer(number, start, capsys):
    questions, (*_, cell, last) = QUIZZES[number], cells_of(LESSON[number], "code")
    assert len(questions) == 5 and source(last) == "compare()"
    assert source(cell).splitlines()[-1] == "quiz(..., ..., ..., ..., ...)"
    for question in questions:
        assert question.text.endswith("?")
        assert re.fullmatch(r"[^.]*(\.\d+[^.]*)*\.", question.because), "not one sentence"
        if question.options:
            assert question.answer in [*"abcdef"[: len(question.options)]]
    start(number)
    form.quiz(..., ..., ..., ..., ...)
    printed = capsys.readouterr().out
    assert printed == "".join(cell["outputs"][0]["text"]), "run make lessons-refresh"
    assert printed.endswith("\nnot answered yet: 1, 2, 3, 4, 5\n")
    page = " ".join(pages()[LESSON[number].name])
    assert not any(question.because in page for question in questions)


@each_lesson
def test_the_right_answers_are_right_and_no_others(number, start, capsys):
    for question in QUIZZES[number]:
        answer, letters = question.answer, "abcdef"[: len(question.options)]
        if letters:
            right, wrong = [answer, f" {answer.upper()})"], [x for x in letters if x != answer]
        elif isinstance(answer, bool):
            right, wrong = [answer, ["No", "yes "][answer]], [not answer, ["y", "n"][answer]]
        else:
            right, wrong = [answer, f"{100 * answer:g}%"], [answer + 0.05, -1, 10 * answer + 1]
        assert {form.judge(question, given)[:5] for given in right} == {"right"}, question
        assert {form.judge(question, given)[:5] for given in wrong} == {"wrong"}, question
    start(number)
    form.quiz(*(question.answer for question in QUIZZES[number]))
    printed = " ".join(capsys.readouterr().out.split())
    assert all(f" right: {question.because}" in printed for question in QUIZZES[number])
    assert " wrong: " not in printed and "not answered yet" not in printed


NO_ANSWERS = None, "", "maybe", "ab", [], [0.5, 1], object(), math.nan, torch.ones(2, 3)


@each_lesson
def test_what_cannot_answer_a_question_is_one_clear_line(number):
    for question in QUIZZES[number]:
        how = 'write "a", "b"' if question.options else "write a number, such as 0.5"
        how = 'write "yes" or "no"' if isinstance(question.answer, bool) else how
        for given in NO_ANSWERS:
            line = form.judge(question, given)
            assert f" is not an answer here; {how}" in line and len(line) < 100, line
            assert "\n" not in line


def test_too_few_answers_are_judged_all_the_same(start, capsys):
    start("03")
    form.quiz("no", "2")
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first == "the quiz has 5 questions, not 2; leave `...` where you have no answer"
    assert [line[:10] for line in lines if line[:8] in ("   right", "   wrong")] == [
        "   right: ", "   wrong: ",
    ]  # fmt: skip
    assert last == "not answered yet: 3, 4, 5"


def answers_of_the_package() -> dict[tuple[str, int], float]:
    """(lesson, question) -> the answer, computed by the package."""
    from minispec.certify.toys import (
        Toy,
        every_outcome,
        first_tokens,
        random_eagle3_head,
        small_model,
    )
    from minispec.distill import AllSteps, MTPLoss, step_weights
    from minispec.methods.autoregressive import autoregressive
    from minispec.sampling import OneHot, Sampling, Seeded, probs
    from minispec.tree import Tree
    from minispec.verify import accept

    path, _, *_ = accept(OneHot([4, 8, 5, 3, 9], 10), Tree.chain(0, [4, 8, 7, 3]), Seeded())
    logits, p = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log(), torch.tensor([0.4, 0.2, 0.1, 0.3])
    siblings = Tree([9, 0, 1, 2], [-1, 0, 0, 0])
    walks = every_outcome(lambda randomness: len(accept([p] * 4, siblings, randomness)[0]))
    texts = every_outcome(
        lambda r: first_tokens(autoregressive, Toy(0), [0], Sampling(1.0), r, 4))  # fmt: skip
    a, b = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
    model = small_model(0)
    loss = MTPLoss(random_eagle3_head(model, 0), model, None, 3, 0.8, aligned=True)
    return {
        ("00", 3): len(path) - 1,
        ("02", 2): int((probs(logits, Sampling(1.0, 0, 0.6)) > 0).sum()),
        ("02", 3): int((probs(logits, Sampling(1.0, 2, 0.6)) > 0).sum()),
        ("03", 3): float(torch.minimum(a, b).sum()),
        ("04", 2): sum(weight for nodes, weight in walks if nodes == 2),
        ("07", 4): step_weights(2, 0.6)[0],
        ("09", 2): len(list(texts)),
        ("11", 3): int(loss.plan(5, 2, AllSteps()).attn_mask[0, 0, 4].sum()),
    }


def test_the_quizzes_numbers_are_the_packages():
    for (number, i), value in answers_of_the_package().items():
        assert QUIZZES[number][i - 1].answer == pytest.approx(value), (number, i)


def test_each_proof_is_asked_for_and_fits_a_screen(start, capsys):
    pytest.importorskip("IPython")
    for number in LESSON:
        text = "\n".join(source(cell) for cell in cells_of(LESSON[number], "markdown"))
        starred = re.findall(r'^\*\*★.*`reveal\("(\w+)"\)`', text, re.MULTILINE)
        assert starred == [*PROOFS[number]]
        start(number)
        for name in starred:
            proof = PROOFS[number][name]
            assert proof.count("\n") <= 40 and not proof.count("$") % 4
            form.reveal(name)
            assert "Markdown" in capsys.readouterr().out  # what display() prints without a notebook
    assert sum(map(len, PROOFS.values())) <= 5


@pytest.fixture
def sliders():
    pytest.importorskip("matplotlib"), pytest.importorskip("IPython")
    return importlib.import_module("sliders")


def test_without_a_front_end_a_picture_is_drawn_once(sliders, monkeypatch):
    drawn = []
    monkeypatch.setattr(sliders, "draw_overlap", lambda p, q: drawn.append((p, q)))
    monkeypatch.setattr(sliders, "draw_formula", lambda *at: drawn.append(at))
    sliders.drag_overlap(p=[1, 3], q=[2, 2])
    sliders.drag_formula(alpha=0.8, gamma=4, c=0.1)
    assert drawn == [([0.25, 0.75], [0.5, 0.5]), (0.8, 4, 0.1)]


def test_sliders_are_shown_to_somebody_who_can_drag_them(sliders, monkeypatch):
    widgets, shown, drawn = pytest.importorskip("ipywidgets"), [], []
    kernel = type("Kernel", (), {"get_parent": lambda self: {"content": {"allow_stdin": True}}})()
    monkeypatch.setattr(sliders, "get_ipython", lambda: type("Shell", (), {"kernel": kernel}))
    monkeypatch.setattr(sliders, "display", lambda *boxes: shown.extend(boxes))
    monkeypatch.setattr(sliders, "draw_overlap", lambda p, q: drawn.append((p, q)))
    sliders.drag_overlap(p=[0.5, 0.5], q=[0.5, 0.5])
    (p0, p1), _ = (column.children for column in shown[0].children)
    assert isinstance(p0, widgets.FloatSlider) and p0.description == "p(0)"
    p1.value = 0.0  # which is below the lowest, so that no sum is 0
    assert drawn[-1] == (pytest.approx([0.5 / 0.51, 0.01 / 0.51]), [0.5, 0.5])


def test_the_timeline_is_in_order_and_links_what_it_names():
    text = (LESSONS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (20\d\d) \|.*?(?:\[(\d{4}\.\d{5})\]\((.*?)\))? \|", text, re.MULTILINE)
    papers = [(number, link) for _, number, link in rows if number]
    assert len(papers) > 15 and [year for year, *_ in rows] == sorted(year for year, *_ in rows)
    assert papers == sorted({(number, f"https://arxiv.org/abs/{number}") for number, _ in papers})


# ---- executed ------------------------------------------------------------------------------------


def client(path, engine, extra: str = ""):
    """Make a client that runs the notebook in a fresh kernel, with the file `engine` as the
    reader's my_minispec.py and with `extra` code after its first cell."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    setup = next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    uses = f"import own_engine, pathlib\nown_engine.FILE = pathlib.Path({str(engine)!r})\n"
    notebook.cells.insert(setup + 1, nbformat.v4.new_code_cell(uses + extra))
    resources = {"metadata": {"path": str(path.parent)}}
    return nbclient.NotebookClient(notebook, timeout=1800, resources=resources)


def stream_text(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def stored_texts(number: str) -> dict[str, str]:
    """What the cells of a lesson print, if it does not depend on the machine and its speed."""
    texts = {cell["id"]: "".join("".join(output.get("text", "")) for output in cell["outputs"])
             for cell in cells_of(LESSON[number], "code")
             if "write" not in cell["metadata"].get("tags", [])}  # fmt: skip
    varies = re.compile(r"\d\.\d|\bhere\b|bfloat16|your?\b|my_minispec")
    return {name: text for name, text in texts.items() if not varies.search(text)}


def run_changed(number: str, change, engine, capsys) -> tuple[list[str], str]:
    """Execute a lesson after `change(cell)`, which returns the new source or None to drop the cell,
    and print the seconds. If SmolLM2 is there, the stored outputs must be today's. Returns what the
    write cells print, and what all cells print."""
    runner = client(LESSON[number], engine)
    for cell in list(runner.nb.cells):
        cell.source = change(cell)
        if cell.source is None:
            runner.nb.cells.remove(cell)
    start = time.perf_counter()
    runner.execute()
    with capsys.disabled():
        print(f"\n{LESSON[number].stem}: {time.perf_counter() - start:.0f} s", end=" ")
    code = [cell for cell in runner.nb.cells if cell.cell_type == "code"]
    stored = stored_texts(number) if (SMOLLM2 / "target").exists() else {}
    for cell in code:
        found = stream_text(cell)
        assert found == stored.get(cell.id, found), "outdated: make lessons-refresh"
    written = [stream_text(cell) for cell in code if "write" in cell.metadata.get("tags", [])]
    return written, "".join(map(stream_text, code))


@pytest.mark.lessons
@each_lesson
def test_with_the_solutions_every_check_is_right_and_saved(number, capsys, monkeypatch, tmp_path):
    """The other lessons' functions are in my_minispec.py already, without later versions of the
    loop. What decodes after the lesson is certified."""
    engine = tmp_path / "my_minispec.py"
    monkeypatch.setattr(own_engine, "FILE", engine)
    for (lesson, name), task in TASKS.items():
        if lesson != number and (lesson < number or name not in own_engine.VERSIONS):
            own_engine.save(task.solution, lesson, name, lambda function: None)

    def solve(cell) -> str:
        if "write" not in cell.metadata.get("tags", []):
            return cell.source
        name = ast.parse(cell.source).body[0].name
        return f"{inspect.getsource(TASKS[number, name].solution)}\n\n{name} = check({name})"

    written, printed = run_changed(number, solve, engine, capsys)
    assert written and all(re.match(r"\w+: right \(", text) for text in written)
    for text in written:
        assert "saved in my_minispec.py" in text or text.startswith("tempting_accept")
    own = set(own_engine.functions_in(engine.read_text("utf-8")))
    assert own | {"rounds"} == own_engine.PLACES.keys()
    checks = 0 if number not in own_engine.STAGES else 1 if number < "02" else 2
    assert printed.count("no loss found") == checks and "not grown" not in printed
    assert ": minispec's" not in printed and "minispec's, not in" not in printed


@pytest.mark.lessons
@each_lesson
def test_untouched_and_without_measurements_nothing_is_written_yet(number, capsys, tmp_path):
    def drop(cell) -> str | None:
        return None if "measure" in cell.metadata.get("tags", []) else cell.source

    written, printed = run_changed(number, drop, tmp_path / "my_minispec.py", capsys)
    assert written and all("not written yet; the lesson goes on" in text for text in written)
    assert ": yours" not in printed and not any(tmp_path.iterdir())


PLANTED_BUGS = {  # lesson -> lines that break the package; its own checks must notice each
    "09_is_it_lossless": [
        "from minispec import verify; verify.residual = lambda p, q, x: p",
        "from minispec.certify import toys; toys.total_variation = lambda a, b: 0.0",
    ]
}


@pytest.mark.lessons
@pytest.mark.parametrize("name, bug", [(n, bug) for n in PLANTED_BUGS for bug in PLANTED_BUGS[n]])
def test_it_stops_at_a_planted_bug(name, bug, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="AssertionError"):
        client(LESSONS / f"{name}.ipynb", tmp_path / "my_minispec.py", bug).execute()
