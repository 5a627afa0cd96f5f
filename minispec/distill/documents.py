"""The training data of drafts and heads: generated documents and the target's hidden states."""

import argparse
import hashlib
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec import distributed
from minispec.checkpoints.heads import load_vocabulary, save_vocabulary
from minispec.checkpoints.load import load, require_tokenizer
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError, note
from minispec.distill.generated import read_split
from minispec.generate.drafters import find_drafter, load_drafter
from minispec.methods.vocabulary import Subset
from minispec.model import Transformer
from minispec.training.loop import Batch, digest, train, write_card

ROWS_PER_PASS = 32  # on a GPU


def load_target(args: argparse.Namespace, dtype: str = "float32") -> tuple[Transformer, Tokenizer]:
    """Load --model and its tokenizer, which distillation needs."""
    model, tokenizer = load(args.model, dtype, args.device)
    return model, require_tokenizer(tokenizer, model.source)


def weights_digest(model: Transformer) -> str:
    """A hash of everything that determines the model's output: its config and weights."""
    arrays = [p.detach().cpu().contiguous().view(torch.uint8).numpy() for p in model.parameters()]
    return digest([str(asdict(model.config)), [hashlib.sha256(a).hexdigest() for a in arrays]])


def load_for_measuring(
    args: argparse.Namespace, kind: str, dtype: str = "float32"
) -> tuple[Transformer, Path, dict, list[dict]]:
    """The target, the folder of --heads, the heads (of this `kind`, see load_drafter) as arguments
    of a method, and the documents of --generated that training would hold out."""
    target, tokenizer = load_target(args, dtype)
    found = args.heads or find_drafter(kind, target)
    if found is None:
        raise UserError(f"there is no folder {kind} next to {target.source}; use --heads")
    if not (folder := Path(found)).is_dir():
        raise UserError(f"--heads {folder}: must be a directory, to save the result in")
    drafter = load_drafter(kind, target, tokenizer, folder)
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
def hidden_states(
    target: Transformer, rows: list[list[int]], rows_per_pass: int | None = None,
    feature_layers: tuple[int, ...] = (),
) -> Iterator[Tensor]:  # fmt: skip
    """Yield the target's hidden states (n, d), on the host, for each row of n tokens, followed by
    those that enter `feature_layers`. By default, a GPU computes ROWS_PER_PASS padded rows at once,
    a CPU a single one."""
    rows_per_pass = rows_per_pass or (ROWS_PER_PASS if target.device.type == "cuda" else 1)
    for start in range(0, len(rows), rows_per_pass):
        batch = rows[start : start + rows_per_pass]
        padded = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in batch], batch_first=True)
        states = target(padded, feature_layers=feature_layers).cpu()
        for row, hidden in zip(batch, states):
            yield hidden[: len(row)]


class Documents:
    """Complete documents. `tokens` (D, T) are padded on the right; `lengths` and `prompts` (D,)
    count those of each document and of its prompt; `hidden` are the target's hidden states (n, d)
    for each, or None if they have not been needed yet or did not fit in memory."""

    def __init__(
        self, rows: list[list[int]], prompts: list[int], states: Iterable[Tensor | None],
        compute: Callable[[list[list[int]]], Iterable[Tensor]] | None = None,
    ):  # fmt: skip
        self.rows, self.hidden, self.compute = rows, list(states), compute
        self.free_bytes = psutil.virtual_memory().available // (2 * distributed.world.size)
        self.tokens = nn.utils.rnn.pad_sequence(list(map(torch.tensor, rows)), batch_first=True)
        self.prompts = torch.tensor(prompts)
        self.lengths = torch.tensor([len(row) for row in rows])

    @classmethod
    def from_rows(
        cls, generated: list[dict], target: Transformer, context: int, dtype: torch.dtype,
        feature_layers: tuple[int, ...] = (),
    ) -> "Documents":  # fmt: skip
        """Build from documents of `read_split`, cut to `context`; the target runs in `dtype`."""
        prompts = [len(row["prompt"]) for row in generated]
        target = target if target.dtype == dtype else deepcopy(target).to(dtype)
        compute = partial(hidden_states, target, feature_layers=feature_layers)
        return cls(texts_of(generated, context), prompts, [None] * len(generated), compute)

    def labels(self, index: Tensor, k: int, n: int | None = None) -> Tensor:
        """Step k's labels (B, n), where n is T - 2 by default: at position i token i + k + 1 if it
        was generated, otherwise -100."""
        at = torch.arange(n or self.tokens.shape[1] - 2) + k + 1  # (n,)
        tokens = F.pad(self.tokens[index], (0, k))[:, k + 1 :][:, : len(at)]
        real = (at < self.lengths[index, None]) & (at >= self.prompts[index, None])
        return tokens.where(real, -100)

    def states(self, index: Tensor, n: int) -> Tensor:
        """The first `n` hidden states of each document, (B, n, d), zero-padded past its end. A
        document's are computed in float16, or in bfloat16 if they are too large, as those inside a
        model can be. They are kept if they fit in half of the memory that was free."""
        indices = index.tolist()
        found = {i: self.hidden[i] for i in indices}
        if missing := [i for i, hidden in found.items() if hidden is None]:
            for i, hidden in zip(missing, self.compute([self.rows[i] for i in missing])):
                too_large = hidden.abs().max() > torch.finfo(torch.float16).max
                found[i] = hidden.bfloat16() if too_large else hidden.half()
                self.free_bytes -= found[i].nbytes
                if self.free_bytes >= 0:
                    self.hidden[i] = found[i]
        states = [found[i][:n].float() for i in indices]
        return torch.stack([F.pad(hidden, (0, 0, 0, n - len(hidden))) for hidden in states])

    def gather(
        self, index: Tensor, steps: int, device: torch.device
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The target's hidden states (B, T - 2 + steps, d), tokens (B, T + steps) and the labels
        (B, T - 2) of steps 1 to `steps`."""
        tokens = F.pad(self.tokens[index], (0, steps)).to(device)
        labels = [self.labels(index, k + 1).to(device) for k in range(steps)]
        return self.states(index, labels[0].shape[1] + steps).to(device), tokens, labels


def shuffled_batches(count: int, rows: int, seed: int) -> Batch:
    """A function from a step to `rows` indices below `count`, reshuffled every epoch. No batch
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
    rows: list[dict], context: int, purpose: str, vocabulary: Subset | None = None
) -> list[dict]:
    """The documents with a label in their first `context` tokens: a generated token, in the
    `vocabulary` if there is one, at index 2 or later (heads cannot predict earlier tokens). A note
    counts the others. Raises UserError if none is left for the `purpose`."""
    known = set(vocabulary.host_ids.tolist()) if vocabulary else range(2**31)
    labels = [(row["prompt"] + row["tokens"])[max(2, len(row["prompt"])) : context] for row in rows]
    kept = [row for row, tokens in zip(rows, labels) if any(token in known for token in tokens)]
    why = (f"the prompt fills the context of {context} tokens, the text is too short, or no "
           "generated token is in the vocabulary")  # fmt: skip
    if not kept:
        raise UserError(f"the documents of --generated have nothing to {purpose}: {why}")
    if len(kept) < len(rows):
        note(f"skipped {len(rows) - len(kept)} of {len(rows)} documents, which have nothing to "
             f"{purpose}: {why}")  # fmt: skip
    return kept


def train_on_generated(
    args: argparse.Namespace, target: Transformer, tokenizer: Tokenizer, model: nn.Module,
    loss: Callable[[Documents], Callable], options: str,
    finish: Callable[[list[dict]], tuple[str, str, str]],
    optimizers: list[torch.optim.Optimizer] | None = None, vocabulary: Subset | None = None,
) -> None:  # fmt: skip
    """Train `model` on the documents of --generated that `select_labelled` keeps, and round it to
    float16, as it is stored. `loss` builds the loss from them; `options` becomes part of the run's
    identity. On rank 0, `finish` then measures the model on the held-out documents and saves it; it
    returns the title, the text and the table of the card."""
    with distributed.together():
        training, held_out = read_split(args.generated, target, tokenizer)
        training = select_labelled(training, args.context, "train on", vocabulary)
        held_out = select_labelled(held_out, args.context, "measure on", vocabulary)
        if len(training) < distributed.world.size:
            raise UserError(f"the {len(training)} documents to train on are too few for "
                            f"{distributed.world.size} processes")  # fmt: skip
    text = digest([[row["prompt"], row["tokens"]] for row in training])
    labels = digest(vocabulary.host_ids.tolist()) if vocabulary else "all"
    identity = {"target": weights_digest(target), "text": text, "options": f"{options} {labels}"}
    layers = getattr(model, "feature_layers", ())
    documents = Documents.from_rows(training, target, args.context, args.dtype, layers)
    batch = shuffled_batches(len(training), args.rows, args.seed)
    run = train(model.requires_grad_(True), identity, loss(documents), batch, args, optimizers)
    model.half().float()
    if distributed.world.rank == 0:
        write_card(args, run, *finish(held_out))
