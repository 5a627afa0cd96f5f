"""FastMTP (arXiv 2509.18362): one multi-token prediction head, in MiMo's layout, drafts K tokens by
running on its own output; the target verifies them in one pass.

Row j of the head reads the target's hidden state h_j, after its final norm, and token t_{j+1}, at
position j, and predicts t_{j+2}. For further drafts, the head reads its own output instead of h.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn

from minispec.cache import KVCache
from minispec.methods.adaptive import FixedNodes, Policy, as_policy
from minispec.methods.declaration import (
    Cache,
    DraftSampling,
    K,
    Nodes,
    Verify,
    Words,
    head_weights,
    method,
)
from minispec.methods.vocabulary import DraftHead, FullVocabulary, Vocabulary
from minispec.model import CHUNK, Block, Config, ForwardContext, Rope, Transformer, make_context
from minispec.sampling import Randomness, Sampling, draw, warp
from minispec.tree import Step, Tree
from minispec.verify import Rule, accept, accept_block

HEAD_CASES = [  # to try, with any recurrent head
    {"k": 1}, {"k": 2}, *({"k": k, "draft_sampling": Sampling()} for k in (1, 2, 3, 6)),
    {"k": 2, "rule": accept_block}, {"k": "auto"}, {"tree": 1}, {"tree": 2},
    *({"tree": nodes, "draft_sampling": Sampling()} for nodes in (20, "auto")),
]  # fmt: skip
CHILDREN = 10  # candidates below each expanded node of a tree, as in EAGLE-2's code

# ---- the head ------------------------------------------------------------------------------------


class RecurrentHead(nn.Module):
    """A layer that drafts several tokens by running on its own output: FastMTP's head or EAGLE-3's
    (see eagle3). `acceptance` is how often each step's token was right, given the tokens before it
    (None: not measured). `feature_layers` are the layers of the target whose inputs it reads;
    without any, it reads the target's output.
    """

    config: Config
    rope: Rope
    feature_layers: tuple[int, ...] = ()
    acceptance: list[float] | None = None
    compiled: Callable[..., Tensor] | None = None  # see Transformer: in place of run_block
    graphs = None  # a captured.DraftGraphs

    def new_cache(self, capacity: int) -> KVCache:
        """Return a cache for the head, with one layer."""
        c, weight = self.config, next(self.parameters())
        new = KVCache if self.graphs is None else self.graphs.new_cache
        return new(1, c.kv_heads, c.head_dim, capacity, weight.dtype, weight.device)

    def start(
        self, model: Transformer, cache: KVCache, head_cache: KVCache | None = None, **settings
    ) -> "HeadDrafter":
        """Return a drafter for a run that continues `cache`. Without a `head_cache`, the head never
        sees the text in it. With one, the target reads the text from its last row on again, as the
        head needs the hidden states. The `settings` are those of HeadDrafter."""
        new = HeadDrafter if self.graphs is None else self.graphs.drafter
        if head_cache is None:
            return new(self, model, self.new_cache(cache.capacity), cache.length, **settings)
        # row j of the head has read token j + 1, so the token after the kept ones may differ
        head_cache.truncate(min(head_cache.length, max(cache.length - 1, 0)))
        cache.truncate(head_cache.length)
        return new(self, model, head_cache, 0, **settings)

    def vocabulary(self, model: Transformer, chosen: Vocabulary | None = None) -> Vocabulary:
        """Return the `chosen` vocabulary, by default all of the target's tokens. Raises UserError
        if the head cannot draft from it."""
        return chosen or FullVocabulary(model)

    def embed(self, tokens: Tensor, model: Transformer) -> Tensor:
        """Tokens (..., n) -> (..., n, d), by default with the target's embedding."""
        return model.model.embed_tokens(tokens)

    def project_features(self, hidden: Tensor) -> Tensor:
        """The target's hidden states -> what stands in for the head's output (..., n, d) in its
        first step: by default, the hidden states themselves."""
        return hidden

    def forward(
        self, hidden: Tensor, embedded: Tensor, cache: KVCache | None = None,
        depth: Tensor | None = None, mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Hidden states (B, n, d) and embedded tokens (B, n, d) -> outputs (B, n, d), which feed
        lm_head and the next step. The other arguments are as in Transformer.forward."""
        ctx = make_context(self.rope, hidden, hidden.shape[1], cache, depth, mask)
        run = self.compiled or self.run_block
        return run(hidden, embedded, ctx)


class MTPHead(RecurrentHead, Block):
    """One block like the target's, fed with a hidden state and a token. Tensors have MiMo's names.
    The embedding and the lm_head are the target's.
    """

    def __init__(self, config: Config):
        super().__init__(config, layer=0)
        size, eps = config.hidden_size, config.norm_eps
        self.config, self.rope = config, Rope(config)
        self.token_layernorm = nn.RMSNorm(size, eps)
        self.hidden_layernorm = nn.RMSNorm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.final_layernorm = nn.RMSNorm(size, eps)

    def run_block(self, hidden: Tensor, embedded: Tensor, ctx: ForwardContext) -> Tensor:
        """Run a pass in the given context."""
        pair = [self.hidden_layernorm(hidden), self.token_layernorm(embedded)]  # in this order
        return self.final_layernorm(Block.forward(self, self.input_proj(torch.cat(pair, -1)), ctx))


MTP = Annotated[RecurrentHead, head_weights("mtp")]


# ---- drafters ------------------------------------------------------------------------------------

Values = dict[tuple[int, ...], float]  # of a tree's candidates, by the tokens of their paths


class Drafter:
    """Proposes the drafts of `draft_and_verify`; its `policy` chooses how many."""

    policy: Policy
    feature_layers: tuple[int, ...] = ()  # layers of the target whose inputs it also reads

    def enqueue(self, hidden: Tensor, tokens: list[int]) -> None:
        """Keep hidden states (n, d) of the target, and the token that follows each, for later."""

    def flush_pending(self) -> None:
        """Read everything that was enqueued."""

    def propose(self, tokens: list[int], free_rows: int) -> Tree:
        """Return at most `free_rows` drafts below the newest token; they may be on the device."""

    def observe(self, tree: Tree, path: list[int]) -> None:
        """Record the outcome of a round."""
        self.policy.observe(drafted=len(tree) - 1, accepted=len(path) - 1)


class Draws:
    """Tokens drawn one after the other, without replacement, from a distribution q (V,). Each comes
    with the distribution that it was drawn from: q, renormalised without the earlier ones."""

    def __init__(self, q: Tensor, randomness: Randomness):
        self.rest, self.randomness = q, randomness
        self.drawn: list[tuple[Tensor, Tensor]] = []  # the tokens (1,) and their distributions

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        while len(self.drawn) <= i:
            token = torch.tensor([self.randomness.categorical(self.rest)])
            self.drawn.append((token, self.rest))
            rest = self.rest.index_fill(0, token, 0.0)
            self.rest = rest / rest.sum()
        return self.drawn[i]


class HeadDrafter(Drafter):
    """Drafts with a head: a chain of `k` or, if `nodes` is not 0, a tree; both may be policies.

    The first `offset` committed rows of the target came from a kept cache without hidden states, so
    the head never sees them. Each of the others has a row in the head's cache or is `pending`: its
    hidden state waits for the next round that drafts, so that the head does not run in plain steps.
    """

    def __init__(
        self, head: RecurrentHead, model: Transformer, cache: KVCache, offset: int,
        sampling: Sampling = Sampling(), randomness: Randomness | None = None,
        k: int | Policy = 3, nodes: int | Policy = 0, vocabulary: Vocabulary | None = None,
    ):  # fmt: skip
        self.head, self.model, self.cache, self.offset = head, model, cache, offset
        self.vocabulary, self.in_tree = head.vocabulary(model, vocabulary), nodes != 0
        self.feature_layers, self.sampling = head.feature_layers, sampling
        self.randomness = randomness
        self.policy = as_policy(nodes, FixedNodes) if self.in_tree else as_policy(k)
        self.last: Tensor | None = None  # (1, d): the head's output at the newest token
        self.pending: list[tuple[Tensor, list[int]]] = []

    def run(
        self, hidden: Tensor, tokens: list[int] | Tensor, depth: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Run the head on n scratch rows: hidden states (n, d), a token each. Returns (n, d). By
        default each row follows the one before it."""
        tokens = torch.as_tensor(tokens, device=self.model.device)
        depth = torch.arange(len(tokens), device=tokens.device) if depth is None else depth
        embedded = self.head.embed(tokens, self.model)
        # row r of the head's cache is at position r + offset
        return self.head(hidden[None], embedded[None], self.cache, depth + self.offset, mask)[0]

    def enqueue(self, hidden: Tensor, tokens: list[int]) -> None:
        """See Drafter."""
        self.pending.append((hidden, tokens))

    def flush_pending(self) -> None:
        """Run the head on everything that is pending, in chunks as in a prefill."""
        if self.pending:
            hidden, tokens = self.joined_pending()
            self.pending.clear()
            for start in range(0, len(tokens), CHUNK):
                chunk = slice(start, start + CHUNK)
                self.extend(hidden[chunk], tokens[chunk])

    @property
    def num_pending(self) -> int:
        """The number of rows that `flush_pending` would commit."""
        return sum(len(tokens) for _, tokens in self.pending)

    def joined_pending(self) -> tuple[Tensor, list[int]]:
        """All pending hidden states (n, d) and tokens."""
        states, tokens = zip(*self.pending)
        return states[0] if len(states) == 1 else torch.cat(states), sum(tokens, [])

    def extend(self, hidden: Tensor, tokens: list[int] | Tensor) -> None:
        """Commit a row for each hidden state (n, d) of the target and the token that follows."""
        if len(tokens):
            self.last = self.run(self.head.project_features(hidden), tokens)[-1:]
            self.cache.commit(list(range(len(tokens))))

    def propose(self, tokens: list[int], free_rows: int, others: Values = {}) -> Tree:
        """See Drafter. `others` are more candidates for a tree, as in `best_tree`."""
        draft_head = self.vocabulary.select(tokens)
        if self.in_tree:
            return self.tree(tokens, free_rows, draft_head, others)
        k = min(self.policy.choose(), free_rows)
        chain, draft_probs = self.draft(tokens, k, draft_head)
        draft_probs = [None, *draft_probs] if draft_probs else []
        return Tree(chain, list(range(-1, len(chain) - 1)), draft_probs)

    def draft(
        self, tokens: list[int], k: int, draft_head: DraftHead
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Draw at most `k` drafts after `tokens`. Returns the newest token and the drafts, in one
        tensor (1 + k,), and the distributions of the drafts."""
        if k > 0:
            self.flush_pending()
        drafts, draft_probs = self.chain(k, self.sampling, self.randomness, draft_head)
        drafts = torch.as_tensor(drafts, dtype=torch.int64, device=self.model.device)
        return torch.cat([drafts.new_tensor(tokens[-1:]), drafts]), draft_probs

    def chain(
        self, k: int, sampling: Sampling, randomness: Randomness, draft_head: DraftHead
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Draw at most `k` drafts, each from the head's distribution over the tokens of
        `draft_head`. Returns them (k,), on the device if greedy, and their distributions over the
        full vocabulary (None: one-hot). The first draft comes from the output of `extend` at the
        newest token. Each further draft takes a pass over the head's own output and the previous
        draft. Restores the cache."""
        drafts: list[Tensor] = []
        draft_probs: list[Tensor | None] = []
        length, hidden = self.cache.length, self.last
        while hidden is not None and len(drafts) < k:
            token, q = draw(draft_head.logits(hidden), sampling, randomness)
            drafts.append(draft_head.to_full_ids(token))
            draft_probs.append(q if q is None else draft_head.scatter(q))
            if len(drafts) < k:
                hidden = self.run(hidden, drafts[-1])
                self.cache.commit([0])
        self.cache.truncate(length)
        return torch.cat(drafts) if drafts else torch.tensor([], dtype=torch.int64), draft_probs

    def tree(
        self, tokens: list[int], free_rows: int, draft_head: DraftHead, others: Values
    ) -> Tree:
        """A tree of at most `free_rows` nodes below the newest token: those of highest value, as
        in EAGLE-2 (Li et al. 2024, section 4). A node's value is the product of the head's
        probabilities along its path. If `others` have a candidate too, the larger value counts.

        When sampling, a tree without `others` is drawn. With them it is not: a drawn token that is
        also a copy would gain in value, so what is drawn would decide what is kept."""
        if self.sampling.temperature and not others:
            return self.drawn_tree(tokens[-1], free_rows, draft_head)
        policy, paths, values = self.policy, [()], {}
        if (self.pending or self.last is not None) and policy.drafting([*others.values()]):
            # in one copy to the host; float64 represents every token id exactly
            for token, parent, value in self.flush_and_expand(policy, draft_head).T.tolist():
                paths.append((*paths[int(parent) + 1], int(token)))
                values[paths[-1]] = max(0.0, policy.calibration * value)  # 0 if it is NaN
        values |= {path: max(value, values.get(path, 0.0)) for path, value in others.items()}
        n = policy.choose([*values.values()], free_rows)
        return best_tree(tokens[-1], values, n)

    def drawn_tree(self, root: int, free_rows: int, draft_head: DraftHead) -> Tree:
        """A tree for sampling: the children of a node are drawn from the head's distribution there,
        without replacement. Whether a draft is kept must not depend on which token was drawn, so
        the value of the i-th child is that of the i-th most likely token."""
        tokens, parents, draft_probs = [root], [-1], [None]
        policy, values, above, draws = self.policy, [], [], []
        if (self.pending or self.last is not None) and policy.drafting():
            _, above, values = self.flush_and_expand(policy, draft_head, draws).tolist()
        values = [max(0.0, policy.calibration * value) for value in values]  # 0 if it is NaN
        best = sorted(range(len(values)), key=values.__getitem__, reverse=True)
        best = best[: policy.choose(values, free_rows)]
        node_of = {-1: 0}
        for i in sorted(i for i in best if values[i] > 0):
            row, rank = divmod(i, len(values) // len(draws))
            token, q = draws[row][rank]
            node_of[i] = len(tokens)
            tokens += draft_head.to_full_ids(token).tolist()
            parents.append(node_of[int(above[i])])
            draft_probs.append(draft_head.scatter(q))
        return Tree(tokens, parents, draft_probs)

    def flush_and_expand(
        self, policy: Policy, draft_head: DraftHead, draws: list[Draws] | None = None
    ) -> Tensor:
        """Run the head on everything that is pending; then see `expand`."""
        self.flush_pending()
        return self.expand(
            lambda *found: min(policy.width(*found), self.cache.free_rows), draft_head, draws
        )

    def children(self, logits: Tensor, draws: list[Draws] | None) -> tuple[Tensor, Tensor]:
        """The probabilities (rows, CHILDREN) of the best tokens after some rows, and the tokens. If
        there is a list of `draws`, append each row's to it."""
        if draws is None:
            p = logits.float().softmax(-1)  # (rows, V)
        else:
            p = warp(logits, self.sampling).cpu()
            draws += [Draws(q, self.randomness) for q in p]
        return p.topk(min(CHILDREN, p.shape[-1]))

    def expand(
        self, width: Callable[[int, Tensor], int], draft_head: DraftHead,
        draws: list[Draws] | None = None,
    ) -> Tensor:  # fmt: skip
        """Candidates for a tree. In each level, the head reads the best candidates of the level
        above in one pass, each with the head's output at its parent; `width` is as in Policy. A
        row sees its ancestors only, at its depth's position. The cache keeps all rows until the
        last level is done. Returns each candidate's token, the index of its parent (-1: the root)
        and its value, (3, N), float64. With `draws`, the candidates' tokens are theirs."""
        start, states = self.cache.length, self.last
        device = states.device if draws is None else "cpu"
        value = torch.ones(1, device=device)  # of the rows that are expanded
        parent = torch.full((1,), -1, device=device)
        seen = torch.ones(1, 0, dtype=torch.bool, device=device)  # by the rows, of all rows
        levels: list[Tensor] = []  # the candidates, (3, n) each
        while True:
            p, token = self.children(draft_head.logits(states), draws)
            found = draft_head.to_full_ids(token), parent[:, None], value[:, None] * p
            levels.append(torch.stack([x.double().expand_as(p).flatten() for x in found]))
            tokens, _, values = levels[-1]
            likely = len(values) if draws is None else int((values > 0).sum())
            n = min(width(len(levels), values), likely)
            if n < 1:
                break
            value, best = values.topk(n)
            parent = best + sum(level.shape[1] for level in levels[:-1])
            above = best // p.shape[1]  # the rows that predicted them
            own = torch.eye(n, dtype=torch.bool, device=best.device)
            depth = best.new_full((n,), len(levels) - 1 - seen.shape[1])
            seen = torch.cat([seen[above], own], 1)
            token = tokens[best].long()
            if draws is not None:
                drawn = [draws[i // p.shape[1]][i % p.shape[1]][0] for i in parent.tolist()]
                token = draft_head.to_full_ids(torch.cat(drawn))
            states = self.run(states[above.to(states.device)], token, depth, seen)
            self.cache.commit(list(range(n)))
        self.cache.truncate(start)
        return torch.cat(levels, 1)


def best_tree(root: int, values: Values, n: int) -> Tree:
    """The tree of the `n` candidates of highest value. Each path comes after its prefixes, whose
    values are not lower, so the best candidates form a tree."""
    best_first = sorted(values, key=values.get, reverse=True)  # keeps the order of equals
    best = set(best_first[:n])
    return Tree.merged(root, [list(path) for path in values if path in best])


# ---- decoding ------------------------------------------------------------------------------------


@method(
    "fastmtp", bench=[{"k": 2}, {"k": 3}, {"k": "auto"}, {"tree": 8}, {"tree": "auto"}],
    cases=[*HEAD_CASES, {"k": 2, "vocabulary": "two"}, {"tree": 2, "vocabulary": "two"},
           {"k": 2, "draft_sampling": Sampling(2.0), "vocabulary": "two"}],
    waits={"": (1, None), "tree": (2, None)},
)  # fmt: skip
def fastmtp(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, head: MTP, k: K = 3, tree: Nodes = 0, vocabulary: Words = None,
    draft_sampling: DraftSampling = None, head_cache: Cache = None, rule: Verify = accept,
) -> Iterator[Step]:  # fmt: skip
    """Draft K = `k` tokens per round with one head (section 3 of the paper). `k` may be a policy
    that chooses K for each round (see adaptive). With a `tree`, draft a tree of that many nodes
    instead, or one that a policy chooses for each round.

    The head drafts over the `vocabulary` of the text's language (default: the full one). It samples
    with `draft_sampling` (default: the target's). Any choice is lossless. `head_cache` may hold the
    head's rows for a prefix of the text in `cache`.
    """
    cache = cache or model.new_cache()
    drafter = head.start(model, cache, head_cache, sampling=draft_sampling or sampling,
                         randomness=randomness, k=k, nodes=tree, vocabulary=vocabulary)  # fmt: skip
    yield from draft_and_verify(model, cache, list(prompt), drafter, sampling, randomness, rule)


def draft_and_verify(
    model: Transformer, cache: KVCache, tokens: list[int], drafter: Drafter, sampling: Sampling,
    randomness: Randomness, rule: Rule,
) -> Iterator[Step]:  # fmt: skip
    """The loop of all methods that draft with a head: propose, score, accept, commit, enqueue."""
    read_prompt(model, cache, tokens, drafter)
    yield Step()  # the prefill, so that it can be timed separately
    while True:
        tree = drafter.propose(tokens, cache.free_rows - 1)  # one row is for the root
        shape = (None, None) if tree.is_chain else (tree.depth, tree.mask)
        on_host, hidden, p = model.score(
            tree.tokens, cache, sampling, *shape, drafter.feature_layers
        )
        tree = replace(tree, tokens=on_host)
        path, next_token, *asked = rule(p, tree, randomness)
        cache.commit(path)
        new = tree.tokens_at(path[1:]) + [next_token]
        # the head's own rows were scratch; rows made from the target's hidden states replace them
        drafter.enqueue(accepted_rows(hidden, path), new)
        drafter.observe(tree, path)
        tokens += new
        yield Step(new, tree, path, *asked)


def read_prompt(
    model: Transformer, cache: KVCache, tokens: list[int], drafter: Drafter
) -> None:
    """Feed all tokens but the newest, which is the root of the next tree, to the target and its
    hidden states to the drafter."""
    unread, layers = tokens[cache.length : -1], drafter.feature_layers
    for hidden in model.prefill_chunks(unread, cache, feature_layers=layers):  # (1, n, d)
        n = hidden.shape[1]
        drafter.enqueue(hidden[0], tokens[cache.length - n + 1 : cache.length + 1])  # h_j, t_{j+1}
        drafter.flush_pending()


def accepted_rows(hidden: Tensor, path: list[int]) -> Tensor:
    """hidden[path]; for a chain, without a copy."""
    return hidden[: len(path)] if path[-1] < len(path) else hidden[path]
