"""Generate text with a target model, and train drafts and heads on it.

    python -m minispec.distill generate --model weights/target --data stories.txt --out own.jsonl
    python -m minispec.distill mtp --model weights/target --own own.jsonl --out weights/mtp

A draft should predict the target's tokens, so the target's own output is the best training text.
Generation and training resume where they stopped when restarted.
"""

import contextlib
import sys
from pathlib import Path

from minispec import parallel
from minispec.checkpoints.fetch import default_model
from minispec.checkpoints.load import resolve
from minispec.errors import Parser, Source, check_outputs, command
from minispec.training.distill import (
    acceptance,
    draft,
    export,
    generate,
    medusa,
    mtp,
    tree,
    vocabulary,
)
from minispec.training.distill.documents import Documents, hidden_states
from minispec.training.distill.generate import sample_batch
from minispec.training.distill.medusa import HeadsLoss
from minispec.training.distill.mtp import AllSteps, MTPLoss, step_accuracy, step_weights
from minispec.training.distill.tree import labels_of
from minispec.training.loop import training_setup
from minispec.training.own_text import Duplicates

__all__ = [
    "AllSteps", "Documents", "Duplicates", "HeadsLoss", "MTPLoss", "hidden_states", "labels_of",
    "main", "sample_batch", "step_accuracy", "step_weights",
]  # fmt: skip


@command
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    p = Parser(prog="python -m minispec.distill", description=__doc__)
    commands = p.add_subparsers(dest="command", required=True)
    for module in (generate, draft, medusa, mtp, acceptance, tree, vocabulary, export):
        name = module.__name__.rpartition(".")[2]
        description = (module.__doc__ or "").split("\n\n")[0]
        sub = commands.add_parser(name, help=description, description=description)
        sub.add_argument("--model", type=Source, help="the target (default: the bundled toy)")
        if module in (draft, medusa, mtp, acceptance, tree):
            sub.add_argument("--own", type=Path, nargs="+", required=True,
                             help="files written by `distill generate`")  # fmt: skip
        module.arguments(sub)
        sub.set_defaults(run=module.run)
    parallel.join()
    with parallel.together():
        args = p.parse_args(argv)
        args.model = default_model() if args.model is None else args.model
        check_outputs(vars(args) | {"model": Source(resolve(args.model))})
    trains = args.run in (draft.run, medusa.run, mtp.run)
    if not trains and args.run is not generate.run:
        parallel.require_one_process(args.command)
    with training_setup(args, ["distill", *argv]) if trains else contextlib.nullcontext():
        args.run(args)
