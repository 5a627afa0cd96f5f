"""microgen-llm 1.2.2's SpeculativeEngine and its plain LLMEngine, as black boxes for the certifier.
The first has only temperature 1 and no end tokens, the second a temperature and one end token."""

import functools
from types import SimpleNamespace

import torch
from end_tokens import end_tokens, until_end
from microgen.backends import PyTorchBackend
from microgen.engine import LLMEngine, SpeculativeEngine
from transformers import AutoModelForCausalLM


class SamplingBackend(PyTorchBackend):
    """A fixed draft: it samples from the distribution that the engine reports."""

    def sample(self, logits, **_):
        return torch.multinomial(logits.softmax(-1), 1)


@functools.cache
def load(checkpoint: str, kind: type = PyTorchBackend) -> PyTorchBackend:
    backend = kind()
    backend.load_model(checkpoint, AutoModelForCausalLM.from_pretrained(checkpoint))
    return backend


def generate(kind, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if temperature != 1 or top_k or top_p < 1:
        raise NotImplementedError("temperature, top-k, top-p")
    torch.manual_seed(seed)
    engine = SpeculativeEngine(load(f"{checkpoint}/draft", kind), load(checkpoint), 2)
    result = engine.generate(torch.tensor([prompt]), max_new_tokens)
    tokens = result.output_ids[len(prompt) :]
    if kind is SamplingBackend:  # fixed too: nothing follows the first end token
        tokens = until_end(checkpoint, tokens)
    return tokens, result.total_drafted_tokens, result.total_accepted_tokens


def plain(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if top_k > 1 or top_p < 1:
        raise NotImplementedError("top-k, top-p")
    torch.manual_seed(seed)
    tokenizer = Ids(pad_token_id=0, eos_token_id=next(iter(end_tokens(checkpoint)), None))
    engine = LLMEngine(load(checkpoint), tokenizer, checkpoint)
    return engine.generate(prompt, max_new_tokens, temperature=0 if top_k else temperature)


class Ids(SimpleNamespace):
    """A tokenizer whose text consists of the ids."""

    __call__ = staticmethod(lambda ids, **_: SimpleNamespace(input_ids=torch.tensor([ids])))
    decode = staticmethod(lambda ids, **_: ids)


speculative = functools.partial(generate, PyTorchBackend)
speculative_fixed = functools.partial(generate, SamplingBackend)
