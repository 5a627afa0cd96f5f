"""Generate text with any method, from a shell.

python -m minispec.generate "Once upon a time" --method autoregressive --stats
"""

import argparse
import contextlib
import os
import sys
from typing import TextIO

from minispec.checkpoints.fetch import default_model
from minispec.checkpoints.load import load, needed
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.errors import (
    AS_TEXT,
    Parser,
    UserError,
    check_writable,
    comma_separated,
    command,
    number,
    stdout_reserved,
)
from minispec.fast import optimize
from minispec.generate.api import LEAST, METHODS, stream
from minispec.generate.drafters import (
    NEEDS,
    load_drafter,
    read_tree_option,
)
from minispec.generate.run import Ending
from minispec.generate.terminal import chat, note_unlisted_end, show
from minispec.generate.view import write_page
from minispec.model import Transformer
from minispec.sampling import Sampling, Seeded


def drafts(text: str) -> int | str:
    """What --k takes."""
    return text if text == "auto" else number(LEAST["k"])(text)


HEADED = "medusa", "medusa-typical", "fastmtp"
# flags of some methods only: which methods, what argparse makes of the value, help
FLAGS = {
    "draft": (("speculative",), str, "the draft model (default: the one beside the model)"),
    "draft_temperature": (("speculative", "fastmtp"), number(0, kind=float), "of the drafts"),
    "k": (("speculative", "prompt-lookup", "fastmtp"), drafts, "drafts a round, or auto"),
    "heads": (HEADED, str, "directory, file or hub id"),
    "tree": (("medusa", "medusa-typical"), str, "nodes, auto, a published name, a JSON file"),
    "vocabulary": (HEADED, str, "file of distill vocabulary, a .pt, or none"),
    "vocabulary_size": (HEADED, number(1), "tokens of a language at most"),
    "block": (("jacobi",), number(LEAST["block"]), "tokens guessed at once"),
    "window": (("lookahead",), number(LEAST["window"]), "W, columns of the window"),
    "ngram": (("lookahead", "prompt-lookup"), number(LEAST["ngram"]), "N; or the longest match"),
    "guesses": (("lookahead",), number(LEAST["guesses"]), "G, guesses verified in a pass"),
    "pool_from_prompt": (("lookahead",), None, "prompt and output join the pool"),
}
PLAIN = "k", "block", "window", "ngram", "guesses", "pool_from_prompt"  # under their own names


def as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def text(argument: str) -> str:
    """A text of the command line: in UTF-8, whatever encoding the system believes in."""
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError:
        return argument


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = Parser(prog="python -m minispec.generate", description=__doc__)
    prompt = p.add_mutually_exclusive_group()
    prompt.add_argument("prompt", nargs="?", type=text, help="text to continue (default: stdin)")
    prompt.add_argument("--prompt-ids", type=token_ids, help="the prompt as token ids: 1,2,3")
    prompt.add_argument("--prompt-file", help="a UTF-8 file that holds the prompt")
    p.add_argument("--method", default="autoregressive", choices=METHODS, metavar="M",
                   help=", ".join(METHODS))
    p.add_argument("--model", help="directory, hub id or .gguf (default: the shipped toy)")
    some = p.add_argument_group("flags of some methods")
    for name, (methods, kind, help) in FLAGS.items():
        settings = {"type": kind} if kind else {"action": "store_const", "const": True}
        some.add_argument(as_flag(name), **settings, help=f"{', '.join(methods)}: {help}")
    p.add_argument("--chat", action="store_true",
                   help="a conversation: the prompt, if any, then a line of stdin per turn")
    p.add_argument("--system", type=text, help="with --chat: the system message")
    p.add_argument("--max-new-tokens", type=number(0), default=200)
    p.add_argument("--temperature", type=number(0, kind=float), default=0.0, help="0: greedy")
    p.add_argument("--top-k", type=number(0), default=0, help="0: off")
    p.add_argument("--top-p", type=number(0, 1, float), default=1.0, help="1: off")
    p.add_argument("--seed", type=number(-(2**63)), default=0)
    p.add_argument("--ignore-eos", action="store_true", help="go on after the model's end tokens")
    p.add_argument("--stop", type=text, action="append", default=[], metavar="S",
                   help="end before this text (repeatable)")
    p.add_argument("--device", default="auto", help="auto, cpu, cuda, mps")
    p.add_argument("--dtype", default="auto",
                   help="auto (bfloat16 on a GPU, else float32), float64, float32, bfloat16")
    p.add_argument("--quantize", choices=["int8"], help="int8 weights, of target and draft")
    p.add_argument("--compile", action="store_true", help="passes as compiled graphs, made once")
    p.add_argument("--stats", action="store_true", help="figures of the run on standard error")
    p.add_argument("--json", action="store_true", help="one JSON object instead of text")
    # two flags rather than one with a value: it must never take the prompt for its value
    p.add_argument("--color", action="store_const", const="brief",
                   help="accepted drafts green, the target's own tokens magenta")
    p.add_argument("--color=full", dest="color", action="store_const", const="full",
                   help="and the rejected drafts, struck out")
    p.add_argument("--html", metavar="FILE",
                   help="a page to step through the run, or a chat's last answer, pass by pass")
    return p.parse_args(argv)


def check_flags(args: argparse.Namespace) -> None:
    """Reject what is visibly wrong before any weights are read."""
    for name, (methods, _, _) in FLAGS.items():
        if getattr(args, name) is not None and args.method not in methods:
            raise UserError(
                f"{as_flag(name)} is for --method {' or '.join(methods)}, not for {args.method}"
            )
    Ending(args.max_new_tokens, tuple(args.stop))
    Sampling(args.temperature, args.top_k, args.top_p)
    ids_or_file = args.prompt_ids is not None or args.prompt_file is not None
    for wrong, message in (
        (args.chat and ids_or_file, "--chat takes its turns as text: give a prompt, or none"),
        (args.system is not None and not args.chat, "--system is for --chat"),
        (args.color and args.json, "--color is for text: give it without --json"),
    ):
        if wrong:
            raise UserError(message)
    if args.html is not None:
        check_writable(args.html, "--html")


def method_options(
    args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer | None
) -> dict:
    """What the command line gives to the method alone; loads its draft or heads."""
    options = {name: getattr(args, name) for name in PLAIN if getattr(args, name) is not None}
    if args.draft_temperature is not None:
        options["draft_sampling"] = Sampling(args.draft_temperature, args.top_k, args.top_p)
    if args.method in NEEDS:
        source = args.heads if args.draft is None else args.draft
        where = source, args.vocabulary, args.vocabulary_size
        options |= load_drafter(args.method, model, tokenizer, *where)
    if args.tree is not None:
        options["tree"] = read_tree_option(args.tree, options["heads"], model.config.context)
    return options


def token_ids(text: str) -> list[int]:
    """What --prompt-ids takes."""
    try:
        return list(map(int, comma_separated(text))) if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text[:40]} must be whole numbers between commas, as 1,2,3"
        ) from None


def read_prompt(args: argparse.Namespace) -> str | list[int]:
    """The prompt, from whichever source was given."""
    if args.prompt is not None or args.prompt_ids is not None:
        return args.prompt_ids if args.prompt is None else args.prompt
    if args.prompt_file is not None:
        try:
            with open(args.prompt_file, **AS_TEXT) as file:
                return file.read().removesuffix("\n")
        except OSError as error:
            raise UserError(f"--prompt-file {args.prompt_file} cannot be read: {error}") from None
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("no prompt: give a text, --prompt-ids, --prompt-file, or pipe one in")
    return sys.stdin.read().removesuffix("\n")


@command
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    check_flags(args)
    with stdout_reserved() if args.json else contextlib.nullcontext(sys.stdout) as out:
        generate(args, out)


def generate(args: argparse.Namespace, out: TextIO) -> None:
    """Do what the flags ask for; the text, or the JSON object, goes to `out`."""
    prompt = None if args.chat else read_prompt(args)
    args.model = default_model() if args.model is None else args.model
    model, tokenizer = load(args.model, args.dtype, args.device)
    if not args.json or args.chat:
        needed(tokenizer, model.source, "give --json, which shows token ids")
    names = "method", "max_new_tokens", "temperature", "top_k", "top_p", "ignore_eos"
    options = {name: getattr(args, name) for name in names} | {"stop": tuple(args.stop)}
    options["randomness"] = Seeded(args.seed)  # one for all turns of a chat
    options |= method_options(args, model, tokenizer)
    for each in (model, options.get("draft")):
        if each is not None:
            optimize(each, int8=args.quantize == "int8", compiled=args.compile)
    if args.chat:
        run = chat(model, tokenizer, args, options, out)
    else:
        run = stream(model, tokenizer, prompt, **options)
        note_unlisted_end(model, tokenizer, args)
        before = prompt if isinstance(prompt, str) and not args.json else ""
        show(run, args, tokenizer, out, before)
    if args.html is not None and run is not None:
        write_page(args.html, model, tokenizer, run, args.model)


if __name__ == "__main__":
    main()
