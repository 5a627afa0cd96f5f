"""Sample many texts at once.

Each row of a batch decodes one prompt. When its text has ended, the row gets the next prompt, so
the batch stays full. The host reads the tokens only once in a burst of steps; in between, tokens,
lengths and randomness stay on the device, and a step on a GPU is one graph.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from minispec.cache import placement
from minispec.fast.captured import SPAN, Graphs
from minispec.fast.graphs import is_on_gpu
from minispec.model import Transformer
from minispec.sampling import Sampling, not_finite, sample_inverse_cdf, warp

BURST = 16  # steps, at most


class BatchCache:
    """A key-value cache of `rows` sequences. `lengths` (rows, 1), the numbers of committed cache
    rows, is a tensor on the device. A pass reads the first `span` cache rows of each sequence."""

    def __init__(self, model: Transformer, rows: int, capacity: int):
        c = model.config
        shape = 2, c.layers, rows, capacity, c.kv_heads, c.head_dim
        self.kv = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.lengths = torch.zeros(rows, 1, dtype=torch.int64, device=model.device)
        self.row_ids = torch.arange(max(rows, capacity), device=model.device)
        self.span = capacity

    @property
    def sequence_ids(self) -> Tensor:
        return self.row_ids[: len(self.lengths), None]  # (rows, 1)

    def place(self, n: int, depth: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See KVCache."""
        return placement(self.lengths, self.sequence_ids, self.row_ids[: self.span], depth, mask)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See KVCache."""
        keys, values = self.kv[:, layer]
        keys[self.sequence_ids, slots] = k
        values[self.sequence_ids, slots] = v
        return keys[:, : self.span], values[:, : self.span]


@dataclass
class Text:
    """A prompt and what has been drawn after it with the generator."""

    prompt: list[int]
    generator: torch.Generator
    answer: list[int] = field(default_factory=list)


class Batch:
    """Texts of up to `n` new tokens, one in each row. Those that have ended stay in their rows, and
    are not changed, until they are replaced or dropped."""

    def __init__(self, model: Transformer, n: int, sampling: Sampling, rows: int, capacity: int):
        self.model, self.n, self.sampling = model, n, sampling
        self.cache = BatchCache(model, rows, capacity + BURST)
        self.graphs = Graphs() if is_on_gpu(model) else None
        self.texts: list[Text | None] = [None] * rows

    def start(self, texts: dict[int, Text]) -> None:
        """Put texts into the rows that are their keys, and run the model on their prompts, but for
        the last tokens: the next step feeds those."""
        self.texts = [texts.get(row, text) for row, text in enumerate(self.texts)]
        fed = [torch.tensor(text.prompt[:-1], dtype=torch.int64) for text in texts.values()]
        padded = nn.utils.rnn.pad_sequence(fed or [torch.empty(0)], batch_first=True)
        if padded.numel():
            new = BatchCache(self.model, *padded.shape)
            self.model(padded, new)  # what it writes for the padding is never committed
            self.cache.kv[:, :, list(texts), : padded.shape[1]] = new.kv

    def drop(self, rows: list[int]) -> None:
        """Drop these rows from the batch."""
        kept = sorted({*range(len(self.texts))} - {*rows})
        self.texts = [self.texts[row] for row in kept]
        self.cache.kv = self.cache.kv[:, :, kept]
        if self.graphs is not None:
            self.graphs.clear()

    def extend(self) -> list[int]:
        """Extend each text by up to BURST tokens. Returns the rows of those that have ended now."""
        growing = [text for text in self.texts if not self.ended(text)]
        steps = min(BURST, self.n - min(len(text.answer) for text in growing))
        uniforms = [torch.rand(steps, dtype=torch.float64, generator=text.generator)
                    for text in self.texts]  # fmt: skip
        ended = []
        for row, tokens in enumerate(self.draw(torch.stack(uniforms))):
            text = self.texts[row]
            while not self.ended(text) and tokens:
                text.answer.append(tokens.pop(0))
                if text.answer[-1] < 0:
                    raise not_finite(self.model.dtype)
                if self.ended(text):
                    ended.append(row)
        return ended

    def ended(self, text: Text) -> bool:
        end = bool(text.answer) and text.answer[-1] in self.model.config.eos_ids
        return end or len(text.answer) == self.n

    def draw(self, uniforms: Tensor) -> list[list[int]]:
        """Draw a token for each number of `uniforms` (rows, steps), which is on the host."""
        device, texts = self.model.device, [text.prompt + text.answer for text in self.texts]
        needed = max(map(len, texts)) + uniforms.shape[1]
        if self.graphs is not None:
            needed = -(-needed // SPAN) * SPAN
        span = min(needed, self.cache.kv.shape[3])
        tokens = torch.tensor([text[-1] for text in texts], device=device)
        lengths = torch.tensor([[len(text) - 1] for text in texts], device=device)
        # MPS has no float64
        columns = uniforms.T.contiguous().to("cpu" if device.type == "mps" else device)
        run, drawn = partial(self.step, span), []
        for column in columns:
            inputs, found = [tokens, lengths, column], None
            if self.graphs is not None and not Graphs.failed:
                found = self.graphs.replay((span,), lambda: run, inputs, device)
            tokens = run(*inputs) if found is None else found.clone()
            lengths = lengths + 1
            drawn.append(tokens)
        return torch.stack(drawn, dim=1).tolist()

    def step(self, span: int, tokens: Tensor, lengths: Tensor, uniforms: Tensor) -> Tensor:
        """Feed the newest token of each row and draw the next one, (B,) each. -1 stands for logits
        with NaN or infinity. What differs between two steps is in the tensors only."""
        self.cache.span, self.cache.lengths = span, lengths
        logits = self.model.logits(self.model(tokens.clamp(min=0)[:, None], self.cache)[:, 0])
        if self.sampling.temperature == 0:
            largest, drawn = logits.max(-1)
        else:
            p = warp(logits, self.sampling).to(uniforms.device)  # (B, V)
            largest, drawn = p[:, 0], sample_inverse_cdf(p, uniforms)
        return drawn.masked_fill(~largest.isfinite(), -1).to(tokens.device)


@torch.no_grad()
def sample_batch(
    model: Transformer, prompts: list[list[int]], n: int, sampling: Sampling,
    generators: list[torch.Generator], rows: int | None = None,
) -> Iterator[list[int]]:  # fmt: skip
    """Sample up to `n` tokens after each prompt, at most `rows` prompts at once (default: all). A
    text stops after an end token. Yields the new tokens of each prompt, in order.

    Each prompt has its own generator, so its tokens do not depend on the others.
    """
    texts = [Text(prompt, generator) for prompt, generator in zip(prompts, generators)]
    waiting, idle = deque(texts), list(range(min(rows or len(texts), len(texts))))
    batch = Batch(model, n, sampling, len(idle), max(map(len, prompts), default=0) + n)
    for text in texts:
        while not batch.ended(text):
            new = range(min(len(idle), len(waiting)))
            batch.start({idle.pop(): waiting.popleft() for _ in new})
            if 3 * len(idle) > len(batch.texts):
                batch.drop(idle)
                idle = []
            idle += batch.extend()
        yield text.answer
