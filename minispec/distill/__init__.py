"""A target's own text, and drafts and heads trained on it.

    python -m minispec.distill generate --model weights/target --data stories.txt --out own.jsonl
    python -m minispec.distill mtp --model weights/target --own own.jsonl --out weights/mtp

A draft is to say what the target would say, so the target's own output is its best text. Started
again, generation and training go on where they stopped.
"""

import contextlib
import os
import sys
from pathlib import Path

from minispec.distill import draft, export, generate, medusa, mtp, tree, vocabulary
from minispec.distill.documents import Documents, hidden_states
from minispec.distill.generate import Duplicates, sample_batch
from minispec.distill.medusa import HeadsLoss
from minispec.distill.mtp import AllSteps, MTPLoss, step_accuracy, step_weights
from minispec.distill.tree import labels_of
from minispec.errors import Parser, UserError, command
from minispec.training import prepared

__all__ = [
    "AllSteps", "Documents", "Duplicates", "HeadsLoss", "MTPLoss", "hidden_states", "labels_of",
    "main", "sample_batch", "step_accuracy", "step_weights",
]  # fmt: skip


@command
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    p = Parser(prog="python -m minispec.distill", description=__doc__)
    commands = p.add_subparsers(dest="command", required=True)
    for module in (generate, draft, medusa, mtp, tree, vocabulary, export):
        name, says = module.__name__.rpartition(".")[2], (module.__doc__ or "").split("\n\n")[0]
        each = commands.add_parser(name, help=says, description=says)
        each.add_argument("--model", default="weights/target", help="the target")
        if module in (draft, medusa, mtp, tree):
            each.add_argument("--own", type=Path, nargs="+", required=True,
                              help="what `generate` wrote, in a file or more")  # fmt: skip
        module.arguments(each)
        each.set_defaults(run=module.run)
    args = p.parse_args(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("minispec.distill runs in one process: start it without torchrun")
    trains = args.run in (draft.run, medusa.run, mtp.run)
    with prepared(args, ["distill", *argv]) if trains else contextlib.nullcontext():
        args.run(args)
