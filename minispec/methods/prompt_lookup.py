"""Prompt lookup decoding (Saxena 2023): copy drafts from the text so far, without a draft model."""

from collections.abc import Iterator

from minispec.cache import KVCache
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling, probs
from minispec.tree import FixedK, Policy, Step, Tree
from minispec.verify import accept


def prompt_lookup(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, k: int | Policy = 10, ngram: int = 3,
) -> Iterator[Step]:  # fmt: skip
    """Draft up to `k` of the tokens that followed the last n tokens where they last occurred, for
    the largest n up to `ngram`. `k` may be a policy that chooses it for each round (see adaptive).
    """
    policy = k if hasattr(k, "choose") else FixedK(k)
    cache = cache or model.new_cache()
    tokens = list(prompt)
    model.prefill(tokens[cache.length : -1], cache)
    yield Step()
    while True:
        n = min(policy.choose(), cache.free_rows - 1)  # one row is for the root
        tree = Tree.chain(tokens[-1], lookup(tokens, n, ngram))
        hidden = model(tree.tokens, cache)
        path, fresh = accept(probs(model.logits(hidden[0]), sampling), tree, randomness)
        cache.commit(path)
        policy.observe(drafted=len(tree) - 1, accepted=len(path) - 1)
        new = tree.tokens_at(path[1:]) + [fresh]
        tokens += new
        yield Step(new, tree, path)


def lookup(tokens: list[int], k: int, ngram: int) -> list[int]:
    """Up to `k` tokens that followed the latest earlier occurrence of the last n tokens, for the
    largest n from `ngram` down to 1 that has one. Fewer if the text ends before that."""
    end = match_end(tokens, ngram, 1)
    return tokens[end : end + k]


def match_end(tokens: list[int], longest: int, shortest: int) -> int:
    """The index after the latest earlier occurrence of the last n tokens, for the largest n from
    `longest` down to `shortest` that has one; the end of the text if none has."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                return start + n
    return len(tokens)
