"""`distill generate --server`: a server generates the text that our sampler would."""

import json
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import ASSISTANT, CHAT_TEMPLATE, END, END_TURN, ROOT, USER, last_error_line
from served import CorrectServer, TextPrompts, serving
from tokenizers.processors import TemplateProcessing

from minispec import load
from minispec.certify.toys import letter_tokenizer, small_model
from minispec.checkpoints.load import save
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.distill import server
from minispec.distill.__main__ import main as distill_main
from minispec.distill.generated import read_generated
from minispec.remote.client import Server, in_parallel

CONTROL = [END, USER, ASSISTANT, END_TURN]
GREEDY = "--temperature", 0, "--top-k", 0, "--top-p", 1


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(server, "RETRY_SECONDS", (0.01, 0.01))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A model whose tokens are 20 letters and the control tokens. Greedily, it never writes the
    last three of those, so its text has its tokens."""
    tokenizer = letter_tokenizer(20)
    tokenizer.backend.add_special_tokens(CONTROL)
    tokenizer = Tokenizer(tokenizer.backend, {"bos_token": END, "eos_token": END}, CHAT_TEMPLATE)
    model = small_model(3, tokenizer.size, 128, eos_ids=(20,))
    model.lm_head.weight[21:] = 0.5 * model.lm_head.weight[0]
    path = tmp_path_factory.mktemp("letters") / "target"
    save(model, tokenizer, path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(0)
    texts = ["".join(rng.choices("abcdefghijklmnopqrst", k=40)) for _ in range(150)]
    (folder / "tales.txt").write_text("\n<|endoftext|>\n".join(texts[:80]))
    rows = [{"prompt": text[:9]} for text in texts[80:]]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def backend(target, server_class=CorrectServer) -> CorrectServer:
    return server_class(*load(target, "float64", "cpu"))


def arguments(target, out, *more) -> list[str]:
    fixed = ["generate", "--model", target, "--out", out, "--tokens", 20, "--batch", 8,
             "--dtype", "float64", "--device", "cpu"]  # fmt: skip
    return [str(argument) for argument in (*fixed, *more)]


def generated(target, out, *more) -> list[dict]:
    """Run `generate` and return the documents it wrote."""
    distill_main(arguments(target, out, *more))
    return read_generated(out)[1]


def rejected(capsys, target, out, *more) -> str:
    return last_error_line(capsys, lambda: distill_main(arguments(target, out, *more)))


# ---- the same text -------------------------------------------------------------------------------


class TextOnly(TextPrompts):
    """Accept and return text only."""

    def choice(self, request, seed):
        found = super().choice(request, seed)
        return {name: found[name] for name in ("text", "finish_reason")}


@pytest.mark.slow
@pytest.mark.parametrize("server_class", [CorrectServer, TextOnly])
@pytest.mark.parametrize("ask", [(), ("--ask", "abc{:.9}")])
def test_greedy_text_is_that_of_our_sampler(target, data, tmp_path, server_class, ask):
    more = "--data", data, "--documents", 40, *GREEDY, *ask
    ours = generated(target, tmp_path / "ours.jsonl", *more)
    with serving(backend(target, server_class)) as url:
        served = generated(target, tmp_path / "served.jsonl", *more, "--server", url)
    assert served == ours and {row["kind"] for row in ours} == {"tales", "asked"}
    assert {len(row["tokens"]) < 20 for row in ours} == {True, False}  # some end before the limit
    assert read_generated(tmp_path / "served.jsonl")[0]["options"]["server"] is True


@pytest.mark.slow
@pytest.mark.parametrize("server_class", [CorrectServer, TextOnly])
def test_the_server_writes_user_turns_too(target, tmp_path, server_class):
    more = "--chat", "ab", "cde", "--documents", 20
    with serving(backend(target, server_class)) as url:
        rows = generated(target, tmp_path / "own.jsonl", *more, "--server", url)
    tokenizer = load(target, "float32", "cpu")[1]
    header = tokenizer.user_header()
    beginnings = [header + tokenizer.encode(text) for text in ("ab", "cde")]
    assert len(rows) >= 20
    for row in rows:
        assert any(row["prompt"][: len(ids)] == ids for ids in beginnings)
        assert row["prompt"][-2:] == [23, 22]  # the end of the turn and the answer's header


def test_a_server_adds_the_bos_of_a_text_prompt_itself():
    tokenizer = letter_tokenizer(8)
    tokenizer.backend.add_special_tokens([END])
    tokenizer.backend.post_processor = TemplateProcessing(f"{END} $A", special_tokens=[(END, 8)])
    client = Server("http://127.0.0.1:9", tokenizer, None, ())
    assert tokenizer.encode("abc") == [8, 0, 1, 2] and client.as_text([8, 0, 1, 2]) == "abc"
    assert client.as_text([8, 8, 0, 1]) == f"{END}ab" and client.as_text([0, 1]) == "ab"


class Records(CorrectServer):
    """Keep the requests, and the largest number of requests at once."""

    busy = most = 0

    def answer(self, request):
        self.requests = getattr(self, "requests", [])
        with self.lock:
            self.requests.append(request)
            self.busy += 1
            self.most = max(self.most, self.busy)
        time.sleep(0.02)
        try:
            return super().answer(request)
        finally:
            with self.lock:
                self.busy -= 1


def test_requests_have_the_sampling_and_seeds_of_their_own_and_are_sent_at_once(
    target, data, tmp_path
):
    records = backend(target, Records)
    flags = "--temperature", 0.7, "--top-k", 5, "--top-p", 0.9, "--keep-duplicates"
    flags += "--documents", 16
    with serving(records) as url:
        rows = generated(target, tmp_path / "own.jsonl", "--data", data, *flags, "--server", url)
    sampled = [request for request in records.requests if request["temperature"]]
    names = "temperature", "top_k", "top_p", "max_tokens"
    assert {tuple(request[name] for name in names) for request in sampled} == {(0.7, 5, 0.9, 20)}
    assert len({request["seed"] for request in sampled}) == len(sampled) == len(rows) == 16
    assert records.most == 8


def test_interrupted_text_continues(target, data, tmp_path, capsys):
    """The server may have another address; our own sampler and another server name are refused."""
    single, parts = tmp_path / "single.jsonl", tmp_path / "parts.jsonl"
    more = "--keep-duplicates", "--data", data, "--server"
    with serving(backend(target)) as url:
        generated(target, single, "--documents", 60, *more, url)
        generated(target, parts, "--documents", 32, *more, url)
    with serving(backend(target)) as url:
        generated(target, parts, "--documents", 60, *more, f"{url}/v1")
    assert single.read_text() == parts.read_text()
    error = rejected(capsys, target, parts, *more[:-1], "--documents", 50)
    assert "was started with another --server" in error


def test_near_duplicates_are_dropped(target, tmp_path, capsys):
    (tmp_path / "same.jsonl").write_text('{"prompt": "abc"}\n' * 60)
    more = "--data", tmp_path / "same.jsonl", *GREEDY
    with serving(backend(target)) as url:
        error = rejected(capsys, target, tmp_path / "own.jsonl", *more, "--server", url)
    assert "generated only 1 distinct documents" in error


# ---- servers that fail ---------------------------------------------------------------------------


class Dies(CorrectServer):
    """Shut down during the 30th answer."""

    answered = 0

    def answer(self, request):
        with self.lock:
            self.answered += 1
            last = self.answered == 30
        if self.answered < 30:
            return super().answer(request)
        if last:
            self.server.shutdown()
            self.server.server_close()
            self.dead.set()
        self.dead.wait(10)
        raise RuntimeError


def test_a_server_that_dies_leaves_the_documents_so_far(target, data, tmp_path, capsys):
    out, more = tmp_path / "own.jsonl", ("--data", data, "--documents", 40)
    dies = backend(target, Dies)
    dies.dead = threading.Event()
    with serving(dies) as url:
        error = rejected(capsys, target, out, *more, "--server", url)
    assert "the documents so far are in --out" in error
    # it may die in the middle of an answer, too
    assert "cannot be reached" in error or "broke off its answer" in error
    rows = read_generated(out)[1]
    assert 8 <= len(rows) < 30
    with serving(backend(target)) as url:
        assert generated(target, out, *more, "--server", url)[: len(rows)] == rows


class Hangs(CorrectServer):
    """Answer all but the 20th request, and set `hanging` once the others of its pool are done."""

    answered = 0

    def answer(self, request):
        with self.lock:
            self.answered += 1
            count = self.answered
        if count == 20:
            time.sleep(1)
            self.hanging.set()
            self.released.wait(60)
        return super().answer(request)


@pytest.mark.slow
def test_ctrl_c_loses_no_finished_answer_and_waits_for_none(target, data, tmp_path):
    """The command runs in a process of its own. One of its 32 requests hangs."""
    hangs, out = backend(target, Hangs), tmp_path / "own.jsonl"
    hangs.hanging, hangs.released = threading.Event(), threading.Event()
    with serving(hangs) as url:
        more = "--data", data, "--documents", 40, "--keep-duplicates", "--server", url
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:  # a process started in the background would ignore SIGINT
            command = [sys.executable, "-m", "minispec.distill", *arguments(target, out, *more)]
            process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        finally:
            signal.signal(signal.SIGINT, before)
        assert hangs.hanging.wait(60), process.communicate(timeout=10)
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        error = process.communicate(timeout=30)[1]
        hangs.released.set()
    assert process.returncode == 130 and "Traceback" not in error
    assert time.monotonic() - begin < 10
    assert len(read_generated(out)[1]) == 31


def test_finished_results_are_yielded_before_an_exception():
    started = threading.Barrier(4)

    def ask(i: int) -> int:
        started.wait()
        if i == 1:
            time.sleep(0.1)
            raise ValueError
        return i * i

    results = in_parallel(ask, [0, 1, 2, 3], 4)
    assert [next(results) for _ in range(3)] == [(0, 0), (2, 4), (3, 9)]
    pytest.raises(ValueError, next, results)


class Stumbles(CorrectServer):
    """Fail on every third request, or on all but the first `works`."""

    count, works = 0, None

    def answer(self, request):
        self.count += 1
        if self.count % 3 == 0 if self.works is None else self.count > self.works:
            return 500, {"error": {"message": "out of memory"}}
        return super().answer(request)


class Fails(Stumbles):
    works = 20


def test_failed_requests_are_repeated_but_not_forever(target, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(server, "RETRY_SECONDS", (0.01,) * 6)
    more = "--data", data, "--documents", 24, "--keep-duplicates"
    with serving(backend(target, Stumbles)) as url:
        assert len(generated(target, tmp_path / "a.jsonl", *more, "--server", url)) == 24
    with serving(backend(target, Fails)) as url:
        error = rejected(capsys, target, tmp_path / "b.jsonl", *more, "--server", url)
    assert "HTTP 500: out of memory" in error and read_generated(tmp_path / "b.jsonl")[1]


class BreaksOff(CorrectServer):
    """Break off every third of the long answers."""

    reason, count = "abort", 0

    def answer(self, request):
        status, found = super().answer(request)
        self.count += request["max_tokens"] == 20
        broken = request["max_tokens"] == 20 and self.count % 3 == 0
        return status, self.broken_off(found) if broken else found

    def broken_off(self, found: dict) -> dict | bytes:
        (choice,) = found["choices"]
        cut = {"token_ids": choice["token_ids"][:5], "finish_reason": self.reason}
        return {"choices": [choice | cut]}


class CutsJson(BreaksOff):
    """Break the connection within an answer that has no Content-Length."""

    def broken_off(self, found):
        return json.dumps(found).encode()[: 20 * (self.count % 2)]


@pytest.mark.parametrize(
    "server_class, reason",
    [(CutsJson, None), (BreaksOff, "abort"),
     *(pytest.param(BreaksOff, reason, marks=pytest.mark.slow) for reason in
       ("error", "content_filter", {"type": "abort", "message": "overloaded"}))],
)  # fmt: skip
def test_an_answer_that_is_broken_off_is_asked_for_again(
    target, data, tmp_path, monkeypatch, server_class, reason
):
    monkeypatch.setattr(server, "RETRY_SECONDS", (0.01,) * 6)
    monkeypatch.setattr(server_class, "reason", reason)
    more = "--data", data, "--documents", 16, "--keep-duplicates", "--server"
    rows = []
    for one in server_class, CorrectServer:
        with serving(backend(target, one)) as url:
            rows.append(generated(target, tmp_path / f"{one.__name__}.jsonl", *more, url))
    assert rows[0] == rows[1]


class NeverAnswersUsers(Records):
    """Break off the answers in conversations."""

    def choice(self, request, seed):
        aborted = {"text": "", "token_ids": [0], "finish_reason": "abort"}
        return aborted if 23 in request["prompt"] else super().choice(request, seed)


def test_every_document_that_is_left_out_is_counted(target, data, tmp_path, capsys):
    """Although their prompts are the same."""
    (tmp_path / "same.jsonl").write_text('{"prompt": "abc"}\n' * 80)
    more = "--data", data / "tales.txt", tmp_path / "same.jsonl", "--documents", 16, "--server"
    records = backend(target, NeverAnswersUsers)
    with serving(records) as url:
        rows = generated(target, tmp_path / "own.jsonl", *more, url)
    assert {row["kind"] for row in rows} == {"tales"}
    asked = [r for r in records.requests if 23 in r["prompt"] and r["max_tokens"] == 20]
    count = len({request["seed"] for request in asked})
    note = f"documents skipped: {count}; the first is prompt 1, 'abc': the server breaks off"
    assert count > 1 and len(asked) == 3 * count and note in capsys.readouterr().err


class ShortContext(CorrectServer):
    """Reject long prompts, without saying so in the list of models."""

    longest = 12

    def answer(self, request):
        if len(request["prompt"]) > self.longest:
            return 400, {"error": {"message": "the prompt is too long"}}
        return super().answer(request)


class NoContext(ShortContext):
    longest = 3


def test_rejected_prompts_are_left_out(target, data, tmp_path, capsys):
    more = "--data", data / "tales.txt", "--documents", 60
    with serving(backend(target, ShortContext)) as url:
        rows = generated(target, tmp_path / "a.jsonl", *more, "--server", url)
    assert max(len(row["prompt"]) for row in rows) == 12
    reason = "the server rejects it: HTTP 400: the prompt is too long"
    assert reason in capsys.readouterr().err.splitlines()[-1]
    with serving(backend(target, NoContext)) as url:
        error = rejected(capsys, target, tmp_path / "b.jsonl", *more, "--server", url)
    assert "generated only 0 distinct documents" in error and reason in error


class ReportsContext(CorrectServer):
    def models(self):
        return 200, {"data": [{"id": "toy", "max_model_len": 30}]}


def test_prompts_fit_the_context_that_the_server_reports(target, data, tmp_path):
    more = "--data", data / "tales.txt", "--documents", 16
    assert max(len(row["prompt"]) for row in generated(target, tmp_path / "ours.jsonl", *more)) > 10
    with serving(backend(target, ReportsContext)) as url:
        rows = generated(target, tmp_path / "own.jsonl", *more, "--server", url)
    assert max(len(row["prompt"]) for row in rows) <= 10


# ---- the wrong server ----------------------------------------------------------------------------


class OtherModel(CorrectServer):
    def __init__(self, model, tokenizer):
        super().__init__(small_model(4, model.config.vocab_size, 128, eos_ids=(20,)), tokenizer)


class AddsBOS(CorrectServer):
    def prompt(self, ids):
        return [20, *ids]


class UnknownTokens(CorrectServer):
    def choice(self, request, seed):
        found = super().choice(request, seed)
        return found | {"token_ids": [10**6]} if request["max_tokens"] == 20 else found


class Strict(CorrectServer):
    """Reject all fields but OpenAI's."""

    def answer(self, request):
        if "min_p" in request:
            return 422, {"detail": "extra fields not permitted"}
        return super().answer(request)


@pytest.mark.parametrize("server_class, snippet", [
    (OtherModel, "does not serve --model: another model"),
    (AddsBOS, "does not serve --model: "),
    (UnknownTokens, "returned token 1000000, which --model lacks"),
    (Strict, "does not support top_k; use --top-k 0"),
])  # fmt: skip
def test_a_wrong_server_is_refused(target, data, tmp_path, capsys, server_class, snippet):
    out, more = tmp_path / "own.jsonl", ("--data", data)
    with serving(backend(target, server_class)) as url:
        assert snippet in rejected(capsys, target, out, *more, "--server", url)
    assert read_generated(out)[1] == []


def test_a_server_whose_own_settings_apply_is_noted(target, data, tmp_path, capsys):
    more = "--data", data, "--documents", 8, *GREEDY
    for server_class, notes in (CorrectServer, 0), (TextOnly, 0), (Strict, 1):
        out = tmp_path / f"{server_class.__name__}.jsonl"
        with serving(backend(target, server_class)) as url:
            generated(target, out, *more, "--server", url)
        assert capsys.readouterr().err.count("accepts OpenAI's fields only") == notes


class IgnoresTopK(CorrectServer):
    def run(self, request, seed):
        return super().run(request | {"top_k": -1}, seed)


@pytest.mark.parametrize("server_class, noted", [(CorrectServer, False), (IgnoresTopK, True)])
def test_samples_that_our_warpers_remove_are_noted(
    target, data, tmp_path, capsys, server_class, noted
):
    more = "--data", data, "--documents", 24, "--temperature", 1, "--top-k", 3
    with serving(backend(target, server_class)) as url:
        generated(target, tmp_path / "own.jsonl", *more, "--server", url)
    assert capsys.readouterr().err.count("samples differently: ") == noted


# ---- flags ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, message", [
    (["--server", "http://127.0.0.1:9"], "cannot be reached"),
    (["--server", ""], "not a valid address"),
    (["--name", "x"], "--name only works with --server"),
    (["--key-env", "X"], "--key-env only works with --server"),
    (["--server", "http://127.0.0.1:9", "--key-env", "MISSING_KEY"], "is not set or does not hold"),
])  # fmt: skip
def test_wrong_flags_are_one_line(target, data, tmp_path, capsys, flags, message):
    out = tmp_path / "own.jsonl"
    assert message in rejected(capsys, target, out, "--data", data, *flags)
    assert not out.exists()


def test_the_key_and_the_name_are_sent(target, data, tmp_path, monkeypatch):
    class Two(Records):
        name = ["one", "two"]

    monkeypatch.setenv("MINE", "sk-mine")
    records = backend(target, Two)
    more = "--data", data, "--documents", 8, "--key-env", "MINE", "--name", "two"
    with serving(records) as url:
        generated(target, tmp_path / "own.jsonl", *more, "--server", url)
    assert set(records.keys) == {"Bearer sk-mine"}
    assert {request["model"] for request in records.requests} == {"two"}
