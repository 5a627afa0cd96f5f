"""llm-samplers 0.1.3's samplers, as black boxes for the certifier. They do not speculate. Each has
one option, a temperature, top-k or top-p, and they stop with an error if config.json has no end
token or several; here, one without an end token gets -1."""

import functools

import torch
from end_tokens import end_tokens
from llm_samplers import TemperatureSampler, TopKSampler, TopPSampler
from transformers import AutoModelForCausalLM


class FixedTopPSampler(TopPSampler):
    """Keep the token that crosses p."""

    def _apply_sampling(self, logits):
        p, order = logits.softmax(-1).sort(descending=True)
        outside = torch.zeros_like(p, dtype=torch.bool)
        outside.scatter_(1, order, p.cumsum(-1) - p >= self.p)
        return logits.masked_fill(outside, -torch.inf)


@functools.cache
def read(checkpoint: str, fixed: bool):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    if fixed:  # a tensor of the tokens, of both files
        model.config.eos_token_id = torch.tensor(end_tokens(checkpoint))
    elif model.config.eos_token_id is None:
        model.config.eos_token_id = -1
    return model


def sampler(temperature, top_k, top_p, fixed):
    if temperature == 0 or top_k == 1:
        return TopKSampler(1)
    if (temperature != 1) + (top_k > 0) + (top_p < 1) > 1:
        raise NotImplementedError("two options at once")
    if top_p < 1:
        return (FixedTopPSampler if fixed else TopPSampler)(top_p)
    return TopKSampler(top_k) if top_k else TemperatureSampler(temperature)


def generate(
    fixed, others, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed
):  # fmt: skip
    torch.manual_seed(seed)
    rows = torch.tensor([prompt] + [prompt[::-1]] * others)
    chosen = sampler(temperature, top_k, top_p, fixed)
    return chosen.sample(read(checkpoint, fixed), rows, max_new_tokens)[0, len(prompt) :].tolist()


single, batch = functools.partial(generate, False, 0), functools.partial(generate, False, 1)
single_fixed = functools.partial(generate, True, 0)
