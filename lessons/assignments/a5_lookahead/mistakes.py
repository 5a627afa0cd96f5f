"""Wrong answers to assignment 5, each a function of the reference with one slip."""

import torch

from lessons.assignments import mutants
from lessons.assignments.grading import Mistake
from minispec.methods import lookahead as package
from minispec.methods.autoregressive import autoregressive
from minispec.methods.lookahead import Pool, Window, combined_mask, window_layout
from minispec.sampling import argmax, probs
from minispec.tree import Step, Tree
from minispec.verify import accept

jacobi, lookahead = package.jacobi, package.lookahead
after, add, add_all, advance = Pool.after, Pool.add, Pool.add_all, Window.advance
predicting_rows = Window.predicting_rows
SCORE = "minispec.methods.lookahead.score_and_accept"


# ---- Jacobi --------------------------------------------------------------------------------------


def jacobi_with(next_guess, accept=accept):
    """`jacobi`, where next_guess(prediction of every row, how many are settled, old guess) is what
    it verifies next."""

    def wrong(model, prompt, sampling, randomness, *, cache=None, block=8):
        cache, tokens = cache or model.new_cache(), list(prompt)
        model.prefill(tokens[cache.length : -1], cache)
        guess = package.initial_guess(prompt, block)
        yield Step()
        while True:
            tree = Tree.chain(tokens[-1], guess[: cache.free_rows - 1])
            target = probs(model.logits(model(tree.tokens, cache)[0]), sampling)
            path, fresh, *_ = accept(target, tree, randomness)
            cache.commit(path)
            guess = next_guess(argmax(target), len(path), guess)
            new = tree.tokens_at(path[1:]) + [fresh]
            tokens += new
            yield Step(new, tree, path)

    return wrong


def without_cache(method):
    def wrong(*arguments, cache=None, **options):
        return method(*arguments, **options)

    return wrong


def plain(model, prompt, sampling, randomness, *, cache=None, **options):
    """Plain decoding: nothing is guessed."""
    return autoregressive(model, prompt, sampling, randomness, cache=cache)


# ---- the trie ------------------------------------------------------------------------------------


def one_node_per_chain(root, chains):
    tokens, parents = [root], [-1]
    for chain in chains:
        for depth, token in enumerate(chain):
            parents.append(len(tokens) - 1 if depth else 0)
            tokens.append(token)
    return Tree(tokens, parents)


def shared_roots_only(root, chains):
    """Chains share their first token, but nothing behind it."""
    tokens, parents, first = [root], [-1], {}
    for chain in chains:
        node = 0
        for depth, token in enumerate(chain):
            if depth == 0 and token in first:
                node = first[token]
                continue
            tokens.append(token)
            parents.append(node)
            node = len(tokens) - 1
            if depth == 0:
                first[token] = node
    return Tree(tokens, parents)


def one_node_per_token(root, chains):
    """The same token is the same node, whatever precedes it."""
    tokens, parents, nodes = [root], [-1], {}
    for chain in chains:
        node = 0
        for token in chain:
            if token not in nodes:
                nodes[token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = nodes[token]
    return Tree(tokens, parents)


# ---- the window ----------------------------------------------------------------------------------


def one_further(lengths):
    distance, mask = window_layout(lengths)
    return distance + 1, mask


def by_column(lengths):
    """The distance is the column: rows do not count."""
    columns = [i + (r == 0) for r, length in enumerate(lengths) for i in range(length)]
    return torch.tensor(columns, dtype=torch.long), window_layout(lengths)[1]


def layout_with(visible):
    """`window_layout`, where visible(r, i, s, j) is whether row r, column i sees row s, column
    j."""

    def wrong(lengths):
        at = [(r, i + (r == 0)) for r, length in enumerate(lengths) for i in range(length)]
        mask = [[visible(*one, *other) for other in at] for one in at]
        seen = torch.tensor(mask, dtype=torch.bool).view(len(at), len(at))
        return window_layout(lengths)[0], seen

    return wrong


def combined_with(change):
    """`combined_mask`, changed in place: change(depth, mask, nodes of the tree)."""

    def wrong(tree, window):
        depth, mask = (x.clone() for x in combined_mask(tree, window))
        change(depth, mask, len(tree))
        return depth, mask

    return wrong


def window_sees_guesses(depth, mask, n):
    mask[n:, :n] = True


def root_hidden_from_window(depth, mask, n):
    mask[n:, 0] = False


def distances_behind_the_tree(depth, mask, n):
    depth[n:] += int(depth[:n].max())


def never_the_root(self, nodes):
    end = nodes + len(self.tokens)
    return list(range(end - len(self.rows[-1]), end))


def always_the_root(self, nodes):
    rows = predicting_rows(self, nodes)
    return rows if rows[:1] == [0] else [0, *rows]


def the_first_row(self, nodes):
    rows = list(range(nodes, nodes + len(self.rows[0])))
    return [0, *rows] if len(self.rows) == 1 else rows


def n_grams_too_early(self, current, predicted):
    grams = list(zip([current, *self.rows[0]], *self.rows[1:], predicted))
    return advance(self, current, predicted) or grams


def without_the_current_token(self, current, predicted):
    full = len(self.rows) == self.ngram - 1
    grams = list(zip(self.rows[0], *(row[1:] for row in self.rows[1:]), predicted[1:]))
    advance(self, current, predicted)
    return grams if full else []


def stands_still(self, current, predicted):
    """A full window gives its n-grams and keeps its rows."""
    rows = self.rows
    grams = advance(self, current, predicted)
    if len(rows) == self.ngram - 1:
        self.rows = rows
    return grams


def keeps_the_first_entries(self, current, predicted):
    full, rows = len(self.rows) == self.ngram - 1, self.rows
    grams = advance(self, current, predicted)
    if not full:
        self.rows = [*rows, predicted]
    return grams


def without_n_grams(self, current, predicted):
    advance(self, current, predicted)
    return []


# ---- the pool ------------------------------------------------------------------------------------


def aliased(self, token):
    """The pool hands out its own list."""
    if not hasattr(self, "handed"):
        self.handed = {}
    return self.handed.setdefault(token, after(self, token))


def oldest_first(self, token):
    return after(self, token)[::-1]


def keeps_the_oldest(self, gram):
    rest = self.continuations.setdefault(gram[0], {})
    if len(rest) < self.limit:
        rest[gram[1:]] = None


def never_refreshed(self, gram):
    if gram[1:] not in self.continuations.get(gram[0], {}):
        add(self, gram)


def without_limit(self, gram):
    limit, self.limit = self.limit, 10**9
    add(self, gram)
    self.limit = limit


def every_n_gram(self, tokens, n, new):
    add_all(self, tokens, n, len(tokens))


def new_only(self, tokens, n, new):
    """N-grams within the new tokens: those that only end there are missed."""
    add_all(self, tokens[len(tokens) - new :], n, new)


def right_to_left(self, tokens, n, new):
    for end in range(len(tokens), max(len(tokens) - new + 1, n) - 1, -1):
        add(self, tuple(tokens[end - n : end]))


# ---- the loop ------------------------------------------------------------------------------------


def without_the_bonus(target, tree, randomness):
    """After a full match the last guess counts as the fresh token."""
    path, fresh, *_ = accept(target, tree, randomness)
    full = len(path) > 1 and not tree.children(path[-1])
    return (path[:-1], tree.tokens[path[-1]]) if full else (path, fresh)


def lookahead_with(accept=accept, window_type=Window, tried=lambda found: found):
    """`lookahead` without the context's end; tried(continuations) are those it verifies."""

    def wrong(
        model, prompt, sampling, randomness, *, cache=None, window=5, ngram=4,
        guesses=5, pool_from_prompt=False,
    ):  # fmt: skip
        cache, tokens = cache or model.new_cache(), list(prompt)
        model.prefill(tokens[cache.length : -1], cache)
        branch, pool = window_type(prompt, window, ngram), Pool(guesses)
        if pool_from_prompt:
            pool.add_all(tokens, ngram, len(tokens))
        yield Step()
        while True:
            tree = Tree.merged(tokens[-1], tried(pool.after(tokens[-1])))
            hidden = model(tree.tokens + branch.tokens, cache, *combined_mask(tree, branch))[0]
            target = probs(model.logits(hidden[: len(tree)]), sampling)
            path, fresh, *_ = accept(target, tree, randomness)
            cache.commit(path)
            said = model.logits(hidden[branch.predicting_rows(len(tree))]).argmax(-1).tolist()
            for gram in branch.advance(tokens[-1], said):
                pool.add(gram)
            new = tree.tokens_at(path[1:]) + [fresh]
            tokens += new
            if pool_from_prompt:
                pool.add_all(tokens, ngram, len(new))
            yield Step(new, tree, path)

    return wrong


class Barren(Window):
    """A window whose n-grams are thrown away."""

    advance = without_n_grams


def text_ignored(*arguments, pool_from_prompt=False, **options):
    return lookahead(*arguments, **options)


MISTAKES = [
    Mistake("jacobi", "the next guess begins with tokens that are settled already",
            {"jacobi": jacobi_with(lambda said, settled, old: said[: len(old)])}),
    Mistake("jacobi", "the guess is never replaced by what the model said",
            {"jacobi": jacobi_with(lambda said, settled, old: old)}),
    Mistake("jacobi", "the new guess is filled up with the old one's first tokens, not its last",
            {"jacobi": jacobi_with(lambda said, settled, old:
                                   (said[settled:] + old)[: len(old)])}),
    Mistake("jacobi", "`jacobi` does not use the given cache", {"jacobi": without_cache(jacobi)}),
    Mistake("jacobi", "`jacobi` is plain decoding: nothing is guessed", {"jacobi": plain}),
    Mistake("trie", "chains do not share their beginnings", {"merged": one_node_per_chain}),
    Mistake("trie", "chains share their first token only", {"merged": shared_roots_only}),
    Mistake("trie", "the same token behind another prefix is another node",
            {"merged": one_node_per_token}),
    Mistake("window_layout, together", "distances are one too large: row 0 begins at distance 1",
            {"window_layout": one_further}),
    Mistake("window_layout, together", "a row adds 1 to the distance: column + row",
            {"window_layout": by_column}),
    Mistake("window_layout, together", "an entry sees all of row 0: only up to its own column",
            {"window_layout": layout_with(lambda r, i, s, j: s == 0 or (j == i and s <= r))}),
    Mistake("window_layout, together", "an entry sees its own row: only row 0 and its own column",
            {"window_layout": layout_with(lambda r, i, s, j: s <= r and j <= i)}),
    Mistake("window_layout", "an entry does not see itself",
            {"window_layout": layout_with(
                lambda r, i, s, j: (r, i) != (s, j) and (s == 0 and j <= i or j == i and s <= r))}),
    Mistake("combined_mask", "the tree's guesses see the window",
            {"combined_mask": mutants.guesses_see_the_window}),
    Mistake("combined_mask, together", "the window sees the tree's guesses",
            {"combined_mask": combined_with(window_sees_guesses)}),
    Mistake("combined_mask, together", "the window does not see the current token, the root",
            {"combined_mask": combined_with(root_hidden_from_window)}),
    Mistake("combined_mask, together", "the window's distances count from the root, not from the "
            "deepest guess", {"combined_mask": combined_with(distances_behind_the_tree)}),
    Mistake("predicting_rows", "while row 0 is alone the current token's row belongs to it as well",
            {"Window.predicting_rows": never_the_root}),
    Mistake("predicting_rows", "the current token's row is used only while row 0 is alone",
            {"Window.predicting_rows": always_the_root}),
    Mistake("predicting_rows", "the next row is said by the last row, not by the first",
            {"Window.predicting_rows": the_first_row}),
    Mistake("advance", "n-grams come from a window that is not full",
            {"Window.advance": n_grams_too_early}),
    Mistake("advance", "column 0 is left out: it begins with the current token",
            {"Window.advance": without_the_current_token}),
    Mistake("advance", "a full window does not move", {"Window.advance": stands_still}),
    Mistake("advance", "while the window fills, every row loses its first entry",
            {"Window.advance": keeps_the_first_entries}),
    Mistake("pool", "the pool hands out its own lists", {"Pool.after": aliased}),
    Mistake("pool", "the oldest comes first: the latest should", {"Pool.after": oldest_first}),
    Mistake("pool", "a full pool refuses what is new: drop what was seen least recently",
            {"Pool.add": keeps_the_oldest}),
    Mistake("pool", "an n-gram that is seen again does not become the latest",
            {"Pool.add": never_refreshed}),
    Mistake("pool", "nothing is ever dropped", {"Pool.add": without_limit}),
    Mistake("pool", "`add_all` adds the n-grams that end in old tokens too",
            {"Pool.add_all": every_n_gram}),
    Mistake("pool", "`add_all` misses the n-grams that begin in old tokens",
            {"Pool.add_all": new_only}),
    Mistake("pool", "`add_all` goes from right to left", {"Pool.add_all": right_to_left}),
    Mistake("lookahead", "while the window fills, its prediction is emitted",
            {SCORE: mutants.warm_up_verified}),
    Mistake("lookahead", "after a full match the bonus token is lost",
            {"lookahead": lookahead_with(accept=without_the_bonus)}),
    Mistake("lookahead", "the window's n-grams never reach the pool",
            {"lookahead": lookahead_with(window_type=Barren)}),
    Mistake("lookahead", "only the latest continuation is verified: merge all of them",
            {"lookahead": lookahead_with(tried=lambda found: found[:1])}),
    Mistake("lookahead", "`pool_from_prompt` has no effect", {"lookahead": text_ignored}),
    Mistake("lookahead", "`lookahead` is plain decoding: no guess is verified",
            {"lookahead": plain}),
    Mistake("lookahead", "`lookahead` does not use the given cache",
            {"lookahead": without_cache(lookahead)}),
]  # fmt: skip
