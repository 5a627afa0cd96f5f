"""Files of the target's own documents, as `distill generate` writes them.

The first line of such a file says how it was made: `{"tokenizer", "options"}`. Each other line is a
document in token ids: `{"kind", "prompt", "tokens"}`. A file that something else wrote may lack the
first line: one can train on it, but `generate` does not go on with it.
"""

import gzip
import json
import lzma
import zlib
from pathlib import Path
from typing import TextIO

from minispec.checkpoints.load import check_fingerprint
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.errors import UserError
from minispec.model import Transformer

UNPACK = {".gz": gzip.open, ".xz": lzma.open}  # files that are read although they are packed
DAMAGED = EOFError, lzma.LZMAError, zlib.error  # what reading them raises besides
HELD_OUT = 50  # every 50th document of a file is for measuring


def read_own(path: Path, tokenizer: Tokenizer | None = None) -> tuple[dict, list[dict]]:
    """How the documents were made ({} if nothing says), and the documents. Those of another
    tokenizer are refused. A last line without an end, as a kill leaves one, does not count. The
    file may be packed (.gz, .xz)."""
    made: dict = {}
    try:
        with unpacked(path) as file:
            rows = [json.loads(line) for line in file.read().split("\n")[:-1]]
        if rows and "options" in rows[0]:
            made = rows.pop(0)
            check(isinstance(made["options"], dict), "options that are no object")
            check(isinstance(made["tokenizer"], str), "a tokenizer that is no hash")
        for row in rows:
            check(isinstance(row["kind"], str), "a kind that is not text")
            check(row["kind"] and row["prompt"] and row["tokens"], "an empty row")
            ids = row["prompt"] + row["tokens"]
            check(all(type(i) is int and 0 <= i < 2**31 for i in ids), "a token that is no id")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, *DAMAGED) as error:
        raise UserError(f"{path} is not a file of minispec.distill generate: {error}") from None
    check_fingerprint(str(path), made.get("tokenizer"), tokenizer)
    return made, rows


def unpacked(path: Path) -> TextIO:
    """The text of a file, which may be packed by gzip or xz."""
    return UNPACK.get(path.suffix, open)(path, "rt", encoding="utf-8")


def check(valid: object, fault: str) -> None:
    """Unlike an assertion, this also stops under `python -O`."""
    if not valid:
        raise ValueError(fault)


def read_training(
    paths: list[Path], target: Transformer, tokenizer: Tokenizer
) -> tuple[list[dict], list[dict]]:
    """The documents to learn from, and those to measure by: every HELD_OUTth of a file, but no
    near-duplicates of the former (greedy documents often are), unless all are. Each knows its
    `place`, file and number."""
    learn, held_out, known = [], [], Duplicates()
    for path in paths:
        for i, row in enumerate(read_own(path, tokenizer)[1]):
            if max(row["prompt"] + row["tokens"]) >= target.config.vocab_size:
                raise UserError(f"{path} holds tokens outside the target's vocabulary: another "
                                "model wrote it")  # fmt: skip
            (learn if i % HELD_OUT else held_out).append(row | {"place": (path, i)})
    if not learn:
        raise UserError(f"{paths[0]} holds {len(held_out)} documents, and none to learn from")
    for row in learn:
        known.add(row["tokens"])
    return learn, [row for row in held_out if not known.add(row["tokens"])] or held_out


class Duplicates:
    """Near-duplicates: texts most of whose 8-grams have been seen before."""

    def __init__(self, n: int = 8, share: float = 0.5):
        self.n, self.share, self.seen = n, share, set()

    def add(self, tokens: list[int]) -> bool:
        """Whether `tokens` is near to what was added before; if not, it is added."""
        grams = {tuple(tokens[i : i + self.n]) for i in range(len(tokens) - self.n + 1)}
        near = len(grams & self.seen) > self.share * len(grams)
        if not near:
            self.seen |= grams
        return near
