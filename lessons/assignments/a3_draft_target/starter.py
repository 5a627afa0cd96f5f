"""Assignment 3: draft-target decoding. Fill in the functions; see README.md."""

from collections.abc import Iterator

from torch import Tensor

from minispec.cache import KVCache
from minispec.methods.adaptive import Policy
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling
from minispec.tree import Step


def lookup(tokens: list[int], k: int, ngram: int) -> list[int]:
    """Up to `k` tokens that followed the latest earlier occurrence of the last n tokens, for the
    largest n from `ngram` down to 1 that has occurred; as many as there are.

    >>> lookup([1, 2, 3, 4, 1, 2], k=3, ngram=2)  # 1, 2 occurred before, and 3, 4, 1 followed
    [3, 4, 1]
    """
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

    Example, k = 2: `tokens` has 6 and the cache 4 rows. Feed the last 2 tokens, commit them, draw a
    draft; feed it, commit it, draw the other. The cache now has 7 rows.
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

    Example, k = 2: after token 7 the draft says 1, 4, and the target accepts 1 and draws 9. The
    round is Step([1, 9], Tree.chain(7, [1, 4], …), [0, 1]), and the draft's row of 4 is dropped.
    """
    raise NotImplementedError


def tokens_per_pass(alpha: float, gamma: int) -> float:
    """E[tokens per target pass] for γ drafts, each accepted with probability α if all before it
    were; α = 1 included.

    >>> tokens_per_pass(0.5, 2)  # one always, a second with 1/2, a third with 1/4
    1.75
    """
    raise NotImplementedError


def speedup(alpha: float, gamma: int, c: float) -> float:
    """Speed over plain decoding, where a draft pass costs c target passes.

    >>> speedup(0.5, 2, 0.125)  # a round costs one target pass and two drafts
    1.4
    """
    raise NotImplementedError
