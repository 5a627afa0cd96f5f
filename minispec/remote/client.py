"""A client for servers with OpenAI's completions API, over httpx."""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing.pool import ThreadPool
from threading import Lock

import httpx

from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError, note, user_error
from minispec.sampling import Sampling

TIMEOUT_SECONDS = 120.0  # for one answer
CONNECT_SECONDS = 30.0
LOCAL_HOSTS = "localhost", "127.0.0.1", "::1", "0.0.0.0"  # the last is what many servers print
# Fields of several servers that turn off further warpers or request token ids. A strict server may
# reject them.
EXTRA_FIELDS = {
    "min_p": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0,
    "samplers": ["temperature", "top_k", "top_p"], "return_token_ids": True, "return_tokens": True,
}  # fmt: skip
TOP_K_OFF = 2**30  # larger than any vocabulary; some servers reject -1, others 0
# Finish reasons, in the words of several servers: an end token, or a limit, ended the answer.
STOP_REASON = re.compile("(?i)stop(_sequence|_string|stringfound)?|eos(_token|found)?|end_turn")
LIMIT_REASON = re.compile("(?i)length|limit|max")
DRAFT_METRIC = re.compile(  # name{labels} value [timestamp]
    r"^\w*:?spec_decode_num_(draft|accepted)_tokens(?:_total)?(?:\{[^}\n]*\})?[ \t]+(\S+)",
    re.MULTILINE,
)


class RequestError(Exception):
    """A request failed. Its `kind` is "rejected" (4xx, or not a completion), "failed" (5xx, or a
    broken connection), "incomplete" (the server broke off its answer), "lost" (the server cannot be
    reached), or "unavailable" (busy, access denied, or no answer in time). The caller may set
    `request` to the one that failed."""

    def __init__(self, message: str, kind: str, busy: bool = False):
        super().__init__(message)
        self.request: object = None
        self.kind, self.busy = kind, busy


PATH, LLAMACPP_PATH = "/v1/completions", "/completion"  # llama.cpp also has its own API
LLAMACPP_NAMES = {"text": "content", "tokens": "tokens", "finish_reason": "stop_type"}
TRANSIENT = "failed", "incomplete", "lost"  # another request may succeed
FATAL = "lost", "unavailable"  # another request would fail as well


@dataclass(frozen=True)
class Answer:
    """A completion. `logprobs` are those of its tokens."""

    text: str
    tokens: list[int]  # without a final end token
    has_ids: bool  # False: our tokenizer, if there is one, encoded the text
    ended: bool  # not cut by a limit; without a finish_reason, every short answer has ended
    logprobs: list[float] | None
    prompt_tokens: int  # as counted by the server; 0 if unknown
    end: int | None  # the final end token, if the server returned it


class Server:
    """Send requests to one server, from any thread. `probe` finds out whether the server accepts
    token ids as prompts, accepts extra fields, and returns token ids. Redirects are not followed,
    so nobody else gets the key."""

    def __init__(
        self, url: str, tokenizer: Tokenizer | None, name: str | None, eos_ids: tuple,
        seconds: float = TIMEOUT_SECONDS, key: str | None = None, connections: int = 16,
    ):  # fmt: skip
        self.tokenizer, self.name, self.eos_ids = tokenizer, name, eos_ids
        self.seconds, self.key = seconds, key
        with user_error(f"{url}: not a valid address; use one like http://localhost:8000"):
            base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
            if not base.host or base.scheme not in ("http", "https"):
                raise ValueError("no http address")
        remote, encrypted = base.host not in LOCAL_HOSTS, base.scheme == "https"
        with user_error("a proxy or certificate variable of the environment is wrong"):
            self.http = httpx.Client(
                base_url=base, headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS)),
                limits=httpx.Limits(max_connections=connections),
                trust_env=remote,  # a server on this machine needs no proxy
                verify=encrypted,  # otherwise no certificates are read
            )  # fmt: skip
        self.url = str(base.copy_with(userinfo=b""))  # for messages
        if key and remote and not encrypted:
            note(f"the key is sent to {self.url} unencrypted and can be read in transit; use https")
        self.accepts_ids = self.accepts_extra = self.returns_ids = True
        self.path, self.needs_logprobs = PATH, False  # to get token ids
        self.context = 2**31  # maximum number of tokens, if the server reports it
        self.retried: tuple[str, ...] = ("failed",)  # kinds of failures after which to repeat
        self.retry_seconds: tuple[float, ...] = (0.1,)  # waited before each repetition
        self.requests = self.drafted = self.accepted = 0  # drafts as reported in answers
        self.lock = Lock()

    # ---- probing ---------------------------------------------------------------------------------

    def probe(self, prompt: list[int]) -> None:
        """Find the model's name and the request format using a prompt, or raise UserError."""
        try:
            self.find_name()
            self.probe_format(prompt)
        except RequestError as error:
            what = "" if error.kind in FATAL else "failed on a plain completion: "
            raise UserError(f"{self.url} {what}{error}") from None
        if not self.returns_ids and self.tokenizer is None:
            raise UserError(f"{self.url} returns no token ids, and --model has no tokenizer")

    def find_name(self) -> None:
        """Set the model's name: the only one served, or check the one requested."""
        listed, why = [], ""
        try:
            listed = at(parse_json(self.request("GET", "/v1/models")), "data", of=list)
        except RequestError as error:
            if error.kind in FATAL:
                raise
            why = f" ({error})"
        models = {name: entry for entry in listed if (name := at(entry, "id", of=str))}
        if self.name is None and not models:
            raise UserError(f"{self.url} does not list its models{why}; name one with --name")
        if self.name is None and len(models) == 1:
            (self.name,) = models
        elif models and self.name not in models:
            missing = "" if self.name is None else f", not {self.name}"
            served = ", ".join(list(models)[:8])
            raise UserError(f"{self.url} serves {served}{missing}; choose one with --name")
        self.context = count(at(models, self.name, "max_model_len")) or self.context

    def probe_format(self, prompt: list[int]) -> None:
        """Try a prompt of token ids, then text; with all extra fields, then with OpenAI's only. If
        no ids are returned, try llama.cpp's own API, then logprobs."""
        formats = [*product((True, False), (True, False) if self.tokenizer else (True,))]
        for self.accepts_extra, self.accepts_ids in formats:
            try:
                answer = self.ask(prompt, 2)
                break
            except RequestError as error:
                if error.kind in FATAL or (self.accepts_extra, self.accepts_ids) == formats[-1]:
                    raise
        if answer.has_ids:
            return
        # llama.cpp's logprobs leave out each token after which the text ends within a character
        for self.path, self.needs_logprobs in ((LLAMACPP_PATH, False), (PATH, True)):
            with contextlib.suppress(RequestError):
                if self.ask(prompt, 2).has_ids:
                    return
        self.returns_ids = self.needs_logprobs = False

    # ---- requests --------------------------------------------------------------------------------

    def ask(self, prompt: list[int], length: int, sampling=Sampling(), seed=0, **fields) -> Answer:
        """Return an answer of at most `length` tokens; `fields` are added to the request."""
        body = {"model": self.name, "max_tokens": length, "temperature": sampling.temperature,
                "top_p": sampling.top_p, "seed": seed,
                "prompt": prompt if self.accepts_ids else self.as_text(prompt)}  # fmt: skip
        if self.accepts_extra:
            body |= EXTRA_FIELDS | {"top_k": sampling.top_k or TOP_K_OFF}
        if self.needs_logprobs:
            body["logprobs"] = 1
        parse = partial(self.parse_answer, length=length)
        path = PATH if "logprobs" in fields else self.path
        return self.request("POST", path, body | fields, parse)

    def supports(self, sampling: Sampling) -> bool:
        """Return whether the server has fields for this sampling; OpenAI's API has no top_k."""
        return self.accepts_extra or not (sampling.top_k and sampling.temperature)

    def as_text(self, prompt: list[int]) -> str:
        """Return a prompt's text, without the tokens that texts begin with: servers add them."""
        start = self.tokenizer.encode("")
        begins = start and prompt[: len(start)] == start
        ids = prompt[len(start) :] if begins else prompt
        return self.tokenizer.backend.decode(ids, skip_special_tokens=False)

    def request(self, method: str, path: str, body: dict | None = None, parse: Callable = str):
        """Return parse(text of the response). Repeat the request while the server is busy or
        loading its model, and after each of `retry_seconds` if it fails, for example because the
        server closed a kept connection. Every failure is a RequestError."""
        with self.lock:
            self.requests += 1
        begin, waits = time.monotonic(), iter(self.retry_seconds)
        while True:
            try:
                return parse(self.send(method, path, body))
            except RequestError as error:
                waited = time.monotonic() - begin
                if error.busy and waited < self.seconds:
                    wait = min(waited + 0.1, 5.0)
                elif error.kind not in self.retried or (wait := next(waits, None)) is None:
                    raise
            time.sleep(wait)

    def send(self, method: str, path: str, body: dict | None) -> str:
        """Return the text of the response to one request."""
        begin, what = time.monotonic(), ""
        if body:
            what = f" (max_tokens {body['max_tokens']}, prompt of {len(body['prompt'])})"
        try:
            response = self.http.request(method, path, json=body)
        except (httpx.ConnectError, httpx.ProxyError) as error:
            raise RequestError(f"cannot be reached ({error}); is it running?", "lost") from None
        except httpx.TimeoutException:
            late = f"did not answer within {time.monotonic() - begin:.0f} s{what}"
            raise RequestError(late, "unavailable") from None
        except httpx.HTTPError as error:
            broken = f"broke off its answer: {type(error).__name__}{what}"
            raise RequestError(broken, "failed") from None
        text, status = response.content.decode("utf-8", "replace"), response.status_code
        failure = f"HTTP {status}: {self.redact(error_message(text))[:200]}{what}"
        if response.next_request:
            target = self.redact(str(response.next_request.url).removesuffix(path))
            raise RequestError(f"redirects to {target}; use that address instead", "unavailable")
        if status in (401, 403):
            needs = "requires a valid key; name its environment variable with --key-env"
            raise RequestError(needs, "unavailable")
        if status in (429, 503):
            busy = f"is still loading or overloaded after {self.seconds:.0f} s: {failure}"
            raise RequestError(busy, "unavailable", busy=True)
        if not response.is_success:
            raise RequestError(failure, "failed" if status >= 500 else "rejected")
        return text

    def redact(self, text: str) -> str:
        """Hide the key, in case the server repeats it."""
        return text.replace(self.key, "…") if self.key else text

    # ---- answers ---------------------------------------------------------------------------------

    def parse_answer(self, response: str, length: int) -> Answer:
        """Return the answer, of at most `length` tokens, in the text of a response."""
        completion = parse_json(response)
        choice = next(iter(at(completion, "choices", of=list)), None)
        if isinstance(at(completion, "tokens"), list):  # llama.cpp's own format
            choice = {name: completion.get(theirs) for name, theirs in LLAMACPP_NAMES.items()}
        if not isinstance(choice, dict):
            found = f"did not answer with a completion but {self.redact(response)[:60]!r}"
            broken = completion is None and (not response or response.lstrip().startswith("{"))
            raise RequestError(found, "failed" if broken else "rejected")
        with self.lock:
            self.drafted += count(at(completion, "timings", "draft_n"))
            self.accepted += count(at(completion, "timings", "draft_n_accepted"))
        text, (tokens, logprobs) = at(choice, "text", of=str), ids_and_logprobs(choice)
        has_ids = tokens is not None
        if not has_ids:
            complete = text.rstrip("\ufffd")  # a limit may cut a character
            tokens = self.tokenizer.encode(complete, False) if self.tokenizer else []
        reason = at(choice, "finish_reason", of=str) or at(choice, "finish_reason", "type", of=str)
        end = tokens.pop() if tokens and tokens[-1] in self.eos_ids else None
        ended = is_stop_reason(reason) if end is None else True
        if ended is None:
            ended = has_ids and len(tokens) < length
            if reason and (ended or not has_ids):
                why = f"{len(tokens)} tokens with finish_reason {reason!r} may be incomplete"
                raise RequestError(f"breaks off an answer: {why}", "incomplete")
        prompt_tokens = count(at(completion, "usage", "prompt_tokens"))
        return Answer(text, tokens, has_ids, ended, logprobs, prompt_tokens, end)

    def draft_counts(self) -> tuple[int, int] | None:
        """Return the number of tokens drafted and accepted so far, if the server reports them."""
        metrics = ""
        with contextlib.suppress(RequestError):
            metrics = self.request("GET", "/metrics")
        found = [(name, count(value)) for name, value in DRAFT_METRIC.findall(metrics)]
        sums = (sum(n for name, n in found if name == kind) for kind in ("draft", "accepted"))
        return next(filter(any, [(*sums,), (self.drafted, self.accepted)]), None)


def ids_and_logprobs(choice: dict) -> tuple[list[int] | None, list[float] | None]:
    """Return the token ids of a choice, from wherever the server puts them, and their logprobs, in
    OpenAI's old or new format. Either may be None."""
    content = at(choice, "logprobs", "content", of=list)
    places = choice.get("token_ids"), choice.get("tokens"), [at(x, "id") for x in content] or None
    lists = (ids for ids in places if isinstance(ids, list))
    ids = next((ids for ids in lists if all(type(i) is int for i in ids)), None)
    logprobs = at(choice, "logprobs", "token_logprobs", of=list)
    logprobs = logprobs or [at(entry, "logprob") for entry in content]
    valid = all(isinstance(value, float | int) and abs(value) < 1e9 for value in logprobs)
    return ids, logprobs if ids is not None and valid else None


def is_stop_reason(reason: str | None) -> bool | None:
    """Return whether a finish reason is an end token or stop string, not a limit. None: it is
    missing, unknown, or says that the answer was broken off ("abort", "content_filter")."""
    if STOP_REASON.fullmatch(reason or ""):
        return True
    return False if LIMIT_REASON.search(reason or "") else None


def error_message(text: str) -> str:
    """Return the error message of a response, in one line."""
    value = parse_json(text)
    nested, top = at(value, "error", "message", of=str), at(value, "message", of=str)
    return " ".join((nested or top or at(value, "error", of=str) or text).split())


# ---- JSON fields that may be missing or of any type ----------------------------------------------


def parse_json(text: str):
    """Return the JSON value of a text, or None if it is not valid JSON."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)


def at(value, *path: str, of: type = object):
    """Return the value at a path of names, or an empty one if it is not `of` this type."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    if of is str and isinstance(value, str):
        # a lone surrogate becomes U+FFFD
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value if isinstance(value, of) else of()


def count(value) -> int:
    """Return a number, also from a string; 0 if it is missing, negative or not finite."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return max(0, int(float(value)))
    return 0


def keys_in(variables: list[str], servers: int) -> list[str]:
    """Read the keys from environment variables that the user named, at most one per server."""
    if len(variables) > servers:
        raise UserError(f"--key-env names {len(variables)} variables for {servers} servers")
    keys = [os.environ.get(name, "").strip() for name in variables]
    for i, key in enumerate(keys, start=1):
        if not (key and key.isascii() and key.isprintable()):  # its name may be a key
            raise UserError(f"--key-env: variable {i} is not set or does not hold a key")
    return keys


def in_parallel(ask: Callable, items: list, threads: int) -> Iterator[tuple[int, object]]:
    """Yield (i, ask(items[i])) in order. If one of them raises, or on Ctrl-C, yield the others that
    are finished and raise that error. Nothing waits for the remaining threads."""
    with ThreadPool(max(1, min(threads, len(items)))) as pool:  # whose threads are daemons
        results, i = [pool.apply_async(ask, (item,)) for item in items], 0
        try:
            for i, result in enumerate(results):
                yield i, result.get()
        except (Exception, KeyboardInterrupt):
            pool.terminate()
            for j, result in enumerate(results[i:], i):
                if result.ready() and result.successful():
                    yield j, result.get()
            raise
