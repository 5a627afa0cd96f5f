"""Two drafters, one `accept`: copy what followed the latest tokens if they have occurred before,
as prompt lookup does; otherwise draft with a FastMTP head or a draft model.

Copying is free and right for long stretches of repeated text, but it requires a repetition. Heads
and draft models always have something to propose, at a cost per token.
"""

from collections.abc import Iterator
from typing import Annotated

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
    Drafter,
    HeadDrafter,
    draft_and_verify,
)
from minispec.methods.prompt_lookup import NgramIndex
from minispec.methods.speculative import propose, replace_unknown
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling
from minispec.tree import Step, Tree
from minispec.verify import accept, accept_block

LookupK = Annotated[int | Policy, Option("copies per round, or auto", least=1, auto="copies")]


@method(
    "hybrid", bench=[{"k": 3}, {"k": "auto"}, {"tree": "auto"}],
    cases=[{"k": 1, "lookup_k": 2}, {"k": 2, "vocabulary": "two"}, {"draft_sampling": Sampling()},
           {"k": 2, "rule": accept_block}, {"k": "auto", "lookup_k": "auto"}, {"tree": 2},
           *({"tree": nodes, "draft_sampling": Sampling()} for nodes in (6, "auto")),
           {"draft": "other", "k": 2}, {"draft": "other", "k": "auto"},
           {"head": "eagle3", "k": 2}],
    waits={"": (1, None), "draft": (2, None), "tree": (2, None)},
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
    used: what followed the latest 2 to 8 tokens joins the candidates for the head's tree, and each
    copy is valued by the running acceptance at its depth.

    `vocabulary` is the head's; the head or draft samples with `draft_sampling`, as in `fastmtp`.
    `draft_cache` is the draft model's, as in `speculative`, and `head_cache` the head's.
    """
    if tree != 0 and head is None:
        raise UserError("hybrid: a tree needs a head, not a draft model")
    cache = cache or model.new_cache()
    settings = {"sampling": draft_sampling or sampling, "randomness": randomness, "k": k}
    if head is None:
        other = ModelDrafter(draft, model, cache, draft_cache, **settings)
    else:
        settings |= {"nodes": tree, "vocabulary": vocabulary}
        other = head.start(model, cache, head_cache, **settings)
    drafter = (CopiesFirst if tree == 0 else CopiesInTree)(other, lookup_k)
    yield from draft_and_verify(model, cache, list(prompt), drafter, sampling, randomness, rule)


class ModelDrafter(Drafter):
    """Drafts with a draft model, as `speculative` does."""

    def __init__(
        self, draft: Transformer, model: Transformer, cache: KVCache, draft_cache: KVCache | None,
        sampling: Sampling, randomness: Randomness, k: int | Policy,
    ):  # fmt: skip
        self.draft, self.vocab_size, self.target_cache = draft, model.config.vocab_size, cache
        self.cache = draft_cache or draft.new_cache(cache.capacity)
        self.policy, self.sampling, self.randomness = as_policy(k), sampling, randomness

    def enqueue(self, hidden: Tensor, tokens: list[int]) -> None:
        """Drop the rows of rejected drafts. The draft model needs no hidden states."""
        self.cache.truncate(min(self.cache.length, self.target_cache.length))

    def propose(self, tokens: list[int], free_rows: int) -> Tree:
        """See Drafter. The draft model first reads the tokens that it has not seen."""
        k = min(self.policy.choose(), free_rows)
        unread = tokens[self.cache.length : -2] if k else []  # the function `propose` reads two
        self.draft.prefill(replace_unknown(unread, self.draft), self.cache)
        drafts, draft_probs = propose(
            self.draft, self.cache, tokens, k, self.sampling, self.randomness, self.vocab_size
        )
        return Tree.chain(tokens[-1], drafts, draft_probs)


class CopiesFirst(Drafter):
    """Copies from the text if the latest tokens have occurred before, otherwise the drafts of
    `other`. Who drafts, and how much, follows from the text so far, so any choice is lossless."""

    matches = 5, 3  # tokens, longest and shortest; after fewer, a head is more often right

    def __init__(self, other: Drafter, k: int | Policy):
        self.other, self.policy, self.copied = other, as_policy(k), []
        self.feature_layers = other.feature_layers
        self.index = NgramIndex(*self.matches)

    def enqueue(self, hidden: Tensor, tokens: list[int]) -> None:
        self.other.enqueue(hidden, tokens)

    def flush_pending(self) -> None:
        self.other.flush_pending()

    def propose(self, tokens: list[int], free_rows: int) -> Tree:
        """See Drafter. Copies are one-hot."""
        self.copied = self.index.continuation(tokens, min(self.policy.choose(), free_rows))
        if self.copied:
            return Tree.chain(tokens[-1], self.copied)
        return self.other.propose(tokens, free_rows)

    def observe(self, tree: Tree, path: list[int]) -> None:
        """See Drafter."""
        used, unused = self.policy, self.other.policy
        used, unused = (used, unused) if self.copied else (unused, used)
        used.observe(drafted=len(tree) - 1, accepted=len(path) - 1)
        unused.observe(drafted=0, accepted=0)


class CopiesInTree(CopiesFirst):
    """Drafts the head's trees. Copies are candidates, valued by their running acceptance."""

    matches = 8, 2  # here a wrong copy costs a node, not the head's drafts

    def __init__(self, other: HeadDrafter, k: int | Policy):
        super().__init__(other, k)
        self.rates = AcceptanceRates(16)

    def propose(self, tokens: list[int], free_rows: int) -> Tree:
        """See Drafter."""
        self.copied = self.index.continuation(tokens, len(self.rates.rate))
        paths = [tuple(self.copied[: i + 1]) for i in range(len(self.copied))]
        return self.other.propose(tokens, free_rows, dict(zip(paths, self.rates.accept_probs())))

    def observe(self, tree: Tree, path: list[int]) -> None:
        """See Drafter."""
        self.other.observe(tree, path)
        nodes = tree.nodes_along(self.copied)
        self.rates.observe(len(nodes), sum(node in path for node in nodes))
        if self.copied and not nodes:  # otherwise, copies that were once wrong would never return
            self.rates.rate[0] += UNTRIED_STEP * (1 - self.rates.rate[0])
