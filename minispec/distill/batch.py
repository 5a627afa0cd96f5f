"""Sample many texts at once.

Each row of a batch decodes one prompt. When a text ends, its row gets the next prompt, so the batch
stays full. The host reads tokens once per burst of steps. During a burst, tokens, lengths and
random numbers stay on the device; on a GPU, each step is one CUDA graph.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from minispec.fast.captured import SPAN, Graphs
from minispec.fast.compiled import is_on_gpu
from minispec.model import Transformer
from minispec.sampling import Sampling, not_finite, sample_inverse_cdf, warp

BURST = 16  # maximum steps between two reads by the host


@dataclass
class Text:
    """A prompt, the generator for its tokens, and the tokens drawn so far."""

    prompt: list[int]
    generator: torch.Generator
    answer: list[int] = field(default_factory=list)


class Batch:
    """Texts of up to `n` new tokens, one in each row. A text that has ended stays in its row,
    unchanged, until it is replaced or dropped. Passes see a view of the cache, whose own length
    stays 0."""

    def __init__(self, model: Transformer, n: int, sampling: Sampling, rows: int, capacity: int):
        self.model, self.n, self.sampling = model, n, sampling
        # an ended text's row is written up to BURST - 1 rows further
        self.cache = model.new_cache(capacity + BURST, rows)
        self.cache.user = object()  # graphs look up the weights once
        self.graphs = Graphs(model) if is_on_gpu(model) else None
        self.texts: list[Text | None] = [None] * rows

    def start(self, texts: dict[int, Text]) -> None:
        """Put each text into the row that is its key, and feed its prompt except the last token,
        which the next step feeds."""
        # steps after an end token may have written NaN, which a mask does not hide
        self.cache.kv[:, :, [row for row in texts if self.texts[row]]] = 0
        self.texts = [texts.get(row, text) for row, text in enumerate(self.texts)]
        fed = [torch.tensor(text.prompt[:-1], dtype=torch.int64) for text in texts.values()]
        if any(map(len, fed)):
            padded = nn.utils.rnn.pad_sequence(fed, batch_first=True)
            new = self.model.new_cache(padded.shape[1], len(padded))
            self.model.prefill(padded, new)  # rows written for padding are never committed
            self.cache.kv[:, :, list(texts), : padded.shape[1]] = new.kv

    def drop(self, rows: list[int]) -> None:
        """Drop these rows from the batch."""
        kept = sorted({*range(len(self.texts))} - {*rows})
        self.texts = [self.texts[row] for row in kept]
        self.cache.set_storage(self.cache.kv[:, :, kept], 0)

    def extend(self) -> list[int]:
        """Extend each text by up to BURST tokens. Returns the rows whose texts have just ended."""
        growing = [row for row, text in enumerate(self.texts) if not self.ended(text)]
        steps = min(BURST, self.n - min(len(self.texts[row].answer) for row in growing))
        uniforms = [torch.rand(steps, dtype=torch.float64, generator=text.generator)
                    for text in self.texts]  # fmt: skip
        drawn = self.draw(torch.stack(uniforms))
        for row in growing:
            text = self.texts[row]
            for token in drawn[row]:
                if token < 0:
                    raise not_finite(self.model.dtype)
                text.answer.append(token)
                if self.ended(text):
                    break
        return [row for row in growing if self.ended(self.texts[row])]

    def ended(self, text: Text) -> bool:
        end = bool(text.answer) and text.answer[-1] in self.model.config.eos_ids
        return end or len(text.answer) == self.n

    def draw(self, uniforms: Tensor) -> list[list[int]]:
        """Draw tokens for each row, one for each number in `uniforms` (rows, steps), a tensor on
        the host."""
        device, texts = self.model.device, [text.prompt + text.answer for text in self.texts]
        needed = max(map(len, texts)) + uniforms.shape[1]
        if self.graphs is not None:
            needed = -(-needed // SPAN) * SPAN
        span = min(needed, self.cache.capacity)
        tokens = torch.tensor([text[-1] for text in texts], device=device)
        lengths = torch.tensor([[len(text) - 1] for text in texts], device=device)
        # MPS has no float64
        columns = uniforms.T.contiguous().to("cpu" if device.type == "mps" else device)
        drawn = []
        for column in columns:
            tokens = self.next_tokens(span, [tokens, lengths, column])
            lengths = lengths + 1
            drawn.append(tokens)
        return torch.stack(drawn, dim=1).tolist()

    def next_tokens(self, span: int, inputs: list[Tensor]) -> Tensor:
        """Run `step`, on a GPU as a graph if possible."""
        if self.graphs is None:
            return self.step(span, *inputs)
        key = span, *self.graphs.key(self.cache)
        run = partial(self.step, span)
        return self.graphs.replay(key, run, inputs, self.model.device).clone()

    def step(self, span: int, tokens: Tensor, lengths: Tensor, uniforms: Tensor) -> Tensor:
        """Feed the newest token of each row and draw the next one, (B,) each. A token of -1 means
        that the logits contained NaN or infinity. Everything that changes from step to step is in
        the tensors, so one graph can replay it."""
        fed = tokens.clamp(min=0)[:, None]  # the host raises after the burst
        logits = self.model.logits(self.model(fed, self.cache.view(span, lengths))[:, 0])
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
    texts = [Text(prompt, generator) for prompt, generator in zip(prompts, generators, strict=True)]
    waiting, idle = deque(texts), list(range(min(rows or len(texts), len(texts))))
    batch = Batch(model, n, sampling, len(idle), max(map(len, prompts), default=0) + n)
    for text in texts:
        while not batch.ended(text):
            if new := range(min(len(idle), len(waiting))):
                batch.start({idle.pop(): waiting.popleft() for _ in new})
            if 3 * len(idle) > len(batch.texts):
                batch.drop(idle)
                idle = []
            idle += batch.extend()
        yield text.answer
