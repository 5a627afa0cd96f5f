"""Wrong answers to assignment 3. Those of the loop are in what it calls, or in what it commits."""

from functools import partial

from lessons.assignments import mutants
from lessons.assignments.grading import Mistake
from minispec.methods import speculative as package
from minispec.methods.autoregressive import autoregressive
from minispec.methods.prompt_lookup import NgramIndex, lookup
from minispec.sampling import Sampling, draw, probs

accept, tokens_per_pass = package.accept, package.tokens_per_pass
propose, speculative = package.propose, package.speculative
DRAW, PROPOSE = "minispec.methods.speculative.draw", "minispec.methods.speculative.propose"


def first_occurrence(tokens, k, ngram):
    for n in range(min(ngram, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + k]
    return []


def shortest_first(tokens, k, ngram):
    for n in range(1, ngram + 1):
        if guess := tokens[NgramIndex(n, n).match_end(tokens) :]:
            return guess[:k]
    return []


def longest_only(tokens, k, ngram):
    end = NgramIndex(ngram, ngram).match_end(tokens)
    return tokens[end : end + k]


def with_the_match(tokens, k, ngram):
    end = NgramIndex(ngram, 1).match_end(tokens)
    return tokens[end - 1 : end - 1 + k] if end < len(tokens) else []


def all_that_followed(tokens, k, ngram):
    return lookup(tokens, len(tokens), ngram)


def warped_twice(logits, sampling, randomness):
    """q is that of temperature 1, whatever the token was drawn with."""
    token, q = draw(logits, sampling, randomness)
    return token, q if q is None else probs(logits, Sampling(1.0))[0]


def without_catching_up(draft, cache, tokens, *arguments):
    """Only the newest token is fed."""
    missing = tokens[cache.length :]
    return propose(draft, cache, tokens[: cache.length] + missing[-1:], *arguments)


def feeds_the_last_draft(draft, cache, tokens, k, *arguments):
    guess, draft_probs = propose(draft, cache, tokens, k, *arguments)
    draft(guess[-1:], cache)
    cache.commit([0])
    return guess, draft_probs


def from_the_beginning(draft, cache, tokens, *arguments):
    """The whole text is fed again, behind what the cache holds."""
    stale, cache.length = cache.length, 0
    drafted = propose(draft, cache, tokens, *arguments)
    cache.length = cache.length + stale
    return drafted


def drawn_by_itself(logits, sampling, randomness):
    """The draft draws, but does not keep what from."""
    token, _ = draw(logits, sampling, randomness)
    return token, None


def without_sampling(model, prompt, sampling, randomness, **options):
    """The draft takes its argmax, whatever `draft_sampling` is."""
    return speculative(
        model, prompt, sampling, randomness, **options | {"draft_sampling": Sampling()}
    )


def with_rule(rule):
    return {"speculative": partial(speculative, rule=rule)}


def without_the_bonus(target, tree, randomness):
    """After a full match the last draft is taken back, and counts as the fresh token."""
    path, fresh, *_ = accept(target, tree, randomness)
    full = len(path) == len(tree) > 1
    return (path[:-1], tree.tokens[path[-1]]) if full else (path, fresh)


def no_cache(model, prompt, sampling, randomness, *, cache=None, **options):
    """The given cache is not used."""
    return speculative(model, prompt, sampling, randomness, **options)


def step_for_the_prefill_missing(*arguments, **options):
    steps = speculative(*arguments, **options)
    next(steps)
    yield from steps


def plain(model, prompt, sampling, randomness, *, cache=None, **options):
    """Plain decoding: the draft is ignored."""
    return autoregressive(model, prompt, sampling, randomness, cache=cache)


def power_sum(terms):
    return lambda alpha, gamma: sum(alpha**i for i in terms(gamma))


MISTAKES = [
    Mistake("lookup", "it takes the first occurrence: the latest is the better guess",
            {"lookup": first_occurrence}),
    Mistake("lookup", "it begins with the shortest n-gram: begin with the longest",
            {"lookup": shortest_first}),
    Mistake("lookup", "if the longest n-gram never occurred, shorter ones are not tried",
            {"lookup": longest_only}),
    Mistake("lookup", "the guess begins with the token that matched",
            {"lookup": with_the_match}),
    Mistake("lookup", "it copies more than k tokens",
            {"lookup": all_that_followed}),
    Mistake("propose, lossless", "an argmax draft is returned with its softmax: it is one-hot",
            {DRAW: mutants.greedy_draft_with_softmax}),
    Mistake("propose, lossless", "a draft is dropped after it was drawn, because it is unlikely",
            {PROPOSE: mutants.confident_prefix, "propose": mutants.confident_prefix}),
    Mistake("propose, lossless", "a draft is drawn from fewer tokens than q holds",
            {PROPOSE: mutants.reduced_vocabulary, "propose": mutants.reduced_vocabulary}),
    Mistake("propose", "q is the softmax before the warpers", {DRAW: warped_twice}),
    Mistake("lossless", "`draft_sampling` has no effect", {"speculative": without_sampling}),
    Mistake("propose", "a drawn draft is returned as one-hot: return its q",
            {DRAW: drawn_by_itself}),
    Mistake("propose, caches", "only the newest token is fed: feed all that the cache lacks",
            {PROPOSE: without_catching_up, "propose": without_catching_up}),
    Mistake("propose", "the last draft is fed as well",
            {"propose": feeds_the_last_draft}),
    Mistake("propose", "the whole text is fed again", {"propose": from_the_beginning}),
    Mistake("lossless", "it accepts too often, as with p / (0.8 q)", with_rule(mutants.lenient)),
    Mistake("lossless", "the bonus token is the argmax: draw it", with_rule(mutants.argmax_bonus)),
    Mistake("lossless, caches", "a draft is judged by the distribution after it",
            with_rule(mutants.probs_after_the_draft)),
    Mistake("lossless, caches", "a stale draft row is kept: truncate the draft's cache",
            {"minispec.cache.KVCache.truncate": mutants.truncate_one_short}),
    Mistake("lossless, caches", "it is plain decoding: nothing is drafted", {"speculative": plain}),
    Mistake("caches", "a full match gives no bonus token", with_rule(without_the_bonus)),
    Mistake("caches", "the given cache is not used", {"speculative": no_cache}),
    Mistake("caches", "the first step is not the prefill's",
            {"speculative": step_for_the_prefill_missing}),
    Mistake("formula", "the bonus token is left out: the sum goes up to α^γ",
            {"tokens_per_pass": power_sum(range)}),
    Mistake("formula", "this is γα + 1: a draft counts only if all before it were accepted",
            {"tokens_per_pass": lambda alpha, gamma: gamma * alpha + 1}),
    Mistake("formula", "α = 1 divides by zero: there it is γ + 1",
            {"tokens_per_pass": lambda alpha, gamma: (1 - alpha ** (gamma + 1)) / (1 - alpha)}),
    Mistake("formula", "the target's own pass is free here: divide by γc + 1",
            {"speedup": lambda alpha, gamma, c: tokens_per_pass(alpha, gamma) / (c * gamma)
             if c else float("inf")}),
    Mistake("formula", "a round has γ drafts: divide by γc + 1",
            {"speedup": lambda alpha, gamma, c: tokens_per_pass(alpha, gamma) / (c + 1)}),
]  # fmt: skip
