"""Suffix lookup with a tree, after SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975): all that
followed the longest repeated end of the text so far, merged into one tree; what followed more often
comes first.

    minispec generate "Once upon a time" --method lessons/methods/suffix_trees.py:suffix_trees
    minispec certify --method lessons/methods/suffix_trees.py:suffix_trees
"""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated

from minispec.cache import KVCache
from minispec.methods.adaptive import as_policy
from minispec.methods.declaration import K, Option, method
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling, probs
from minispec.tree import Step, Tree
from minispec.verify import Rule, accept

Branches = Annotated[int, Option("number of different continuations", least=1)]


@method("suffix-trees", cases=[{"k": 2}, {"k": 3, "branches": 2}, {"k": "auto"}])
def suffix_trees(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, k: K = 8, branches: Branches = 3, rule: Rule = accept,
) -> Iterator[Step]:  # fmt: skip
    """Draft up to `k` tokens of each of the `branches` most frequent continuations."""
    policy = as_policy(k)
    cache = cache or model.new_cache()
    tokens = list(prompt)
    model.prefill(tokens[cache.length : -1], cache)
    yield Step()
    while True:
        paths = continuations(tokens, policy.choose(), branches)
        tree = Tree.merged(tokens[-1], paths).first(cache.free_rows)
        hidden = model(tree.tokens, cache, tree.depth, tree.mask)[0]
        path, next_token, *asked = rule(probs(model.logits(hidden), sampling), tree, randomness)
        cache.commit(path)
        policy.observe(drafted=max(tree.depths), accepted=len(path) - 1)
        new = tree.tokens_at(path[1:]) + [next_token]
        tokens += new
        yield Step(new, tree, path, *asked)


def continuations(tokens: list[int], k: int, branches: int) -> list[list[int]]:
    """What followed the last n tokens earlier, for the largest n up to 6 that has occurred."""
    for n in range(min(6, len(tokens) - 1), 0, -1):
        ends = [i for i in range(n, len(tokens)) if tokens[i - n : i] == tokens[-n:]]
        if ends:
            found = Counter(tuple(tokens[end : end + k]) for end in ends)
            return [list(path) for path, _ in found.most_common(branches)]
    return []
