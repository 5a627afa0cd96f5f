"""lade 0.0.2 (lookahead decoding) with transformers 4.34, as a black box for the certifier. It only
changes greedy decoding."""

import functools
import os

import lade
import torch
from mend import fixed
from transformers import AutoModelForCausalLM

os.environ["USE_LADE"] = "1"
lade.augment_all()
lade.config_lade(LEVEL=4, WINDOW_SIZE=6, GUESS_SET_SIZE=6)


@functools.cache
def load(checkpoint: str):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, torch_dtype=torch.float32)
    model.tokenizer = None
    return model.eval()


@torch.inference_mode()
def lookahead(checkpoint, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
    if temperature and top_k != 1:
        raise NotImplementedError("sampling")
    if max_new_tokens == 0:
        return []
    tokens = torch.tensor([prompt])
    output = load(checkpoint).generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max_new_tokens,
        do_sample=False, pad_token_id=0)  # fmt: skip
    return output[0, len(prompt) :].tolist()


lookahead_fixed = fixed(  # accepted tokens end with any end token, not just the first of several
    lookahead,
    ("lade.decoding.jacobi_greedy_search_multilevel",
     ("hits[hh] == eos_token_id[0]", "hits[hh] in eos_token_id"),
     ("next_tokens = eos_token_id_tensor", "next_tokens = torch.tensor([hits[hh]])")),
)  # fmt: skip
