"""Two drafters, one `accept`: copy what followed the latest tokens if they have occurred before,
as prompt lookup does; otherwise draft with a FastMTP head or a draft model.

Copying is free and right for long stretches of repeated text, but it requires a repetition. Heads
and draft models always have something to propose, at a cost per token.
"""

from collections.abc import Iterator
from typing import Annotated

import torch
from torch import Tensor

from minispec.cache import KVCache
from minispec.cli import UserError
from minispec.methods.adaptive import UNTRIED_STEP, AcceptanceRates, Policy, as_policy
from minispec.methods.declaration import (
    Cache,
    Draft,
    DraftSampling,
    K,
    Nodes,
    Option,
    Verify,
    Words,
    method,
)
from minispec.methods.fastmtp import (
    MTP,
    Drafts,
    HeadSource,
    check_vocabulary,
    draft_and_verify,
)
from minispec.methods.prompt_lookup import NgramIndex
from minispec.methods.speculative import propose, replace_unknown
from minispec.methods.vocabulary import FullVocabulary
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling
from minispec.tree import Step, Tree
from minispec.verify import accept, accept_block

LookupK = Annotated[int | Policy, Option("copies per round, or auto", least=1, auto="copies")]
LONGEST_MATCH, SHORTEST_MATCH = 5, 3  # tokens; after shorter matches a head is more often right


class ModelDrafter:
    """Drafts with a draft model, as `speculative` does; used like a head's HeadDrafter."""

    def __init__(
        self, draft: Transformer, model: Transformer, cache: KVCache, draft_cache: KVCache | None
    ):  # fmt: skip
        self.model, self.vocab_size, self.feature_layers = draft, model.config.vocab_size, ()
        self.cache, self.target_cache = draft_cache or draft.new_cache(cache.capacity), cache

    def enqueue(self, hidden: Tensor, tokens: list[int]) -> None:
        """Drop the rows of rejected drafts. The draft model needs no hidden states."""
        self.cache.truncate(min(self.cache.length, self.target_cache.length))

    def flush_pending(self) -> None:
        """Nothing to do: `draft` reads what is new."""

    def draft(
        self, tokens: list[int], k: int, sampling: Sampling, randomness: Randomness, _: object
    ) -> tuple[Tensor, list[Tensor | None]]:
        """See HeadDrafter. The draft model first reads the tokens that it has not seen."""
        unread = replace_unknown(tokens[self.cache.length : -2], self.model)  # `propose` reads two
        self.model.prefill(unread, self.cache)
        drafts, draft_probs = propose(
            self.model, self.cache, tokens, k, sampling, randomness, self.vocab_size
        )
        return torch.tensor([tokens[-1], *drafts]), draft_probs


@method(
    "hybrid", bench=[{"k": 3}, {"k": "auto"}, {"tree": "auto"}],
    cases=[{"k": 1, "lookup_k": 2}, {"k": 2, "vocabulary": "two"}, {"draft_sampling": Sampling()},
           {"k": 2, "rule": accept_block}, {"k": "auto", "lookup_k": "auto"}, {"tree": 6},
           {"tree": "auto"}, {"draft": "other", "k": 2}, {"draft": "other", "k": "auto"},
           {"head": "eagle3", "k": 2}],
    waits={"": (1, None), "draft": (2, None), "tree": (2, 2)}, checks=(check_vocabulary,),
)  # fmt: skip
def hybrid(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, head: MTP = None, draft: Draft = None, k: K = 3,
    lookup_k: LookupK = 6, tree: Nodes = 0, vocabulary: Words = None,
    draft_sampling: DraftSampling = None, draft_cache: Cache = None, head_cache: Cache = None,
    rule: Verify = accept,
) -> Iterator[Step]:  # fmt: skip
    """Copy up to `lookup_k` tokens if the latest 3 to 5 have occurred before. Otherwise draw `k`
    drafts from `head` or, if that is None, from `draft`. Both numbers may be policies, each of
    which learns only from the rounds of its own drafter. With a `tree` (see fastmtp), neither is
    used: the tokens to copy are candidates for the head's tree, valued by their running acceptance.

    `vocabulary` is the head's; the head or draft samples with `draft_sampling`, as in `fastmtp`.
    `draft_cache` is the draft model's, as in `speculative`, and `head_cache` the head's.
    """
    if tree != 0 and head is None:
        raise UserError("hybrid: a tree needs a head, not a draft model")
    cache = cache or model.new_cache()
    drafter = (
        ModelDrafter(draft, model, cache, draft_cache) if head is None
        else head.start(model, cache, head_cache)
    )  # fmt: skip
    vocabulary = FullVocabulary(model) if head is None else head.vocabulary(model, vocabulary)
    source = CopiesFirst(HeadSource(drafter, vocabulary, k, tree, draft_sampling), lookup_k)
    yield from draft_and_verify(model, cache, list(prompt), source, sampling, randomness, rule)


class CopiesFirst:
    """Copies from the text if the latest tokens have occurred before, otherwise the drafts of
    `other`. Who drafts, and how much, follows from the text so far, so any choice is lossless. In
    trees, the copies are candidates, valued by their running acceptance."""

    def __init__(self, other: HeadSource, k: int | Policy):
        self.other, self.drafter = other, other.drafter
        self.policy = as_policy(k)
        self.index, self.copied = NgramIndex(LONGEST_MATCH, SHORTEST_MATCH), []
        self.acceptance = AcceptanceRates(16)  # of copied tokens in trees

    def propose(
        self, tokens: list[int], free_rows: int, sampling: Sampling, randomness: Randomness
    ) -> Drafts:
        """See Source."""
        end, in_tree = self.index.match_end(tokens), self.other.nodes is not None
        most = len(self.acceptance.rate) if in_tree else min(self.policy.choose(), free_rows)
        self.copied = tokens[end : end + most]
        if self.copied and not in_tree:
            return torch.tensor([tokens[-1], *self.copied]), []  # copies are one-hot
        chain = list(zip(self.copied, self.acceptance.accept_probs()))
        return self.other.propose(tokens, free_rows, sampling, randomness, chain)

    def observe(self, tree: Tree, path: list[int]) -> None:
        """See Source."""
        if self.other.nodes is None:
            used, unused = self.policy, self.other.policy
            used, unused = (used, unused) if self.copied else (unused, used)
            used.observe(drafted=len(tree) - 1, accepted=len(path) - 1)
            unused.observe(drafted=0, accepted=0)
            return
        self.other.observe(tree, path)
        kept, right = copies(self.copied, tree, path)
        self.acceptance.observe(kept, right)
        if self.copied and not kept:  # otherwise, copies that were once wrong would never return
            self.acceptance.rate[0] += UNTRIED_STEP * (1 - self.acceptance.rate[0])


def copies(copied: list[int], tree: Tree, path: list[int]) -> tuple[int, int]:
    """How many of the copied tokens are a path of the tree, and how many were accepted."""
    node, drafted, accepted = 0, 0, 0
    for token in copied:
        node = next((i for i in tree.children(node) if tree.tokens[i] == token), None)
        if node is None:
            break
        drafted, accepted = drafted + 1, accepted + (node in path)
    return drafted, accepted
