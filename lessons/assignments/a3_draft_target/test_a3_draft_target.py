"""The certifier's exact sums and greedy identity; the draft against passes without a cache. The
target's passes and their rows are counted: plain decoding is lossless, but speeds up nothing."""

import random

import pytest
import torch
import torch.nn.functional as F

from lessons.assignments.grading import expected
from minispec.certify.methods.cases import SAMPLINGS
from minispec.certify.toys import (
    Recorder,
    Toy,
    exact_distribution,
    first_tokens,
    negated,
    small_model,
    total_variation,
)
from minispec.methods import speculative
from minispec.methods.autoregressive import autoregressive
from minispec.model import Transformer
from minispec.sampling import Sampling, Seeded, probs

STAYS = (Transformer,)
GREEDY, WARM = Sampling(), Sampling(0.8, top_k=5)
GRADED = {
    "lookup": "lookup, minispec.methods.prompt_lookup.NgramIndex.match_end", "propose": "propose",
    "lossless": "speculative", "caches": "speculative", "formula": "tokens_per_pass, speedup",
}  # fmt: skip


def greedy_after(model, tokens: list[int], n: int) -> list[int]:
    """`n` argmax tokens, without any cache."""
    more: list[int] = []
    for _ in range(n):
        more.append(int(model.logits(model(tokens + more)[0, -1]).argmax()))
    return more


# ---- the text as its own draft -------------------------------------------------------------------


@pytest.mark.points(3, task="lookup")
def test_lookup_finds_the_longest_and_then_the_latest_repeat(impl, seeds):
    for seed in seeds(60):
        rng = random.Random(seed)
        tokens = rng.choices(range(3), k=rng.randint(1, 25))
        k, ngram = rng.randint(0, 5), rng.randint(1, 4)
        expected: list[int] = []
        for n in range(ngram, 0, -1):
            ends = [e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[-n:]]
            if ends:
                expected = tokens[ends[-1] : ends[-1] + k]
                break
        guess = impl.lookup(list(tokens), k, ngram)
        assert guess == expected, (
            f"{tokens}, at most {k}, n-grams up to {ngram}: {expected}, not {guess}: take the "
            "longest n-gram that occurred before, where it last did, and what followed, however "
            "short"
        )


# ---- drafting ------------------------------------------------------------------------------------


@pytest.mark.points(2, task="propose")
def test_greedy_drafts_are_the_draft_s_argmax_and_one_hot(impl, seeds):
    for seed in seeds(4):
        draft, rng = small_model(seed), random.Random(seed)
        tokens, k = rng.choices(range(24), k=rng.randint(1, 9)), rng.randint(1, 5)
        cache = draft.new_cache()
        guess, draft_probs = impl.propose(draft, cache, tokens, k, GREEDY, Seeded(), 24)
        expected = greedy_after(draft, tokens, k)
        assert guess == expected, f"greedy drafts after {tokens}: {expected}, not {guess}"
        assert draft_probs == [None] * k, (
            "an argmax was not drawn from the softmax: its distribution is one-hot, which is None"
        )


@pytest.mark.points(4, task="propose")
def test_sampled_drafts_come_with_the_distribution_they_were_drawn_from(impl, seeds):
    for seed, rows in zip(seeds(4), (24, 24, 20, 30)):  # the draft's vocabulary; the target's is 24
        draft, randomness = small_model(seed, vocab=rows), Recorder(seed)
        tokens = random.Random(seed).choices(range(20), k=5)
        cache = draft.new_cache()
        guess, draft_probs = impl.propose(draft, cache, tokens, 4, WARM, randomness, 24)
        assert guess == randomness.drawn and len(guess) == 4, (
            "k = 4 tokens, each as `randomness.categorical` gave it: no draft may be dropped after "
            "it was drawn"
        )
        for i, (q, drawn) in enumerate(zip(draft_probs, randomness.probs, strict=True)):
            known = [t if t < rows else 0 for t in tokens + guess[:i]]
            logits = draft.logits(draft(known)[0, -1:])[:, :24]
            right = F.pad(probs(logits, WARM)[0], (0, 24 - logits.shape[-1]))
            assert torch.equal(q, F.pad(drawn, (0, 24 - len(drawn)))), (
                f"draft {i} was drawn from another distribution than is returned for it"
            )
            assert (q - right).abs().max() < 1e-9, (
                f"draft {i}: q is the draft's own distribution after its warpers, over the "
                "target's tokens"
            )


@pytest.mark.points(2, task="propose")
def test_drafting_feeds_only_what_the_cache_lacks(impl, seeds):
    for i, seed in enumerate(seeds(4)):
        draft, tokens = small_model(seed), random.Random(seed).choices(range(24), k=8)
        cache = draft.new_cache()
        draft(tokens[: 3 + i], cache)
        cache.length = 3 + i
        guess, _ = impl.propose(draft, cache, tokens, 3, GREEDY, Seeded(), 24)
        assert guess == greedy_after(draft, tokens, 3), "a cache that lags changes the drafts"
        assert cache.length == len(tokens) + 2, (
            f"after 3 drafts the cache holds the {len(tokens)} tokens and the first two drafts, "
            f"not {cache.length} rows: the last one is fed next round, if it is accepted"
        )


# ---- the loop ------------------------------------------------------------------------------------


@pytest.mark.points(6, task="lossless")
@pytest.mark.parametrize(
    "label, k", [("T=1", 1), ("T=1", 2), ("T=0.7 top-k 2", 2), ("T=1.5 top-p 0.8", 1)]
)
def test_the_certifier_finds_exactly_the_target_s_distribution(impl, seeds, label, k):
    """Every random outcome of the first tokens, on a target that every stale row changes."""
    (seed,) = seeds(1)
    model, draft, prompt = Toy(seed + 5), Toy(seed + 77), [1, 0, 1, 1, 0]

    arguments, options = (model, prompt, SAMPLINGS[label], 2), {"draft": draft, "k": k}
    given = expected(impl.speculative, *arguments, **options)
    d = total_variation(given.tokens, exact_distribution(autoregressive, *arguments))
    assert d < 1e-12, (
        f"{label}, k={k}: the output is {d:.1e} (total variation) away from plain decoding: q is "
        "what the draft was drawn from, and p and q each come after their warpers"
    )
    right = expected(speculative.speculative, *arguments, **options)
    for what in "passes", "rows":
        one, other = getattr(given, what), getattr(right, what)
        assert abs(one - other) < 1e-9, (
            f"{label}, k={k}: the output is the target's, but two tokens take {one:.3f} {what} of "
            f"the target on average instead of {other:.3f}: every round scores k drafts in one "
            "pass, and accepts as many of them as the rule allows"
        )


@pytest.mark.points(3, task="lossless")
def test_greedy_tokens_are_plain_decoding_s(impl, seeds):
    for i, seed in enumerate(seeds(2)):
        model, other = small_model(seed), small_model(seed + 50)
        prompt = random.Random(seed).choices(range(24), k=1 + 3 * i)
        plain = list(first_tokens(autoregressive, model, prompt, GREEDY, Seeded(), 8))
        for draft, k, warm in (
            (other, 3, None), (other, 2, Sampling(1.0)), (model, 1, None), (negated(model), 3, None)
        ):  # fmt: skip
            steps = impl.speculative(
                model, prompt, GREEDY, Seeded(), draft=draft, k=k, draft_sampling=warm
            )
            rounds = [step for step, _ in zip(steps, range(9))]
            tokens = [t for step in rounds for t in step.tokens][:8]
            assert tokens == plain, f"greedy, k={k}: {tokens} instead of {plain}"
            drawn = [step.tree.drawn_from(1) is not None for step in rounds[1:]]
            assert drawn == [warm is not None] * 8, (
                f"draft_sampling {warm}: the draft draws with it, or, where it is None, as the "
                "target does; at temperature 0 its distributions are one-hot"
            )


@pytest.mark.points(3, task="caches")
def test_both_caches_follow_the_text(impl, seeds):
    """The target's rows are compared with a fresh pass, the draft's show in what it drafts."""
    for kept, seed in enumerate(seeds(3)):  # `kept` rows are from an earlier run
        model, draft = small_model(seed, vocab=4), small_model(seed + 50, vocab=4)
        cache, tokens = model.new_cache(), [1, 2, 3]
        model.prefill(tokens[:kept], cache)
        steps = impl.speculative(model, tokens, GREEDY, Seeded(), cache=cache, draft=draft, k=3)
        for round_, step in zip(range(9), steps):
            if round_:
                expected = greedy_after(draft, tokens, 3)
                assert step.tree.tokens == [tokens[-1], *expected], (
                    f"round {round_}: the tree holds {step.tree.tokens}, but the draft says "
                    f"{expected} after the text: roll its cache back to the accepted tokens, and "
                    "catch up after a full match"
                )
            else:
                assert step.tokens == [] and step.tree is None, "the first step is the prefill's"
            tokens = tokens + step.tokens
            assert cache.length == len(tokens) - 1, (
                f"round {round_}: {cache.length} rows for all but the last of {len(tokens)} tokens"
            )
            fresh = model.new_cache()
            model(tokens[:-1], fresh)
            rows, right = (torch.stack(each.k)[:, :, : cache.length] for each in (cache, fresh))
            worst = (rows - right).abs().max()
            assert worst < 1e-9, (
                f"round {round_}: a row of the target's cache is not what the text gives"
            )


@pytest.mark.points(2, task="caches")
def test_a_draft_that_is_the_target_gives_k_plus_one_tokens_a_pass(impl, seeds):
    (seed,) = seeds(1)
    model = small_model(seed + 1)
    for k in (4, 1):
        steps = impl.speculative(model, [1, 2], Sampling(1.0), Seeded(seed), draft=model, k=k)
        counts = [len(step.tokens) for step, _ in zip(steps, range(8))][1:]
        assert counts == [k + 1] * 7, (
            f"k={k}: {counts} tokens a round; q = p accepts all k drafts and adds one bonus token"
        )


# ---- what it should bring ------------------------------------------------------------------------


@pytest.mark.points(3, task="formula")
def test_the_expectation_is_the_sum_over_what_may_be_accepted(impl):
    for alpha in (0.0, 0.1, 0.35, 0.8, 0.999, 1.0):
        for gamma in (1, 2, 5, 9):
            expected = sum(alpha**i for i in range(gamma + 1))
            given = impl.tokens_per_pass(alpha, gamma)
            assert abs(given - expected) < 1e-9, (
                f"α={alpha}, γ={gamma}: 1 + α + … + α^γ = {expected:.4f}, not {given:.4f}"
            )


@pytest.mark.points(1, task="formula")
def test_the_speedup_pays_for_the_drafts(impl):
    for alpha, gamma, c in ((0.8, 5, 0.1), (0.5, 3, 0.0), (1.0, 4, 0.25), (0.0, 7, 1.0)):
        expected = sum(alpha**i for i in range(gamma + 1)) / (gamma * c + 1)
        given = impl.speedup(alpha, gamma, c)
        assert abs(given - expected) < 1e-9, (
            f"α={alpha}, γ={gamma}, c={c}: tokens a pass over γc + 1 is {expected:.4f}"
        )
