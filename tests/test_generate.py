"""Runs stop exactly where plain decoding would; the command line reports errors in one line."""

import contextlib
import copy
import gc
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import (
    END,
    END_TURN,
    ROOT,
    TOKENIZER,
    byte_model,
    byte_tokenizer,
    file_limit,
    method_options,
    random_model,
)
from torch import Tensor

import minispec.__main__
from minispec import UserError, cli
from minispec.cache import KVCache
from minispec.certify import __main__ as certify
from minispec.certify.toys import random_eagle3_head, random_mtp_head
from minispec.checkpoints.eagle3 import save_eagle3
from minispec.checkpoints.heads import save_mtp
from minispec.checkpoints.load import load, save
from minispec.cli import check_writable, command, printable
from minispec.distill.__main__ import main as distill_main
from minispec.generate import __main__ as generate
from minispec.generate import decode, stream, terminal, view
from minispec.generate.run import acceptance
from minispec.machine import package_version
from minispec.tree import Step, Tree


def scripted(text_tokens: list[int], block: int):
    """A method that emits these tokens, `block` per round, as if all its drafts were accepted."""

    def method(model, prompt, sampling, randomness, *, cache=None) -> Iterator[Step]:
        model.prefill(prompt[cache.length : -1], cache)
        yield Step()
        for at in range(0, len(text_tokens), block):
            new = text_tokens[at : at + block]
            cache.commit(list(range(len(new))))
            yield Step(new, Tree.chain(0, new[:-1]), list(range(len(new))))

    return method


@pytest.fixture(params=[1, 2, 3, 7])
def register(request, monkeypatch):
    """Register a scripted method with this block size."""
    return lambda tokens: monkeypatch.setitem(
        generate.METHODS, "scripted", scripted(tokens, request.param)
    )


@pytest.mark.parametrize("offset", range(8))
def test_an_end_token_stops_a_run_at_any_offset_in_a_block(register, offset):
    tokens, model = TOKENIZER.encode("abcdefghijklmnop"), byte_model(eos=(258, 256))
    register(tokens[:offset] + [256] + tokens[offset:])
    run = decode(model, TOKENIZER, "x", method="scripted")
    assert run.tokens == tokens[:offset] + [256]
    assert (run.text, run.finish_reason) == ("abcdefghijklmnop"[:offset], "eos")
    for n in 0, 1, 9 + offset:  # and max_new_tokens is never exceeded
        run = decode(model, TOKENIZER, "x", "scripted", ignore_eos=True, max_new_tokens=n)
        assert (len(run.tokens), run.stats["new_tokens"], run.finish_reason) == (n, n, "length")


@pytest.mark.parametrize("stop", ["d", "def", "fgh", "p", "no", "é", "你", "好x"])
def test_a_run_stops_at_the_last_token_of_a_stop_string_without_showing_it(register, stop):
    text = "abcdefghéi你好xnop"
    tokens = TOKENIZER.encode(text)
    register(tokens)
    run = stream(byte_model(), TOKENIZER, "x", method="scripted", stop=("zzz", stop))
    shown = [chunk.text for chunk in run]
    before = text[: text.index(stop)]
    assert "".join(shown) == run.text == before and run.finish_reason == "stop"
    assert run.tokens == tokens[: len((before + stop).encode())]


@pytest.mark.parametrize(
    ("stop", "n", "text"),
    [("ec", 5, "ababa"), ("ab", 5, ""), ("ba", 8, "a"), (("abac?", "b!"), 8, "ababac!!")],
)
def test_a_possible_start_of_a_stop_string_is_held_back_then_shown(register, stop, n, text):
    """`stop` may be a single string, and longer than the remaining text."""
    register(TOKENIZER.encode("ababac!!"))
    run = decode(byte_model(), TOKENIZER, "x", method="scripted", stop=stop, max_new_tokens=n)
    assert run.text == text == "".join(run.texts) and len(run.texts) == len(run.tokens)


@pytest.mark.parametrize("before", ["", "a", "abcdé", "abcde" * 3])
def test_a_stop_string_that_is_a_control_token_is_matched_by_id(register, before):
    """It has no text. Text held back for other stop strings is shown, even half a character."""
    tokens = TOKENIZER.encode(before) + [TOKENIZER.encode("é")[0]]
    register([*tokens, TOKENIZER.control_ids[END_TURN], *tokens])
    run = decode(byte_model(), TOKENIZER, "x", "scripted", stop=(END_TURN, "de!", "é?"))
    assert run.tokens == [*tokens, TOKENIZER.control_ids[END_TURN]]
    assert (run.text, run.finish_reason) == (before + "\ufffd", "stop")
    assert len(run.texts) == len(run.tokens)


def test_a_cache_that_does_not_fit_model_and_prompt_is_rejected():
    model = byte_model(context=40)
    full = model.new_cache()
    model.prefill([1, 2, 3], full)
    changes = {"layers": 1}, {"layers": 3}, {"kv_heads": 4}, {"head_dim": 8}
    others = [byte_model().float(), *(random_model(**each) for each in changes)]
    for cache in (full, model.new_cache(3), model.new_cache(41),
                  *(other.new_cache(30) for other in others)):  # fmt: skip
        with pytest.raises(UserError, match="the cache does not fit this model and a prompt"):
            decode(model, TOKENIZER, [1, 2, 3], cache=cache)


def test_statistics_and_seeds_of_plain_decoding():
    runs = [decode(byte_model(), TOKENIZER, "hello", temperature=1.0, seed=s, max_new_tokens=30)
            for s in (1, 1, 2)]  # fmt: skip
    assert runs[0].tokens == runs[1].tokens != runs[2].tokens
    s = runs[0].stats
    assert (s["target_passes"], s["new_tokens"], s["tokens_per_pass"]) == (30, 30, 1.0)
    assert s["drafted"] == s["accepted"] == s["extra_parameters"] == 0
    assert s["prefill_seconds"] > 0 and s["tokens_per_second"] > 0


@pytest.mark.parametrize("method", generate.METHODS)
def test_a_finished_run_holds_no_cache(method, monkeypatch):
    """`bench` keeps the runs of all prompts and methods; with their caches, `make speed`
    held 7 GB halfway through."""
    model, caches = random_model(), []
    options = method_options(model).get(method, {})
    new_cache = KVCache.__init__

    def remember(cache, *args, **kwargs):
        caches.append(weakref.ref(cache))
        new_cache(cache, *args, **kwargs)

    monkeypatch.setattr(KVCache, "__init__", remember)
    run = decode(model, None, [1, 2, 3], method, max_new_tokens=5, ignore_eos=True, **options)
    gc.collect()
    assert len(run.tokens) == 5 and run.stats["dtype"] == "float64"
    assert caches and all(cache() is None for cache in caches)


def test_of_the_draft_distributions_a_run_keeps_one_number_per_draft():
    """With whole distributions, a long chat with a large vocabulary held gigabytes."""
    model, drawn = random_model(), []
    options = method_options(model)["speculative"] | {"temperature": 1.0, "max_new_tokens": 20}
    run = stream(model, None, [1, 2, 3], "speculative", **options)
    for chunk in run:
        tree = chunk.step.tree
        drawn.append([None] + [float(q[x]) for x, q in zip(tree.tokens[1:], tree.draft_probs[1:])])
    for step, probs in zip(run.rounds, drawn, strict=True):
        kept = [q and q[x] for x, q in zip(step.tree.tokens, step.tree.draft_probs)]
        assert kept == probs and not any(isinstance(q, Tensor) for q in step.tree.draft_probs)


@pytest.mark.parametrize("method", ["autoregressive", "speculative", "lookahead"])
def test_a_finished_run_can_be_pickled_and_copied(method):
    model = byte_model(eos=(256,))
    draft = {"draft": byte_model(1)} if method == "speculative" else {}
    run = decode(model, TOKENIZER, "abc", method, temperature=1.0, max_new_tokens=9, **draft)
    for copied in pickle.loads(pickle.dumps(run)), copy.deepcopy(run), copy.copy(run):
        assert list(copied) == [] and copied.as_json("m") == run.as_json("m")
        assert view.trace(model, TOKENIZER, copied, "m") == view.trace(model, TOKENIZER, run, "m")


@pytest.mark.parametrize("shared", ["cache", "draft_cache"])
def test_only_one_run_at_a_time_may_use_a_cache(shared):
    """Two live runs with one cache would both be silently wrong."""
    model, draft = random_model(), random_model(1, layers=1)
    network = {"cache": model, "draft_cache": draft}[shared]
    options = {"draft": draft, "k": 2, shared: network.new_cache()}
    first = stream(model, None, [1, 2, 3], "speculative", **options)
    next(iter(first))
    for copied in copy.deepcopy(options[shared]), pickle.loads(pickle.dumps(options[shared])):
        assert copied.kv.equal(options[shared].kv) and copied.length == options[shared].length
    second = stream(model, None, [1, 2, 3, *first.tokens, 4], "speculative", **options)
    with pytest.raises(UserError, match="another run has begun to use this run's cache"):
        next(iter(first))
    next(iter(second))
    first.finish("interrupted")  # leaves the other's cache alone
    rest = [token for chunk in second for token in chunk.tokens]
    assert rest and second.tokens == decode(model, None, second.prompt).tokens


def test_a_run_may_be_finished_before_it_begins_and_twice():
    run = stream(random_model(), None, [1, 2, 3])
    run.finish("interrupted")
    run.finish("length")
    assert list(run) == [] and run.finish_reason == "interrupted" and run.stats["new_tokens"] == 0


def test_acceptance_rates_by_depth():
    """Depth 1: 2 of 3 accepted. Depth 2: 1 of 2 accepted, the other failed at depth 1."""
    rounds = [
        Step([5, 6], Tree.chain(0, [5]), [0, 1]),
        Step([5, 6, 7], Tree.chain(0, [5, 6]), [0, 1, 2]),
        Step([9], Tree.chain(0, [5, 6]), [0]),
    ]
    rates = acceptance(rounds)
    assert rates == {"unconditional": [2 / 3, 1 / 2], "conditional": [2 / 3, 1.0]}


def call(*arguments: str) -> None:
    generate.main([*arguments, "--device", "cpu"])


def refused(capsys, main, arguments: list) -> str:
    """Run a command that must fail; return its one-line error."""
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and err.count("\n") == 1 and out == ""
    return err


def test_the_json_output_has_the_documented_keys(folder, capsys):
    call("hello", "--model", folder, "--json", "--max-new-tokens", "5", "--dtype", "float64")
    out = json.loads(capsys.readouterr().out)
    keys = "method model prompt_tokens prompt_ids tokens text finish_reason stats"
    assert list(out) == keys.split()
    assert set(out["stats"]) >= {
        "target_passes", "new_tokens", "tokens_per_pass", "drafted", "accepted", "acceptance",
        "prefill_seconds", "decode_seconds", "tokens_per_second", "extra_parameters", "dtype",
        "temperature", "top_k", "top_p",
    }  # fmt: skip
    model, tokenizer = load(folder, "float64", "cpu")
    expected = decode(model, tokenizer, "hello", max_new_tokens=5)
    assert (out["tokens"], out["prompt_tokens"]) == (expected.tokens, 5)
    assert (out["text"], out["finish_reason"]) == (expected.text, "length")


def test_every_source_gives_the_same_prompt(folder, capsys, tmp_path, monkeypatch):
    """A file's last newline and byte-order mark are not part of the prompt. Without a tokenizer,
    only --prompt-ids and --json work."""
    file = tmp_path / "prompt.txt"
    file.write_bytes("\ufeffhéllo\n".encode())
    ids = TOKENIZER.encode("héllo")
    monkeypatch.setattr(sys, "stdin", io.StringIO("héllo\n"))
    for source in ["héllo"], ["--prompt-ids", ",".join(map(str, ids))], ["--prompt-file", file], []:
        call(*map(str, source), "--model", folder, "--json", "--max-new-tokens", "0")
        assert json.loads(capsys.readouterr().out)["prompt_ids"] == ids
    for data in b"\xef\xbb\xbfa\r\nb\r\n", b"a\nb", b"a\nb\n":  # a pipe is read like a file
        file.write_bytes(data)
        for source in ["--prompt-file", str(file)], []:
            pipe = io.TextIOWrapper(io.BytesIO(data), "cp1252", newline="\n")
            monkeypatch.setattr(sys, "stdin", pipe)
            call(*source, "--model", folder, "--json", "--max-new-tokens", "0")
            assert json.loads(capsys.readouterr().out)["prompt_ids"] == TOKENIZER.encode("a\nb")
    save(byte_model(), None, tmp_path)
    arguments = ["--model", str(tmp_path), "--prompt-ids", "1,2", "--max-new-tokens", "3"]
    call(*arguments, "--json")
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 3
    assert "use --json" in refused(capsys, generate.main, arguments)


@pytest.mark.parametrize(
    "arguments, match",
    [
        (["x", "--model", ""], "no such directory: "),
        (["x", "--method", "magic"], "unknown method 'magic'; choose from autoregressive, "),
        (["x", "--temperature", "nan"], "nan must be a number, at least 0"),
        (["--prompt-file", ""], "cannot be read"),
        (["x", "--html", ""], "cannot be written (not a file)"),
        (["x", "--top-p", "2"], "2 must be a number, from 0 to 1"),
        (["x", "--seed", "9" * 30], "must be a whole number, from -9223372036854775808"),
        (["x", "--prompt-ids", "1"], "--prompt-ids: not allowed with argument prompt"),
        (["--prompt-ids", "1,b"], "b must be a whole number, at least 0"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--prompt-ids", "1,70000"], "70000 is out of range"),
        (["x" * 300], "the prompt has 300 tokens, but the context is only 256"),
        (["x", "--dtype", "int3"], "dtype int3"),
        (["x", "--nope"], "unrecognized arguments: --nope"),
        (["a\udcff"], "not valid Unicode"),
        (["x", "--stop", ""], "must not be empty"),
        (["--chat", "--prompt-file", "nowhere"], "--chat cannot use --prompt-ids or --prompt-file"),
        (["x", "--system", "Be brief."], "--system requires --chat"),
        (["x", "--method", "fastmtp", "--k", "1" + "0" * 20], "from 1 to 9223372036854775807"),
        (["x", "--method", "speculative", "--draft", ""], "no such directory: "),
        (["x", "--method", "medusa", "--heads", ""], "no such directory: "),
        (["x", "--color", "--json"], "--color and --json are mutually exclusive"),
        (["x", "--method", "fastmtp", "--tree", "0", "--model", "nowhere"], "--tree 0 must be"),
        (["x", "--method", "hybrid", "--tree", "8", "--draft", "x"], "--tree is for heads, not"),
    ],
)  # fmt: skip
def test_user_errors_are_one_line_and_exit_code_2(folder, arguments, match, capsys):
    if "--model" not in arguments:
        arguments = [*arguments, "--model", folder]
    assert match in refused(capsys, generate.main, [*arguments, "--device", "cpu"])


@pytest.mark.parametrize("main, arguments, match", [
    (minispec.__main__.main, ["genrate", "x"], "choice: 'genrate' (did you mean generate?)"),
    (minispec.__main__.main, ["magic"], "invalid choice: 'magic' (choose from "),
    (distill_main, ["generat"], "(did you mean generate?)"),
    (generate.main, ["x", "--method", "medsua"], "unknown method 'medsua'; did you mean medusa?"),
    (certify.main, ["--checks", "gredy"], "unknown check 'gredy'; did you mean greedy?"),
])  # fmt: skip
def test_a_mistyped_name_is_answered_with_the_nearest(main, arguments, match, capsys):
    assert match in refused(capsys, main, arguments)


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as caught:
        minispec.__main__.main(["--version"])
    assert caught.value.code == 0 and minispec.__version__ == package_version("minispec")
    assert capsys.readouterr().out == f"minispec {minispec.__version__}\n"


def test_an_invalid_tree_file_is_a_one_line_error(tmp_path, capsys):
    arguments = ["x", "--method", "medusa", "--tree", tmp_path / "tree.json", "--device", "cpu"]
    for text, match in (
        ("{}", "must hold a JSON list"),
        ('[["a"]]', "the tree's rank 'a'"),
        ("[0, 1]", "must be rank paths"),
        ("[" * 100_000, "cannot be read as JSON"),
    ):
        (tmp_path / "tree.json").write_text(text)
        assert match in refused(capsys, generate.main, arguments)


def test_a_tree_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "tree.json").write_text("\ufeff[[0], [0, 0], [1]]\r\n", encoding="utf-8")
    assert generate.drafters.read_paths(str(tmp_path / "tree.json")) == [[0], [0, 0], [1]]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_an_unwritable_output_is_a_one_line_error(folder, tmp_path, capsys, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    run = ["x", "--model", folder, "--max-new-tokens", "1"]
    for page in tmp_path / "pipe", tmp_path:
        message = refused(capsys, generate.main, [*run, "--html", page])
        assert f"--html {page}: cannot be written (not a file)" in message
    with pytest.raises(SystemExit):
        generate.main([*run, "--html", "/dev/full"])
    assert "/dev/full cannot be written: [Errno 28] No space left" in capsys.readouterr().err
    for main, arguments in (generate.main, run), (minispec.__main__.main, []):
        with open("/dev/full", "w") as full, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            message = refused(capsys, main, arguments)
            assert "No space left on device: 'standard output'" in message
    page, link = tmp_path / "new" / "page.html", tmp_path / "link"
    link.symlink_to(tmp_path / "nothing yet")
    for file in page, link:  # the check creates only the folder
        check_writable(file, "--html")
    assert page.parent.is_dir() and not page.exists() and link.is_symlink()
    assert not list(page.parent.iterdir())
    exists = Path.exists

    def created_meanwhile(file, **options):
        """Another process creates the file right after the check for it."""
        found = exists(file, **options)
        if file.name == "raced":
            file.write_text("theirs")
        return found

    monkeypatch.setattr(Path, "exists", created_meanwhile)
    check_writable(tmp_path / "raced", "--html")
    assert (tmp_path / "raced").read_text() == "theirs"


def test_on_a_full_disk_the_earlier_page_stays(folder, tmp_path, capsys, monkeypatch):
    page = tmp_path / "page.html"
    page.write_text("earlier")
    run = ["x", "--model", folder, "--max-new-tokens", "1", "--html", page]
    with file_limit(8192), pytest.raises(SystemExit) as caught:
        generate.main(list(map(str, run)))
    err = capsys.readouterr().err
    assert caught.value.code == 2
    assert err == f"minispec: {page} cannot be written: [Errno 27] File too large\n"
    assert page.read_text() == "earlier" and list(tmp_path.iterdir()) == [page]
    no_new_files = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(tempfile, "TemporaryFile", no_new_files)  # before any long work
    error = f"--html {page}: cannot be written (Permission denied)"
    assert error in refused(capsys, generate.main, run)


def test_a_full_standard_output_is_named(tmp_path):
    program = "from minispec.cli import command\ncommand(lambda argv: print('x' * 2000))()"
    with open(tmp_path / "out", "w") as out, file_limit(1000):
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=out,
                              stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "minispec: [Errno 27] File too large: 'standard output'\n"


def test_a_shell_without_utf_8(folder):
    command = [sys.executable, "-m", "minispec.generate", "你好", "--model", folder]
    done = subprocess.run([*command, "--max-new-tokens", "0"], cwd=ROOT, timeout=100,
                          env=os.environ | {"LC_ALL": "C"}, stdout=subprocess.PIPE)  # fmt: skip
    assert (done.returncode, done.stdout.decode()) == (0, "你好\n")


def test_pipes_are_utf_8_and_statistics_go_to_standard_error(folder, monkeypatch, capsys):
    pipes = [io.TextIOWrapper(io.BytesIO(text), "cp1252") for text in ("你好".encode(), b"")]
    monkeypatch.setattr(sys, "stdin", pipes[0])
    monkeypatch.setattr(sys, "stdout", pipes[1])
    call("--model", folder, "--max-new-tokens", "2", "--stats", "--stop", "é")
    assert pipes[1].buffer.getvalue().decode().startswith("你好")
    assert "2 tokens (length) in 2 passes" in capsys.readouterr().err


def test_user_errors_in_a_notebook_leave_its_output_usable(monkeypatch, capsys):
    """Its stdin was already read and its output may not be a file. Its Ctrl-C handler is kept."""

    def fails(argv):
        raise FileNotFoundError(2, "gone")

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
    sys.stdin.readline()
    for out in io.StringIO(), sys.stdout:
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
            command(fails)([])
    print("still here")
    out, err = capsys.readouterr()
    assert out == "still here\n" and err.count("gone\n") == 2
    assert signal.getsignal(signal.SIGINT) is not cli.exit_on_sigint


def test_running_out_of_memory_is_a_one_line_error(capsys):
    def main(argv):
        raise RuntimeError(argv[0])

    error = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"
    assert error in refused(capsys, command(main), [error])
    for error in "CUDA out of memory. Tried to allocate 2.00 GiB", "MPS backend out of memory":
        assert error in refused(capsys, command(main), [error])
    for error in "a bug", "CUDA error: an illegal memory access was encountered":
        with pytest.raises(RuntimeError, match=error):
            command(main)([error])


def test_quoted_text_cannot_control_the_terminal(tmp_path, capsys):
    """Neither in a file name nor in an error raised by a chat template."""
    unsafe = "\x1b]0;pwned\x07\x1b[2J\u202ename\r\x9b1m"
    message = refused(capsys, generate.main, ["x", "--model", str(tmp_path / unsafe)])
    assert r"\x1b]0;pwned\x07\x1b[2J\u202ename" in message and message.rstrip("\n").isprintable()
    save(byte_model(eos=(256,)), byte_tokenizer("{{ raise_exception('\x1b[31mno') }}"), tmp_path)
    message = refused(capsys, generate.main, ["hi", "--chat", "--model", str(tmp_path)])
    assert r"rejects this conversation: \x1b[31mno" in message
    assert printable("naïve 猫 🙂 é") == "naïve 猫 🙂 é"


def test_with_json_standard_output_is_exactly_one_object(folder):
    """Whatever Python, C or child processes print while the model is loaded or Python exits."""
    program = (
        "import atexit, os, sys; from minispec.generate import __main__ as generate\n"
        "load = generate.load\n"
        "def noisy(*a):\n"
        "    print('python'); os.system('echo child'); os.write(1, b'c\\n'); return load(*a)\n"
        "generate.load = noisy; atexit.register(print, 'at exit'); generate.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "hi", "--model", folder, "--json"]
    done = subprocess.run([*command, "--max-new-tokens", "2"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0 and len(json.loads(done.stdout)["tokens"]) == 2
    assert {b"python", b"child", b"c"} <= set(done.stderr.splitlines())


@pytest.mark.slow  # Python compiles all of torch again
def test_optimised_python_runs_and_rejects_the_same(folder):
    """python -OO removes asserts and docstrings."""
    program = (
        "import sys; from minispec import bench, certify, fetch, pretrain\n"
        "from minispec.generate import __main__ as generate\n"
        "from minispec.certify.__main__ import main\n"
        "def code(run, *argv):\n"
        "    try: run([*argv])\n"
        "    except SystemExit as ended: return ended.code\n"
        "helps = generate.main, bench.main, main, fetch.main, pretrain.main\n"
        "[code(each, '-h') for each in helps] == [0] * 5 or sys.exit('help')\n"
        "wrong = code(generate.main, *sys.argv[1:], '--method', 'jacobi', '--block', '999')\n"
        "wrong == 2 or sys.exit('not refused')\n"
        "generate.main(sys.argv[1:])"
    )
    command = [sys.executable, "-OO", "-c", program, "hi", "--model", folder]
    done = subprocess.run([*command, "--max-new-tokens", "2"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == b"minispec: block 999: must be from 1 to 255\n"


def test_ctrl_c_stops_cleanly_and_keeps_the_output(tmp_path):
    """Both early (while torch is imported) and in the middle of a run."""
    save(byte_model(context=30_000), TOKENIZER, tmp_path)
    command = [sys.executable, "-m", "minispec.generate", "x", "--model", str(tmp_path),
               "--stats", "--ignore-eos", "--max-new-tokens", "29000"]  # fmt: skip
    early = 130, -signal.SIGINT  # the latter if Python itself had not started yet
    for wait, codes in (lambda _: time.sleep(0.5), early), (lambda out: out.read(20), (0,)):
        # a shell's background jobs ignore Ctrl-C, and their children inherit that
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) as process:  # fmt: skip
            signal.signal(signal.SIGINT, before)
            wait(process.stdout)
            process.send_signal(signal.SIGINT)
            message = process.communicate(timeout=60)[1].decode()
        assert process.returncode in codes and "Traceback" not in message
        assert ("tokens (interrupted) in" in message) == (codes == (0,))


def test_ctrl_c_shows_text_held_back_for_a_stop_string(monkeypatch, capsys):
    """When interrupted, "abc" is not shown yet because it may start the stop string."""
    monkeypatch.setitem(generate.METHODS, "scripted", scripted(TOKENIZER.encode("xyzabc..."), 1))
    run = stream(byte_model(), TOKENIZER, "x", method="scripted", stop=("abcd",))

    def six_chunks(chunks):
        for _ in range(6):
            yield next(chunks)
        raise KeyboardInterrupt

    run.chunks = six_chunks(run.chunks)
    generate.show(run, generate.parser().parse_args(["x"]), TOKENIZER, sys.stdout)
    assert run.text == "xyzabc" and capsys.readouterr().out == "xyzabc\n"


TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    """Like `folder`, but with a template that names the speakers and a context of 64."""
    path = tmp_path_factory.mktemp("talker")
    save(byte_model(context=64, eos=(256,)), byte_tokenizer(TEMPLATE), path)
    return str(path)


def chat_turns(capsys, monkeypatch, lines: str, *arguments: str) -> tuple[list[dict], str]:
    """The runs of a chat with these lines on standard input, and its standard error."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    call("--chat", "--json", "--dtype", "float64", *arguments)
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


def test_a_chat_processes_only_new_tokens(folder, capsys, monkeypatch, tmp_path):
    page = tmp_path / "last.html"
    options = ["--model", folder, "--max-new-tokens", "4", "--html", str(page)]
    first, second = chat_turns(capsys, monkeypatch, "hi\n\nhow are you?\n", *options)[0]
    # at least the first prompt, and the answer as far as its text encodes to the same tokens
    assert first["stats"]["cached_tokens"] == 0
    assert second["stats"]["cached_tokens"] >= first["prompt_tokens"]
    model, tokenizer = load(folder, "float64", "cpu")
    messages = [{"role": "user", "content": "hi"},
                {"role": "assistant", "content": first["text"].strip()},
                {"role": "user", "content": "how are you?"}]  # fmt: skip
    fresh = decode(model, tokenizer, tokenizer.chat(messages), max_new_tokens=4)
    assert second["tokens"] == fresh.tokens
    assert f'"tokens": {second["tokens"]}' in page.read_text(encoding="utf-8")


def test_the_draft_of_a_chat_processes_only_new_tokens(folder, capsys, monkeypatch):
    fed = []

    def recording_load_drafter(*arguments):
        draft = original_load_drafter(*arguments)["draft"]
        forward = draft.forward
        draft.forward = lambda tokens, *more: fed.append(len(tokens)) or forward(tokens, *more)
        return {"draft": draft}

    original_load_drafter = generate.drafters.load_drafter
    monkeypatch.setattr(generate.drafters, "load_drafter", recording_load_drafter)
    lines = "tell me everything\nand now this\n"
    options, drafts = ["--model", folder, "--max-new-tokens", "6"], ["--draft", folder]
    runs, _ = chat_turns(capsys, monkeypatch, lines, *options, "--method", "speculative", *drafts)
    long = [n for n in fed if n > 2]  # passes for neither drafts nor a bonus token
    assert len(long) == 2 and sum(long) < runs[1]["prompt_tokens"] + 6
    plain, _ = chat_turns(capsys, monkeypatch, lines, *options)
    assert [run["tokens"] for run in runs] == [run["tokens"] for run in plain]


@pytest.mark.parametrize("method", ["fastmtp", "eagle3", "hybrid"])
def test_the_head_of_a_chat_sees_the_whole_text(tmp_path, capsys, monkeypatch, method):
    """The second turn is drafted as it would be in a new run of the whole conversation."""
    model = byte_model()
    save(model, TOKENIZER, tmp_path)
    save_mtp(random_mtp_head(model, 1), tmp_path / "mtp", "x", None, torch.float64, [1.0])
    save_eagle3(random_eagle3_head(model, 1), tmp_path / "eagle3", "x", None, torch.float64)
    options = ["--model", str(tmp_path), "--max-new-tokens", "9", "--method", method]
    runs = []

    def recorded(*arguments, **more):
        runs.append(stream(*arguments, **more))
        return runs[-1]

    monkeypatch.setattr(terminal, "stream", recorded)
    chat_turns(capsys, monkeypatch, "tell me everything\nand now this\n", *options)
    loaded, tokenizer = load(tmp_path, "float64", "cpu")
    fresh = decode(loaded, tokenizer, runs[1].prompt, method, max_new_tokens=9)
    assert runs[1].cached_tokens > 9 and runs[1].tokens == fresh.tokens
    assert [step.tree for step in runs[1].rounds] == [step.tree for step in fresh.rounds]


def test_a_chat_begins_with_the_prompt_and_the_system_message(chat_folder, capsys, monkeypatch):
    options = ["--model", chat_folder, "--max-new-tokens", "2", "--system", "S"]
    for lines, prompt in (("yo\n", []), ("yo\n", ["hi"]), ("", ["hi"])):
        runs = chat_turns(capsys, monkeypatch, lines, *options, *prompt)[0]
        prompts = [TOKENIZER.decode(run["prompt_ids"]) for run in runs]
        assert prompts[0].startswith("s:S\nu:" + ("hi" if prompt else "yo"))
        assert len(runs) == bool(lines) + len(prompt) and (not lines or "u:yo\n" in prompts[-1])


def test_a_chat_longer_than_the_context_drops_its_oldest_turns(chat_folder, capsys, monkeypatch):
    lines = "".join(f"turn {i} of many\n" for i in range(6))
    options = ["--model", chat_folder, "--max-new-tokens", "9", "--system", "S", "--ignore-eos"]
    runs, err = chat_turns(capsys, monkeypatch, lines, *options)
    assert len(runs) == 6 and err.count("dropping the oldest turn\n") == err.count("\n") > 1
    last = TOKENIZER.decode(runs[-1]["prompt_ids"])
    assert last.startswith("s:S\nu:turn") and "turn 5" in last and "turn 0" not in last
    assert all(run["finish_reason"] == "length" for run in runs)


def test_a_chat_skips_a_turn_that_is_longer_than_the_context(chat_folder, capsys, monkeypatch):
    options = ["--model", chat_folder, "--max-new-tokens", "9", "--ignore-eos"]
    too_long = "the turn has 104 tokens, but the context is only 64; shorten it"
    runs, err = chat_turns(capsys, monkeypatch, "hi\n" + "x" * 99 + "\nyo\n", *options)
    assert err == f"minispec: {too_long}\n"
    expected = chat_turns(capsys, monkeypatch, "hi\nyo\n", *options)[0]
    assert [run["prompt_ids"] for run in runs] == [run["prompt_ids"] for run in expected]
    for arguments, message in (
        (["x" * 99], too_long),
        (["hi", "--system", "x" * 99], "with the system message, but the context is only 64"),
    ):
        arguments = ["--chat", "--model", chat_folder, *arguments]
        assert message in refused(capsys, generate.main, arguments)


def test_invalid_utf_8_ends_a_chat_after_the_earlier_turns(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\n\xff\n")))
    with pytest.raises(SystemExit) as caught:
        call("--model", folder, "--chat", "--json", "--max-new-tokens", "2")
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and len(out.splitlines()) == 1 and "not valid Unicode" in err


def test_an_end_token_that_only_the_tokenizer_names_is_reported_once(tmp_path, capsys, monkeypatch):
    save(byte_model(eos=(258,)), TOKENIZER, tmp_path)
    message = (f"does not list {END}, the tokenizer's end token, so generation does not stop there;"
               " add 256 to eos_token_id in generation_config.json, or its text to --stop")
    options = ["--model", str(tmp_path), "--max-new-tokens", "2"]
    assert chat_turns(capsys, monkeypatch, "hi\nho\n", *options)[1].count(message) == 1
    call(*options, "x")
    assert message in capsys.readouterr().err
    for silent in ["--stop", END], ["--ignore-eos"]:
        call(*options, "x", *silent)
        assert capsys.readouterr().err == ""


def test_each_turn_of_a_sampled_chat_uses_new_random_numbers(tmp_path, capsys, monkeypatch):
    """The template keeps only the last message, so both turns have the same prompt."""
    save(byte_model(), byte_tokenizer("{{ messages[-1].content }}"), tmp_path)
    options = ["--model", str(tmp_path), "--temperature", "1", "--max-new-tokens", "9"]
    first, second = chat_turns(capsys, monkeypatch, "hi\nhi\n", *options)[0]
    assert first["prompt_ids"] == second["prompt_ids"] and first["tokens"] != second["tokens"]
