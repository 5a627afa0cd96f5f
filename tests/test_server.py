"""An honest server passes, every wrong one is caught, and what a server can do is one line."""

import copy
import json
import time
from dataclasses import replace

import pytest
import torch
from conftest import TOKENIZER, byte_model
from served import Honest, serving

from minispec.certify import mutants
from minispec.certify.__main__ import main
from minispec.certify.client import Server
from minispec.certify.drawn import SAMPLED
from minispec.certify.server import check_server
from minispec.checkpoint import save
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


def examine(served, url=None, baseline=None, name=None, seconds=60.0, model=None, **options):
    """The verdicts on a server of ours."""
    model = model or served.model

    def client(address):
        return Server(address, served.tokenizer, name, model.config.eos_ids, seconds)

    with serving(served) as address, torch.no_grad():
        plain = baseline and client(baseline)
        return list(
            check_server(client(url or address), model, served.tokenizer, plain, **options)
        )


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


class Slow(Honest):
    def answer(self, asked):
        time.sleep(1)
        return super().answer(asked)


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
        (Locked, {}, "wants a key: put it into OPENAI_API_KEY"),
        (LockedModels, {}, "wants a key: put it into OPENAI_API_KEY"),
        (Repeats, {}, "HTTP 400: Incorrect key provided: …"),
        (Slow, {"seconds": 0.3}, "no answer in 0 s"),
        (Page, {}, "answers no completion but '<html>hello'"),
        (NoChoices, {}, "answers no completion but '{"),
        (Two, {}, "serves one, two: choose by --name"),
        (Honest, {"name": "mine"}, "serves toy: choose by --name mine, which is not there"),
        (Elsewhere, {}, "HTTP 404: no such path"),
        (Honest, {"url": "http://127.0.0.1:9"}, ":9 refuses a plain completion: nobody answers"),
        (Honest, {"url": "here"}, "here: is no address"),
    ],
)
def test_what_cannot_be_examined_is_one_line(kind, options, says, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with pytest.raises(UserError) as caught:
        examine(honest(kind), **options)
    said = str(caught.value)
    assert says in said and "\n" not in said and "secret" not in said


def test_the_command(tmp_path, capsys):
    save(MODEL, TOKENIZER, tmp_path)
    with serving(honest()) as url:
        arguments = ["--server", f"{url}/v1/", "--model", str(tmp_path), "--checks", "limits"]
        with pytest.raises(SystemExit) as caught:
            main([*arguments, "--json"])
        found = json.loads(capsys.readouterr().out)
    assert caught.value.code == 0 and found["passed"], found
    assert {v["check"] for v in found["verdicts"]} == {"server", "limits", "drafts"}
