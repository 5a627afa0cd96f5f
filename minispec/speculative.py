"""Draft-target speculative decoding (Leviathan et al. 2023; Chen et al. 2023).

A small draft model proposes K tokens one by one; the target scores them all in one pass.
"""

from collections.abc import Iterator
from typing import Literal
from weakref import ref

import torch
from torch import Tensor

from minispec.cache import KVCache
from minispec.cost import cost_curve, curve_at, in_passes, mode, once, one_pass
from minispec.errors import UserError
from minispec.model import Transformer
from minispec.sampling import OneHot, Randomness, Sampling, probs
from minispec.tree import Step, Tree
from minispec.verify import accept

MOST = 16  # the longest chain that `auto` considers


def speculative(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, draft: Transformer, k: int | Literal["auto"] = 4,
    draft_sampling: Sampling | None = None,
) -> Iterator[Step]:  # fmt: skip
    """Leviathan et al. 2023, algorithm 1, with γ = `k` draft tokens a round.

    The draft draws with `draft_sampling` (default: as the target does); any choice is lossless.
    Vocabularies may differ in length by padding. k "auto" maximises the paper's speedup formula
    for the costs measured here; a seed then reproduces a sampled run only as far as they do.
    """
    if k != "auto" and not 1 <= k < model.config.context:
        raise UserError(f"k {k}: must be auto or from 1 to {model.config.context - 1}")
    cache = cache or model.new_cache()
    draft_cache = draft.new_cache(cache.capacity)
    tokens = list(prompt)
    model.prefill(tokens[cache.length : -1], cache)
    draft.prefill(known(tokens[:-1], draft), draft_cache)
    length = Length(model, draft) if k == "auto" else None
    yield Step()
    while True:
        gamma = min(length.best() if length else k, cache.room - 1)
        guess, laws = propose(
            draft, draft_cache, tokens, gamma, draft_sampling or sampling, randomness,
            model.config.vocab_size,
        )  # fmt: skip
        tree = Tree.chain(tokens[-1], guess, laws)
        hidden = model(tree.tokens, cache)
        path, fresh = accept(probs(model.logits(hidden[0]), sampling), tree, randomness)
        cache.commit(path)
        # after a full match the draft is one row short: next round feeds it two tokens
        draft_cache.truncate(min(draft_cache.length, cache.length))
        if length:
            length.observe(accepted=len(path) - 1, drafted=gamma)
        new = tree.tokens_at(path[1:]) + [fresh]
        tokens += new
        yield Step(new, tree, path)


def propose(
    draft: Transformer, cache: KVCache, tokens: list[int], k: int, sampling: Sampling,
    randomness: Randomness, vocabulary: int,
) -> tuple[list[int], list[Tensor | None]]:  # fmt: skip
    """`k` tokens after `tokens`, each drawn from the draft's law; and the laws (None: one-hot)."""
    guess: list[int] = []
    laws: list[Tensor | None] = []
    while len(guess) < k:
        feed = (tokens + guess)[cache.length :]
        logits = draft.logits(draft(known(feed, draft), cache)[0, -1:])[:, :vocabulary]
        cache.commit(list(range(len(feed))))
        law = probs(logits, sampling)
        if isinstance(law, OneHot):
            guess.append(law.tokens[0])
            laws.append(None)
        else:
            q = torch.nn.functional.pad(law[0], (0, vocabulary - law.shape[-1]))  # no padding rows
            guess.append(randomness.categorical(q))
            laws.append(q)
    return guess, laws


def known(tokens: list[int], draft: Transformer) -> list[int]:
    """As the draft sees them: a token that is padding to it is its token 0. What a draft is fed
    decides how good it is, never what comes out."""
    return [token if token < draft.config.vocab_size else 0 for token in tokens]


class Length:
    """K for the next round: the maximum of E[tokens per target pass] / (γc + pass(γ + 1)).

    This is section 3.3's formula, but for the target's pass, which the paper takes to cost 1 over
    any number of tokens. The costs, in target passes over one token, are measured once; α, the
    chance that a draft is accepted, is a running mean that forgets. K depends on earlier rounds
    only: dropping drafts for tokens already drawn would bias the output.
    """

    def __init__(self, model: Transformer, draft: Transformer):
        self.curve = cost_curve(model)
        pair = ref(draft), mode(draft)  # no reference that would keep the draft alive
        self.c = once(model, pair, lambda: in_passes(one_pass(draft, 1), model))
        self.accepted, self.tried = 3.0, 4.0  # a prior worth four drafts

    @property
    def alpha(self) -> float:
        return self.accepted / self.tried

    def best(self) -> int:
        return max(range(1, MOST + 1), key=self.speedup)

    def speedup(self, gamma: int) -> float:
        """Over plain decoding."""
        rows = curve_at(self.curve, gamma + 1)
        return speedup(self.alpha, gamma, self.c / rows) / rows

    def observe(self, accepted: int, drafted: int) -> None:
        """A round tried its accepted drafts and, if there was one, the rejected one."""
        self.accepted = 0.9 * self.accepted + accepted
        self.tried = 0.9 * self.tried + min(accepted + 1, drafted)


def tokens_per_pass(alpha: float, gamma: int) -> float:
    """E[tokens per target pass] = (1 - α^(γ+1)) / (1 - α), equation 1."""
    return gamma + 1.0 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speedup(alpha: float, gamma: int, c: float) -> float:
    """Over plain decoding, theorem 3.8."""
    return tokens_per_pass(alpha, gamma) / (gamma * c + 1)
