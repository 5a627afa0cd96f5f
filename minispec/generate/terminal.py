"""A run or a conversation, printed in the terminal as it is generated."""

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from typing import TextIO

from minispec.checkpoints.tokenizer import Tokenizer
from minispec.errors import (
    UserError,
    note,
)
from minispec.generate.api import common_prefix, stream, unlisted_end
from minispec.generate.run import Run
from minispec.generate.view import paint
from minispec.model import Transformer

CHAT_ROOM = 8192  # cache rows of a chat: the context, but no more than this


def show(
    run: Run, args: argparse.Namespace, tokenizer: Tokenizer | None, out: TextIO, prompt: str = ""
) -> None:
    """Print a run to `out` as it goes, after `prompt`; Ctrl-C ends it with what was produced."""
    before, shown = prompt, 0
    with contextlib.suppress(KeyboardInterrupt):
        for n, chunk in enumerate(run):
            new = "" if args.json else chunk.text
            if args.color and tokenizer:
                new = paint(chunk, tokenizer, n % 2 == 1, args.color == "full")
            print(before + new, end="", file=out, flush=True)
            before, shown = "", shown + len(chunk.text)
    if run.finish_reason is None:
        run.finish("interrupted")
        before += "" if args.json else run.text[shown:]  # it might have begun a stop string
    facts = json.dumps(run.as_json(args.model), ensure_ascii=False) if args.json else ""
    print(before + facts, file=out, flush=True)
    if args.stats:
        print(describe(run), file=sys.stderr)


def note_unlisted_end(
    model: Transformer, tokenizer: Tokenizer | None, args: argparse.Namespace
) -> None:
    """Print what `unlisted_end` says, unless the flags show that the user knows."""
    unlisted = unlisted_end(model, tokenizer)
    if unlisted and not args.ignore_eos and (end := tokenizer.named["eos_token"]) not in args.stop:
        note(f"{unlisted}, or add --stop {shlex.quote(end)}")


def describe(run: Run) -> str:
    """The statistics in one line of words."""
    s = run.stats
    lossy = "" if s["lossless"] else " (lossy)"
    line = (
        f"{run.method}{lossy}: {s['new_tokens']} tokens ({run.finish_reason}) "
        f"in {s['target_passes']} passes, {s['tokens_per_pass']:.2f} a pass, "
        f"{s['tokens_per_second']:.1f} tokens/s; prompt {len(run.prompt)} tokens, "
        f"{s['cached_tokens']} of them cached, {s['prefill_seconds']:.3f} s"
    )
    if s["drafted"]:
        rates = ", ".join(f"{rate:.2f}" for rate in s["acceptance"]["unconditional"])
        line += f"; {s['accepted']} of {s['drafted']} drafts accepted (by position {rates})"
    return line


def chat(
    model: Transformer, tokenizer: Tokenizer, args: argparse.Namespace, options: dict, out: TextIO
) -> Run | None:
    """The prompt, if any, then turns from standard input; returns the last answer. The caches of
    the model and of a draft model stay: a turn feeds only what is new in it. If the context would
    not hold an answer, the oldest turns are forgotten."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    cache = model.new_cache(min(model.config.context, CHAT_ROOM))
    caches = [cache]
    if "draft" in options:
        options["draft_cache"] = options["draft"].new_cache(cache.capacity)
        caches.append(options["draft_cache"])
    free_rows = cache.capacity - max(1, min(args.max_new_tokens, cache.capacity // 2))
    note_unlisted_end(model, tokenizer, args)
    run, messages, held = None, [], []  # the turns, and the tokens whose rows the cache holds
    for turn in user_turns(args.prompt):
        messages.append({"role": "user", "content": turn})
        while len(prompt := tokenizer.chat(system + messages)) > free_rows and len(messages) > 1:
            messages = messages[2:]
            note("the context is full: the oldest turn is forgotten")
        if len(prompt) >= cache.capacity:
            raise UserError(
                f"the turn has {len(prompt)} tokens, the context only {cache.capacity}: shorten it"
            )
        kept = min(common_prefix(held, prompt), len(prompt) - 1)
        for each in caches:
            each.truncate(min(kept, each.length))
        run = stream(model, tokenizer, prompt, cache=cache, **options)
        show(run, args, tokenizer, out)
        messages.append({"role": "assistant", "content": run.text.strip()})
        held = (prompt + run.tokens)[: cache.length]
    return run


def user_turns(first: str | None) -> Iterator[str]:
    """`first`, if any, and lines of standard input; a prompt sign where a person types."""
    if first:
        yield first
    while sys.stdin is not None:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
