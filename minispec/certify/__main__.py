"""The command line of the certifier."""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import torch

from minispec import certify, cli, distributed
from minispec.certify import report
from minispec.certify.common import Verdict, describe_error
from minispec.certify.compare import compare
from minispec.certify.functions.checks import (
    FUNCTION_CHECKS,
    THOROUGH,
    Limits,
    check_implementation,
)
from minispec.certify.methods.checks import CHECKS
from minispec.certify.servers.checks import REQUESTS, SERVER_CHECKS, check_server
from minispec.certify.servers.context import precision
from minispec.checkpoints.fetch import default_model
from minispec.checkpoints.load import load
from minispec.checkpoints.weights import write_text
from minispec.cli import (
    OutputFile,
    OutputFolder,
    Parser,
    Source,
    UserError,
    import_function,
    number,
)
from minispec.methods import find_method
from minispec.methods.declaration import Method
from minispec.remote.client import Server, keys_in

FLAG_MODES = {  # the modes each flag belongs to; "" checks this package
    **dict.fromkeys(("baseline", "bitwise", "greedy_only", "require_tv", "requests"),
                    ("impl", "server")),
    "only": ("impl", "server", "method", ""),
    **dict.fromkeys(("thorough", "runs", "outcomes", "length", "save"), ("impl",)),
    **dict.fromkeys(("name", "key_env", "precision"), ("server",)),
    "model": ("server", "compare"), "checks": ("impl", "server", "method", ""),
}  # fmt: skip
NOT_BITWISE = "thorough", "runs", "outcomes", "length", "requests", "require_tv"


def parser() -> Parser:
    p = Parser(prog="python -m minispec.certify", description=certify.__doc__)
    mode = p.add_mutually_exclusive_group()
    mode.add_argument("--impl", type=Source, help="test a function: package.module:function or "
                      "file.py:function")  # fmt: skip
    mode.add_argument("--server", metavar="URL", help="test a server with /v1/completions")
    mode.add_argument("--compare", nargs=2, type=Path, metavar="JSONL", help="explain the "
                      "differences between two files of generate --json lines")  # fmt: skip
    mode.add_argument("--method", type=Source, help="prove a decoding loop: a method of this "
                      "package, or your own as file.py:function")  # fmt: skip
    p.add_argument("--baseline", type=Source, help="plain decoding by the same engine (a "
                   "function or a URL); --impl or --server must then equal it")  # fmt: skip
    p.add_argument("--bitwise", action="store_true", default=None, help="only check that greedy "
                   "texts equal those of --baseline near ties, where any rounding would show")
    p.add_argument("--thorough", action="store_true", default=None, help="test --impl for "
                   f"{THOROUGH.seconds / 60:.0f} instead of {Limits.seconds / 60:.0f} minutes")
    p.add_argument("--runs", type=number(100), help="maximum per statistical row of --impl")
    p.add_argument("--outcomes", type=number(10), help="maximum outcomes per enumeration "
                   f"(default: {Limits.outcomes}, thorough: {THOROUGH.outcomes})")  # fmt: skip
    p.add_argument("--length", type=number(2, 24),
                   help=f"the most tokens that are enumerated (default: {Limits.length})")
    p.add_argument("--model", type=Source, help="of --server or --compare (default: generate's)")
    p.add_argument("--name", help="the model's name on the server (default: its only model)")
    p.add_argument("--key-env", nargs="+", metavar="NAME", help="the environment variable that "
                   "holds the API key of --server, and optionally a second one for --baseline. "
                   "Without it no key is sent")  # fmt: skip
    p.add_argument("--requests", type=number(100), help="the most that are drawn for --impl, or "
                   f"about as many to --server (default: {REQUESTS})")  # fmt: skip
    p.add_argument("--require-tv", type=number(0, 1, float), help="exit with 3 if any row with "
                   "samples may have missed a larger bias, as a total variation at one token "
                   f"(default: {report.REQUIRED_TV})")  # fmt: skip
    p.add_argument("--precision", type=precision, help="of --server: float32 (default), bfloat16, "
                   "float16, or the logit gap below which two tokens are tied")  # fmt: skip
    p.add_argument("--checks", type=cli.comma_separated,
                   help=f"run only some checks, of {','.join(CHECKS)}; "
                   f"for --impl, of {','.join(FUNCTION_CHECKS)}; "
                   f"for --server, of {','.join(SERVER_CHECKS)}")  # fmt: skip
    p.add_argument("--only", metavar="TEXT", help="judge only the rows whose case (for --impl and "
                   '--server: whose "check: case") contains this text')  # fmt: skip
    p.add_argument("--greedy-only", action="store_true", default=None, help="leave out the checks "
                   "that sample, for a decoder that does not")  # fmt: skip
    p.add_argument("--save", type=OutputFolder, metavar="DIR", help="keep --impl's checkpoints")
    p.add_argument("--junit", type=OutputFile, metavar="FILE", help="also write JUnit XML")
    p.add_argument("--json", nargs="?", const=True, type=OutputFile, metavar="FILE",
                   help="print one JSON object instead of the table, or write it to FILE")
    return p


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the flags, rejecting any that would be ignored."""
    args = parser().parse_args(argv)
    modes = "impl", "server", "compare", "method"
    chosen = (x for x in modes if getattr(args, x) is not None)
    mode = next(chosen, "")
    for flag, modes in FLAG_MODES.items():
        if getattr(args, flag) is not None and mode not in modes:
            allowed = " or ".join(f"--{name}" for name in modes if name)
            raise UserError(f"{cli.flag_name(flag)} only works with {allowed}")
    if args.bitwise:
        if args.baseline is None:
            raise UserError("--bitwise needs --baseline: plain decoding by the same engine")
        if unused := [flag for flag in NOT_BITWISE if getattr(args, flag) is not None]:
            raise UserError(f"{cli.flag_name(unused[0])} has no effect with --bitwise; omit it")
    available = {"impl": FUNCTION_CHECKS, "server": SERVER_CHECKS}.get(mode, tuple(CHECKS))
    available = ("bits",) if args.bitwise else available
    args.checks = available if args.checks is None else tuple(args.checks)
    if unknown := [name for name in args.checks if name not in available]:
        raise UserError(f"unknown check {unknown[0]!r}; {cli.suggestion(unknown[0], available)}")
    if args.greedy_only:
        args.checks = tuple(name for name in args.checks if name not in report.SAMPLED)
    return args


def make_verdicts(args: argparse.Namespace, folder: Path) -> Iterator[Verdict]:
    """Run the requested checks and yield their verdicts; write checkpoints to the folder."""
    urls = [url for url in (args.server, args.baseline) if url is not None]
    keys = keys_in(args.key_env or [], len(urls))
    if args.compare or args.server is not None:
        model = default_model() if args.model is None else args.model
        model, tokenizer = load(model, "float64", "cpu")
    if args.compare:
        return compare(*args.compare, model)
    if args.server is not None:
        servers = [Server(url, tokenizer, args.name, model.config.eos_ids, key=key)
                   for url, key in zip_longest(urls, keys)]  # fmt: skip
        return check_server(
            *servers[:1], model, tokenizer, *servers[1:], requests=args.requests or REQUESTS,
            precision=torch.float32 if args.precision is None else args.precision,
            checks=args.checks, only=args.only or "",
        )  # fmt: skip
    if args.impl is not None:
        chosen = {name: getattr(args, name) for name in ("runs", "outcomes", "length", "requests")}
        chosen = {name: x for name, x in chosen.items() if x is not None}
        limits = replace(THOROUGH if args.thorough else Limits(), **chosen)
        baseline = None
        if args.baseline is not None:
            baseline = import_function(args.baseline, "--baseline")
        impl = import_function(args.impl)
        return check_implementation(impl, args.only or "", args.checks, limits, baseline, folder)
    methods = None if args.method is None else [find_method(args.method)]
    found = (guarded(name, args.only or "", methods) for name in args.checks)
    return itertools.chain.from_iterable(found)


def guarded(name: str, only: str, methods: list[Method] | None) -> Iterator[Verdict]:
    """The rows of a check; an exception of somebody's own method is a row that fails."""
    try:
        yield from CHECKS[name](only, methods)
    except Exception as error:
        if methods is None:
            raise
        yield Verdict(name, methods[0].name, False, describe_error(error))


@cli.command
@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    distributed.require_one_process("certify")
    args, begin = parse(argv), time.perf_counter()
    argv = sys.argv[1:] if argv is None else argv
    with cli.stdout_reserved() as out, tempfile.TemporaryDirectory() as temporary:
        folder = args.save or Path(temporary)
        subject = args.impl if args.impl is not None else args.server
        require_tv = report.REQUIRED_TV if args.require_tv is None else args.require_tv

        def save(rows: list[Verdict], finished: bool = False) -> str:
            """Write the reports on the rows so far; return what is printed at the end."""
            seconds = time.perf_counter() - begin
            if args.junit:
                report.write_junit(rows, seconds, argv, args.junit)
            if isinstance(args.json, Path) or (args.json and finished):
                text = report.json_report(
                    rows, seconds, argv, subject, folder, finished, require_tv)  # fmt: skip
                if args.json is True:
                    return text
                write_text(args.json, text + "\n")
            return report.summary(rows, seconds, require_tv)

        table = None if args.json is True else out
        rows = report.print_table(make_verdicts(args, folder), table, save)
        print(save(rows, finished=True), file=out)
    sys.exit(report.conclude(rows, require_tv)[0])


if __name__ == "__main__":
    main()
