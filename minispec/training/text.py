"""Read documents from the user's files, for training and for prompts.

A `.txt` file holds documents separated by lines `<|endoftext|>`; a document that starts with
`User:` (or `用户：`) is a conversation. A `.jsonl` file holds an object per line: `{"text"}`,
`{"prompt"}`, `{"prompt", "completion"}` or `{"messages": [{"role", "content"}, ...]}`; the card of
weights/target shows how to convert other data sets. Any other file, such as a book, is cut at blank
lines into chunks of about 2,000 characters. All files must be UTF-8. A folder means the .txt and
.jsonl files in it.

The *kind* of a document is its file's name without the extension. Every 50th document of a kind is
held out: it is used for measuring, never for training.
"""

import json
import re
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError, user_error


class Conversation(list[dict[str, str]]):
    """Turns {role, content}; `location` names the file and line they were read from."""

    def __init__(self, turns: Iterable[dict[str, str]], location: str = ""):
        super().__init__(turns)
        self.location = location


Document = str | Conversation
Corpus = dict[str, list[Document]]  # documents by kind

END = "<|endoftext|>"
END_LINE = re.compile(f"^{re.escape(END)}$", re.M)
FOLDER_TYPES = ".txt", ".jsonl"  # the files read from a folder
ROLES = {"User: ": "user", "用户：": "user", "Assistant: ": "assistant", "助手：": "assistant"}
CHUNK_CHARS = 2000
HOLD_OUT_EVERY = 50  # documents


def read_corpus(data: list[Path]) -> tuple[Corpus, Corpus]:
    """The training documents and the held-out ones. A kind of one document holds none out."""
    train, held_out = {}, {}
    for path in dict.fromkeys(data):
        for kind, documents in read_documents(path).items():
            held = documents[::HOLD_OUT_EVERY] if len(documents) > 1 else []
            rest = [d for i, d in enumerate(documents) if i % HOLD_OUT_EVERY or not held]
            train.setdefault(kind, []).extend(rest)
            held_out.setdefault(kind, []).extend(held)
    if not any(plain_text(document) for documents in train.values() for document in documents):
        raise UserError(f"{' '.join(map(str, data))}: no text found")
    return train, held_out


def read_documents(path: Path) -> Corpus:
    """The documents of a file, or of all files in a folder except hidden ones, by kind."""
    if not path.exists():
        raise UserError(f"no such file or directory: {path}")
    files = [path]
    if path.is_dir():
        inside = (f for f in path.rglob("*") if f.suffix.lower() in FOLDER_TYPES and f.is_file())
        files = sorted(f for f in inside if "/." not in f"/{f.relative_to(path).as_posix()}")
        if not files:
            raise UserError(f"{path} holds no {', '.join(FOLDER_TYPES)} file; name any other file "
                            "explicitly")  # fmt: skip
    corpus: Corpus = {}
    for file in files:
        text = read_text(file)
        objects = file.suffix.lower() in (".jsonl", ".json")
        documents = read_objects(file, text) if objects else split_documents(file, text)
        corpus.setdefault(file.stem, []).extend(documents)
    return {kind: documents for kind, documents in corpus.items() if documents}


def read_text(file: Path) -> str:
    """The text of a file without a byte-order mark, with lines ending in \\n."""
    with user_error(f"{file} cannot be read as UTF-8 text"):
        text = file.read_text(encoding="utf-8-sig")
    if "\0" in text:
        raise UserError(f"{file} is not text: it contains NUL bytes")
    return text


def split_documents(file: Path, text: str) -> list[Document]:
    """Split a text at lines of END; if it has none, cut it into chunks."""
    if not END_LINE.search(text):
        return chunks(text)
    documents = filter(None, map(str.strip, END_LINE.split(text)))
    return [parse_conversation(d, f"{file} document {i}") for i, d in enumerate(documents, 1)]


def chunks(text: str) -> list[Document]:
    """Cut a text at blank lines into chunks of about CHUNK_CHARS characters."""
    result = [""]
    for part in text.split("\n\n"):
        if result[-1] and len(result[-1]) + len(part) > CHUNK_CHARS:
            result.append("")
        result[-1] += ("\n\n" if result[-1] else "") + part
    return [chunk.strip("\n") for chunk in result if chunk.strip()]


def parse_conversation(document: str, location: str) -> Document:
    """Parse `User: … Assistant: …` into turns; return any other document unchanged."""
    if not document.startswith(tuple(ROLES)):
        return document
    parts = re.split(f"^({'|'.join(ROLES)})", document, flags=re.M)[1:]
    turns = (turn(ROLES[name], text.strip()) for name, text in zip(parts[::2], parts[1::2]))
    return Conversation(turns, location)


def turn(role: str, content: str | list[dict[str, str]]) -> dict[str, str]:
    """A turn of a conversation. A list of text parts is joined."""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    if not (isinstance(role, str) and isinstance(content, str)):
        raise ValueError("not a string")
    return {"role": role, "content": content}


def read_objects(file: Path, text: str) -> list[Document]:
    """The documents of a .jsonl file, which holds an object per line."""
    documents = []
    for number, line in enumerate(text.split("\n"), 1):
        location = f"{file} line {number}"
        with user_error(
            f'{location}: must be an object with string values, like {{"text"}}, {{"prompt"}}, '
            '{"prompt", "completion"} or {"messages": [{"role", "content"}, ...]}'
        ):
            if line.strip():
                documents.append(parse_document(json.loads(line), location))
                plain_text(documents[-1]).encode()  # raises for lone surrogates
    return documents


def parse_document(row: object, location: str) -> Document:
    """The document in a JSON object."""
    match row:
        case {"messages": list(messages)}:
            turns = [turn(message["role"], message["content"]) for message in messages]
        case {"prompt": str(prompt), "completion": str(answer)}:
            turns = turn("user", prompt), turn("assistant", answer)
        case {"prompt": str(prompt)}:
            turns = (turn("user", prompt),)
        case {"text": str(text)}:
            return text
        case _:
            raise ValueError("none of these")
    return Conversation(turns, location)


def plain_text(document: Document) -> str:
    """A document's text, with a conversation's turns on separate lines."""
    if isinstance(document, str):
        return document
    return "\n".join(turn["content"] for turn in document)


def encode(document: Document, tokenizer: Tokenizer) -> list[int]:
    """A document's token ids. Conversations go through the chat template if the model has one."""
    if not document:
        return []
    if isinstance(document, str) or tokenizer.chat_template is None:
        return tokenizer.encode(plain_text(document))
    *before, last = document
    if before and last["role"] == "assistant":
        return tokenizer.chat(before) + tokenizer.encode(last["content"], add_special_tokens=False)
    return tokenizer.chat(document)


class Skipped:
    """Documents that cannot be encoded, such as conversations that the chat template rejects."""

    def __init__(self):
        self.reasons: dict[str, str] = {}  # by location

    def attempt(self, document: Document, encode: Callable[..., list[int]], *more) -> list[int]:
        """Return encode(document, …). If that fails, skip the document and return []."""
        try:
            if tokens := encode(document, *more):
                return tokens
            reason = "it is empty"
        except UserError as error:
            reason = str(error)
        location = getattr(document, "location", "") or repr(plain_text(document)[:40])
        self.reasons.setdefault(location, reason)
        return []

    def __str__(self) -> str:
        """The number of documents and the first one's reason; empty if none were skipped."""
        first = next(map(": ".join, self.reasons.items()), "")
        return first and f"documents skipped: {len(self.reasons)}; the first is {first}"


def held_out_prompts(
    data: Path, kinds: list[str] | None, tokenizer: Tokenizer, n: int, skipped: Skipped
) -> dict[str, list[list[int]]]:
    """Prompts from up to `n` held-out documents of each kind (None: all kinds): the first 16
    tokens of a text, or a conversation up to the first answer."""
    held_out = {name: texts for name, texts in read_corpus([data])[1].items() if texts}
    for name in kinds or ():
        if name not in held_out:
            raise UserError(f"--kind {name}: not found in {data}, which has {', '.join(held_out)}")
    prompts = {}
    for name in kinds or held_out:
        found = (skipped.attempt(document, first_prompt, tokenizer) for document in held_out[name])
        prompts[name] = list(islice(filter(None, found), n))
    return prompts


def first_prompt(document: Document, tokenizer: Tokenizer) -> list[int]:
    """The prompt that `held_out_prompts` takes from a document."""
    if isinstance(document, str) or tokenizer.chat_template is None:
        return encode(document, tokenizer)[:16]
    return encode(document[: user_turn_ends(document)[0]], tokenizer)


def user_turn_ends(document: Conversation) -> list[int]:
    """The number of turns up to and including each user turn; all turns if there is none."""
    ends = [i for i, message in enumerate(document, 1) if message["role"] == "user"]
    return ends or [len(document)]
