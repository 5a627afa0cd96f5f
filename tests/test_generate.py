"""One place ends a run: exactly where plain decoding would have stopped. And the command line."""

import io
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from conftest import GOLDEN, ROOT, random_model, random_tokens
from test_tokenizer import byte_tokenizer

from minispec import UserError, generate
from minispec.checkpoint import load, save
from minispec.errors import command
from minispec.generate import decode, stream
from minispec.sampling import Seeded
from minispec.tree import Step, Tree

TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.size


def byte_model(seed: int = 0, context: int = 256, eos: tuple[int, ...] = ()):
    return random_model(seed, vocab_size=VOCAB, context=context, bos_id=256, eos_ids=eos)


def scripted(text_tokens: list[int], block: int):
    """A method that emits these tokens, `block` a round, as if all its drafts had been accepted."""

    def method(model, prompt, sampling, randomness, *, cache=None) -> Iterator[Step]:
        model.prefill(prompt[cache.length : -1], cache)
        yield Step()
        tokens, rest = list(prompt), list(text_tokens)
        while True:
            new, rest = rest[:block], rest[block:]
            guess = new[: cache.room][:-1]
            tree = Tree.chain(tokens[-1], guess)
            model(tree.tokens, cache, tree.depth, tree.mask)
            cache.commit(list(range(len(tree))))
            tokens += new[: cache.room + 1]
            yield Step(new, tree, list(range(len(tree))))

    return method


@pytest.fixture(params=[1, 2, 3, 7])
def blocks(request, monkeypatch):
    """Register a scripted method of this block size."""

    def register(tokens):
        monkeypatch.setitem(generate.METHODS, "scripted", scripted(tokens, request.param))

    return register


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("eos", [(256,), (258, 259, 256)])
def test_an_end_token_ends_at_every_offset_of_a_block(blocks, offset, eos):
    tokens = TOKENIZER.encode("abcdefghijklmnop")
    blocks(tokens[:offset] + [256] + tokens[offset:])
    run = decode(byte_model(eos=eos), TOKENIZER, "x", method="scripted")
    assert run.tokens == tokens[:offset] + [256]
    assert (run.text, run.finish_reason) == ("abcdefghijklmnop"[:offset], "eos")
    assert run.cache.length <= 1 + len(run.tokens) - 1
    run = decode(byte_model(eos=eos), TOKENIZER, "x", method="scripted", ignore_eos=True,
                 max_new_tokens=12)  # fmt: skip
    assert (len(run.tokens), run.finish_reason) == (12, "length")


@pytest.mark.parametrize("n", range(16))
def test_the_number_of_tokens_is_never_overshot(blocks, n):
    tokens = TOKENIZER.encode("abcdefghijklmnopqrst")
    blocks(tokens)
    run = decode(byte_model(), TOKENIZER, "x", method="scripted", max_new_tokens=n)
    assert run.tokens == tokens[:n] and run.finish_reason == "length"
    assert run.stats["new_tokens"] == n


@pytest.mark.parametrize("stop", ["d", "def", "fgh", "p", "no", "é", "你", "好x"])
def test_a_stop_string_ends_at_its_last_token_and_is_not_shown(blocks, stop):
    text = "abcdefghéi你好xnop"
    tokens = TOKENIZER.encode(text)
    blocks(tokens)
    run = stream(byte_model(), TOKENIZER, "x", method="scripted", stop=("zzz", stop))
    shown = [chunk.text for chunk in run]
    before = text[: text.index(stop)]
    assert "".join(shown) == run.text == before and run.finish_reason == "stop"
    assert run.tokens == tokens[: len((before + stop).encode())]


def test_one_stop_string_may_come_alone(blocks):
    blocks(TOKENIZER.encode("abcdef"))
    for stop, text in ("ec", "abcde"), ("de", "abc"):
        run = decode(byte_model(), TOKENIZER, "x", method="scripted", stop=stop, max_new_tokens=5)
        assert run.text == text


def test_what_might_begin_a_stop_string_is_held_back_and_then_shown(blocks):
    blocks(TOKENIZER.encode("ababac!!"))
    run = decode(byte_model(), TOKENIZER, "x", method="scripted", stop=("abac?", "b!"),
                 max_new_tokens=8)  # fmt: skip
    assert run.text == "ababac!!" and run.finish_reason == "length"


@pytest.mark.parametrize("context", [4, 5, 6, 17])
def test_the_context_ends_a_run_and_a_prompt_must_leave_room(context):
    model = byte_model(context=context)
    run = decode(model, TOKENIZER, "abc", max_new_tokens=100)
    assert (len(run.tokens), run.finish_reason) == (context - 3, "context")
    for n in (context, context + 1):
        with pytest.raises(UserError, match=f"has {n} tokens, the context only {context}"):
            decode(model, TOKENIZER, "a" * n)


@pytest.mark.parametrize("seed", range(5))
def test_a_kept_cache_gives_the_same_turn_as_a_fresh_one(seed):
    """Stopped inside a block or not, what is left in the cache serves the next turn."""
    rng, model = random.Random(seed), byte_model(seed)
    first = random_tokens(rng.randint(1, 20), seed, vocab=256)
    cache = model.new_cache()
    one = decode(model, TOKENIZER, first, cache=cache, max_new_tokens=rng.randint(0, 9))
    second = first + one.tokens + random_tokens(rng.randint(1, 5), seed + 1, vocab=256)
    two = decode(model, TOKENIZER, second, cache=cache, max_new_tokens=20)
    assert two.cached_tokens == max(0, len(first + one.tokens) - 1)
    assert two.tokens == decode(model, TOKENIZER, second, max_new_tokens=20).tokens


def test_a_cache_that_does_not_go_with_the_prompt_is_refused():
    model = byte_model(context=40)
    full = model.new_cache()
    model.prefill([1, 2, 3], full)
    for cache in full, model.new_cache(3), model.new_cache(41):
        with pytest.raises(UserError, match="does not go with a prompt of 3 tokens"):
            decode(model, TOKENIZER, [1, 2, 3], cache=cache)
    changes = {"layers": 1}, {"layers": 3}, {"kv_heads": 4}, {"head_dim": 8}
    others = [byte_model().float(), *(random_model(**each) for each in changes)]
    for cache in *(other.new_cache(30) for other in others), model.new_cache(30, batch=2):
        with pytest.raises(UserError, match="another model's or a batch's"):
            decode(model, TOKENIZER, [1, 2, 3], cache=cache)


def test_twice_in_a_row_gives_the_same_and_a_seed_decides():
    model = byte_model()
    runs = [decode(model, TOKENIZER, "hello", temperature=1.0, seed=s, max_new_tokens=30).tokens
            for s in (1, 1, 2)]  # fmt: skip
    assert runs[0] == runs[1] != runs[2]


def test_plain_decodings_statistics():
    stats = decode(byte_model(), TOKENIZER, "hello", max_new_tokens=9).stats
    assert (stats["target_passes"], stats["new_tokens"], stats["tokens_per_pass"]) == (9, 9, 1.0)
    assert stats["drafted"] == stats["accepted"] == stats["extra_parameters"] == 0
    assert stats["prefill_seconds"] > 0 and stats["tokens_per_second"] > 0


def test_acceptance_by_position_counts_what_it_says():
    """Depth 1: 2 of 3 accepted. Depth 2: drafted twice, accepted once, where depth 1 had been."""
    rounds = [
        Step([5, 6], Tree.chain(0, [5]), [0, 1]),
        Step([5, 6, 7], Tree.chain(0, [5, 6]), [0, 1, 2]),
        Step([9], Tree.chain(0, [5, 6]), [0]),
    ]
    rates = generate.acceptance(rounds)
    assert rates == {"unconditional": [2 / 3, 1 / 2], "conditional": [2 / 3, 1.0]}


# ---- the command line ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level model on disk."""
    path = tmp_path_factory.mktemp("model")
    save(byte_model(), TOKENIZER, path)
    return str(path)


def call(*arguments: str) -> None:
    generate.main([*arguments, "--device", "cpu"])


def test_json_is_the_contract(folder, capsys):
    call("hello", "--model", folder, "--json", "--max-new-tokens", "5", "--dtype", "float64")
    out = json.loads(capsys.readouterr().out)
    keys = "method model prompt_tokens prompt_ids tokens text finish_reason stats"
    assert list(out) == keys.split()
    assert set(out["stats"]) >= {
        "target_passes", "new_tokens", "tokens_per_pass", "drafted", "accepted", "acceptance",
        "prefill_seconds", "decode_seconds", "tokens_per_second", "extra_parameters",
        "temperature", "top_k", "top_p",
    }  # fmt: skip
    model, tokenizer = load(folder, "float64", "cpu")
    expected = decode(model, tokenizer, "hello", max_new_tokens=5)
    assert (out["tokens"], out["prompt_tokens"]) == (expected.tokens, 5)
    assert (out["text"], out["finish_reason"]) == (expected.text, "length")


def test_every_source_of_a_prompt_is_the_same_prompt(folder, capsys, tmp_path, monkeypatch):
    options = ("--model", folder, "--json", "--max-new-tokens", "4")
    file = tmp_path / "prompt.txt"
    file.write_text("héllo", encoding="utf-8")
    ids = ",".join(map(str, TOKENIZER.encode("héllo")))
    monkeypatch.setattr(sys, "stdin", io.StringIO("héllo\n"))
    tokens = []
    for source in (["héllo"], ["--prompt-ids", ids], ["--prompt-file", str(file)], []):
        call(*source, *options)
        tokens.append(json.loads(capsys.readouterr().out)["tokens"])
    assert tokens == [tokens[0]] * 4


def test_text_is_streamed_after_its_prompt_and_figures_go_to_stderr(folder, capsys):
    call("hello", "--model", folder, "--stats", "--max-new-tokens", "5")
    out, err = capsys.readouterr()
    assert out.startswith("hello") and out.endswith("\n") and "5 tokens (length) in 5 passes" in err


def test_the_prompt_is_not_shown_where_the_method_refuses_its_options(folder, capsys, monkeypatch):
    def refuses(*arguments, **options):
        raise UserError("k auto is for chains")
        yield

    monkeypatch.setitem(generate.METHODS, "autoregressive", refuses)
    with pytest.raises(SystemExit):
        call("hello", "--model", folder)
    assert capsys.readouterr() == ("", "minispec: k auto is for chains\n")


def test_a_text_is_the_same_prompt_from_anywhere(folder, tmp_path, capsys, monkeypatch):
    """An editor's last newline belongs to the file, as does the mark before its first letter."""
    file = tmp_path / "prompt.txt"
    file.write_bytes("\ufeffab\n".encode())
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\n"))
    for source in ["ab"], ["--prompt-file", file], []:
        call(*map(str, source), "--model", folder, "--json", "--max-new-tokens", "0")
        assert json.loads(capsys.readouterr().out)["prompt_ids"] == TOKENIZER.encode("ab")


def test_a_model_without_tokenizer_shows_ids_as_json_alone(tmp_path, capsys):
    save(byte_model(), None, tmp_path)
    arguments = ["--model", str(tmp_path), "--prompt-ids", "1,2", "--max-new-tokens", "3"]
    call(*arguments, "--json")
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 3
    with pytest.raises(SystemExit):
        call(*arguments)
    assert "give --json" in capsys.readouterr().err


def test_bytes_that_are_no_text_end_a_chat_after_the_turns_before(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\n\xff\n")))
    with pytest.raises(SystemExit) as caught:
        call("--model", folder, "--chat", "--json", "--max-new-tokens", "2")
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and len(out.splitlines()) == 1 and "not valid Unicode" in err


def test_mistakes_in_a_notebook_s_process_leave_its_output_alone(folder, tmp_path):
    """Called twice, with a pipe that was read from, and with an output that is no file."""
    script = (
        "import contextlib, io, sys\n"
        "from minispec import errors, generate\n"
        "sys.stdin.readline()\n"
        "def lost(argv): raise FileNotFoundError(2, 'gone')\n"
        "for out in io.StringIO(), sys.stdout:\n"
        "    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):\n"
        "        generate.main(['x', '--model', sys.argv[1], '--max-new-tokens', '1'])\n"
        "        errors.command(lost)([])\n"
        "print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, folder], cwd=ROOT, input="a\nb\n",
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0 and done.stderr.count("gone\n") == 2, done.stderr
    assert done.stdout.endswith("still here\n") and "Traceback" not in done.stderr


def test_without_standard_input(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    call("--model", folder, "--chat")
    with pytest.raises(SystemExit):
        call("--model", folder)
    assert "no prompt" in capsys.readouterr().err


def test_a_file_that_is_tried_is_left_as_it_was(folder, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "there")
    call("x", "--model", folder, "--max-new-tokens", "1", "--html", str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").stat().st_size


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is not on this system")
def test_a_full_disk_is_one_line(folder, capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as caught:
            call("x", "--model", folder, "--max-new-tokens", "1")
    err = capsys.readouterr().err
    assert caught.value.code == 2 and "No space left" in err and err.count("\n") == 1


def test_pipes_are_utf_8_whatever_the_system_says(folder, monkeypatch):
    pipes = [io.TextIOWrapper(io.BytesIO(text), "cp1252") for text in ("你好".encode(), b"")]
    monkeypatch.setattr(sys, "stdin", pipes[0])
    monkeypatch.setattr(sys, "stdout", pipes[1])
    call("--model", folder, "--max-new-tokens", "0")
    assert pipes[1].buffer.getvalue().decode() == "你好\n"


def test_a_chat_feeds_only_what_is_new(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\nhow are you?\n"))
    call("--model", folder, "--chat", "--json", "--max-new-tokens", "4", "--dtype", "float64")
    turns = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(turns) == 2 and turns[0]["stats"]["cached_tokens"] == 0
    # at least the first prompt; the answer too, as far as its text is encoded in the same tokens
    assert turns[1]["stats"]["cached_tokens"] >= turns[0]["prompt_tokens"]
    model, tokenizer = load(folder, "float64", "cpu")
    answer = turns[0]["text"].strip()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer},
                {"role": "user", "content": "how are you?"}]  # fmt: skip
    fresh = decode(model, tokenizer, tokenizer.chat(messages), max_new_tokens=4)
    assert turns[1]["tokens"] == fresh.tokens


def test_the_turns_of_a_sampled_chat_use_fresh_randomness(folder, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nhi\n"))
    uniform = Seeded.uniform
    monkeypatch.setattr(Seeded, "uniform", lambda self: seen.append(uniform(self)) or seen[-1])
    call("--model", folder, "--chat", "--max-new-tokens", "3", "--temperature", "1", "--seed", "4")
    assert len(seen) == len(set(seen)) > 4


@pytest.mark.parametrize(
    "arguments, match",
    [
        (["x", "--model", "nowhere"], "no such directory: nowhere"),
        (["x", "--method", "magic"], "unknown method 'magic'"),
        (["x", "--max-new-tokens", "-3"], "must not be negative"),
        (["x", "--top-p", "2"], "top-p 2.0"),
        (["x", "--prompt-ids", "1"], "give one prompt, not a text and --prompt-ids"),
        (["--prompt-ids", "1,b"], "must be integers between commas"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--prompt-ids", "1,70000"], "70000 is out of range"),
        (["x" * 300], "the prompt has 300 tokens, the context only 256"),
        (["x", "--dtype", "int3"], "dtype int3"),
        (["x", "--seed", "9" * 30], "must fit in 64 bits"),
        (["--chat", "--prompt-file", "nowhere"], "takes its turns from standard input"),
        (["a\udcff"], "not valid Unicode"),
        (["x", "--k", "3"], "--k is for --method speculative or prompt-lookup"),
        (["x", "--method", "prompt-lookup", "--k", "auto"], "--k auto: must be a number\n"),
        (["x", "--method", "speculative"], "needs draft=, on the command line --draft DIR"),
        (["x", "--stop", ""], "must not be empty"),
        (["--color", "full"], "write --color=full"),
    ],
)
def test_mistakes_are_one_line_and_code_2(folder, arguments, match, capsys):
    if "--model" not in arguments:
        arguments = [*arguments, "--model", folder]
    with pytest.raises(SystemExit) as caught:
        call(*arguments)
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and match in err and err.count("\n") == 1 and out == ""


@pytest.mark.parametrize(
    ("tool", "arguments", "match"),
    [
        ("generate", ["x", "--quantize", "int4"], "argument --quantize: invalid choice: 'int4'"),
        ("generate", ["x", "--max-new-tokens", "ten"], "--max-new-tokens: invalid int value"),
        ("generate", ["x", "--nope"], "unrecognized arguments: --nope"),
        ("bench", ["--shape", "nope"], "argument --shape: invalid choice: 'nope'"),
        ("certify", ["--model"], "argument --model: expected one argument"),
        ("pretrain", [], "the following arguments are required: --data, --out"),
        ("distill", ["draught"], "invalid choice: 'draught'"),
        ("distill", ["mtp", "--mode", "x", "--out", "y"], "distill mtp -h shows the flags"),
        ("distill", ["mtp", "--out", "y", "--nope"], "--nope (python -m minispec.distill mtp"),
        ("distill", ["vocabulary"], "the following arguments are required"),
        ("study", ["x"], "invalid choice: 'x'"),
    ],
)
def test_what_no_parser_can_read_is_one_line_too(tool, arguments, match, capsys):
    with pytest.raises(SystemExit) as caught:
        import_module(f"minispec.{tool}").main(arguments)
    err = capsys.readouterr().err
    assert caught.value.code == 2 and match in err and err.count("\n") == 1


def test_ctrl_c_ends_cleanly_with_what_was_produced(tmp_path):
    save(byte_model(context=30_000), TOKENIZER, tmp_path)
    arguments = ["-m", "minispec.generate", "x", "--model", str(tmp_path), "--stats",
                 "--ignore-eos", "--max-new-tokens", "29000"]  # fmt: skip
    # a shell's background jobs ignore Ctrl-C, and their children inherit that
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        try:
            process.stdout.read(20)  # it has begun to speak
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0 and b"tokens (interrupted) in" in err
    assert b"Traceback" not in err


def test_ctrl_c_shows_what_was_held_back_for_a_stop_string(monkeypatch, capsys):
    """At the interruption "abc" may still begin the stop string, and is not shown yet."""
    monkeypatch.setitem(generate.METHODS, "scripted", scripted(TOKENIZER.encode("xyzabc..."), 1))
    run = stream(byte_model(), TOKENIZER, "x", method="scripted", stop=("abcd",))

    def interrupted(chunks):
        for _ in range(6):
            yield next(chunks)
        raise KeyboardInterrupt

    run.chunks = interrupted(run.chunks)
    generate.show(run, generate.parse(["x"]), TOKENIZER)
    assert run.text == "xyzabc" and capsys.readouterr().out == "xyzabc\n"


def test_too_little_memory_is_one_line(capsys):
    def main(argv):
        raise RuntimeError(argv)

    with pytest.raises(SystemExit) as caught:
        command(main)("DefaultCPUAllocator: can't allocate memory:\nyou tried 99 bytes")
    err = capsys.readouterr().err
    assert caught.value.code == 2 and "not enough memory" in err and err.count("\n") == 1
    with pytest.raises(RuntimeError, match="a bug"):
        command(main)("a bug")


def test_the_golden_models_run_through_the_command_line(capsys):
    call(
        "--prompt-ids", "5,6,7", "--model", str(GOLDEN / "qwen3"), "--json", "--max-new-tokens", "3"
    )
    out = json.loads(capsys.readouterr().out)
    assert len(out["tokens"]) == 3 and out["text"] == ""
