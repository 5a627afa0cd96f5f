"""Token Recycling (Luo et al. 2024, arXiv 2408.08696): the candidates that earlier passes did not
choose are drafts for later ones. For each token, the model's best next tokens in the latest pass
over it are kept; a tree is grown from them.

    minispec generate "Once upon a time" --method lessons/methods/token_recycling.py:token_recycling
    minispec certify --method lessons/methods/token_recycling.py:token_recycling
"""

import heapq
from collections.abc import Iterator
from typing import Annotated

from minispec.cache import KVCache
from minispec.methods.declaration import Option, method
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling, probs
from minispec.tree import Step, Tree
from minispec.verify import Rule, accept

CANDIDATES = 8  # kept for each token, as in the paper
Size = Annotated[int, Option("number of nodes of the tree", least=1)]


@method(
    "token-recycling", waits={"": (2, 2)}, bench=[{}, {"nodes": 30}],
    cases=[{"nodes": 1}, {"nodes": 3}, {"nodes": 20}],
)  # fmt: skip
def token_recycling(
    model: Transformer, prompt: list[int], sampling: Sampling, randomness: Randomness, *,
    cache: KVCache | None = None, nodes: Size = 80, rule: Rule = accept,
) -> Iterator[Step]:  # fmt: skip
    """Grow a tree of at most `nodes` recycled candidates below the newest token."""
    cache = cache or model.new_cache()
    tokens, candidates = list(prompt), {}
    model.prefill(tokens[cache.length : -1], cache)
    yield Step()
    while True:
        tree = grow(tokens[-1], candidates, min(nodes, cache.free_rows - 1))
        logits = model.logits(model(tree.tokens, cache, tree.depth, tree.mask)[0])  # (nodes + 1, V)
        best = logits.topk(min(CANDIDATES, logits.shape[-1])).indices.tolist()
        path, next_token, *asked = rule(probs(logits, sampling), tree, randomness)
        cache.commit(path)
        candidates |= zip(tree.tokens, best)
        new = tree.tokens_at(path[1:]) + [next_token]
        tokens += new
        yield Step(new, tree, path, *asked)


def grow(root: int, candidates: dict[int, list[int]], nodes: int) -> Tree:
    """The tree of the `nodes` candidates whose ranks and depth add up to least: the best child of a
    node counts as much as its next sibling."""
    tokens, parents = [root], [-1]
    queue = [(1, 0, 0, 0)]  # sum, parent, rank; the third number makes the order unique
    while queue and len(tokens) <= nodes:
        total, parent, _, rank = heapq.heappop(queue)
        children = candidates.get(tokens[parent], [])
        if rank < len(children):
            tokens.append(children[rank])
            parents.append(parent)
            heapq.heappush(queue, (total + 1, len(tokens) - 1, len(tokens), 0))
            heapq.heappush(queue, (total + 1, parent, len(tokens), rank + 1))
    return Tree(tokens, parents)
