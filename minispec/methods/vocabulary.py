"""Language-aware vocabulary compression (FastMTP, section 3.3; FR-Spec, arXiv 2502.14856): a draft
reads only those rows of lm_head that its text's language uses often.

The target still verifies over the full vocabulary, so a wrong guess of the language costs speed,
never text.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.model import Transformer

WINDOW = 32  # tokens of the latest text by which its language is known
SURE = 4.0  # a token so many times as frequent in one language as in any other votes for it
MOST = 0.8  # share of the votes that makes a text of one language, not a mixed one


@dataclass(frozen=True)
class Language:
    """Its frequent tokens, most frequent first, and how often each was seen."""

    ids: tuple[int, ...]
    counts: tuple[int, ...]


def count(texts: Iterable[list[int]], forced: list[int], size: int) -> Language:
    """The `size` most frequent tokens of `texts`, `forced` ones in any case and first."""
    seen: Counter[int] = Counter()
    for tokens in texts:
        seen.update(tokens)
    ranked = sorted(seen.keys() - set(forced), key=lambda token: (-seen[token], token))
    ids = list(dict.fromkeys(forced)) + ranked
    return Language(tuple(ids[:size]), tuple(seen[token] for token in ids[:size]))


# ---- at a draft's lm_head ------------------------------------------------------------------------


class Subset:
    """Some rows of lm_head, W[V_high], for the tokens `ids`. As a Vocabulary it picks itself."""

    def __init__(self, weight: Tensor, ids: list[int]):
        self.size, self.host_ids = len(weight), torch.tensor(ids)
        self.ids = self.host_ids.to(weight.device)
        self.rows = weight[self.ids]  # (|V_high|, d)

    def __len__(self) -> int:
        """|V_high|."""
        return len(self.ids)

    def select(self, tokens: list[int]) -> "Subset":
        return self

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., d) -> (..., |V_high|)."""
        return F.linear(hidden, self.rows)

    def to_full_ids(self, token: Tensor) -> Tensor:
        """From numbers in the small vocabulary to token ids, V_high[j], on the same device."""
        return (self.host_ids if token.device.type == "cpu" else self.ids)[token]

    def to_subset_ids(self, tokens: Tensor) -> Tensor:
        """From token ids to numbers in the small vocabulary; -100 for all others, as for labels."""
        number = torch.full((self.size,), -100, device=self.ids.device)
        number[self.ids] = torch.arange(len(self), device=number.device)
        return number[tokens.clamp(min=0)].where(tokens >= 0, -100)

    def scatter(self, probs: Tensor) -> Tensor:
        """A distribution over the subset, (|V_high|,), as one over the vocabulary, (V,); both on
        the host."""
        return probs.new_zeros(self.size).scatter(0, self.host_ids, probs)


class FullVocabulary:
    """The full vocabulary, in the place of a Subset of it."""

    def __init__(self, model: Transformer):
        self.logits = model.logits

    def select(self, tokens: list[int]) -> "FullVocabulary":
        return self

    def to_full_ids(self, token: Tensor) -> Tensor:
        return token

    def to_subset_ids(self, tokens: Tensor) -> Tensor:
        return tokens

    def scatter(self, probs: Tensor) -> Tensor:
        return probs


DraftHead = Subset | FullVocabulary


class Vocabulary(Protocol):
    """Which tokens a method drafts from: Compressed chooses by the text's language."""

    def select(self, tokens: list[int]) -> DraftHead:
        """What to draft from after `tokens`."""


class Compressed:
    """The languages' subsets of a model's lm_head, and which of them a text calls for."""

    def __init__(self, languages: dict[str, Language], model: Transformer):
        assert languages, "at least one language"
        self.languages, self.weight = languages, model.lm_head.weight.detach()
        self.subsets: dict[tuple[str, ...], Subset] = {}
        self.votes = votes(languages)

    @torch.inference_mode(False)  # kept beyond a run
    def select(self, tokens: list[int]) -> Subset:
        """The subset for what comes after `tokens`: their language's, or the union of those they
        mix; all languages' where nothing tells."""
        names = self.spoken(tokens)
        if names not in self.subsets:
            ids = dict.fromkeys(i for name in names for i in self.languages[name].ids)
            self.subsets[names] = Subset(self.weight, list(ids))
        return self.subsets[names]

    def spoken(self, tokens: list[int]) -> tuple[str, ...]:
        """The languages of the latest tokens: the one with MOST of the votes, else all that have
        some."""
        found = Counter(self.votes[t] for t in tokens[-WINDOW:] if t in self.votes)
        names = tuple(sorted(found)) or tuple(sorted(self.languages))
        for name, n in found.items():
            if n >= MOST * found.total():
                return (name,)
        return names


def votes(languages: dict[str, Language]) -> dict[int, str]:
    """Tokens that tell a language: SURE times as frequent there as in every other."""
    share: dict[int, dict[str, float]] = {}
    for name, language in languages.items():
        total = sum(language.counts) + 1
        for token, n in zip(language.ids, language.counts):
            share.setdefault(token, {})[name] = n / total
    result = {}
    for token, by_name in share.items():
        best = max(by_name, key=by_name.get)
        others = [p for name, p in by_name.items() if name != best]
        if len(languages) > 1 and by_name[best] > SURE * max(others, default=0.0):
            result[token] = best
    return result
