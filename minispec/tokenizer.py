"""Text to tokens and back: encode, streaming decode, chat template."""

import datetime
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from minispec.errors import UserError, optional_json

ADDED = "content", "single_word", "lstrip", "rstrip", "normalized", "special"  # of an AddedToken


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
        add_listed(backend, settings, directory)
        named = optional_json(directory / "special_tokens_map.json") | settings
        bos, eos = (mark_special(backend, named.get(key)) for key in ("bos_token", "eos_token"))
        if settings.get("add_bos_token") and bos and backend.post_processor is None:
            backend.post_processor = call(
                f"{directory}: its bos_token {bos!r} is not in the vocabulary",
                TemplateProcessing, f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))],
            )  # fmt: skip
        return cls(backend, bos, eos, read_template(directory, settings))

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
        texts = self.backend.to_str(), json.dumps(settings, indent=2)
        return dict(zip(("tokenizer.json", "tokenizer_config.json"), texts))

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
        self.decode, self.shown, self.tokens, self.text = decode, prompt, [], ""

    def push(self, token: int) -> str:
        """The characters that `token` completes (maybe none yet)."""
        self.tokens.append(token)
        new = self.new()
        return "" if not new or new.endswith("\ufffd") else self.flush()

    def flush(self) -> str:
        """What is left at the end: an incomplete character, shown as U+FFFD."""
        new = self.new()
        self.text, self.shown, self.tokens = self.text + new, self.tokens, []
        return new

    def new(self) -> str:
        """The text of the tokens that are not shown yet."""
        before, whole = self.decode(self.shown), self.decode(self.shown + self.tokens)
        # not its length: the U+FFFD of a prompt that ends inside a character becomes the character
        return whole[len(os.path.commonprefix([before, whole])) :]


# ---- files ---------------------------------------------------------------------------------------


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


def add_listed(backend: Backend, settings: dict, where: Path) -> None:
    """Add the tokens that tokenizer_config.json lists by their ids and tokenizer.json lacks."""
    try:
        listed = {int(i): t for i, t in (settings.get("added_tokens_decoder") or {}).items()}
        for i, token in sorted(listed.items()):
            if backend.token_to_id(token["content"]) is None:
                backend.add_tokens([AddedToken(**{k: token[k] for k in ADDED if k in token})])
                if backend.token_to_id(token["content"]) != i:
                    raise ValueError(f"{token['content']!r} cannot be token {i}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: added_tokens_decoder must hold tokens by id: {error}") from None


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


def read_template(directory: Path, settings: dict) -> str | None:
    """The chat template: a file's, else that of tokenizer_config.json, or the default of several
    there."""
    file, template = directory / "chat_template.jinja", settings.get("chat_template")
    if file.exists():
        return file.read_text(encoding="utf-8", errors="replace")
    if isinstance(template, list):
        template = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        return template.get("default")
    return template


# ---- chat ----------------------------------------------------------------------------------------


def render(template: str, messages: list[dict[str, str]], bos: str, eos: str) -> str:
    """The text of a conversation, by a template that is given what transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = datetime.datetime.now().strftime
    environment.filters["tojson"] = tojson
    known = dict(messages=messages, bos_token=bos, eos_token=eos, add_generation_prompt=True)
    try:  # templates ask whether these two are none
        return environment.from_string(template).render(known, tools=None, documents=None)
    except Exception as error:  # a template is code: it may raise anything
        raise UserError(f"the model's chat template refuses this conversation: {error}") from None


def refuse(message: str) -> None:
    """What templates call as raise_exception."""
    raise jinja2.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, **more) -> str:
    """What templates call so: jinja's own would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


class Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks, for training, what the assistant says."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
