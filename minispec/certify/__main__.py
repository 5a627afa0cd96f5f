"""The command line of the certifier."""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import TextIO

import torch

from minispec import certify
from minispec.certify.common import RUNS, Verdict
from minispec.certify.compare import compare
from minispec.certify.others.api_keys import keys_in, warn_if_exposed
from minispec.certify.others.blackbox import (
    FUNCTION_CHECKS,
    check_implementation,
    load_implementation,
)
from minispec.certify.others.client import Server
from minispec.certify.others.context import precision
from minispec.certify.others.server import REQUESTS, SERVER_CHECKS, check_server
from minispec.certify.ours.checks import CHECKS
from minispec.certify.ours.mutants import check_mutants
from minispec.checkpoints.fetch import default_model
from minispec.checkpoints.load import load
from minispec.errors import (
    Parser,
    UserError,
    comma_separated,
    command,
    number,
    printable,
    stdout_reserved,
)

PACKAGE_CHECKS = CHECKS | {"mutants": check_mutants}
MODES = "impl", "server", "compare"
FLAG_MODES = {  # the modes each flag belongs to; "" checks this package
    "baseline": ("impl", "server"), "runs": ("impl",), "model": ("server", "compare"),
    "name": ("server",), "key_env": ("server",), "requests": ("server",), "precision": ("server",),
    "checks": ("impl", "server", ""),
}  # fmt: skip
INFO_ROWS = "server", "baseline", "drafts"  # rows about the test itself, which prove nothing
STATUS_LABELS = {True: "pass", False: "FAIL", None: "skip"}


def parser() -> Parser:
    p = Parser(prog="python -m minispec.certify", description=certify.__doc__)
    p.add_argument("--impl", help="test a function: package.module:function or file.py:function")
    p.add_argument("--server", metavar="URL", help="test a server of --model with /v1/completions")
    p.add_argument("--baseline", help="plain decoding by the same engine (a function or a URL); "
                   "--impl or --server must then equal it")  # fmt: skip
    p.add_argument("--runs", type=number(100), help=f"runs per statistical check (default: {RUNS})")
    p.add_argument("--compare", nargs=2, type=Path, metavar="JSONL", help="explain the differences "
                   "between two files of runs, lines of generate --json")  # fmt: skip
    p.add_argument("--model", help="the model of --server or --compare (default: as in generate)")
    p.add_argument("--name", help="the model's name on the server (default: its only model)")
    p.add_argument("--key-env", nargs="+", metavar="NAME", help="the environment variable that "
                   "holds the API key of --server, and optionally a second one for --baseline. "
                   "Without it no key is sent")  # fmt: skip
    p.add_argument("--requests", type=number(100),
                   help=f"requests to --server (default: about {REQUESTS})")  # fmt: skip
    p.add_argument("--precision", type=precision, help="of --server: float32 (default), bfloat16, "
                   "float16, or the logit gap below which two tokens are tied")  # fmt: skip
    p.add_argument("--checks", type=comma_separated,
                   help=f"run only some checks, of {','.join(PACKAGE_CHECKS)}; "
                   f"for --impl, of {','.join(FUNCTION_CHECKS)}; "
                   f"for --server, of {','.join(SERVER_CHECKS)}")  # fmt: skip
    p.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return p


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the flags, rejecting any that would be ignored."""
    args = parser().parse_args(argv)
    requested = [name for name in MODES if getattr(args, name) is not None]
    if len(requested) > 1:
        raise UserError(f"--{requested[0]} and --{requested[1]} are different tests; choose one")
    mode = requested[0] if requested else ""
    for flag, modes in FLAG_MODES.items():
        if getattr(args, flag) is not None and mode not in modes:
            allowed = " or ".join(f"--{name}" for name in modes if name)
            raise UserError(f"--{flag.replace('_', '-')} only works with {allowed}")
    available = {"impl": FUNCTION_CHECKS, "server": SERVER_CHECKS}.get(mode, tuple(PACKAGE_CHECKS))
    args.checks = available if args.checks is None else tuple(args.checks)
    unknown = [name for name in args.checks if name not in available]
    if unknown:
        raise UserError(f"unknown check {unknown[0]!r}; choose from {', '.join(available)}")
    return args


def make_verdicts(args: argparse.Namespace) -> Iterator[Verdict]:
    """Run the requested checks and yield their verdicts."""
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
        for server in servers:
            warn_if_exposed(server)
        return check_server(
            *servers[:1], model, tokenizer, *servers[1:], requests=args.requests or REQUESTS,
            precision=torch.float32 if args.precision is None else args.precision,
            checks=args.checks,
        )  # fmt: skip
    if args.impl is not None:
        baseline = args.baseline and load_implementation(args.baseline, "--baseline")
        return check_implementation(
            load_implementation(args.impl), runs=args.runs or RUNS, checks=args.checks,
            baseline=baseline,
        )  # fmt: skip
    return (verdict for name in args.checks for verdict in PACKAGE_CHECKS[name]())


def print_table(verdicts: Iterable[Verdict], out: TextIO | None) -> list[Verdict]:
    """Collect all verdicts, printing each as it comes if there is an `out`. Text from a server may
    contain terminal control characters, so it is escaped."""
    rows = []
    for v in verdicts:
        v = replace(v, case=printable(v.case), detail=printable(v.detail))
        rows.append(v)
        if out:
            status = STATUS_LABELS[v.passed]
            print(f"{status}  {v.check:<14}{v.case:<43} {v.detail}", file=out, flush=True)
    return rows


@command
@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with stdout_reserved() as out:  # what an implementation prints goes to stderr
        passed = run_checks(args, out)
    sys.exit(0 if passed else 1)


def run_checks(args: argparse.Namespace, out: TextIO) -> bool:
    """Run and print the requested checks; return whether they passed."""
    begin = time.perf_counter()
    rows = print_table(make_verdicts(args), None if args.json else out)
    counts = Counter(v.passed for v in rows)
    # skipped checks prove nothing: one must pass
    passed = any(v.passed for v in rows if v.check not in INFO_ROWS) and not counts[False]
    seconds = time.perf_counter() - begin
    if args.json:
        report = {"passed": passed, "seconds": seconds, "verdicts": [asdict(v) for v in rows]}
        print(json.dumps(report, ensure_ascii=False), file=out)
    else:
        skipped = f", {counts[None]} skipped" if counts[None] else ""
        print(f"{counts[True]} of {len(rows)} passed{skipped} in {seconds:.0f} s", file=out)
    return passed


if __name__ == "__main__":
    main()
