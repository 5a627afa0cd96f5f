"""Generate text with any method, from the command line.

python -m minispec.generate "Once upon a time" --method autoregressive --stats
"""

import argparse
import contextlib
import os
import sys
from typing import TextIO

from minispec import cli, distributed
from minispec.checkpoints.fetch import default_model
from minispec.checkpoints.load import load, require_tokenizer
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import OutputFile, Parser, Source, UserError, flag_name, number
from minispec.fast import optimize, optimize_drafter, quantized_dtype
from minispec.fast.bitwise import NOT_COMPILED
from minispec.generate import drafters
from minispec.generate.api import stream, unlisted_eos_warning
from minispec.generate.run import StopConditions
from minispec.generate.terminal import chat, show
from minispec.generate.view import write_page
from minispec.methods import METHODS, find_method
from minispec.methods.declaration import Method, Option
from minispec.model import Transformer
from minispec.sampling import Sampling, Seeded
from minispec.verify import RULES

VOCABULARY_SIZE = Option("maximum number of tokens per language", "size")
FILES = "weights", "vocabulary", "paths"  # the kinds of options whose flags may name a file
EXCLUSIVE = [  # two flags, and why they cannot be combined
    ("k", "tree", "--k drafts a chain and --tree a tree; choose one"),
    ("verify", "tree", "--verify block is for chains, not for a --tree"),
    ("draft", "heads", "--draft and --heads are mutually exclusive"),
    ("draft", "tree", "--tree is for heads, not for --draft"),
    ("draft", "vocabulary", "--vocabulary is for heads, not for --draft"),
    ("draft", "vocabulary_size", "--vocabulary is for heads, not for --draft"),
    ("chat", "prompt_ids", "--chat cannot use --prompt-ids or --prompt-file"),
    ("chat", "prompt_file", "--chat cannot use --prompt-ids or --prompt-file"),
    ("color", "json", "--color and --json are mutually exclusive"),
    ("bitwise", "compile", NOT_COMPILED),
]  # fmt: skip


def parse_ids(text: str) -> list[int]:
    return [number(0)(part) for part in cli.comma_separated(text)] if text.strip() else []


def option_flags() -> dict[str, dict[str, tuple[Option, object]]]:
    """The flags of all methods' options: for each, the option and its default, by method."""
    flags: dict[str, dict[str, tuple[Option, object]]] = {}
    for method in map(find_method, METHODS):
        for name, (option, default) in method.options.items():
            if option.help:
                flags.setdefault(option.flag or name, {})[method.name] = option, default
            if option.kind == "vocabulary":
                flags.setdefault("vocabulary_size", {})[method.name] = VOCABULARY_SIZE, 0
    return flags


def flag_of(method: Method, name: str) -> str:
    """The flag of a method's option."""
    return method.options[name][0].flag or name


def add_model_flags(p: Parser) -> None:
    """Add --model and the flags that say how to run it, also for bench."""
    p.add_argument("--model", type=Source,
                   help="directory, hub id or .gguf (default: the toy, if shipped, else SmolLM2)")
    p.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    p.add_argument("--dtype", default="auto",
                   help="auto (bfloat16 on a GPU, and with --quantize if that is faster, otherwise "
                   "float32), float64, float32 or bfloat16")
    p.add_argument("--quantize", choices=["int8"], help="int8 weights for target and draft")
    p.add_argument("--compile", action="store_true", help="compile the passes and cache them")
    p.add_argument("--bitwise", action="store_true",
                   help="make all methods, plain decoding too, give the same numbers, bit for bit")


def choose_model(args: argparse.Namespace) -> None:
    """Set the default --model, and the --dtype that suits --quantize."""
    args.model = distributed.from_rank_0(default_model) if args.model is None else args.model
    if args.quantize:
        args.dtype = distributed.from_rank_0(lambda: quantized_dtype(args.dtype, args.device))


def optimize_all(args: argparse.Namespace, model: Transformer, *options: dict) -> None:
    """Apply --quantize, --compile and --bitwise to the model and, but for the last, to the drafters
    among methods' options."""
    drafts = [own["draft"] for own in options if own.get("draft") is not None]
    for network in dict.fromkeys([model, *drafts]):
        bitwise = args.bitwise and network is model
        optimize(network, args.quantize == "int8", args.compile, bitwise)
    for own in options:
        optimize_drafter(own, model)


def parser() -> Parser:
    p = Parser(prog="python -m minispec.generate", description=__doc__)
    prompt = p.add_mutually_exclusive_group()
    prompt.add_argument("prompt", nargs="?", help="text to continue (default: stdin)")
    prompt.add_argument("--prompt-ids", type=parse_ids, help="the prompt as token ids: 1,2,3")
    prompt.add_argument("--prompt-file", type=Source, help="a UTF-8 file containing the prompt")
    p.add_argument("--method", default="autoregressive", type=Source, metavar="M",
                   help=f"{', '.join(METHODS)}, or your own: file.py:function "
                   "(default: %(default)s)")  # fmt: skip
    add_model_flags(p)
    specific = p.add_argument_group("method-specific options")
    for name, uses in option_flags().items():
        option, default = next(iter(uses.values()))
        files = any(used.kind in FILES for used, _ in uses.values())
        settings = {"type": Source if files else number(1) if option is VOCABULARY_SIZE else str}
        settings = {"action": "store_const", "const": True} if default is False else settings
        helps = {used.help: [m for m in uses if uses[m][0].help == used.help]
                 for used, _ in uses.values()}  # fmt: skip
        help = "; ".join(f"{', '.join(methods)}: {text}" for text, methods in helps.items())
        specific.add_argument(flag_name(name), **settings, help=help)
    specific.add_argument("--option", action="append", default=[], metavar="NAME=VALUE",
                          help="any option of the method, by its name in Python (repeatable)")
    p.add_argument("--chat", action="store_true",
                   help="hold a conversation: the prompt, if any, then one turn per line of stdin")
    p.add_argument("--system", help="system message for --chat")
    p.add_argument("--max-new-tokens", type=number(0), default=200, help="default: 200")
    p.add_argument("--temperature", type=number(0, kind=float), default=0.0,
                   help="0 (default): greedy")
    p.add_argument("--top-k", type=number(0), default=0, help="0 (default): off")
    p.add_argument("--top-p", type=number(0, 1, float), default=1.0, help="1 (default): off")
    p.add_argument("--seed", type=number(-(2**63)), default=0, help="default: 0")
    p.add_argument("--ignore-eos", action="store_true", help="continue past the model's end tokens")
    p.add_argument("--stop", action="append", default=[], metavar="S",
                   help="stop before this text (repeatable)")
    p.add_argument("--stats", action="store_true", help="print statistics to standard error")
    p.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    # two flags, because a flag with an optional value would take the prompt as its value
    p.add_argument("--color", action="store_const", const="brief",
                   help="accepted drafts in blue, the target's own tokens in green")
    p.add_argument("--color=full", dest="color", action="store_const", const="full",
                   help="also show rejected drafts, struck out")
    p.add_argument("--html", type=OutputFile, metavar="FILE",
                   help="write a page that steps through the run, or a chat's last answer")
    return p


def check_flags(args: argparse.Namespace) -> None:
    """Reject invalid combinations before any weights are read."""
    args.method = find_method(args.method)
    own = {flag_of(args.method, name) for name in args.method.options}
    own |= {"vocabulary_size"} if "vocabulary" in own else set()
    for name, uses in option_flags().items():
        if getattr(args, name) is not None and name not in own:
            raise UserError(f"{flag_name(name)} is for --method {', '.join(uses)}, not for "
                            f"{args.method.name}")  # fmt: skip
    args.options = parse_options(args)
    given = {name for name, value in vars(args).items() if value not in (None, False, "tokens")}
    for one, other, message in EXCLUSIVE:
        if {one, other} <= given:
            raise UserError(message)
    StopConditions(args.max_new_tokens, tuple(args.stop))
    Sampling(args.temperature, args.top_k, args.top_p)
    if args.system is not None and not args.chat:
        raise UserError("--system requires --chat")
    if args.compile and distributed.tensor_parallel.size > 1:
        raise UserError(distributed.NOT_COMPILED)


@cli.command
def main(argv: list[str] | None = None) -> None:
    distributed.join(share_models=True)
    with distributed.together():
        args = parser().parse_args(argv)
        check_flags(args)
    with cli.stdout_reserved() if args.json else contextlib.nullcontext(sys.stdout) as out:
        generate(args, out)


def generate(args: argparse.Namespace, out: TextIO) -> None:
    """Generate as the flags say and write the text, or the JSON object, to `out`."""
    prompt = None if args.chat else distributed.from_rank_0(lambda: read_prompt(args))
    choose_model(args)
    with distributed.together():
        model, tokenizer = load(args.model, args.dtype, args.device)
        if not args.json or args.chat:
            require_tokenizer(tokenizer, model.source, "use --json, which prints token ids")
        drafter = args.options | drafting_options(args, model, tokenizer)
    names = "max_new_tokens", "temperature", "top_k", "top_p", "ignore_eos", "stop"
    options = drafter | {name: getattr(args, name) for name in names}
    # a chat's turns share the randomness
    options |= {"method": args.method.function, "randomness": Seeded(args.seed)}
    optimize_all(args, model, options)
    unlisted = unlisted_eos_warning(model, tokenizer, args.stop)
    if unlisted and not args.ignore_eos:
        cli.note(f"{unlisted}, or its text to --stop")
    if args.chat:
        run = chat(model, tokenizer, args, options, out)
    else:
        run = stream(model, tokenizer, prompt, **options)
        shown_prompt = prompt if isinstance(prompt, str) and not args.json else ""
        show(run, args, tokenizer, out, shown_prompt)
    if args.html is not None and run is not None:
        file = os.devnull if distributed.tensor_parallel.rank else args.html
        write_page(file, model, tokenizer, run, args.model)


def read_prompt(args: argparse.Namespace) -> str | list[int]:
    """The prompt, from the command line, a file or standard input."""
    if args.prompt is not None or args.prompt_ids is not None:
        return args.prompt_ids if args.prompt is None else args.prompt
    if args.prompt_file is not None:
        with cli.user_error(f"--prompt-file {args.prompt_file} cannot be read"):
            with open(args.prompt_file, **cli.TEXT_ENCODING) as file:
                return file.read().removesuffix("\n")
    if sys.stdin.isatty():
        raise UserError("no prompt: pass text, --prompt-ids or --prompt-file, or pipe text in")
    return sys.stdin.read().removesuffix("\n")


def parse_options(args: argparse.Namespace) -> dict:
    """The options of the method that need no model: from its flags and from --option."""
    given, flags = {}, option_flags()
    for name, (option, _) in args.method.options.items():
        flag = flag_of(args.method, name)
        text = getattr(args, flag) if flag in flags else None
        if text is not None and option.kind not in ("weights", "vocabulary"):
            given[name] = flag_name(flag), text
    for pair in args.option:
        name, equals, text = pair.partition("=")
        name, names = name.replace("-", "_"), args.method.options
        if not equals or name not in names:
            raise UserError(f"--option {pair}: {args.method.name} has no such option; "
                            f"{cli.suggestion(name, names)}")  # fmt: skip
        given[name] = f"--option {name}", text
    return {name: parse_option(args, name, *given[name]) for name in given}


def parse_option(args: argparse.Namespace, name: str, flag: str, text: str | bool) -> object:
    """The value of an option that was written as `text`, after the `flag`."""
    option, default = args.method.options[name]
    try:
        if text is True or option.kind == "number":
            return text if text is True else option.parse(text, default)
        if option.kind == "paths":
            return drafters.read_paths(text)
        if option.kind == "sampling":
            return Sampling(number(0, kind=float)(text), args.top_k, args.top_p)
        if option.kind == "rule" and text in RULES:
            return RULES[text]
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{flag} {error}") from None
    advice = f"choose from {', '.join(RULES)}" if option.kind == "rule" else "it has its own flag"
    raise UserError(f"{flag} {text}: {advice}")


def drafting_options(
    args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer | None
) -> dict:
    """Load what the method drafts with, from its flags or from next to the model."""
    weights, loaded = args.method.of_kind("weights"), {}
    sources = {name: getattr(args, flag_of(args.method, name), None) for name in weights}
    sources = {name: source for name, source in sources.items() if source is not None}
    folders = {name: weights[name].folder for name in sources}
    for name, folder in (folders | drafters.missing_drafters(args.method, model, sources)).items():
        words = () if folder == "draft" else (args.vocabulary, args.vocabulary_size)
        loaded |= drafters.load_drafter(folder, model, tokenizer, sources.get(name), *words)
    return loaded


if __name__ == "__main__":
    main()
