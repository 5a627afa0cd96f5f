"""Assignment 5: lookahead's window and pool. Fill in the functions; see README.md."""

from collections.abc import Iterator

from torch import Tensor

from minispec.cache import KVCache
from minispec.methods import lookahead as package
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling
from minispec.tree import Step, Tree


def jacobi(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, block: int = 8,
) -> Iterator[Step]:  # fmt: skip
    """Guess `block` tokens, replace each by what the model says there, until they stay.

    Never ending: first an empty `Step()` for the prefill, then one Step(new tokens, tree, path) a
    round. The first guess is the prompt's tokens, over and over (`package.initial_guess`). A
    round's tree is the chain of the guess. The next guess is what the argmax says behind the new
    tokens, filled up with the last tokens of the old guess. Not graded: the end of the context.

    Example, block 3: after token 7 the guess is 4, 5, 6, and the argmax along 7, 4, 5, 6 says 4, 9,
    2, 8. So 4 is accepted and 9 the fresh token; 2, 8 follow it, and the next guess is 2, 8, 6.
    """
    raise NotImplementedError


def merged(root: int, chains: list[list[int]]) -> Tree:
    """The trie of all chains below the root: what they share stands once. Nodes in the order of
    their first appearance.

    >>> tree = merged(9, [[1, 2], [1, 3]])
    >>> tree.tokens, tree.parents
    ([9, 1, 2, 3], [-1, 0, 1, 1])
    """
    raise NotImplementedError


def window_layout(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """For a window with rows of these lengths: each entry's distance from the current token (w,),
    and who sees whom (w, w), bool; entries row by row.

    Row r, column i guesses the token at distance i + r. Column 0 of row 0 is the current token,
    which is not stored: row 0 begins with column 1, all others with column 0. An entry sees row 0
    up to its own column, then its column from row 1 down to itself.

    >>> distance, mask = window_layout((2, 3))  # row 0 has columns 1 and 2, row 1 has 0, 1 and 2
    >>> distance.tolist()
    [1, 2, 1, 2, 3]
    >>> mask.int().tolist()[3]  # row 1, column 1: row 0 up to column 1, then itself
    [1, 0, 0, 1, 0]
    """
    raise NotImplementedError


def combined_mask(tree: Tree, window: package.Window | None) -> tuple[Tensor, Tensor]:
    """Depth (n,) and mask (n, n) of one pass over a tree's nodes and, behind them, a window's
    entries (`window.layout` is their distance and mask). The two are blind to each other, except
    that the root, as the current token, is seen by both. A window of None is no window.

    Example: a root with one guess and a window of 2 entries. Row 1, the guess, sees columns 0 and
    1; row 2, the first entry, sees columns 0 and 2.
    """
    raise NotImplementedError


class Window(package.Window):
    """`self.rows`, at most N - 1 (N is `self.ngram`), row 0 one entry shorter than the others."""

    def predicting_rows(self, nodes: int) -> list[int]:
        """The rows of a pass (`nodes` tree nodes, then the window row by row) that say the next
        row: those of the last row, and while row 0 is alone the current token (pass row 0) too.

        Example: behind 4 nodes, rows of 2 and 3 entries take up pass rows 4 to 8. The last row's
        are [6, 7, 8]; if only row 0 were there, [0, 4, 5].
        """
        raise NotImplementedError

    def advance(self, current: int, predicted: list[int]) -> list[tuple[int, ...]]:
        """Take in what the last row says; the n-grams down the columns, if there are enough rows.

        With fewer than N - 1 rows, `predicted` becomes one more row, and every row loses its first
        entry. Otherwise column i gives the N-gram (row 0, …, row N - 2, predicted) at i,
        `current` being column 0 of row 0; then all rows move up, and the new row 0 loses its first
        entry.

        Example, N = 3: rows [1, 2] and [3, 4, 5], current 0, predicted [6, 7, 8] give (0, 3, 6),
        (1, 4, 7), (2, 5, 8), and the rows become [4, 5] and [6, 7, 8].
        """
        raise NotImplementedError


class Pool:
    """N-grams by their first token, for each at most `limit` continuations: those seen last."""

    def __init__(self, limit: int):
        """Example: Pool(2) keeps two continuations of each token."""
        raise NotImplementedError

    def add(self, gram: tuple[int, ...]) -> None:
        """Remember it as the latest; where a first token has too many, drop the one seen least
        recently.

        >>> pool = Pool(2)
        >>> for gram in (1, 2), (1, 3), (1, 2), (1, 4):
        ...     pool.add(gram)
        >>> pool.after(1)  # 2 was seen again after 3
        [[4], [2]]
        """
        raise NotImplementedError

    def add_all(self, tokens: list[int], n: int, new: int) -> None:
        """Add the n-grams of `tokens` that end in one of its last `new`, from left to right.

        Example: add_all([5, 6, 7, 8], n=2, new=2) adds (6, 7), then (7, 8).
        """
        raise NotImplementedError

    def after(self, token: int) -> list[list[int]]:
        """What may follow, latest first. The caller may change the lists.

        Example: after add((1, 2, 3)) and add((1, 4, 5)), after(1) is [[4, 5], [2, 3]] and after(2)
        [].
        """
        raise NotImplementedError


def lookahead(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, window: int = 5, ngram: int = 4, guesses: int = 5,
    pool_from_prompt: bool = False,
) -> Iterator[Step]:  # fmt: skip
    """Fu et al. 2024, algorithms 2 to 4, never ending: first an empty `Step()` for the prefill,
    then one Step(new tokens, tree, path) a round. W = `window`, N = `ngram`, G = `guesses`.

    The window begins with the prompt (`Window(prompt, window, ngram)`), the pool is empty or, with
    `pool_from_prompt`, holds the prompt's n-grams. A round's tree merges the pool's continuations
    of the newest token. One pass scores the tree and, behind it, the window's tokens; `accept`
    (path, next token, chances) sees the tree's rows only, and only its path is committed. What the
    model says at `predicting_rows` goes into `advance`, the n-grams that come out of it into the
    pool, and with `pool_from_prompt` those that end in new tokens as well. Not graded: the end of
    the context.

    Example: the newest token is 7, and the pool knows 4, 5 and 4, 6 after it. The tree is 7 with
    the child 4, which has the children 5 and 6. The target says 4 and then 8, so the new tokens are
    [4, 8]; 5, 6 and the window's rows are forgotten.
    """
    raise NotImplementedError
