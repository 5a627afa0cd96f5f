"""Assignment 9: an EAGLE-3 head and training-time test. Fill in the functions; see README.md."""

from torch import Tensor

from minispec import distill
from minispec.distill import AllSteps
from minispec.methods import eagle3
from minispec.model import ForwardContext


def default_layers(n: int) -> tuple[int, ...]:
    """The layers of a target with n whose inputs the head reads: 2, n / 2 (rounded down) and n - 3,
    counted from 0, ascending. For a small n, a number is moved to the nearest layer that there is,
    and layers that coincide count once.

    >>> default_layers(30)
    (2, 15, 27)
    >>> default_layers(2)
    (0, 1)
    """
    raise NotImplementedError


class Midlayer(eagle3.Midlayer):
    """The head's block: `input_layernorm`, `hidden_norm`, `self_attn` (which reads 2d),
    `post_attention_layernorm` and `mlp` are given, and `norm_before_residual`."""

    def forward(self, hidden: Tensor, embedded: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states (B, n, d) and embedded tokens (B, n, d) -> (B, n, d). The attention
        `self.self_attn(x, ctx)` reads [norm(embedded); norm(hidden)]; each has its own norm. Its
        result is added to `hidden`, or to norm(hidden) if `norm_before_residual`. Then the MLP, as
        in llama: it reads what `post_attention_layernorm` makes of its input, and is added to it.

        Example: for hidden states and embedded tokens (1, 5, 16) the attention reads (1, 5, 32),
        the tokens in columns 0 to 15.
        """
        raise NotImplementedError


class Eagle3Head(eagle3.Eagle3Head):
    """A head with `fc`, `midlayer`, `norm` and an `lm_head` of its own; `target_size` is d of the
    target."""

    def project_features(self, hidden: Tensor) -> Tensor:
        """The target's hidden states, each followed by the three that entered the chosen layers,
        (..., n, 4d) -> (..., n, d), what the head reads in its first step.

        Example: of columns 0 to 63 for d = 16, `fc` reads columns 16 to 63.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Outputs (..., d) -> logits (..., number of the head's tokens).

        Example: outputs are not normed when the next step reads them, but they are here.
        """
        raise NotImplementedError


def read_ids(where: str, tensors: dict[str, Tensor], count: int, vocab: int) -> list[int]:
    """The target's tokens that the rows of a head's lm_head stand for, of `vocab`.

    `tensors` are those of a file. `d2t` (count,) holds each row's token *minus the row's number*;
    without it, row i is token i. `t2d` (vocab,), if there, is true for these tokens. Both are
    removed from `tensors`. `where` names the file; it is for messages.
    Raises minispec.cli.UserError if they are not `count` different tokens below `vocab`, or if t2d
    marks others.

    >>> read_ids("a head", {"d2t": torch.tensor([2, 2, 5])}, 3, 8)
    [2, 3, 7]
    """
    raise NotImplementedError


class MTPLoss(distill.MTPLoss):
    """Documents -> the loss. `self.head`, `self.target`, `self.weights` (Σ = 1, one a step),
    `self.draft_head` (the head's tokens, with the target's rows of lm_head), `self.gather` and
    `self.logits` (the head's) are given. `self.aligned` and `self.soft` are true."""

    def __call__(self, index: Tensor) -> Tensor:
        """Σ weight_k · CE_k, in nats, for documents `index` (B,).

        `states, tokens, labels = self.gather(index)`: the target's states (B, n + steps, 4d), the
        tokens, and each step's labels (B, n), in the target's numbers, -100 where none counts. A
        row counts if its label is one of the head's tokens (`self.draft_head.to_subset_ids` gives
        -100 for others). CE_k is the mean over the rows that count, 0 if there are none, of the
        cross-entropy between the target's distribution over the head's tokens and the head's. For
        step k (from 1), row i's distribution of the target comes from its last state at token
        i + k: `self.draft_head.logits(last)` are the target's logits over the head's tokens. What
        the head says comes from `self.outputs(states[:, :n], tokens)`.

        Example: two steps with CE_1 = 1.0 and CE_2 = 2.0 and the weights 0.6, 0.4 give 1.4.
        """
        raise NotImplementedError

    def outputs(self, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
        """Training-time test: the head's outputs (B, n, d) for every step. `hidden` (B, n, 4d) are
        the target's states, tokens (B, n + steps or more).

        Step k (from 1) at row i reads the output of step k - 1 there (at first, what
        `self.head.project_features` makes of the states), and the true token i + k, embedded by
        `self.head.embed(tokens, self.target)`. `self.head.run_block(hidden, embedded, ctx)` takes
        what `plan` returns. All steps share one AllSteps(). Gradients flow through all of them.

        Example: at row 0, step 2 reads step 1's output at row 0 and token 2, and says token 3.
        """
        raise NotImplementedError

    def plan(self, n: int, k: int, keys: AllSteps) -> ForwardContext:
        """Positions and mask of step k + 1 (k from 0), for n rows.

        Row i stands at position i + k. It sees rows 0 to i of step 1, then, of every later step
        including its own, row i only. `keys`, given as ForwardContext.cache, puts the keys of all
        steps so far side by side: (k + 1) · n of them. ForwardContext.attn_mask is (1, 1, n, keys);
        `self.head.rope(positions, dtype)`, positions (1, n), gives cos and sin.

        Example, n = 2, k = 1: positions [1, 2]; the mask's rows are [1, 0, 1, 0] and [1, 1, 0, 1].
        """
        raise NotImplementedError
