"""List each language's frequent tokens, for a head to draft from."""

import argparse
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from minispec.checkpoints.heads import save_vocabulary
from minispec.checkpoints.load import read_tokenizer
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.errors import UserError, check_writable, comma_separated, number
from minispec.methods.vocabulary import count
from minispec.training.own_text import UNPACK, read_own
from minispec.training.text import plain, read_kinds


def run(args: argparse.Namespace) -> None:
    tokenizer = read_tokenizer(args.model)
    check_writable(args.out, "--out")
    languages = {}
    for name, files in args.text:
        if name in languages:
            raise UserError(f"--text {name}=…: give each name once")
        each = [ids_of(Path(file), tokenizer) for file in files]
        ids = tqdm(chain.from_iterable(each), desc=name, unit="document")
        languages[name] = count(ids, sorted(tokenizer.controls.values()), args.size)
        total = sum(languages[name].counts)
        if not total:
            raise UserError(f"--text {name}={','.join(files)}: holds no text")
        print(f"{name}: {len(languages[name].ids)} of {tokenizer.size} tokens, {total} seen")
    save_vocabulary(languages, tokenizer, args.out)


def ids_of(path: Path, tokenizer: Tokenizer) -> Iterable[list[int]]:
    """The documents of a file or folder of texts, encoded one by one; of a file of `generate` what
    the target said."""
    if path.is_file() and (path.suffix in UNPACK or path.suffix == ".jsonl"):
        with path.open("rb") as file:
            begun = file.readline()
        if path.suffix in UNPACK or begun.startswith(b'{"tokenizer"'):
            return [row["tokens"] for row in read_own(path, tokenizer)[1]]
    documents = chain.from_iterable(read_kinds(path).values())
    return (tokenizer.encode(plain(document)) for document in documents)


def named_files(text: str) -> tuple[str, list[str]]:
    """What --text takes."""
    name, _, files = text.partition("=")
    if not (name and files):
        raise argparse.ArgumentTypeError(f"{text}: must be NAME=FILE,FILE…")
    return name, comma_separated(files)


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--text", action="append", required=True, type=named_files,
                   metavar="NAME=FILE,…",
                   help="a language and its texts or own documents (repeat)")  # fmt: skip
    p.add_argument("--size", type=number(1), default=2048, help="tokens of each (%(default)s)")
    p.add_argument("--out", type=Path, required=True)
