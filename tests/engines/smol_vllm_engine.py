"""smol-vllm 0.1.2's engine, as black boxes for the certifier. It has no top-k and no top-p, ignores
the temperature, and calls a method that transformers 4.57 does not have: `patched` has it again."""

import contextlib
import functools
from types import SimpleNamespace

import torch
from batches import batching
from end_tokens import end_tokens
from smol_vllm import CausalLM, LLMEngine, Scheduler
from transformers.cache_utils import DynamicCache


class FixedCausalLM(CausalLM):
    """Prefill every prompt alone, without padding, and sample with the temperature."""

    def prefill(self, groups):
        for group in groups:
            self.kv_caches[group.group_id] = DynamicCache()
        return [self.next_token(group, group.sequences[0].prompt_tokens) for group in groups]

    def decode(self, groups, block_tables):
        return [self.next_token(group, group.sequences[0].output_tokens[-1:]) for group in groups]

    @torch.no_grad()
    def next_token(self, group, tokens):
        cache, temperature = self.kv_caches[group.group_id], group.sampling_params["temperature"]
        logits = self.model(torch.tensor([tokens]), past_key_values=cache).logits[0, -1]
        if temperature == 0:
            return logits.argmax().item()
        return torch.multinomial((logits / temperature).softmax(-1), 1).item()


class FixedScheduler(Scheduler):
    def schedule(self):
        """Put new requests first, as the engine orders the tokens."""
        outputs = super().schedule()
        outputs.scheduled_groups.sort(key=lambda group: bool(group.sequences[0].output_tokens))
        return outputs


def batch_split(cache, full_batch_size, split_size):
    """Return a cache for every row, as older versions of transformers did."""
    rows = range(full_batch_size)
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    return [DynamicCache([(k[i : i + 1], v[i : i + 1]) for k, v in layers]) for i in rows]


@functools.cache
def load(checkpoint: str, kind: type) -> CausalLM:
    """Load a model that pads with the end token, or with 1 if the checkpoint has none."""
    model, ends = kind(checkpoint, "cpu"), end_tokens(checkpoint)
    model.tokenizer = SimpleNamespace(pad_token_id=None, eos_token_id=[*ends, 1][0])
    return model


def many(mode, checkpoint, requests):
    if any(request["top_k"] > 1 or request["top_p"] < 1 for request in requests):
        raise NotImplementedError("top-k, top-p")
    if mode != "released":
        DynamicCache.batch_split = batch_split
    torch.manual_seed(requests[0]["seed"])
    with contextlib.redirect_stdout(None):
        engine, fixed = LLMEngine(enable_metrics=False), mode == "fixed"
        engine.model = load(checkpoint, FixedCausalLM if fixed else CausalLM)
        if fixed:
            engine.scheduler = FixedScheduler(engine.block_manager, 8)
        wanted = [request for request in requests if request["max_new_tokens"]]  # not 0
        for request in wanted:
            temperature = 0.0 if request["top_k"] else request["temperature"]
            engine.add_request(request["prompt"], request["max_new_tokens"], temperature,
                               end_tokens(checkpoint))  # fmt: skip
        left = len(wanted)
        while left:
            left -= sum(output.finished for output in engine.step())
    answers = iter(engine.groups.values())
    return [next(answers).sequences[0].output_tokens if request["max_new_tokens"] else []
            for request in requests]  # fmt: skip


released, patched, fixed = (
    batching(functools.partial(many, mode)) for mode in ("released", "patched", "fixed")
)
