"""Print a run or a conversation as it is generated."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TextIO

from minispec import distributed
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError, note
from minispec.generate.api import common_prefix_length, stream
from minispec.generate.run import Run
from minispec.generate.view import paint
from minispec.model import Transformer

MAX_CHAT_ROWS = 8192  # limit on the cache rows of a chat, for models with a longer context


def show(
    run: Run, args: argparse.Namespace, tokenizer: Tokenizer | None, out: TextIO, prompt: str = ""
) -> None:
    """Print a run to `out` as it is generated, after `prompt`. Ctrl-C stops it cleanly."""
    before, shown = prompt, 0
    with contextlib.suppress(KeyboardInterrupt):
        for n, chunk in enumerate(run):
            new = "" if args.json else chunk.text
            if args.color and tokenizer:
                new = paint(chunk, tokenizer, n % 2 == 1, args.color == "full")
            print(before + new, end="", file=out, flush=True)
            before, shown = "", shown + len(chunk.text)
    distributed.check_agreement(run.tokens)
    run.finish("interrupted")  # unless it has ended
    rest = run.text[shown:]  # held back as a possible stop string
    if args.json:
        rest = json.dumps(run.as_json(args.model), ensure_ascii=False)
    print(before + rest, file=out, flush=True)
    if args.stats:
        print(describe(run), file=sys.stderr)


def describe(run: Run) -> str:
    s = run.stats
    line = (
        f"{run.method}{'' if run.lossless else ' (lossy)'}: {s['new_tokens']} tokens "
        f"({run.finish_reason}) in {s['target_passes']} passes, {s['tokens_per_pass']:.2f} per "
        f"pass, {s['tokens_per_second']:.1f} tokens/s; prompt {len(run.prompt)} tokens, "
        f"{s['cached_tokens']} of them cached, {s['prefill_seconds']:.3f} s"
    )
    if s["drafted"]:
        rates = ", ".join(f"{rate:.2f}" for rate in s["acceptance"]["unconditional"])
        line += f"; {s['accepted']} of {s['drafted']} drafts accepted (by position {rates})"
    return line


def chat(
    model: Transformer, tokenizer: Tokenizer, args: argparse.Namespace, options: dict, out: TextIO
) -> Run | None:
    """Answer the prompt, if any, then each turn on standard input; return the last answer's run.
    The caches of the model and of its drafter are kept, so only new tokens are processed. If the
    context has no space for an answer, the oldest turns are dropped. A line that does not fit even
    alone is skipped."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    cache = model.new_cache(min(model.config.context, MAX_CHAT_ROWS))
    caches = [cache]
    for name in args.method.of_kind("cache"):
        if (drafter := options.get(name.removesuffix("_cache"))) is not None:
            options[name] = drafter.new_cache(cache.capacity)
            caches.append(options[name])
    max_prompt = cache.capacity - max(1, min(args.max_new_tokens, cache.capacity // 2))
    run, messages, cached = None, [], []  # messages in the context; tokens in the cache
    for turn in user_turns(args.prompt):
        recent = [*messages, {"role": "user", "content": turn}]
        while len(prompt := tokenizer.chat(system + recent)) > max_prompt and len(recent) > 1:
            recent = recent[2:]
        if len(prompt) >= cache.capacity:  # without any other turn
            included = " with the system message" if system else ""
            too_long = (f"the turn has {len(prompt)} tokens{included}, but the context is only "
                        f"{cache.capacity}; shorten it")  # fmt: skip
            if run is None and args.prompt:  # the prompt itself
                raise UserError(too_long)
            note(too_long)
            continue
        for _ in range(len(messages) // 2 - len(recent) // 2):
            note("the context is full; dropping the oldest turn")
        messages = recent
        kept = min(common_prefix_length(cached, prompt), len(prompt) - 1)
        for c in caches:
            c.truncate(min(kept, c.length))
        run = stream(model, tokenizer, prompt, cache=cache, **options)
        show(run, args, tokenizer, out)
        messages.append({"role": "assistant", "content": run.text.strip()})
        cached = (prompt + run.tokens)[: cache.length]
    return run


def user_turns(first: str | None) -> Iterator[str]:
    """Yield `first`, if any, then lines of standard input, with a prompt sign on a terminal."""
    if first:
        yield first
    while line := distributed.from_rank_0(read_line):
        if line.strip():
            yield line.strip()


def read_line() -> str:
    """Read a line of standard input; "" at its end."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()
