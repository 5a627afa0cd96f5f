"""Write the Colab badges and each lesson's first cell, from the Source address in pyproject.toml.
Without an address there are no badges, and the lessons need a checkout. `make badges` runs this."""

import json
import re
import sys
import tomllib
from pathlib import Path

from minispec.checkpoints.weights import write_text

LESSONS = Path(__file__).resolve().parent
BADGE = re.compile(r"\[!\[Open in Colab\]\([^)]*\)\]\([^)]*\)")
FIRST_CELL = """\
import sys

sys.path.append("lessons")  # in case Jupyter was not started in lessons
"""
COLAB_CELL = """\
import os
import sys

if not any(map(os.path.exists, ["form.py", "lessons/form.py", "checkout/installed"])):  # Colab
    os.system("git clone -q --depth 1 {address} checkout")
    os.system(f"{{sys.executable}} -m pip install -q -e checkout && touch checkout/installed")
sys.path.extend(["lessons", "checkout/lessons"])  # in case Jupyter was not started in lessons
"""
START = """\
from form import check, compare, hint, lesson, measured, predict, quiz, reveal, smollm2, source

lesson("{number}")"""


def address() -> str | None:
    """The repository's address; None if it has none."""
    project = tomllib.loads((LESSONS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    found = project["project"].get("urls", {}).get("Source")
    if not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+(?<!\.git)|None", str(found)):
        print("pyproject.toml: [project.urls] Source must be https://github.com/OWNER/NAME, "
              f"not {found!r}", file=sys.stderr)  # fmt: skip
        raise SystemExit(2)
    return found


def badge(notebook: str) -> str:
    """The badge that opens this file of lessons/ in Colab, as Markdown; "" without an address."""
    colab = "https://colab.research.google.com"
    repository = (address() or "").removeprefix("https://github.com/")
    return repository and (
        f"[![Open in Colab]({colab}/assets/colab-badge.svg)]"
        f"({colab}/github/{repository}/blob/main/lessons/{notebook})"
    )


def first_cell(number: str) -> str:
    """The first cell of lesson `number`. With an address it also works without a checkout."""
    cell = (COLAB_CELL if address() else FIRST_CELL) + START
    return cell.format(address=address(), number=number)


def write_notebook(path: Path) -> None:
    """Put the badge after the title, and replace the cell that starts the lesson."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    title = notebook["cells"][0]
    head, _, rest = BADGE.sub("", "".join(title["source"])).partition("\n")
    parts = filter(None, [head, badge(path.name), rest.lstrip()])
    title["source"] = "\n\n".join(parts).splitlines(True)
    setup = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    setup["source"] = first_cell(path.name[:2]).splitlines(True)
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    write_text(path, text + "\n")


def write_table(path: Path) -> None:
    """Put a badge after the link of each row about a notebook."""
    text = re.sub(
        r"^(\| \[\d\d\]\((\w+\.ipynb)\))[^|]*\|",
        lambda row: " ".join(filter(None, [row[1], badge(row[2]), "|"])),
        path.read_text(encoding="utf-8"), flags=re.MULTILINE,
    )  # fmt: skip
    write_text(path, text)


if __name__ == "__main__":
    for path in sorted(LESSONS.glob("*.ipynb")):
        write_notebook(path)
    write_table(LESSONS / "README.md")
