"""Convert text to tokens and back: encoding, streaming decoding and conversations."""

import codecs
import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Backend

from minispec.checkpoints.chat_template import Messages, check_messages, read_template, render
from minispec.cli import UserError, optional_json, user_error

ADDED_TOKEN_FLAGS = "single_word", "lstrip", "rstrip", "normalized", "special"
SPECIAL_NAMES = [f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
EXTRA_KEY, ADDITIONAL_KEY = "extra_special_tokens", "additional_special_tokens"

PRIVATE_USE = range(0xF0000, 0xFFFFE)  # characters without a meaning
LAST_ADDED = 16  # tokens that heads with an old fingerprint may lack
PROMPT_TOKENS = 8  # that may end inside a character, or show that a word is not a text's first
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # of vocabularies with byte fallback
# the byte that each character stands for in the tokens of a byte-level vocabulary
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
OWN_BYTES = [ord(c) for c in ALPHABET if ord(c) < 256]  # printable; other bytes follow in order
BYTE_LEVEL = dict(zip(ALPHABET, OWN_BYTES + sorted({*range(256)} - {*OWN_BYTES})))


@dataclass(eq=False)
class Tokenizer:
    """A tokenizer.json, with the special tokens and the chat template from the files next to it.
    `special_tokens` maps names (bos_token, eos_token, pad_token, …) to tokens."""

    backend: Backend
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_template: str | None = None

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer | None":
        """Read tokenizer.json (None without it) and the files next to it as PreTrainedTokenizerFast
        of transformers 5 does: tokenizer_config.json, chat_template.jinja and, if the former has no
        added_tokens_decoder, special_tokens_map.json and added_tokens.json. Only tokenizer.json
        determines whether texts begin with BOS."""
        if not (directory / "tokenizer.json").exists():
            return None
        backend = read_backend(directory / "tokenizer.json")
        backend.no_padding()
        backend.no_truncation()
        settings = optional_json(directory / "tokenizer_config.json")
        template = read_template(directory, settings)
        problem = "tokens in tokenizer_config.json or a file next to it are not in the format of"
        with user_error(f"{directory}: {problem} transformers"):
            special_tokens = add_listed_tokens(backend, directory, settings)
        return cls(backend, special_tokens, template)

    def files(self) -> dict[str, str]:
        """Return the contents of the files that `from_directory` and transformers read, by name."""
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        settings["clean_up_tokenization_spaces"] = False
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        settings = json.dumps(settings, indent=2)
        return {"tokenizer.json": self.backend.to_str(), "tokenizer_config.json": settings}

    def id_of(self, name: str) -> int | None:
        """Return the id of a special token by its name; None if there is none."""
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    @property
    def size(self) -> int:
        """One more than the largest id, including added tokens."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def control_ids(self) -> dict[str, int]:
        """Ids of the special tokens (end of text, chat roles, …), which have no text."""
        tokens = self.backend.get_added_tokens_decoder().items()
        return {token.content: i for i, token in tokens if token.special}

    @property
    def fingerprint(self) -> str:
        """Two hashes for `matches`, with and without the added tokens."""
        return f"{self.hash_without(set())}-{self.hash_without(set(self.added_tokens))}"

    @property
    def added_tokens(self) -> list[str]:
        """The added tokens, the last one first."""
        added = self.backend.get_added_tokens_decoder()
        return [added[i].content for i in sorted(added, reverse=True)]

    def hash_without(self, tokens: set[str]) -> str:
        """A hash of all other tokens and their ids."""
        ids = sorted((w, i) for w, i in self.backend.get_vocab().items() if w not in tokens)
        return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]

    def matches(self, other: "Tokenizer | str") -> bool:
        """Return whether the tokenizers (or a fingerprint of the other) differ at most in added
        tokens. An old fingerprint, a single hash, may only lack the last tokens of this one."""
        added = self.added_tokens
        if isinstance(other, Tokenizer):
            tokens = {*added, *other.added_tokens}
            return self.hash_without(tokens) == other.hash_without(tokens)
        counts = 0, len(added), *range(1, LAST_ADDED + 1)
        return any(self.hash_without(set(added[:n])) in str(other).split("-") for n in counts)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return token ids. `add_special_tokens` prepends those that texts begin with, if any."""
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise UserError("the text is not valid Unicode; it must be UTF-8")
        with user_error("the tokenizer failed on this text"):
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: list[int]) -> str:
        """Return the text, without special tokens."""
        with user_error("the tokenizer failed on these tokens"):
            return self.backend.decode(tokens)

    def stream(self, prompt: list[int]) -> "TextStream":
        """Return a streaming decoder for the tokens that follow `prompt`."""
        return TextStream(self, prompt)

    def chat(self, messages: Messages) -> list[int]:
        """Return the ids of a conversation up to the assistant's next turn. Turns that spell
        control tokens are encoded as plain text."""
        if self.chat_template is None:
            raise UserError("this model has no chat template; use plain text, without --chat")
        check_messages(messages)
        ids = set(self.control_ids.values())
        texts = (self.encode(turn["content"], add_special_tokens=False) for turn in messages)
        if any(map(ids.intersection, texts)):
            tokens = self.chat_literally(messages)
        else:
            text = render(self.chat_template, messages, self.special_tokens)
            tokens = self.encode(text, add_special_tokens=False)
        if not tokens:
            raise UserError("the model's chat template renders this conversation as empty text")
        return tokens

    def user_header(self) -> list[int]:
        """Return the ids of a conversation up to the text of the user's first turn."""
        if self.chat_template is None:
            raise UserError("this model has no chat template, so it cannot play the user")
        marker = chr(PRIVATE_USE[0])
        messages = [{"role": "user", "content": marker}]
        text = render(self.chat_template, messages, self.special_tokens)
        return self.encode(text.partition(marker)[0], add_special_tokens=False)

    def chat_literally(self, messages: Messages) -> list[int]:
        """`chat` for turns that spell control tokens. The text is encoded in one piece, so that
        turns and template may merge as usual, by a copy of this tokenizer in which each control
        token has a private name that no turn spells."""
        content = "".join(turn["content"] for turn in messages)
        unused = (c for c in map(chr, PRIVATE_USE) if c not in content)
        names = dict(zip(self.control_ids, unused))
        stand_ins = dict(zip(self.control_ids, unused))  # the template sees these in the turns
        hidden = [turn | {"content": replace_all(turn["content"], stand_ins)} for turn in messages]
        text = render(self.chat_template, hidden, self.special_tokens)
        spelled = {stand_in: token for token, stand_in in stand_ins.items()}
        quoted = {json.dumps(old, ensure_ascii=False): f'"{new}"' for old, new in names.items()}
        with user_error("the tokenizer cannot encode text that spells a control token"):
            private = Backend.from_str(replace_all(self.backend.to_str(), quoted))
        text = replace_all(text, names | spelled)
        return Tokenizer(private).encode(text, add_special_tokens=False)


class TextStream:
    """Convert tokens to text as they arrive, without splitting characters. Bytes that belong to no
    character become U+FFFD on their own, so the text never changes afterwards."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]):
        self.tokenizer, self.special = tokenizer, tokenizer.control_ids
        self.decoder = str(tokenizer.backend.decoder)
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # keeps incomplete characters
        self.last: list[int] = []  # the last token that had text and those since
        for token in prompt[-PROMPT_TOKENS:]:
            self.push(token)

    def push(self, token: int) -> str:
        """Return the characters that `token` completes (possibly none)."""
        name = self.tokenizer.backend.id_to_token(token)
        if name is None or name in self.special:  # by name, as `decode` skips them
            return ""
        data = self.bytes_of(name)
        if data is not None:
            self.last = [token]
            return self.utf8.decode(data)
        # decoders that strip the space before a text's first word must see that this is not it
        texts = [self.tokenizer.decode(tokens) for tokens in (self.last, [*self.last, token])]
        new = texts[1][len(os.path.commonprefix(texts)) :]
        self.last = [token] if new else [*self.last, token]
        return self.flush() + new

    def flush(self) -> str:
        """Return the remaining text; an incomplete character becomes U+FFFD."""
        return self.utf8.decode(b"", final=True)

    def bytes_of(self, name: str) -> bytes | None:
        """The bytes that a token of this name stands for; None if it stands for characters."""
        if "ByteLevel" in self.decoder:
            codes = [BYTE_LEVEL.get(c) for c in name]
            return name.encode() if None in codes else bytes(codes)
        fallback = BYTE_TOKEN.fullmatch(name) if "ByteFallback" in self.decoder else None
        return bytes.fromhex(fallback[1]) if fallback else None


# ---- files ---------------------------------------------------------------------------------------


def read_backend(path: Path) -> Backend:
    """Read a tokenizer.json."""
    with user_error(f"{path} is not a valid tokenizer"):
        return Backend.from_str(path.read_text(encoding="utf-8-sig"))


def replace_all(text: str, replacements: dict[str, str]) -> str:
    """Replace every key with its value in one pass, the longest keys first."""
    keys = sorted(replacements, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, keys)), lambda match: replacements[match[0]], text)


def add_listed_tokens(backend: Backend, directory: Path, settings: dict) -> dict[str, str]:
    """Add the tokens that the files next to tokenizer.json list or name, and return the special
    tokens that have names. Precedence and ids are those of transformers 5, which closes gaps
    between the listed ids."""
    existing, legacy = backend.get_added_tokens_decoder(), {}
    known = {token.content for token in existing.values()}
    if "added_tokens_decoder" in settings:
        listed = {int(i): to_added_token(t) for i, t in settings["added_tokens_decoder"].items()}
    else:  # older files
        legacy = optional_json(directory / "special_tokens_map.json")
        ids = optional_json(directory / "added_tokens.json")
        listed = {i: to_added_token(text) for text, i in ids.items()} | existing
    lists = settings.get(EXTRA_KEY), settings.get(ADDITIONAL_KEY), legacy.get(EXTRA_KEY)
    lists = [tokens for tokens in lists if tokens is not None and not isinstance(tokens, dict)]
    extra = next(filter(None, lists), [])
    tokens = {token.content: token for _, token in sorted(listed.items())}
    named = named_tokens(settings, legacy)
    for token in named.values():
        if text_of(token) not in known - tokens.keys():
            tokens.setdefault(text_of(token), to_added_token(token)).special = True
    for token in extra if lists else legacy.get(ADDITIONAL_KEY) or []:
        if text_of(token) not in (known if lists else known | tokens.keys()):
            tokens.setdefault(text_of(token), to_added_token(token)).special = True
    backend.add_tokens(list(tokens.values()))
    return {name: text_of(token) for name, token in named.items()}


def named_tokens(settings: dict, legacy: dict) -> dict[str, str | dict]:
    """Return the special tokens that have names, as the files store them, the usual ones first."""
    merged = dict.fromkeys(SPECIAL_NAMES) | settings | legacy
    named = {name: token for name, token in merged.items()
             if name.endswith("_token") and isinstance(token, str | dict)}  # fmt: skip
    for key in EXTRA_KEY, "model_specific_special_tokens":
        if isinstance(merged.get(key), dict):
            named |= merged[key]
    return named


def text_of(token: str | dict) -> str:
    return token if isinstance(token, str) else token["content"]


def to_added_token(token: str | dict) -> AddedToken:
    """Convert a token as files store it: as text, or as an object with flags."""
    stored = {} if isinstance(token, str) else token
    flags = {flag: stored[flag] for flag in ADDED_TOKEN_FLAGS if flag in stored}
    return AddedToken(text_of(token), **flags)
