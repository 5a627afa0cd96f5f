"""A server that speaks OpenAI's completions API, over httpx."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock

import httpx

from minispec.certify.others.fields import as_number, count, field, items, parsed, spelt
from minispec.certify.ours.cases import GREEDY
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.errors import UserError
from minispec.sampling import Sampling

SECONDS = 120.0  # that one answer may take
# warpers, under the names of several servers, that would else have each server's own defaults; and
# a request for token ids. A strict server may refuse fields that it does not know
EXTRAS = {
    "min_p": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0,
    "samplers": ["temperature", "top_k", "top_p"], "return_token_ids": True, "return_tokens": True,
}  # fmt: skip

BUSY = {429: "is still too busy", 503: "is still loading, or overloaded,"}
CUT = re.compile("length|limit|max", re.IGNORECASE)  # finish reasons of an answer that hit a limit
COUNTER = re.compile(  # name{labels} value [timestamp]
    r"\w*:?spec_decode_num_(draft|accepted)_tokens(?:_total)?(?:\{[^}]*\})?\s+(\S+)"
)


class Refused(Exception):
    """The server said no to a request (4xx)."""


class Denied(Refused):
    """It answers no request at all: it wants a key, or is somewhere else."""


class ServerError(Refused):
    """It broke while it answered."""


class Timeout(ServerError):
    """It took too long, or was not ready for too long."""


class NotOffered(Refused):
    """The server does not have this."""


class ConnectionLost(Exception):
    """The server cannot be reached any more."""


@dataclass(frozen=True)
class Answer:
    """One choice of a completion. `tokens` are without the end token that ended it; `logprobs` are
    theirs, where they were asked for and given."""

    text: str
    tokens: list[int]
    given: bool  # as ids; else our tokenizer read the text
    ended: bool  # by an end token or a stop string; else by its length
    reason: str | None  # the finish_reason; without one, an answer shorter than asked for has ended
    logprobs: list[float] | None = None
    prompt_tokens: int | None = None  # as the server counts them


class Server:
    """Requests, one at a time or from several threads. What it takes and gives is found out by
    `probe`: token ids as prompts, token ids in answers, extra fields. The key goes to this server
    only: redirects are not followed."""

    def __init__(
        self, url: str, tokenizer: Tokenizer | None, name: str | None, ends: tuple,
        seconds: float = SECONDS, key: str | None = None,
    ):  # fmt: skip
        self.tokenizer, self.name, self.ends = tokenizer, name, ends
        self.seconds, self.key = seconds, key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
            if not base.host or base.scheme not in ("http", "https"):
                raise ValueError
            self.http = httpx.Client(
                base_url=base, headers=headers, timeout=seconds,
                limits=httpx.Limits(max_connections=16),
            )  # fmt: skip
            self.url = str(base.copy_with(userinfo=b""))  # as it is shown
        except (ValueError, httpx.InvalidURL):
            raise UserError(f"{url}: is no address: give one as http://localhost:8000") from None
        self.takes_ids = self.gives_ids = True
        self.context = 2**31  # tokens at most, where it tells
        self.extras = EXTRAS
        self.logprobs = False  # whether ids come beside logprobs only
        self.requests = self.drafted = self.accepted = 0  # drafts that answers told of
        self.lock = Lock()

    # ---- meeting ---------------------------------------------------------------------------------

    def probe(self, prompt: list[int]) -> None:
        """Find its model's name, and how it is asked, by a prompt. UserError where that fails."""
        try:
            self.find_name()
            self.probe_format(prompt)
        except (Denied, Timeout, ConnectionLost) as error:
            raise UserError(f"{self.url} {error}") from None
        except Refused as error:
            raise UserError(f"{self.url} refuses a plain completion: {error}") from None
        if not self.gives_ids and self.tokenizer is None:
            raise UserError(f"{self.url} gives no token ids, and --model has no tokenizer")

    def probe_format(self, prompt: list[int]) -> None:
        """Ask with ids and all fields, then with less, until an answer comes."""
        ways = [(True, EXTRAS), (True, {}), (False, EXTRAS), (False, {})]
        ways = ways if self.tokenizer else ways[:2]
        for self.takes_ids, self.extras in ways:
            try:
                choice = self.post(self.body(prompt, 2, GREEDY, 0))["choices"][0]
                break
            except Refused as error:
                if isinstance(error, (Timeout, Denied)) or (self.takes_ids, self.extras) == ways[-1]:
                    raise
        self.gives_ids = self.logprobs = True
        if self.ids(choice) is not None:
            self.logprobs = False
            return
        try:
            choice = self.post(self.body(prompt, 2, GREEDY, 0))["choices"][0]
            self.gives_ids = self.logprobs = self.ids(choice) is not None
        except Refused:
            self.gives_ids = self.logprobs = False

    def find_name(self) -> None:
        """The name of the model: the only one served, or the one asked for."""
        listed, why = [], ""
        try:
            listed = items(parsed(self.request("GET", "/v1/models")), "data")
        except (Timeout, Denied):
            raise
        except Refused as error:
            why = f" ({error})"
        models = {name: each for each in listed if (name := spelt(each, "id"))}
        if not models:
            if self.name is None:
                raise UserError(
                    f"{self.url} does not list its models{why}: give the name of one by --name"
                )
            return
        if self.name is None and len(models) == 1:
            (self.name,) = models
        elif self.name not in models:
            asked = "--name" if self.name is None else f"--name {self.name}, which is not there"
            raise UserError(f"{self.url} serves {', '.join(list(models)[:8])}: choose by {asked}")
        self.context = count(models[self.name], "max_model_len") or self.context

    # ---- asking ----------------------------------------------------------------------------------

    def ask(
        self, prompt: list[int], length: int, sampling: Sampling = GREEDY, seed: int = 0, **more
    ) -> Answer:  # fmt: skip
        """What it answers, at most `length` tokens; `more` are fields of the request."""
        return self.choices(prompt, length, sampling, seed, **more)[0]

    def offered(self, name: str, prompt: list[int], length: int, **more) -> Answer:
        """`ask` with a field that not every server takes."""
        try:
            return self.ask(prompt, length, **more)
        except ServerError:
            raise
        except Refused as error:
            raise NotOffered(f"{name} ({error})") from None

    def choices(
        self, prompt: list[int], length: int, sampling: Sampling = GREEDY, seed: int = 0, **more
    ) -> list[Answer]:  # fmt: skip
        got = self.post(self.body(prompt, length, sampling, seed) | more)
        prompt_tokens = count(got, "usage", "prompt_tokens")
        return [self.answer(choice, length, prompt_tokens) for choice in got["choices"]]

    def body(self, prompt: list[int], length: int, sampling: Sampling, seed: int) -> dict:
        asked = {
            "model": self.name, "max_tokens": length, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "seed": seed,
            "prompt": prompt if self.takes_ids else self.tokenizer.decode(prompt),
        }  # fmt: skip
        if self.extras:
            asked |= self.extras | {"top_k": sampling.top_k or -1}
        elif sampling.top_k:
            raise NotOffered("top_k")
        return asked | ({"logprobs": 1} if self.logprobs else {})

    def post(self, body: dict) -> dict:
        """The JSON object that a request is answered by. It has choices, which are objects."""
        text = self.request("POST", "/v1/completions", body)
        found = parsed(text)
        choices = items(found, "choices")
        if not choices or not all(isinstance(choice, dict) for choice in choices):
            raise Refused(f"answers no completion but {self.masked(text)[:60]!r}")
        with self.lock:
            self.drafted += count(found, "timings", "draft_n") or 0
            self.accepted += count(found, "timings", "draft_n_accepted") or 0
        return found

    def request(self, method: str, path: str, body: dict | None = None) -> str:
        """The text of a response; what else can happen, in one line."""
        asked = [f"{k} {body[k]}" for k in ("max_tokens", "temperature") if body]
        what = f" ({', '.join(asked)}, a prompt of {len(body['prompt'])})" if body else ""
        with self.lock:
            self.requests += 1
        begin = time.monotonic()
        try:
            got, text = self.patiently(method, path, body)
        except httpx.ConnectError as error:
            raise ConnectionLost(f"cannot be reached ({error}): is it running?") from None
        except httpx.TimeoutException:
            seconds = time.monotonic() - begin
            raise Timeout(f"gave no answer in {seconds:.0f} s{what}") from None
        except httpx.HTTPError as error:
            raise ServerError(f"it broke off: {type(error).__name__}{what}") from None
        if got.next_request:
            there = self.masked(str(got.next_request.url).removesuffix(path))
            raise Denied(f"redirects to {there}: give that address instead")
        if got.status_code in (401, 403):
            raise Denied("wants a key, or another one: --key-env names the variable that holds it")
        refusal = f"HTTP {got.status_code}: {self.masked(message(text))[:200]}{what}"
        if got.status_code in BUSY:
            raise Timeout(f"{BUSY[got.status_code]} after {self.seconds:.0f} s: {refusal}")
        if not got.is_success:
            raise (ServerError if got.status_code >= 500 else Refused)(refusal)
        return text

    def patiently(self, method: str, path: str, body: dict | None) -> tuple[httpx.Response, str]:
        """A response and its text. Ask again, with back-off, while the server is too busy or loads
        its model, and once after a kept connection was closed."""
        begin, wait = time.monotonic(), 0.1
        while True:
            try:
                got, text = self.send(method, path, body)
            except httpx.RemoteProtocolError:
                got, text = self.send(method, path, body)
            late = time.monotonic() - begin + wait > self.seconds
            if got.status_code not in BUSY or late:
                return got, text
            time.sleep(wait)
            wait = min(2 * wait, 5.0)

    def send(self, method: str, path: str, body: dict | None) -> tuple[httpx.Response, str]:
        """A response and its text. httpx limits the time of each read; this limits their sum."""
        begin, parts = time.monotonic(), []
        with self.http.stream(method, path, json=body) as got:
            for part in got.iter_bytes():
                parts.append(part)
                if time.monotonic() - begin > self.seconds:
                    raise httpx.ReadTimeout("the answer still comes in")
        return got, b"".join(parts).decode("utf-8-sig", "replace")

    def masked(self, text: str) -> str:
        """What a server says, without the key, should it repeat that."""
        return text.replace(self.key, "…") if self.key else text

    # ---- what it answered ------------------------------------------------------------------------

    def answer(self, choice: dict, length: int, prompt_tokens: int | None) -> Answer:
        text, tokens = spelt(choice, "text"), self.ids(choice) if self.gives_ids else None
        given = tokens is not None
        if not given and self.tokenizer is None:
            raise Refused("its answer has no token ids, and --model has no tokenizer")
        if not given:
            tokens = self.tokenizer.encode(text, special=False)
        reason = spelt(choice, "finish_reason") or None
        ended = ended_by(reason)
        if ended is None:
            ended = given and len(tokens) < length
        if tokens and tokens[-1] in self.ends:
            tokens, ended = tokens[:-1], True
        content = items(choice, "logprobs", "content")
        logprobs = [as_number(each) for each in items(choice, "logprobs", "token_logprobs")]
        logprobs = logprobs or [as_number(field(each, "logprob")) for each in content]
        numbers = given and None not in logprobs
        return Answer(
            text, tokens, given, ended, reason, logprobs if numbers else None, prompt_tokens
        )

    def ids(self, choice: dict) -> list[int] | None:
        """The token ids of a choice, wherever servers put them."""
        beside = [field(each, "id") for each in items(choice, "logprobs", "content")]
        for found in choice.get("token_ids"), choice.get("tokens"), beside or None:
            if isinstance(found, list) and all(type(i) is int for i in found):
                return found
        return None

    def streamed(self, prompt: list[int], length: int, **more) -> tuple[str, str | None]:
        """The text and the finish reason of an answer that comes in parts."""
        body = self.body(prompt, length, GREEDY, 0) | {"stream": True} | more
        text, reason = "", None
        for data in events(self.request("POST", "/v1/completions", body)):
            part = parsed(data)
            if not isinstance(part, dict):
                said = self.masked(data)[:60]
                raise Refused(f"a stream is no stream of completions: {said!r}")
            for choice in items(part, "choices"):
                text += spelt(choice, "text")
                reason = spelt(choice, "finish_reason") or reason
        return text, reason

    def drafts(self) -> tuple[int, int] | None:
        """Tokens drafted and accepted so far, where it tells."""
        try:
            lines = self.request("GET", "/metrics").splitlines()
        except (Refused, ConnectionLost):
            lines = []
        counts = {"draft": 0, "accepted": 0}
        for found in filter(None, map(COUNTER.match, lines)):
            counts[found[1]] += count(found[2]) or 0
        told = tuple(counts.values())
        return next((each for each in (told, (self.drafted, self.accepted)) if any(each)), None)


def ended_by(reason: str | None) -> bool | None:
    """Whether a finish reason is an end token or a stop string, not a limit; None without one."""
    return reason and not CUT.search(reason)


def events(text: str) -> Iterator[str]:
    """The data of server-sent events."""
    for line in text.split("\n"):
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield data


def message(text: str) -> str:
    """What a refusal says, in one line."""
    found = parsed(text)
    places = ("error", "message"), ("message",), ("error",)
    said = next(filter(None, (spelt(found, *place) for place in places)), text)
    return " ".join(said.split())
