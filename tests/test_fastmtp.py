"""FastMTP: the head, its chain of drafts, compressed vocabularies."""

import random

import pytest
import torch
from conftest import SHARED, needs_shared, random_model
from tokenizers import Tokenizer as Backend

from minispec import Sampling
from minispec.generate import decode
from minispec.methods.fastmtp import Drafter, FullVocabulary
from minispec.methods.vocabulary import Compressed, Language, Subset, count, votes
from minispec.sampling import Seeded
from minispec.tokenizer import Tokenizer
from minispec.toys import random_head, switching

# ---- the head and its drafts ---------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 6])
def test_k_drafts_a_round_but_none_before_a_pass(k):
    model = random_model(context=60)
    run = decode(model, None, [5], "fastmtp", head=random_head(model, 0), k=k, max_new_tokens=99)
    drafted = [len(step.tree) - 1 for step in run.rounds]
    assert drafted[0] == 0 and set(drafted[1:-5]) == {k}  # at the end of the context fewer


@pytest.mark.parametrize("compressed", [False, True])
def test_sampled_drafts_carry_the_distribution_they_were_drawn_from(compressed):
    model = random_model(2)
    drafter = Drafter(random_head(model, 0), model, 64, 0)
    drafter.extend(model([1, 2, 3])[0], [2, 3, 4])
    subset = switching(model).pick([0] * 9) if compressed else FullVocabulary(model)
    guess, draft_probs = drafter.chain(3, Sampling(1.0), Seeded(0), subset)
    assert len(guess) == len(draft_probs) == 3 and drafter.cache.length == 3
    hidden, tokens = model([1, 2, 3])[0], [2, 3, 4]
    for token, q in zip(guess, draft_probs):
        row = Drafter(drafter.head, model, 64, 0).run(hidden, tokens)[-1:]
        p = model.logits(row)[0].softmax(-1)
        outside = [i for i in range(32) if compressed and i not in subset.ids]
        p[outside] = 0.0
        assert torch.allclose(q, p / p.sum()) and q[token] > 0
        assert bool(outside) == compressed and float(q[outside].sum()) == 0
        hidden, tokens = torch.cat([hidden, row]), tokens + [token]


def test_what_a_run_leaves_behind_can_be_trained_on():
    """Runs are in inference mode, whose tensors no gradient passes; what they keep is not."""
    model = random_model()
    words = switching(model)
    run = decode(model, None, [1, 2], "fastmtp", head=random_head(model, 0), vocabulary=words,
                 max_new_tokens=9)  # fmt: skip
    model.model.norm.weight.requires_grad_(True)
    model.model.layers[0].input_layernorm.weight.requires_grad_(True)
    mask = run.rounds[-1].tree.mask
    hidden = model([3] * len(mask), run.cache, mask=mask)
    words.pick([1, 2]).logits(hidden).square().sum().backward()
    for norm in (model.model.norm, model.model.layers[0].input_layernorm):
        assert norm.weight.grad.abs().sum() > 0


# ---- vocabularies --------------------------------------------------------------------------------


def test_the_set_is_by_frequency_with_forced_tokens_first():
    texts = [[5, 5, 5, 7, 7, 2], [2, 9, 9, 9, 9]]
    assert count(texts, [3, 7], 4) == Language((3, 7, 9, 5), (0, 2, 4, 3))
    assert count(texts, [], 99).ids == (9, 5, 2, 7)  # equal counts by id


def test_the_small_head_is_the_full_one_s_rows():
    model, token = random_model(), torch.tensor([1])
    subset, hidden = Subset(model.lm_head.weight, [4, 30, 7]), model([1, 2])[0]
    assert len(subset) == 3
    assert torch.allclose(subset.logits(hidden), model.logits(hidden)[:, [4, 30, 7]])
    assert subset.full(token).tolist() == [30]
    p = subset.scatter(torch.tensor([0.5, 0.2, 0.3]))
    assert p.shape == (32,) and p[[4, 30, 7]].tolist() == pytest.approx([0.5, 0.2, 0.3])
    whole = FullVocabulary(model)
    assert torch.equal(whole.logits(hidden), model.logits(hidden))
    assert whole.full(token) is token and whole.scatter(p) is p


def test_the_language_is_that_of_the_latest_tokens():
    languages = {
        "en": Language((0, 1, 2, 3), (50, 90, 90, 50)),
        "zh": Language((0, 11, 12), (50, 80, 80)),
        "code": Language((0, 21, 22, 3), (50, 70, 70, 50)),
    }
    words = Compressed(languages, random_model())
    assert words.votes == {1: "en", 2: "en", 11: "zh", 12: "zh", 21: "code", 22: "code"}
    assert words.spoken([1, 2, 0, 1]) == ("en",)
    assert words.spoken([1, 2] * 20 + [11, 12] * 20) == ("zh",)  # the text has changed
    assert words.spoken([1, 1, 21, 22]) == ("code", "en")  # mixed
    assert words.spoken([1] * 9 + [21]) == ("en",)
    assert words.spoken([0, 3, 99]) == words.spoken([]) == ("code", "en", "zh")
    assert set(words.pick([1, 1, 21, 22]).ids.tolist()) == {0, 1, 2, 3, 21, 22}
    assert words.pick([11]) is words.pick([12, 11])
    assert votes({"one": Language((1,), (5,))}) == {}


def test_another_vocabulary_than_the_text_s_costs_speed_not_text():
    model, rng = random_model(3), random.Random(0)
    words = Compressed({"wrong": count([rng.choices(range(32), k=9)], [], 4)}, model)
    plain = decode(model, None, [1, 2, 3], max_new_tokens=40)
    result = decode(model, None, [1, 2, 3], "fastmtp", head=random_head(model, 1),
                    vocabulary=words, max_new_tokens=40)  # fmt: skip
    assert result.tokens == plain.tokens


@needs_shared
def test_frequencies_over_a_real_large_vocabulary():
    """Qwen2's 151,643 tokens: a language's set is small, and a text's language is told."""
    folder = SHARED / "tokenizers" / "qwen2"
    tokenizer = Tokenizer(Backend.from_file(str(folder / "tokenizer.built.json")))
    texts = {
        "en": (SHARED / "data" / "train" / "stories_en.txt").read_text()[:250_000],
        "zh": (SHARED / "data" / "train" / "stories_zh.txt").read_text()[:120_000],
    }
    special = tokenizer.special_ids
    languages = {
        name: count([tokenizer.encode(text[2000:])], special, 8000) for name, text in texts.items()
    }
    model = random_model(vocab_size=tokenizer.size, hidden_size=8, heads=2, kv_heads=1)
    words = Compressed(languages, model)
    for name, text in texts.items():
        assert words.spoken(tokenizer.encode(text[:200])) == (name,)
        held_out, frequent = tokenizer.encode(text[:2000]), set(languages[name].ids)
        inside = sum(token in frequent for token in held_out) / len(held_out)
        assert inside > 0.9 and len(frequent) < tokenizer.size / 15
        assert set(special) <= frequent
