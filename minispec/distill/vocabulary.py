"""List each language's frequent tokens, for a head to draft from."""

import argparse
from pathlib import Path

from tqdm import tqdm

from minispec.checkpoint import read_tokenizer
from minispec.errors import UserError, check_writable, number
from minispec.heads import save_vocabulary
from minispec.methods.vocabulary import count
from minispec.text import plain, read_kinds


def run(args: argparse.Namespace) -> None:
    tokenizer = read_tokenizer(args.model)
    check_writable(args.out, "--out")
    languages = {}
    for text in args.text:
        name, _, files = text.partition("=")
        if not (name and files) or name in languages:
            raise UserError(f"--text {text}: must be NAME=FILE,FILE… with each name once")
        kinds = [read_kinds(Path(file)) for file in files.split(",")]
        documents = [d for each in kinds for texts in each.values() for d in texts]
        ids = (tokenizer.encode(plain(d)) for d in tqdm(documents, desc=name, unit="document"))
        languages[name] = count(ids, sorted(tokenizer.controls.values()), args.size)
        total = sum(languages[name].counts)
        if not total:
            raise UserError(f"--text {text}: holds no text")
        print(f"{name}: {len(languages[name].ids)} of {tokenizer.size} tokens, {total} seen")
    save_vocabulary(languages, tokenizer, args.out)


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--text", action="append", required=True, metavar="NAME=FILE,…",
                   help="a language and its texts, files or folders (repeat)")  # fmt: skip
    p.add_argument("--size", type=number(1), default=2048, help="tokens of each (%(default)s)")
    p.add_argument("--out", type=Path, required=True)
