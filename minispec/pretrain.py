"""Train a small model from text.

    python -m minispec.pretrain --data stories.txt dialogues.jsonl --out target --steps 3000

Next-token cross-entropy over packed documents; Muon for the matrices, AdamW for the rest; a cosine
schedule. Everything random follows from `--seed` and the number of tokens seen, so a run started
again with the same --out goes on from its checkpoint exactly as if it had not stopped. It may go on
with other --steps or another --context: short rows first train faster. Under `torchrun` each
process takes its share of every batch. What --data may hold is written in `minispec.text`.
"""

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer as BPE
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

from minispec.checkpoint import check_fingerprint, load, read_tokenizer, save
from minispec.errors import Parser, UserError, command, number
from minispec.generate import decode
from minispec.model import Config, Transformer, count_parameters
from minispec.text import END, Document, Kinds, plain, read_corpus
from minispec.tokenizer import Tokenizer, call, read_backend
from minispec.training import (
    Run,
    markdown,
    muon_and_adamw,
    prepare,
    processes,
    read_checkpoint,
    size_arguments,
    train,
    training_arguments,
    write_card,
)

USER, ASSISTANT, END_TURN = "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


# ---- tokens --------------------------------------------------------------------------------------


def train_tokenizer(kinds: Kinds, size: int, most: int = 2_500_000) -> BPE:
    """A byte-level BPE of `size` tokens from at most `most` characters of every kind."""
    bpe = BPE(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END, USER, ASSISTANT, END_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def sample() -> Iterator[str]:
        for documents in kinds.values():
            left = most
            for text in map(plain, documents):
                if left > 0:
                    yield text[:left]
                left -= len(text)

    bpe.train_from_iterator(sample(), trainer)
    return bpe


def complete(bpe: BPE) -> Tokenizer:
    """A tokenizer with what a model trained here needs: END begins every text, roles are tokens."""
    bpe.no_padding()
    bpe.no_truncation()
    bpe.add_special_tokens([END, USER, ASSISTANT, END_TURN])
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, bpe.token_to_id(END))]
    )
    return Tokenizer(bpe, END, END, CHAT_TEMPLATE)


def marked(document: Document) -> str:
    """A conversation as CHAT_TEMPLATE writes it."""
    if isinstance(document, str):
        return document
    return "".join(f"<|{each['role']}|>{each['content']}{END_TURN}" for each in document)


def tokenize(tokenizer: Tokenizer, documents: list[Document]) -> Iterator[np.ndarray]:
    """Each document with its leading END; a document of the next follows in the packed stream."""
    for start in range(0, len(documents), 1000):
        texts = list(map(marked, documents[start : start + 1000]))
        encoded = call("the tokenizer fails at a text", tokenizer.backend.encode_batch, texts)
        yield from (np.array(each.ids, np.int32) for each in encoded)


class Stream:
    """Documents packed end to end, in another order every epoch."""

    def __init__(self, documents: list[np.ndarray], seed: int):
        self.documents, self.seed, self.epoch = documents, seed, -1
        self.size = sum(map(len, self.documents))

    def take(self, seen: int, rows: int, context: int) -> Tensor:
        """The tokens (rows, context + 1) after the first `seen`; each row's last one, a label, is
        the first of the next row."""
        parts, n = [], rows * context + 1
        while n > 0:
            epoch, offset = divmod(seen, self.size)
            if epoch != self.epoch:
                order = np.random.default_rng([self.seed, epoch]).permutation(len(self.documents))
                self.epoch = epoch
                self.tokens = np.concatenate([self.documents[i] for i in order])
            parts.append(self.tokens[offset : offset + n])
            seen, n = seen + len(parts[-1]), n - len(parts[-1])
        return torch.from_numpy(np.concatenate(parts)).long().unfold(0, context + 1, context)


# ---- the model and its loss ----------------------------------------------------------------------


class NextToken(nn.Module):
    """rows (B, T + 1) -> mean cross-entropy in nats."""

    def __init__(self, model: Transformer, dtype: torch.dtype):
        super().__init__()
        self.transformer, self.dtype = model, dtype

    def forward(self, rows: Tensor) -> Tensor:
        with torch.autocast(rows.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.transformer.logits(self.transformer(rows[:, :-1]))
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def new_model(
    args: argparse.Namespace, tokenizer: Tokenizer, vocabulary: int, bos: int | None,
    eos: tuple[int, ...],
) -> Transformer:  # fmt: skip
    """A model of the command line's sizes: untrained, or with the weights of --init."""
    config = Config(
        hidden_size=args.width, intermediate_size=args.ffn, layers=args.layers, heads=args.heads,
        kv_heads=args.kv_heads, head_dim=args.width // args.heads, vocab_size=vocabulary,
        context=args.context, bos_id=bos, eos_ids=eos,
    )  # fmt: skip
    model = Transformer(config)
    initialise(model, args.seed)
    if args.init:
        theirs, its = load(args.init, "float32", "cpu")
        check_fingerprint(f"--init {args.init}", its.fingerprint if its else None, tokenizer)
        ours = asdict(replace(config, context=theirs.config.context))
        for name, value in asdict(theirs.config).items():
            if value != ours[name]:
                raise UserError(f"--init {args.init}: its {name} is {value}, here it is "
                                f"{ours[name]}: give the same sizes")  # fmt: skip
        model.load_state_dict(theirs.state_dict())
    return model.to(args.device)


def initialise(model: nn.Module, seed: int) -> None:
    """Biases 0; weights normal, of deviation 0.02, or 0.02/√(2·layers) where they write to the
    residual stream."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 0.02
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(2 * model.config.layers)
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std)
        elif name.endswith(".bias"):
            parameter.data.zero_()


@torch.no_grad()
def bits_per_byte(model: Transformer, tokenizer: Tokenizer, documents: list[Document]) -> float:
    """Bits to code the documents, cut to the context, over the bytes of their text. END is coded
    behind those that end inside it."""
    rows = [torch.from_numpy(ids).long() for ids in tokenize(tokenizer, documents)]
    rows = [torch.cat([ids, ids[:1]])[: model.config.context + 1] for ids in rows]
    size = sum(len(tokenizer.decode(ids.tolist()).encode()) for ids in rows)
    rows, bits = sorted(rows, key=len), 0.0
    for start in range(0, len(rows), 8):
        batch = nn.utils.rnn.pad_sequence(rows[start : start + 8], True, -100).to(model.device)
        logits = model.logits(model(batch[:, :-1].clamp(min=0))).float()
        bits += F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
    return float(bits) / math.log(2) / max(size, 1)


def evaluate(model: Transformer, tokenizer: Tokenizer, kinds: Kinds) -> dict[str, float]:
    """Bits per byte of every kind."""
    return {k: round(bits_per_byte(model, tokenizer, d), 4) for k, d in kinds.items() if d}


# ---- the command ---------------------------------------------------------------------------------


def distinct_4grams(tokens: list[int]) -> float:
    """Share of different ones among the 4-grams: few in a loop, which flatters every draft."""
    grams = list(zip(*(tokens[i:] for i in range(4))))
    return len(set(grams)) / max(1, len(grams))


def finish(
    run: Run, tokenizer: Tokenizer, sizes: dict[str, int], held_out: Kinds,
    args: argparse.Namespace,
) -> None:  # fmt: skip
    """Write the checkpoint directory; the model is judged as it is stored, in float16. `sizes` are
    the training tokens of each kind."""
    model, c = run.model, run.model.config
    save(model, tokenizer, args.out, torch.float16)
    model.half().float()
    bits = evaluate(model, tokenizer, held_out)
    counts = ", ".join(f"{kind} {n:,}" for kind, n in sizes.items())
    table = markdown("kind", ["held-out bits per byte"], {k: [v] for k, v in bits.items()})
    documents = next((d for d in held_out.values() if d), [""])
    prompt = next(tokenize(tokenizer, documents))[: min(24, args.context - 1)].tolist()
    said = decode(model, tokenizer, prompt, max_new_tokens=120).tokens
    sample = tokenizer.backend.decode(prompt + said, skip_special_tokens=False)
    write_card(
        args, run, f"{count_parameters(model):,} parameters",
        f"{c.layers} layers of width {c.hidden_size}, {c.heads} heads ({c.kv_heads} for keys and "
        f"values), vocabulary {c.vocab_size}, context {c.context}. Llama layout, float16.",
        f"Learnt from so many tokens: {counts}.\n\n{table}\n\n"
        f"A greedy sample ({distinct_4grams(said):.2f} of its 4-grams are different):\n\n"
        f"```\n{sample}\n```",
    )  # fmt: skip
    print("held-out bits per byte:", bits)


def choose_tokenizer(args: argparse.Namespace, kinds: Kinds, rank: int) -> Tokenizer:
    """That of --tokenizer, of the training that goes on in --out, or of --init; else a new one,
    which rank 0 trains for all."""
    if args.tokenizer:
        return complete(read_backend(args.tokenizer))
    if state := read_checkpoint(args.out):
        return complete(BPE.from_str(state["what"]["tokenizer"]))
    if args.init:
        return complete(read_tokenizer(args.init).backend)
    new = [train_tokenizer(kinds, args.vocab).to_str() if rank == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(new, device=args.device)
    return complete(BPE.from_str(new[0]))


def digest(value: object) -> str:
    """A short hash of what JSON can write."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def parse(argv: list[str]) -> argparse.Namespace:
    p = Parser(prog="python -m minispec.pretrain", description=__doc__.split("\n\n")[0])
    p.add_argument("--data", type=Path, nargs="+", required=True, metavar="PATH",
                   help="a .txt, a .jsonl, other text, or a folder of such (see text.py)")
    p.add_argument("--tokenizer", type=Path, help="a tokenizer.json to use instead of a new one")
    p.add_argument("--vocab", type=number(260, 2**20), default=4096,
                   help="tokens of a new tokenizer (default: %(default)s)")  # fmt: skip
    size_arguments(p, layers=6, width=192, heads=3, ffn=512)
    training_arguments(p, steps=2000, batch_tokens=4096, context=256, least_context=2)
    args = p.parse_args(argv)
    prepare(args, ["pretrain", *argv])
    return args


@command
def main(argv: list[str] | None = None) -> None:
    args = parse(sys.argv[1:] if argv is None else argv)
    with processes(args) as rank:
        kinds, held_out = read_corpus(args.data)
        tokenizer = choose_tokenizer(args, kinds, rank)
        ends = tuple(map(tokenizer.backend.token_to_id, (END, END_TURN)))
        model = new_model(args, tokenizer, tokenizer.size, ends[0], ends)
        ids = {kind: list(tokenize(tokenizer, documents)) for kind, documents in kinds.items()}
        sizes = {kind: sum(map(len, each)) for kind, each in ids.items()}
        stream = Stream([each for part in ids.values() for each in part], args.seed)
        what = {
            "data": digest(kinds),
            "tokenizer": tokenizer.backend.to_str(),
            "model": str(replace(model.config, context=0)),
        }
        run = Run(model, muon_and_adamw(model), what)
        if rank == 0:
            counts = ", ".join(f"{kind} {n:,}" for kind, n in sizes.items())
            print(f"{count_parameters(model):,} parameters; {counts} tokens")
        few = {kind: documents[:32] for kind, documents in held_out.items()}

        def note() -> str:
            return f"held-out bits per byte {evaluate(model, tokenizer, few)}"

        train(run, NextToken(model, args.dtype), stream.take, args, note)
        if rank == 0:
            finish(run, tokenizer, sizes, held_out, args)


if __name__ == "__main__":
    main()
