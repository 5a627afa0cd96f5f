"""Assignment 3: draft-target decoding. Fill in the functions; see README.md."""

from collections.abc import Iterator

from torch import Tensor

from minispec.cache import KVCache
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling
from minispec.tree import Policy, Step


def lookup(tokens: list[int], k: int, ngram: int) -> list[int]:
    """Up to `k` tokens that followed the latest earlier occurrence of the last n tokens, for the
    largest n from `ngram` down to 1 that has occurred; as many as there are."""
    raise NotImplementedError


def propose(
    draft: Transformer, cache: KVCache, tokens: list[int], k: int, sampling: Sampling,
    randomness: Randomness, vocab_size: int,
) -> tuple[list[int], list[Tensor | None]]:  # fmt: skip
    """`k` tokens after `tokens`, each drawn from the draft's distribution; and the distribution of
    each (None: one-hot).

    `cache` is the draft's and holds a prefix of `tokens`: feed what it lacks, commit what is fed.
    A distribution is (vocab_size,), over the target's tokens: the draft's logits beyond them are
    cut off before `probs`, and where the draft knows fewer, the rest is 0. At temperature 0 the
    draft takes its argmax and draws nothing.
    """
    raise NotImplementedError


def speculative(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, draft: Transformer, k: int | Policy = 4,
    draft_sampling: Sampling | None = None, draft_cache: KVCache | None = None,
) -> Iterator[Step]:  # fmt: skip
    """Leviathan et al. 2023, algorithm 1, never ending: first an empty `Step()` for the prefill,
    then one Step(new tokens, tree, path) a round.

    `cache` may hold a prefix of the prompt already, and so may `draft_cache`. The draft draws with
    `draft_sampling`, by default as the target does. After every round the target's cache holds all
    tokens but the last. Not graded: a k that is a policy, a given `draft_cache`, vocabularies of
    different sizes, the end of the context.
    """
    raise NotImplementedError


def tokens_per_pass(alpha: float, gamma: int) -> float:
    """E[tokens per target pass] for γ drafts, each accepted with probability α if all before it
    were; α = 1 included."""
    raise NotImplementedError


def speedup(alpha: float, gamma: int, c: float) -> float:
    """Speed over plain decoding, where a draft pass costs c target passes."""
    raise NotImplementedError
