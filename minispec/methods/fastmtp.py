"""FastMTP (arXiv 2509.18362): one multi-token prediction head, in MiMo's layout, drafts K tokens by
running on its own output; the target verifies them in one pass.

Row j of the head reads the target's hidden state h_j, after its final norm, and token t_{j+1}, at
position j, and predicts t_{j+2}. For further drafts, the head reads its own output instead of h.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.cache import KVCache
from minispec.methods.vocabulary import DraftHead, FullVocabulary, Vocabulary
from minispec.model import CHUNK, Block, Config, ForwardContext, Rope, Transformer, make_context
from minispec.sampling import Randomness, Sampling, draw, probs
from minispec.tree import FixedK, Policy, Step, Tree
from minispec.verify import accept

# ---- the head ------------------------------------------------------------------------------------


class MTPHead(Block):
    """One block like the target's, fed with a hidden state and a token. Tensors have MiMo's names.

    The embedding and the lm_head are the target's. `acceptance` is how often each step's token was
    right, given the tokens before it (None: not measured).
    """

    def __init__(self, config: Config):
        super().__init__(config, layer=0)
        size, eps = config.hidden_size, config.norm_eps
        self.config, self.rope = config, Rope(config)
        self.token_layernorm = nn.RMSNorm(size, eps)
        self.hidden_layernorm = nn.RMSNorm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.final_layernorm = nn.RMSNorm(size, eps)
        self.acceptance: list[float] | None = None

    def new_cache(self, capacity: int) -> KVCache:
        """Return a cache for the head, with one layer."""
        c, weight = self.config, self.final_layernorm.weight
        return KVCache(1, c.kv_heads, c.head_dim, capacity, 1, weight.dtype, weight.device)

    def drafter(self, model: Transformer, cache: KVCache, offset: int) -> "Drafter":
        """What drafts with this head for its target."""
        return Drafter(self, model, cache, offset)

    def forward(
        self, hidden: Tensor, embedded: Tensor, cache: KVCache | None = None,
        depth: Tensor | None = None, mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Hidden states (B, n, d) and embedded tokens (B, n, d) -> outputs (B, n, d), which feed
        lm_head and the next step. The other arguments are as in Transformer.forward."""
        ctx = make_context(self.rope, hidden, hidden.shape[1], cache, depth, mask)
        return self.layers(hidden, embedded, ctx)

    def layers(self, hidden: Tensor, embedded: Tensor, ctx: ForwardContext) -> Tensor:
        """`forward`, given the context of the pass."""
        pair = [self.hidden_layernorm(hidden), self.token_layernorm(embedded)]  # in this order
        return self.final_layernorm(super().forward(self.input_proj(torch.cat(pair, -1)), ctx))


class Drafter:
    """Runs a head for its target. Holds the head's cache and what it drafts from.

    The first `offset` committed rows of the target came from a kept cache without hidden states, so
    the head never sees them. Each of the others has a row in the head's cache or is `pending`: its
    hidden state waits for the next round that drafts, so that the head does not run in plain steps.
    """

    def __init__(self, head: MTPHead, model: Transformer, cache: KVCache, offset: int):
        self.head, self.model, self.cache, self.offset = head, model, cache, offset
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
        embedded = self.model.model.embed_tokens(tokens)
        # row r of the head's cache is at position r + offset
        return self.head(hidden[None], embedded[None], self.cache, depth + self.offset, mask)[0]

    def receive(self, hidden: Tensor, tokens: list[int]) -> None:
        """Keep hidden states (n, d) of the target, and the token that follows each, for later."""
        self.pending.append((hidden, tokens))

    def catch_up(self) -> None:
        """Run the head on everything that is pending, in chunks as in a prefill."""
        if self.pending:
            hidden, tokens = self.joined_pending()
            self.pending.clear()
            for start in range(0, len(tokens), CHUNK):
                chunk = slice(start, start + CHUNK)
                self.extend(hidden[chunk], tokens[chunk])

    def joined_pending(self) -> tuple[Tensor, list[int]]:
        """All pending hidden states (n, d) and tokens."""
        states, tokens = zip(*self.pending)
        return states[0] if len(states) == 1 else torch.cat(states), sum(tokens, [])

    def extend(self, hidden: Tensor, tokens: list[int] | Tensor) -> None:
        """Commit a row for each hidden state (n, d) of the target and the token that follows."""
        if len(tokens):
            self.last = self.run(hidden, tokens)[-1:]
            self.cache.commit(list(range(len(tokens))))

    def draft(
        self, tokens: list[int], k: int, sampling: Sampling, randomness: Randomness,
        draft_head: DraftHead,
    ) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
        """Draw at most `k` drafts after `tokens`. Returns the newest token and the drafts, in one
        tensor (1 + k,), and the distributions of the drafts."""
        if k > 0:
            self.catch_up()
        drafts, draft_probs = self.chain(k, sampling, randomness, draft_head)
        drafts = torch.as_tensor(drafts, device=self.model.device)
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


    def expand(
        self, width: int, depth: int, draft_head: DraftHead
    ) -> tuple[list[int], list[int], list[float]]:
        """Candidates for a tree, level by level, best siblings first: their tokens, their parents
        (-1: the root) and their values, the products of the head's probabilities along the paths.

        As in EAGLE-2 (Li et al. 2024, section 4), the head reads the `width` best candidates of a
        level in one pass, each with the head's output at its parent. A row sees its ancestors only,
        at its depth's position. All earlier rows are fed again: for a single layer, this takes less
        time than to keep them.
        """
        states, value = self.last, self.last.new_ones(1, dtype=torch.float32)
        parent = torch.full((1,), -1, device=states.device)  # the candidates that are expanded
        tokens, parents, values, read = [], [], [], None
        for level in range(depth):
            p, token = draft_head.logits(states).float().softmax(-1).topk(width)  # (rows, width)
            tokens.append(draft_head.to_full_ids(token).flatten())
            parents.append(parent.repeat_interleave(width))
            values.append((value[:, None] * p).flatten())
            if level + 1 < depth:
                value, best = values[-1].topk(width)
                parent = best + sum(map(len, values[:-1]))
                read = HeadRows.after(read, best // width, states, tokens[-1][best])
                states = self.run(read.states, read.tokens, read.depth, read.mask)[-width:]
        # a single wait for the device; float64 represents every token id exactly
        found = torch.stack([torch.cat(x).double() for x in (tokens, parents, values)]).tolist()
        return list(map(int, found[0])), list(map(int, found[1])), found[2]


@dataclass(frozen=True)
class HeadRows:
    """The rows that the head reads in a tree's pass: its states (n, d), tokens and depths (n,), and
    which rows each one sees, (n, n)."""

    states: Tensor
    tokens: Tensor
    depth: Tensor
    mask: Tensor

    @classmethod
    def after(
        cls, above: "HeadRows | None", parent: Tensor, states: Tensor, tokens: Tensor
    ) -> "HeadRows":
        """The rows above, and below them a level with these tokens. parent[i] is the index of row
        i's parent in `states`, the head's outputs at the level above."""
        n = len(tokens)
        own = torch.eye(n, dtype=torch.bool, device=tokens.device)
        if above is None:  # below the root, which all see in the cache
            return cls(states[parent], tokens, torch.zeros_like(tokens), own)
        seen = above.mask[-len(states) :][parent]
        return cls(
            torch.cat([above.states, states[parent]]), torch.cat([above.tokens, tokens]),
            torch.cat([above.depth, above.depth[-1:] + torch.ones_like(tokens)]),
            torch.cat([F.pad(above.mask, (0, n)), torch.cat([seen, own], 1)]),
        )  # fmt: skip


def best_tree(
    root: int, n: int, tokens: list[int], parents: list[int], values: list[float]
) -> Tree:
    """The tree of the `n` candidates of highest value (see Drafter.expand). No candidate's value is
    above its parent's, so these form a tree."""
    kept = sorted(sorted(range(len(values)), key=lambda i: -values[i])[:n])
    node = {-1: 0} | {i: index for index, i in enumerate(kept, 1)}
    return Tree([root, *(tokens[i] for i in kept)], [-1, *(node[parents[i]] for i in kept)])


# ---- decoding ------------------------------------------------------------------------------------


def fastmtp(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, head: MTPHead, k: int | Policy = 3, tree: int | None = None,
    vocabulary: Vocabulary | None = None, draft_sampling: Sampling | None = None,
) -> Iterator[Step]:  # fmt: skip
    """Draft K = `k` tokens per round with one head (section 3 of the paper). `k` may be a policy
    that chooses K for each round (see adaptive).

    The head samples with `draft_sampling` (default: the target's) over the `vocabulary` of the
    text's language (default: the full one). Any choice is lossless.
    """
    policy = k if hasattr(k, "choose") else FixedK(k)
    vocabulary = vocabulary or FullVocabulary(model)
    cache = cache or model.new_cache()
    drafter = head.drafter(model, head.new_cache(cache.capacity), offset=cache.length)
    tokens = list(prompt)
    # the cache holds every token but the newest, which is the root of the next tree
    for hidden in model.prefill_chunks(tokens[cache.length : -1], cache):  # (1, n, d)
        n = hidden.shape[1]
        drafter.receive(hidden[0], tokens[cache.length - n + 1 : cache.length + 1])  # h_j, t_{j+1}
        drafter.catch_up()
    yield Step()  # the prefill, so that it can be timed separately
    while True:
        draft_head = vocabulary.select(tokens)
        if tree is None:
            n = min(policy.choose(), cache.free_rows - 1)  # one row is for the root
            rows, draft_probs = drafter.draft(
                tokens, n, draft_sampling or sampling, randomness, draft_head
            )
            host_rows = rows.to("cpu", non_blocking=True)  # greedy drafts are still on the device
            hidden = model(rows, cache)[0]
            p = probs(model.logits(hidden), sampling)  # waits for the device
            proposed = Tree.chain(tokens[-1], host_rows.tolist()[1:], draft_probs)
        else:
            drafter.catch_up()
            proposed = Tree.chain(tokens[-1], [])
            if drafter.last is not None:
                width, depth = max(4, round(1.3 * tree**0.5)), round(math.log2(tree)) + 2
                candidates = drafter.expand(width, depth, draft_head)
                proposed = best_tree(tokens[-1], min(tree, cache.free_rows - 1), *candidates)
            hidden = model(proposed.tokens, cache, proposed.depth, proposed.mask)[0]
            p = probs(model.logits(hidden), sampling)
        path, next_token = accept(p, proposed, randomness)
        cache.commit(path)
        new = proposed.tokens_at(path[1:]) + [next_token]
        # the head's own rows were scratch; rows made from the target's hidden states replace them
        drafter.receive(hidden[path], new)
        policy.observe(drafted=len(proposed) - 1, accepted=len(path) - 1)
        tokens += new
        yield Step(new, proposed, path)
