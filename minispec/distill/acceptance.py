"""Measure how often each step of a FastMTP or EAGLE-3 head is right. `--k auto` starts from these
rates.

`distill mtp` and `distill eagle3` measure new heads themselves; this is for heads from elsewhere,
and for other text.
"""

import argparse
from functools import partial

from minispec.checkpoints.heads import save_acceptance
from minispec.cli import number
from minispec.distill.documents import load_for_measuring
from minispec.distill.mtp import MTPLoss, measure


def run(args: argparse.Namespace) -> None:
    target, folder, drafter, rows = load_for_measuring(args, "mtp")
    head, vocabulary = drafter["head"], drafter.get("vocabulary")
    subset = vocabulary and vocabulary.select([])
    loss = partial(MTPLoss, head, target, steps=args.k, beta=1.0, aligned=True, vocabulary=subset)
    table = measure(head, loss, target, rows, target.config.context)
    save_acceptance(head, folder)
    print(table)


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--k", type=number(1, 32), default=3,
                   help="steps to measure (default: %(default)s)")  # fmt: skip
