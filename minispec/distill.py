"""A target's own text, and drafts trained on it.

    python -m minispec.distill generate --model weights/target --data DIR --out own.jsonl
    python -m minispec.distill draft --model weights/target --own own.jsonl --out weights/draft

A draft is to say what the target would say, so the target's own output is its best text: sampled
in batches from the beginnings of training documents, without near-duplicates. Started again, both
commands go on where they stopped.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from minispec.checkpoint import load, save
from minispec.errors import UserError, command
from minispec.model import Transformer, count_parameters
from minispec.pretrain import (
    KINDS,
    Batches,
    NextToken,
    Trainer,
    build,
    checked,
    optimizers,
    read_corpus,
    shown,
    train,
    training_arguments,
)  # fmt: skip
from minispec.sampling import OneHot, Sampling, probs
from minispec.tokenizer import Tokenizer

LONGEST = 24  # tokens of a prompt
HELD_OUT = 50  # every 50th generated document is for measuring


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
        laws = probs(model.logits(last), sampling)
        if isinstance(laws, OneHot):
            tokens = laws.tokens
        else:
            tokens = torch.multinomial(laws, 1, generator=generator)[:, 0].tolist()
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

    def add(self, tokens: list[int]) -> bool:
        """True if `tokens` is near to what was added before; otherwise it is added."""
        grams = {tuple(tokens[i : i + self.n]) for i in range(len(tokens) - self.n + 1)}
        if len(grams & self.seen) > self.share * len(grams):
            return True
        self.seen |= grams
        return False


def beginnings(
    documents: dict[str, list[str]], tokenizer: Tokenizer, seed: int
) -> Iterator[tuple[str, list[int]]]:
    """(kind, first tokens of a training document), kinds by their shares, without end."""
    rng = np.random.default_rng(seed)
    kinds = [kind for kind in documents if kind in KINDS]
    shares = np.array([KINDS[kind][1] for kind in kinds])
    while True:
        kind = str(rng.choice(kinds, p=shares / shares.sum()))
        document = documents[kind][rng.integers(len(documents[kind]))]
        yield kind, tokenizer.encode(document[:400])[: rng.integers(4, LONGEST)]


def generate(args: argparse.Namespace) -> None:
    """Append documents to --out until it holds --documents of them."""
    model, tokenizer = load(args.model, args.dtype, args.device)
    documents, _ = read_corpus(args.data)
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    n = min(args.tokens, model.config.context - LONGEST)
    if n < 1:
        raise UserError(f"the target's context of {model.config.context} tokens is too short")
    duplicates, kept, batch = Duplicates(), 0, 0
    rows = read_own(args.out) if args.out.exists() else []
    if rows:  # the last batch may have been cut short: it is made again
        batch = rows[-1]["batch"]
        rows = [row for row in rows if row["batch"] < batch]
        part = args.out.with_suffix(".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        part.replace(args.out)
    for row in rows:
        duplicates.add(row["tokens"])
        kept += 1
    starts = beginnings(documents, tokenizer, args.seed)
    for _ in range(batch * args.batch):
        next(starts)
    bar = tqdm(total=args.documents, initial=kept, unit="document")
    with args.out.open("a", encoding="utf-8") as file:
        while kept < args.documents:
            kinds, prompts = zip(*(next(starts) for _ in range(args.batch)))
            generator = torch.Generator().manual_seed(args.seed + batch)
            answers = sample_batch(model, list(prompts), n, sampling, generator)
            lines = []
            for kind, prompt, tokens in zip(kinds, prompts, answers):
                if not duplicates.add(tokens):
                    row = {"batch": batch, "kind": kind, "prompt": prompt, "tokens": tokens}
                    lines.append(json.dumps(row) + "\n")
            if not lines:
                raise UserError(
                    f"only {kept} different documents came: raise --temperature or ask for fewer"
                )
            file.write("".join(lines))
            file.flush()
            kept, batch = kept + len(lines), batch + 1
            bar.update(len(lines))
    bar.close()


def read_own(path: Path) -> list[dict]:
    """The documents that `generate` wrote."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines[:-1]]  # a line cut short by a kill is dropped
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a file of minispec.distill generate: {error}") from None


# ---- a draft -------------------------------------------------------------------------------------


class SoftLabels(nn.Module):
    """rows (B, T + 1) -> cross-entropy of the draft against the target's whole law, in nats."""

    def __init__(self, draft: Transformer, target: Transformer, dtype: torch.dtype):
        super().__init__()
        self.draft, self.dtype = draft, dtype
        self.target = [target]  # no parameters of this module

    def forward(self, rows: Tensor) -> Tensor:
        with torch.autocast(rows.device.type, self.dtype, enabled=self.dtype != torch.float32):
            with torch.no_grad():
                law = self.target[0].logits(self.target[0](rows[:, :-1])).float().softmax(-1)
            logits = self.draft.logits(self.draft(rows[:, :-1]))
        return F.cross_entropy(logits.float().flatten(0, 1), law.flatten(0, 1))


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
    """Train a draft on the target's own documents, by its tokens or by its laws."""
    target, tokenizer = load(args.model, "float32", str(args.device))
    own = read_own(args.own)
    measured = own[::HELD_OUT]
    documents: dict[str, list[list[int]]] = {}
    for i, row in enumerate(own):
        if i % HELD_OUT:
            documents.setdefault(row["kind"], []).append(row["prompt"] + row["tokens"])
    model = build(args, tokenizer.backend)
    if count_parameters(model) * 10 > count_parameters(target):
        raise UserError(
            "a draft must have at most a tenth of its target's parameters: make it less wide"
        )
    labels = "soft labels" if args.soft else "hard labels"
    batches = Batches(documents, args.seed)
    trainer = Trainer(model, optimizers(model), batches, objective=labels)
    args.out.mkdir(parents=True, exist_ok=True)
    objective = SoftLabels(model, target, args.dtype) if args.soft else NextToken(model, args.dtype)
    train(trainer, args, objective)
    save(model, tokenizer, args.out, torch.float16)
    rates = agreement(load(args.out, "float32", str(args.device))[0], target, measured)
    (args.out / "README.md").write_text(draft_card(trainer, args, rates), encoding="utf-8")
    print(
        "same argmax, Σ min(p, q):", {k: (round(a, 3), round(b, 3)) for k, (a, b) in rates.items()}
    )


def draft_card(
    trainer: Trainer, args: argparse.Namespace, rates: dict[str, tuple[float, float]]
) -> str:
    """The README.md beside the draft's weights."""
    config = trainer.model.config
    sizes = {kind: stream.size for kind, stream in trainer.batches.streams.items()}
    kinds = "\n".join(
        f"| {kind} | {sizes.get(kind, 0):,} | {same:.3f} | {overlap:.3f} |"
        for kind, (same, overlap) in rates.items()
    )
    return DRAFT_CARD.format(
        parameters=count_parameters(trainer.model), c=config,
        labels="the target's laws (soft labels)" if args.soft else "its tokens (hard labels)",
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

{step} steps, {tokens:,} tokens, {minutes:.0f} minutes of training on {threads} threads ({device}).

On every {held_out}th document, never trained on: how often the draft's best token is the target's,
and Σ min(p, q), the chance that a token drawn from the draft is accepted at temperature 1.

| kind | training tokens | same argmax | Σ min(p, q) |
|---|---|---|---|
{kinds}
"""


# ---- command line --------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m minispec.distill", description=__doc__.split("\n")[0]
    )
    commands = p.add_subparsers(dest="command", required=True)
    g = commands.add_parser("generate", help="sample the target's own text")
    g.set_defaults(run=generate)
    g.add_argument("--data", type=Path, required=True, help="the corpus that gives the beginnings")
    g.add_argument("--documents", type=int, default=8000)
    g.add_argument("--tokens", type=int, default=200, help="at most, of one document")
    g.add_argument("--batch", type=int, default=64)
    g.add_argument("--temperature", type=float, default=0.6)
    g.add_argument("--top-k", type=int, default=20)
    g.add_argument("--top-p", type=float, default=1.0)
    g.add_argument("--seed", type=int, default=0)
    g.add_argument("--dtype", default="auto")
    g.add_argument("--device", default="auto")
    d = commands.add_parser("draft", help="train a draft on that text")
    d.set_defaults(run=draft)
    d.add_argument("--own", type=Path, required=True, help="what `generate` wrote")
    d.add_argument("--soft", action="store_true", help="learn the target's laws, not its tokens")
    training_arguments(d, layers=3, width=64, heads=2, ffn=160, steps=1500)
    g.add_argument("--out", type=Path, required=True, help="a .jsonl file, appended to")
    for each in (g, d):
        each.add_argument("--model", default="weights/target", help="the target")
    args = p.parse_args(argv)
    if args.command == "draft":
        return checked(args)
    if min(args.documents, args.tokens, args.batch) < 1:
        raise UserError("--documents, --tokens and --batch must be at least 1")
    return args


@command
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    args.run(args)


if __name__ == "__main__":
    main()
