"""Train Medusa heads on the target's own text: Medusa-1, the target stays as it is."""

import argparse

import torch
from torch import Tensor, nn

from minispec.distill.documents import (
    HELD_OUT,
    Documents,
    cross_entropy,
    learn,
    load_target,
    own_argument,
)
from minispec.distill.tree import accuracy_table, choose_tree, ranks_of
from minispec.errors import UserError, number
from minispec.heads import load_medusa, save_medusa
from minispec.methods.medusa import Heads, untrained
from minispec.model import Transformer, count_parameters
from minispec.training import prepare, training_arguments, write_card


class HeadsLoss(nn.Module):
    """Indices of documents -> Σ over heads of 0.8^k · CE_k, in nats (section 2.2.1); CE_k is over
    the full vocabulary, against the generated token at t + k + 2."""

    def __init__(self, heads: Heads, target: Transformer, documents: Documents, dtype: torch.dtype):
        super().__init__()
        self.heads, self.documents, self.dtype = heads, documents, dtype
        self.target = [target]  # in a list: no parameters of this module

    def forward(self, index: Tensor) -> Tensor:
        at, device = index.cpu(), index.device
        labels = [self.documents.labels(at, k + 1) for k in range(len(self.heads))]
        labels = torch.stack(labels)  # (K, B, n)
        some = (labels >= 0).any(0)
        hidden = self.documents.states(at, labels.shape[-1])[some].to(device)  # (N, d)
        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.heads(hidden, self.target[0])  # (K, N, V)
        labels = labels[:, some].to(device)
        return sum(0.8**k * cross_entropy(*both) for k, both in enumerate(zip(logits, labels)))


def run(args: argparse.Namespace) -> None:
    prepare(args, args.words)
    target, tokenizer = load_target(args, "float32")
    heads = untrained(args.heads, args.layers, target, args.shared)
    if args.init:
        theirs = load_medusa(args.init, target, tokenizer)
        sizes = (len(theirs), theirs.layers, theirs.shared)
        if sizes != (args.heads, args.layers, args.shared):
            raise UserError(f"--init {args.init}: give its sizes: --heads {sizes[0]} --layers "
                            f"{sizes[1]}{' --shared' * sizes[2]}")  # fmt: skip
        heads.load_state_dict(theirs.state_dict())
    run, measured = learn(
        args, target, tokenizer, heads,
        [torch.optim.AdamW(heads.parameters(), betas=(0.9, 0.95), weight_decay=0.0)],
        lambda documents: HeadsLoss(heads, target, documents, args.dtype),
        f"{args.heads} {args.layers} {args.shared}",
    )  # fmt: skip
    heads.half().float()  # as they are stored
    rows = [(row["prompt"] + row["tokens"])[: args.context] for row in measured]
    prompts = [len(row["prompt"]) for row in measured]
    choose_tree(ranks_of(heads, target, rows, prompts), heads, target)
    save_medusa(heads, args.out, args.model, tokenizer, torch.float16)
    table = accuracy_table(heads.accuracy)
    write_card(
        args, run, f"{len(heads)} Medusa heads",
        f"{args.layers} residual block(s) each and "
        f"{'the lm_head of the target (v2)' if args.shared else 'a projection (v1)'}; "
        f"{count_parameters(heads):,} parameters of their own, float16. Medusa-1: the frozen "
        "target's own documents, Σ 0.8^k · CE over the tokens it generated.",
        "How often a head's token of this rank is the right one, on every "
        f"{HELD_OUT}th document (not trained on, and near to none that was):\n\n{table}\n\n"
        f"Their tree has {len(heads.tree)} nodes; `python -m minispec.distill tree` chooses one "
        "for other text and another machine.",
    )  # fmt: skip
    print(table)


def arguments(p: argparse.ArgumentParser) -> None:
    own_argument(p)
    p.add_argument("--heads", type=number(1, 100), default=4, help="default: %(default)s")
    p.add_argument("--layers", type=number(0, 100), default=1,
                   help="residual blocks of a head (default: %(default)s)")  # fmt: skip
    p.add_argument("--shared", action="store_true", help="end in the target's lm_head (layout v2)")
    p.add_argument("--init", help="begin with these heads, of the same sizes")
    training_arguments(p, 2000, batch_tokens=4096, context=256, least_context=3, lr=1e-3)
