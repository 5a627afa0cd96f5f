"""litgpt 0.5.13's generate functions, as black boxes for the certifier."""

import functools
import json
from pathlib import Path

import torch
from end_tokens import end_tokens
from litgpt.config import Config
from litgpt.generate import base, speculative_decoding
from litgpt.model import GPT
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from mend import fixed
from safetensors.torch import load_file


@functools.cache
def load(checkpoint: str) -> GPT:
    values = json.loads(Path(checkpoint, "config.json").read_text())
    config = Config(
        "llama", block_size=values["max_position_embeddings"], n_layer=values["num_hidden_layers"],
        n_embd=values["hidden_size"], vocab_size=values["vocab_size"],
        padded_vocab_size=values["vocab_size"], n_head=values["num_attention_heads"],
        n_query_groups=values["num_key_value_heads"], head_size=values["head_dim"],
        intermediate_size=values["intermediate_size"], norm_eps=values["rms_norm_eps"],
        rope_base=values["rope_theta"], rotary_percentage=1.0, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP")  # fmt: skip
    model, weights = GPT(config), {}
    original = load_file(f"{checkpoint}/model.safetensors")
    original.setdefault("lm_head.weight", original["model.embed_tokens.weight"])
    copy_weights_hf_llama(config, {}, weights, original)
    model.load_state_dict(weights)
    model.set_kv_cache(batch_size=1)
    return model.eval()


def plain(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if max_new_tokens == 0:
        return []
    torch.manual_seed(seed)
    return torch.cat([*base.generate_fn(
        load(checkpoint), torch.tensor(prompt), len(prompt) + max_new_tokens,
        temperature=temperature, top_k=top_k or None, top_p=top_p, include_prompt=False,
        include_eos=True, stop_tokens=tuple([token] for token in end_tokens(checkpoint)),
    )]).tolist()  # fmt: skip


def speculative(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if max_new_tokens == 0:
        return []
    torch.manual_seed(seed)
    tokens, _ = speculative_decoding.generate(
        load(f"{checkpoint}/draft"), load(checkpoint), torch.tensor(prompt),
        len(prompt) + max_new_tokens, temperature=temperature, top_k=top_k or None, top_p=top_p,
        stop_tokens=tuple(end_tokens(checkpoint)), include_prompt=False, speculative_k=2,
    )  # fmt: skip
    return tokens.tolist()


speculative_fixed = fixed(
    speculative,
    ("litgpt.generate.speculative_decoding.sample",  # greedy: a one-hot distribution
     (" F.softmax(logits, dim=-1)\n", " F.one_hot(logits.argmax(), len(logits)).float()\n")),
    ("litgpt.generate.speculative_decoding.speculative_decoding",  # the residual is normalised
     ("new_token, _ = sample(adjusted_distribution[None, None, ...], apply_softmax=False, "
      "**sample_kwargs)", "new_token = multinomial_num_samples_1(adjusted_distribution)")),
    ("litgpt.generate.speculative_decoding.generate",  # first token, end token, number of tokens
     ("tokens = []", "tokens = [token[0]]"),
     ("max_returned_tokens - 1:", "max_returned_tokens - 1 and token not in stop_tokens:"),
     ("if new_token in", "tokens.append(new_token)\n            if new_token in"),
     ("break\n            tokens.append(new_token)", "break"),
     ("stack(tokens)", "stack(tokens[: max_returned_tokens - prompt_size])")),
)  # fmt: skip


@torch.inference_mode()
def step(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    """Call the function for one round in a loop, with all that `speculative` misses: it drops the
    first token, and either the end token or the right length."""
    torch.manual_seed(seed)
    target, draft, end = load(checkpoint), load(f"{checkpoint}/draft"), end_tokens(checkpoint)
    sampling = dict(temperature=temperature, top_k=top_k or None, top_p=top_p)
    tokens, drafted, accepted, at = [], 0, 0, torch.arange(len(prompt))
    if max_new_tokens:
        for model in draft, target:  # the last token is the target's
            token = base.next_token(model, at, torch.tensor([prompt]), len(prompt), **sampling)
        tokens = token.tolist()
    while len(tokens) < max_new_tokens and not set(end) & set(tokens):
        at = torch.tensor([len(prompt) + len(tokens) - 1])
        room = load(checkpoint).max_seq_length - int(at) - 1
        k = min(2, max_new_tokens - len(tokens), room)
        if k == 0:  # the context's last row
            new = base.next_token(target, at, token[None], int(at) + 1, **sampling)
        else:
            new = speculative_decoding.speculative_decoding(
                draft, target, token, at, int(at) + 1, k, **sampling)  # fmt: skip
            drafted, accepted = drafted + k, accepted + len(new) - 1
        tokens, token = tokens + new.tolist(), new[-1:]
    stop = next((i + 1 for i, token in enumerate(tokens) if token in end), max_new_tokens)
    return tokens[: min(stop, max_new_tokens)], drafted, accepted
