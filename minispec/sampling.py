"""Sampling: warp logits into distributions, and draw from them with injected randomness."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from reprlib import repr as brief
from typing import Protocol

import torch
from torch import Tensor

from minispec.cli import UserError, to_number


@dataclass(frozen=True)
class Sampling:
    """Logit warpers, applied in the same order as in transformers: temperature (0: greedy), top-k
    (0: off), top-p (1: off)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        for name, kind in ("temperature", float), ("top_k", int), ("top_p", float):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, to_number(value, kind))  # NumPy's are not JSON
            except UserError as error:
                raise UserError(f"{name} {brief(value)}: {error}") from None
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(
                f"temperature {self.temperature}: must be 0 (greedy) or a positive number"
            )
        if self.top_k < 0:
            raise UserError(f"top-k {self.top_k}: must be 0 (off) or a positive number of tokens")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p}: must be above 0 and at most 1 (off)")


@dataclass(frozen=True)
class OneHot(Sequence):
    """One-hot distributions, stored as token ids; indexing builds the dense row (V,)."""

    tokens: list[int]
    size: int

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> Tensor:
        dense = torch.zeros(self.size)
        dense[self.tokens[i]] = 1.0
        return dense


def probs(logits: Tensor, sampling: Sampling) -> Tensor | OneHot:
    """Warp logits (n, V) into distributions (n, V) on the host. Verification waits for the device
    only here. Drafting may wait as well: for sampled drafts, or for the candidates of Medusa.

    At temperature 0 each is one-hot at the argmax. Otherwise they equal those of transformers,
    including its treatment of ties, in float32 or better. Raises UserError if the logits contain
    NaN or infinity.
    """
    if sampling.temperature == 0:
        best = logits.max(-1)
        largest = best.values.to("cpu", non_blocking=True)  # arrives before the indices
        tokens = best.indices.tolist()
        if not largest.isfinite().all():
            raise not_finite(logits.dtype)
        return OneHot(tokens, logits.shape[-1])
    p = warp(logits, sampling).cpu()
    if p[:, 0].isnan().any():  # one NaN or +infinity makes its whole row NaN
        raise not_finite(logits.dtype)
    return p


def not_finite(dtype: torch.dtype) -> UserError:
    """The error for logits of this dtype that contain NaN or infinity."""
    name = str(dtype).removeprefix("torch.")
    hint = "the checkpoint is corrupt" if dtype.itemsize > 2 else "use --dtype bfloat16 or float32"
    return UserError(f"the model's logits contain NaN or infinity in {name}: {hint}")


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """`probs` for temperatures above 0, on the device of the logits and without checks."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # shift the largest to 0 first, so that a tiny temperature cannot overflow every logit
    logits = logits - logits.amax(-1, keepdim=True)
    logits = logits / max(sampling.temperature, 1e-30)  # a smaller one could be 0 in float32
    if 0 < sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -math.inf)
    if sampling.top_p < 1:
        ascending, order = logits.sort()
        tail = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        tail[..., -1] = False  # always keep the most likely token
        removed = torch.zeros_like(tail).scatter(-1, order, tail)  # back in vocabulary order
        logits = logits.masked_fill(removed, -math.inf)
    return logits.softmax(-1)


def argmax(probs: Tensor | OneHot) -> list[int]:
    """The most likely token of each row."""
    return probs.tokens if isinstance(probs, OneHot) else probs.argmax(-1).tolist()


class Randomness(Protocol):
    """The only source of randomness in decoding: `Seeded`, a scripted replay, or an enumerator."""

    def bernoulli(self, p: float) -> bool:
        """Return True with probability `p`."""

    def categorical(self, probs: Tensor) -> int:
        """Draw a token from `probs` (V,)."""


def draw(
    logits: Tensor, sampling: Sampling, randomness: Randomness
) -> tuple[Tensor, Tensor | None]:
    """Draw a draft token (1,) from logits (1, V). Returns the token and its distribution (V,).

    At temperature 0 the distribution is one-hot (None) and the token stays on the device, so that
    drafting continues without waiting for it. Logits with NaN or infinity also yield a one-hot
    draft: a broken draft costs speed but never changes the output.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1), None
    q = warp(logits, sampling)[0].cpu()
    if q[0].isnan():
        return logits.argmax(-1).cpu(), None
    return torch.tensor([randomness.categorical(q)]), q


class Seeded:
    """Randomness from a seed, with the same draws on every machine."""

    def __init__(self, seed: int = 0):
        try:
            self.generator = torch.Generator().manual_seed(index(seed))
        except (TypeError, ValueError, RuntimeError):  # RuntimeError in older versions of torch
            raise UserError(
                f"seed {seed!r}: must be a whole number from -2**63 to 2**64 - 1"
            ) from None

    def uniform(self) -> float:
        return torch.rand((), dtype=torch.float64, generator=self.generator).item()

    def bernoulli(self, p: float) -> bool:
        return self.uniform() < p

    def categorical(self, probs: Tensor) -> int:
        return int(sample_inverse_cdf(probs, self.uniform()))


def sample_inverse_cdf(probs: Tensor, uniform: float | Tensor) -> Tensor:
    """Return the tokens (...) at which the cumulative sums of `probs` (..., V) exceed `uniform`
    (...), which holds float64 numbers in [0, 1)."""
    cumulative = probs.double().cumsum(-1)
    # scaled by the total, so that rounding cannot run past the last token; right=True, so that a
    # token of probability 0 is never chosen
    threshold = uniform * cumulative[..., -1]
    return torch.searchsorted(cumulative, threshold[..., None], right=True)[..., 0]
