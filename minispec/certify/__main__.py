"""The command line of the certifier."""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from minispec import certify
from minispec.certify.blackbox import check_implementation, load_implementation
from minispec.certify.checks import CHECKS, Verdict
from minispec.certify.compare import compare
from minispec.certify.mutants import check_mutants
from minispec.checkpoint import WEIGHTS, load
from minispec.errors import Parser, UserError, command

KNOWN = CHECKS | {"mutants": check_mutants}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags; one that would go unheard is refused, as a verdict must be of what was asked."""
    p = Parser(prog="python -m minispec.certify", description=certify.__doc__.split("\n\n")[0])
    p.add_argument("--impl", help="package.module:function or file.py:function, a black box")
    p.add_argument("--compare", nargs=2, type=Path, metavar="JSONL", help="two files of runs, "
                   "lines of generate --json")  # fmt: skip
    p.add_argument("--model", help="model of --compare (default: the shipped target)")
    p.add_argument("--checks", help=f"only these: {','.join(KNOWN)}")
    p.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    args = p.parse_args(argv)
    given = [f for f in ("compare", "impl", "checks") if getattr(args, f) is not None]
    if len(given) > 1:
        raise UserError(f"--{given[0]} and --{given[1]} are two examinations: give one of them")
    if args.model and not args.compare:
        raise UserError("--model is for --compare: others bring models of their own")
    args.checks = list(KNOWN) if args.checks is None else args.checks.split(",")
    unknown = [name for name in args.checks if name not in KNOWN]
    if unknown:
        raise UserError(f"unknown check {unknown[0]!r}: use some of {', '.join(KNOWN)}")
    return args


def verdicts_of(args: argparse.Namespace) -> Iterator[Verdict]:
    """What the flags ask for, verdict by verdict."""
    if args.compare:
        model, _ = load(args.model or WEIGHTS / "target", "float64", "cpu")
        return compare(*args.compare, model)
    if args.impl is not None:
        return check_implementation(load_implementation(args.impl))
    return (verdict for name in args.checks for verdict in KNOWN[name]())


def table(verdicts: Iterable[Verdict], quiet: bool) -> list[Verdict]:
    """Print each verdict as it comes; all of them."""
    rows = []
    for v in verdicts:
        rows.append(v)
        if not quiet:
            mark = "pass" if v.passed else "FAIL"
            print(f"{mark}  {v.check:<12}{v.case:<46}{v.detail}", flush=True)
    return rows


@command
@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    begin = time.perf_counter()
    rows = table(verdicts_of(args), quiet=args.json)
    failed, seconds = sum(not v.passed for v in rows), time.perf_counter() - begin
    if args.json:
        found = {"passed": failed == 0, "seconds": seconds, "verdicts": [asdict(v) for v in rows]}
        print(json.dumps(found, ensure_ascii=False))
    else:
        print(f"{len(rows) - failed} of {len(rows)} passed in {seconds:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
