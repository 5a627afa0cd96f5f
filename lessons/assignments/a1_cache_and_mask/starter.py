"""Assignment 1: the cache and the tree's mask. Fill in the functions; see README.md."""

from torch import Tensor

from minispec import cache


def layout(parents: tuple[int, ...]) -> tuple[list[int], Tensor, Tensor]:
    """The depths of a tree's nodes, as a list and as a tensor (n,) of integers, and its mask
    (n, n), bool.

    `parents[i]` is the parent of node i, -1 for the root, which is node 0; parents come before
    their children. mask[i, j] is True where node i sees node j: its ancestors and itself.

    >>> depths, depth, mask = layout((-1, 0, 0, 1))  # two children, the first has a child
    >>> depths
    [0, 1, 1, 2]
    >>> mask.int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    """
    raise NotImplementedError


class KVCache(cache.KVCache):
    """Keys and values: `self.k` and `self.v`, lists of (1, capacity, heads, head_dim), one for each
    layer.

    Rows [0, self.length) are committed, those behind them are scratch. Allocation and writing are
    given; you decide where a pass goes, what it sees and what stays.
    """

    def place(self, n: int, depth: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where the `n` rows of the next pass go, and what they see.

        Returns slots (1, n), the cache rows to write, right behind the committed ones; positions
        (1, n), where a row of depth 0 stands at `length`; and visible (1, 1, n, length + n), bool:
        every row sees the committed rows, and row i sees scratch row j if mask[i, j]. ValueError if
        the rows do not fit.

        Example: 3 rows are committed and a root with two children comes, depths 0, 1, 1. Slots are
        3, 4, 5, positions 3, 4, 4, and the second child sees rows 0, 1, 2, 3 and 5.
        """
        raise NotImplementedError

    def commit(self, path: list[int]) -> None:
        """Keep scratch rows `path` (ascending), in order, right after the committed ones.

        Scratch row 0 is cache row `length`. K was rotated already: rows are moved, not changed.

        Example: 3 rows are committed. commit([0, 2]) leaves cache row 3 where it is, copies row 5
        to row 4, and sets `length` to 5.
        """
        raise NotImplementedError

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on; nothing is moved.

        Example: 5 rows are committed. truncate(3) sets `length` to 3.
        """
        raise NotImplementedError
