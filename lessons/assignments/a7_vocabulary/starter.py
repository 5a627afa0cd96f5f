"""Assignment 7: a language's vocabulary. Fill in the functions; see README.md."""

from collections.abc import Iterable

from torch import Tensor

from minispec import vocabulary
from minispec.model import Transformer
from minispec.methods.vocabulary import Language


def count(texts: Iterable[list[int]], forced: list[int], size: int) -> Language:
    """The `size` most frequent tokens of `texts`, and how often each was seen.

    `forced` tokens come first, each once, in any case (whatever their count, 0 included); then the
    others by count, equal counts by id.
    """
    raise NotImplementedError


class Subset:
    """Logits over some rows of lm_head; `ids` None: over all. `ids` is kept as an attribute."""

    def __init__(self, model: Transformer, ids: list[int] | None = None):
        raise NotImplementedError

    def logits(self, model: Transformer, hidden: Tensor) -> Tensor:
        """(..., d) -> (..., |V_high|); entry j is token ids[j]'s. Reads those rows of
        lm_head, `model.head_rows`, alone."""
        raise NotImplementedError

    def full(self, j: int) -> int:
        """The token that the small vocabulary numbers `j`."""
        raise NotImplementedError

    def scatter(self, law: Tensor) -> Tensor:
        """A law over the subset, (|V_high|,), as one over the vocabulary, (V,): 0 elsewhere."""
        raise NotImplementedError


def votes(languages: dict[str, Language]) -> dict[int, str]:
    """Tokens that tell a language: those whose share there is more than SURE times their share in
    every other one. A share is a token's count over the sum of all counts + 1. Where there is one
    language only, nothing tells."""
    raise NotImplementedError


class Compressed(vocabulary.Compressed):
    """`self.model`; `self.languages`, by name; `self.votes`, as `votes` gives them;
    `self.subsets`, an empty dict of what `pick` has made, by the tuple of its languages' names."""

    def pick(self, tokens: list[int]) -> vocabulary.Subset:
        """The subset for what comes after `tokens`: all tokens of the languages that `self.spoken`
        names, each once, in their order; made once for the same names. The full vocabulary where no
        language is known at all. (`vocabulary.Subset` or yours.)"""
        raise NotImplementedError

    def spoken(self, tokens: list[int]) -> tuple[str, ...]:
        """The languages of the last WINDOW tokens, in alphabetical order: the one alone that has at
        least the share MOST of their votes, else all that have some; all languages where no token
        votes. (SURE, WINDOW and MOST are constants of `minispec.methods.vocabulary`.)"""
        raise NotImplementedError
