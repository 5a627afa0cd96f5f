"""One generation: its tokens, their text, when it stops, and its statistics."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral

import torch

from minispec.cache import KVCache
from minispec.checkpoints.tokenizer import TextStream
from minispec.cli import UserError
from minispec.sampling import Sampling
from minispec.tree import Step, Tree


@dataclass(frozen=True)
class Chunk:
    """The output of one round: its tokens, and the new text that each completes."""

    tokens: list[int]
    texts: list[str]
    step: Step

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True)
class StopConditions:
    """When a run stops: after `max_new_tokens`, at a stop string or at an end token."""

    max_new_tokens: int = 200
    stop: tuple[str, ...] = ()
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self):
        n = self.max_new_tokens
        if not isinstance(n, Integral) or n < 0:
            raise UserError(f"max-new-tokens {n}: must be a whole number, at least 0")
        object.__setattr__(self, "max_new_tokens", int(n))  # a NumPy integer may overflow
        texts = self.stop if isinstance(self.stop, tuple | list) else [None]
        if not all(isinstance(text, str) and text for text in texts):
            raise UserError(f"stop {self.stop!r}: must be text, and must not be empty")


@dataclass(eq=False)
class Run:
    """One generation. Iterate over it for Chunks; it always holds everything generated so far.

    EOS, stop strings, lengths, the context limit and the statistics are handled here and nowhere
    else. A run stops exactly where plain decoding would, even inside an accepted block."""

    method: str
    prompt: list[int]
    steps: Iterator[Step]
    caches: list[KVCache]  # the target's first; empty once the run is finished
    sampling: Sampling
    stop_conditions: StopConditions
    stop_ids: list[int]  # ids of stop strings that are control tokens, which have no text
    decoder: TextStream | None
    extra_parameters: int
    lossless: bool = True  # the method keeps the distribution of plain decoding
    user: object = field(default_factory=object, repr=False)  # marks its caches
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # the new text that each token completed
    held_back: str = ""  # decoded text that may be the start of a stop string
    finish_reason: str | None = None
    rounds: list[Step] = field(default_factory=list)
    prefilled: bool = False
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __post_init__(self):
        self.cached_tokens = int(self.caches[0].length)
        self.dtype = str(self.caches[0].k[0].dtype).removeprefix("torch.")
        self.chunks = self.run()
        for cache in self.caches:
            cache.user = self.user

    def __iter__(self) -> Iterator[Chunk]:
        return self.chunks

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @torch.inference_mode()  # cheaper operators than under no_grad
    def run(self) -> Iterator[Chunk]:
        """Yield one chunk per round, the last one cut where the run ends."""
        if self.finish_reason is not None:  # before it began
            return
        start = time.perf_counter()
        self.next_step()  # the prefill
        self.prefill_seconds = time.perf_counter() - start
        if self.stop_conditions.max_new_tokens == 0:
            self.finish("length")
        while self.finish_reason is None:
            start = time.perf_counter()
            step = self.next_step()
            self.decode_seconds += time.perf_counter() - start
            self.rounds.append(without_distributions(step))
            yield self.emit(step)

    def next_step(self) -> Step:
        """The method's next round, in the model's dtype even under a surrounding autocast."""
        if any(cache.user is not self.user for cache in self.caches):
            raise UserError("another run has begun to use this run's cache; finish one run before "
                            "you pass its cache to the next")  # fmt: skip
        with without_autocast(self.caches[0].device):
            step = next(self.steps, None)
        if problem := self.broken_contract(step):
            raise UserError(f"{self.method}: {problem}")
        return step

    def broken_contract(self, step: object) -> str | None:
        """What is wrong with a round of a method, if anything; see tree.Step."""
        if not isinstance(step, Step):
            return ("it ended; a method yields a Step for each round, without end" if step is None
                    else f"it yields an object of type {type(step).__name__}; a method yields "
                    "Steps")  # fmt: skip
        if not self.prefilled:
            self.prefilled = True
            return "its first Step is the prefill, which has no tokens" if step.tokens else None
        if step.tree is None or step.tokens[:-1] != step.tree.tokens_at(step.path[1:]):
            return "the tokens of a Step are those of its path below the root, and the next one"
        committed = len(self.prompt) + len(self.tokens) + len(step.tokens) - 1
        if self.caches[0].length != committed:
            return (f"the cache holds {self.caches[0].length} tokens after a round instead of "
                    f"{committed}, all but the newest: commit the path, no more")  # fmt: skip
        return None

    def emit(self, step: Step) -> Chunk:
        """Append the step's tokens, up to the first one that ends the run."""
        before = len(self.tokens)
        for token in map(int, step.tokens):  # a caller's Randomness may draw NumPy integers
            self.tokens.append(token)
            self.texts.append("")
            if reason := self.end_after(token):
                self.finish(reason)
                break
        return Chunk(self.tokens[before:], self.texts[before:], step)

    def end_after(self, token: int) -> str | None:
        """Add this token's text unless it may start a stop string; return why the run ends here."""
        conditions = self.stop_conditions
        if token in conditions.eos_ids:
            return "eos"
        if token in self.stop_ids:
            self.texts[-1], self.held_back = self.held_back + self.decoder.flush(), ""
            return "stop"
        self.held_back += self.decoder.push(token) if self.decoder else ""
        positions = [i for i in map(self.held_back.find, conditions.stop) if i >= 0]
        if positions:
            self.texts[-1], self.held_back = self.held_back[: min(positions)], ""
            return "stop"
        starts = (n for stop in conditions.stop for n in range(1, len(stop))
                  if self.held_back.endswith(stop[:n]))  # fmt: skip
        safe = len(self.held_back) - max(starts, default=0)
        self.texts[-1], self.held_back = self.held_back[:safe], self.held_back[safe:]
        if len(self.tokens) == conditions.max_new_tokens:
            return "length"
        if len(self.prompt) + len(self.tokens) == self.caches[0].capacity:
            return "context"
        return None

    def finish(self, reason: str) -> None:
        """End the run: add the text that was held back, and truncate the caches to the rows of
        emitted tokens so that the next turn of a chat can use them. A finished run holds only its
        results, so that a list of runs takes little memory and can be pickled."""
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        if reason != "stop" and self.tokens:
            self.texts[-1] += self.held_back + (self.decoder.flush() if self.decoder else "")
        for cache in self.caches:
            if cache.user is self.user:  # not if another run has begun to use it
                cache.truncate(min(cache.length, len(self.prompt) + len(self.tokens) - 1))
                cache.user = None
        self.steps, self.chunks, self.caches, self.decoder = iter(()), iter(()), [], None

    @property
    def stats(self) -> dict:
        """The statistics that --json and --stats report: seconds, tokens and passes."""
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
            "dtype": self.dtype,
            "lossless": self.lossless,
            **asdict(self.sampling),
        }

    def as_json(self, model_name: str) -> dict:
        return {
            "method": self.method,
            "model": str(model_name),
            "prompt_tokens": len(self.prompt),
            "prompt_ids": self.prompt,
            "tokens": self.tokens,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stats": self.stats,
        }


def without_distributions(step: Step) -> Step:
    """The step with q as {x: q(x)} for its tokens x; all of q, (V,), would soon take gigabytes."""
    tree, pairs = step.tree, zip(step.tree.tokens, step.tree.draft_probs)
    kept = [q if q is None else {x: float(q[x])} for x, q in pairs]
    return replace(step, tree=Tree(tree.tokens, tree.parents, kept))


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Disable a surrounding autocast: the cache only holds the model's dtype."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else contextlib.nullcontext()


def acceptance(rounds: list[Step]) -> dict[str, list[float]]:
    """Acceptance rate by depth: over all rounds that drafted that deep (unconditional), and over
    those that also accepted the previous depth (conditional)."""
    deepest = [max(step.tree.depths) for step in rounds]
    unconditional, conditional = [], []
    for depth in range(1, max(deepest, default=0) + 1):
        lengths = [len(step.path) - 1 for step, d in zip(rounds, deepest) if d >= depth]
        accepted, reached = (sum(n >= k for n in lengths) for k in (depth, depth - 1))
        unconditional.append(accepted / len(lengths))
        conditional.append(accepted / reached if reached else 0.0)
    return {"unconditional": unconditional, "conditional": conditional}
