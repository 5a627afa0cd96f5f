"""One generation: where it ends, the text that its tokens make, and its figures."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from numbers import Integral

import torch

from minispec.cache import KVCache
from minispec.checkpoints.tokenizer import TextStream
from minispec.errors import UserError
from minispec.sampling import Sampling
from minispec.tree import Step

LOSSY = ("medusa-typical",)  # every other method draws as plain decoding does


@dataclass(frozen=True)
class Chunk:
    """What one round adds to the output: tokens, and the text that each makes visible."""

    tokens: list[int]
    texts: list[str]
    step: Step

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True)
class Ending:
    """What ends a run: a number of tokens, stop strings, the model's end tokens."""

    max_new_tokens: int = 200
    stop: tuple[str, ...] = ()
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self):
        n = self.max_new_tokens
        if not isinstance(n, Integral) or n < 0:
            raise UserError(f"max-new-tokens {n}: must be a whole number, at least 0")
        if not isinstance(self.stop, (tuple, list)) or not all(
            isinstance(text, str) and text for text in self.stop
        ):
            raise UserError(f"stop {self.stop!r}: must be text, and must not be empty")


@dataclass(eq=False)
class Run:
    """One generation. Iterate over it for Chunks; what was produced so far is always in it.

    EOS, stop strings, lengths, the context limit and the statistics live here and nowhere else,
    and cut inside an accepted block exactly where plain decoding would have stopped.
    """

    method: str
    prompt: list[int]
    steps: Iterator[Step]
    cache: KVCache
    sampling: Sampling
    ending: Ending
    stop_ids: list[int]  # of the stop strings that are control tokens: they have no text
    decoder: TextStream | None
    extra_parameters: int
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # what each token made visible
    held: str = ""  # decoded, but maybe the beginning of a stop string
    finish_reason: str | None = None
    rounds: list[Step] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __post_init__(self):
        self.cached_tokens = self.cache.length
        self.chunks = self.run()

    def __iter__(self) -> Iterator[Chunk]:
        return self.chunks

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @torch.inference_mode()  # cheaper operators than under no_grad
    def run(self) -> Iterator[Chunk]:
        """Round after round, each cut where the run ends."""
        begin = time.perf_counter()
        self.next_step()  # the prefill
        self.prefill_seconds = time.perf_counter() - begin
        if self.ending.max_new_tokens == 0:
            self.finish("length")
        while self.finish_reason is None:
            begin = time.perf_counter()
            step = self.next_step()
            self.decode_seconds += time.perf_counter() - begin
            self.rounds.append(step)
            yield self.take(step)

    def next_step(self) -> Step:
        """The method's next round, in the model's dtype even under a surrounding autocast."""
        with without_autocast(self.cache.device):
            return next(self.steps)

    def take(self, step: Step) -> Chunk:
        """Append the step's tokens up to the first that ends the run."""
        before = len(self.tokens)
        for token in step.tokens:
            self.tokens.append(token)
            self.texts.append("")
            reason = self.end_after(token)
            if reason:
                self.finish(reason)
                break
        return Chunk(self.tokens[before:], self.texts[before:], step)

    def end_after(self, token: int) -> str | None:
        """Show the text so far as it is safe; the reason to stop after this token, if any."""
        if token in self.ending.eos_ids:
            return "eos"
        if token in self.stop_ids:
            self.texts[-1], self.held = self.held + self.decoder.flush(), ""
            return "stop"
        self.held += self.decoder.push(token) if self.decoder else ""
        found = min((at for at in map(self.held.find, self.ending.stop) if at >= 0), default=None)
        if found is not None:
            self.texts[-1], self.held = self.held[:found], ""
            return "stop"
        safe = len(self.held) - longest_overlap(self.held, self.ending.stop)
        self.texts[-1], self.held = self.held[:safe], self.held[safe:]
        if len(self.tokens) == self.ending.max_new_tokens:
            return "length"
        if len(self.prompt) + len(self.tokens) == self.cache.capacity:
            return "context"
        return None

    def finish(self, reason: str) -> None:
        """End here: show the text held back, and leave in the cache rows of emitted tokens only,
        so that it serves the next turn."""
        self.finish_reason = reason
        if reason != "stop" and self.tokens:
            self.texts[-1] += self.held + (self.decoder.flush() if self.decoder else "")
        kept = len(self.prompt) + len(self.tokens) - 1
        self.cache.truncate(min(self.cache.length, kept))

    @property
    def stats(self) -> dict:
        """The figures that --json and --stats report: seconds, tokens and passes."""
        passes, new = len(self.rounds), len(self.tokens)
        return {
            "target_passes": passes,
            "new_tokens": new,
            "tokens_per_pass": new / passes if passes else 0.0,
            "drafted": sum(len(step.tree) - 1 for step in self.rounds),
            "accepted": sum(len(step.path) - 1 for step in self.rounds),
            "acceptance": acceptance(self.rounds),
            "cached_tokens": self.cached_tokens,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "tokens_per_second": new / self.decode_seconds if self.decode_seconds else 0.0,
            "extra_parameters": self.extra_parameters,
            "lossless": self.method not in LOSSY,
            **asdict(self.sampling),
        }

    def as_json(self, model_name: str) -> dict:
        return {
            "method": self.method,
            "model": model_name,
            "prompt_tokens": len(self.prompt),
            "prompt_ids": self.prompt,
            "tokens": self.tokens,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stats": self.stats,
        }


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Suspend a surrounding autocast: a cache holds the model's dtype and no other."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def longest_overlap(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins one of `stops`."""
    lengths = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return max(lengths, default=0)


def acceptance(rounds: list[Step]) -> dict[str, list[float]]:
    """Share of drafts accepted at depth 1, 2, …: of the rounds that drafted so deep, and
    (conditional) of those of them that had accepted the depth before."""
    deepest = [max(step.tree.depths) for step in rounds]
    unconditional, conditional = [], []
    for depth in range(1, max(deepest, default=0) + 1):
        lengths = [len(step.path) - 1 for step, d in zip(rounds, deepest) if d >= depth]
        accepted, reached = (sum(n >= k for n in lengths) for k in (depth, depth - 1))
        unconditional.append(accepted / len(lengths))
        conditional.append(accepted / reached if reached else 0.0)
    return {"unconditional": unconditional, "conditional": conditional}
