"""Train and measure the heads that run on their own output: FastMTP's and EAGLE-3's."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import mean

import torch
from torch import Tensor

from minispec.checkpoints.eagle3 import load_eagle3, save_eagle3
from minispec.checkpoints.heads import load_mtp, load_subset, save_measured, save_mtp
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError, number
from minispec.distill import documents as data
from minispec.distill.documents import Documents, cross_entropy
from minispec.methods.eagle3 import OWN_VOCABULARY, Eagle3Head, default_layers
from minispec.methods.fastmtp import MTPHead, RecurrentHead
from minispec.methods.vocabulary import FullVocabulary, Subset
from minispec.model import ForwardContext, Transformer, count_parameters
from minispec.training import loop
from minispec.training.new_model import initialise


class AllSteps:
    """A cache for training: it keeps the keys and values of all steps so far."""

    def __init__(self):
        self.k, self.v = [], []

    def write(self, layer: int, slots: None, k: Tensor, v: Tensor):
        self.k.append(k)
        self.v.append(v)
        return torch.cat(self.k, 1), torch.cat(self.v, 1)


class MTPLoss:
    """Document indices -> Σ α_k · CE_k, in nats (section 3.2 of the paper).

    Step k at row i reads step k - 1's output there (the target's hidden state for step 1) and the
    true token i + k. In mode `parallel`, as in the published code, it has position i and attends to
    rows up to i of its own step. In mode `aligned`, as in drafting with one cache, it has position
    i + k - 1 and attends to rows up to i of step 1 and to row i of steps 2 to k. With `soft`, CE_k
    compares with the target's distribution there instead of the label. With a `vocabulary` (an
    EAGLE-3 head has its own, and its own lm_head), logits and the target's distribution cover only
    its tokens, and labels outside it are ignored."""

    def __init__(self, head: RecurrentHead, target: Transformer, documents: Documents, steps: int,
                 beta: float, aligned: bool, soft: bool = False,
                 vocabulary: Subset | None = None):  # fmt: skip
        self.head, self.target, self.documents = head, target, documents
        self.aligned, self.soft = aligned, soft
        if isinstance(head, Eagle3Head):
            vocabulary = Subset(target.lm_head.weight, head.host_ids.tolist())
        self.draft_head = vocabulary or FullVocabulary(target)
        self.weights = step_weights(steps, beta)

    def __call__(self, index: Tensor) -> Tensor:
        states, tokens, labels = self.gather(index)
        n, total = labels[0].shape[1], 0.0
        for k, x in enumerate(self.outputs(states[:, :n], tokens)):
            label = self.draft_head.to_subset_ids(labels[k])
            real = label >= 0  # (B, n)
            p = None
            if self.soft:  # the target's distributions (N, V) at the labels
                after = states[:, k + 1 :][:, :n][real][:, : self.target.config.hidden_size]
                p = self.draft_head.logits(after).float().softmax(-1)
            total += self.weights[k] * cross_entropy(self.logits(x[real]), label[real], p)
        return total

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        return self.documents.gather(index, len(self.weights), self.target.device)

    def logits(self, x: Tensor) -> Tensor:
        """The head's outputs (..., d) -> (..., V)."""
        return getattr(self.head, "logits", self.draft_head.logits)(x)  # its own lm_head, if any

    def outputs(self, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
        """The head's outputs (B, n, d) for every step, given the target's hidden states (B, n, d)
        and at least n + steps tokens per row."""
        n, keys, outputs = hidden.shape[1], AllSteps(), []
        hidden = self.head.project_features(hidden)
        for k in range(len(self.weights)):
            embedded = self.head.embed(tokens[:, k + 1 : k + 1 + n], self.target)
            hidden = self.head.run_block(hidden, embedded, self.plan(n, k, keys))
            outputs.append(hidden)
        return outputs

    def steps(self, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
        """Logits (B, n, V) for every step; the arguments are those of `outputs`."""
        return [self.logits(x) for x in self.outputs(hidden, tokens)]

    def plan(self, n: int, k: int, keys: AllSteps) -> ForwardContext:
        """Step k's positions and attention mask."""
        target = self.target
        at = torch.arange(n, device=target.device)[None]
        if not self.aligned:
            return ForwardContext(*self.head.rope(at, target.dtype))
        same_row = torch.eye(n, dtype=torch.bool, device=target.device)
        prefix = torch.ones_like(same_row).tril()
        attn_mask = torch.cat([prefix] + [same_row] * k, 1)[None, None]  # (1, 1, n, (k + 1) n)
        return ForwardContext(*self.head.rope(at + k, target.dtype), attn_mask, keys)


def step_weights(steps: int, beta: float) -> list[float]:
    """α_k = β^(k-1) / Σ β^(j-1)."""
    powers = [beta**k for k in range(steps)]
    return [p / sum(powers) for p in powers]


@torch.no_grad()
def step_accuracy(loss: MTPLoss, indices: list[int]) -> list[float]:
    """For each step, the share of labels that are its best token in the loss's vocabulary, given
    the true tokens before."""
    right, count = [0] * len(loss.weights), [0] * len(loss.weights)
    for i in indices:
        states, tokens, labels = loss.gather(torch.tensor([i]))
        for k, logits in enumerate(loss.steps(states[:, : labels[0].shape[1]], tokens)):
            right[k] += int((logits.argmax(-1) == loss.draft_head.to_subset_ids(labels[k])).sum())
            count[k] += int((labels[k] >= 0).sum())
    return [r / max(c, 1) for r, c in zip(right, count)]


def measure(
    head: RecurrentHead, loss: Callable[[Documents], MTPLoss], target: Transformer,
    rows: list[dict], context: int,
) -> str:  # fmt: skip
    """Set the head's acceptance to the mean of `step_accuracy` over the kinds of documents. Returns
    a Markdown table with a row per kind and a column per step."""
    layers = head.feature_layers
    measured = loss(Documents.from_rows(rows, target, context, torch.float32, layers))
    kinds: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        kinds.setdefault(row["kind"], []).append(i)
    rates = {kind: step_accuracy(measured, indices) for kind, indices in kinds.items()}
    head.acceptance = [mean(of_step) for of_step in zip(*rates.values())]
    steps = [f"step {k + 1}" for k in range(len(head.acceptance))]
    return loop.markdown_table("kind", steps, rates)


def run(args: argparse.Namespace) -> None:
    """Train FastMTP's head on text that the target generated."""
    target, tokenizer = data.load_target(args)
    head = load_mtp(args.init, target, tokenizer) if args.init else MTPHead(target.config)
    train_head(args, target, tokenizer, head)


def run_eagle3(args: argparse.Namespace) -> None:
    """Train an EAGLE-3 head on text that the target generated.

    As in the paper's training-time test, each step reads the head's output of the step before. The
    head drafts only the tokens of --vocabulary, whose lm_head rows it starts from."""
    if args.init and args.vocabulary:
        raise UserError(f"--init: {OWN_VOCABULARY}")
    target, tokenizer = data.load_target(args)
    if args.init:
        head = load_eagle3(args.init, target, tokenizer)
    else:  # with the target's sizes, and the plain llama block of published heads
        c, subset = target.config, load_subset(args.vocabulary, target, tokenizer)
        ids = sorted(subset.host_ids.tolist()) if subset else list(range(c.vocab_size))
        plain = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "qk_norm"), False)
        head = Eagle3Head(replace(c, model_type="llama", **plain), c, ids, default_layers(c.layers))
    train_head(args, target, tokenizer, head)


def train_head(
    args: argparse.Namespace, target: Transformer, tokenizer: Tokenizer, head: RecurrentHead
) -> None:
    """Train, measure and save a head, which is initialised first unless it has been loaded."""
    is_eagle3 = isinstance(head, Eagle3Head)  # and has a vocabulary of its own
    vocabulary = head if is_eagle3 else load_subset(args.vocabulary, target, tokenizer)
    if not args.init:
        initialise(head, args.seed)
        if is_eagle3:
            head.lm_head.weight.data.copy_(target.lm_head.weight[head.host_ids])
        head.to(args.device)
    loss = partial(MTPLoss, head, target, steps=args.k, beta=args.beta, soft=args.soft,
                   aligned=args.mode == "aligned", vocabulary=vocabulary)  # fmt: skip
    options = f"{args.mode} {args.k} {args.beta} {args.soft}"

    def finish(held_out: list[dict]) -> tuple[str, str, str]:
        table = measure(head, loss, target, held_out, args.context)
        where = args.out, loop.without_folder(args.model), tokenizer, torch.float16
        if is_eagle3:
            save_eagle3(head, *where)
        else:
            save_mtp(head, *where, step_weights(args.k, args.beta))
            data.store_vocabulary(args, target, tokenizer)
        title = "An EAGLE-3 head" if is_eagle3 else "A FastMTP head"
        measured = ("How often each step's best token is right on held-out documents, given the "
                    "true tokens before it:")  # fmt: skip
        return f"{title} of {count_parameters(head):,} parameters", measured, table

    data.train_on_generated(args, target, tokenizer, head, loss, options, finish, None, vocabulary)


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--mode", choices=["aligned", "parallel"], default="aligned",
                   help="run steps as in drafting, or as in the published code")  # fmt: skip
    head_arguments(p, k=3, beta=0.6)


def eagle3_arguments(p: argparse.ArgumentParser) -> None:
    p.set_defaults(mode="aligned")
    head_arguments(p, k=7, beta=0.8)


def head_arguments(p: argparse.ArgumentParser, k: int, beta: float) -> None:
    """Add the flags of `train_head`, with these defaults."""
    loop.add_flags(
        p,
        ("k", number(1, 32), k, "steps to train, one per drafted token"),
        ("beta", number(0, 10, float), beta, "ratio of successive loss weights"),
    )
    p.add_argument("--soft", action="store_true",
                   help="learn the target's distributions instead of its tokens")  # fmt: skip
    loop.training_arguments(p, steps=1000, context=224, lr=4e-3)


def run_acceptance(args: argparse.Namespace) -> None:
    """Measure how often each step of a FastMTP or EAGLE-3 head is right. `--k auto` starts from
    these rates.

    Training measures new heads itself; this is for heads from elsewhere, and for other text."""
    target, folder, drafter, rows = data.load_for_measuring(args, "mtp")
    head, vocabulary = drafter["head"], drafter.get("vocabulary")
    subset = vocabulary and vocabulary.select([])
    loss = partial(MTPLoss, head, target, steps=args.k, beta=1.0, aligned=True, vocabulary=subset)
    table = measure(head, loss, target, rows, target.config.context)
    save_measured(head, folder)
    print(table)


def acceptance_arguments(p: argparse.ArgumentParser) -> None:
    loop.add_flags(p, ("k", number(1, 32), 3, "steps to measure"))
