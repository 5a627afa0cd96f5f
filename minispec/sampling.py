"""From logits to the distribution that tokens are drawn from, and the injected randomness."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from operator import index
from typing import Protocol

import torch
from torch import Tensor

from minispec.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """Warpers of logits, in the order of their application, which is that of transformers:
    temperature (0: greedy), top-k (0: off), top-p (1: off)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        for name, kind in (("temperature", Real), ("top_k", Integral), ("top_p", Real)):
            if not isinstance(getattr(self, name), kind):
                whole = "whole " if kind is Integral else ""
                raise UserError(f"{name} {getattr(self, name)!r}: must be a {whole}number")
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
    """The warped distributions (n, V) of logits (n, V), on the host: a round's one synchronisation.

    At temperature 0 each is one-hot at the argmax. Otherwise the warpers come in the order of
    transformers and give its distributions, ties included. At least float32. Raises UserError if
    the logits contain NaN or infinity.
    """
    if sampling.temperature == 0:
        best = logits.max(-1)
        tokens = best.indices.where(best.values.isfinite(), -1).tolist()
        if -1 in tokens:
            raise not_finite(logits.dtype)
        return OneHot(tokens, logits.shape[-1])
    p = warp(logits, sampling).cpu()
    if p[:, 0].isnan().any():  # one such logit makes its whole row NaN
        raise not_finite(logits.dtype)
    return p


def not_finite(dtype: torch.dtype) -> UserError:
    """The error for logits of this type that contain NaN or infinity."""
    name = str(dtype).removeprefix("torch.")
    cure = "the checkpoint is corrupt" if dtype.itemsize > 2 else "use --dtype bfloat16 or float32"
    return UserError(f"the model's logits contain NaN or infinity in {name}: {cure}")


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """`probs` at a temperature above 0, on the device of the logits and unchecked."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # the largest becomes 0 first, so that a tiny temperature cannot overflow every logit
    logits = logits - logits.amax(-1, keepdim=True)
    logits = logits / max(sampling.temperature, 1e-30)  # in float32 a tiny one would be 0
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if sampling.top_p < 1:
        ascending, order = logits.sort()
        tail = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        tail[..., -1] = False  # the most likely token stays
        removed = torch.zeros_like(tail).scatter(-1, order, tail)  # in the vocabulary's order
        logits = logits.masked_fill(removed, -math.inf)
    return logits.softmax(-1)


def argmax(probs: Tensor | OneHot) -> list[int]:
    """Each row's likeliest token."""
    return probs.tokens if isinstance(probs, OneHot) else probs.argmax(-1).tolist()


class Randomness(Protocol):
    """All that is random in decoding. Others: a scripted replay, an exhaustive enumerator."""

    def bernoulli(self, p: float) -> bool:
        """True with probability `p`."""

    def categorical(self, probs: Tensor) -> int:
        """A token drawn from `probs` (V,)."""


def draw(
    logits: Tensor, sampling: Sampling, randomness: Randomness
) -> tuple[Tensor, Tensor | None]:
    """A draft token (1,) from logits (1, V), and the distribution (V,) it was drawn from.

    At temperature 0 that is one-hot (None), and the token stays on the device: drafting continues
    without waiting for it. Logits with NaN or infinity yield a one-hot draft as well: a broken
    draft costs speed and never changes the output.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1), None
    q = warp(logits, sampling)[0].cpu()
    if q[0].isnan():
        return logits.argmax(-1).cpu(), None
    return torch.tensor([randomness.categorical(q)]), q


class Seeded:
    """Randomness from a seed: the same draws on every machine."""

    def __init__(self, seed: int = 0):
        try:
            self.generator = torch.Generator().manual_seed(index(seed))
        except (TypeError, ValueError, RuntimeError):  # older torch raises the latter
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
    """The tokens (...) at which the cumulative sums of `probs` (..., V) pass `uniform` (...),
    numbers of [0, 1) in float64."""
    cumulative = probs.double().cumsum(-1)
    # scaled by the total, so that rounding cannot lead past the last token; right=True: a token of
    # probability 0 is never chosen
    drawn = uniform * cumulative[..., -1]
    return torch.searchsorted(cumulative, drawn[..., None], right=True)[..., 0]
