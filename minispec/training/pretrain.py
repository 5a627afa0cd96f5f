"""Train a small model from text.

    python -m minispec.pretrain --data stories.txt dialogues.jsonl --out target --steps 3000

Next-token cross-entropy over packed documents; Muon for the matrices, AdamW for the rest; a cosine
schedule. A run started again with the same --out goes on where it stopped. Under `torchrun` each
process takes its share of every batch. What --data may hold is written in `minispec.text`.
"""

import argparse
import functools
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer as BPE
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

from minispec.checkpoints.load import read_tokenizer, save
from minispec.checkpoints.tokenizer import Tokenizer, read_backend
from minispec.errors import Parser, command, number
from minispec.generate import decode
from minispec.model import Transformer, count_parameters
from minispec.training.loop import (
    Batch,
    Training,
    digest,
    markdown,
    prepared,
    processes,
    train,
    training_arguments,
    write_card,
)
from minispec.training.new_model import new_model, size_arguments
from minispec.training.text import END, Document, Kinds, plain, read_corpus

USER, ASSISTANT, END_TURN = "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(kinds: Kinds, size: int) -> BPE:
    """A byte-level BPE of `size` tokens, each digit one of them."""
    bpe = BPE(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END, USER, ASSISTANT, END_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (plain(document) for documents in kinds.values() for document in documents)
    bpe.train_from_iterator(texts, trainer)
    return bpe


def complete(bpe: BPE) -> Tokenizer:
    """A tokenizer with what a model trained here needs: END begins every text, roles are tokens."""
    bpe.no_padding()
    bpe.no_truncation()
    bpe.add_special_tokens([END, USER, ASSISTANT, END_TURN])
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, bpe.token_to_id(END))]
    )
    return Tokenizer(bpe, {"bos_token": END, "eos_token": END}, CHAT_TEMPLATE)


def marked(document: Document) -> str:
    """A conversation as CHAT_TEMPLATE writes it."""
    if isinstance(document, str):
        return document
    return "".join(f"<|{each['role']}|>{each['content']}{END_TURN}" for each in document)


def tokenize(tokenizer: Tokenizer, documents: list[Document]) -> list[np.ndarray]:
    """Each document with its leading END; a document of the next follows in the packed stream."""
    return [np.array(tokenizer.encode(marked(each)), np.int32) for each in documents]


def packed(documents: list[np.ndarray], rows: int, context: int, seed: int) -> Batch:
    """The documents packed end to end, in another order every epoch, as each step's tokens (rows,
    context + 1): a row's last one, a label, is the first of the next row."""
    size, n = sum(map(len, documents)), rows * context

    @functools.lru_cache(1)
    def stream(epoch: int) -> np.ndarray:
        order = np.random.default_rng([seed, epoch]).permutation(len(documents))
        tokens = np.concatenate([documents[i] for i in order])
        return np.resize(tokens, max(size, n + 1))  # a small text repeats itself

    def batch(step: int) -> Tensor:
        epoch, i = divmod(step, max((size - 1) // n, 1))
        tokens = torch.from_numpy(stream(epoch)[i * n : i * n + n + 1])
        return tokens.long().unfold(0, context + 1, context)

    return batch


class NextToken(nn.Module):
    """rows (B, T + 1) -> mean cross-entropy in nats."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.transformer = model

    def forward(self, rows: Tensor) -> Tensor:
        logits = self.transformer.logits(self.transformer(rows[:, :-1]))
        labels = rows[:, 1:].to(logits.device)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


@torch.no_grad()
def bits_per_byte(model: Transformer, tokenizer: Tokenizer, documents: list[Document]) -> float:
    """Bits to code the documents and their ends, cut to the context, over the bytes of text."""
    bits = size = 0
    for ids in tokenize(tokenizer, documents):
        row = torch.from_numpy(ids).long().to(model.device)
        row = torch.cat([row, row[:1]])[: model.config.context + 1]
        logits = model.logits(model(row[None, :-1]))[0].float()
        bits += float(F.cross_entropy(logits, row[1:], reduction="sum"))
        size += len(tokenizer.decode(row.tolist()).encode())
    return bits / math.log(2) / max(size, 1)


def distinct_4grams(tokens: list[int]) -> float:
    """Share of different ones among the 4-grams: few in a loop, which flatters every draft."""
    grams = list(zip(*(tokens[i:] for i in range(4))))
    return len(set(grams)) / max(1, len(grams))


def choose_tokenizer(args: argparse.Namespace, kinds: Kinds) -> Tokenizer:
    """That of --tokenizer or of --init, else a new one, which is the same in every process."""
    if args.tokenizer:
        return complete(read_backend(args.tokenizer))
    if args.init:
        return complete(read_tokenizer(args.init).backend)
    return complete(train_tokenizer(kinds, args.vocab))


def finish(
    run: Training, tokenizer: Tokenizer, sizes: dict[str, int], held_out: Kinds,
    args: argparse.Namespace,
) -> None:  # fmt: skip
    """Write the checkpoint directory and its card; `sizes` are the tokens of each kind."""
    model, c = run.model, run.model.config
    save(model, tokenizer, args.out, torch.float16)
    model.half().float()  # as it is stored
    said = decode(model, tokenizer, tokenizer.encode(""), max_new_tokens=120).tokens
    facts = {
        "sizes": f"{c.layers} layers of width {c.hidden_size}, {c.heads} heads ({c.kv_heads} for "
                 f"keys and values), vocabulary {c.vocab_size}, context {c.context}",
        "text, in tokens": ", ".join(f"{kind} {n:,}" for kind, n in sizes.items()),
        "a greedy sample": repr(tokenizer.decode(said)),
        "its distinct 4-grams": f"{distinct_4grams(said):.2f}",
    }  # fmt: skip
    measured = {kind: each for kind, each in held_out.items() if each}
    bits = {kind: [bits_per_byte(model, tokenizer, each)] for kind, each in measured.items()}
    table = markdown("kind", ["held-out bits per byte"], bits)
    write_card(args, run, f"A model of {count_parameters(model):,} parameters", facts, table)


@command
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    p = Parser(prog="python -m minispec.pretrain", description=__doc__)
    p.add_argument("--data", type=Path, nargs="+", required=True, metavar="PATH",
                   help="texts: files or folders (see text.py)")  # fmt: skip
    p.add_argument("--tokenizer", type=Path, help="a tokenizer.json to use instead of a new one")
    p.add_argument("--vocab", type=number(260, 2**20), default=4096,
                   help="tokens of a new tokenizer (default: %(default)s)")  # fmt: skip
    size_arguments(p, layers=6, width=192, heads=3, ffn=512)
    training_arguments(p, steps=2000, context=256, lr=4e-3)
    args = p.parse_args(argv)
    with prepared(args, ["pretrain", *argv]), processes(args) as rank:
        kinds, held_out = read_corpus(args.data)
        tokenizer = choose_tokenizer(args, kinds)
        ends = tuple(map(tokenizer.backend.token_to_id, (END, END_TURN)))
        model = new_model(args, tokenizer, vocab_size=tokenizer.size, bos_id=ends[0], eos_ids=ends)
        ids = {kind: tokenize(tokenizer, documents) for kind, documents in kinds.items()}
        what = {
            "data": digest(kinds),
            "tokenizer": tokenizer.fingerprint,
            "model": str(model.config),
        }
        batch = packed(sum(ids.values(), []), args.rows, args.context, args.seed)
        run = train(model, what, NextToken(model), batch, args)
        if rank == 0:
            sizes = {kind: sum(map(len, each)) for kind, each in ids.items()}
            finish(run, tokenizer, sizes, held_out, args)


if __name__ == "__main__":
    main()
