"""Draft-target speculative decoding (Leviathan et al. 2023; Chen et al. 2023).

A small draft model proposes γ tokens (the argument `k`: other papers say K) one by one; the target
scores them all in one pass.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.cache import KVCache
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling, draw, probs
from minispec.tree import Fixed, Policy, Step, Tree
from minispec.verify import accept


def speculative(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, draft: Transformer, k: int | Policy = 4,
    draft_sampling: Sampling | None = None, draft_cache: KVCache | None = None,
) -> Iterator[Step]:  # fmt: skip
    """Leviathan et al. 2023, algorithm 1, with γ = `k` draft tokens a round, or as many as a
    policy says (see adaptive).

    The draft draws with `draft_sampling` (default: as the target does); any choice is lossless.
    `draft_cache` may hold the draft's rows of a prefix of the prompt, as `cache` holds the
    target's. Vocabularies may differ in length by padding.
    """
    policy = k if hasattr(k, "choose") else Fixed(k)
    cache = cache or model.new_cache()
    draft_cache = draft_cache or draft.new_cache(cache.capacity)
    tokens = list(prompt)
    # Between rounds the cache holds every token but the newest. A pass feeds that one first, as the
    # tree's root: over 1 + γ rows it yields p_1 … p_{γ+1} of the paper.
    model.prefill(tokens[cache.length : -1], cache)
    draft.prefill(clipped(tokens[draft_cache.length : -1], draft), draft_cache)
    yield Step()  # the prefill, so that it can be timed apart
    while True:
        gamma = min(policy.choose(), cache.free_rows - 1)  # the root takes a row of the pass
        # x_1 … x_γ, each drawn from q of one pass of the draft
        drafts, draft_probs = propose(
            draft, draft_cache, tokens, gamma, draft_sampling or sampling, randomness,
            model.config.vocab_size,
        )  # fmt: skip
        tree = Tree.chain(tokens[-1], drafts, draft_probs)
        # p_1 … p_{γ+1}, in one pass of the target
        p = probs(model.logits(model(tree.tokens, cache)[0]), sampling)
        # the first n drafts, and t
        path, fresh = accept(p, tree, randomness)
        cache.commit(path)
        # the draft never ran on its own last token: where all was accepted it lacks that row, and
        # `propose` feeds it two tokens
        draft_cache.truncate(min(draft_cache.length, cache.length))
        policy.observe(drafted=len(drafts), accepted=len(path) - 1)
        new = tree.tokens_at(path[1:]) + [fresh]
        tokens += new
        yield Step(new, tree, path)


def propose(
    draft: Transformer, cache: KVCache, tokens: list[int], k: int, sampling: Sampling,
    randomness: Randomness, vocabulary: int,
) -> tuple[list[int], list[Tensor | None]]:  # fmt: skip
    """`k` tokens after `tokens`, each drawn from the draft's distribution; and the distributions
    over the target's vocabulary (None: one-hot). Greedy drafts wait on the device till the end."""
    feed = torch.tensor(clipped(tokens[cache.length :], draft))
    drafts: list[Tensor] = []
    draft_probs: list[Tensor | None] = []
    while len(drafts) < k:
        logits = draft.logits(draft(feed, cache)[0, -1:])[:, :vocabulary]  # (1, V) without padding
        cache.commit(list(range(len(feed))))
        feed, q = draw(logits, sampling, randomness)
        drafts.append(feed)
        draft_probs.append(q if q is None else F.pad(q, (0, vocabulary - len(q))))
    return torch.cat(drafts).tolist() if drafts else [], draft_probs


def clipped(tokens: list[int], draft: Transformer) -> list[int]:
    """The tokens, 0 in the place of those that the draft has no embedding for (the target's padding
    rows). What a draft reads decides how often it is right, never what comes out."""
    return [token if token < draft.config.vocab_size else 0 for token in tokens]


def tokens_per_pass(alpha: float, gamma: int) -> float:
    """E[tokens per target pass] = (1 - α^(γ+1)) / (1 - α), equation 1; α is the acceptance rate."""
    return gamma + 1.0 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speedup(alpha: float, gamma: int, c: float) -> float:
    """Over plain decoding, theorem 3.8; c is a draft pass's cost over a target pass's."""
    return tokens_per_pass(alpha, gamma) / (gamma * c + 1)
