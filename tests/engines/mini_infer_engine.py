"""mini-infer 0.2.5's engine and its speculative step, as black boxes for the certifier."""

import contextlib
import functools

import torch
from batches import batching
from end_tokens import end_tokens, until_end
from mend import mend
from mini_infer.engine import InferenceEngine
from mini_infer.models.loader import load_model_from_safetensors
from mini_infer.models.sampler import SamplingParams
from mini_infer.speculative import speculative_step


@functools.cache
def load(checkpoint: str):
    """Load a llama as a Qwen2 whose attention biases are 0."""
    with contextlib.redirect_stdout(None):
        model, config = load_model_from_safetensors(checkpoint, "cpu", torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith("_proj.bias"):
            weight.data.zero_()
    return model, config


class MendedEngine(InferenceEngine):
    """It reads cached prefixes, and evicts some before the blocks run out."""

    run = mend(InferenceEngine.step, (
        "past_key_values=seq.past_key_values", "past_key_values=self.past(seq, len(chunk_tokens))"
    ))  # fmt: skip

    def step(self):
        pool = self.block_pool
        self.prefix_cache.evict_lru(pool, pool.num_blocks // 2 - pool.num_free)
        return self.run()

    def past(self, seq, new):
        """Return the keys and values before the new tokens."""
        cached, blocks = seq.block_table.num_tokens - new, seq.block_table.physical_block_ids
        if seq.past_key_values is not None or cached == 0:
            return seq.past_key_values
        layers = range(self.config.num_hidden_layers)
        return [self.block_pool.read_sequence_kv(layer, blocks, cached) for layer in layers]


@functools.cache
def engine(checkpoint: str, prefixes: bool, kind: type) -> InferenceEngine:
    return kind(
        *load(checkpoint), device=torch.device("cpu"), enable_prefix_caching=prefixes)  # fmt: skip


def many(prefixes, kind, checkpoint, requests):
    torch.manual_seed(requests[0]["seed"])
    runner, end = engine(checkpoint, prefixes, kind), end_tokens(checkpoint)
    valid = [r for r in requests if r["max_new_tokens"]]  # for 0, it generates one token
    sequences = iter([runner.add_request(r["prompt"], SamplingParams(
        r["max_new_tokens"], r["temperature"], r["top_p"], r["top_k"] or -1, stop_token_ids=end))
        for r in valid])  # fmt: skip
    while runner.scheduler.has_unfinished_sequences():
        runner.step()
    return [next(sequences).output_token_ids if r["max_new_tokens"] else [] for r in requests]


def speculative(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    """Call the step in a loop, which the package leaves to its user."""
    if top_k > 1 or top_p < 1:
        raise NotImplementedError("top-k, top-p")
    torch.manual_seed(seed)
    tokens, drafted, accepted = [], 0, 0
    temperature = 0.0 if top_k else temperature
    target, draft = load(checkpoint)[0], load(f"{checkpoint}/draft")[0]
    ends = set(end_tokens(checkpoint))
    while len(tokens) < max_new_tokens and ends.isdisjoint(tokens):
        prefix = torch.tensor([prompt + tokens])
        new, agreed = speculative_step(target, draft, prefix, 2, temperature)
        tokens, drafted, accepted = tokens + new, drafted + 2, accepted + agreed
    return until_end(checkpoint, tokens[:max_new_tokens]), drafted, accepted


plain, prefix_cached, prefix_cached_fixed = (
    batching(functools.partial(many, prefixes, kind)) for prefixes, kind in (
        (False, InferenceEngine), (True, InferenceEngine), (True, MendedEngine))
)  # fmt: skip
