"""Measure how often each step of a FastMTP head is right. `--k auto` starts from these rates.

`distill mtp` measures new heads itself; this is for heads from elsewhere, and for other text.
"""

import argparse
from pathlib import Path
from statistics import mean

import torch

from minispec.checkpoints.heads import save_acceptance
from minispec.cli import Source, UserError, number
from minispec.distill.documents import (
    Documents,
    hidden_states,
    load_target,
    select_labelled,
)
from minispec.distill.mtp import MTPLoss, accuracy_table, category_accuracy
from minispec.distill.own_text import read_split
from minispec.generate.drafters import find_drafter, load_drafter


def run(args: argparse.Namespace) -> None:
    """Measure on the documents of --own that training on them would hold out."""
    target, tokenizer = load_target(args)
    folder = Path(args.heads or find_drafter("fastmtp", target))
    if not folder.is_dir():
        raise UserError(f"--heads {folder}: must be a directory, to save the rates in")
    drafter = load_drafter("fastmtp", target, tokenizer, str(folder))
    head, vocabulary = drafter["head"], drafter["vocabulary"]
    context = target.config.context
    rows = select_labelled(read_split(args.own, target, tokenizer)[1], context, "measure on")
    texts = [(row["prompt"] + row["tokens"])[:context] for row in rows]
    states = list(hidden_states(target, texts, torch.float32))
    documents = Documents(texts, [len(row["prompt"]) for row in rows], states)
    subset = vocabulary and vocabulary.select([])
    loss = MTPLoss(head, target, documents, args.k, 1.0, aligned=True, vocabulary=subset)
    rates = category_accuracy(loss, rows)
    head.acceptance = [mean(of_step) for of_step in zip(*rates.values())]
    save_acceptance(head, folder)
    print(accuracy_table(rates))


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--heads", type=Source, help="directory of the head, whose config.json is "
                   "updated (default: the one next to the model)")  # fmt: skip
    p.add_argument("--k", type=number(1, 32), default=3,
                   help="steps to measure (default: %(default)s)")  # fmt: skip
    p.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
