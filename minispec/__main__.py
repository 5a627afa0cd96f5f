"""The `minispec` command: `minispec generate …` is short for `python -m minispec.generate …`."""

import sys
from importlib import import_module

from minispec import __version__
from minispec.cli import Parser, command

COMMANDS = {  # name: (module, what it does)
    "generate": ("generate.__main__", "generate text with any method, or chat"),
    "bench": ("bench.__main__", "compare the speed of all methods"),
    "certify": ("certify.__main__", "check whether a decoder is lossless"),
    "pretrain": ("training.pretrain", "train a small model from text"),
    "distill": ("distill.__main__", "train a draft model or heads for a model"),
    "fetch": ("checkpoints.fetch", "download a real model, SmolLM2-135M-Instruct"),
}


@command
def main(argv: list[str] | None = None) -> None:
    p = Parser(prog="minispec", description=__doc__, add_help=False)
    p.add_argument("command", choices=COMMANDS)
    p.add_argument("--version", action="version", version=f"minispec {__version__}")
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in ([], ["-h"], ["--help"]):
        print("usage: minispec COMMAND …   (minispec COMMAND -h shows its flags)\n"
              "       minispec --version\n")  # fmt: skip
        print("\n".join(f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items()))
        return
    module, _ = COMMANDS[p.parse_args(argv[:1]).command]
    import_module(f"minispec.{module}").main(argv[1:])


if __name__ == "__main__":
    main()
