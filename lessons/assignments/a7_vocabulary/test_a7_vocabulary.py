"""Sets by counting, logits by rows of lm_head, the certifier on drafts from a subset."""

import random

import pytest
import torch

from minispec.certify.toys import (
    exact_distribution,
    first_tokens,
    random_mtp_head,
    small_model,
    total_variation,
)
from minispec.methods.autoregressive import autoregressive
from minispec.methods.fastmtp import fastmtp
from minispec.methods.vocabulary import MAJORITY, RECENT_TOKENS, VOTE_RATIO, Language
from minispec.sampling import Sampling, Seeded

GRADED = {
    "count": "count",
    "subset": "Subset.__init__, Subset.__len__, Subset.logits, Subset.to_full_ids",
    "scatter": "Subset.__init__, Subset.scatter",
    "lossless": "Subset.__init__, Subset.logits, Subset.to_full_ids, Subset.scatter",
    "votes": "votes", "detect_languages": "Compressed.detect_languages",
    "select": "Compressed.select",
}  # fmt: skip


@pytest.mark.points(3, task="count")
def test_the_set_is_by_frequency_with_forced_tokens_first(impl, seeds):
    for seed in seeds(30):
        rng = random.Random(seed)
        texts = [rng.choices(range(9), k=rng.randint(0, 12)) for _ in range(rng.randint(0, 4))]
        forced, size = rng.sample(range(12), rng.randint(0, 3)), rng.randint(1, 12)
        forced = forced + forced[:1]  # a tokenizer may name one twice
        flat = [token for text in texts for token in text]
        others = sorted(set(flat) - set(forced), key=lambda t: (-flat.count(t), t))
        ids = (list(dict.fromkeys(forced)) + others)[:size]
        language = impl.count((list(text) for text in texts), list(forced), size)
        assert tuple(language.ids) == tuple(ids), (
            f"{texts}, forced {forced}, {size} tokens: {ids} instead of {list(language.ids)}: "
            "forced ones first, then by count, equal counts by id; no token twice"
        )
        assert tuple(language.counts) == tuple(map(flat.count, ids)), "counts, in the ids' order"


@pytest.mark.points(3, task="subset")
def test_the_small_head_is_rows_of_the_full_one(impl, seeds):
    for seed in seeds(6):
        rng, model = random.Random(seed), small_model(seed)
        ids, hidden = rng.sample(range(24), rng.randint(1, 20)), model([1, 2, 3])
        subset = impl.Subset(model.lm_head.weight, list(ids))
        logits = subset.logits(hidden)
        assert logits.shape == (1, 3, len(ids)), f"(..., d) -> (..., {len(ids)}), one a token"
        assert (logits - model.logits(hidden)[..., ids]).abs().max() < 1e-9, (
            f"entry j is the logit of token ids[j], for ids {ids} in their order"
        )
        assert len(subset) == len(ids), f"{len(ids)} tokens, not {len(subset)}"
        found = subset.to_full_ids(torch.arange(len(ids))).tolist()
        assert found == ids, f"number j is token ids[j], so {ids}, not {found}"


@pytest.mark.points(2, task="scatter")
def test_a_scattered_distribution_is_0_elsewhere(impl, seeds):
    for seed in seeds(6):
        rng, model = random.Random(seed), small_model(seed)
        ids = rng.sample(range(24), rng.randint(1, 20))
        generator = torch.Generator().manual_seed(seed)
        probs = torch.rand(len(ids), generator=generator, dtype=torch.float64)
        probs = probs / probs.sum()
        right = torch.zeros(24, dtype=torch.float64)
        right[ids] = probs
        given = impl.Subset(model.lm_head.weight, list(ids)).scatter(probs)
        assert given.shape == (24,), "a distribution over the full vocabulary, (V,)"
        assert torch.equal(given, right), (
            "token ids[j] has the probability of entry j, all others 0: that is what a draft is "
            "drawn from"
        )


class Always:
    """A vocabulary that is one subset, whatever the text."""

    def __init__(self, subset):
        self.subset = subset

    def select(self, tokens: list[int]):
        return self.subset


@pytest.mark.points(4, task="lossless")
def test_the_certifier_finds_exactly_the_target_s_distribution(impl, seeds):
    """FastMTP's real loop drafts from the subset, through every random outcome."""
    (seed,) = seeds(1)
    model = small_model(seed + 4, vocab=3, layers=1)
    head = random_mtp_head(model, seed + 4)
    words = Always(impl.Subset(model.lm_head.weight, [2, 0]))

    def method(*arguments, **options):
        return fastmtp(*arguments, head=head, k=1, vocabulary=words, **options)

    d = total_variation(
        exact_distribution(method, model, [1, 0, 1], Sampling(1.0), 2),
        exact_distribution(autoregressive, model, [1, 0, 1], Sampling(1.0), 2),
    )
    assert d < 1e-12, (
        f"drafts from tokens [2, 0] of 3: the output is {d:.1e} (total variation) away from the "
        "target: `to_full_ids` and `scatter` must tell what was drawn, and from which distribution"
    )


@pytest.mark.points(1, task="lossless")
def test_greedy_text_does_not_depend_on_the_vocabulary(impl, seeds):
    (seed,) = seeds(1)
    model = small_model(seed + 2)
    plain = first_tokens(autoregressive, model, [3, 1, 4], Sampling(), Seeded(), 12)
    for ids in ([5], [23, 4, 0, 11]):
        words = Always(impl.Subset(model.lm_head.weight, ids))
        head = random_mtp_head(model, seed)
        steps = fastmtp(model, [3, 1, 4], Sampling(), Seeded(), head=head, vocabulary=words)
        tokens = tuple(t for step, _ in zip(steps, range(13)) for t in step.tokens)[:12]
        assert tokens == plain, f"drafts from tokens {ids}: {tokens} instead of {plain}"


def random_languages(rng: random.Random, names: str) -> dict[str, Language]:
    languages = {}
    for name in names:
        ids = rng.sample(range(20), rng.randint(1, 12))
        languages[name] = Language(tuple(ids), tuple(rng.choice((0, 1, 9, 99)) for _ in ids))
    return languages


@pytest.mark.points(3, task="votes")
def test_a_token_votes_where_it_is_far_more_frequent_than_anywhere_else(impl, seeds):
    for seed in seeds(30):
        rng = random.Random(seed)
        languages = random_languages(rng, "abc"[: rng.randint(2, 3)])
        share = {
            name: {t: n / (sum(each.counts) + 1) for t, n in zip(each.ids, each.counts)}
            for name, each in languages.items()
        }
        right = {}
        for token in range(20):
            for name in languages:
                rest = max(share[other].get(token, 0.0) for other in languages if other != name)
                if share[name].get(token, 0.0) > VOTE_RATIO * rest:
                    right[token] = name
        given = impl.votes(languages)
        assert given == right, (
            f"{languages}: {given} instead of {right}: a token votes for the language where its "
            f"share is more than {VOTE_RATIO} times that in every other"
        )


@pytest.mark.points(1, task="votes")
def test_one_language_alone_needs_no_votes(impl):
    assert impl.votes({"a": Language((1, 2), (5, 6))}) == {}, "there is none to tell it from"


def compressed(impl, languages: dict[str, Language], votes: dict[int, str]):
    words = impl.Compressed(languages, small_model(0))
    words.votes = votes
    return words


@pytest.mark.points(4, task="detect_languages")
def test_the_latest_tokens_tell_the_language(impl, seeds):
    languages = {name: Language((i,), (1,)) for i, name in enumerate("cab")}
    for seed in seeds(60):
        rng = random.Random(seed)
        known = {token: rng.choice("abc") for token in rng.sample(range(12), 8)}
        favourites = rng.sample(range(12), rng.randint(1, 12))
        tokens = rng.choices(favourites, k=rng.randint(0, 3 * RECENT_TOKENS))
        found = [known[t] for t in tokens[-RECENT_TOKENS:] if t in known]
        right = tuple(sorted(set(found))) or ("a", "b", "c")
        for name in "abc":
            if found and found.count(name) >= MAJORITY * len(found):
                right = (name,)
        given = compressed(impl, languages, known).detect_languages(list(tokens))
        assert given == right, (
            f"votes {''.join(found)!r} of the last {RECENT_TOKENS} tokens: {right}, not {given}: "
            f"one language that has {MAJORITY} of the votes, else all that have some; all where "
            "none votes"
        )


@pytest.mark.points(2, task="select")
def test_the_subset_is_the_union_of_what_is_spoken(impl):
    languages = {"a": Language((3, 1, 2), (9, 8, 7)), "b": Language((5, 1), (9, 9))}
    words = compressed(impl, languages, {})
    for names, ids in ((("a",), [3, 1, 2]), (("b",), [5, 1]), (("a", "b"), [3, 1, 2, 5])):
        words.detect_languages = lambda tokens, names=names: names
        picked = words.select([1, 2, 3])
        found = picked.to_full_ids(torch.arange(len(picked))).tolist()
        assert found == ids, f"{names}: tokens {ids}, each once, not {found}"
        assert words.select([4]) is picked, "rows of lm_head are copied once, not in every round"
