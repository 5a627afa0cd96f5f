"""Text to tokens and back: encode, streaming decode, chat template."""

import datetime
import hashlib
import json
import os
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
        self,
        backend: Backend,
        bos: str | None = None,
        eos: str | None = None,
        chat_template: str | None = None,
    ):
        self.backend, self.bos, self.eos, self.chat_template = backend, bos, eos, chat_template

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Read tokenizer.json, and tokenizer_config.json and chat_template.jinja if there."""
        backend = read_backend(directory / "tokenizer.json")
        file = directory / "tokenizer_config.json"
        settings = optional_json(file)
        template = settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            several = [t for t in template if isinstance(t, dict)]
            template = {t.get("name"): t.get("template") for t in several}.get("default")
        if (directory / "chat_template.jinja").exists():
            template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
        named = optional_json(directory / "special_tokens_map.json") | settings
        bos, eos = (content(named.get(key)) for key in ("bos_token", "eos_token"))
        backend.no_padding()
        backend.no_truncation()
        add_missing(backend, settings, [bos, eos], file)
        return cls(with_bos(backend, settings, bos), bos, eos, template)

    def save(self, directory: Path) -> None:
        """Write the three as transformers reads them."""
        self.backend.save(str(directory / "tokenizer.json"), pretty=False)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos,
            "eos_token": self.eos,
            "chat_template": self.chat_template,
            "clean_up_tokenization_spaces": False,
        }
        settings = {key: value for key, value in settings.items() if value is not None}
        (directory / "tokenizer_config.json").write_text(
            json.dumps(settings, indent=2), encoding="utf-8"
        )

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
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            raise UserError("the text is not valid Unicode: give it as UTF-8")
        return self.backend.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: list[int]) -> str:
        """Text without the special tokens."""
        return self.backend.decode(tokens, skip_special_tokens=True)

    def stream(self, prompt: list[int]) -> "TextStream":
        """A decoder of the tokens that follow `prompt`, one at a time."""
        return TextStream(self.backend, prompt)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation of {role, content}, up to where the assistant is to speak."""
        if self.chat_template is None:
            raise UserError("this model has no chat template: give it plain text, without --chat")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
        )
        environment.globals.update(
            raise_exception=refuse, strftime_now=datetime.datetime.now().strftime
        )
        environment.filters["tojson"] = tojson
        try:
            text = environment.from_string(self.chat_template).render(
                messages=messages,
                tools=None,  # templates ask whether they are none
                documents=None,
                add_generation_prompt=True,
                bos_token=self.bos or "",
                eos_token=self.eos or "",
            )
        except Exception as error:  # a template is code: it may raise anything
            raise UserError(
                f"the model's chat template refuses this conversation: {error}"
            ) from None
        tokens = self.encode(text, special=False)
        if not tokens:
            raise UserError("the model's chat template makes nothing of this conversation")
        return tokens


class TextStream:
    """Tokens in, text out, never in the middle of a character."""

    def __init__(self, backend: Backend, prompt: list[int]):
        self.backend = backend
        # what is decoded before the new tokens: the prompt, later the last tokens shown. Decoders
        # that strip the space of a text's first word must see that this is not the first
        self.context, self.tokens = prompt, []
        self.before = self.decode(prompt)
        self.text = ""

    def decode(self, tokens: list[int]) -> str:
        return self.backend.decode(tokens, skip_special_tokens=True)

    def push(self, token: int) -> str:
        """The characters that `token` completes (maybe none yet)."""
        self.tokens.append(token)
        whole = self.decode(self.context + self.tokens)
        if whole.endswith("\ufffd") or whole == self.before:
            return ""
        return self.show(whole)

    def flush(self) -> str:
        """What is left at the end: an incomplete character, shown as U+FFFD."""
        return self.show(self.decode(self.context + self.tokens))

    def show(self, whole: str) -> str:
        """What `whole` adds to the text shown; its tokens become the context of the next."""
        # not its length: the U+FFFD of a prompt that ends inside a character becomes the character
        new = whole[len(os.path.commonprefix([self.before, whole])) :]
        self.text += new
        self.context, self.tokens = self.tokens, []
        self.before = self.decode(self.context)
        return new


def read_backend(path: Path) -> Backend:
    """The tokenizer of a tokenizer.json."""
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not a tokenizer: {error}") from None


def content(token: str | dict | None) -> str | None:
    """Special tokens are spelled as strings or as {content: …}."""
    return token.get("content") if isinstance(token, dict) else token


def add_missing(backend: Backend, settings: dict, ends: list[str | None], where: Path) -> None:
    """Special tokens that tokenizer.json does not mark as such: those that its neighbour lists
    with their ids, and ends among its words."""
    try:
        listed = {
            int(number): AddedToken(**{key: token[key] for key in ADDED if key in token})
            for number, token in (settings.get("added_tokens_decoder") or {}).items()
        }
    except (AttributeError, TypeError, ValueError):
        raise UserError(f"{where}: added_tokens_decoder must hold tokens by their ids") from None
    for number, token in sorted(listed.items()):
        if backend.token_to_id(token.content) is None:
            backend.add_tokens([token])
            if backend.token_to_id(token.content) != number:
                raise UserError(f"{where}: {token.content!r} cannot be token {number}")
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [end for end in ends if end and end not in known and backend.token_to_id(end) is not None]
    )


def with_bos(backend: Backend, settings: dict, bos: str | None) -> Backend:
    """Honour `add_bos_token` where the tokenizer.json itself says nothing of it."""
    if settings.get("add_bos_token") and bos and backend.post_processor is None:
        bos_id = backend.token_to_id(bos)
        if bos_id is None:
            raise UserError(f"tokenizer_config.json: bos_token {bos!r} is not in the vocabulary")
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, bos_id)]
        )
    return backend


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """What templates call so: jinja's own would escape for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks, for training, what the assistant says."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def refuse(message: str) -> None:
    """What templates call as raise_exception."""
    raise jinja2.TemplateError(message)
