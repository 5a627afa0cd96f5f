"""The state of a server test (prompts, tolerance, answers), and functions to interpret answers."""

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
from minispec.certify.others.client import Answer, NotSupported, Server
from minispec.certify.others.scoring import gaps
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.errors import number
from minispec.generate import decode
from minispec.model import Transformer
from minispec.sampling import Sampling

TIME_LIMIT_MINUTES = 30  # no requests are sent after that
ANSWER_TOKENS = 32  # max_tokens of greedy answers
CONCURRENCY = 8  # requests at a time
HIGH_TEMPERATURE = Sampling(1.5)
Result = tuple[bool | None, str]  # passed, detail


@dataclass
class ServerContext:
    """State shared by all checks of a server. `answers` are the greedy ones, with their prompts."""

    server: Server
    baseline: Server | None
    model: Transformer  # in float64
    tokenizer: Tokenizer | None
    tolerance: float  # rounding may hide a logit gap below this
    requests: int
    samplings: tuple[Sampling, ...]
    checks: tuple[str, ...]
    prompts: dict[str, list[list[int]]]
    answers: list[tuple[list[int], Answer]] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)

    @property
    def not_a_tie(self) -> str:
        return f"not a tie (tolerance {self.tolerance:.2g})"

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() - self.begin > 60 * TIME_LIMIT_MINUTES

    def as_received(self, prompt: list[int]) -> list[int]:
        """Return the prompt as the servers see it: retokenized if one accepts text only."""
        if all(server.accepts_ids for server in (self.server, self.baseline) if server):
            return prompt
        return self.tokenizer.encode(self.tokenizer.decode(prompt))

    def greedy_answers(self) -> list[tuple[list[int], Answer]]:
        """Return the greedy answers so far with their prompts; request some if there are none."""
        if not self.answers:
            prompts = [ids for prompts in self.prompts.values() for ids in prompts[:2]]
            self.answers = [(ids, self.server.ask(ids, ANSWER_TOKENS)) for ids in prompts]
        return self.answers

    def long_answer(self) -> tuple[list[int], Answer]:
        """Return a greedy answer of full length, and its prompt."""
        for ids, answer in self.greedy_answers():
            if len(answer.tokens) >= ANSWER_TOKENS:
                return ids, answer
        raise NotSupported(f"no greedy answer has {ANSWER_TOKENS} tokens")


# ---- prompts -------------------------------------------------------------------------------------

PROMPT_TEXTS = (
    "The old lighthouse keeper climbed the stairs every evening, and when the lamp was lit he",
    "def largest(numbers):\n    best = numbers[0]\n    for number in numbers[1:]:\n        if",
    "Der Zug nach Hamburg fährt um acht Uhr ab. Wer mitfahren will, muss",
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "works": [{"title":',
    "Question: A box holds 12 eggs. How many eggs are there in 7 boxes?\nAnswer: There are",
)
PROMPT_LENGTHS = 1, 2, 16, 17, 33, 64, 65, 128, 129, 257, 513  # around common block sizes


def make_prompts(model: Transformer, tokenizer: Tokenizer | None) -> dict[str, list[list[int]]]:
    """Make prompts of several categories; those from text need a tokenizer."""
    rng, eos_ids = random.Random(0), model.config.eos_ids
    usable = [i for i in range(model.config.vocab_size) if i not in eos_ids]
    noise = [rng.choices(usable, k=n) for n in (3, 12, 40)]
    texts = [ids for text in PROMPT_TEXTS if tokenizer and len(ids := tokenizer.encode(text)) > 1]
    all_tokens = [token for ids in texts or noise for token in ids]
    categories = {
        "texts": texts,
        "repetitive": [(ids[-8:] * 4)[: 8 * 3 + 2 + i] for i, ids in enumerate(texts + noise)],
        "lengths": [list(islice(cycle(all_tokens), n)) for n in PROMPT_LENGTHS],
        "random ids": noise,
    }
    return {category: prompts for category, prompts in categories.items() if prompts}


def precision(text: str) -> float | torch.dtype:
    """Parse --precision: the name of a dtype, or the logit gap below which tokens are tied."""
    if text in ("float64", "float32", "float16", "bfloat16"):
        return getattr(torch, text)
    try:
        return number(0, 100, float)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text}: use float32, float16, bfloat16, or a gap in logits"
        ) from None


def tolerance_of(precision: float | torch.dtype, model: Transformer, prompts: dict) -> float:
    """Return the logit gap that rounding may hide: `precision` if it is a number, else 4 times the
    largest change of our logits in this dtype (a gap has two logits; the other 2 is a margin)."""
    if isinstance(precision, float):
        return precision
    rounded = copy.deepcopy(model).to(precision)
    largest_change = 0.0
    for ids in [prompts[category][0] for category in prompts]:
        logits, other = (m.logits(m(ids)).double() for m in (model, rounded))
        largest_change = max(largest_change, float((logits - other).abs().max()))
    return max(TIE, 4 * largest_change)


# ---- answers ------------------------------------------------------------------------------------


def answer_tokens(ctx: ServerContext, prompt: list[int], answer: Answer) -> list[int]:
    """Return the tokens of an answer. For a text answer, these are our own tokens as far as their
    text agrees, then the tokenizer's."""
    if answer.has_ids:
        return answer.tokens
    ours = decode(ctx.model, ctx.tokenizer, prompt, max_new_tokens=ANSWER_TOKENS)
    tokens = ours.tokens[: len(ours.tokens) - (ours.finish_reason == "eos")]
    prefixes = list(accumulate(ours.texts, initial=""))  # the end token flushes held-back text
    n = max(n for n, text in enumerate(prefixes) if answer.text.startswith(text))
    return tokens[:n] + ctx.tokenizer.encode(answer.text[len(prefixes[n]) :], special=False)


def with_eos(ctx: ServerContext, prompt: list[int], answer: Answer) -> list[int]:
    """Return the tokens of an answer; if an end token ended it, append the most probable one."""
    tokens, eos_ids = answer_tokens(ctx, prompt, answer), ctx.model.config.eos_ids
    if not (answer.ended and eos_ids and in_vocabulary(ctx, tokens)):
        return tokens
    return [*tokens, min(eos_ids, key=lambda end: gaps(ctx.model, prompt, [*tokens, end])[-1])]


def in_vocabulary(ctx: ServerContext, tokens: list[int]) -> bool:
    return all(0 <= token < ctx.model.config.vocab_size for token in tokens)


def largest_gap(ctx: ServerContext, prompt: list[int], tokens: list[int]) -> tuple[float, int, int]:
    """Return the largest gap below the best token, its index, and how many tokens have a gap."""
    if not in_vocabulary(ctx, tokens):
        return math.inf, next(i for i, t in enumerate(tokens) if not in_vocabulary(ctx, [t])), 1
    below = gaps(ctx.model, prompt, tokens) if tokens else [0.0]
    return max(below), below.index(max(below)), sum(gap > 0 for gap in below)


def run_concurrently(function: Callable, jobs: list, label: str = "") -> list:
    """Run all jobs concurrently and return their results; show progress if there is a label."""
    pool = ThreadPoolExecutor(CONCURRENCY)
    try:
        results = pool.map(function, jobs)
        return list(tqdm(results, label, len(jobs), disable=None if label else True))
    finally:
        pool.shutdown(cancel_futures=True)
