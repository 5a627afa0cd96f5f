"""A client for servers with OpenAI's completions API, over httpx."""

import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import product
from threading import Lock, Thread
from typing import TypeVar

import httpx

from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError
from minispec.remote.json_fields import (
    as_number,
    count_at,
    list_at,
    parse_json,
    text_at,
    value_at,
)
from minispec.remote.transport import make_transport
from minispec.sampling import Sampling

Item, Result = TypeVar("Item"), TypeVar("Result")
TIMEOUT_SECONDS = 120.0  # for one answer
CONNECT_SECONDS = 30.0
# Fields that turn off further warpers, which would otherwise have the server's defaults, and fields
# that request token ids, under the names used by several servers. A strict server may reject them.
EXTRA_FIELDS = {
    "min_p": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0,
    "samplers": ["temperature", "top_k", "top_p"], "return_token_ids": True, "return_tokens": True,
}  # fmt: skip
LOGPROBS = {"logprobs": 1}
TOP_K_OFF = 2**30  # larger than any vocabulary; some servers reject -1, others 0

BUSY_STATUS = {429: "is still too busy", 503: "is still loading or overloaded"}
STOP_REASONS = (  # an end token or a stop string ended the answer, in the words of several servers
    "stop", "eos", "eos_token", "stop_sequence", "stop_string", "end_turn", "eosfound",
    "stopstringfound",
)  # fmt: skip
LIMIT_REASON = re.compile("length|limit|max", re.IGNORECASE)  # the answer reached a limit
DRAFT_METRIC = re.compile(  # name{labels} value [timestamp]
    r"\w*:?spec_decode_num_(draft|accepted)_tokens(?:_total)?(?:\{[^}]*\})?\s+(\S+)"
)


class RequestError(Exception):
    """A request failed. Its `kind` is "rejected" (4xx, or answered by something else), "failed"
    (5xx, or a broken connection), "unavailable" (access is denied, or no answer in time), or
    "unsupported" (it was not sent, because the server has no field for it)."""

    def __init__(self, message: str, kind: str):
        super().__init__(message)
        self.kind = kind


class ConnectionLost(Exception):
    """The server cannot be reached."""


@dataclass(frozen=True)
class Answer:
    """One choice of a completion. `tokens` excludes a final end token; `logprobs` has one value per
    token, if they were requested and returned."""

    text: str
    tokens: list[int]
    has_ids: bool  # False: our tokenizer encoded the text
    # by an end token or a stop string, not by a limit; None: broken off, or for an unknown reason
    ended: bool | None
    reason: str | None  # finish_reason; if missing, an answer shorter than max_tokens has ended
    logprobs: list[float] | None = None
    prompt_tokens: int | None = None  # as counted by the server
    end: int | None = None  # the final end token, if the server returned it


class Server:
    """Send requests to one server; safe to use from several threads. `probe` finds out whether the
    server accepts token ids as prompts, accepts extra fields, and returns token ids. The key is
    sent to this server only: redirects are not followed."""

    def __init__(
        self, url: str, tokenizer: Tokenizer | None, name: str | None, eos_ids: tuple,
        seconds: float = TIMEOUT_SECONDS, key: str | None = None, connections: int = 16,
    ):  # fmt: skip
        self.tokenizer, self.name, self.eos_ids = tokenizer, name, eos_ids
        self.seconds, self.key = seconds, key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
            if not base.host or base.scheme not in ("http", "https"):
                raise ValueError
        except (ValueError, httpx.InvalidURL):
            raise UserError(
                f"{url}: not a valid address; use one like http://localhost:8000"
            ) from None
        transport, self.proxy = make_transport(base, connections)
        timeout = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
        self.http = httpx.Client(
            base_url=base, headers=headers, timeout=timeout, transport=transport
        )
        self.url = str(base.copy_with(userinfo=b""))  # for messages
        if self.proxy:
            self.url += f" (through {self.proxy})"
        self.accepts_ids = self.accepts_extra = self.returns_ids = True
        self.context = 2**31  # maximum number of tokens, if the server reports it
        self.needs_logprobs = False  # to get token ids
        self.requests = self.drafted = self.accepted = 0  # drafts as reported in answers
        self.lock = Lock()

    # ---- probing ---------------------------------------------------------------------------------

    def probe(self, prompt: list[int]) -> None:
        """Find the model's name and the request format using a prompt, or raise UserError."""
        try:
            self.find_name()
            self.probe_format(prompt)
        except ConnectionLost as error:
            raise UserError(f"{self.url} {error}") from None
        except RequestError as error:
            what = "" if error.kind == "unavailable" else "failed on a plain completion: "
            raise UserError(f"{self.url} {what}{error}") from None
        if not self.returns_ids and self.tokenizer is None:
            raise UserError(f"{self.url} returns no token ids, and --model has no tokenizer")

    def probe_format(self, prompt: list[int]) -> None:
        """Try a prompt of token ids, then text; with all extra fields, then with OpenAI's own."""
        choice = failure = None
        prompts = (True, False) if self.tokenizer else (True,)
        for self.accepts_extra, self.accepts_ids in product((True, False), prompts):
            try:
                choice = self.post(self.body(prompt, 2))["choices"][0]
                break
            except RequestError as error:
                failure = error
                if error.kind == "unavailable":
                    break
        if choice is None:
            raise failure
        if self.token_ids(choice) is None:
            self.returns_ids = self.needs_logprobs = self.returns_ids_with_logprobs(prompt)

    def returns_ids_with_logprobs(self, prompt: list[int]) -> bool:
        try:
            choice = self.post(self.body(prompt, 2) | LOGPROBS)["choices"][0]
            return self.token_ids(choice) is not None
        except RequestError:
            return False

    def find_name(self) -> None:
        """Set the model's name: the only one served, or check the one requested."""
        listed, why = [], ""
        try:
            listed = list_at(parse_json(self.request("GET", "/v1/models")), "data")
        except RequestError as error:
            if error.kind == "unavailable":
                raise
            why = f" ({error})"
        models = {name: entry for entry in listed if (name := text_at(entry, "id"))}
        if not models:
            if self.name is None:
                raise UserError(f"{self.url} does not list its models{why}; name one with --name")
            return
        if self.name is None and len(models) == 1:
            (self.name,) = models
        elif self.name not in models:
            missing = "" if self.name is None else f", not {self.name}"
            served = ", ".join(list(models)[:8])
            raise UserError(f"{self.url} serves {served}{missing}; choose one with --name")
        self.context = count_at(models[self.name], "max_model_len") or self.context

    # ---- requests --------------------------------------------------------------------------------

    def ask(
        self, prompt: list[int], length: int, sampling: Sampling = Sampling(), seed: int = 0,
        **fields,
    ) -> Answer:  # fmt: skip
        """Return an answer of at most `length` tokens; `fields` are added to the request."""
        completion = self.post(self.body(prompt, length, sampling, seed) | fields)
        prompt_tokens = count_at(completion, "usage", "prompt_tokens")
        return self.parse_answer(completion["choices"][0], length, prompt_tokens)


    def body(
        self, prompt: list[int], length: int, sampling: Sampling = Sampling(), seed: int = 0
    ) -> dict:
        body = {
            "model": self.name, "max_tokens": length, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "seed": seed,
            "prompt": prompt if self.accepts_ids else self.as_text(prompt),
        }  # fmt: skip
        if self.accepts_extra:
            body |= EXTRA_FIELDS | {"top_k": sampling.top_k or TOP_K_OFF}
        elif sampling.top_k and sampling.temperature:
            raise RequestError("top_k", "unsupported")
        return body | (LOGPROBS if self.needs_logprobs else {})

    def as_text(self, prompt: list[int]) -> str:
        """Return the text of a prompt, for a server that adds the tokens that texts begin with. Its
        special tokens are spelled out."""
        start = self.tokenizer.encode("")
        begins = start and prompt[: len(start)] == start
        ids = prompt[len(start) :] if begins else prompt
        return self.tokenizer.backend.decode(ids, skip_special_tokens=False)

    def post(self, body: dict) -> dict:
        """Send a request and return the JSON object of the answer; its choices are objects."""
        text = self.request("POST", "/v1/completions", body)
        completion = parse_json(text)
        choices = list_at(completion, "choices")
        if not choices or not all(isinstance(choice, dict) for choice in choices):
            found = self.redact(text)[:60]
            broken = completion is None and (not text or text.lstrip().startswith("{"))
            kind = "failed" if broken else "rejected"
            raise RequestError(f"did not answer with a completion but {found!r}", kind)
        with self.lock:
            self.drafted += count_at(completion, "timings", "draft_n") or 0
            self.accepted += count_at(completion, "timings", "draft_n_accepted") or 0
        return completion

    def request(self, method: str, path: str, body: dict | None = None) -> str:
        """Return the text of a response; raise every failure as an exception with one line."""
        values = [f"{k} {body[k]}" for k in ("max_tokens", "temperature") if body]
        what = f" ({', '.join(values)}, prompt of {len(body['prompt'])})" if body else ""
        with self.lock:
            self.requests += 1
        begin = time.monotonic()
        try:
            response, text = self.send_with_retries(method, path, body)
        except (httpx.ConnectError, httpx.ProxyError) as error:
            raise ConnectionLost(f"cannot be reached ({error}); is it running?") from None
        except httpx.TimeoutException:
            seconds = time.monotonic() - begin
            late = f"did not answer within {seconds:.0f} s{what}"
            raise RequestError(late, "unavailable") from None
        except httpx.HTTPError as error:
            broken = f"broke off its answer: {type(error).__name__}{what}"
            raise RequestError(broken, "failed") from None
        self.check_status(response, path, f"{self.redact(error_message(text))[:200]}{what}")
        return text

    def check_status(self, response: httpx.Response, path: str, message: str) -> None:
        """Raise RequestError unless the request succeeded."""
        status = response.status_code
        failure = f"HTTP {status}: {message}"
        if response.next_request:
            target = self.redact(str(response.next_request.url).removesuffix(path))
            raise RequestError(f"redirects to {target}; use that address instead", "unavailable")
        if status in (401, 403, 407):
            needs = "requires a valid key; name its environment variable with --key-env"
            if self.proxy:  # it may be the one that refused
                needs = f"refuses access: {failure}; check {self.proxy} and --key-env"
            raise RequestError(needs, "unavailable")
        if busy := BUSY_STATUS.get(status):
            raise RequestError(f"{busy} after {self.seconds:.0f} s: {failure}", "unavailable")
        if not response.is_success:
            raise RequestError(failure, "failed" if status >= 500 else "rejected")

    def send_with_retries(
        self, method: str, path: str, body: dict | None
    ) -> tuple[httpx.Response, str]:
        """Send a request. Retry once after a dropped keep-alive connection, and with back-off while
        the server is busy or loading its model."""
        begin, wait = time.monotonic(), 0.1
        while True:
            try:
                response, text = self.send(method, path, body)
            except httpx.RemoteProtocolError:
                response, text = self.send(method, path, body)
            late = time.monotonic() - begin + wait > self.seconds
            if response.status_code not in BUSY_STATUS or late:
                return response, text
            time.sleep(wait)
            wait = min(2 * wait, 5.0)

    def send(self, method: str, path: str, body: dict | None) -> tuple[httpx.Response, str]:
        """Return a response and its text. httpx limits the time per read; this limits the total."""
        begin, parts = time.monotonic(), []
        with self.http.stream(method, path, json=body) as response:
            for part in response.iter_bytes():
                parts.append(part)
                if time.monotonic() - begin > self.seconds:
                    raise httpx.ReadTimeout("the answer is still arriving")
        return response, b"".join(parts).decode("utf-8-sig", "replace")

    def redact(self, text: str) -> str:
        """Hide the key, in case the server repeats it."""
        return text.replace(self.key, "…") if self.key else text

    # ---- answers ---------------------------------------------------------------------------------

    def parse_answer(self, choice: dict, length: int, prompt_tokens: int | None) -> Answer:
        text, tokens = text_at(choice, "text"), self.token_ids(choice) if self.returns_ids else None
        has_ids = tokens is not None
        if not has_ids and self.tokenizer is None:
            raise RequestError("an answer has no token ids; --model has no tokenizer", "failed")
        if not has_ids:
            complete = text.rstrip("\ufffd")  # a limit may cut a character
            tokens = self.tokenizer.encode(complete, special=False)
        reason = finish_reason(choice)
        ended = is_stop_reason(reason)
        if ended is None and (reason is None or has_ids and len(tokens) >= length):
            ended = has_ids and len(tokens) < length
        end = tokens[-1] if tokens and tokens[-1] in self.eos_ids else None
        if end is not None:
            tokens, ended = tokens[:-1], True
        content = list_at(choice, "logprobs", "content")
        logprobs = [as_number(value) for value in list_at(choice, "logprobs", "token_logprobs")]
        logprobs = logprobs or [as_number(value_at(entry, "logprob")) for entry in content]
        valid = has_ids and None not in logprobs
        logprobs = logprobs if valid else None
        return Answer(text, tokens, has_ids, ended, reason, logprobs, prompt_tokens, end)

    def token_ids(self, choice: dict) -> list[int] | None:
        """Return the token ids of a choice, from wherever the server puts them, or None."""
        with_logprobs = [value_at(entry, "id") for entry in list_at(choice, "logprobs", "content")]
        for ids in choice.get("token_ids"), choice.get("tokens"), with_logprobs or None:
            if isinstance(ids, list) and all(type(i) is int for i in ids):
                return ids
        return None

    def draft_counts(self) -> tuple[int, int] | None:
        """Return the number of tokens drafted and accepted so far, if the server reports them."""
        try:
            lines = self.request("GET", "/metrics").splitlines()
        except (RequestError, ConnectionLost):
            lines = []
        counts = {"draft": 0, "accepted": 0}
        for match in filter(None, map(DRAFT_METRIC.match, lines)):
            counts[match[1]] += count_at(match[2]) or 0
        sources = tuple(counts.values()), (self.drafted, self.accepted)
        return next((pair for pair in sources if any(pair)), None)


def is_stop_reason(reason: str | None) -> bool | None:
    """Return whether a finish reason is an end token or stop string, not a limit. None: it is
    missing, unknown, or says that the answer was broken off ("abort", "content_filter")."""
    if reason and reason.lower() in STOP_REASONS:
        return True
    return False if reason and LIMIT_REASON.search(reason) else None


def finish_reason(choice: dict) -> str | None:
    """Return the finish reason of a choice; SGLang's may be an object such as {"type": "stop"}."""
    return text_at(choice, "finish_reason") or text_at(choice, "finish_reason", "type") or None


def error_message(text: str) -> str:
    """Return the error message of a response, in one line."""
    value = parse_json(text)
    paths = ("error", "message"), ("message",), ("error",)
    return " ".join(next(filter(None, (text_at(value, *path) for path in paths)), text).split())


# ---- several requests ----------------------------------------------------------------------------


def in_parallel(
    ask: Callable[[Item], Result], items: list[Item], threads: int
) -> Iterator[tuple[int, Result]]:
    """Yield (i, ask(items[i])) in order. If one of them raises, or Ctrl-C is pressed, yield the
    others that are finished and raise that. Nothing waits for the remaining threads."""
    waiting = deque(enumerate(items))
    futures: list[Future] = [Future() for _ in items]
    for _ in range(min(threads, len(items))):
        Thread(target=work, args=(ask, waiting, futures), daemon=True).start()
    i = 0
    try:
        for i, future in enumerate(futures):
            yield i, future.result()
    except GeneratorExit:
        raise
    except BaseException:
        waiting.clear()
        for j, future in enumerate(futures[i:], i):
            if future.done() and not future.exception():
                yield j, future.result()
        raise
    finally:
        waiting.clear()


def work(ask: Callable, waiting: deque, futures: list[Future]) -> None:
    """Answer the items that are waiting, one after another, until there are none."""
    while waiting:
        try:
            i, item = waiting.popleft()
        except IndexError:  # another thread took the last one
            return
        try:
            futures[i].set_result(ask(item))
        except BaseException as error:
            futures[i].set_exception(error)
