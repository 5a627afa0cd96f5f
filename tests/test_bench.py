"""The benchmark: its statistics, its comparison with plain decoding, and its command line."""

import json
import subprocess
import sys
import time
from collections import Counter, namedtuple
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import (
    CHAT_TEMPLATE,
    ROOT,
    TOKENIZER,
    byte_model,
    byte_tokenizer,
    last_error_line,
    random_model,
)

from minispec import UserError, machine
from minispec.bench import __main__ as bench
from minispec.bench import measure, prompts, shapes, tables
from minispec.bench.measure import read_cpu_seconds
from minispec.bench.shapes import pass_work
from minispec.certify import __main__ as certify
from minispec.certify.toys import random_eagle3_head, random_medusa_heads, random_mtp_head
from minispec.checkpoints.eagle3 import save_eagle3
from minispec.checkpoints.heads import save_medusa, save_mtp, save_vocabulary
from minispec.checkpoints.load import save
from minispec.fast import optimize
from minispec.generate import __main__ as generate
from minispec.generate import decode
from minispec.methods import find_method
from minispec.methods.vocabulary import Language
from minispec.model import Transformer, count_parameters
from minispec.tree import Step, Tree

measure.COPY_BYTES, measure.MATMUL_SIZE = 2**20, 64  # precise timing does not matter here


@pytest.fixture(autouse=True)
def others(monkeypatch) -> SimpleNamespace:
    """What the benchmark believes that other processes use of the cores: before it measures, and
    while it measures one category after another (1 s on one core each)."""
    shares = SimpleNamespace(before=0.0, during=[])

    def readings():
        elapsed = busy = 0.0
        for i in range(100):
            yield elapsed, busy, 0.0
            share = shares.during[i // 2] if i // 2 < len(shares.during) else 0.0
            elapsed, busy = elapsed + 1, busy + share * (i % 2 == 0)

    times = readings()
    monkeypatch.setattr(measure, "others_share_now", lambda: shares.before)
    monkeypatch.setattr(measure, "read_cpu_seconds", lambda: next(times))
    return shares


def make_run(seconds: float, tokens: int, rounds: int, tree: Tree) -> SimpleNamespace:
    steps = [Step([0], tree, [0])] * rounds
    return SimpleNamespace(
        decode_seconds=seconds, tokens=[0] * tokens, rounds=steps, extra_parameters=0
    )


def rows_of(*repeats: tuple[list, list], temperature=0.0) -> list[dict]:
    """The table of plain decoding's and a method's runs, one pair of lists per repeat."""
    by_method = [dict(zip(("autoregressive", "medusa"), runs)) for runs in repeats]
    return measure.table_of("x", temperature, by_method, {"curve": [0.0, 1.0, 1.5, 4.0]})


def test_alpha_counts_only_tested_drafts():
    """4 drafted and 1 accepted: 2 tested. 2 drafted and both accepted: 2 tested. None drafted."""
    rounds = [
        Step([1, 9], Tree.chain(0, [1, 2, 3, 4]), [0, 1], {1: 0.9, 2: 0.2}),
        Step([1, 2, 9], Tree.chain(0, [1, 2]), [0, 1, 2], {1: 1.0, 2: 0.5}),
        Step([9], Tree.chain(0, []), [0]),
    ]
    assert measure.alpha([SimpleNamespace(rounds=rounds)]) == 3 / 4
    assert measure.alpha([SimpleNamespace(rounds=rounds[2:])]) is None


def test_runs_that_differ_from_plain_decoding_are_counted():
    model = random_model()
    a, b = (decode(model, None, [x], max_new_tokens=5) for x in (1, 2))
    assert rows_of(([a, a], [a, b]))[1]["differing"] == 1
    assert rows_of(([a, a], [a, a]), ([a, a], [b, b]))[1]["differing"] == 2
    row = rows_of(([a], [a]), temperature=0.7)[1]
    assert (row["speedup"], row["differing"], row["tokens_per_pass"]) == (1.0, None, 1.0)


@pytest.mark.parametrize(
    "tokens, seconds, tree, expected",
    [
        (12, 1.0, Tree.chain(0, [1]), "2.00 tokens per pass; a round costs 1.00 steps"),
        (6, 2.0, Tree.chain(0, [1]), "almost no draft token is accepted"),
        (12, 4.5, Tree.chain(0, [1, 2]), "its pass over 3 rows accounts for 4.00"),
        (12, 6.0, Tree.chain(0, [1]), "drafting and accepting account for 4.50"),
    ],
)
def test_the_main_reason_for_a_slowdown_is_given(tokens, seconds, tree, expected):
    plain = make_run(1.0, 6, 6, Tree.chain(0, []))
    assert expected in tables.reason(rows_of(([plain], [make_run(seconds, tokens, 6, tree)]))[1])


def test_speeds_are_medians_over_repeats_then_prompts(capsys):
    """Of three prompts, in three repeats in which plain decoding takes 1.0, 2.0 and 1.5 s."""
    chain, repeats = Tree.chain(0, [1]), []
    for seconds, speeds in (1.0, [1, 2, 4]), (2.0, [3, 2, 1]), (1.5, [2, 2, 4]):
        runs = [make_run(seconds / speed, 6, 3, chain) for speed in speeds]
        repeats.append(([make_run(seconds, 6, 6, chain)] * 3, runs))
    plain, row = rows_of(*repeats)
    assert (row["speedup"], row["min"], row["max"]) == (2.0, 2.0, 4.0)
    assert row["mean"] == pytest.approx(8 / 3)
    assert row["half_range"] == pytest.approx((8 / 3 - 2) / 2)
    assert plain["tokens_per_second"] == pytest.approx(6 / 1.5)
    # seconds of the prompts, by repeat: 1, 0.5, 0.25; 2/3, 1, 2; 0.75, 0.75, 0.375
    assert row["tokens_per_second"] == pytest.approx(6 / 0.75)
    assert (row["prompts"], row["repeats"], row["tokens_per_pass"]) == (3, 3, 2.0)
    tables.show([plain, row])
    headings, *_, cells, reason = capsys.readouterr().out.strip().splitlines()
    assert headings.split()[1:5] == ["speedup", "(min-max)", "mean", "±"] and "2.00" in reason
    assert cells.split()[1:5] == ["2.00", "(2.00-4.00)", "2.67", "0.33"]
    assert rows_of(repeats[0])[1]["half_range"] is None  # unknown


def test_a_repeat_is_a_whole_round_of_methods(weights, monkeypatch, capsys):
    calls = []

    def recorded(model, tokenizer, prompt, *, method, **options):
        calls.append((find_method(method).name, prompt[0]))
        return decode(model, tokenizer, prompt, method=method, **options)

    monkeypatch.setattr(measure, "decode", recorded)
    bench.main(options_of(weights, "--methods", "jacobi", "--prompts", "2", "--repeats", "2"))
    rounds = [method for method, _ in calls]
    assert rounds == ["autoregressive", "jacobi"] * 6  # with a warm-up in each repeat
    first, second = (TOKENIZER.encode(prompts.PROMPTS[i])[0] for i in (0, 4))
    assert [prompt for _, prompt in calls[::2]] == 2 * [first, first, second]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A model with a draft (itself), Medusa heads, a FastMTP and an EAGLE-3 head next to it."""
    folder, model = tmp_path_factory.mktemp("weights"), byte_model()
    for name in "target", "draft":
        save(model, TOKENIZER, folder / name)
    heads = random_medusa_heads(model, 0)
    heads.accuracy = torch.full((4, 10), 0.05)
    save_medusa(heads, folder / "medusa", "", TOKENIZER, model.dtype)
    save_mtp(random_mtp_head(model, 0), folder / "mtp", "", TOKENIZER, model.dtype, [1.0])
    save_eagle3(random_eagle3_head(model, 0), folder / "eagle3", "", TOKENIZER, model.dtype)
    return folder


def options_of(weights, *more: str) -> list[str]:
    return ["--model", str(weights / "target"), "--device", "cpu", "--dtype", "float64",
            "--prompts", "1", "--max-new-tokens", "6", *more]  # fmt: skip


def test_every_method_has_a_row_and_the_output_of_plain_decoding(weights, capsys):
    bench.main(options_of(weights, "--k", "2", "--temperature", "0,0.7", "--quantize", "int8",
                          "--json"))  # fmt: skip
    out = json.loads(capsys.readouterr().out)
    assert out["machine"]["curve"][1] == 1.0
    rows = {row["method"]: row for row in out["rows"] if not row["temperature"]}
    assert {row["method"] for row in out["rows"] if row["temperature"] == 0.7} == rows.keys()
    auto = "speculative", "prompt-lookup", "fastmtp", "hybrid", "eagle3"
    trees = {"medusa", "medusa tree=auto", "eagle3 tree=60"}
    assert trees | {f"{name} k=auto" for name in auto} < rows.keys()
    assert all(row["differing"] == 0 for row in rows.values())
    assert rows["autoregressive"]["speedup"] == 1.0 and rows["autoregressive"]["acceptance"] is None
    assert rows["speculative k=2"]["acceptance"] == 1.0  # the draft is the target
    assert rows["speculative k=2"]["by_step"] == [1.0, 1.0]
    assert rows["medusa"]["extra_parameters"] > 0
    assert {row["repeats"] for row in out["rows"]} == {3}


def test_rows_can_be_selected_and_prompts_are_evenly_spaced(weights, monkeypatch, tmp_path):
    file, held_out = tmp_path / "chat.jsonl", [[i] for i in range(1, 8)]
    rows = [{"prompt": prompt, "file": file} for prompt in held_out]
    monkeypatch.setattr(prompts, "read_split", lambda *_: ([], rows))
    methods = "fastmtp k=2,hybrid tree=5,lookahead (5,4,5),medusa tree=32,hybrid k=auto,eagle3 k=5"
    args = bench.parse(options_of(weights, "--generated", str(file), "--methods", methods))
    model, tokenizer = bench.load(args.model, "float32", "cpu")
    for args.prompts, indices in (1, [0]), (2, [0, 3]), (3, [0, 2, 4]), (9, range(7)):
        chosen = bench.prompts_of(args, model, tokenizer)["chat"]
        assert chosen == [held_out[i] for i in indices]
    rows = bench.methods_of(args, model, tokenizer).keys()
    assert rows == {"autoregressive", "fastmtp k=2", "lookahead (5,4,5)", "medusa tree=32",
                    "hybrid k=auto", "hybrid tree=5", "eagle3 k=5"}  # fmt: skip


@pytest.mark.parametrize(
    "flag, its, others",
    [("--draft", "--draft", "speculative k=4"), ("--mtp", "--heads", "fastmtp k=2")],
)
def test_hybrid_drafts_as_in_generate(weights, tmp_path, flag, its, others):
    """The flag counts, not the head next to the model. The other methods share the drafter."""
    other = byte_model(3)
    save(other, TOKENIZER, tmp_path / "--draft")
    save_mtp(random_mtp_head(other, 5), tmp_path / "--mtp", "", TOKENIZER, other.dtype, [1.0])
    source = str(tmp_path / flag)
    args = bench.parse(options_of(weights, flag, source, "--methods", f"{others},hybrid k=3"))
    model, tokenizer = bench.load(args.model, "float64", "cpu")
    rows = bench.methods_of(args, model, tokenizer)
    generated = generate.parser().parse_args(["x", "--method", "hybrid", its, source])
    generate.check_flags(generated)
    expected = generate.drafting_options(generated, model, tokenizer)
    assert rows["hybrid k=3"].keys() == {*expected, "k", "method"}
    for name in {"draft", "head"} & expected.keys():
        assert rows["hybrid k=3"][name] is rows[others][name]
        for mine, other in zip(expected[name].parameters(), rows[others][name].parameters()):
            assert torch.equal(mine, other)


def test_each_vocabulary_size_has_a_row(weights, capsys, tmp_path):
    model = byte_model()
    save_mtp(random_mtp_head(model, 0), tmp_path, "", TOKENIZER, model.dtype, [1.0])
    language = Language(tuple(range(100)), tuple(range(100, 0, -1)))
    save_vocabulary({"bytes": language}, TOKENIZER, tmp_path / "vocabulary.json")
    bench.main(options_of(weights, "--methods", "fastmtp", "--mtp", str(tmp_path), "--json",
                          "--vocabulary-sizes", "5,none"))  # fmt: skip
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {"fastmtp k=3 of 5", "fastmtp k=3 of all"} < rows.keys()
    assert all(row["differing"] == 0 for row in rows.values())


def test_methods_without_a_drafter_have_no_row_unless_they_were_asked_for(tmp_path):
    save(byte_model(), TOKENIZER, tmp_path / "target")
    save_mtp(random_mtp_head(byte_model(), 0), tmp_path / "mtp", "", TOKENIZER, torch.float64,
             [1.0])  # fmt: skip
    for more in [], ["--vocabulary-sizes", "none"]:
        args = bench.parse(options_of(tmp_path, *more))
        model, tokenizer = bench.load(args.model, "float64", "cpu")
        rows = bench.methods_of(args, model, tokenizer)
        assert ("fastmtp k=3 of all" in rows) == bool(more) and "hybrid k=3" in rows
        assert not any(row.startswith(("speculative", "medusa", "eagle3")) for row in rows)
    for more in (["--methods", "medusa"], ["--vocabulary-sizes", "none", "--draft", "nowhere"]):
        args = bench.parse(options_of(tmp_path, *more))
        with pytest.raises(UserError, match="medusa needs heads=|no such directory: nowhere"):
            bench.methods_of(args, model, tokenizer)


def test_prompts_are_built_in_or_held_out_or_questions(weights, tmp_path, capsys):
    data, questions = tmp_path / "stories_en.txt", tmp_path / "questions.jsonl"
    stories = [f"{i} {i * i} birds flew over the sea." for i in range(101)]
    data.write_text("\n<|endoftext|>\n".join(stories))
    file = tmp_path / "chat.jsonl"
    rows = [{"kind": "x", "prompt": [i], "tokens": list(range(i, i + 99))} for i in range(1, 99)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    turns = [("qa", "W\u2028hy?"), ("maths", "x" * 5000), ("writing", "Dear"), ("stem", "What?")]
    objects = [{"category": c, "turns": [t]} for c, t in turns]
    lines = (json.dumps(question, ensure_ascii=False) for question in objects)
    questions.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    for source, table in (
        ([], "stories, 1 prompts"),
        (["--data", str(data), "--prompts", "9"], "stories_en, 3 prompts"),
        (["--generated", str(file)], "chat, 1 prompts"),
        (["--questions", str(questions)], "qa, 1 prompts"),
        (["--questions", str(questions), "--prompts", "3"], "multi-turn, 2 prompts"),
    ):
        bench.main(options_of(weights, "--methods", "jacobi", *source))
        out = capsys.readouterr()
        assert table in out.out and "speculative" not in out.out
        assert "tokens per pass; a round costs" in out.out
    assert "maths: prompts skipped because they exceed the context: 1" in out.err


@pytest.mark.parametrize(
    "wrong",
    [
        "--k 0", "--k 1e3", "--draft nowhere", "--data nowhere", "--temperature x", "--prompts 0",
        "--temperature -1", "--kind maths", "--methods magic", "--acceptance 2", "--acceptance 0.5",
        "--questions nowhere", "--questions . --data .",
        "--shape smollm2-135m --acceptance 2",
        "--shape smollm2-135m --methods medusa", "--shape magic", "--shape smollm2-135m --k 3",
        "--methods ,", "--vocabulary-sizes 9,x", "--vocabulary-sizes 9 --methods medusa",
        "--vocabulary-sizes 9 --methods fastmtp", "--repeats 0", "--json --markdown",
        "--markdown --temperature 0,0.7", "--draft x --methods medusa",
        "--heads x --methods hybrid", "--mtp x --methods speculative", "--k 3 --methods hybrid",
        "--draft x --mtp x --methods hybrid", "--eagle3 x --methods fastmtp",
    ],
)  # fmt: skip
def test_invalid_flags_are_reported_in_one_line(weights, wrong, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(options_of(weights, *wrong.split()))
    err = capsys.readouterr().err
    assert caught.value.code == 2 and err.startswith("minispec: ") and err.count("\n") == 1


def test_a_mistyped_method_is_answered_with_the_nearest(weights, capsys):
    line = last_error_line(capsys, lambda: bench.main(options_of(weights, "--methods", "medsua")))
    assert "did you mean medusa?" in line


@pytest.mark.parametrize(
    "main, arguments",
    [
        (bench.main, "--methods jacobi,"), (bench.main, "--data . --kind a,,b"),
        (bench.main, "--temperature 0,"), (bench.main, "--vocabulary-sizes ,9"),
        (bench.main, "--methods ,jacobi"), (certify.main, "--checks scoring,,tree"),
        (generate.main, "--prompt-ids 1,,2"), (generate.main, "--prompt-ids 1,2,"),
    ],
)  # fmt: skip
def test_an_empty_name_in_a_list_is_rejected(main, arguments, capsys):
    line = last_error_line(capsys, lambda: main(arguments.split()))
    assert "has an empty name before or after a comma" in line


def test_prompts_that_the_template_rejects_are_left_out(weights, tmp_path, capsys):
    """They do not make a file of questions malformed."""
    strict, questions, data = (tmp_path / name for name in ("strict", "q.jsonl", "talk.jsonl"))
    no_x = "{% if 'x' in messages[0]['content'] %}{{ raise_exception('no x') }}{% endif %}"
    save(byte_model(), byte_tokenizer(no_x + CHAT_TEMPLATE), strict)
    for texts, remaining, first in ("axbxc", 2, 2), ("xx", 0, 1):
        objects = [{"category": "qa", "turns": [text]} for text in texts]
        questions.write_text("\n" + "".join(json.dumps(question) + "\n" for question in objects))
        chats = [{"prompt": text} for text in texts for _ in range(50)]
        data.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        sources = ("--questions", questions, first + 1), ("--data", data, 50 * first - 49)
        for flag, file, line in sources:
            options = options_of(weights, "--model", str(strict), flag, str(file), "--methods",
                                 "autoregressive", "--prompts", "9")  # fmt: skip
            reason = f"documents skipped: 2; the first is {file} line {line}: the model's chat " \
                     "template rejects this conversation: no x"  # fmt: skip
            if remaining:
                bench.main(options)
                out = capsys.readouterr()
                assert reason in out.err and f"{len(texts) - 2} prompts" in out.out
            else:
                line = last_error_line(capsys, lambda: bench.main(options))
                assert line == f"minispec: there are no prompts: {reason}"


def test_an_end_token_known_only_to_the_tokenizer_is_reported(weights, tmp_path, capsys):
    save(byte_model(eos=(256,)), TOKENIZER, tmp_path)
    for more, listed in ([], False), (["--model", str(tmp_path)], True):
        bench.main(options_of(weights, "--methods", "autoregressive", *more))
        err = capsys.readouterr().err
        assert listed != ("the model's config does not list <|endoftext|>" in err)


@pytest.mark.parametrize(
    "flag, content, message",
    [("--questions", line, "must be an object with category and turns")
     for line in ('{"turns": ["a"]}', '{"category": "c", "turns": []}', "{", "3")]
    + [("--data", "<|endoftext|>\n", "there are no prompts")],
)  # fmt: skip
def test_unsuitable_text_is_rejected(weights, flag, content, message, tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_text('{"category": "c", "turns": ["a"]}\n' + content)
    wrong = options_of(weights, flag, str(file))
    assert message in last_error_line(capsys, lambda: bench.main(wrong))


def test_stats_show_where_the_time_of_a_round_goes(weights, monkeypatch, capsys):
    """A slow target, draft, policy and loop, in seconds per round: 0.04, 0.03, 0.02 and 0.01."""

    def propose():
        time.sleep(0.03)

    def decoder(prompt):
        prefill = compile("def prefill(): time.sleep(0.3)\nprefill()", "x.py", "exec")
        exec(prefill, {"time": time})  # does not count
        for _ in range(5):
            for file, seconds in ("a/model.py", 0.04), ("b/adaptive.py", 0.02):
                exec(compile(f"time.sleep({seconds})", file, "exec"), {"time": time})
            propose()
            time.sleep(0.01)

    monkeypatch.setattr(measure, "LOOK_SECONDS", 0.001)
    shares = measure.time_shares(decoder, [])
    assert shares.keys() == {"target pass", "drafts", "policy", "other Python"}
    assert sum(shares.values()) == pytest.approx(1) and 0.2 < shares["target pass"] < 0.6
    options = options_of(weights, "--methods", "fastmtp k=2", "--repeats", "1",
                         "--max-new-tokens", "60")  # fmt: skip
    bench.main([*options, "--stats", "--json"])
    for row in json.loads(capsys.readouterr().out)["rows"]:
        assert sum(row["time"].values()) == pytest.approx(1) and "target pass" in row["time"]
    for more, shown in (["--stats"], True), ([], False):
        bench.main([*options, *more])
        assert ("fastmtp k=2: time of a round: " in capsys.readouterr().out) == shown


def test_a_long_call_counts_as_long_as_it_takes():
    """Python looks at the stack only after a call of C code, even if several looks were due."""

    def propose(seconds):
        time.sleep(seconds)  # with looks in between

    def decoder(prompt):
        for _ in range(10):
            start = time.perf_counter()
            exec(compile("sum(range(3_000_000))", "a/model.py", "exec"))
            propose(time.perf_counter() - start)

    shares = measure.time_shares(decoder, [])
    assert 0.3 < shares["target pass"] < 0.7 and 0.3 < shares["drafts"] < 0.7


# ---- Markdown and JSON ---------------------------------------------------------------------------


def questions_file(folder, **counts: int):
    file = folder / "questions.jsonl"
    questions = [(name, f"{name} {i}") for name, n in counts.items() for i in range(n)]
    rows = [json.dumps({"category": name, "turns": [text]}) for name, text in questions]
    file.write_text("".join(row + "\n" for row in rows))
    return str(file)


def test_markdown_is_one_table_with_the_facts_below_it(weights, tmp_path, capsys, others):
    others.during = [0.04, 0.0]
    options = options_of(weights, "--methods", "fastmtp k=3,jacobi", "--markdown", "--repeats", "2",
                         "--questions", questions_file(tmp_path, chat=2, sums=1),
                         "--prompts", "2")  # fmt: skip
    bench.main(options)
    header, rule, *rows, blank, facts, _, command = capsys.readouterr().out.splitlines()
    assert header == "| tokens per pass, relative speed | chat | sums | mean |"
    assert rule == "|---|---|---|---|" and not blank
    assert [row.split(" | ")[0] for row in rows] == ["| `fastmtp k=3`", "| `jacobi`"]
    for row in rows:
        cells = [tuple(map(float, cell.split(", "))) for cell in row.strip("| ").split(" | ")[1:]]
        for chat, sums, mean in zip(*cells):
            assert (chat + sums) / 2 == pytest.approx(mean, abs=0.02)
    for fact in ("(chat), ", "(sums) tokens/s.", f"torch {torch.__version__}, commit ",
                 "Prompts: 3; repeats: 2.", "Lowest speedup of a single prompt: `fastmtp k=3` ",
                 "at most ", "differ from plain decoding's: 0.",
                 "Other processes used at most 4% of the cores."):  # fmt: skip
        assert fact in facts
    assert command == "    " + machine.command_line("minispec.bench", options)


def test_the_lowest_speedup_is_that_of_any_prompt():
    chain = Tree.chain(0, [1])
    runs = [[make_run(1 / x, 6, 6, chain) for x in speeds] for speeds in ([1, 1], [0.7, 3])]
    plain, row = ({**row, "others_share": None} for row in rows_of(tuple(runs)))
    about = {"processor": "P", "instructions": "I", "threads": 1, "versions": {"torch": "T"},
             "commit": None, "date": "2026-01-01T00:00", "command": "C"}  # fmt: skip
    better = row | {"kind": "y", "min": 0.9}
    text = tables.markdown([[plain, row], [plain | {"kind": "y"}, better]], about)
    assert "Lowest speedup of a single prompt: `medusa` 0.70." in text
    assert "commit unknown, 2026-01-01" in text
    assert "Half the range" not in text and "Other processes" not in text  # both are unknown


def test_json_says_what_was_measured_where(weights, capsys, others):
    others.during = [0.25]
    options = options_of(weights, "--methods", "jacobi", "--json")
    bench.main(options)
    out = json.loads(capsys.readouterr().out)
    assert out["about"]["command"] == machine.command_line("minispec.bench", options)
    assert {"date", "processor", "threads", "versions", "commit"} < out["about"].keys()
    assert [row["others_share"] for row in out["rows"]] == [0.25, 0.25]
    assert all(row["min"] <= row["mean"] <= row["max"] for row in out["rows"])


def test_the_commit_is_that_of_the_checkout(monkeypatch, tmp_path):
    def git(*command: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True,
                              capture_output=True, text=True)  # fmt: skip
        return done.stdout.strip()

    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine.commit() is None
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    git("tag", "v1")
    commit = git("rev-parse", "HEAD")
    assert machine.commit() == commit
    (tmp_path / "file").write_text("two")
    assert machine.commit() == commit + "+"
    monkeypatch.setattr(machine, "ROOT", tmp_path / "site-packages")  # inside another checkout
    (tmp_path / "site-packages").mkdir()
    assert machine.commit() is None


def test_the_shipped_prompts_are_twelve_of_each_kind():
    lines = (ROOT / "weights" / "smollm2" / "prompts.jsonl").read_text().splitlines()
    questions = [json.loads(line) for line in lines]
    kinds = Counter(question["category"] for question in questions)
    assert kinds == dict.fromkeys("chat sums code stories summaries".split(), 12)
    assert len({question["turns"][0] for question in questions}) == 60


# ---- other processes -----------------------------------------------------------------------------


def test_nothing_is_measured_on_a_busy_machine(weights, monkeypatch, capsys, others):
    others.before = 0.63
    options = options_of(weights, "--methods", "autoregressive")
    with monkeypatch.context() as patched:
        patched.setattr(generate, "optimize", lambda *_, **__: pytest.fail("products were timed"))
        line = last_error_line(capsys, lambda: bench.main(options))
        wrong = options_of(weights, "--methods", "fastmtp q=3")
        assert "no such method" in last_error_line(capsys, lambda: bench.main(wrong))
    assert "other processes used 63% of the cores, so nothing was measured" in line
    assert "--busy" in line
    bench.main([*options, "--busy"])
    out = capsys.readouterr()
    assert "stories, 1 prompts" in out.out and "used 63% of the cores, so speeds may" in out.err
    for others.before in 0.5, None:  # not above the limit; unknown
        bench.main(options)
        assert "other processes" not in capsys.readouterr().err


def test_a_category_measured_on_a_busy_machine_is_omitted(weights, tmp_path, capsys, others):
    others.during = [0.5, 0.7, 0.0]
    options = options_of(weights, "--methods", "jacobi", "--questions",
                         questions_file(tmp_path, chat=1, sums=1, code=1))  # fmt: skip
    with pytest.raises(SystemExit) as caught:
        bench.main(options)
    out = capsys.readouterr()
    assert caught.value.code == 2 and "chat, 1 prompts" in out.out
    assert "sums, 1 prompts" not in out.out and "code, 1 prompts" not in out.out
    line = out.err.splitlines()[-1]
    assert "while sums (temperature 0) was measured, other processes used 70% of the cores" in line
    assert "its table is omitted" in line and "--busy" in line


@pytest.mark.parametrize("flag", ["--markdown", "--json", "--busy"])
def test_a_busy_machine_and_other_output(weights, tmp_path, capsys, others, flag):
    """The Markdown table has the categories before; JSON is complete or not written."""
    others.during = [0.1, 0.7]
    options = options_of(weights, "--methods", "jacobi", flag, "--questions",
                         questions_file(tmp_path, chat=1, sums=1))  # fmt: skip
    if flag == "--busy":
        bench.main(options)
        out = capsys.readouterr()
        assert "sums, 1 prompts" in out.out and "70% of the cores, so speeds may" in out.err
        return
    with pytest.raises(SystemExit):
        bench.main(options)
    out = capsys.readouterr().out
    assert ("| chat | mean |" in out and "sums" not in out) if flag == "--markdown" else not out


@pytest.mark.parametrize(
    "after, share",
    [((20, 0, 0), 0.0), ((20, 10, 0), 0.5), ((20, 10, 6), 0.2), ((20, 10, 25), 0.0),
     ((20, 59, 0), 1.0), ((0, 0, 0), None)],  # the last: /proc/stat does not change
)  # fmt: skip
def test_the_share_of_other_processes(monkeypatch, after, share):
    readings = iter([(100.0, 40.0, 5.0), [a + b for a, b in zip((100.0, 40.0, 5.0), after)]])
    monkeypatch.setattr(measure, "read_cpu_seconds", lambda: next(readings))
    assert measure.watch(lambda: "done") == ("done", pytest.approx(share))


@pytest.mark.parametrize(
    "usable, elapsed, busy",
    [({0, 1, 2}, 1100, 200), ({0}, 900, 170), ({1, 2, 7}, 200, 30), ({8, 9}, 1100, 200),
     (None, 1100, 200)],
)  # fmt: skip
def test_only_the_usable_cores_count(monkeypatch, usable, elapsed, busy):
    """A container may list all of its host's cores. Time stolen by other machines is busy time, and
    a guest's time is already in the user's."""

    class Process(SimpleNamespace):
        def __init__(self):
            known = {} if usable is None else {"cpu_affinity": lambda: list(usable)}
            times = 1.0, 2.0, 3.0, 4.0, 99.0  # user, system, children's, iowait
            child = SimpleNamespace(cpu_times=lambda: times)
            super().__init__(cpu_times=lambda: times, children=lambda recursive: [child], **known)

    fields = "user nice system idle iowait irq softirq steal guest guest_nice"
    Core = namedtuple("Core", fields)
    cores = [Core(100, 10, 20, 700, 30, 5, 5, 30, 99, 0), Core(10, 0, 0, 90, *[0] * 6),
             Core(20, 0, 0, 80, *[0] * 6)]  # fmt: skip
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: cores)
    monkeypatch.setattr(psutil, "Process", Process)
    assert read_cpu_seconds() == (elapsed, busy, 20.0)


def test_running_descendants_count_as_our_own():
    start, deadline = read_cpu_seconds()[2], time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            before = time.process_time()
            while read_cpu_seconds()[2] - start < time.process_time() - before + 0.05:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            child.kill()


# ---- random weights ------------------------------------------------------------------------------


def test_an_oracle_draft_has_its_accuracy_and_never_changes_the_output():
    model, prompt = random_model(vocab_size=500), [1, 2, 3]
    plain = decode(model, None, prompt, max_new_tokens=120)
    for acceptance, minimum, maximum in ((0.0, 1.0, 1.0), (0.7, 1.9, 3.6), (1.0, 4.8, 5.0)):
        draft = shapes.OracleDraft(model, prompt + plain.tokens, acceptance)
        run = decode(model, None, prompt, "speculative", draft=draft, k=4, max_new_tokens=120)
        assert run.tokens == plain.tokens and minimum <= measure.per_pass([run]) <= maximum


def test_shapes_have_their_sizes(monkeypatch, capsys):
    """The numbers of parameters, in millions, are those of the model cards."""
    for name, millions in (("smollm2-135m", 134.5), ("qwen2.5-0.5b", 494.0),
                           ("llama-3.2-1b", 1235.8), ("llama-2-7b", 6738.4),
                           ("llama-3.1-8b", 8030.3), ("llama-3.1-70b", 70553.7)):  # fmt: skip
        with torch.device("meta"):
            model = Transformer(shapes.MODEL_SHAPES[name])
        assert abs(count_parameters(model) / 1e6 - millions) < 0.1
    small = replace(shapes.MODEL_SHAPES["qwen2.5-0.5b"], layers=2, hidden_size=64, vocab_size=300,
                    intermediate_size=96, heads=4, kv_heads=2, head_dim=16)  # fmt: skip
    monkeypatch.setitem(shapes.MODEL_SHAPES, "qwen2.5-0.5b", small)
    bench.main("--shape qwen2.5-0.5b --max-new-tokens 8 --device cpu --json".split())
    found = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in found["rows"][1:]] == [
        f"speculative k={k}" for k in (1, 2, 4, 8, 16)
    ]
    assert all(1 <= row["tokens_per_pass"] <= 8 for row in found["rows"])


@pytest.mark.parametrize("tied", [True, False])
def test_a_pass_reads_all_stored_weights_except_the_embedding(tied):
    config = replace(shapes.MODEL_SHAPES["smollm2-135m"], layers=2, vocab_size=300, tied=tied)
    model = shapes.random_weights(config, "float32", "cpu")
    assert torch.isfinite(model.logits(model([1, 2, 3]))).all()
    full_precision = pass_work(model).read_bytes
    assert full_precision == 4 * (count_parameters(model.model.layers) + 300 * config.hidden_size)
    optimize(model, int8=True)
    assert 3.8 < full_precision / pass_work(model).read_bytes < 4
