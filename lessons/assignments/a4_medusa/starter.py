"""Assignment 4: Medusa's heads and trees. Fill in the functions; see README.md."""

from torch import Tensor, nn

from minispec.methods.vocabulary import DraftHead
from minispec.model import Transformer
from minispec.sampling import OneHot
from minispec.tree import RankPath, Tree, TreePolicy


class ResBlock(nn.Module):
    """x + SiLU(W x + b). W and b are those of an nn.Linear called `linear`."""

    def __init__(self, size: int):
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
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
        raise NotImplementedError

    def forward(self, hidden: Tensor, draft_head: Transformer | DraftHead) -> Tensor:
        """Logits (K, ..., V) of hidden states (..., d), which are the target's after its norm.
        `draft_head.logits` is the target's lm_head, or some of its rows."""
        raise NotImplementedError


def new_heads(heads: int, layers: int, model: Transformer, shared: bool) -> MedusaHeads:
    """Heads, on the model's device and in its type, that all say what the model's lm_head says:
    blocks begin as the identity, projections (none if `shared`) as a copy of lm_head."""
    raise NotImplementedError


def labels_of(tokens: list[int], prompt: int, heads: int) -> Tensor:
    """What head k should say at t: token t + k + 2, -100 where the text has ended; (n, heads).

    A row that has a label within the prompt (the first `prompt` tokens) has no labels at all.
    """
    raise NotImplementedError


def from_paths(root: int, paths: list[list[int]], candidates: list[list[int]]) -> Tree:
    """The tree of rank paths: (0, 2) is the best candidate of depth 1, then the third best of
    depth 2. `candidates[k]` holds the tokens of depth k + 1, best first. Nodes come in the order of
    the paths; what paths share stands once."""
    raise NotImplementedError


def propose(
    heads: MedusaHeads, draft_head: DraftHead, hidden: Tensor, root: int,
    tree: list[RankPath] | TreePolicy, free_rows: int,
) -> Tree:  # fmt: skip
    """The tree of the heads' candidates below `root`, the newest token: the first `free_rows` of
    the rank paths `tree`.

    `hidden` (1, d) is the target's hidden state before `root`; it is (0, d) before the first pass
    of a prompt of one token: then, as without paths, the root stands alone. A tree may be less deep
    than there are heads. Call heads(hidden, draft_head) once; `draft_head.to_full_ids(j)` turns a
    tensor of indices into tokens. Not graded: a policy that chooses.
    """
    raise NotImplementedError


def expected_tokens(accuracy: Tensor, paths: list[RankPath]) -> float:
    """Tokens per pass if heads were right independently. accuracy[k, r] is the chance that head k's
    rank-r token is right; `paths` are the tree's nodes without the root."""
    raise NotImplementedError


def grow_tree(accuracy: Tensor, nodes: int) -> list[RankPath]:
    """The `nodes` nodes below the root that gain most by `expected_tokens`, best first; accuracies
    (K, R) fall from rank to rank. Fewer where no more gain anything. A parent comes before its
    child."""
    raise NotImplementedError


def typical_path(target: Tensor | OneHot, tree: Tree, epsilon: float, delta: float) -> list[int]:
    """Typical acceptance, which is lossy: the longest path from node 0 all of whose later tokens
    have p(x) > min(ε, δ · exp(-H(p))), p being target[parent]; of several the likeliest."""
    raise NotImplementedError
