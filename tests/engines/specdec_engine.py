"""specdec's decoders, as black boxes for the certifier. They have no temperature, top-k or top-p,
and only the plain one can decode greedily."""

import contextlib
import functools
from types import SimpleNamespace

import torch
from end_tokens import until_end
from specdec.decoder import SpecDecoder


@functools.cache
def load(checkpoint):
    """Load a decoder, with a tokenizer whose text consists of the ids."""
    with contextlib.redirect_stdout(None):
        decoder = SpecDecoder(f"{checkpoint}/draft", checkpoint, device="cpu")
    decoder.tokenizer = SimpleNamespace(
        encode=lambda ids, **_: torch.tensor([ids]), decode=lambda ids, **_: ids.tolist(),
        eos_token_id=decoder.tokenizer.eos_token_id)  # fmt: skip
    return decoder


def generate(decode, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if top_p < 1 or top_k > 1 or temperature not in (0, 1):
        raise NotImplementedError("temperature, top-k, top-p")
    if max_new_tokens == 0:  # transformers does not accept 0
        return []
    torch.manual_seed(seed)
    sampled = temperature > 0 and top_k != 1
    return decode(load(checkpoint), prompt, max_new_tokens, sampled)[len(prompt) :]


def spec_gen(decoder, prompt, n, sampled):
    if not sampled:
        raise NotImplementedError("greedy")
    return decoder.spec_gen(prompt, n, num_sample_tok=2)


def speculative_fixed(checkpoint, prompt, *, max_new_tokens, **options):
    """Drop the tokens after the first end token or beyond the limit."""
    tokens = speculative(checkpoint, prompt, max_new_tokens=max_new_tokens, **options)
    return until_end(checkpoint, tokens[:max_new_tokens])


plain = functools.partial(generate, SpecDecoder.autoregressive_gen)
speculative = functools.partial(generate, spec_gen)
