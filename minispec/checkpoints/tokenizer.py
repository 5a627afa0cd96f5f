"""Text to tokens and back: encode, streaming decode, conversations."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from minispec.checkpoints.chat_template import (
    PRIVATE,
    Messages,
    check_messages,
    hide,
    read_template,
    render,
    replace_all,
)
from minispec.errors import UserError, optional_json

FLAGS = "single_word", "lstrip", "rstrip", "normalized", "special"  # of an AddedToken
NAMES = [f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
EXTRA, ADDITIONAL = "extra_special_tokens", "additional_special_tokens"


class Tokenizer:
    """A tokenizer.json with what its neighbours say of special tokens and chat. `named` are special
    tokens by their names: bos_token, eos_token, pad_token, …"""

    def __init__(
        self, backend: Backend, named: dict[str, str] | None = None,
        chat_template: str | None = None,
    ):  # fmt: skip
        self.backend, self.named, self.chat_template = backend, named or {}, chat_template

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Read tokenizer.json and its neighbours as PreTrainedTokenizerFast of transformers 5 does:
        tokenizer_config.json and, where that lists no added_tokens_decoder,
        special_tokens_map.json and added_tokens.json; chat_template.jinja. Whether texts begin
        with BOS is for tokenizer.json alone to say."""
        backend = read_backend(directory / "tokenizer.json")
        backend.no_padding()
        backend.no_truncation()
        settings = optional_json(directory / "tokenizer_config.json")
        template = read_template(directory, settings)
        try:
            named = add_neighbours(backend, directory, settings)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"{directory}: tokenizer_config.json or a neighbour of it names tokens in a form "
                f"that is not transformers' ({error!r})"
            ) from None
        return cls(backend, named, template)

    def files(self) -> dict[str, str]:
        """What `from_directory` and transformers read, by the names of its files."""
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.named,
            "clean_up_tokenization_spaces": False,
        }
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        texts = self.backend.to_str(), json.dumps(settings, indent=2)
        return dict(zip(("tokenizer.json", "tokenizer_config.json"), texts))

    def id_of(self, name: str) -> int | None:
        """The id of a named special token, if there is one."""
        return self.backend.token_to_id(self.named[name]) if name in self.named else None

    @property
    def size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def controls(self) -> dict[str, int]:
        """Special tokens, which stand for no text (ends, roles of a chat, …), and their ids."""
        tokens = self.backend.get_added_tokens_decoder().items()
        return {token.content: i for i, token in tokens if token.special}

    def words(self, other: "Tokenizer") -> dict[str, int]:
        """The vocabulary proper: without what either tokenizer has as an added token."""
        added = [t.get_added_tokens_decoder().values() for t in (self.backend, other.backend)]
        names = {token.content for tokens in added for token in tokens}
        return {w: i for w, i in self.backend.get_vocab().items() if w not in names}

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers whose ids mean the same tokens."""
        vocabulary = sorted(self.backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids. `special` adds what the model begins texts with (BOS, if anything)."""
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

    def chat(self, messages: Messages) -> list[int]:
        """Ids of a conversation, up to where the assistant is to speak. What its turns say is text,
        even where it spells a control token."""
        if self.chat_template is None:
            raise UserError("this model has no chat template: give it plain text, without --chat")
        check_messages(messages)
        ids = set(self.controls.values())
        if any(ids.intersection(self.encode(turn["content"], special=False)) for turn in messages):
            tokens = self.chat_literally(messages)
        else:
            text = render(self.chat_template, messages, self.named)
            tokens = self.encode(text, special=False)
        if not tokens:
            raise UserError("the model's chat template makes nothing of this conversation")
        return tokens

    def user_header(self) -> list[int]:
        """Ids of a conversation up to where the user is to speak first."""
        if self.chat_template is None:
            raise UserError("this model has no chat template, so it cannot play the user")
        said = PRIVATE[0]
        text = render(self.chat_template, [{"role": "user", "content": said}], self.named)
        return self.encode(text.partition(said)[0], special=False)

    def chat_literally(self, messages: Messages) -> list[int]:
        """`chat`, if turns spell control tokens: only the template's own count.

        The text is encoded in one piece by a twin of this tokenizer that knows each control token
        under a private name instead, which no turn spells. So a turn changes no token of the
        template around it.
        """
        hidden, spelled = hide(messages, self.controls)
        said = "".join(turn["content"] for turn in messages)
        prefix = next(c for c in map(chr, range(0x100000, 0x10FFFE)) if c not in said)
        names = {token: f"{prefix}{i}." for token, i in self.controls.items()}
        twin = Tokenizer(renamed(self.backend, names))
        text = replace_all(render(self.chat_template, hidden, self.named), names | spelled)
        ids = {twin.controls[name]: self.controls[token] for token, name in names.items()}
        return [ids.get(i, i) for i in twin.encode(text, special=False)]


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
    """Call the library, whose errors are bare Exceptions or, where its Rust code panics, as at a
    regular expression that takes too many steps, BaseExceptions."""
    try:
        return function(*args, **options)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserError(f"{problem}: {error}") from None


def read_backend(path: Path) -> Backend:
    """The tokenizer of a tokenizer.json."""
    return call(f"{path} is not a tokenizer", Backend.from_file, str(path))


def renamed(backend: Backend, names: dict[str, str]) -> Backend:
    """A copy in which special tokens have other names. One that is in the model's vocabulary is
    renamed there too, or the model could still make it of a text that spells it."""
    raw = json.loads(backend.to_str())
    raw["post_processor"] = None  # it might mention them
    for token in raw["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = raw["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(word, word): i for word, i in model["vocab"].items()}
    else:  # Unigram's list of pieces and scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    problem = "the tokenizer cannot encode text that spells a control token"
    return call(problem, Backend.from_str, json.dumps(raw))


def add_neighbours(backend: Backend, directory: Path, settings: dict) -> dict[str, str]:
    """Add the tokens that tokenizer.json's neighbours list or name, and return the special ones
    that have names. What counts before what, and who gets which id, is as in transformers 5: where
    the listed ids leave a gap, the next one in turn."""
    own, legacy = backend.get_added_tokens_decoder(), {}
    known = {token.content for token in own.values()}
    if "added_tokens_decoder" in settings:
        listed = {int(i): added(t) for i, t in settings["added_tokens_decoder"].items()}
    else:  # older files
        legacy = optional_json(directory / "special_tokens_map.json")
        numbers = optional_json(directory / "added_tokens.json")
        listed = {i: added(text) for text, i in numbers.items()} | own
    lists = settings.get(EXTRA), settings.get(ADDITIONAL), legacy.get(EXTRA)
    lists = [each for each in lists if each is not None and not isinstance(each, dict)]
    extra = next(filter(None, lists), [])
    for token in listed.values():
        token.special |= token.content not in known and token.content in map(text_of, extra)
    tokens = {token.content: token for _, token in sorted(listed.items())}
    named = named_tokens(settings, legacy)
    for given in named.values():
        if text_of(given) in tokens:
            tokens[text_of(given)].special = True
        elif text_of(given) not in known:
            tokens[text_of(given)] = added(given, special=True)
    for given in extra if lists else legacy.get(ADDITIONAL) or []:
        if text_of(given) not in known | tokens.keys():
            tokens[text_of(given)] = added(given, special=True)
    backend.add_tokens(list(tokens.values()))
    return {name: text_of(given) for name, given in named.items()}


def named_tokens(settings: dict, legacy: dict) -> dict[str, str | dict]:
    """The special tokens that have names, the usual ones first, as the files spell them."""
    every = dict.fromkeys(NAMES) | settings | legacy
    named = {name: given for name, given in every.items()
             if name.endswith("_token") and isinstance(given, str | dict)}  # fmt: skip
    for key in EXTRA, "model_specific_special_tokens":
        if isinstance(every.get(key), dict):
            named |= every[key]
    return named


def text_of(token: str | dict) -> str:
    return token if isinstance(token, str) else token["content"]


def added(token: str | dict, **flags: bool) -> AddedToken:
    """A token as files spell it: its text, or an object with flags."""
    given = {} if isinstance(token, str) else {key: token[key] for key in FLAGS if key in token}
    return AddedToken(text_of(token), **(given | flags))
