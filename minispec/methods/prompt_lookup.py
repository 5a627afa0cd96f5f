"""Prompt lookup decoding (Saxena 2023): copy drafts from the text so far, without a draft model."""

from collections.abc import Iterator
from typing import Annotated

from minispec.cache import KVCache
from minispec.methods.adaptive import as_policy
from minispec.methods.declaration import K, Option, method
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling, probs
from minispec.tree import Step, Tree
from minispec.verify import Rule, accept

Ngram = Annotated[int, Option("length of the longest match", least=1)]


@method("prompt-lookup", cases=[{"k": 2}, {"k": "auto"}], bench=[{}, {"k": "auto"}])
def prompt_lookup(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, k: K = 10, ngram: Ngram = 3, rule: Rule = accept,
) -> Iterator[Step]:  # fmt: skip
    """Draft up to `k` of the tokens that followed the last n tokens where they last occurred, for
    the largest n up to `ngram`. `k` may be a policy that chooses it for each round (see adaptive).
    """
    policy = as_policy(k)
    cache = cache or model.new_cache()
    tokens, index = list(prompt), NgramIndex(ngram, 1)
    model.prefill(tokens[cache.length : -1], cache)
    yield Step()
    while True:
        n = min(policy.choose(), cache.free_rows - 1)  # one row is for the root
        tree = Tree.chain(tokens[-1], index.continuation(tokens, n))
        hidden = model(tree.tokens, cache)
        path, next_token, *asked = rule(probs(model.logits(hidden[0]), sampling), tree, randomness)
        cache.commit(path)
        policy.observe(drafted=len(tree) - 1, accepted=len(path) - 1)
        new = tree.tokens_at(path[1:]) + [next_token]
        tokens += new
        yield Step(new, tree, path, *asked)


class NgramIndex:
    """The n-grams of a text that only grows, for n from `shortest` to `longest`. Each n reads every
    token once, so a round costs the same however long the text is."""

    def __init__(self, longest: int, shortest: int):
        self.sizes = range(shortest, longest + 1)
        self.ends: dict[tuple[int, ...], int] = {}  # n-gram -> index after its latest occurrence
        self.next_end: dict[int, int] = {}  # by n

    def match_end(self, tokens: list[int]) -> int:
        """The index after the latest earlier occurrence of the last n tokens, for the largest n
        that has one; the end of the text if none has."""
        found = len(tokens)
        for n in self.sizes:
            for end in range(self.next_end.get(n, n), len(tokens)):  # not the text's own end
                self.ends[tuple(tokens[end - n : end])] = end
            self.next_end[n] = max(n, len(tokens))
            end = self.ends.get(tuple(tokens[-n:]))
            if end is None:  # then no longer n-gram has occurred, either
                break
            found = end
        return found

    def continuation(self, tokens: list[int], k: int) -> list[int]:
        """Up to `k` tokens that followed there."""
        end = self.match_end(tokens)
        return tokens[end : end + k]


def lookup(tokens: list[int], k: int, ngram: int) -> list[int]:
    """Up to `k` tokens that followed the latest earlier occurrence of the last n tokens, for the
    largest n from `ngram` down to 1 that has one. Fewer if the text ends before that."""
    return NgramIndex(ngram, 1).continuation(tokens, k)
