"""`make score`: what a decoder's tokens cost, who gets no score, and the leaderboard."""

import copy
import json
import re
import shlex
import subprocess
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, file_limit, random_model

from lessons import machines
from lessons.assignments import accepted, leaderboard, score
from minispec import paths
from minispec.certify.functions.checks import Limits
from minispec.checkpoints.load import load
from minispec.fast import swap
from minispec.fast.products import TIMED_ROWS, MeasuredLinear
from minispec.tree import Tree

PLAIN = """
from functools import cache

import torch

import minispec
from minispec.sampling import Sampling, Seeded, probs

load = cache(minispec.load)


@torch.no_grad()
def decode(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    model, _ = load(checkpoint)
    cache, tokens, rng = model.new_cache(), list(prompt), Seeded(seed)
    while len(tokens) < len(prompt) + max_new_tokens:
        fed = tokens[cache.length :]
        hidden = model(fed, cache)[0]
        cache.commit([*range(len(fed))])
        p = probs(model.logits(hidden[-1:]), Sampling(temperature, top_k, top_p))[0]
        tokens.append(rng.categorical(p))
        if tokens[-1] in model.config.eos_ids:
            break
    return tokens[len(prompt) :]
"""
SPECULATIVE = """
from functools import cache
import minispec
from minispec import generate

load = cache(minispec.load)

def decode(checkpoint, prompt, **options):
    return generate.decode(*load(checkpoint), prompt, "speculative", k=3, **options).tokens
"""


certificate, load_once = score.certificate, cache(load)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """One text, few tokens, and no certifier."""
    monkeypatch.setattr(score, "load", load_once)
    monkeypatch.setattr(score, "LENGTH", 6)
    monkeypatch.setattr(score, "TEXTS", {**score.TEXTS, "texts": score.TEXTS["texts"][:1]})
    monkeypatch.setattr(score, "certificate", lambda impl: (0, "no loss found"))


def run(tmp_path, code: str, capsys, *flags: str) -> tuple[int, dict, str]:
    """Score this code. Returns the exit code, the result as JSON and the last line of output."""
    file, result = tmp_path / "anna.py", tmp_path / "anna.json"
    file.write_text(code)
    with pytest.raises(SystemExit) as exit_:
        score.main([str(file), f"--json={result}", *flags])
    output = capsys.readouterr()
    lines = (output.out + output.err).strip().splitlines()
    return exit_.value.code, json.loads(result.read_text()) if result.exists() else {}, lines[-1]


# ---- cost ----------------------------------------------------------------------------------------


def test_the_curves_are_those_that_were_published():
    card = (ROOT / "weights" / "smollm2" / "README.md").read_text(encoding="utf-8")
    counts, costs = (re.search(rf"^\| {start}.*$", card, re.MULTILINE)[0].split("|")[2:-1]
                     for start in ("a pass over", "cost, in passes over one token"))  # fmt: skip
    measured = {int(n.split()[0]): float(c) for n, c in zip(counts, costs)}
    assert measured == machines.MEASURED
    for name, at in machines.MACHINES.items():
        curve = [at(n) for n in range(1, 200)]
        assert curve[0] == 1 and all(a < b for a, b in zip(curve, curve[1:])), name
    assert [machines.MACHINES["EPYC"](n) for n in measured] == [*measured.values()]
    assert machines.MACHINES["H200"](64) == machines.H200[64]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_pass_over_n_rows_costs_what_the_curve_says(mode):
    """Also that of a copy, and with products that are turned round."""
    model, tree = random_model(), Tree([1, 2, 3, 4], [-1, 0, 0, 1])
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    turned = copy.deepcopy(model)
    swap(turned, lambda layer: MeasuredLinear(layer, ["weight_first"] * len(TIMED_ROWS)))
    with mode():
        for network in model, turned:
            rows = network.new_cache(32)
            for inputs in ([5, 6],), (tree.tokens, rows, tree.depth, tree.mask):
                with score.Meter() as meter:
                    network.logits(network(*inputs))
                assert meter.work == {len(inputs[0]): weights}
    for name, at in machines.MACHINES.items():
        assert score.cost({4: 3 * weights}, weights, name) == pytest.approx(3 * at(4))


def test_any_product_counts_whoever_multiplies():
    w, x = torch.ones(50, 30), torch.ones(7, 30)
    products = [
        lambda: x @ w.T, lambda: w @ x.T, lambda: torch.einsum("nk,mk->nm", x, w),
        lambda: F.linear(x, w, torch.ones(50)), lambda: torch.addmm(torch.ones(50), x, w.T),
        lambda: x[None] @ w.T, lambda: x.new_zeros(7, 50).addmm_(x, w.T),
    ]  # fmt: skip
    for product in products:
        with score.Meter() as meter:
            product()
        assert meter.work == {7: 1500}
    with score.Meter() as meter:
        w @ x[0]
        torch.bmm(x.expand(3, 7, 30), w.T.expand(3, 30, 50))
    assert meter.work == {1: 1500, 7: 4500}


# ---- scores --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_plain_and_speculative_decoding(tmp_path, capsys):
    """Plain decoding is a pass per token, the first of which reads the prompt."""
    code, plain, line = run(tmp_path, PLAIN, capsys)
    prompt = len(load_once(paths.TOY, "float64", "cpu")[1].encode(score.texts(0)[0]))
    at = machines.MACHINES["EPYC"]
    assert code == 0 and line.startswith("anna: 0.9") and plain["tokens"] == 6
    assert 6 / (at(prompt) + 5) < plain["EPYC"] < 1  # lm_head ran on one row of the prompt
    assert plain["score"] == pytest.approx((plain["EPYC"] * plain["H200"]) ** 0.5, abs=1e-3)
    code, faster, _ = run(tmp_path, SPECULATIVE, capsys)
    assert code == 0 and faster["EPYC"] > plain["EPYC"] and faster["H200"] > plain["H200"]


@pytest.mark.slow
def test_auto_reads_no_clock(tmp_path, capsys):
    auto = SPECULATIVE.replace("k=3", 'k="auto"')
    results = [run(tmp_path, auto, capsys)[1] for _ in range(2)]
    assert results[0] == results[1] and results[0]["score"] > 0


def test_seeds_choose_other_texts():
    assert score.texts(0) == score.texts(0) != score.texts(1)
    assert not any("{" in text for text in score.texts(0))


WRONG = {  # what stands in the place of a line of PLAIN -> the beginning of the reason
    "model, _ = load(checkpoint)": {
        'model, _ = load(checkpoint + "/draft")': "it does not decode like plain decoding: token",
        'raise ValueError("no cache")': "raised ValueError: no cache (prompt of",
        "raise SystemExit(0)": "raised SystemExit: 0",
        "import os; os._exit(0)": "the process ended with status 0 before it was done",
        "return []": "it does not decode like plain decoding: 0 tokens instead of 6",
        "raise NotImplementedError('top-k')": "top-k",
        'open(__file__ + ".txt", "w")': "raised PermissionError: [Errno 13] Permission denied: ",
        "import threading; threading.Thread(target=print).start()":
            "raised RuntimeError: can't start new thread",
        "while True: pass": "it ran for more than 1 seconds and was stopped",
    },
    "hidden = model(fed, cache)[0]": {
        "with torch._C._DisableTorchDispatch(): hidden = model(fed, cache)[0]":
            "6 tokens, but the target has scored ",
    },
}  # fmt: skip


@pytest.mark.parametrize("line, wrong", [(a, b) for a in WRONG for b in WRONG[a]])
def test_who_gets_no_score_and_why(line, wrong, tmp_path, capsys, monkeypatch):
    if wrong.startswith("while"):
        monkeypatch.setattr(score, "SECONDS", 1)
    code, result, printed = run(tmp_path, PLAIN.replace(line, wrong), capsys)
    assert code == 1 and result["score"] is None
    assert result["reason"].startswith(WRONG[line][wrong])
    assert printed == f"anna: no score; {result['reason']}"


@pytest.mark.slow
def test_work_while_importing_counts(tmp_path, capsys):
    before = run(tmp_path, PLAIN, capsys)[1]
    early = PLAIN + "\nwith torch.no_grad():\n    load(minispec.paths.TOY)[0]([1, 2, 3])\n"
    after = run(tmp_path, early, capsys)[1]
    assert "3" in after["work"] and "3" not in before["work"] and after["score"] < before["score"]


@pytest.mark.slow
def test_who_is_not_certified_gets_no_score(tmp_path, capsys, monkeypatch):
    """Greedy tokens are right, but it does not sample."""
    monkeypatch.setattr(score, "certificate", certificate)
    monkeypatch.setattr(score, "LIMITS", Limits(1e9, 100, 10, 2))
    few = {"only": "T=1.5 top-k 3", "checks": ("statistical",)}
    monkeypatch.setattr(score, "ROWS", few)
    code, result, _ = run(tmp_path, PLAIN, capsys)
    assert code == 0 and result["certifier"].startswith("no loss found")
    code, result, _ = run(tmp_path, PLAIN.replace("rng.categorical(p)", "int(p.argmax())"), capsys)
    certificate(f"{tmp_path}/anna.py:decode")
    assert capsys.readouterr().out.startswith("FAIL  statistical ")
    reason = "the certifier does not admit it: LOSS in statistical (1)"
    assert (code, result["reason"]) == (1, reason)


@pytest.mark.parametrize(
    "code, flags, message",
    [
        ("x = 1", [], "cannot be imported"), ("def decode(:", [], "cannot be imported"),
        (PLAIN, ["--seed=x"], "x must be a whole number"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(code, flags, message, tmp_path, capsys):
    exit_code, result, line = run(tmp_path, code, capsys, *flags)
    assert exit_code == 2 and message in line and not result


@pytest.mark.parametrize("arguments", [[], ["nowhere.py"], ["notes.txt"]])
def test_a_missing_file_is_one_line(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(SystemExit) as exit_:
        score.main(arguments)
    err = capsys.readouterr().err.strip()
    assert exit_.value.code == 2 and "\n" not in err and err.startswith("minispec: ")


# ---- heads ---------------------------------------------------------------------------------------

EAGLE3 = ROOT / "weights" / "eagle3"


@pytest.fixture
def toy_for_smollm2(monkeypatch):
    """The toy answers the prompts, one of each kind."""
    monkeypatch.setattr(accepted, "find_smollm2", lambda: paths.TOY)
    monkeypatch.setattr(accepted, "PER_KIND", 1)


def test_a_folder_with_a_head_gets_its_accepted_length(toy_for_smollm2, tmp_path, capsys):
    file, found = tmp_path / "anna.json", {}
    for seed in 0, 1:
        with pytest.raises(SystemExit) as exit_:
            score.main([str(EAGLE3), f"--seed={seed}", f"--json={file}"])
        found[seed] = json.loads(file.read_text())
        assert exit_.value.code == 0 and list(found[seed]) == ["name", "seed", *accepted.DRAFTS]
    length, tree = (found[0][name] for name in accepted.DRAFTS)
    line = capsys.readouterr().out.splitlines()[2]
    assert line == f"eagle3: {length:.3f} tokens per pass ({tree:.3f} with a tree of 16)"
    assert 1 < length < 6 and 1 < tree and found[0] != found[1] | {"seed": 0}


def test_a_seed_chooses_as_many_prompts_of_each_kind(monkeypatch):
    _, tokenizer = load_once(paths.TOY, "float64", "cpu")
    monkeypatch.setattr(accepted, "PER_KIND", 50)
    with pytest.raises(ValueError, match="larger than population"):
        accepted.prompts(tokenizer, 0)
    monkeypatch.undo()
    first, other = (accepted.prompts(tokenizer, seed) for seed in (0, 1))
    assert len(first) == len(other) == 10 and first != other == accepted.prompts(tokenizer, 1)


def test_what_is_no_head_for_the_model_gets_no_score(toy_for_smollm2, tmp_path, capsys):
    file = tmp_path / "anna.json"
    for folder, reason in (ROOT / "weights" / "mtp", "draft_vocab_size"), (tmp_path, "config.json"):
        with pytest.raises(SystemExit) as exit_:
            score.main([str(folder), f"--json={file}"])
        result = json.loads(file.read_text())
        file.unlink()
        assert exit_.value.code == 1 and result["accepted length"] is None
        assert reason in result["reason"] and "no score; " in capsys.readouterr().out


# ---- leaderboard ---------------------------------------------------------------------------------


def result(name: str, value: float | None, seed: int = 0, **more) -> dict:
    scores = {} if value is None else {"EPYC": value, "H200": value}
    return {"name": name, "seed": seed, "score": value} | scores | more


def write(folder, *results: dict):
    folder.mkdir(exist_ok=True)
    for i, one in enumerate(results):
        (folder / f"{i}.json").write_text(json.dumps(one))


def test_the_leaderboard_is_sorted_and_escaped(tmp_path):
    lost = result("Dan", None, reason="LOSS in <exact>")
    names = "Ben", "<script>alert(1)</script>", "Cleo & co"
    write(tmp_path / "scores", lost, *map(result, names, (1.5, 2.25, 1.5)), result("Eve", 1.25))
    out = tmp_path / "new" / "board.html"
    leaderboard.main([str(tmp_path / "scores"), str(out)])
    page = out.read_text(encoding="utf-8")
    rows = [row.split("<td>")[1:] for row in page.splitlines() if row.startswith("<tr><td>")]
    assert rows == [
        ["1", "&lt;script&gt;alert(1)&lt;/script&gt;", "2.250", "2.250", "2.250"],
        ["2", "Ben", "1.500", "1.500", "1.500"], ["2", "Cleo &amp; co", "1.500", "1.500", "1.500"],
        ["4", "Eve", "1.250", "1.250", "1.250"], ["", "Dan", "no score: LOSS in &lt;exact&gt;"],
    ]  # fmt: skip
    assert "<th>score<th>EPYC<th>H200" in page
    assert not re.search("https?:|src=|url\\(|@import|<link", page)


@pytest.mark.parametrize(
    "results, message",
    [
        ([], "has no .json files"), ([[]], "must hold a JSON object"),
        ([{}], "0.json is not a result"), ([{"name": "x", "seed": 0}], "is not a result"),
        ([result("x", 2)], "is not a result"), ([result("x", float("nan"))], "is not a result"),
        ([result(["x"], 1.5)], "is not a result"),
        ([result("x", 1.5), result("y", 1.5, seed=1)], "1.json has another seed than "),
    ],
)  # fmt: skip
def test_what_is_no_result_is_one_line(results, message, tmp_path, capsys):
    write(tmp_path / "scores", *results)
    with pytest.raises(SystemExit) as exit_:
        leaderboard.main([str(tmp_path / "scores"), str(tmp_path / "board.html")])
    err = capsys.readouterr().err.strip()
    assert exit_.value.code == 2 and "\n" not in err and message in err
    assert not (tmp_path / "board.html").exists()


def test_heads_have_a_board_of_their_own(tmp_path, capsys):
    head = {"name": "Fay", "seed": 0, "accepted length": 1.5, "tree of 16": 2.25}
    lost = {"name": "Guy", "seed": 0, "accepted length": None, "reason": "no head"}
    write(tmp_path / "heads", lost, head)
    leaderboard.main([str(tmp_path / "heads"), str(tmp_path / "board.html")])
    page = (tmp_path / "board.html").read_text(encoding="utf-8")
    assert "<th>accepted length<th>tree of 16" in page and "prompts of seed 0" in page
    assert "<tr><td>1<td>Fay<td>1.500<td>2.250\n<tr><td><td>Guy<td>no score: no head" in page
    write(tmp_path / "both", result("Eve", 1.25), head)
    with pytest.raises(SystemExit):
        leaderboard.main([str(tmp_path / "both"), str(tmp_path / "other.html")])
    assert "1.json has no score, unlike " in capsys.readouterr().err


def test_on_a_full_disk_the_earlier_board_stays(tmp_path, capsys):
    write(tmp_path / "scores", result("Eve", 1.25))
    (tmp_path / "board.html").write_text("earlier")
    with file_limit(100), pytest.raises(SystemExit):
        leaderboard.main([str(tmp_path / "scores"), str(tmp_path / "board.html")])
    assert "board.html cannot be written: [Errno 27] File too large\n" in capsys.readouterr().err
    assert (tmp_path / "board.html").read_text() == "earlier"


def test_make_passes_names_on():
    command = ["make", "--no-print-directory", "-n", "score", "IMPL=my decoder.py", "SEED=3"]
    printed = subprocess.check_output([*command, "JSON=a b.json"], cwd=ROOT, text=True)
    words = shlex.split(printed.split("lessons.assignments.score")[1].replace("\\\n", " "))
    assert words == ["my decoder.py", "--seed=3", "--json=a b.json"]
