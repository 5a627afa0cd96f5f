"""medusa-llm 0.1 (Medusa) with its initial heads, as a black box for the certifier. It accepts by a
threshold (typical acceptance), so only its greedy decoding is meant to be lossless."""

import functools
from types import SimpleNamespace

import torch
from end_tokens import end_tokens
from medusa.model.medusa_model import MedusaModel
from medusa.model.modeling_llama_kv import LlamaForCausalLM
from safetensors.torch import load_file
from transformers import LlamaConfig


@functools.cache
def load(checkpoint: str, room: int) -> MedusaModel:
    """Load a model, with keys and values for every head: it does not share them. The cache has
    `room` for more tokens than the context."""
    config = LlamaConfig.from_pretrained(checkpoint)
    weights = load_file(f"{checkpoint}/model.safetensors")
    groups = config.num_attention_heads // config.num_key_value_heads
    for name, weight in weights.items():
        if ".k_proj." in name or ".v_proj." in name:
            heads = weight.unflatten(0, (config.num_key_value_heads, -1))
            weights[name] = heads.repeat_interleave(groups, 0).flatten(0, 1)
    config.num_key_value_heads = config.num_attention_heads
    config.max_position_embeddings += room
    base = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights)
    model = MedusaModel(base, medusa_num_heads=2, base_model_name_or_path=checkpoint).eval()
    model.tokenizer = SimpleNamespace(eos_token_id=-1, decode=lambda ids, **_: ids.tolist())
    return model


@torch.inference_mode()
def generate(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed, room):
    if top_p < 1 or top_k > 1:
        raise NotImplementedError("top-k, top-p")
    torch.manual_seed(seed)
    model, tokens, end = load(checkpoint, room), [], end_tokens(checkpoint)
    rounds = model.medusa_generate(
        torch.tensor([prompt]), temperature=0.0 if top_k else temperature, max_steps=max_new_tokens,
        medusa_choices=[1, 2, 2])  # fmt: skip
    for result in rounds:
        tokens = result["text"]
        stop = next((i + 1 for i, token in enumerate(tokens) if token in end), max_new_tokens)
        if len(tokens) >= stop:  # it counts rounds, not tokens
            return tokens[:stop]
    return tokens


medusa, medusa_fixed = (functools.partial(generate, room=n) for n in (0, 8))
