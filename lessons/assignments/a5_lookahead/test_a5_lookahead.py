"""The window against the definition and a model, the pool against a plain list. The passes of both
loops are counted: plain decoding is lossless, but saves none."""

import random

import pytest
import torch

from lessons.assignments.grading import counted_run
from minispec.certify.toys import (
    Toy,
    exact_distribution,
    first_tokens,
    small_model,
    total_variation,
)
from minispec.methods import lookahead
from minispec.methods.autoregressive import autoregressive
from minispec.model import Transformer
from minispec.sampling import Sampling, Seeded
from minispec.tree import Tree

STAYS = (Transformer,)
GREEDY = Sampling()
GRADED = {
    "jacobi": "jacobi", "trie": "merged", "window_layout": "window_layout",
    "combined_mask": "combined_mask", "predicting_rows": "Window.predicting_rows",
    "advance": "Window.advance", "pool": "Pool.__init__, Pool.add, Pool.add_all, Pool.after",
    "together": "merged, window_layout, combined_mask, Window.predicting_rows, Window.advance",
    "lookahead": "lookahead, minispec.methods.lookahead.score_and_accept",
}  # fmt: skip


def compare(method, other, model, prompt: list[int], n: int, **options) -> None:
    """Compare the first `n` greedy tokens with plain decoding's, and the passes that they take with
    those of the package's method."""
    run = model, prompt, GREEDY, Seeded(), n
    plain = first_tokens(autoregressive, *run)
    tokens, passes = counted_run(method, *run, **options)
    assert tokens == plain, f"{options}: {tokens}, but plain decoding says {plain}"
    _, right = counted_run(other, *run, **options)
    assert passes == right, (
        f"{options}: {n} tokens take passes of {list(passes)} rows instead of {list(right)}: each "
        "pass scores all guesses, and a right guess saves one"
    )


# ---- Jacobi --------------------------------------------------------------------------------------


@pytest.mark.points(2, task="jacobi")
def test_jacobi_is_lossless(impl, seeds):
    for i, seed in enumerate(seeds(2)):
        model, prompt = small_model(seed), random.Random(seed).choices(range(24), k=1 + 3 * i)
        for block in (1, 5):
            compare(impl.jacobi, lookahead.jacobi, model, prompt, 12, block=block)

    def method(*arguments, **options):
        return impl.jacobi(*arguments, block=3, **options)

    d = total_variation(
        exact_distribution(method, Toy(seed + 5), [1, 0, 1], Sampling(1.0), 3),
        exact_distribution(autoregressive, Toy(seed + 5), [1, 0, 1], Sampling(1.0), 3),
    )
    assert d < 1e-12, (
        f"sampled, the output is {d:.1e} (total variation) away: to `accept`, guesses are one-hot"
    )


@pytest.mark.points(3, task="jacobi")
def test_a_guess_is_what_the_model_said_a_pass_ago(impl, seeds):
    for kept, seed in enumerate(seeds(3)):
        model, prompt, block = small_model(seed, vocab=4), [3, 1, 0, 1, 2], 4 + kept
        tokens, guess = list(prompt), [prompt[i % 5] for i in range(block)]
        cache = model.new_cache()
        model.prefill(prompt[:kept], cache)  # rows kept from an earlier run
        steps = impl.jacobi(model, prompt, GREEDY, Seeded(), cache=cache, block=block)
        assert next(steps).tree is None, "the first step is the prefill's"
        for round_, step in zip(range(8), steps):
            assert step.tree.tokens == [tokens[-1], *guess], (
                f"round {round_}: the guess is {step.tree.tokens[1:]} instead of {guess}: what the "
                "last pass said behind its new tokens, then the last tokens of the old guess"
            )
            logits = model.logits(model(tokens + guess))[0, len(tokens) - 1 :]
            predicted = logits.argmax(-1).tolist()
            settled = len(step.tokens)
            tokens += step.tokens
            assert cache.length == len(tokens) - 1, (
                f"round {round_}: the given cache has {cache.length} rows, but {len(tokens) - 1} "
                "are settled: feed what it lacks, and commit what was accepted"
            )
            guess = (predicted[settled:] + guess[len(predicted) - settled :])[:block]


# ---- the trie ------------------------------------------------------------------------------------


@pytest.mark.points(3, task="trie")
def test_what_chains_share_stands_once(impl, seeds):
    for seed in seeds(30):
        rng = random.Random(seed)
        chains = [rng.choices(range(3), k=rng.randint(0, 4)) for _ in range(rng.randint(0, 6))]
        tree = impl.merged(9, [list(chain) for chain in chains])
        order = list(dict.fromkeys(
            tuple(chain[:n]) for chain in chains for n in range(1, len(chain) + 1)
        ))  # fmt: skip
        paths = {0: ()}
        for node in range(1, len(tree)):
            paths[node] = (*paths[tree.parents[node]], tree.tokens[node])
        assert tree.tokens[0] == 9 and list(paths.values())[1:] == order, (
            f"chains {chains}: paths {list(paths.values())[1:]} instead of {order}: siblings with "
            "the same token are one node, else an accepted token may lead into the shorter chain"
        )


# ---- the window ----------------------------------------------------------------------------------


def random_lengths(rng: random.Random) -> tuple[int, ...]:
    """Of a window: row 0, and as many others as have been added."""
    width, ngram = rng.randint(1, 5), rng.randint(2, 5)
    rows = rng.randint(1, ngram - 1)
    first = width + ngram - 3 - (rows - 1)
    return (first, *[first + 1] * (rows - 1))


def entries(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """(row, column) of each."""
    return [(r, i + (r == 0)) for r, length in enumerate(lengths) for i in range(length)]


@pytest.mark.points(2, task="window_layout")
def test_an_entry_guesses_the_token_at_column_plus_row(impl, seeds):
    for seed in seeds(12):
        lengths = random_lengths(random.Random(seed))
        distance, _ = impl.window_layout(lengths)
        right = [r + i for r, i in entries(lengths)]
        assert distance.tolist() == right, (
            f"rows of {lengths}: distances {right}, not {distance.tolist()}: row 0 begins with "
            "column 1, as its column 0 is the current token"
        )


@pytest.mark.points(4, task="window_layout")
def test_an_entry_sees_row_0_up_to_its_column_and_then_its_column(impl, seeds):
    for seed in seeds(12):
        lengths = random_lengths(random.Random(seed))
        at = entries(lengths)
        seen = impl.window_layout(lengths)[1]
        assert seen.shape == (len(at), len(at)) and seen.dtype == torch.bool, "(w, w), bool"
        for (r, i), row in zip(at, seen.tolist()):
            right = [(s, j) for s, j in at if (s == 0 and j <= i) or (j == i and s <= r)]
            found = [entry for entry, sees in zip(at, row) if sees]
            assert found == right, (
                f"rows of {lengths}: row {r}, column {i} sees (row, column) {found} instead of "
                f"{right}: row 0 up to its own column, then down its column to itself"
            )


def passing(impl, rng: random.Random):
    """A tree, a full window, and what `combined_mask` says of them."""
    tree = Tree.merged(1, [rng.choices(range(4), k=3) for _ in range(rng.randint(0, 3))])
    width, ngram = rng.randint(1, 4), rng.randint(2, 5)
    window = lookahead.Window(rng.choices(range(24), k=5), width, ngram)
    row = [rng.choices(range(24), k=width) for _ in range(ngram - 1)]
    window.rows = [row[0][1:], *row[1:]]
    return tree, window, *impl.combined_mask(tree, window)


@pytest.mark.points(4, task="combined_mask")
def test_tree_and_window_are_blind_to_each_other_but_for_the_root(impl, seeds):
    for seed in seeds(12):
        tree, window, depth, mask = passing(impl, random.Random(seed))
        n, (distance, seen) = len(tree), window.layout
        assert depth.tolist() == tree.depth.tolist() + distance.tolist(), (
            "depths of the tree's nodes, then the window's distances: both count from the root"
        )
        assert mask.shape == (n + len(distance),) * 2, "one row and column for every token"
        assert torch.equal(mask[:n, :n], tree.mask), "the tree's nodes see each other as before"
        assert not mask[:n, n:].any(), "a node of the tree sees the window: guesses must not"
        assert mask[n:, 0].all(), "every entry sees the root, which is the current token"
        assert not mask[n:, 1:n].any(), "an entry of the window sees a guess of the tree"
        assert torch.equal(mask[n:, n:], seen), "the window's entries see each other as before"
    depth, mask = impl.combined_mask(tree, None)
    assert torch.equal(depth, tree.depth) and torch.equal(mask, tree.mask), "no window: the tree"


@pytest.mark.points(2, task="predicting_rows")
def test_the_last_row_says_the_next_one(impl, seeds):
    for seed in seeds(12):
        rng = random.Random(seed)
        lengths, nodes = random_lengths(rng), rng.randint(1, 9)
        window = impl.Window([1, 2], 3, 4)
        window.rows = [[0] * length for length in lengths]
        end = nodes + sum(lengths)
        right = [0] * (len(lengths) == 1) + list(range(end - lengths[-1], end))
        given = window.predicting_rows(nodes)
        assert given == right, (
            f"{nodes} nodes, rows of {lengths}: pass rows {right}, not {given}: "
            "column 0 of row 0 is the current token, which is pass row 0"
        )


@pytest.mark.points(5, task="advance")
def test_the_window_fills_harvests_its_columns_and_moves_up(impl, seeds):
    for seed in seeds(12):
        rng = random.Random(seed)
        width, ngram = rng.randint(1, 5), rng.randint(2, 5)
        window = impl.Window(rng.choices(range(24), k=4), width, ngram)
        assert [len(row) for row in window.rows] == [width + ngram - 3]
        for pass_ in range(2 * ngram):
            before, full = [list(row) for row in window.rows], len(window.rows) == ngram - 1
            predicted, current = rng.choices(range(24), k=len(before[-1]) + (len(before) == 1)), 99
            grams = window.advance(current, list(predicted))
            if not full:
                assert not grams, f"pass {pass_}: {len(before)} rows of {ngram - 1} give no n-gram"
                moved = [row[1:] for row in [*before, predicted]]
            else:
                columns = [[current, *before[0]], *before[1:], predicted]
                right = [tuple(row[i] for row in columns) for i in range(width)]
                assert [tuple(gram) for gram in grams] == right, (
                    f"pass {pass_}, W={width}, N={ngram}: n-grams {grams} instead of {right}: read "
                    "down the columns, beginning with the current token"
                )
                moved = [*before[1:], predicted]
                moved[0] = moved[0][1:]
            assert [list(row) for row in window.rows] == moved, (
                f"pass {pass_}: rows {window.rows} instead of {moved}: the window moves on by one"
            )


# ---- the pool ------------------------------------------------------------------------------------


@pytest.mark.points(4, task="pool")
def test_the_pool_keeps_what_was_seen_last(impl, seeds):
    for seed in seeds(6):
        rng = random.Random(seed)
        most = rng.randint(0, 4)
        pool, grams = impl.Pool(most), []
        for _ in range(100):
            gram = tuple(rng.choices(range(3), k=3))
            pool.add(gram)
            grams = [gram] + [g for g in grams if g != gram]
            right = [list(g[1:]) for g in grams if g[0] == gram[0]][:most]
            given = [list(rest) for rest in pool.after(gram[0])]
            assert given == right, (
                f"at most {most}: {given} instead of {right}: latest first, each once, and one "
                "that is seen again becomes the latest"
            )
        assert pool.after(99) == [], "nothing is known after a token that never came first"


@pytest.mark.points(2, task="pool")
def test_what_the_caller_does_with_a_guess_leaves_the_pool_alone(impl):
    pool = impl.Pool(3)
    pool.add((1, 2, 3))
    pool.add((1, 4, 5))
    for _ in range(2):
        guesses = pool.after(1)
        assert guesses == [[4, 5], [2, 3]], (
            f"{guesses}: a caller appended to the list it was given, and the pool changed: hand "
            "out copies"
        )
        guesses[0].append(99)
        guesses.append([7])


@pytest.mark.points(2, task="pool")
def test_n_grams_of_a_text_that_end_in_its_new_tokens(impl, seeds):
    for seed in seeds(20):
        rng = random.Random(seed)
        tokens = rng.choices(range(4), k=rng.randint(1, 10))
        n, new = rng.randint(2, 4), rng.randint(0, len(tokens))
        ends = range(max(n, len(tokens) - new + 1), len(tokens) + 1)
        one, other = impl.Pool(9), impl.Pool(9)
        one.add_all(tokens, n, new)
        for end in ends:
            other.add(tuple(tokens[end - n : end]))
        for token in range(4):
            assert one.after(token) == other.after(token), (
                f"{tokens}, n={n}, {new} new: after {token} {one.after(token)} instead of "
                f"{other.after(token)}: each n-gram whose last token is new, from left to right"
            )


# ---- all of it on a model ------------------------------------------------------------------------


@pytest.mark.points(4, task="together")
def test_each_entry_s_hidden_state_is_that_of_its_chain_alone(impl, seeds):
    """Window, trie, layout and mask in one pass, compared with a pass for each entry."""
    for seed in seeds(4):
        rng, model = random.Random(seed), small_model(seed)
        width, ngram = rng.randint(1, 4), rng.randint(2, 4)
        tokens = rng.choices(range(24), k=rng.randint(2, 9))
        window, cache = impl.Window(tokens, width, ngram), model.new_cache()
        model.prefill(tokens[:-1], cache)
        for pass_ in range(ngram):
            tree = impl.merged(tokens[-1], [rng.choices(range(24), k=2) for _ in range(2)])
            lengths = tuple(map(len, window.rows))
            view = type("View", (), {"layout": impl.window_layout(lengths), "rows": window.rows})()
            depth, mask = impl.combined_mask(tree, view)
            hidden = model(tree.tokens + window.tokens, cache, depth, mask)[0]
            for (r, i), row in zip(entries(lengths), hidden[len(tree) :]):
                chain = window.rows[0][:i] + [each[i] for each in window.rows[1 : r + 1]]
                assert (row - model(tokens + chain)[0, -1]).abs().max() < 1e-9, (
                    f"pass {pass_}, W={width}, N={ngram}: row {r}, column {i} is not what a pass "
                    "over the prefix, row 0 and its own column gives"
                )
            predicted = model.logits(hidden[window.predicting_rows(len(tree))]).argmax(-1).tolist()
            window.advance(tokens[-1], predicted)


# ---- the loop ------------------------------------------------------------------------------------

SETTINGS = (  # W, N, G, and whether the text's own n-grams join the pool
    (3, 3, 3, True), (1, 2, 1, False), (2, 4, 2, False), (4, 3, 5, True),
)  # fmt: skip


def options_of(settings: tuple) -> dict:
    return dict(zip(("window", "ngram", "guesses", "pool_from_prompt"), settings))


@pytest.mark.points(3, task="lookahead")
def test_lookahead_is_lossless(impl, seeds):
    for seed, settings in zip(seeds(4), SETTINGS):
        model, prompt = small_model(seed, vocab=4), [1, 2, 3, 1, 2]
        compare(impl.lookahead, lookahead.lookahead, model, prompt, 24, **options_of(settings))

    def method(*arguments, **options):
        return impl.lookahead(*arguments, **options, **options_of((3, 3, 3, True)))

    arguments = Toy(seed + 5), [1, 0, 1], Sampling(1.0), 2
    d = total_variation(
        exact_distribution(method, *arguments), exact_distribution(autoregressive, *arguments)
    )
    assert d < 1e-12, (
        f"sampled, the output is {d:.1e} (total variation) away: n-grams are one-hot, and only the "
        "tree's rows are verified"
    )


@pytest.mark.points(3, task="lookahead")
def test_every_round_verifies_what_the_window_has_collected(impl, seeds):
    """Each round's tree, path and tokens are those of the package's loop."""
    for kept, (seed, settings) in enumerate(zip(seeds(4), SETTINGS)):
        model, prompt = small_model(seed, vocab=4), [1, 2, 3, 1, 2]
        runs = []
        for method in (lookahead.lookahead, impl.lookahead):
            cache, tokens, rounds = model.new_cache(), list(prompt), []
            model.prefill(prompt[:kept], cache)
            steps = method(model, prompt, GREEDY, Seeded(), cache=cache, **options_of(settings))
            for step, _ in zip(steps, range(20)):
                tokens += step.tokens
                tree = step.tree and (step.tree.tokens, step.tree.parents)
                rounds.append((tree, step.path, step.tokens, cache.length - len(tokens)))
            runs.append(rounds)
        for round_, (right, given) in enumerate(zip(*runs)):
            assert given == right, (
                f"W, N, G = {settings[:3]}, pool_from_prompt {settings[3]}, round {round_}: (tree, "
                f"path, new tokens, rows of the cache less tokens) is {given} instead of {right}"
            )
