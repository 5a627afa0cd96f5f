"""What drafts and heads learn from: files of the target's own documents, and its hidden states.

The first line of such a file says how it was made: `{"tokenizer", "options"}`. Each other line is a
document in token ids: `{"kind", "prompt", "tokens"}`. A file that something else wrote may lack the
first line: one can train on it, but `generate` does not go on with it.
"""

import argparse
import gzip
import hashlib
import json
import lzma
import os
import zlib
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import IO, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from minispec.checkpoint import check_fingerprint, load, needed
from minispec.errors import UserError, check_writable, note
from minispec.heads import load_vocabulary, save_vocabulary
from minispec.methods.vocabulary import Subset
from minispec.model import Transformer
from minispec.pretrain import digest
from minispec.tokenizer import Tokenizer
from minispec.training import Batch, Training, lock, train

HALF = torch.float16
TOGETHER = 2**15  # tokens that a GPU passes through the target at once
UNPACK = {".gz": gzip.open, ".xz": lzma.open}  # files that are read although they are packed
DAMAGED = EOFError, lzma.LZMAError, zlib.error  # what reading them raises besides
PURPOSES = "learn from", "measure by"  # of documents
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


def load_target(args: argparse.Namespace, dtype: str = "float32") -> tuple[Transformer, Tokenizer]:
    """--model, from whose texts nothing can be learnt without a tokenizer."""
    model, tokenizer = load(args.model, dtype, args.device)
    return model, needed(tokenizer, model.source)


def weights_digest(model: Transformer) -> str:
    """A hash of the function: weights, and what else makes it."""
    each = [p.detach().cpu().contiguous().view(torch.uint8).numpy() for p in model.parameters()]
    return digest([str(asdict(model.config)), [hashlib.sha256(a).hexdigest() for a in each]])


def words_digest(words: Subset | None) -> str:
    """A hash of the vocabulary that is learnt."""
    return digest(words.host_ids.tolist()) if words else "all"


def keep_vocabulary(args: argparse.Namespace, target: Transformer, tokenizer: Tokenizer) -> None:
    """Put the vocabulary that heads have learnt beside them, and no other: from now on they draft
    from it."""
    beside = args.out / "vocabulary.json"
    if args.vocabulary:
        languages = load_vocabulary(args.vocabulary, target, tokenizer).languages
        save_vocabulary(languages, tokenizer, beside)
    else:
        beside.unlink(missing_ok=True)


@torch.no_grad()
def kept_states(
    path: Path, target: Transformer, context: int, dtype: torch.dtype, weights: str
) -> list[Tensor]:
    """The target's hidden states (n, d), in float16, of every document of a file of `generate`, cut
    to `context` tokens; `weights` is the target's digest. They are kept in a file next to it, each
    document's behind a hash of its tokens, and those of documents added since are appended. If any
    hash is another document's, all are computed again, in a new file: another training may still be
    reading the old one."""
    rows = [(row["prompt"] + row["tokens"])[:context] for row in read_own(path)[1]]
    hashes = [bytes.fromhex(digest(row)) for row in rows]  # of 8 bytes
    key, size = digest([weights, context, str(dtype), "hashes"])[:8], target.config.hidden_size
    file = path.with_name(f"{path.name}.{key}.hidden")
    check_writable(file, "the hidden states of --own")
    ends = list(accumulate((8 + 2 * size * len(row) for row in rows), initial=0))  # bytes
    while True:
        with file.open("a+b") as out:
            lock(out, str(file), wait=True)  # two trainings on one text may begin together
            if not (file.exists() and os.path.samestat(os.fstat(out.fileno()), file.stat())):
                continue  # while this one waited, the other began a new file
            done = bisect(ends, out.seek(0, os.SEEK_END)) - 1
            # of the document after the `done` whole ones a kill may have left a part
            each = zip(hashes[: done + 1], ends)
            if not all(own.startswith(read_at(out, at, 8)) for own, at in each):
                file.unlink()
                continue
            if done < len(rows):
                out.truncate(ends[done])
                states = hidden_states(target, tqdm(rows[done:], "hidden states"), dtype)
                for own, each in zip(hashes[done:], states):
                    out.write(own + each.half().numpy().tobytes())
                out.flush()
            flat = torch.from_file(str(file), size=ends[-1] // 2, dtype=HALF)  # read when needed
            parts = flat.split([4 + size * len(row) for row in rows])
            return [part[4:].view(-1, size) for part in parts]


def read_at(file: IO, place: int, n: int) -> bytes:
    """The `n` bytes at a place in a file; fewer at its end."""
    file.seek(place)
    return file.read(n)


@torch.no_grad()
def hidden_states(
    target: Transformer, rows: Iterable[list[int]], dtype: torch.dtype, most: int | None = None
) -> Iterator[Tensor]:
    """The target's hidden states (n, d) of each row of n tokens, on the host. Rows share a pass
    while they are `most` tokens with padding: by default a GPU takes many, a CPU each alone."""
    most = (TOGETHER if target.device.type == "cuda" else 0) if most is None else most
    for batch in batches(rows, most):
        padded = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in batch], batch_first=True)
        with torch.autocast(target.device.type, dtype, enabled=dtype != torch.float32):
            states = target(padded).to("cpu", dtype)
        for row, each in zip(batch, states):
            yield each[: len(row)]


def batches(rows: Iterable[list[int]], most: int) -> Iterator[list[list[int]]]:
    """The rows in their order, as many at once as are `most` tokens with padding, at least one."""
    batch: list[list[int]] = []
    for row in rows:
        if batch and (len(batch) + 1) * max(map(len, [*batch, row])) > most:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


class Documents:
    """Whole documents, padded on the right to the longest of all: `tokens` (D, T), `lengths` and
    `prompts` (D,), how many tokens each has and how many of these it was given; `hidden`, the
    target's states (n, d) of each."""

    def __init__(self, rows: list[list[int]], prompts: list[int], states: list[Tensor]):
        pad = nn.utils.rnn.pad_sequence
        self.tokens = pad([torch.tensor(row) for row in rows], batch_first=True)
        self.hidden = list(states)
        self.prompts = torch.tensor(prompts)
        self.lengths = torch.tensor([len(row) for row in rows])

    @classmethod
    def of(
        cls, own: list[dict], target: Transformer, context: int, dtype: torch.dtype
    ) -> "Documents":
        """Rows of `read_training`, of at most `context` tokens."""
        rows = [(row["prompt"] + row["tokens"])[:context] for row in own]
        places = [row["place"] for row in own]
        files, weights = {path for path, _ in places}, weights_digest(target)
        kept = {path: kept_states(path, target, context, dtype, weights) for path in files}
        states = [kept[path][i] for path, i in places]
        return cls(rows, [len(row["prompt"]) for row in own], states)

    def labels(self, index: Tensor, k: int) -> Tensor:
        """Step k's label at i is token i + k + 1 if that is a generated one, else -100;
        (B, T - 2)."""
        at = torch.arange(self.tokens.shape[1] - 2) + k + 1  # (n,)
        tokens = F.pad(self.tokens[index], (0, k))[:, k + 1 :][:, : len(at)]
        real = (at < self.lengths[index, None]) & (at >= self.prompts[index, None])
        return tokens.where(real, -100)

    def states(self, index: Tensor, n: int) -> Tensor:
        """The target's first `n` hidden states of each document, (B, n, d), 0 behind its end."""
        states = [self.hidden[i][:n] for i in index.tolist()]
        padded = torch.stack([F.pad(each, (0, 0, 0, n - len(each))) for each in states])
        return padded.to(torch.float32)


def shuffled(count: int, rows: int, seed: int) -> Batch:
    """What gives each step `rows` of the numbers below `count`, in another order every epoch; no
    batch reaches into the next."""

    def batch(step: int) -> Tensor:
        epoch, i = divmod(step, max(count // rows, 1))
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))
        return order[i * rows : (i + 1) * rows]

    return batch


def cross_entropy(logits: Tensor, labels: Tensor, p: Tensor | None = None) -> Tensor:
    """Mean over the rows that have a label, against it or, if given, the row's distribution in `p`
    (n, V); 0 if none has."""
    real = labels >= 0
    truth = labels if p is None else p * real[:, None]
    return F.cross_entropy(logits.float(), truth, reduction="sum") / real.sum().clamp(min=1)


def labelled(
    own: list[dict], context: int, purpose: str, first: int = 2, words: Subset | None = None
) -> list[dict]:
    """Those documents that have a label within `context` tokens: a generated token, one of `words`,
    that is not before number `first`, as heads predict the token after the next. The others are
    counted in a note; it is an error if none is left for the `purpose`."""
    kept, skipped, known = [], Counter(), set(words.host_ids.tolist()) if words else None
    for row in own:
        labels = (row["prompt"] + row["tokens"])[max(first, len(row["prompt"])) : context]
        if len(row["prompt"]) >= context:
            skipped[f"the prompt fills the context of {context} tokens"] += 1
        elif not labels:
            skipped["the text is too short"] += 1
        elif known is not None and known.isdisjoint(labels):
            skipped["no generated token is in the vocabulary"] += 1
        else:
            kept.append(row)
    why = ", ".join(f"{reason} ({n})" for reason, n in skipped.items())
    if not kept:
        raise UserError(f"the documents of --own have nothing to {purpose}: {why}")
    if skipped:
        note(f"skipped {skipped.total()} of {len(own)} documents, which have nothing to {purpose}: "
             f"{why}")  # fmt: skip
    return kept


def learn(
    args: argparse.Namespace, target: Transformer, tokenizer: Tokenizer, model: nn.Module,
    loss: Callable[[Documents], Callable], options: str,
    optimizers: list[torch.optim.Optimizer] | None = None, first: int = 2,
    words: Subset | None = None,
) -> tuple[Training, list[dict]]:  # fmt: skip
    """Train `model` on --own, by the loss of its documents; `options` tell it from another training
    in the same --out. Which of them count, `labelled` says. Returns the run, and the documents to
    measure by."""
    own, measured = (
        labelled(rows, args.context, purpose, first, words)
        for rows, purpose in zip(read_training(args.own, target, tokenizer), PURPOSES)
    )
    text = digest([[row["prompt"], row["tokens"]] for row in own])
    what = {"target": weights_digest(target), "text": text, "options": options}
    documents = Documents.of(own, target, args.context, args.dtype)
    batch = shuffled(len(own), args.rows, args.seed)
    return train(model, what, loss(documents), batch, args, optimizers), measured
