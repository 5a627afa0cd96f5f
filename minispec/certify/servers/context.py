"""A server as a decoder under examination, and the prompts and tolerance of its examination."""

import argparse
import copy
import random
import time
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, cycle, islice

import torch
from tqdm import tqdm

from minispec.certify.common import NotSupported
from minispec.certify.compare import TIE
from minispec.certify.examination import Examination, Request
from minispec.checkpoints.tokenizer import Tokenizer
from minispec.cli import UserError, number
from minispec.generate import decode
from minispec.model import Transformer
from minispec.remote import identity
from minispec.remote.client import Answer, RequestError, Server, in_parallel
from minispec.sampling import Sampling, probs

TIME_LIMIT_MINUTES = 30  # of an examination
ANSWER_TOKENS = 32  # max_tokens of greedy answers
CONCURRENCY = 8  # requests at a time


@dataclass(frozen=True)
class ServerDecoder:
    """A server, as a decoder under examination."""

    server: Server
    model: Transformer  # in float64
    tokenizer: Tokenizer | None
    end: float  # nothing is requested after this time.monotonic()

    def batch(self, requests: list[Request]) -> list[list[int]]:
        """Return the tokens for several requests, which are sent concurrently."""
        answers = in_parallel(self.ask, requests, CONCURRENCY)
        bar = tqdm(answers, "requests", len(requests), leave=False, disable=None, delay=5)
        found = []
        for i, answer in list(bar):
            prompt, n, *_ = requests[i]
            found.append(self.with_end(prompt, n, answer))
        return found

    def ask(self, request: Request, **fields) -> Answer:
        """Ask with fields that not every server supports."""
        if time.monotonic() > self.end:
            late = f"{TIME_LIMIT_MINUTES} minutes are over (reduce --requests)"
            raise RequestError(late, "incomplete")
        if not self.server.supports(request.sampling):
            raise NotSupported("top_k")
        try:
            return self.server.ask(*request, **fields)
        except RequestError as error:
            if fields and error.kind == "rejected":
                raise NotSupported(f"{', '.join(fields)} ({error})") from None
            error.request = request
            raise

    def with_end(self, prompt: list[int], n: int, answer: Answer) -> list[int]:
        """Return an answer's tokens with an end token, the most probable one, if it ended early.
        For a text, these are our own tokens as far as their text agrees, then the tokenizer's."""
        tokens = answer.tokens
        if not answer.has_ids and self.tokenizer:
            ours = decode(self.model, self.tokenizer, prompt, max_new_tokens=n)
            prefixes = list(accumulate(ours.texts, initial=""))  # an end token flushes held text
            agreed = max(i for i, text in enumerate(prefixes) if answer.text.startswith(text))
            rest = self.tokenizer.encode(answer.text[len(prefixes[agreed]) :], False)
            kept = len(ours.tokens) - (ours.finish_reason == "eos")
            tokens = ours.tokens[: min(agreed, kept)] + rest
        return identity.with_end(self.model, prompt, tokens, n, answer.ended)


@dataclass
class ServerContext(Examination):
    """The examination of a server."""

    decoder: ServerDecoder
    baseline: ServerDecoder | None = None
    prompts: dict[str, list[list[int]]] = field(default_factory=dict)  # by kind
    requests: int = 0  # to all servers, roughly

    @property
    def server(self) -> Server:
        return self.decoder.server

    @property
    def servers(self) -> list[Server]:
        return [decoder.server for decoder in self.decoders]

    @property
    def has_ids(self) -> bool:
        """Return whether all servers return token ids."""
        return all(server.returns_ids for server in self.servers)

    @property
    def context(self) -> int:
        return min(server.context for server in self.servers)

    @property
    def accepts_ids(self) -> bool:
        return all(server.accepts_ids for server in self.servers)

    def as_received(self, prompt: list[int]) -> list[int]:
        """Return the prompt as the servers see it: retokenized if one accepts text only."""
        if self.accepts_ids:
            return prompt
        return self.decoder.tokenizer.encode(self.server.as_text(prompt))

    def choose_prompts(self, candidates: dict[str, list[list[int]]]) -> None:
        """Set the prompts to those that fit into the context."""
        context = min(self.model.config.context, self.context)
        for kind, prompts in candidates.items():
            received = [self.as_received(ids) for ids in prompts]
            if fitting := [ids for ids in received if 0 < len(ids) <= context - ANSWER_TOKENS]:
                self.prompts[kind] = fitting
        if not self.prompts:
            raise UserError(f"a context of {context} tokens is too short for any prompt")

    @cached_property
    def sampled_prompt(self) -> list[int]:
        """A prompt that repeats its own beginning, such that copying the next token is right about
        half the time. Drafts by prompt lookup are then accepted as often as rejected."""
        texts = [ids for prompts in self.prompts.values() for ids in prompts][:8]
        candidates = [(1.0, texts[0])]
        for ids in texts:
            for n in range(2, min(len(ids), 12)):
                prompt = [*ids[:12], *ids[:n]]
                if self.as_received(prompt) == prompt:
                    p = probs(self.model.logits(self.model(prompt)[0, -1:]), Sampling(1.0))[0]
                    candidates.append((abs(float(p[ids[n]]) - 0.5), prompt))
        return min(candidates)[1]


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
    """Make prompts of several kinds; those from text need a tokenizer."""
    rng, eos_ids = random.Random(0), model.config.eos_ids
    usable = [i for i in range(model.config.vocab_size) if i not in eos_ids]
    noise = [rng.choices(usable, k=n) for n in (3, 12, 40)]
    texts = [ids for text in PROMPT_TEXTS if tokenizer and len(ids := tokenizer.encode(text)) > 1]
    all_tokens = [token for ids in texts or noise for token in ids]
    kinds = {
        "texts": texts,
        "repetitive": [(ids[-8:] * 4)[: 8 * 3 + 2 + i] for i, ids in enumerate(texts + noise)],
        "lengths": [list(islice(cycle(all_tokens), n)) for n in PROMPT_LENGTHS],
        "random ids": noise,
    }
    return {kind: prompts for kind, prompts in kinds.items() if prompts}


def precision(text: str) -> float | torch.dtype:
    """Parse --precision: the name of a dtype, or the logit gap below which tokens are tied."""
    if text in ("float64", "float32", "float16", "bfloat16"):
        return getattr(torch, text)
    try:
        return number(0, 100, float)(text)
    except argparse.ArgumentTypeError:
        advice = "use float32, float16, bfloat16, or a gap in logits"
        raise argparse.ArgumentTypeError(f"{text}: {advice}") from None


def tolerance_of(precision: float | torch.dtype, model: Transformer, prompts: dict) -> float:
    """Return the logit gap that rounding may hide: `precision` if it is a number, else 4 times the
    largest change of our logits in this dtype (a gap has two logits; the other 2 is a margin)."""
    if isinstance(precision, float):
        return precision
    rounded, changes = copy.deepcopy(model).to(precision), []
    for ids, *_ in prompts.values():
        logits, other = (m.logits(m(ids)).double() for m in (model, rounded))
        changes.append(float((logits - other).abs().max()))
    return max(TIE, 4 * max(changes))
