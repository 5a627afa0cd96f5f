"""FastMTP: the head, its chain of drafts, compressed vocabularies, training."""

import random

import pytest
import torch
from conftest import SHARED, needs_shared, random_model, random_tokens
from tokenizers import Tokenizer as Backend

from minispec import Sampling, certify, generate
from minispec.generate import decode
from minispec.methods.fastmtp import Drafter, FullVocabulary
from minispec.methods.vocabulary import Compressed, Language, Subset, count, votes
from minispec.sampling import Seeded
from minispec.tokenizer import Tokenizer
from minispec.toys import random_head, switching

# ---- the head and its drafts ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4, 8))
def test_head_cache_and_drafts_are_those_of_fresh_passes(seed):
    """The head is its formula; after every round its cache holds the rows that a fresh pass over
    the committed tokens makes; and each draft is that of fresh passes over all rows before it."""
    assert certify.head_problem(seed) is None and certify.drafts_problem(seed) is None


@pytest.mark.parametrize("k", range(1, 7))
def test_greedy_tokens_are_plain_decoding_s(k):
    for seed in range(2):
        model, prompt = random_model(seed), random_tokens(1 + 3 * seed, seed)
        head = random_head(model, seed)
        plain = decode(model, None, prompt, max_new_tokens=30)
        for words in (None, switching(model)):
            result = decode(model, None, prompt, "fastmtp", head=head, k=k, vocabulary=words,
                            max_new_tokens=30)  # fmt: skip
            assert result.tokens == plain.tokens
            assert [len(step.tree) for step in result.rounds[1:-1]] == [k + 1] * (
                len(result.rounds) - 2
            )


def test_a_prompt_of_one_token_and_the_end_of_the_context():
    model = random_model(context=40)
    plain = decode(model, None, [5], max_new_tokens=1000)
    result = decode(model, None, [5], "fastmtp", head=random_head(model, 0), max_new_tokens=1000)
    assert result.tokens == plain.tokens and result.finish_reason == "context"
    assert len(result.rounds[0].tree) == 1  # nothing to draft from before a pass


def test_it_goes_on_from_a_kept_cache():
    """The rows of a kept cache have no hidden states: the head begins behind them."""
    model, cache = random_model(), random_model().new_cache()
    head, prompt = random_head(model, 1), random_tokens(9)
    for n in (9, 4, 12):
        plain = decode(model, None, prompt, max_new_tokens=n)
        options = {"head": head, "cache": cache, "max_new_tokens": n}
        assert decode(model, None, prompt, "fastmtp", **options).tokens == plain.tokens
        prompt = prompt + plain.tokens + [3]


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
        "en": (SHARED / "data" / "train" / "stories_en.txt").read_text()[:400_000],
        "zh": (SHARED / "data" / "train" / "stories_zh.txt").read_text()[:200_000],
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


# ---- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tree", "4"], "--tree is for --method medusa or medusa-typical, not for fastmtp"),
        (["--heads", "nowhere"], "no such directory: nowhere"),
        (["--vocabulary", "nowhere.json"], "no such vocabulary file"),
        (["--k", "many"], "--k: many must be a whole number, at least 1"),
        (["--vocabulary-size", "0"], "0 must be a whole number, at least 1"),
        (["--vocabulary", "none", "--vocabulary-size", "9"], "needs a --vocabulary"),
    ],
)
def test_wrong_flags_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        generate.main(["x", "--method", "fastmtp", *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.gpu
def test_on_a_gpu_it_equals_plain_decoding():
    model, head = random_model().cuda(), random_head(random_model(), 0).cuda()
    plain = decode(model, None, [1, 2, 3], max_new_tokens=40)
    for k in (3, "auto"):
        result = decode(model, None, [1, 2, 3], "fastmtp", head=head, k=k, max_new_tokens=40)
        assert result.tokens == plain.tokens
