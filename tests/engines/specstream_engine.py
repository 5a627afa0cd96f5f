"""specstream 1.0.0's SpeculativeStreaming, as black boxes for the certifier. It has no top-k and no
top-p. It never uses what it drafts: the tree only enters its statistics."""

import functools
from types import SimpleNamespace

import torch
from end_tokens import AnyOf, end_tokens
from specstream.speculative_streaming import SpeculativeStreaming, SpeculativeStreamingConfig
from transformers import AutoModelForCausalLM

read = functools.cache(AutoModelForCausalLM.from_pretrained)


class WithoutCache(torch.nn.Module):
    """A model that reads the whole text, which it is given in every pass."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids, **_):
        return self.model(input_ids, use_cache=False)


class Fixed(SpeculativeStreaming):
    """Keep transformers' attention, and let no node of the tree through."""

    def __init__(self, model, config):
        config.prune_threshold = 2.0
        super().__init__(WithoutCache(model), config)

    def _replace_attention_layers(self):
        pass


@functools.cache
def load(kind: type, checkpoint: str) -> SpeculativeStreaming:
    return kind(read(checkpoint), SpeculativeStreamingConfig())


def generate(kind, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if top_k > 1 or top_p < 1:
        raise NotImplementedError("top-k, top-p")
    torch.manual_seed(seed)
    engine, sampled = load(kind, checkpoint), temperature > 0 and not top_k
    engine.config.temperature, ends = temperature if sampled else 1.0, end_tokens(checkpoint)
    tokenizer = SimpleNamespace(eos_token_id=AnyOf(ends) if kind is Fixed else [*ends, None][0])
    rows = torch.tensor([prompt])
    return engine.generate_speculative(rows, tokenizer, max_new_tokens, sampled)["generated_tokens"]


streaming = functools.partial(generate, SpeculativeStreaming)
streaming_fixed = functools.partial(generate, Fixed)
