"""Jacobi and lookahead decoding: the iteration, the window, the pool."""

import pytest
import torch
from conftest import count_up, random_model, random_tokens

from minispec.generate import decode
from minispec.methods.lookahead import Pool, Window, beside, from_prompt
from minispec.sampling import OneHot, Seeded
from minispec.tree import Tree
from minispec.verify import accept

SIZES = [(1, 2, 0), (1, 3, 1), (4, 2, 3), (10, 5, 10)]


# ---- Jacobi --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block", [1, 16])
def test_every_iteration_settles_a_token_and_the_fixed_point_is_greedy(seed, block):
    model, prompt = random_model(seed), random_tokens(1 + seed, seed)
    plain = decode(model, None, prompt, max_new_tokens=50)
    run = decode(model, None, prompt, "jacobi", block=block, max_new_tokens=50)
    assert run.tokens == plain.tokens
    assert len(run.rounds) <= 50 and all(len(step.tokens) >= 1 for step in run.rounds)
    assert all(len(step.tree) == block + 1 for step in run.rounds[:1])


def test_a_guess_is_what_the_model_said_a_pass_ago():
    """The Jacobi map by hand: y_i ← argmax p(· | y_<i), from the prompt's tokens on."""
    model, prompt, block = random_model(3), random_tokens(5), 6
    tokens, guess = list(prompt), from_prompt(prompt, block)
    rounds = decode(model, None, prompt, "jacobi", block=block, max_new_tokens=40).rounds
    for step in rounds[:-1]:
        assert step.tree.tokens == [tokens[-1], *guess]
        said = model.logits(model(tokens + guess))[0, len(tokens) - 1 :].argmax(-1).tolist()
        settled = len(step.tokens)
        assert step.tokens == said[:settled]
        tokens += step.tokens
        guess = said[settled:] + guess[len(said) - settled :]


def test_a_text_that_counts_is_settled_a_block_at_a_time():
    model, _ = count_up(12, 1)
    run = decode(model, None, [3, 4, 5], "jacobi", block=4, max_new_tokens=40)
    assert run.tokens == [(6 + i) % 12 for i in range(40)]


# ---- the window ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width, ngram", [(1, 2), (1, 3), (4, 2), (3, 4), (5, 4), (15, 5)])
def test_the_window_fills_in_n_minus_2_passes_and_then_keeps_its_shape(width, ngram):
    window = Window([7, 8, 9], width, ngram)
    assert [len(row) for row in window.rows] == [width + ngram - 3]
    for filled in range(1, ngram - 1):
        said = list(range(len(window.said_by(1))))
        assert window.advance(0, said) == [] and len(window.rows) == filled + 1
    for _ in range(2 * ngram):
        assert [len(row) for row in window.rows] == [width - 1] + [width] * (ngram - 2)
        assert len(window.tokens) == (ngram - 1) * width - 1
        before, said = [list(row) for row in window.rows], random_tokens(width)
        grams = window.advance(5, said)
        assert len(grams) == width and {len(gram) for gram in grams} == {ngram}
        assert [g[0] for g in grams] == [5, *before[0]] and [g[-1] for g in grams] == said
        for r in range(1, ngram - 1):
            assert [g[r] for g in grams] == before[r]


def test_a_right_window_s_grams_are_the_text():
    """Over a text that counts, every n-gram harvested from a settled window counts as well."""
    model, _ = count_up(12, 1)
    tokens, window = [3, 4], Window([3, 4], 4, 3)
    for passes in range(12):
        depth, mask = beside(Tree.chain(tokens[-1], []), window)
        logits = model.logits(model([tokens[-1], *window.tokens], depth=depth, mask=mask))[0]
        said = logits[window.said_by(1)].argmax(-1).tolist()
        grams = window.advance(tokens[-1], said)
        tokens.append((tokens[-1] + 1) % 12)
        if passes > 5:
            # column 0 begins with the true current token, not with what the column says
            assert all(b == (a + 1) % 12 for gram in grams[1:] for a, b in zip(gram, gram[1:]))


@pytest.mark.parametrize("seed", range(4))
def test_guesses_do_not_depend_on_the_window(seed):
    model, tokens = random_model(seed), random_tokens(6, seed)
    cache = model.new_cache()
    model.prefill(tokens[:-1], cache)
    tree = Tree.merged(tokens[-1], [[1, 2, 3], [1, 4], [5]])
    rows = []
    for filler in (random_tokens(9, seed + 10), random_tokens(9, seed + 20)):
        window = Window(filler, 4, 4)
        window.advance(tokens[-1], filler[:6])
        depth, mask = beside(tree, window)
        rows.append(model(tree.tokens + window.tokens, cache, depth, mask)[0, : len(tree)])
    alone = model(tree.tokens, cache, tree.depth, tree.mask)[0]
    assert torch.allclose(rows[0], rows[1]) and torch.allclose(rows[0], alone)


# ---- the pool ------------------------------------------------------------------------------------


def test_the_pool_keeps_the_last_used_and_nothing_of_it_leaks():
    pool = Pool(2)
    for gram in [(1, 2, 3), (1, 4, 5), (2, 2, 2), (1, 2, 3), (1, 6, 7)]:
        pool.add(gram)
    assert pool.after(1) == [[6, 7], [2, 3]] and pool.after(2) == [[2, 2]] and pool.after(9) == []
    pool.after(1)[0].append(99)
    assert pool.after(1) == [[6, 7], [2, 3]]
    empty = Pool(0)
    empty.add((1, 2))
    assert empty.after(1) == []
    seeded = Pool(9)
    seeded.add_all([1, 2, 3, 4], 3, new=4)
    assert seeded.after(1) == [[2, 3]] and seeded.after(2) == [[3, 4]] and seeded.after(3) == []
    seeded.add_all([1, 2, 3, 4, 5], 3, new=1)
    assert seeded.after(3) == [[4, 5]] and seeded.after(1) == [[2, 3]]
    seeded.add_all([1], 3, new=1)


def test_a_trie_accepts_what_separate_chains_would_miss():
    """[3, 4] and [3, 5] where the target says 3, 5, 7: the first 3 must not be a dead end."""
    says = OneHot([3, 5, 9, 7], 10)  # after the root, 3, 4 and 5
    tree = Tree.merged(0, [[3, 4], [3, 5]])
    assert accept(says, tree, Seeded()) == ([0, 1, 3], 7)


# ---- decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_runs_are_alike_and_verify_no_more_than_g_guesses(size):
    options = dict(zip(("window", "ngram", "guesses"), size)) | {"max_new_tokens": 30}
    model, prompt = random_model(1), random_tokens(5, 1)
    first, second = (decode(model, None, prompt, "lookahead", **options) for _ in range(2))
    assert [s.tokens for s in first.rounds] == [s.tokens for s in second.rounds]
    assert max(len(step.tree) for step in first.rounds) <= 1 + size[2] * (size[1] - 1)
    if size[2] == 0:
        assert len(first.rounds) == 30


def test_a_full_match_yields_n_tokens():
    """A model that counts in a circle: once the pool has seen it, every pass yields N."""
    for ngram in (2, 3, 5):
        model, _ = count_up(6, 1)
        run = decode(model, None, [0], "lookahead", window=4, ngram=ngram, guesses=8,
                     max_new_tokens=60)  # fmt: skip
        assert run.tokens == [(1 + i) % 6 for i in range(60)]
        assert {len(step.tokens) for step in run.rounds[12:-1]} == {ngram}


def test_the_prompt_s_n_grams_are_guesses_from_the_first_pass_on():
    model, _ = count_up(6, 1)
    prompt = [0, 1, 2, 3, 4, 5, 0]
    run = decode(model, None, prompt, "lookahead", window=2, ngram=3, guesses=2,
                 pool_from_prompt=True, max_new_tokens=20)  # fmt: skip
    assert len(run.rounds[0].tokens) == 3
    without = decode(model, None, prompt, "lookahead", window=2, ngram=3, guesses=2,
                     max_new_tokens=20)  # fmt: skip
    assert len(without.rounds[0].tokens) == 1
