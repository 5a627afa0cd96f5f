"""Proposals are what their method says: against slow oracles that compute each afresh."""

import inspect
import random
from unittest import mock

import mistakes
import pytest
import torch

from minispec.certify.cases import GREEDY, RANK_TREES, bound
from minispec.methods import lookahead, medusa
from minispec.methods.fastmtp import Drafter, MTPHead
from minispec.methods.medusa import complete
from minispec.model import Transformer, plan
from minispec.sampling import Seeded
from minispec.toys import random_head, random_heads, small_model
from minispec.tree import Tree


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() < 1e-9)


def lookahead_window(seed: int) -> None:
    """Each entry's hidden state beside a tree equals a pass over prefix, row and column alone."""
    rng, model = random.Random(seed), small_model(seed)
    width, ngram = rng.randint(1, 6), rng.randint(2, 5)
    tokens = rng.choices(range(24), k=rng.randint(1, 12))
    ahead, cache = lookahead.Window(tokens, width, ngram), model.new_cache()
    model.prefill(tokens[:-1], cache)
    for _ in range(ngram):
        tree = Tree.merged(tokens[-1], [rng.choices(range(24), k=3) for _ in range(3)])
        depth, mask = lookahead.beside(tree, ahead)
        hidden = model(tree.tokens + ahead.tokens, cache, depth, mask)[0]
        entries = [(r, i) for r, row in enumerate(ahead.rows) for i in range(len(row))]
        for (r, i), row in zip(entries, hidden[len(tree) :]):
            column = i + (r == 0)  # column 0 of row 0 is the current token
            before = ahead.rows[0][:column] + [each[i] for each in ahead.rows[1 : r + 1]]
            assert close(row, model(tokens + before)[0, -1]), (r, column)
        said = model.logits(hidden[ahead.said_by(len(tree))]).argmax(-1).tolist()
        ahead.advance(tokens[-1], said)


def lookahead_pool(seed: int) -> None:
    """Against a plain list of all n-grams, newest first, read again and again."""
    rng, pool, grams = random.Random(seed), lookahead.Pool(3), []
    for _ in range(200):
        gram = tuple(rng.choices(range(3), k=4))
        pool.add(gram)
        grams = [gram] + [g for g in grams if g != gram]
        for token in range(3):
            assert pool.after(token) == [list(g[1:]) for g in grams if g[0] == token][:3]


def medusa_tree(seed: int) -> None:
    """Each tree comes from the hidden state before the newest token, computed afresh."""
    model, tokens = small_model(seed), [3, 1, 4]
    heads, paths = random_heads(model, seed), complete(RANK_TREES["deep"], 4, 24)
    steps = bound("medusa", heads=heads, tree=paths)(model, tokens, GREEDY, Seeded())
    next(steps)
    for step, _ in zip(steps, range(6)):
        best = heads(model(tokens[:-1])[0, -1], model).topk(2).indices.tolist()
        assert step.tree == Tree.from_paths(tokens[-1], paths, best)
        tokens = tokens + step.tokens


def mtp_head(seed: int) -> None:
    """The head's formula: the hidden state first, norms before, the block, the norm."""
    model = small_model(seed)
    head, tokens = random_head(model, seed), random.Random(seed).choices(range(24), k=7)
    hidden, embedded = model(tokens)[0, :-1], model.model.embed_tokens(torch.tensor(tokens[1:]))
    outputs = Drafter(head, model, 32, offset=0).run(hidden, tokens[1:])
    d = model.config.hidden_size
    left, right = head.input_proj.weight[:, :d], head.input_proj.weight[:, d:]
    x = head.hidden_layernorm(hidden) @ left.T + head.token_layernorm(embedded) @ right.T
    now = plan(head.rope, x, len(x), None, None, None)
    x = x + head.self_attn(head.input_layernorm(x)[None], now)[0]
    x = x + head.mlp(head.post_attention_layernorm(x))
    assert close(head.final_layernorm(x), outputs)


def mtp_drafts(seed: int) -> None:
    """After every round the head's cache is that of a fresh pass over the committed tokens, and as
    long as the target's; and drafts are those of fresh passes over all rows."""
    model, tokens = small_model(seed, vocab=3), [2, 1, 0]  # where drafts are often right
    head, cache = random_head(model, seed), model.new_cache()
    rounds = bound("fastmtp", head=head, k=3)(model, tokens, GREEDY, Seeded(), cache=cache)
    next(rounds)
    for step, _ in zip(rounds, range(12)):
        assert step.tree.tokens[1:] == fresh_drafts(head, model, tokens, 3)
        tokens = tokens + step.tokens
        kept, fresh = inspect.getgeneratorlocals(rounds)["drafter"], Drafter(head, model, 128, 0)
        fresh.extend(model(tokens[:-1])[0], tokens[1:])
        assert kept.cache.length == cache.length == fresh.cache.length
        rows = slice(cache.length)
        assert close(kept.cache.k[0][:, rows], fresh.cache.k[0][:, rows])


def fresh_drafts(head: MTPHead, model: Transformer, tokens: list[int], k: int) -> list[int]:
    """Argmax drafts, every row of the head computed anew for each of them."""
    hidden, drafts = model(tokens[:-1])[0], []
    for _ in range(k):
        row = Drafter(head, model, 128, 0).run(hidden, tokens[1:] + drafts)[-1:]
        drafts.append(int(model.logits(row).argmax()))
        hidden = torch.cat([hidden, row])
    return drafts


ORACLES = lookahead_window, lookahead_pool, medusa_tree, mtp_head, mtp_drafts


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle.__name__)
def test_proposals_are_those_of_a_slow_oracle(oracle, seed):
    oracle(seed)


@torch.no_grad()
@pytest.mark.parametrize(
    "oracle, owner, changes",
    [
        (lookahead_window, lookahead, {"window_layout": mistakes.window_off_by_one}),
        (lookahead_pool, lookahead.Pool, {"after": mistakes.aliased_pool}),
        (medusa_tree, medusa, {"propose": mistakes.hidden_of_the_round_before}),
        (mtp_head, MTPHead, {"layers": mistakes.token_first}),
        (mtp_drafts, Drafter, {"extend": mistakes.hidden_before_the_norm}),
        (mtp_drafts, Drafter, {"extend": mistakes.stale_rows, "chain": mistakes.chain_remembered}),
        (mtp_drafts, Drafter, {"chain": mistakes.position_off_by_one}),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_the_oracle_sees_a_mistake_that_no_output_shows(oracle, owner, changes):
    with mock.patch.multiple(owner, **changes), pytest.raises(AssertionError):
        for seed in range(3):
            oracle(seed)
