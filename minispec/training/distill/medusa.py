"""Train Medusa heads on the target's own text: Medusa-1, the target stays as it is."""

import argparse

import torch
from torch import Tensor

from minispec.checkpoints.heads import load_medusa, load_subset, save_medusa
from minispec.errors import UserError
from minispec.methods.medusa import MedusaHeads, untrained
from minispec.methods.vocabulary import FullVocabulary, Subset
from minispec.model import Transformer, count_parameters
from minispec.training.distill.documents import (
    Documents,
    cross_entropy,
    keep_vocabulary,
    learn,
    load_target,
    words_digest,
)
from minispec.training.distill.tree import accuracy_table, choose_tree
from minispec.training.loop import training_arguments, whole_numbers, without_folders, write_card


class HeadsLoss:
    """Indices of documents -> Σ over heads of 0.8^k · CE_k, in nats (section 2.2.1); CE_k is over
    the full vocabulary, against the generated token at t + k + 2. For heads that end in the
    target's lm_head it can be over a `vocabulary`: a label that is none of its tokens does not
    count."""

    def __init__(self, heads: MedusaHeads, target: Transformer, documents: Documents,
                 vocabulary: Subset | None = None):  # fmt: skip
        self.heads, self.target, self.documents = heads, target, documents
        self.words = vocabulary or FullVocabulary(target)

    def __call__(self, index: Tensor) -> Tensor:
        labels = [self.documents.labels(index, k + 1) for k in range(len(self.heads))]
        labels = torch.stack(labels).to(self.target.device)  # (K, B, n)
        labels = self.words.to_subset_ids(labels)
        some = (labels >= 0).any(0)
        hidden = self.documents.states(index, labels.shape[-1]).to(some.device)[some]  # (N, d)
        logits = self.heads(hidden, self.words)  # (K, N, V)
        labels = labels[:, some]
        return sum(0.8**k * cross_entropy(*both) for k, both in enumerate(zip(logits, labels)))


def run(args: argparse.Namespace) -> None:
    target, tokenizer = load_target(args)
    if args.init:
        heads = load_medusa(args.init, target, tokenizer).requires_grad_(True)
    else:
        heads = untrained(args.heads, args.layers, target, args.shared)

    if args.vocabulary and not heads.shared:
        raise UserError("--vocabulary is for heads with --shared; these have their own lm_heads")
    words = load_subset(args.vocabulary, target, tokenizer)

    def loss_of(documents: Documents) -> HeadsLoss:
        return HeadsLoss(heads, target, documents, words)

    options = f"{heads} {words_digest(words)}"
    adamw = torch.optim.AdamW(heads.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    run, measured = learn(args, target, tokenizer, heads, loss_of, options, [adamw], words=words)
    heads.half().float()  # as they are stored
    choose_tree(heads, words, target, measured, args.context)
    save_medusa(heads, args.out, without_folders(args.model), tokenizer, torch.float16)
    keep_vocabulary(args, target, tokenizer)
    facts = {
        "layout": "v2, the target's lm_head" if heads.shared else "v1, a projection each",
        "residual blocks of a head": heads.layers,
        "loss": "Medusa-1: Σ 0.8^k · CE_k over the frozen target's own tokens",
        "tree": f"{len(heads.tree)} nodes; `distill tree` chooses one for another machine",
        "measured": "how often a head's token of this rank is right, on held-out documents",
    }
    title = f"{len(heads)} Medusa heads of {count_parameters(heads):,} parameters"
    write_card(args, run, title, facts, accuracy_table(heads))


def arguments(p: argparse.ArgumentParser) -> None:
    whole_numbers(p, ("heads", 1, 4, "heads"), ("layers", 0, 1, "residual blocks of a head"))
    p.add_argument("--shared", action="store_true", help="end in the target's lm_head (layout v2)")
    p.add_argument("--vocabulary", help="a file of distill vocabulary: learn its tokens alone")
    p.add_argument("--init", help="begin with these heads, whose sizes then count")
    training_arguments(p, steps=2000, context=256, lr=1e-3)
