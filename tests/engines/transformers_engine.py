"""transformers' generate, as black boxes for the certifier (run by `make reference`)."""

import functools
import os

import torch
import transformers

transformers.logging.set_verbosity_error()
PRECISION = getattr(torch, os.environ.get("PRECISION", "float32"))
DTYPE = "dtype" if transformers.__version__ >= "5" else "torch_dtype"
read = functools.cache(transformers.AutoModelForCausalLM.from_pretrained)


def generate(
    load, speculate, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed
):
    """`load` and `speculate` are functions of the checkpoint: they return the model and further
    options of its generate. `speculate` also gets whether tokens are sampled."""
    if max_new_tokens == 0:  # it does not accept 0
        return []
    model, options = load(checkpoint), speculate(checkpoint, temperature > 0)
    torch.manual_seed(seed)  # after loading, which may use random numbers
    sampling = dict(do_sample=False)
    if temperature:
        sampling = dict(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        output = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max_new_tokens,
            pad_token_id=0, **sampling, **options,
        )  # fmt: skip
    return output[0, len(prompt) :].tolist()


def target(checkpoint):
    return read(checkpoint, **{DTYPE: PRECISION})


def with_draft(checkpoint, sampled):
    return {"assistant_model": target(f"{checkpoint}/draft")}


plain = functools.partial(generate, target, lambda checkpoint, sampled: {})
assisted = functools.partial(generate, target, with_draft)
