"""The commands `minispec distill …`."""

import contextlib
import sys
from pathlib import Path

from minispec import distill, distributed
from minispec.checkpoints.fetch import default_model
from minispec.checkpoints.load import resolve
from minispec.cli import Parser, Source, check_outputs, command
from minispec.distill import acceptance, draft, eagle3, export, generate, medusa, mtp, vocabulary
from minispec.training.loop import device_argument, training_setup

TRAINING, MEASURING = (draft, medusa, mtp, eagle3), (acceptance, distill.tree)


@command
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    p = Parser(prog="python -m minispec.distill", description=distill.__doc__)
    commands = p.add_subparsers(dest="command", required=True)
    for module in (generate, *TRAINING, *MEASURING, vocabulary, export):
        name = module.__name__.rpartition(".")[2]
        description = (module.__doc__ or "").split("\n\n")[0]
        sub = commands.add_parser(name, help=description, description=description)
        sub.add_argument("--model", type=Source, help="the target (default: the bundled toy)")
        if module in TRAINING + MEASURING:
            sub.add_argument("--generated", type=Path, nargs="+", required=True,
                             help="files written by `distill generate`")  # fmt: skip
        if module in MEASURING:
            sub.add_argument("--heads", type=Source, help="directory of the heads, whose "
                             "config.json is updated (default: next to the model)")  # fmt: skip
        if module in (medusa, mtp, eagle3):
            sub.add_argument("--vocabulary", type=Source, help="a file from distill vocabulary: "
                             "train on its tokens only")  # fmt: skip
            sub.add_argument("--init", type=Source, help="start from these heads; their sizes "
                             "override the flags")  # fmt: skip
        if module in (generate, *MEASURING):
            device_argument(sub)
        module.arguments(sub)
        sub.set_defaults(run=module.run)
    distributed.join()
    with distributed.together():
        args = p.parse_args(argv)
        args.model = default_model() if args.model is None else args.model
        check_outputs(vars(args) | {"model": Source(resolve(args.model))})
    trains = args.run in [module.run for module in TRAINING]
    if not trains and args.run is not generate.run:
        distributed.require_one_process(args.command)
    with training_setup(args, ["distill", *argv]) if trains else contextlib.nullcontext():
        args.run(args)


if __name__ == "__main__":
    main()
