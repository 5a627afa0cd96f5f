"""The view shows what happened: distributions, chances and texts agree with their definitions. The
page is tested in a real browser, if there is one."""

import io
import json
import re
import subprocess
import sys

import pytest
from conftest import (
    DECLARED,
    NEEDS,
    TOKENIZER,
    VOCAB,
    browser,
    method_options,
    needs_browser,
    random_model,
    random_tokens,
)
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from minispec import Sampling
from minispec.certify.toys import Recorder
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.generate import METHODS, decode, palette, stream, view
from minispec.generate import __main__ as generate
from minispec.generate.run import Chunk
from minispec.sampling import probs
from minispec.tree import Step, Tree
from minispec.verify import accept

ESCAPE = re.compile(r"\x1b\[[\d;]*m")
BLUE, VERMILION, GREEN = "38;5;32", "38;5;166", "38;5;29"
STRUCK = re.compile(rf"\x1b\[{VERMILION};9m.*?\x1b\[0m")


class ChanceRecorder(Recorder):
    """Also records the chances it is asked for."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.chances = []

    def bernoulli(self, p):
        self.chances.append(p)
        return super().bernoulli(p)


def traced(method: str, temperature: float, model, **options):
    """A run of 20 tokens, and the data of its page."""
    options = method_options(model).get(method, {}) | options | {"temperature": temperature}
    run = decode(model, None, random_tokens(9), method, max_new_tokens=20, **options)
    return run, view.trace(model, None, run, "model")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", list(METHODS))
def test_distributions_equal_those_of_plain_forward_passes(method, temperature):
    model = random_model()
    run, data = traced(method, temperature, model)
    before, sampling = list(run.prompt), Sampling(temperature or 1.0)
    for step, entry in zip(run.rounds, data["passes"], strict=True):
        tree = step.tree
        assert entry["rows"] == len(before) - 1 and entry["tokens"] == step.tokens
        target = []
        for node in range(len(tree)):
            branch = tree.tokens_at([i for i in range(1, len(tree)) if tree.mask[node, i]])
            logits = model.logits(model(before + branch)[0, -1:])
            target.append(probs(logits, sampling)[0])
            ids, shown = zip(*entry["probs"][node])
            top = target[node].topk(view.TOP_TOKENS).indices.tolist()
            assert list(ids[: view.TOP_TOKENS]) == top
            assert list(shown) == pytest.approx(target[node][list(ids)].tolist(), rel=1e-3)
            assert {tree.tokens[i] for i in tree.children(node)} <= set(ids)
            entropy = -(target[node] * target[node].log()).sum()
            assert entry["entropy"][node] == pytest.approx(float(entropy), rel=1e-3)
            if node:
                p = float(target[tree.parents[node]][tree.tokens[node]])
                assert entry["p"][node] == pytest.approx(p, rel=1e-3)
        before += step.tokens
    assert any(len(step.tree) > 1 for step in run.rounds) == (method != "autoregressive")


@pytest.mark.parametrize(
    "method", [name for name in METHODS if DECLARED[name].lossless and name != "autoregressive"]
)
def test_chances_equal_those_drawn_in_the_run(method):
    model, recorder = random_model(), ChanceRecorder(3)
    run, data = traced(method, 0.8, model, randomness=recorder, rule=accept)
    shown, drawn = [], []
    for entry in data["passes"]:
        parents, path = entry["tree"]["parents"], entry["tree"]["path"]
        for place in path:
            shown += [entry["chance"][i] for i, parent in enumerate(parents) if parent == place
                      and entry["chance"][i] is not None]  # fmt: skip
        drawn.append(entry["drawn"])
    assert shown == pytest.approx(recorder.chances, rel=1e-3) and len(shown) > 3
    if not DECLARED[method].of_kind("sampling"):  # the others draw their drafts
        expected = [float(p[x]) for p, x in zip(recorder.probs, recorder.drawn)]
        assert drawn == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("method", [m for m in NEEDS if DECLARED[m].of_kind("rule")])
def test_chances_of_a_block_equal_those_drawn_in_the_run(method):
    """The longest block is tried first, until one is accepted."""
    model, recorder = random_model(), ChanceRecorder(3)
    run, data = traced(method, 0.8, model, randomness=recorder)  # the default rule
    shown = []
    for entry in data["passes"]:
        accepted = len(entry["tree"]["path"]) - 1
        shown += entry["chance"][:0:-1][: len(entry["chance"]) - max(accepted, 1)]
    assert shown == pytest.approx(recorder.chances, rel=1e-3) and len(shown) > 9


def test_greedy_and_typical_decisions():
    model = random_model()
    _, data = traced("medusa", 0.0, model)
    for entry in data["passes"]:
        for i, chance in enumerate(entry["chance"]):
            assert chance in (None, float(i in entry["tree"]["path"]))
        assert entry["probs"][entry["tree"]["path"][-1]][0][0] == entry["tokens"][-1]
    _, data = traced("medusa-typical", 0.8, model)
    for entry in data["passes"]:  # this rule has no chances of acceptance
        assert set(entry["chance"]) == {None}
        shown = dict(entry["probs"][entry["tree"]["path"][-1]])
        assert shown[entry["tokens"][-1]] == entry["drawn"]


def test_tree_and_window_of_a_step_are_the_input_of_its_pass():
    model, fed = random_model(context=64), []
    model.register_forward_pre_hook(lambda _, arguments: fed.append(list(arguments[0])))
    run = decode(model, None, random_tokens(9), "lookahead", max_new_tokens=60)
    windows = [[x for row in step.window for x in row] for step in run.rounds]
    shown = [step.tree.tokens + window for step, window in zip(run.rounds, windows)]
    assert shown == fed[-len(run.rounds) :]
    assert any(windows) and not windows[-1]  # the window no longer fits at the end of the context


def test_a_run_that_ends_inside_a_step_shows_the_emitted_tokens():
    run, data = traced("speculative", 0.0, random_model(), draft=random_model(), k=6)
    assert [entry["emitted"] for entry in data["passes"]] == [7, 7, 6]
    assert [len(entry["tokens"]) for entry in data["passes"]] == [7, 7, 7]
    none = decode(random_model(), None, [1, 2], max_new_tokens=0)
    assert view.trace(random_model(), None, none, "model")["passes"] == []


def test_text_of_single_tokens():
    pieces = [view.piece(TOKENIZER, token) for token in TOKENIZER.encode("a 你\n")]
    assert pieces == ["a", " ", "ä", "½", "ł", "\n"]  # the vocabulary's letters for bytes E4 BD A0
    assert view.piece(TOKENIZER, 256) == TOKENIZER.special_tokens["eos_token"]
    assert view.piece(TOKENIZER, 9999) == view.piece(None, 9999) == "#9999"
    # a vocabulary with byte fallback, whose pieces keep their spaces
    backend = Backend(models.BPE({"▁a": 0, "b": 1, "<0xE4>": 2, "▁": 3, "<": 4}, []))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokenizer = Tokenizer(backend)
    assert [view.piece(tokenizer, i) for i in range(5)] == [" a", "b", "<0xE4>", " ", "<"]


@pytest.mark.parametrize("stop", [(), ("\x00", "e", "ab")])
@pytest.mark.parametrize("seed", range(3))
def test_page_and_terminal_show_the_text_of_the_run(seed, stop):
    """For every chunk and any bytes. Drafts are struck out only with `full`."""
    model = random_model(seed, vocab_size=VOCAB, bos_id=256, eos_ids=(256,))
    run = stream(model, TOKENIZER, "你好 ab ab", "prompt-lookup", temperature=1.5, seed=seed,
                 stop=stop, max_new_tokens=60)  # fmt: skip
    for chunk in run:
        for full in False, True:
            painted = view.paint(chunk, TOKENIZER, full=full)
            assert full or not STRUCK.search(painted)
            assert ESCAPE.sub("", STRUCK.sub("", painted)) == chunk.text
    data = view.trace(model, TOKENIZER, run, "model")
    assert "".join(text for entry in data["passes"] for text in entry["texts"]) == run.text
    assert data["prompt"] == "你好 ab ab" and data["tokens"] == run.tokens
    used = {t for entry in data["passes"] for t in entry["tokens"] + entry["tree"]["tokens"]}
    assert used <= data["pieces"].keys()


def test_colours_show_accepted_fresh_and_rejected_tokens():
    """In the tree, b or c follows a, and d is a's sibling. Accepted: a and c; then e is drawn."""
    root, a, b, c, d, e = TOKENIZER.encode("xabcde")
    tree = Tree([root, a, b, b, c, d], [-1, 0, 1, 2, 1, 0])
    chunk = Chunk([a, c, e], list("ace"), Step([a, c, e], tree, [0, 1, 4]))
    accepted, fresh = f"\x1b[{BLUE}ma\x1b[0m\x1b[{BLUE}mc\x1b[0m", f"\x1b[{GREEN}me\x1b[0m"
    struck = f"\x1b[{VERMILION};9mbb|d\x1b[0m"
    assert view.paint(chunk, TOKENIZER) == accepted + fresh
    assert view.paint(chunk, TOKENIZER, full=True) == accepted + struck + fresh
    lines = Chunk([a], ["a\n\nb"], Step([a], Tree.chain(e, []), [0]))  # each line on its own
    assert view.paint(lines, TOKENIZER, underline=True) == (
        f"\x1b[{GREEN};4ma\x1b[0m\n\n\x1b[{GREEN};4mb\x1b[0m"
    )
    odd = Step([a], Tree.chain(e, [TOKENIZER.encode("\n")[0], TOKENIZER.encode("\x1b")[0]]), [0])
    assert view.rejected_text(odd, TOKENIZER) == r"↵\x1b"


def mixed(colour: list[float], other: list[float], share: float) -> list[float]:
    return [share * a + (1 - share) * b for a, b in zip(colour, other)]


def contrast(colour: list[float], other: list[float]) -> float:
    """The contrast ratio of WCAG 2, from 1 to 21."""

    def luminance(rgb: list[float]) -> float:
        shares = [c / 255 for c in rgb]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))

    low, high = sorted((luminance(colour), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def channels(colour: str) -> list[float]:
    return list(bytes.fromhex(colour.removeprefix("#")))


@pytest.mark.parametrize("meaning", palette.LEGEND)
def test_colours_can_be_read_on_dark_and_on_light(meaning):
    colour = channels(palette.LEGEND[meaning])
    cell = int(palette.ansi(palette.LEGEND[meaning]).removeprefix("38;5;")) - 16
    in_terminal = [(0, 95, 135, 175, 215, 255)[cell // n % 6] for n in (36, 6, 1)]
    for shade in colour, in_terminal:
        for terminal in "#000000", "#ffffff":
            assert contrast(shade, channels(terminal)) > 3.4
    template = view.TEMPLATE.read_text(encoding="utf-8")
    modes = [re.search(rf"--{name}: light-dark\((#\w+), (#\w+)\)", template).groups()
             for name in ("ink", "panel")]  # fmt: skip
    shares = {
        use: int(share) / 100
        for use, share in re.findall(
            rf"--{meaning}-(text|bg): color-mix\(in srgb, var\(--{meaning}\) (\d+)%, ", template
        )
    }
    for ink, panel in zip(*modes):
        text, panel = mixed(colour, channels(ink), shares["text"]), channels(panel)
        assert contrast(text, panel) >= 4.5
        if meaning != "rejected":  # has no background of its own
            assert contrast(text, mixed(colour, panel, shares["bg"])) >= 4.5


def call(folder, *arguments: str) -> None:
    generate.main(["--model", folder, "--device", "cpu", "--max-new-tokens", "8", *arguments])


def test_color_never_takes_the_prompt_as_its_value(folder, capsys, monkeypatch):
    call(folder, "full story")
    plain = capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")  # an explicit --color wins, even into a pipe
    for words in (["--color", "full story"], ["full story", "--color"],
                  ["--color=full", "full story"]):  # fmt: skip
        call(folder, *words)
        out = capsys.readouterr().out
        assert "\x1b[" in out and ESCAPE.sub("", out) == plain
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nho\n"))
    call(folder, "--chat", "--color")
    assert capsys.readouterr().out.count("\x1b[0m") > 2
    call(folder, "--", "--color")
    assert capsys.readouterr().out.startswith("--color")
    with pytest.raises(SystemExit) as caught:
        call(folder, "x", "--color=loud")
    assert caught.value.code == 2


def data_of(page: str) -> dict:
    blocks = re.findall(r'<script id="trace" type="application/json">(.*?)</script>', page, re.S)
    assert len(blocks) == 1 and "<" not in blocks[0]
    return json.loads(blocks[0])


def test_the_page_embeds_any_text_safely(folder, capsys, tmp_path):
    prompt = "</script><script>alert(1)</script><!-- __TRACE__ & \" ' 你\u2028"
    call(folder, prompt, "--json", "--html", str(tmp_path / "a.html"))
    facts = json.loads(capsys.readouterr().out)
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    data = data_of(page)
    assert {key: data[key] for key in facts} == facts and data["prompt"] == prompt
    template = view.TEMPLATE.read_text(encoding="utf-8")
    assert template.count(view.PLACEHOLDER) == 1
    assert palette.css() in page and view.COLOURS_PLACEHOLDER not in page
    assert page.count("<script") == template.count("<script") == 2
    # the page needs no network
    assert "default-src 'none'" in template
    assert set(re.findall(r"https?://[^\s\"']+", template)) == {"http://www.w3.org/2000/svg"}
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", template) == ["data:,"]


# opens each page in frames as wide as a phone and a desktop, and does what a reader would do
HARNESS = """<!DOCTYPE html><meta charset="utf-8"><pre id="out"></pre><script>
const pages = PAGES, out = [];
function tried(frame, name, width) {
  const w = frame.contentWindow, d = w.document, $ = id => d.getElementById(id);
  const key = (name, on = d.body) => on.dispatchEvent(
    new w.KeyboardEvent("keydown", {key: name, bubbles: true, cancelable: true}));
  const where = () => $("where").textContent;
  const touch = (type, x) => { const t = new w.Touch({identifier: 1, target: d.body, clientX: x,
    clientY: 50}); d.body.dispatchEvent(new w.TouchEvent(type, {bubbles: true,
    touches: type === "touchstart" ? [t] : [], changedTouches: [t]})); };
  const box = $("tree").getBoundingClientRect(), root = $("tree").querySelector(".root");
  const seen = {name, width, first: where(), root: root.getBoundingClientRect().left - box.left};
  key("ArrowRight"); seen.right = where();
  touch("touchstart", 200); touch("touchend", 100); seen.swiped = where();
  touch("touchstart", 100); touch("touchend", 200); key("ArrowLeft"); seen.left = where();
  key("End"); seen.last = where(); seen.text = $("text").textContent;
  $("previous").click(); $("slider").value = 1; $("slider").dispatchEvent(new w.Event("input"));
  seen.slid = where();
  const nodes = d.querySelectorAll("#tree g[role=button]");
  nodes[0].dispatchEvent(new w.MouseEvent("click")); 
  seen.note = $("distribution-note").textContent;
  const ground = () => w.getComputedStyle(d.body).backgroundColor;
  const before = ground(); $("theme").click(); seen.theme = before !== ground();
  seen.nodes = nodes.length; seen.bars = d.querySelectorAll("#distribution .bar").length;
  seen.window = !$("window-part").hidden; seen.overflow = d.documentElement.scrollWidth - width;
  seen.below = 0; // how far the end of an accepted path is out of sight
  for (key("Home"); ; key("ArrowRight")) {
    const end = $("tree").querySelector("g.fresh").getBoundingClientRect().bottom;
    seen.below = Math.max(seen.below, end - $("tree").getBoundingClientRect().bottom);
    if ($("next").disabled) break;
  }
  seen.crossed = [...d.querySelectorAll("#tree g.node")].filter(node => {
    const [token, note] = [...node.querySelectorAll("text")].map(x => x.getBoundingClientRect());
    return token.right > note.left && token.bottom > note.top + 4;
  }).length;
  return seen;
}
for (const [name, html] of Object.entries(pages)) for (const width of [390, 1280]) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 844px; border: 0`;
  frame.srcdoc = html;
  document.body.append(frame);
  frame.addEventListener("load", () => {
    frame.contentWindow.addEventListener("error", e => out.push({name, error: e.message}));
    out.push(tried(frame, name, width));
    document.getElementById("out").textContent = JSON.stringify(out);
  });
}
</script>"""

@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The page of every method on the shipped weights, and that of a large tree."""
    folder, made = tmp_path_factory.mktemp("pages"), {}
    for method in METHODS.keys() - {"eagle3"}:  # no such head is shipped
        file = folder / f"{method}.html"
        generate.main(["Once upon a time", "--max-new-tokens", "12", "--method", method,
                       "--html", str(file), "--device", "cpu"])  # fmt: skip
        made[method] = file.read_text(encoding="utf-8")
    generate.main(["Once upon a time", "--max-new-tokens", "24", "--method", "fastmtp",
                   "--tree", "60", "--temperature", "1.5", "--html", str(file)])  # fmt: skip
    return made | {"fastmtp, tree of 60": file.read_text(encoding="utf-8")}


@pytest.mark.slow
@needs_browser
def test_the_page_of_every_method_in_a_browser(pages, tmp_path):
    file = tmp_path / "harness.html"
    embedded = json.dumps(pages).replace("<", r"\u003c")
    file.write_text(HARNESS.replace("PAGES", embedded, 1), encoding="utf-8")
    command = [*browser(tmp_path / "profile"), "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    results = json.loads(re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.S)[1]
                      .replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))  # fmt: skip
    assert len(results) == 2 * len(pages) and not any("error" in result for result in results)
    for result in results:
        data = data_of(pages[result["name"]])
        count, second = len(data["passes"]), data["passes"][1]
        assert result["first"] == result["left"] == f"pass 1 of {count}"
        assert 0 <= result["root"] < 20  # visible, however deep the tree
        assert result["right"] == result["slid"] == f"pass 2 of {count}"
        assert result["swiped"] == f"pass {min(3, count)} of {count}"
        assert result["last"] == f"pass {count} of {count}"
        assert result["text"] == data["prompt"] + data["text"]
        assert result["nodes"] == len(second["tree"]["tokens"])
        assert result["bars"] >= len(second["probs"][0])
        assert result["note"].startswith("node 0,") and result["theme"]
        assert result["window"] == bool(second["window"]) and result["overflow"] <= 0
        assert result["below"] <= 0 and result["crossed"] == 0
