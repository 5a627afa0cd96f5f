"""The site that `make site` wrote to build/site: its links hold, and in a browser every page loads
without errors or requests to elsewhere and fits a phone, in light and dark mode. A lesson hides its
outputs until the reader has predicted, judges the quiz, and runs exercises that need no torch."""

import importlib.util
import inspect
import json
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ROOT, browser, needs_browser

sys.path.append(str(ROOT / "lessons"))
from form import judge, load_solutions, spaced  # noqa: E402

pytestmark = pytest.mark.site
SITE = ROOT / "build" / "site"
LESSONS = sorted(path.stem for path in (ROOT / "lessons").glob("*.ipynb"))
GALLERY = sorted(path.name for path in (ROOT / "lessons" / "gallery").glob("*.html"))


@pytest.fixture(scope="module")
def pages() -> list[Path]:
    if not (SITE / "index.html").exists():
        pytest.skip("the site is not built: make site")
    return sorted(SITE.rglob("*.html"))


class Page(HTMLParser):
    """The anchors of a page, what its links lead to and what it loads."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list) -> None:
        found = dict(attributes)
        self.anchors.update(found[key] for key in ("id", "name") if found.get(key))
        self.loaded += [found["src"]] if found.get("src") else []
        if found.get("href"):
            (self.links if tag == "a" else self.loaded).append(found["href"])


def test_every_link_holds(pages):
    parsed = {path: Page(path) for path in pages}
    for path, page in parsed.items():
        assert not any(urlsplit(url).scheme not in ("", "data") for url in page.loaded), path
        for url in [*page.links, *page.loaded]:
            parts = urlsplit(url)
            if parts.scheme in ("https", "http", "data"):
                continue
            assert not parts.scheme and not parts.path.startswith("/"), (path, url)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_file() and target.is_relative_to(SITE), (path, url)
            if parts.fragment and target.suffix == ".html":
                assert unquote(parts.fragment) in parsed[target].anchors, (path, url)


def test_everything_is_there(pages):
    names = {path.relative_to(SITE).as_posix() for path in pages}
    assert names >= {f"lessons/{name}.html" for name in LESSONS}
    assert names >= {f"lessons/gallery/{name}" for name in GALLERY}
    for name, *texts in [
        ("index.html", 'id="is-it-lossless"'),
        ("lessons/06_fastmtp.html", "<mfrac"),
        ("tests/engines/README.html", 'id="findings"', "OpenVINO GenAI"),
        ("tests/engines/TABLE.html", "README.html#openvino-genai-a-draft-model"),
        ("lessons/site/api.html", "Accept a path down the tree", "minispec/verify.py.html#L-"),
    ]:
        page = (SITE / name).read_text(encoding="utf-8")
        assert all(text in page for text in texts), name


# ---- in a browser --------------------------------------------------------------------------------

HARNESS = """<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,"><iframe></iframe>
<script>
const frame = document.querySelector("iframe");
const seen = (nodes) => [...nodes].filter((node) => node.getClientRects().length).length;
const loaded = (frame) => new Promise((done) => { frame.onload = done; });

async function open(url) {
  frame.style.cssText = "width: 1280px; height: 900px";
  frame.src = url;
  await loaded(frame);
  return frame.contentDocument;
}

function layout(page) {
  const widths = {};
  for (const width of [1280, 375]) {
    frame.style.width = `${width}px`;
    widths[width] = page.documentElement.scrollWidth - page.documentElement.clientWidth;
  }
  return widths;
}

// on a phone, which formulas scroll, and how small the pictures become
function phone(page) {
  frame.style.width = "375px";
  const formulas = [...page.querySelectorAll("math[display=block]")]
    .filter((math) => math.scrollWidth > math.clientWidth).map((math) => math.textContent);
  const scales = [...page.querySelectorAll("article img")]
    .filter((image) => image.getClientRects().length)
    .map((image) => image.getBoundingClientRect().width / image.naturalWidth);
  return { formulas, smallest: Math.min(1, ...scales) };
}

// how pictures look in light and dark mode
function filters(page) {
  return ["light", "dark"].map((theme) => {
    page.body.dataset.theme = theme;
    return [...page.querySelectorAll("article img")]
      .map((image) => frame.contentWindow.getComputedStyle(image).filter);
  });
}

async function step(run) {  // forward, in a page of the gallery
  run.loading = "eager";
  if (run.contentDocument.readyState !== "complete" || !run.contentDocument.getElementById("next"))
    await loaded(run);
  const page = run.contentDocument, before = page.getElementById("where").textContent;
  page.getElementById("next").click();
  return [before, page.getElementById("where").textContent];
}

async function predict(page, url) {
  const cells = page.querySelectorAll(".cell_output"), form = page.getElementById("prediction");
  const press = (name) => form.querySelector(name).click();
  const found = { cells: cells.length, before: seen(cells) };
  const { ranges } = JSON.parse(page.getElementById("lesson").textContent);
  const fields = form.querySelectorAll("input");
  fields[0].value = "many";
  fields[1].value = ranges[fields[1].name].high + 1;
  for (const field of [...fields].slice(2)) field.value = ranges[field.name].low + 0.5;
  press(".go");
  found.refused = seen(cells);
  found.faults = [...form.querySelectorAll(".fault")].map((fault) => fault.textContent);
  for (const field of fields) field.value = `${100 * ranges[field.name].low}%`;
  press(".go");
  found.after = seen(cells);
  found.names = [...fields].map((field) => field.name);
  found.tables = [...page.querySelectorAll(".comparison")].map((table) =>
    [...table.rows].slice(1).map((row) => [...row.cells].map((cell) => cell.textContent)));
  page = await open(url);
  found.kept = seen(page.querySelectorAll(".cell_output"));
  found.wide = layout(page);
  page.querySelector("#prediction .again").click();
  found.again = seen(page.querySelectorAll(".cell_output"));
  page.querySelector("#prediction .skip").click();
  found.skipped = seen(page.querySelectorAll(".cell_output"));
  const run = page.querySelector("iframe.run");
  if (run) found.steps = await step(run);
  found.quiz = await quiz(page, url);
  return found;
}

// Leave questions open, answer all wrong and all right, load the page again, start again.
async function quiz(page, url) {
  const found = {}, { right, wrong } = ANSWERS[url];
  const look = () => [...page.querySelectorAll("form.quiz .verdict")].map((p) => p.textContent);
  const check = (answers) => {
    const form = page.querySelector("form.quiz");
    answers.forEach((answer, i) => { form.elements[`question${i}`].value = answer; });
    form.querySelector(".go").click();
    return [...look(), form.querySelector(".open").textContent];
  };
  found.open = check([]);
  found.wrong = check(wrong);
  found.right = check(right);
  page = await open(url);
  found.kept = look();
  page.querySelector("form.quiz .again").click();
  found.again = look();
  page = await open(url);
  found.forgotten = look();
  return found;
}

// Enter and Tab in an editor, then Escape and Tab, which leaves it. Its value comes back.
function type(editor) {
  const press = (key) => editor.dispatchEvent(
    new frame.contentWindow.KeyboardEvent("keydown", { key, cancelable: true }));
  const before = editor.value;
  editor.focus();
  editor.value = "def f():";
  editor.setSelectionRange(8, 8);
  const kept = ["Enter", "Tab", "Escape", "Tab"].map(press), typed = editor.value;
  editor.value = before;
  editor.dispatchEvent(new Event("input"));
  return [kept, typed];
}

// Have answers judged one after the other (null: what the page shows); load the page again.
async function exercises(url) {
  const found = {}, given = EXERCISES[url];
  let page = await open(url);
  const forms = () => [...page.querySelectorAll("form.exercise")].map((form) =>
    [form.querySelector("textarea"), form.querySelector(".verdict"), form]);
  for (const [editor, verdict, form] of forms()) {
    const name = editor.ariaLabel;
    found[name] = { stub: editor.value, typed: type(editor), verdicts: [] };
    for (const answer of given[name]) {
      if (answer !== null) editor.value = answer;
      editor.dispatchEvent(new Event("input"));
      form.querySelector(".go").click();
      while (!verdict.textContent.startsWith(name)) await new Promise((on) => setTimeout(on, 50));
      found[name].verdicts.push(
        { right: verdict.classList.contains("right"), text: verdict.textContent });
    }
  }
  page = await open(url);
  for (const [editor, verdict, form] of forms()) {
    found[editor.ariaLabel].kept = [editor.value, verdict.textContent];
    form.querySelector(".again").click();
    found[editor.ariaLabel].again = editor.value;
  }
  return found;
}

// a column after one click on its head, then after another
function sorts(page) {
  const head = [...page.querySelectorAll("th")].find((th) => th.textContent === "seconds");
  return [1, 2].map(() => {
    head.querySelector("button").click();
    return [...page.querySelectorAll("article tbody tr")]
      .map((row) => row.cells[head.cellIndex].textContent);
  });
}

async function visit(url) {
  const page = await open(url);
  const found = { title: page.title, wide: layout(page), ...phone(page), filters: filters(page) };
  found.loaded = frame.contentWindow.performance.getEntriesByType("resource").map((e) => e.name);
  found.notes = page.querySelectorAll("p.elsewhere").length;
  if (url.endsWith("/TABLE.html")) found.sorted = sorts(page);
  if (page.getElementById("next")) found.steps = await step(frame);
  if (page.getElementById("prediction")) found.lesson = await predict(page, url);
  return found;
}

(async () => {
  const results = {};
  for (const url of PAGES) {
    results[url] = await visit(url).catch((error) => ({ error: error.stack }));
  }
  await fetch("/exercises");
  for (const url of Object.keys(EXERCISES)) {
    results[url].exercises = await exercises(url).catch((error) => ({ error: error.stack }));
  }
  fetch("/results", { method: "POST", body: JSON.stringify(results) });
})();
</script>"""


class Handler(SimpleHTTPRequestHandler):
    """Serves the site and the harness, and takes the harness's results."""

    def do_GET(self):
        self.server.paths.append(self.path)
        if self.path not in ("/harness", "/exercises"):
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.server.harness.encode())

    def do_POST(self):
        self.server.results = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.server.finished.set()

    def log_message(self, *arguments):
        pass


def answers_of(number: str) -> dict[str, list[str]]:
    """Right answers to a lesson's quiz, as a reader would write them, and wrong ones."""
    right, wrong = [], []
    for question in load_solutions(number).QUIZ:
        answer = question.answer
        if question.options:
            pair = answer, "b" if answer == "a" else "a"
        elif isinstance(answer, bool):
            pair = ("yes", "no") if answer else ("no", "yes")
        else:
            pair = f"{100 * answer:g} %", str(answer + 1)
        right.append(pair[0])
        wrong.append(pair[1])
    return {"right": right, "wrong": wrong}


ENDLESS = """def accept(guess, choices):
    n = 0
    while n < 1:
        n += 0
    return n, choices[n]
"""


def exercises_of(number: str) -> dict[str, list[str | None]]:
    """What is judged for each of a lesson's exercises on the site; the solution is the last."""
    return {
        task.name: [None, f"def {task.name}(*given):\n    return -1\n"]
        + [ENDLESS] * (number == "00") + [inspect.getsource(task.solution)]
        for task in load_solutions(number).TASKS if ".pure_" in task.solution.__module__
    }  # fmt: skip


HAS_PYTHON = (SITE / "_static" / "python").exists()
EXERCISES = {f"/lessons/{name}.html": exercises_of(name[:2]) for name in LESSONS if HAS_PYTHON}
EXERCISES = {url: answers for url, answers in EXERCISES.items() if answers}
ANSWERS = {f"/lessons/{name}.html": answers_of(name[:2]) for name in LESSONS}


@pytest.fixture(scope="module")
def visited(pages, tmp_path_factory) -> dict[str, dict]:
    """What the browser found on each page. No page may write to the console."""
    folder = tmp_path_factory.mktemp("browser")
    urls = [f"/{path.relative_to(SITE).as_posix()}" for path in pages]
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=SITE)) as server:
        server.harness = HARNESS.replace("PAGES", json.dumps(urls))
        server.harness = server.harness.replace("ANSWERS", json.dumps(ANSWERS))
        server.harness = server.harness.replace("EXERCISES", json.dumps(EXERCISES))
        server.paths, server.results, server.finished = [], None, threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [*browser(folder / "profile"), "--window-size=1400,1000",
                   f"http://127.0.0.1:{server.server_port}/harness"]  # fmt: skip
        with open(folder / "log", "w") as log, subprocess.Popen(command, stderr=log) as process:
            server.finished.wait(timeout=600)
            process.terminate()
        server.shutdown()
    lines = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
    assert not [line for line in lines if "CONSOLE" in line]
    assert server.results and server.results.keys() == set(urls)
    here = f"http://127.0.0.1:{server.server_port}/"
    for result in server.results.values():
        result["elsewhere"] = [u for u in result.get("loaded", ()) if not u.startswith(here)]
    before = server.paths[: server.paths.index("/exercises")]
    assert not any("/python/" in path for path in before), "Python is loaded before it is needed"
    return server.results


@needs_browser
def test_every_page_loads_from_here_and_fits_both_widths(visited):
    for url, found in visited.items():
        assert "error" not in found, (url, found)
        assert found["title"] and not found["elsewhere"], url
        assert found["wide"] == {"1280": 0, "375": 0}, url
        assert not found["formulas"], url
        assert found["smallest"] > 0.75, "a picture's labels are too small on a phone"


@needs_browser
def test_pictures_are_dark_in_dark_mode(visited):
    light, dark = zip(*(found["filters"] for found in visited.values()))
    assert {filter for page in light for filter in page} == {"none"}
    assert {filter for page in dark for filter in page} == {"invert(1) hue-rotate(180deg)"}


@needs_browser
def test_a_click_on_a_column_sorts_the_table_of_engines(visited):
    for column, falling in zip(visited["/tests/engines/TABLE.html"]["sorted"], (False, True)):
        seconds = [int(text) for text in column if text]
        assert seconds == sorted(seconds, reverse=falling) and seconds[0] != seconds[-1]
        assert not any(column[len(seconds) :]), "empty cells are last"


@needs_browser
def test_a_run_of_the_gallery_steps_forward(visited):
    steps = {url: found["steps"] for url, found in visited.items() if "steps" in found}
    assert steps.keys() == {f"/lessons/gallery/{name}" for name in GALLERY}
    in_place = [found["lesson"]["steps"] for found in visited.values()
                if "steps" in found.get("lesson", ())]  # fmt: skip
    assert len(in_place) == len(GALLERY)  # each belongs to one lesson
    for before, after in [*steps.values(), *in_place]:
        assert before.startswith("pass 1 of ") and after.startswith("pass 2 of ")


@needs_browser
@pytest.mark.parametrize("name", LESSONS)
def test_a_prediction_shows_the_outputs_and_stands_next_to_what_was_measured(visited, name):
    found, number = visited[f"/lessons/{name}.html"]["lesson"], name[:2]
    assert found["before"] == found["refused"] == found["again"] == 1  # the drawn round
    ranges = load_solutions(number).RANGES
    first, second, *others = found["faults"]
    low, *_, high = ranges[found["names"][1]]
    assert (first, second) == (
        "write a number, as 0.5, 50%, 10 or 10x", f"not between {low} and {high}"
    )  # fmt: skip
    for name, fault in zip(found["names"][2:], others):
        assert fault == ("not a whole number" if isinstance(ranges[name], range) else "")
    assert found["after"] == found["kept"] == found["skipped"] == found["cells"] > 5
    assert found["wide"] == {"1280": 0, "375": 0}
    *earlier, last = found["tables"]
    assert [row[0] for row in last] == [spaced(name) for name in found["names"]]
    for name, row in zip(found["names"], last):
        _, said, measured, ratio = row
        low, value = ranges[name][0], float(measured)
        assert float(said.removesuffix("%")) == pytest.approx(100 * low)
        no_ratio = value == 0 or isinstance(ranges[name], range)
        assert ratio == "–" if no_ratio else abs(float(ratio) - low / value) < 0.006
        assert any(row in table for table in earlier), "not shown where it is measured"


@needs_browser
@pytest.mark.parametrize("name", LESSONS)
def test_the_quiz_is_judged_as_in_the_notebook_and_kept(visited, name):
    url, questions = f"/lessons/{name}.html", load_solutions(name[:2]).QUIZ
    found, nothing = visited[url]["lesson"]["quiz"], [""] * len(questions)
    assert found["open"] == [*nothing, "not answered yet: 1, 2, 3, 4, 5"]
    for kind, given in ANSWERS[url].items():
        verdicts = [judge(question, answer) for question, answer in zip(questions, given)]
        assert found[kind] == [*verdicts, ""] and {v[:5] for v in verdicts} == {kind}
    assert found["kept"] == found["right"][:-1]
    assert found["again"] == found["forgotten"] == nothing


def judge_exercise(*answer: str) -> dict:
    """The verdict here of what the page's Python runs."""
    spec = importlib.util.spec_from_file_location("judge", ROOT / "lessons" / "site" / "judge.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return json.loads(module.judge(*answer))


@needs_browser
@pytest.mark.skipif(not HAS_PYTHON, reason="the site was built without npm, so it has no Python")
@pytest.mark.parametrize("name", LESSONS)
def test_exercises_are_judged_on_the_page_as_in_the_notebook(visited, name):
    url, number = f"/lessons/{name}.html", name[:2]
    found = visited[url].get("exercises", {})
    assert found.keys() == exercises_of(number).keys()
    assert len(found) + visited[url]["notes"] == len(load_solutions(number).TASKS)
    for task, (_, *answers) in EXERCISES.get(url, {}).items():
        stub, *verdicts = found[task]["verdicts"]
        assert stub == {"right": False, "text": f"{task}: not written yet"}
        if ENDLESS in answers:
            answers.remove(ENDLESS)
            endless = verdicts.pop(1)["text"]
            assert "still running after 20 seconds; does its loop end?\n    with guess [" in endless
        imports = "from statistics import median"
        assert verdicts == [judge_exercise(number, task, imports, answer) for answer in answers]
        assert [verdict["right"] for verdict in verdicts] == [False, True]
        assert found[task]["kept"] == [answers[-1], verdicts[-1]["text"]]
        assert found[task]["typed"] == [[False, False, True, True], "def f():\n        "]
        assert found[task]["again"] == found[task]["stub"] and f"def {task}(" in found[task]["stub"]
