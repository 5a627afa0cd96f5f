"""List the most frequent tokens of each language, for heads to draft from."""

import argparse
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from minispec.checkpoints.heads import save_vocabulary
from minispec.checkpoints.load import read_tokenizer
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import TEXT_ENCODING, OutputFile, UserError, comma_separated, number
from minispec.distill.generated import OPENERS, read_generated
from minispec.methods.vocabulary import count
from minispec.training.loop import add_flags
from minispec.training.text import plain_text, read_documents


def run(args: argparse.Namespace) -> None:
    """List the most frequent tokens of each language, for heads to draft from."""
    tokenizer = read_tokenizer(args.model)
    languages = {}
    for name, files in args.text:
        if name in languages:
            raise UserError(f"--text {name}=…: use each name once")
        documents = [ids_of(file, tokenizer) for file in files]
        ids = tqdm(chain.from_iterable(documents), desc=name, unit="document")
        languages[name] = count(ids, sorted(tokenizer.control_ids.values()), args.size)
        if not (total := sum(languages[name].counts)):
            raise UserError(f"--text {name}={','.join(map(str, files))}: no text found")
        print(f"{name}: {len(languages[name].ids)} of {tokenizer.size} tokens, seen {total} times")
    save_vocabulary(languages, tokenizer, args.out)


def ids_of(path: Path, tokenizer: Tokenizer) -> Iterable[list[int]]:
    """The documents of a text file or folder, encoded one by one, or the generated tokens in a file
    from `generate`."""
    if path.is_file() and (path.suffix in OPENERS or path.suffix == ".jsonl"):
        with path.open(**TEXT_ENCODING) as file:
            first_line = file.readline()
        if path.suffix in OPENERS or first_line.startswith('{"tokenizer"'):
            return [row["tokens"] for row in read_generated(path, tokenizer)[1]]
    documents = chain.from_iterable(read_documents(path).values())
    return (tokenizer.encode(plain_text(document)) for document in documents)


def named_files(text: str) -> tuple[str, list[Path]]:
    """Parse the value of --text."""
    name, _, files = text.partition("=")
    if not (name and files):
        raise argparse.ArgumentTypeError(f"{text}: must be NAME=FILE,FILE…")
    return name, list(map(Path, comma_separated(files)))


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--text", action="append", required=True, type=named_files,
                   metavar="NAME=FILE,…",
                   help="a language and its text files, or files from distill generate; "
                        "repeat for each language")  # fmt: skip
    add_flags(p, ("size", number(1), 2048, "tokens per language"))
    p.add_argument("--out", type=OutputFile, required=True, help="JSON file to write")
