"""The benchmark counts what it says, compares with plain decoding, and writes its contract."""

import json
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import random_model
from test_generate import TOKENIZER, byte_model

from minispec import bench
from minispec.checkpoint import save
from minispec.fast import quicken
from minispec.generate import decode, stream
from minispec.heads import save_medusa, save_mtp
from minispec.methods.autoregressive import autoregressive
from minispec.model import Transformer, count_parameters
from minispec.replay import SHAPES, decoded, random_weights, replayed
from minispec.sampling import Sampling, Seeded
from minispec.timing import PARTS, split
from minispec.toys import random_head, random_heads
from minispec.tree import Step, Tree

bench.COPIED = 2**20  # it does not matter how well a copy is timed


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
    assert row.speedup == row.overall == 1.0 and row.differing is None


def test_a_round_costs_what_all_prompts_took_together():
    """Three prompts of 3 rounds each, which all take 2 plain ones: one whose guesses are right, two
    whose are wrong. By the median of the three a round would cost 4.7."""
    lone = Step([0], Tree.chain(0, []), [0])
    plain, own = (
        [
            SimpleNamespace(decode_seconds=seconds, tokens=[0] * n, rounds=[lone] * 3,
                            stats={"extra_parameters": 0})
            for seconds, n in each
        ]
        for each in (((15.0, 15), (3.0, 3), (3.0, 3)), ((6.0, 15), (6.0, 3), (6.0, 3)))
    )  # fmt: skip
    machine = bench.Machine(1e-3, [0.0, 1.0], 2e-3, None)
    row = bench.summarise("x", "medusa", own, plain, machine, temperature=0.7)
    assert (row.least, row.speedup, row.most) == (0.5, 0.5, 2.5) and row.overall == 21 / 18
    assert row.tokens_per_pass == 21 / 9
    assert "2.33 tokens a pass for a round that costs 2.00 plain ones" in bench.reason(row, row)


def test_a_losing_method_is_told_why():
    machine = bench.Machine(1e-3, [0.0, 1.0], 2e-3, None)
    model = random_model()
    run = decode(model, None, [1], max_new_tokens=5)
    parts = dict.fromkeys(PARTS, 1.0)
    plain = bench.summarise("x", "autoregressive", [run], [run], machine, parts=parts)
    for part in PARTS:
        row = replace(plain, method="slow", overall=0.5, split=parts | {part: 6.0})
        assert f"it loses most by {part}" in bench.reason(row, plain)
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
    shape = ["--shape", "qwen2.5-0.5b"]
    for wrong in ["--acceptance", "2"], ["--model", str(tmp_path)], ["--methods", "medusa"]:
        with pytest.raises(SystemExit) as caught:
            bench.main([*shape, *wrong])
        assert caught.value.code == 2 and capsys.readouterr().err.startswith("minispec: ")
    for wrong in (
        ["--k", "0"], ["--draft", "nowhere"], ["--data", str(tmp_path)], ["--temperature", "x"],
        ["--temperature", "-1"], ["--kind", "all"], ["--repeat", "0"], ["--methods", "medusa"],
        ["--against", "transformers", "--temperature", "1"], ["--acceptance", "2"],
        ["--acceptance", "0.5"], ["--plots", "/dev/null/x"], ["--questions", "nowhere"],
        ["--questions", "nowhere", "--answers", str(tmp_path)],
        ["--questions", "nowhere", "--answers", str(tmp_path), "--json"],
        ["--questions", "q", "--answers", "a", "--temperature", "0,1"],
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


def test_prompts_are_a_corpus_s_held_out_beginnings_or_our_own(tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    stories = [f"{i} {i * i} birds flew over the sea." for i in range(101)]
    (data / "stories_en.txt").write_text("<|endoftext|>\n".join(stories))
    save(byte_model(), TOKENIZER, tmp_path / "model")
    options = ["--model", str(tmp_path / "model"), "--device", "cpu", "--max-new-tokens", "5",
               "--temperature", "0", "--methods", "jacobi"]  # fmt: skip
    bench.main([*options, "--prompts", "1"])
    assert "stories_en, 1 prompts" in capsys.readouterr().out
    bench.main([*options, "--data", str(data)])
    assert "stories_en, 3 prompts" in capsys.readouterr().out


def test_every_method_emits_what_plain_decoding_does_in_int8(tmp_path, capsys):
    model = byte_model()
    save(model, TOKENIZER, tmp_path / "model")
    save_medusa(random_heads(model, 0), tmp_path / "heads", "", TOKENIZER, model.dtype)
    save_mtp(random_head(model, 0), tmp_path / "mtp", "", TOKENIZER, model.dtype, [1.0])
    folders = {"model": "model", "draft": "model", "heads": "heads", "mtp": "mtp"}
    paths = [part for flag, name in folders.items() for part in (f"--{flag}", str(tmp_path / name))]
    bench.main([*paths, "--device", "cpu", "--prompts", "1", "--max-new-tokens", "6", "--dtype",
                "float64", "--temperature", "0", "--quantize", "int8", "--json"])  # fmt: skip
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {"speculative k=auto", "medusa tree=auto", "fastmtp k=auto"} < rows.keys()
    assert all(row["differing"] == 0 for row in rows.values())


def test_the_parts_of_a_round_add_up_to_it():
    """And a part that is slowed down is the one that grows."""
    model, draft = random_model(), random_model(1)
    begin = partial(stream, model, None, [1, 2, 3], "speculative", max_new_tokens=40, draft=draft)
    run, parts = split("speculative", begin)
    assert run.finish_reason == "length" and min(parts.values()) >= 0
    assert sum(parts.values()) <= run.decode_seconds / (len(run.rounds) - 1)
    draft.model.register_forward_pre_hook(lambda *_: time.sleep(0.003))
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
            model = Transformer(SHAPES[name])
        assert abs(count_parameters(model) / 1e6 - millions) < 0.1
    small = replace(SHAPES["qwen2.5-0.5b"], layers=2, hidden_size=64, intermediate_size=96,
                    vocab_size=300, heads=4, kv_heads=2, head_dim=16)  # fmt: skip
    monkeypatch.setitem(SHAPES, "qwen2.5-0.5b", small)
    bench.main(["--shape", "qwen2.5-0.5b", "--max-new-tokens", "8", "--device", "cpu", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["floor"] > 0 and found["machine"]["pass_seconds"] > 0
    assert [row["k"] for row in found["rows"]] == [1, 2, 4, 8, 16]
    assert all(1 <= row["tokens_per_pass"] <= row["k"] + 1 for row in found["rows"])
    bench.main(["--shape", "qwen2.5-0.5b", "--max-new-tokens", "8", "--quantize", "int8"])
    assert "each right with probability 0.8" in capsys.readouterr().out


@pytest.mark.parametrize("tied", [True, False])
def test_a_pass_reads_all_weights_but_an_embedding_as_they_are_kept(tied):
    config = replace(SHAPES["smollm2-135m"], layers=2, vocab_size=300, tied=tied)
    model = random_weights(config, "float32", "cpu")
    assert torch.isfinite(model.logits(model([1, 2, 3]))).all()
    layers = count_parameters(model.model.layers)
    whole = bench.bytes_per_pass(model)
    assert whole == 4 * (layers + 300 * config.hidden_size)
    quicken(model, int8=True)
    assert 3.8 < whole / bench.bytes_per_pass(model) < 4


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
