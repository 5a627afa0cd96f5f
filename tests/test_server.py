"""An honest server passes, every wrong one is caught, and what a server can do is one line."""

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
from served import Honest, serving

from minispec import errors
from minispec.certify.__main__ import main
from minispec.certify.others.client import Refused, Server, ended_by
from minispec.certify.others.drawn import SAMPLED
from minispec.certify.others.keys import warn_if_exposed
from minispec.certify.others.server import check_server
from minispec.certify.ours import mutants
from minispec.checkpoints.load import save
from minispec.errors import UserError
from minispec.toys import letters, small_model

END, OTHER_END = 256, 259
MODEL = byte_model(0, context=300, eos=(END, OTHER_END))


def disturbed(model, noise: float):
    """A draft that is often right."""
    draft, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    for p in draft.parameters():
        p.add_(noise * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return draft


with torch.no_grad():
    LETTERS = small_model(3, vocab=8, layers=1)
    DRAFT = disturbed(LETTERS, 0.25)


def examine(
    served, url=None, baseline=None, name=None, seconds=60.0, model=None, key=None, **options
):
    """The verdicts on a server of ours."""
    model = model or served.model

    def client(address):
        return Server(address, served.tokenizer, name, model.config.eos_ids, seconds, key)

    with serving(served) as address, torch.no_grad():
        plain = baseline and client(baseline)
        return list(check_server(client(url or address), model, served.tokenizer, plain, **options))


def honest(kind=Honest):
    return kind(MODEL, TOKENIZER, "prompt-lookup", k=3)


def drawing(kind=Honest):
    return kind(LETTERS, letters(8), "speculative", draft=DRAFT, k=1)


def failures(verdicts) -> list[tuple[str, str]]:
    return [(v.check, v.case) for v in verdicts if v.passed is False]


def test_an_honest_server_passes():
    verdicts = examine(honest(), requests=200, samplings=SAMPLED[4:])
    assert not failures(verdicts), verdicts
    assert {v.check for v in verdicts if v.passed} == {
        "server", "greedy", "limits", "load", "distribution", "drafts",
    }  # fmt: skip
    assert [v for v in verdicts if v.passed is None] == []


# ---- servers that err ----------------------------------------------------------------------------


class Cut(Honest):
    """Forgets what is far back."""

    def prompt(self, given):
        return given[-140:]


class ForgetsTheSecondTime(Honest):
    """A prefix cache of stale rows."""

    seen = ()

    def run(self, asked, seed):
        before, self.seen = self.seen, asked["prompt"]
        return super().run(asked | {"prompt": asked["prompt"][1:] or [0]} if before == self.seen
                           else asked, seed)  # fmt: skip


def mutated(mutant: str, make=honest) -> Honest:
    """A server with one of the certifier's mutants behind it."""
    (found,) = (each for each in mutants.MUTANTS if each.name == mutant)

    class Mutated(Honest):
        def run(self, asked, seed):
            with self.lock, found.apply():
                return super().run(asked, seed)

    return make(Mutated)


class TooMany(Honest):
    def run(self, asked, seed):
        return super().run(asked | {"max_tokens": asked["max_tokens"] + 1}, seed)


class GoesOn(Honest):
    """Past one of the two end tokens."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.model = copy.deepcopy(self.model)
        self.model.config = replace(self.model.config, eos_ids=(OTHER_END,))


class StopsWithin(Honest):
    """Looks for stop strings in each token alone."""

    def run(self, asked, seed):
        return super().run({k: v for k, v in asked.items() if k != "stop"}, seed)


class KeepsTheStop(Honest):
    def choice(self, asked, seed):
        found = super().choice(asked, seed)
        found["text"] += "".join(asked.get("stop", ()))
        return found


class LosesTheLastPart(Honest):
    def parts(self, choice):
        return super().parts(choice)[::2]


class StreamsAnotherEnd(Honest):
    def parts(self, choice):
        return [*super().parts(choice)[:2], {"finish_reason": "stop"}]


class WarmLogprobs(Honest):
    def logprobs(self, run):
        return [0.97 * each for each in super().logprobs(run)]


class SameChoices(Honest):
    def choices(self, asked):
        return [self.choice(asked, asked["seed"])] * asked["n"]


class Leaks(Honest):
    """A temperature of a request that is being answered at the same time."""

    busy: list[float] = []

    def run(self, asked, seed):
        self.busy.append(asked["temperature"])
        time.sleep(0.003)
        try:
            return super().run(asked | {"temperature": max(self.busy)}, seed)
        finally:
            self.busy.remove(asked["temperature"])


GREEDY = ("greedy", "lengths")


@pytest.mark.parametrize(
    "wrong, check, case",
    [
        (Cut, *GREEDY),
        (ForgetsTheSecondTime, *GREEDY),
        (TooMany, "limits", "lengths"),
        (GoesOn, "limits", "where greedy answers end"),
        (StopsWithin, "limits", "stop strings"),
        (KeepsTheStop, "limits", "stop strings"),
        (LosesTheLastPart, "limits", "streaming"),
        (StreamsAnotherEnd, "limits", "streaming"),
        (WarmLogprobs, "limits", "logprobs"),
        (SameChoices, "limits", "several choices"),
        (Leaks, "load", "8 at once, of mixed temperatures"),
    ],
)  # fmt: skip
def test_a_wrong_server_is_caught(wrong, check, case):
    verdicts = examine(honest(wrong), model=MODEL, checks=(check,))
    assert verdicts[0].passed, verdicts
    assert (check, case) in failures(verdicts), verdicts
    assert all(v.passed is not False for v in verdicts if v.check != check)


def test_a_wrong_acceptance_is_caught_greedily():
    assert failures(
        examine(mutated("a draft judged by the distribution after it"), checks=("greedy",))
    )


# ---- sampled -------------------------------------------------------------------------------------


class Smaller(Honest):
    def run(self, asked, seed):
        return super().run(asked | {"top_p": asked["top_p"] ** 4}, seed)


class NoTopK(Honest):
    def run(self, asked, seed):
        return super().run(asked | {"top_k": -1}, seed)


class OneSeed(Honest):
    def run(self, asked, seed):
        return super().run(asked, 7)


class OwnSeeds(Honest):
    count = 0

    def run(self, asked, seed):
        self.count += 1
        return super().run(asked, self.count)


def examine_drawn(served, sampling: int, requests: int):
    """The rows of the seeds and of one sampling."""
    verdicts = examine(served, checks=("distribution",), requests=requests,
                       samplings=SAMPLED[sampling : sampling + 1])  # fmt: skip
    assert verdicts[0].passed
    return [v for v in verdicts if v.check == "distribution"]


@pytest.mark.parametrize(
    "mutant, requests",
    [
        ("a rejection resamples from p", 250),
        ("the bonus is an argmax", 200),
        pytest.param("acceptance lenient by 0.8", 4000, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_acceptance_is_caught_in_what_is_drawn(mutant, requests):
    seeds, drawn = examine_drawn(mutated(mutant, drawing), 0, requests)
    assert seeds.passed and drawn.passed is False and "p = " in drawn.detail


@pytest.mark.parametrize(
    "wrong, sampling, passed, says",
    [
        (Honest, 0, [True, True], ["for equal seeds", "p = "]),
        (NoTopK, 2, [True, False], ["for equal seeds", "has probability 0"]),
        (Smaller, 3, [True, False], ["for equal seeds", "p = "]),
        (OneSeed, 0, [False, False], ["repeats itself", "p = "]),
        (OwnSeeds, 0, [None, True], ["seeds are ignored", "p = "]),
    ],
)  # fmt: skip
def test_what_is_drawn_wrongly_is_seen(wrong, sampling, passed, says):
    rows = examine_drawn(drawing(wrong), sampling, 90)
    assert [v.passed for v in rows] == passed, rows
    assert all(text in v.detail for text, v in zip(says, rows)), rows


def test_with_a_baseline_a_convention_is_no_loss():
    """Another top-p, plain and speculative alike."""
    plain = Smaller(LETTERS, letters(8))
    served = Smaller(LETTERS, letters(8), "prompt-lookup")
    with serving(plain) as baseline:
        verdicts = examine(served, baseline=baseline, requests=150, samplings=SAMPLED[3:4],
                           checks=("distribution",))  # fmt: skip
    assert not failures(verdicts), verdicts
    differ = [v.case for v in verdicts if v.check == "baseline" and not v.passed]
    assert differ == ["distribution, T=1 top-k 0 top-p 0.8"]
    with serving(Honest(LETTERS, letters(8))) as baseline:
        verdicts = examine(served, baseline=baseline, requests=150, samplings=SAMPLED[3:4],
                           checks=("distribution",))  # fmt: skip
    assert failures(verdicts) == [("distribution", "T=1 top-k 0 top-p 0.8")]


# ---- what servers take and give ------------------------------------------------------------------


class TextIn(Honest):
    """No ids in, but ids out; and ends are called otherwise."""

    def answer(self, asked):
        if not isinstance(asked["prompt"], str):
            return 400, {"error": {"message": "prompt must be a string"}}
        return super().answer(asked)

    def choice(self, asked, seed):
        found = super().choice(asked, seed)
        return found | {"finish_reason": {"stop": "eos_token"}.get(found["finish_reason"])}


class TextOnly(TextIn):
    """No ids in, none out."""

    def choice(self, asked, seed):
        found = super().choice(asked, seed)
        return {name: found[name] for name in ("text", "finish_reason")}


class Strict(Honest):
    """Knows OpenAI's fields only."""

    def answer(self, asked):
        if "min_p" in asked:
            return 422, {"detail": "extra fields not permitted"}
        return super().answer(asked)


class IdsBesideLogprobs(Honest):
    """As llama.cpp."""

    def choice(self, asked, seed):
        found = super().choice(asked, seed)
        ids = found.pop("token_ids")
        logprobs = found.pop("logprobs", None)
        if logprobs:
            content = zip(ids, logprobs["token_logprobs"])
            found["logprobs"] = {"content": [{"id": i, "logprob": p} for i, p in content]}
        return found


@pytest.mark.parametrize("kind, says, check, missing", [
    (TextOnly, "takes text, gives text, read by our tokenizer", "greedy", ["all others"]),
    (TextIn, "takes text, gives token ids", "distribution", []),
    (Strict, "takes token ids, gives token ids", "distribution", ["T=1 top-k 3 top-p 1"]),
    (IdsBesideLogprobs, "takes token ids, gives token ids", "distribution", []),
])  # fmt: skip
def test_servers_of_other_kinds_are_understood(kind, says, check, missing):
    checks = (check, "limits")
    verdicts = examine(honest(kind), requests=130, samplings=SAMPLED[2:3], checks=checks)
    assert says in verdicts[0].detail and not failures(verdicts), verdicts
    skipped = [v.case for v in verdicts if v.passed is None]
    assert skipped == missing, verdicts


def test_a_text_server_has_no_distribution():
    verdicts = examine(honest(TextOnly), checks=("distribution",))
    assert [(v.check, v.passed) for v in verdicts] == [
        ("server", True), ("distribution", None), ("drafts", True),
    ]  # fmt: skip


class AddsBOS(Honest):
    def prompt(self, given):
        return [END, *given]


class Another(Honest):
    """A wrong model behind the right name."""

    def __init__(self, *given, **options):
        super().__init__(byte_model(1, context=300, eos=(END,)), TOKENIZER)


def test_another_model_is_seen_and_nothing_else_is_asked():
    for kind, says in (Another, "another model or other weights"), (AddsBOS, "as "):
        served = honest(kind)
        verdicts = examine(served, model=MODEL)
        assert len(verdicts) == 1 and verdicts[0].passed is False
        assert says in verdicts[0].detail


# ---- servers that fail ---------------------------------------------------------------------------


class Breaks(Honest):
    """On long prompts."""

    status = None

    def answer(self, asked):
        if len(asked["prompt"]) > 100:
            if self.status:
                return self.status, {"error": {"message": "out of\nmemory"}}
            raise RuntimeError
        return super().answer(asked)


class Fails(Breaks):
    status = 500


def test_a_server_that_breaks_on_a_request_fails_that_row():
    for kind, says in (Breaks, "broke off: "), (Fails, "HTTP 500: out of memory"):
        verdicts = examine(honest(kind), checks=("greedy",))
        assert failures(verdicts) == [GREEDY]
        (detail,) = [v.detail for v in verdicts if v.passed is False]
        assert says in detail and "a prompt of 128" in detail and "\n" not in detail


class Dies(Honest):
    """Not only the answer breaks off: nobody is there after it."""

    def answer(self, asked):
        if len(asked["prompt"]) > 100:
            self.server.shutdown()
            self.server.server_close()
            raise RuntimeError
        return super().answer(asked)


def test_a_server_that_dies_ends_the_table():
    verdicts = examine(honest(Dies), checks=("greedy", "limits"))
    assert [v.passed for v in verdicts[-2:]] == [True, False]
    assert "is it running?" in verdicts[-1].detail


class Locked(Honest):
    def answer(self, asked):
        return 401, {"error": {"message": "wrong key sk-secret"}}


class LockedModels(Locked):
    name = None  # nor does it list its models


class Repeats(Honest):
    """The key."""

    def answer(self, asked):
        return 400, {"error": {"message": "Incorrect key provided: sk-secret"}}


class Timeout(Honest):
    def answer(self, asked):
        time.sleep(1)
        return super().answer(asked)


class Drips(Honest):
    """A byte now and then: no read takes long."""

    def answer(self, asked):
        def parts():
            while True:
                time.sleep(0.02)
                yield b" "

        return 200, parts()


class Loads(Honest):
    """Its model, for some requests."""

    left = 2

    def ready(self, what, *given):
        self.left -= 1
        return what(*given) if self.left < 0 else (503, {"error": {"message": "Loading model"}})

    def answer(self, asked):
        return self.ready(super().answer, asked)

    def models(self):
        return self.ready(super().models)


class LoadsWhatItLists(Loads):
    def models(self):
        return Honest.models(self)


class LoadsForever(Loads):
    left = 10**6


class Moved(Honest):
    def models(self):
        return 301, "https://example.org:1/v2/v1/models"


class MovedCompletions(Honest):
    def answer(self, asked):
        return 307, "http://example.org/v1/completions"


class Nulls(Honest):
    """Fields that are there, and null."""

    def choice(self, asked, seed):
        found = super().choice(asked, seed)
        odd = {"text": None, "logprobs": {"token_logprobs": [None], "content": None}}
        return found | odd | {"token_ids": [10**6]}

    def answer(self, asked):
        status, found = super().answer(asked)
        return status, found | {"usage": None, "timings": {"draft_n": None}}


class Briefly(Honest):
    """Nothing at all, while it is busy."""

    busy = 0

    def choice(self, asked, seed):
        self.busy += 1
        time.sleep(0.003)
        try:
            found = super().choice(asked, seed)
            return found if self.busy < 2 else found | {"token_ids": [], "text": ""}
        finally:
            self.busy -= 1


def test_odd_answers_are_verdicts():
    (verdict,) = examine(honest(Nulls), checks=("greedy",))
    assert verdict.passed is False and "another model" in verdict.detail
    verdicts = examine(honest(Briefly), checks=("load",))
    assert [v.check for v in verdicts if v.passed is False] == ["load"]


class Page(Honest):
    def answer(self, asked):
        return 200, b"<html>hello"


class NoChoices(Honest):
    def answer(self, asked):
        return 200, {"choices": [3]}


class Two(Honest):
    name = ["one", "two"]


class Elsewhere(Honest):
    path = "/completion"


@pytest.mark.parametrize(
    "kind, options, says",
    [
        (Locked, {}, "wants a key, or another one: --key-env names the variable that holds it"),
        (LockedModels, {}, "wants a key, or another one: --key-env"),
        (Repeats, {}, "HTTP 400: Incorrect key provided: …"),
        (Timeout, {"seconds": 0.3}, "gave no answer in 0 s"),
        (Drips, {"seconds": 0.3}, "gave no answer in 0 s"),
        (LoadsForever, {"seconds": 0.3}, "is still loading, or overloaded, after 0 s: HTTP 503: L"),
        (Moved, {}, "redirects to https://example.org:1/v2: give that address instead"),
        (MovedCompletions, {}, "redirects to http://example.org: give that address instead"),
        (Page, {}, "answers no completion but '<html>hello'"),
        (NoChoices, {}, "answers no completion but '{"),
        (Two, {}, "serves one, two: choose by --name"),
        (Honest, {"name": "mine"}, "serves toy: choose by --name mine, which is not there"),
        (Elsewhere, {}, "HTTP 404: no such path"),
        (Honest, {"url": "http://127.0.0.1:9"}, ":9 cannot be reached ("),
        (Honest, {"url": "here"}, "here: is no address"),
        (Honest, {"url": "ftp://127.0.0.1"}, "ftp://127.0.0.1: is no address"),
    ],
)
def test_what_cannot_be_examined_is_one_line(kind, options, says):
    with pytest.raises(UserError) as caught:
        examine(honest(kind), key="sk-secret", **options)
    said = str(caught.value)
    assert says in said and "\n" not in said and "secret" not in said


@pytest.mark.parametrize("kind", [Loads, LoadsWhatItLists])
def test_a_server_that_loads_its_model_is_waited_for(kind):
    assert examine(drawing(kind), checks=())[0].passed


def test_the_command(tmp_path, capsys):
    save(MODEL, TOKENIZER, tmp_path)
    with serving(honest()) as url:
        arguments = ["--server", f"{url}/v1/", "--model", str(tmp_path), "--checks", "limits"]
        with pytest.raises(SystemExit) as caught:
            main([*arguments, "--json"])
        found = json.loads(capsys.readouterr().out)
    assert caught.value.code == 0 and found["passed"], found
    assert {v["check"] for v in found["verdicts"]} == {"server", "limits", "drafts"}


# ---- fields of any type --------------------------------------------------------------------------

ODD = (
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


def disturbances(value):
    """Copies of a JSON value, each with something odd in one place, or nothing."""
    yield from ODD
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        if isinstance(value[key], (dict, list)):
            changed = disturbances(value[key])
        else:
            changed = ODD
        for each in changed:
            copied = copy.copy(value)
            copied[key] = each
            yield copied
        if isinstance(value, dict):
            yield {name: value[name] for name in value if name != key}


def canned(models: object = MODELS, completion: object = COMPLETION, metrics: str = "") -> Server:
    """A server that gives these answers, whatever it is asked; `said` holds them."""
    said = {"/v1/models": models, "/v1/completions": completion}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text=metrics)
        text = json.dumps(said[request.url.path])
        if b'"stream"' in request.content:
            text = f"data: {text}\r\n\r\ndata: [DONE]\n\n"
        return httpx.Response(200, text=text)

    server = Server("http://canned", letters(8), None, (0,))
    server.http = httpx.Client(base_url="http://canned", transport=httpx.MockTransport(answer))
    server.said = said
    return server


@pytest.mark.parametrize("path, right", [("/v1/models", MODELS), ("/v1/completions", COMPLETION)])
def test_a_field_of_any_type_is_read_or_ignored(path, right):
    server = canned()
    for odd in disturbances(right):
        server.said[path], server.name = odd, None
        with contextlib.suppress(UserError):
            server.probe([1, 2, 3])
            for asked in server.ask, server.streamed:
                with contextlib.suppress(Refused):
                    asked([1, 2], 4)
            server.drafts()
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
    assert canned(metrics=text).drafts() == drafts


class Wild(Honest):
    """One odd field in every third answer, once it has been recognised."""

    asked = 0

    def choice(self, asked, seed):
        found = super().choice(asked, seed)
        self.asked += 1
        if self.asked < 20 or self.asked % 3:
            return found
        rng = random.Random(self.asked)
        return rng.choice([each for each in disturbances(found) if isinstance(each, dict)])


class HugeIds(Honest):
    """No token has such an id, nor is it one that fits into 64 bits."""

    def choice(self, asked, seed):
        found = super().choice(asked, seed)
        huge = [10**30, *found["token_ids"][1:]]
        return found | {"token_ids": huge} if asked["max_tokens"] > 4 else found


def test_ids_of_any_size_are_verdicts():
    assert failures(examine(drawing(HugeIds), checks=("limits",)))


def test_odd_fields_in_the_middle_of_an_examination_are_verdicts():
    verdicts = examine(drawing(Wild), checks=("limits", "load"))
    assert verdicts[0].passed and {v.check for v in verdicts} >= {"limits", "load"}
    assert failures(verdicts)


# ---- why answers end -----------------------------------------------------------------------------


class Renamed(Honest):
    """A finish reason by another name."""

    names = {"length": "max_tokens", "stop": "eos"}

    def choice(self, asked, seed):
        found = super().choice(asked, seed)
        return found | {"finish_reason": self.names[found["finish_reason"]]}


class NoReason(Renamed):
    names = {"length": None, "stop": None}


class AlwaysLength(Renamed):
    names = {"length": "length", "stop": "length"}


class AlwaysStop(Renamed):
    names = {"length": "stop", "stop": "stop"}


def test_other_names_of_finish_reasons_are_understood():
    assert not failures(examine(honest(Renamed), checks=("limits",)))
    limits = "length", "max_tokens", "MAX_TOKENS", "max_length", "length_limit", "model_length"
    ends = "stop", "eos", "eos_token", "stop_sequence", "end_turn", "content_filter"
    assert [ended_by(reason) for reason in (*limits, *ends)] == [False] * 6 + [True] * 6


def test_what_a_missing_finish_reason_hides_is_said():
    verdicts = {v.case: v for v in examine(honest(NoReason), checks=("limits",))}
    assert not failures(verdicts.values()), verdicts
    for case in "lengths", "where greedy answers end", "stop strings", "streaming":
        assert "without a finish_reason, which could not be checked" in verdicts[case].detail
    assert "without" not in verdicts["logprobs"].detail


def test_a_wrong_finish_reason_is_what_the_row_speaks_of():
    verdicts = {v.case: v for v in examine(drawing(AlwaysLength), checks=("limits",))}
    assert verdicts["stop strings"].passed is False
    assert "the text ends there, by 'length'" in verdicts["stop strings"].detail
    verdicts = {v.case: v for v in examine(drawing(AlwaysStop), checks=("limits",))}
    assert verdicts["lengths"].passed is False
    assert "kept, but finish_reason is 'stop'" in verdicts["lengths"].detail


# ---- keys ----------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    save(LETTERS, letters(8), tmp_path)
    return str(tmp_path)


def certify(*arguments: str, code: int) -> None:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == code


class Wrong(Honest):
    """Does not have our model: one row is asked for."""

    def choice(self, asked, seed):
        return {"text": "", "token_ids": [], "finish_reason": "stop"}


def test_a_key_goes_only_where_its_variable_is_named_for(checkpoint, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-unasked")
    monkeypatch.setenv("MINE", "sk-mine\n")
    monkeypatch.setenv("ITS", "sk-its")
    for names, keys in ([], (None, None)), (["MINE"], ("Bearer sk-mine", None)), (
        ["MINE", "ITS"], ("Bearer sk-mine", "Bearer sk-its")
    ):  # fmt: skip
        served, baseline = drawing(Wrong), drawing(Page)
        with serving(served) as url, serving(baseline) as other:
            flags = ["--key-env", *names] if names else []
            certify("--server", url, "--baseline", other, "--model", checkpoint, *flags, code=2)
        assert (set(served.keys), set(baseline.keys)) == ({keys[0]}, {keys[1]})
    assert "unencrypted" not in capsys.readouterr().err


def test_a_redirect_takes_no_key_along(checkpoint, monkeypatch, capsys):
    monkeypatch.setenv("MINE", "sk-mine")
    there = drawing()

    class Redirects(Honest):
        def models(self):
            return 307, f"{url}/v1/models"

    with serving(there) as url, serving(drawing(Redirects)) as here:
        certify("--server", here, "--model", checkpoint, "--key-env", "MINE", code=2)
    assert not there.keys and f"redirects to {url}: give" in capsys.readouterr().err


@pytest.mark.parametrize(
    "value, flags, says",
    [
        (None, ["--key-env", "MINE"], "variable 1 is not set, or what it holds is not a key"),
        (" ", ["--key-env", "MINE"], "variable 1 is not set, or what it holds is not a key"),
        ("ключ", ["--key-env", "MINE"], "variable 1 is not set, or what it holds is not a key"),
        ("sk-a\nsk-b", ["--key-env", "MINE"], "is not a key"),
        ("sk", ["--key-env", "MINE", "MINE"], "--key-env names 2 variables for 1 servers"),
    ],
)
def test_a_variable_without_a_key_is_refused(value, flags, says, monkeypatch, capsys):
    if value is not None:
        monkeypatch.setenv("MINE", value)
    certify("--server", "http://127.0.0.1:9", "--model", "nowhere", *flags, code=2)
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


@pytest.mark.parametrize("url, warned", [
    ("http://127.0.0.2:9", False), ("http://[::1]:9", False), ("http://LOCALHOST:9", False),
    ("https://example.org", False), ("http://192.0.2.1", True),
    ("http://user:pw@lab.example", True), ("http://127.0.0.1.example.org", True),
])  # fmt: skip
def test_a_key_in_the_clear_is_warned_of_once(url, warned, capsys):
    warn_if_exposed(Server(url, None, None, (), key="sk-mine"))
    warn_if_exposed(Server(url, None, None, ()))
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


def test_what_an_implementation_prints_is_not_in_the_answer(tmp_path, capfd):
    (tmp_path / "talks.py").write_text(TALKS)
    asked = ["--impl", f"{tmp_path}/talks.py:decode", "--checks", "greedy"]
    certify(*asked, "--json", code=1)
    out, err = capfd.readouterr()
    assert not json.loads(out)["passed"] and {"loading", "request", "child"} <= set(err.split())
    certify(*asked, code=1)
    assert re.fullmatch(r"(FAIL  greedy .*\n){3}0 of 3 passed in \d+ s\n", capfd.readouterr().out)


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
print("after")
"""


def test_standard_output_is_reserved_for_the_answer():
    """In a process of its own, as pytest replaces standard output."""
    asked = [sys.executable, "-c", PRINTS, errors.__file__]
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run(asked, capture_output=True, text=True, env=buffered)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["before", "answer", "after", ""]
    others = {"python", "kept", "descriptor", "child", "buffered by C", "exit"}
    assert set(done.stderr.splitlines()) == others


def test_what_a_server_says_cannot_drive_the_terminal(checkpoint, capsys):
    class Colours(Wrong):
        name = "\x1b[31mtoy\u202e"

        def answer(self, asked):
            if asked["max_tokens"] > 2:  # once it has been met
                return 400, {"error": {"message": "\x1b[2Jno\ud800"}}
            return super().answer(asked)

    with serving(drawing(Colours)) as url:
        certify("--server", url, "--model", checkpoint, code=1)
    out = capsys.readouterr().out
    assert "\\x1b[31mtoy\\u202e" in out and "HTTP 400: \\x1b[2Jno" in out
    assert "\x1b" not in out and "\u202e" not in out
