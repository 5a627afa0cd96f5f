"""speculative-decoding's loops with transformers' models, as black boxes for the certifier."""

from functools import cache, partial
from types import SimpleNamespace

import speculative_decoding as chains
import torch
from end_tokens import until_end
from mend import mend
from speculative_decoding import speculative_decoding_with_prophet as prophets
from transformers import AutoModelForCausalLM, DynamicCache

read = cache(AutoModelForCausalLM.from_pretrained)


def net(folder, tokens, start_tokens=(), cache=None, return_early_exit_only=False, **_):
    """The function that the loops call, with all tokens and one tensor of keys and values."""
    model = read(folder, **({"num_hidden_layers": 1} if return_early_exit_only else {}))
    seen = DynamicCache([layer.unbind(1) for layer in cache[0].unbind(1)] if cache else None)
    x = torch.cat([*start_tokens[:1], model.model.embed_tokens(tokens)[0]])[None]
    hidden = model.model(inputs_embeds=x[:, seen.get_seq_length() :], cache=seen, use_cache=True)[0]
    rows = [torch.stack([layer.keys, layer.values], 1) for layer in seen.layers]
    return model.lm_head(hidden), (torch.stack(rows, 1), hidden)


def generate(
    loop, nets, folder, prompt, *, max_new_tokens, temperature, top_k, top_p, seed, fixed=False
):  # fmt: skip
    if top_p < 1:
        raise NotImplementedError("top-p")
    torch.manual_seed(seed)
    kept = (top_k - 0.5) / read(folder).config.vocab_size if top_k else 1  # a fraction, rounded up
    models = SimpleNamespace(model=partial(net, folder), prophet=partial(net, f"{folder}/draft"),
        to_prophet_start_token=torch.nn.Identity(), num_leading_start_tokens=1)  # fmt: skip
    output = loop(*nets(models), torch.tensor([prompt]), len(prompt) + max_new_tokens,
        temperature=temperature, filter_thres=1 - kept)  # fmt: skip
    tokens = output[0].flatten().tolist()  # the first row, or the first item of a tuple
    return until_end(folder, tokens) if fixed else tokens


LOOPS = [
    (chains.speculative_decoding, lambda m: [m.model, m.prophet]),
    (chains.speculative_decoding_with_same_model, lambda m: [m.model]),
    (prophets.speculative_decoding_with_prophet_model, lambda m: [m]),
]
NO_ROUNDS = "total_accepted / num_steps", "total_accepted / max(num_steps, 1)"
NO_TOKENS = "return prompt, None", "return prompt[..., :0], None"
plain = partial(generate, chains.base_decoding, lambda m: [m.model])
plain_fixed = partial(plain, fixed=True)
draft, same_model, prophet = (
    partial(generate, partial(loop, gamma=2), nets) for loop, nets in LOOPS
)
draft_fixed, same_model_fixed, prophet_fixed = (
    partial(generate, partial(mend(loop, *changes), gamma=2), nets, fixed=True)
    for (loop, nets), changes in zip(LOOPS, [[NO_ROUNDS], [NO_ROUNDS], [NO_ROUNDS, NO_TOKENS]])
)
