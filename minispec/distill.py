"""A target's own text, and drafts trained on it.

    python -m minispec.distill generate --model weights/target --data DIR --out own.jsonl
    python -m minispec.distill draft --model weights/target --own own.jsonl --out weights/draft
    python -m minispec.distill vocabulary --text en=stories.txt,talk.txt --text zh=zh.txt \\
        --out weights/mtp/vocabulary.json

A draft is to say what the target would say, so the target's own output is its best text: sampled
in batches from the beginnings of training documents, without near-duplicates unless they are asked
for. Started again, generation and training go on where they stopped.
"""

import argparse
import contextlib
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from minispec.checkpoint import (
    check_attention,
    check_fingerprint,
    check_tokenizer,
    load,
    read_tokenizer,
    save,
    write_tensors,
)
from minispec.cost import cost_curve, heads_cost
from minispec.errors import Parser, UserError, check_seed, command, prepare_file
from minispec.fast import quicken
from minispec.grow import begin, grow
from minispec.heads import (
    load_medusa,
    read_medusa,
    read_mtp,
    save_medusa,
    save_mtp,
    save_tree,
    save_vocabulary,
)
from minispec.methods.fastmtp import Head
from minispec.methods.medusa import RANKS, Heads, Ranks, medusa, untrained
from minispec.methods.vocabulary import count
from minispec.model import Pass, Transformer, count_parameters
from minispec.pretrain import (
    KINDS,
    Batches,
    NextToken,
    Trainer,
    begin_distributed,
    build,
    checked,
    end_distributed,
    held_out_prompts,
    init_argument,
    initialise,
    model_arguments,
    optimizers,
    prepare_training,
    read_corpus,
    read_documents,
    shown,
    train,
    training_arguments,
)  # fmt: skip
from minispec.sampling import OneHot, Sampling, Seeded, probs
from minispec.tokenizer import Tokenizer

LONGEST = 24  # tokens of a prompt
SKIPPED = 50  # held-out texts of a kind that are left to the benchmark
HELD_OUT = 50  # every 50th generated document is for measuring
TOGETHER = 16  # texts whose hidden states are computed at once: of more, a CPU waits for memory
IDLE = 64  # prompts in a row after which nothing new came: enough


# ---- the target's own text -----------------------------------------------------------------------


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


class Duplicates:
    """Near-duplicates: texts most of whose 8-grams have been seen before."""

    def __init__(self, n: int = 8, share: float = 0.5):
        self.n, self.share, self.seen = n, share, set()

    def grams(self, tokens: list[int]) -> set[tuple[int, ...]]:
        return {tuple(tokens[i : i + self.n]) for i in range(len(tokens) - self.n + 1)}

    def knows(self, tokens: list[int]) -> bool:
        """Whether `tokens` is near to what was added."""
        grams = self.grams(tokens)
        return len(grams & self.seen) > self.share * len(grams)

    def add(self, tokens: list[int]) -> bool:
        """`knows`; if not, it is added."""
        known = self.knows(tokens)
        if not known:
            self.seen |= self.grams(tokens)
        return known


def beginnings(
    documents: dict[str, list[str]], tokenizer: Tokenizer, seed: int, most: int = LONGEST
) -> Iterator[tuple[str, list[int]]]:
    """(kind, first tokens of a training document), kinds by their shares, without end. At least 4
    tokens, fewer than `most`."""
    rng = np.random.default_rng(seed)
    kinds = [kind for kind in documents if kind in KINDS]
    shares = np.array([KINDS[kind][1] for kind in kinds])
    while True:
        kind = str(rng.choice(kinds, p=shares / shares.sum()))
        document = documents[kind][rng.integers(len(documents[kind]))]
        yield kind, tokenizer.encode(document[: 20 * most])[: rng.integers(4, most)]


def generate(args: argparse.Namespace) -> None:
    """Append documents to --out until it holds --documents of them."""
    prepare_file(args.out, "--out")
    model, tokenizer = load_both(args, args.dtype)
    documents = {k: texts for k, texts in read_corpus(args.data)[0].items() if k in KINDS}
    if args.kind:
        if args.kind not in documents:
            raise UserError(f"--kind {args.kind}: {args.data} has {', '.join(documents)}")
        documents = {args.kind: documents[args.kind]}
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    n = min(args.tokens, model.config.context - LONGEST)
    if n < 1:
        raise UserError(f"the target's context of {model.config.context} tokens is too short")
    names = "seed", "kind", "batch", "tokens", "temperature", "top_k", "top_p", "keep_duplicates"
    options = {"dtype": str(model.dtype).removeprefix("torch.")}
    options |= {name: getattr(args, name) for name in names}
    options |= {"model": model_digest(model), "data": digest_of(documents)}
    duplicates, kept, batch = resumed(args.out, tokenizer, options)
    starts = beginnings(documents, tokenizer, args.seed)
    for _ in range(batch * args.batch):
        next(starts)
    bar = tqdm(total=args.documents, initial=kept, unit="document")
    fingerprint, idle = tokenizer.fingerprint, 0
    with args.out.open("a", encoding="utf-8") as file:
        while kept < args.documents:
            kinds, prompts = zip(*(next(starts) for _ in range(args.batch)))
            generator = torch.Generator().manual_seed(args.seed + batch)
            answers = sample_batch(model, list(prompts), n, sampling, generator)
            lines = []
            for kind, prompt, tokens in zip(kinds, prompts, answers):
                if args.keep_duplicates or not duplicates.add(tokens):
                    row = {"batch": batch, "kind": kind, "prompt": prompt, "tokens": tokens}
                    row |= {"tokenizer": fingerprint, "options": options}
                    lines.append(json.dumps(row) + "\n")
            idle = 0 if lines else idle + args.batch
            if idle >= IDLE:
                raise UserError(
                    f"only {kept} different documents came: raise --temperature or ask for fewer"
                )
            file.write("".join(lines))
            file.flush()
            kept, batch = kept + len(lines), batch + 1
            bar.update(len(lines))
    bar.close()


def resumed(out: Path, tokenizer: Tokenizer, options: dict) -> tuple[Duplicates, int, int]:
    """What `out` holds, how many documents, and the next batch; the last one may have been cut
    short: it is dropped from the file, to be made again. Raises UserError for a file that was made
    with other options."""
    rows = read_own(out, tokenizer) if out.exists() else []
    if not all(type(row.get("batch")) is int for row in rows):
        raise UserError(f"{out} was not begun by minispec.distill generate: give another --out")
    for row in rows:
        # older files say less: they were made before near-duplicates could be kept
        theirs = options | {"keep_duplicates": False} | row.get("options", {})
        for name in options:
            if theirs[name] != options[name]:
                raise UserError(
                    f"{out} was begun with {flag(name, theirs[name])}: give what it was begun "
                    "with, or another --out"
                )
    batch = rows[-1]["batch"] if rows else 0
    if rows:
        rows = [row for row in rows if row["batch"] < batch]
        part = out.with_suffix(".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        part.replace(out)
    duplicates = Duplicates()
    for row in rows:
        duplicates.add(row["tokens"])
    return duplicates, len(rows), batch


def flag(name: str, value: object) -> str:
    """An option of `generate` in words."""
    if name == "model":
        return "another --model"
    if name == "data":  # to the kind "code" belongs Python's library
        return "another --data, or by another Python"
    option = f"--{name.replace('_', '-')}"
    if value in (None, False):
        return f"no {option}"
    return option if value is True else f"{option} {value}"


def read_own(path: Path, tokenizer: Tokenizer | None = None) -> list[dict]:
    """The documents that `generate` wrote, with this tokenizer as far as both are known."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines[:-1]]  # a line cut short by a kill is dropped
        for row in rows:
            assert row["kind"] and row["prompt"] and row["tokens"], "an empty row"
            ids = row["prompt"] + row["tokens"]
            assert all(type(i) is int and i >= 0 for i in ids), "tokens that are no ids"
            assert isinstance(row.get("options", {}), dict), "options that are no object"
            assert isinstance(row.get("tokenizer"), str | None), "a tokenizer that is no hash"
    except (OSError, ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
        raise UserError(f"{path} is not a file of minispec.distill generate: {error}") from None
    for theirs in {row.get("tokenizer") for row in rows}:  # None in older files
        check_fingerprint(str(path), theirs, tokenizer)
    return rows


def read_training(
    paths: list[Path], target: Transformer, tokenizer: Tokenizer | None
) -> list[dict]:
    """The same of several files, `marked`, for training: texts in the target's tokens."""
    rows = []
    for path in paths:
        part = marked(read_own(path, tokenizer))
        check_ids(part, target.config.vocab_size, path)
        rows += part
    return learnable(rows, paths[0])


def check_ids(rows: list[dict], size: int, path: Path) -> None:
    """Refuse tokens beyond a vocabulary of `size`."""
    most = max((i for row in rows for i in row["prompt"] + row["tokens"]), default=0)
    if most >= size:
        raise UserError(f"{path} holds token {most}, the target has {size}: another model wrote it")


def learnable(rows: list[dict], source: Path) -> list[dict]:
    """The rows, of which some must not be held out."""
    if all(row["held out"] for row in rows):
        raise UserError(f"{source} holds {len(rows)} documents, and none to learn from: give more")
    return rows


def marked(rows: list[dict]) -> list[dict]:
    """Every 50th of a file or corpus is "held out"."""
    return [row | {"held out": i % HELD_OUT == 0} for i, row in enumerate(rows)]


def split(rows: list[dict]) -> tuple[list[int], list[int]]:
    """The numbers of the rows to learn from; and of those to measure by, which are held out and no
    near-duplicates of them (greedy documents often are), unless all are."""
    learn = [i for i, row in enumerate(rows) if not row["held out"]]
    held_out = [i for i, row in enumerate(rows) if row["held out"]]
    known = Duplicates()
    for i in learn:
        known.seen |= known.grams(rows[i]["tokens"])
    return learn, [i for i in held_out if not known.knows(rows[i]["tokens"])] or held_out


def one_process(name: str) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"minispec.distill {name} runs in one process: start it without torchrun")


def load_both(args: argparse.Namespace, dtype: str) -> tuple[Transformer, Tokenizer]:
    """--model, whose texts nothing can be learnt from without a tokenizer."""
    model, tokenizer = load(args.model, dtype, args.device)
    if tokenizer is None:
        raise UserError(f"{args.model} has no tokenizer.json: put its tokenizer there")
    return model, tokenizer


# ---- documents and hidden states -----------------------------------------------------------------


@torch.no_grad()
def hidden_states(target: Transformer, rows: list[list[int]], dtype: torch.dtype) -> list[Tensor]:
    """The target's hidden states (n, d) of each row of n tokens; rows of like lengths together."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    states: list[Tensor] = [torch.empty(0)] * len(rows)
    for start in tqdm(range(0, len(order), TOGETHER), desc="hidden states", unit="batch"):
        part = order[start : start + TOGETHER]
        batch = nn.utils.rnn.pad_sequence([torch.tensor(rows[i]) for i in part], batch_first=True)
        with torch.autocast(target.device.type, dtype, enabled=dtype != torch.float32):
            hidden = target(batch.to(target.device))
        for i, states_of_i in zip(part, hidden):
            states[i] = states_of_i[: len(rows[i])].to("cpu", dtype, copy=True)
    return states


def model_digest(model: Transformer) -> str:
    """Of the weights, and of what else makes the function."""
    weights = [digest(p.detach().cpu()) for p in model.parameters()]
    return digest_of([weights, asdict(model.config)])


def digest(tensor: Tensor) -> str:
    """Of a tensor's numbers."""
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()


def digest_of(value: object) -> str:
    """A short hash of what JSON can write."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def stored_states(
    target: Transformer, rows: list[list[int]], dtype: torch.dtype, file: Path
) -> list[Tensor]:
    """`hidden_states`, computed once: read back from `file` where it holds those of the same rows
    and model."""
    key = digest_of([rows, model_digest(target), str(dtype)])
    lengths = [len(row) for row in rows]
    with contextlib.suppress(SafetensorError, OSError):  # damaged or not there: computed anew
        with safe_open(file, "pt") as stored:
            if (stored.metadata() or {}).get("key") == key:
                return list(stored.get_tensor("hidden").split(lengths))
    states = hidden_states(target, rows, dtype)
    write_tensors({"hidden": torch.cat(states)}, file, {"key": key})
    return states


class Documents:
    """Whole documents, padded on the right to the longest of all."""

    def __init__(self, rows: list[list[int]], prompts: list[int], states: list[Tensor]):
        pad = nn.utils.rnn.pad_sequence
        self.tokens = pad([torch.tensor(row) for row in rows], batch_first=True)  # (D, T)
        self.hidden = states
        self.prompts = torch.tensor(prompts)
        self.lengths = torch.tensor([len(row) for row in rows])

    def labels(self, index: Tensor, k: int) -> Tensor:
        """Step k's label at i is token i + k + 1 if that is a generated one, else -100;
        (B, T - 2)."""
        at = torch.arange(self.tokens.shape[1] - 2) + k + 1  # (n,)
        tokens = F.pad(self.tokens[index], (0, k))[:, k + 1 :][:, : len(at)]
        real = (at < self.lengths[index, None]) & (at >= self.prompts[index, None])
        return tokens.where(real, -100)


def documents_of(
    own: list[dict], target: Transformer, args: argparse.Namespace, file: Path
) -> Documents:
    """The rows, of --context tokens at most; the target's hidden states are kept in `file`."""
    rows = [(row["prompt"] + row["tokens"])[: args.context] for row in own]
    states = stored_states(target, rows, args.dtype, file)
    return Documents(rows, [len(row["prompt"]) for row in own], states)


class Shuffled:
    """Batches of these numbers, in an order that changes every epoch."""

    def __init__(self, numbers: list[int], seed: int):
        self.numbers, self.seed = torch.tensor(numbers), seed
        self.taken, self.epoch = 0, -1

    def take(self, step: int, progress: float, rows: int, context: int) -> Tensor:
        """The next numbers, (rows,); no batch reaches into the next epoch."""
        epoch, batch = divmod(self.taken, max(len(self.numbers) // rows, 1))
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self.epoch = epoch
            self.order = self.numbers[torch.randperm(len(self.numbers), generator=generator)]
        self.taken += 1
        return self.order[batch * rows : (batch + 1) * rows]

    def state(self) -> dict[str, int]:
        return {"taken": self.taken}

    def restore(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


# ---- a draft -------------------------------------------------------------------------------------


class SoftLabels(nn.Module):
    """Indices of documents -> cross-entropy of the draft against the target's whole distributions
    of the generated tokens, in nats. The target's hidden states are known: only its lm_head runs.
    """

    def __init__(
        self, draft: Transformer, target: Transformer, documents: Documents, dtype: torch.dtype
    ):
        super().__init__()
        self.draft, self.documents, self.dtype = draft, documents, dtype
        self.target = [target]  # no parameters of this module

    def forward(self, index: Tensor) -> Tensor:
        tokens, generated, hidden = self.gather(index)
        with torch.autocast(index.device.type, self.dtype, enabled=self.dtype != torch.float32):
            with torch.no_grad():
                p = self.target[0].logits(hidden).float().softmax(-1)  # (N, V)
            logits = self.draft.logits(self.draft(tokens)[generated])
        return F.cross_entropy(logits.float(), p, reduction="sum") / max(len(p), 1)

    @torch.compiler.disable
    def gather(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (B, T - 1), which of them a generated one follows, and the target's hidden states
        (N, d) at these."""
        at, device, documents = index.cpu(), index.device, self.documents
        prompts, lengths = documents.prompts[at], documents.lengths[at]
        tokens = documents.tokens[at, :-1]
        here = torch.arange(tokens.shape[1]) + 1
        generated = (here >= prompts[:, None]) & (here < lengths[:, None])
        parts = zip(at.tolist(), prompts.tolist(), lengths.tolist())
        hidden = torch.cat([documents.hidden[i][p - 1 : n - 1] for i, p, n in parts])
        return tokens.to(device), generated.to(device), hidden.to(device, torch.float32)


@torch.no_grad()
def agreement(
    draft: Transformer, target: Transformer, rows: list[dict]
) -> dict[str, tuple[float, float]]:
    """Per kind: how often both argmaxes are equal, and Σ min(p, q), the chance that a draft drawn
    from q is accepted, over the generated tokens of `rows`."""
    result = {}
    for kind in sorted({row["kind"] for row in rows}):
        same, overlap, count = 0.0, 0.0, 0
        for row in (row for row in rows if row["kind"] == kind):
            tokens = (row["prompt"] + row["tokens"])[:-1]
            p, q = (m.logits(m(tokens))[0, len(row["prompt"]) - 1 :] for m in (target, draft))
            same += (p.argmax(-1) == q.argmax(-1)).sum().item()
            overlap += torch.minimum(p.softmax(-1), q.softmax(-1)).sum().item()
            count += len(p)
        result[kind] = (same / count, overlap / count)
    return result


def draft(args: argparse.Namespace) -> None:
    """Train a draft on the target's own documents, by its tokens or by its distributions."""
    one_process("draft")
    target, tokenizer = load_both(args, "float32")
    model = build(args, tokenizer.backend)
    if args.init:
        begin(model, args.init, tokenizer)
    if count_parameters(model) * 10 > count_parameters(target):
        raise UserError(
            "a draft must have at most a tenth of its target's parameters: make it less wide"
        )
    own = read_training(args.own, target, tokenizer)
    learn, measured = split(own)
    texts: dict[str, list[list[int]]] = {}
    for i in learn:
        texts.setdefault(own[i]["kind"], []).append(own[i]["prompt"] + own[i]["tokens"])
    prepare_training(args.out)
    if args.soft:
        documents = documents_of(own, target, args, args.out / "hidden.safetensors")
        args.context = documents.tokens.shape[1]  # of the longest: no batch is wider
        objective = SoftLabels(model, target, documents, args.dtype)
        batches = Shuffled(learn, args.seed)
    else:
        objective, batches = NextToken(model, args.dtype), Batches(texts, args.seed)
    labels = "soft labels" if args.soft else "hard labels"
    trainer = Trainer(model, optimizers(model), batches, objective=labels)
    train(trainer, args, objective)
    save(model, tokenizer, args.out, torch.float16)
    student = load(args.out, "float32", str(args.device))[0]
    rates = agreement(student, target, [own[i] for i in measured])
    sizes = {kind: sum(map(len, parts)) for kind, parts in texts.items()}
    (args.out / "README.md").write_text(draft_card(trainer, args, sizes, rates), encoding="utf-8")
    print(
        "same argmax, Σ min(p, q):", {k: (round(a, 3), round(b, 3)) for k, (a, b) in rates.items()}
    )


def draft_card(
    trainer: Trainer, args: argparse.Namespace, sizes: dict[str, int],
    rates: dict[str, tuple[float, float]],
) -> str:  # fmt: skip
    """The README.md beside the draft's weights; `sizes` are the kinds' tokens."""
    config = trainer.model.config
    kinds = "\n".join(
        f"| {kind} | {sizes.get(kind, 0):,} | {same:.3f} | {overlap:.3f} |"
        for kind, (same, overlap) in rates.items()
    )
    return DRAFT_CARD.format(
        parameters=count_parameters(trainer.model), c=config,
        labels="the target's distributions (soft labels)" if args.soft
        else "its tokens (hard labels)",
        padding=" with padding" if args.soft else "",
        command=shown(sys.argv[1:]), step=trainer.step, tokens=trainer.tokens,
        minutes=trainer.seconds / 60, threads=torch.get_num_threads(),
        device=trainer.model.device.type, held_out=HELD_OUT, kinds=kinds,
    )  # fmt: skip


DRAFT_CARD = """\
# A draft of {parameters:,} parameters

{c.layers} layers of width {c.hidden_size}, {c.heads} heads ({c.kv_heads} for keys and values), \
vocabulary {c.vocab_size}. Llama layout, float16.

Trained on the target's own output, on {labels}:

    python -m minispec.distill {command}

{step} steps, {tokens:,} tokens{padding}, {minutes:.0f} minutes of training on {threads} threads \
({device}).

On every {held_out}th document, not trained on and near to none that was: how often the draft's best
token is the target's, and Σ min(p, q), the chance that a token drawn from the draft is accepted at
temperature 1.

| kind | training tokens | same argmax | Σ min(p, q) |
|---|---|---|---|
{kinds}
"""


# ---- Medusa --------------------------------------------------------------------------------------


def labels_of(tokens: list[int], prompt: int, heads: int) -> Tensor:
    """Head k's label at t is token t + k + 2, -100 where the text has ended; (n, heads).

    Rows of which a label would be a token of the prompt (the first `prompt` ones) have none.
    """
    labels = torch.full((len(tokens), heads), -100)
    for k in range(heads):
        first = max(prompt - 2, 0)
        rest = torch.tensor(tokens[first + k + 2 :], dtype=torch.long)
        labels[first : first + len(rest), k] = rest
    return labels


class Positions:
    """Hidden states (N, d) and labels (N, K) of all positions that have a label."""

    def __init__(self, states: list[Tensor], labels: list[Tensor]):
        kept = [(each >= 0).any(1) for each in labels]
        self.hidden = torch.cat([h[some] for h, some in zip(states, kept)])
        self.labels = torch.cat([each[some] for each, some in zip(labels, kept)])


class HeadsLoss(nn.Module):
    """Indices of positions -> Σ over heads of 0.8^k · CE_k, in nats (section 2.2.1)."""

    def __init__(self, heads: Heads, target: Transformer, positions: Positions, dtype: torch.dtype):
        super().__init__()
        self.heads, self.positions, self.dtype = heads, positions, dtype
        self.target = [target]  # in a list: no parameters of this module

    def forward(self, index: Tensor) -> Tensor:
        at = index.to(self.positions.hidden.device)
        hidden = self.positions.hidden[at].to(index.device, torch.float32)
        labels = self.positions.labels[at].to(index.device)
        with torch.autocast(index.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.heads(hidden, self.target[0])  # (K, B, V)
        return sum(0.8**k * cross_entropy(row, labels[:, k]) for k, row in enumerate(logits))


def cross_entropy(logits: Tensor, labels: Tensor, p: Tensor | None = None) -> Tensor:
    """Mean over the rows that have a label, against it or, if given, the row's distribution in `p`
    (n, V); 0 if none has."""
    real = labels >= 0
    truth = labels if p is None else p * real[:, None]
    return F.cross_entropy(logits.float(), truth, reduction="sum") / real.sum().clamp(min=1)


@torch.no_grad()
def ranks_of(heads: Heads, target: Transformer, hidden: Tensor, labels: Tensor) -> Tensor:
    """The rank that each head gives its label, (K, n): RANKS for all worse, -1 without a label.
    These are the `ranks` of all functions below."""
    ranks = torch.full(labels.T.shape, -1)
    for start in range(0, len(hidden), 512):
        part = slice(start, start + 512)
        logits = heads(hidden[part].to(target.device, target.dtype), target).cpu()  # (K, b, V)
        label = labels[part].T[..., None]  # (K, b, 1)
        above = (logits > logits.gather(-1, label.clamp(min=0))).sum(-1).clamp(max=RANKS)
        ranks[:, part] = above.where(label[..., 0] >= 0, -1)
    return ranks


def accuracy_of(ranks: Tensor) -> Tensor:
    """a[k][r], (K, RANKS): the share of labelled positions where head k's rank-r token is right."""
    labelled = (ranks >= 0).sum(1, keepdim=True).clamp(min=1)
    return torch.stack([(ranks == r).sum(1) for r in range(RANKS)], 1) / labelled


def together(ranks: Tensor) -> list[Ranks]:
    """The paths all of whose tokens were right somewhere, the most frequent first, counted where
    every head has a label. Unlike a product of accuracies this knows that heads are right at the
    same places."""
    columns = ranks[:, (ranks >= 0).all(0)].T.tolist()
    right: Counter[Ranks] = Counter()
    for column in columns:
        depth = next((k for k, rank in enumerate(column) if rank == RANKS), len(column))
        right.update(tuple(column[:n]) for n in range(1, depth + 1))
    return sorted(right, key=lambda path: (-right[path], len(path), path))  # beginnings first


def replayed(ranks: Tensor, paths: list[Ranks]) -> tuple[int, int]:
    """(tokens, passes) of greedy decoding along the text, with the tree of these paths."""
    nodes, columns = set(paths), [tuple(column) for column in ranks.T.tolist()]
    at = passes = 0
    while at < len(columns):
        length = 0
        while length < len(ranks) and columns[at][: length + 1] in nodes:
            length += 1
        at, passes = at + length + 1, passes + 1
    return at, passes


def along(ranks: list[Tensor], paths: list[Ranks]) -> float:
    """Tokens per pass of decoding these very texts."""
    tokens, passes = map(sum, zip(*(replayed(r[:, (r >= 0).any(0)], paths) for r in ranks)))
    return tokens / passes if passes else 1.0


def medusa_heads(args: argparse.Namespace) -> None:
    """Train Medusa-1 heads on the frozen target's own documents."""
    one_process("medusa")
    target, tokenizer = load_both(args, "float32")
    heads = untrained(args.heads, args.layers, target, args.shared)
    if args.init:
        known, folder = read_medusa(args.init)
        check_tokenizer(f"--init {args.init}", folder, tokenizer)
        grow(dict(heads.named_parameters()), known, args.init)
    own = read_training(args.own, target, tokenizer)
    rows = [row["prompt"] + row["tokens"] for row in own]
    prompts = [len(row["prompt"]) for row in own]
    prepare_training(args.out)
    states = stored_states(target, rows, args.dtype, args.out / "hidden.safetensors")
    labels = [labels_of(row, prompt, args.heads) for row, prompt in zip(rows, prompts)]
    learn, measured = split(own)
    positions = Positions([states[i] for i in learn], [labels[i] for i in learn])
    optimizer = torch.optim.AdamW(heads.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    batches = Shuffled(list(range(len(positions.hidden))), args.seed)
    trainer = Trainer(heads, [optimizer], batches, objective="medusa heads")
    train(trainer, args, HeadsLoss(heads, target, positions, args.dtype))
    heads.half().float()  # as they are stored
    ranks = [ranks_of(heads, target, states[i], labels[i]) for i in measured]
    heads.accuracy = accuracy_of(torch.cat(ranks, 1))
    quicken(target)  # a tree is chosen for passes as they will be
    best = max(candidates(ranks, heads, target), key=lambda tree: tree.speedup)
    heads.tree = best.paths
    save_medusa(heads, args.out, args.model, tokenizer, torch.float16)
    (args.out / "README.md").write_text(medusa_card(trainer, args, heads, best), encoding="utf-8")
    print(accuracy_table(heads.accuracy))


@dataclass(frozen=True)
class Candidate:
    """A tree, and what it should bring here."""

    paths: list[Ranks]
    tokens: float  # a pass
    cost: float  # of a round, in passes over one token

    @property
    def speedup(self) -> float:
        return self.tokens / self.cost


def candidates(
    ranks: list[Tensor], heads: Heads, target: Transformer, most: int = 63
) -> list[Candidate]:
    """The trees of 1 to `most` nodes whose paths are right most often in texts of these ranks, or
    the one of none if no path is; each with what it brings along them and the cost of its round on
    this machine: a pass over its nodes and the root, and the heads."""
    curve, drafting = cost_curve(target), heads_cost(target, heads)
    paths = together(torch.cat(ranks, 1))[: min(most, len(curve) - 2)]
    trees = [paths[:n] for n in range(1, len(paths) + 1)] or [[]]
    return [Candidate(t, along(ranks, t), curve[len(t) + 1] + drafting) for t in trees]


def accuracy_table(accuracy: Tensor) -> str:
    """Markdown: a row per head, a column per rank."""
    ranks = [f"rank {r}" for r in range(accuracy.shape[1])]
    return markdown("head", ranks, dict(enumerate(accuracy.tolist())))


def markdown(corner: str, columns: list[str], rows: dict[object, list[float]]) -> str:
    """A table of rates."""
    lines = [f"| {' | '.join([corner, *columns])} |", "|---" * len(columns) + "|---|"]
    for name, rates in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{rate:.3f}" for rate in rates) + " |")
    return "\n".join(lines)


def medusa_card(
    trainer: Trainer, args: argparse.Namespace, heads: Heads, tree: Candidate
) -> str:  # fmt: skip
    """The README.md beside the heads."""
    return MEDUSA_CARD.format(
        heads=len(heads), layers=args.layers, parameters=count_parameters(heads),
        end="the target's lm_head (v2)" if heads.shared else "a projection (v1)",
        command=shown(sys.argv[1:]), step=trainer.step, tokens=trainer.tokens,
        minutes=trainer.seconds / 60, threads=torch.get_num_threads(), device=args.device.type,
        held_out=HELD_OUT, table=accuracy_table(heads.accuracy),
        nodes=len(tree.paths), expected=tree.tokens,
    )  # fmt: skip


MEDUSA_CARD = """\
# {heads} Medusa heads

{layers} residual block(s) each and {end}; {parameters:,} parameters of their own, float16.

Medusa-1: the frozen target's own documents, Σ 0.8^k · CE over the tokens it generated.

    python -m minispec.distill {command}

{step} steps over {tokens:,} positions, {minutes:.0f} minutes on {threads} threads ({device}).

How often the head's token of this rank is the token at t + k + 2, on every {held_out}th document
(not trained on, and near to none that was):

{table}

## The tree

{nodes} nodes; {expected:.2f} tokens a pass of such text.
`python -m minispec.distill tree` measures anew, for other text and another machine.
"""


@torch.no_grad()
def tree(args: argparse.Namespace) -> None:
    """Accuracies of heads on the target's own continuations of held-out beginnings; the tree for
    them and this machine, written beside the heads; and what it brings, expected and measured."""
    if not Path(args.heads).is_dir():
        raise UserError(f"--heads {args.heads}: must be a directory, where its tree can be written")
    target, tokenizer = load_both(args, args.dtype)
    if args.prompt_tokens + args.tokens > target.config.context or args.tokens < 3:
        raise UserError(
            f"--prompt-tokens {args.prompt_tokens} and --tokens {args.tokens} must fit in the "
            f"context of {target.config.context}, and the latter be at least 3"
        )
    heads = load_medusa(args.heads, target, tokenizer)
    prompts = held_out_prompts(
        args.data, [args.kind], tokenizer, args.documents, args.prompt_tokens, SKIPPED
    )[args.kind]
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    ranks = own_ranks(target, prompts, heads, sampling, args)
    heads.accuracy = accuracy_of(torch.cat(ranks, 1))
    print(accuracy_table(heads.accuracy))
    quicken(target)  # a tree is chosen for passes as they will be
    trees = candidates(ranks, heads, target)
    best = max(trees, key=lambda tree: tree.speedup)
    if args.nodes:
        best = trees[min(args.nodes, len(trees)) - 1]
    print("nodes  tokens a pass   cost of a round   speedup")
    for each in trees:
        if each is best or len(each.paths) in (1, 2, 4, 8, 16, 32, len(trees)):
            print(
                f"{len(each.paths):>5}{each.tokens:>15.2f}{each.cost:>18.2f}{each.speedup:>10.2f}"
            )
    heads.tree = best.paths
    save_tree(heads, Path(args.heads))
    decoded = prompts[: args.measured]
    runs = [measured(target, prompt, sampling, heads, args.tokens) for prompt in decoded]
    tokens, passes = map(sum, zip(*runs))
    result = (
        f"chosen: {len(best.paths)} nodes; along these texts {best.tokens:.2f} tokens a pass, "
        f"decoding {tokens / passes:.2f} over {len(runs)} prompts"
    )
    print(result)
    renew_card(args, heads, len(prompts), result)


def own_ranks(
    target: Transformer, prompts: list[list[int]], heads: Heads, sampling: Sampling,
    args: argparse.Namespace,
) -> list[Tensor]:  # fmt: skip
    """The ranks that the heads give the target's own continuation of each prompt."""
    generator = torch.Generator().manual_seed(args.seed)
    answers = sample_batch(target, prompts, args.tokens, sampling, generator)
    rows = [prompt + answer for prompt, answer in zip(prompts, answers)]
    states = hidden_states(target, rows, torch.float32)
    return [
        ranks_of(heads, target, hidden, labels_of(row, len(prompt), len(heads)))
        for row, prompt, hidden in zip(rows, prompts, states)
    ]


def renew_card(args: argparse.Namespace, heads: Heads, texts: int, result: str) -> None:
    """The section about the tree, in the card beside the heads if there is one."""
    card = Path(args.heads) / "README.md"
    if card.exists():
        kept = card.read_text(encoding="utf-8").split("## The tree")[0]
        section = TREE_SECTION.format(
            command=shown(sys.argv[1:]), kind=args.kind, texts=texts,
            table=accuracy_table(heads.accuracy), result=result,
        )  # fmt: skip
        card.write_text(kept + section, encoding="utf-8")


TREE_SECTION = """\
## The tree

    python -m minispec.distill {command}

Accuracies along the target's own continuations of {texts} held-out beginnings ({kind}):

{table}

{result}.
"""


def measured(
    target: Transformer, prompt: list[int], sampling: Sampling, heads: Heads, n: int
) -> tuple[int, int]:
    """(tokens, passes) of real decoding, to an end token or about `n` tokens."""
    tokens: list[int] = []
    for passes, step in enumerate(medusa(target, prompt, sampling, Seeded(0), heads=heads)):
        tokens += step.tokens
        if len(tokens) >= n or set(step.tokens) & set(target.config.eos_ids):
            return len(tokens), passes
    raise AssertionError("decoding does not end")


# ---- FastMTP -------------------------------------------------------------------------------------


class Keys:
    """Keys and values of all steps so far, in the place of a cache: training needs them all."""

    def __init__(self):
        self.k, self.v = [], []

    def write(self, layer: int, slots: None, k: Tensor, v: Tensor):
        self.k.append(k)
        self.v.append(v)
        return torch.cat(self.k, 1), torch.cat(self.v, 1)


class MTPLoss(nn.Module):
    """Indices of documents -> Σ α_k · CE_k, in nats: section 3.2 of the paper.

    Step k at row i reads its own output of the step before (the target's hidden state at first)
    and the true token i + k. In mode `parallel`, the published code's, it stays at position i and
    sees what step 1 saw, at its own step. In mode `aligned` it does what drafting with one cache
    does: it stands at position i + k - 1 and sees step 1 up to row i, then its own earlier steps.
    With `soft` each CE is against the target's distribution in the label's place, not the label.
    """

    def __init__(self, head: Head, target: Transformer, documents: Documents, steps: int,
                 beta: float, aligned: bool, dtype: torch.dtype, soft: bool = False):  # fmt: skip
        super().__init__()
        self.head, self.documents, self.aligned, self.dtype = head, documents, aligned, dtype
        self.target, self.soft = [target], soft  # in a list: no parameters of this module
        self.weights = step_weights(steps, beta)

    def forward(self, index: Tensor) -> Tensor:
        hidden, tokens, labels = self.gather(index)
        with torch.autocast(index.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.steps(hidden, tokens)
            targets = self.target_probs(index) if self.soft else [None] * len(logits)
        return sum(
            weight * cross_entropy(each.flatten(0, 1), label.flatten(), p)
            for weight, each, label, p in zip(self.weights, logits, labels, targets)
        )

    @torch.compiler.disable
    def gather(self, index: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Hidden states (B, T - 2, d), tokens (B, T + steps) and each step's labels."""
        at, device, documents = index.cpu(), index.device, self.documents
        n, steps = documents.tokens.shape[1] - 2, len(self.weights)
        tokens = F.pad(documents.tokens[at], (0, steps))
        labels = [documents.labels(at, k + 1).to(device) for k in range(steps)]
        return self.states(index, n), tokens.to(device), labels

    @torch.compiler.disable
    def states(self, index: Tensor, n: int) -> Tensor:
        """The target's first `n` hidden states of each document, (B, n, d), 0 behind its end."""
        states = [self.documents.hidden[i][:n] for i in index.tolist()]
        padded = torch.stack([F.pad(each, (0, 0, 0, n - len(each))) for each in states])
        return padded.to(index.device, torch.float32)

    @torch.no_grad()
    def target_probs(self, index: Tensor) -> list[Tensor]:
        """For each step the target's distributions (B n, V) in the places of its labels: step k's
        at row i comes from the hidden state i + k."""
        n, steps = self.documents.tokens.shape[1] - 2, len(self.weights)
        p = self.target[0].logits(self.states(index, n + steps)).float().softmax(-1)
        return [p[:, k + 1 : k + 1 + n].flatten(0, 1) for k in range(steps)]

    def steps(self, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
        """Logits (B, n, V) of every step; hidden (B, n, d), tokens (B, n + steps at least)."""
        target, n, logits = self.target[0], hidden.shape[1], []
        keys = Keys()
        for k in range(len(self.weights)):
            embedded = target.model.embed_tokens(tokens[:, k + 1 : k + 1 + n])
            hidden = self.head.layers(hidden, embedded, self.plan(n, k, keys))
            logits.append(target.logits(hidden))
        return logits

    def plan(self, n: int, k: int, keys: Keys) -> Pass:
        """Step k's positions, and what it sees."""
        target = self.target[0]
        at = torch.arange(n, device=target.device)[None]
        if not self.aligned:
            return Pass(*self.head.rope(at, target.dtype))
        own = torch.eye(n, dtype=torch.bool, device=target.device)
        prefix = torch.ones_like(own).tril()
        visible = torch.cat([prefix] + [own] * k, 1)[None, None]  # (1, 1, n, (k + 1) n)
        return Pass(*self.head.rope(at + k, target.dtype), visible, keys)


def step_weights(steps: int, beta: float) -> list[float]:
    """α_k = β^(k-1) / Σ β^(j-1)."""
    powers = [beta**k for k in range(steps)]
    return [p / sum(powers) for p in powers]


@torch.no_grad()
def step_accuracy(loss: MTPLoss, indices: list[int]) -> list[float]:
    """How often each step's best token is the true one, its input tokens being true as well."""
    right, count = [0] * len(loss.weights), [0] * len(loss.weights)
    documents, target = loss.documents, loss.target[0]
    for i in indices:
        n = int(documents.lengths[i]) - 2
        if n < 1:
            continue
        tokens = F.pad(documents.tokens[i : i + 1], (0, len(right))).to(target.device)
        hidden = documents.hidden[i][None, :n].to(target.device, target.dtype)
        for k, logits in enumerate(loss.steps(hidden, tokens)):
            label = documents.labels(torch.tensor([i]), k + 1)[:, :n]
            right[k] += int((logits.argmax(-1).cpu() == label).sum())
            count[k] += int((label >= 0).sum())
    return [r / max(c, 1) for r, c in zip(right, count)]


def mtp(args: argparse.Namespace) -> None:
    """Train FastMTP's head on the frozen target's own documents, or on a corpus."""
    if (args.own is None) == (args.data is None):
        raise UserError("give either --own, the target's documents, or --data, a corpus")
    if args.own and args.documents is not None:
        raise UserError("--documents counts those of --data: of --own all are read")
    args.documents = 6000 if args.documents is None else args.documents
    args.device, rank, world = begin_distributed(args)
    target, tokenizer = load_both(args, "float32")
    head = new_head(target, args, tokenizer)
    own = (
        read_training(args.own, target, tokenizer)
        if args.own
        else corpus_rows(args.data, tokenizer, args)
    )
    prepare_training(args.out)
    file = args.out / (f"hidden.{rank}.safetensors" if world > 1 else "hidden.safetensors")
    documents = documents_of(own, target, args, file)
    learn, measured = split(own)
    batches = Shuffled(learn, args.seed)
    objective = f"mtp {args.mode}" + " soft" * args.soft
    trainer = Trainer(head, optimizers(head), batches, objective=objective)
    loss = MTPLoss(
        head, target, documents, args.k, args.beta, args.mode == "aligned", args.dtype, args.soft
    )
    train(trainer, args, loss)
    if rank == 0:
        for p in head.parameters():
            p.data = p.data.half().float()  # as they are stored
        rates = {
            kind: step_accuracy(loss, [i for i in measured if own[i]["kind"] == kind])
            for kind in sorted({own[i]["kind"] for i in measured})
        }
        save_mtp(head, args.out, args.model, tokenizer, torch.float16, loss.weights)
        (args.out / "README.md").write_text(mtp_card(trainer, args, rates), encoding="utf-8")
        print({kind: [round(a, 3) for a in each] for kind, each in rates.items()})
    end_distributed()


def new_head(target: Transformer, args: argparse.Namespace, tokenizer: Tokenizer) -> Head:
    """FastMTP's head, untrained or as --init has it."""
    head = Head(target.config)
    initialise(head, args.seed)
    if args.init:
        known, folder = read_mtp(args.init)
        check_tokenizer(f"--init {args.init}", folder, tokenizer)
        check_attention(f"--init {args.init}", folder, head.config)
        grow(dict(head.named_parameters()), known, args.init, head.config.kv_heads)
    return head.to(args.device)


def corpus_rows(data: Path, tokenizer: Tokenizer, args: argparse.Namespace) -> list[dict]:
    """Documents of a corpus in the form of `generate`'s, kinds by their shares: the control."""
    documents, _ = read_corpus(data)
    starts, rows, seen = beginnings(documents, tokenizer, args.seed, args.context), [], set()
    for _ in range(20 * args.documents):
        kind, tokens = next(starts)
        if len(rows) == args.documents:
            break
        if tuple(tokens[:12]) not in seen:  # no document twice, or held-out ones would be known
            seen.add(tuple(tokens[:12]))
            rows.append({"kind": kind, "prompt": tokens[:1], "tokens": tokens[1:]})
    return learnable(marked(rows), data)


def mtp_card(trainer: Trainer, args: argparse.Namespace, rates: dict[str, list[float]]) -> str:
    """The README.md beside the head."""
    return MTP_CARD.format(
        parameters=count_parameters(trainer.model), command=shown(sys.argv[1:]),
        text="the frozen target's own documents" if args.own else "documents of the corpus",
        weights=", ".join(f"{w:.3f}" for w in step_weights(args.k, args.beta)), mode=args.mode,
        labels="by the target's distributions (soft labels)" if args.soft else "by their tokens",
        step=trainer.step, tokens=trainer.tokens, minutes=trainer.seconds / 60,
        threads=torch.get_num_threads(), device=args.device.type, held_out=HELD_OUT,
        table=markdown("kind", [f"step {k + 1}" for k in range(args.k)], rates),
    )  # fmt: skip


MTP_CARD = """\
# A FastMTP head of {parameters:,} parameters

One block in MiMo's layout (tensors model.mtp_layers.0.*), float16; embedding and lm_head are the
target's. Trained on {text}, {labels}, Σ α_k · CE_k with α = {weights}, mode {mode}.

    python -m minispec.distill {command}

{step} steps, {tokens:,} tokens with padding, {minutes:.0f} minutes on {threads} threads ({device}).

How often each step's best token is the right one, given right tokens before it, on every
{held_out}th document (not trained on, and near to none that was):

{table}
"""


# ---- vocabularies --------------------------------------------------------------------------------


def vocabulary(args: argparse.Namespace) -> None:
    """The frequent tokens of each --text, in one file that a draft's vocabulary is read from."""
    tokenizer = read_tokenizer(args.model)
    prepare_file(args.out, "--out")
    languages = {}
    for text in args.text:
        name, _, files = text.partition("=")
        if not (name and files):
            raise UserError(f"--text {text}: must be NAME=FILE, as en=stories.txt")
        if name in languages:
            raise UserError(f"--text {text}: {name} came before: put commas between its files")
        missing = [file for file in files.split(",") if not Path(file).exists()]
        if missing:
            raise UserError(f"--text {text}: no such file: {missing[0]}")
        documents = (d for file in files.split(",") for d in read_documents(Path(file)))
        texts = (tokenizer.encode(d) for d in tqdm(documents, desc=name, unit="document"))
        languages[name] = count(texts, tokenizer.special_ids, args.size)
        total = sum(languages[name].counts)
        if not total:
            raise UserError(f"--text {text}: holds no text (of a folder the .py files are read)")
        print(f"{name}: {len(languages[name].ids)} of {tokenizer.size} tokens, {total} seen")
    save_vocabulary(languages, tokenizer, args.out)


# ---- command line --------------------------------------------------------------------------------


def sampling_arguments(
    p: argparse.ArgumentParser, temperature: float, top_k: int, top_p: float
) -> None:
    """The flags of a command that samples from the target."""
    p.add_argument("--temperature", type=float, default=temperature)
    p.add_argument("--top-k", type=int, default=top_k)
    p.add_argument("--top-p", type=float, default=top_p)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--dtype", default="auto")
    p.add_argument("--device", default="auto")


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = Parser(prog="python -m minispec.distill", description=__doc__.split("\n\n")[0])
    commands = p.add_subparsers(dest="command", required=True)
    for add in add_generate, add_draft, add_medusa, add_mtp, add_tree, add_vocabulary:
        add(commands).add_argument("--model", default="weights/target", help="the target")
    args, rest = p.parse_known_args(argv)
    if rest:
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(rest)}")
    rows = {"draft": 2, "medusa": 1, "mtp": 5}  # the least --context
    if args.command in rows:
        return checked(args, rows[args.command])
    if "seed" in args:
        check_seed(args.seed)
    counts = "documents", "tokens", "batch", "prompt_tokens", "nodes", "measured", "size"
    for name in counts:
        if name in args and getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    return args


def own_argument(p: argparse.ArgumentParser, required: bool = True) -> None:
    p.add_argument("--own", type=Path, nargs="+", required=required,
                   help="what `generate` wrote, in a file or more")  # fmt: skip


def add_generate(commands) -> argparse.ArgumentParser:
    g = commands.add_parser("generate", help="sample the target's own text")
    g.set_defaults(run=generate)
    g.add_argument("--data", type=Path, required=True, help="the corpus that gives the beginnings")
    g.add_argument("--kind", help="only of this kind (default: all, by their shares)")
    g.add_argument("--documents", type=int, default=8000)
    g.add_argument("--tokens", type=int, default=200, help="at most, of one document")
    g.add_argument("--batch", type=int, default=64)
    g.add_argument("--keep-duplicates", action="store_true",
                   help="near-duplicates as well: what is typical of the target as often as it "
                   "comes")  # fmt: skip
    sampling_arguments(g, temperature=0.6, top_k=20, top_p=0.95)
    g.add_argument("--out", type=Path, required=True, help="a .jsonl file, appended to")
    return g


def add_draft(commands) -> argparse.ArgumentParser:
    d = commands.add_parser("draft", help="train a draft on that text")
    d.set_defaults(run=draft)
    d.add_argument("--soft", action="store_true", help="learn distributions, not tokens")
    model_arguments(d, layers=3, width=64, heads=2, ffn=160)
    training_arguments(d, steps=1500)
    own_argument(d)
    return d


def add_medusa(commands) -> argparse.ArgumentParser:
    m = commands.add_parser("medusa", help="train Medusa heads on that text")
    m.set_defaults(run=medusa_heads)
    m.add_argument("--heads", type=int, default=4)
    m.add_argument("--layers", type=int, default=1, help="residual blocks of a head")
    m.add_argument("--shared", action="store_true", help="end in the target's lm_head (layout v2)")
    init_argument(m)
    training_arguments(m, steps=2000, batch_tokens=2048, context=1, lr=1e-3)
    own_argument(m)
    return m


def add_mtp(commands) -> argparse.ArgumentParser:
    f = commands.add_parser("mtp", help="train FastMTP's head on that text")
    f.set_defaults(run=mtp)
    f.add_argument("--k", type=int, default=3, help="steps of the head on its own output")
    f.add_argument("--beta", type=float, default=0.6, help="weight of a step over the one before")
    f.add_argument("--mode", choices=["aligned", "parallel"], default="aligned")
    f.add_argument("--soft", action="store_true", help="learn distributions, not tokens")
    init_argument(f)
    own_argument(f, required=False)
    f.add_argument("--data", type=Path, help="instead of --own: a corpus, as a control")
    f.add_argument("--documents", type=int, help="with --data: how many (6000)")
    training_arguments(f, steps=1000, batch_tokens=3584, context=224, lr=4e-3)
    return f


def add_tree(commands) -> argparse.ArgumentParser:
    t = commands.add_parser("tree", help="measure Medusa heads, and choose the tree for them")
    t.set_defaults(run=tree)
    t.add_argument("--heads", default="weights/medusa", help="their directory; its tree is renewed")
    t.add_argument("--data", type=Path, required=True, help="the corpus whose held-out text begins")
    t.add_argument("--kind", default="stories_en")
    t.add_argument("--documents", type=int, default=100)
    t.add_argument("--prompt-tokens", type=int, default=16)
    t.add_argument("--tokens", type=int, default=150)
    sampling_arguments(t, temperature=0.0, top_k=0, top_p=1.0)
    t.add_argument("--nodes", type=int, help="default: what pays most on this machine")
    t.add_argument("--measured", type=int, default=10, help="texts that are decoded for real")
    return t


def add_vocabulary(commands) -> argparse.ArgumentParser:
    v = commands.add_parser("vocabulary", help="list each language's frequent tokens to draft from")
    v.set_defaults(run=vocabulary)
    v.add_argument("--text", action="append", required=True, metavar="NAME=FILE,…",
                   help="a language and its texts: .txt, .jsonl, a folder of Python files "
                        "(repeat)")  # fmt: skip
    v.add_argument("--size", type=int, default=2048, help="tokens of each language")
    v.add_argument("--out", type=Path, required=True)
    return v


@command
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    args.run(args)


if __name__ == "__main__":
    main()
