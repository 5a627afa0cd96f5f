"""The benchmark: its statistics, its comparison with plain decoding, and its command line."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    CHAT_TEMPLATE,
    TOKENIZER,
    byte_model,
    byte_tokenizer,
    last_error_line,
    random_model,
)

from minispec import bench
from minispec.certify import __main__ as certify
from minispec.checkpoints.heads import save_medusa, save_mtp, save_vocabulary
from minispec.checkpoints.load import save
from minispec.fast import optimize
from minispec.generate import __main__ as generate
from minispec.generate import decode
from minispec.methods.vocabulary import Language
from minispec.model import Transformer, count_parameters
from minispec.toys import random_medusa_heads, random_mtp_head
from minispec.tree import Step, Tree

bench.COPY_BYTES, bench.MATMUL_SIZE = 2**20, 64  # precise timing does not matter here


def make_run(seconds: float, tokens: int, rounds: int, tree: Tree) -> SimpleNamespace:
    steps = [Step([0], tree, [0])] * rounds
    return SimpleNamespace(
        decode_seconds=seconds, tokens=[0] * tokens, rounds=steps, extra_parameters=0
    )


def row_of(runs, plain, temperature=0.0) -> dict:
    by_method = {"autoregressive": plain, "medusa": runs}
    machine = {"curve": [0.0, 1.0, 1.5, 4.0], "draft_cost": 0.0}
    return bench.table_of("x", temperature, by_method, machine, {})[1]


def test_alpha_counts_only_tested_drafts():
    """4 drafted and 1 accepted: 2 tested. 2 drafted and both accepted: 2 tested. None drafted."""
    rounds = [
        Step([1, 9], Tree.chain(0, [1, 2, 3, 4]), [0, 1]),
        Step([1, 2, 9], Tree.chain(0, [1, 2]), [0, 1, 2]),
        Step([9], Tree.chain(0, []), [0]),
    ]
    assert bench.alpha([SimpleNamespace(rounds=rounds)]) == 3 / 4
    assert bench.alpha([SimpleNamespace(rounds=rounds[2:])]) is None


def test_runs_that_differ_from_plain_decoding_are_counted():
    model = random_model()
    a, b = (decode(model, None, [x], max_new_tokens=5) for x in (1, 2))
    assert row_of([a, b], [a, a])["differing"] == 1
    row = row_of([a], [a], temperature=0.7)
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
    assert expected in bench.reason(row_of([make_run(seconds, tokens, 6, tree)], [plain]))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A model with a draft (itself), Medusa heads and a FastMTP head next to it."""
    folder, model = tmp_path_factory.mktemp("weights"), byte_model()
    for name in "target", "draft":
        save(model, TOKENIZER, folder / name)
    heads = random_medusa_heads(model, 0)
    heads.accuracy = torch.full((4, 10), 0.05)
    save_medusa(heads, folder / "medusa", "", TOKENIZER, model.dtype)
    save_mtp(random_mtp_head(model, 0), folder / "mtp", "", TOKENIZER, model.dtype, [1.0])
    return folder


def options_of(weights, *more: str) -> list[str]:
    return ["--model", str(weights / "target"), "--device", "cpu", "--dtype", "float64",
            "--prompts", "1", "--max-new-tokens", "6", *more]  # fmt: skip


def test_every_method_has_a_row_and_the_output_of_plain_decoding(weights, capsys, tmp_path):
    picture = tmp_path / "new" / "folder" / "picture.png"
    bench.main(options_of(weights, "--k", "2", "--temperature", "0,0.7", "--quantize", "int8",
                          "--json", "--picture", str(picture)))  # fmt: skip
    out = json.loads(capsys.readouterr().out)
    assert picture.read_bytes().startswith(b"\x89PNG") and out["machine"]["curve"][1] == 1.0
    rows = {row["method"]: row for row in out["rows"] if not row["temperature"]}
    assert {row["method"] for row in out["rows"] if row["temperature"] == 0.7} == rows.keys()
    auto = "speculative", "prompt-lookup", "fastmtp", "hybrid"
    assert {"medusa", "medusa tree=auto", *(f"{name} k=auto" for name in auto)} < rows.keys()
    assert all(row["differing"] == 0 for row in rows.values())
    assert rows["autoregressive"]["speedup"] == 1.0 and rows["autoregressive"]["acceptance"] is None
    assert rows["speculative k=2"]["acceptance"] == 1.0  # the draft is the target
    assert rows["speculative k=2"]["expected_tokens_per_pass"] == 3.0
    assert rows["speculative k=2"]["by_step"] == [1.0, 1.0]
    assert rows["medusa"]["extra_parameters"] > 0


def test_rows_can_be_selected_and_prompts_are_evenly_spaced(weights, capsys, tmp_path):
    file = tmp_path / "chat.jsonl"
    rows = [{"kind": "x", "prompt": [i % 250], "tokens": [5, 6]} for i in range(350)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    methods = "fastmtp k=2,lookahead (5,4,5),medusa tree=32"
    args = bench.parse(options_of(weights, "--own", str(file), "--methods", methods))
    model, tokenizer = bench.load(args.model, "float32", "cpu")
    held_out = [row["prompt"] for row in bench.read_split(args.own, model, tokenizer)[1]]
    assert len(held_out) == 7
    for args.prompts, indices in (1, [0]), (2, [0, 3]), (3, [0, 2, 4]), (9, range(7)):
        chosen = bench.prompts_of(args, model, tokenizer)["chat"]
        assert chosen == [held_out[i] for i in indices]
    rows = bench.methods_of(args, model, tokenizer).keys()
    assert rows == {"autoregressive", "fastmtp k=2", "lookahead (5,4,5)", "medusa tree=32"}


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
        (["--own", str(file)], "chat, 1 prompts"),
        (["--questions", str(questions)], "qa, 1 prompts"),
        (["--questions", str(questions), "--prompts", "3"], "multi-turn, 2 prompts"),
    ):
        bench.main(options_of(weights, "--methods", "jacobi", *source))
        out = capsys.readouterr()
        assert table in out.out and "speculative" not in out.out
        assert "tokens per pass; a round costs" in out.out
    assert "maths: prompts left out because they exceed the context: 1" in out.err


@pytest.mark.parametrize(
    "wrong",
    [
        "--k 0", "--k 1e3", "--draft nowhere", "--data nowhere", "--temperature x", "--prompts 0",
        "--temperature -1", "--kind maths", "--methods magic", "--acceptance 2", "--acceptance 0.5",
        "--picture /dev/null/x.png", "--questions nowhere", "--questions . --data .",
        "--shape smollm2-135m --acceptance 2",
        "--shape smollm2-135m --methods medusa", "--shape magic", "--shape smollm2-135m --k 3",
        "--methods ,", "--vocabulary-sizes 9,x", "--vocabulary-sizes 9 --methods medusa",
        "--vocabulary-sizes 9 --methods fastmtp",
    ],
)  # fmt: skip
def test_invalid_flags_are_reported_in_one_line(weights, wrong, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(options_of(weights, *wrong.split()))
    err = capsys.readouterr().err
    assert caught.value.code == 2 and err.startswith("minispec: ") and err.count("\n") == 1


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
            reason = f"documents left out: 2; the first is {file} line {line}: the model's chat " \
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


# ---- random weights ------------------------------------------------------------------------------


def test_an_oracle_draft_has_its_accuracy_and_never_changes_the_output():
    model, prompt = random_model(vocab_size=500), [1, 2, 3]
    plain = decode(model, None, prompt, max_new_tokens=120)
    for acceptance, minimum, maximum in ((0.0, 1.0, 1.0), (0.7, 1.9, 3.6), (1.0, 4.8, 5.0)):
        draft = bench.OracleDraft(model, prompt + plain.tokens, acceptance)
        run = decode(model, None, prompt, "speculative", draft=draft, k=4, max_new_tokens=120)
        assert run.tokens == plain.tokens and minimum <= bench.per_pass([run]) <= maximum


def test_shapes_have_their_sizes(monkeypatch, capsys):
    """The numbers of parameters, in millions, are those of the model cards."""
    for name, millions in (("smollm2-135m", 134.5), ("qwen2.5-0.5b", 494.0),
                           ("llama-3.2-1b", 1235.8), ("llama-2-7b", 6738.4)):  # fmt: skip
        with torch.device("meta"):
            model = Transformer(bench.MODEL_SHAPES[name])
        assert abs(count_parameters(model) / 1e6 - millions) < 0.1
    small = replace(bench.MODEL_SHAPES["qwen2.5-0.5b"], layers=2, hidden_size=64, vocab_size=300,
                    intermediate_size=96, heads=4, kv_heads=2, head_dim=16)  # fmt: skip
    monkeypatch.setitem(bench.MODEL_SHAPES, "qwen2.5-0.5b", small)
    bench.main("--shape qwen2.5-0.5b --max-new-tokens 8 --device cpu --json".split())
    found = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in found["rows"][1:]] == [
        f"speculative k={k}" for k in (1, 2, 4, 8, 16)
    ]
    assert all(1 <= row["tokens_per_pass"] <= 8 for row in found["rows"])


@pytest.mark.parametrize("tied", [True, False])
def test_a_pass_reads_all_stored_weights_except_the_embedding(tied):
    config = replace(bench.MODEL_SHAPES["smollm2-135m"], layers=2, vocab_size=300, tied=tied)
    model = bench.random_weights(config, "float32", "cpu")
    assert torch.isfinite(model.logits(model([1, 2, 3]))).all()
    full_precision = bench.weights_read(model)
    assert full_precision == 4 * (count_parameters(model.model.layers) + 300 * config.hidden_size)
    optimize(model, int8=True)
    assert 3.8 < full_precision / bench.weights_read(model) < 4
