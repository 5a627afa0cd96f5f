"""Documents from files of the user's own, for training and for prompts.

A `.txt` holds documents, each followed by a line `<|endoftext|>`; one that begins with `User:` (or
`用户：`) is a conversation. A `.jsonl` or `.json` holds an object on each line or one list of them:
`{"text"}`, `{"messages": [{"role", "content"}, ...]}`, ShareGPT's `{"conversations": [{"from",
"value"}, ...]}`, `{"prompt"}`, `{"prompt", "completion"}`, `{"question", "answer"}` or `{"text",
"code"}`. Any other text, a book or source code, is cut at blank lines into pieces of about 2,000
characters. All of it is UTF-8. A folder stands for the .txt, .jsonl and .py files in it; a .json
there may hold settings, so it is read only if it is named itself.

A *kind* of text is the stem of its file's name; the .py files of a folder are of one kind, the
folder's name. Every 50th document of a kind is held out: never trained on, it is for measuring.
"""

import json
import re
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from minispec.checkpoints.tokenizer import Tokenizer
from minispec.errors import UserError


class Conversation(list[dict[str, str]]):
    """Turns, {role, content}; `place` says where they were read: a file and a number in it."""

    def __init__(self, turns: Iterable[dict[str, str]], place: str = ""):
        super().__init__(turns)
        self.place = place


Document = str | Conversation
Kinds = dict[str, list[Document]]

END = "<|endoftext|>"
DIVIDER = re.compile(f"^{re.escape(END)}$", re.M)
SUFFIXES = ".txt", ".jsonl", ".py"  # of the files that are read in a folder
ROLES = {"User: ": "user", "用户：": "user", "Assistant: ": "assistant", "助手：": "assistant"}
SHAREGPT = {"human": "user", "gpt": "assistant"}  # other roles have their usual names
PACKED = {  # first bytes of files that are not text
    b"\x1f\x8b": "compressed by gzip", b"PK\x03\x04": "a zip archive", b"PAR1": "a parquet file",
    b"\x28\xb5\x2f\xfd": "compressed by zstd", b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}  # fmt: skip
PIECE = 2000  # characters
HELD_OUT = 50


def read_corpus(data: list[Path]) -> tuple[Kinds, Kinds]:
    """The documents to train on and those held out, by kind; of a lone one none is held out."""
    train: Kinds = {}
    held_out: Kinds = {}
    for path in dict.fromkeys(data):
        for kind, documents in read_kinds(path).items():
            held = documents[::HELD_OUT] if len(documents) > 1 else []
            rest = [d for i, d in enumerate(documents) if i % HELD_OUT or not held]
            train.setdefault(kind, []).extend(rest)
            held_out.setdefault(kind, []).extend(held)
    if not any(plain(document) for documents in train.values() for document in documents):
        raise UserError(f"{' '.join(map(str, data))}: holds no text")
    return train, held_out


def read_kinds(path: Path) -> Kinds:
    """The documents of a file, or of all files in a folder but hidden ones, by kind."""
    if not path.exists():
        raise UserError(f"no such file or directory: {path}")
    files = [path]
    if path.is_dir():
        inside = (f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
        files = sorted(f for f in inside if "/." not in f"/{f.relative_to(path).as_posix()}")
        if not files:
            raise UserError(f"{path} holds no {', '.join(SUFFIXES)} file; any other file has to be "
                            "named itself")  # fmt: skip
    kinds: Kinds = {}
    for file in files:
        text = read_text(file)
        objects = file.suffix.lower() in (".jsonl", ".json")
        documents = read_objects(file, text) if objects else divide(file, text)
        kind = path.resolve().name if file.suffix == ".py" and file != path else file.stem
        kinds.setdefault(kind, []).extend(documents)
    return {kind: documents for kind, documents in kinds.items() if documents}


def read_text(file: Path) -> str:
    """The text of a file without a byte-order mark; lines end with \\n. Bytes of source code that
    are not UTF-8 are skipped."""
    try:
        with file.open("rb") as raw:
            begins = raw.read(4)
        for first, form in PACKED.items():
            if begins.startswith(first):
                raise UserError(f"{file} is {form}: convert it to UTF-8 text first")
        errors = "ignore" if file.suffix == ".py" else "strict"
        text = file.read_text(encoding="utf-8-sig", errors=errors)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    if "\0" in text:
        raise UserError(f"{file} is not text: it contains NUL bytes")
    return text


def divide(file: Path, text: str) -> list[Document]:
    """The documents of a text that lines of END divide, or else its pieces."""
    documents = DIVIDER.split(text)
    if len(documents) == 1:
        return pieces(text)
    documents = filter(None, map(str.strip, documents))
    return [conversation(d, f"{file} document {i}") for i, d in enumerate(documents, 1)]


def pieces(text: str) -> list[Document]:
    """A text cut at blank lines into pieces of about PIECE characters."""
    result = [""]
    for part in text.split("\n\n"):
        if result[-1] and len(result[-1]) + len(part) > PIECE:
            result.append("")
        result[-1] += ("\n\n" if result[-1] else "") + part
    return [piece.strip("\n") for piece in result if piece.strip()]


def conversation(document: str, place: str) -> Document:
    """The turns of a document like `User: … Assistant: …`; any other document as it is."""
    if not document.startswith(tuple(ROLES)):
        return document
    parts = re.split(f"^({'|'.join(ROLES)})", document, flags=re.M)[1:]
    turns = (turn(ROLES[name], said.strip()) for name, said in zip(parts[::2], parts[1::2]))
    return Conversation(turns, place)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def read_objects(file: Path, text: str) -> list[Document]:
    """The documents of a .jsonl or .json: of one list of objects, or of an object a line."""
    if text.lstrip().startswith("["):
        try:
            rows, unit = json.loads(text), "object"
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file} cannot be read as one JSON list: {error}") from None
    else:
        rows, unit = text.split("\n"), "line"
    documents = []
    for number, row in enumerate(rows, 1):
        place = f"{file} {unit} {number}"
        try:
            if unit == "object" or row.strip():
                documents.append(document_of(row if unit == "object" else json.loads(row), place))
                plain(documents[-1]).encode()  # a lone surrogate is no text
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(
                f'{place}: must be an object of strings, such as {{"text"}}, {{"prompt"}}, '
                '{"prompt", "completion"}, {"messages": [{"role", "content"}, ...]} or '
                '{"conversations": [{"from", "value"}, ...]}'
            ) from None
    return documents


def document_of(row: object, place: str) -> Document:
    """The document in an object. A worked problem loses its calculator's marks."""
    match row:
        case {"messages": list(said)} | {"conversations": list(said)}:
            turns = map(turn_of, said)
        case {"prompt": str(prompt), "completion": str(answer)}:
            turns = turn("user", prompt), turn("assistant", answer)
        case {"prompt": str(prompt)}:
            turns = (turn("user", prompt),)
        case {"question": str(question), "answer": str(answer)}:
            turns = turn("user", question), turn("assistant", re.sub("<<.*?>>", "", answer))
        case {"text": str(task), "code": str(code)}:
            code = code.replace("\r\n", "\n").strip()
            turns = turn("user", task.strip()), turn("assistant", code)
        case {"text": str(text)}:
            return text
        case _:
            raise ValueError
    return Conversation(turns, place)


def turn_of(said: dict) -> dict[str, str]:
    """A turn of `messages` or, in ShareGPT's names, of `conversations`. Parts are joined."""
    match said:
        case {"role": str(role), "content": content}:
            pass
        case {"from": str(name), "value": content}:
            role = SHAREGPT.get(name, name)
        case _:
            raise ValueError
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError
    return turn(role, content)


def plain(document: Document) -> str:
    """Its text; a conversation's turns are lines."""
    if isinstance(document, str):
        return document
    return "\n".join(turn["content"] for turn in document)


def encode(document: Document, tokenizer: Tokenizer) -> list[int]:
    """Its token ids; a conversation's as the model's chat template, if it has one, writes them."""
    if not document:
        return []
    if isinstance(document, str) or tokenizer.chat_template is None:
        return tokenizer.encode(plain(document))
    *before, last = document
    if before and last["role"] == "assistant":
        return tokenizer.chat(before) + tokenizer.encode(last["content"], special=False)
    return tokenizer.chat(document)


class LeftOut:
    """Documents that were left out because they cannot be encoded, such as conversations that the
    chat template refuses."""

    def __init__(self):
        self.reasons: dict[str, str] = {}  # by place

    def attempt(self, document: Document, encode: Callable[..., list[int]], *more) -> list[int]:
        """encode(document, …), or no tokens if that fails: the document is left out."""
        try:
            if tokens := encode(document, *more):
                return tokens
            reason = "it is empty"
        except UserError as error:
            reason = str(error)
        place = getattr(document, "place", "") or repr(plain(document)[:40])
        self.reasons.setdefault(place, reason)
        return []

    def __str__(self) -> str:
        """How many there are, and the first with its reason; empty if there are none."""
        first = next((f"{place}: {reason}" for place, reason in self.reasons.items()), "")
        return first and f"documents left out: {len(self.reasons)}; the first is {first}"


def held_out_prompts(
    data: Path, kinds: list[str] | None, tokenizer: Tokenizer, n: int, left_out: LeftOut
) -> dict[str, list[list[int]]]:
    """Of each kind (None: of all) the beginnings of `n` documents that were held out: 16 tokens of
    a text, of a conversation all up to the first answer."""
    held_out = {kind: texts for kind, texts in read_corpus([data])[1].items() if texts}
    for kind in kinds or ():
        if kind not in held_out:
            raise UserError(f"{data} has no text of the kind {kind}, but {', '.join(held_out)}")
    prompts = {
        kind: (left_out.attempt(document, beginning, tokenizer) for document in held_out[kind])
        for kind in kinds or held_out
    }
    return {kind: list(islice(filter(None, each), n)) for kind, each in prompts.items()}


def beginning(document: Document, tokenizer: Tokenizer) -> list[int]:
    """What `held_out_prompts` takes of a document."""
    if isinstance(document, str) or tokenizer.chat_template is None:
        return encode(document, tokenizer)[:16]
    return encode(document[: user_ends(document)[0]], tokenizer)


def user_ends(document: Conversation) -> list[int]:
    """How many turns there are up to each of the user's, that one included; all, if none is."""
    ends = [i for i, each in enumerate(document, 1) if each["role"] == "user"]
    return ends or [len(document)]
