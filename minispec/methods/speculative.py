"""Draft-target speculative decoding (Leviathan et al. 2023; Chen et al. 2023).

A small draft model proposes γ tokens one by one (argument `k`; other papers write K). The target
scores them all in one pass.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.cache import KVCache
from minispec.methods.adaptive import as_policy
from minispec.methods.declaration import Cache, Draft, DraftSampling, K, Verify, method
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling, draw, probs
from minispec.tree import Step, Tree
from minispec.verify import accept, accept_block


@method(
    "speculative", bench=[{"k": 4}, {"k": "auto"}], waits={"": (2, None)},
    cases=[{"k": 1}, {"k": 2}, {"k": "auto"}, {"k": 2, "draft_sampling": Sampling()},
           {"k": 2, "draft_sampling": Sampling(2.0)}, {"k": 2, "rule": accept_block}],
)  # fmt: skip
def speculative(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, draft: Draft, k: K = 4, draft_sampling: DraftSampling = None,
    draft_cache: Cache = None, rule: Verify = accept,
) -> Iterator[Step]:  # fmt: skip
    """Leviathan et al. 2023, algorithm 1, with γ = `k` draft tokens per round. `k` may be a policy
    that chooses γ for each round (see adaptive).

    The draft samples with `draft_sampling` (default: the target's); any choice is lossless.
    `draft_cache` may hold the draft's rows for a prefix of the prompt, as `cache` may hold the
    target's. The two vocabularies may differ in size by padding.
    """
    policy, draft_sampling = as_policy(k), draft_sampling or sampling
    cache = cache or model.new_cache()
    draft_cache = draft_cache or draft.new_cache(cache.capacity)
    tokens = list(prompt)
    # Between rounds the cache holds every token but the newest. The next pass feeds that token
    # first, as the tree's root, so its 1 + γ rows yield the paper's p_1 … p_{γ+1}.
    model.prefill(tokens[cache.length : -1], cache)
    draft.prefill(replace_unknown(tokens[draft_cache.length : -1], draft), draft_cache)
    yield Step()  # the prefill, so that it can be timed separately
    while True:
        gamma = min(policy.choose(), cache.free_rows - 1)  # one row is for the root
        # x_1 … x_γ, each drawn from the q of its own draft pass
        drafts, draft_probs = propose(
            draft, draft_cache, tokens, gamma, draft_sampling, randomness, model.config.vocab_size
        )
        tree = Tree.chain(tokens[-1], drafts, draft_probs)
        # p_1 … p_{γ+1}, in one pass of the target
        p = probs(model.logits(model(tree.tokens, cache)[0]), sampling)
        # the first n drafts, and t, the next token
        path, next_token, *asked = rule(p, tree, randomness)
        cache.commit(path)
        # The draft never ran on its own last token. If all drafts were accepted, its cache lacks
        # that row, and `propose` feeds it two tokens.
        draft_cache.truncate(min(draft_cache.length, cache.length))
        policy.observe(drafted=len(drafts), accepted=len(path) - 1)
        new = tree.tokens_at(path[1:]) + [next_token]
        tokens += new
        yield Step(new, tree, path, *asked)


def propose(
    draft: Transformer, cache: KVCache, tokens: list[int], k: int, sampling: Sampling,
    randomness: Randomness, vocab_size: int,
) -> tuple[list[int], list[Tensor | None]]:  # fmt: skip
    """Draw `k` tokens after `tokens` from the draft model. Returns them and their distributions
    over the target's vocabulary (None: one-hot). Greedy drafts stay on the device until the end."""
    feed = torch.tensor(replace_unknown(tokens[cache.length :], draft))
    drafts: list[Tensor] = []
    draft_probs: list[Tensor | None] = []
    while len(drafts) < k:
        logits = draft.logits(draft(feed, cache)[0, -1:])[:, :vocab_size]  # (1, V) without padding
        cache.commit(list(range(len(feed))))
        feed, q = draw(logits, sampling, randomness)
        drafts.append(feed)
        draft_probs.append(q if q is None else F.pad(q, (0, vocab_size - len(q))))
    return torch.cat(drafts).tolist() if drafts else [], draft_probs


def replace_unknown(tokens: list[int], draft: Transformer) -> list[int]:
    """Replace tokens that the draft has no embedding for (the target's padding rows) with 0. What
    the draft reads affects how often it is right, never the output."""
    return [token if token < draft.config.vocab_size else 0 for token in tokens]


def tokens_per_pass(alpha: float, gamma: int) -> float:
    """E[tokens per target pass] = (1 - α^(γ+1)) / (1 - α), equation 1; α is the acceptance rate."""
    return gamma + 1.0 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speedup(alpha: float, gamma: int, c: float) -> float:
    """Speedup over plain decoding, theorem 3.8; c is the cost of a draft pass in target passes."""
    return tokens_per_pass(alpha, gamma) / (gamma * c + 1)
