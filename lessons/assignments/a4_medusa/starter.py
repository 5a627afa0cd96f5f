"""Assignment 4: Medusa's heads and trees. Fill in the functions; see README.md."""

from torch import Tensor

from minispec import medusa
from minispec.methods.medusa import Ranks
from minispec.model import Transformer
from minispec.sampling import OneHot
from minispec.tree import Tree


class Heads(medusa.Heads):
    """K heads of L residual blocks and a projection each. The parameters are given:

    `weight` (L, K, d, d), each a W transposed, (in, out); `bias` (L, K, 1, d); `projection`
    (K, V, d), or None where the heads end in the target's lm_head (`model.logits`). len(heads) is
    K.
    """

    def forward(self, hidden: Tensor, model: Transformer) -> Tensor:
        """Logits (K, ..., V) of hidden states (..., d), which are the target's after its norm.

        A block is x + SiLU(W x + b); each head has its own.
        """
        raise NotImplementedError


def untrained(heads: int, layers: int, model: Transformer, shared: bool) -> Heads:
    """Heads, on the model's device and in its type, that all say what the model's lm_head says:
    blocks begin as the identity, projections (none if `shared`) as a copy of lm_head."""
    raise NotImplementedError


def labels_of(tokens: list[int], prompt: int, heads: int) -> Tensor:
    """What head k should say at t: token t + k + 2, -100 where the text has ended; (n, heads).

    Rows of which a label would be a token of the prompt (the first `prompt` ones) have none at all.
    """
    raise NotImplementedError


def from_paths(root: int, paths: list[list[int]], candidates: list[list[int]]) -> Tree:
    """The tree of rank paths: (0, 2) is the best candidate of depth 1, then the third best of
    depth 2. `candidates[k]` holds the tokens of depth k + 1, best first. Nodes come in the order of
    the paths; what paths share stands once."""
    raise NotImplementedError


def propose(
    heads: Heads, model: Transformer, hidden: Tensor, root: int, paths: list[Ranks]
) -> Tree:
    """The tree of the heads' candidates below `root`, the newest token.

    `hidden` (1, d) is the target's hidden state before `root`; it is (0, d) before the first pass
    of a prompt of one token: then, as without paths, the root alone. Trees may be less deep than
    there are heads, and heads(hidden, model) is called once.
    """
    raise NotImplementedError


def expected(accuracy: Tensor, paths: list[Ranks]) -> float:
    """Tokens per pass if heads were right independently. accuracy[k, r] is the chance that head k's
    rank-r token is right; `paths` are the tree's nodes, the root apart."""
    raise NotImplementedError


def grow_tree(accuracy: Tensor, nodes: int) -> list[Ranks]:
    """The `nodes` nodes below the root that gain most by `expected`, best first; accuracies (K, R)
    fall from rank to rank. Fewer where no more gain anything. A parent comes before its child."""
    raise NotImplementedError


def typical_path(laws: Tensor | OneHot, tree: Tree, epsilon: float, delta: float) -> list[int]:
    """Typical acceptance, which is lossy: the longest path from node 0 all of whose later tokens
    have p(x) > min(ε, δ · exp(-H(p))), p being laws[parent]; of several the likeliest."""
    raise NotImplementedError
