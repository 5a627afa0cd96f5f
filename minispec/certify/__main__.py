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
from minispec.certify.compare import compare
from minispec.certify.others.blackbox import CHECKS as BOXED
from minispec.certify.others.blackbox import check_implementation, load_implementation
from minispec.certify.others.client import Server
from minispec.certify.others.exam import precision
from minispec.certify.others.keys import keys_in, warn_if_exposed
from minispec.certify.others.server import CHECKS as SERVED
from minispec.certify.others.server import REQUESTS, check_server
from minispec.certify.ours.checks import CHECKS, RUNS, Verdict
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

KNOWN = CHECKS | {"mutants": check_mutants}
EXAMS = "impl", "server", "compare"
FLAGS = {  # what each is for, "" being ours
    "baseline": ("impl", "server"), "runs": ("impl",), "model": ("server", "compare"),
    "name": ("server",), "key_env": ("server",), "requests": ("server",), "precision": ("server",),
    "checks": ("impl", "server", ""),
}  # fmt: skip
ASIDE = "server", "baseline", "drafts"  # rows that say what was examined, and how
MARKS = {True: "pass", False: "FAIL", None: "skip"}


def parser() -> Parser:
    p = Parser(prog="python -m minispec.certify", description=certify.__doc__)
    p.add_argument("--impl", help="package.module:function or file.py:function, a black box")
    p.add_argument("--server", metavar="URL", help="a server of --model with /v1/completions")
    p.add_argument("--baseline", help="its own plain decoding, which --impl or --server must equal "
                   "then: a function, or a URL")  # fmt: skip
    p.add_argument("--runs", type=number(100), help=f"of each statistical row (default: {RUNS})")
    p.add_argument("--compare", nargs=2, type=Path, metavar="JSONL", help="two files of runs, "
                   "lines of generate --json")  # fmt: skip
    p.add_argument("--model", help="of --server or --compare (default: the shipped target)")
    p.add_argument("--name", help="the model's name at --server (default: the only one there)")
    p.add_argument("--key-env", nargs="+", metavar="NAME", help="the environment variable that "
                   "holds the key of --server; with a second one, the key of --baseline. A server "
                   "whose variable is not named gets no key")  # fmt: skip
    p.add_argument("--requests", type=number(100), help=f"to --server (default: about {REQUESTS})")
    p.add_argument("--precision", type=precision, help="of --server: float32 (default), bfloat16, "
                   "float16, or the gap between two logits that is a tie")  # fmt: skip
    p.add_argument("--checks", type=comma_separated,
                   help=f"only these: {','.join(KNOWN)}; of a black box "
                   f"{','.join(BOXED)}; of a server {','.join(SERVED)}")  # fmt: skip
    p.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return p


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the flags. Reject any that would be ignored: a verdict must be on what was asked."""
    args = parser().parse_args(argv)
    asked = [name for name in EXAMS if getattr(args, name) is not None]
    if len(asked) > 1:
        raise UserError(f"--{asked[0]} and --{asked[1]} are two examinations: leave one out")
    exam = asked[0] if asked else ""
    for flag, exams in FLAGS.items():
        if getattr(args, flag) is not None and exam not in exams:
            where = " and ".join(f"--{name}" for name in exams if name)
            raise UserError(f"--{flag.replace('_', '-')} is for {where}")
    known = {"impl": BOXED, "server": SERVED}.get(exam, tuple(KNOWN))
    args.checks = known if args.checks is None else tuple(args.checks)
    unknown = [name for name in args.checks if name not in known]
    if unknown:
        raise UserError(f"unknown check {unknown[0]!r}: use some of {', '.join(known)}")
    return args


def verdicts_of(args: argparse.Namespace) -> Iterator[Verdict]:
    """What the flags ask for, verdict by verdict."""
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
    return (verdict for name in args.checks for verdict in KNOWN[name]())


def table(verdicts: Iterable[Verdict], out: TextIO | None) -> list[Verdict]:
    """All verdicts, each printed as it comes, if there is where to. What servers say may hold
    characters that would drive a terminal."""
    rows = []
    for v in verdicts:
        v = replace(v, case=printable(v.case), detail=printable(v.detail))
        rows.append(v)
        if out:
            print(f"{MARKS[v.passed]}  {v.check:<14}{v.case:<44}{v.detail}", file=out, flush=True)
    return rows


@command
@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with stdout_reserved() as out:  # what an implementation prints is not ours
        passed = certified(args, out)
    sys.exit(0 if passed else 1)


def certified(args: argparse.Namespace, out: TextIO) -> bool:
    """Print what the flags ask for; whether it passed."""
    begin = time.perf_counter()
    rows = table(verdicts_of(args), None if args.json else out)
    counts = Counter(v.passed for v in rows)
    proven = any(v.passed for v in rows if v.check not in ASIDE)  # what was skipped proves nothing
    passed = proven and not counts[False]
    seconds = time.perf_counter() - begin
    if args.json:
        found = {"passed": passed, "seconds": seconds, "verdicts": [asdict(v) for v in rows]}
        print(json.dumps(found, ensure_ascii=False), file=out)
    else:
        skipped = f", {counts[None]} skipped" if counts[None] else ""
        print(f"{counts[True]} of {len(rows)} passed{skipped} in {seconds:.0f} s", file=out)
    return passed


if __name__ == "__main__":
    main()
