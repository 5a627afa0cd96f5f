"""The notebooks: complete and small as committed. With the marker `lessons`, each runs in a fresh
kernel without an error and stops if a bug is planted in the package."""

import json
import re

import pytest
from conftest import ROOT

LESSONS = ROOT / "lessons"
NOTEBOOKS = sorted(LESSONS.glob("*.ipynb"))
NUMBERED = [path for path in NOTEBOOKS if not path.name.startswith("00")]  # 00 is an introduction
SETUP = """\
import sys
from pathlib import Path

root = next(
    p for p in [Path.cwd(), *Path.cwd().parents] if (p / "minispec" / "__init__.py").exists()
)
sys.path.insert(0, str(root))
"""
LOCAL_PATH = re.compile(
    r"/tmp/|/work/|/home/|/root/|/Users/|[A-Z]:\\\\|ipykernel_|" + re.escape(str(ROOT))
)

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
each_lesson = pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)


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
def test_it_begins_with_a_title_and_finds_the_checkout(path):
    first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]
    assert first["cell_type"] == "markdown" and source(first).startswith("# ")
    setup = source(cells_of(path, "code")[0])
    assert "".join(setup.split()).startswith("".join(SETUP.split()))  # line breaks may differ


@each_lesson
def test_it_has_the_parts_of_a_lesson(path):
    code, text = (
        "\n".join(source(cell) for cell in cells_of(path, kind)) for kind in ("code", "markdown")
    )
    assert 15 <= len(cells_of(path, "code")) <= 25
    assert len(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split()) <= 1800
    if "from drawing import" in code:  # its helper calls inspect.getsource
        code += (LESSONS / "drawing.py").read_text(encoding="utf-8")
    assert "inspect.getsource" in code
    assert re.search(r"^\s*assert ", code, re.MULTILINE)
    assert "arXiv" in text and "<details>" in text


# ---- executed ------------------------------------------------------------------------------------


def client(path, extra: str | None = None):
    """Make a client that runs the notebook in a fresh kernel, after any `extra` code."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    if extra:
        setup = next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code")
        notebook.cells.insert(setup, nbformat.v4.new_code_cell(f"{SETUP}{extra}"))
    resources = {"metadata": {"path": str(path.parent)}}
    return nbclient.NotebookClient(notebook, timeout=300, resources=resources)


@pytest.mark.lessons
@each_notebook
def test_it_runs(path):
    notebook = client(path)
    pytest.importorskip("nbformat").validate(notebook.nb)
    notebook.execute()


PLANTED_BUGS = {  # lesson -> lines that break the package; its own checks must notice each
    "07_self_distillation_and_vocabulary": [
        "from minispec.training import distill; distill.step_weights = lambda n, beta: [1 / n] * n",
        "from minispec.training.own_text import Duplicates; Duplicates.add = lambda *_: False",
    ],
    "09_is_it_lossless": [
        "from minispec import verify; verify.residual = lambda p, q, x: p",
        "from minispec import toys; toys.total_variation = lambda a, b: 0.0",
    ],
}


@pytest.mark.lessons
@pytest.mark.parametrize("name, bug", [(n, bug) for n in PLANTED_BUGS for bug in PLANTED_BUGS[n]])
def test_it_stops_at_a_planted_bug(name, bug):
    nbclient = pytest.importorskip("nbclient")
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="AssertionError"):
        client(LESSONS / f"{name}.ipynb", bug).execute()
