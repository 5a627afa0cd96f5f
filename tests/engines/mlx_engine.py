"""mlx-lm 0.32.2's generators, with mlx's CPU backend, as black boxes for the certifier."""

import functools
import os

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load

mx.set_default_device(mx.cpu)
PRECISION = getattr(mx, os.environ.get("PRECISION", "float32"))


@functools.cache
def read(folder: str) -> tuple:
    model, tokenizer = load(folder)
    model.set_dtype(PRECISION)
    return model, tokenizer


def generate(speculate, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if max_new_tokens == 0:
        return []
    mx.random.seed(seed)
    model, tokenizer = read(checkpoint)
    if top_k >= model.args.vocab_size:  # it rejects a top-k of the whole vocabulary
        top_k = 0
    request = dict(max_tokens=max_new_tokens, sampler=make_sampler(temperature, top_p, top_k=top_k))
    tokens = []
    for token, *_ in speculate(checkpoint, mx.array(prompt), model, **request):
        tokens.append(int(token))
        if tokens[-1] in tokenizer.eos_token_ids:  # the package does this in stream_generate
            break
    return tokens


def with_draft(checkpoint, prompt, model, **request):
    return speculative_generate_step(prompt, model, read(f"{checkpoint}/draft")[0], **request)


def without(checkpoint, prompt, model, **request):
    return generate_step(prompt, model, **request)


plain, speculative = functools.partial(generate, without), functools.partial(generate, with_draft)
