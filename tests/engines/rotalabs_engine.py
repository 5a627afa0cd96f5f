"""rotalabs-accel 1.1.1's decoding loops, as black boxes for the certifier. It needs transformers 4:
5.24's caches have another `crop`."""

import functools
from types import SimpleNamespace

import torch
from end_tokens import until_end
from rotalabs_accel import speculative as rotalabs
from transformers import AutoModelForCausalLM, logging

logging.set_verbosity_error()
read = functools.cache(AutoModelForCausalLM.from_pretrained)
CPU = torch.device("cpu")


@functools.cache
def with_heads(wrapper: type, checkpoint: str) -> torch.nn.Module:
    """The target with new, random heads; the package has no trained ones."""
    torch.manual_seed(0)
    return wrapper(read(checkpoint)).eval()


def generate(
    decode, checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed, fixed=False
):  # fmt: skip
    if max_new_tokens == 0:  # it does not accept 0
        return []
    if top_k > 1:
        raise NotImplementedError("top-k")
    end = read(checkpoint).generation_config.eos_token_id
    if isinstance(end, list) and not fixed:
        raise NotImplementedError("several end tokens")
    ids = SimpleNamespace(  # a tokenizer whose text consists of the ids
        encode=lambda ids, **_: torch.tensor([ids]), decode=lambda ids, **_: ids.tolist(),
        eos_token_id=end if isinstance(end, int) else -1)  # fmt: skip
    greedy = temperature == 0 or top_k == 1
    mode = rotalabs.DecodingMode.GREEDY if greedy else rotalabs.DecodingMode.SAMPLING
    options = {"temperature": 1.0 if greedy else temperature, "max_new_tokens": max_new_tokens}
    torch.manual_seed(seed)
    text, metrics = decode(checkpoint, ids, prompt, mode, top_p, options)
    tokens = text[len(prompt) :]
    if fixed:
        tokens = until_end(checkpoint, tokens[:max_new_tokens])
    return tokens, metrics.total_tokens, metrics.accepted_tokens - metrics.iterations


def with_draft(
    checkpoint, ids, prompt, mode, top_p, options, decode=rotalabs.speculative_decode
):  # fmt: skip
    config = rotalabs.SpeculativeConfig(2, mode=mode, top_p=top_p, top_k=0, **options)
    models = read(f"{checkpoint}/draft"), read(checkpoint)
    return decode(*models, ids, prompt, config, CPU)


def with_tree(checkpoint, ids, prompt, mode, top_p, options):
    if mode is rotalabs.DecodingMode.GREEDY or top_p < 1:
        raise NotImplementedError("greedy, top-p")
    models = read(f"{checkpoint}/draft"), read(checkpoint)
    config = rotalabs.TreeSpecConfig(max_depth=2, branch_factor=2, top_p=top_p, **options)
    return rotalabs.tree_speculative_decode(*models, ids, prompt, config, CPU)


def with_medusa(
    checkpoint, ids, prompt, mode, top_p, options, decode=rotalabs.medusa_decode
):  # fmt: skip
    if mode is rotalabs.DecodingMode.SAMPLING:
        raise NotImplementedError("sampling")
    model = with_heads(rotalabs.MedusaModel, checkpoint)
    config = rotalabs.MedusaConfig(num_candidates=2, **options)
    return decode(model, read(checkpoint), ids, prompt, config, CPU)


def with_eagle(
    checkpoint, ids, prompt, mode, top_p, options, decode=rotalabs.eagle_decode,
    kind=rotalabs.EAGLEModel,
):  # fmt: skip
    if top_p < 1:
        raise NotImplementedError("top-p")
    config = rotalabs.EAGLEConfig(2, mode=mode, **options)
    model = with_heads(kind, checkpoint)
    return decode(model, ids, prompt, config, CPU)


draft_model, tree, medusa, eagle = (
    functools.partial(generate, decode)
    for decode in (with_draft, with_tree, with_medusa, with_eagle)
)
