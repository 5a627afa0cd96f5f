"""The commands `minispec distill …`."""

import contextlib
import ctypes
import sys
from pathlib import Path

from minispec import distill, distributed
from minispec.checkpoints.fetch import default_model
from minispec.checkpoints.load import resolve
from minispec.cli import Parser, Source, check_outputs, command
from minispec.distill import draft, export, generate, medusa, mtp, vocabulary
from minispec.training.loop import DEVICE, add_flags, training_setup

COMMANDS = {  # what each runs, which its docstring describes, and what adds its flags
    "generate": (generate.run, generate.arguments),
    "draft": (draft.run, draft.arguments),
    "medusa": (medusa.run, medusa.arguments),
    "mtp": (mtp.run, mtp.arguments),
    "eagle3": (mtp.run_eagle3, mtp.eagle3_arguments),
    "acceptance": (mtp.run_acceptance, mtp.acceptance_arguments),
    "tree": (medusa.run_tree, lambda p: None),
    "vocabulary": (vocabulary.run, vocabulary.arguments),
    "export": (export.run, export.arguments),
}
HEADS, MEASURING = ("medusa", "mtp", "eagle3"), ("acceptance", "tree")
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # parameters of mallopt(3)


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tensors for the next ones. By default, glibc gives
    that of large ones back, and Linux clears every page again: a quarter of the time. Elsewhere,
    this does nothing."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        allocator = ctypes.CDLL(None)
        allocator.mallopt(M_MMAP_MAX, 0)
        allocator.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


@command
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    p = Parser(prog="python -m minispec.distill", description=distill.__doc__)
    commands = p.add_subparsers(dest="command", required=True)
    for name, (run, arguments) in COMMANDS.items():
        description = (run.__doc__ or "").split("\n\n")[0]
        sub = commands.add_parser(name, help=description, description=description)
        sub.add_argument("--model", type=Source, help="the target (default: the bundled toy)")
        if name in ("draft", *HEADS, *MEASURING):
            sub.add_argument("--generated", type=Path, nargs="+", required=True,
                             help="files written by `distill generate`")  # fmt: skip
        if name in MEASURING:
            sub.add_argument("--heads", type=Source, help="directory of the heads, whose "
                             "config.json is updated (default: next to the model)")  # fmt: skip
        if name in HEADS:
            sub.add_argument("--vocabulary", type=Source, help="a file from distill vocabulary: "
                             "train on its tokens only")  # fmt: skip
            sub.add_argument("--init", type=Source, help="start from these heads; their sizes "
                             "override the flags")  # fmt: skip
        if name in ("generate", *MEASURING):
            add_flags(sub, DEVICE)
        if name in ("generate", "tree"):
            add_flags(sub, ("dtype", str, "auto", "float32 or bfloat16"))
        arguments(sub)
    distributed.join()
    with distributed.together():
        args = p.parse_args(argv)
        args.model = default_model() if args.model is None else args.model
        check_outputs(vars(args) | {"model": Source(resolve(args.model))})
    trains = args.command in ("draft", *HEADS)
    if not trains and args.command != "generate":
        distributed.require_one_process(args.command)
    keep_freed_memory()
    with training_setup(args, ["distill", *argv]) if trains else contextlib.nullcontext():
        COMMANDS[args.command][0](args)


if __name__ == "__main__":
    main()
