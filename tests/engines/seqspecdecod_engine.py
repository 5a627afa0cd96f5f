"""sequential-speculative-decoding's methods, as black boxes for the certifier. It has no top-k and
no top-p; top-k 1 is requested as temperature 0, which is the same distribution."""

import functools
from types import SimpleNamespace

import torch
import transformers
from seqspecdecod import baseline_generate, speculative_generate

read = functools.cache(transformers.AutoModelForCausalLM.from_pretrained)


class Ids(SimpleNamespace):
    """A tokenizer whose text consists of the ids; its chat template adds nothing."""

    apply_chat_template = staticmethod(lambda messages, **_: messages[0]["content"])
    __call__ = staticmethod(lambda texts, **_: SimpleNamespace(input_ids=torch.tensor(texts)))
    convert_tokens_to_ids = staticmethod(lambda token: None)  # unk: there is no </think>
    decode = staticmethod(lambda ids, **_: " ".join(map(str, ids)))


def generate(method, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if top_p < 1 or top_k > 1:
        raise NotImplementedError("top-k, top-p")
    torch.manual_seed(seed)
    target, temperature = read(checkpoint), 0.0 if top_k else float(temperature)
    ids = Ids(eos_token_id=target.generation_config.eos_token_id, unk_token_id=None)
    request = target, ids, prompt, max_new_tokens
    if not method:
        result = baseline_generate(*request, target_temperature=temperature)
        return [int(token) for token in result["text"].split()]
    draft, temperatures = read(f"{checkpoint}/draft"), (temperature, temperature)  # draft, target
    result = speculative_generate(draft, *request, 2, *temperatures, method=method)
    tokens = [int(token) for token in result["text"].split()]
    return tokens, result["draft_tokens"], result["accepted_tokens"]


plain, standard, naive_hsd, capped_hsd = (
    functools.partial(generate, method) for method in ("", "standard", "naive_hsd", "capped_hsd")
)
