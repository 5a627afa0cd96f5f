"""A server that speaks OpenAI's completions API, over httpx."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock

import httpx

from minispec.certify.cases import GREEDY
from minispec.errors import UserError
from minispec.sampling import Sampling
from minispec.tokenizer import Tokenizer

SECONDS = 120.0  # that one answer may take
# warpers, under the names of several servers, that would else have each server's own defaults; and
# a request for token ids. A strict server may refuse fields that it does not know
EXTRAS = {
    "min_p": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0,
    "samplers": ["temperature", "top_k", "top_p"], "return_token_ids": True, "return_tokens": True,
}  # fmt: skip

COUNTER = re.compile(r"\w*:?spec_decode_num_(draft|accepted)_tokens(?:_total)?[{ ]")


class Refused(Exception):
    """The server said no to a request (4xx)."""


class NoKey(Refused):
    """It wants a key, or another one."""


class Broke(Refused):
    """It broke while it answered."""


class Slow(Broke):
    """It took too long."""


class NotOffered(Refused):
    """The server does not have this."""


class Gone(Exception):
    """The server cannot be reached any more."""


@dataclass(frozen=True)
class Answer:
    """One choice of a completion. `tokens` are without the end token that ended it; `logprobs` are
    theirs, where they were asked for and given."""

    text: str
    tokens: list[int]
    given: bool  # as ids; else our tokenizer read the text
    ended: bool  # by an end token or a stop string; else by its length
    logprobs: list[float] | None = None
    prompt_tokens: int | None = None  # as the server counts them


class Server:
    """Requests, one at a time or from several threads. What it takes and gives is found out by
    `meet`: token ids as prompts, token ids in answers, extra fields."""

    def __init__(
        self, url: str, tokenizer: Tokenizer | None, name: str | None, ends: tuple,
        seconds: float = SECONDS,
    ):  # fmt: skip
        self.tokenizer, self.name, self.ends = tokenizer, name, ends
        self.key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
            self.http = httpx.Client(
                base_url=base, headers=headers, timeout=seconds,
                limits=httpx.Limits(max_connections=16),
            )  # fmt: skip
            self.url = str(base.copy_with(userinfo=b""))  # as it is shown
            if not base.host:
                raise ValueError
        except (ValueError, httpx.InvalidURL):
            raise UserError(f"{url}: is no address: give one as http://localhost:8000") from None
        self.takes_ids = self.gives_ids = True
        self.context = 2**31  # tokens at most, where it tells
        self.extras = EXTRAS
        self.logprobs = False  # whether ids come beside logprobs only
        self.requests = self.drafted = self.accepted = 0  # drafts that answers told of
        self.lock = Lock()

    # ---- meeting ---------------------------------------------------------------------------------

    def meet(self, prompt: list[int]) -> None:
        """Find its model's name, and how it is asked, by a prompt. UserError where that fails."""
        try:
            self.find_name()
            self.find_manners(prompt)
        except NoKey:
            raise UserError(f"{self.url} wants a key: put it into OPENAI_API_KEY") from None
        except (Refused, Gone) as error:
            raise UserError(f"{self.url} refuses a plain completion: {error}") from None
        if not self.gives_ids and self.tokenizer is None:
            raise UserError(f"{self.url} gives no token ids, and --model has no tokenizer")

    def find_manners(self, prompt: list[int]) -> None:
        """Ask with ids and all fields, then with less, until an answer comes."""
        ways = [(True, EXTRAS), (True, {}), (False, EXTRAS), (False, {})]
        ways = ways if self.tokenizer else ways[:2]
        for self.takes_ids, self.extras in ways:
            try:
                choice = self.post(self.body(prompt, 2, GREEDY, 0))["choices"][0]
                break
            except Refused as error:
                if isinstance(error, (Slow, NoKey)) or (self.takes_ids, self.extras) == ways[-1]:
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
        try:
            models = {each["id"]: each for each in self.get("/v1/models").json()["data"]}
        except NoKey:
            raise
        except (Refused, ValueError, KeyError, TypeError):
            if self.name is None:
                raise UserError(
                    f"{self.url} does not list its models: give the name of one by --name"
                ) from None
            return
        if self.name is None and len(models) == 1:
            (self.name,) = models
        elif self.name not in models:
            asked = "--name" if self.name is None else f"--name {self.name}, which is not there"
            raise UserError(f"{self.url} serves {', '.join(list(models)[:8])}: choose by {asked}")
        self.context = models[self.name].get("max_model_len") or self.context

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
        except Broke:
            raise
        except Refused as error:
            raise NotOffered(f"{name} ({error})") from None

    def choices(
        self, prompt: list[int], length: int, sampling: Sampling = GREEDY, seed: int = 0, **more
    ) -> list[Answer]:  # fmt: skip
        got = self.post(self.body(prompt, length, sampling, seed) | more)
        usage = got.get("usage") or {}
        try:
            return [self.answer(choice, usage.get("prompt_tokens")) for choice in got["choices"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise Refused(f"its answer is no completion: {type(error).__name__} {error}") from None

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
        """The JSON object that a request is answered by."""
        got = self.checked(lambda: self.http.post("/v1/completions", json=body), body)
        try:
            found = got.json()
            if not found["choices"] or not all(isinstance(c, dict) for c in found["choices"]):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise Refused(f"answers no completion but {self.masked(got.text[:60])!r}") from None
        timings = found.get("timings") or {}
        with self.lock:
            self.drafted += timings.get("draft_n") or 0
            self.accepted += timings.get("draft_n_accepted") or 0
        return found

    def get(self, path: str) -> httpx.Response:
        return self.checked(lambda: self.http.get(path), {})

    def checked(self, send, body: dict) -> httpx.Response:
        """The response, where it is one; what else can happen, in one line."""
        what = ", ".join(f"{k} {v}" for k, v in body.items() if k in ("max_tokens", "temperature"))
        what = f" ({what}, a prompt of {len(body['prompt'])})" if body else ""
        with self.lock:
            self.requests += 1
        begin = time.monotonic()
        try:
            got = patiently(send)
        except httpx.ConnectError as error:
            raise Gone(f"nobody answers there ({error}): is it running?") from None
        except httpx.TimeoutException:
            seconds = time.monotonic() - begin
            raise Slow(f"no answer in {seconds:.0f} s{what}") from None
        except httpx.HTTPError as error:
            raise Broke(f"it broke off: {type(error).__name__}{what}") from None
        if got.status_code in (401, 403):
            raise NoKey("it wants another key")
        if got.status_code >= 400:
            kind = Broke if got.status_code >= 500 else Refused
            raise kind(f"HTTP {got.status_code}: {self.masked(message(got))}{what}")
        return got

    def masked(self, text: str) -> str:
        """What a server says, without the key, should it repeat that."""
        return text.replace(self.key, "…") if self.key else text

    # ---- what it answered ------------------------------------------------------------------------

    def answer(self, choice: dict, prompt_tokens: int | None) -> Answer:
        text, tokens = str(choice.get("text") or ""), self.ids(choice) if self.gives_ids else None
        given = tokens is not None
        if not given:
            tokens = self.tokenizer.encode(text, special=False)
        ended = choice.get("finish_reason") not in ("length", None)
        if tokens and tokens[-1] in self.ends:
            tokens, ended = tokens[:-1], True
        said = choice.get("logprobs") or {}
        content = said.get("content") or []
        logprobs = said.get("token_logprobs") or [each["logprob"] for each in content]
        numbers = given and all(isinstance(each, (int, float)) for each in logprobs)
        return Answer(text, tokens, given, ended, logprobs if numbers else None, prompt_tokens)

    def ids(self, choice: dict) -> list[int] | None:
        """The token ids of a choice, wherever servers put them."""
        said = choice.get("logprobs")
        content = said.get("content") if isinstance(said, dict) else None
        content = content if isinstance(content, list) else []
        beside = [each.get("id") for each in content if isinstance(each, dict)]
        for found in choice.get("token_ids"), choice.get("tokens"), beside or None:
            if isinstance(found, list) and all(type(i) is int for i in found):
                return found
        return None

    def streamed(self, prompt: list[int], length: int, **more) -> tuple[str, str | None]:
        """The text and the finish reason of an answer that comes in parts."""
        body = self.body(prompt, length, GREEDY, 0) | {"stream": True} | more
        got = self.checked(lambda: self.http.post("/v1/completions", json=body), body)
        text, reason = "", None
        try:
            for part in events(got.text):
                for choice in part.get("choices") or []:
                    text += choice.get("text") or ""
                    reason = choice.get("finish_reason") or reason
        except (ValueError, AttributeError, TypeError) as error:
            raise Refused(f"a stream is no stream of completions: {error}") from None
        return text, reason

    def drafts(self) -> tuple[int, int] | None:
        """Tokens drafted and accepted so far, where it tells."""
        try:
            lines = self.get("/metrics").text.splitlines()
        except (Refused, Gone):
            lines = []
        counts = {"draft": 0, "accepted": 0}
        for line in lines:
            if found := COUNTER.match(line):
                counts[found[1]] += int(float(line.split()[-1]))
        told = tuple(counts.values())
        return next((each for each in (told, (self.drafted, self.accepted)) if any(each)), None)


def patiently(send: Callable[[], httpx.Response]) -> httpx.Response:
    """Once more where the server had closed a kept connection, and later where it is too busy."""
    for wait in 1, 2, 4:
        try:
            got = send()
        except httpx.RemoteProtocolError:
            return send()
        if got.status_code != 429:
            return got
        time.sleep(wait)
    return got


def events(text: str) -> Iterator[dict]:
    """The JSON objects of a stream of server-sent events."""
    for line in text.split("\n"):
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def message(got: httpx.Response) -> str:
    """What a refusal says, in one line."""
    try:
        found = got.json()
        found = found.get("error", found)
        said = str(found.get("message", found) if isinstance(found, dict) else found)
    except (ValueError, AttributeError):
        said = got.text
    return " ".join(said.split())[:200]
