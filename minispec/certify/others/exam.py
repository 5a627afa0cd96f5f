"""What an examination of a server holds: prompts, tolerance, answers; and how they are read."""

import argparse
import copy
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, cycle, islice

import torch
from tqdm import tqdm

from minispec.certify.compare import TIE
from minispec.certify.others.client import Answer, NotOffered, Server
from minispec.certify.others.scoring import gaps
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.errors import number
from minispec.generate import decode
from minispec.model import Transformer
from minispec.sampling import Sampling

MINUTES = 30  # after which nothing more is asked
LENGTH = 32  # tokens of a greedy answer
AT_ONCE = 8
HOT = Sampling(1.5)
Row = tuple[bool | None, str]  # passed, detail


@dataclass
class ServerContext:
    """What every row needs. `answers` are the greedy ones, with their prompts."""

    server: Server
    baseline: Server | None
    model: Transformer  # in float64
    tokenizer: Tokenizer | None
    tolerance: float  # a gap between logits that rounding may bridge
    requests: int
    samplings: tuple[Sampling, ...]
    checks: tuple[str, ...]
    prompts: dict[str, list[list[int]]]
    answers: list[tuple[list[int], Answer]] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)

    @property
    def no_tie(self) -> str:
        return f"no tie (tolerance {self.tolerance:.2g})"

    @property
    def late(self) -> bool:
        return time.monotonic() - self.begin > 60 * MINUTES

    def as_read(self, prompt: list[int]) -> list[int]:
        """A prompt as the servers read it: where one takes text only, as our tokenizer reads it."""
        if all(each.takes_ids for each in (self.server, self.baseline) if each):
            return prompt
        return self.tokenizer.encode(self.tokenizer.decode(prompt))

    def greedy(self) -> list[tuple[list[int], Answer]]:
        """Greedy answers, and their prompts: those that were asked for, else some."""
        if not self.answers:
            prompts = [ids for each in self.prompts.values() for ids in each[:2]]
            self.answers = [(ids, self.server.ask(ids, LENGTH)) for ids in prompts]
        return self.answers

    def long(self) -> tuple[list[int], Answer]:
        """A greedy answer that no end token cut short, and its prompt."""
        for ids, answer in self.greedy():
            if len(answer.tokens) >= LENGTH:
                return ids, answer
        raise NotOffered(f"no greedy answer has {LENGTH} tokens")


# ---- prompts -------------------------------------------------------------------------------------

TEXTS = (
    "The old lighthouse keeper climbed the stairs every evening, and when the lamp was lit he",
    "def largest(numbers):\n    best = numbers[0]\n    for number in numbers[1:]:\n        if",
    "Der Zug nach Hamburg fährt um acht Uhr ab. Wer mitfahren will, muss",
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "works": [{"title":',
    "Question: A box holds 12 eggs. How many eggs are there in 7 boxes?\nAnswer: There are",
)
LENGTHS = 1, 2, 16, 17, 33, 64, 65, 128, 129, 257, 513  # about blocks' borders


def prompts_for(model: Transformer, tokenizer: Tokenizer | None) -> dict[str, list[list[int]]]:
    """Prompts of several kinds, those of text where there is a tokenizer."""
    rng, ends = random.Random(0), model.config.eos_ids
    usable = [i for i in range(model.config.vocab_size) if i not in ends]
    noise = [rng.choices(usable, k=n) for n in (3, 12, 40)]
    texts = [ids for text in TEXTS if tokenizer and len(ids := tokenizer.encode(text)) > 1]
    every = [token for ids in texts or noise for token in ids]
    kinds = {
        "texts": texts,
        "repetitive": [(ids[-8:] * 4)[: 8 * 3 + 2 + i] for i, ids in enumerate(texts + noise)],
        "lengths": [list(islice(cycle(every), n)) for n in LENGTHS],
        "random ids": noise,
    }
    return {kind: each for kind, each in kinds.items() if each}


def precision(text: str) -> float | torch.dtype:
    """What --precision takes: the name of a dtype, or the gap between two logits that is a tie."""
    if text in ("float64", "float32", "float16", "bfloat16"):
        return getattr(torch, text)
    try:
        return number(0, 100, float)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text}: use float32, float16, bfloat16, or a gap in logits"
        ) from None


def tolerance_of(precision: float | torch.dtype, model: Transformer, prompts: dict) -> float:
    """A gap between two logits that a server's rounding may bridge: a number, or what rounding to a
    dtype does to our own logits (twice the largest change of one, for two, and twice that)."""
    if isinstance(precision, float):
        return precision
    rounded = copy.deepcopy(model).to(precision)
    moved = 0.0
    for ids in [each[0] for each in prompts.values()]:
        logits, other = (each.logits(each(ids)).double() for each in (model, rounded))
        moved = max(moved, float((logits - other).abs().max()))
    return max(TIE, 4 * moved)


# ---- answers ------------------------------------------------------------------------------------


def read(exam: ServerContext, prompt: list[int], answer: Answer) -> list[int]:
    """The tokens of an answer. Of one in text, ours as long as they spell it, then the
    tokenizer's."""
    if answer.given:
        return answer.tokens
    ours = decode(exam.model, exam.tokenizer, prompt, max_new_tokens=LENGTH)
    tokens = ours.tokens[: len(ours.tokens) - (ours.finish_reason == "eos")]
    spelt = list(accumulate(ours.texts, initial=""))  # what was held back comes with the end token
    n = max(n for n, text in enumerate(spelt) if answer.text.startswith(text))
    return tokens[:n] + exam.tokenizer.encode(answer.text[len(spelt[n]) :], special=False)


def with_eos(exam: ServerContext, prompt: list[int], answer: Answer) -> list[int]:
    """The tokens of an answer, with the best end token of its place where one ended it."""
    tokens, ends = read(exam, prompt, answer), exam.model.config.eos_ids
    if not (answer.ended and ends and known(exam, tokens)):
        return tokens
    return [*tokens, min(ends, key=lambda end: gaps(exam.model, prompt, [*tokens, end])[-1])]


def known(exam: ServerContext, tokens: list[int]) -> bool:
    return all(0 <= token < exam.model.config.vocab_size for token in tokens)


def worst(exam: ServerContext, prompt: list[int], tokens: list[int]) -> tuple[float, int, int]:
    """The largest gap below the best token, where, and how many tokens are not the best."""
    if not known(exam, tokens):
        return math.inf, next(i for i, t in enumerate(tokens) if not known(exam, [t])), 1
    below = gaps(exam.model, prompt, tokens) if tokens else [0.0]
    return max(below), below.index(max(below)), sum(gap > 0 for gap in below)


def at_once(function: Callable, jobs: list, label: str = "") -> list:
    """The results of jobs, eight at a time, with progress where there is much to wait for."""
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        results = pool.map(function, jobs)
        return list(tqdm(results, label, len(jobs), disable=None if label else True))
    finally:
        pool.shutdown(cancel_futures=True)
