"""Sphinx settings for the site. `make site` writes it to build/site.

The pages are the repository's own Markdown files and notebooks, read where they are, and api.md.
Notebooks are not run: the site shows their committed outputs, which predict.js hides until the
reader has predicted. Every file that a page links to becomes a page too, so all links stay on the
site. No page loads anything from elsewhere; formulas are converted to MathML here.
"""

import importlib
import inspect
import json
import os
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from docutils import nodes
from latex2mathml.converter import convert
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer, TextLexer, get_lexer_for_filename

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "lessons")]
import form  # noqa: E402

project = html_title = "minispec"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.linkcode"]
root_doc = "README"
include_patterns = ["README.md", "lessons/**", "minispec/**", "tests/**", "weights/**"]
exclude_patterns = [".*", "**/.*", "build", "weights/smollm2/target"]
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3  # as on GitHub
# a link that starts with "site:" is not for Sphinx to resolve
myst_url_schemes = {"http": None, "https": None, "site": "{{path}}"}
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["page.js", "exercise.js", "predict.js", "quiz.js", "table.js"]
html_math_renderer = "mathml"
html_copy_source = html_show_copyright = False
html_domain_indices = html_use_index = False
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_inherit_docstrings = False

CONTENTS = {  # pages after which others are listed; every page must be listed once
    "README": """

```{toctree}
:hidden:
:glob:
:caption: Learn
lessons/README
lessons/[01]*
lessons/assignments/README
lessons/assignments/*/README
```

```{toctree}
:hidden:
:caption: Is it lossless?
minispec/certify/README
tests/engines/TABLE
tests/engines/README
```

```{toctree}
:hidden:
:glob:
:caption: The package
lessons/site/api
minispec/README
minispec/where_to_run
weights/smollm2/README
weights/**/README
tests/gpu/results/*
```
""",
    "tests/engines/README": """

```{toctree}
:hidden:
:glob:
reports/*
```
""",
}
COLAB = re.compile(r"\[!\[Open in Colab\]\([^)]*\)\]")  # its image is on another site
RELATIVE_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)\s#]+")
PYODIDE = ROOT / "build" / "pyodide" / "package"
RUNTIME = [
    "pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json", "python_stdlib.zip"
]  # fmt: skip
shown = set()  # the files and folders that get a page because another page links to them


def page_of(path: Path) -> str:
    """Return the name of the page that shows a file or lists a folder."""
    shown.add(path)
    return f"source/{path.relative_to(ROOT).as_posix()}"


def read(app, name: str, text: list[str]) -> None:
    """Make a page's links lead to other pages of the site."""
    folder = (ROOT / name).parent

    def on_site(link: re.Match) -> str:
        path = (folder / link[0]).resolve()
        if path.is_dir() and (path / "README.md").exists():
            return f"{link[0]}/README.md"
        if path.suffix == ".html":  # a page of the gallery
            return f"site:{link[0]}"
        if path.suffix in (".md", ".ipynb", ".png") or not path.exists():
            return link[0]
        return f"site:{os.path.relpath(ROOT / page_of(path), folder)}.html"

    text[0] = RELATIVE_LINK.sub(on_site, COLAB.sub("[Open in Colab]", text[0]))
    text[0] += CONTENTS.get(name, "")


def source_pages(app):
    """Yield a page for each file or folder that another page links to."""
    listings = {path: listing(path) for path in sorted(shown) if path.is_dir()}
    for path in sorted(shown):
        title = path.relative_to(ROOT).as_posix()
        heading = f"<h1>{title.replace('/', '/<wbr>')}</h1>"
        body = listings.get(path) or highlighted(path)
        yield page_of(path), {"title": title, "body": heading + body}, "page.html"


def listing(folder: Path) -> str:
    """Return links to a folder's files and to the cards of its folders as HTML."""
    lines, here = [], Path(page_of(folder)).parent
    for path in sorted(folder.iterdir()):
        if (path / "README.md").exists():
            page = f"{path.relative_to(ROOT).as_posix()}/README"
        elif path.is_file() and path.name != "__init__.py":
            page = page_of(path)
        else:
            continue
        lines.append(f'<li><a href="{os.path.relpath(page, here)}.html">{path.name}</a></li>')
    return f"<ul>{''.join(lines)}</ul>"


def highlighted(path: Path) -> str:
    """Return a text file as HTML, with an anchor L-1, L-2, … for each line."""
    lexer = get_lexer_for_filename(path.name) if path.suffix in (".py", ".mk") else TextLexer()
    return highlight(path.read_text(encoding="utf-8"), lexer, HtmlFormatter(lineanchors="L"))


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """Return the link from api.html to an object's source."""
    thing = importlib.import_module(info["module"])
    for name in info["fullname"].split("."):
        thing = getattr(thing, name, None)
    try:
        path, line = Path(inspect.getsourcefile(thing)), inspect.getsourcelines(thing)[1]
    except TypeError:  # a constant
        return None
    return f"../../{page_of(path)}.html#L-{line}"


def docstring(app, what, name, thing, options, lines: list[str]) -> None:
    """Turn a docstring, in which only `code` is marked up, into reStructuredText."""
    text = re.sub(r"([*|\\])|`([^`]+)`", lambda m: rf"\{m[1]}" if m[1] else f"``{m[2]}``",
                  "\n".join(lines))  # fmt: skip
    lines[:] = text.split("\n")


def mathml(writer, node) -> None:
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    writer.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode


def source_of(*things) -> str:
    """Return the source of functions or classes as HTML."""
    text = "\n".join(map(inspect.getsource, things)).rstrip()
    return highlight(text, PythonLexer(), HtmlFormatter())


def add_lesson(app, name: str, template: str, context: dict, doctree) -> None:
    """Give a lesson's page what its scripts need, see page.js."""
    if number := re.match(r"lessons/(\d\d)_", name):
        solutions = form.load_solutions(number[1])
        ranges = {
            prediction: {"low": ends[0], "high": ends[-1], "choice": isinstance(ends, range)}
            for prediction, ends in solutions.RANGES.items()
        }
        quiz = [asdict(question) for question in solutions.QUIZ]
        exercises = {
            task.name: {
                "number": number[1], "hints": task.hints,
                "solution": source_of(task.solution), "source": source_of(*task.shows),
            }
            for task in solutions.TASKS
            if PYODIDE.exists() and task.solution.__module__.startswith("solutions.pure_")
        }  # fmt: skip
        elsewhere = [task.name for task in solutions.TASKS if task.name not in exercises]
        data = json.dumps({"ranges": ranges, "quiz": quiz, "rounding": form.ROUNDING,
                           "exercises": exercises, "elsewhere": elsewhere})  # fmt: skip
        data = data.replace("<", r"\u003c")  # no end tag
        context["body"] += f'<script type="application/json" id="lesson">{data}</script>'


def add_python(folder: Path) -> None:
    """Copy Pyodide, which `make site` has fetched, and pack what it runs."""
    if not PYODIDE.exists():
        print("Without npm, exercises on the site are text: install npm", file=sys.stderr)
        return
    folder.mkdir()
    for path in PYODIDE.iterdir():
        if path.name in RUNTIME:
            shutil.copy(path, folder)
    lessons = ROOT / "lessons"
    with ZipFile(folder / "lessons.zip", "w", ZIP_DEFLATED) as archive:
        for path in (lessons / "form.py", lessons / "site" / "judge.py"):
            archive.write(path, path.name)
        for path in ((lessons / "solutions").glob("[_p]*.py")):
            archive.write(path, f"solutions/{path.name}")


def finish(app, error) -> None:
    """Copy the gallery and Python, and make the README the front page."""
    if not error:
        add_python(app.outdir / "_static" / "python")
        shutil.copytree(ROOT / "lessons/gallery", app.outdir / "lessons/gallery",
                        dirs_exist_ok=True)  # fmt: skip
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def setup(app) -> None:
    app.add_html_math_renderer("mathml", (mathml, None), (mathml, None))
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", docstring)
    app.connect("html-collect-pages", source_pages)
    app.connect("html-page-context", add_lesson)
    app.connect("build-finished", finish)
