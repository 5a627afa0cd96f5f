"""The rows of the table: which methods run, with which options and drafters."""

import argparse
import re
from inspect import Parameter

from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError, flag_name, suggestion
from minispec.generate.drafters import FLAGS, load_drafter, missing_drafters
from minispec.methods import METHODS, find_method
from minispec.methods.declaration import Method
from minispec.model import Transformer
from minispec.verify import RULES

PLAIN = "autoregressive"  # what all others are compared with
ANY_NUMBER = re.compile(r"(\S+) (\w+)=([1-9]\d{0,2})")
Methods = dict[str, dict]  # table row, which starts with the method's name -> `decode`'s options
Rows = dict[str, tuple[Method, dict]]


def methods_of(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> Methods:
    """The rows of --methods or, without it, those that the methods declare, except for those whose
    drafter is not found. Rows with the same drafter share it."""
    rows, loaded, found = requested_rows(args), {}, {}
    for row, (method, options) in rows.items():
        try:
            folders = folders_of(args, method, model)
        except UserError:
            if args.methods or method.name == "fastmtp" and args.vocabulary_sizes:
                raise
            continue
        rule = {name: RULES[args.verify] for name in method.of_kind("rule") if args.verify}
        found[row] = {"method": method.function} | rule | options
        for folder in folders:
            if folder not in loaded:
                loaded[folder] = load_drafter(folder, model, tokenizer, source_of(args, folder))
            found[row] = loaded[folder] | found[row]
    for size in args.vocabulary_sizes:
        subset = {"vocabulary": "none"} if size is None else {"size": size}
        method, drafter = "fastmtp", load_drafter("mtp", model, tokenizer, args.mtp, **subset)
        found[f"fastmtp k=3 of {size or 'all'}"] = {"method": method} | drafter | {"k": 3}
    return found


def requested_rows(args: argparse.Namespace) -> Rows:
    """The rows of --methods, which names methods, their rows, or rows with any number."""
    rows: Rows = {}
    for method in map(find_method, METHODS):
        rows |= declared_rows(method, args.k)
    if args.methods is None:
        return rows
    chosen: Rows = {}
    for name in PLAIN, *args.methods:
        chosen |= rows_named(name, rows, args.k)
    return chosen


def declared_rows(method: Method, k: int) -> Rows:
    """The rows that a method declares; with a draft model, `k` replaces the number of drafts."""
    rows = {}
    for options in method.bench:
        if needs_draft(method) and isinstance(options.get("k"), int):
            options = options | {"k": k}
        values = ",".join(map(str, options.values()))
        label = f" {next(iter(options))}={values}" if len(options) == 1 else f" ({values})"
        rows[method.name + label * bool(options)] = method, options
    return rows


def needs_draft(method: Method) -> bool:
    return method.options.get("draft", (None, None))[1] is Parameter.empty


def rows_named(name: str, rows: Rows, k: int) -> Rows:
    """The row of this name, all rows of the method of this name, or one with any number."""
    if name in rows:
        return {name: rows[name]}
    if match := ANY_NUMBER.fullmatch(name):
        method, option = find_method(match[1]), match[2]
        if option in method.options and method.options[option][0].kind in ("number", "paths"):
            return {name: (method, {option: int(match[3])})}
    elif name in METHODS or ":" in name:
        return declared_rows(find_method(name), k)
    names = dict.fromkeys([*METHODS, *rows])
    raise UserError(f"--methods {name!r}: no such method or row of the table; "
                    f"{suggestion(name, names)}")  # fmt: skip


def folders_of(args: argparse.Namespace, method: Method, model: Transformer) -> list[str]:
    """The folders of what a method drafts with, which flags name or which lie next to the model."""
    weights = {name: option.folder for name, option in method.of_kind("weights").items()}
    given = {n: folder for n, folder in weights.items() if source_of(args, folder) is not None}
    if any(method.options[n][1] is not Parameter.empty for n in given):
        given = dict([*given.items()][:1])  # one is enough
    return [*(given | missing_drafters(method, model, given)).values()]


def source_of(args: argparse.Namespace, folder: str) -> str | None:
    """The value of the flag that replaces this folder."""
    return getattr(args, FLAGS[folder][1][2:])


def methods_of_flags() -> dict[str, tuple[str, ...]]:
    """For each flag of what drafts, for --k and --vocabulary-sizes, the methods it applies to."""
    methods, flags = list(map(find_method, METHODS)), {"--vocabulary-sizes": ("fastmtp",)}
    for folder, (_, flag) in FLAGS.items():
        flags[flag] = tuple(m.name for m in methods
                            if any(o.folder == folder for o in m.of_kind("weights").values()))
    return flags | {flag_name("k"): tuple(m.name for m in methods if needs_draft(m))}
