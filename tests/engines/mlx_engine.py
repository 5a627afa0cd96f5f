"""mlx-lm 0.32.2's generators, with mlx's CPU backend, as black boxes for the certifier."""

import functools
import os

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load

mx.set_default_device(mx.cpu)
PRECISION = getattr(mx, os.environ.get("PRECISION", "float32"))


@functools.cache
def read(folder: str) -> tuple:
    model, tokenizer = load(folder)
    model.set_dtype(PRECISION)
    return model, tokenizer


def sampler(checkpoint, temperature, top_k, top_p):
    whole = top_k >= read(checkpoint)[0].args.vocab_size  # it rejects a top-k of the vocabulary
    return make_sampler(temperature, top_p, top_k=0 if whole else top_k)


def generate(speculate, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if max_new_tokens == 0:
        return []
    mx.random.seed(seed)
    model, tokenizer = read(checkpoint)
    tokens, chosen = [], sampler(checkpoint, temperature, top_k, top_p)
    request = dict(max_tokens=max_new_tokens, sampler=chosen)
    for token, *_ in speculate(checkpoint, mx.array(prompt), model, **request):
        tokens.append(int(token))
        if tokens[-1] in tokenizer.eos_token_ids:  # the package does this in stream_generate
            break
    return tokens


def with_draft(checkpoint, prompt, model, **request):
    return speculative_generate_step(prompt, model, read(f"{checkpoint}/draft")[0], **request)


def without(checkpoint, prompt, model, **request):
    return generate_step(prompt, model, **request)


def many(checkpoint, requests):
    """Generate without drafts: the batches cannot have them."""
    mx.random.seed(requests[0]["seed"])
    model, tokenizer = read(checkpoint)
    valid = [r for r in requests if r["max_new_tokens"]]
    batch = BatchGenerator(model, stop_tokens=[[token] for token in tokenizer.eos_token_ids])
    numbers = batch.insert(
        [r["prompt"] for r in valid], [r["max_new_tokens"] for r in valid],
        samplers=[sampler(checkpoint, r["temperature"], r["top_k"], r["top_p"]) for r in valid],
    )  # fmt: skip
    tokens = {number: [] for number in numbers}
    while responses := batch.next_generated():
        for response in responses:
            tokens[response.uid].append(response.token)
    batch.close()
    answers = iter(tokens.values())
    return [next(answers) if r["max_new_tokens"] else [] for r in requests]


plain, speculative = functools.partial(generate, without), functools.partial(generate, with_draft)
plain.many = many
