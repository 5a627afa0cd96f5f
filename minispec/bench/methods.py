"""The rows of the table: which methods run, with which options and drafters."""

import argparse
import re

from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError, suggestion
from minispec.generate.drafters import drafter_of, find_drafter, load_drafter
from minispec.model import Transformer

ANY_NUMBER = re.compile(r"(medusa tree|(fastmtp|eagle3|hybrid) (k|tree))=[1-9]\d{0,2}")
Methods = dict[str, dict]  # table row, which starts with the method's name -> the method's options


def methods_of(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> Methods:
    methods: Methods = {
        "autoregressive": {}, "prompt-lookup": {}, "prompt-lookup k=auto": {"k": "auto"},
        "jacobi": {},
        "lookahead (5,4,5)": {"window": 5, "ngram": 4, "guesses": 5},
        "lookahead (10,5,10)": {"window": 10, "ngram": 5, "guesses": 10},
        "lookahead (15,5,15)": {"window": 15, "ngram": 5, "guesses": 15},
        f"speculative k={args.k}": {"k": args.k}, "speculative k=auto": {"k": "auto"},
        "medusa": {}, "medusa tree=auto": {"tree": "auto"},
        "fastmtp k=2": {"k": 2}, "fastmtp k=3": {"k": 3}, "fastmtp k=auto": {"k": "auto"},
        "fastmtp tree=8": {"tree": 8}, "fastmtp tree=auto": {"tree": "auto"},
        "eagle3 k=3": {"k": 3}, "eagle3 k=auto": {"k": "auto"}, "eagle3 tree=60": {"tree": 60},
        "hybrid k=3": {"k": 3}, "hybrid k=auto": {"k": "auto"},
        "hybrid tree=auto": {"tree": "auto"},
    }  # fmt: skip
    method_of = {row: row.split()[0] for row in methods}
    if args.methods is not None:
        requested = {"autoregressive", *args.methods}
        for row in filter(ANY_NUMBER.fullmatch, args.methods):
            method, name, number = re.split("[ =]", row)
            methods[row], method_of[row] = {name: int(number)}, method
        if unknown := requested - set(method_of.values()) - methods.keys():
            names = dict.fromkeys([*method_of.values(), *methods])
            raise UserError(f"--methods {min(unknown)!r}: no such method or row of the table; "
                            f"{suggestion(min(unknown), names)}")  # fmt: skip
        method_of = {row: method for row, method in method_of.items() if {row, method} & requested}
    drafters = drafters_of(args, model, tokenizer, set(method_of.values()))
    for size in args.vocabulary_sizes:
        subset = {"vocabulary": "none"} if size is None else {"size": size}
        row = f"fastmtp k=3 of {size or 'all'}"
        methods[row] = load_drafter("fastmtp", model, tokenizer, args.mtp, **subset) | {"k": 3}
        method_of[row] = "fastmtp"
    return {row: drafters[m] | methods[row] for row, m in method_of.items() if m in drafters}


def drafters_of(
    args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer, methods: set[str]
) -> Methods:
    """Load what each of the methods drafts with, as its options. Methods with the same drafter
    share it. Without --methods, leave out those whose drafter is not found."""
    sources = {"speculative": args.draft, "medusa": args.heads, "fastmtp": args.mtp,
               "eagle3": args.eagle3}  # fmt: skip
    loaded: Methods = {}
    drafters: Methods = {}
    for method in sorted(methods):
        try:
            drafter = drafter_of(method, model, args.mtp, args.draft)
            if drafter in sources and sources[drafter] is None:
                sources[drafter] = find_drafter(drafter, model)
        except UserError:
            if args.methods or method == "fastmtp" and args.vocabulary_sizes:
                raise
            continue
        if drafter in sources and drafter not in loaded:
            loaded[drafter] = load_drafter(drafter, model, tokenizer, sources[drafter])
        drafters[method] = loaded.get(drafter, {})
    return drafters
