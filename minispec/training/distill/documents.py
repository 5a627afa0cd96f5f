"""What drafts and heads learn from: the target's own documents and its hidden states."""

import argparse
import hashlib
import os
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import IO

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from minispec.checkpoints.heads import load_vocabulary, save_vocabulary
from minispec.checkpoints.load import load, needed
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.errors import UserError, check_writable, note
from minispec.methods.vocabulary import Subset
from minispec.model import Transformer
from minispec.training.loop import Batch, Training, digest, lock, train
from minispec.training.own_text import read_own, read_training

HALF = torch.float16
TOGETHER = 2**15  # tokens that a GPU passes through the target at once
PURPOSES = "learn from", "measure by"  # of documents


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
