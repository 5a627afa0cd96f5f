"""Write the Colab badges and each lesson's first cell, from the Source address in pyproject.toml.
`make badges` runs this."""

import json
import re
import sys
import tomllib
from pathlib import Path

from minispec.checkpoints.weights import write_text

LESSONS = Path(__file__).resolve().parent
BADGE = re.compile(r"\[!\[Open in Colab\]\([^)]*\)\]\([^)]*\)")
FIRST_CELL = """\
import os
import sys

if not any(map(os.path.exists, ["form.py", "lessons/form.py", "checkout/installed"])):  # Colab
    os.system("git clone -q --depth 1 {address} checkout")
    os.system(f"{{sys.executable}} -m pip install -q -e checkout && touch checkout/installed")
sys.path.extend(["lessons", "checkout/lessons"])  # in case Jupyter was not started in lessons
from form import check, compare, hint, lesson, measured, predict, quiz, reveal, smollm2, source

lesson("{number}")"""


def address() -> str:
    """The repository's address."""
    project = tomllib.loads((LESSONS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    found = project["project"].get("urls", {}).get("Source", "")
    if not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+(?<!\.git)", found):
        print("pyproject.toml: [project.urls] Source must be https://github.com/OWNER/NAME, "
              f"not {found!r}", file=sys.stderr)  # fmt: skip
        raise SystemExit(2)
    return found


def badge(notebook: str) -> str:
    """The badge that opens this file of lessons/ in Colab, as Markdown."""
    colab = "https://colab.research.google.com"
    repository = address().removeprefix("https://github.com/")
    return (
        f"[![Open in Colab]({colab}/assets/colab-badge.svg)]"
        f"({colab}/github/{repository}/blob/main/lessons/{notebook})"
    )


def first_cell(number: str) -> str:
    """The first cell of lesson `number`. It also works without a checkout."""
    return FIRST_CELL.format(address=address(), number=number)


def write_notebook(path: Path) -> None:
    """Put the badge after the title, and replace the cell that starts the lesson."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    title = notebook["cells"][0]
    head, _, rest = BADGE.sub("", "".join(title["source"])).partition("\n")
    title["source"] = f"{head}\n\n{badge(path.name)}\n\n{rest.lstrip()}".splitlines(True)
    setup = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    setup["source"] = first_cell(path.name[:2]).splitlines(True)
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    write_text(path, text + "\n")


def write_table(path: Path) -> None:
    """Put a badge into the last of the six columns of each row about a notebook."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for i, line in enumerate(lines):
        if row := re.match(r"\| \[\d\d\]\((\w+\.ipynb)\)", line):
            lines[i] = "|".join([*line.split("|")[:6], f" {badge(row[1])} |"])
    write_text(path, "\n".join(lines) + "\n")


if __name__ == "__main__":
    for path in sorted(LESSONS.glob("*.ipynb")):
        write_notebook(path)
    write_table(LESSONS / "README.md")
