"""Sample the target's own text.

A text of the corpus gives its first tokens, and the target goes on. Of a conversation the target is
asked, by its chat template, for the answer to a user's turn; so `{"prompt": ...}` a line is enough.
Near-duplicates are left out: a model repeats itself.
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from minispec.distill.documents import Duplicates, load_target, read_own, weights_digest
from minispec.errors import UserError, check_writable, number
from minispec.model import Transformer
from minispec.pretrain import digest
from minispec.sampling import OneHot, Sampling, probs
from minispec.text import Document, Kinds, plain, read_corpus
from minispec.tokenizer import Tokenizer

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

LONGEST = 24  # tokens of a beginning
IDLE = 64  # prompts in a row after which nothing new came: enough
Asked = tuple[str, list[int], list[int]]  # the kind, a prompt, and how the corpus goes on


@torch.no_grad()
def sample_batch(
    model: Transformer, prompts: list[list[int]], n: int, sampling: Sampling,
    generator: torch.Generator,
) -> list[list[int]]:  # fmt: skip
    """At most `n` tokens after each prompt, all sampled together; an end token is a row's last.

    Prompts are padded on the right: what lies behind a row's own length is never committed.
    """
    lengths = [len(prompt) for prompt in prompts]
    rows = nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True)
    cache = model.new_cache(max(lengths) + n, batch=len(prompts))
    hidden = model(rows, cache)
    cache.extend(lengths)
    last = hidden[torch.arange(len(prompts)), torch.tensor(lengths) - 1]  # (B, d)
    output: list[list[int]] = [[] for _ in prompts]
    alive = [True] * len(prompts)
    while True:
        p = probs(model.logits(last), sampling)  # (B, V)
        if isinstance(p, OneHot):
            tokens = p.tokens
        else:
            tokens = torch.multinomial(p, 1, generator=generator)[:, 0].tolist()
        for i, token in enumerate(tokens):
            if alive[i]:
                output[i].append(token)
                alive[i] = token not in model.config.eos_ids and len(output[i]) < n
        if not any(alive):
            return output
        last = model(torch.tensor(tokens)[:, None], cache)[:, 0]
        cache.extend([1] * len(prompts))


# ---- prompts -------------------------------------------------------------------------------------


def ask(
    document: Document, tokenizer: Tokenizer, rng: np.random.Generator, n: int
) -> tuple[list[int], list[int]]:
    """A prompt of a document, and at most `n` tokens with which the document goes on after it."""
    if isinstance(document, str):
        ids = tokenizer.encode(document[: 20 * (LONGEST + n)])
        cut = rng.integers(4, LONGEST)
        return ids[:cut], ids[cut : cut + n]
    turns = [i + 1 for i, turn in enumerate(document) if turn["role"] == "user"] or [len(document)]
    before = document[: rng.choice(turns)]
    after = plain(document[len(before) : len(before) + 1])
    chat = tokenizer.chat(before) if tokenizer.chat_template else tokenizer.encode(plain(before))
    return chat, tokenizer.encode(after, special=False)[:n] if after else []


def ask_many(
    kinds: Kinds, tokenizer: Tokenizer, seed: list[int], args: argparse.Namespace, longest: int
) -> list[Asked]:
    """--batch prompts of at most `longest` tokens, of documents drawn at random."""
    rng = np.random.default_rng(seed)
    documents = [(kind, document) for kind, texts in kinds.items() for document in texts]
    asked: list[Asked] = []
    for _ in range(100 * args.batch):
        kind, document = documents[rng.integers(len(documents))]
        prompt, rest = ask(document, tokenizer, rng, args.tokens)
        if 0 < len(prompt) <= longest and (rest or not args.corpus):
            asked.append((kind, prompt, rest))
        if len(asked) == args.batch:
            return asked
    raise UserError(f"--data holds hardly a prompt of at most {longest} tokens: lower --tokens")


# ---- the file ------------------------------------------------------------------------------------


@contextlib.contextmanager
def alone(path: Path) -> Iterator[TextIO]:
    """The file, opened to append to; refused while another process has it so."""
    lock = path.with_name(path.name + ".lock")
    with path.open("a+", encoding="utf-8", newline="\n") as file, contextlib.ExitStack() as end:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go when the file is closed
            else:
                lock.touch(exist_ok=False)
                end.callback(lock.unlink)
        except OSError:
            raise UserError(f"--out {path}: another process is writing it: give another --out, or "
                            f"wait (if there is none, delete {lock})") from None  # fmt: skip
        yield file


def resume(file: TextIO, path: Path, tokenizer: Tokenizer, options: dict) -> tuple[list[dict], int]:
    """The documents in the file, and the next batch. The last batch may be incomplete: it is cut
    off, to be made again. Raises UserError for a file that was made with other options."""
    made, rows = read_own(path, tokenizer)
    if rows and not (made and all(type(row.get("batch")) is int for row in rows)):
        raise UserError(f"{path} was not begun by minispec.distill generate: give another --out")
    for name, value in options.items():
        theirs = made.get("options", options).get(name)
        if theirs != value:
            said = f"another --{name}" if name in ("model", "data") else f"--{name} {theirs}"
            raise UserError(f"{path} was begun with {said}: give what it was begun with, or "
                            "another --out")  # fmt: skip
    batch = rows[-1]["batch"] if rows else 0
    kept = [row for row in rows if row["batch"] < batch]
    file.seek(0)
    file.truncate(sum(len(file.readline()) for _ in range(1 + len(kept))) if kept else 0)
    if not kept:
        file.write(json.dumps({"tokenizer": tokenizer.fingerprint, "options": options}) + "\n")
    return kept, batch if kept else 0


# ---- the command ---------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    """Append documents to --out until it holds --documents of them."""
    check_writable(args.out, "--out")
    model, tokenizer = load_target(args, args.dtype)
    kinds = read_corpus(args.data)[0]
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    if args.tokens + LONGEST > model.config.context:
        raise UserError(f"--tokens {args.tokens} and a prompt do not fit in the target's context "
                        f"of {model.config.context}")  # fmt: skip
    names = "seed", "batch", "tokens", "temperature", "top_k", "top_p", "keep_duplicates", "corpus"
    options = {name.replace("_", "-"): getattr(args, name) for name in names}
    options |= {"dtype": str(model.dtype), "model": weights_digest(model), "data": digest(kinds)}

    def made(batch: int) -> Iterator[dict]:
        """The documents of a batch."""
        longest = model.config.context - args.tokens
        asked = ask_many(kinds, tokenizer, [args.seed, batch], args, longest)
        prompts, answers = [prompt for _, prompt, _ in asked], [rest for _, _, rest in asked]
        if not args.corpus:
            generator = torch.Generator().manual_seed(args.seed + batch)
            answers = sample_batch(model, prompts, args.tokens, sampling, generator)
        for (kind, prompt, _), tokens in zip(asked, answers):
            yield {"kind": kind, "prompt": prompt, "tokens": tokens, "batch": batch}

    with alone(args.out) as file:
        rows, batch = resume(file, args.out, tokenizer, options)
        append(file, rows, batch, made, args)


def append(
    file: TextIO, rows: list[dict], batch: int, made: Callable[[int], Iterable[dict]],
    args: argparse.Namespace,
) -> None:  # fmt: skip
    """Add `made(batch)`, `made(batch + 1)`, … to a file that holds `rows`, but no near-duplicates
    unless they are asked for."""
    duplicates, kept, idle = Duplicates(), len(rows), 0
    for row in rows:
        duplicates.add(row["tokens"])
    with tqdm(total=args.documents, initial=kept, unit="document") as bar:
        while kept < args.documents:
            new = list(made(batch))
            if not args.keep_duplicates:
                new = [row for row in new if not duplicates.add(row["tokens"])]
            idle = 0 if new else idle + args.batch
            if idle >= IDLE:
                raise UserError(f"only {kept} different documents came: raise --temperature or ask "
                                "for fewer")  # fmt: skip
            file.write("".join(json.dumps(row) + "\n" for row in new))
            file.flush()
            kept, batch = kept + len(new), batch + 1
            bar.update(len(new))


def sampling_arguments(
    p: argparse.ArgumentParser, temperature: float, top_k: int, top_p: float
) -> None:
    """The flags of a command that samples from the target."""
    p.add_argument("--temperature", type=float, default=temperature)
    p.add_argument("--top-k", type=int, default=top_k)
    p.add_argument("--top-p", type=float, default=top_p)
    p.add_argument("--seed", type=number(0), default=0)
    p.add_argument("--dtype", default="auto")
    p.add_argument("--device", default="auto")


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--data", type=Path, nargs="+", required=True, metavar="PATH",
                   help="texts or prompts: files or folders (see text.py)")  # fmt: skip
    p.add_argument("--documents", type=number(1), default=8000, help="default: %(default)s")
    p.add_argument("--tokens", type=number(1), default=200, help="at most, of one (%(default)s)")
    p.add_argument("--batch", type=number(1), default=64, help="prompts together (%(default)s)")
    p.add_argument("--keep-duplicates", action="store_true",
                   help="what is typical of the target as often as it comes")  # fmt: skip
    p.add_argument("--corpus", action="store_true",
                   help="a control: the texts go on as they do in the corpus")  # fmt: skip
    sampling_arguments(p, temperature=0.6, top_k=20, top_p=0.95)
    p.add_argument("--out", type=Path, required=True, help="a .jsonl file, appended to")
