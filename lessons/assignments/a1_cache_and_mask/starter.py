"""Assignment 1: the cache and the tree's mask. Fill in the functions; see README.md."""

from torch import Tensor

from minispec import cache


def layout(parents: tuple[int, ...]) -> tuple[list[int], Tensor, Tensor]:
    """The depths of a tree's nodes, as a list and as a tensor (n,) of integers, and its mask
    (n, n), bool.

    `parents[i]` is the parent of node i, -1 for the root, which is node 0; parents come before
    their children. mask[i, j] is True where node i sees node j: its ancestors and itself.
    """
    raise NotImplementedError


class KVCache(cache.KVCache):
    """Keys and values: `self.k` and `self.v`, lists of (batch, capacity, heads, head_dim), one
    for each layer.

    `self.lengths` holds one number per sequence (here there is one sequence, and `self.length` is
    its number): rows [0, length) are committed, those behind them are scratch. Allocation and
    writing are given; you decide where a pass goes, what it sees and what stays.
    """

    def place(self, n: int, depth: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where the `n` rows of the next pass go, and what they see.

        Returns slots (1, n), the cache rows to write, right behind the committed ones; positions
        (1, n), where a row of depth 0 stands at `length`; and visible (1, 1, n, length + n), bool:
        every row sees the committed rows, and row i sees scratch row j if mask[i, j]. ValueError if
        the rows do not fit.
        """
        raise NotImplementedError

    def commit(self, path: list[int]) -> None:
        """Keep scratch rows `path` (ascending), in order, right after the committed ones.

        Scratch row 0 is cache row `length`. K was rotated already: rows are moved, not changed.
        """
        raise NotImplementedError

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on; nothing is moved."""
        raise NotImplementedError
