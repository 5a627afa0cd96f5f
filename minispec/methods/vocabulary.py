"""Language-aware vocabulary compression (FastMTP, section 3.3; FR-Spec, arXiv 2502.14856): a draft
uses only the rows of lm_head for tokens that are frequent in the text's language.

The target still verifies over the full vocabulary, so guessing the wrong language costs speed but
never changes the output.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from minispec.model import Transformer

RECENT_TOKENS = 32  # how many of the latest tokens decide the language
VOTE_RATIO = 4.0  # a token votes for a language if this many times as frequent as in any other
MAJORITY = 0.8  # share of the votes that one language needs; with less, the text is mixed


@dataclass(frozen=True)
class Language:
    """The frequent tokens of a language, most frequent first, and their counts."""

    ids: tuple[int, ...]
    counts: tuple[int, ...]


def count(texts: Iterable[list[int]], forced: list[int], size: int) -> Language:
    """The `size` most frequent tokens of `texts`; `forced` ones come first, however rare."""
    seen: Counter[int] = Counter()
    for tokens in texts:
        seen.update(tokens)
    ranked = sorted(seen.keys() - set(forced), key=lambda token: (-seen[token], token))
    ids = list(dict.fromkeys(forced)) + ranked
    return Language(tuple(ids[:size]), tuple(seen[token] for token in ids[:size]))


# ---- the lm_head of a draft ----------------------------------------------------------------------


class SubsetIds:
    """Converts between the indices of a subset of the vocabulary and token ids. `ids` (|V_high|,)
    are on the device, `host_ids` on the host; `size` is |V|. As a Vocabulary, it selects itself."""

    ids: Tensor
    host_ids: Tensor
    size: int

    def select(self, tokens: list[int]) -> "SubsetIds":
        return self

    def to_full_ids(self, token: Tensor) -> Tensor:
        """Map indices into the subset to token ids, V_high[j], on the same device."""
        return (self.host_ids if token.device.type == "cpu" else self.ids)[token]

    def to_subset_ids(self, tokens: Tensor) -> Tensor:
        """Map token ids to indices into the subset, all others to -100, an ignored label."""
        index = torch.full((self.size,), -100, device=self.ids.device)
        index[self.ids] = torch.arange(len(self.ids), device=index.device)
        return index[tokens.clamp(min=0)].where(tokens >= 0, -100)

    def scatter(self, probs: Tensor) -> Tensor:
        """Expand a distribution over the subset (|V_high|,) to the full vocabulary (V,), both on
        the host."""
        return probs.new_zeros(self.size).scatter(0, self.host_ids, probs)


class Subset(SubsetIds):
    """The rows of lm_head for tokens `ids`, W[V_high]."""

    def __init__(
        self, weight: Tensor, ids: list[int],
        make_layer: Callable[[nn.Linear], nn.Module] | None = None,
    ):  # fmt: skip
        self.size, self.host_ids = len(weight), torch.tensor(ids)
        self.ids = self.host_ids.to(weight.device)
        rows = nn.Linear(weight.shape[1], len(ids), bias=False, device="meta")
        rows.weight = nn.Parameter(weight[self.ids], requires_grad=False)  # (|V_high|, d)
        self.rows = rows if make_layer is None else make_layer(rows)

    def __len__(self) -> int:
        """|V_high|."""
        return len(self.ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., d) -> (..., |V_high|)."""
        return self.rows(hidden)


class FullVocabulary:
    """All rows of lm_head, with the interface of a Subset."""

    def __init__(self, model: Transformer):
        self.logits = model.logits

    def select(self, tokens: list[int]) -> "FullVocabulary":
        return self

    def to_full_ids(self, tokens: Tensor) -> Tensor:
        return tokens

    to_subset_ids = scatter = to_full_ids


DraftHead = SubsetIds | FullVocabulary


class Vocabulary(Protocol):
    """Chooses the tokens that a method drafts from. Compressed chooses by the text's language."""

    def select(self, tokens: list[int]) -> DraftHead:
        """The rows of lm_head to draft with after `tokens`."""


class Compressed:
    """Subsets of a model's lm_head, one per language or mix of languages, chosen by the text."""

    def __init__(self, languages: dict[str, Language], model: Transformer):
        assert languages, "at least one language"
        self.languages, self.weight = languages, model.lm_head.weight.detach()
        self.subsets: dict[tuple[str, ...], Subset] = {}
        self.make_layer: Callable[[nn.Linear], nn.Module] | None = None
        self.votes = votes(languages)

    @torch.inference_mode(False)  # subsets outlive the run
    def select(self, tokens: list[int]) -> Subset:
        """The subset of the language of `tokens`, or the union for a mixed text; the union of all
        languages if the language is unclear."""
        names = self.detect_languages(tokens)
        if names not in self.subsets:
            ids = dict.fromkeys(token for name in names for token in self.languages[name].ids)
            self.subsets[names] = Subset(self.weight, list(ids), self.make_layer)
        return self.subsets[names]

    def set_layer(self, make_layer: Callable[[nn.Linear], nn.Module]) -> None:
        """From now on, replace the linear layer of each subset, as `fast` does it."""
        if make_layer is not self.make_layer:
            self.make_layer, self.subsets = make_layer, {}

    def detect_languages(self, tokens: list[int]) -> tuple[str, ...]:
        """The languages of the latest tokens: the one with a MAJORITY of the votes, else all that
        have any votes, else all."""
        found = Counter(self.votes[t] for t in tokens[-RECENT_TOKENS:] if t in self.votes)
        names = tuple(sorted(found)) or tuple(sorted(self.languages))
        for name, n in found.items():
            if n >= MAJORITY * found.total():
                return (name,)
        return names


def votes(languages: dict[str, Language]) -> dict[int, str]:
    """Tokens that vote, and their language: VOTE_RATIO times as frequent there as in any other."""
    share: dict[int, dict[str, float]] = {}
    for name, language in languages.items():
        total = sum(language.counts) + 1
        for token, n in zip(language.ids, language.counts):
            share.setdefault(token, {})[name] = n / total
    result = {}
    for token, by_name in share.items():
        best = max(by_name, key=by_name.get)
        others = [p for name, p in by_name.items() if name != best]
        if len(languages) > 1 and by_name[best] > VOTE_RATIO * max(others, default=0.0):
            result[token] = best
    return result
