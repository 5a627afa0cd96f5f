"""Sample the target's own text.

A text of the corpus gives its first tokens, and the target goes on; or, with --ask, what to do with
it is said first. Of a conversation the target is asked, by its chat template, for the answer to a
user's turn; so `{"prompt": ...}` a line is enough. With --chat the target writes the user's turns
as well, after the bare header of one (Magpie, arXiv 2406.08464), so no data is needed at all.
With --given documents are taken as they are: mtp --soft learns the distributions over them, which
cost one pass. Near-duplicates are left out: a model repeats itself.
"""

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from minispec.checkpoints.tokenizer import Tokenizer
from minispec.errors import UserError, check_writable, note
from minispec.generate.api import unlisted_end
from minispec.model import Config, Transformer
from minispec.sampling import Sampling, argmax, not_finite, probs, sample_inverse_cdf, warp
from minispec.training.distill.documents import load_target, weights_digest
from minispec.training.loop import digest, lock, whole_numbers
from minispec.training.own_text import UNPACK, Duplicates, read_own
from minispec.training.text import (
    Conversation,
    Document,
    Kinds,
    LeftOut,
    encode,
    read_corpus,
    turn,
    user_ends,
)

LONGEST = 24  # tokens of a beginning
ALIKE = 4  # batches of prompts that are drawn together, and sorted
IDLE = 64  # prompts in a row after which nothing new came: enough
TURN, ASKING = 96, Sampling(0.9)  # of a user's turn by the target: tokens, how drawn
OPTIONS = (
    "seed", "batch", "tokens", "temperature", "top_k", "top_p", "keep_duplicates", "ask", "chat",
    "given",
)  # fmt: skip


@torch.no_grad()
def sample_batch(
    model: Transformer, prompts: list[list[int]], n: int, sampling: Sampling,
    generator: torch.Generator,
) -> list[list[int]]:  # fmt: skip
    """At most `n` tokens after each prompt, all sampled together; an end token is a row's last.

    Prompts are padded on the right: what lies behind a row's own length is never committed. Rows
    that have ended are dropped when they are more than a third.
    """
    lengths = [len(prompt) for prompt in prompts]
    padded = nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True)
    cache = model.new_cache(max(lengths) + n, batch=len(prompts))
    hidden = model(padded, cache)
    cache.extend(lengths)
    last = torch.stack([row[length - 1] for row, length in zip(hidden, lengths)])  # (B, d)
    output: list[list[int]] = [[] for _ in prompts]
    rows = output  # those that are still sampled, in the cache's order
    while True:
        logits = model.logits(last)  # (B, V)
        if sampling.temperature == 0:
            tokens = argmax(probs(logits, sampling))
        else:
            uniform = torch.rand(len(rows), dtype=torch.float64, generator=generator)
            p = warp(logits, sampling)
            p = p.cpu() if p.device.type == "mps" else p  # which has no float64
            drawn = sample_inverse_cdf(p, uniform.to(p.device))
            tokens = drawn.where(p[:, 0].isfinite(), -1).tolist()
            if -1 in tokens:
                raise not_finite(logits.dtype)
        for row, token in zip(rows, tokens):
            if not ended(row, n, model.config.eos_ids):
                row.append(token)
        alive = [i for i, row in enumerate(rows) if not ended(row, n, model.config.eos_ids)]
        if not alive:
            return output
        if 3 * len(alive) < 2 * len(rows):
            cache.keep(alive)
            rows, tokens = [rows[i] for i in alive], [tokens[i] for i in alive]
        last = model(torch.tensor(tokens)[:, None], cache)[:, 0]
        cache.extend([1] * len(rows))


def ended(row: list[int], n: int, eos: tuple[int, ...]) -> bool:
    return len(row) == n or (bool(row) and row[-1] in eos)


def user_turns(
    model: Transformer, tokenizer: Tokenizer, beginnings: list[str], n: int,
    rng: np.random.Generator,
) -> list[Document]:  # fmt: skip
    """At most `n` conversations of one turn, which the target wrote after its template's header of
    a user's turn and one of the `beginnings`. Turns without an end are left out."""
    chosen = [str(rng.choice(beginnings or [""])) for _ in range(n)]
    begun = [tokenizer.encode(beginning, special=False) for beginning in chosen]
    prompts = [tokenizer.user_header() + ids for ids in begun]
    generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
    turns = sample_batch(model, prompts, min(TURN, model.config.context // 2), ASKING, generator)
    said = [
        tokenizer.decode(ids + tokens).strip()
        for ids, tokens in zip(begun, turns) if tokens[-1] in model.config.eos_ids
    ]  # fmt: skip
    return [Conversation([turn("user", text)]) for text in said if text]


def prompt_of(
    document: Document, tokenizer: Tokenizer, rng: np.random.Generator, ask: str | None = None
) -> list[int]:
    """A text's first tokens, or the conversation in which `ask` speaks of it; a conversation up to
    the answer to one of the user's turns."""
    if isinstance(document, str) and ask:
        document = [turn("user", ask.format(document))]
    if isinstance(document, str):
        return tokenizer.encode(document[: 20 * LONGEST])[: rng.integers(4, LONGEST)]
    return encode(document[: rng.choice(user_ends(document))], tokenizer)


def new_documents(
    model: Transformer, tokenizer: Tokenizer, kinds: Kinds, args: argparse.Namespace,
    seed: list[int], left_out: LeftOut,
) -> list[dict]:  # fmt: skip
    """What the target says to --batch prompts: of documents drawn at random, or of its own."""
    rng, longest = np.random.default_rng(seed), model.config.context - args.tokens
    documents = [(kind, document) for kind, texts in kinds.items() for document in texts]
    if args.chat is None:
        drawn = (documents[i] for i in rng.integers(len(documents), size=100 * args.batch))
    else:
        turns = user_turns(model, tokenizer, args.chat, args.batch, rng)
        drawn = (("chat", document) for document in turns)
    how = prompt_of, tokenizer, rng, args.ask
    prompts = ((kind, left_out.attempt(document, *how)) for kind, document in drawn)
    most = args.batch if args.chat is not None else ALIKE * args.batch
    asked = list(islice((each for each in prompts if 0 < len(each[1]) <= longest), most))
    if not asked:
        if args.chat is None:
            why = str(left_out) or "lower --tokens"
            raise UserError(f"there is hardly a prompt of at most {longest} tokens: {why}")
        return []  # no turn of the user's ended
    if len(asked) > args.batch:  # prompts of like lengths need little padding
        asked.sort(key=lambda each: len(each[1]))
        at = args.batch * rng.integers(len(asked) // args.batch)
        asked = asked[at : at + args.batch]
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
    answers = sample_batch(model, [p for _, p in asked], args.tokens, sampling, generator)
    return [
        {"kind": kind, "prompt": prompt, "tokens": answer}
        for (kind, prompt), answer in zip(asked, answers)
    ]


def given_documents(
    config: Config, tokenizer: Tokenizer, kinds: Kinds, args: argparse.Namespace, seed: list[int],
    left_out: LeftOut,
) -> list[dict]:  # fmt: skip
    """What documents drawn at random say themselves after the prompts that a target would get."""
    rng, rows = np.random.default_rng(seed), []
    end = tokenizer.id_of("eos_token")  # of a turn, where a model has several ends
    ends = [end] if end in config.eos_ids else list(config.eos_ids[:1])
    documents = [(kind, document) for kind, texts in kinds.items() for document in texts]
    for i in rng.integers(len(documents), size=args.batch):
        kind, document = documents[i]
        if isinstance(document, str) and args.ask:
            document = [turn("user", args.ask.format(document)), turn("assistant", document)]
        if isinstance(document, str):
            ids, cut = tokenizer.encode(document), rng.integers(4, LONGEST)
            prompt, said = ids[:cut], ids[cut:]
        else:
            answers = [i for i, each in enumerate(document) if i and each["role"] == "assistant"]
            if not answers:
                continue
            at = rng.choice(answers)
            prompt = left_out.attempt(document, lambda turns: encode(turns[:at], tokenizer))
            said = tokenizer.encode(document[at]["content"], special=False) + ends
        answer = said[: args.tokens]
        if prompt and answer and len(prompt) + args.tokens <= config.context:
            rows.append({"kind": kind, "prompt": prompt, "tokens": answer})
    return rows


def resume(file: TextIO, path: Path, tokenizer: Tokenizer, options: dict) -> list[dict]:
    """The documents of a file that was begun with these options, or that is new. What a kill left
    of a last line is cut off."""
    made, rows = read_own(path, tokenizer)
    file.seek(0)
    if not rows and file.read(1) and not made:
        raise UserError(f"{path} was not begun by minispec.distill generate: give another --out")
    for name, value in options.items():
        begun = made.get("options", {}).get(name)
        if rows and (begun or None) != (value or None):  # files of before lack what was off
            raise UserError(f"{path} was not begun with this --{name.replace('_', '-')}: give what "
                            "it was begun with, or another --out")  # fmt: skip
    file.seek(0)
    whole = file.read().rpartition("\n")[0]
    file.truncate(len(whole) + 1 if rows else 0)
    if not rows:
        file.write(json.dumps({"tokenizer": tokenizer.fingerprint, "options": options}) + "\n")
    return rows


def check_flags(args: argparse.Namespace) -> None:
    """Reject what is visibly wrong before any weights are read."""
    if args.out.suffix in UNPACK:
        raise UserError(f"--out {args.out}: a packed file cannot be appended to; choose a .jsonl "
                        "file and pack it afterwards")  # fmt: skip
    check_writable(args.out, "--out")
    for flag in "given", "ask":
        if getattr(args, flag) and not args.data:
            raise UserError(f"--{flag} is about documents: give --data")
    try:
        (args.ask or "").format("")
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f"--ask {args.ask}: the text goes where {{}} is ({error})") from None


def run(args: argparse.Namespace) -> None:
    """Append documents to --out until it holds --documents of them."""
    check_flags(args)
    model, tokenizer = load_target(args, args.dtype)
    if unlisted := unlisted_end(model, tokenizer):
        note(unlisted)
    kinds = read_corpus(args.data)[0] if args.data else {}
    options = {name: getattr(args, name) for name in OPTIONS}
    options |= {"dtype": str(model.dtype), "model": weights_digest(model), "data": digest(kinds)}
    with (
        args.out.open("a+", encoding="utf-8", newline="\n") as file,
        tqdm(total=args.documents, unit="document") as bar,
    ):
        lock(file, f"--out {args.out}")
        rows = resume(file, args.out, tokenizer, options)
        duplicates, kept, idle, left_out = Duplicates(), len(rows), 0, LeftOut()
        for row in rows:
            duplicates.add(row["tokens"])
        bar.update(kept)
        while kept < args.documents and idle < IDLE:
            seed = [args.seed, kept, idle]
            if args.given:
                new = given_documents(model.config, tokenizer, kinds, args, seed, left_out)
            else:
                new = new_documents(model, tokenizer, kinds, args, seed, left_out)
            if not args.keep_duplicates:
                new = [row for row in new if not duplicates.add(row["tokens"])]
            file.write("".join(json.dumps(row) + "\n" for row in new))
            file.flush()
            kept, idle = kept + len(new), 0 if new else idle + args.batch
            bar.update(len(new))
    if kept and left_out.reasons:
        note(str(left_out))
    if kept < args.documents:
        why = "raise --temperature, give more --data, or ask for fewer"
        if not kept and left_out.reasons:
            why = str(left_out)
        elif not kept and args.chat is not None:
            why = f"no user turn ended; {unlisted or 'use a model trained to chat, or give --data'}"
        raise UserError(f"only {kept} different documents came: {why}")


def arguments(p: argparse.ArgumentParser) -> None:
    of = p.add_mutually_exclusive_group(required=True)
    of.add_argument("--data", type=Path, nargs="+", metavar="PATH",
                    help="texts or prompts: files or folders (see text.py)")  # fmt: skip
    of.add_argument("--chat", nargs="*", metavar="BEGINNING",
                    help="the target plays the user too, whose turns begin so")  # fmt: skip
    p.add_argument("--ask", metavar="FORMAT",
                   help="said of a text: 'Summarize: {}', 'Go on: {:.200}'")  # fmt: skip
    p.add_argument("--given", action="store_true",
                   help="what the documents say, not the target: to learn by --soft")  # fmt: skip
    p.add_argument("--out", type=Path, required=True, help="a .jsonl file, appended to")
    whole_numbers(
        p,
        ("documents", 1, 8000, "in all"),
        ("tokens", 1, 200, "of a document, at most"),
        ("batch", 1, 64, "prompts together"),
        ("seed", 0, 0, "of all that is random"),
    )
    p.add_argument("--temperature", type=float, default=0.6)
    p.add_argument("--top-k", type=int, default=20)
    p.add_argument("--top-p", type=float, default=0.95)
    p.add_argument("--keep-duplicates", action="store_true",
                   help="what is typical of the target as often as it comes")  # fmt: skip
    p.add_argument("--dtype", default="auto")
    p.add_argument("--device", default="auto")
