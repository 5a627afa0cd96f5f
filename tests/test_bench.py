"""The benchmark counts what it says, compares with plain decoding, and writes its contract."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import random_model
from test_generate import TOKENIZER, byte_model

from minispec import advise, bench, cost
from minispec.methods.autoregressive import autoregressive
from minispec.certify import random_head, random_heads
from minispec.checkpoint import save
from minispec.generate import decode, stream
from minispec.methods.lookahead import memory_of
from minispec.model import count_parameters
from minispec.replay import SHAPES, decoded, random_weights, replayed
from minispec.sampling import Sampling, Seeded
from minispec.timing import PARTS, split
from minispec.tree import Step, Tree


def test_alpha_counts_tried_drafts_only():
    """4 drafted, 1 accepted: 2 were tried. 2 drafted and accepted: 2 were tried. None drafted."""

    class Rounds:
        rounds = [
            Step([1, 9], Tree.chain(0, [1, 2, 3, 4]), [0, 1]),
            Step([1, 2, 9], Tree.chain(0, [1, 2]), [0, 1, 2]),
            Step([9], Tree.chain(0, []), [0]),
        ]

    assert bench.alpha([Rounds()]) == 3 / 4
    Rounds.rounds = Rounds.rounds[2:]
    assert bench.alpha([Rounds()]) is None


def test_a_method_that_differs_from_plain_decoding_is_counted():
    model = random_model()
    a, b = (decode(model, None, [x], max_new_tokens=5) for x in (1, 2))
    machine = bench.Machine(floor=1e-3, curve=[0.0, 1.0, 1.1], pass_seconds=2e-3, draft=None)
    row = bench.summarise("stories_en", "x", [a, b], [a, a], machine)
    assert row.differing == 1 and row.tokens_per_pass == 1.0 and row.predicted_speedup is None
    row = bench.summarise("stories_en", "x", [a], [a], machine, k=3, temperature=0.7)
    assert row.speedup == row.round_cost == 1.0 and row.differing is None


def test_a_round_costs_what_all_prompts_took_together():
    """Three prompts of 3 rounds each, which all take 2 plain ones: one whose guesses are right, two
    whose are wrong. By the median of the three a round would cost 4.7."""
    lone = Step([0], Tree.chain(0, []), [0])
    plain, own = (
        [
            SimpleNamespace(decode_seconds=seconds, tokens=[0] * n, rounds=[lone] * 3,
                            stats={"extra_parameters": 0}, cache=random_model().new_cache())
            for seconds, n in each
        ]
        for each in (((15.0, 15), (3.0, 3), (3.0, 3)), ((6.0, 15), (6.0, 3), (6.0, 3)))
    )  # fmt: skip
    machine = bench.Machine(1e-3, [0.0, 1.0], 2e-3, None)
    row = bench.summarise("x", "medusa", own, plain, machine, temperature=0.7)
    assert (row.least, row.speedup, row.most) == (0.5, 0.5, 2.5) and row.overall == 21 / 18
    assert row.tokens_per_pass == 21 / 9 and abs(row.round_cost - 2.0) < 1e-12


def test_a_losing_method_is_told_why():
    machine = bench.Machine(1e-3, [0.0, 1.0], 2e-3, None)
    model = random_model()
    run = decode(model, None, [1], max_new_tokens=5)
    parts = dict.fromkeys(PARTS, 1.0)
    plain = bench.summarise("x", "autoregressive", [run], [run], machine, parts=parts)
    for part in PARTS:
        row = replace(plain, method="slow", overall=0.5, split=parts | {part: 6.0})
        assert bench.BLAME[part] in bench.reason(row, plain)
    assert "loses" not in bench.reason(replace(plain, method="fast", overall=2.0), plain)


def test_the_command_writes_json_and_refuses_nonsense(tmp_path, capsys):
    save(byte_model(), TOKENIZER, tmp_path)
    options = ["--model", str(tmp_path), "--draft", str(tmp_path), "--heads", "", "--mtp", "",
               "--device", "cpu"]  # fmt: skip
    short = ["--max-new-tokens", "6", "--k", "2", "--dtype", "float64"]
    short += ["--prompts", "2"]
    bench.main([*options, *short, "--json", "--plots", str(tmp_path / "plots")])
    out = json.loads(capsys.readouterr().out)
    assert len(list((tmp_path / "plots").glob("*.png"))) == 3
    rows = {row["method"]: row for row in out["rows"] if not row["temperature"]}
    sampled = {row["method"] for row in out["rows"] if row["temperature"] == 0.7}
    assert sampled == rows.keys() and out["machine"]["curve"][1] == 1.0
    for row in rows.values():
        assert set(row["split"]) == set(PARTS) and row["over_floor"] > 0
    assert rows["autoregressive"]["speedup"] == 1.0 and rows["autoregressive"]["alpha"] is None
    assert rows["speculative k=2"]["alpha"] == 1.0  # the draft is the target
    assert rows["speculative k=2"]["predicted_tokens_per_pass"] == 3.0
    assert all(row["differing"] == 0 for row in rows.values())
    bench.main([*options, *short, "--temperature", "0", "--methods", "lookahead"])
    text = capsys.readouterr().out
    assert "tokens a pass for a round that costs" in text and "speculative" not in text
    for wrong in (
        ["--k", "0"], ["--draft", "nowhere"], ["--data", str(tmp_path)], ["--temperature", "x"],
        ["--temperature", "-1"], ["--kind", "all"], ["--advise", "--shape", "qwen2.5-0.5b"],
        ["--against", "transformers", "--temperature", "1"], ["--acceptance", "2"],
        ["--acceptance", "0.5"], ["--shape", "qwen2.5-0.5b", "--acceptance", "2"],
        ["--shape", "qwen2.5-0.5b", "--data", str(tmp_path)],
        ["--shape", "qwen2.5-0.5b", "--model", str(tmp_path)], ["--stored", "float32"],
        ["--shape", "smollm2-135m", "--stored", "float32", "--dtype", "bfloat16"],
        ["--methods", "medusa"], ["--shape", "qwen2.5-0.5b", "--methods", "medusa"],
        ["--advise", "--json"], ["--advise", "--temperature", "0"],
        ["--questions", "q", "--answers", "a", "--temperature", "0,1"],
        ["--questions", "nowhere"], ["--questions", "nowhere", "--answers", str(tmp_path)],
        ["--plots", "/dev/null/x"], ["--repeat", "0"], ["--advise", "--repeat", "3"],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as caught:
            bench.main([*options, *wrong])
        assert caught.value.code == 2 and capsys.readouterr().err.startswith("minispec: ")


def test_of_repeated_runs_that_of_the_middle_speed_counts(monkeypatch):
    asked, seconds = [], iter([9, 9, 5, 1, 3, 4, 1, 2])  # the first of each warms up

    def decode(model, tokenizer, prompt, method, **options):
        asked.append((prompt, method))
        return SimpleNamespace(tokens=[7, 7], decode_seconds=next(seconds))

    monkeypatch.setattr(bench, "decode", decode)
    methods = {"autoregressive": {}, "lookahead (5, 4, 5)": {}}
    runs = bench.measure(None, None, methods, ["p"], 2, 0.0, repeat=3)
    assert [run.decode_seconds for each in runs.values() for run in each] == [3, 2]
    assert asked == [("p", "autoregressive"), ("p", "lookahead")] * 4


@pytest.fixture
def corpus(tmp_path):
    """Options for a small model and a corpus of 8 held-out stories, the last equal to the first."""
    data = tmp_path / "data"
    data.mkdir()
    stories = [f"{i} {i * i} birds flew over the sea." for i in range(301)]
    (data / "stories_en.txt").write_text("<|endoftext|>\n".join(stories + stories[:1] * 50))
    save(byte_model(), TOKENIZER, tmp_path / "model")
    return ["--model", str(tmp_path / "model"), "--draft", "", "--heads", "", "--mtp", "",
            "--device", "cpu", "--dtype", "float64", "--max-new-tokens", "20", "--temperature",
            "0", "--methods", "lookahead-auto", "--data", str(data)]  # fmt: skip


def test_lookahead_after_an_earlier_text(corpus, tmp_path, capsys, monkeypatch):
    """What its memory knows of the text it knows in every run, and of no prompt's output more."""
    file, given, decoded = tmp_path / "earlier.txt", [], bench.decode
    file.write_text("7 49 birds flew over the sea.", encoding="utf-8")
    monkeypatch.setattr(bench, "decode", lambda *a, **o: given.append(o) or decoded(*a, **o))
    bench.main([*corpus, "--prompts", "2", "--earlier", str(file), "--json"])
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert list(rows) == ["autoregressive", "lookahead-auto", "lookahead-auto earlier"]
    assert all(row["differing"] == 0 for row in rows.values())
    first, *rest = [options["earlier"] for options in given if "earlier" in options]
    assert len(rest) == 2 and all(each is first for each in rest)
    known = memory_of([TOKENIZER.encode(file.read_text())])
    assert first.counts == known.counts
    bench.main([*corpus, "--prompts", "2", "--json"])
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--earlier", "nowhere.txt"], "--earlier nowhere.txt cannot be read"),
        (["--earlier", "/dev/null"], "--earlier /dev/null: the file holds no text"),
        (["--earlier", "x", "--shape", "qwen2.5-0.5b"], "leave --earlier out"),
        (["--earlier", "x", "--advise"], "leave --earlier out"),
        (["--earlier", "x", "--methods", "jacobi"], "add it to --methods"),
    ],
)
def test_earlier_texts_where_they_cannot_be(corpus, capsys, arguments, message):
    options = corpus[:-4] + (corpus[-4:] if "--shape" not in arguments else corpus[-2:])
    if "--shape" in arguments or "--advise" in arguments:
        options = [o for o in options if o not in ("--temperature", "0")]
    with pytest.raises(SystemExit) as caught:
        bench.main([*options, *arguments])
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_fewer_of_the_benchmark_s_own_prompts(corpus, capsys):
    bench.main([*corpus[:-2], "--prompts", "1"])
    assert "stories_en, 1 prompts" in capsys.readouterr().out


def test_the_parts_of_a_round_add_up_to_it():
    """And a part that is slowed down is the one that grows."""
    model, draft = random_model(), random_model(1)
    begin = partial(stream, model, None, [1, 2, 3], "speculative", max_new_tokens=40, draft=draft)
    run, parts = split("speculative", begin)
    assert run.finish_reason == "length" and min(parts.values()) >= 0
    assert sum(parts.values()) <= run.decode_seconds / (len(run.rounds) - 1)
    slow = draft.layers
    draft.layers = lambda *x: (
        [torch.linalg.inv(torch.rand(150, 150)) for _ in range(5)] and slow(*x)
    )
    _, slower = split("speculative", begin)
    grown = {part: slower[part] - parts[part] for part in PARTS}
    assert max(grown, key=grown.get) == "draft"
    heads = random_heads(model, 0)
    begin = partial(stream, model, None, [1, 2], "medusa", max_new_tokens=9, heads=heads)
    assert split("medusa", begin)[1]["accept"] > 0


def test_replayed_drafts_are_right_as_often_as_asked_and_change_nothing():
    model = random_model(vocab_size=500)
    prompt, sampling = [1, 2, 3], Sampling()
    text, rounds, _ = decoded(autoregressive(model, prompt, sampling, Seeded(0)), 120)
    assert rounds == 120
    for acceptance, least, most in ((0.0, 1.0, 1.0), (0.7, 1.9, 3.6), (1.0, 4.9, 5.0)):
        steps = replayed(model, prompt, sampling, Seeded(0), text=text, k=4, acceptance=acceptance)
        tokens, rounds, _ = decoded(steps, 120)
        assert tokens[:120] == text[:120] and least <= len(tokens) / rounds <= most


def test_shapes_have_their_sizes(monkeypatch, capsys):
    """In millions of parameters, as their cards say."""
    for name, millions in (("smollm2-135m", 134.5), ("qwen2.5-0.5b", 494.0),
                           ("llama-3.2-1b", 1235.8), ("llama-2-7b", 6738.4)):  # fmt: skip
        with torch.device("meta"):
            model = bench.Transformer(SHAPES[name])
        assert abs(count_parameters(model) / 1e6 - millions) < 0.1
    small = replace(SHAPES["qwen2.5-0.5b"], layers=2, hidden_size=64, intermediate_size=96,
                    vocab_size=300, heads=4, kv_heads=2, head_dim=16)  # fmt: skip
    model = random_weights(small, torch.float32, torch.device("cpu"))
    assert torch.isfinite(model.logits(model([1, 2, 3]))).all()
    monkeypatch.setitem(SHAPES, "qwen2.5-0.5b", small)
    bench.main(["--shape", "qwen2.5-0.5b", "--max-new-tokens", "8", "--device", "cpu", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["floor_ms"] > 0 and found["pass_ms"] > 0
    assert [row["k"] for row in found["rows"]] == [1, 2, 4, 8, 16]
    assert all(1 <= row["tokens_per_pass"] <= row["k"] + 1 for row in found["rows"])
    int8 = random_weights(small, torch.float32, torch.device("cpu"), quantize=True)
    assert 3.5 < cost.bytes_per_pass(model) / cost.bytes_per_pass(int8) < 4.1
    for stored in torch.bfloat16, torch.float32:
        model = random_weights(small, torch.float32, torch.device("cpu"), stored=stored)
        model.undo()
        same = [torch.equal(p, p.bfloat16()) for p in model.parameters() if p.dim() == 2]
        assert all(same) if stored == torch.bfloat16 else not any(same)


def test_questions_are_answered_in_spec_benchs_format(tmp_path, capsys):
    save(byte_model(), TOKENIZER, tmp_path)
    questions = tmp_path / "questions.jsonl"
    turns = [["One.", "Two."], ["x" * 5000]]
    lines = [{"question_id": i, "category": "c", "turns": t} for i, t in enumerate(turns)]
    questions.write_text("\n".join(map(json.dumps, lines)))
    options = ["--model", str(tmp_path), "--draft", "", "--heads", "", "--mtp", "", "--methods",
               "prompt-lookup", "--questions", str(questions), "--answers", str(tmp_path / "a"),
               "--max-new-tokens", "7", "--device", "cpu"]  # fmt: skip
    bench.main(options)
    out = capsys.readouterr().out
    assert "1 of 2 questions are longer than the context" in out
    for name in ("autoregressive", "prompt-lookup"):
        (line,) = map(json.loads, (tmp_path / "a" / f"{name}.jsonl").read_text().splitlines())
        (choice,) = line["choices"]
        assert line["question_id"] == 0 and len(choice["turns"]) == len(choice["wall_time"]) == 2
        assert sum(choice["accept_lengths"]) >= sum(choice["new_tokens"])
        assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
    good = json.dumps({"question_id": 1, "turns": ["a\u2028b"]}, ensure_ascii=False) + "\n\n"
    for wrong in (
        '{"question_id": 1}', '{"question_id": 1, "turns": ["\\ud800"]}', "{", '"x"',
        '{"question_id": 1, "turns": "abc"}',
    ):  # fmt: skip
        questions.write_text(good + wrong)
        with pytest.raises(SystemExit):
            bench.main(options)
        assert "line 3: must be an object with question_id and" in capsys.readouterr().err
    questions.write_text("\n")
    with pytest.raises(SystemExit):
        bench.main(options)
    assert "holds no questions" in capsys.readouterr().err


def test_folders_that_cannot_be_written_are_refused_before_any_work(tmp_path, capsys):
    save(byte_model(), TOKENIZER, tmp_path)
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question_id": 1, "turns": ["a"]}')
    (tmp_path / "autoregressive.jsonl").mkdir()
    (tmp_path / "speedup.png").mkdir()
    options = ["--model", str(tmp_path), "--draft", "", "--heads", "", "--mtp", "", "--device",
               "cpu", "--methods", "jacobi"]  # fmt: skip
    for more in (
        ["--questions", str(questions), "--answers", str(tmp_path)], ["--plots", str(tmp_path)],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as caught:
            bench.main([*options, *more])
        assert caught.value.code == 2 and "cannot be written" in capsys.readouterr().err


def test_advice_follows_the_machine(capsys):
    """A method whose drafts cost nothing gets long ones; one whose passes grow dear gets short."""
    model = random_model(context=200)
    head = random_head(model, 0)
    for curve, fits in (
        ([0.0, *[1.0] * 64], range(1, 7)),
        ([0.0, *[n**4 for n in range(1, 65)]], [1]),
    ):
        cost.known[model] = {}
        cost.once(model, "curve", lambda curve=curve: curve)
        choices = list(advise.CHOOSERS["fastmtp"](model, None, {"head": head}, [[1, 2], [3]], 30))
        assert [c.words for c in choices] == [f"k = {k}" for k in range(1, 7)]
        best = max(choices, key=lambda c: c.speedup)
        assert best.options["k"] in fits
    heads = random_heads(model, 0)  # without accuracies no tree can be grown beforehand
    choices = list(advise.CHOOSERS["medusa"](model, None, {"heads": heads}, [[1, 2], [3]], 30))
    assert [c.words for c in choices] == ["tree = auto"]
    heads.accuracy, heads.tree = torch.full((4, 10), 0.1), [(0,), (0, 0)]
    choices = list(advise.CHOOSERS["medusa"](model, None, {"heads": heads}, [[1, 2], [3]], 30))
    assert len(choices) == 1 + len(advise.SIZES) and all(c.speedup > 0 for c in choices)
    for method in ("lookahead", "lookahead-auto"):  # each tries its own settings
        choices = advise.CHOOSERS[method](model, None, {}, [[1, 2], [3]], 8)
        assert {choice.method for choice in choices} == {method}
    advise.advise(model, None, {"fastmtp k=2": {"head": head, "k": 2}}, {"x": [[1], [2]]}, 20)
    assert "predicted" in capsys.readouterr().out
