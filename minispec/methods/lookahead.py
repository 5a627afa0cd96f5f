"""Jacobi decoding (Santilli et al. 2023) and lookahead decoding (Fu et al. 2024, arXiv 2402.02057):
several tokens per pass, without training and without a second model.

Greedy text is the fixed point of y_i = argmax p(· | y_<i) for all i at once. Jacobi decoding
iterates this map on a block of guessed tokens. Lookahead decoding keeps the n-grams along the
iteration's trajectory: they are good guesses later, when their first token occurs again.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated

import torch
from torch import Tensor

from minispec.cache import KVCache
from minispec.cli import UserError
from minispec.methods.declaration import Option, method
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling, argmax, probs
from minispec.tree import Step, Tree
from minispec.verify import Rule, accept

Block = Annotated[int, Option("number of tokens guessed at once", least=1)]
Columns = Annotated[int, Option("W, number of columns of the window", least=1)]
Ngram = Annotated[int, Option("N, length of the n-grams", least=1)]
Guesses = Annotated[int, Option("G, guesses verified per pass", least=0)]
FromPrompt = Annotated[bool, Option("add the n-grams of prompt and output to the pool")]
SETTINGS = (  # W, N and G to try, from the smallest values up
    (1, 2, 0), (1, 2, 1), (3, 2, 2), (1, 3, 2), (3, 3, 3), (2, 4, 1), (5, 4, 5), (10, 5, 10),
)  # fmt: skip

# ---- Jacobi decoding -----------------------------------------------------------------------------


@method(
    "jacobi", cases=[{"block": 3}, {"block": 1}, {"block": 9}],
    checks=(lambda model, cache, options: check_block(options["block"], model),),
)  # fmt: skip
def jacobi(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, block: Block = 8, rule: Rule = accept,
) -> Iterator[Step]:  # fmt: skip
    """Guess `block` tokens, then replace each with the model's prediction until they stop changing.

    Confirmed tokens leave the front of the block, and every pass confirms at least one token.
    (Despite the name, no Jacobian is computed.) Under sampling the guesses are drafts like any
    others.
    """
    check_block(block, model)
    cache = cache or model.new_cache()
    tokens = list(prompt)
    model.prefill(tokens[cache.length : -1], cache)
    guess = initial_guess(prompt, block)
    yield Step()
    while True:
        tree = Tree.chain(tokens[-1], guess[: cache.free_rows - 1])
        target = probs(model.logits(model(tree.tokens, cache)[0]), sampling)
        path, next_token, *asked = rule(target, tree, randomness)
        cache.commit(path)
        # node i predicts the token after it; later predictions are the next guess
        predicted = argmax(target)[len(path) :]
        guess = predicted + guess[len(predicted) :]
        new = tree.tokens_at(path[1:]) + [next_token]
        tokens += new
        yield Step(new, tree, path, *asked)


def check_block(block: int, model: Transformer) -> None:
    """Raise UserError if the block is empty or does not fit into the context."""
    if not 1 <= block < model.config.context:
        raise UserError(f"block {block}: must be from 1 to {model.config.context - 1}")


def initial_guess(prompt: list[int], n: int) -> list[int]:
    """`n` tokens to start the iteration from: the prompt, repeated."""
    return [prompt[i % len(prompt)] for i in range(n)]


# ---- the window ----------------------------------------------------------------------------------


class Window:
    """The lookahead branch: N - 1 rows of W columns. Row r, column i guesses the token at position
    t + i + r, where t is the current token's position. Column 0 of row 0 is the current token and
    is not stored.

    Row 0 starts with W + N - 3 tokens of the prompt; each of the first N - 2 passes adds a row.
    """

    def __init__(self, prompt: list[int], width: int, ngram: int):
        self.ngram = ngram
        self.rows = [initial_guess(prompt, width + ngram - 3)]

    @property
    def tokens(self) -> list[int]:
        return [token for row in self.rows for token in row]

    @property
    def layout(self) -> tuple[Tensor, Tensor]:
        """Distance of each entry from the current token (w,), and the mask (w, w)."""
        return window_layout(tuple(map(len, self.rows)))

    def predicting_rows(self, nodes: int) -> list[int]:
        """Rows of a pass that predict the window's next row; `nodes` tree nodes come first."""
        end = nodes + len(self.tokens)
        last = list(range(end - len(self.rows[-1]), end))
        return [0, *last] if len(self.rows) == 1 else last

    def advance(self, current: int, predicted: list[int]) -> list[tuple[int, ...]]:
        """Add the `predicted` row. Once there are N - 1 rows, return the n-grams down the columns.

        The window moves by one position, even if the pass accepted several tokens.
        """
        if len(self.rows) < self.ngram - 1:
            self.rows = [row[1:] for row in [*self.rows, predicted]]
            return []
        grams = list(zip([current, *self.rows[0]], *self.rows[1:], predicted))
        self.rows = [*self.rows[1:], predicted]
        self.rows[0] = self.rows[0][1:]
        return grams


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # cached tensors outlive the run
def window_layout(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """`Window.layout` for rows of these lengths. Each entry attends to row 0 up to its own column,
    then down its column."""
    cells = [(r, i + (r == 0)) for r, length in enumerate(lengths) for i in range(length)]
    row, column = torch.tensor(cells, dtype=torch.long).view(-1, 2).T
    first_row = (row == 0) & (column <= column[:, None])
    own_column = (column == column[:, None]) & (row <= row[:, None])
    return row + column, first_row | own_column


def combined_mask(tree: Tree, window: Window | None) -> tuple[Tensor, Tensor]:
    """Depth and mask of one pass over a tree and a window. They cannot attend to each other, but
    both attend to the root, which is the current token."""
    if window is None:
        return tree.depth, tree.mask
    window_depth, window_mask = window.layout
    n, w = len(tree), len(window_depth)
    mask = torch.zeros(n + w, n + w, dtype=torch.bool)
    mask[:n, :n] = tree.mask
    mask[n:, 0] = True
    mask[n:, n:] = window_mask
    return torch.cat([tree.depth, window_depth]), mask


# ---- the pool ------------------------------------------------------------------------------------


class Pool:
    """N-grams by first token. Each first token keeps its `limit` most recent continuations."""

    def __init__(self, limit: int):
        self.limit = limit
        self.continuations: dict[int, dict[tuple[int, ...], None]] = {}  # the oldest first

    def add(self, gram: tuple[int, ...]) -> None:
        rest = self.continuations.setdefault(gram[0], {})
        rest.pop(gram[1:], None)
        rest[gram[1:]] = None
        if len(rest) > self.limit:
            del rest[next(iter(rest))]

    def add_all(self, tokens: list[int], n: int, new: int) -> None:
        """Add the n-grams of `tokens` that end in one of its last `new` tokens."""
        for end in range(max(len(tokens) - new + 1, n), len(tokens) + 1):
            self.add(tuple(tokens[end - n : end]))

    def after(self, token: int) -> list[list[int]]:
        """Continuations of `token`, most recent first."""
        return [list(rest) for rest in reversed(self.continuations.get(token, {}))]


# ---- lookahead decoding --------------------------------------------------------------------------


@method(
    "lookahead",
    cases=[{"window": w, "ngram": n, "guesses": g, "pool_from_prompt": pool}
           for w, n, g in SETTINGS for pool in (False, True)],
    bench=[{"window": n, "ngram": 4 + (n > 5), "guesses": n} for n in (5, 10, 15)],
    checks=(lambda _, cache, o: check_window(o["window"], o["ngram"], cache.capacity),),
)  # fmt: skip
def lookahead(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, window: Columns = 5, ngram: Ngram = 4, guesses: Guesses = 5,
    pool_from_prompt: FromPrompt = False, rule: Rule = accept,
) -> Iterator[Step]:  # fmt: skip
    """Fu et al. 2024, algorithms 2 to 4: W = `window`, N = `ngram`, G = `guesses`.

    A pass carries the current token, the window, and the pool's continuations of the current token
    merged into a trie. With `pool_from_prompt`, n-grams of the prompt and output join the pool.
    """
    cache = cache or model.new_cache()
    check_window(window, ngram, cache.capacity)
    tokens = list(prompt)
    model.prefill(tokens[cache.length : -1], cache)
    branch, pool = Window(prompt, window, ngram), Pool(guesses)
    if pool_from_prompt:
        pool.add_all(tokens, ngram, len(tokens))
    yield Step()
    while True:
        tree = Tree.merged(tokens[-1], pool.after(tokens[-1])).first(cache.free_rows)
        rows = branch.rows
        (path, next_token, *asked), predicted = score_and_accept(
            model, cache, tree, branch, sampling, randomness, rule
        )
        if predicted:
            for gram in branch.advance(tokens[-1], predicted):
                pool.add(gram)
        new = tree.tokens_at(path[1:]) + [next_token]
        tokens += new
        if pool_from_prompt:
            pool.add_all(tokens, ngram, len(new))
        yield Step(new, tree, path, *asked, window=rows if predicted else [])


def score_and_accept(
    model: Transformer, cache: KVCache, tree: Tree, window: Window | None, sampling: Sampling,
    randomness: Randomness, rule: Rule,
) -> tuple[tuple, list[int]]:  # fmt: skip
    """Score, accept and commit. Returns what the rule returns, and the window's next row (empty if
    the window no longer fits into the cache)."""
    if window and len(tree) + len(window.tokens) > cache.free_rows:
        window = None
    depth, mask = combined_mask(tree, window)
    hidden = model(tree.tokens + (window.tokens if window else []), cache, depth, mask)[0]
    n, last = len(tree), window.predicting_rows(len(tree)) if window else []
    # of the window, only the last row is needed
    target = probs(model.logits(hidden[[*range(n), *last]] if last else hidden[:n]), sampling)
    outcome = rule(target, tree, randomness)
    cache.commit(outcome[0])
    return outcome, argmax(target)[n:]


def check_window(window: int, ngram: int, capacity: int) -> None:
    """Raise UserError if the n-grams are too short, or the window can never fit into the cache."""
    if ngram < 2:
        raise UserError(f"ngram {ngram}: must be at least 2")
    rows = (ngram - 1) * window
    if rows >= capacity:
        raise UserError(
            f"window {window}, ngram {ngram}: {rows} rows cannot fit into a cache of {capacity}; "
            "use smaller values"
        )
