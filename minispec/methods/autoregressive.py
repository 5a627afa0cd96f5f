"""Plain decoding: one token per pass. Every other method must match its output."""

from collections.abc import Iterator

from minispec.cache import KVCache
from minispec.methods.declaration import method
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling, probs
from minispec.tree import Step, Tree
from minispec.verify import Rule, accept


@method("autoregressive")
def autoregressive(
    model: Transformer,
    prompt: list[int],
    sampling: Sampling,
    randomness: Randomness,
    *,
    cache: KVCache | None = None,
    rule: Rule = accept,
) -> Iterator[Step]:
    """Draw each token from the target's distribution, given all tokens before it.

    `cache` may already hold a prefix of the prompt.
    """
    cache = cache or model.new_cache()
    tokens = list(prompt)
    model.prefill(tokens[cache.length : -1], cache)
    yield Step()
    while True:
        tree = Tree.chain(tokens[-1], [])
        hidden = model(tree.tokens, cache)
        path, next_token, *asked = rule(probs(model.logits(hidden[0]), sampling), tree, randomness)
        cache.commit(path)
        tokens.append(next_token)
        yield Step([next_token], tree, path, *asked)
