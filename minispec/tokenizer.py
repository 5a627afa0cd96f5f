"""Text to tokens and back: encode, streaming decode, chat template."""

import hashlib
import json
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

from minispec.errors import UserError, optional_json


class Tokenizer:
    """A tokenizer.json with what its neighbours say of special tokens and chat."""

    def __init__(
        self, backend: Backend, bos: str | None = None, eos: str | None = None,
        chat_template: str | None = None,
    ):  # fmt: skip
        self.backend, self.bos, self.eos, self.chat_template = backend, bos, eos, chat_template

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Read tokenizer.json and, if there, tokenizer_config.json, special_tokens_map.json and
        chat_template.jinja."""
        backend = read_backend(directory / "tokenizer.json")
        backend.no_padding()
        backend.no_truncation()
        settings = optional_json(directory / "tokenizer_config.json")
        named = optional_json(directory / "special_tokens_map.json") | settings
        bos, eos = (mark_special(backend, named.get(key)) for key in ("bos_token", "eos_token"))
        template, file = settings.get("chat_template"), directory / "chat_template.jinja"
        if file.exists():
            template = file.read_text(encoding="utf-8", errors="replace")
        return cls(backend, bos, eos, template)

    def files(self) -> dict[str, str]:
        """What `from_directory` and transformers read, by the names of its files."""
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos,
            "eos_token": self.eos,
            "chat_template": self.chat_template,
            "clean_up_tokenization_spaces": False,
        }
        settings = {key: value for key, value in settings.items() if value is not None}
        settings = json.dumps(settings, indent=2)
        return {"tokenizer.json": self.backend.to_str(), "tokenizer_config.json": settings}

    @property
    def size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def special_ids(self) -> list[int]:
        """Of the tokens that are no text: ends, roles of a chat, and the like."""
        added = self.backend.get_added_tokens_decoder()
        return sorted(i for i, token in added.items() if token.special)

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers whose ids mean the same tokens."""
        vocabulary = sorted(self.backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids; `special` adds what the model begins texts with (BOS, if anything)."""
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise UserError("the text is not valid Unicode: give it as UTF-8")
        problem = "the tokenizer fails at this text"
        return call(problem, self.backend.encode, text, add_special_tokens=special).ids

    def decode(self, tokens: list[int]) -> str:
        """Text without the special tokens."""
        return call("the tokenizer fails at these tokens", self.backend.decode, tokens)

    def stream(self, prompt: list[int]) -> "TextStream":
        """A decoder of the tokens that follow `prompt`, one at a time."""
        return TextStream(self.decode, prompt)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation of {role, content}, up to where the assistant is to speak."""
        if self.chat_template is None:
            raise UserError("this model has no chat template: give it plain text, without --chat")
        text = render(self.chat_template, messages, self.bos or "", self.eos or "")
        tokens = self.encode(text, special=False)
        if not tokens:
            raise UserError("the model's chat template makes nothing of this conversation")
        return tokens


class TextStream:
    """Tokens in, text out, never in the middle of a character.

    New text is what tokens add to that of the ones before them: decoders that strip the space of a
    text's first word must see that this is not the first.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: list[int]):
        self.decode, self.shown, self.tokens = decode, prompt, []

    def push(self, token: int) -> str:
        """The characters that `token` completes (maybe none yet)."""
        self.tokens.append(token)
        new = self.new()
        return "" if not new or new.endswith("\ufffd") else self.flush()

    def flush(self) -> str:
        """What is left at the end: an incomplete character, shown as U+FFFD."""
        new = self.new()
        self.shown, self.tokens = self.tokens, []
        return new

    def new(self) -> str:
        """The text of the tokens that are not shown yet."""
        before, whole = self.decode(self.shown), self.decode(self.shown + self.tokens)
        # not its length: the U+FFFD of a prompt that ends inside a character becomes the character
        return whole[len(os.path.commonprefix([before, whole])) :]


def call(problem: str, function: Callable, *args, **options):
    """Call the library, whose errors are bare Exceptions, and not even those where its Rust code
    panics, as at a regular expression that takes too many steps."""
    try:
        return function(*args, **options)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserError(f"{problem}: {error}") from None


def read_backend(path: Path) -> Backend:
    """The tokenizer of a tokenizer.json."""
    return call(f"{path} is not a tokenizer", Backend.from_file, str(path))


def mark_special(backend: Backend, token: str | dict | None) -> str | None:
    """The text of an end, spelled so or as {content: …}, which is no text to show, whether or not
    tokenizer.json says so."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    if text not in known and backend.token_to_id(text) is not None:
        backend.add_special_tokens([text])
    return text


def render(template: str, messages: list[dict[str, str]], bos: str, eos: str) -> str:
    """The text of a conversation, by a template that is given what transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": refuse, "strftime_now": datetime.now().strftime}
    known = dict(messages=messages, bos_token=bos, eos_token=eos, add_generation_prompt=True)
    try:  # templates ask whether these two are none
        return environment.from_string(template).render(known, tools=None, documents=None)
    except Exception as error:  # a template is code: it may raise anything
        raise UserError(f"the model's chat template refuses this conversation: {error}") from None


def refuse(message: str) -> None:
    """What templates call as raise_exception."""
    raise jinja2.TemplateError(message)
