"""Behaviour specific to each method: proposals, lengths, tree shapes, bad input."""

import math
import random

import pytest
import torch
from conftest import (
    AUTO,
    NEEDS,
    TOKENIZER,
    byte_model,
    byte_tokenizer,
    method_options,
    random_model,
    random_tokens,
)
from tokenizers import models

from minispec import UserError
from minispec.certify.toys import random_mtp_head
from minispec.generate import decode
from minispec.generate.drafters import check_vocabularies
from minispec.methods.fastmtp import fastmtp
from minispec.methods.prompt_lookup import NgramIndex, lookup
from minispec.methods.speculative import speedup, tokens_per_pass
from minispec.model import Transformer
from minispec.sampling import Sampling, Seeded
from minispec.tree import Tree


@pytest.mark.parametrize("seed", range(20))
def test_lookup_equals_its_definition(seed):
    """Prefer longer matches, then later ones; also in a text that grows by some tokens a round."""
    rng = random.Random(seed)
    text = rng.choices(range(rng.randint(1, 4)), k=80)
    for longest, shortest in (3, 1), (5, 3), (1, 1):
        index, end = NgramIndex(longest, shortest), 0
        while (end := end + rng.randint(1, 6)) <= len(text):
            tokens = text[:end]
            ends = [i for n in range(longest, shortest - 1, -1) for i in range(end - 1, n - 1, -1)
                    if tokens[i - n : i] == tokens[-n:]] + [end]  # fmt: skip
            assert index.match_end(tokens) == ends[0]
            if shortest == 1:
                assert lookup(tokens, 4, longest) == tokens[ends[0] :][:4]


def test_n_may_be_larger_than_any_match():
    assert lookup([1, 2, 3, 1, 2], 1, 10**12) == [3]


@pytest.mark.parametrize("repeated", [False, True])
def test_a_round_of_lookup_costs_the_same_however_long_the_text_is(repeated):
    class Text(list):
        def __getitem__(self, key):
            read.append(len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1)
            return super().__getitem__(key)

    read, index, costs = [], NgramIndex(5, 3), []
    text = Text(i % 50 if repeated else i for i in range(100))
    for _ in range(50):
        read.clear()
        index.match_end(text)
        costs.append(sum(read))
        text.extend(range(len(text), len(text) + 4))
    assert max(costs[1:]) == min(costs[1:]) < 100


def test_a_merged_tree_shares_prefixes():
    tree = Tree.merged(9, [[3, 4], [3, 5], [], [6], [3, 4, 7]])
    assert tree.tokens == [9, 3, 4, 5, 6, 7] and tree.parents == [-1, 0, 1, 1, 0, 2]
    assert tree.depth.tolist() == [0, 1, 2, 2, 1, 3]
    assert tree.mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]


def test_rank_paths_pick_candidates_by_depth():
    tree = Tree.from_paths(9, [[0], [1], [0, 2], [1, 0]], [[10, 11], [20, 21, 22]])
    assert [tree.tokens_at(p) for p in ([0, 1, 3], [0, 2, 4])] == [[9, 10, 22], [9, 11, 20]]


def test_formulas_of_leviathan_et_al():
    """Equation 1 by direct summation; its limit at α = 1; theorem 3.8."""
    for alpha in (0.0, 0.3, 0.8, 1.0):
        for gamma in (1, 4, 7):
            expected = sum(alpha**i for i in range(gamma + 1))
            assert abs(tokens_per_pass(alpha, gamma) - expected) < 1e-12
    assert abs(speedup(0.8, 5, 0.1) - tokens_per_pass(0.8, 5) / 1.5) < 1e-12


@pytest.mark.parametrize("rows", [(32, 40), (40, 32)])
def test_vocabularies_may_differ_by_padding(rows):
    """Target and draft have the same 30 tokens, but embeddings of different sizes."""
    target, draft = (random_model(seed, vocab_size=n) for seed, n in enumerate(rows))
    prompt = random_tokens(5, vocab=30)
    for temperature in (0.0, 1.0):
        plain = decode(target, None, prompt, max_new_tokens=20)
        run = decode(target, None, prompt, "speculative", draft=draft, max_new_tokens=20,
                     temperature=temperature, top_p=0.9)  # fmt: skip
        assert max(run.tokens) < rows[0]
        if temperature == 0:
            assert run.tokens == plain.tokens


def test_a_draft_may_have_other_added_tokens_but_not_another_vocabulary():
    """Any draft is lossless, but one with another vocabulary would hardly ever be right."""
    more, other, target = byte_tokenizer(), byte_tokenizer(), byte_model()
    more.backend.add_tokens(["extra"])
    check_vocabularies(TOKENIZER, more, target, byte_model())
    check_vocabularies(more, TOKENIZER, target, byte_model())
    plain = decode(target, TOKENIZER, "hello", max_new_tokens=20)
    draft = random_model(1, vocab_size=TOKENIZER.size + 1)
    run = decode(target, TOKENIZER, "hello", "speculative", draft=draft, max_new_tokens=20)
    assert run.tokens == plain.tokens
    for vocab in (["a", "b"], ["b", "a", "c"]):  # other tokens, and the same with other ids
        other.backend.model = models.BPE({token: i for i, token in enumerate(vocab)}, [])
        with pytest.raises(UserError, match="the draft's vocabulary differs"):
            check_vocabularies(TOKENIZER, other, target, byte_model())
    with pytest.raises(UserError, match="the draft's vocabulary differs"):
        check_vocabularies(None, None, random_model(), byte_model())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", NEEDS)
def test_a_broken_draft_costs_speed_but_changes_no_output(method, temperature):
    """All weights of the draft are NaN, and so are its logits."""
    model = random_model()
    options = method_options(model)[method]
    (drafter,) = (x for x in options.values() if isinstance(x, torch.nn.Module))
    target_weights = {p.data_ptr() for p in model.parameters()}  # a draft may share some
    for p in drafter.parameters():
        if p.data_ptr() not in target_weights:
            p.data.fill_(math.nan)
    policies = [{}, *({argument: "auto"} for name, argument in AUTO if name == method)]
    for policy in policies:
        run = decode(model, None, [1, 2, 3], method, max_new_tokens=20, temperature=temperature,
                     **options | policy)  # fmt: skip
        assert all(0 <= token < 32 for token in run.tokens) and len(run.tokens) == 20
        if temperature == 0:
            assert run.tokens == decode(model, None, [1, 2, 3], max_new_tokens=20).tokens


def test_fastmtp_reads_the_hidden_states_of_every_prefilled_chunk(monkeypatch):
    """The head's cache must equal that of a single pass over the whole prompt."""
    model, head = random_model(context=1200), random_mtp_head(random_model(), 2)
    prompt, caches = random_tokens(1100), []
    for chunk in 300, 2000:
        monkeypatch.setattr(Transformer.prefill_chunks, "__defaults__", (chunk,))
        kept, new_cache = [], head.new_cache
        monkeypatch.setattr(head, "new_cache", lambda n: kept.append(new_cache(n)) or kept[0])
        rounds = fastmtp(model, prompt, Sampling(), Seeded(), head=head)
        next(rounds)
        assert kept[0].length == len(prompt) - 1  # the root of the first tree follows later
        next(rounds)
        monkeypatch.undo()
        assert kept[0].length == len(prompt) - 1
        caches.append(kept[0].kv[:, :, :, : len(prompt) - 1])
    assert torch.allclose(*caches, atol=1e-10)
