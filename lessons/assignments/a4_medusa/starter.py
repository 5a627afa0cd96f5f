"""Assignment 4: Medusa's heads and trees. Fill in the functions; see README.md."""

from torch import Tensor, nn

from minispec.methods.adaptive import Policy
from minispec.methods.vocabulary import DraftHead
from minispec.model import Transformer
from minispec.sampling import OneHot
from minispec.tree import RankPath, Tree


class ResBlock(nn.Module):
    """x + SiLU(W x + b). W and b are those of an nn.Linear called `linear`."""

    def __init__(self, size: int):
        """Example: ResBlock(16) has `linear.weight` (16, 16) and `linear.bias` (16,)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size).

        Example: with W and b 0 it returns x.
        """
        raise NotImplementedError


class MedusaHeads(nn.ModuleList):
    """K = `heads` heads of `layers` residual blocks each, then a projection to `vocab_size` tokens
    without a bias; with `vocab_size` None there are no projections, and the heads end in the
    target's lm_head.

    Each head is an nn.Sequential, so the parameters have the names of published checkpoints: block
    i of head k is `k.i.linear.weight` and `k.i.linear.bias`, its projection `k.{layers}.weight`.
    len(heads) is K.
    """

    def __init__(self, heads: int, layers: int, hidden_size: int, vocab_size: int | None):
        """The heads, as described above.

        >>> [tuple(p.shape) for p in MedusaHeads(2, 0, 16, 24).parameters()]  # two projections
        [(24, 16), (24, 16)]
        """
        raise NotImplementedError

    def forward(self, hidden: Tensor, draft_head: Transformer | DraftHead) -> Tensor:
        """Logits (K, ..., V) of hidden states (..., d), which are the target's after its norm.
        `draft_head.logits` is the target's lm_head, or some of its rows.

        Example: 3 heads on hidden states (1, 5, 16), with 24 tokens, give (3, 1, 5, 24).
        """
        raise NotImplementedError


def new_heads(heads: int, layers: int, model: Transformer, shared: bool) -> MedusaHeads:
    """Heads, on the model's device and in its type, that all say what the model's lm_head says:
    blocks begin as the identity, projections (none if `shared`) as a copy of lm_head.

    Example: new_heads(3, 1, model, False)(hidden, model)[k] equals model.logits(hidden), for k from
    0 to 2.
    """
    raise NotImplementedError


def labels_of(tokens: list[int], prompt: int, heads: int) -> Tensor:
    """What head k should say at t: token t + k + 2, -100 where the text has ended; (n, heads).

    A row that has a label within the prompt (the first `prompt` tokens) has no labels at all.

    >>> labels_of([10, 11, 12, 13, 14], prompt=3, heads=2).tolist()
    [[-100, -100], [13, 14], [14, -100], [-100, -100], [-100, -100]]
    """
    raise NotImplementedError


def from_paths(root: int, paths: list[list[int]], candidates: list[list[int]]) -> Tree:
    """The tree of rank paths: (0, 2) is the best candidate of depth 1, then the third best of
    depth 2. `candidates[k]` holds the tokens of depth k + 1, best first. Nodes come in the order of
    the paths; what paths share stands once.

    >>> tree = from_paths(9, [[0], [1], [0, 2]], [[10, 11], [20, 21, 22]])
    >>> tree.tokens, tree.parents
    ([9, 10, 11, 22], [-1, 0, 0, 1])
    """
    raise NotImplementedError


def propose(
    heads: MedusaHeads, draft_head: DraftHead, hidden: Tensor, root: int,
    paths: list[RankPath] | Policy, free_rows: int,
) -> Tree:  # fmt: skip
    """The tree of the heads' candidates below `root`, the newest token: the first `free_rows` of
    the rank `paths`.

    `hidden` (1, d) is the target's hidden state before `root`; it is (0, d) before the first pass
    of a prompt of one token: then, as without paths, the root stands alone. A tree may be less deep
    than there are heads. Call heads(hidden, draft_head) once; `draft_head.to_full_ids(j)` turns a
    tensor of indices into tokens. Not graded: a policy that chooses.

    Example: the best tokens of head 0 are 4, 7, … and those of head 1 are 2, 5, …. The paths (0,),
    (0, 1) and (1,) give the tokens root, 4, 5, 7, with the parents -1, 0, 1, 0.
    """
    raise NotImplementedError


def expected_tokens(accuracy: Tensor, paths: list[RankPath]) -> float:
    """Tokens per pass if heads were right independently. accuracy[k, r] is the chance that head k's
    rank-r token is right; `paths` are the tree's nodes without the root.

    >>> expected_tokens(torch.tensor([[0.5, 0.25], [0.5, 0.0]]), [(0,), (1,), (0, 0)])
    2.0
    """
    raise NotImplementedError


def grow_tree(accuracy: Tensor, nodes: int) -> list[RankPath]:
    """The `nodes` nodes below the root that gain most by `expected_tokens`, best first; accuracies
    (K, R) fall from rank to rank. Fewer where no more gain anything. A parent comes before its
    child.

    >>> grow_tree(torch.tensor([[0.5, 0.125], [0.5, 0.25]]), 3)  # they gain 1/2, 1/4 and 1/8
    [(0,), (0, 0), (0, 1)]
    """
    raise NotImplementedError


def typical_path(target: Tensor | OneHot, tree: Tree, epsilon: float, delta: float) -> list[int]:
    """Typical acceptance, which is lossy: the longest path from node 0 all of whose later tokens
    have p(x) > min(ε, δ · exp(-H(p))), p being target[parent]; of several the likeliest.

    Example: ε = 0.09, δ = 0.3, and p is uniform over 4 tokens, so exp(-H) = 1/4. The bound is
    min(0.09, 0.075), and a child with p(x) = 0.25 is accepted.
    """
    raise NotImplementedError
