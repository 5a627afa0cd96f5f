"""csaq-quant 0.6.0's self-speculative decoding, as black boxes for the certifier. The target is the
model in 8 bits, so compare with `plain` (--baseline). It needs transformers 4: 5.24's caches have
another `crop`."""

import functools
import warnings

import torch
from csaq import CSAQConfig, CSAQInferenceEngine, quantize
from transformers import AutoModelForCausalLM, logging

warnings.simplefilter("ignore")
logging.set_verbosity_error()


@functools.cache
def load(checkpoint: str) -> CSAQInferenceEngine:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    vocab = model.config.vocab_size
    texts = [{"input_ids": torch.arange(8 * i, 8 * i + 8)[None] % vocab} for i in range(4)]
    config = CSAQConfig(target_bits=8, bit_options=[8])  # it cannot pack 16 bits
    model, info = quantize(model, texts, config, verbose=False)
    return CSAQInferenceEngine(model, info["causal_map"], verbose=False)


def generate(speculate, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if top_k > 1:
        raise NotImplementedError("top-k")
    if max_new_tokens == 0:  # transformers does not accept 0
        return []
    torch.manual_seed(seed)
    output, report = load(checkpoint).generate(
        torch.tensor([prompt]), speculative=speculate, lookahead=3,
        temperature=0.0 if top_k else temperature, top_p=top_p, max_new_tokens=max_new_tokens,
        **({} if speculate else {"top_k": 0}))  # fmt: skip
    if report.error_log:
        raise RuntimeError(report.error_log)
    tokens = output[0, len(prompt) :].tolist()
    return (tokens, report.draft_calls, report.tokens_accepted) if speculate else tokens


plain, speculative = functools.partial(generate, False), functools.partial(generate, True)
