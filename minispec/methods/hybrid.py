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
from minispec.methods.adaptive import UNTRIED_STEP, AdaptiveK
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
    accepted_rows,
    check_vocabulary,
    read_prompt,
    score_chain,
    score_tree,
)
from minispec.methods.prompt_lookup import NgramIndex
from minispec.methods.speculative import propose, replace_unknown
from minispec.methods.vocabulary import FullVocabulary
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling
from minispec.tree import FixedK, Policy, Step, Tree, node_policy
from minispec.verify import accept, accept_block

LookupK = Annotated[int | Policy, Option("copies per round, or auto", least=1, auto="copies")]
LONGEST_MATCH, SHORTEST_MATCH = 5, 3  # tokens; after shorter matches a head is more often right


class ModelDrafter:
    """Drafts with a draft model, as `speculative` does; used like a head's Drafter."""

    def __init__(
        self, draft: Transformer, model: Transformer, cache: KVCache, draft_cache: KVCache | None
    ):  # fmt: skip
        self.model, self.vocab_size, self.feature_layers = draft, model.config.vocab_size, ()
        self.cache, self.target_cache = draft_cache or draft.new_cache(cache.capacity), cache

    def receive(self, hidden: Tensor, tokens: list[int]) -> None:
        """Drop the rows of rejected drafts. The draft model needs no hidden states."""
        self.cache.truncate(min(self.cache.length, self.target_cache.length))

    def catch_up(self) -> None:
        """Nothing to do: `draft` reads what is new."""

    def draft(
        self, tokens: list[int], k: int, sampling: Sampling, randomness: Randomness, _: object
    ) -> tuple[Tensor, list[Tensor | None]]:
        """See Drafter. The draft model first reads the tokens that it has not seen."""
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
    waits={"": (1, None), "tree": (2, 2)}, checks=(check_vocabulary,),
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
    drafting, copying = (n if hasattr(n, "choose") else FixedK(n) for n in (k, lookup_k))
    nodes = node_policy(tree)
    if nodes is not None and head is None:
        raise UserError("hybrid: a tree needs a head, not a draft model")
    cache = cache or model.new_cache()
    drafter = (
        ModelDrafter(draft, model, cache, draft_cache) if head is None
        else head.start(model, cache, head_cache)
    )  # fmt: skip
    vocabulary = FullVocabulary(model) if head is None else head.vocabulary(model, vocabulary)
    tokens, index = list(prompt), NgramIndex(LONGEST_MATCH, SHORTEST_MATCH)
    layers = drafter.feature_layers
    read_prompt(model, cache, tokens, drafter)
    yield Step()  # the prefill, so that it can be timed separately
    rates = AdaptiveK([1.0], 0.0)  # of copied tokens in trees
    while True:
        free_rows = cache.free_rows - 1  # one row is for the root
        # who drafts, and how much, follows from the text so far, so any choice is lossless
        end = index.match_end(tokens)
        most = min(copying.choose(), free_rows) if nodes is None else len(rates.rate)
        copied = tokens[end : end + most]
        if nodes is not None:
            chain, draft_head = list(zip(copied, rates.accept_probs())), vocabulary.select(tokens)
            proposed = drafter.tree(tokens, nodes, free_rows, draft_head, chain)
            hidden, p = score_tree(model, cache, proposed, sampling, layers)
        else:
            rows, draft_probs = torch.tensor([tokens[-1], *copied]), []  # copies are one-hot
            if not copied and (n := min(drafting.choose(), free_rows)) > 0:
                rows, draft_probs = drafter.draft(
                    tokens, n, draft_sampling or sampling, randomness, vocabulary.select(tokens)
                )
            proposed, hidden, p = score_chain(model, cache, rows, draft_probs, sampling, layers)
        path, next_token, *asked = rule(p, proposed, randomness)
        cache.commit(path)
        new = proposed.tokens_at(path[1:]) + [next_token]
        drafter.receive(accepted_rows(hidden, path), new)
        outcome = {"drafted": len(proposed) - 1, "accepted": len(path) - 1}
        if nodes is not None:
            nodes.observe(**outcome)
            kept, right = copies(copied, proposed, path)
            rates.observe(kept, right)
            if copied and not kept:  # otherwise, copies that were once wrong would never return
                rates.rate[0] += UNTRIED_STEP * (1 - rates.rate[0])
        else:
            used, unused = (copying, drafting) if copied else (drafting, copying)
            used.observe(**outcome)
            unused.observe(drafted=0, accepted=0)
        tokens += new
        yield Step(new, proposed, path, *asked)


def copies(copied: list[int], tree: Tree, path: list[int]) -> tuple[int, int]:
    """How many of the copied tokens are a path of the tree, and how many were accepted."""
    node, drafted, accepted = 0, 0, 0
    for token in copied:
        node = next((i for i in tree.children(node) if tree.tokens[i] == token), None)
        if node is None:
            break
        drafted, accepted = drafted + 1, accepted + (node in path)
    return drafted, accepted
