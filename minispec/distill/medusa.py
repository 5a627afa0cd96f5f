"""Train Medusa heads on text that the target generated (Medusa-1: the target stays frozen)."""

import argparse
from functools import partial

import torch
from torch import Tensor

from minispec import distributed
from minispec.checkpoints.heads import load_medusa, load_subset, save_medusa
from minispec.cli import UserError
from minispec.distill.documents import (
    Documents,
    cross_entropy,
    load_target,
    store_vocabulary,
    train_on_generated,
)
from minispec.distill.tree import accuracy_table, choose_tree
from minispec.methods.medusa import MedusaHeads, new_heads
from minispec.methods.vocabulary import FullVocabulary, Subset
from minispec.model import Transformer, count_parameters
from minispec.training.loop import integer_flags, training_arguments, without_folder, write_card


class HeadsLoss:
    """Document indices -> Σ over heads of 0.8^k · CE_k, in nats (section 2.2.1). CE_k compares head
    k's prediction at t with the generated token t + k + 2, over the full vocabulary. Heads that end
    in the target's lm_head can use a smaller `vocabulary`; labels outside it are ignored."""

    def __init__(self, heads: MedusaHeads, target: Transformer, documents: Documents,
                 vocabulary: Subset | None = None):  # fmt: skip
        self.heads, self.target, self.documents = heads, target, documents
        self.draft_head = vocabulary or FullVocabulary(target)

    def __call__(self, index: Tensor) -> Tensor:
        labels = [self.documents.labels(index, k + 1) for k in range(len(self.heads))]
        labels = torch.stack(labels).to(self.target.device)  # (K, B, n)
        labels = self.draft_head.to_subset_ids(labels)
        labelled = (labels >= 0).any(0)
        hidden = self.documents.states(index, labels.shape[-1])  # (B, n, d)
        hidden = hidden.to(labels.device)[labelled]  # (N, d)
        logits = self.heads(hidden, self.draft_head)  # (K, N, V)
        labels = labels[:, labelled]
        return sum(0.8**k * cross_entropy(*both) for k, both in enumerate(zip(logits, labels)))


def run(args: argparse.Namespace) -> None:
    target, tokenizer = load_target(args)
    if args.init:
        heads = load_medusa(args.init, target, tokenizer).requires_grad_(True)
    else:
        heads = new_heads(args.heads, args.layers, target, args.shared)
    if args.vocabulary and not heads.shared:
        raise UserError("--vocabulary needs --shared heads; these have projections of their own")
    vocabulary = load_subset(args.vocabulary, target, tokenizer)
    loss = partial(HeadsLoss, heads, target, vocabulary=vocabulary)
    adamw = torch.optim.AdamW(heads.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    run, held_out = train_on_generated(args, target, tokenizer, heads, loss, str(heads), [adamw],
                                       vocabulary=vocabulary)  # fmt: skip
    if distributed.world.rank:
        return
    choose_tree(heads, vocabulary, target, held_out, args.context)
    save_medusa(heads, args.out, without_folder(args.model), tokenizer, torch.float16)
    store_vocabulary(args, target, tokenizer)
    title = f"{len(heads)} Medusa heads of {count_parameters(heads):,} parameters"
    measured = (f"The tree has {len(heads.tree)} nodes; `minispec distill tree` chooses one for "
                "your machine. How often the head's token of each rank is right on held-out "
                "documents:")  # fmt: skip
    write_card(args, run, title, measured, accuracy_table(heads))


def arguments(p: argparse.ArgumentParser) -> None:
    integer_flags(p, ("heads", 1, 4, "Medusa heads"), ("layers", 0, 1, "residual blocks per head"))
    p.add_argument("--shared", action="store_true", help="use the target's lm_head (layout v2)")
    training_arguments(p, steps=2000, context=256, lr=1e-3)
