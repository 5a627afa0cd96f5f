"""Methods of somebody's own, for the tests: without a declaration and with one."""

from collections.abc import Iterator

from minispec.methods.adaptive import as_policy
from minispec.methods.declaration import Draft, K, method
from minispec.sampling import Randomness, Sampling, probs
from minispec.tree import Step, Tree
from minispec.verify import Rule, accept


def copying(model, prompt, sampling, randomness, *, cache=None, n=4, ever=True):
    """Copy the `n` tokens that followed the newest one where it last occurred."""
    cache = cache or model.new_cache()
    tokens = list(prompt)
    model.prefill(tokens[cache.length : -1], cache)
    yield Step()
    while True:
        found = [i for i in range(len(tokens) - 1) if ever and tokens[i] == tokens[-1]]
        copied = tokens[found[-1] + 1 :] if found else []
        tree = Tree.chain(tokens[-1], copied[: min(n, cache.free_rows - 1)])
        p = probs(model.logits(model(tree.tokens, cache)[0]), sampling)
        path, next_token, *_ = accept(p, tree, randomness)
        cache.commit(path)
        new = tree.tokens_at(path[1:]) + [next_token]
        tokens += new
        yield Step(new, tree, path)


@method("twigs", cases=[{"k": 1}, {"k": 3}, {"k": "auto"}])
def twigs(
    model, prompt: list[int], sampling: Sampling, randomness: Randomness, *, cache=None,
    draft: Draft, k: K = 2, rule: Rule = accept,
) -> Iterator[Step]:  # fmt: skip
    """The `k` best next tokens of a draft model, which has no cache: a tree of depth one."""
    policy = as_policy(k)
    cache = cache or model.new_cache()
    tokens = list(prompt)
    model.prefill(tokens[cache.length : -1], cache)
    yield Step()
    while True:
        n = min(policy.choose(), cache.free_rows - 1, draft.config.vocab_size)
        best = draft.logits(draft(tokens)[0, -1]).topk(n).indices.tolist()
        tree = Tree.merged(tokens[-1], [[token] for token in best])
        hidden = model(tree.tokens, cache, tree.depth, tree.mask)[0]
        path, next_token, *asked = rule(probs(model.logits(hidden), sampling), tree, randomness)
        cache.commit(path)
        policy.observe(drafted=n, accepted=len(path) - 1)
        new = tree.tokens_at(path[1:]) + [next_token]
        tokens += new
        yield Step(new, tree, path, *asked)
