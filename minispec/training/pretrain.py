"""Train a small model on text.

    python -m minispec pretrain --data stories.txt dialogues.jsonl --out target --steps 3000

The loss is next-token cross-entropy over packed documents. Muon trains the matrices, AdamW the
rest, on a cosine schedule. A run restarted with the same --out resumes where it stopped. Under
`torchrun`, each process takes its share of every batch. `training/text.py` lists the file formats.
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
from torch import Tensor

from minispec import distributed
from minispec.checkpoints.load import read_tokenizer, save
from minispec.checkpoints.tokenizer import Tokenizer, read_backend
from minispec.cli import Parser, command, number
from minispec.generate import decode
from minispec.model import Transformer, count_parameters
from minispec.training import loop
from minispec.training.new_model import new_model, size_arguments
from minispec.training.text import END, Corpus, Document, plain_text, read_corpus

END_TURN = "<|end|>"
SPECIAL_TOKENS = [END, "<|user|>", "<|assistant|>", END_TURN]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(corpus: Corpus, size: int) -> BPE:
    """Train a byte-level BPE tokenizer of `size` tokens. Each digit is a token of its own."""
    bpe = BPE(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL_TOKENS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    texts = (plain_text(document) for documents in corpus.values() for document in documents)
    bpe.train_from_iterator(texts, trainer)
    return bpe


def choose_tokenizer(args: argparse.Namespace, corpus: Corpus) -> Tokenizer:
    """The tokenizer of --tokenizer or --init, or else a new one, identical in every process; END
    starts every text, and the roles have tokens."""
    if args.tokenizer:
        bpe = read_backend(args.tokenizer)
    elif args.init:
        bpe = read_tokenizer(args.init).backend
    else:
        bpe = train_tokenizer(corpus, args.vocab)
    bpe.no_padding()
    bpe.no_truncation()
    bpe.add_special_tokens(SPECIAL_TOKENS)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, bpe.token_to_id(END))]
    )
    return Tokenizer(bpe, {"bos_token": END, "eos_token": END}, CHAT_TEMPLATE)


def tokenize(tokenizer: Tokenizer, documents: list[Document]) -> list[np.ndarray]:
    """Token ids: a leading END, which also ends the document before it in a batch, then a text, or
    a conversation in CHAT_TEMPLATE's format."""
    turns = ([f"<|{t['role']}|>{t['content']}{END_TURN}" for t in d] if isinstance(d, list) else d
             for d in documents)  # fmt: skip
    return [np.array(tokenizer.encode("".join(parts)), np.int32) for parts in turns]


def packed_batches(documents: list[np.ndarray], rows: int, context: int, seed: int) -> loop.Batch:
    """Batches (rows, context + 1) of documents packed end to end, reshuffled every epoch. A row's
    last token is only a label; it is also the first token of the next row."""
    size, n = sum(map(len, documents)), rows * context

    @functools.lru_cache(1)
    def stream(epoch: int) -> np.ndarray:
        order = np.random.default_rng([seed, epoch]).permutation(len(documents))
        tokens = np.concatenate([documents[i] for i in order])
        return np.resize(tokens, max(size, n + 1))  # repeats a text shorter than a batch

    def batch(step: int) -> Tensor:
        epoch, i = divmod(step, max((size - 1) // n, 1))
        tokens = torch.from_numpy(stream(epoch)[i * n : i * n + n + 1])
        return tokens.long().unfold(0, context + 1, context)

    return batch


def next_token_loss(model: Transformer, rows: Tensor) -> Tensor:
    """Mean cross-entropy of rows (B, T + 1), in nats; with several processes, this one's share."""
    logits = model.logits(model(rows[:, :-1]))
    labels = rows[:, 1:].to(logits.device)
    mean = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
    return mean / distributed.world.size


@torch.no_grad()
def bits_per_byte(model: Transformer, tokenizer: Tokenizer, documents: list[Document]) -> float:
    """Cross-entropy of documents, cut to the context, and their ends, in bits per byte of text."""
    bits = size = 0
    for ids in tokenize(tokenizer, documents):
        row = torch.from_numpy(ids).long().to(model.device)
        row = torch.cat([row, row[:1]])[: model.config.context + 1]
        logits = model.logits(model(row[None, :-1]))[0].float()
        bits += float(F.cross_entropy(logits, row[1:], reduction="sum"))
        size += len(tokenizer.decode(row.tolist()).encode())
    return bits / math.log(2) / max(size, 1)


def distinct_4grams(tokens: list[int]) -> float:
    """The share of distinct 4-grams. Looping text has few, and makes any draft look good."""
    grams = list(zip(*(tokens[i:] for i in range(4))))
    return len(set(grams)) / max(1, len(grams))


def finish(
    args: argparse.Namespace, run: loop.TrainingRun, tokenizer: Tokenizer,
    tokens: dict[str, list[np.ndarray]], held_out: Corpus,
) -> None:  # fmt: skip
    """Write the model and its card. `tokens` are those of the documents of each kind."""
    model = run.model
    save(model, tokenizer, args.out, torch.float16)
    model.half().float()  # round to float16, as stored
    sample = decode(model, tokenizer, tokenizer.encode(""), max_new_tokens=120).tokens
    sizes = ", ".join(f"{kind} {sum(map(len, rows)):,}" for kind, rows in tokens.items())
    measured = (
        f"Tokens of text: {sizes}.\n\nA greedy sample, of whose 4-grams "
        f"{distinct_4grams(sample):.2f} are distinct: {tokenizer.decode(sample)!r}"
    )
    bits = {k: [bits_per_byte(model, tokenizer, texts)] for k, texts in held_out.items() if texts}
    table = loop.markdown_table("kind", ["held-out bits per byte"], bits)
    title = f"A model of {count_parameters(model):,} parameters"
    loop.write_card(args, run, title, measured, table)


@command
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    p = Parser(prog="python -m minispec pretrain", description=__doc__)
    p.add_argument("--data", type=Path, nargs="+", required=True, metavar="PATH",
                   help="text files or folders (see training/text.py)")  # fmt: skip
    p.add_argument("--tokenizer", type=Path, help="a tokenizer.json to use instead of a new one")
    loop.add_flags(p, ("vocab", number(260, 2**20), 4096, "size of a new tokenizer"))
    size_arguments(p, layers=6, width=192, heads=3, ffn=512)
    loop.training_arguments(p, steps=2000, context=256, lr=4e-3)
    distributed.join()
    with distributed.together():
        args = p.parse_args(argv)
    with loop.training_setup(args, ["pretrain", *argv]):
        with distributed.together():
            corpus, held_out = read_corpus(args.data)
        tokenizer = choose_tokenizer(args, corpus)
        eos_ids = tuple(map(tokenizer.backend.token_to_id, (END, END_TURN)))
        config = {"vocab_size": tokenizer.size, "bos_id": eos_ids[0], "eos_ids": eos_ids}
        model = new_model(args, tokenizer, **config)
        tokens = {name: tokenize(tokenizer, documents) for name, documents in corpus.items()}
        identity = {"data": loop.digest(corpus), "tokenizer": tokenizer.hash_without(set()),
                    "model": str(model.config)}  # fmt: skip
        batch = packed_batches(sum(tokens.values(), []), args.rows, args.context, args.seed)
        run = loop.train(model, identity, functools.partial(next_token_loss, model), batch, args)
        if distributed.world.rank == 0:
            finish(args, run, tokenizer, tokens, held_out)


if __name__ == "__main__":
    main()
