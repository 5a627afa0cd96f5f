"""The training data of drafts and heads: generated documents and the target's hidden states."""

import argparse
import glob
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from minispec import distributed
from minispec.checkpoints.heads import load_vocabulary, save_vocabulary
from minispec.checkpoints.load import load, require_tokenizer
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.checkpoints.weights import atomic_write
from minispec.cli import UserError, check_writable, note
from minispec.distill.own_text import read_generated, read_split
from minispec.generate.drafters import find_drafter, load_drafter
from minispec.methods.vocabulary import Subset
from minispec.model import Transformer
from minispec.training.loop import Batch, TrainingRun, digest, train

GPU_TOKENS_PER_PASS = 2**15  # including padding
DOCUMENTS_PER_SHARE = 64  # computed by a process before each exchange


def load_target(args: argparse.Namespace, dtype: str = "float32") -> tuple[Transformer, Tokenizer]:
    """Load --model and its tokenizer, which distillation needs."""
    model, tokenizer = load(args.model, dtype, args.device)
    return model, require_tokenizer(tokenizer, model.source)


def weights_digest(model: Transformer) -> str:
    """A hash of everything that determines the model's output: its config and weights."""
    arrays = [p.detach().cpu().contiguous().view(torch.uint8).numpy() for p in model.parameters()]
    return digest([str(asdict(model.config)), [hashlib.sha256(a).hexdigest() for a in arrays]])


def load_for_measuring(
    args: argparse.Namespace, method: str, dtype: str = "float32"
) -> tuple[Transformer, Path, dict, list[dict]]:
    """The target, the folder of --heads, the heads as arguments of `method`, and the documents of
    --generated that training on them would hold out."""
    target, tokenizer = load_target(args, dtype)
    folder = Path(args.heads or find_drafter(method, target))
    if not folder.is_dir():
        raise UserError(f"--heads {folder}: must be a directory, to save the result in")
    drafter = load_drafter(method, target, tokenizer, folder)
    held_out = read_split(args.generated, target, tokenizer)[1]
    return target, folder, drafter, select_labelled(held_out, target.config.context, "measure on")


def texts_of(rows: list[dict], context: int) -> list[list[int]]:
    """The tokens of documents, prompts included, cut to `context`."""
    return [(row["prompt"] + row["tokens"])[:context] for row in rows]


def store_vocabulary(args: argparse.Namespace, target: Transformer, tokenizer: Tokenizer) -> None:
    """Save the vocabulary that heads were trained on next to them, so that they draft from it. If
    they were trained on all tokens, remove any older file."""
    file = args.out / "vocabulary.json"
    if args.vocabulary:
        languages = load_vocabulary(args.vocabulary, target, tokenizer).languages
        save_vocabulary(languages, tokenizer, file)
    else:
        file.unlink(missing_ok=True)


@torch.no_grad()
def cached_states(
    path: Path, target: Transformer, context: int, dtype: torch.dtype, weights: str
) -> list[Tensor]:
    """The target's hidden states (n, d), in float16, for each document of a `generate` file, cut to
    `context` tokens. `weights` is the target's digest.

    A file next to it caches them and is mapped to memory. Its name holds a digest of the settings
    and one of the text; the file of an older text is deleted.
    """
    rows = texts_of(read_generated(path)[1], context)
    prefix = f"{path.name}.{digest([weights, context, str(dtype)])[:8]}"
    file = path.with_name(f"{prefix}.{digest(rows)}.hidden")
    if not distributed.all_gather(file.exists())[0]:
        with distributed.together():
            if distributed.world.rank == 0:
                check_writable(file, "the hidden states of --generated")
                for old in path.parent.glob(f"{glob.escape(prefix)}.*.hidden"):
                    old.unlink()
        states = shared_states(target, rows, dtype)
        if distributed.world.rank == 0:
            with atomic_write(file) as part, part.open("wb") as out:
                out.writelines(hidden.numpy().tobytes() for hidden in states)
        else:
            list(states)  # yields nothing; rank 0 gets this process's share
        distributed.all_gather(None)  # the file is complete
    lengths, size = list(map(len, rows)), target.config.hidden_size
    flat = torch.from_file(str(file), size=sum(lengths) * size, dtype=torch.float16)  # lazily
    return list(flat.view(-1, size).split(lengths))


def shared_states(
    target: Transformer, rows: list[list[int]], dtype: torch.dtype
) -> Iterator[Tensor]:
    """`hidden_states` in float16. Each process computes a share; rank 0 yields all in order."""
    rank, size = distributed.world.rank, distributed.world.size
    step = size * DOCUMENTS_PER_SHARE
    for start in tqdm(range(0, len(rows), step), "hidden states"):
        own = rows[start : start + step][rank::size]
        shares = distributed.gather([states.half() for states in hidden_states(target, own, dtype)])
        for of_round in zip_longest(*shares):
            yield from (states for states in of_round if states is not None)


@torch.no_grad()
def hidden_states(
    target: Transformer, rows: Iterable[list[int]], dtype: torch.dtype,
    max_tokens: int | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Yield the target's hidden states (n, d), on the host, for each row of n tokens. Rows share a
    pass of up to `max_tokens` tokens with padding; the default is one row per pass on a CPU."""
    if max_tokens is None:
        max_tokens = GPU_TOKENS_PER_PASS if target.device.type == "cuda" else 0
    for batch in batches(rows, max_tokens):
        padded = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in batch], batch_first=True)
        with torch.autocast(target.device.type, dtype, enabled=dtype != torch.float32):
            states = target(padded).to("cpu", dtype)
        for row, hidden in zip(batch, states):
            yield hidden[: len(row)]


def batches(rows: Iterable[list[int]], max_tokens: int) -> Iterator[list[list[int]]]:
    """Group consecutive rows into batches of one row or up to `max_tokens` tokens with padding."""
    batch: list[list[int]] = []
    for row in rows:
        if batch and (len(batch) + 1) * max(map(len, [*batch, row])) > max_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


class Documents:
    """Complete documents. `tokens` (D, T) are padded on the right; `lengths` and `prompts` (D,) are
    the number of tokens in each document and in its prompt; `hidden` are the target's hidden states
    (n, d) for each."""

    def __init__(self, rows: list[list[int]], prompts: list[int], states: list[Tensor]):
        pad = nn.utils.rnn.pad_sequence
        self.tokens = pad([torch.tensor(row) for row in rows], batch_first=True)
        self.hidden = list(states)
        self.prompts = torch.tensor(prompts)
        self.lengths = torch.tensor([len(row) for row in rows])

    @classmethod
    def from_rows(
        cls, generated: list[dict], target: Transformer, context: int, dtype: torch.dtype
    ) -> "Documents":
        """Build from documents of `read_split`, cut to `context` tokens."""
        locations = [row["location"] for row in generated]
        # in the order of --generated, since all processes must take the files in the same order
        files, weights = dict.fromkeys(path for path, _ in locations), weights_digest(target)
        cached = {path: cached_states(path, target, context, dtype, weights) for path in files}
        states = [cached[path][i] for path, i in locations]
        return cls(texts_of(generated, context), [len(row["prompt"]) for row in generated], states)

    def labels(self, index: Tensor, k: int, n: int | None = None) -> Tensor:
        """Step k's labels (B, n), where n is T - 2 by default: at position i token i + k + 1 if it
        was generated, otherwise -100."""
        at = torch.arange(n or self.tokens.shape[1] - 2) + k + 1  # (n,)
        tokens = F.pad(self.tokens[index], (0, k))[:, k + 1 :][:, : len(at)]
        real = (at < self.lengths[index, None]) & (at >= self.prompts[index, None])
        return tokens.where(real, -100)

    def states(self, index: Tensor, n: int) -> Tensor:
        """The first `n` hidden states of each document, (B, n, d), zero-padded past its end."""
        states = [self.hidden[i][:n] for i in index.tolist()]
        padded = torch.stack([F.pad(hidden, (0, 0, 0, n - len(hidden))) for hidden in states])
        return padded.to(torch.float32)


def shuffled_batches(count: int, rows: int, seed: int) -> Batch:
    """A function that maps a step to `rows` indices below `count`, reshuffled every epoch. No batch
    spans two epochs."""

    def batch(step: int) -> Tensor:
        epoch, i = divmod(step, max(count // rows, 1))
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))
        return order[i * rows : (i + 1) * rows]

    return batch


def cross_entropy(logits: Tensor, labels: Tensor, p: Tensor | None = None) -> Tensor:
    """Mean cross-entropy over the rows with a label; 0 if there are none. If distributions `p`
    (n, V) are given, all rows must have one, and are compared with `p` instead. With several
    processes, this one's share of it."""
    count = distributed.all_reduce((labels >= 0).sum()).clamp(min=1)
    expected = labels if p is None else p
    return F.cross_entropy(logits.float(), expected, reduction="sum") / count


def select_labelled(
    rows: list[dict], context: int, purpose: str, first: int = 2, vocabulary: Subset | None = None
) -> list[dict]:
    """The documents with a label in their first `context` tokens: a generated token, in the
    `vocabulary` if there is one, at index `first` or later (heads cannot predict earlier tokens). A
    note counts the documents skipped. Raises UserError if none is left for the `purpose`."""
    kept, skipped, known = [], Counter(), set(vocabulary.host_ids.tolist()) if vocabulary else None
    for row in rows:
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
        raise UserError(f"the documents of --generated have nothing to {purpose}: {why}")
    if skipped:
        note(f"skipped {skipped.total()} of {len(rows)} documents, which have nothing to {purpose}"
             f": {why}")  # fmt: skip
    return kept


def train_on_generated(
    args: argparse.Namespace, target: Transformer, tokenizer: Tokenizer, model: nn.Module,
    loss: Callable[[Documents], Callable], options: str,
    optimizers: list[torch.optim.Optimizer] | None = None, first: int = 2,
    vocabulary: Subset | None = None,
) -> tuple[TrainingRun, list[dict]]:  # fmt: skip
    """Train `model` on the documents of --generated that `select_labelled` keeps. `loss` builds the
    loss from them; `options` becomes part of the run's identity. Returns the run and the held-out
    documents."""
    with distributed.together():
        training, held_out = read_split(args.generated, target, tokenizer)
        training = select_labelled(training, args.context, "train on", first, vocabulary)
        held_out = select_labelled(held_out, args.context, "measure on", first, vocabulary)
        if len(training) < distributed.world.size:
            raise UserError(f"the {len(training)} documents to train on are too few for "
                            f"{distributed.world.size} processes")  # fmt: skip
    text = digest([[row["prompt"], row["tokens"]] for row in training])
    labels = digest(vocabulary.host_ids.tolist()) if vocabulary else "all"
    identity = {"target": weights_digest(target), "text": text, "options": f"{options} {labels}"}
    documents = Documents.from_rows(training, target, args.context, args.dtype)
    batch = shuffled_batches(len(training), args.rows, args.seed)
    return train(model, identity, loss(documents), batch, args, optimizers), held_out
