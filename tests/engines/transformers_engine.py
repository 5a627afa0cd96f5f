"""transformers' generate, as black boxes for the certifier (run by `make reference`)."""

import functools

import torch
import transformers

transformers.logging.set_verbosity_error()
read = functools.cache(transformers.AutoModelForCausalLM.from_pretrained)


def generate(speculate, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if max_new_tokens == 0:  # it does not accept 0
        return []
    torch.manual_seed(seed)
    sampling = dict(do_sample=False)
    if temperature:
        sampling = dict(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        output = read(checkpoint, dtype=torch.float32).generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max_new_tokens,
            pad_token_id=0, **sampling, **speculate(checkpoint),
        )  # fmt: skip
    return output[0, len(prompt) :].tolist()


def with_draft(checkpoint):
    return {"assistant_model": read(f"{checkpoint}/draft", dtype=torch.float32)}


plain = functools.partial(generate, lambda checkpoint: {})
assisted = functools.partial(generate, with_draft)
prompt_lookup = functools.partial(generate, lambda checkpoint: {"prompt_lookup_num_tokens": 3})
