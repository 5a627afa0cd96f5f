"""What is shown is what happened: distributions, chances and texts against their definitions; and
the page in a real browser, where there is one."""

import io
import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import TOKENIZER, VOCAB, companions, random_model, random_tokens
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from minispec import Sampling
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.generate import METHODS, decode, stream, view
from minispec.generate import __main__ as generate
from minispec.generate.run import Chunk
from minispec.sampling import probs
from minispec.toys import Recorder
from minispec.tree import Step, Tree

ESCAPE = re.compile(r"\x1b\[[\d;]*m")
STRUCK = re.compile(r"\x1b\[9;31m.*?\x1b\[0m")


class Watched(Recorder):
    """Remembers the chances it was given too."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.chances = []

    def bernoulli(self, p):
        self.chances.append(p)
        return super().bernoulli(p)


def traced(method: str, temperature: float, model, **options):
    """A run of 20 tokens, and what its page would show."""
    options = companions(model).get(method, {}) | options | {"temperature": temperature}
    run = decode(model, None, random_tokens(9), method, max_new_tokens=20, **options)
    return run, view.trace(model, None, run, "model")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", list(METHODS))
def test_distributions_are_those_of_plain_forward_passes(method, temperature):
    model = random_model()
    run, data = traced(method, temperature, model)
    before, sampling = list(run.prompt), Sampling(temperature or 1.0)
    for step, now in zip(run.rounds, data["passes"], strict=True):
        tree = step.tree
        assert now["rows"] == len(before) - 1 and now["tokens"] == step.tokens
        target = []
        for node in range(len(tree)):
            branch = tree.tokens_at([i for i in range(1, len(tree)) if tree.mask[node, i]])
            logits = model.logits(model(before + branch)[0, -1:])
            target.append(probs(logits, sampling)[0])
            ids, shown = zip(*now["probs"][node])
            assert list(ids[: view.TOP]) == target[node].topk(view.TOP).indices.tolist()
            assert list(shown) == pytest.approx(target[node][list(ids)].tolist(), rel=1e-3)
            assert {tree.tokens[i] for i in tree.children(node)} <= set(ids)
            entropy = -(target[node] * target[node].log()).sum()
            assert now["entropy"][node] == pytest.approx(float(entropy), rel=1e-3)
            if node:
                p = float(target[tree.parents[node]][tree.tokens[node]])
                assert now["p"][node] == pytest.approx(p, rel=1e-3)
        before += step.tokens
    assert any(len(step.tree) > 1 for step in run.rounds) == (method != "autoregressive")


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"autoregressive", "medusa-typical"}))
def test_chances_are_those_the_run_asked_its_randomness_for(method):
    model, seen = random_model(), Watched(3)
    run, data = traced(method, 0.8, model, randomness=seen)
    shown, drawn = [], []
    for now in data["passes"]:
        parents, path = now["tree"]["parents"], now["tree"]["path"]
        for place in path:
            shown += [now["chance"][i] for i, parent in enumerate(parents) if parent == place
                      and now["chance"][i] is not None]  # fmt: skip
        drawn.append(now["drawn"])
    assert shown == pytest.approx(seen.chances, rel=1e-3) and len(shown) > 3
    if method not in ("speculative", "fastmtp"):  # their drafts are drawn from the same randomness
        right = [float(p[x]) for p, x in zip(seen.probs, seen.drawn)]
        assert drawn == pytest.approx(right, rel=1e-3)


def test_greedy_and_typical_decisions():
    model = random_model()
    _, data = traced("medusa", 0.0, model)
    for now in data["passes"]:
        for i, chance in enumerate(now["chance"]):
            assert chance in (None, float(i in now["tree"]["path"]))
        assert now["probs"][now["tree"]["path"][-1]][0][0] == now["tokens"][-1]
    _, data = traced("medusa-typical", 0.8, model)
    for now in data["passes"]:  # `accept`'s chances do not apply to this rule
        assert set(now["chance"]) == {None}
        shown = dict(now["probs"][now["tree"]["path"][-1]])
        assert shown[now["tokens"][-1]] == now["drawn"]


def test_tree_and_window_of_a_step_are_what_its_pass_was_fed():
    model, fed = random_model(context=64), []
    model.register_forward_pre_hook(lambda _, arguments: fed.append(list(arguments[0])))
    run = decode(model, None, random_tokens(9), "lookahead", max_new_tokens=60)
    windows = [[x for row in step.window for x in row] for step in run.rounds]
    shown = [step.tree.tokens + window for step, window in zip(run.rounds, windows)]
    assert shown == fed[-len(run.rounds) :]
    assert any(windows) and not windows[-1]  # at the end of the context there is no room for one


def test_a_run_cut_inside_a_step_shows_what_was_emitted():
    run, data = traced("speculative", 0.0, random_model(), draft=random_model(), k=6)
    assert [now["emitted"] for now in data["passes"]] == [7, 7, 6]
    assert [len(now["tokens"]) for now in data["passes"]] == [7, 7, 7]
    none = decode(random_model(), None, [1, 2], max_new_tokens=0)
    assert view.trace(random_model(), None, none, "model")["passes"] == []


def test_the_pieces_of_a_vocabulary():
    pieces = [view.piece(TOKENIZER, token) for token in TOKENIZER.encode("a 你\n")]
    assert pieces == ["a", " ", "ä", "½", "ł", "\n"]  # its letters for the bytes E4 BD A0
    assert view.piece(TOKENIZER, 256) == TOKENIZER.named["eos_token"]
    assert view.piece(TOKENIZER, 9999) == view.piece(None, 9999) == "#9999"
    # and of one with byte fallback, whose pieces keep their spaces
    backend = Backend(models.BPE({"▁a": 0, "b": 1, "<0xE4>": 2, "▁": 3, "<": 4}, []))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokenizer = Tokenizer(backend)
    assert [view.piece(tokenizer, i) for i in range(5)] == [" a", "b", "<0xE4>", " ", "<"]


@pytest.mark.parametrize("stop", [(), ("\x00", "e", "ab")])
@pytest.mark.parametrize("seed", range(3))
def test_the_texts_of_page_and_terminal_are_the_run_s(seed, stop):
    """Chunk by chunk, whatever bytes the tokens are; drafts are struck out only with `full`."""
    model = random_model(seed, vocab_size=VOCAB, bos_id=256, eos_ids=(256,))
    run = stream(model, TOKENIZER, "你好 ab ab", "prompt-lookup", temperature=1.5, seed=seed,
                 stop=stop, max_new_tokens=60)  # fmt: skip
    for chunk in run:
        for full in False, True:
            painted = view.paint(chunk, TOKENIZER, full=full)
            assert full or not STRUCK.search(painted)
            assert ESCAPE.sub("", STRUCK.sub("", painted)) == chunk.text
    data = view.trace(model, TOKENIZER, run, "model")
    assert "".join(text for now in data["passes"] for text in now["texts"]) == run.text
    assert data["prompt"] == "你好 ab ab" and data["tokens"] == run.tokens
    used = {t for now in data["passes"] for t in now["tokens"] + now["tree"]["tokens"]}
    assert used <= data["pieces"].keys()


def test_who_and_which_pass_and_what_was_rejected():
    """The tree: a, with b or c below it, and d beside it; a and c are accepted, then e is drawn."""
    root, a, b, c, d, e = TOKENIZER.encode("xabcde")
    tree = Tree([root, a, b, b, c, d], [-1, 0, 1, 2, 1, 0])
    chunk = Chunk([a, c, e], list("ace"), Step([a, c, e], tree, [0, 1, 4]))
    green, struck = "\x1b[32ma\x1b[0m\x1b[32mc\x1b[0m", "\x1b[9;31mbb|d\x1b[0m"
    assert view.paint(chunk, TOKENIZER) == green + "\x1b[35me\x1b[0m"
    assert view.paint(chunk, TOKENIZER, full=True) == green + struck + "\x1b[35me\x1b[0m"
    lines = Chunk([a], ["a\n\nb"], Step([a], Tree.chain(e, []), [0]))  # each by itself
    assert view.paint(lines, TOKENIZER, underline=True) == (
        "\x1b[35;4ma\x1b[0m\n\n\x1b[35;4mb\x1b[0m"
    )
    odd = Step([a], Tree.chain(e, [TOKENIZER.encode("\n")[0], TOKENIZER.encode("\x1b")[0]]), [0])
    assert view.rejected(odd, TOKENIZER) == r"↵\x1b"


def call(folder, *arguments: str) -> None:
    generate.main(["--model", folder, "--device", "cpu", "--max-new-tokens", "8", *arguments])


def test_the_flag_never_takes_the_prompt_for_its_value(folder, capsys, monkeypatch):
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


def test_the_page_holds_its_data_whatever_the_text(folder, capsys, tmp_path):
    prompt = "</script><script>alert(1)</script><!-- __TRACE__ & \" ' 你\u2028"
    call(folder, prompt, "--json", "--html", str(tmp_path / "a.html"))
    facts = json.loads(capsys.readouterr().out)
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    data = data_of(page)
    assert {key: data[key] for key in facts} == facts and data["prompt"] == prompt
    template = view.PAGE.read_text(encoding="utf-8")
    assert template.count(view.MARK) == 1
    assert page.count("<script") == template.count("<script") == 2
    # and needs no network
    assert "default-src 'none'" in template
    assert set(re.findall(r"https?://[^\s\"']+", template)) == {"http://www.w3.org/2000/svg"}
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", template) == ["data:,"]


# each page in frames as wide as a phone and as a desktop, and what a reader would do with it
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

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of every method on the shipped weights, and their data."""
    folder, made = tmp_path_factory.mktemp("pages"), {}
    for method in METHODS:
        file = folder / f"{method}.html"
        generate.main(["Once upon a time", "--max-new-tokens", "12", "--method", method,
                       "--html", str(file), "--device", "cpu"])  # fmt: skip
        made[method] = file.read_text(encoding="utf-8")
    return made


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_every_method_s_page_in_a_browser(pages, tmp_path):
    file = tmp_path / "harness.html"
    embedded = json.dumps(pages).replace("<", r"\u003c")
    file.write_text(HARNESS.replace("PAGES", embedded, 1), encoding="utf-8")
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
        file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    seen = json.loads(re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.S)[1]
                      .replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))  # fmt: skip
    assert len(seen) == 2 * len(METHODS) and not any("error" in one for one in seen)
    for one in seen:
        data = data_of(pages[one["name"]])
        count, second = len(data["passes"]), data["passes"][1]
        assert one["first"] == one["left"] == f"pass 1 of {count}"
        assert 0 <= one["root"] < 20  # in sight, however deep the tree
        assert one["right"] == one["slid"] == f"pass 2 of {count}"
        assert one["swiped"] == f"pass {min(3, count)} of {count}"
        assert one["last"] == f"pass {count} of {count}"
        assert one["text"] == data["prompt"] + data["text"]
        assert one["nodes"] == len(second["tree"]["tokens"])
        assert one["bars"] >= len(second["probs"][0])
        assert one["note"].startswith("node 0,") and one["theme"]
        assert one["window"] == bool(second["window"]) and one["overflow"] <= 0
