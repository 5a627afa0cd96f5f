"""Train a small target, or a draft for it, from text.

    python -m minispec.pretrain --data DIR --out weights/target --steps 3000

Next-token cross-entropy over packed documents; Muon for the matrices, AdamW for the rest; a cosine
schedule. Everything random follows from `--seed` and the position in the data, so a run started
again with the same --out goes on from its last checkpoint exactly as if it had not stopped. It may
go on with other --steps or another --context: short rows first train faster. Under `torchrun` each
process takes its share of every batch.
"""

import argparse
import contextlib
import json
import math
import os
import pickle
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer as BPE
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from tqdm import tqdm

from minispec.checkpoint import pick_device, resolve, save
from minispec.errors import Parser, UserError, check_compiler, check_seed, command, prepare_folder
from minispec.grow import begin
from minispec.methods.autoregressive import autoregressive
from minispec.model import Config, Transformer, count_parameters
from minispec.sampling import Sampling, Seeded
from minispec.tokenizer import Tokenizer, read_backend

END = "<|endoftext|>"  # separates documents, and begins the first
USER, ASSISTANT, END_TURN = "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# kind of text: its files, and its share of a batch
KINDS = {
    "stories_en": (["stories_en.txt"], 0.30),
    "stories_zh": (["stories_zh.txt"], 0.13),
    "dialogue_en": (["dialogue_en.txt"], 0.15),
    "dialogue_zh": (["dialogue_zh.txt"], 0.10),
    "maths": (["gsm8k_train.jsonl"], 0.12),
    "code": (["mbpp.jsonl", sysconfig.get_paths()["stdlib"]], 0.20),
}
WARM_UP = "stories_distilled", "stories_distilled.txt"
WARM_UP_SHARE, WARM_UP_END = 0.5, 0.3  # half of each batch during the first 30 % of the steps
CHECKPOINT = "training.pt"  # in --out, while a training goes on and after it
HELD_OUT = 50  # every 50th document is never trained on


# ---- text ----------------------------------------------------------------------------------------


def read_documents(path: Path) -> list[str]:
    """The documents of a .txt divided by END, a .jsonl of tasks, or a tree of Python files; raises
    UserError for anything else."""
    if path.is_dir():
        return [
            piece
            for file in sorted(path.rglob("*.py"))
            if not skipped(file.relative_to(path))
            for piece in code_pieces(file.read_text(encoding="utf-8", errors="ignore"))
        ]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if path.suffix == ".jsonl":
        return [task(path, i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    documents = (d.strip().removesuffix("<|end_story|>") for d in text.split(END))
    return [turns(d) for d in documents if d]


def skipped(file: Path) -> bool:
    """Installed packages, tests and tables are not the standard library's prose."""
    return bool(
        {"site-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "pydoc_data"}
        & set(file.parts)
    )


def code_pieces(source: str, size: int = 2000) -> list[str]:
    """A file cut at top-level blank lines into pieces of about `size` characters; no tables."""
    pieces = [""]
    for part in source.split("\n\n\n"):
        if pieces[-1] and len(pieces[-1]) + len(part) > size:
            pieces.append("")
        pieces[-1] += ("\n\n\n" if pieces[-1] else "") + part.strip("\n")
    return [p for p in pieces if p.strip() and len(p) < 10 * size]


def task(path: Path, number: int, line: str) -> str:
    """A worked maths problem (without its calculator marks) or a small programming task, as a line
    of a .jsonl holds it."""
    try:
        row = json.loads(line)
        if "question" in row:
            return f"Question: {row['question']}\nAnswer: {re.sub('<<.*?>>', '', row['answer'])}"
        return "# " + row["text"].strip() + "\n" + row["code"].replace("\r\n", "\n").strip()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path} line {number}: must be an object with question and answer, or text and code"
        ) from None


def turns(document: str) -> str:
    """Dialogues marked `User: … Assistant: …` get the special tokens of the chat template."""
    if not re.match("User: |用户：", document):
        return document
    parts = re.split(r"^(User: |用户：|Assistant: |助手：)", document, flags=re.M)[1:]
    roles = [USER if name in ("User: ", "用户：") else ASSISTANT for name in parts[::2]]
    return "".join(role + text.strip() + END_TURN for role, text in zip(roles, parts[1::2]))


def read_corpus(data: Path) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Training and held-out documents per kind; kinds whose files are missing are left out."""
    if not data.is_dir():
        raise UserError(f"no such directory: {data}")
    sources = {kind: files for kind, (files, _) in KINDS.items()} | {WARM_UP[0]: [WARM_UP[1]]}
    train, held_out = {}, {}
    for kind, files in sources.items():
        paths = [data / name for name in files]  # an absolute name stands for itself
        documents = [d for path in paths if path.exists() for d in read_documents(path)]
        if len(documents) > 1:  # a single one is held out: none would be left
            held_out[kind] = documents[::HELD_OUT]
            train[kind] = [d for i, d in enumerate(documents) if i % HELD_OUT]
    if not set(train) - {"code"}:
        raise UserError(
            f"{data} holds none of the files {', '.join(f[0] for f in sources.values())}, or none "
            "of two documents"
        )
    return train, held_out


def held_out_prompts(
    data: Path, kinds: list[str], tokenizer: Tokenizer, n: int, length: int = 16, skip: int = 0
) -> dict[str, list[list[int]]]:
    """Of each kind the first `length` tokens of `n` documents that were never trained on; the first
    `skip` are left out, or half of them where they are few."""
    held_out = read_corpus(data)[1]
    missing = [kind for kind in kinds if kind not in held_out]
    if missing:
        raise UserError(f"{data} has no text of the kind {missing[0]}")
    texts = {kind: held_out[kind][min(skip, len(held_out[kind]) // 2) :][:n] for kind in kinds}
    return {k: [tokenizer.encode(text)[:length] for text in each] for k, each in texts.items()}


def train_tokenizer(documents: dict[str, list[str]], size: int, per_kind: int = 2_500_000) -> BPE:
    """A byte-level BPE of `size` tokens from at most `per_kind` characters of every kind."""
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

    def sample():
        for kind in documents:
            budget = per_kind
            for document in documents[kind]:
                if budget > 0:
                    yield re.sub(r"<\|\w+\|>", "\n", document)
                budget -= len(document)

    bpe.train_from_iterator(sample(), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, bpe.token_to_id(END))]
    )
    return bpe


# ---- batches -------------------------------------------------------------------------------------


class Stream:
    """Documents packed end to end, reshuffled every epoch; `position` is its whole state."""

    def __init__(self, documents: list[list[int]], seed: int):
        self.documents, self.seed, self.position = documents, seed, 0
        self.size = sum(map(len, documents))
        self.epoch, self.tokens = -1, np.empty(0, np.int32)

    def take(self, n: int) -> np.ndarray:
        """The next `n` tokens."""
        parts = []
        while n > 0:
            epoch, offset = divmod(self.position, self.size)
            if epoch != self.epoch:
                order = np.random.default_rng([self.seed, epoch]).permutation(len(self.documents))
                self.epoch = epoch
                self.tokens = np.concatenate(
                    [np.asarray(self.documents[i], np.int32) for i in order]
                )
            parts.append(self.tokens[offset : offset + n])
            self.position += len(parts[-1])
            n -= len(parts[-1])
        return np.concatenate(parts)


class Batches:
    """Rows of `context + 1` tokens, each from a kind drawn by its share."""

    def __init__(self, documents: dict[str, list[list[int]]], seed: int):
        self.streams = {kind: Stream(d, seed) for kind, d in documents.items()}
        self.seed = seed

    def shares(self, progress: float) -> np.ndarray:
        """Probability of each stream at this fraction of the run: the warm-up text only early."""
        early = WARM_UP_SHARE if WARM_UP[0] in self.streams and progress < WARM_UP_END else 0.0
        real = sum(KINDS[k][1] for k in self.streams if k in KINDS)
        return np.array(
            [KINDS[k][1] * (1 - early) / real if k in KINDS else early for k in self.streams]
        )

    def take(self, step: int, progress: float, rows: int, context: int) -> Tensor:
        """The whole batch of a step, (rows, context + 1)."""
        kinds = np.random.default_rng([self.seed, step]).choice(
            list(self.streams), size=rows, p=self.shares(progress)
        )
        return torch.from_numpy(np.stack([self.streams[k].take(context + 1) for k in kinds])).long()

    def state(self) -> dict[str, int]:
        return {kind: stream.position for kind, stream in self.streams.items()}

    def restore(self, state: dict[str, int]) -> None:
        for kind, stream in self.streams.items():
            stream.position = state[kind]


# ---- training ------------------------------------------------------------------------------------


class NextToken(nn.Module):
    """rows (B, T + 1) -> mean cross-entropy in nats."""

    def __init__(self, model: Transformer, dtype: torch.dtype):
        super().__init__()
        self.transformer, self.dtype = model, dtype

    def forward(self, rows: Tensor) -> Tensor:
        with torch.autocast(rows.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.transformer.logits(self.transformer(rows[:, :-1]))
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


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


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for embeddings, norms and biases."""
    ends = "embed_tokens.weight", "lm_head.weight"
    inner = {n: p.dim() == 2 and not n.endswith(ends) for n, p in model.named_parameters()}
    matrices = [p for n, p in model.named_parameters() if inner[n]]
    others = [p for n, p in model.named_parameters() if not inner[n]]
    return [
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate(step: int, steps: int, peak: float, warmup: int = 100) -> float:
    """Linear warm-up, then a cosine down to a fiftieth."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


@torch.no_grad()
def bits_per_byte(
    model: Transformer, documents: list[list[int]], sizes: list[int], batch: int = 16
) -> float:
    """Bits to code the documents (BOS first, right-padded to a batch) over their bytes of text."""
    bits = 0.0
    order = sorted(range(len(documents)), key=lambda i: len(documents[i]))
    for start in range(0, len(order), batch):
        rows = [torch.tensor(documents[i]) for i in order[start : start + batch]]
        rows = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100).to(
            model.device
        )
        logits = model.logits(model(rows[:, :-1].clamp(min=0))).float()
        bits += F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
    return bits / math.log(2) / max(sum(sizes), 1)


def evaluate(
    model: Transformer, held_out: dict[str, tuple[list[list[int]], list[int]]]
) -> dict[str, float]:
    """Held-out bits per byte of every kind."""
    return {kind: round(bits_per_byte(model, *rows), 4) for kind, rows in held_out.items()}


def tokenize(bpe: BPE, documents: list[str]) -> list[list[int]]:
    """Each document with its leading END; a document of the next follows in the packed stream."""
    return [e.ids for e in bpe.encode_batch(documents)]


def clip_held_out(
    bpe: BPE, documents: list[str], context: int
) -> tuple[list[list[int]], list[int]]:
    """Documents cut to the context, END behind those that end inside it; bytes of their text."""
    rows, sizes = [], []
    for ids in tokenize(bpe, documents):
        rows.append((ids + [ids[0]])[: context + 1])
        sizes.append(len(bpe.decode(rows[-1]).encode()))
    return rows, sizes


BROKEN = (
    OSError, EOFError, RuntimeError, KeyError, TypeError, AttributeError, pickle.UnpicklingError,
)  # fmt: skip


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Says what to do where a checkpoint is not what it should be."""
    try:
        yield
    except BROKEN:
        raise UserError(
            f"{path} is damaged, or older than this program: delete it to begin anew, or give "
            "another --out"
        ) from None


@dataclass
class Trainer:
    """The state of a run: what a checkpoint holds."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    batches: Batches
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    objective: str = "next token"
    tokenizer: str | None = None  # as in a tokenizer.json, where no model at hand has it

    @property
    def heads(self) -> list[int] | None:
        """Of a transformer: what the shapes of its weights do not tell."""
        config = getattr(self.model, "config", None)
        return config and [config.heads, config.kv_heads]

    def save(self, path: Path) -> None:
        state = dict(
            model=self.model.state_dict(),
            optimizers=[o.state_dict() for o in self.optimizers],
            batches=self.batches.state(),
            step=self.step,
            tokens=self.tokens,
            seconds=self.seconds,
            objective=self.objective,
            heads=self.heads,
            tokenizer=self.tokenizer,
        )
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def restore(self, path: Path) -> None:
        with readable(path):
            state = torch.load(path, next(self.model.parameters()).device, weights_only=True)
            theirs = {name: p.shape for name, p in state["model"].items()}
            kinds = set(state["batches"])
        shapes = {name: p.shape for name, p in self.model.state_dict().items()}
        ours = shapes, self.objective, self.heads, set(self.batches.state())
        said = state.get("objective", self.objective), state.get("heads", self.heads)
        if ours != (theirs, *said, kinds):
            raise UserError(
                f"{path} is of another training (other sizes, kinds of text or objective): "
                "give what it was begun with, or another --out"
            )
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.batches.restore(state["batches"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]


def train(
    trainer: Trainer, args: argparse.Namespace, objective: nn.Module,
    note: Callable[[], str] | None = None,
) -> None:  # fmt: skip
    """Steps until `args.steps`, from the checkpoint in --out if there is one; `objective(rows)` is
    the loss. Every --save-every steps, and in the end, writes the checkpoint and shows `note()`."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    checkpoint = args.out / CHECKPOINT
    if begun(args.out):
        trainer.restore(checkpoint)
    rows = args.batch_tokens // args.context
    if world > 1:
        objective = nn.parallel.DistributedDataParallel(objective)
    if args.compile:
        objective = torch.compile(objective)
    bar = tqdm(total=args.steps, initial=trainer.step, unit="step", disable=rank > 0)
    while trainer.step < args.steps:
        loss = one_step(trainer, args, objective, rows, rank, world)
        if not math.isfinite(loss):
            raise UserError(f"the loss is {loss} after {trainer.step} steps: lower --lr")
        bar.update()
        bar.set_postfix(loss=f"{loss:.3f}", tok_s=f"{trainer.tokens / trainer.seconds:.0f}")
        if rank == 0 and (trainer.step % args.save_every == 0 or trainer.step == args.steps):
            trainer.save(checkpoint)
            if note:
                bar.write(f"step {trainer.step}: {note()}")
    bar.close()


def one_step(
    trainer: Trainer,
    args: argparse.Namespace,
    objective: nn.Module,
    rows: int,
    rank: int,
    world: int,
) -> float:
    """One step on this process's share of the batch; its loss."""
    start = time.perf_counter()
    batch = trainer.batches.take(trainer.step, trainer.step / args.steps, rows, args.context)
    loss = objective(batch[rank::world].to(args.device))
    loss.backward()
    nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(trainer.step, args.steps, args.lr)
        optimizer.step()
        optimizer.zero_grad()
    trainer.step += 1
    trainer.tokens += rows * args.context
    trainer.seconds += time.perf_counter() - start
    return loss.item()


# ---- the finished model --------------------------------------------------------------------------


CARD = """\
# {parameters:,} parameters

{c.layers} layers of width {c.hidden_size}, {c.heads} heads ({c.kv_heads} for keys and values), \
vocabulary {c.vocab_size}, context {c.context}. Llama layout, float16. Last command:

    python -m minispec.pretrain {command}

{step} steps, {tokens:,} tokens, {minutes:.0f} minutes of training on {threads} threads ({device}).

| kind | training tokens | seen | held-out bits per byte |
|---|---|---|---|
{kinds}

{loops}

## Greedy samples

The first 24 tokens, or fewer, are given.

{samples}
"""


def continuation(model: Transformer, prompt: list[int], n: int, sampling: Sampling) -> list[int]:
    """At most `n` tokens after the prompt, ending before an end token."""
    tokens: list[int] = []
    with torch.no_grad():
        for step in autoregressive(model, prompt, sampling, Seeded(0)):
            tokens += step.tokens
            if tokens and tokens[-1] in model.config.eos_ids:
                return tokens[:-1]
            if len(tokens) >= n or len(prompt) + len(tokens) >= model.config.context:
                return tokens


def distinct_4grams(tokens: list[int]) -> float:
    """Share of different ones among the 4-grams: few in a loop, which flatters every draft."""
    grams = list(zip(*(tokens[i:] for i in range(4))))
    return len(set(grams)) / max(1, len(grams))


def card(
    model: Transformer,
    tokenizer: Tokenizer,
    trainer: Trainer,
    held_out: dict[str, list[str]],
    losses: dict[str, float],
) -> str:
    """The README.md beside the weights: how they were made, what they reach, what they say."""
    c, device = model.config, trainer.model.device.type
    texts = held_out.get("stories_en", [])[:30]
    stories = [tokenizer.encode(text)[: min(10, c.context - 1)] for text in texts]
    shares = [distinct_4grams(continuation(model, prompt, 200, Sampling())) for prompt in stories]
    kinds = "\n".join(
        f"| {kind} | {s.size:,} | {s.position / s.size:.2f} times | {losses[kind]:.3f} |"
        for kind, s in trainer.batches.streams.items()
    )
    loops = shares and (
        f"Distinct 4-grams in greedy stories of at most 200 tokens from {len(shares)} held-out "
        f"beginnings: mean {np.mean(shares):.3f}, least {min(shares):.3f}, "
        f"{sum(x < 0.7 for x in shares)} below 0.7."
    )
    begun = {kind: texts[0] for kind, texts in held_out.items() if kind in KINDS}
    samples = "\n\n".join(
        f"{kind}:\n\n```\n{sample(model, tokenizer, text)}\n```"
        for kind, text in [("story", "Once upon a time"), *begun.items()]
    )
    return CARD.format(
        parameters=count_parameters(model), c=c, command=shown(sys.argv[1:]),
        step=trainer.step, tokens=trainer.tokens, minutes=trainer.seconds / 60,
        threads=torch.get_num_threads(), device=device, kinds=kinds,
        loops=loops or "", samples=samples,
    )  # fmt: skip


def shown(arguments: list[str]) -> str:
    """A command line without the folders of the machine it ran on."""
    return " ".join(Path(a).name if Path(a).is_absolute() else a for a in arguments)


def sample(model: Transformer, tokenizer: Tokenizer, text: str) -> str:
    """A greedy continuation of the text's first 24 tokens, or fewer in a short context, special
    tokens shown."""
    prompt = tokenizer.encode(text)[: min(24, model.config.context - 1)]
    tokens = prompt + continuation(model, prompt, 120, Sampling())
    return tokenizer.backend.decode(tokens, skip_special_tokens=False)


def finish(
    trainer: Trainer, tokenizer: Tokenizer, held_out: dict[str, list[str]], out: Path
) -> None:
    """Write the checkpoint directory; it is judged as it is stored, in float16."""
    model, bpe = trainer.model, tokenizer.backend
    save(model, tokenizer, out, torch.float16)
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    tests = {kind: clip_held_out(bpe, d, model.config.context) for kind, d in held_out.items()}
    losses = evaluate(model, tests)
    (out / "README.md").write_text(
        card(model, tokenizer, trainer, held_out, losses), encoding="utf-8"
    )
    print("held-out bits per byte:", losses)


def prepare_training(out: Path) -> None:
    """Make the folder of a training, and see that checkpoints can be written there."""
    prepare_folder(out, "--out", "training.tmp")  # what becomes the checkpoint


def begun(out: Path) -> bool:
    """Whether a training can go on there."""
    return (out / CHECKPOINT).exists()


def model_arguments(
    p: argparse.ArgumentParser, layers: int, width: int, heads: int, ffn: int
) -> None:
    """The sizes of a new model, and what it begins with."""
    init_argument(p)
    sizes = {"layers": layers, "width": width, "heads": heads, "kv-heads": 1, "ffn": ffn}
    for name, size in sizes.items():
        p.add_argument(f"--{name}", type=int, default=size, help="default: %(default)s")


def init_argument(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--init",
        help="begin with this checkpoint, whose sizes may be smaller (but for the heads of keys "
        "and their size, Medusa's heads and their blocks)",
    )


def training_arguments(
    p: argparse.ArgumentParser, steps: int, batch_tokens: int = 8192, context: int = 512,
    lr: float = 4e-3,
) -> None:  # fmt: skip
    """The flags of every training command; `checked` looks at their values."""
    p.add_argument("--out", type=Path, required=True, help="the directory to write")
    p.add_argument("--steps", type=int, default=steps, help="default: %(default)s")
    p.add_argument("--batch-tokens", type=int, default=batch_tokens, help="default: %(default)s")
    p.add_argument("--context", type=int, default=context, help="tokens of a row (%(default)s)")
    p.add_argument("--lr", type=float, default=lr, help="default: %(default)s")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32",
        help="of the matrix products (bfloat16 is ten times faster where AMX or a GPU is)",
    )  # fmt: skip
    p.add_argument("--compile", action="store_true", help="torch.compile (needs a compiler)")
    p.add_argument("--device", default="auto")
    p.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")


def checked(args: argparse.Namespace, least_context: int = 2) -> argparse.Namespace:
    """Complain of impossible values; dtype and device become torch's, and a training that goes on
    has no --init any more."""
    least = {"seed": 0, "context": least_context, "vocab": 260}  # bytes and special tokens
    check_seed(args.seed)
    for name, value in vars(args).items():
        if type(value) is int and value < least.get(name, 1):
            raise UserError(
                f"--{name.replace('_', '-')} {value}: must be at least {least.get(name, 1)}"
            )
        if type(value) is float and not (0 < value < math.inf or value == 0 and name == "beta"):
            raise UserError(f"--{name} {value}: must be a positive number")
    if args.batch_tokens < args.context:
        raise UserError(
            f"--batch-tokens {args.batch_tokens} must hold a row of --context {args.context}"
        )
    if "width" in args and (
        args.width % args.heads or args.heads % args.kv_heads or args.width // args.heads % 2
    ):
        raise UserError(
            f"--width {args.width} must be an even multiple of --heads {args.heads}, "
            f"and those a multiple of --kv-heads {args.kv_heads}"
        )
    if begun(args.out):
        args.init = None
    args.dtype = getattr(torch, args.dtype)
    args.device = pick_device(args.device)
    if args.compile and args.device.type != "mps":
        check_compiler(args.device.type)
    return args


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = Parser(prog="python -m minispec.pretrain", description=__doc__.split("\n\n")[0])
    names = ", ".join([*(files[0] for files, _ in KINDS.values()), WARM_UP[1]])
    p.add_argument(
        "--data",
        type=Path,
        required=True,
        help=f"a folder with some of {names}; to the code belongs Python's own library",
    )
    p.add_argument("--tokenizer", type=Path, help="a tokenizer.json to use instead of a new one")
    p.add_argument("--vocab", type=int, default=8192, help="of a new tokenizer (%(default)s)")
    model_arguments(p, layers=14, width=192, heads=3, ffn=512)
    training_arguments(p, steps=3000)
    return checked(p.parse_args(argv))


def build(args: argparse.Namespace, bpe: BPE) -> Transformer:
    """The untrained model of the command line's sizes."""
    ends = (bpe.token_to_id(END), bpe.token_to_id(END_TURN))
    if None in ends:
        raise UserError(
            f"the tokenizer lacks {END} or {END_TURN}: take one that minispec.pretrain trained"
        )
    model = Transformer(
        Config(
            args.width,
            args.ffn,
            args.layers,
            args.heads,
            args.kv_heads,
            args.width // args.heads,
            bpe.get_vocab_size(),
            args.context,
            bos_id=ends[0],
            eos_ids=ends,
        )
    )
    initialise(model, args.seed)
    return model.to(args.device)


def choose_tokenizer(args: argparse.Namespace, documents: dict[str, list[str]], rank: int) -> BPE:
    """That of the training that goes on in --out; or of --tokenizer or --init; or a new one."""
    source = args.tokenizer or (resolve(args.init) / "tokenizer.json" if args.init else None)
    if source and not source.exists():
        raise UserError(f"no such tokenizer: {source}")
    given = read_backend(source) if source else None
    if begun(args.out):
        with readable(args.out / CHECKPOINT):
            state = torch.load(args.out / CHECKPOINT, "cpu", weights_only=True, mmap=True)
            kept = BPE.from_str(state["tokenizer"])
        if given and Tokenizer(given).fingerprint != Tokenizer(kept).fingerprint:
            raise UserError(f"{args.out} was begun with another tokenizer than {source}: give "
                            "that, or another --out")  # fmt: skip
        return kept
    if given:
        return given
    new = [train_tokenizer(documents, args.vocab).to_str() if rank == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(new, device=args.device)
    return BPE.from_str(new[0])


def begin_distributed(args: argparse.Namespace) -> tuple[torch.device, int, int]:
    """Device, rank and number of processes, where torchrun has started several."""
    device = args.device
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if args.batch_tokens // args.context % world:
        raise UserError(
            f"--batch-tokens {args.batch_tokens} must hold a multiple of {world} rows of "
            f"--context {args.context}"
        )
    return device, rank, world


def end_distributed() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@command
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    args.device, rank, world = begin_distributed(args)
    documents, held_out = read_corpus(args.data)
    prepare_training(args.out)
    bpe = choose_tokenizer(args, documents, rank)
    model, tokenizer = build(args, bpe), Tokenizer(bpe, END, END, CHAT_TEMPLATE)
    if args.init:
        begin(model, args.init, tokenizer)
    batches = Batches({kind: tokenize(bpe, d) for kind, d in documents.items()}, args.seed)
    tests = {kind: clip_held_out(bpe, d[:32], args.context) for kind, d in held_out.items()}
    trainer = Trainer(model, optimizers(model), batches, tokenizer=bpe.to_str())
    if rank == 0:
        print(
            f"{count_parameters(model):,} parameters;",
            ", ".join(f"{k} {s.size:,}" for k, s in batches.streams.items()),
            "tokens",
        )
    objective = NextToken(model, args.dtype)
    train(trainer, args, objective, lambda: f"held-out bits per byte {evaluate(model, tests)}")
    if rank == 0:
        finish(trainer, tokenizer, held_out, args.out)
    end_distributed()


if __name__ == "__main__":
    main()
