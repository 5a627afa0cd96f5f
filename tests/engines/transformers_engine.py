"""transformers' assisted generation, a black box for the certifier (`reference` extra):

    PYTHONPATH=tests python -m minispec.certify --impl transformers_assisted:assisted

The assistant is the model itself with noise on its weights, so that drafts are often, but not
always, accepted. `plain` is transformers without an assistant, for comparison.
"""

import functools

import torch
import transformers

transformers.logging.set_verbosity_error()


@functools.cache
def pair(checkpoint: str):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assistant = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in assistant.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model, assistant


def assisted(checkpoint, prompt, **options):
    return generate(*pair(checkpoint), prompt, **options)


def plain(checkpoint, prompt, **options):
    return generate(pair(checkpoint)[0], None, prompt, **options)


def generate(model, assistant, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if max_new_tokens == 0:  # transformers refuses this
        return []
    torch.manual_seed(seed)
    sampled = dict(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        output = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), assistant_model=assistant,
            max_new_tokens=max_new_tokens, pad_token_id=0,
            **(sampled if temperature else dict(do_sample=False)),
        )  # fmt: skip
    return output[0, len(prompt) :].tolist()
