"""The rows of the table: which methods run, with which options and drafters."""

import argparse
import re
from functools import cache
from inspect import Parameter

from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError, suggestion
from minispec.generate.drafters import FLAGS, load_drafter, missing_drafters
from minispec.methods import METHODS, find_method
from minispec.methods.declaration import Method
from minispec.model import Transformer
from minispec.verify import RULES

PLAIN = "autoregressive"  # what all others are compared with
OPTIONS = re.compile(r" (\(.*\)|\w+=\S+)$")  # after the name of a method
ANY_NUMBER = re.compile(r" (\w+)=([1-9]\d{0,2})")
Methods = dict[str, dict]  # table row, which starts with the method's name -> `decode`'s options
Rows = dict[str, tuple[Method, dict]]


def methods_of(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> Methods:
    """The rows of --methods or, without it, those that the methods declare, except for those whose
    drafter is not found. Rows with the same drafter share it."""
    sources = {folder: getattr(args, flag[2:]) for folder, (_, flag) in FLAGS.items()}
    load = cache(lambda folder: load_drafter(folder, model, tokenizer, sources[folder]))
    rows, found = {}, {}
    for name in METHODS if args.methods is None else (PLAIN, *args.methods):
        rows |= rows_named(name, args.k)
    for row, (method, options) in rows.items():
        try:
            folders = folders_of(sources, method, model)
        except UserError:
            if args.methods or method.name == "fastmtp" and args.vocabulary_sizes:
                raise
            continue
        rule = {name: RULES[args.verify] for name in method.of_kind("rule") if args.verify}
        drafters = {name: value for folder in folders for name, value in load(folder).items()}
        found[row] = drafters | {"method": method.function} | rule | options
    for size in args.vocabulary_sizes:
        subset = {"vocabulary": "none"} if size is None else {"size": size}
        head = load_drafter("mtp", model, tokenizer, args.mtp, **subset)
        found[f"fastmtp k=3 of {size or 'all'}"] = head | {"method": "fastmtp", "k": 3}
    return found


def rows_named(name: str, k: int) -> Rows:
    """All rows of the method of this name, the row of this name, or one with any number."""
    if (word := OPTIONS.sub("", name)) in METHODS or ":" in word:
        method, match = find_method(word), ANY_NUMBER.fullmatch(name.removeprefix(word))
        rows = declared_rows(method, k)
        if name in (word, *rows):
            return rows if name == word else {name: rows[name]}
        if match and match[1] in method.of_kind("number", "paths"):
            return {name: (method, {match[1]: int(match[2])})}
    rows = [row for known in METHODS for row in declared_rows(find_method(known), k)]
    raise UserError(f"--methods {name!r}: no such method or row of the table; "
                    f"{suggestion(name, dict.fromkeys([*METHODS, *rows]))}")  # fmt: skip


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


def folders_of(sources: dict, method: Method, model: Transformer) -> list[str]:
    """The folders of what a method drafts with, which flags name or which lie next to the model."""
    weights = {name: option.folder for name, option in method.of_kind("weights").items()}
    given = {n: folder for n, folder in weights.items() if sources[folder] is not None}
    if any(method.options[n][1] is not Parameter.empty for n in given):
        given = dict([*given.items()][:1])  # one is enough
    return [*(given | missing_drafters(method, model, given)).values()]


def methods_of_flags(args: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """The methods that use --k, --vocabulary-sizes and each flag of a drafter."""
    methods, users = list(map(find_method, METHODS)), {"vocabulary_sizes": ("fastmtp",)}
    for folder, (_, flag) in FLAGS.items():
        users[flag[2:]] = tuple(m.name for m in methods
                                if any(o.folder == folder for o in m.of_kind("weights").values()))
    users["k"] = tuple(m.name for m in methods if needs_draft(m))
    # with --mtp, only these methods use a draft
    return users if args.mtp is None else users | {"draft": users["k"]}
