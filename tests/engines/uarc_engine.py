"""uarc 0.3.0's speculative engine, and its Hugging Face backend with and without a draft, as black
boxes for the certifier. The engine is greedy and has no end tokens; the backend has no top-k."""

import functools
from types import SimpleNamespace

import torch
from end_tokens import until_end
from uarc.backends.huggingface import HuggingFaceBackend


class Ids(SimpleNamespace):
    """A tokenizer whose text consists of the ids."""

    encode = staticmethod(lambda ids, **_: torch.tensor([ids]))
    decode = staticmethod(lambda ids, **_: "")
    __call__ = staticmethod(lambda ids, **_: {"input_ids": torch.tensor([ids])})


@functools.cache
def load(checkpoint: str, draft: bool) -> HuggingFaceBackend:
    backend = HuggingFaceBackend(checkpoint, f"{checkpoint}/draft" if draft else "", device=None)
    backend.load()
    backend._tokenizer = Ids(pad_token_id=None)
    return backend


def speculative(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    """Call the engine itself, which only decodes greedily."""
    if temperature > 0 and top_k != 1:
        raise NotImplementedError("sampling")
    output = load(checkpoint, True)._spec_engine.generate(torch.tensor(prompt), max_new_tokens)
    return output[0, len(prompt) :].tolist()


def speculative_fixed(checkpoint, prompt, **request):
    """Stop after the first end token."""
    return until_end(checkpoint, speculative(checkpoint, prompt, **request))


def generate(draft, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if top_k > 1:
        raise NotImplementedError("top-k")
    if max_new_tokens == 0 and not draft:  # transformers does not accept 0
        return []
    torch.manual_seed(seed)
    result = load(checkpoint, draft).generate(
        prompt, max_new_tokens, 0.0 if top_k else temperature, top_p)  # fmt: skip
    return result["token_ids"]


plain, backend = functools.partial(generate, False), functools.partial(generate, True)


def backend_fixed(checkpoint, prompt, **request):
    """Speculate only for greedy requests, and sample without transformers' default top-k of 50."""
    if request["temperature"] == 0 or request["top_k"] == 1:
        return speculative_fixed(checkpoint, prompt, **request)
    load(checkpoint, False)._model.generation_config.top_k = 0
    return plain(checkpoint, prompt, **request)
