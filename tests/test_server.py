"""A correct server passes, each wrong one is caught, and an unusable one gives a one-line error."""

import contextlib
import copy
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import replace

import httpx
import pytest
import torch
from conftest import TOKENIZER, byte_model
from served import CorrectServer, TextPrompts, serving

from lessons.assignments import mutants
from minispec import cli
from minispec.certify.__main__ import main
from minispec.certify.common import NotSupported
from minispec.certify.examination import Request
from minispec.certify.methods import cases
from minispec.certify.servers import checks as server
from minispec.certify.servers.checks import SERVER_SAMPLINGS, check_server
from minispec.certify.servers.context import ServerDecoder
from minispec.certify.toys import letter_tokenizer, small_model
from minispec.checkpoints.load import save
from minispec.cli import UserError
from minispec.remote.client import RequestError, Server, is_stop_reason

END, OTHER_END = 256, 259
MODEL = byte_model(0, context=300, eos=(END, OTHER_END))


def with_noise(model, noise: float):
    """Return a noisy copy of a model, a draft that is often right."""
    draft, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    for p in draft.parameters():
        p.add_(noise * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return draft


with torch.no_grad():
    LETTERS = small_model(3, vocab=8, layers=1)
    DRAFT = with_noise(LETTERS, 0.25)


def examine(
    backend, url=None, baseline=None, name=None, seconds=60.0, model=None, key=None, **options
):
    """Return the verdicts on a server of ours."""
    model, tokenizer = model or backend.model, backend.tokenizer

    def client(address):
        return Server(address, tokenizer, name, model.config.eos_ids, seconds, key)

    with serving(backend) as address, torch.no_grad():
        plain = baseline and client(baseline)
        return list(check_server(client(url or address), model, tokenizer, plain, **options))


def byte_server(server_class=CorrectServer):
    return server_class(MODEL, TOKENIZER, "prompt-lookup", k=3)


def letter_server(server_class=CorrectServer):
    return server_class(LETTERS, letter_tokenizer(8), "speculative", draft=DRAFT, k=1)


def plain_server(server_class=CorrectServer):
    return server_class(LETTERS, letter_tokenizer(8))


def failures(verdicts) -> list[tuple[str, str]]:
    return [(v.check, v.case) for v in verdicts if v.passed is False]


@pytest.mark.slow
def test_a_correct_server_passes():
    verdicts = examine(byte_server(), requests=600, samplings=SERVER_SAMPLINGS[4:])
    assert not failures(verdicts), verdicts
    assert {v.check for v in verdicts if v.passed} == {
        "server", "greedy", "limits", "sampled", "distribution", "drafts",
    }  # fmt: skip
    assert [v for v in verdicts if v.passed is None] == []


@pytest.mark.parametrize("dtype, equal", [(torch.float64, True), (torch.bfloat16, False)], ids=str)
def test_texts_with_and_without_drafts_are_compared_bit_by_bit(dtype, equal):
    """A difference of rounding fails, although it is a tie."""
    drafting = CorrectServer(copy.deepcopy(LETTERS).to(dtype), letter_tokenizer(8), "prompt-lookup")
    with serving(plain_server()) as baseline:
        rows = examine(drafting, baseline=baseline, model=LETTERS, checks=("bits",),
                       precision=torch.bfloat16)  # fmt: skip
    (row,) = (row for row in rows if row.check == "bits")
    assert row.passed == equal
    assert ("differs at token" in row.detail) != equal
    assert re.search(r"\d\d prompts, \d+ tokens, \d+ near ties", row.detail)


# ---- wrong servers -------------------------------------------------------------------------------


class TruncatesPrompts(CorrectServer):
    """Forget the distant part of a prompt."""

    def prompt(self, ids):
        return ids[-140:]


class StalePrefixCache(CorrectServer):
    """Use stale rows of a prefix cache."""

    seen = ()

    def run(self, request, seed):
        before, self.seen = self.seen, request["prompt"]
        if before == self.seen:
            request = request | {"prompt": request["prompt"][1:] or [0]}
        return super().run(request, seed)


def mutated(mutant: str, make=byte_server) -> CorrectServer:
    """Return a server that runs with one of certify's mutants."""
    (patch,) = (m for m in mutants.MUTANTS if m.name == mutant)

    class Mutated(CorrectServer):
        runs = {}

        def run(self, request, seed):
            with self.lock, patch.apply():
                self.options["rule"] = cases.accept  # which some of the mutants replace
                return super().run(request, seed)

    return make(Mutated)


class OneTokenTooMany(CorrectServer):
    def run(self, request, seed):
        return super().run(request | {"max_tokens": request["max_tokens"] + 1}, seed)


class IgnoresOneEos(CorrectServer):
    """Continue past one of the two end tokens."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.model = copy.deepcopy(self.model)
        self.model.config = replace(self.model.config, eos_ids=(OTHER_END,))


class ScaledLogprobs(CorrectServer):
    def logprobs(self, run):
        return [0.97 * logprob for logprob in super().logprobs(run)]


class Leaks(CorrectServer):
    """Use the temperature of a concurrent request."""

    busy: list[float] = []

    def run(self, request, seed):
        self.busy.append(request["temperature"])
        time.sleep(0.003)
        try:
            return super().run(request | {"temperature": max(self.busy)}, seed)
        finally:
            self.busy.remove(request["temperature"])


@pytest.mark.parametrize(
    "wrong, check, case",
    [
        (TruncatesPrompts, "greedy", "prompts"),
        (StalePrefixCache, "greedy", "turns"),
        (OneTokenTooMany, "limits", "all"),
        (IgnoresOneEos, "limits", "all"),
        (ScaledLogprobs, "limits", "logprobs"),
        (Leaks, "greedy", "batches"),
    ],
)  # fmt: skip
def test_a_wrong_server_is_caught(wrong, check, case):
    verdicts = examine(byte_server(wrong), model=MODEL, only=f"{check}: {case}", requests=400)
    assert verdicts[0].passed, verdicts
    assert failures(verdicts) == [(check, case)], verdicts
    assert verdicts[1].evidence or case == "logprobs"


@pytest.mark.parametrize("wrong, kind", [(TruncatesPrompts, "prompts"), (Leaks, "batches")])
def test_a_greedy_difference_from_the_baseline_is_a_loss(wrong, kind):
    with serving(byte_server()) as baseline:
        options = dict(baseline=baseline, only=f"greedy: {kind}", requests=400)
        *_, verdict, _ = examine(byte_server(wrong), **options)
    assert verdict.passed is False and "top-2 gap" in verdict.detail, verdict


def test_a_wrong_acceptance_is_caught_by_greedy_answers():
    assert failures(
        examine(mutated("draft verified against the next position"), checks=("greedy",))
    )


# ---- sampled -------------------------------------------------------------------------------------


class SmallerTopP(CorrectServer):
    def run(self, request, seed):
        return super().run(request | {"top_p": request["top_p"] ** 4}, seed)


class NoTopK(CorrectServer):
    def run(self, request, seed):
        return super().run(request | {"top_k": -1}, seed)


class OneSeed(CorrectServer):
    def run(self, request, seed):
        return super().run(request, 7)


class IgnoresSeeds(CorrectServer):
    count = 0

    def run(self, request, seed):
        self.count += 1
        return super().run(request, self.count)


def examine_samples(backend, sampling: int, requests: int):
    """Return the verdicts on seeds and on one sampling."""
    verdicts = examine(backend, checks=("distribution",), requests=requests,
                       samplings=SERVER_SAMPLINGS[sampling : sampling + 1])  # fmt: skip
    assert verdicts[0].passed
    return [v for v in verdicts if v.check == "distribution"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant, requests",
    [
        ("a rejection resamples from p", 450),
        ("bonus token is the argmax", 250),
        ("acceptance probability divided by 0.8", 2000),
    ],
)
def test_a_wrong_acceptance_is_caught_by_samples(mutant, requests):
    seeds, sampled = examine_samples(mutated(mutant, letter_server), 0, requests)
    assert seeds.passed and sampled.passed is False and "p = " in sampled.detail


class HotIsClamped(CorrectServer):
    def run(self, request, seed):
        return super().run(request | {"temperature": min(request["temperature"], 0.6)}, seed)


@pytest.mark.parametrize("server_class, passed", [(HotIsClamped, False),
                         pytest.param(CorrectServer, True, marks=pytest.mark.slow)])  # fmt: skip
def test_sampled_tokens_of_drawn_requests_are_judged(server_class, passed):
    found = examine(letter_server(server_class), requests=700, only="sampled: temperature")
    (row,) = (v for v in found if v.check == "sampled")
    assert row.passed is passed and row.detectable_tv, row
    assert passed or re.search("biased: .* bin .* times instead of", row.detail)
    assert passed or row.evidence["tokens"]


@pytest.mark.parametrize(
    "wrong, sampling, passed, snippets",
    [
        (CorrectServer, 0, [True, True], ["equal seeds agree", "p = "]),
        (NoTopK, 2, [True, False], ["equal seeds agree", "has probability 0"]),
        (SmallerTopP, 3, [True, False], ["equal seeds agree", "p = "]),
        (OneSeed, 0, [False, False], ["the same answer for every", "the same tokens for every"]),
        (IgnoresSeeds, 0, [None, True], ["seeds are ignored", "p = "]),
    ],
)  # fmt: skip
def test_wrong_sampling_is_caught(wrong, sampling, passed, snippets):
    rows = examine_samples(plain_server(wrong), sampling, 90)
    assert [v.passed for v in rows] == passed, rows
    assert all(text in v.detail for text, v in zip(snippets, rows)), rows


@pytest.mark.slow
def test_with_a_baseline_a_deviating_convention_passes():
    """Both plain and speculative decoding use another top-p."""
    plain = plain_server(SmallerTopP)
    backend = SmallerTopP(LETTERS, letter_tokenizer(8), "prompt-lookup")
    options = dict(requests=220, samplings=SERVER_SAMPLINGS[3:4], checks=("distribution",))
    with serving(plain) as baseline:
        verdicts = examine(backend, baseline=baseline, **options)
    assert not failures(verdicts), verdicts
    differ = [v.case for v in verdicts if v.check == "baseline" and not v.passed]
    assert differ == ["distribution, T=1 top-k 0 top-p 0.8"]
    with serving(plain_server()) as baseline:
        verdicts = examine(backend, baseline=baseline, **options)
    assert failures(verdicts) == [("distribution", "T=1 top-k 0 top-p 0.8")]


def test_without_requests_or_time_a_row_is_skipped(monkeypatch):
    _, verdict, _ = examine(plain_server(), requests=60, only="distribution: T=0.6")
    assert verdict.passed is None and "answers from --requests; increase it" in verdict.detail
    with serving(plain_server()) as url:
        late = ServerDecoder(Server(url, None, "toy", ()), LETTERS, None, end=0.0)
        with pytest.raises(RequestError, match="30 minutes are over"):
            late.batch([Request([1], 2)] * 2)
    monkeypatch.setattr(server.context, "TIME_LIMIT_MINUTES", 0)
    model, *rows, _ = examine(plain_server())
    assert model.passed and not any(row.passed for row in rows)
    assert all("minutes are over" in row.detail or "not enough time" in row.detail for row in rows)


# ---- formats of requests and answers -------------------------------------------------------------


class TextIn(TextPrompts):
    """Accept text only, but return ids; use another finish reason for end tokens."""

    def choice(self, request, seed):
        found = super().choice(request, seed)
        return found | {"finish_reason": {"stop": "eos_token"}.get(found["finish_reason"])}


class TextOnly(TextIn):
    """Accept and return text only."""

    def choice(self, request, seed):
        found = super().choice(request, seed)
        return {name: found[name] for name in ("text", "finish_reason")}


class Strict(CorrectServer):
    """Reject all fields but OpenAI's."""

    def answer(self, request):
        if "min_p" in request:
            return 422, {"detail": "extra fields not permitted"}
        return super().answer(request)


class IdsInLogprobs(CorrectServer):
    """Return ids as llama.cpp does."""

    def choice(self, request, seed):
        found = super().choice(request, seed)
        ids = found.pop("token_ids")
        logprobs = found.pop("logprobs", None)
        if logprobs:
            content = zip(ids, logprobs["token_logprobs"])
            found["logprobs"] = {"content": [{"id": i, "logprob": p} for i, p in content]}
        return found


class LlamaCpp(IdsInLogprobs):
    """Leave tokens out of the logprobs, as llama.cpp does with parts of characters, but not of the
    answers of its own API."""

    paths = CorrectServer.paths + ("/completion",)

    def choice(self, request, seed):
        found = super().choice(request, seed)
        if found.get("logprobs"):
            content = found["logprobs"]["content"]
            found["logprobs"]["content"] = [x for x in content if x["id"] % 3]
        return found

    def answer(self, request):
        if request["path"] != "/completion":
            return super().answer(request)
        found = CorrectServer.choice(self, request, request["seed"])
        reason = "eos" if found["finish_reason"] == "stop" else "limit"
        return 200, {"content": found["text"], "tokens": found["token_ids"], "stop_type": reason}


def test_all_token_ids_are_taken_from_llama_cpps_own_api():
    verdicts = examine(byte_server(LlamaCpp), checks=("greedy",), requests=60)
    assert "returns token ids" in verdicts[0].detail and not failures(verdicts), verdicts


@pytest.mark.slow
@pytest.mark.parametrize("server_class, snippet, check, missing", [
    (TextOnly, "accepts text, returns text, encoded by our", "greedy", ["all"]),
    (TextIn, "accepts text, returns token ids", "distribution", []),
    (Strict, "accepts token ids, returns token ids", "distribution", ["T=1 top-k 3 top-p 1"]),
    (IdsInLogprobs, "accepts token ids, returns token ids", "distribution", []),
])  # fmt: skip
def test_servers_with_other_formats_are_supported(server_class, snippet, check, missing):
    options = dict(requests=400, samplings=SERVER_SAMPLINGS[2:3], checks=(check, "limits"))
    verdicts = examine(byte_server(server_class), **options)
    assert snippet in verdicts[0].detail and not failures(verdicts), verdicts
    skipped = [v.case for v in verdicts if v.passed is None]
    assert skipped == missing, verdicts


def test_a_text_server_has_no_distribution():
    verdicts = examine(byte_server(TextOnly), checks=("distribution",))
    assert [(v.check, v.passed) for v in verdicts] == [
        ("server", True), ("distribution", None), ("drafts", True),
    ]  # fmt: skip


class AddsBOS(CorrectServer):
    def prompt(self, ids):
        return [END, *ids]


class OtherModel(CorrectServer):
    """Serve a wrong model under the right name."""

    def __init__(self, *args, **options):
        super().__init__(byte_model(1, context=300, eos=(END,)), TOKENIZER)


def test_another_model_is_detected_and_ends_the_test():
    for server_class, snippet in (OtherModel, "another model or other"), (AddsBOS, "add BOS"):
        backend = byte_server(server_class)
        verdicts = examine(backend, model=MODEL)
        assert len(verdicts) == 1 and verdicts[0].passed is False
        assert snippet in verdicts[0].detail


# ---- servers that fail ---------------------------------------------------------------------------


class DropsConnection(CorrectServer):
    """Fail on long prompts."""

    status = None

    def answer(self, request):
        if len(request["prompt"]) > 100:
            if self.status:
                return self.status, {"error": {"message": "out of\nmemory"}}
            raise RuntimeError
        return super().answer(request)


class InternalError(DropsConnection):
    status = 500


def test_a_server_that_fails_on_a_request_fails_that_check():
    for server_class, only, snippet in (
        (DropsConnection, "greedy", "broke off its answer"),
        (InternalError, "prompts", "HTTP 500: out of memory"),
    ):
        verdicts = examine(byte_server(server_class), checks=("greedy",), only=only, requests=1000)
        (verdict,) = [v for v in verdicts if v.passed is False and v.case == "prompts"]
        assert snippet in verdict.detail and "\n" not in verdict.detail
        assert len(verdict.evidence["prompt"]) > 100


@pytest.mark.parametrize("status, kind", [
    (400, "rejected"), (404, "rejected"), (422, "rejected"), (401, "unavailable"),
    (403, "unavailable"), (429, "unavailable"), (503, "unavailable"), (500, "failed"),
])  # fmt: skip
def test_a_rejection_differs_from_a_failure(status, kind):
    class Responds(CorrectServer):
        def answer(self, request):
            return status, {}

    with serving(plain_server(Responds)) as url:
        client = Server(url, None, "toy", (), seconds=0.1)
        with pytest.raises(RequestError) as caught:
            client.ask([1], 2)
        assert caught.value.kind == kind
        with pytest.raises(NotSupported if kind == "rejected" else RequestError):
            ServerDecoder(client, LETTERS, None, end=math.inf).ask(Request([1], 2), n=1)


class ShutsDown(CorrectServer):
    """Shut down in the middle of an answer."""

    def answer(self, request):
        if len(request["prompt"]) > 100:
            self.server.shutdown()
            self.server.server_close()
            raise RuntimeError
        return super().answer(request)


def test_a_server_that_dies_ends_the_table():
    verdicts = examine(byte_server(ShutsDown), checks=("greedy", "limits"))
    assert [v.passed for v in verdicts[-2:]] == [True, False]
    assert "is it running?" in verdicts[-1].detail


class RequiresKey(CorrectServer):
    def answer(self, request):
        return 401, {"error": {"message": "wrong key sk-secret"}}


class RequiresKeyForModels(RequiresKey):
    name = None  # it does not list its models either


class EchoesKey(CorrectServer):
    """Repeat the key."""

    def answer(self, request):
        return 400, {"error": {"message": "Incorrect key provided: sk-secret"}}


class Sleeps(CorrectServer):
    def answer(self, request):
        time.sleep(1)
        return super().answer(request)


class IsLoading(CorrectServer):
    """Report that the model is loading, for some requests."""

    left = 2

    def ready(self, what, *args):
        self.left -= 1
        return what(*args) if self.left < 0 else (503, {"error": {"message": "Loading model"}})

    def answer(self, request):
        return self.ready(super().answer, request)

    def models(self):
        return self.ready(super().models)


class ListsModelsWhileLoading(IsLoading):
    def models(self):
        return CorrectServer.models(self)


class LoadsForever(IsLoading):
    left = 10**6


class Moved(CorrectServer):
    def models(self):
        return 301, "https://example.org:1/v2/v1/models"


class MovedCompletions(CorrectServer):
    def answer(self, request):
        return 307, "http://example.org/v1/completions"


class NullFields(CorrectServer):
    """Return fields that are null."""

    def choice(self, request, seed):
        found = super().choice(request, seed)
        odd = {"text": None, "logprobs": {"token_logprobs": [None], "content": None}}
        return found | odd | {"token_ids": [10**6]}

    def answer(self, request):
        status, found = super().answer(request)
        return status, found | {"usage": None, "timings": {"draft_n": None}}


class EmptyWhenBusy(CorrectServer):
    """Return empty answers while busy."""

    busy = 0

    def choice(self, request, seed):
        self.busy += 1
        time.sleep(0.003)
        try:
            found = super().choice(request, seed)
            return found if self.busy < 2 else found | {"token_ids": [], "text": ""}
        finally:
            self.busy -= 1


def test_odd_answers_give_verdicts():
    (verdict,) = examine(byte_server(NullFields), checks=("greedy",))
    assert verdict.passed is False and "another model" in verdict.detail
    verdicts = examine(byte_server(EmptyWhenBusy), only="greedy: batches", requests=400)
    assert failures(verdicts) == [("greedy", "batches")]


class HtmlPage(CorrectServer):
    def answer(self, request):
        return 200, b"<html>hello"


class NoChoices(CorrectServer):
    def answer(self, request):
        return 200, {"choices": [3]}


class TwoModels(CorrectServer):
    name = ["one", "two"]


class OtherPath(CorrectServer):
    paths = ("/completion",)


@pytest.mark.parametrize(
    "server_class, options, snippet",
    [
        (RequiresKey, {}, "requires a valid key; name its environment variable with --key-env"),
        (RequiresKeyForModels, {}, "requires a valid key; name"),
        (EchoesKey, {}, "HTTP 400: Incorrect key provided: …"),
        (Sleeps, {"seconds": 0.3}, "did not answer within 0 s"),
        (LoadsForever, {"seconds": 0.3}, "is still loading or overloaded after 0 s: HTTP 503: L"),
        (Moved, {}, "redirects to https://example.org:1/v2; use that address instead"),
        (MovedCompletions, {}, "redirects to http://example.org; use that address instead"),
        (HtmlPage, {}, "did not answer with a completion but '<html>hello'"),
        (NoChoices, {}, "did not answer with a completion but '{"),
        (TwoModels, {}, "serves one, two; choose one with --name"),
        (CorrectServer, {"name": "mine"}, "serves toy, not mine; choose one with --name"),
        (OtherPath, {}, "HTTP 404: no such path"),
        (CorrectServer, {"url": "http://127.0.0.1:9"}, ":9 cannot be reached ("),
        (CorrectServer, {"url": "here"}, "here: not a valid address"),
        (CorrectServer, {"url": "ftp://127.0.0.1"}, "ftp://127.0.0.1: not a valid address"),
    ],
)
def test_an_unusable_server_gives_a_one_line_error(server_class, options, snippet):
    with pytest.raises(UserError) as caught:
        examine(byte_server(server_class), key="sk-secret", **options)
    message = str(caught.value)
    assert snippet in message and "\n" not in message and "secret" not in message


WRONG = {"ALL_PROXY": "socks5://127.0.0.1:9", "HTTP_PROXY": "socks://x", "SSL_CERT_FILE": "no.pem"}
FAULT = "^a proxy or certificate variable of the environment is wrong: "


@pytest.mark.parametrize("variables, url, error", [
    (WRONG, "http://127.0.0.1:9", None), (WRONG, "http://[::1]:9", None),
    (WRONG, "http://localhost:9", None), (WRONG, "http://0.0.0.0:9", None),
    ({"SSL_CERT_FILE": "no.pem"}, "http://lab.example", None),
    ({"SSL_CERT_FILE": "no.pem"}, "https://lab.example", "No such file"),
    (WRONG, "http://lab.example", "Unknown scheme for proxy"),
    ({"ALL_PROXY": "socks5://x"}, "http://lab.example", ".*socksio"),
    ({"HTTPS_PROXY": "proxy:port"}, "https://lab.example", "Invalid port"),
    ({"HTTPS_PROXY": "proxy:3128"}, "https://lab.example", None),
])  # fmt: skip
def test_a_wrong_variable_of_the_environment_is_reported(variables, url, error, environment):
    environment.setitem(sys.modules, "socksio", None)  # not installed
    for name, value in variables.items():
        environment.setenv(name, value)
    expected = pytest.raises(UserError, match=f"{FAULT}.*{error}")
    with expected if error else contextlib.nullcontext():
        Server(url, None, None, ())


@pytest.fixture
def environment(monkeypatch):
    """An environment without proxies."""
    for name in os.environ:
        if name.lower().endswith("_proxy") or name.startswith("SSL_CERT"):
            monkeypatch.delenv(name)
    return monkeypatch


def test_a_proxy_is_used_except_for_this_machine(environment):
    with serving(byte_server(RequiresKeyForModels)) as proxy:
        for name in "HTTP_PROXY", "HTTPS_PROXY":
            environment.setenv(name, proxy)
        with pytest.raises(UserError, match="lab.example requires a valid key"):
            Server("http://lab.example", None, None, ()).probe([1])
        # the proxy does not allow a tunnel
        with pytest.raises(UserError, match=r"lab.example cannot be reached \(501"):
            Server("https://lab.example", None, None, ()).probe([1])
        for name in "HTTP_PROXY", "HTTPS_PROXY":
            environment.setenv(name, "http://127.0.0.1:9")
        with pytest.raises(UserError, match="requires a valid key"):
            Server(proxy, None, None, ()).probe([1])


@pytest.mark.parametrize("server_class", [IsLoading, ListsModelsWhileLoading])
def test_loading_servers_are_waited_for(server_class):
    assert examine(letter_server(server_class), checks=())[0].passed


def test_the_command(tmp_path, capsys):
    save(MODEL, TOKENIZER, tmp_path)
    with serving(byte_server()) as url:
        arguments = ["--server", f"{url}/v1/", "--model", str(tmp_path), "--only", "limits: l"]
        with pytest.raises(SystemExit) as caught:
            main([*arguments, "--json"])
        found = json.loads(capsys.readouterr().out)
    assert caught.value.code == 0 and found["passed"], found
    assert {v["check"] for v in found["verdicts"]} == {"server", "limits", "drafts"}


# ---- fields of any type --------------------------------------------------------------------------

ODD_VALUES = (
    None, True, -1, 1.5, 10**400, math.nan, math.inf, "", "x", "7", "\ud800\x1b[31m", [], [[]],
    [None], {}, {"a": 1},
)  # fmt: skip
MODELS = {"data": [{"id": "toy", "max_model_len": 64}]}
COMPLETION = {
    "choices": [{
        "text": "ab", "token_ids": [1, 2], "finish_reason": "stop",
        "logprobs": {"token_logprobs": [-1.0, -2.0], "content": [{"id": 1, "logprob": -1.0}]},
    }],
    "usage": {"prompt_tokens": 1}, "timings": {"draft_n": 2, "draft_n_accepted": 1},
}  # fmt: skip


def odd_copies(value):
    """Yield copies of a JSON value, each with one odd or missing value."""
    yield from ODD_VALUES
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        if isinstance(value[key], (dict, list)):
            changed = odd_copies(value[key])
        else:
            changed = ODD_VALUES
        for odd in changed:
            copied = copy.copy(value)
            copied[key] = odd
            yield copied
        if isinstance(value, dict):
            yield {name: value[name] for name in value if name != key}


def canned(models: object = MODELS, completion: object = COMPLETION, metrics: str = "") -> Server:
    """Return a server that always gives the answers in its attribute `canned`."""
    canned = {"/v1/models": models, "/v1/completions": completion, "/completion": completion}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text=metrics)
        text = json.dumps(canned[request.url.path])
        return httpx.Response(200, text=text)

    server = Server("http://canned", letter_tokenizer(8), None, (0,))
    server.http = httpx.Client(base_url="http://canned", transport=httpx.MockTransport(answer))
    server.canned = canned
    return server


@pytest.mark.parametrize("path, right", [("/v1/models", MODELS), ("/v1/completions", COMPLETION)])
def test_a_field_of_any_type_is_read_or_ignored(path, right):
    server = canned()
    for odd in odd_copies(right):
        server.canned[path], server.name = odd, None
        with contextlib.suppress(UserError):
            server.accepts_ids = True
            server.probe([1, 2, 3])
            with contextlib.suppress(RequestError):
                server.ask([1, 2], 4)
            server.draft_counts()
            assert server.context > 0 and isinstance(server.name, str)


@pytest.mark.parametrize(
    "value, read",
    [("4096", 4096), (4096.0, 4096), ("many", 2**31), ([1], 2**31), (-1, 2**31), (None, 2**31)],
)
def test_a_context_is_read_if_it_is_a_number(value, read):
    server = canned({"data": [{"id": "toy", "max_model_len": value}]})
    server.probe([1])
    assert server.context == read


@pytest.mark.parametrize("metrics, drafts", [
    ('{engine="0"} 8.0', (8, 4)), ("_total 8", (8, 4)),
    ('{engine="0", path="/a b"} 8.0 1395066363000', (8, 4)), ("NaN", None), ("{} +Inf", None),
    ("{} nan 1395066363000", None), ("", None), ("{} x", None), ("{", None),
])  # fmt: skip
def test_metrics_are_read_if_they_are_numbers(metrics, drafts):
    drafted = f"vllm:spec_decode_num_draft_tokens{metrics}\n"
    text = drafted + drafted.replace("draft", "accepted").replace("8", "4", 1)
    assert canned(metrics=text).draft_counts() == drafts


class OddFields(CorrectServer):
    """Put an odd field in every third answer, after the first checks."""

    answered = 0

    def choice(self, request, seed):
        found = super().choice(request, seed)
        self.answered += 1
        if self.answered < 20 or self.answered % 3:
            return found
        rng = random.Random(self.answered)
        return rng.choice([odd for odd in odd_copies(found) if isinstance(odd, dict)])


class HugeIds(CorrectServer):
    """Return ids that are not in the vocabulary, and do not fit into 64 bits."""

    def choice(self, request, seed):
        found = super().choice(request, seed)
        huge = [10**30, *found["token_ids"][1:]]
        return found | {"token_ids": huge} if request["max_tokens"] > 4 else found


def test_ids_of_any_size_give_verdicts():
    assert failures(examine(plain_server(HugeIds), checks=("greedy",)))


@pytest.mark.slow
def test_odd_fields_in_the_middle_of_a_test_give_verdicts():
    verdicts = examine(plain_server(OddFields), checks=("greedy", "limits"))
    assert verdicts[0].passed and {v.check for v in verdicts} >= {"greedy", "limits"}
    assert failures(verdicts)


# ---- finish reasons ------------------------------------------------------------------------------


class Renamed(CorrectServer):
    """Use other names for finish reasons."""

    names = {"length": "max_tokens", "stop": "eos"}

    def choice(self, request, seed):
        found = super().choice(request, seed)
        return found | {"finish_reason": self.names[found["finish_reason"]]}


class Objects(Renamed):
    names = {name: {"type": name, "matched": 1} for name in ("length", "stop")}


class NoReason(Renamed):
    names = {"length": None, "stop": None}


class Aborts(CorrectServer):
    """Break off every third answer."""

    count = 0

    def choice(self, request, seed):
        self.count += 1
        found = super().choice(request, seed)
        if request["max_tokens"] > 4 and self.count % 3 == 0:
            found |= {"token_ids": found["token_ids"][:3], "text": found["text"][:3]}
            found |= {"finish_reason": "abort", "logprobs": None}
        return found


def test_answers_that_a_server_breaks_off_do_not_fail_a_row():
    verdicts = examine(byte_server(Aborts), checks=("greedy", "limits"), requests=150)
    assert not failures(verdicts), failures(verdicts)
    assert any("not judged: " in v.detail and "finish_reason 'abort' may be" in v.detail
               for v in verdicts)  # fmt: skip


@pytest.mark.parametrize("server", [Renamed, Objects, NoReason])
def test_other_names_of_finish_reasons_are_understood(server):
    assert not failures(examine(byte_server(server), checks=("limits",)))
    limits = "length", "max_tokens", "MAX_TOKENS", "max_length", "length_limit", "model_length"
    ends = "stop", "STOP", "eos", "eos_token", "stop_sequence", "end_turn"
    unknown = "abort", "error", "content_filter", "cancelled", "other", "filter_stop", "", None
    assert [is_stop_reason(reason) for reason in limits] == [False] * 6
    assert [is_stop_reason(reason) for reason in ends] == [True] * 6
    assert [is_stop_reason(reason) for reason in unknown] == [None] * 8


# ---- keys ----------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    save(LETTERS, letter_tokenizer(8), tmp_path)
    return str(tmp_path)


def certify(*arguments: str, code: int) -> None:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == code


class Wrong(CorrectServer):
    """Serve another model, so that the test ends after one check."""

    def choice(self, request, seed):
        return {"text": "", "token_ids": [], "finish_reason": "stop"}


def test_a_key_is_sent_only_to_the_server_it_was_named_for(checkpoint, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-unasked")
    monkeypatch.setenv("MINE", "sk-mine\n")
    monkeypatch.setenv("ITS", "sk-its")
    for names, keys in ([], (None, None)), (["MINE"], ("Bearer sk-mine", None)), (
        ["MINE", "ITS"], ("Bearer sk-mine", "Bearer sk-its")
    ):  # fmt: skip
        backend, baseline = letter_server(Wrong), letter_server(HtmlPage)
        with serving(backend) as url, serving(baseline) as other:
            flags = ["--key-env", *names] if names else []
            certify("--server", url, "--baseline", other, "--model", checkpoint, *flags, code=2)
        assert (set(backend.keys), set(baseline.keys)) == ({keys[0]}, {keys[1]})
    assert "unencrypted" not in capsys.readouterr().err


def test_a_redirect_does_not_receive_the_key(checkpoint, monkeypatch, capsys):
    monkeypatch.setenv("MINE", "sk-mine")
    there = letter_server()

    class Redirects(CorrectServer):
        def models(self):
            return 307, f"{url}/v1/models"

    with serving(there) as url, serving(letter_server(Redirects)) as here:
        certify("--server", here, "--model", checkpoint, "--key-env", "MINE", code=2)
    assert not there.keys and f"redirects to {url}; use" in capsys.readouterr().err


@pytest.mark.parametrize(
    "value, flags, snippet",
    [
        (None, ["--key-env", "MINE"], "variable 1 is not set or does not hold a key"),
        (" ", ["--key-env", "MINE"], "variable 1 is not set or does not hold a key"),
        ("ключ", ["--key-env", "MINE"], "variable 1 is not set or does not hold a key"),
        ("sk-a\nsk-b", ["--key-env", "MINE"], "does not hold a key"),
        ("sk", ["--key-env", "MINE", "MINE"], "--key-env names 2 variables for 1 servers"),
    ],
)
def test_a_variable_without_a_key_is_rejected(value, flags, snippet, monkeypatch, capsys):
    if value is not None:
        monkeypatch.setenv("MINE", value)
    certify("--server", "http://127.0.0.1:9", "--model", "nowhere", *flags, code=2)
    err = capsys.readouterr().err
    assert snippet in err and err.count("\n") == 1


@pytest.mark.parametrize("url, warned", [
    ("http://127.0.0.1:9", False), ("http://[::1]:9", False), ("http://LOCALHOST:9", False),
    ("https://example.org", False), ("http://192.0.2.1", True),
    ("http://user:pw@lab.example", True), ("http://127.0.0.1.example.org", True),
])  # fmt: skip
def test_an_unencrypted_key_gives_one_warning(url, warned, capsys):
    Server(url, None, None, (), key="sk-mine")
    Server(url, None, None, ())
    err = capsys.readouterr().err
    assert err.count("unencrypted") == warned and "pw" not in err and "sk-" not in err


# ---- standard output -----------------------------------------------------------------------------

TALKS = """
import ctypes, os
print("loading")
def decode(folder, prompt, **options):
    print("request")
    os.system("echo child")
    return []
"""


def test_output_of_an_implementation_does_not_go_to_stdout(tmp_path, capfd):
    (tmp_path / "talks.py").write_text(TALKS)
    arguments = ["--impl", f"{tmp_path}/talks.py:decode", "--checks", "greedy"]
    certify(*arguments, "--json", code=1)
    out, err = capfd.readouterr()
    assert not json.loads(out)["passed"] and {"loading", "request", "child"} <= set(err.split())
    certify(*arguments, code=1)
    table = r"(FAIL  greedy .*\n){8}0 of 8 passed in \d+ s\nLOSS in greedy \(8\)\n"
    assert re.fullmatch(table, capfd.readouterr().out)


PRINTS = """
import atexit, ctypes, os, sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("errors", sys.argv[1])
errors = module_from_spec(spec)
spec.loader.exec_module(errors)
stdout = sys.stdout
print("before")
with errors.stdout_reserved() as answer:
    print("python")
    print("kept", file=stdout)
    os.write(1, b"descriptor\\n")
    os.system("echo child")
    ctypes.CDLL(None).printf(b"buffered by C\\n")
    atexit.register(print, "exit")
    print("answer", file=answer)
"""


def test_standard_output_is_reserved_for_the_result():
    """In a separate process, because pytest replaces standard output."""
    command = [sys.executable, "-c", PRINTS, cli.__file__]
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, capture_output=True, text=True, env=buffered)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["before", "answer", ""]
    others = {"python", "kept", "descriptor", "child", "buffered by C", "exit"}
    assert set(done.stderr.splitlines()) == others


def test_text_from_a_server_cannot_control_the_terminal(checkpoint, capsys):
    class Colours(Wrong):
        name = "\x1b[31mtoy\u202e"

        def answer(self, request):
            if request["max_tokens"] > 2:  # after probing
                return 400, {"error": {"message": "\x1b[2Jno\ud800"}}
            return super().answer(request)

    with serving(letter_server(Colours)) as url:
        certify("--server", url, "--model", checkpoint, code=1)
    out = capsys.readouterr().out
    assert "\\x1b[31mtoy\\u202e" in out and "HTTP 400: \\x1b[2Jno" in out
    assert "\x1b" not in out and "\u202e" not in out
