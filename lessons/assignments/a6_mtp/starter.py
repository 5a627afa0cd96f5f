"""Assignment 6: the prediction head, drafting with it, and its loss. Fill in the functions; see
README.md."""

from torch import Tensor

from minispec import distill
from minispec.distill import AllSteps
from minispec.methods import fastmtp
from minispec.methods.vocabulary import DraftHead
from minispec.model import ForwardContext
from minispec.sampling import Randomness, Sampling


class MTPHead(fastmtp.MTPHead):
    """A block like the target's, with `hidden_layernorm`, `token_layernorm`, `input_proj` (2d -> d)
    and `final_layernorm`; its attention and MLP are `minispec.model.Block.forward(self, x, ctx)`.

    `forward`, which plans the pass for a cache and calls `run_block`, is given.
    """

    def run_block(self, hidden: Tensor, embedded: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states (B, n, d) and embedded tokens (B, n, d) -> (B, n, d), which feeds lm_head
        and the next step. The hidden state comes first in what `input_proj` reads.

        Example: h is normed by `hidden_layernorm`, Emb(t) by `token_layernorm`; [h; Emb(t)] (B, n,
        2d) goes through `input_proj` to (B, n, d), through the block, and through
        `final_layernorm`.
        """
        raise NotImplementedError


class Drafter(fastmtp.HeadDrafter):
    """The head beside its target. `self.run(hidden, tokens)` gives the head's outputs (n, d) for
    hidden states (n, d) and a token each, as scratch rows of `self.cache` right behind its
    committed ones; `self.last` (1, d) is the output at the newest token, None before the first.
    """

    def extend(self, hidden: Tensor, tokens: list[int] | Tensor) -> None:
        """Take in the target's own hidden states (n, d), each with the token that came after it.

        Row j is (h_j, t_{j+1}). Commit the rows and keep the last output in `last`; n may be 0.

        Example: the cache has 4 rows. extend(hidden of 2 rows, [8, 3]) makes them 6, and `last` is
        the output of the row with token 3.
        """
        raise NotImplementedError

    def chain(
        self, k: int, sampling: Sampling, randomness: Randomness, draft_head: DraftHead
    ) -> tuple[Tensor, list[Tensor | None]]:
        """At most `k` drafts, in a tensor or a list, each drawn from the head's distribution over
        the tokens of `draft_head`, some or all; and the distribution of each over the full
        vocabulary (None: one-hot). No drafts before the first hidden state.

        The head runs on its own output and its newest draft. `draft_head.logits(hidden)` are the
        logits (..., size of the subset). `draft_head.to_full_ids(j)` turns a tensor of their
        indices into tokens, and `draft_head.scatter(q)` a distribution over the subset into one
        over the full vocabulary.
        `minispec.sampling.draw` draws. The cache and `last` end as they began.

        Example, k = 2: `last` gives the first draft, 8. The head runs on `last` and 8, and its
        output gives the second. Nothing is run on that one, and the row of 8 is dropped.
        """
        raise NotImplementedError


    def grow(
        self, newest: int, n: int, width: int, depth: int, draft_head: DraftHead
    ) -> tuple[list[int], list[int]]:
        """Optional. A tree of the `n` best drafts after `newest`, the text's newest token, as in
        EAGLE-2. Returns its tokens, of which the first is `newest`, and the index of each node's
        parent (-1 for `newest`), parents before children. Before the first hidden state there are
        no drafts. The cache and `last` end as they began.

        After a node, the head's distribution is the softmax of `draft_head.logits(output)` at that
        node; a node's value is the product of the probabilities along its path. The candidates of
        level 1 are the tokens after `newest`, where the output is `last`. Those of each further
        level are the tokens after the `width` candidates of highest value in the level above. There
        are `depth` levels. Of the candidates of all levels, those of highest value are kept.

        For the output at a node, the head reads the output at the parent and the node's token, at
        the position of the node's depth; the row sees the text and the node's ancestors, no other
        node. Run each path by itself, or a level in one pass: `self.run(hidden, tokens, depth,
        mask)` also takes the distance (n,) of each row from the first, and which rows see which,
        (n, n).

        Example, n = 3, width = 1, depth = 2: at first the head gives 5 the probability 0.6 and 8
        0.3; after 5, it gives 8 0.7 and 5 0.2. The values are 0.6, 0.3, 0.42 and 0.12. So the
        tokens are [newest, 5, 8, 8], and the parents [-1, 0, 0, 1].
        """
        raise NotImplementedError


def step_weights(steps: int, beta: float) -> list[float]:
    """α_k = β^(k-1) / Σ β^(j-1), for k from 1 to `steps`.

    >>> step_weights(2, 0.25)  # 1 and 1/4, divided by their sum
    [0.8, 0.2]
    """
    raise NotImplementedError


class Documents(distill.Documents):
    """`tokens` (D, T), whole documents padded on the right; `lengths` (D,) of each; `prompts` (D,),
    how many of its first tokens are a prompt."""

    def labels(self, index: Tensor, k: int) -> Tensor:
        """Step k's label (from 1) at row i is token i + k + 1 of documents `index` (B,) if that is
        a token of the document and not of its prompt, else -100; (B, T - 2).

        Example: the document is [5, 6, 7, 8, 9] and its prompt has 3 tokens. Step 1's labels are
        those of tokens 2, 3, 4: -100, 8, 9. Step 2's are 8, 9, -100.
        """
        raise NotImplementedError


class MTPLoss(distill.MTPLoss):
    """Indices of documents -> Σ α_k · CE_k. `self.head`, `self.target`, `self.weights` (the
    α_k) and `self.aligned` are given, and so is `self.gather`."""

    def __call__(self, index: Tensor) -> Tensor:
        """The loss, in nats. `hidden, tokens, labels = self.gather(index)`: what `steps` reads, and
        each step's labels (B, n). CE_k is the mean over the rows that have a label, 0 if none.

        Example: two steps with CE_1 = 1.0 and CE_2 = 2.0 and the weights 0.8, 0.2 give 1.2.
        """
        raise NotImplementedError

    def steps(self, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
        """Logits (B, n, V) of every step, for hidden states (B, n, d) and tokens (B, n + steps).

        Step k (from 1) at row i reads its own output of the step before (at first the hidden state)
        and the true token i + k. Gradients flow through all steps. `self.head.run_block` takes what
        `plan` returns.

        Example: at row 0, step 1 reads h_0 and token 1 and says token 2; step 2 reads step 1's
        output at row 0 and token 2, and says token 3.
        """
        raise NotImplementedError

    def plan(self, n: int, k: int, keys: AllSteps) -> ForwardContext:
        """Positions and visibility of step k + 1 (k from 0).

        Not `aligned`: position i, causal, its own keys only. `aligned`, as drafting with one cache
        does it: position i + k; row i sees step 1's keys up to row i, then, of every later step
        including its own, those of row i alone. `keys`, given as `ForwardContext.cache`, puts the
        keys of all steps so far side by side: (k + 1) · n of them. `self.head.rope(positions,
        dtype)` gives cos and sin. `ForwardContext.attn_mask` is the mask of
        `scaled_dot_product_attention`, (1, 1, n, keys); None stands for causal.

        Example, aligned, n = 2, k = 1: positions [1, 2]; the mask's rows are [1, 0, 1, 0] and [1,
        1, 0, 1], over the keys of step 1 and then those of step 2.
        """
        raise NotImplementedError
