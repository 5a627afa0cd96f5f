"""Jacobi decoding (Santilli et al. 2023) and lookahead decoding (Fu et al. 2024, arXiv 2402.02057):
several tokens a pass from the target alone, without training and without a second model.

Greedy text is the fixed point of y_i = argmax p(· | y_<i), all i at once. Jacobi decoding iterates
this map on a block of guessed tokens. Lookahead keeps the trajectory of the iteration: the n-grams
along it are good guesses later, wherever their first token comes up again.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush

import torch
from torch import Tensor

from minispec.cache import KVCache
from minispec.cost import cost_curve
from minispec.errors import UserError
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling, best, probs
from minispec.tree import Step, Tree
from minispec.verify import accept

# ---- Jacobi decoding -----------------------------------------------------------------------------


def jacobi(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, block: int = 8,
) -> Iterator[Step]:  # fmt: skip
    """Guess `block` tokens, replace each by what the model says there, until they stay.

    What the model has confirmed leaves the block in front; so every pass settles one token at
    least, and no Jacobian is anywhere. Under sampling the guesses are drafts like any others.
    """
    if not 1 <= block < model.config.context:
        raise UserError(f"block {block}: must be from 1 to {model.config.context - 1}")
    cache = cache or model.new_cache()
    tokens = list(prompt)
    model.prefill(tokens[cache.length : -1], cache)
    guess = from_prompt(prompt, block)
    yield Step()
    while True:
        tree = Tree.chain(tokens[-1], guess[: cache.room - 1])
        logits = model.logits(model(tree.tokens, cache)[0])
        path, fresh = accept(probs(logits, sampling), tree, randomness)
        cache.commit(path)
        # node i said what follows it: those behind the fresh token's place are the next guess
        said = best(logits[len(path) :])
        guess = said + guess[len(said) :]
        new = tree.tokens_at(path[1:]) + [fresh]
        tokens += new
        yield Step(new, tree, path)


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

    def said_by(self, nodes: int) -> list[int]:
        """The rows of a pass (of `nodes` tree nodes, then the window) that say the next row."""
        end = nodes + len(self.tokens)
        last = list(range(end - len(self.rows[-1]), end))
        return [0, *last] if len(self.rows) == 1 else last

    def advance(self, current: int, said: list[int]) -> list[tuple[int, ...]]:
        """Take in what the last row says; the n-grams down the columns, if there are enough rows.

        The window moves on by one position, even where the pass accepted several tokens.
        """
        if len(self.rows) < self.ngram - 1:
            self.rows = [row[1:] for row in [*self.rows, said]]
            return []
        grams = list(zip([current, *self.rows[0]], *self.rows[1:], said))
        self.rows = [*self.rows[1:], said]
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


def beside(tree: Tree, window: Window | None) -> tuple[Tensor, Tensor]:
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


def pool_of(texts: Sequence[list[int]], n: int, most: int) -> Pool:
    """A pool that these texts went through in order: of each first token it knows the `most`
    continuations seen last."""
    pool = Pool(most)
    for text in texts:
        pool.add_all(text, n, len(text))
    return pool


# ---- lookahead decoding --------------------------------------------------------------------------


def lookahead(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, window: int = 5, ngram: int = 4, guesses: int = 5,
    pool_from_prompt: bool = False, earlier: Sequence[list[int]] = (),
) -> Iterator[Step]:  # fmt: skip
    """Fu et al. 2024, algorithms 2 to 4: W = `window`, N = `ngram`, G = `guesses`.

    A pass carries the current token, the window, and the pool's continuations of the current token
    merged into a trie. With `pool_from_prompt` the n-grams of prompt and output join the pool. The
    pool begins with those of the `earlier` texts (token ids), as of what the target wrote before.
    """
    check_sizes(window, ngram, guesses, model.config.context)
    cache = cache or model.new_cache()
    tokens = list(prompt)
    model.prefill(tokens[cache.length : -1], cache)
    ahead = Window(prompt, window, ngram)
    pool = pool_of([*earlier, *([tokens] if pool_from_prompt else [])], ngram, guesses)
    yield Step()
    while True:
        tree = Tree.merged(tokens[-1], pool.after(tokens[-1])).first(cache.room)
        rows = ahead.rows
        path, fresh, said = one_pass(model, cache, tree, ahead, sampling, randomness)
        if said:
            for gram in ahead.advance(tokens[-1], said):
                pool.add(gram)
        new = tree.tokens_at(path[1:]) + [fresh]
        tokens += new
        if pool_from_prompt:
            pool.add_all(tokens, ngram, len(new))
        yield Step(new, tree, path, rows if said else [])


def one_pass(
    model: Transformer, cache: KVCache, tree: Tree, ahead: Window | None, sampling: Sampling,
    randomness: Randomness,
) -> tuple[list[int], int, list[int]]:  # fmt: skip
    """Score, accept and commit: the path, the fresh token, and what the window's last row says
    (nothing where the window does not fit into the cache any more)."""
    if ahead and len(tree) + len(ahead.tokens) > cache.room:
        ahead = None
    depth, mask = beside(tree, ahead)
    hidden = model(tree.tokens + (ahead.tokens if ahead else []), cache, depth, mask)[0]
    n, last = len(tree), ahead.said_by(len(tree)) if ahead else []
    # the rows between say nothing new
    logits = model.logits(hidden[[*range(n), *last]] if last else hidden[:n])
    path, fresh = accept(probs(logits[:n], sampling), tree, randomness)
    cache.commit(path)
    return path, fresh, best(logits[n:]) if ahead else []


def check_sizes(window: int, ngram: int, guesses: int, context: int) -> None:
    """Refuse what is too small, and a window that would never fit into the context."""
    for name, value, least in (("window", window, 1), ("ngram", ngram, 2), ("guesses", guesses, 0)):
        if value < least:
            raise UserError(f"{name} {value}: must be at least {least}")
    rows = (ngram - 1) * window
    if rows >= context:
        raise UserError(
            f"window {window}, ngram {ngram}: {rows} rows never fit into a context of {context}: "
            "take smaller ones"
        )


# ---- what pays, chosen as it goes ----------------------------------------------------------------

WIDTHS = 0, 5, 10, 15
NGRAM = 5
ORDER = 6  # the most tokens of a context
OWN = 4  # once in this text counts as much as so many times in earlier ones
PERIOD = 32  # passes between two choices of W
DEBT, CREDIT = 0.03, 1.0  # loss allowed against plain decoding: a share of its passes, and passes
RARE = 0.1  # the least chance of a guess
GUESSED = 8  # tokens of guesses that a pass is supposed to carry when W is chosen


def lookahead_auto(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, earlier: "Memory | Sequence[list[int]]" = (),
) -> Iterator[Step]:  # fmt: skip
    """Lookahead with window and guesses chosen by what passes cost here and how often guesses hit,
    down to plain decoding where nothing pays. Instead of a pool by first tokens it has a Memory of
    prompt, output and the window's n-grams, above one of `earlier` texts: token ids, or their
    Memory, which is only read, so that one serves many runs."""
    cache = cache or model.new_cache()
    choice = Choice(cost_curve(model))
    tokens = list(prompt)
    model.prefill(tokens[cache.length : -1], cache)
    ahead = None
    memory = Memory(ORDER, earlier if isinstance(earlier, Memory) else memory_of(earlier))
    memory.learn(tokens, len(tokens))
    yield Step()
    while True:
        if choice.is_due():
            before, width = choice.now, choice.width()
            if width != before:
                ahead = Window(tokens[-16:], width, NGRAM) if width else None
        tree = choice.tree(tokens, memory, cache.room)
        rows = ahead.rows if ahead else []
        path, fresh, said = one_pass(model, cache, tree, ahead, sampling, randomness)
        if said:
            for gram in ahead.advance(tokens[-1], said):
                memory.learn(gram, NGRAM - 1)
        choice.observe(tree, path)
        new = tree.tokens_at(path[1:]) + [fresh]
        tokens += new
        memory.learn(tokens, len(new))
        yield Step(new, tree, path, rows if said else [])


class Memory:
    """How often each token followed the last one to `order` tokens (after SuffixDecoding, Oliaro et
    al. 2024, arXiv 2411.04975): the more of a context is known, the surer is what follows.

    Where `earlier` texts know a context too, what followed it in this one counts OWN times.
    """

    def __init__(self, order: int, earlier: "Memory | None" = None):
        self.order, self.earlier = order, earlier
        self.counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def learn(self, tokens: Sequence[int], new: int) -> None:
        """Count the last `new` of the tokens, each behind what is before it."""
        for at in range(max(len(tokens) - new, 1), len(tokens)):
            for n in range(1, min(self.order, at) + 1):
                self.counts[tuple(tokens[at - n : at])][tokens[at]] += 1

    def followed(self, context: tuple[int, ...]) -> Counter[int] | None:
        """How often each token did, here and in the earlier texts; None if none is known to."""
        own = self.counts.get(context)
        theirs = self.earlier and self.earlier.followed(context)
        if not (own and theirs):
            return own or theirs
        return theirs + Counter({token: OWN * count for token, count in own.items()})

    def after(self, context: Sequence[int], most: int = 8) -> list[tuple[int, float]]:
        """What followed the longest end of `context` that is known, likeliest first, with its
        share: as if an unknown token had followed once, too."""
        for n in range(min(self.order, len(context)), 0, -1):
            seen = self.followed(tuple(context[-n:]))
            if seen:
                total = 1 + seen.total()
                return [(token, count / total) for token, count in seen.most_common(most)]
        return []


def memory_of(texts: Sequence[list[int]]) -> Memory:
    """What `lookahead_auto` remembers of these texts (token ids)."""
    memory = Memory(ORDER)
    for text in texts:
        memory.learn(text, len(text))
    return memory


class Choice:
    """What the next pass should carry: the most tokens for its cost, in passes over one token.

    `curve[n]` is the cost of n tokens. The chance of a guess is the product of the Memory's shares
    along its path. Chosen from earlier passes only, and never deeper in debt to plain decoding than
    DEBT and CREDIT allow: guesses leave enough for the window's rows until it may close.
    """

    def __init__(self, curve: list[float]):
        self.curve = curve
        self.speed = {w: 1.5 / self.cost(GUESSED, w) if w else 1.0 for w in WIDTHS}  # prior
        self.now, self.passes = 0, 0  # W, and all passes so far
        self.tokens, self.spent = 0, 0.0
        self.since = (0, 0.0)

    def cost(self, guessed: int, width: int) -> float:
        """Of a pass over the current token, so many of guesses, and N - 1 rows of a window."""
        n = 1 + guessed + (NGRAM - 1) * width
        last = len(self.curve) - 1
        return self.curve[n] if n <= last else self.curve[last] * n / last

    def affords(self, cost: float, passes: int) -> bool:
        """Whether so many passes may cost this, and bring one token each."""
        return self.spent + cost <= (self.tokens + passes) * (1 + DEBT) + CREDIT

    def is_due(self) -> bool:
        return self.passes % PERIOD == 0

    def width(self) -> int:
        """W for the next PERIOD passes: the fastest as far as is known."""
        if self.passes:
            tokens, spent = self.tokens - self.since[0], self.spent - self.since[1]
            self.speed[self.now] = tokens / spent
        self.since = self.tokens, self.spent
        period = {w: PERIOD * self.cost(GUESSED, w) for w in WIDTHS}
        ready = [w for w in WIDTHS if w == 0 or self.affords(period[w], PERIOD)]
        self.now = max(ready, key=lambda w: self.speed[w])
        return self.now

    def tree(self, tokens: list[int], memory: Memory, room: int) -> Tree:
        """The likeliest guesses behind the text, as many as pay; at most `room` nodes."""
        grown, parents, contexts = [tokens[-1]], [-1], [tokens[-ORDER:]]
        queue: list[tuple[float, int, int]] = []  # of guesses to take: -chance, parent, token
        chance, expected = 1.0, 1.0
        bare = self.cost(0, self.now)  # without guesses
        best, most = 1, 1 / bare
        left = PERIOD - 1 - self.passes % PERIOD  # passes until W is chosen again
        while len(grown) < min(room, len(self.curve)):
            for token, share in memory.after(contexts[-1]):
                if chance * share >= RARE:
                    heappush(queue, (-chance * share, len(grown) - 1, token))
            if not queue:
                break
            negative, parent, token = heappop(queue)
            chance, expected = -negative, expected - negative
            grown.append(token)
            parents.append(parent)
            contexts.append([*contexts[parent], token][-ORDER:])
            cost = self.cost(len(grown) - 1, self.now)
            affordable = self.affords(cost, 1) and self.affords(cost + left * bare, 1 + left)
            if expected / cost > most and affordable:
                best, most = len(grown), expected / cost
        return Tree(grown[:best], parents[:best])

    def observe(self, tree: Tree, path: list[int]) -> None:
        """Count the pass, and what it brought."""
        self.passes += 1
        self.tokens += len(path)
        self.spent += self.cost(len(tree) - 1, self.now)
