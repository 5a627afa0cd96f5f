"""A solution. The package has no such engine: its methods share verbs, not a framework, and each
shows its own loop. So this one is written here, with the package's verbs."""

from collections.abc import Iterator
from functools import cache as keep

import torch

from lessons.assignments.a8_engine.proposers import Lookup, Proposer
from minispec import load
from minispec.cache import KVCache
from minispec.model import Transformer
from minispec.sampling import Randomness, Sampling, Seeded, probs
from minispec.tree import Step
from minispec.verify import accept


def engine(
    model: Transformer, proposer: Proposer, prompt: list[int], sampling: Sampling,
    randomness: Randomness, *, cache: KVCache | None = None,
) -> Iterator[Step]:  # fmt: skip
    """Every method is the same round: propose, score, accept, commit, learn, yield."""
    cache = cache or model.new_cache()
    tokens = list(prompt)
    none = torch.empty(1, 0, model.config.hidden_size, dtype=model.dtype, device=model.device)
    hidden = [none, *model.prefill_chunks(tokens[cache.length : -1], cache)]
    proposer.begin(tokens, torch.cat(hidden, 1)[0], cache.capacity)
    yield Step()
    while True:
        tree = proposer.propose(tokens, cache.free_rows, sampling, randomness)
        riding, depth, mask = proposer.beside(tree, cache.free_rows)
        hidden = model(tree.tokens + riding, cache, depth, mask)[0]
        target = probs(model.logits(hidden[: len(tree)]), sampling)
        path, fresh, *_ = accept(target, tree, randomness)
        cache.commit(path)
        new = tree.tokens_at(path[1:]) + [fresh]
        tokens += new
        proposer.learn(tokens, tree, path, hidden)
        yield Step(new, tree, path)


loaded = keep(lambda checkpoint: load(checkpoint, "float64", "cpu")[0])


def black_box(
    checkpoint: str, prompt: list[int], *, max_new_tokens: int, temperature: float, top_k: int,
    top_p: float, seed: int,
) -> list[int]:  # fmt: skip
    """The engine with prompt lookup, cut inside a round where plain decoding would have stopped."""
    model, tokens = loaded(checkpoint), []
    sampling = Sampling(temperature, top_k, top_p)
    for step in engine(model, Lookup(model), prompt, sampling, Seeded(seed)):
        for token in step.tokens:
            if len(tokens) < max_new_tokens:
                tokens.append(token)
            if len(tokens) == max_new_tokens or token in model.config.eos_ids:
                return tokens
        if max_new_tokens == 0:
            return tokens
