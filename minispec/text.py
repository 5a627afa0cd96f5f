"""Documents from files of the user's own, for training and for prompts.

A `.txt` holds documents, each followed by a line `<|endoftext|>`; one that begins with `User:` (or
`用户：`) is a conversation. A `.jsonl` holds an object a line: `{"text"}`, `{"messages": [{"role",
"content"}, ...]}`, `{"prompt"}`, `{"prompt", "completion"}`, `{"question", "answer"}` or `{"text",
"code"}`. Any other text, a book or source code, is cut at blank lines into pieces of about 2,000
characters. Of a folder, all .txt, .jsonl and .py files in it are read.

A *kind* of text is the stem of its file's name; the .py files of a folder are of one kind, the
folder's name. Every 50th document of a kind is held out: never trained on, it is for measuring.
"""

import json
import re
from pathlib import Path

from minispec.errors import UserError
from minispec.tokenizer import Tokenizer

Document = str | list[dict[str, str]]  # a text, or a conversation's turns: {role, content}
Kinds = dict[str, list[Document]]

END = "<|endoftext|>"
DIVIDER = re.compile(f"^{re.escape(END)}$", re.M)
SUFFIXES = ".txt", ".jsonl", ".py"  # of the files that are read in a folder
ROLES = {"User: ": "user", "用户：": "user", "Assistant: ": "assistant", "助手：": "assistant"}
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
    if not any(train.values()):
        raise UserError(f"{' '.join(map(str, data))}: holds no text")
    return train, held_out


def read_kinds(path: Path) -> Kinds:
    """The documents of a file, or of all files in a folder but hidden ones, by kind."""
    if not path.exists():
        raise UserError(f"no such file or directory: {path}")
    files = [path]
    if path.is_dir():
        inside = (f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
        files = sorted(f for f in inside if "/." not in f"/{f.relative_to(path).as_posix()}")
        if not files:
            raise UserError(f"{path} holds no {', '.join(SUFFIXES)} file")
    kinds: Kinds = {}
    for file in files:
        text = read_text(file)
        documents = read_lines(file, text) if file.suffix == ".jsonl" else divide(text)
        kind = path.resolve().name if file.suffix == ".py" and file != path else file.stem
        kinds.setdefault(kind, []).extend(documents)
    return {kind: documents for kind, documents in kinds.items() if documents}


def read_text(file: Path) -> str:
    """The text of a file; source code may hold bytes that are no UTF-8, which are skipped."""
    try:
        errors = "ignore" if file.suffix == ".py" else "strict"
        return file.read_text(encoding="utf-8", errors=errors)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None


def divide(text: str) -> list[Document]:
    """The documents of a text that lines of END divide, or else its pieces."""
    documents = DIVIDER.split(text)
    if len(documents) == 1:
        return pieces(text)
    return [conversation(d) for d in map(str.strip, documents) if d]


def pieces(text: str) -> list[Document]:
    """A text cut at blank lines into pieces of about PIECE characters."""
    result = [""]
    for part in text.split("\n\n"):
        if result[-1] and len(result[-1]) + len(part) > PIECE:
            result.append("")
        result[-1] += ("\n\n" if result[-1] else "") + part
    return [piece.strip("\n") for piece in result if piece.strip()]


def conversation(document: str) -> Document:
    """The turns of a document like `User: … Assistant: …`; any other document as it is."""
    if not document.startswith(tuple(ROLES)):
        return document
    parts = re.split(f"^({'|'.join(ROLES)})", document, flags=re.M)[1:]
    return [turn(ROLES[name], said.strip()) for name, said in zip(parts[::2], parts[1::2])]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def read_lines(file: Path, text: str) -> list[Document]:
    """The documents of a .jsonl."""
    documents = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.strip():
                documents.append(document_of(json.loads(line)))
                plain(documents[-1]).encode()  # a lone surrogate is no text
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(
                f'{file} line {number}: must be an object of strings, as {{"text"}}, {{"prompt"}}, '
                '{"prompt", "completion"} or {"messages": [{"role", "content"}, ...]}'
            ) from None
    return documents


def document_of(row: object) -> Document:
    """What a line of a .jsonl says. A worked problem loses its calculator's marks."""
    match row:
        case {"messages": [_, *_] as messages}:
            return [turn(each["role"], each["content"]) for each in messages]
        case {"prompt": str(prompt), "completion": str(answer)}:
            return [turn("user", prompt), turn("assistant", answer)]
        case {"prompt": str(prompt)}:
            return [turn("user", prompt)]
        case {"question": str(question), "answer": str(answer)}:
            return [turn("user", question), turn("assistant", re.sub("<<.*?>>", "", answer))]
        case {"text": str(task), "code": str(code)}:
            code = code.replace("\r\n", "\n").strip()
            return [turn("user", task.strip()), turn("assistant", code)]
        case {"text": str(text)}:
            return text
    raise ValueError


def plain(document: Document) -> str:
    """Its text; a conversation's turns are lines."""
    if isinstance(document, str):
        return document
    return "\n".join(turn["content"] for turn in document)


def encode(document: Document, tokenizer: Tokenizer) -> list[int]:
    """Its token ids; a conversation's as the model's chat template, if it has one, writes them."""
    if isinstance(document, str) or tokenizer.chat_template is None:
        return tokenizer.encode(plain(document))
    *before, last = document
    if before and last["role"] == "assistant":
        return tokenizer.chat(before) + tokenizer.encode(last["content"], special=False)
    return tokenizer.chat(document)


def held_out_prompts(
    data: Path, kinds: list[str] | None, tokenizer: Tokenizer, n: int
) -> dict[str, list[list[int]]]:
    """Of each kind (None: of all) the beginnings of `n` documents that were held out: 16 tokens of
    a text, of a conversation all up to the first answer."""
    held_out = {kind: texts for kind, texts in read_corpus([data])[1].items() if texts}
    for kind in kinds or ():
        if kind not in held_out:
            raise UserError(f"{data} has no text of the kind {kind}, but {', '.join(held_out)}")
    chosen = {kind: held_out[kind][:n] for kind in kinds or held_out}
    return {kind: [beginning(d, tokenizer) for d in texts] for kind, texts in chosen.items()}


def beginning(document: Document, tokenizer: Tokenizer) -> list[int]:
    """What `held_out_prompts` takes of a document."""
    if isinstance(document, str) or tokenizer.chat_template is None:
        return encode(document, tokenizer)[:16]
    return encode(document[: user_ends(document)[0]], tokenizer)


def user_ends(document: list[dict[str, str]]) -> list[int]:
    """How many turns there are up to each of the user's, that one included; all, if none is."""
    ends = [i for i, each in enumerate(document, 1) if each["role"] == "user"]
    return ends or [len(document)]
