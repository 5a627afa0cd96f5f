"""Jacobi decoding (Santilli et al. 2023) and lookahead decoding (Fu et al. 2024, arXiv 2402.02057):
several tokens a pass from the target alone, without training and without a second model.

Greedy text is the fixed point of y_i = argmax p(· | y_<i), all i at once. Jacobi decoding iterates
this map on a block of guessed tokens. Lookahead keeps the trajectory of the iteration: the n-grams
along it are good guesses later, wherever their first token comes up again.
"""

from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from minispec.cache import KVCache
from minispec.errors import UserError
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling, argmax, probs
from minispec.tree import Step, Tree
from minispec.verify import accept

# ---- Jacobi decoding -----------------------------------------------------------------------------


def jacobi(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, block: int = 8,
) -> Iterator[Step]:  # fmt: skip
    """Guess `block` tokens, replace each by what the model says there, until they stay.

    What the model has confirmed leaves the block in front, so every pass settles at least one
    token. (Despite the name, no Jacobian is computed.) Under sampling the guesses are drafts like
    any others.
    """
    check_block(block, model)
    cache = cache or model.new_cache()
    tokens = list(prompt)
    model.prefill(tokens[cache.length : -1], cache)
    guess = from_prompt(prompt, block)
    yield Step()
    while True:
        tree = Tree.chain(tokens[-1], guess[: cache.free_rows - 1])
        target = probs(model.logits(model(tree.tokens, cache)[0]), sampling)
        path, fresh = accept(target, tree, randomness)
        cache.commit(path)
        # node i said what follows it: those behind the fresh token's place are the next guess
        predicted = argmax(target)[len(path) :]
        guess = predicted + guess[len(predicted) :]
        new = tree.tokens_at(path[1:]) + [fresh]
        tokens += new
        yield Step(new, tree, path)


def check_block(block: int, model: Transformer) -> None:
    """Raise UserError for a block that is empty or does not fit into the context."""
    if not 1 <= block < model.config.context:
        raise UserError(f"block {block}: must be from 1 to {model.config.context - 1}")


def from_prompt(prompt: list[int], n: int) -> list[int]:
    """`n` tokens to begin an iteration with: the prompt's, again and again."""
    return [prompt[i % len(prompt)] for i in range(n)]


# ---- the window ----------------------------------------------------------------------------------


class Window:
    """N - 1 rows of W columns: row r, column i guesses the token at position t + i + r, where t is
    the current token's. That one is column 0 of row 0 and not stored.

    Row 0 begins with W + N - 3 tokens of the prompt; each of the first N - 2 passes adds a row.
    """

    def __init__(self, prompt: list[int], width: int, ngram: int):
        self.ngram = ngram
        self.rows = [from_prompt(prompt, width + ngram - 3)]

    @property
    def tokens(self) -> list[int]:
        return [token for row in self.rows for token in row]

    @property
    def layout(self) -> tuple[Tensor, Tensor]:
        """Distances from the current token (w,), and who sees whom (w, w)."""
        return window_layout(tuple(map(len, self.rows)))

    def predicted_by(self, nodes: int) -> list[int]:
        """The rows of a pass (of `nodes` tree nodes, then the window) that say the next row."""
        end = nodes + len(self.tokens)
        last = list(range(end - len(self.rows[-1]), end))
        return [0, *last] if len(self.rows) == 1 else last

    def advance(self, current: int, predicted: list[int]) -> list[tuple[int, ...]]:
        """Take in what the last row says; the n-grams down the columns, if there are enough rows.

        The window moves on by one position, even where the pass accepted several tokens.
        """
        if len(self.rows) < self.ngram - 1:
            self.rows = [row[1:] for row in [*self.rows, predicted]]
            return []
        grams = list(zip([current, *self.rows[0]], *self.rows[1:], predicted))
        self.rows = [*self.rows[1:], predicted]
        self.rows[0] = self.rows[0][1:]
        return grams


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept beyond a run
def window_layout(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Of rows of these lengths: each entry sees row 0 up to its own column, then its column."""
    at = [(r, i + (r == 0)) for r, length in enumerate(lengths) for i in range(length)]
    row, column = torch.tensor(at, dtype=torch.long).view(-1, 2).T
    first_row = (row == 0) & (column <= column[:, None])
    own_column = (column == column[:, None]) & (row <= row[:, None])
    return row + column, first_row | own_column


def combined_mask(tree: Tree, window: Window | None) -> tuple[Tensor, Tensor]:
    """Depth and mask of one pass over a tree and a window: blind to each other, but for the root,
    which is the current token to both."""
    if window is None:
        return tree.depth, tree.mask
    depth, seen = window.layout
    n, w = len(tree), len(depth)
    mask = torch.zeros(n + w, n + w, dtype=torch.bool)
    mask[:n, :n] = tree.mask
    mask[n:, 0] = True
    mask[n:, n:] = seen
    return torch.cat([tree.depth, depth]), mask


# ---- the pool ------------------------------------------------------------------------------------


class Pool:
    """N-grams by their first token, of each at most `most` continuations: those seen last."""

    def __init__(self, most: int):
        self.most = most
        self.known: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def add(self, gram: tuple[int, ...]) -> None:
        rest = self.known.setdefault(gram[0], OrderedDict())
        rest[gram[1:]] = None
        rest.move_to_end(gram[1:])
        while len(rest) > self.most:
            rest.popitem(last=False)

    def add_all(self, tokens: list[int], n: int, new: int) -> None:
        """The n-grams of `tokens` that end in one of its last `new`."""
        for end in range(max(len(tokens) - new + 1, n), len(tokens) + 1):
            self.add(tuple(tokens[end - n : end]))

    def after(self, token: int) -> list[list[int]]:
        """What may follow, seen last first."""
        return [list(rest) for rest in reversed(self.known.get(token, {}))]


# ---- lookahead decoding --------------------------------------------------------------------------


def lookahead(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, window: int = 5, ngram: int = 4, guesses: int = 5,
    pool_from_prompt: bool = False,
) -> Iterator[Step]:  # fmt: skip
    """Fu et al. 2024, algorithms 2 to 4: W = `window`, N = `ngram`, G = `guesses`.

    A pass carries the current token, the window, and the pool's continuations of the current token
    merged into a trie. With `pool_from_prompt` the n-grams of prompt and output join the pool.
    """
    cache = cache or model.new_cache()
    check_window(window, ngram, cache.capacity)
    tokens = list(prompt)
    model.prefill(tokens[cache.length : -1], cache)
    ahead, pool = Window(prompt, window, ngram), Pool(guesses)
    if pool_from_prompt:
        pool.add_all(tokens, ngram, len(tokens))
    yield Step()
    while True:
        tree = Tree.merged(tokens[-1], pool.after(tokens[-1])).first(cache.free_rows)
        rows = ahead.rows
        path, fresh, predicted = one_pass(model, cache, tree, ahead, sampling, randomness)
        if predicted:
            for gram in ahead.advance(tokens[-1], predicted):
                pool.add(gram)
        new = tree.tokens_at(path[1:]) + [fresh]
        tokens += new
        if pool_from_prompt:
            pool.add_all(tokens, ngram, len(new))
        yield Step(new, tree, path, rows if predicted else [])


def one_pass(
    model: Transformer, cache: KVCache, tree: Tree, ahead: Window | None, sampling: Sampling,
    randomness: Randomness,
) -> tuple[list[int], int, list[int]]:  # fmt: skip
    """Score, accept and commit: the path, the fresh token, and what the window's last row says
    (nothing where the window does not fit into the cache any more)."""
    if ahead and len(tree) + len(ahead.tokens) > cache.free_rows:
        ahead = None
    depth, mask = combined_mask(tree, ahead)
    hidden = model(tree.tokens + (ahead.tokens if ahead else []), cache, depth, mask)[0]
    n, last = len(tree), ahead.predicted_by(len(tree)) if ahead else []
    # the rows between say nothing new
    target = probs(model.logits(hidden[[*range(n), *last]] if last else hidden[:n]), sampling)
    path, fresh = accept(target, tree, randomness)
    cache.commit(path)
    return path, fresh, argmax(target)[n:]


def check_window(window: int, ngram: int, free_rows: int) -> None:
    """Raise UserError for a window that is empty or would never fit into the cache."""
    for name, value, least in (("window", window, 1), ("ngram", ngram, 2)):
        if value < least:
            raise UserError(f"{name} {value}: must be at least {least}")
    rows = (ngram - 1) * window
    if rows >= free_rows:
        raise UserError(
            f"window {window}, ngram {ngram}: {rows} rows never fit into a cache of {free_rows}: "
            "take smaller ones"
        )
