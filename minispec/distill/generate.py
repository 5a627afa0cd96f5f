"""Generate text with the target, to train drafts and heads on.

The target continues the first few tokens of each text in --data or, with --ask, answers a request
about it. In a conversation, it answers one of the user's turns through its chat template, so lines
of `{"prompt": ...}` are enough. With --chat, it writes the user's turns too, from an empty user
header (Magpie, arXiv 2406.08464), so no data is needed. Near-duplicates are dropped, because models
repeat themselves. With --server, a server of the target (vLLM, llama.cpp, SGLang, …) generates the
answers.
"""

import argparse
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np
import psutil
import torch
from tqdm import tqdm

from minispec import distributed
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import OutputFile, UserError, flag_name, note, number, user_error
from minispec.distill import server
from minispec.distill.batch import sample_batch
from minispec.distill.documents import load_target, weights_digest
from minispec.distill.generated import OPENERS, Duplicates, read_generated
from minispec.generate.api import unlisted_eos_warning
from minispec.model import Config, Transformer
from minispec.sampling import Sampling
from minispec.training import text
from minispec.training.loop import add_flags, digest, lock

MAX_BEGINNING = 24  # a text's prompt is shorter than this, in tokens
POOLED_BATCHES = 4  # prompts are drawn in pools of this many batches
MAX_ROWS, MAX_REQUESTS = 256, 64  # prompts sampled at once here, or by a server
MAX_IDLE_PROMPTS = 64  # stop after this many prompts without a new document
# (prompts, maximum tokens, sampling, seed) -> (index of a prompt, tokens that follow it), …
Sample = Callable[[list[list[int]], int, Sampling, int], Iterator[tuple[int, list[int]]]]
USER_TURN_TOKENS, USER_TURN_SAMPLING = 96, Sampling(0.9)  # when the target writes user turns
RECORDED_FLAGS = (  # stored in the file's header
    "seed", "batch", "tokens", "temperature", "top_k", "top_p", "keep_duplicates", "ask", "chat",
)  # fmt: skip


def local_sampler(model: Transformer, rows: int) -> Sample:
    """Sample with the model itself, `rows` prompts at once. If there are several processes, each
    samples its share of them, and the answers are the same."""
    rank, size = distributed.world.rank, distributed.world.size

    def sample(prompts: list[list[int]], n: int, sampling: Sampling, seed: int) -> Iterator:
        own = range(len(prompts))[rank::size]
        generators = [torch.Generator().manual_seed(seed + i) for i in own]
        texts = sample_batch(model, prompts[rank::size], n, sampling, generators, -(-rows // size))
        if size == 1:
            yield from enumerate(texts)
        else:
            shares = distributed.all_gather([*texts])
            yield from ((i, shares[i % size][i // size]) for i in range(len(prompts)))

    return sample


def default_batch(args: argparse.Namespace, model: Transformer) -> int:
    """Without --batch: what an unfinished file was started with, or as many prompts as suit."""
    header = read_generated(args.out)[0] if args.out.exists() else {}
    batch = header.get("options", {}).get("batch")
    if isinstance(batch, int) and batch > 0:  # otherwise `resume` rejects the file
        return batch
    return rows_that_fit(model) if args.server is None else MAX_REQUESTS


def rows_that_fit(model: Transformer) -> int:
    """The rows of a batch: a power of two, at most MAX_ROWS, whose cache takes at most half of the
    free memory. Few texts are longer than 1,024 tokens."""
    row = model.new_cache(1).kv.nbytes * min(model.config.context, 1024)
    on_gpu = model.device.type == "cuda"
    free = torch.cuda.mem_get_info()[0] if on_gpu else psutil.virtual_memory().available
    return min(MAX_ROWS, 2 ** int(math.log2(max(free // (2 * row), 1))))


def user_turns(
    sample: Sample, config: Config, tokenizer: Tokenizer, beginnings: list[str], n: int,
    rng: np.random.Generator,
) -> list[text.Document]:  # fmt: skip
    """Sample up to `n` single-turn conversations: the target writes the user's turn, after the chat
    template's user header and one of the `beginnings`. Unfinished turns are dropped."""
    chosen = [str(rng.choice(beginnings or [""])) for _ in range(n)]
    begun = [tokenizer.encode(beginning, add_special_tokens=False) for beginning in chosen]
    prompts = [tokenizer.user_header() + ids for ids in begun]
    max_tokens, seed = min(USER_TURN_TOKENS, config.context // 2), int(rng.integers(2**63))
    drawn = sample(prompts, max_tokens, USER_TURN_SAMPLING, seed)
    finished = [begun[i] + tokens for i, tokens in drawn if tokens[-1] in config.eos_ids]
    turns = filter(None, [tokenizer.decode(ids).strip() for ids in finished])
    return [text.Conversation([text.turn("user", turn)]) for turn in turns]


def prompt_of(
    document: text.Document, tokenizer: Tokenizer, rng: np.random.Generator, ask: str | None = None
) -> list[int]:
    """The prompt to sample from: a text's first tokens, or the request `ask` about it; or a
    conversation up to one of the user's turns."""
    if isinstance(document, str) and ask:
        document = [text.turn("user", ask.format(document))]
    if isinstance(document, str):
        return tokenizer.encode(document[: 20 * MAX_BEGINNING])[: rng.integers(4, MAX_BEGINNING)]
    return text.encode(document[: rng.choice(text.user_turn_ends(document))], tokenizer)


def sample_documents(
    sample: Sample, config: Config, tokenizer: Tokenizer, corpus: text.Corpus,
    args: argparse.Namespace, skipped: text.Skipped, seed: list[int], most: int,
) -> Iterator[dict]:  # fmt: skip
    """Sample answers to at most `most` prompts, from random documents or written by the target."""
    rng, max_prompt = np.random.default_rng(seed), config.context - args.tokens
    documents = [(name, document) for name, texts in corpus.items() for document in texts]
    if args.chat is None:
        tried = 100 * POOLED_BATCHES * args.batch
        drawn = (documents[i] for i in rng.integers(len(documents), size=tried))
    else:
        turns = user_turns(sample, config, tokenizer, args.chat, most, rng)
        drawn = (("chat", document) for document in turns)
    how = prompt_of, tokenizer, rng, args.ask
    prompts = ((name, skipped.attempt(document, *how)) for name, document in drawn)
    fitting = (prompt for prompt in prompts if 0 < len(prompt[1]) <= max_prompt)
    # prompts that run together have similar lengths, but the shortest ones are not always first
    chosen = sorted(islice(fitting, most), key=lambda prompt: len(prompt[1]))
    start = rng.integers(len(chosen) or 1)
    chosen = chosen[start:] + chosen[:start]
    if not chosen and args.chat is None:  # with --chat, no user turn was finished
        why = str(skipped) or "lower --tokens"
        raise UserError(f"no prompts of at most {max_prompt} tokens found: {why}")
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    prompts = [ids for _, ids in chosen]
    for i, answer in sample(prompts, args.tokens, sampling, int(rng.integers(2**63))):
        yield {"kind": chosen[i][0], "prompt": prompts[i], "tokens": answer}


def resume(file: TextIO, path: Path, tokenizer: Tokenizer, options: dict) -> list[dict]:
    """Check that a file is new or was started with these options, and return its documents. Remove
    an incomplete last line, left by a killed process."""
    header, rows = read_generated(path, tokenizer)
    file.seek(0)
    content = file.read()
    if content and not (header or rows):
        raise UserError(f"{path} is not from minispec.distill generate: choose another --out")
    for name, value in options.items():
        before = header.get("options", {}).get(name)
        if rows and (before or None) != (value or None):  # older files lack flags that were off
            raise UserError(f"{path} was started with another {flag_name(name)}: use the same "
                            "one, or choose another --out")  # fmt: skip
    file.truncate(len(content[: content.rfind("\n") + 1].encode()) if rows else 0)
    if not rows:
        file.write(json.dumps({"tokenizer": tokenizer.fingerprint, "options": options}) + "\n")
    return rows


def check_flags(args: argparse.Namespace) -> None:
    """Reject invalid flags before any weights are read."""
    if args.out.suffix in OPENERS:
        raise UserError(f"--out {args.out}: a compressed file cannot be appended to; choose a "
                        ".jsonl file and compress it afterwards")  # fmt: skip
    if args.ask and not args.data:
        raise UserError("--ask needs the documents of --data")
    if args.server is not None and distributed.world.size > 1:
        raise UserError("one process asks --server with many requests at once: omit torchrun")
    for flag in "name", "key_env":
        if getattr(args, flag) is not None and args.server is None:
            raise UserError(f"{flag_name(flag)} only works with --server")
    with user_error(f"--ask {args.ask}: write {{}} in place of the text"):
        (args.ask or "").format("")


def append_documents(
    file: TextIO, rows: list[dict], new_documents: Callable[[list[int], int], Iterable[dict]],
    args: argparse.Namespace,
) -> int:  # fmt: skip
    """Append documents to a file that holds `rows` until there are --documents of them or a pool
    has nothing new; return their number. `new_documents` yields at most as many as requested, from
    a seed. Each is written as soon as it arrives."""
    duplicates, kept, idle, tokens = Duplicates(), len(rows), 0, 0
    for row in rows:
        duplicates.add(row["tokens"])
    with tqdm(total=args.documents, initial=kept, unit="document") as bar:
        while (before := kept) < args.documents and idle < MAX_IDLE_PROMPTS:
            missing = min(args.documents - kept, POOLED_BATCHES * args.batch)
            for row in new_documents([args.seed, kept, idle], missing):
                if args.keep_duplicates or not duplicates.add(row["tokens"]):
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                    tokens += len(row["tokens"])
                    seconds = max(bar.format_dict["elapsed"], 1e-9)  # a clock may be coarse
                    bar.set_postfix_str(f"{tokens / seconds:.0f} tokens/s", refresh=False)
                    bar.update()
                    kept += 1
            idle = 0 if kept > before else idle + missing
    return kept


def run(args: argparse.Namespace) -> None:
    """Generate text with the target, to train drafts and heads on."""
    with distributed.together():
        check_flags(args)
        model, tokenizer = load_target(args, args.dtype)
    if warning := unlisted_eos_warning(model, tokenizer):
        note(warning)
    corpus, skipped = text.read_corpus(args.data)[0] if args.data else {}, text.Skipped()
    args.batch = args.batch or distributed.all_gather(default_batch(args, model))[0]
    options = {"server": args.server is not None}  # at any address
    options |= {name: getattr(args, name) for name in RECORDED_FLAGS}
    options |= {"dtype": str(model.dtype), "model": weights_digest(model), "data": digest(corpus)}
    config, sample = model.config, local_sampler(model, args.batch)
    if args.server is not None:
        sample = server.ServerSampler(args, model, tokenizer, skipped)
        config = replace(config, context=min(config.context, sample.server.context))
    if args.tokens >= config.context:
        raise UserError(f"--tokens {args.tokens} leaves no room for a prompt in the context of "
                        f"{config.context} tokens: lower --tokens")  # fmt: skip

    new_documents = partial(sample_documents, sample, config, tokenizer, corpus, args, skipped)
    first, rows = distributed.world.rank == 0, []
    out = args.out if first else Path(os.devnull)  # the other processes write nothing
    writing = user_error(f"{out} cannot be written", OSError)
    with writing, out.open("a+", encoding="utf-8", newline="\n") as file:
        with distributed.together():
            if first:
                lock(file, f"--out {args.out}")
                rows = resume(file, args.out, tokenizer, options)
        rows = distributed.all_gather(rows)[0]
        kept = append_documents(file, rows, new_documents, args)
    if kept and skipped.reasons:
        note(str(skipped))
    if kept < args.documents:
        why = "raise --temperature, add --data, or lower --documents"
        if not kept and (skipped.reasons or args.chat is not None):
            unfinished = warning or "choose a chat model, or use --data"
            why = str(skipped) or f"no user turn was finished; {unfinished}"
        raise UserError(f"generated only {kept} distinct documents: {why}")


def arguments(p: argparse.ArgumentParser) -> None:
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, nargs="+", metavar="PATH",
                        help="text or prompt files, or folders (see training/text.py)")  # fmt: skip
    source.add_argument("--chat", nargs="*", metavar="BEGINNING",
                        help="let the target write the user turns, each starting with one of "
                             "these")  # fmt: skip
    p.add_argument("--ask", metavar="FORMAT",
                   help="a request to make about each text, like 'Summarize: {}' or "
                        "'Continue: {:.200}'")  # fmt: skip
    p.add_argument("--server", metavar="URL", help="let a server of --model with /v1/completions "
                   "generate; --model itself only checks its first answers")  # fmt: skip
    p.add_argument("--name", help="the model's name on the server (default: its only model)")
    p.add_argument("--key-env", metavar="NAME", help="the environment variable that holds the API "
                   "key of --server. Without it no key is sent")  # fmt: skip
    p.add_argument("--out", type=OutputFile, required=True, help=".jsonl file to append to")
    add_flags(
        p,
        ("documents", number(1), 8000, "documents the file should hold"),
        ("tokens", number(1), 200, "maximum tokens to generate per document"),
        ("seed", number(0), 0, "random seed"),
        ("temperature", float, 0.6, "0: greedy"),
        ("top-k", int, 20, "0: off"),
        ("top-p", float, 0.95, "1: off"),
    )
    p.add_argument("--batch", type=number(1), help="prompts sampled at once, or requests to "
                   f"--server (default: {MAX_REQUESTS} requests, or as many prompts as half of the "
                   f"free memory holds, at most {MAX_ROWS})")  # fmt: skip
    p.add_argument("--keep-duplicates", action="store_true",
                   help="keep near-duplicates, at the rate the target generates them")  # fmt: skip
