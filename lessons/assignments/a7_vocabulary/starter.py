"""Assignment 7: a language's vocabulary. Fill in the functions; see README.md."""

from collections.abc import Iterable

from torch import Tensor

from minispec.methods import vocabulary
from minispec.methods.vocabulary import Language


def count(texts: Iterable[list[int]], forced: list[int], size: int) -> Language:
    """The `size` most frequent tokens of `texts`, and how often each was seen.

    `forced` tokens come first, each once, whatever their count (even 0); then the others by count,
    equal counts by id.

    >>> count([[4, 4, 2], [2, 3]], forced=[9], size=3)
    Language(ids=(9, 2, 4), counts=(0, 2, 2))
    """
    raise NotImplementedError


class Subset:
    """Some rows of lm_head, whose weight is (V, d): those of the tokens `ids`, in their order."""

    def __init__(self, weight: Tensor, ids: list[int]):
        """Example: Subset(weight, [7, 2]) reads weight[7] and weight[2]."""
        raise NotImplementedError

    def __len__(self) -> int:
        """|V_high|. Example: 2 for ids [7, 2]."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., d) -> (..., |V_high|); entry j is token ids[j]'s. Reads those rows alone.

        Example: for ids [7, 2] and hidden states (1, 3, d) they are (1, 3, 2).
        """
        raise NotImplementedError

    def to_full_ids(self, token: Tensor) -> Tensor:
        """The ids of tokens that the small vocabulary numbers so: ids[j] for j. On the device of
        `token`, so that drafting need not wait for the host.

        Example: for ids [7, 2], tensor([1, 0]) becomes tensor([2, 7]).
        """
        raise NotImplementedError

    def scatter(self, probs: Tensor) -> Tensor:
        """A distribution over the subset, (|V_high|,), as one over the vocabulary, (V,): 0
        elsewhere.

        Example: for ids [2, 0] of V = 4, [0.75, 0.25] becomes [0.25, 0, 0.75, 0].
        """
        raise NotImplementedError


def votes(languages: dict[str, Language]) -> dict[int, str]:
    """Tokens that tell a language: those whose share there is more than VOTE_RATIO times their
    share in every other one. A share is a token's count over the sum of all counts + 1. With one
    language no token votes.

    >>> votes({"a": Language((1, 2), (9, 9)), "b": Language((2, 3), (9, 9))})  # both use 2
    {1: 'a', 3: 'b'}
    """
    raise NotImplementedError


class Compressed(vocabulary.Compressed):
    """`self.weight`, lm_head's; `self.languages`, by name; `self.votes`, as `votes` gives them;
    `self.subsets`, a dict for what `select` has made, by the tuple of its languages' names."""

    def select(self, tokens: list[int]) -> vocabulary.Subset:
        """The subset for what comes after `tokens`: all tokens of the languages that
        `self.detect_languages` names, each once, in their order; made once for the same names.
        (`vocabulary.Subset` or yours.)

        Example: the languages have tokens 3, 1 and 5, 1. For ("a", "b") the subset's are 3, 1, 5.
        """
        raise NotImplementedError

    def detect_languages(self, tokens: list[int]) -> tuple[str, ...]:
        """The languages of the last RECENT_TOKENS tokens, in alphabetical order: one alone if it
        has at least the share MAJORITY of their votes, else all that have some; all languages where
        no token votes. (These constants are those of `minispec.methods.vocabulary`.)

        Example: votes a, a, a, a, b give ("a",), which has a share of 0.8; a, a, b give ("a", "b").
        """
        raise NotImplementedError
